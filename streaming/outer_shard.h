// OuterShard: this process's shard of the outer state, and what every exchange does with a fragment of it,
// whatever carries the bytes:
//
//     a send       payload = encode(global - local), its header, and the hash of global
//     a receive    the outer step from the mean of payloads, and the merge into local
//
// It is one implementation for lock-step and for the sync log: the same bits.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "streaming/error_feedback.h"
#include "streaming/exchange.h"
#include "llmc/layout.h"
#include "llmc/memory.h"
#include "streaming/options.h"
#include "streaming/outer.h"
#include "streaming/outer_state.h"
#include "streaming/schedule.h"

// Values in a process's shard of a fragment.
inline long shard_values(const Fragment& fragment, const Layout& layout) {
    long values = 0;
    for (int block : fragment.blocks) { values += layout.blocks[block].size / layout.ranks; }
    return values;
}

inline std::vector<long> shard_values(const std::vector<Fragment>& fragments, const Layout& layout) {
    std::vector<long> values;
    for (const Fragment& fragment : fragments) { values.push_back(shard_values(fragment, layout)); }
    return values;
}

class OuterShard {
public:
    // rank: this process's rank in its worker
    // in_flight: the most exchanges at the same time
    OuterShard(const DilocoOptions& options, const std::vector<Fragment>& fragments, const Layout& layout,
               int rank, int worker, int in_flight)
        : options(options), wire(wire_options(options)), fragments(fragments),
          values(shard_values(fragments, layout)), worker(worker) {
        for (const Fragment& fragment : fragments) { place(fragment, layout, rank); }
        largest = int(std::max_element(values.begin(), values.end()) - values.begin());
        const int slots = most_in_a_step(fragments, options.inner_steps, options.overlap);
        state = std::make_unique<OuterState>(ranges, layout.shard_size(), values[size_t(largest)],
                                             options.offload ? slots : 0);
        mean = Buffer<float>(values[size_t(largest)]);
        if (wire.error_feedback) { feedback = ErrorFeedback(values, in_flight); }
        reserve_reports(3 * slots);
    }

    // Of the exchange of fragment p that is sent at `step`.
    Sync sync_at(int p, long step) const {
        return {sync_number(fragments, p, step, options.inner_steps), p, step, values[size_t(p)]};
    }

    // ---- sending

    // Writes the payload of a sync, with the headers of its parts.
    // tokens: that this worker has trained on since the fragment's last send   flags: of the headers
    // local: (shard_size)   sums: (encoding_sums), of a HostBuffer: what encoding has lost
    void write_payload(uint8_t* payload, const PayloadLayout& layout, const Sync& sync, uint64_t tokens,
                       uint32_t flags, const float* local, double* sums, Stream& main) {
        const Sending sending = begin_payload(payload, layout, sync, tokens, flags, main);
        const std::vector<OuterState::Part> parts =
            state->use(sync.fragment, OuterState::Needs::global, main);
        for (size_t i = 0; i < parts.size(); i++) {
            const float* local_part = local + parts[i].range.shard;
            add_to_payload(sending, pieces[size_t(sync.fragment)][i], parts[i].global, local_part, main);
        }
        state->end_read(sync.fragment, main);
        device::copy_to_host_later(sums, encoding.data(), encoding_sums, main);
    }

    // The same for zeros in place of parameters, in all of a fragment: before step 1, so that nothing that a
    // send needs is set up under a step. The residuals are to be had back: see ErrorFeedback::end().
    void rehearse_payload(uint8_t* payload, const PayloadLayout& layout, const Sync& sync, double* sums,
                          Stream& main) {
        device::set_zero(mean.data(), sync.values, main);
        const Sending sending = begin_payload(payload, layout, sync, 0, 0, main);
        add_to_payload(sending, {0, sync.values, 0}, mean, mean, main);
        device::copy_to_host_later(sums, encoding.data(), encoding_sums, main);
    }

    // ---- receiving

    // The outer step of a fragment from `mean`. Returns the mean's squared norm, as SyncReport has it.
    std::shared_ptr<HostBuffer<float>> apply(const Sync& sync, LocalMove move, float* local, floatX* params,
                                             Stream& main) {
        const auto needs = OuterState::Needs::global_and_momentum;
        for (const OuterState::Part& part : state->use(sync.fragment, needs, main)) {
            device::outer_step(part.global, part.momentum, local + part.range.shard, params + part.range.flat,
                               mean + part.first, part.range.count, outer_step(move), main);
        }
        state->end_write(sync.fragment, main);
        return mean_square_of(sync.values, main);
    }

    // The same with what a rehearsal's exchange has brought, on nothing that counts.
    void rehearse_apply(const Sync& sync, Stream& main) {
        mean_square_of(sync.values, main);
        const long third = sync.values / 12 * 4;  // of the mean: for global, momentum and mean
        OuterStep step = outer_step(LocalMove::merge);
        step.local_weight = 1;  // there is no local
        device::outer_step(mean.data(), mean + third, nullptr, nullptr, mean + 2 * third, third, step, main);
    }

    // The hash of fragment p's global parameters, as its payload's header has it. The host waits for main.
    uint64_t hash(int p, Stream& main) {
        device::write_header(hashed, PayloadHeader(), main);
        for (const OuterState::Part& part : state->use(p, OuterState::Needs::global, main)) {
            device::add_hash(hashed, part.first, part.global, part.range.count, main);
        }
        state->end_read(p, main);
        device::read_headers(host_hashed.data(), hashed, sizeof(PayloadHeader), 1, 1, main);
        main.synchronize();
        return host_hashed[0].hash;
    }

    // ---- for reports

    // Now, on the main stream. Reuses what no report holds any more.
    Timestamp stamp(Stream& main) {
        auto unused = std::find_if(timestamps.begin(), timestamps.end(),
                                   [](const Timestamp& timestamp) { return !timestamp.is_shared(); });
        if (unused == timestamps.end()) { unused = timestamps.emplace(unused); }
        main.stamp(*unused);
        return *unused;
    }

    // Memory for so many more reports at the same time.
    void reserve_reports(int count) {
        for (int i = 0; i < count; i++) { host_numbers.push_back(new_host_number()); }
    }

    // What `step` sends or receives of the outer state, ahead of it.
    void fetch_for(long step) {
        state->clear();
        const long H = options.inner_steps;
        for (int p = 0; p < int(fragments.size()); p++) {
            if (is_due(fragments[p], step, H, options.overlap)) {
                state->fetch(p, OuterState::Needs::global_and_momentum);
            } else if (is_sent(fragments[p], step, H)) {
                state->fetch(p, OuterState::Needs::global);
            }
        }
    }

    const DilocoOptions options;
    const WireOptions wire;
    const std::vector<Fragment> fragments;
    const std::vector<long> values;          // of each fragment, in this shard
    std::vector<std::vector<Range>> ranges;  // of each fragment: its blocks' shards
    std::vector<std::vector<Piece>> pieces;  // the same, as they lie in a fragment and in the model
    int largest = 0;                         // fragment
    std::unique_ptr<OuterState> state;
    ErrorFeedback feedback;  // of what this worker sends
    Buffer<float> mean;      // (largest fragment)

private:
    // A payload that is being written.
    struct Sending {
        uint8_t* payload;
        PayloadLayout layout;
        Rounding rounding;
        float* residual;  // (values of the fragment), or null
    };

    void place(const Fragment& fragment, const Layout& layout, int rank) {
        ranges.emplace_back();
        pieces.emplace_back();
        long first = 0;
        for (int block : fragment.blocks) {
            const Range range = layout.shard(block, rank);
            ranges.back().push_back(range);
            pieces.back().push_back({first, range.count, uint64_t(layout.logical_index(range.flat))});
            first += range.count;
        }
    }

    OuterStep outer_step(LocalMove move) const {
        OuterStep step = make_outer_step(options.outer_optimizer, options.outer_lr, options.outer_momentum,
                                         options.local_weight);
        step.move = move;
        return step;
    }

    Sending begin_payload(uint8_t* payload, const PayloadLayout& layout, const Sync& sync, uint64_t tokens,
                          uint32_t flags, Stream& main) {
        const Sending sending{payload, layout,
                              wire.rounding(worker, sync.number, RoundingStage::send),
                              feedback.begin(sync.fragment, sync.number, main)};
        for (int part = 0; part < layout.parts; part++) {
            PayloadHeader header = make_header(sync, layout, part, worker, tokens);
            header.flags |= flags;
            device::write_header(payload + size_t(part) * layout.bytes, header, main);
        }
        device::clear_padding(payload, layout, main);
        device::set_zero(encoding.data(), encoding_sums, main);
        return sending;
    }

    // global, local: (piece.count)
    void add_to_payload(const Sending& sending, const Piece& piece, const float* global, const float* local,
                        Stream& main) {
        const PayloadLayout& layout = sending.layout;
        for_each_part(layout, piece.first, piece.count, [&](int part, long first, long count) {
            device::add_hash(sending.payload + size_t(part) * layout.bytes, first,
                             global + (first - piece.first), count, main);
        });
        float* residual = sending.residual == nullptr ? nullptr : sending.residual + piece.first;
        const Source source{global, local, residual};
        device::quantize(sending.payload, layout, sending.rounding.at(piece.index), piece.first, source,
                         piece.count, main);
        device::sum_encoding(encoding, partial, sending.payload, layout, piece.first, source, piece.count,
                             main);
    }

    // The squared norm of the first n values of `mean`, which the host has when main has come past this.
    std::shared_ptr<HostBuffer<float>> mean_square_of(long n, Stream& main) {
        auto unused = std::find_if(host_numbers.begin(), host_numbers.end(),
                                   [](const auto& number) { return number.use_count() == 1; });
        if (unused == host_numbers.end()) { unused = host_numbers.insert(unused, new_host_number()); }
        device::global_norm_squared(mean_square, mean, n, main);
        device::copy_to_host_later((*unused)->data(), mean_square.data(), 1, main);
        return *unused;
    }

    static std::shared_ptr<HostBuffer<float>> new_host_number() {
        return std::make_shared<HostBuffer<float>>(1);
    }

    const int worker;
    Buffer<float> mean_square{1};
    Buffer<double> encoding{encoding_sums}, partial{partial_sums(1)};
    Buffer<uint8_t> hashed{sizeof(PayloadHeader)};
    HostBuffer<PayloadHeader> host_hashed{1};
    std::vector<std::shared_ptr<HostBuffer<float>>> host_numbers;  // of reports
    std::vector<Timestamp> timestamps;                             // of reports
};
