// Buffer: an array that is freed with its owner. All zero bits when new, and 64-byte aligned, which is
// fastest for vector loads and oneDNN. A large one asks for pages of 2 MiB: attention reads parts of rows,
// each of which lies in another page of 4 KiB.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "llmc/owned_array.h"

namespace cpu {

struct AlignedMemory {
    static void* take(size_t bytes) {
        const size_t page = size_t(2) << 20, alignment = bytes < page ? 64 : page;
        const size_t whole = (bytes + 63) / 64 * 64;
        void* p = nullptr;
        if (posix_memalign(&p, alignment, whole) != 0) { throw std::bad_alloc(); }
        if (alignment == page) { madvise(p, whole, MADV_HUGEPAGE); }  // a hint, which may be refused
        return memset(p, 0, whole);
    }
    static void give_back(void* p) { free(p); }
};

template <class T>
using Buffer = OwnedArray<T, AlignedMemory>;

template <class T>
using HostBuffer = Buffer<T>;

}  // namespace cpu
