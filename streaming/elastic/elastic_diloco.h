// ElasticDiloco: Streaming DiLoCo over the sync log (README.md). What is sent, averaged and merged is what
// diloco.h sends, averages and merges, byte for byte, as long as no worker is late:
//
//     step t, after the inner update of local:
//       the log says which fragments are sent      encode(): payload = global - local, into pinned memory
//       what is applied, once it is decided        apply(): the contributors' mean, the outer step
//       whether to continue, to wait, or to jump to the step where the others are
//
// A worker that is not among the contributors takes the same outer step and moves local by as much as global
// moved. What it has learned is in its next delta, and its residuals from before the payload are restored.
//
// All work of the device is enqueued on main by the trainer's thread; the log's thread only reads complete
// payloads. After each sync the host waits for main, to learn the hash of the new global parameters. A
// worker's ranks agree on each turn by a collective on their devices, for which the host waits in every step.
//
// Memory besides OuterShard's: pinned, a payload of each fragment and `workers` of the largest; on the
// device, `workers` + 1 of the largest; in the host's memory, for each sync in flight, what is sent and what
// has been received. A snapshot lies in an unnamed file: 8 bytes a value (with --join-moments 16).
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/clock.h"
#include "llmc/comm.h"
#include "llmc/run/store.h"
#include "streaming/elastic/elastic_snapshot.h"
#include "streaming/exchange.h"
#include "streaming/outer_loop.h"
#include "streaming/outer_shard.h"
#include "streaming/elastic/sync_log_threads.h"

// Of the inner optimizer, for --join-moments.
struct InnerMoments {
    float *m = nullptr, *v = nullptr;  // (shard_size), where the parameters lie
    long* updates = nullptr;           // AdamW's t
};

// What the trainer does for an ElasticDiloco.
struct ElasticCallbacks {
    // Reports events: now and then during a wait, and before an error is thrown. False ends the wait.
    std::function<bool(const std::vector<OuterEvent>&)> report;
    // Called with the run's options (LogStart::fingerprint) if this worker has others: throws the error that
    // says so.
    std::function<void(const std::string&)> refuse;
    // On the log's thread, before it asks the device for anything.
    std::function<void()> use_device;
};

class ElasticDiloco : public OuterLoop, private LogShard {
public:
    using OpenStore = std::function<std::unique_ptr<LogStore>()>;

    // worker: its number   inner: joins its ranks, with calls on inner_stream
    // start: without positions and generation   open: opens a connection to the store
    ElasticDiloco(const DilocoOptions& options, const SyncLogOptions& log_options, int worker,
                  const std::vector<Fragment>& fragments, const Layout& layout, Comm& inner,
                  Stream& inner_stream, LogStart start, OpenStore open, ElasticCallbacks callbacks,
                  InnerMoments moments = {})
        : log_options(log_options), schedule(fragments, options.inner_steps),
          shard(options, fragments, layout, log_options.shard, worker, int(fragments.size())), inner(inner),
          inner_stream(inner_stream), log_start(std::move(start)), open(std::move(open)),
          callbacks(std::move(callbacks)), moments(moments), outgoing(fragments.size()),
          tokens_at_send(fragments.size()), hashes(fragments.size()) {
        log_start.positions.assign(fragments.size(), 0);
        for (size_t p = 0; p < outgoing.size(); p++) { outgoing[p].bytes = HostBuffer<uint8_t>(bytes_of(p)); }
    }

    void start(const float* local, Stream& main) override {
        shard.state->start(local, main);
        rehearse(main);
        shard.fetch_for(1);
    }

    void restore(const SavedState& saved, const Fields& fields, Stream& main) override {
        const LogPlace place = saved_place(saved, fields, outgoing.size());
        tokens_at_send = saved_tokens(fields, outgoing.size());
        shard.load(saved, main);
        for (int p = 0; p < schedule.fragments(); p++) {
            if (!place.sent[size_t(p)]) { continue; }
            const long sync = schedule.sync(p, place.positions[size_t(p)]);
            shard.feedback.load_before(p, sync, saved, "residuals_before", main);
        }
        log_start.generation = place.generation;
        log_start.positions = place.positions;
        log_start.from_checkpoint = true;
        shard.fetch_for(saved.step() + 1);
    }

    // Returns when this worker has a place in the run, or will not get one.
    Outcome begin(long step, uint64_t tokens, float* local, floatX* params, Stream& main) override {
        now.main = &main;
        log.reset(new SyncLogThreads(log_options, schedule, shard.worker, *this, log_start, open));
        Outcome outcome = after_inner_step(step, tokens, local, params, main);
        // Syncs that were merged here are reported with the first step's, as no step has been made yet. The
        // wait for them was not a part of training.
        reports = std::exchange(outcome.syncs, {});
        for (SyncReport& sync : reports) { sync.idle_from = sync.idle_until; }
        return outcome;
    }

    Outcome after_inner_step(long step, uint64_t tokens, float* local, floatX* params,
                             Stream& main) override {
        now = {tokens, local, params, &main};
        for (const Fragment& one : shard.fragments) {  // the device first: a turn holds the log's lock
            if (is_due(one, step, shard.options.inner_steps, shard.options.overlap)) { main.synchronize(); }
        }
        Outcome outcome = take_turns(step, [this](long at) { return log->turn(at); });
        shard.fetch_for(outcome.step + 1);
        return outcome;
    }

    // Waits as long as a worker that is alive needs this one.
    Outcome finish(long step, float* local, floatX* params, Stream& main) override {
        now = {now.tokens, local, params, &main};
        return take_turns(step, [this](long at) { return log->finish(at); });
    }

    void request_stop() override {}  // each worker stops by itself
    std::string gave_up() const override { return given_up; }

    ElasticSnapshot& snapshot() override {
        if (!taken) { taken = std::make_unique<ElasticSnapshot>(*shard.state, shard.feedback, no_owner); }
        return *taken;
    }

    void take_snapshot(Stream& copies) override {
        snapshot().begin({log->generation(), log->positions(), {}}, schedule, tokens_at_send, copies);
    }

    void collect_in_flight(Stream&) override {}  // it is in the store
    void checkpointed() override { log->checkpointed(taken->log_place().positions); }

    const float* global(Stream& main) override { return shard.state->global(main); }

    std::string warning() const override { return log ? log->warning() : ""; }

    OuterCosts costs() const override {
        return log ? OuterCosts{turn_seconds, log->cpu_seconds()} : OuterCosts();
    }

private:
    // Adds the time of its scope.
    struct Stopwatch {
        double& seconds;
        double from = now_seconds();
        ~Stopwatch() { seconds += now_seconds() - from; }
    };

    // A fragment's last payload.
    struct Outgoing {
        long sync = -1;
        uint64_t tokens = 0;        // 0: there is no payload
        HostBuffer<uint8_t> bytes;  // (payload)
        HostBuffer<double> sums{encoding_sums};
        Event written;
        std::optional<Encoded> encoded;  // once the log has asked for it
    };

    // The arguments of the trainer's call.
    struct Now {
        uint64_t tokens = 0;
        float* local = nullptr;
        floatX* params = nullptr;
        Stream* main = nullptr;
    };

    // A snapshot: this header, then piece by piece global, momentum and, if it has moments, m and v.
    struct SnapshotHeader {
        uint32_t magic = 0x4e534c44, version = 2;  // "DLSN"
        uint64_t values = 0;
        uint64_t has_moments = 0, updates = 0;
    };

    // -------------------------------------------------------------------------------------------------------
    // Turns

    // Takes turns until the log says to continue, the wait is ended, or the run is over.
    template <class Turn>
    Outcome take_turns(long step, Turn turn) {
        idle_from = now.main->stamp();
        helpless.reset();  // the time limit is of one wait: the last may have ended while the store was away
        while (true) {
            const double from = now_seconds(), work_before = shard_seconds;
            const LogTurn own = turn(step);
            // Without the shard's work: what the log costs training.
            turn_seconds += now_seconds() - from - (shard_seconds - work_before);
            const LogTurn agreed = agree(own);
            note_events();
            switch (agreed.kind) {
                case LogTurn::go_on:
                    return outcome(step, Outcome::continues);
                case LogTurn::jump:
                    step = agreed.step;
                    break;
                case LogTurn::wait:
                    if (all_leave) { return outcome(step, Outcome::left); }
                    wait();
                    break;
                case LogTurn::over:
                    return outcome(step, Outcome::over);
                case LogTurn::lost:
                case LogTurn::stop:
                    end(agreed.kind);
                    return outcome(step, Outcome::left);
            }
        }
    }

    Outcome outcome(long step, Outcome::Course course) {
        return {step, std::exchange(reports, {}), std::exchange(told, {}), std::exchange(has_loaded, false),
                course};
    }

    // Tells why the log has stopped. Throws, except after `lost`: then the caller saves what is here.
    void end(LogTurn::Kind kind) {
        report_events();
        const LogStop own = log->stopped();
        if (!own.theirs.empty() && callbacks.refuse) { callbacks.refuse(own.theirs); }
        given_up = own.why.empty() ? format("another rank of worker %d has stopped", shard.worker) : own.why;
        const bool is_whole = kind == LogTurn::lost && !has_loaded;  // else other ranks may lack a snapshot
        if (!is_whole) { throw RunError(given_up, own.replaced ? replaced_status : 1); }
    }

    bool report_events() { return !callbacks.report || callbacks.report(std::exchange(told, {})); }

    void wait() {
        log->wait(longest_wait);
        note_events();
        note_helplessness();
        if (!report_events() || !given_up.empty()) { leaves = true; }
    }

    // Gives up a wait for a store that does not answer, or for a snapshot that nobody can give, after the
    // time limit.
    void note_helplessness() {
        const std::string reason = log->helpless();
        if (reason.empty()) { return helpless.reset(); }
        if (!helpless) { helpless.emplace(log_options.timeout); }
        helpless->has_waited(longest_wait);
        const std::string limit = format("%g s (--timeout)", log_options.timeout);
        if (helpless->is_over()) { given_up = reason + "; gave up after " + limit; }
        const double silent = std::min(10.0, log_options.timeout / 2);
        if (std::exchange(is_warned, helpless->waited() >= silent) || !is_warned) { return; }
        told.push_back({name_of(LogEventKind::too_few), std::nullopt, shard.worker,
                        "waits: " + reason + "; it writes a checkpoint and ends after " + limit, false});
    }

    // What all ranks of this worker do (LogTurn::Kind); they jump as far as the farthest.
    LogTurn agree(const LogTurn& mine) {
        if (inner.size() == 1) {
            all_leave = leaves && mine.kind == LogTurn::wait;
            return mine;
        }
        const int64_t own[] = {mine.kind, mine.step, leaves + !given_up.empty(), has_loaded};
        std::copy_n(own, 4, turns.data());
        device::copy_to_device(device_turns.data(), turns.data(), 4, inner_stream);
        inner.all_gather(device_turns + 4, device_turns.data(), sizeof own, inner_stream);
        device::copy_to_host_later(turns.data(), device_turns + 4, 4 * inner.size(), inner_stream);
        inner_stream.record(gathered);
        inner.wait(gathered);
        LogTurn all{LogTurn::go_on};
        int64_t one_leaves = 0;  // 2: since it has given up
        for (int rank = 0; rank < inner.size(); rank++) {
            const LogTurn::Kind kind = LogTurn::Kind(turns[4 * rank]);
            if (kind > all.kind) { all = {kind}; }
            if (kind == all.kind) { all.step = std::max(all.step, long(turns[4 * rank + 1])); }
            one_leaves = std::max(one_leaves, turns[4 * rank + 2]);
            has_loaded = has_loaded || turns[4 * rank + 3] != 0;  // then all ranks have joined
        }
        all_leave = one_leaves > 0 && all.kind == LogTurn::wait;
        if (all_leave && one_leaves > 1 && given_up.empty()) {
            given_up = format("another rank of worker %d has given up its wait", shard.worker);
        }
        return all;
    }

    // Collects the log's events. What they say about an applied sync also goes into that sync's report.
    void note_events() {
        for (LogEvent& event : log->events()) {
            for (SyncReport& report : reports) {
                if (event.kind != LogEventKind::applied || report.sync != event.sync) { continue; }
                report.log->decider = event.entry->decider.worker;
                report.log->grace_seconds = double(event.entry->waited) / 1000;
                report.traffic.bytes_received = event.bytes_read;
            }
            const LogEventKind kind = event.kind;
            const bool is_routine = kind == LogEventKind::decided || kind == LogEventKind::applied;
            const std::optional<long> sync = event.sync >= 0 ? std::optional<long>(event.sync) : std::nullopt;
            told.push_back({name_of(kind), sync, event.worker, std::move(event.text), is_routine});
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // The log's shard

    Sync sync_of(long number) const {
        return shard.sync_at(schedule.fragment(number), schedule.send_step(number));
    }

    PayloadLayout layout_of(const Sync& sync) const { return payload_layout(shard.wire.format, sync.values); }

    uint64_t hash(int p) override {
        const Stopwatch work{shard_seconds};
        return hashes[size_t(p)] = shard.hash(p, *now.main);
    }

    // No payload without training since the last send that counted, or if resumed residuals already hold it.
    void encode(long number) override {
        const Stopwatch work{shard_seconds};
        Stream& main = *now.main;
        const Sync sync = sync_of(number);
        const size_t p = size_t(sync.fragment);
        Outgoing& out = outgoing[p];
        out.sync = number;
        out.tokens = shard.feedback.is_in_flight(number) ? 0 : now.tokens - tokens_at_send[p];
        out.encoded.reset();
        if (out.tokens == 0) { return; }
        const PayloadLayout layout = layout_of(sync);
        const FragmentValues global = shard.global_values(sync.fragment, main);
        const OuterGradient delta = global - shard.local_values(sync.fragment, now.local);
        shard.encode(payload, layout, sync, out.tokens, 0, delta, out.sums.data(), main);
        device::copy_to_host_later(out.bytes.data(), payload.data(), long(layout.bytes), main);
        main.record(out.written);
    }

    // On one of the log's threads; the log's lock keeps all other calls out.
    const Encoded* encoded(long number) override {
        Outgoing& out = outgoing[size_t(schedule.fragment(number))];
        if (out.sync != number) { return nullptr; }
        if (!out.encoded && out.tokens == 0) { out.encoded.emplace(); }
        if (out.encoded) { return &*out.encoded; }
        if (callbacks.use_device) { callbacks.use_device(); }
        if (!out.written.query()) { return nullptr; }
        const size_t bytes = layout_of(sync_of(number)).bytes;
        out.encoded = Encoded{std::string(reinterpret_cast<const char*>(out.bytes.data()), bytes), out.tokens,
                              header_of(out.bytes).hash};
        return &*out.encoded;
    }

    void apply(long number, const std::vector<Contribution>& contributions, bool counted) override {
        const Stopwatch work{shard_seconds};
        const Sync sync = sync_of(number);
        Stream& main = *now.main;
        SyncReport report{sync.number, sync.fragment, sync.send_step, sync.send_step + shard.options.overlap,
                          {}, idle_from, main.stamp(), hashes[size_t(sync.fragment)], {}};
        report.log = LogReport{{}, counted};
        for (const Contribution& one : contributions) { note_header(one, sync, report); }
        Outgoing& out = outgoing[size_t(sync.fragment)];
        uint64_t& until = tokens_at_send[size_t(sync.fragment)];
        const bool has_payload = out.sync == sync.number && out.tokens > 0;
        // The counted payload may be an earlier start's, of training that local lacks.
        const bool holds = has_payload || (log_start.from_checkpoint && until < now.tokens);
        if (report.applied()) {
            receive(sync, contributions);
            const LocalMove move = counted && holds ? LocalMove::merge : LocalMove::follow;
            report.mean_square = shard.apply(sync, move, now.local, now.params, main);
        }
        if (shard.feedback.is_in_flight(sync.number)) {
            shard.feedback.end(sync.fragment, sync.number, counted && report.applied(), main);
        } else if (counted && report.applied()) {  // an earlier start has sent these residuals
            shard.feedback.clear(sync.fragment, main);
        }
        main.record(applied);
        applied.synchronize();  // then the received payloads may be overwritten, and the sums are there
        const bool is_own = has_payload || log_start.from_checkpoint;  // of this start or the one it resumes
        for (const auto& one : report.log->contributors) {
            if (is_own && one.worker == shard.worker) { until = std::min(now.tokens, until + one.tokens); }
        }
        // note_events() adds how much was received.
        if (has_payload && out.encoded) { report.traffic.bytes_sent = out.encoded->payload.size(); }
        if (report.applied()) {  // of the contributors; this worker's own sums are known only if it has sent
            const double unknown = std::numeric_limits<double>::quiet_NaN(), none[] = {unknown, unknown};
            const int count = int(contributions.size());
            report.statistics = outer_statistics(has_payload ? out.sums.data() : none,
                                                 {host_sums.data(), host_sums + row_sums(count)}, count);
        }
        out.sync = -1, out.encoded.reset();
        reports.push_back(report);
        idle_from = main.stamp();
    }

    // Adds a contribution to the report. Throws if it was not made on these global parameters.
    void note_header(const Contribution& one, const Sync& sync, SyncReport& report) {
        const PayloadLayout layout = layout_of(sync);
        const int worker = one.worker;
        const std::string refused =
            format("the payload of worker %d for ", worker) + describe(sync) + " was refused: ";
        if (one.payload.size() != layout.bytes) {
            throw RunError(refused + format("it has %zu bytes, not %zu: do all workers run the same program "
                                            "with the same options?", one.payload.size(), layout.bytes));
        }
        PayloadHeader header;
        memcpy(&header, one.payload.data(), sizeof header);
        check_header(header, sync, layout, 0, worker);
        if (header.hash != hashes[size_t(sync.fragment)]) {
            throw RunError(refused + "it was made from other global parameters");
        }
        if (header.flags & delta_not_finite) { report.not_finite.push_back(worker); }
        report.log->contributors.push_back({worker, header.tokens});
    }

    // shard.mean = the mean of the payloads.
    void receive(const Sync& sync, const std::vector<Contribution>& contributions) {
        Stream& main = *now.main;
        const PayloadLayout layout = layout_of(sync);
        const int count = int(contributions.size());
        const long bytes = long(layout.bytes);
        for (int i = 0; i < count; i++) {  // a GPU fetches each while the host copies the next
            memcpy(host_received + i * bytes, contributions[size_t(i)].payload.data(), layout.bytes);
            device::copy_to_device(received + i * bytes, host_received + i * bytes, bytes, main);
        }
        mean_of_payloads(shard.mean, weights.data(), received, count, layout, main);
        device::sum_rows(sums, partial, received, layout.bytes, count, layout, shard.mean, main);
        device::copy_to_host_later(host_sums.data(), sums.data(), row_sums(count), main);
    }

    // -------------------------------------------------------------------------------------------------------
    // Snapshots for other workers

    size_t snapshot_bytes() const override {
        const size_t arrays = log_options.elastic.join_moments ? 4 : 2;
        return sizeof(SnapshotHeader) + size_t(shard.state->count()) * arrays * sizeof(float);
    }

    void append_snapshot(Spool& spool) override {
        const Stopwatch work{shard_seconds};
        Stream& main = *now.main;
        SnapshotHeader header;
        header.values = uint64_t(shard.state->count());
        header.has_moments = log_options.elastic.join_moments;
        header.updates = header.has_moments ? uint64_t(*moments.updates) : 0;
        spool.append(&header, sizeof header);
        for_pieces([&](float* piece, long first, long count, size_t bytes) {
            shard.state->save(piece, piece + count, first, count, main);
            if (header.has_moments) {
                device::copy_to_host_later(piece + 2 * count, moments.m + first, count, main);
                device::copy_to_host_later(piece + 3 * count, moments.v + first, count, main);
            }
            main.synchronize();
            spool.append(piece, bytes);
        });
    }

    void load(const Spool& snapshot, size_t at) override {
        const Stopwatch work{shard_seconds};
        const SnapshotHeader header = checked_header(snapshot, at);
        Stream& main = *now.main;
        at += sizeof header;
        for_pieces([&](float* piece, long first, long count, size_t bytes) {
            snapshot.read(piece, at, bytes);
            at += bytes;
            shard.state->load(piece, piece + count, first, count, main);
            if (log_options.elastic.join_moments) {
                device::copy_to_device(moments.m + first, piece + 2 * count, count, main);
                device::copy_to_device(moments.v + first, piece + 3 * count, count, main);
            }
            main.synchronize();
        });
        if (log_options.elastic.join_moments) { *moments.updates = long(header.updates); }
        begin_at_global(main);
        main.synchronize();
        has_loaded = true;
    }

    // Calls use(piece, first, count, bytes) for each piece of the shard.   piece: (2 or 4, count), pinned
    template <class Use>
    void for_pieces(Use use) const {
        const long n = shard.state->count(), arrays = log_options.elastic.join_moments ? 4 : 2;
        const long most = std::min(n, long(log_options.snapshot_chunk / (4 * sizeof(float))));
        HostBuffer<float> piece(arrays * most);
        for (long first = 0; first < n; first += most) {
            const long count = std::min(most, n - first);
            use(piece.data(), first, count, size_t(arrays * count) * sizeof(float));
        }
    }

    SnapshotHeader checked_header(const Spool& snapshot, size_t at) const {
        SnapshotHeader header;
        const SnapshotHeader expected;
        const bool is_whole = snapshot.size() == at + snapshot_bytes();
        if (is_whole) { snapshot.read(&header, at, sizeof header); }
        const bool fits = is_whole && header.magic == expected.magic && header.version == expected.version &&
                          header.values == uint64_t(shard.state->count()) &&
                          header.has_moments == uint64_t(log_options.elastic.join_moments);
        if (!fits) {
            throw RunError("the snapshot of another worker was refused: do all run the same program with the "
                           "same options?");
        }
        return header;
    }

    // local = global, with nothing in flight.
    void begin_at_global(Stream& main) {
        device::cast(now.local, shard.state->global(main), shard.state->count(), main);
        for (const std::vector<Range>& fragment : shard.ranges) {
            for (const Range& range : fragment) {
                device::cast(now.params + range.flat, now.local + range.shard, range.count, main);
            }
        }
        shard.state->clear();
        shard.feedback.clear(main);
        for (Outgoing& out : outgoing) { out.sync = -1, out.encoded.reset(); }
        tokens_at_send.assign(tokens_at_send.size(), now.tokens);
        log_start.from_checkpoint = false;
    }

    // -------------------------------------------------------------------------------------------------------
    // Setting up

    // Of fragment p's payload.
    long bytes_of(size_t p) const { return long(payload_bytes(shard.wire.format, shard.values[p])); }

    // Before step 1: uses once everything that a sync needs of the device.
    void rehearse(Stream& main) {
        const Sync sync = rehearsal(shard.largest, shard.values[size_t(shard.largest)]);
        const PayloadLayout layout = layout_of(sync);
        Outgoing& out = outgoing[size_t(shard.largest)];
        shard.rehearse_encode(payload, layout, sync, out.sums.data(), main);
        device::copy_to_host_later(out.bytes.data(), payload.data(), long(layout.bytes), main);
        main.synchronize();
        const std::string bytes(reinterpret_cast<const char*>(out.bytes.data()), layout.bytes);
        now.main = &main;
        receive(sync, std::vector<Contribution>(size_t(log_options.workers), Contribution{0, bytes}));
        shard.rehearse_apply(sync, main);
        shard.feedback.end(sync.fragment, sync.number, false, main);
        main.synchronize();
    }

    static constexpr double longest_wait = 0.02;  // seconds, between two turns

    const SyncLogOptions log_options;
    const SyncSchedule schedule;
    OuterShard shard;
    ErrorFeedback no_owner;  // means are not rounded here
    Comm& inner;
    Stream& inner_stream;
    LogStart log_start;
    const OpenStore open;
    const ElasticCallbacks callbacks;
    const InnerMoments moments;
    std::vector<Outgoing> outgoing;        // of each fragment
    std::vector<uint64_t> tokens_at_send;  // of each fragment: at the last send that counted
    std::vector<uint64_t> hashes;          // of each fragment's global parameters
    Buffer<uint8_t> payload{bytes_of(size_t(shard.largest))};         // (largest payload)
    Buffer<uint8_t> received{log_options.workers * payload.count()};  // (workers, payload)
    HostBuffer<uint8_t> host_received{received.count()};              // the same
    Buffer<float> weights{shard.wire.token_weights ? log_options.workers : 0};  // (workers), if by tokens
    Buffer<double> partial{partial_sums(log_options.workers)};        // of the sums of rows
    Buffer<double> sums{most_row_sums(log_options.workers)};
    HostBuffer<double> host_sums{sums.count()};
    std::optional<Patience> helpless;  // since when nobody can help
    bool is_warned = false;
    std::string given_up;
    bool leaves = false, all_leave = false;  // this rank ends the wait; some rank does, so all do
    HostBuffer<int64_t> turns{4 * inner.size()};           // (ranks, 4): kind, step, leaves, has_loaded
    Buffer<int64_t> device_turns{4 * (1 + inner.size())};  // (1 + ranks, 4): this rank's, then the same
    Event gathered, applied;
    Now now;
    Timestamp idle_from;
    double turn_seconds = 0, shard_seconds = 0;
    // For the next Outcome.
    std::vector<SyncReport> reports;
    std::vector<OuterEvent> told;
    bool has_loaded = false;  // a snapshot
    std::unique_ptr<ElasticSnapshot> taken;  // null before the first snapshot()
    std::unique_ptr<SyncLogThreads> log;  // the last member: its threads use all others
};
