// Streams: work in order. Where settings().asynchronous is set, a stream is a thread with a queue, and an
// adversary holds back its work; else work is done when the call that enqueues it returns.
//
// The adversary: every few items a stream gets a rank. Rank 0 works at once. The others begin only when the
// host waits for something, so that it has enqueued as much as it could, and no stream of a lower rank has
// anything to do; or after 2 ms. So an item of one stream often runs far ahead of, or far behind, an item of
// another that it is not ordered with.
#pragma once
#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dev/emulator/futex.h"

namespace emulator {

// When a piece of work is done. The addresses of two bytes tell thread sanitizer what CUDA promises: the work
// begins after the call that enqueued it, and a thread that waits for it continues after its end.
struct Point {
    bool done = false;
    double seconds = 0;  // when
    char enqueued = 0, completed = 0;
};
using PointRef = std::shared_ptr<Point>;

struct Item {
    std::function<void()> work;   // may be empty
    std::vector<PointRef> after;  // it begins when these are done
    PointRef point;
};

struct Stream {
    int number;  // for messages, and for the adversary
    int device;
    bool waits_for_default_stream;  // and vice versa, like CUDA's blocking streams
    std::deque<Item> items;
    PointRef last;  // of the item enqueued last
    uint64_t items_taken = 0;
    int rank = 0;  // of the item taken
    bool has_thread = false, working = false, waiting = false, closing = false;
    int nccl_calls_in_progress = 0;  // that may enqueue something later
};
using StreamRef = std::shared_ptr<Stream>;

// Of the calling thread.
int& current_device();

// The stream behind a handle; null if it is none. Throws Error where the handle is the default stream's and
// settings().no_default_stream forbids it. `call`: for the message.
StreamRef find_stream(cudaStream_t handle, const char* call);
StreamRef default_stream();  // of the current device
cudaStream_t open_stream(bool waits_for_default_stream);
// The work that is enqueued on it is still done.
bool close_stream(cudaStream_t handle);
void close_all_streams();

// Throws Error if an NCCL call on the stream is in progress, for the order of the two is not defined then;
// where work is done at once, also what it throws.
PointRef enqueue(const StreamRef& stream, const char* call, std::function<void()> work,
                 std::vector<PointRef> after = {});
// The same for what that NCCL call itself enqueues.
PointRef enqueue_for_nccl(const StreamRef& stream, std::function<void()> work, std::vector<PointRef> after);

PointRef last_point(const StreamRef& stream);  // null: nothing was ever enqueued
void wait_for(const PointRef& point);          // the host waits
bool is_done(const PointRef& point);
void wait_for_all_streams();  // of the current device
void drain_all_streams();     // the same, without an order for thread sanitizer

void begin_nccl_call(const StreamRef& stream);
void end_nccl_call(const StreamRef& stream);

// Within an item: the adversary may hold it here.
void hold_item();
// Within an item, while one lives: the stream waits for another process, and no stream waits for this one.
class WaitsForOthers {
public:
    WaitsForOthers();
    ~WaitsForOthers();
};

// A mistake on a stream is printed once and fails all calls from then on with cudaErrorLaunchFailure.
void set_sticky_error(const std::string& message);
// Null: there was none.
const char* sticky_error();
void clear_sticky_error();

}  // namespace emulator
