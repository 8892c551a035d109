// Every kind of mistake that the emulator promises to find, made on purpose: the report must name kernel,
// block, thread and line. A mistake's line is marked `mistake(NAME)`. What only a sanitizer sees, or sees
// better, is expected of the build with it.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "dev/emulator/device_array.h"
#include "dev/emulator/reports.h"

// What the launch throws; empty if nothing.
template <class... P>
std::string report_of(void (*kernel)(P...), const Grid& grid, typename Parameter<P>::type... arguments) {
    try {
        launch(kernel, grid, arguments...);
    } catch (const emulator::Error& error) { return error.what(); }
    return "";
}

std::string in(const char* kernel, const char* block, const char* thread) {
    return std::string("in kernel ") + kernel + ", block " + block + ", thread " + thread +
           "; launched at " __FILE__;
}

bool any_nan(const std::vector<float>& values) {
    return std::any_of(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

// ---- barriers and warp operations

__global__ void divergent_barrier() {
    if (threadIdx.x < 32) {
        __syncthreads();  // mistake(barrier of the first warp)
    } else {
        __syncthreads();  // mistake(barrier of the other warp)
    }
}

TEST(Emulator, ReportsADivergentBarrier) {
    for_each_order(4, [] {
        EXPECT_TRUE(contains(
            report_of(divergent_barrier, Grid{1, 64}),
            {"divergent barrier: thread (", line_of("barrier of the first warp"),
             line_of("barrier of the other warp"), "in kernel divergent_barrier()", "block (0,0,0)"}));
    });
}

__global__ void divergent_shuffle(int* out) {
    int value = int(threadIdx.x);
    if (threadIdx.x == 7) {
        value = __shfl_xor_sync(full_warp, value, 1);  // mistake(shuffle of one lane)
    } else {
        value = __shfl_xor_sync(full_warp, value, 1);  // mistake(shuffle of the others)
    }
    out[threadIdx.x] = value;
}

TEST(Emulator, ReportsADivergentShuffle) {
    DeviceArray<int> out(32);
    for_each_order(4, [&] {
        EXPECT_TRUE(contains(report_of(divergent_shuffle, Grid{1, 32}, out),
                             {"divergent warp operation",
                              "thread (7,0,0) waits in __shfl_xor_sync at " + line_of("shuffle of one lane"),
                              line_of("shuffle of the others")}));
    });
}

__global__ void block_sum_in_a_branch(float* out) {
    float sum = 0.0f;
    if (threadIdx.x < 64) {
        sum = block_sum(1.0f);  // mistake(reduction in a branch)
    }
    __syncthreads();  // mistake(barrier after the branch)
    out[threadIdx.x] = sum;
}

TEST(Emulator, ReportsAReductionAtTheLineOfItsCallNotWithinIt) {
    DeviceArray<float> out(96);
    EXPECT_TRUE(contains(
        report_of(block_sum_in_a_branch, Grid{1, 96}, out),
        {"divergent barrier", line_of("reduction in a branch"), line_of("barrier after the branch")}));
}

__global__ void lane_outside_of_its_mask() {
    if (threadIdx.x >= 15) { return; }
    __syncwarp(threadIdx.x == 3 ? 0x7FF7 : 0x7FFF);  // mistake(own lane not in the mask)
}

TEST(Emulator, ReportsALaneThatIsNotInItsOwnMask) {
    const uint64_t before = emulator::settings().seed;
    emulator::settings().seed = 0;  // lane 3 comes before those that would wait for it in vain
    EXPECT_TRUE(contains(report_of(lane_outside_of_its_mask, Grid{1, 32}),
                         {line_of("own lane not in the mask") + ": wrong mask: the calling lane is not in it",
                          in("lane_outside_of_its_mask()", "(0,0,0)", "(3,0,0)")}));
    emulator::settings().seed = before;
}

__global__ void masks_that_differ(int* out) {
    const unsigned mask = threadIdx.x == 9 ? 0x0000FFFF : full_warp;
    out[threadIdx.x] = __shfl_sync(mask, int(threadIdx.x), 0);  // mistake(masks differ)
}

TEST(Emulator, ReportsMasksThatDiffer) {
    DeviceArray<int> out(32);
    for_each_order(4, [&] {
        EXPECT_TRUE(contains(report_of(masks_that_differ, Grid{1, 32}, out),
                             {line_of("masks differ") + ": wrong mask: thread (", "with mask ffffffff",
                              "thread (9,0,0) waits in __shfl_sync", "with mask 0000ffff"}));
    });
}

__global__ void mask_of_a_lane_that_returned(int* out) {
    if (threadIdx.x == 31) { return; }
    out[threadIdx.x] = __shfl_down_sync(full_warp, int(threadIdx.x), 1);  // mistake(a lane has returned)
}

TEST(Emulator, ReportsAMaskWithALaneThatHasReturned) {
    DeviceArray<int> out(32);
    for_each_order(4, [&] {
        EXPECT_TRUE(
            contains(report_of(mask_of_a_lane_that_returned, Grid{1, 32}, out),
                     {line_of("a lane has returned") + ": wrong mask", "thread (31,0,0) has returned"}));
    });
}

__global__ void source_outside_of_the_mask(int* out) {
    if (threadIdx.x < 16) {
        out[threadIdx.x] =
            __shfl_sync(0xFFFF, int(threadIdx.x), threadIdx.x == 5 ? 20 : 0);  // mistake(source)
    }
}

TEST(Emulator, ReportsAShuffleFromALaneThatIsNotInTheMask) {
    DeviceArray<int> out(32);
    for_each_order(4, [&] {
        EXPECT_TRUE(contains(report_of(source_outside_of_the_mask, Grid{1, 32}, out),
                             {line_of("source") + ": wrong mask: the value comes from lane 20",
                              in("source_outside_of_the_mask(int*)", "(0,0,0)", "(5,0,0)")}));
    });
}

__global__ void parts_of_a_warp_then_all(int* out) {
    int value = int(threadIdx.x);
    if (threadIdx.x < 16) { value = __shfl_xor_sync(0xFFFF, value, 1); }
    out[threadIdx.x] = __shfl_xor_sync(full_warp, value, 16);
}

TEST(Emulator, DoesNotTakeAPartOfAWarpForAMistake) {
    for_each_order(8, [] {
        DeviceArray<int> out(32);
        EXPECT_EQ(report_of(parts_of_a_warp_then_all, Grid{1, 32}, out), "");
        EXPECT_EQ(out.to_host()[16], 1);
        EXPECT_EQ(out.to_host()[1], 17);
    });
}

__global__ void return_before_a_barrier() {
    if (threadIdx.x >= 40) { return; }
    __syncthreads();  // mistake(barrier that some never reach)
}

TEST(Emulator, ReportsADeadlockWithWhoWaitsWhere) {
    for_each_order(4, [] {
        EXPECT_TRUE(contains(report_of(return_before_a_barrier, Grid{1, 64}),
                             {"deadlock",
                              "thread (0,0,0) to (39,0,0) waits in __syncthreads at " +
                                  line_of("barrier that some never reach"),
                              "thread (40,0,0) to (63,0,0) has returned"}));
    });
}

__global__ void barrier_against_shuffle() {
    if (threadIdx.x == 12) {
        __syncthreads();  // mistake(one waits in a barrier)
    } else {
        __syncwarp();  // mistake(and the others for it)
    }
}

TEST(Emulator, ReportsADeadlockBetweenABarrierAndAWarpOperation) {
    for_each_order(4, [] {
        EXPECT_TRUE(contains(
            report_of(barrier_against_shuffle, Grid{1, 32}),
            {"deadlock", "thread (12,0,0) waits in __syncthreads at " + line_of("one waits in a barrier"),
             "thread (13,0,0) to (31,0,0) waits in __syncwarp at " + line_of("and the others for it")}));
    });
}

// ---- addresses

__global__ void misaligned_load(float* out, const float* inp) {
    const bool wrong = blockIdx.x == 2 && threadIdx.x == 5;
    const Pack<float> pack = load_pack(inp + threadIdx.x * 4 + (wrong ? 1 : 0));  // mistake(misaligned load)
    out[blockIdx.x * 32 + threadIdx.x] = pack[0];
}

TEST(Emulator, ReportsAMisalignedAccess) {
    DeviceArray<float> inp(132), out(96);
    for_each_order(4, [&] {
        EXPECT_TRUE(contains(report_of(misaligned_load, Grid{3, 32}, out, inp),
                             {line_of("misaligned load") + ": misaligned access: 16 bytes",
                              in("misaligned_load(float*, float const*)", "(2,0,0)", "(5,0,0)")}));
    });
}

__global__ void misaligned_copy(const float* inp) {
    SHARED(float[132], values);
    copy_async_16(values + threadIdx.x * 4 + (threadIdx.x == 9 ? 2 : 0), inp);  // mistake(misaligned copy)
}

__global__ void matrix_from_global_memory(const float* inp) {
    uint32_t registers[4];
    load_matrix_x4(registers, inp);  // mistake(ldmatrix from global memory)
}

TEST(Emulator, ReportsAddressesThatPtxDoesNotTake) {
    DeviceArray<float> inp(8);
    EXPECT_TRUE(contains(report_of(misaligned_copy, Grid{1, 32}, inp),
                         {line_of("misaligned copy") + ": misaligned access", "thread (9,0,0)"}));
    EXPECT_TRUE(contains(
        report_of(matrix_from_global_memory, Grid{1, 32}, inp),
        {line_of("ldmatrix from global memory") + ": ldmatrix from an address that is not in shared"}));
}

__global__ void write_past_shared_variable(int last) {
    SHARED(int[64], before);  // mistake(variable that is overrun)
    SHARED(int[64], after);
    after[threadIdx.x] = 0;
    __syncthreads();  // mistake(barrier before the overrun)
    int* values = before;
    if (threadIdx.x == 33) { values[last] = 1; }  // mistake(overrun)
    __syncthreads();                              // mistake(barrier after the overrun)
}

TEST(Emulator, ReportsAWritePastASharedVariable) {
    if (has_address_sanitizer) {
        EXPECT_SANITIZER(launch(write_past_shared_variable, Grid{1, 64}, 64),
                         "AddressSanitizer: use-after-poison", "overrun", "thread .33,0,0.");
        return;
    }
    for_each_order(4, [] {
        EXPECT_TRUE(contains(report_of(write_past_shared_variable, Grid{1, 64}, 64),
                             {line_of("barrier after the overrun") + ": wrote past the end of before (" +
                                  line_of("variable that is overrun") + "): its byte 256 of 256",
                              "after it waited at " + line_of("barrier before the overrun"),
                              in("write_past_shared_variable(int)", "(0,0,0)", "(33,0,0)")}));
    });
}

__global__ void too_many_shared_variables() {
    SHARED(char[40 * 1024], first);
    SHARED(char[9 * 1024], second);  // mistake(one too many)
    first[0] = second[0] = 0;
}

__global__ void dynamic_shared_memory() {
    DYNAMIC_SHARED(memory);
    memory[threadIdx.x] = 0;
}

TEST(Emulator, ReportsTooMuchSharedMemory) {
    EXPECT_TRUE(contains(report_of(too_many_shared_variables, Grid{1, 1}),
                         {line_of("one too many") + ": too much shared memory: 50176 bytes",
                          "in kernel too_many_shared_variables()"}));
    EXPECT_TRUE(contains(report_of(dynamic_shared_memory, Grid{1, 1, 100 * 1024}),
                         {"launch of kernel dynamic_shared_memory()", "too much shared memory: 102400"}));
    EXPECT_EQ(report_of(dynamic_shared_memory, Grid{1, 1, 99 * 1024}), "");
}

TEST(Emulator, ReportsALaunchThatNoDeviceTakes) {
    EXPECT_TRUE(contains(report_of(dynamic_shared_memory, Grid{1, 1025, 2000}),
                         {"more threads than a block can have"}));
    EXPECT_TRUE(contains(report_of(dynamic_shared_memory, Grid{0, 32, 2000}), {"an empty grid or block"}));
    EXPECT_TRUE(
        contains(report_of(dynamic_shared_memory, Grid{dim3(1, 65536), 32, 2000}), {"more blocks than"}));
}

__global__ void write_at(float* out, long index) {
    if (blockIdx.x == 1 && threadIdx.x == 17) { out[index] = 1.0f; }  // mistake(write at an index)
}

TEST(Emulator, ReportsAWritePastAnAllocation) {
    DeviceArray<float> out(1026);
    if (has_address_sanitizer) {
        EXPECT_SANITIZER(launch(write_at, Grid{2, 32}, out, 1026), "AddressSanitizer: use-after-poison",
                         "write at an index", "block .1,0,0., thread .17,0,0.");
        EXPECT_SANITIZER(launch(write_at, Grid{2, 32}, out, -1), "AddressSanitizer: use-after-poison",
                         "write at an index", "block .1,0,0., thread .17,0,0.");
        return;
    }
    EXPECT_TRUE(contains(report_of(write_at, Grid{2, 32}, out, 1026),
                         {"kernel write_at(float*, long), launched at " __FILE__,
                          "wrote past the end of an allocation of 4104 bytes"}));
}

TEST(Emulator, ReportsAWriteFarPastAnAllocationAndIntoFreedMemory) {
    if (has_address_sanitizer || has_thread_sanitizer) { GTEST_SKIP() << "the sanitizer ends the process"; }
    DeviceArray<float> out(1024);
    EXPECT_TRUE(contains(report_of(write_at, Grid{2, 32}, out, 1026),
                         {"invalid access: 8 bytes past the end of an allocation of 4096 bytes",
                          in("write_at(float*, long)", "(1,0,0)", "(17,0,0)")}));
    EXPECT_TRUE(contains(report_of(write_at, Grid{2, 32}, DeviceArray<float>(1024), -256),
                         {"past the end of an allocation of 4096 bytes, or 1024 bytes before the next one"}));
    float* freed = DeviceArray<float>(1024);
    EXPECT_TRUE(
        contains(report_of(write_at, Grid{2, 32}, freed, 0), {"invalid access: the memory has been freed"}));
    EXPECT_TRUE(
        contains(report_of(write_at, Grid{2, 32}, nullptr, 0), {"the address is not in device memory"}));
}

__global__ void read_at(float* out, const float* inp, long index) {
    if (threadIdx.x == 17) { out[0] = inp[index]; }  // mistake(read at an index)
}

TEST(Emulator, ReadsNanOrReportsAReadPastAnAllocation) {
    DeviceArray<float> inp(std::vector<float>(1026, 1.0f)), out(1);
    if (has_address_sanitizer) {
        EXPECT_SANITIZER(launch(read_at, Grid{1, 32}, out, inp, 1026), "AddressSanitizer: use-after-poison",
                         "read at an index", "thread .17,0,0.");
        return;
    }
    launch(read_at, Grid{1, 32}, out, inp, 1026);
    EXPECT_TRUE(any_nan(out.to_host()));
    if (has_thread_sanitizer) {
        EXPECT_SANITIZER(launch(read_at, Grid{1, 32}, out, inp, 1088), "SEGV", "read at an index",
                         "thread .17,0,0.");
        return;
    }
    EXPECT_TRUE(contains(
        report_of(read_at, Grid{1, 32}, out, inp, 1088),
        {"invalid access: 248 bytes past the end of an allocation of 4104 bytes", "thread (17,0,0)"}));
}

__global__ void divide(int* out, int by) { out[threadIdx.x] = 12 / by; }

__global__ void large_local_array(int* out) {
    volatile int local[40000];
    for (int i = 40000; i-- > 0;) { local[i] = i; }
    out[threadIdx.x] = local[0];
}

TEST(Emulator, ReportsADivisionByZeroAndAStackThatOverflows) {
    if (has_address_sanitizer || has_thread_sanitizer) { GTEST_SKIP() << "the sanitizer ends the process"; }
    DeviceArray<int> out(1);
    EXPECT_TRUE(contains(report_of(divide, Grid{1, 1}, out, 0), {"integer division by zero"}));
    EXPECT_TRUE(contains(report_of(large_local_array, Grid{1, 1}, out), {"stack overflow"}));
}

// ---- values that are not there yet

__global__ void read_before_write(float* out) {
    SHARED(float[64], values);
    if (threadIdx.x != 20) { values[threadIdx.x] = 1.0f; }
    __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = values[threadIdx.x];
}

TEST(Emulator, SharedMemoryThatNobodyWroteReadsAsNanInEveryBlock) {
    DeviceArray<float> out(3 * 64);
    for_each_order(4, [&] {
        launch(read_before_write, Grid{3, 64}, out);
        const std::vector<float> values = out.to_host();
        for (int i = 0; i < 3 * 64; i++) { EXPECT_EQ(std::isnan(values[i]), i % 64 == 20) << i; }
    });
}

template <bool waits>
__global__ void copy_through_shared(float* out, const float* inp) {
    SHARED(float[256], values);
    copy_async_16(values + threadIdx.x * 4, inp + threadIdx.x * 4);
    copy_async_commit();
    if (waits) { copy_async_wait<0>(); }
    __syncthreads();
    out[threadIdx.x] = values[255 - threadIdx.x];  // mistake(read of a copy on its way)
}

TEST(Emulator, AnAsynchronousCopyArrivesAtItsWaitAndNoSooner) {
    std::vector<float> inp(256);
    for (int i = 0; i < 256; i++) { inp[i] = float(i); }
    DeviceArray<float> device_inp(inp), out(64);
    for_each_order(4, [&] {
        launch(copy_through_shared<true>, Grid{1, 64}, out, device_inp);
        EXPECT_EQ(out.to_host()[0], 255.0f);
    });
    if (has_address_sanitizer || has_thread_sanitizer) {
        EXPECT_SANITIZER(launch(copy_through_shared<false>, Grid{1, 64}, out, device_inp),
                         "AddressSanitizer: use-after-poison|ThreadSanitizer: data race",
                         "read of a copy on its way", "thread");
        return;
    }
    for_each_order(4, [&] {
        launch(copy_through_shared<false>, Grid{1, 64}, out, device_inp);
        EXPECT_TRUE(any_nan(out.to_host()));
    });
}

__global__ void copy_without_commit(float* out, const float* inp) {
    SHARED(float[4], values);
    copy_async_16(values, inp);
    copy_async_wait<0>();
    out[0] = values[0];
}

TEST(Emulator, ACopyThatWasNeverCommittedIsNotWaitedFor) {
    if (has_address_sanitizer) { GTEST_SKIP() << "the sanitizer ends the process"; }
    DeviceArray<float> inp(std::vector<float>(4, 1.0f)), out(1);
    launch(copy_without_commit, Grid{1, 1}, out, inp);
    EXPECT_TRUE(any_nan(out.to_host()));
}

// ---- races

__global__ void no_barrier_after_write(float* out) {
    SHARED(float[128], values);
    values[threadIdx.x] = float(threadIdx.x);
    out[threadIdx.x] = values[(threadIdx.x + 32) % 128];  // mistake(read without a barrier)
}

TEST(Emulator, AMissingBarrierBetweenWriteAndReadShowsUnderEveryOrder) {
    DeviceArray<float> out(128);
    if (has_thread_sanitizer) {
        EXPECT_SANITIZER(launch(no_barrier_after_write, Grid{1, 128}, out), "ThreadSanitizer: data race",
                         "read without a barrier", "thread");
        return;
    }
    for_each_order(10, [&] {
        launch(no_barrier_after_write, Grid{1, 128}, out);
        EXPECT_TRUE(any_nan(out.to_host()));
    });
}

// Three tiles through one buffer, without the barrier that keeps the next tile from overwriting the last.
__global__ void no_barrier_before_reuse(float* out, const float* inp) {
    SHARED(float[128], values);
    float sum = 0.0f;
    for (int tile = 0; tile < 3; tile++) {
        values[threadIdx.x] = inp[tile * 128 + threadIdx.x];  // mistake(overwritten while it is read)
        __syncthreads();
        sum += values[(threadIdx.x + 32) % 128];
    }
    out[threadIdx.x] = sum;
}

TEST(Emulator, AMissingBarrierBeforeTheReuseOfABufferShows) {
    std::vector<float> inp(3 * 128), expected(128);
    for (int i = 0; i < 3 * 128; i++) { inp[i] = float(i / 128 * 1000 + i % 128); }
    for (int i = 0; i < 128; i++) { expected[i] = float(3000 + 3 * ((i + 32) % 128)); }
    DeviceArray<float> device_inp(inp), out(128);
    if (has_thread_sanitizer) {
        EXPECT_SANITIZER(launch(no_barrier_before_reuse, Grid{1, 128}, out, device_inp),
                         "ThreadSanitizer: data race", "overwritten while it is read", "thread");
        return;
    }
    int found = 0, orders = 0;
    for_each_order(10, [&] {
        launch(no_barrier_before_reuse, Grid{1, 128}, out, device_inp);
        found += out.to_host() != expected;
        orders++;
    });
    EXPECT_EQ(found, orders);
}

__global__ void shared_values_without_syncwarp(int* out) {
    SHARED(int[32], values);
    values[threadIdx.x] = int(threadIdx.x);
    const int unrelated = __shfl_xor_sync(full_warp, int(threadIdx.x), 1);
    out[threadIdx.x] = values[31 - threadIdx.x] + unrelated;  // mistake(a shuffle orders no memory)
}

TEST(Emulator, ThreadSanitizerKnowsThatAShuffleOrdersNoMemory) {
    if (!has_thread_sanitizer) { GTEST_SKIP() << "found in the build with -fsanitize=thread only"; }
    DeviceArray<int> out(32);
    EXPECT_SANITIZER(launch(shared_values_without_syncwarp, Grid{1, 32}, out), "ThreadSanitizer: data race",
                     "a shuffle orders no memory", "thread");
}

template <bool atomically>
__global__ void count_threads(int* total) {
    if (atomically) {
        atomicAdd(total, 1);
    } else {
        *total += 1;  // mistake(addition that is not atomic)
    }
}

TEST(Emulator, ThreadSanitizerReportsARaceOnGlobalMemoryWithinAndBetweenBlocks) {
    if (!has_thread_sanitizer) { GTEST_SKIP() << "found in the build with -fsanitize=thread only"; }
    DeviceArray<int> total(std::vector<int>{0});
    EXPECT_SANITIZER(launch(count_threads<false>, Grid{1, 2}, total), "ThreadSanitizer: data race",
                     "addition that is not atomic", "block .0,0,0.");
    EXPECT_SANITIZER(launch(count_threads<false>, Grid{2, 1}, total), "ThreadSanitizer: data race",
                     "addition that is not atomic", "block");
}

TEST(Emulator, OneLaunchAfterAnotherIsNoRace) {
    DeviceArray<int> total(std::vector<int>{0});
    launch(count_threads<true>, Grid{9, 40}, total);
    launch(count_threads<false>, Grid{1, 1}, total);
    launch(count_threads<true>, Grid{3, 40}, total);
    EXPECT_EQ(total.to_host()[0], 9 * 40 + 1 + 3 * 40);
}

// ---- the order, and what a test sees of the device

__global__ void note_order(int* order, int* next) {
    order[atomicAdd(next, 1)] = int(blockIdx.x * blockDim.x + threadIdx.x);
    __syncthreads();
    order[atomicAdd(next, 1)] = int(blockIdx.x * blockDim.x + threadIdx.x);
}

std::vector<int> order_of(uint64_t seed) {
    const uint64_t before = emulator::settings().seed;
    emulator::settings().seed = seed;
    DeviceArray<int> order(4 * 64 * 2), next(std::vector<int>{0});
    launch(note_order, Grid{4, 64}, order, next);
    emulator::settings().seed = before;
    return order.to_host();
}

TEST(Emulator, TheSeedDecidesTheOrderAndSeedZeroIsAscending) {
    EXPECT_EQ(order_of(5), order_of(5));
    EXPECT_NE(order_of(5), order_of(6));
    const std::vector<int> ascending = order_of(0);
    for (int i = 0; i < 4 * 64 * 2; i++) { EXPECT_EQ(ascending[i], i / 128 * 64 + i % 64); }
}

TEST(Emulator, RunsOnAfterAReport) {
    DeviceArray<float> out(128);
    for (int i = 0; i < 20; i++) { EXPECT_NE(report_of(return_before_a_barrier, Grid{1, 64}), ""); }
    EXPECT_EQ(report_of(read_before_write, Grid{2, 64}, out), "");
}

TEST(Emulator, LaunchesFromAnyThreadOfTheHostAndReportsThere) {
    std::string report;
    DeviceArray<int> total(std::vector<int>{0});
    std::thread other([&] {
        launch(count_threads<true>, Grid{2, 40}, total);
        report = report_of(return_before_a_barrier, Grid{1, 64});
    });
    other.join();
    launch(count_threads<true>, Grid{1, 1}, total);
    EXPECT_EQ(total.to_host()[0], 81);
    EXPECT_TRUE(contains(report, {"deadlock", line_of("barrier that some never reach")}));
}

TEST(Emulator, NewDeviceMemoryIsNanAndNoAddressIsUsedTwice) {
    float* before = nullptr;
    for (int i = 0; i < 3; i++) {
        DeviceArray<float> memory(1000);
        EXPECT_NE(static_cast<float*>(memory), before);
        for (float value : memory.to_host()) { EXPECT_TRUE(std::isnan(value)); }
        before = memory;
    }
}

TEST(Emulator, RefusesCopiesThatCudaRefuses) {
    DeviceArray<float> memory(10);
    float host[20] = {};
    EXPECT_EQ(cudaMemcpy(memory, host, 44, cudaMemcpyHostToDevice),
              cudaErrorInvalidValue);  // 4 bytes too many
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(memory, host, 40, cudaMemcpyDeviceToHost),
              cudaErrorInvalidValue);  // the other way round
    EXPECT_EQ(cudaMemset(memory, 0, 41), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFree(host), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemset(memory, 0, 40), cudaSuccess);
    EXPECT_EQ(memory.to_host(), std::vector<float>(10, 0.0f));
    cudaGetLastError();
}
