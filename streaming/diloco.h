// Streaming DiLoCo (arXiv 2501.18512, algorithm 2): the trainer calls it once per step.
//
//     step t, after the inner update of local:
//       for each fragment that is sent at t:          start the exchange of delta = global - local
//       for each fragment that was sent at t - tau:   wait for the mean; step global; merge it into local
//
// global, the outer parameters, is bitwise the same on all workers. A process exchanges only its own shard
// (ZeRO-1): the outer communicator joins the processes of all workers that hold the same shard. One fragment,
// tau = 0 and alpha = 0 make this DiLoCo (arXiv 2311.08105).
#pragma once
#include <algorithm>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "streaming/all_gather_exchange.h"
#include "streaming/all_to_all_exchange.h"
#include "llmc/layout.h"
#include "streaming/outer_loop.h"
#include "streaming/outer_shard.h"
#include "streaming/plan.h"
#include "streaming/schedule.h"
#include "streaming/snapshot.h"
#include "streaming/sync_report.h"

class Diloco : public OuterLoop {
public:
    // rank: this process's rank in its worker
    // outer: joins the processes that hold this shard; its rank is the worker's number
    Diloco(const DilocoOptions& options, const std::vector<Fragment>& fragments, const Layout& layout,
           int rank, Comm& outer, Stream& outer_stream)
        : workers(outer.size()), most(most_in_flight(fragments, options.inner_steps, options.overlap)),
          shard(options, fragments, layout, rank, outer.rank(), most), tokens_at_send(fragments.size()) {
        const WireOptions& wire = shard.wire;
        if (choose_exchange(wire, shard.values, workers) == ExchangeKind::all_gather) {
            const long n = shard.values[size_t(shard.largest)];
            exchange = std::make_unique<AllGatherExchange>(wire, n, most, outer, outer_stream);
        } else {
            exchange = std::make_unique<AllToAllExchange>(wire, shard.pieces, most, outer, outer_stream);
        }
    }

    void start(const float* local, Stream& main) override {
        shard.state->start(local, main);
        shard.fetch_for(1);
    }

    // Before the first step: a trial exchange as large as the largest fragment. When it returns, all
    // workers have arrived, and kernels, pinned memory and connections have been used once, so that none of
    // them is set up during a step. Throws as after_inner_step() does.
    void rehearse(Stream& main) {
        const Sync sync = rehearsal(shard.largest, shard.values[size_t(shard.largest)]);
        uint8_t* payload = exchange->payload(sync);
        shard.rehearse_encode(payload, exchange->layout(sync), sync, exchange->encoding_sums(sync), main);
        exchange->start(sync, main);
        exchange->wait(sync);
        exchange->mean(shard.mean, sync, main);
        shard.rehearse_apply(sync, main);
        end_exchange(sync, false, main);
        main.synchronize();
    }

    Outcome begin(long step, uint64_t, float*, floatX*, Stream& main) override {
        rehearse(main);
        return outcome(step, {});
    }

    Outcome after_inner_step(long step, uint64_t tokens, float* local, floatX* params,
                             Stream& main) override {
        for (int p = 0; p < int(shard.fragments.size()); p++) {
            const bool sends = is_sent(shard.fragments[p], step, shard.options.inner_steps);
            if (sends) { send(p, step, tokens, local, main); }
        }
        std::vector<SyncReport> reports = receive_due(step, local, params, main);
        shard.fetch_for(step + 1);
        return outcome(step, std::move(reports));
    }

    Outcome finish(long step, float* local, floatX* params, Stream& main) override {
        return {step, receive_due(in_flight.empty() ? 0 : due_step(in_flight.back()), local, params, main)};
    }

    void request_stop() override { stopping = true; }

    DilocoSnapshot& snapshot() override {
        if (!taken) {
            const long largest = shard.values[size_t(shard.largest)];
            const size_t means = std::max(size_t(most), in_flight.size());
            taken = std::make_unique<DilocoSnapshot>(*shard.state, shard.feedback, exchange->owner_feedback,
                                                     largest, int(means));
        }
        return *taken;
    }

    void take_snapshot(Stream& copies) override { snapshot().begin(in_flight, tokens_at_send, copies); }

    void collect_in_flight(Stream& main) override {
        for (; !in_flight.empty(); in_flight.pop_front()) { end(take(in_flight.front(), main), main); }
    }

    void checkpointed() override {}  // in lock-step no other worker depends on it

    void restore(const SavedState& saved, const Fields& fields, Stream& main) override {
        // An elastic worker may be ahead of the others or behind them. In lock-step all are at the same step.
        if (fields.has("log.generation")) {
            throw UserError(saved.path() + " belongs to a run with --outer-transport store: resume it with "
                            "that, or start from its model (-e model_STEP.bin)");
        }
        tokens_at_send = saved_tokens(fields, shard.fragments.size());
        resumed = saved_syncs(fields, long(shard.fragments.size()), workers);
        read_means(resumed, saved, shard.fragments, shard.values, shard.options.inner_steps);
        shard.load(saved, main);
        exchange->owner_feedback.load(saved, "owner_residuals", main);
        in_flight.clear();
        for (const SavedSync& one : resumed) { in_flight.push_back(one.sync); }
        shard.reserve_reports(int(resumed.size()));  // with a smaller tau all may be due in one step
        shard.fetch_for(saved.step() + 1);
    }

    const float* global(Stream& main) override { return shard.state->global(main); }

private:
    Outcome outcome(long step, std::vector<SyncReport> reports) const {
        const DilocoOptions& o = shard.options;
        Outcome outcome{step, std::move(reports)};
        outcome.exchanges = is_exchanging(shard.fragments, step + 1, o.inner_steps, o.overlap);
        return outcome;
    }

    long due_step(const Sync& sync) const { return sync.send_step + shard.options.overlap; }

    // Starts the exchange of fragment p's outer gradient.   master: local in fp32 (shard_size)
    void send(int p, long step, uint64_t tokens, const float* master, Stream& main) {
        const Sync sync = shard.sync_at(p, step);
        uint8_t* payload = exchange->payload(sync);
        const FragmentValues global = shard.global_values(p, main), local = shard.local_values(p, master);
        const OuterGradient delta = global - local;
        shard.encode(payload, exchange->layout(sync), sync, tokens - tokens_at_send[p],
                     stopping ? stop_requested : 0, delta, exchange->encoding_sums(sync), main);
        exchange->start(sync, main);
        tokens_at_send[p] = tokens;
        in_flight.push_back(sync);
    }

    // Receives in the order of sending, which is that of the sync numbers and of this worker's due steps.
    std::vector<SyncReport> receive_due(long step, float* local, floatX* params, Stream& main) {
        std::vector<SyncReport> reports;
        for (; !in_flight.empty() && due_step(in_flight.front()) <= step; in_flight.pop_front()) {
            const Sync& sync = in_flight.front();
            SyncReport& report = reports.emplace_back(take(sync, main));
            if (report.applied()) {
                report.mean_square = shard.apply(sync, LocalMove::merge, local, params, main);
            }
            end(report, main);
        }
        return reports;
    }

    // Waits for a sync, and writes its mean to shard.mean if it is to be applied.
    SyncReport take(const Sync& sync, Stream& main) {
        for (const SavedSync& saved : resumed) {
            if (saved.sync.number == sync.number) { return take_saved(saved, main); }
        }
        const Timestamp idle_from = main.stamp();
        const Headers headers = exchange->wait(sync);
        SyncReport report{sync.number, sync.fragment, sync.send_step, due_step(sync), {}, idle_from,
                          main.stamp(), 0, not_finite_of(headers)};
        report.stops = asks_to_stop(headers);
        for (const std::vector<PayloadHeader>& part : headers.sent) {
            report.global_hash += part[size_t(shard.worker)].hash;
        }
        check_agreement(headers, sync);
        if (report.applied()) {
            exchange->mean(shard.mean, sync, main);
            report.statistics = outer_statistics(exchange->encoding_sums(sync), headers.sums, workers);
        }
        report.traffic = end_exchange(sync, report.applied(), main);
        return report;
    }

    // The same for a sync that was in flight when the resumed run stopped: its mean is in the checkpoint.
    SyncReport take_saved(const SavedSync& saved, Stream& main) {
        SyncReport report = saved.report;
        report.due_step = due_step(saved.sync);
        report.idle_from = report.idle_until = main.stamp();
        if (report.applied()) {
            device::copy_to_device(shard.mean.data(), saved.mean.data(), saved.sync.values, main);
        }
        return report;
    }

    void end(const SyncReport& report, Stream& main) {
        if (taken) { taken->deliver(report, shard.mean, main); }
    }

    // Throws if the hashes show that workers held different global parameters at the send.
    void check_agreement(const Headers& headers, const Sync& sync) const {
        std::set<int> diverged;
        for (const std::vector<PayloadHeader>& part : headers.sent) {
            for (int worker : diverged_workers(part)) { diverged.insert(worker); }
        }
        if (diverged.empty()) { return; }
        const std::string who = workers_in_words({diverged.begin(), diverged.end()});
        // A wrong momentum changes global, and thus the hash, only one exchange later.
        const long good = sync.send_step - 2 * shard.options.inner_steps;
        throw RunError("the global parameters of " + describe(sync) + " differ between workers (suspected: " +
                       who + "): start the run again from its last checkpoint, or, if it stops here again, " +
                       (good > 0 ? format("from one of step %ld or before", good) : "from its beginning"));
    }

    Traffic end_exchange(const Sync& sync, bool applied, Stream& main) {
        shard.feedback.end(sync.fragment, sync.number, applied, main);
        return exchange->finish(sync, applied, main);
    }

    const int workers;
    const int most;  // exchanges in flight at the same time, at most
    OuterShard shard;
    std::vector<uint64_t> tokens_at_send;  // of each fragment
    std::deque<Sync> in_flight;
    std::vector<SavedSync> resumed;  // in flight in the checkpoint; kept, since copies may read them
    bool stopping = false;
    std::unique_ptr<Exchange> exchange;
    std::unique_ptr<DilocoSnapshot> taken;  // null before the first snapshot()
};
