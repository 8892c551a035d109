// The emulated device's global memory and pinned memory of the host, between allocation and release.
//
// Both are 0xFF when new (NaN), no address is used twice, and each allocation ends at a page that must not be
// touched: an access beyond it, before its first page or in freed memory faults. The bytes before it in its
// first page and the few after its end (starts are aligned to 256 bytes) are 0xFF and checked after each
// launch; address sanitizer forbids them.
//
// If streams are asynchronous, device memory is closed to the host: from when the host has waited for a
// stream, or made an allocation, until a stream works again, every access faults (mprotect).
#pragma once
#include <cstddef>
#include <map>
#include <string>

#include "dev/emulator/futex.h"

namespace emulator {

enum class Memory { pageable, pinned, device };

class DeviceMemory {
public:
    static DeviceMemory& instance();

    // Null if there is no room.
    void* allocate(size_t bytes, Memory kind);
    // False if `p` is not the begin of an allocation of that kind. Its addresses stay closed.
    bool release(void* p, Memory kind);
    void release_all();

    // Pageable memory that the program has pinned.
    bool pin(void* p, size_t bytes);
    bool unpin(void* p);

    Memory kind_of(const void* p);
    // Whether [p, p + bytes) lies in one allocation of device or pinned memory.
    bool holds(const void* p, size_t bytes);
    size_t bytes_in_use();
    size_t bytes_in_all() const { return region_bytes; }

    // A stream begins to work on device memory, or ends.
    void begin_work();
    void end_work();
    // The host has waited: closes device memory unless a stream works.
    void close();

    // Which allocation was overrun, and on which side; empty if none was.
    std::string damage();
    // What lies at an address that faulted. Takes no lock: a signal handler calls it.
    std::string explain(const void* p) const;

private:
    static constexpr size_t region_bytes = size_t(64) << 30;

    struct Region {
        char* begin;
        size_t used;
        bool holds(const void* p) const { return p >= begin && p < begin + region_bytes; }
    };
    struct Allocation {
        char* mapping;  // whole pages, followed by a guard page
        size_t mapped;
        char* p;
        size_t bytes;
        Memory kind;
        char* end() const { return mapping + mapped; }
    };

    DeviceMemory();
    Region& region(Memory kind) { return kind == Memory::device ? device : pinned; }
    void free_pages(const Allocation& allocation);
    void close_if_idle();
    // The last allocation that begins at or before `p`.
    const Allocation* find(const void* p) const;
    bool is_pinned_by_program(const void* p, size_t bytes) const;

    Monitor monitor;
    Region device, pinned;
    std::map<const char*, Allocation> allocations;
    std::map<const char*, size_t> pinned_by_program;
    size_t in_use = 0;
    int streams_at_work = 0;
    bool closed = false;
};

// Whether [p, p + bytes) lies in one allocation of device memory.
bool is_device_memory(const void* p, size_t bytes);

}  // namespace emulator
