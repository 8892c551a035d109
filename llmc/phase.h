// Phase: a named stretch of the host's work, as Nsight Systems shows it (NVTX). Nothing on the CPU.
#pragma once
#include "llmc/device.h"
#if defined(USE_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

class Phase {
public:
    explicit Phase(const char* name) { nvtxRangePushA(name); }
    ~Phase() { nvtxRangePop(); }
    Phase(const Phase&) = delete;
    Phase& operator=(const Phase&) = delete;
};
#else
struct Phase {
    explicit Phase(const char*) {}
    ~Phase() {}
};
#endif
