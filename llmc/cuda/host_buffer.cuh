// HostBuffer on a GPU's host: pinned, so that the GPU reads and writes it by itself and copies return
// at once.
#pragma once
#include <new>
#include <utility>

#include "llmc/cuda/device.cuh"

namespace cuda {

template <class T>
class HostBuffer {
public:
    HostBuffer() = default;
    // Throws std::bad_alloc where the host has no more memory to pin.
    explicit HostBuffer(long count) : count_(count) {
        void* p = nullptr;
        if (cudaMallocHost(&p, size_t(count) * sizeof(T)) != cudaSuccess) {
            cudaGetLastError();
            throw std::bad_alloc();
        }
        data_ = static_cast<T*>(p);
        memset(p, 0, size_t(count) * sizeof(T));
    }
    HostBuffer(HostBuffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    HostBuffer& operator=(HostBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~HostBuffer() { cudaFreeHost(data_); }

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
