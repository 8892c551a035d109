// The plan of a run, before it starts: whether its options are valid, its fragments, and what it sends when.
#pragma once
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "llmc/layout.h"
#include "streaming/exchange.h"
#include "streaming/outer.h"
#include "streaming/outer_shard.h"
#include "streaming/schedule.h"

// Throws a UserError for options that are not valid for a run of `steps` steps (-1: not known yet).
inline void validate(const DilocoOptions& options, long steps, int workers) {
    const long H = options.inner_steps;
    if (H < 1) { throw UserError(format("%ld inner steps (H): use at least 1", H)); }
    if (options.overlap < 0 || options.overlap >= H) {
        throw UserError(format("an overlap (tau) of %ld steps with %ld inner steps (H): use 0 to %ld, so "
                               "that a fragment has arrived before it is sent again",
                               options.overlap, H, H - 1));
    }
    wire_options(options);  // refuses unknown words
    if (options.streams()) { make_outer_step(options); }
    if (workers > 1 && !options.streams()) {
        throw UserError(format("%d workers without an outer optimizer would never sync: use nesterov or "
                               "average, or one worker with more ranks", workers));
    }
    if (steps >= 0 && steps < H) {
        throw UserError(format("%ld steps are fewer than H = %ld, so some fragments would never be exchanged: "
                               "train for more steps (-x), or lower -H", steps, H));
    }
}

// The fragments that workers exchange; none without an outer optimizer.
inline std::vector<Fragment> make_fragments(const Layout& layout, const DilocoOptions& options) {
    if (!options.streams()) { return {}; }
    return make_fragments(layout, options.fragment_layers, parse_fragment_pattern(options.fragment_pattern),
                          options.inner_steps);
}

// The offset t_p of each fragment.
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

// Bytes that a process takes for the exchange: on the device, in the host's memory, and for a snapshot.
struct OuterBytes {
    double device = 0, host = 0, snapshot = 0;
};
inline OuterBytes outer_bytes(const DilocoOptions& options, const Layout& layout, int workers) {
    if (!options.streams()) { return {}; }
    const std::vector<Fragment> fragments = make_fragments(layout, options);
    const std::vector<long> values = shard_values(fragments, layout);
    const double all = double(layout.shard_size());
    const double largest = double(*std::max_element(values.begin(), values.end()));
    const double flying = most_in_flight(fragments, options.inner_steps, options.overlap);
    const double slots = most_in_a_step(fragments, options.inner_steps, options.overlap);
    const double payload = double(payload_bytes(wire_options(options).format, long(largest)));
    const double state = 8 * all;
    const bool is_all_to_all = planned_exchange(options, values, workers) == ExchangeKind::all_to_all;
    const double holders = is_all_to_all ? 1 + 1.0 / workers : 1;  // of residuals: sender and owner
    const double kept = options.is_elastic() ? double(fragments.size()) : flying;  // from before a sync
    const double residuals = options.outer_error_feedback ? 4 * holders : 0;  // bytes a value
    const double feedback = residuals * (all + kept * largest);
    const double payloads = (options.is_elastic() ? 1 : flying) * (is_all_to_all ? 3 : workers + 1);
    const bool has_mean = has_mean_row(workers) && !options.is_elastic();
    const double means = is_all_to_all ? (4 * largest + payload) / workers : has_mean ? 4 * largest : 0;
    const double wire = 4 * largest + payloads * payload + means + feedback;
    // Payloads: pinned; of each sync in flight; and of the one being sent, in a request and in a buffer.
    const double copies = workers + double(fragments.size()) + flying * (workers + 1) + 2;
    const double staged = runs_on_gpu && options.transport == "tcp" ? (is_all_to_all ? 2 : workers + 1) : 0;
    const double outside = (options.is_elastic() ? copies : staged) * payload;
    const double relay = 4 * double(relay_values(layout.shard_size()));
    const double on_device = options.offload ? slots * 8 * largest + relay : state;
    const double saved = options.is_elastic() ? 2 * residuals * all : residuals * all + 4 * flying * largest;
    return {on_device + wire, (options.offload ? state : 0) + outside, state + saved};
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

// The bandwidth, in bytes per step, at which no merge waits if there is no latency: whatever is sent in
// `length` + 1 consecutive steps must be transferred within `length` + overlap steps.
// overlap: at least 1. Windows that begin with an idle step are skipped: they need no more than without it.
inline double bytes_a_step_without_waits(const std::vector<size_t>& sent, long overlap) {
    const long H = long(sent.size());
    double most = double(std::accumulate(sent.begin(), sent.end(), size_t(0))) / double(H);
    for (long first = 0; first < H; first++) {
        size_t sum = 0;
        for (long length = 0; length < H && sent[first] > 0; length++) {
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
                         "step at most; at most %d in flight at a time\n", sum, H, name_of(exchange).c_str(),
                         sum / double(H), peak, most_in_flight(fragments, H, options.overlap));
}

// The plan in Mbit/s, once the duration of a step is known: a line for people.
// bytes: that a process sends in a sync, by fragment
// passes: how often these bytes cross its link in a sync, one after another: once in lock-step, where it
// sends and receives at the same time; over a store once up, and once down for each other worker
inline std::string rates(const std::vector<Fragment>& fragments, const std::vector<size_t>& bytes, long H,
                         long overlap, double step_seconds, int passes) {
    const std::vector<size_t> sent = sent_in_period(fragments, bytes, H);
    auto mbits = [&](double bytes_a_step) { return bytes_a_step * 8e-6 / step_seconds; };
    const double average = double(std::accumulate(sent.begin(), sent.end(), size_t(0))) / double(H);
    const double peak = double(*std::max_element(sent.begin(), sent.end()));
    std::string line = format("at %.4g s a step a process sends %.4g Mbit/s on average and %.4g Mbit/s in "
                              "the step that sends most", step_seconds, mbits(average), mbits(peak));
    if (overlap > 0) {
        line += format("; with an overlap of %ld a link of %.4g Mbit/s keeps up", overlap,
                       mbits(passes * bytes_a_step_without_waits(sent, overlap)));
    }
    return line;
}

// How long a request to stop takes in lock-step: a worker's ranks learn of it with the loss of the next step,
// send it with the next sync after two more steps, and all stop when the slowest worker has merged that sync.
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
