// Buffer: an array in a GPU's memory, freed with its owner. All zero bits when new. The host does not read or
// write it: see llmc/cuda/memory.cuh.
#pragma once
#include <new>
#include <utility>

#include "llmc/cuda/device.cuh"

namespace cuda {

template <class T>
class Buffer {
public:
    Buffer() = default;
    // Throws std::bad_alloc where the device has no more memory.
    explicit Buffer(long count) : count_(count) {
        if (count == 0) { return; }
        void* p = nullptr;
        const cudaError_t status = cudaMalloc(&p, size_t(count) * sizeof(T));
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            throw std::bad_alloc();
        }
        cudaCheck(status);
        data_ = static_cast<T*>(p);
        cudaCheck(cudaMemset(p, 0, size_t(count) * sizeof(T)));
        cudaCheck(cudaDeviceSynchronize());  // other streams do not wait for the memset
    }
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~Buffer() { cudaFree(data_); }

    T* data() { return data_; }
    const T* data() const { return data_; }
    operator T*() { return data_; }
    operator const T*() const { return data_; }
    long count() const { return count_; }

private:
    T* data_ = nullptr;
    long count_ = 0;
};

}  // namespace cuda
