// Buffer: an array in the memory that the layers work on; freed with its owner. All zero bits when new.
// On the CPU: 64-byte aligned, so that vector loads and oneDNN are at their fastest.
#pragma once
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace cpu {

template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(long count) : count_(count) {
        size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
        data_ = static_cast<T*>(std::aligned_alloc(64, bytes == 0 ? 64 : bytes));
        if (!data_) { throw std::bad_alloc(); }
        memset(static_cast<void*>(data_), 0, bytes);
    }
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~Buffer() { free(data_); }

    T* data() { return data_; }
    const T* data() const { return data_; }
    operator T*() { return data_; }
    operator const T*() const { return data_; }
    long count() const { return count_; }

private:
    T* data_ = nullptr;
    long count_ = 0;
};

template <class T>
using HostBuffer = Buffer<T>;

}  // namespace cpu
