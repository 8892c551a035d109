// CUDA's runtime: copies and fills. CUDA Runtime API, "API synchronization behavior": what is copied out of
// pageable memory has been read when the call returns, and what is copied into it has been written; all else
// of the asynchronous calls, and copies within the device, happen later. cudaMemcpy out of pageable memory,
// too, may return before the data is on the device.
// Compiled without -fsanitize=thread (see sanitizers.h).
#include <cstring>
#include <utility>
#include <vector>

#include "dev/emulator/device_memory.h"
#include "dev/emulator/emulator.h"
#include "dev/emulator/runtime.h"
#include "dev/emulator/shared_memory.h"

namespace emulator {
namespace {

// `height` rows of `width` bytes; a pitch is the distance between the begins of two.
struct Copy {
    char* to;
    size_t to_pitch;
    const char* from;
    size_t from_pitch, width, height;

    // From the begin of the first row to the end of the last.
    size_t span(size_t pitch) const { return (height - 1) * pitch + width; }
    bool overlaps() const { return from < to + span(to_pitch) && to < from + span(from_pitch); }
};

Copy in_one_piece(void* to, const void* from, size_t bytes) {
    return {static_cast<char*>(to), bytes, static_cast<const char*>(from), bytes, bytes, bytes > 0 ? 1u : 0u};
}

bool may_touch(const void* p, size_t bytes, Memory kind) {
    return kind == Memory::pageable || DeviceMemory::instance().holds(p, bytes);
}

// `kind` says which side of a copy is device memory, and must be right.
bool is_valid(const Copy& copy, cudaMemcpyKind kind, Memory to, Memory from) {
    const bool wants_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool wants_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault &&
        (wants_to != (to == Memory::device) || wants_from != (from == Memory::device))) {
        return false;
    }
    return copy.width <= copy.to_pitch && copy.width <= copy.from_pitch &&
           may_touch(copy.to, copy.span(copy.to_pitch), to) &&
           may_touch(copy.from, copy.span(copy.from_pitch), from);
}

void note_target(const Copy& copy) {
    for (size_t row = 0; row < copy.height; row++) { note_write(copy.to + row * copy.to_pitch, copy.width); }
}

void note_source(const Copy& copy) {
    for (size_t row = 0; row < copy.height; row++) {
        note_read(copy.from + row * copy.from_pitch, copy.width);
    }
}

void move_rows(const Copy& copy) {
    OwnAccesses own;
    for (size_t row = 0; row < copy.height; row++) {
        memmove(copy.to + row * copy.to_pitch, copy.from + row * copy.from_pitch, copy.width);
    }
}

// Whoever reads the target too early finds NaN there.
void poison_target(const Copy& copy) {
    if (settings().seed == 0 || !settings().asynchronous || copy.overlaps()) { return; }
    {
        OwnAccesses own;
        for (size_t row = 0; row < copy.height; row++) {
            memset(copy.to + row * copy.to_pitch, poison, copy.width);
        }
    }
    hold_item();
}

// The source's bytes, now.
std::vector<char> stage(const Copy& copy) {
    note_source(copy);
    OwnAccesses own;
    std::vector<char> staged(copy.width * copy.height);
    move_rows({staged.data(), copy.width, copy.from, copy.from_pitch, copy.width, copy.height});
    return staged;
}

PointRef enqueue_copy(const Copy& copy, const StreamRef& stream, const char* call, const void* caller) {
    return enqueue(stream, call, [=] {
        CalledFrom from(caller);
        note_source(copy);
        note_target(copy);
        poison_target(copy);
        move_rows(copy);
    });
}

PointRef enqueue_staged(Copy copy, const StreamRef& stream, const char* call, const void* caller) {
    auto staged = std::make_shared<std::vector<char>>(stage(copy));
    copy.from = staged->data();
    copy.from_pitch = copy.width;
    return enqueue(stream, call, [copy, staged, caller]() mutable {
        CalledFrom from(caller);
        note_target(copy);
        poison_target(copy);
        move_rows(copy);
        OwnAccesses own;
        staged.reset();
    });
}

// `call`: the function of CUDA's. `caller`: the place in the program that thread sanitizer shall name.
cudaError_t copy_on(const StreamRef& stream, const Copy& copy, cudaMemcpyKind kind, bool is_asynchronous,
                    const char* call, const void* caller) {
    if (!stream) { return handle_result(false); }
    if (copy.width == 0 || copy.height == 0) { return result(cudaSuccess); }
    DeviceMemory& memory = DeviceMemory::instance();
    const Memory to = memory.kind_of(copy.to), from = memory.kind_of(copy.from);
    if (!is_valid(copy, kind, to, from)) { return result(cudaErrorInvalidValue); }
    if (from == Memory::pageable && to != Memory::pageable) {
        enqueue_staged(copy, stream, call, caller);
        return result(cudaSuccess);
    }
    const PointRef done = enqueue_copy(copy, stream, call, caller);
    const bool within_device = from == Memory::device && to == Memory::device;
    if (to == Memory::pageable || (!is_asynchronous && !within_device)) { wait_for(done); }
    return result(cudaSuccess);
}

cudaError_t fill_on(const StreamRef& stream, void* p, int value, size_t bytes, const char* call,
                    const void* caller) {
    if (!stream) { return handle_result(false); }
    if (bytes == 0) { return result(cudaSuccess); }
    if (!DeviceMemory::instance().holds(p, bytes)) { return result(cudaErrorInvalidValue); }
    enqueue(stream, call, [=] {
        CalledFrom from(caller);
        note_write(p, bytes);
        OwnAccesses own;
        memset(p, value, bytes);
    });
    return result(cudaSuccess);
}

}  // namespace
}  // namespace emulator

using namespace emulator;

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return copy_on(default_stream(), in_one_piece(to, from, bytes), kind, false, __func__,
                   __builtin_return_address(0));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy_on(find_stream(stream, __func__), in_one_piece(to, from, bytes), kind, true, __func__,
                   __builtin_return_address(0));
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                         size_t height, cudaMemcpyKind kind) {
    const Copy copy{
        static_cast<char*>(to), to_pitch, static_cast<const char*>(from), from_pitch, width, height};
    return copy_on(default_stream(), copy, kind, false, __func__, __builtin_return_address(0));
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    const Copy copy{
        static_cast<char*>(to), to_pitch, static_cast<const char*>(from), from_pitch, width, height};
    return copy_on(find_stream(stream, __func__), copy, kind, true, __func__, __builtin_return_address(0));
}

cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    return fill_on(default_stream(), p, value, bytes, __func__, __builtin_return_address(0));
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    return fill_on(find_stream(stream, __func__), p, value, bytes, __func__, __builtin_return_address(0));
}
