// SyncReport: what one exchange did, for logs and for people. A checkpoint holds the reports of the syncs
// that were in flight when it was taken, so that the resumed run's log is complete.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/state.h"
#include "streaming/exchange.h"

// What the sync log of an elastic run decided for a sync.
struct LogReport {
    struct Contributor {
        int worker;
        uint64_t tokens;  // trained on since its last send of the fragment that counted
    };
    std::vector<Contributor> contributors;  // ascending; none: all workers skip the sync
    bool counted = false;                   // this worker is among them
    int decider = -1;                       // worker
    double grace_seconds = 0;               // that the decider waited for workers that did not send
};

struct SyncReport {
    long sync;
    int fragment;
    long send_step, due_step;
    Traffic traffic;
    Timestamp idle_from, idle_until;  // of the main stream: see waited_seconds()
    uint64_t global_hash;         // of this worker's global parameters of the fragment, at the send
    // Workers whose delta of this shard was not finite, or else owners of a mean that was not. If there are
    // any, no worker applies the sync.
    std::vector<int> not_finite;
    OuterStatistics statistics = {};  // of this process's shard; empty: not applied
    std::shared_ptr<HostBuffer<float>> mean_square = nullptr;  // nothing was applied
    bool stops = false;  // some worker has asked all to stop when it sent this
    std::optional<LogReport> log = std::nullopt;  // of the sync log; in lock-step all workers take part

    bool applied() const { return not_finite.empty() && !(log && log->contributors.empty()); }

    // How long the main stream was idle before this mean could be applied, by its own clock: from the end
    // of the work enqueued before, until the host noticed the end of the exchange. This includes the wait
    // for a worker that sends later, the wire, and the host's polling (every 50 us on a GPU). Call it after
    // the host has seen a later event of the main stream complete.
    double waited_seconds() const { return seconds_between(idle_from, idle_until); }

    // The norm of this shard of the mean; to be called as waited_seconds(). NaN: nothing was applied.
    double mean_norm() const { return mean_square ? std::sqrt(mean_square->data()[0]) : NAN; }
};

// The workers whose headers have a flag.
inline std::set<int> flagged(const std::vector<PayloadHeader>& headers, uint32_t flag) {
    std::set<int> workers;
    for (const PayloadHeader& header : headers) {
        if (header.flags & flag) { workers.insert(int(header.worker)); }
    }
    return workers;
}

// Senders whose delta was not finite; if there are none, owners whose mean could not be sent.
inline std::vector<int> not_finite_of(const Headers& headers) {
    std::set<int> named;
    for (const auto& part : headers.sent) { named.merge(flagged(part, delta_not_finite)); }
    if (named.empty()) { named = flagged(headers.means, delta_not_finite); }
    return std::vector<int>(named.begin(), named.end());
}

inline bool asks_to_stop(const Headers& headers) {
    return std::any_of(headers.sent.begin(), headers.sent.end(),
                       [](const auto& part) { return !flagged(part, stop_requested).empty(); });
}

// ---- in a checkpoint: what a resumed run cannot compute. `stops` is not saved: that run has stopped.

// Calls field(name, value) for each number of a report, to write it or to read it back.
template <class ReportT, class Field>
void for_numbers(ReportT& report, Field field) {
    field("bytes_sent", report.traffic.bytes_sent);
    field("bytes_received", report.traffic.bytes_received);
    field("seconds", report.traffic.seconds);
    field("global_hash", report.global_hash);
    field("delta_norm", report.statistics.delta_norm);
    field("quantization_error", report.statistics.quantization_error);
}

// prefix: of the fields' names
inline void add_report(Fields& fields, const std::string& prefix, const SyncReport& report) {
    for_numbers(report, [&](const char* name, const auto& value) { fields.set(prefix + name, value); });
    fields.set(prefix + "cosines", report.statistics.cosines);
    fields.set(prefix + "mean_cosines", report.statistics.mean_cosines);
    fields.set(prefix + "not_finite", report.not_finite);
}

// The report of `sync`, without its due step and the times of the main stream.
inline SyncReport report_of(const Fields& fields, const std::string& prefix, const Sync& sync, int workers) {
    SyncReport report{sync.number, sync.fragment, sync.send_step, 0, {}, {}, {}, 0, {}};
    for_numbers(report, [&](const char* name, auto& value) { fields.read(prefix + name, value); });
    fields.read(prefix + "cosines", report.statistics.cosines, row_sums(workers));
    fields.read(prefix + "mean_cosines", report.statistics.mean_cosines, workers);
    fields.read(prefix + "not_finite", report.not_finite, workers);
    return report;
}
