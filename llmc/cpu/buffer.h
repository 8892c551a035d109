// Buffer: an array that is freed with its owner. All zero bits when new, and 64-byte aligned, which is
// fastest for vector loads and oneDNN. A large one asks for pages of 2 MiB: attention reads parts of rows,
// each of which lies in another page of 4 KiB.
#pragma once
#include <malloc.h>
#include <sys/mman.h>

#include <cstring>
#include <new>

#include "llmc/owned_array.h"

namespace cpu {

struct AlignedMemory {
    static void* take(size_t bytes) {
        const size_t page = size_t(2) << 20;
        void* const p = memalign(bytes < page ? 64 : page, bytes);
        if (!p) { throw std::bad_alloc(); }
        if (bytes >= page) { madvise(p, bytes, MADV_HUGEPAGE); }  // a hint, which may be refused
        return memset(p, 0, bytes);
    }
    static void give_back(void* p) { free(p); }
};

template <class T>
using Buffer = OwnedArray<T, AlignedMemory>;

template <class T>
using HostBuffer = Buffer<T>;

}  // namespace cpu
