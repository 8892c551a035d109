// What the files that implement CUDA's runtime share: how a call returns its error.
#pragma once
#include <cuda_runtime_api.h>

#include "dev/emulator/queue.h"

namespace emulator {

// Keeps an error for cudaGetLastError. After a mistake in a kernel every call returns cudaErrorLaunchFailure.
cudaError_t result(cudaError_t error);

// Once for the process: an access that faults is explained. In emulator.cpp.
void catch_faults();

inline cudaError_t handle_result(bool valid) {
    return result(valid ? cudaSuccess : cudaErrorInvalidResourceHandle);
}
inline cudaError_t argument_result(bool valid) { return result(valid ? cudaSuccess : cudaErrorInvalidValue); }

}  // namespace emulator
