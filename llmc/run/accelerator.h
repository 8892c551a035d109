// The device that a process computes on, chosen when all of a run's processes have met and before they make
// a communicator: NCCL has to know where several share a GPU. On the CPU there is nothing to choose.
#pragma once
#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
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
    std::string identity;  // empty: nothing is shared that would have to be known
};

inline Device use_device(int, const std::string&) { return {}; }
inline void use_in_this_thread(const Device&) {}
inline void share_device(const std::string&, bool) {}

}  // namespace cpu

// Which of its machine's GPUs a process takes. Whoever started it has counted; but two that each started a
// worker here (--worker 0, --worker 1) have both counted from 0, and then the run's own numbers count.
// machines, local_ranks: of all that it meets
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

// "worker 0 rank 0 and worker 1 rank 0": those that use one device; empty if none do.
inline std::string sharers_of_a_device(const Process& process, const std::vector<std::string>& devices) {
    for (const std::string& device : devices) {
        std::vector<std::string> names;
        for (int i = 0; i < process.size(); i++) {
            if (devices[size_t(i)] == device) { names.push_back(process.member(i)); }
        }
        if (names.size() > 1) { return list_in_words(names); }
    }
    return "";
}

// --interface is for the traffic between workers, and NCCL can be given one for all that it carries: that is
// the same where no worker's ranks need a network for theirs.   machines: of all processes
inline void check_interface(const Process& process, const std::vector<std::string>& machines) {
    for (int i = 0; i < process.size(); i++) {
        if (machines[size_t(i)] != machines[size_t(i / process.ranks * process.ranks)]) {
            throw UserError(
                format("--interface would move the traffic inside worker %d, too, whose ranks are on several "
                       "machines: give --outer-transport gloo, or leave it out",
                       i / process.ranks));
        }
    }
}

// outer_nccl: NCCL carries the exchange between workers, too.
// Sets environment variables: before NCCL starts its threads, and CUDA reads them in the thread that calls.
inline device::Device choose_device(Process& process, bool outer_nccl) {
    if (!runs_on_gpu) { return device::use_device(0, ""); }
    const std::vector<std::string> machines = process.gather("machine", machine_name());
    const std::string interface = outer_nccl ? process.interface : "";
    if (!interface.empty()) { check_interface(process, machines); }
    const int number =
        local_number(process, machines, process.gather("local rank", std::to_string(process.local_rank)));
    device::Device device;
    process.change_environment([&] { device = device::use_device(number, interface); });
    const std::string sharers = sharers_of_a_device(process, process.gather("device", device.identity));
    if (sharers.empty()) { return device; }

    const bool one_machine =
        std::count(machines.begin(), machines.end(), machines[0]) == process.size();
    process.change_environment(
        [&] { device::share_device(process.run_id + " " + process.name(), one_machine); });
    if (process.index() == 0) {
        printf("%s share a GPU, and every collective costs milliseconds: fine for tests; otherwise start "
               "fewer processes here, or give each worker GPUs of its own (CUDA_VISIBLE_DEVICES)\n",
               sharers.c_str());
    }
    return device;
}
