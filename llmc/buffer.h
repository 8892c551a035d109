// Buffer: an array in the memory that the layers work on. The CPU's or the GPU's.
#pragma once
#include "llmc/cpu/buffer.h"
#include "llmc/device.h"
#ifdef USE_CUDA
#include "llmc/cuda/buffer.cuh"
#endif

using device::Buffer;
