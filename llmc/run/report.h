// Report: what a run says while it trains: numbers for the logs (logger.h), lines for people (the status
// line). Every process logs; one process of those that were started together speaks to people.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "llmc/checkpoint/training_state.h"
#include "llmc/comm.h"
#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/mfu.h"
#include "llmc/outlier.h"
#include "llmc/run/inputs.h"
#include "llmc/run/logger.h"
#include "llmc/run/options.h"
#include "llmc/run/process.h"
#include "llmc/run/stores.h"
#include "streaming/outer_loop.h"
#include "streaming/plan.h"
#include "streaming/sync_report.h"

// "1 step", "2 steps"
inline std::string counted(long n, const char* what) {
    return format("%ld %s%s", n, what, n == 1 ? "" : "s");
}

// The log's line for a sync that was merged in `step`.   time: of the log
inline JsonLine sync_line(const SyncReport& r, long step, double time) {
    std::vector<double> contributors, tokens;
    for (const auto& one : r.log ? r.log->contributors : std::vector<LogReport::Contributor>()) {
        contributors.push_back(one.worker);
        tokens.push_back(double(one.tokens));
    }
    const auto of_log = [&](auto LogReport::*field) {  // null in lock-step, which has no sync log
        return r.log ? std::optional((*r.log).*field) : std::nullopt;
    };
    return JsonLine().field("type", "sync").field("sync", r.sync).field("fragment", r.fragment)
        .field("send_step", r.send_step).field("apply_step", step).field("time", time)
        .field("bytes_sent", r.traffic.bytes_sent).field("bytes_received", r.traffic.bytes_received)
        .field("wire_seconds", r.traffic.seconds).field("waited_seconds", r.waited_seconds())
        .field("global_hash", format("%016llx", (unsigned long long)r.global_hash))
        .field("staleness", step - r.send_step).field("delta_norm", r.statistics.delta_norm)
        .field("mean_norm", r.mean_norm()).field("quantization_error", r.statistics.quantization_error)
        .field("cosines", r.statistics.cosines).field("mean_cosines", r.statistics.mean_cosines)
        .field("contributors", contributors).field("contributor_tokens", tokens)
        .field("decider", of_log(&LogReport::decider))
        .field("grace_seconds", of_log(&LogReport::grace_seconds))
        .field("counted", of_log(&LogReport::counted));
}

inline JsonLine event_line(const OuterEvent& event, long step, double time, long unix_time) {
    return JsonLine().field("type", "event").field("step", step).field("time", time)
        .field("unix_time", unix_time).field("kind", event.kind).field("sync", event.sync)
        .field("worker", event.worker).field("text", event.text);
}

// The log's last line.   inner_bytes_sent: by this process in the whole run
inline JsonLine end_line(long step, double time, const Totals& totals, uint64_t inner_bytes_sent,
                         const OuterCosts& costs) {
    return JsonLine().field("type", "end").field("step", step).field("time", time)
        .field("train_seconds", totals.train_seconds).field("inner_bytes_sent", inner_bytes_sent)
        .field("outer_bytes_sent", totals.outer.bytes_sent).field("waited_seconds", totals.waited_seconds)
        .field("log_turn_seconds", costs.turns).field("log_thread_seconds", costs.threads);
}

// How many outer steps a run has, and, if they are few, what that costs. Measured with 0.66M parameters and
// tuned outer settings (dev/results/quality.md): how far, in percent, the loss of two workers and of four
// ends above data-parallel's after 110 outer steps, and by which power of their number that falls.
inline std::string outer_steps(const Options& o, long steps) {
    const double after_110 = o.uses_muon() ? (o.workers > 2 ? 3.4 : 1.2) : (o.workers > 2 ? 6.2 : 2.4);
    const long H = o.diloco.inner_steps, count = steps / H, least = 15;  // fewer were not measured
    const double cost = after_110 * std::pow(110.0 / std::max(count, least), o.uses_muon() ? 0.5 : 0.8);
    const std::string text = format("%s, H = %ld", counted(count, "outer step").c_str(), H);
    if (o.workers == 1 || cost < 2) { return text; }
    return text + format(": few, so expect a loss %s %.0f%% above data-parallel's, or more where outer "
                         "rates are not tuned; a smaller -H or a longer run narrows the gap",
                         count < least ? "more than" : "some", cost);
}

// What a process asks of a bucket, and what that costs at AWS's prices of 2026-11: $5 for a million requests
// that write or list, $0.40 for reads. Counted with two and four workers (scripts/multi_node/s3.md).
inline std::string bucket_requests(int workers) {
    const double sync_writes = 2 + 1.4 / workers, sync_reads = 2.3 * workers;
    const double writes_a_second = 1.6, reads_a_second = 0.8 + 0.8 * workers;  // signs of life
    auto dollars = [](double writes, double reads) { return (5 * writes + 0.4 * reads) / 1e6; };
    return format("about %.0f requests a sync and %.0f a second from each process: at AWS's prices $%.2f for "
                  "10,000 syncs and $%.2f a day", sync_writes + sync_reads, writes_a_second + reads_a_second,
                  10000 * dollars(sync_writes, sync_reads), 86400 * dollars(writes_a_second, reads_a_second));
}

class Report {
public:
    // device: its name   sync_bytes: that a process sends in a sync, per fragment; empty without an exchange
    Report(const Options& options, const Process& process, const Inputs& inputs,
           const std::vector<Fragment>& fragments, const std::string& device, std::vector<size_t> sync_bytes,
           Totals& totals, Logger& logger, StatusLine& status)
        : o(options), process(process), inputs(inputs), fragments(fragments), device(device),
          sync_bytes(std::move(sync_bytes)), totals(totals), logger(logger), status(status),
          flops_per_token(model_flops_per_token(inputs.shape, inputs.layout.values, o.seq_len)),
          peak(peak_flops(device, sizeof(floatX) == 2, matmul_precision(o.matmul_precision))) {}

    // the largest tau of all workers, if the workers stop together: rates() then says how long a stop takes.
    std::optional<long> stop_overlap;

    // Rank 0 of worker 0 speaks; of a worker that was started by itself (--worker), its own rank 0.
    bool speaks() const { return process.rank == 0 && (process.worker == 0 || o.worker >= 0); }

    void say(const std::string& line) {
        if (speaks()) { status.print(line); }
    }

    // matmul: how matrices are multiplied   exchanges: the plan of the syncs; notes: of the resumed
    // checkpoint
    void banner(const std::string& matmul, const std::string& exchanges,
                const std::vector<std::string>& notes, long resumed_step) const {
        if (!speaks()) { return; }
        const GptShape& s = inputs.shape;
        printf(
            "model      %s, %s, %d channels, vocabulary %d (padded to %d), %d positions: %.2fM parameters\n",
            counted(s.layers, "layer").c_str(), counted(s.heads, "head").c_str(), s.channels, s.vocab_size,
            s.padded_vocab_size, s.max_seq_len, double(inputs.layout.values) / 1e6);
        printf("processes  %s x %s%s\n", counted(o.workers, "worker").c_str(),
               counted(o.ranks, "rank").c_str(),
               o.worker >= 0 ? format(", this is worker %d", o.worker).c_str() : "");
        printf("step       %ld tokens %s: %s of %d x %d tokens on each rank; %s\n", o.total_batch,
               o.has_own_batch() ? format("on worker %d", process.worker).c_str() : "a worker",
               counted(o.micro_steps(), "micro-step").c_str(), o.batch, o.seq_len,
               counted(inputs.steps, "step").c_str());
        if (o.uses_muon()) {
            printf("optimizer  Muon at %g for the layers' matrices, AdamW at %g for the rest\n",
                   double(o.muon.learning_rate), double(o.schedule.peak));
        }
        printf("device     %s; matmuls in %s; parameters %s, gradients fp32\n", device.c_str(),
               matmul.c_str(), sizeof(floatX) == 2 ? "bf16" : "fp32");
        fputs(exchanges.c_str(), stdout);
        if (o.diloco.streams()) { printf("outer      %s\n", outer_steps(o, inputs.steps).c_str()); }
        if (o.diloco.is_elastic() && is_s3_url(process.store_url)) {
            printf("bucket     %s\n", bucket_requests(o.workers).c_str());
        }
        for (const std::string& note : o.notes) { printf("note       %s\n", note.c_str()); }
        for (const std::string& note : notes) { printf("%s\n", note.c_str()); }
        if (resumed_step > 0) { printf("resumed after step %ld\n", resumed_step); }
        fflush(stdout);
    }

    // A step that the device has completed.   m: what the host knew when it enqueued the step
    void step(StepMetrics m, const Scalars& scalars, double seconds) {
        m.loss = scalars.loss;
        m.norm = scalars.norm;
        m.loss_zscore = scalars.loss_zscore;
        m.norm_zscore = scalars.norm_zscore;
        m.skipped = scalars.is_skipped();
        totals.train_seconds += seconds;
        m.seconds = seconds;
        m.tokens_per_second = double(o.total_batch) / seconds;
        if (peak) { m.mfu = flops_per_token * m.tokens_per_second / (*peak * process.ranks); }
        logger.step(m);
        if (measured_steps++ > 0) { measured_seconds += m.seconds; }
        if (!speaks() || !std::isfinite(m.loss)) { return; }
        if (!std::isfinite(m.norm)) {
            say(format("step %ld: the gradient is not finite (loss %g): its update is skipped", m.step,
                       m.loss));
        } else if (m.skipped) {
            say(format("step %ld: loss %.4f (z-score %.1f), gradient norm %.4g (z-score %.1f): an outlier, "
                       "its update is skipped", m.step, m.loss, m.loss_zscore, m.norm, m.norm_zscore));
        }
        status.update(m.step, inputs.steps, m.loss, m.tokens_per_second, m.mfu);
    }

    // Syncs whose means were merged in `step`.
    void syncs(long step, const std::vector<SyncReport>& reports) {
        if (!reports.empty()) { totals.next_sync = 0; }  // with another H, the numbering differs
        for (const SyncReport& r : reports) {
            totals.syncs++;
            totals.next_sync = std::max(totals.next_sync, r.sync + 1);
            totals.outer.bytes_sent += r.traffic.bytes_sent;
            totals.outer.bytes_received += r.traffic.bytes_received;
            totals.waited_seconds += r.waited_seconds();
            logger.write(sync_line(r, step, logger.seconds()));
            if (process.worker != 0 && o.worker < 0) { continue; }
            for (int worker : r.not_finite) {  // every rank says so, since it concerns that rank's shard
                status.print(
                    format("sync %ld, fragment %d, shard %d: the outer gradient of worker %d, or its part of "
                           "the mean, is not finite: no worker applies it",
                           r.sync, r.fragment, process.rank, worker));
            }
        }
    }

    // Says the exchange's rates in Mbit/s, once, when eleven steps have been measured, or all steps of a
    // shorter run. The first step does not count, since it touches memory for the first time. all: steps that
    // this process trains
    void rates(long all) {
        if (sync_bytes.empty() || !speaks()) { return; }
        if (measured_steps < 2 || measured_steps != std::min(11L, all)) { return; }
        const double seconds = measured_seconds / double(measured_steps - 1);
        const int passes = o.diloco.is_elastic() ? o.workers : 1;
        say(::rates(fragments, sync_bytes, o.diloco.inner_steps, o.diloco.overlap, seconds, passes));
        if (stop_overlap) { say(time_to_stop(fragments, o.diloco.inner_steps, *stop_overlap, seconds)); }
    }

    // What happened between elastic workers. People read about their own workers, and once about the others.
    void events(long step, const std::vector<OuterEvent>& all) {
        for (const OuterEvent& event : all) {
            logger.write(event_line(event, step, logger.seconds(), Logger::unix_seconds()));
            const bool is_own = event.worker == process.worker;
            if (event.is_routine || process.rank > 0 || !(is_own || speaks())) { continue; }
            status.print((is_own ? format("worker %d ", event.worker) : "") + event.text);
        }
    }

    void validation(long step, float loss) {
        logger.eval(step, loss);
        if (std::isfinite(loss)) { say(format("validation loss %.4f after step %ld", double(loss), step)); }
    }

    void hellaswag(long step, double accuracy, long examples) {
        logger.hellaswag(step, accuracy, examples);
        say(format("HellaSwag %.4f after step %ld (%ld examples)", accuracy, step, examples));
    }

    // The last lines of a run that has come to its end.   inner: traffic between this worker's ranks
    void end(long step, const Traffic& inner, const OuterCosts& costs) {
        const Totals& t = totals;
        logger.write(end_line(step, logger.seconds(), t, inner.bytes_sent, costs));
        if (inputs.steps == 0) { return; }
        say(format("trained %ld steps in %.1f s: %.0f tokens/s a worker", inputs.steps, t.train_seconds,
                   double(t.tokens) / t.train_seconds));
        if (process.ranks > 1) {
            say(format("inner: %.1f MB sent by a rank", double(inner.bytes_sent) / 1e6));
        }
        if (sync_bytes.empty()) { return; }
        say(format("outer: %ld syncs, %.3f MB sent by a rank, waited %.2f s (%.2f%% of training)", t.syncs,
                   double(t.outer.bytes_sent) / 1e6, t.waited_seconds,
                   100 * t.waited_seconds / t.train_seconds));
    }

private:
    const Options& o;
    const Process& process;
    const Inputs& inputs;
    const std::vector<Fragment>& fragments;
    const std::string device;
    const std::vector<size_t> sync_bytes;
    Totals& totals;
    Logger& logger;
    StatusLine& status;
    const double flops_per_token;          // of the model
    const std::optional<double> peak;  // flops per second of one GPU's matmuls, if known
    long measured_steps = 0;               // by this process, since it started
    double measured_seconds = 0;           // of these, without the first
};
