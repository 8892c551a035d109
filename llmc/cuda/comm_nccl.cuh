// Comm over NCCL. The inner communicator is blocking and free in what it uses; the outer one is non-blocking
// and uses one CTA, so that the training step keeps the GPU while an exchange is under way (comms.h).
//
// A call of a non-blocking communicator may return before NCCL has enqueued anything; an event recorded then
// would complete at once. So each call here is polled until NCCL says that it is no longer in progress.
// An aborted or failed collective lets its event complete, too: wait() asks the communicator after the event.
#pragma once
#include <nccl.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/comm.h"
#include "llmc/store.h"
#include "llmc/stream.h"

namespace cuda {

struct NcclOptions {
    bool blocking = true;
    int max_ctas = 0;            // 0: NCCL's choice
    bool measures_time = false;  // Traffic::seconds, by timing events around each call
};

class NcclComm : public ::Comm {
public:
    // Throws CommError when not all members have come within the group's timeout.
    NcclComm(const CommGroup& group, const NcclOptions& options)
        : my_rank(group.rank), my_size(group.size), timeout(group.timeout), options(options) {
        const std::string key = group.name + "/nccl";
        const ncclUniqueId id = share_id(group.store, key);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = options.blocking ? 1 : 0;
        if (options.max_ctas > 0) { config.minCTAs = config.maxCTAs = options.max_ctas; }
        settle(ncclCommInitRankConfig(&comm, my_size, id, my_rank, &config), "ncclCommInitRankConfig");
        if (my_rank == 0) { group.store.remove(key); }
    }
    NcclComm(const NcclComm&) = delete;
    NcclComm& operator=(const NcclComm&) = delete;

    // Gives up what is under way: whoever wants its result has waited for it.
    ~NcclComm() override { ncclCommAbort(comm); }

    int rank() const override { return my_rank; }
    int size() const override { return my_size; }

    void all_gather(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        call("ncclAllGather", bytes, stream, traffic,
             [&] { return ncclAllGather(inp, out, bytes, ncclUint8, comm, stream); });
    }

    void all_to_all(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        char* const to = static_cast<char*>(out);
        const char* const from = static_cast<const char*>(inp);
        call("all-to-all", bytes, stream, traffic, [&] {
            require(ncclGroupStart(), "ncclGroupStart");
            for (int peer = 0; peer < my_size; peer++) {
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

    void all_reduce(float* values, size_t count, Reduction reduction, Stream& stream,
                    Traffic* traffic) override {
        const ncclRedOp_t operation = reduction == Reduction::sum ? ncclSum : ncclMax;
        call("ncclAllReduce", count * sizeof(float), stream, traffic,
             [&] { return ncclAllReduce(values, values, count, ncclFloat, operation, comm, stream); });
    }

    // While another thread is in a call, it is that one that will see.
    void check() override {
        const std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
        if (!lock.owns_lock()) { return; }
        const ncclResult_t state = state_of_calls();
        if (state != ncclInProgress) { require(state, "a collective"); }
    }

    void wait(const Event& event) override {
        Patience patience(timeout);
        while (!event.query()) {
            check();
            if (patience.is_over()) {
                throw CommError(-1, format("no answer within %.0f s (--timeout)", timeout));
            }
            std::this_thread::sleep_for(between_polls);
        }
        check();
        add_times();
    }

private:
    struct Timing {
        cudaEvent_t begin, end;
        Traffic* traffic;
    };

    // The id that rank 0 draws, through the store.
    ncclUniqueId share_id(Store& store, const std::string& key) const {
        ncclUniqueId id;
        if (my_rank == 0) {
            require(ncclGetUniqueId(&id), "ncclGetUniqueId");
            store.set(key, std::string(id.internal, sizeof id.internal));
            return id;
        }
        Patience patience(timeout);
        std::optional<std::string> shared;
        while (!(shared = store.try_get(key))) {
            if (patience.is_over()) {
                throw CommError(0, format("rank 0 did not come within %.0f s (--timeout)", timeout));
            }
            patience.pause();
        }
        memcpy(id.internal, shared->data(), sizeof id.internal);
        return id;
    }

    template <class Call>
    void call(const char* name, size_t bytes, Stream& stream, Traffic* traffic, Call enqueue) {
        const bool timed = traffic && options.measures_time;
        Timing timing{nullptr, nullptr, traffic};
        if (timed) {
            timing.begin = timing_event();
            cudaCheck(cudaEventRecord(timing.begin, stream));
        }
        settle(locked(enqueue), name);
        if (timed) {
            timing.end = timing_event();
            cudaCheck(cudaEventRecord(timing.end, stream));
            timings.push_back(timing);
        }
        if (traffic) {
            traffic->bytes_sent += size_t(my_size - 1) * bytes;
            traffic->bytes_received += size_t(my_size - 1) * bytes;
        }
    }

    // NCCL's calls on one communicator are not for two threads at a time: the watchdog has its own.
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

    // Returns when the call is enqueued.
    void settle(ncclResult_t result, const char* name) {
        Patience patience(timeout);
        while (result == ncclInProgress) {
            result = locked([&] { return state_of_calls(); });
            if (patience.is_over()) {
                throw CommError(-1, format("%s: no answer within %.0f s (--timeout)", name, timeout));
            }
            if (result == ncclInProgress) { std::this_thread::sleep_for(between_polls); }
        }
        require(result, name);
    }

    // Of a call in a group: the group's end says when all are enqueued.
    void grouped(ncclResult_t result) const {
        if (result != ncclInProgress) { require(result, "a call of a group"); }
    }

    void require(ncclResult_t result, const char* name) const {
        if (result == ncclSuccess) { return; }
        const char* const last = ncclGetLastError(comm);
        throw CommError(-1, format("%s: NCCL: %s%s%s", name, ncclGetErrorString(result),
                                   last && *last ? ": " : "", last ? last : ""));
    }

    // Calls end in the order in which they were made.
    void add_times() {
        while (!timings.empty()) {
            const cudaError_t status = cudaEventQuery(timings.front().end);
            if (status == cudaErrorNotReady) {
                cudaGetLastError();  // it stays there for the next launch to find
                return;
            }
            cudaCheck(status);
            const Timing done = timings.front();
            timings.pop_front();
            float milliseconds = 0;
            cudaCheck(cudaEventElapsedTime(&milliseconds, done.begin, done.end));
            done.traffic->seconds += milliseconds / 1e3;
            idle.insert(idle.end(), {done.begin, done.end});
        }
    }

    cudaEvent_t timing_event() {
        cudaEvent_t event = nullptr;
        if (idle.empty()) {
            cudaCheck(cudaEventCreate(&event));
        } else {
            event = idle.back();
            idle.pop_back();
        }
        return event;
    }

    static constexpr std::chrono::microseconds between_polls{50};

    int my_rank, my_size;
    double timeout;
    NcclOptions options;
    ncclComm_t comm = nullptr;
    std::mutex mutex;  // of calls on comm
    std::deque<Timing> timings;
    std::vector<cudaEvent_t> idle;
};

}  // namespace cuda
