// Owned: a C library's object; `free` releases it when its owner is destroyed.
// OwnedArray: an array that is freed with its owner. Memory provides its memory:
//     static void* take(size_t bytes);    // all zero bits; throws if there is no more
//     static void give_back(void* p);
#pragma once
#include <cstddef>
#include <memory>

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
        : memory(count == 0 ? nullptr : static_cast<T*>(Memory::take(size_t(count) * sizeof(T)))),
          values(count) {}

    T* data() { return memory.get(); }
    const T* data() const { return memory.get(); }
    operator T*() { return data(); }
    operator const T*() const { return data(); }
    long count() const { return memory ? values : 0; }  // 0 also after a move

private:
    Owned<T, Memory::give_back> memory;
    long values = 0;
};
