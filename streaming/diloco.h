// Streaming DiLoCo (arXiv 2501.18512, algorithm 2): the state machine that the trainer calls once per step.
//
//     step t, after the inner update of local:
//       for each fragment that is sent at t:          start the exchange of global - local
//       for each fragment that was sent at t - tau:   wait for the mean; step global; merge it into local
//
// global is the outer parameters: the same bits on all workers. Everything here is about this process's shard
// (ZeRO-1): the processes that hold the same shard in the other workers are the members of the outer
// communicator. With fragments = 1, tau = 0 and alpha = 0 this is DiLoCo (arXiv 2311.08105).
#pragma once
#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "all_gather_exchange.h"
#include "all_to_all_exchange.h"
#include "error_feedback.h"
#include "llmc/layout.h"
#include "llmc/memory.h"
#include "outer.h"
#include "outer_state.h"
#include "schedule.h"
#include "snapshot.h"
#include "sync_report.h"

struct DilocoOptions {
    long inner_steps = 100;     // H
    long overlap = 1;           // tau, in [0, H)
    float local_weight = 0.5f;  // alpha
    OuterOptimizer optimizer = OuterOptimizer::nesterov;
    float learning_rate = 0.4f;  // the outer one
    float momentum = 0.9f;       // mu
    std::vector<long> offsets;  // t_p of each fragment; empty: evenly spread
    WireOptions wire;
    // The outer state lies in the host's memory: see outer_state.h. The residuals of error feedback, which a
    // send changes at once, stay on the device.
    bool offload = false;
};

// Throws a UserError for options that make no run of `steps` steps (-1: not known yet).
inline void validate(const DilocoOptions& options, long steps, int workers) {
    const long H = options.inner_steps;
    if (H < 1) { throw UserError(format("%ld inner steps (H): use at least 1", H)); }
    if (options.overlap < 0 || options.overlap >= H) {
        throw UserError(format("an overlap (tau) of %ld steps with %ld inner steps (H): use 0 to %ld, so "
                               "that a fragment has arrived before it is sent again",
                               options.overlap, H, H - 1));
    }
    if (!(options.local_weight >= 0 && options.local_weight <= 1)) {
        throw UserError(format("a local weight (alpha) of %g: use 0 to 1", options.local_weight));
    }
    if (!(options.learning_rate >= 0 && std::isfinite(options.learning_rate))) {
        throw UserError(format("an outer learning rate of %g: use 0 or more", options.learning_rate));
    }
    if (!(options.momentum >= 0 && options.momentum <= 1)) {
        throw UserError(format("an outer momentum of %g: use 0 to 1", options.momentum));
    }
    if (workers > 1 && options.optimizer == OuterOptimizer::none) {
        throw UserError(format("%d workers without an outer optimizer would never meet: use nesterov or "
                               "average, or one worker with more ranks", workers));
    }
    if (steps >= 0 && steps < H) {
        throw UserError(format("%ld steps with %ld inner steps (H): train for at least that many, or not all "
                               "fragments are exchanged", steps, H));
    }
}

// Values in a process's shard of a fragment.
inline long shard_values(const Fragment& fragment, const Layout& layout) {
    long values = 0;
    for (int block : fragment.blocks) { values += layout.blocks[block].size / layout.ranks; }
    return values;
}

// "h.0..h.2, h.6": the names of blocks, runs of neighbours shortened.
inline std::string block_names(const std::vector<int>& blocks, const Layout& layout) {
    std::string names;
    for (size_t i = 0; i < blocks.size(); i++) {
        size_t last = i;
        while (last + 1 < blocks.size() && blocks[last + 1] == blocks[last] + 1) { last++; }
        names += (names.empty() ? "" : ", ") + layout.blocks[size_t(blocks[i])].name;
        if (last > i) { names += (last > i + 1 ? ".." : ", ") + layout.blocks[size_t(blocks[last])].name; }
        i = last;
    }
    return names;
}

inline std::vector<long> shard_values(const std::vector<Fragment>& fragments, const Layout& layout) {
    std::vector<long> values;
    for (const Fragment& fragment : fragments) { values.push_back(shard_values(fragment, layout)); }
    return values;
}

// Bytes that a process sends in a sync, by fragment. It receives as many.
inline std::vector<size_t> sync_bytes(const DilocoOptions& options, const std::vector<Fragment>& fragments,
                                      const Layout& layout, int workers) {
    const std::vector<long> values = shard_values(fragments, layout);
    const ExchangeKind exchange = choose_exchange(options.wire, values, workers);
    std::vector<size_t> bytes;
    for (long n : values) { bytes.push_back(exchange_bytes(exchange, options.wire.format, n, workers)); }
    return bytes;
}

// The schedule in words and numbers, for people: a line for each fragment and one for the sum.
inline std::string plan(const DilocoOptions& options, std::vector<Fragment> fragments, const Layout& layout,
                        int workers) {
    const long H = options.inner_steps;
    if (!options.offsets.empty()) { set_offsets(fragments, options.offsets, H); }
    const ExchangeKind exchange = choose_exchange(options.wire, shard_values(fragments, layout), workers);
    const std::vector<size_t> bytes = sync_bytes(options, fragments, layout, workers);
    const std::vector<size_t> sent = sent_in_period(fragments, bytes, H);
    std::string text = "fragment  offset  every      bytes a sync  blocks\n";
    for (size_t p = 0; p < fragments.size(); p++) {
        text += format("%8zu  %6ld  %5ld  %16zu  %s\n", p, fragments[p].offset, H, bytes[p],
                       block_names(fragments[p].blocks, layout).c_str());
    }
    const double sum = double(std::accumulate(sent.begin(), sent.end(), size_t(0)));
    const size_t peak = *std::max_element(sent.begin(), sent.end());
    return text + format("a process sends %.0f bytes every %ld steps by %s, %.0f a step on average, %zu in a "
                         "step at most; at most %d in flight at a time\n", sum, H,
                         name_of(exchange).c_str(), sum / double(H), peak,
                         most_in_flight(fragments, H, options.overlap));
}

class Diloco {
public:
    // rank: this process's rank in its worker.
    // outer: joins the processes that hold this shard; its rank is the worker's number.
    Diloco(const DilocoOptions& options, std::vector<Fragment> fragments, const Layout& layout, int rank,
           Comm& outer, Stream& outer_stream)
        : options(options), fragments(std::move(fragments)), worker(outer.rank()), workers(outer.size()) {
        if (!options.offsets.empty()) { set_offsets(this->fragments, options.offsets, options.inner_steps); }
        for (const Fragment& fragment : this->fragments) {
            ranges.emplace_back();
            for (int block : fragment.blocks) { ranges.back().push_back(layout.shard(block, rank)); }
            if (values_of(int(ranges.size()) - 1) > values_of(largest)) { largest = int(ranges.size()) - 1; }
        }
        tokens_at_send.resize(this->fragments.size());
        const int slots = most_in_a_step(this->fragments, options.inner_steps, options.overlap);
        state = std::make_unique<OuterState>(ranges, layout.shard_size(), values_of(largest),
                                             options.offload ? slots : 0);
        mean = Buffer<float>(values_of(largest));
        for (int i = 0; i < 3 * slots; i++) { host_numbers.push_back(new_host_number()); }
        set_up_exchange(layout, outer, outer_stream);
    }

    // global = local, momentum = 0.   local: (shard_size), the same on all workers
    void start(const float* local, Stream& main) {
        state->start(local, main);
        fetch_for(1);
    }

    // Before step 1: an exchange as large as the largest fragment's, of zeros, which nobody uses. When it
    // returns all workers are there, and all that an exchange needs (kernels, pinned memory, connections) has
    // been used once, so that none of it is set up under a step. Throws as after_inner_step() does.
    void rehearse(Stream& main) {
        const Sync sync = rehearsal(largest, values_of(largest));
        const long n = sync.values;
        device::set_zero(mean.data(), n, main);
        Sending sending = begin_payload(sync, 0, main);
        add_to_payload(sending, {0, n, 0}, mean, mean, main);
        start_exchange(sync, main);
        exchange->wait(sync);
        exchange->mean(mean, sync, main);
        mean_square_of(n, main);
        const long third = n / 12 * 4;  // of the mean: for global, momentum and mean; alpha = 1: no local
        device::outer_step(mean.data(), mean + third, nullptr, nullptr, mean + 2 * third, third,
                           {options.learning_rate, options.momentum, 1.0f}, main);
        end_exchange(sync, false, main);
        main.synchronize();
    }

    // After the inner update of `step` (1, 2, ...): sends, then receives what is due.
    // tokens: that this worker has trained on so far.
    // local: (shard_size)   params: flat; this rank's shards are written
    // Throws a CommError when an exchange failed, a RunError when the workers' global parameters differ.
    std::vector<SyncReport> after_inner_step(long step, uint64_t tokens, float* local, floatX* params,
                                             Stream& main) {
        for (int p = 0; p < int(fragments.size()); p++) {
            if (is_sent(fragments[p], step, options.inner_steps)) { send(p, step, tokens, local, main); }
        }
        std::vector<SyncReport> reports = receive_due(step, local, params, main);
        fetch_for(step + 1);
        return reports;
    }

    // At the end of training: receives and applies what is in flight, in the order of the sync numbers.
    std::vector<SyncReport> finish(float* local, floatX* params, Stream& main) {
        state->clear();  // the step that it was fetched for does not come
        return receive_due(in_flight.empty() ? 0 : due_step(in_flight.back()), local, params, main);
    }

    // From the next send on this worker asks all to take a checkpoint and leave: see SyncReport::stops.
    void request_stop() { stopping = true; }

    // Memory for a snapshot, once for all that are taken. It refers to parts of this.
    std::unique_ptr<OuterSnapshot> make_snapshot() {
        const size_t most = std::max(size_t(encodings.count()), in_flight.size());
        return std::make_unique<OuterSnapshot>(*state, feedback, exchange->owner_feedback, state->count(),
                                               values_of(largest), int(most));
    }

    // Between two steps: starts to copy all that the next ones build on. What is in flight is added as it is
    // received (snapshot.h): until then `out` has to stay.
    void snapshot(OuterSnapshot& out, Stream& main) {
        out.begin(in_flight, tokens_at_send, main);
        taken = &out;
    }

    // Where the run ends behind a snapshot: takes part in what is in flight, for the snapshot and for the
    // other workers, and applies none of it.
    void collect_in_flight(Stream& main) {
        for (; !in_flight.empty(); in_flight.pop_front()) { end(take(in_flight.front(), main), main); }
    }

    // Goes on where a snapshot was taken, after start() and rehearse(). tau may be another one.
    // Throws a UserError where the snapshot is not of these fragments.
    void restore(const StateReader& saved, const Fields& fields, Stream& main) {
        const long values = state->count();
        tokens_at_send = saved_tokens(fields, fragments.size());
        resumed = saved_syncs(saved, fields, fragments, values_of_all(), options.inner_steps, workers);
        state->load(read_floats(saved, "global", values).data(),
                    read_floats(saved, "momentum", values).data(), main);
        load_residuals(feedback, saved, "residuals", main);
        load_residuals(exchange->owner_feedback, saved, "owner_residuals", main);
        in_flight.clear();
        for (const SavedSync& one : resumed) {
            in_flight.push_back(one.sync);
            host_numbers.push_back(new_host_number());  // with a smaller tau all may be due in one step
        }
        fetch_for(saved.identity().step + 1);
    }

    // The outer parameters, readable by kernels, for work on main from now on.   (shard_size)
    const float* global(Stream& main) { return state->global(main); }

    // The same for who knows that no outer step is still at work, or on its way to where they lie.
    const float* global() const { return std::as_const(*state).global(); }
    float* global() { return state->global(); }

private:
    // Of this process's shard of fragment p.
    long values_of(int p) const {
        long n = 0;
        for (const Range& range : ranges[size_t(p)]) { n += range.count; }
        return n;
    }

    std::vector<long> values_of_all() const {
        std::vector<long> values;
        for (int p = 0; p < int(fragments.size()); p++) { values.push_back(values_of(p)); }
        return values;
    }

    long due_step(const Sync& sync) const { return sync.send_step + options.overlap; }

    OuterStep outer_step() const {
        if (options.optimizer == OuterOptimizer::average) { return {1.0f, 0.0f, options.local_weight}; }
        return {options.learning_rate, options.momentum, options.local_weight};
    }

    void send(int p, long step, uint64_t tokens, const float* local, Stream& main) {
        const Sync sync{sync_number(fragments, p, step, options.inner_steps), p, step, values_of(p)};
        Sending sending = begin_payload(sync, tokens - tokens_at_send[p], main);
        const std::vector<OuterState::Part> parts = state->use(p, OuterState::Needs::global, main);
        for (size_t i = 0; i < parts.size(); i++) {
            const float* local_part = local + parts[i].range.shard;
            add_to_payload(sending, pieces[size_t(p)][i], parts[i].global, local_part, main);
        }
        state->end_read(p, main);
        start_exchange(sync, main);
        tokens_at_send[p] = tokens;
        in_flight.push_back(sync);
    }

    // In the order of sending, which is that of the sync numbers and, on one worker, of the due steps.
    std::vector<SyncReport> receive_due(long step, float* local, floatX* params, Stream& main) {
        std::vector<SyncReport> reports;
        // After a resume with a smaller tau there may be more at once than what was fetched leaves room for.
        if (!in_flight.empty() && due_step(in_flight.front()) < step) { state->clear(); }
        while (!in_flight.empty() && due_step(in_flight.front()) <= step) {
            reports.push_back(receive(in_flight.front(), local, params, main));
            in_flight.pop_front();
        }
        return reports;
    }

    SyncReport receive(const Sync& sync, float* local, floatX* params, Stream& main) {
        SyncReport report = take(sync, main);
        if (report.applied()) { report.mean_square = apply(sync, local, params, main); }
        end(report, main);
        return report;
    }

    // Waits for a sync. Its mean is in `mean` then, where it is to be applied.
    SyncReport take(const Sync& sync, Stream& main) {
        for (const SavedSync& saved : resumed) {
            if (saved.sync.number == sync.number) { return take_saved(saved, main); }
        }
        const Timestamp idle_from = stamp(main);
        const Headers headers = exchange->wait(sync);
        SyncReport report{sync.number, sync.fragment, sync.send_step, due_step(sync),         {},
                          idle_from,   stamp(main),   0,              not_finite_of(headers)};
        report.stops = asks_to_stop(headers);
        for (const std::vector<PayloadHeader>& part : headers.sent) {
            report.global_hash += part[size_t(worker)].hash;
        }
        check_agreement(headers, sync);
        if (report.applied()) {
            exchange->mean(mean, sync, main);
            report.statistics = outer_statistics(encodings.of(sync).sums.data(), headers.sums, workers);
        }
        report.traffic = end_exchange(sync, report.applied(), main);
        return report;
    }

    // What arrived in the run that this one goes on with, or was to arrive.
    SyncReport take_saved(const SavedSync& saved, Stream& main) {
        SyncReport report = saved.report;
        report.due_step = due_step(saved.sync);
        report.idle_from = stamp(main);
        report.idle_until = stamp(main);
        if (report.applied()) {
            device::copy_to_device(mean.data(), saved.mean.data(), saved.sync.values, main);
        }
        return report;
    }

    void end(const SyncReport& report, Stream& main) {
        if (taken != nullptr) { taken->deliver(report, mean, main); }
    }

    // Returns the squared norm of the mean, as SyncReport has it.
    std::shared_ptr<HostBuffer<float>> apply(const Sync& sync, float* local, floatX* params, Stream& main) {
        const auto needs = OuterState::Needs::global_and_momentum;
        for (const OuterState::Part& part : state->use(sync.fragment, needs, main)) {
            device::outer_step(part.global, part.momentum, local + part.range.shard, params + part.range.flat,
                               mean + part.first, part.range.count, outer_step(), main);
        }
        state->end_write(sync.fragment, main);
        return mean_square_of(sync.values, main);
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

    // Now, on the main stream. Reuses what no report holds any more.
    Timestamp stamp(Stream& main) {
        auto unused = std::find_if(timestamps.begin(), timestamps.end(),
                                   [](const Timestamp& timestamp) { return !timestamp.is_shared(); });
        if (unused == timestamps.end()) { unused = timestamps.emplace(unused); }
        main.stamp(*unused);
        return *unused;
    }

    // Every worker sent the hashes of its global parameters as they were at the send: all must be the same.
    void check_agreement(const Headers& headers, const Sync& sync) const {
        std::set<int> diverged;
        for (const std::vector<PayloadHeader>& part : headers.sent) {
            for (int worker : diverged_workers(part)) { diverged.insert(worker); }
        }
        if (diverged.empty()) { return; }
        std::string who;
        for (int worker : diverged) { who += (who.empty() ? "" : ", ") + std::to_string(worker); }
        who = (diverged.size() == 1 ? "worker " : "workers ") + who;
        throw RunError("the global parameters of " + describe(sync) + " differ between workers, suspected: " +
                       who + ": start the run again from its last checkpoint");
    }

    void set_up_exchange(const Layout& layout, Comm& outer, Stream& outer_stream) {
        const std::vector<long> values = values_of_all();
        for (int p = 0; p < int(ranges.size()); p++) {
            pieces.emplace_back();
            long first = 0;
            for (const Range& range : ranges[size_t(p)]) {
                pieces.back().push_back({first, range.count, uint64_t(layout.logical_index(range.flat))});
                first += range.count;
            }
        }
        const WireOptions& wire = options.wire;
        const int most = most_in_flight(fragments, options.inner_steps, options.overlap);
        encodings = Slots<Encoding>(most);
        if (wire.error_feedback) { feedback = ErrorFeedback(values, most); }
        if (choose_exchange(wire, values, outer.size()) == ExchangeKind::all_gather) {
            const long n = values_of(largest);
            exchange = std::make_unique<AllGatherExchange>(wire, n, most, outer, outer_stream);
        } else {
            exchange = std::make_unique<AllToAllExchange>(wire, pieces, most, outer, outer_stream);
        }
    }

    // What the encoding of a sync that is in flight has lost.
    struct Encoding {
        HostBuffer<double> sums{encoding_sums};
    };

    // A payload that is being written.
    struct Sending {
        uint8_t* payload;
        PayloadLayout layout;
        Rounding rounding;
        float* residual;  // (values of the fragment), or null
    };

    // tokens: that this worker has trained on since the fragment's last send
    Sending begin_payload(const Sync& sync, uint64_t tokens, Stream& main) {
        Sending sending{exchange->payload(sync), exchange->layout(sync),
                        options.wire.rounding(worker, sync.number, RoundingStage::send),
                        feedback.begin(sync.fragment, sync.number, main)};
        for (int part = 0; part < sending.layout.parts; part++) {
            PayloadHeader header = make_header(sync, sending.layout, part, worker, tokens);
            if (stopping) { header.flags |= stop_requested; }
            device::write_header(sending.payload + size_t(part) * sending.layout.bytes, header, main);
        }
        device::clear_padding(sending.payload, sending.layout, main);
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

    // What the exchange waits for on main has the host's sums in it: whoever has waited for it may read them.
    void start_exchange(const Sync& sync, Stream& main) {
        device::copy_to_host_later(encodings.take(sync).sums.data(), encoding.data(), encoding_sums, main);
        exchange->start(sync, main);
    }

    Traffic end_exchange(const Sync& sync, bool applied, Stream& main) {
        feedback.end(sync.fragment, sync.number, applied, main);
        encodings.give_back(sync);
        return exchange->finish(sync, applied, main);
    }

    DilocoOptions options;
    std::vector<Fragment> fragments;
    std::vector<std::vector<Range>> ranges;  // of each fragment: its blocks' shards
    std::vector<std::vector<Piece>> pieces;  // the same, as they lie in a fragment and in the model
    std::vector<uint64_t> tokens_at_send;    // of each fragment: tokens when it was last sent
    int worker, workers;                     // this one, and how many there are
    int largest = 0;                         // fragment
    Buffer<float> mean;                      // (largest fragment)
    Buffer<float> mean_square{1};
    Buffer<double> encoding{encoding_sums}, partial{partial_sums(1)};
    std::vector<std::shared_ptr<HostBuffer<float>>> host_numbers;  // of reports
    Slots<Encoding> encodings{0};
    std::unique_ptr<OuterState> state;
    ErrorFeedback feedback;  // of what this worker sends
    std::deque<Sync> in_flight;
    std::vector<SavedSync> resumed;    // those that were when the run was stopped; pinned, and so kept
    OuterSnapshot* taken = nullptr;    // the last one
    bool stopping = false;
    std::vector<Timestamp> timestamps;  // of reports
    std::unique_ptr<Exchange> exchange;
};
