// The shared memory of one block: variables with a red zone before, between and after them. All bytes are
// 0xFF at first (NaN as float, bf16, half and fp8; -1 as an integer), so that the use of a value that was
// never written shows, and so does a write to a red zone. Under address sanitizer the red zones are
// forbidden.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "dev/emulator/sanitizers.h"
#include "llmc/host_device.h"

namespace emulator {

constexpr unsigned char poison = 0xFF;  // all bits, see untouched()

inline void* map_memory(size_t bytes, int protection = PROT_READ | PROT_WRITE) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) { throw std::bad_alloc(); }
    return p;
}

class SharedMemory {
public:
    SharedMemory() = default;
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;
    ~SharedMemory() {
        if (arena) { munmap(arena, capacity); }
    }

    // For the next block, with `dynamic_bytes` of dynamic shared memory. Thread sanitizer forgets the last
    // block's accesses because the memory is mapped anew.
    void reset(size_t dynamic_bytes) {
        if (thread_sanitizer && arena) {
            munmap(arena, capacity);
            arena = nullptr;
        }
        if (!arena) {
            arena = static_cast<char*>(map_memory(capacity));
            used = capacity;
        }
        allow(arena, used);
        {
            OwnAccesses own;
            memset(arena, poison, used);  // the bytes after these still are
        }
        variables.clear();
        used = red_zone;
        static_bytes = 0;
        forbid(arena, red_zone);
        add(this, "dynamic shared memory", dynamic_bytes, Site{});
    }

    // Null if there is none of that key yet.
    void* find(const void* key) const {
        for (const Variable& variable : variables) {
            if (variable.key == key) { return arena + variable.offset; }
        }
        return nullptr;
    }

    // Null if the emulator has no room for it, which is far more than any device's.
    void* add(const void* key, const char* name, size_t bytes, Site site) {
        const size_t end = used + (bytes + red_zone - 1) / red_zone * red_zone + red_zone;
        if (end > capacity) { return nullptr; }
        variables.push_back({key, name, used, bytes, site});
        forbid(arena + used + bytes, end - used - bytes);
        used = end;
        if (key != this) { static_bytes += bytes; }
        return arena + variables.back().offset;
    }

    void* dynamic() const { return arena + variables[0].offset; }
    size_t dynamic_bytes() const { return variables[0].bytes; }
    size_t bytes_of_variables() const { return static_bytes; }

    bool holds(const void* p, size_t bytes) const {
        return p >= arena && static_cast<const char*>(p) + bytes <= arena + used;
    }

    // What was written outside of the variables; empty if nothing was. Address sanitizer looks by itself.
    std::string damage() const {
        if (address_sanitizer) { return ""; }
        if (!untouched(0, red_zone)) { return "wrote before the begin of " + name(variables[0]); }
        for (size_t i = 0; i < variables.size(); i++) {
            const Variable& variable = variables[i];
            const size_t begin = variable.offset + variable.bytes;
            const size_t end = i + 1 < variables.size() ? variables[i + 1].offset : used;
            if (untouched(begin, end)) { continue; }
            size_t at = begin;
            while (static_cast<unsigned char>(arena[at]) == poison) { at++; }
            return "wrote past the end of " + name(variable) + ": its byte " +
                   std::to_string(at - variable.offset) + " of " + std::to_string(variable.bytes);
        }
        return "";
    }

private:
    struct Variable {
        const void* key;
        const char* name;
        size_t offset, bytes;
        Site site;
    };

    static constexpr size_t red_zone = 128;
    static constexpr size_t capacity = 512 * 1024;

    static std::string name(const Variable& variable) {
        std::string text = variable.name;
        if (variable.site.line != 0) {
            text += std::string(" (") + variable.site.file + ":" + std::to_string(variable.site.line) + ")";
        }
        return text;
    }

    // Loops, not memcmp: thread sanitizer would take that for an access of the kernel's. Called at every
    // meeting point: eight bytes at a time.
    bool untouched(size_t begin, size_t end) const {
        uint64_t all = ~uint64_t(0);
        for (; begin + 8 <= end; begin += 8) {
            uint64_t eight;
            memcpy(&eight, arena + begin, 8);
            all &= eight;
        }
        for (; begin < end; begin++) { all &= ~uint64_t(0xFF) | static_cast<unsigned char>(arena[begin]); }
        return all == ~uint64_t(0);
    }

    char* arena = nullptr;
    size_t used = 0, static_bytes = 0;
    std::vector<Variable> variables;
};

}  // namespace emulator
