// Exchange: the mean of one fragment's outer gradients over all workers. Diloco writes a payload, starts the
// exchange, and returns to it some steps later; training continues in between. Several exchanges may be in
// flight. There are two kinds. Each of M processes sends, counted in payloads of the whole fragment,
//
//     all_gather   M - 1          all_gather_exchange.h: every process receives every payload; one rounding
//     all_to_all   2 (M - 1) / M  all_to_all_exchange.h: every process receives the mean of each part from
//                                 its owner, which has rounded it again: the bits differ from all_gather's
//
// In both all workers decode the same bytes, so the mean is bitwise the same on all of them. Over a store
// (elastic_diloco.h) every worker reads all payloads, as with all_gather.
#pragma once
#include <exception>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "streaming/error_feedback.h"
#include "llmc/buffer.h"
#include "llmc/comm.h"
#include "streaming/options.h"
#include "streaming/quantize.h"
#include "streaming/slots.h"
#include "streaming/statistics.h"

enum class ExchangeKind { automatic, all_gather, all_to_all };  // automatic: the fewer bytes
inline const std::vector<std::string> exchange_names = {"auto", "all_gather", "all_to_all"};

inline std::string name_of(ExchangeKind kind) { return exchange_names[size_t(kind)]; }

inline ExchangeKind parse_exchange(const std::string& name) {
    return ExchangeKind(place_of(name, exchange_names, "outer exchange"));
}

// The options of the wire, the same on all workers.
struct WireOptions {
    Format format = Format::fp4_e2m1;
    ExchangeKind exchange = ExchangeKind::automatic;
    bool stochastic = false;      // rounding; else to nearest
    uint64_t seed = 0;            // of stochastic rounding
    bool error_feedback = false;  // of senders, and of the owners of means
    bool token_weights = false;   // of workers in the mean; else all are equal

    Rounding rounding(int worker, long sync, RandomUse use) const {
        return stochastic ? stochastic_rounding(seed, worker, uint64_t(sync), use) : Rounding();
    }
};

inline WireOptions wire_options(const DilocoOptions& options) {
    return {parse_format(options.outer_format), parse_exchange(options.outer_exchange),
            options.outer_rounding == "stochastic", options.seed, options.outer_error_feedback,
            options.weighs_by_tokens()};
}

// The payload of a part's mean, by all-to-all, begins with its own header, the headers of the M payloads that
// are averaged, and the sums of products of their values (statistics.h).
inline size_t mean_sums_offset(int workers) { return sizeof(PayloadHeader) * size_t(1 + workers); }

inline PayloadLayout mean_payload_layout(Format format, long n, int workers) {
    const size_t sums = (sizeof(double) * size_t(row_sums(workers)) + 15) / 16 * 16;
    return payload_layout(format, n, workers, 1 + workers, sums);
}

// Bytes that a process sends in the exchange of a fragment of n values; in lock-step it receives as many.
// Over a store `workers` is 2: the process sends one payload.
inline size_t exchange_bytes(ExchangeKind kind, Format format, long n, int workers) {
    const size_t others = size_t(workers - 1);
    if (kind != ExchangeKind::all_to_all) { return others * payload_bytes(format, n); }
    const size_t mean = mean_payload_layout(format, n, workers).bytes;
    return others * (payload_layout(format, n, workers).bytes + mean);
}

// The kind of exchange for fragments with these numbers of values. If both kinds send equally many bytes:
// all-gather, since it rounds only once.
inline ExchangeKind choose_exchange(const WireOptions& wire, const std::vector<long>& values, int workers) {
    if (wire.exchange != ExchangeKind::automatic) { return wire.exchange; }
    size_t gather = 0, all_to_all = 0;
    for (long n : values) {
        gather += exchange_bytes(ExchangeKind::all_gather, wire.format, n, workers);
        all_to_all += exchange_bytes(ExchangeKind::all_to_all, wire.format, n, workers);
    }
    return all_to_all < gather ? ExchangeKind::all_to_all : ExchangeKind::all_gather;
}

// A range of a fragment that is contiguous in the model without padding.
struct Piece {
    long first, count;  // within the fragment
    uint64_t index;     // of the first one in the model
};

// One exchange of one fragment.
struct Sync {
    long number;  // sync_number() of schedule.h
    int fragment;
    long send_step;  // 0: a rehearsal
    long values;     // n, of this process's shard of the fragment
};

// A trial exchange before step 1. No sync of a run has its number.
inline Sync rehearsal(int fragment, long values) {
    return {std::numeric_limits<long>::max(), fragment, 0, values};
}

inline bool is_rehearsal(const Sync& sync) { return sync.send_step == 0; }

inline std::string describe(const Sync& sync) {
    if (is_rehearsal(sync)) { return format("fragment %d (rehearsal before step 1)", sync.fragment); }
    return format("fragment %d (sync %ld, sent at step %ld)", sync.fragment, sync.number, sync.send_step);
}

// The headers of a sync's payloads, checked to be of this sync, and the statistics that came with them.
struct Headers {
    std::vector<std::vector<PayloadHeader>> sent;  // (parts, workers)
    std::vector<PayloadHeader> means;              // of the parts' means, by their owners; all-gather: none
    std::vector<double> sums;                      // (row_sums(workers)), of the workers' payloads
};

// The header that `worker` sends with a part of `sync`; flags and hash are added later.
inline PayloadHeader make_header(const Sync& sync, const PayloadLayout& layout, int part, int worker,
                                 uint64_t tokens) {
    PayloadHeader header;
    header.format = uint16_t(layout.format);
    header.sync = uint64_t(sync.number);
    header.fragment = uint32_t(sync.fragment);
    header.worker = uint32_t(worker);
    header.send_step = uint64_t(sync.send_step);
    header.values = uint64_t(sync.values);
    header.tokens = tokens;
    header.part = uint16_t(part);
    header.parts = uint16_t(layout.parts);
    return header;
}

// Refuses a payload that is not the one expected of `worker`.
inline void check_header(const PayloadHeader& header, const Sync& sync, const PayloadLayout& layout, int part,
                         int worker) {
    const PayloadHeader expected = make_header(sync, layout, part, worker, 0);
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
    same("number of parts", header.parts, expected.parts);
    same("part", header.part, expected.part);
}

// out = the mean of `workers` payloads that lie layout.bytes apart: weighted by tokens, or unweighted if
// weights is null.   out: (layout.values)   weights: (workers), workspace
inline void mean_of_payloads(float* out, float* weights, const uint8_t* payloads, int workers,
                             const PayloadLayout& layout, Stream& on) {
    if (weights != nullptr) { device::token_weights(weights, payloads, layout.bytes, workers, on); }
    device::dequantize_mean(out, payloads, layout.bytes, workers, layout, weights, on);
}

// The calls for one sync, in this order: payload, start, wait, mean (only if it is needed), finish.
class Exchange {
public:
    virtual ~Exchange() = default;

    // Where the values of a sync's fragment lie in its payload.
    PayloadLayout layout(const Sync& sync) const { return payload_layout(wire.format, sync.values, parts); }

    // Where the caller writes the payload: layout(sync), with the headers, and zeros in the padding blocks of
    // short parts. 64-byte aligned.
    uint8_t* payload(const Sync& sync) { return slots.take(sync.number).sent; }

    // Where the caller writes the statistics of its encoding.   returns (encoding_sums)
    double* encoding_sums(const Sync& sync) { return slots.of(sync.number).encoding.data(); }

    // Sends the payload after all work enqueued on `main` so far. Returns at once.
    void start(const Sync& sync, Stream& main) {
        Slot& slot = slots.of(sync.number);
        slot.traffic = Traffic();
        order(main, stream, slot.ready);
        enqueue(sync, slot);
        stream.record(slot.done);
    }

    // Blocks until all payloads have arrived, and checks their headers.
    // Throws a CommError that names the fragment, the sync and, if it is known, the worker.
    Headers wait(const Sync& sync) {
        Slot& slot = slots.of(sync.number);
        try {
            comm.wait(slot.done);
        } catch (const CommError& error) {
            const std::string who = error.peer < 0 ? "" : " with worker " + std::to_string(error.peer);
            throw CommError(error.peer,
                            "the exchange of " + describe(sync) + " failed" + who + ": " + error.what());
        }
        return check(sync, slot);
    }

    // Writes the mean.   out: (sync.values)
    virtual void mean(float* out, const Sync& sync, Stream& main) = 0;

    // Releases the sync's buffers, and returns its traffic.   applied: whether the workers apply the mean
    Traffic finish(const Sync& sync, bool applied, Stream& main) {
        owner_feedback.end(sync.fragment, sync.number, applied, main);
        const Traffic traffic = slots.of(sync.number).traffic;
        slots.give_back(sync.number);
        return traffic;
    }

    ErrorFeedback owner_feedback;  // of the means that this worker rounds, by all-to-all

protected:
    struct Slot {
        Buffer<uint8_t> sent, received;
        Buffer<uint8_t> means;              // by all-to-all
        HostBuffer<PayloadHeader> headers;  // of all that was received
        HostBuffer<double> sums;            // (row_sums(workers)), by all-to-all of each part
        HostBuffer<double> encoding{::encoding_sums};
        Traffic traffic;
        Event ready, done;
    };

    // parts: of a payload   in_flight: the most exchanges at the same time
    Exchange(const WireOptions& wire, int parts, int in_flight, Comm& comm, Stream& stream)
        : wire(wire), parts(parts), comm(comm), stream(stream), workers(comm.size()),
          weights(wire.token_weights ? workers : 0), partial(partial_sums(workers)), slots(in_flight) {}

    // Enqueues the exchange of a slot on the outer stream.
    virtual void enqueue(const Sync& sync, Slot& slot) = 0;

    // The headers that a slot has received, checked.
    virtual Headers check(const Sync& sync, const Slot& slot) const = 0;

    const WireOptions wire;
    const int parts;
    Comm& comm;
    Stream& stream;  // the outer one
    const int workers;
    Buffer<float> weights;   // (workers), if they are by tokens
    Buffer<double> partial;  // of sums of products
    Slots<Slot> slots;
};

// Workers whose global parameters are not those of the majority; all workers, if there is no majority.
inline std::vector<int> diverged_workers(const std::vector<PayloadHeader>& headers) {
    std::map<uint64_t, size_t> holders;
    for (const PayloadHeader& one : headers) { holders[one.hash]++; }
    std::vector<int> diverged;
    for (size_t i = 0; i < headers.size() && holders.size() > 1; i++) {
        if (2 * holders[headers[i].hash] <= headers.size()) { diverged.push_back(int(i)); }
    }
    return diverged;
}

// Waits for the stream before buffers that it may still use are freed. wait() has reported its errors.
inline void let_end(Stream& stream) {
    try {
        stream.synchronize();
    } catch (const std::exception&) {}
}
