// Stream and Event on a GPU: cudaStream_t and cudaEvent_t with an owner. The CPU's, with the same functions,
// are in llmc/stream.h.
#pragma once
#include <utility>

#include "llmc/cuda/device.cuh"

namespace cuda {

// A point in a stream. Recording it again makes a new point: who waits already waits for the old one.
// An event that was never recorded is complete.
class Event {
public:
    Event() = default;
    Event(Event&& other) noexcept : event(std::exchange(other.event, nullptr)) {}
    Event& operator=(Event&& other) noexcept {
        std::swap(event, other.event);
        return *this;
    }
    // What waits for the point keeps waiting for it.
    ~Event() {
        if (event) { cudaEventDestroy(event); }
    }

    // True once all work before the point is done.
    bool query() const {
        if (!event) { return true; }
        const cudaError_t status = cudaEventQuery(event);
        if (status == cudaErrorNotReady) { return false; }
        cudaCheck(status);
        return true;
    }

    // Blocks until all work before the point is done.
    void synchronize() const {
        if (event) { cudaCheck(cudaEventSynchronize(event)); }
    }

private:
    friend class Stream;
    cudaEvent_t event = nullptr;
};

// Work in order, next to that of other streams.
class Stream {
public:
    // run_inline: computes. queued: communicates, and goes first where both have something to run.
    enum class Kind { run_inline, queued };

    explicit Stream(Kind kind = Kind::run_inline) {
        int least = 0, greatest = 0;
        cudaCheck(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        cudaCheck(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                               kind == Kind::queued ? greatest : least));
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    // Finishes what is queued.
    ~Stream() {
        cudaStreamSynchronize(stream);
        cudaFree(memory);
        cudaStreamDestroy(stream);
    }

    operator cudaStream_t() const { return stream; }

    // `event` completes when everything enqueued so far has.
    void record(Event& event) {
        if (!event.event) { cudaCheck(cudaEventCreateWithFlags(&event.event, cudaEventDisableTiming)); }
        cudaCheck(cudaEventRecord(event.event, stream));
    }

    // What is enqueued from now on runs after `event`.
    void wait(const Event& event) {
        if (event.event) { cudaCheck(cudaStreamWaitEvent(stream, event.event)); }
    }

    // Blocks until everything enqueued so far is done.
    void synchronize() { cudaCheck(cudaStreamSynchronize(stream)); }

    // Device memory for the kernels of one call, 256-byte aligned and not initialized: whoever asks next on
    // this stream gets the same memory. Grows, waiting for the stream, when more is asked for than ever
    // before.   returns (count)
    template <class T>
    T* scratch(long count) {
        const size_t bytes = size_t(count) * sizeof(T);
        if (bytes > memory_bytes) {
            synchronize();
            cudaCheck(cudaFree(memory));
            memory = nullptr;
            memory_bytes = 0;
            cudaCheck(cudaMalloc(&memory, bytes));
            memory_bytes = bytes;
        }
        return static_cast<T*>(memory);
    }

private:
    cudaStream_t stream = nullptr;
    void* memory = nullptr;
    size_t memory_bytes = 0;
};

}  // namespace cuda
