// floatX: the type of parameters and activations. bf16 on GPUs (fp32 in a -DENABLE_FP32 build), fp32 on the
// CPU. Master weights, optimizer state and outer state are float everywhere.
#pragma once
#if defined(USE_CUDA) && !defined(ENABLE_FP32)
#include <cuda_bf16.h>
using floatX = __nv_bfloat16;
#else
using floatX = float;
#endif
