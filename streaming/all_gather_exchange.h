// AllGatherExchange sends every payload to every worker over the outer communicator: a process sends and
// receives M - 1 payloads, and values are rounded once.
#pragma once
#include "streaming/exchange.h"

class AllGatherExchange : public Exchange {
public:
    // largest: values in this process's shard of the largest fragment
    // in_flight: the most exchanges at the same time
    AllGatherExchange(const WireOptions& wire, long largest, int in_flight, Comm& comm, Stream& stream)
        : Exchange(wire, 1, in_flight, comm, stream), sums(row_sums(workers)) {
        if (has_mean_row(workers)) {
            own_mean = Buffer<float>(largest);
            own_weights = Buffer<float>(weights.count());
        }
        slots.for_each([&](Slot& slot) {
            const long bytes = long(payload_bytes(wire.format, largest));
            slot.sent = Buffer<uint8_t>(bytes);
            slot.received = Buffer<uint8_t>(bytes * workers);
            slot.headers = HostBuffer<PayloadHeader>(workers);
            slot.sums = HostBuffer<double>(sums.count());
        });
    }

    ~AllGatherExchange() override { let_end(stream); }

    void mean(float* out, const Sync& sync, Stream& main) override {
        const uint8_t* received = slots.of(sync.number).received;
        mean_of_payloads(out, weights.data(), received, workers, layout(sync), main);
    }

private:
    // Also computes the statistics' sums of products, which with many workers need a mean of their own.
    void enqueue(const Sync& sync, Slot& slot) override {
        const PayloadLayout one = layout(sync);
        comm.all_gather(slot.received, slot.sent, one.bytes, stream, &slot.traffic);
        device::read_groups(slot.headers.data(), slot.received, one.bytes, workers, 1, stream);
        if (has_mean_row(workers)) {
            mean_of_payloads(own_mean, own_weights.data(), slot.received, workers, one, stream);
        }
        device::sum_rows(sums, partial, slot.received, one.bytes, workers, one, own_mean.data(), stream);
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(sums.data());
        device::read_groups(slot.sums.data(), bytes, 0, 1, row_sums(workers), stream);
    }

    Headers check(const Sync& sync, const Slot& slot) const override {
        for (int worker = 0; worker < workers; worker++) {
            check_header(slot.headers[worker], sync, layout(sync), 0, worker);
        }
        return {{{slot.headers.data(), slot.headers + workers}}, {},
                {slot.sums.data(), slot.sums + sums.count()}};
    }

    Buffer<double> sums;                  // of enqueue()
    Buffer<float> own_mean, own_weights;  // of enqueue(), for more workers than most_pairwise
};
