// Buffer: an array in a GPU's memory, freed with its owner. All zero bits when new. The host can only copy to
// and from it (llmc/cuda/memory.cuh).
#pragma once
#include <new>

#include "llmc/cuda/device.cuh"
#include "llmc/owned_array.h"

namespace cuda {

// Memory of the current device, not initialized. std::bad_alloc if there is not enough.
inline void* allocate(size_t bytes) {
    void* p = nullptr;
    if (failed_with(cudaErrorMemoryAllocation, cudaMalloc(&p, bytes))) { throw std::bad_alloc(); }
    return p;
}

struct GpuMemory {
    // Waits for the whole device, so allocate before step 1.
    static void* take(size_t bytes) {
        void* p = allocate(bytes);
        cudaCheck(cudaMemset(p, 0, bytes));
        cudaCheck(cudaDeviceSynchronize());  // other streams do not wait for the memset
        return p;
    }
    static void give_back(void* p) { cudaFree(p); }
};

template <class T>
using Buffer = OwnedArray<T, GpuMemory>;

}  // namespace cuda
