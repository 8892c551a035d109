// HD: a function that the CPU's loops and the CUDA kernels both call. Under a plain C++ compiler it means
// nothing.
#pragma once
#ifdef __CUDACC__
#define HD __host__ __device__
#else
#define HD
#endif
