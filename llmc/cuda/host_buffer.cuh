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
        const cudaError_t status = cudaMallocHost(&p, bytes);
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError();  // clears it, or the next caller of cudaGetLastError would get it
            throw RunError(format("cannot pin %.3g GB of the host's memory: start fewer processes on this "
                                  "machine, leave out --outer-offload, or raise the job's memory limit",
                                  double(bytes) / 1e9));
        }
        cudaCheck(status);
        memset(p, 0, bytes);
        return p;
    }
    static void give_back(void* p) { cudaFreeHost(p); }
};

template <class T>
using HostBuffer = OwnedArray<T, PinnedMemory>;

}  // namespace cuda
