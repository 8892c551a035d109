// Buffer: an array in the memory that the layers work on. HostBuffer: one in the host's memory that is copied
// to and from it. Both are all zero bits when new. With them come the copies, casts and fills of such arrays.
// The CPU's or the GPU's.
#pragma once
#include "llmc/cpu/buffer.h"
#include "llmc/cpu/memory.h"
#include "llmc/device.h"
#ifdef USE_CUDA
#include "llmc/cuda/buffer.cuh"
#include "llmc/cuda/host_buffer.cuh"
#include "llmc/cuda/memory.cuh"
#endif

using device::Buffer;
using device::HostBuffer;
