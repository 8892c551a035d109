// Comm over NCCL. The inner communicator is blocking and uses as many CTAs as NCCL chooses. The outer one is
// non-blocking and uses one CTA, so that the training step keeps the GPU during an exchange (comms.h).
//
// A call of a non-blocking communicator may return before NCCL has enqueued anything; an event recorded then
// would complete at once. So each call is polled until NCCL says that it is no longer in progress. The event
// of an aborted or failed collective completes, too: after the event, wait() asks the communicator.
// NCCL does not say which member failed: all report the run's first failure (cause.h).
#pragma once
#include <nccl.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/run/cause.h"
#include "llmc/comm.h"
#include "llmc/run/store.h"
#include "llmc/stream.h"

namespace cuda {

class NcclComm : public ::Comm {
public:
    // is_outer: non-blocking, one SM, timed; else blocking, and as many SMs as NCCL chooses.
    // Throws CommError if some member has not joined within the group's timeout, unless the communicator is
    // blocking: then the watchdog ends the process.
    NcclComm(const CommGroup& group, bool is_outer) : group(group), is_outer(is_outer) {
        const std::string key = group.name + "/nccl";
        const ncclUniqueId id = share_id(key);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = is_outer ? 0 : 1;
        if (is_outer) { config.minCTAs = config.maxCTAs = 1; }  // else as many as NCCL chooses
        settle(ncclCommInitRankConfig(&comm, size(), id, rank(), &config), "ncclCommInitRankConfig");
        if (rank() == 0) { group.store.remove(key); }
    }

    // Abandons collectives that are in progress: their results are no longer needed.
    ~NcclComm() override { ncclCommAbort(comm); }

    int rank() const override { return group.rank; }
    int size() const override { return group.size; }
    int sms() const override { return size() > 1 && is_outer ? 1 : 0; }

    void all_gather(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        call("ncclAllGather", bytes, stream, traffic,
             [&] { return ncclAllGather(inp, out, bytes, ncclUint8, comm, stream); });
    }

    void all_to_all(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        char* const to = static_cast<char*>(out);
        const char* const from = static_cast<const char*>(inp);
        call("all-to-all", bytes, stream, traffic, [&] {
            require(ncclGroupStart(), "ncclGroupStart");
            for (int peer = 0; peer < size(); peer++) {
                grouped(ncclSend(from + size_t(peer) * bytes, bytes, ncclUint8, peer, comm, stream));
                grouped(ncclRecv(to + size_t(peer) * bytes, bytes, ncclUint8, peer, comm, stream));
            }
            return ncclGroupEnd();
        });
    }

    void reduce_scatter(float* out, const float* inp, size_t count, Stream& stream,
                        Traffic* traffic) override {
        call("ncclReduceScatter", count * sizeof(float), stream, traffic,
             [&] { return ncclReduceScatter(inp, out, count, ncclFloat, ncclSum, comm, stream); });
    }

    void all_reduce(float* values, size_t count, Stream& stream, Traffic* traffic) override {
        call("ncclAllReduce", count * sizeof(float), stream, traffic,
             [&] { return ncclAllReduce(values, values, count, ncclFloat, ncclSum, comm, stream); });
    }

    // If another thread is in a call, that thread will see a failure.
    void check() override {
        std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
        if (lock.owns_lock()) { check_calls(lock); }
    }

    void wait(const Event& event) override {
        Patience patience(group.timeout);
        while (!event.query()) {
            check();
            if (patience.is_over()) { fail_waiting(is_outer ? slow_link : "a collective"); }
            nap(patience);
        }
        std::unique_lock<std::mutex> lock(mutex);
        check_calls(lock);
        add_times();
    }

private:
    static constexpr const char* slow_link = "an exchange: over a slow link raise --timeout, or give "
                                             "--outer-transport tcp";
    struct Timing {
        Timestamp begin, end;
        Traffic* traffic;
    };

    // Shares rank 0's id through the store.
    ncclUniqueId share_id(const std::string& key) const {
        ncclUniqueId id;
        if (rank() == 0) {
            require(ncclGetUniqueId(&id), "ncclGetUniqueId");
            group.store.set(key, std::string(id.internal, sizeof id.internal));
            return id;
        }
        Patience patience(group.timeout);
        std::optional<std::string> shared;
        while (!(shared = group.store.try_get(key))) {
            if (patience.is_over() || group.store.try_get("cause")) { fail_waiting("NCCL's id"); }
            patience.pause();
        }
        memcpy(id.internal, shared->data(), sizeof id.internal);
        return id;
    }

    template <class Call>
    void call(const char* name, size_t bytes, Stream& stream, Traffic* traffic, Call enqueue) {
        const bool timed = traffic && is_outer;  // Traffic::seconds, by timestamps around each call
        const Timestamp begin = timed ? stream.stamp() : Timestamp();
        settle(locked(enqueue), name);
        if (timed) { timings.push_back({begin, stream.stamp(), traffic}); }
        if (traffic) {
            traffic->bytes_sent += size_t(size() - 1) * bytes;
            traffic->bytes_received += size_t(size() - 1) * bytes;
        }
    }

    // Only one thread at a time may call NCCL on a communicator, and the watchdog has its own thread.
    template <class Call>
    ncclResult_t locked(Call call) {
        const std::lock_guard<std::mutex> lock(mutex);
        return call();
    }

    ncclResult_t state_of_calls() const {
        ncclResult_t state = ncclSuccess;
        require(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError");
        return state;
    }

    // Throws if a call has failed. Releases `lock`, of the mutex, before it waits for a cause.
    void check_calls(std::unique_lock<std::mutex>& lock) const {
        const ncclResult_t state = state_of_calls();
        lock.unlock();
        if (state != ncclInProgress) { require(state, "a collective"); }
    }

    // Returns when the call is enqueued. For a non-blocking communicator only its state tells, not the result
    // of the call.
    void settle(ncclResult_t result, const char* name) {
        if (is_outer && result == ncclSuccess) { result = ncclInProgress; }
        Patience patience(group.timeout);
        while (result == ncclInProgress) {
            result = locked([&] { return state_of_calls(); });
            if (result != ncclInProgress) { break; }
            if (patience.is_over()) { fail_waiting(name); }
            nap(patience);
        }
        require(result, name);
    }

    // The pause between two polls. (Time while this process is stopped does not count as the others'
    // silence.)
    static void nap(Patience& patience) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        patience.has_waited(0.001);
    }

    // Checks a call in a group: all calls are enqueued at the group's end.
    void grouped(ncclResult_t result) const {
        if (result != ncclInProgress) { require(result, "a call of a group"); }
    }

    void require(ncclResult_t result, const char* name) const {
        if (result == ncclSuccess) { return; }
        const char* const last = ncclGetLastError(comm);
        const std::string with = size() > 1 ? " with " + others() : "";
        fail(format("failed in %s%s: NCCL: %s%s%s", name, with.c_str(), ncclGetErrorString(result),
                    last && *last ? ": " : "", last ? last : ""));
    }

    [[noreturn]] void fail_waiting(const char* name) const {
        fail(format("waited %g s (--timeout) for %s (%s)", group.timeout, others().c_str(), name));
    }

    // Reports the cause, if any process knows it, otherwise what this process has seen.
    [[noreturn]] void fail(const std::string& seen) const {
        const Cause cause = find_cause(group.store, {group.member(rank()), seen});
        int culprit = size() - 1;
        while (culprit >= 0 && (culprit == rank() || group.member(culprit) != cause.process)) { culprit--; }
        throw CommError(culprit, cause.text());
    }

    // "worker 1 rank 0", "one of worker 1 rank 0 and worker 2 rank 0"
    std::string others() const {
        std::vector<std::string> names;
        for (int r = 0; r < size(); r++) {
            if (r != rank()) { names.push_back(group.member(r)); }
        }
        return (names.size() > 1 ? "one of " : "") + list_in_words(names);
    }

    // Adds the times of calls that have ended. Calls end in the order in which they were made.
    void add_times() {
        for (; !timings.empty() && timings.front().end.query(); timings.pop_front()) {
            const Timing& done = timings.front();
            done.traffic->seconds += seconds_between(done.begin, done.end);
        }
    }

    const CommGroup group;
    const bool is_outer;
    ncclComm_t comm = nullptr;
    std::mutex mutex;  // of calls on comm
    std::deque<Timing> timings;
};

}  // namespace cuda
