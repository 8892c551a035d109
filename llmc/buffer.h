// Buffer: an array in the memory that the layers work on, the CPU's or the GPU's. HostBuffer: an array in the
// host's memory that is copied to or from a Buffer. Both are zeroed when allocated. This header also brings
// in the functions that copy, cast and fill such arrays.
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
