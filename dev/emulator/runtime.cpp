// The part of the CUDA runtime that a test of kernels needs: device memory, copies, streams, events, errors.
// What is enqueued on any stream is done when the call returns.
// Compiled without -fsanitize=thread (see sanitizers.h).
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "dev/emulator/device_memory.h"
#include "dev/emulator/sanitizers.h"

namespace emulator {
namespace {

constexpr unsigned char poison = 0xFF;
constexpr size_t page = 4096, alignment = 256, region_bytes = size_t(64) << 30;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Allocation {
    char* mapping;  // whole pages, a guard page behind
    size_t mapped;
    char* p;
    size_t bytes;
    char* end() const { return mapping + mapped; }
};

class DeviceMemory {
public:
    static DeviceMemory& instance() {
        static DeviceMemory memory;
        return memory;
    }

    // Null if there is no room.
    void* allocate(size_t bytes) {
        std::lock_guard<std::mutex> lock(mutex);
        const size_t mapped = round_up(bytes, page);
        if (begin == MAP_FAILED || mapped > region_bytes || used + mapped + page > region_bytes) {
            return nullptr;
        }
        char* mapping = static_cast<char*>(begin) + used;
        used += mapped + page;
        if (mprotect(mapping, mapped, PROT_READ | PROT_WRITE) != 0) { return nullptr; }
        const Allocation made{mapping, mapped, mapping + mapped - round_up(bytes, alignment), bytes};
        allocations[made.p] = made;
        OwnAccesses own;
        memset(mapping, poison, mapped);
        forbid(mapping, size_t(made.p - mapping));
        forbid(made.p + bytes, size_t(made.end() + page - made.p) - bytes);
        return made.p;
    }

    // False if `p` is not the begin of an allocation. Its pages go back to the system, its addresses stay
    // closed.
    bool release(void* p) {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = allocations.find(static_cast<char*>(p));
        if (found == allocations.end()) { return false; }
        const Allocation gone = found->second;
        allocations.erase(found);
        forbid(gone.mapping, gone.mapped);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        return mmap(gone.mapping, gone.mapped, PROT_NONE, flags, -1, 0) == gone.mapping;
    }

    bool in_region(const void* p) const {
        return p >= begin && p < static_cast<const char*>(begin) + region_bytes;
    }

    // Whether [p, p + bytes) lies in one allocation.
    bool holds(const void* p, size_t bytes) {
        std::lock_guard<std::mutex> lock(mutex);
        const Allocation* at = find(p);
        return at && static_cast<const char*>(p) + bytes <= at->p + at->bytes;
    }

    std::string damage() {
        if (address_sanitizer) { return ""; }
        std::lock_guard<std::mutex> lock(mutex);
        for (const auto& [p, a] : allocations) {
            const std::string allocation = "an allocation of " + std::to_string(a.bytes) + " bytes";
            if (touched(a.mapping, a.p)) { return "wrote before the begin of " + allocation; }
            if (touched(a.p + a.bytes, a.end())) { return "wrote past the end of " + allocation; }
        }
        return "";
    }

    // Without the lock: from a signal handler.
    std::string explain(const void* p) const {
        if (!in_region(p)) { return "the address is not in device memory"; }
        const Allocation* before = find(p);
        if (!before || p >= before->end() + page) { return "the memory has been freed"; }
        return std::to_string(static_cast<const char*>(p) - (before->p + before->bytes)) +
               " bytes past the end of an allocation of " + std::to_string(before->bytes) + " bytes";
    }

private:
    DeviceMemory()
        : begin(mmap(nullptr, region_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}

    static bool touched(const char* from, const char* to) {
        for (; from < to; from++) {
            if (static_cast<unsigned char>(*from) != poison) { return true; }
        }
        return false;
    }

    // The last allocation that begins at or before `p`.
    const Allocation* find(const void* p) const {
        auto after = allocations.upper_bound(static_cast<const char*>(p));
        return after == allocations.begin() ? nullptr : &std::prev(after)->second;
    }

    std::mutex mutex;
    void* begin;
    size_t used = page;
    std::map<const char*, Allocation> allocations;
};

// Handles of streams and events, by kind. They are never used twice.
struct Handles {
    std::mutex mutex;
    std::set<const void*> open;

    template <class Handle>
    Handle create() {
        std::lock_guard<std::mutex> lock(mutex);
        static uintptr_t last = 0;
        const Handle handle = reinterpret_cast<Handle>(++last * 16);
        open.insert(handle);
        return handle;
    }
    bool close(const void* handle) {
        std::lock_guard<std::mutex> lock(mutex);
        return open.erase(handle) == 1;
    }
    bool has(const void* handle) {
        std::lock_guard<std::mutex> lock(mutex);
        return open.count(handle) == 1;
    }
};

Handles& streams() {
    static Handles handles;
    return handles;
}

Handles& events() {
    static Handles handles;
    return handles;
}

// As on the device, an error stays until it is asked for.
cudaError_t& last_error() {
    static thread_local cudaError_t error = cudaSuccess;
    return error;
}

cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) { last_error() = error; }
    return error;
}

bool is_stream(cudaStream_t stream) { return !stream || streams().has(stream); }

cudaError_t handle_result(bool valid) { return result(valid ? cudaSuccess : cudaErrorInvalidResourceHandle); }

// Which side of a copy is device memory follows from `kind`, and must be true.
bool copy_is_valid(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    DeviceMemory& memory = DeviceMemory::instance();
    const bool to_device = memory.in_region(to), from_device = memory.in_region(from);
    const bool wants_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool wants_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (wants_to != to_device || wants_from != from_device)) { return false; }
    return (!to_device || memory.holds(to, bytes)) && (!from_device || memory.holds(from, bytes));
}

}  // namespace

bool is_device_memory(const void* p, size_t bytes) { return DeviceMemory::instance().holds(p, bytes); }

std::string damage_of_device_memory() { return DeviceMemory::instance().damage(); }

std::string explain_address(const void* p) { return DeviceMemory::instance().explain(p); }

}  // namespace emulator

using namespace emulator;

cudaError_t cudaMalloc(void** p, size_t bytes) {
    *p = bytes == 0 ? nullptr : DeviceMemory::instance().allocate(bytes);
    return result(*p || bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* p) {
    return result(!p || DeviceMemory::instance().release(p) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) { return result(cudaSuccess); }
    if (!copy_is_valid(to, from, bytes, kind)) { return result(cudaErrorInvalidValue); }
    note_read(from, bytes);
    note_write(to, bytes);
    OwnAccesses own;
    memmove(to, from, bytes);
    return result(cudaSuccess);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return is_stream(stream) ? cudaMemcpy(to, from, bytes, kind) : result(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    if (bytes == 0) { return result(cudaSuccess); }
    if (!DeviceMemory::instance().holds(p, bytes)) { return result(cudaErrorInvalidValue); }
    note_write(p, bytes);
    OwnAccesses own;
    memset(p, value, bytes);
    return result(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    return is_stream(stream) ? cudaMemset(p, value, bytes) : result(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return handle_result(is_stream(stream));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return result(cudaSuccess);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    *stream = streams().create<cudaStream_t>();
    return result(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return handle_result(streams().close(stream)); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return handle_result(is_stream(stream) && events().has(event));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = events().create<cudaEvent_t>();
    return result(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return handle_result(events().close(event)); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return handle_result(is_stream(stream) && events().has(event));
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return handle_result(events().has(event)); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return handle_result(events().has(event)); }

cudaError_t cudaDeviceSynchronize() { return result(cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return last_error(); }

cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error();
    last_error() = cudaSuccess;
    return error;
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidResourceHandle:
            return "invalid resource handle";
        default:
            return "an error that the emulator does not make";
    }
}
