// HostBuffer on a GPU's host: pinned memory, which the GPU reads and writes by itself, so that copies return
// at once.
#pragma once
#include <cstring>

#include "llmc/cuda/device.cuh"
#include "llmc/error.h"
#include "llmc/owned_array.h"

namespace cuda {

struct PinnedMemory {
    static void* take(size_t bytes) {
        void* p = nullptr;
        if (failed_with(cudaErrorMemoryAllocation, cudaMallocHost(&p, bytes))) {
            throw RunError(format("cannot pin %.3g GB of the host's memory: start fewer processes on this "
                                  "machine, leave out --outer-offload, or raise the job's memory limit",
                                  double(bytes) / 1e9));
        }
        memset(p, 0, bytes);
        return p;
    }
    static void give_back(void* p) { cudaFreeHost(p); }
};

template <class T>
using HostBuffer = OwnedArray<T, PinnedMemory>;

}  // namespace cuda
