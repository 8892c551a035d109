// HD: a function that both the CPU's loops and the CUDA kernels call. Under a plain C++ compiler it means
// nothing. HD_INLINE: one that must be inlined, or the loops that call it are not vectorized.
// Site: a place in the source, for messages. As a parameter's default, Site::here() is the place of the call.
#pragma once
#ifdef __CUDACC__
#define HD __host__ __device__
#else
#define HD
#endif
#define HD_INLINE HD inline __attribute__((always_inline))

struct Site {
    const char* file = "";
    int line = 0;

    HD static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};
