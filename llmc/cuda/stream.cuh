// Stream, Event and Timestamp on a GPU: a cudaStream_t and cudaEvent_ts with an owner, and a stream whose
// work needs the host in between.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "llmc/cpu/stream.h"
#include "llmc/cuda/buffer.cuh"
#include "llmc/cuda/device.cuh"

namespace cuda {

// A cudaEvent_t with owners. Streams that already wait for it keep waiting after it is destroyed.
using EventHandle = std::shared_ptr<CUevent_st>;
inline EventHandle new_event(unsigned flags) {
    cudaEvent_t event;
    cudaCheck(cudaEventCreateWithFlags(&event, flags));
    return {event, cudaEventDestroy};
}

// Whether the status that cudaEventQuery or cudaStreamQuery returned says that all is complete.
inline bool is_complete(cudaError_t status) { return !failed_with(cudaErrorNotReady, status); }

// Blocks the host until `query` reports completion.
//
// CUDA's own waits spin, and the host waits for most of each step. Events that sleep instead
// (cudaEventBlockingSync) are slower between streams, according to the documentation of
// cudaEventCreateWithFlags. So the host polls, and naps in between. A short wait ends without a nap; a longer
// one ends at most a nap late (50 us, plus Linux's latency), and by then the next step has been enqueued.
template <class Query>
inline void wait_until_complete(Query query) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point patience = Clock::now() + std::chrono::microseconds(50);
    while (!is_complete(query())) {
        if (Clock::now() > patience) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
    }
}

// A point in a stream. Recording it again makes a new point; earlier waits are still for the old one.
// An event that was never recorded is complete.
class Event {
public:
    // True once all work before the point is done. Throws what work on the host threw.
    bool query() const {
        if (!host.query()) { return false; }
        return !handle || is_complete(cudaEventQuery(handle.get()));
    }

    // Blocks until all work before the point is done. Throws what work on the host threw.
    void synchronize() const {
        host.synchronize();
        if (handle) {
            wait_until_complete([this] { return cudaEventQuery(handle.get()); });
        }
    }

private:
    friend class Stream;

    EventHandle handle;
    cpu::Event host;  // on a hosted stream: the event has been recorded
};

// The time at which a stream came to a point, by the GPU's clock. Copies refer to the same one.
class Timestamp {
public:
    // True once it is complete. Only for NCCL's streams: a hosted stream may not have recorded it yet.
    bool query() const { return is_complete(cudaEventQuery(handle.get())); }

private:
    friend class Stream;
    friend double seconds_between(const Timestamp& begin, const Timestamp& end);

    EventHandle handle;
};

// The time between two complete stamps: the host must have seen them, or a later event, complete.
inline double seconds_between(const Timestamp& begin, const Timestamp& end) {
    float milliseconds = 0;
    cudaCheck(cudaEventElapsedTime(&milliseconds, begin.handle.get(), end.handle.get()));
    return milliseconds / 1e3;
}

// Work in order, concurrent with other streams.
class Stream {
public:
    // compute        kernels run in the order in which they are enqueued
    // communicate    the same at the highest priority, so that transfers start before waiting kernels
    // hosted         a thread takes the work from a queue and enqueues it in turn, so that part of it can run
    //                on the host. Other streams may wait for its events only once the host has seen them
    //                complete.
    enum class Kind { compute, communicate, hosted };

    explicit Stream(Kind kind = Kind::compute) {
        int least = 0, greatest = 0;
        cudaCheck(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        cudaCheck(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                               kind == Kind::compute ? least : greatest));
        if (kind == Kind::hosted) {
            host = std::make_unique<cpu::Stream>(cpu::Stream::Kind::communicate);
            int current = 0;
            cudaCheck(cudaGetDevice(&current));
            host->enqueue([current] { cudaCheck(cudaSetDevice(current)); });  // each thread has its own
        }
    }

    // Finishes the queue.
    ~Stream() {
        host.reset();
        cudaStreamSynchronize(stream);
        cudaFree(memory);
        cudaStreamDestroy(stream);
    }

    // For launches, which run in the order of the calls. A hosted stream takes work only through enqueue().
    operator cudaStream_t() const {
        if (host) { throw std::logic_error("a launch that bypasses the queue of a hosted stream"); }
        return stream;
    }

    // Calls `work` with the stream: now or, on a hosted stream, after all work that was enqueued before.
    void enqueue(std::function<void(cudaStream_t)> work) {
        if (!host) { return work(stream); }
        host->enqueue([work = std::move(work), stream = stream] { work(stream); });
    }

    // `event` completes when everything enqueued so far has.
    //
    // The CUDA event is reused: waits for an earlier record of it are still for that record. Work in a hosted
    // queue, which has not waited or recorded yet, keeps an event of its own.
    void record(Event& event) {
        if (!event.handle || event.handle.use_count() > 1) {
            event.handle = new_event(cudaEventDisableTiming);
        }
        event.host = cpu::Event();
        enqueue([handle = event.handle](cudaStream_t on) { cudaCheck(cudaEventRecord(handle.get(), on)); });
        if (host) { host->record(event.host); }
    }

    // Work that is enqueued from now on runs after `event`.
    void wait(const Event& event) {
        if (!host && !event.host.query()) {
            throw std::logic_error("a stream waits for an event that the host has not seen complete");
        }
        if (!event.handle) { return; }
        enqueue([event](cudaStream_t on) {
            event.host.synchronize();  // another hosted stream may not have recorded it yet
            cudaCheck(cudaStreamWaitEvent(on, event.handle.get()));
        });
    }

    // The time at which everything enqueued so far has been done.
    Timestamp stamp() {
        Timestamp time;
        time.handle = new_event(cudaEventDefault);
        enqueue([handle = time.handle](cudaStream_t on) { cudaCheck(cudaEventRecord(handle.get(), on)); });
        return time;
    }

    // Blocks until everything enqueued so far is done. Throws what work on the host threw.
    void synchronize() {
        if (host) { host->synchronize(); }
        wait_until_complete([this] { return cudaStreamQuery(stream); });
    }

    // Device memory for the kernels of one call, 256-byte aligned and not initialized. The next call on this
    // stream gets the same memory. It grows, and waits for the stream, if a call asks for more than any
    // before.   returns (count)
    template <class T>
    T* scratch(long count) {
        const size_t bytes = size_t(count) * sizeof(T);
        if (bytes > memory_bytes) {
            synchronize();
            cudaCheck(cudaFree(memory));
            memory = nullptr;
            memory_bytes = 0;
            memory = allocate(bytes);
            memory_bytes = bytes;
        }
        return static_cast<T*>(memory);
    }

private:
    cudaStream_t stream = nullptr;
    std::unique_ptr<cpu::Stream> host;
    void* memory = nullptr;
    size_t memory_bytes = 0;
};

}  // namespace cuda
