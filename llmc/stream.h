// Stream: work in order. Event: a point in that order, for which others can wait. Timestamp: the time at
// which a stream came to a point. The CPU's or the GPU's.
#pragma once
#include "llmc/cpu/stream.h"
#include "llmc/device.h"
#ifdef USE_CUDA
#include "llmc/cuda/stream.cuh"
#endif

using device::Event;
using device::Stream;
using device::Timestamp;

// Work that is given to `after` from now on starts after the work that `before` has been given so far.
inline void order(Stream& before, Stream& after, Event& event) {
    before.record(event);
    after.wait(event);
}
