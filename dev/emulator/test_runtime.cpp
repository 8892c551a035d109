// Streams that are threads: what CUDA promises holds under every seed, and each kind of mistake that a
// program can make with them, made on purpose, is seen: by thread sanitizer always, at its line; in the other
// builds as a wrong result under some seeds, since the adversary runs streams ahead of each other.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "dev/emulator/device_array.h"
#include "dev/emulator/reports.h"

// Under thread sanitizer every seed sees what there is, and a new stream's first kernel is slow (its fibers).
constexpr int n = 1000, seeds = has_thread_sanitizer ? 4 : 20;

__global__ void fill(float* out, float value) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) { out[i] = value + float(i % 7); }  // mistake(fill)
}

__global__ void scale(float* out, const float* inp, float factor) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) { out[i] = factor * inp[i]; }  // mistake(scale)
}

// Runs until the host, or another kernel, sets *gate.
__global__ void wait_for_gate(const int* gate) {
    while (__atomic_load_n(gate, __ATOMIC_RELAXED) == 0) { usleep(100); }
}
__global__ void open_gate(int* gate) { __atomic_store_n(gate, 1, __ATOMIC_RELAXED); }

__global__ void write_at(float* out, long index) {
    if (blockIdx.x == 1 && threadIdx.x == 17) { out[index] = 1.0f; }  // mistake(write at an index)
}

class TestStream {
public:
    explicit TestStream(unsigned flags = cudaStreamNonBlocking) {
        cudaCheck(cudaStreamCreateWithFlags(&stream, flags));
    }
    ~TestStream() { cudaStreamDestroy(stream); }
    operator cudaStream_t() const { return stream; }

private:
    cudaStream_t stream = nullptr;
};

class TestEvent {
public:
    explicit TestEvent(unsigned flags = cudaEventDisableTiming) {
        cudaCheck(cudaEventCreateWithFlags(&event, flags));
    }
    ~TestEvent() { cudaEventDestroy(event); }
    operator cudaEvent_t() const { return event; }

private:
    cudaEvent_t event = nullptr;
};

template <class T>
class PinnedArray {
public:
    explicit PinnedArray(int count) : count(count) {
        void* p = nullptr;
        cudaCheck(cudaMallocHost(&p, size_t(count) * sizeof(T)));
        data = static_cast<T*>(p);
    }
    ~PinnedArray() { cudaFreeHost(data); }
    operator T*() { return data; }
    T* begin() { return data; }
    T* end() { return data + count; }

private:
    T* data = nullptr;
    int count;
};

// A kernel on a stream does not end before open().
class Gate {
public:
    explicit Gate(cudaStream_t stream) : flag(1) {
        *flag = 0;
        launch(wait_for_gate, Grid{1, 1, 0, stream}, static_cast<int*>(flag));
    }
    ~Gate() { open(); }
    void open() { __atomic_store_n(static_cast<int*>(flag), 1, __ATOMIC_RELAXED); }

private:
    PinnedArray<int> flag;
};

Grid on(cudaStream_t stream, Site site = Site::here()) { return Grid(dim3(32), dim3(32), 0, stream, site); }

class Runtime : public testing::Test {
protected:
    void SetUp() override {
        before = emulator::settings();
        emulator::settings().asynchronous = true;
    }
    void TearDown() override {
        cudaDeviceReset();
        emulator::settings() = before;
    }

private:
    emulator::Settings before;
};

// Ends the process, or not.
#define EXPECT_REPORT(statement, expression)                  \
    do {                                                      \
        testing::FLAGS_gtest_death_test_style = "threadsafe"; \
        EXPECT_DEATH(statement, expression);                  \
    } while (false)

// ---- two streams and the host

enum class Mistake { none, no_wait, no_record, late_record, no_wait_back, early_read };

// A kernel fills a buffer, another stream copies it, the first scales the copy and fetches the result: three
// rounds. How many values come out wrong.
int wrong_values(Mistake mistake) {
    DeviceArray<float> produced(n), copied(n), result(n);
    PinnedArray<float> host(n);
    TestStream compute, transfer;
    TestEvent filled, copy_done, arrived;
    int wrong = 0;
    for (int round = 0; round < 3; round++) {
        launch(fill, on(compute), produced, float(round));
        const bool records = mistake != Mistake::no_record && mistake != Mistake::late_record;
        if (records) { cudaCheck(cudaEventRecord(filled, compute)); }
        if (mistake != Mistake::no_wait) { cudaCheck(cudaStreamWaitEvent(transfer, filled)); }
        if (mistake == Mistake::late_record) { cudaCheck(cudaEventRecord(filled, compute)); }
        const auto kind = cudaMemcpyDeviceToDevice;
        cudaCheck(cudaMemcpyAsync(copied, produced, n * sizeof(float), kind, transfer));  // mistake(copy)
        cudaCheck(cudaEventRecord(copy_done, transfer));
        if (mistake != Mistake::no_wait_back) { cudaCheck(cudaStreamWaitEvent(compute, copy_done)); }
        launch(scale, on(compute), result, copied, 2.0f);
        cudaCheck(cudaMemcpyAsync(host, result, n * sizeof(float), cudaMemcpyDeviceToHost, compute));
        cudaCheck(cudaEventRecord(arrived, compute));
        if (mistake != Mistake::early_read) { cudaCheck(cudaEventSynchronize(arrived)); }
        for (int i = 0; i < n; i++) {
            wrong += host[i] != 2.0f * (float(round) + float(i % 7));  // mistake(read by the host)
        }
        cudaCheck(cudaDeviceSynchronize());
    }
    return wrong;
}

TEST_F(Runtime, StreamsOrderedByEventsAreRightUnderEverySeed) {
    for_each_order(seeds, [] { EXPECT_EQ(wrong_values(Mistake::none), 0); });
}

// `line`: of one of the two accesses that are not ordered; in the build with thread sanitizer.
void expect_seen(Mistake mistake, const std::string& line) {
    if (has_thread_sanitizer) {
        EXPECT_REPORT(wrong_values(mistake), "ThreadSanitizer: data race.*" + line);
        return;
    }
    int seen = 0;
    for_each_order(seeds, [&] { seen += wrong_values(mistake) > 0; });
    testing::Test::RecordProperty("seeds_that_show_it", seen);
    printf("shown by %d of %d seeds\n", seen, seeds);
    EXPECT_GT(seen, seeds / 4);
}

TEST_F(Runtime, AMissingWaitIsSeen) { expect_seen(Mistake::no_wait, line_of("copy")); }
TEST_F(Runtime, AMissingRecordIsSeen) { expect_seen(Mistake::no_record, line_of("copy")); }
TEST_F(Runtime, ARecordBehindTheWaitIsSeen) { expect_seen(Mistake::late_record, line_of("copy")); }
TEST_F(Runtime, AMissingWaitForTheWayBackIsSeen) { expect_seen(Mistake::no_wait_back, line_of("scale")); }
TEST_F(Runtime, AReadBeforeTheDataArrivedIsSeen) {
    expect_seen(Mistake::early_read, line_of("read by the host"));
}

// The wait is there, and the buffer is used again too soon: what the host enqueues is one round ahead.
int wrong_values_of_a_reused_buffer(bool waits) {
    DeviceArray<float> buffer(n), sums(n);
    PinnedArray<float> host(n);
    TestStream produce, consume;
    TestEvent produced, consumed;
    for (int round = 0; round < 4; round++) {
        if (waits) { cudaCheck(cudaStreamWaitEvent(produce, consumed)); }
        launch(fill, on(produce), buffer, float(round));
        cudaCheck(cudaEventRecord(produced, produce));
        cudaCheck(cudaStreamWaitEvent(consume, produced));
        launch(scale, on(consume), sums, buffer, float(round));
        cudaCheck(cudaEventRecord(consumed, consume));
    }
    cudaCheck(cudaMemcpyAsync(host, sums, n * sizeof(float), cudaMemcpyDeviceToHost, consume));
    cudaCheck(cudaStreamSynchronize(consume));
    int wrong = 0;
    for (int i = 0; i < n; i++) { wrong += host[i] != 3.0f * (3.0f + float(i % 7)); }
    cudaCheck(cudaDeviceSynchronize());
    return wrong;
}

TEST_F(Runtime, ThreadSanitizerSeesABufferThatIsReusedTooSoon) {
    for_each_order(seeds, [] { EXPECT_EQ(wrong_values_of_a_reused_buffer(true), 0); });
    if (!has_thread_sanitizer) { GTEST_SKIP() << "found in the build with -fsanitize=thread only"; }
    EXPECT_REPORT(wrong_values_of_a_reused_buffer(false), "ThreadSanitizer: data race.*" + line_of("fill"));
}

// ---- events

TEST_F(Runtime, AnEventIsCompleteWhenTheWorkBeforeItIs) {
    TestStream stream;
    TestEvent event;
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess) << "never recorded";
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(stream, event), cudaSuccess);
    Gate gate(stream);
    cudaCheck(cudaEventRecord(event, stream));
    EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady)
        << "as CUDA's: an error that stays until it is asked for";
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    gate.open();
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
}

TEST_F(Runtime, AWaitIsForTheRecordBeforeItNotForALaterOne) {
    TestStream first, second;
    TestEvent event;
    cudaCheck(cudaEventRecord(event, first));
    cudaCheck(cudaStreamWaitEvent(second, event));
    Gate gate(first);
    cudaCheck(cudaEventRecord(event, first));
    EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
    gate.open();
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
    cudaGetLastError();
}

TEST_F(Runtime, WhatWaitsForAnEventOutlivesIt) {
    DeviceArray<float> values(n);
    TestStream first, second;
    {
        TestEvent event;
        launch(fill, on(first), values, 1.0f);
        cudaCheck(cudaEventRecord(event, first));
        cudaCheck(cudaStreamWaitEvent(second, event));
    }
    launch(scale, on(second), values, values, 2.0f);
    EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
    EXPECT_EQ(values.to_host()[1], 4.0f);
}

TEST_F(Runtime, EventsTellTheTimeBetweenThem) {
    TestStream stream;
    TestEvent from(cudaEventDefault), to(cudaEventDefault), without_time;
    float milliseconds = 0.0f;
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, from, to), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    cudaCheck(cudaEventRecord(from, stream));
    Gate gate(stream);
    cudaCheck(cudaEventRecord(to, stream));
    cudaCheck(cudaEventSynchronize(from));
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, from, to), cudaErrorNotReady);
    usleep(20000);
    gate.open();
    cudaCheck(cudaEventSynchronize(to));
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, from, to), cudaSuccess);
    EXPECT_GE(milliseconds, 20.0f);
    EXPECT_LE(milliseconds, 10000.0f);
    cudaCheck(cudaEventRecord(without_time, stream));
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, from, without_time), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
}

TEST_F(Runtime, RefusesWhatHasBeenDestroyed) {
    cudaStream_t stream;
    cudaEvent_t event;
    cudaCheck(cudaStreamCreate(&stream));
    cudaCheck(cudaEventCreate(&event));
    cudaCheck(cudaEventDestroy(event));
    EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
    cudaCheck(cudaStreamDestroy(stream));
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
    EXPECT_THROW(launch(open_gate, Grid{1, 1, 0, stream}, nullptr), emulator::Error);
    cudaGetLastError();
}

// ---- streams

TEST_F(Runtime, ADestroyedStreamFinishesItsWork) {
    DeviceArray<float> values(n);
    for_each_order(4, [&] {
        {
            TestStream stream;
            for (int i = 0; i < 5; i++) { launch(fill, on(stream), values, float(i)); }
        }
        cudaCheck(cudaDeviceSynchronize());
        EXPECT_EQ(values.to_host()[8], 5.0f);
    });
}

TEST_F(Runtime, KernelsOfTwoStreamsRunAtTheSameTime) {
    DeviceArray<int> gate(std::vector<int>{0});
    cudaCheck(cudaDeviceSynchronize());
    for_each_order(4, [&] {
        TestStream first, second;
        launch(wait_for_gate, Grid{1, 1, 0, first}, gate);
        launch(open_gate, Grid{1, 1, 0, second}, gate);
        EXPECT_EQ(cudaStreamSynchronize(first), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
    });
}

__global__ void sum_in_shared_memory(float* out, const float* inp) {
    for (int i = 0; i < 8; i++) {
        const float sum = block_sum(inp[threadIdx.x]);
        if (threadIdx.x == 0) { out[i] = sum; }
    }
}

TEST_F(Runtime, BlocksOfSeveralStreamsDoNotTouchEachOther) {
    const std::vector<float> ones(128, 1.0f), twos(128, 2.0f);
    DeviceArray<float> one(ones), two(twos), first_sum(8), second_sum(8);
    cudaCheck(cudaDeviceSynchronize());
    for_each_order(4, [&] {
        TestStream first, second;
        for (int i = 0; i < 10; i++) {
            launch(sum_in_shared_memory, Grid{1, 128, 0, first}, first_sum, one);
            launch(sum_in_shared_memory, Grid{1, 128, 0, second}, second_sum, two);
        }
        cudaCheck(cudaDeviceSynchronize());
        EXPECT_EQ(first_sum.to_host(), std::vector<float>(8, 128.0f));
        EXPECT_EQ(second_sum.to_host(), std::vector<float>(8, 256.0f));
    });
}

TEST_F(Runtime, BlockingStreamsAndTheDefaultStreamWaitForEachOther) {
    for_each_order(seeds, [] {
        DeviceArray<float> values(n);
        TestStream first(cudaStreamDefault), second(cudaStreamDefault);
        launch(fill, on(first), values, 1.0f);
        launch(scale, on(nullptr), values, values, 2.0f);
        launch(scale, on(second), values, values, 3.0f);
        cudaCheck(cudaStreamSynchronize(second));
        EXPECT_EQ(values.to_host()[2], 18.0f);
    });
}

TEST_F(Runtime, TheDefaultStreamCanBeForbidden) {
    DeviceArray<float> values(n);
    TestEvent event;
    emulator::settings().no_default_stream = true;
    EXPECT_THROW(launch(fill, on(nullptr), values, 1.0f), emulator::Error);
    EXPECT_THROW(cudaMemsetAsync(values, 0, 4, nullptr), emulator::Error);
    EXPECT_THROW(cudaEventRecord(event, nullptr), emulator::Error);
    EXPECT_EQ(cudaMemset(values, 0, 4), cudaSuccess) << "names no stream";
}

// ---- memory and copies

TEST_F(Runtime, PinnedMemoryIsNanWhenNew) {
    PinnedArray<float> memory(100);
    for (float value : memory) { EXPECT_TRUE(std::isnan(value)); }
    cudaPointerAttributes attributes;
    cudaCheck(cudaPointerGetAttributes(&attributes, memory));
    EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
    float pageable = 0.0f;
    cudaCheck(cudaPointerGetAttributes(&attributes, &pageable));
    EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
    EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue) << "cudaFreeHost's";
    cudaGetLastError();
}

TEST_F(Runtime, PageableMemoryIsReadBeforeAnAsynchronousCopyReturnsAndWrittenToo) {
    for_each_order(seeds, [] {
        DeviceArray<float> device(n);
        std::vector<float> host(n, 1.0f);
        TestStream stream;
        cudaCheck(cudaMemcpyAsync(device, host.data(), n * sizeof(float), cudaMemcpyHostToDevice, stream));
        host.assign(n, 2.0f);
        cudaCheck(cudaMemcpyAsync(host.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost, stream));
        EXPECT_EQ(host, std::vector<float>(n, 1.0f));
    });
}

// How many values on the device are not what pinned memory held at the call.
int changed_too_early(bool waits) {
    DeviceArray<float> device(n);
    PinnedArray<float> host(n);
    for (float& value : host) { value = 1.0f; }
    TestStream stream;
    cudaCheck(cudaMemcpyAsync(device, host, n * sizeof(float), cudaMemcpyHostToDevice, stream));
    if (waits) { cudaCheck(cudaStreamSynchronize(stream)); }
    for (float& value : host) {
        value = 2.0f;  // mistake(source changed)
    }
    cudaCheck(cudaStreamSynchronize(stream));
    int changed = 0;
    for (float value : device.to_host()) { changed += value != 1.0f; }
    return changed;
}

TEST_F(Runtime, AChangeToPinnedMemoryThatIsStillCopiedIsSeen) {
    for_each_order(seeds, [] { EXPECT_EQ(changed_too_early(true), 0); });
    if (has_thread_sanitizer) {
        EXPECT_REPORT(changed_too_early(false), "ThreadSanitizer: data race.*" + line_of("source changed"));
        return;
    }
    int seen = 0;
    for_each_order(seeds, [&] { seen += changed_too_early(false) > 0; });
    EXPECT_GT(seen, seeds / 4);
}

TEST_F(Runtime, CopiesRowsOfTwoPitches) {
    for (int pinned = 0; pinned < 2; pinned++) {
        std::vector<int> from = {1, 2, 9, 3, 4, 9, 5, 6, 9}, to(12, 0);
        if (pinned) { cudaCheck(cudaHostRegister(from.data(), 36, cudaHostRegisterDefault)); }
        DeviceArray<int> device(std::vector<int>(12, 0));
        cudaCheck(cudaDeviceSynchronize());
        TestStream stream;
        const auto up = cudaMemcpyHostToDevice, down = cudaMemcpyDeviceToHost;
        EXPECT_EQ(cudaMemcpy2DAsync(device, 16, from.data(), 12, 8, 3, up, stream), cudaSuccess);
        EXPECT_EQ(cudaMemcpy2DAsync(to.data(), 16, device, 16, 16, 3, down, stream), cudaSuccess);
        EXPECT_EQ(to, std::vector<int>({1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0, 0}));
        EXPECT_EQ(cudaMemcpy2DAsync(to.data(), 16, device, 16, 16, 4, down, stream), cudaErrorInvalidValue);
        cudaGetLastError();
        if (pinned) { cudaCheck(cudaHostUnregister(from.data())); }
    }
}

TEST_F(Runtime, FreeingMemoryWaitsForTheDevice) {
    for_each_order(seeds, [] {
        auto values = std::make_unique<DeviceArray<float>>(n);
        TestStream stream;
        for (int i = 0; i < 3; i++) { launch(fill, on(stream), *values, 1.0f); }
        values.reset();
        EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
    });
}

void touch_device_memory() {
    emulator::settings().asynchronous = true;
    float* values = nullptr;
    cudaCheck(cudaMalloc(&values, 4000));
    TestStream stream;
    launch(fill, on(stream), values, 1.0f);
    cudaCheck(cudaStreamSynchronize(stream));
    volatile float value = values[5];  // mistake(host access)
    _exit(value == 0.0f);
}

TEST_F(Runtime, TheHostCannotTouchDeviceMemory) {
    if (has_address_sanitizer || has_thread_sanitizer) {
        EXPECT_REPORT(touch_device_memory(), "SEGV.*" + line_of("host access"));
    } else {
        EXPECT_REPORT(touch_device_memory(),
                      "device memory, which the host must not touch: an allocation of 4000 bytes");
    }
    DeviceArray<float> values(n);
    TestStream stream;
    cudaCheck(cudaMemsetAsync(values, 0, n * sizeof(float), stream));  // and it is open again
    cudaCheck(cudaStreamSynchronize(stream));
    EXPECT_EQ(values.to_host()[0], 0.0f);
}

TEST_F(Runtime, TheHostCanTouchDeviceMemoryWhereItIsNotProtected) {
    emulator::settings().protect = false;
    DeviceArray<float> values(n);
    cudaCheck(cudaDeviceSynchronize());
    EXPECT_TRUE(std::isnan(*static_cast<float*>(values)));
}

// ---- mistakes in kernels

__global__ void divergent_barrier() {
    if (threadIdx.x == 0) { __syncthreads(); }  // mistake(barrier of one thread)
}

TEST_F(Runtime, AMistakeInAKernelFailsEveryCallFromThenOn) {
    DeviceArray<float> values(n);
    TestStream stream, other;
    testing::internal::CaptureStderr();
    launch(divergent_barrier, Grid{1, 64, 0, stream});
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
    const std::string report = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(
        contains(report, {"emulator: deadlock", line_of("barrier of one thread"), "launched at " __FILE__}));
    EXPECT_TRUE(contains(cudaGetErrorString(cudaErrorLaunchFailure),
                         {"unspecified launch failure: deadlock", line_of("barrier of one thread")}));
    EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
    EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure) << "it stays";
    EXPECT_EQ(cudaStreamSynchronize(other), cudaErrorLaunchFailure);
    EXPECT_EQ(cudaMemsetAsync(values, 0, 4, other), cudaErrorLaunchFailure);
    try {
        launch(fill, on(other), values, 1.0f);
        ADD_FAILURE() << "a launch after a mistake";
    } catch (const std::runtime_error& error) {
        EXPECT_TRUE(contains(error.what(), {__FILE__, "unspecified launch failure: deadlock"}));
    }
    cudaDeviceReset();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

void write_into(float* p, long index) {
    emulator::settings().asynchronous = true;
    TestStream stream;
    launch(write_at, Grid{2, 32, 0, stream}, p, index);
    fprintf(stderr, "%s\n", cudaGetErrorString(cudaStreamSynchronize(stream)));
    _exit(1);
}

TEST_F(Runtime, AKernelThatUsesFreedMemoryIsReported) {
    float* freed = DeviceArray<float>(1024);
    const std::string report = has_address_sanitizer  ? "use-after-poison.*" + line_of("write at an index")
                               : has_thread_sanitizer ? "SEGV.*" + line_of("write at an index")
                                                      : "invalid access: the memory has been freed";
    EXPECT_REPORT(write_into(freed, 0), report + ".*in kernel .*write_at.*thread .17,0,0.");
}

TEST_F(Runtime, AWriteBesideAnAllocationIsReported) {
    DeviceArray<float> values(1026);
    const std::string report = has_address_sanitizer ? "use-after-poison.*" + line_of("write at an index")
                                                     : "wrote past the end of an allocation of 4104 bytes";
    EXPECT_REPORT(write_into(values, 1026), report);
}

TEST_F(Runtime, ALaunchThatNoDeviceTakesThrowsAtTheLaunch) {
    TestStream stream;
    EXPECT_THROW(launch(divergent_barrier, Grid{1, 1025, 0, stream}), emulator::Error);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}
