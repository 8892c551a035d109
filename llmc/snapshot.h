// OuterSnapshot: the outer optimizer's part of a checkpoint. Named arrays in pinned memory of the host, which
// the main stream fills while training goes on, and fields. What has not arrived yet at the checkpoint's step
// is awaited: it is copied when it arrives, and the writer's thread waits for the last copy.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/error.h"
#include "llmc/state.h"
#include "llmc/stream.h"

class OuterSnapshot {
public:
    virtual ~OuterSnapshot() = default;

    // On any thread: returns when the copies are complete. Throws a RunError if the snapshot was abandoned.
    void wait() const {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return abandoned || missing == 0; });
        if (abandoned) { throw RunError("the run ended before all that was on its way had arrived"); }
        const Event all = last_copy;
        lock.unlock();
        all.synchronize();
    }

    // On any thread: gives up what has not arrived yet, which ends wait().
    void abandon() {
        std::lock_guard<std::mutex> lock(mutex);
        abandoned = missing > 0;
        changed.notify_all();
    }

    // What to save, once wait() has returned.
    std::vector<StateSection> sections() const {
        std::vector<StateSection> all;
        for (const Array& one : arrays) {
            const size_t bytes = size_t(one.count) * sizeof(float);
            if (bytes > 0) { all.push_back({one.name, one.values.data(), bytes}); }
        }
        return all;
    }
    void add_fields(Fields& all) const { all.add(fields); }

protected:
    // The first `count` values are saved; 0: the array is left out.
    struct Array {
        std::string name;
        HostBuffer<float> values;
        long count;
    };

    // Takes memory for an array of at most `most` values.
    Array& add_array(const std::string& name, long most) {
        return arrays.emplace_back(Array{name, HostBuffer<float>(most), most});
    }

    // Starts a snapshot that awaits so many arrivals. The previous one must have been written or abandoned.
    void begin(size_t awaited) {
        std::lock_guard<std::mutex> lock(mutex);
        if (missing > 0 && !abandoned) {
            throw std::logic_error("a snapshot is taken while one is not complete");
        }
        missing = awaited;
        abandoned = false;
        fields = Fields();
    }

    bool is_awaited() const {
        std::lock_guard<std::mutex> lock(mutex);
        return missing > 0 && !abandoned;
    }

    // The copies that have been enqueued on main so far belong to the snapshot.
    void end_copies(Stream& main) {
        std::lock_guard<std::mutex> lock(mutex);
        main.record(last_copy);
    }

    // One of those that were awaited has arrived, with the same.
    void end_arrival(Stream& main) {
        end_copies(main);
        std::lock_guard<std::mutex> lock(mutex);
        missing--;
        changed.notify_all();
    }

    Fields fields;  // filled until the last arrival

private:
    std::deque<Array> arrays;
    Event last_copy;
    size_t missing = 0;  // of those that are awaited
    bool abandoned = false;
    mutable std::mutex mutex;  // of the three above
    mutable std::condition_variable changed;
};
