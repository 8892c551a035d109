// SyncReport: what one exchange did, for logs and for people. A checkpoint holds the reports of the syncs
// that were in flight when it was taken, so that the resumed run's log is complete.
#pragma once
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
        uint64_t tokens;  // trained on since its last send of the fragment
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
    OuterStatistics statistics = {};  // of this process's shard; nothing, where nothing was applied
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

// Senders whose delta was not finite; if there are none, owners whose mean could not be sent.
inline std::vector<int> not_finite_of(const Headers& headers) {
    std::set<int> senders, owners;
    for (const std::vector<PayloadHeader>& part : headers.sent) {
        for (const PayloadHeader& header : part) {
            if (header.flags & delta_not_finite) { senders.insert(int(header.worker)); }
        }
    }
    for (const PayloadHeader& header : headers.means) {
        if (header.flags & delta_not_finite) { owners.insert(int(header.worker)); }
    }
    const std::set<int>& named = senders.empty() ? owners : senders;
    return std::vector<int>(named.begin(), named.end());
}

inline bool asks_to_stop(const Headers& headers) {
    for (const std::vector<PayloadHeader>& part : headers.sent) {
        for (const PayloadHeader& header : part) {
            if (header.flags & stop_requested) { return true; }
        }
    }
    return false;
}

// ---- in a checkpoint: what the resumed run cannot compute by itself. `stops` has had its effect already.

// The count that field `name` states, checked.
inline long count_of(const Fields& fields, const std::string& name, long most) {
    const long count = fields.integer(name);
    if (count < 0 || count > most) {
        throw UserError(format("the checkpoint has %ld of '%s', and there can be %ld: %s", count,
                               name.c_str(), most, checkpoint_hint()));
    }
    return count;
}

inline void add_numbers(Fields& fields, const std::string& name, const std::vector<double>& numbers) {
    fields.set(name, long(numbers.size()));
    for (size_t i = 0; i < numbers.size(); i++) { fields.set(name + "." + std::to_string(i), numbers[i]); }
}

inline std::vector<double> numbers_of(const Fields& fields, const std::string& name, long most) {
    std::vector<double> numbers(static_cast<size_t>(count_of(fields, name, most)));
    for (size_t i = 0; i < numbers.size(); i++) { numbers[i] = fields.real(name + "." + std::to_string(i)); }
    return numbers;
}

// prefix: of the fields' names
inline void add_report(Fields& fields, const std::string& prefix, const SyncReport& report) {
    fields.set(prefix + "bytes_sent", report.traffic.bytes_sent);
    fields.set(prefix + "bytes_received", report.traffic.bytes_received);
    fields.set(prefix + "seconds", report.traffic.seconds);
    fields.set(prefix + "global_hash", report.global_hash);
    fields.set(prefix + "delta_norm", report.statistics.delta_norm);
    fields.set(prefix + "quantization_error", report.statistics.quantization_error);
    add_numbers(fields, prefix + "cosines", report.statistics.cosines);
    add_numbers(fields, prefix + "mean_cosines", report.statistics.mean_cosines);
    const std::string not_finite = prefix + "not_finite";
    fields.set(not_finite, long(report.not_finite.size()));
    for (size_t i = 0; i < report.not_finite.size(); i++) {
        fields.set(not_finite + "." + std::to_string(i), long(report.not_finite[i]));
    }
}

// The report of `sync`, without its due step and the times of the main stream.
inline SyncReport report_of(const Fields& fields, const std::string& prefix, const Sync& sync, int workers) {
    SyncReport report{sync.number, sync.fragment, sync.send_step, 0, {}, {}, {}, 0, {}};
    report.traffic.bytes_sent = fields.count(prefix + "bytes_sent");
    report.traffic.bytes_received = fields.count(prefix + "bytes_received");
    report.traffic.seconds = fields.real(prefix + "seconds");
    report.global_hash = fields.count(prefix + "global_hash");
    report.statistics.delta_norm = fields.real(prefix + "delta_norm");
    report.statistics.quantization_error = fields.real(prefix + "quantization_error");
    report.statistics.cosines = numbers_of(fields, prefix + "cosines", row_sums(workers));
    report.statistics.mean_cosines = numbers_of(fields, prefix + "mean_cosines", workers);
    const long not_finite = count_of(fields, prefix + "not_finite", workers);
    for (long i = 0; i < not_finite; i++) {
        report.not_finite.push_back(int(fields.integer(prefix + "not_finite." + std::to_string(i))));
    }
    return report;
}
