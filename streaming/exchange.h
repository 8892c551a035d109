// Exchange: the mean of one fragment's outer gradients over all workers. The state machine writes a payload,
// starts the exchange and comes back some steps later; in between training goes on. Several exchanges may be
// under way.
//
// AllGatherExchange sends each payload to everyone over the outer communicator: M - 1 payloads sent and
// received by a process, and one rounding. All workers decode the same bytes, so the mean is bitwise the same
// on all of them.
#pragma once
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/comm.h"
#include "quantize.h"

// One exchange of one fragment.
struct Sync {
    long number;  // sync_number() of schedule.h
    int fragment;
    long send_step;  // 0: a rehearsal
    long values;     // n, of this process's shard of the fragment
};

// A number that no sync of a run has.
inline Sync rehearsal(int fragment, long values) {
    return {std::numeric_limits<long>::max(), fragment, 0, values};
}

inline std::string describe(const Sync& sync) {
    if (sync.send_step == 0) { return format("fragment %d (rehearsal before step 1)", sync.fragment); }
    return format("fragment %d (sync %ld, sent at step %ld)", sync.fragment, sync.number, sync.send_step);
}

// The calls for one sync, in this order: payload, start, wait, mean (if at all), finish.
class Exchange {
public:
    virtual ~Exchange() = default;

    // Where the payload is to be written: payload_bytes(format, sync.values), 64-byte aligned.
    virtual uint8_t* payload(const Sync& sync) = 0;

    // Sends the payload once all that `main` has been given so far is done. Returns at once.
    virtual void start(const Sync& sync, Stream& main) = 0;

    // Blocks until the mean can be had. The header of every worker's payload, checked to be of this sync.
    // Throws a CommError that names the fragment, the sync and, where it is known, the worker.
    virtual std::vector<PayloadHeader> wait(const Sync& sync) = 0;

    // Writes the mean.   out: (sync.values)
    virtual void mean(float* out, const Sync& sync, Stream& main) = 0;

    // Gives the sync's buffers back. What it put on the wire.
    virtual Traffic finish(const Sync& sync) = 0;
};

// The header that `worker` sends with `sync`; the flags and the hash are added to it later.
inline PayloadHeader make_header(const Sync& sync, Format format, int worker, uint64_t tokens) {
    PayloadHeader header;
    header.format = uint16_t(format);
    header.sync = uint64_t(sync.number);
    header.fragment = uint32_t(sync.fragment);
    header.worker = uint32_t(worker);
    header.send_step = uint64_t(sync.send_step);
    header.values = uint64_t(sync.values);
    header.tokens = tokens;
    return header;
}

// Refuses a payload that is not the one expected of `worker`.
inline void check_header(const PayloadHeader& header, const Sync& sync, Format format_expected, int worker) {
    const PayloadHeader expected = make_header(sync, format_expected, worker, 0);
    auto same = [&](const char* what, uint64_t got, uint64_t wanted) {
        if (got != wanted) {
            const std::string who = "the payload of worker " + std::to_string(worker);
            const std::string why = " is " + std::to_string(got) + ", not " + std::to_string(wanted);
            throw RunError(who + " for " + describe(sync) + " was refused: its " + what + why
                           + ": do all workers run the same program with the same options?");
        }
    };
    same("magic number", header.magic, expected.magic);
    same("version", header.version, expected.version);
    same("number format", header.format, expected.format);
    same("sync number", header.sync, expected.sync);
    same("fragment", header.fragment, expected.fragment);
    same("sender", header.worker, expected.worker);
    same("send step", header.send_step, expected.send_step);
    same("number of values", header.values, expected.values);
}

// Workers whose global parameters are not those that most workers hold; all, where no more than half agree.
inline std::vector<int> diverged_workers(const std::vector<PayloadHeader>& headers) {
    std::vector<int> diverged;
    for (const PayloadHeader& one : headers) {
        size_t holders = 0;
        for (const PayloadHeader& other : headers) { holders += other.hash == one.hash; }
        const bool minority = headers.size() > 1 && 2 * holders <= headers.size();
        if (minority) { diverged.push_back(int(&one - headers.data())); }
    }
    return diverged;
}

class AllGatherExchange : public Exchange {
public:
    // largest: values in this process's shard of the largest fragment.
    // in_flight: the most exchanges at the same time.
    AllGatherExchange(Format format, long largest, int in_flight, Comm& comm, Stream& stream)
        : format_(format), comm(comm), stream(stream) {
        const long bytes = long(payload_bytes(format, largest));
        for (int i = 0; i < in_flight; i++) {
            slots.push_back(std::make_unique<Slot>());
            slots.back()->sent = Buffer<uint8_t>(bytes);
            slots.back()->received = Buffer<uint8_t>(bytes * comm.size());
            slots.back()->headers = HostBuffer<PayloadHeader>(comm.size());
        }
    }

    // The stream may still be working on the buffers; an error it met was reported by wait().
    ~AllGatherExchange() override {
        try {
            stream.synchronize();
        } catch (const std::exception&) {
        }
    }

    uint8_t* payload(const Sync& sync) override {
        for (auto& slot : slots) {
            if (slot->sync == none) {
                slot->sync = sync.number;
                return slot->sent;
            }
        }
        throw std::logic_error("more exchanges in flight than there are buffers");
    }

    void start(const Sync& sync, Stream& main) override {
        Slot& slot = find(sync);
        const size_t bytes = payload_bytes(format_, sync.values);
        slot.traffic = Traffic();
        order(main, stream, slot.ready);
        comm.all_gather(slot.received, slot.sent, bytes, stream, &slot.traffic);
        device::read_headers(slot.headers.data(), slot.received, bytes, comm.size(), stream);
        stream.record(slot.done);
    }

    std::vector<PayloadHeader> wait(const Sync& sync) override {
        Slot& slot = find(sync);
        try {
            comm.wait(slot.done);
        } catch (const CommError& error) {
            std::string who = error.peer < 0 ? "" : " with worker " + std::to_string(error.peer);
            throw CommError(error.peer,
                            "the exchange of " + describe(sync) + " failed" + who + ": " + error.what());
        }
        for (int worker = 0; worker < comm.size(); worker++) {
            check_header(slot.headers[worker], sync, format_, worker);
        }
        return std::vector<PayloadHeader>(slot.headers.data(), slot.headers + comm.size());
    }

    void mean(float* out, const Sync& sync, Stream& main) override {
        const size_t bytes = payload_bytes(format_, sync.values);
        device::dequantize_mean(out, find(sync).received, bytes, comm.size(), format_, sync.values, main);
    }

    Traffic finish(const Sync& sync) override {
        Slot& slot = find(sync);
        slot.sync = none;
        return slot.traffic;
    }

private:
    static constexpr long none = -1;

    // Buffers of one exchange. They stay where they are while the stream works on them.
    struct Slot {
        long sync = none;
        Buffer<uint8_t> sent;               // (payload)
        Buffer<uint8_t> received;           // (workers, payload)
        HostBuffer<PayloadHeader> headers;  // (workers)
        Traffic traffic;
        Event ready, done;
    };

    Slot& find(const Sync& sync) {
        for (auto& slot : slots) {
            if (slot->sync == sync.number) { return *slot; }
        }
        throw std::logic_error("no such exchange is in flight");
    }

    Format format_;
    Comm& comm;
    Stream& stream;
    std::vector<std::unique_ptr<Slot>> slots;
};
