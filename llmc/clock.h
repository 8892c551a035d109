// The host's time: now_seconds(), and Phase, a named stretch of the host's work that Nsight Systems shows (an
// NVTX range; nothing on the CPU).
#pragma once
#include <chrono>

// Seconds since some point in the past; never goes back.
inline double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#if defined(USE_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

class Phase {
public:
    explicit Phase(const char* name) { nvtxRangePushA(name); }
    ~Phase() { nvtxRangePop(); }
    Phase& operator=(Phase&&) = delete;  // which also rules out copies
};
#else
struct Phase {
    explicit Phase(const char*) {}
    ~Phase() {}
};
#endif
