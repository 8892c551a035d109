// The streams' threads, their queues and the adversary. Compiled without -fsanitize=thread (see
// sanitizers.h).
#include "dev/emulator/queue.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <thread>

#include "dev/emulator/device_memory.h"
#include "dev/emulator/emulator.h"
#include "dev/emulator/machine.h"

namespace emulator {
namespace {

constexpr double longest_hold = 0.002, poll_counts_for = 0.001;  // seconds
constexpr uint64_t items_of_one_rank = 4, ranks = 8;

// Never destroyed: streams may outlive main().
struct Streams {
    Monitor monitor;  // of all that is here, and of all streams, items and points
    std::map<cudaStream_t, StreamRef> by_handle;
    std::vector<StreamRef> with_thread;        // those that may have work, closed ones included
    std::map<int, StreamRef> default_streams;  // by device
    int opened = 0;
    int hosts_waiting = 0;
    double last_poll = 0;
    bool failed = false;
    std::string failure;  // kept after a reset: a caller may have its address

    StreamRef make(bool waits_for_default_stream) {
        auto stream = std::make_shared<Stream>();
        stream->number = opened++;
        stream->device = current_device();
        stream->waits_for_default_stream = waits_for_default_stream;
        return stream;
    }
    bool host_waits() const { return hosts_waiting > 0 || seconds_now() < last_poll + poll_counts_for; }
};

Streams& streams() {
    static Streams& all = *new Streams;
    return all;
}

// Calls in which the host waited for a stream, those that launched a kernel, a product, a copy or a fill, and
// the most items that one stream's queue ever held. EMULATOR_COUNT_WAITS prints them at the program's end.
struct Calls {
    std::atomic<long> waits{0}, launches{0};
    size_t queued = 0;  // with the lock held
    ~Calls() {
        if (getenv("EMULATOR_COUNT_WAITS")) {
            fprintf(stderr, "emulator: the host waited in %ld calls\nemulator: the host launched %ld times\n"
                    "emulator: a stream's queue held up to %zu items\n",
                    waits.load(), launches.load(), queued);
        }
    }
} calls;

// The stream whose thread this is.
Stream*& own_stream() {
    static thread_local Stream* stream = nullptr;
    return stream;
}

// ---- the adversary; with the lock held

int rank_of(const Stream& stream, uint64_t item) {
    Random random{settings().seed * 0xD1B54A32D192ED03u ^ uint64_t(stream.number) << 32 ^
                  (item + uint64_t(stream.number)) / items_of_one_rank};
    return int(random.below(ranks));
}

bool has_something_to_do(const Stream& stream) {
    return !stream.waiting && (stream.working || !stream.items.empty());
}

bool may_begin(const Stream& stream) {
    if (stream.rank == 0) { return true; }
    const Streams& all = streams();
    if (!all.host_waits()) { return false; }
    for (const StreamRef& other : all.with_thread) {
        const int rank = other->working ? other->rank : rank_of(*other, other->items_taken);
        if (other.get() != &stream && rank < stream.rank && has_something_to_do(*other)) { return false; }
    }
    return true;
}

void hold(Stream& stream, uint64_t item) {
    if (settings().seed == 0) { return; }
    stream.rank = rank_of(stream, item);
    const double limit = seconds_now() + longest_hold;
    while (!may_begin(stream)) {
        const double left = limit - seconds_now();
        if (left <= 0) { return; }
        streams().monitor.wait(std::min(left, poll_counts_for));
    }
}

// ---- waiting

void wait_until_done(const PointRef& point) {
    while (!point->done) { streams().monitor.wait(); }
}

void block_until_done(const PointRef& point) {
    if (point) {
        Locked lock(streams().monitor);
        streams().hosts_waiting++;
        streams().monitor.notify();
        wait_until_done(point);
        streams().hosts_waiting--;
    }
    DeviceMemory::instance().close();
}

std::vector<PointRef> last_points() {
    Locked lock(streams().monitor);
    std::vector<PointRef> points;
    for (const StreamRef& stream : streams().with_thread) {
        if (stream->device == current_device()) { points.push_back(stream->last); }
    }
    return points;
}

void complete(const PointRef& point) {
    release(&point->completed);
    point->seconds = seconds_now();
    point->done = true;
    streams().monitor.notify();
}

// ---- the threads

void work_on(const std::function<void()>& work) {
    struct AtWork {
        AtWork() { DeviceMemory::instance().begin_work(); }
        ~AtWork() { DeviceMemory::instance().end_work(); }
    } at_work;
    work();
}

void run_item(Stream& stream, Item& item) {
    bool skip;
    {
        Locked lock(streams().monitor);
        stream.waiting = !item.after.empty();
        for (const PointRef& point : item.after) {
            wait_until_done(point);
            acquire(&point->completed);
        }
        stream.waiting = false;
        skip = !item.work || streams().failed;
        if (!skip) { hold(stream, stream.items_taken); }
    }
    if (skip) { return; }
    try {
        work_on(item.work);
    } catch (const std::exception& error) { set_sticky_error(error.what()); }
    item.work = nullptr;  // arguments end with the kernel, on its thread
}

// False: the stream is closed and done.
bool take(Stream& stream, Item* item) {
    Locked lock(streams().monitor);
    while (stream.items.empty() && !stream.closing) { streams().monitor.wait(); }
    if (stream.items.empty()) { return false; }
    *item = std::move(stream.items.front());
    stream.items.pop_front();
    stream.items_taken++;
    stream.working = true;
    acquire(&item->point->enqueued);
    return true;
}

void run(StreamRef stream) {
    const std::string name = "stream " + std::to_string(stream->number);
    pthread_setname_np(pthread_self(), name.c_str());
    own_stream() = stream.get();
    Item item;
    while (take(*stream, &item)) {
        run_item(*stream, item);
        Locked lock(streams().monitor);
        stream->working = false;
        complete(item.point);
        item = {};
    }
    Locked lock(streams().monitor);
    auto& all = streams().with_thread;
    all.erase(std::remove(all.begin(), all.end(), stream), all.end());
}

void start_thread(const StreamRef& stream) {
    stream->has_thread = true;
    streams().with_thread.push_back(stream);
    std::thread(run, stream).detach();
}

// The default stream and the streams that wait for it wait for each other.
void add_default_order(const StreamRef& stream, std::vector<PointRef>* after) {
    const Streams& all = streams();
    const auto found = all.default_streams.find(stream->device);
    if (found == all.default_streams.end()) { return; }
    const StreamRef& default_stream = found->second;
    if (stream == default_stream) {
        for (const auto& [handle, other] : all.by_handle) {
            const bool waits = other->waits_for_default_stream && other->device == stream->device;
            if (waits && other->last) { after->push_back(other->last); }
        }
    } else if (stream->waits_for_default_stream && default_stream->last) {
        after->push_back(default_stream->last);
    }
}

PointRef put(const StreamRef& stream, const char* call, std::function<void()> work,
             std::vector<PointRef> after) {
    PointRef point;
    {
        Locked lock(streams().monitor);
        point = std::make_shared<Point>();
        if (call && stream->nccl_calls_in_progress > 0) {
            throw Error(std::string(call) + " on stream " + std::to_string(stream->number) +
                        ": a call on a non-blocking NCCL communicator is still in progress there "
                        "(ncclCommGetAsyncError tells): the order of the two is not defined");
        }
        add_default_order(stream, &after);
        if (!settings().asynchronous && stream->last) { after.push_back(stream->last); }
        stream->last = point;
        if (settings().asynchronous) {
            release(&point->enqueued);
            stream->items.push_back({std::move(work), std::move(after), point});
            calls.queued = std::max(calls.queued, stream->items.size());
            if (!stream->has_thread) { start_thread(stream); }
            streams().monitor.notify();
            return point;
        }
    }
    for (const PointRef& earlier : after) { wait_for(earlier); }
    struct Completion {
        const PointRef& point;
        ~Completion() {
            Locked lock(streams().monitor);
            complete(point);
        }
    } completion{point};
    if (work) { work_on(work); }
    return point;
}

}  // namespace

// ---- handles

int& current_device() {
    static thread_local int device = 0;
    return device;
}

StreamRef default_stream() {
    Locked lock(streams().monitor);
    StreamRef& stream = streams().default_streams[current_device()];
    if (!stream) { stream = streams().make(false); }
    return stream;
}

StreamRef find_stream(cudaStream_t handle, const char* call) {
    if (handle == nullptr || handle == cudaStreamLegacy) {
        if (settings().no_default_stream) { throw Error(std::string(call) + " on the default stream"); }
        return default_stream();
    }
    Locked lock(streams().monitor);
    const auto found = streams().by_handle.find(handle);
    return found == streams().by_handle.end() ? nullptr : found->second;
}

cudaStream_t open_stream(bool waits_for_default_stream) {
    default_stream();  // number 0
    Locked lock(streams().monitor);
    const StreamRef stream = streams().make(waits_for_default_stream);
    const auto handle = reinterpret_cast<cudaStream_t>(uintptr_t(stream->number) * 16);  // never used twice
    streams().by_handle[handle] = stream;
    return handle;
}

bool close_stream(cudaStream_t handle) {
    Locked lock(streams().monitor);
    const auto found = streams().by_handle.find(handle);
    if (found == streams().by_handle.end()) { return false; }
    found->second->closing = true;
    streams().monitor.notify();
    streams().by_handle.erase(found);
    return true;
}

void close_all_streams() {
    Locked lock(streams().monitor);
    for (const auto& [handle, stream] : streams().by_handle) { stream->closing = true; }
    streams().by_handle.clear();
    streams().monitor.notify();
}

// ---- work

PointRef enqueue(const StreamRef& stream, const char* call, std::function<void()> work,
                 std::vector<PointRef> after) {
    calls.launches += work != nullptr;
    return put(stream, call, std::move(work), std::move(after));
}

PointRef enqueue_for_nccl(const StreamRef& stream, std::function<void()> work, std::vector<PointRef> after) {
    return put(stream, nullptr, std::move(work), std::move(after));
}

PointRef last_point(const StreamRef& stream) {
    Locked lock(streams().monitor);
    return stream->last;
}

void wait_for(const PointRef& point) {
    calls.waits++;
    block_until_done(point);
    if (point) { acquire(&point->completed); }
}

bool is_done(const PointRef& point) {
    {
        Locked lock(streams().monitor);
        if (point && !point->done) {
            streams().last_poll = seconds_now();
            return false;
        }
        if (point) { acquire(&point->completed); }
    }
    DeviceMemory::instance().close();
    return true;
}

void wait_for_all_streams() {
    for (const PointRef& point : last_points()) { wait_for(point); }
}

void drain_all_streams() {
    for (const PointRef& point : last_points()) { block_until_done(point); }
}

void begin_nccl_call(const StreamRef& stream) {
    Locked lock(streams().monitor);
    stream->nccl_calls_in_progress++;
}

void end_nccl_call(const StreamRef& stream) {
    Locked lock(streams().monitor);
    stream->nccl_calls_in_progress--;
}

void hold_item() {
    Stream* stream = own_stream();
    if (!stream) { return; }
    Locked lock(streams().monitor);
    hold(*stream, stream->items_taken + (uint64_t(1) << 31));  // with a rank of its own
}

WaitsForOthers::WaitsForOthers() {
    Locked lock(streams().monitor);
    if (own_stream()) { own_stream()->waiting = true; }
    streams().monitor.notify();
}

WaitsForOthers::~WaitsForOthers() {
    Locked lock(streams().monitor);
    if (own_stream()) { own_stream()->waiting = false; }
}

// ---- errors

void set_sticky_error(const std::string& message) {
    Locked lock(streams().monitor);
    if (streams().failed) { return; }
    fprintf(stderr, "emulator: %s\n", message.c_str());
    streams().failure = "unspecified launch failure: " + message;  // cudaGetErrorString's
    streams().failed = true;
}

const char* sticky_error() {
    Locked lock(streams().monitor);
    return streams().failed ? streams().failure.c_str() : nullptr;
}

void clear_sticky_error() {
    Locked lock(streams().monitor);
    streams().failed = false;
}

}  // namespace emulator
