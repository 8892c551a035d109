// Stream and Event: work in order, and points in that order that others can wait for. The CPU's or the GPU's.
#pragma once
#include "llmc/cpu/stream.h"
#include "llmc/device.h"
#ifdef USE_CUDA
#include "llmc/cuda/stream.cuh"
#endif

using device::Event;
using device::Stream;
