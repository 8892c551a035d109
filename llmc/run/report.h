// Report: what a run says while it trains: numbers for the logs (logger.h), lines for people (the status
// line). Every process logs; one process of those that were started together speaks to people.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/checkpoint/training_state.h"
#include "llmc/clock.h"
#include "llmc/comm.h"
#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/mfu.h"
#include "llmc/outlier.h"
#include "llmc/run/inputs.h"
#include "llmc/run/logger.h"
#include "llmc/run/options.h"
#include "llmc/run/process.h"
#include "streaming/exchange.h"
#include "streaming/outer_loop.h"
#include "streaming/outer_shard.h"
#include "streaming/plan.h"
#include "streaming/schedule.h"
#include "streaming/sync_report.h"

// "1 step", "2 steps"
inline std::string counted(long n, const char* what) {
    return format("%ld %s%s", n, what, n == 1 ? "" : "s");
}

inline SyncMetrics sync_metrics(const SyncReport& r, long step) {
    SyncMetrics m{r.sync,
                  r.fragment,
                  r.send_step,
                  step,
                  r.traffic.bytes_sent,
                  r.traffic.bytes_received,
                  r.traffic.seconds,
                  r.waited_seconds(),
                  r.global_hash,
                  r.statistics.delta_norm,
                  r.mean_norm(),
                  r.statistics.quantization_error,
                  r.statistics.cosines,
                  r.statistics.mean_cosines};
    if (!r.log) { return m; }
    for (const LogReport::Contributor& contributor : r.log->contributors) {
        m.contributors.push_back(contributor.worker);
        m.contributor_tokens.push_back(double(contributor.tokens));
    }
    m.decider = r.log->decider;
    m.grace_seconds = r.log->grace_seconds;
    m.counted = r.log->counted;
    return m;
}

// -----------------------------------------------------------------------------------------------------------
// The plan of the exchanges, for people

// t_p of each.
inline std::vector<double> offsets(const std::vector<Fragment>& fragments) {
    std::vector<double> offsets;
    for (const Fragment& fragment : fragments) { offsets.push_back(double(fragment.offset)); }
    return offsets;
}

// An elastic worker sends its payload once, to the store, from which all others read it.
inline ExchangeKind planned_exchange(const DilocoOptions& options, const std::vector<long>& values,
                                     int workers) {
    if (options.is_elastic()) { return ExchangeKind::all_gather; }
    return choose_exchange(wire_options(options), values, workers);
}

// Bytes that a process sends in a sync, by fragment; none without an exchange.
inline std::vector<size_t> sync_bytes(const DilocoOptions& options, const std::vector<Fragment>& fragments,
                                      const Layout& layout, int workers) {
    const std::vector<long> values = shard_values(fragments, layout);
    const ExchangeKind exchange = planned_exchange(options, values, workers);
    const int members = options.is_elastic() ? 2 : workers;
    std::vector<size_t> bytes;
    for (long n : values) {
        bytes.push_back(exchange_bytes(exchange, wire_options(options).format, n, members));
    }
    return bytes;
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

// Bytes that a process sends in the steps t with t mod H = 0, 1, ..., H - 1.   bytes: of a sync, by fragment
inline std::vector<size_t> sent_in_period(const std::vector<Fragment>& fragments,
                                          const std::vector<size_t>& bytes, long H) {
    std::vector<size_t> sent(H, 0);
    for (size_t p = 0; p < fragments.size(); p++) { sent[fragments[p].offset] += bytes[p]; }
    return sent;
}

// The slowest link, in bytes per step, over which every fragment arrives within its `overlap` steps, without
// latency: the bytes that are sent in `length` + 1 consecutive steps have `length` + overlap steps to pass.
// overlap: at least 1
inline double bytes_a_step_without_waits(const std::vector<size_t>& sent, long overlap) {
    const long H = long(sent.size());
    double most = double(std::accumulate(sent.begin(), sent.end(), size_t(0))) / double(H);
    for (long first = 0; first < H; first++) {
        size_t sum = 0;
        for (long length = 0; length < H; length++) {
            sum += sent[(first + length) % H];
            most = std::max(most, double(sum) / double(length + overlap));
        }
    }
    return most;
}

// The schedule in words and numbers, for people: a line for each fragment and one for the sum.
inline std::string plan(const DilocoOptions& options, const std::vector<Fragment>& fragments,
                        const Layout& layout, int workers) {
    const long H = options.inner_steps;
    const std::vector<long> values = shard_values(fragments, layout);
    const ExchangeKind exchange = planned_exchange(options, values, workers);
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

// The plan in Mbit/s, once the duration of a step is known: a line for people.
// bytes: that a process sends in a sync, by fragment; it receives as many
inline std::string rates(const std::vector<Fragment>& fragments, const std::vector<size_t>& bytes, long H,
                         long overlap, double step_seconds) {
    const std::vector<size_t> sent = sent_in_period(fragments, bytes, H);
    auto mbits = [&](double bytes_a_step) { return bytes_a_step * 8e-6 / step_seconds; };
    const double average = double(std::accumulate(sent.begin(), sent.end(), size_t(0))) / double(H);
    const double peak = double(*std::max_element(sent.begin(), sent.end()));
    std::string line = format("at %.4g s a step a process sends %.4g Mbit/s on average and %.4g Mbit/s in "
                              "the step that sends most", step_seconds, mbits(average), mbits(peak));
    if (overlap > 0) {
        line += format("; with an overlap of %ld a link of %.4g Mbit/s keeps up", overlap,
                       mbits(bytes_a_step_without_waits(sent, overlap)));
    }
    return line;
}

// How long a request to stop takes in lock-step: it comes with the loss of the next step, is sent with the
// next sync after two more steps, and is obeyed when the slowest worker has merged that sync.
// overlap: tau of that worker   step_seconds: of a step
inline std::string time_to_stop(const std::vector<Fragment>& fragments, long H, long overlap,
                                double step_seconds) {
    std::vector<long> sends;
    for (const Fragment& fragment : fragments) { sends.push_back(fragment.offset); }
    std::sort(sends.begin(), sends.end());
    long longest = sends.front() + H - sends.back();
    for (size_t p = 1; p < sends.size(); p++) { longest = std::max(longest, sends[p] - sends[p - 1]); }
    const long steps = 3 + longest + overlap;
    return format("a stop (SIGTERM) takes up to %ld steps, %.3g s, and a checkpoint", steps,
                  double(steps) * step_seconds);
}

// -----------------------------------------------------------------------------------------------------------

class Report {
public:
    // device: its name   sync_bytes: that a process sends in a sync, per fragment; empty without an exchange
    Report(const Options& options, const Process& process, const Inputs& inputs,
           const std::vector<Fragment>& fragments, const std::string& device, std::vector<size_t> sync_bytes,
           Totals& totals, Logger& logger, StatusLine& status)
        : o(options),
          process(process),
          inputs(inputs),
          fragments(fragments),
          device(device),
          sync_bytes(std::move(sync_bytes)),
          totals(totals),
          logger(logger),
          status(status),
          flops_per_token(model_flops_per_token(inputs.shape, inputs.layout.values, o.seq_len)),
          promised(promised_flops(device, sizeof(floatX) == 2, matmul_precision(o.matmul_precision))) {}

    // tau of the slowest worker, if the workers stop together: rates() then says how long a stop takes.
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
        if (promised) { m.mfu = flops_per_token * m.tokens_per_second / (*promised * process.ranks); }
        logger.step(m);
        measured_steps++;
        if (measured_steps == 1) { first_seconds = m.seconds; }
        measured_seconds += m.seconds;
        if (!speaks() || !std::isfinite(m.loss)) { return; }
        if (!std::isfinite(m.norm)) {
            say(format("step %ld: the gradient is not finite (loss %g): its update is skipped", m.step,
                       m.loss));
        } else if (m.skipped) {
            say(format(
                "step %ld: loss %.4f (z-score %.1f), gradient norm %.4g (z-score %.1f): an outlier, its "
                "update is skipped",
                m.step, m.loss, m.loss_zscore, m.norm, m.norm_zscore));
        }
        status.update(m.step, inputs.steps, m.loss, m.tokens_per_second, m.mfu);
    }

    // Syncs whose means were merged in `step`.
    void syncs(long step, const std::vector<SyncReport>& reports) {
        for (const SyncReport& r : reports) {
            totals.syncs++;
            totals.next_sync = std::max(totals.next_sync, r.sync + 1);
            totals.outer.bytes_sent += r.traffic.bytes_sent;
            totals.outer.bytes_received += r.traffic.bytes_received;
            totals.waited_seconds += r.waited_seconds();
            logger.sync(sync_metrics(r, step));
            if (process.worker != 0 && o.worker < 0) { continue; }
            for (int worker : r.not_finite) {  // every rank says so, since it concerns that rank's shard
                status.print(
                    format("sync %ld, fragment %d, shard %d: the movement of worker %d is not finite: "
                           "nobody applies it",
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
        const double seconds = (measured_seconds - first_seconds) / double(measured_steps - 1);
        say(::rates(fragments, sync_bytes, o.diloco.inner_steps, o.diloco.overlap, seconds));
        if (stop_overlap) { say(time_to_stop(fragments, o.diloco.inner_steps, *stop_overlap, seconds)); }
    }

    // What happened between elastic workers. People read about their own workers, and once about the others.
    void events(long step, const std::vector<OuterEvent>& all) {
        for (const OuterEvent& event : all) {
            logger.event({step, event.kind, event.sync, event.worker, event.text});
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
    void end(const EndMetrics& m) {
        logger.end(m);
        const Totals& t = totals;
        if (inputs.steps == 0) { return; }
        say(format("trained %ld steps in %.1f s: %.0f tokens/s a worker", inputs.steps, t.train_seconds,
                   double(t.tokens) / t.train_seconds));
        if (process.ranks > 1) {
            say(format("inner: %.1f MB sent by a rank", double(m.inner_bytes_sent) / 1e6));
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
    const std::optional<double> promised;  // flops per second of one GPU's matmuls, if known
    long measured_steps = 0;               // by this process, since it started
    double measured_seconds = 0, first_seconds = 0;
};

// Ends the run with a RunError if a loss is not finite, and says what to do. A resume takes the newest step
// of which every process has a checkpoint, so the state that produced this loss must be deleted. name: of the
// loss   step: the parameters after this step gave it   folder: of the checkpoints
inline void check_loss(float loss, const std::string& name, long step, const std::string& folder,
                       const Process& process, const std::string& lineage, bool has_checkpoints) {
    if (std::isfinite(loss)) { return; }
    const std::string what = name + (std::isnan(loss) ? " is not a number: " : " is infinite: ");
    const CheckpointFolder files(folder, process);
    std::set<long> good;
    if (has_checkpoints) { good = files.whole_steps(lineage); }
    good.erase(good.lower_bound(step), good.end());
    if (good.empty()) {
        throw RunError(what + "start again with a lower -l or a longer -u (there is no earlier checkpoint)");
    }
    const bool is_suspect_there = !first_that_exists({files.state(step)}).empty();
    const std::string suspect = folder + format("/state_%08ld_*.bin", step);
    throw RunError(
        what + (is_suspect_there ? "remove " + suspect + ", then " : "") +
        format("resume (-y 1) from the last good checkpoint, of step %ld, with a lower -l or -sg 4: "
               "unchanged, the run would do the same again",
               *good.rbegin()));
}
