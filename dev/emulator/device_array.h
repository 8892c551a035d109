// For tests of kernels, on a GPU and on the emulator alike: an array in device memory, one allocation a
// tensor, so that an access beside it is seen; and a run of the same test under several orders of blocks and
// threads.
#pragma once
#include <functional>
#include <vector>

#include "llmc/cuda/device.cuh"

template <class T>
class DeviceArray {
public:
    // Not initialized: NaN under the emulator.
    explicit DeviceArray(size_t count) : count(count) {
        void* p = nullptr;
        cudaCheck(cudaMalloc(&p, count * sizeof(T)));
        data = static_cast<T*>(p);
    }
    explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
        cudaCheck(cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice));
        cudaCheck(cudaDeviceSynchronize());  // other streams do not wait for the copy
    }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data); }

    operator T*() { return data; }
    std::vector<T> to_host() const {
        std::vector<T> values(count);
        cudaCheck(cudaDeviceSynchronize());  // this copy does not wait for other streams
        cudaCheck(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }

private:
    T* data = nullptr;
    size_t count;
};

// Runs `test` under `orders` orders, with seeds from EMULATOR_SEED on (default 1). With seed 0, for
// debuggers, only under the ascending order; on a GPU, which has its own order, once.
inline void for_each_order([[maybe_unused]] int orders, const std::function<void()>& test) {
#ifdef __CUDACC__
    test();
#else
    const uint64_t first = emulator::settings().seed;
    for (int i = 0; i < (first == 0 ? 1 : orders); i++) {
        emulator::settings().seed = first + uint64_t(i);
        test();
    }
    emulator::settings().seed = first;
#endif
}
