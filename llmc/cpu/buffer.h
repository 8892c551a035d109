// Buffer: an array that is freed with its owner. All zero bits when new, and 64-byte aligned, which is
// fastest for vector loads and oneDNN.
#pragma once
#include <cstdlib>
#include <cstring>
#include <new>

#include "llmc/owned_array.h"

namespace cpu {

struct AlignedMemory {
    static void* take(size_t bytes) {
        const size_t whole = (bytes + 63) / 64 * 64;  // as aligned_alloc requires
        void* p = std::aligned_alloc(64, whole);
        if (!p) { throw std::bad_alloc(); }
        return memset(p, 0, whole);
    }
    static void give_back(void* p) { free(p); }
};

template <class T>
using Buffer = OwnedArray<T, AlignedMemory>;

template <class T>
using HostBuffer = Buffer<T>;

}  // namespace cpu
