// Copies, casts and fills of what the layers work on: the CPU's or the GPU's.
#pragma once
#include "llmc/cpu/memory.h"
#ifdef USE_CUDA
#include "llmc/cuda/memory.cuh"
#endif
