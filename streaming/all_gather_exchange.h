// AllGatherExchange sends every payload to every worker over the outer communicator: a process sends and
// receives M - 1 payloads, and values are rounded once.
#pragma once
#include "streaming/exchange.h"

class AllGatherExchange : public Exchange {
public:
    // largest: values in this process's shard of the largest fragment
    // in_flight: the most exchanges at the same time
    AllGatherExchange(const WireOptions& wire, long largest, int in_flight, Comm& comm, Stream& stream)
        : wire(wire), comm(comm), stream(stream), weights(wire.token_weights ? comm.size() : 0),
          partial(partial_sums(comm.size())), sums(row_sums(comm.size())), slots(in_flight) {
        if (has_mean_row(comm.size())) {
            own_mean = Buffer<float>(largest);
            own_weights = Buffer<float>(weights.count());
        }
        slots.for_each([&](Slot& slot) {
            const long bytes = long(payload_bytes(wire.format, largest));
            slot.sent = Buffer<uint8_t>(bytes);
            slot.received = Buffer<uint8_t>(bytes * comm.size());
            slot.headers = HostBuffer<PayloadHeader>(comm.size());
            slot.sums = HostBuffer<double>(sums.count());
        });
    }

    ~AllGatherExchange() override { let_end(stream); }

    PayloadLayout layout(const Sync& sync) const override { return payload_layout(wire.format, sync.values); }

    uint8_t* payload(const Sync& sync) override { return slots.take(sync).sent; }

    void start(const Sync& sync, Stream& main) override {
        Slot& slot = slots.of(sync);
        const size_t bytes = layout(sync).bytes;
        slot.traffic = Traffic();
        order(main, stream, slot.ready);
        comm.all_gather(slot.received, slot.sent, bytes, stream, &slot.traffic);
        device::read_groups(slot.headers.data(), slot.received, bytes, comm.size(), 1, stream);
        compare(slot, layout(sync));
        stream.record(slot.done);
    }

    Headers wait(const Sync& sync) override {
        Slot& slot = slots.of(sync);
        wait_for(comm, slot.done, sync);
        for (int worker = 0; worker < comm.size(); worker++) {
            check_header(slot.headers[worker], sync, layout(sync), 0, worker);
        }
        return {{{slot.headers.data(), slot.headers + comm.size()}}, {},
                {slot.sums.data(), slot.sums + sums.count()}};
    }

    void mean(float* out, const Sync& sync, Stream& main) override {
        const PayloadLayout one = layout(sync);
        mean_of_payloads(out, weights.data(), slots.of(sync).received, one.bytes, comm.size(), one, main);
    }

    Traffic finish(const Sync& sync, bool, Stream&) override {
        const Traffic traffic = slots.of(sync).traffic;
        slots.give_back(sync);
        return traffic;
    }

private:
    struct Slot {
        Buffer<uint8_t> sent;               // (payload)
        Buffer<uint8_t> received;           // (workers, payload)
        HostBuffer<PayloadHeader> headers;  // (workers)
        HostBuffer<double> sums;            // (row_sums(workers))
        Traffic traffic;
        Event ready, done;
    };

    // The sums of products of the received payloads. On the outer stream; a mean that they need is computed
    // there, for the sums alone.
    void compare(Slot& slot, const PayloadLayout& layout) {
        const int workers = comm.size();
        if (has_mean_row(workers)) {
            mean_of_payloads(own_mean, own_weights.data(), slot.received, layout.bytes, workers, layout,
                             stream);
        }
        device::sum_rows(sums, partial, slot.received, layout.bytes, workers, layout, own_mean.data(),
                         stream);
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(sums.data());
        device::read_groups(slot.sums.data(), bytes, 0, 1, row_sums(workers), stream);
    }

    const WireOptions wire;
    Comm& comm;
    Stream& stream;
    Buffer<float> weights;                // (workers), if they are by tokens
    Buffer<double> partial, sums;         // of compare()
    Buffer<float> own_mean, own_weights;  // of compare(), for more workers than most_pairwise
    Slots<Slot> slots;
};
