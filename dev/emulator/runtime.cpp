// CUDA's runtime: errors, the device, attributes, memory from its allocation to its release. Copies are in
// copies.cpp, streams and events in streams.cpp. Compiled without -fsanitize=thread (see sanitizers.h).
#include "dev/emulator/runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "dev/emulator/device_memory.h"
#include "dev/emulator/emulator.h"

namespace emulator {
namespace {

// As on the device, an error stays until it is asked for.
cudaError_t& last_error() {
    static thread_local cudaError_t error = cudaSuccess;
    return error;
}

// EMULATOR_DEVICES: how many there are, so that each process of a machine can take one. Devices have streams
// of their own, but share one memory.
int device_count() {
    const char* count = getenv("EMULATOR_DEVICES");
    return count ? atoi(count) : 1;
}

bool is_device(int device) { return device >= 0 && device < device_count(); }

// Waits for the device, as the real functions do in practice. No documentation promises that, so thread
// sanitizer is told of no order.
cudaError_t release(void* p, Memory kind) {
    if (p) { drain_all_streams(); }
    return argument_result(!p || DeviceMemory::instance().release(p, kind));
}

cudaError_t allocate(void** p, size_t bytes, Memory kind) {
    catch_faults();
    *p = bytes == 0 ? nullptr : DeviceMemory::instance().allocate(bytes, kind);
    return result(*p || bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation);
}

}  // namespace

cudaError_t result(cudaError_t error) {
    if (sticky_error()) { error = cudaErrorLaunchFailure; }
    if (error != cudaSuccess) { last_error() = error; }
    return error;
}

}  // namespace emulator

using namespace emulator;

// ---- errors

cudaError_t cudaPeekAtLastError() { return sticky_error() ? cudaErrorLaunchFailure : last_error(); }

cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    last_error() = cudaSuccess;
    return error;
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorInvalidResourceHandle:
            return "invalid resource handle";
        case cudaErrorNotReady:
            return "device not ready";
        case cudaErrorHostMemoryAlreadyRegistered:
            return "part or all of the requested memory range is already mapped";
        case cudaErrorHostMemoryNotRegistered:
            return "pointer does not correspond to a registered memory region";
        case cudaErrorLaunchFailure:
            return sticky_error() ? sticky_error() : "unspecified launch failure";
        default:
            return "an error that the emulator does not make";
    }
}

// ---- the device

cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return result(cudaSuccess);
}

cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) { return result(cudaErrorInvalidDevice); }
    current_device() = device;
    return result(cudaSuccess);
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device();
    return result(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (!is_device(device)) { return result(cudaErrorInvalidDevice); }
    cudaDeviceProp& p = *properties = {};
    snprintf(p.name, sizeof(p.name), "emulated GPU");
    p.major = 9;  // as Hopper; but of shared memory no more than sm_86 has: what fits here fits everywhere
    p.minor = 0;
    p.pciBusID = device;
    p.multiProcessorCount = 4;
    p.warpSize = warpSize;
    p.totalGlobalMem = DeviceMemory::instance().bytes_in_all();
    p.sharedMemPerBlock = 48 * 1024;
    p.sharedMemPerBlockOptin = settings().shared_bytes_per_block;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiProcessor = 1536;
    p.asyncEngineCount = 2;
    p.concurrentKernels = 1;
    p.unifiedAddressing = 1;
    return result(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    const cudaError_t status = cudaGetDeviceProperties(&p, device);
    if (status != cudaSuccess) { return status; }
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:
            *value = p.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = p.minor;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = p.multiProcessorCount;
            break;
        case cudaDevAttrWarpSize:
            *value = p.warpSize;
            break;
        case cudaDevAttrMaxThreadsPerBlock:
            *value = p.maxThreadsPerBlock;
            break;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            *value = p.maxThreadsPerMultiProcessor;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = int(p.sharedMemPerBlock);
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = int(p.sharedMemPerBlockOptin);
            break;
        default:
            return result(cudaErrorInvalidValue);
    }
    return status;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return result(cudaSuccess);
}

static cudaError_t version(int* version) {
    *version = CUDART_VERSION;
    return result(cudaSuccess);
}
cudaError_t cudaRuntimeGetVersion(int* runtime) { return version(runtime); }
cudaError_t cudaDriverGetVersion(int* driver) { return version(driver); }

cudaError_t cudaDeviceSynchronize() {
    wait_for_all_streams();
    return result(cudaSuccess);
}

cudaError_t cudaDeviceReset() {
    drain_all_streams();
    close_all_streams();
    DeviceMemory::instance().release_all();
    clear_sticky_error();
    last_error() = cudaSuccess;
    return cudaSuccess;
}

// ---- kernels

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
    return argument_result(attribute != cudaFuncAttributeMaxDynamicSharedMemorySize ||
                           (value >= 0 && size_t(value) <= settings().shared_bytes_per_block));
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = int(settings().shared_bytes_per_block);
    return result(cudaSuccess);
}

// ---- memory

cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(p, bytes, Memory::device); }

cudaError_t cudaFree(void* p) { return release(p, Memory::device); }

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return allocate(p, bytes, Memory::pinned); }

cudaError_t cudaMallocHost(void** p, size_t bytes) { return allocate(p, bytes, Memory::pinned); }

cudaError_t cudaFreeHost(void* p) { return release(p, Memory::pinned); }

cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
    return result(DeviceMemory::instance().pin(p, bytes) ? cudaSuccess
                                                         : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* p) {
    drain_all_streams();
    return result(DeviceMemory::instance().unpin(p) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = DeviceMemory::instance().bytes_in_all();
    *free = *total - DeviceMemory::instance().bytes_in_use();
    return result(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
    const Memory kind = DeviceMemory::instance().kind_of(p);
    *attributes = {};
    attributes->type = kind == Memory::device   ? cudaMemoryTypeDevice
                       : kind == Memory::pinned ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
    attributes->device = current_device();
    if (kind != Memory::pageable) { attributes->devicePointer = const_cast<void*>(p); }
    if (kind != Memory::device) { attributes->hostPointer = const_cast<void*>(p); }
    return result(cudaSuccess);
}
