// Chooses the GPU of this process, and sets up CUDA and NCCL before their first call.
#pragma once
#include <net/if.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "llmc/cuda/device.cuh"
#include "llmc/error.h"

namespace cuda {

// The GPU in use.
struct Device {
    std::string name;      // "NVIDIA H200"
    std::string identity;  // its place on the machine's bus: the same for processes that share a GPU
    int index = 0;         // among this machine's GPUs
};

// Each thread that calls CUDA must select the GPU for itself, or it uses the first one.
inline void use_in_this_thread(const Device& device) { cudaCheck(cudaSetDevice(device.index)); }

// Sends NCCL's traffic through a network interface. UserError if there is none of that name, since NCCL's own
// message would not name it.
inline void use_interface(const std::string& name) {
    if (if_nametoindex(name.c_str()) == 0) {
        throw UserError("no network interface " + name + ": give --interface one that `ip address` lists");
    }
    setenv("NCCL_SOCKET_IFNAME", ("=" + name).c_str(), 1);
    setenv("NCCL_NET", "Socket", 0);  // or InfiniBand, if there is any, would carry the traffic instead
}

// UserError if this program has no code for a GPU. Code runs on GPUs of the same major compute capability
// from its minor one on; of the last, PTX is there for all later GPUs, unless its GPU_ARCH ends in a or f.
// built_for: compute capabilities times 100, in ascending order
inline void check_code_for(const cudaDeviceProp& gpu, const std::vector<int>& built_for) {
    const int here = 100 * gpu.major + 10 * gpu.minor;
    bool has_code = here >= built_for.back();
    std::string known;
    for (int arch : built_for) {
        has_code = has_code || (arch / 100 == gpu.major && arch <= here);
        known += format("%d.%d, ", arch / 100, arch / 10 % 10);
    }
    if (has_code) { return; }
    const std::string advice = format("build it with make train_gpt GPU_ARCH=%d%d", gpu.major, gpu.minor);
    throw UserError(format("this program is built for GPUs of compute capability %sand later, but %s has "
                           "%d.%d: ", known.c_str(), gpu.name, gpu.major, gpu.minor) +
                    (here < 800 ? "use an A100 (8.0) or a later one" : advice));
}

// Selects GPU `number` modulo the count of GPUs on this machine. UserError if there is none that it can use.
// interface: of the network that NCCL is to use; empty: its choice
//
// NCCL is to use rings for two reasons. NVLink's switches, which it would sometimes prefer, sum in varying
// order (github.com/NVIDIA/nccl/issues/1497). And NCCL connects for an algorithm at its first use, which may
// depend on the message size: with one algorithm, all connections are made before step 1.
inline Device use_device(int number, const std::string& interface) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);       // else a kernel's first launch may wait for running ones
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // else streams share queues and wait for each other
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0", 0);    // else inner collectives may wait for outer ones
    setenv("NCCL_ALGO", "Ring", 0);
    if (!interface.empty()) { use_interface(interface); }
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        throw UserError(format("no GPU is available (%s): run train_gpt_cpu instead, or see what nvidia-smi "
                               "says", status == cudaSuccess ? "none was found" : cudaGetErrorString(status)));
    }
    const int index = number % count;
    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, index));
#if defined(__CUDA_ARCH_LIST__)  // by nvcc, in ascending order
    check_code_for(properties, {__CUDA_ARCH_LIST__});
#endif
    cudaCheck(cudaSetDevice(index));
    return {properties.name, format("%x:%x:%x", unsigned(properties.pciDomainID),
                                    unsigned(properties.pciBusID), unsigned(properties.pciDeviceID)),
            index};
}

// Memory of the selected GPU, in bytes: what is free, and all of it.
inline std::pair<double, double> memory_size() {
    size_t free = 0, all = 0;
    cudaCheck(cudaMemGetInfo(&free, &all));
    return {double(free), double(all)};
}

// For several processes on one GPU, which NCCL refuses if they are on the same host. With a host id of its
// own, each process looks like a host of its own. Collectives then go through sockets, and take milliseconds.
// process: a name that is unique in the run   one_machine: whether all processes are on this machine
inline void share_device(const std::string& process, bool one_machine) {
    setenv("NCCL_HOSTID", process.c_str(), 1);
    setenv("NCCL_NET", "Socket", 0);
    setenv("NCCL_PROTO", "Simple", 0);
    if (one_machine) { setenv("NCCL_SOCKET_IFNAME", "lo", 0); }
}

}  // namespace cuda
