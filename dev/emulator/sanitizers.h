// What the sanitizers have to be told about fibers and about memory. In a build without sanitizers nothing.
//
// Address sanitizer finds accesses to memory that `forbid` marked. Thread sanitizer takes each CUDA thread
// as one of its fibers. Switches between them order nothing; `release` and `acquire` order what CUDA
// orders. The emulator's own sources are compiled without -fsanitize=thread, with EMULATOR_THREAD_SANITIZER
// defined: their bookkeeping is no part of the program under test, and they name the accesses that are.
#pragma once
#include <cstddef>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATOR_THREAD_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_read_range(void* from, unsigned long bytes);
void __tsan_write_range(void* to, unsigned long bytes);
void __tsan_func_entry(void* caller);
void __tsan_func_exit();
}
#endif

namespace emulator {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool address_sanitizer = true;
inline void forbid(const void* p, size_t bytes) { ASAN_POISON_MEMORY_REGION(p, bytes); }
inline void allow(const void* p, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(p, bytes); }
// Before a switch to the stack [to, to + bytes). A null `state`: the stack left behind is never used again.
inline void leave_stack(void** state, const void* to, size_t bytes) {
    __sanitizer_start_switch_fiber(state, to, bytes);
}
// After a switch: where it came from.
inline void enter_stack(void* state, const void** from, size_t* bytes) {
    __sanitizer_finish_switch_fiber(state, from, bytes);
}
#else
constexpr bool address_sanitizer = false;
inline void forbid(const void*, size_t) {}
inline void allow(const void*, size_t) {}
inline void leave_stack(void**, const void*, size_t) {}
inline void enter_stack(void*, const void**, size_t*) {}
#endif

#if defined(EMULATOR_THREAD_SANITIZER)
constexpr bool thread_sanitizer = true;
inline void* create_fiber() { return __tsan_create_fiber(0); }
inline void destroy_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void name_fiber(void* fiber, const char* name) { __tsan_set_fiber_name(fiber, name); }
inline void* current_fiber() { return __tsan_get_current_fiber(); }
inline void switch_fiber(void* fiber) { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }
inline void release(void* tag) { __tsan_release(tag); }
inline void acquire(void* tag) { __tsan_acquire(tag); }
inline void note_read(const void* p, size_t bytes) { __tsan_read_range(const_cast<void*>(p), bytes); }
inline void note_write(void* p, size_t bytes) { __tsan_write_range(p, bytes); }
// While one lives, accesses of this CUDA thread are the emulator's own.
struct OwnAccesses {
    OwnAccesses() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~OwnAccesses() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
};
// While one lives, reports name `caller`, a return address, for accesses that are noted.
struct CalledFrom {
    explicit CalledFrom(const void* caller) { __tsan_func_entry(const_cast<void*>(caller)); }
    ~CalledFrom() { __tsan_func_exit(); }
};
#else
constexpr bool thread_sanitizer = false;
inline void* create_fiber() { return nullptr; }
inline void destroy_fiber(void*) {}
inline void name_fiber(void*, const char*) {}
inline void* current_fiber() { return nullptr; }
inline void switch_fiber(void*) {}
inline void release(void*) {}
inline void acquire(void*) {}
inline void note_read(const void*, size_t) {}
inline void note_write(void*, size_t) {}
struct OwnAccesses {
    OwnAccesses() {}
    ~OwnAccesses() {}
};
struct CalledFrom {
    explicit CalledFrom(const void*) {}
    ~CalledFrom() {}
};
#endif

inline void call_at_death(void (*print)()) {
#if defined(__SANITIZE_ADDRESS__) || defined(EMULATOR_THREAD_SANITIZER)
    __sanitizer_set_death_callback(print);
#else
    (void)print;
#endif
}

}  // namespace emulator
