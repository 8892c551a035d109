// Buffer: an array in the memory that the layers work on. HostBuffer: one in the host's memory that is copied
// from and to. Both all zero bits when new. The CPU's or the GPU's.
#pragma once
#include "llmc/cpu/buffer.h"
#include "llmc/device.h"
#ifdef USE_CUDA
#include "llmc/cuda/buffer.cuh"
#include "llmc/cuda/host_buffer.cuh"
#endif

using device::Buffer;
using device::HostBuffer;
