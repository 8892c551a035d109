// Owned: a C library's object; `free` releases it when its owner is destroyed.
// OwnedArray: an array that is freed with its owner. Memory provides its memory:
//     static void* take(size_t bytes);    // all zero bits; throws if there is no more
//     static void give_back(void* p);     // does nothing for null
#pragma once
#include <cstddef>
#include <memory>
#include <utility>

template <auto free>
struct CallFree {
    template <class T>
    void operator()(T* p) const { free(p); }
};
template <class T, auto free>
using Owned = std::unique_ptr<T, CallFree<free>>;

template <class T, class Memory>
class OwnedArray {
public:
    OwnedArray() = default;
    explicit OwnedArray(long count)
        : data_(count == 0 ? nullptr : static_cast<T*>(Memory::take(size_t(count) * sizeof(T)))),
          count_(count) {}
    OwnedArray(OwnedArray&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    OwnedArray& operator=(OwnedArray&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~OwnedArray() { Memory::give_back(data_); }

    T* data() { return data_; }
    const T* data() const { return data_; }
    operator T*() { return data_; }
    operator const T*() const { return data_; }
    long count() const { return count_; }

private:
    T* data_ = nullptr;
    long count_ = 0;
};
