// OuterShard: this process's shard of the outer state, and what every exchange does with a fragment of it,
// whatever carries the bytes:
//
//     a send       payload = encode(delta) with delta = global - local, its header, and the hash of global
//     a receive    the outer step from the mean of payloads, and the merge into local
//
// Lock-step and elastic runs share this implementation, so that both compute the same bits.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "streaming/error_feedback.h"
#include "streaming/exchange.h"
#include "llmc/layout.h"
#include "llmc/buffer.h"
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

// Values of a fragment: an array for each of its pieces.
struct FragmentValues {
    std::vector<const float*> arrays;  // (count of the piece) each
};

// The outer gradient of a fragment, by piece. It is never stored: load_block() in quantize.h and load_delta()
// in quantize.cuh subtract the values just before these are encoded.
using OuterGradient = std::vector<Source>;

inline OuterGradient operator-(const FragmentValues& global, const FragmentValues& local) {
    OuterGradient delta;
    for (size_t i = 0; i < global.arrays.size(); i++) {
        delta.push_back({global.arrays[i], local.arrays[i]});
    }
    return delta;
}

class OuterShard {
public:
    // rank: this process's rank in its worker   in_flight: the most exchanges at the same time
    OuterShard(const DilocoOptions& options, const std::vector<Fragment>& fragments, const Layout& layout,
               int rank, int worker, int in_flight)
        : options(options), wire(wire_options(options)), fragments(fragments),
          worker(worker), values(shard_values(fragments, layout)) {
        for (const Fragment& fragment : fragments) { place(fragment, layout, rank); }
        largest = int(std::max_element(values.begin(), values.end()) - values.begin());
        const int slots = most_in_a_step(fragments, options.inner_steps, options.overlap);
        state = std::make_unique<OuterState>(ranges, layout.shard_size(), values[size_t(largest)],
                                             options.offload ? slots : 0);
        mean = Buffer<float>(values[size_t(largest)]);
        if (wire.error_feedback) { feedback = ErrorFeedback(values, in_flight); }
        reserve_reports(3 * slots);
    }

    // The exchange of fragment p that is sent at `step`.
    Sync sync_at(int p, long step) const {
        return {sync_number(fragments, p, step, options.inner_steps), p, step, values[size_t(p)]};
    }

    // Restores what a snapshot has saved (snapshot.h).
    void load(const SavedState& saved, Stream& main) {
        const long n = state->count();
        state->load(saved.floats("global", n).data(), saved.floats("momentum", n).data(), 0, n, main);
        feedback.load(saved, "residuals", main);
    }

    // ---- sending

    // The global parameters of fragment p, for work on main until encode() has been called.
    FragmentValues global_values(int p, Stream& main) {
        FragmentValues global;
        for (const OuterState::Part& part : state->use(p, main)) { global.arrays.push_back(part.global); }
        return global;
    }

    // The parameters of fragment p in `local`.   local: (shard_size)
    FragmentValues local_values(int p, const float* local) const {
        FragmentValues values;
        for (const Range& range : ranges[size_t(p)]) { values.arrays.push_back(local + range.shard); }
        return values;
    }

    // Writes the payload of a sync: the headers of its parts, with the hash of global, and delta's codes.
    // tokens, flags: of the headers
    // sums: (encoding_sums), of a HostBuffer: how large delta is, and how much of it encoding has lost
    void encode(uint8_t* payload, const PayloadLayout& layout, const Sync& sync, uint64_t tokens,
                uint32_t flags, const OuterGradient& delta, double* sums, Stream& main) {
        const Rounding rounding = wire.rounding(worker, sync.number, RandomUse::send_rounding);
        float* residual = feedback.begin(sync.fragment, sync.number, main);
        for (int part = 0; part < layout.parts; part++) {
            PayloadHeader header = make_header(sync, layout, part, worker, tokens);
            header.flags = flags;
            device::write_header(payload + size_t(part) * layout.bytes, header, main);
        }
        device::clear_padding(payload, layout, main);
        device::set_zero(encoding.data(), encoding_sums, main);
        for (size_t i = 0; i < delta.size(); i++) {
            const Piece& piece = pieces[size_t(sync.fragment)][i];
            const long first = piece.first, count = piece.count;
            Source source = delta[i];
            source.residual = residual == nullptr ? nullptr : residual + first;
            for_each_part(layout, first, count, [&](int part, long begin, long n) {
                device::add_hash(payload + size_t(part) * layout.bytes, begin,
                                 source.values + (begin - first), n, main);
            });
            device::quantize(payload, layout, rounding.at(piece.index), first, source, count, main);
            device::sum_encoding(encoding, partial, payload, layout, first, source, count, main);
        }
        if (!is_rehearsal(sync)) { state->end_read(sync.fragment, main); }
        device::copy_to_host_later(sums, encoding.data(), encoding_sums, main);
    }

    // Encodes zeros (and residuals) in place of parameters, so that everything a send needs is set up before
    // the first step. ErrorFeedback::end() restores the residuals.
    void rehearse_encode(uint8_t* payload, const PayloadLayout& layout, const Sync& sync, double* sums,
                         Stream& main) {
        device::set_zero(mean.data(), sync.values, main);
        const OuterGradient zeros(pieces[size_t(sync.fragment)].size(), Source{mean.data(), mean.data()});
        encode(payload, layout, sync, 0, 0, zeros, sums, main);
    }

    // ---- receiving

    // The outer step of a fragment, from `mean`. Returns the mean's squared norm for a SyncReport.
    std::shared_ptr<HostBuffer<float>> apply(const Sync& sync, LocalMove move, float* local, floatX* params,
                                             Stream& main) {
        for (const OuterState::Part& part : state->use(sync.fragment, main)) {
            device::outer_step(part.global, part.momentum, local + part.range.shard, params + part.range.flat,
                               mean + part.first, part.range.count, make_outer_step(options, move), main);
        }
        state->end_write(sync.fragment, main);
        return mean_square_of(sync.values, main);
    }

    // The same on buffers of zeros, after a rehearsal's exchange.
    void rehearse_apply(const Sync& sync, Stream& main) {
        mean_square_of(sync.values, main);
        const long third = sync.values / 12 * 4;  // of the mean: for global, momentum and mean
        OuterStep step = make_outer_step(options);
        step.local_weight = 1;  // there is no local to move
        device::outer_step(mean.data(), mean + third, nullptr, nullptr, mean + 2 * third, third, step, main);
    }

    // The hash of fragment p's global parameters, as in the header of a payload. The host waits for main.
    uint64_t hash(int p, Stream& main) {
        device::write_header(hashed, PayloadHeader(), main);
        for (const OuterState::Part& part : state->use(p, main)) {
            device::add_hash(hashed, part.first, part.global, part.range.count, main);
        }
        state->end_read(p, main);
        device::read_groups(host_hashed.data(), hashed, sizeof(PayloadHeader), 1, 1, main);
        main.synchronize();
        return host_hashed[0].hash;
    }

    // ---- for reports

    // Allocates memory for `count` more reports at the same time.
    void reserve_reports(int count) {
        for (int i = 0; i < count; i++) { host_numbers.push_back(std::make_shared<HostBuffer<float>>(1)); }
    }

    // Fetches ahead the outer state that `step` sends or receives.
    void fetch_for(long step) {
        state->clear();
        const long H = options.inner_steps;
        for (int p = 0; p < int(fragments.size()); p++) {
            if (is_used(fragments[p], step, H, options.overlap)) { state->fetch(p); }
        }
    }

    const DilocoOptions options;
    const WireOptions wire;
    const std::vector<Fragment> fragments;
    const int worker;                        // its number
    const std::vector<long> values;          // of each fragment, in this shard
    std::vector<std::vector<Range>> ranges;  // of each fragment: its blocks' shards
    std::vector<std::vector<Piece>> pieces;  // the same by their places in the fragment and the model
    int largest = 0;                         // fragment
    std::unique_ptr<OuterState> state;
    ErrorFeedback feedback;  // of what this worker sends
    Buffer<float> mean;      // (largest fragment)

private:
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

    // The squared norm of the first n values of `mean`, in host memory once main has passed this call.
    std::shared_ptr<HostBuffer<float>> mean_square_of(long n, Stream& main) {
        auto unused = std::find_if(host_numbers.begin(), host_numbers.end(),
                                   [](const auto& number) { return number.use_count() == 1; });
        if (unused == host_numbers.end()) {
            unused = host_numbers.insert(unused, std::make_shared<HostBuffer<float>>(1));
        }
        device::global_norm_squared(mean_square, mean.data(), n, main);
        device::copy_to_host_later((*unused)->data(), mean_square.data(), 1, main);
        return *unused;
    }

    Buffer<float> mean_square{1};
    Buffer<double> encoding{encoding_sums}, partial{partial_sums(1)};
    Buffer<uint8_t> hashed{sizeof(PayloadHeader)};
    HostBuffer<PayloadHeader> host_hashed{1};
    std::vector<std::shared_ptr<HostBuffer<float>>> host_numbers;  // of reports
};
