// Device memory and pinned memory: what lies where, and which side may touch it when. Compiled without
// -fsanitize=thread (see sanitizers.h).
#include "dev/emulator/device_memory.h"

#include <sys/mman.h>

#include <cstring>

#include "dev/emulator/emulator.h"
#include "dev/emulator/shared_memory.h"

namespace emulator {
namespace {

constexpr size_t page = 4096, alignment = 256;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

bool touched(const char* from, const char* to) {
    for (; from < to; from++) {
        if (static_cast<unsigned char>(*from) != poison) { return true; }
    }
    return false;
}

}  // namespace

// Never destroyed: streams may outlive main().
DeviceMemory& DeviceMemory::instance() {
    static DeviceMemory& memory = *new DeviceMemory;
    return memory;
}

DeviceMemory::DeviceMemory()
    : device{static_cast<char*>(map_memory(region_bytes, PROT_NONE)), page},
      pinned{static_cast<char*>(map_memory(region_bytes, PROT_NONE)), page} {}

void* DeviceMemory::allocate(size_t bytes, Memory kind) {
    Locked lock(monitor);
    Region& in = region(kind);
    const size_t mapped = round_up(bytes, page);
    if (mapped > region_bytes || in.used + mapped + page > region_bytes) { return nullptr; }
    char* mapping = in.begin + in.used;
    in.used += mapped + page;
    if (mprotect(mapping, mapped, PROT_READ | PROT_WRITE) != 0) { return nullptr; }
    const Allocation made{mapping, mapped, mapping + mapped - round_up(bytes, alignment), bytes, kind};
    allocations[made.p] = made;
    in_use += kind == Memory::device ? mapped : 0;
    memset(mapping, poison, mapped);
    forbid(mapping, size_t(made.p - mapping));
    forbid(made.p + bytes, size_t(made.end() + page - made.p) - bytes);
    if (kind == Memory::device && closed) { mprotect(mapping, mapped, PROT_NONE); }
    close_if_idle();
    return made.p;
}

bool DeviceMemory::release(void* p, Memory kind) {
    Locked lock(monitor);
    auto found = allocations.find(static_cast<char*>(p));
    if (found == allocations.end() || found->second.kind != kind) { return false; }
    free_pages(found->second);
    allocations.erase(found);
    return true;
}

void DeviceMemory::release_all() {
    Locked lock(monitor);
    for (const auto& [p, allocation] : allocations) { free_pages(allocation); }
    allocations.clear();
    pinned_by_program.clear();
    closed = false;
}

void DeviceMemory::free_pages(const Allocation& gone) {
    in_use -= gone.kind == Memory::device ? gone.mapped : 0;
    forbid(gone.mapping, gone.mapped);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap(gone.mapping, gone.mapped, PROT_NONE, flags, -1, 0);
}

bool DeviceMemory::pin(void* p, size_t bytes) {
    Locked lock(monitor);
    return pinned_by_program.emplace(static_cast<char*>(p), bytes).second;
}

bool DeviceMemory::unpin(void* p) {
    Locked lock(monitor);
    return pinned_by_program.erase(static_cast<char*>(p)) == 1;
}

bool DeviceMemory::is_pinned_by_program(const void* p, size_t bytes) const {
    auto after = pinned_by_program.upper_bound(static_cast<const char*>(p));
    if (after == pinned_by_program.begin()) { return false; }
    const auto& [begin, length] = *std::prev(after);
    return static_cast<const char*>(p) + bytes <= begin + length;
}

Memory DeviceMemory::kind_of(const void* p) {
    if (device.holds(p)) { return Memory::device; }
    if (pinned.holds(p)) { return Memory::pinned; }
    Locked lock(monitor);
    return is_pinned_by_program(p, 1) ? Memory::pinned : Memory::pageable;
}

bool DeviceMemory::holds(const void* p, size_t bytes) {
    Locked lock(monitor);
    const Allocation* at = find(p);
    return (at && static_cast<const char*>(p) + bytes <= at->p + at->bytes) || is_pinned_by_program(p, bytes);
}

size_t DeviceMemory::bytes_in_use() {
    Locked lock(monitor);
    return in_use;
}

// ---- closed to the host

void DeviceMemory::begin_work() {
    Locked lock(monitor);
    streams_at_work++;
    if (!closed) { return; }
    for (const auto& [p, allocation] : allocations) {
        if (allocation.kind != Memory::device) { continue; }
        mprotect(allocation.mapping, allocation.mapped, PROT_READ | PROT_WRITE);
    }
    closed = false;
}

void DeviceMemory::end_work() {
    Locked lock(monitor);
    streams_at_work--;
}

void DeviceMemory::close() {
    Locked lock(monitor);
    close_if_idle();
}

void DeviceMemory::close_if_idle() {
    if (closed || streams_at_work > 0 || !settings().asynchronous || !settings().protect) { return; }
    mprotect(device.begin, device.used, PROT_NONE);
    closed = true;
}

// ---- reports

std::string DeviceMemory::damage() {
    if (address_sanitizer) { return ""; }
    Locked lock(monitor);
    for (const auto& [p, a] : allocations) {
        if (a.kind != Memory::device) { continue; }
        const std::string allocation = "an allocation of " + std::to_string(a.bytes) + " bytes";
        if (touched(a.mapping, a.p)) { return "wrote before the begin of " + allocation; }
        if (touched(a.p + a.bytes, a.end())) { return "wrote past the end of " + allocation; }
    }
    return "";
}

const DeviceMemory::Allocation* DeviceMemory::find(const void* p) const {
    auto after = allocations.upper_bound(static_cast<const char*>(p));
    return after == allocations.begin() ? nullptr : &std::prev(after)->second;
}

std::string DeviceMemory::explain(const void* p) const {
    if (!device.holds(p) && !pinned.holds(p)) { return "the address is not in device memory"; }
    const Allocation* before = find(p);
    if (!before || p >= before->end() + page) { return "the memory has been freed"; }
    const std::string allocation = "an allocation of " + std::to_string(before->bytes) + " bytes";
    const long past_end = static_cast<const char*>(p) - (before->p + before->bytes);
    if (past_end >= 0) {
        const auto next = allocations.upper_bound(static_cast<const char*>(p));
        const long ahead = next == allocations.end() ? long(page) : next->first - static_cast<const char*>(p);
        const std::string before_next =
            ahead < long(page) ? ", or " + std::to_string(ahead) + " bytes before the next one" : "";
        return std::to_string(past_end) + " bytes past the end of " + allocation + before_next;
    }
    return "device memory, which the host must not touch: " + allocation;
}

bool is_device_memory(const void* p, size_t bytes) {
    DeviceMemory& memory = DeviceMemory::instance();
    return memory.kind_of(p) == Memory::device && memory.holds(p, bytes);
}

}  // namespace emulator
