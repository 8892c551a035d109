// Buffer: an array that is freed with its owner. It is zeroed when allocated, and 64-byte aligned, which is
// fastest for vector loads and oneDNN. A large array lies in pages of 2 MiB, its end included: with 4 KiB
// pages the CPU needs a TLB entry for every 4 KiB, and in attention, which reads parts of rows, for every
// row. TLB misses are expensive in a virtual machine: there LayerNorm took longer for the last MiB of an
// array, in small pages, than for the two MiB before it, in a large page.
#pragma once
#include <malloc.h>
#include <sys/mman.h>

#include <cstring>
#include <new>

#include "llmc/owned_array.h"

namespace cpu {

struct AlignedMemory {
    static void* take(size_t bytes) {
        const size_t page = size_t(2) << 20, whole = (bytes + page - 1) / page * page;
        const size_t taken = whole - bytes <= bytes / 3 ? whole : bytes;  // at most a third more
        void* const p = memalign(taken < page ? 64 : page, taken);
        if (!p) { throw std::bad_alloc(); }
        if (taken >= page) { madvise(p, taken, MADV_HUGEPAGE); }  // a hint, which may be refused
        return memset(p, 0, bytes);
    }
    static void give_back(void* p) { free(p); }
};

template <class T>
using Buffer = OwnedArray<T, AlignedMemory>;

template <class T>
using HostBuffer = Buffer<T>;

}  // namespace cpu
