// Stream: work in order. Event: a point in that order, for which others can wait. Timestamp: the time at
// which a stream came to a point.
//
// On the CPU, a stream that computes (the main stream) runs its work at once on the calling thread. A stream
// that communicates is a thread with a first-in-first-out queue. An exception there stops it: later work is
// dropped, and every later event throws that exception.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "llmc/clock.h"

namespace cpu {

// A point in a stream. Recording it again makes a new point; copies refer to the same point.
// An event that was never recorded is complete, as in CUDA.
class Event {
public:
    // True once all work before the point is done. Throws what that work threw.
    bool query() const {
        if (!state) { return true; }
        std::lock_guard<std::mutex> lock(state->mutex);
        if (state->error) { std::rethrow_exception(state->error); }
        return state->done;
    }

    // Blocks until all work before the point is done. Throws what that work threw.
    void synchronize() const {
        if (!state) { return; }
        std::unique_lock<std::mutex> lock(state->mutex);
        state->changed.wait(lock, [&] { return state->done; });
        if (state->error) { std::rethrow_exception(state->error); }
    }

private:
    friend class Stream;
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        bool done = false;
        std::exception_ptr error;
    };

    static void complete(State& state, std::exception_ptr error) {
        std::lock_guard<std::mutex> lock(state.mutex);
        state.done = true;
        state.error = std::move(error);
        state.changed.notify_all();
    }

    std::shared_ptr<State> state;
};

// The time at which a stream came to a point. Copies refer to the same one.
struct Timestamp {
    std::shared_ptr<double> moment;  // as now_seconds() says it
};

// The time between two complete stamps: the host must have seen them, or a later event, complete.
inline double seconds_between(const Timestamp& begin, const Timestamp& end) {
    return *end.moment - *begin.moment;
}

class Stream {
public:
    // hosted: its work needs the host (llmc/cuda/stream.cuh). On the CPU the same as communicate.
    enum class Kind { compute, communicate, hosted };

    explicit Stream(Kind kind = Kind::compute) {
        if (kind != Kind::compute) { worker = std::thread([this] { run(); }); }
    }

    // Finishes the queue, then ends the thread.
    ~Stream() {
        if (!worker.joinable()) { return; }
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
        }
        changed.notify_all();
        worker.join();
    }

    // Runs `work` after everything enqueued before. On a stream that computes it has run, or thrown,
    // when this returns.
    void enqueue(std::function<void()> work) {
        if (!worker.joinable()) { return work(); }
        push({std::move(work), nullptr});
    }

    // `event` completes when everything enqueued so far has.
    void record(Event& event) {
        event.state = nullptr;
        if (!worker.joinable()) { return; }
        event.state = std::make_shared<Event::State>();
        push({nullptr, event.state});
    }

    // Work that is enqueued from now on runs after `event`.
    void wait(const Event& event) {
        enqueue([event] { event.synchronize(); });
    }

    // The time at which everything enqueued so far has been done.
    Timestamp stamp() {
        const Timestamp time{std::make_shared<double>()};
        enqueue([time] { *time.moment = now_seconds(); });
        return time;
    }

    // Blocks until everything enqueued so far is done. Throws what it threw.
    void synchronize() {
        Event all;
        record(all);
        all.synchronize();
    }

private:
    struct Item {
        std::function<void()> work;
        std::shared_ptr<Event::State> event;
    };

    void push(Item item) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            items.push_back(std::move(item));
        }
        changed.notify_all();
    }

    void run() {
        std::exception_ptr error;
        while (true) {
            Item item;
            {
                std::unique_lock<std::mutex> lock(mutex);
                changed.wait(lock, [&] { return closing || !items.empty(); });
                if (items.empty()) { return; }
                item = std::move(items.front());
                items.pop_front();
            }
            if (item.event) {
                Event::complete(*item.event, error);
            } else if (!error) {
                try {
                    item.work();
                } catch (...) { error = std::current_exception(); }
            }
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> items;
    bool closing = false;
    std::thread worker;
};

}  // namespace cpu
