// device:: is where parameters lie and layers run: `cuda` with USE_CUDA, else `cpu`. Both hold the same names
// (Stream, Event, Buffer, a function for each layer and each streaming kernel), so that what is built from
// them is written once.
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
