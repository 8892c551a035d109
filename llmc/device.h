// device:: is the namespace of the device that parameters lie on and layers run on: `cuda` with USE_CUDA,
// else `cpu`. Both have the same names (Stream, Event, Buffer, a function for each layer and each streaming
// kernel), so that the code above them is written once.
#pragma once

namespace cpu {}
namespace cuda {}

#ifdef USE_CUDA
namespace device = cuda;
const bool runs_on_gpu = true;
#else
namespace device = cpu;
const bool runs_on_gpu = false;
#endif
