// Buffer: an array in the memory that the layers work on; freed with its owner. All zero bits when new.
// On the CPU: 64-byte aligned, so that vector loads and oneDNN are at their fastest.
#pragma once
#include <cstdlib>
#include <cstring>
#include <new>

#include "llmc/owned_array.h"

namespace cpu {

struct AlignedMemory {
    static void* take(size_t bytes) {
        const size_t whole = (bytes + 63) / 64 * 64;  // as aligned_alloc wants it
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
