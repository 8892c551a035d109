// The device that a process computes on: on the CPU there is nothing to choose.
#pragma once
#include <string>

#include "llmc/device.h"
#include "llmc/machine.h"
#ifdef USE_CUDA
#include "llmc/cuda/gpu.cuh"
#endif

namespace cpu {

struct Device {
    std::string name = "CPU";
    std::string identity;  // empty: nothing is shared that would have to be known
};

inline Device use_device(int, const std::string&) { return {}; }
inline void share_device(const std::string&, bool) {}

}  // namespace cpu
