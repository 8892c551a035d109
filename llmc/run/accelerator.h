// Chooses the device that a process computes on, after the run's processes have met and before they make a
// communicator: NCCL must know whether several processes share a GPU. On the CPU there is nothing to choose.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/device.h"
#include "llmc/run/machine.h"
#include "llmc/run/process.h"
#ifdef USE_CUDA
#include "llmc/cuda/gpu.cuh"
#endif

namespace cpu {

struct Device {
    std::string name = "CPU";
    std::string identity;
};

inline Device use_device(int, const std::string&) { return {}; }
inline void use_in_this_thread(const Device&) {}
inline void share_device(const std::string&, bool) {}
inline std::pair<double, double> memory_size() { return {INFINITY, INFINITY}; }  // the host's is all there is

}  // namespace cpu

// The number of the GPU that a process takes on its machine: its local rank; or, if two launchers have both
// counted from 0 on this machine (--worker 0, --worker 1), its number among the run's processes there.
// machines, local_ranks: of all processes
inline int local_number(const Process& process, const std::vector<std::string>& machines,
                        const std::vector<std::string>& local_ranks) {
    std::set<std::string> taken;
    bool is_taken_twice = false;
    int before = 0;
    for (int i = 0; i < process.size(); i++) {
        if (machines[size_t(i)] != machines[size_t(process.index())]) { continue; }
        is_taken_twice |= !taken.insert(local_ranks[size_t(i)]).second;
        before += i < process.index();
    }
    return is_taken_twice ? before : process.local_rank;
}

// UserError unless each worker has the same number of ranks on each of its GPUs: else a GPU may have failed.
// devices: of all processes
inline void check_shares(const Process& process, const std::vector<std::string>& devices) {
    for (int first = 0; first < process.size(); first += process.ranks) {
        std::map<std::string, int> ranks;  // of the worker, on each of its GPUs
        for (int r = 0; r < process.ranks; r++) { ranks[devices[size_t(first + r)]]++; }
        for (const auto& [device, count] : ranks) {
            if (count == ranks[devices[size_t(first)]]) { continue; }
            throw UserError(process.member(first) + " and its worker's other ranks share GPUs unevenly: look "
                            "in nvidia-smi for a failed GPU, or start as many ranks as there are GPUs");
        }
    }
}

// --interface is meant for the traffic between workers, but NCCL uses one interface for all its traffic. So it
// is refused if a worker's ranks need a network among themselves.   machines: of all processes
inline void check_interface(const Process& process, const std::vector<std::string>& machines) {
    for (int i = 0; i < process.size(); i++) {
        if (machines[size_t(i)] != machines[size_t(i / process.ranks * process.ranks)]) {
            throw UserError(format("--interface would move the traffic inside worker %d, too, whose ranks "
                                   "are on several machines: give --outer-transport tcp, or leave out "
                                   "--interface", i / process.ranks));
        }
    }
}

// outer_nccl: NCCL also carries the exchange between workers.
// Sets environment variables, so call it before NCCL starts its threads and CUDA reads them in this thread.
inline device::Device choose_device(Process& process, bool outer_nccl) {
    if (!runs_on_gpu) { return device::use_device(0, ""); }
    const std::vector<std::string> machines = process.gather("machine", machine_name());
    const std::string interface = outer_nccl ? process.interface : "";
    if (!interface.empty()) { check_interface(process, machines); }
    const int number =
        local_number(process, machines, process.gather("local rank", std::to_string(process.local_rank)));
    device::Device device;
    process.change_environment([&] { device = device::use_device(number, interface); });
    const auto devices = process.gather("device", machine_name() + "/" + device.identity);
    if (std::set<std::string>(devices.begin(), devices.end()).size() == devices.size()) { return device; }
    check_shares(process, devices);

    const bool one_machine = std::count(machines.begin(), machines.end(), machines[0]) == process.size();
    process.change_environment(
        [&] { device::share_device(process.run_id + " " + process.name(), one_machine); });
    if (process.index() == 0) {
        printf("processes share a GPU, and every collective costs milliseconds: fine for tests; otherwise "
               "start fewer, or give each worker GPUs of its own (CUDA_VISIBLE_DEVICES)\n");
    }
    return device;
}
