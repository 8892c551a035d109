// Comm over a CPU's communicator (TCP) for buffers on a GPU: copy to pinned memory, collective, copy back.
// Unlike NCCL's kernels it occupies no SM while it waits for the network.
#pragma once
#include <memory>
#include <utility>

#include "llmc/comm.h"
#include "llmc/cuda/host_buffer.cuh"
#include "llmc/stream.h"

namespace cuda {

// Only for hosted streams, since the host waits for copies and peers. One stream at a time.
class StagedComm : public ::Comm {
public:
    explicit StagedComm(std::unique_ptr<cpu::Comm> host) : host(std::move(host)) {}

    int rank() const override { return host->rank(); }
    int size() const override { return host->size(); }
    uint64_t progress() const override { return host->progress(); }

    void all_gather(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        stage(out, size_t(size()) * bytes, inp, bytes, stream, [=](char* received, const char* sent) {
            host->all_gather(received, sent, bytes, at_once, traffic);
        });
    }

    void all_to_all(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        const size_t all = size_t(size()) * bytes;
        stage(out, all, inp, all, stream, [=](char* received, const char* sent) {
            host->all_to_all(received, sent, bytes, at_once, traffic);
        });
    }

    void reduce_scatter(float* out, const float* inp, size_t count, Stream& stream,
                        Traffic* traffic) override {
        const size_t bytes = count * sizeof(float);
        stage(out, bytes, inp, size_t(size()) * bytes, stream, [=](char* received, const char* sent) {
            host->reduce_scatter(reinterpret_cast<float*>(received), reinterpret_cast<const float*>(sent),
                                 count, at_once, traffic);
        });
    }

    void all_reduce(float* values, size_t count, Stream& stream, Traffic* traffic) override {
        const size_t bytes = count * sizeof(float);
        stage(values, bytes, values, bytes, stream, [=](char* received, const char* sent) {
            memcpy(received, sent, bytes);
            host->all_reduce(reinterpret_cast<float*>(received), count, at_once, traffic);
        });
    }

private:
    // Calls work(received, sent) on buffers in the host's memory.
    template <class Work>
    void stage(void* out, size_t out_bytes, const void* inp, size_t inp_bytes, Stream& stream, Work work) {
        stream.enqueue([=](cudaStream_t on) {
            reserve(sent, inp_bytes, on);
            reserve(received, out_bytes, on);
            cudaCheck(cudaMemcpyAsync(sent.data(), inp, inp_bytes, cudaMemcpyDeviceToHost, on));
            wait_for(on);  // also for the previous call's copy to the GPU, which reads `received`
            work(received.data(), sent.data());
            cudaCheck(cudaMemcpyAsync(out, received.data(), out_bytes, cudaMemcpyHostToDevice, on));
        });
    }

    // Grows a buffer. This happens only in the first calls: no call is larger than those of the rehearsal
    // (streaming/diloco.h).
    static void reserve(HostBuffer<char>& buffer, size_t bytes, cudaStream_t on) {
        if (size_t(buffer.count()) >= bytes) { return; }
        wait_for(on);  // for the previous call's copies
        buffer = HostBuffer<char>(long(bytes));
    }

    static void wait_for(cudaStream_t on) {
        wait_until_complete([on] { return cudaStreamQuery(on); });
    }

    std::unique_ptr<cpu::Comm> host;
    cpu::Stream at_once;
    HostBuffer<char> sent, received;
};

}  // namespace cuda
