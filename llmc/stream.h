// Stream, Event, Timestamp: work in order, points in that order that others can wait for, and when a stream
// came to a point. The CPU's or the GPU's.
#pragma once
#include "llmc/cpu/stream.h"
#include "llmc/device.h"
#ifdef USE_CUDA
#include "llmc/cuda/stream.cuh"
#endif

using device::Event;
using device::Stream;
using device::Timestamp;

// What `after` is given from now on comes after what `before` has been given so far.
inline void order(Stream& before, Stream& after, Event& event) {
    before.record(event);
    after.wait(event);
}
