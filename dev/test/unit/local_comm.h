// LocalComm: the members of a Comm as threads of one process. For tests: bytes are counted exactly as a
// transport would put them on the wire, a member can be told to be late or to leave, and nothing waits for
// ever.
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/comm.h"

// Where the members meet. Every call has two meetings: by the first all members have brought their buffers,
// by the second all have copied what they need.
class LocalGroup {
public:
    explicit LocalGroup(int size, double time_limit = 20) : buffers(size_t(size)), time_limit(time_limit) {}

    int size() const { return int(buffers.size()); }

    // Shows the others a buffer for the next two meetings.
    void bring(int rank, const void* buffer) {
        std::lock_guard<std::mutex> lock(mutex);
        buffers[rank] = static_cast<const uint8_t*>(buffer);
    }

    // Returns when all members have called it. Throws a CommError when one has left or is too late.
    void meet() {
        std::unique_lock<std::mutex> lock(mutex);
        if (gone >= 0) { throw CommError(gone, "the connection was closed"); }
        const long meeting = meetings;
        if (++arrived == size()) {
            arrived = 0;
            meetings++;
            changed.notify_all();
            return;
        }
        auto over = [&] { return meetings != meeting || gone >= 0; };
        if (!changed.wait_for(lock, std::chrono::duration<double>(time_limit), over)) {
            throw CommError(-1, "time limit exceeded");
        }
        if (meetings == meeting) { throw CommError(gone, "the connection was closed"); }
    }

    // What member `rank` brought to the last meeting.
    const uint8_t* buffer(int rank) const { return buffers[rank]; }

    void leave(int rank) {
        std::lock_guard<std::mutex> lock(mutex);
        gone = rank;
        changed.notify_all();
    }

private:
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<const uint8_t*> buffers;
    double time_limit;
    int arrived = 0, gone = -1;
    long meetings = 0;
};

class LocalComm : public Comm {
public:
    // delay(call number): seconds to sleep on the stream before a call.   corrupt: changes what was received.
    using Delay = std::function<double(long)>;
    using Corrupt = std::function<void(long, uint8_t*, size_t)>;

    LocalComm(LocalGroup& group, int rank, Delay delay = nullptr, Corrupt corrupt = nullptr)
        : group(group), rank_(rank), delay(std::move(delay)), corrupt(std::move(corrupt)) {}

    int rank() const override { return rank_; }
    int size() const override { return group.size(); }

    void all_gather(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        call(stream, traffic, size_t(size() - 1) * bytes, inp, [=] {
            uint8_t* parts = static_cast<uint8_t*>(out);
            for (int r = 0; r < size(); r++) { memcpy(parts + size_t(r) * bytes, group.buffer(r), bytes); }
            if (corrupt) { corrupt(calls, parts, bytes); }
        });
    }

    void all_to_all(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        call(stream, traffic, size_t(size() - 1) * bytes, inp, [=] {
            for (int r = 0; r < size(); r++) {
                const uint8_t* part = group.buffer(r) + size_t(rank_) * bytes;
                memcpy(static_cast<uint8_t*>(out) + size_t(r) * bytes, part, bytes);
            }
            if (corrupt) { corrupt(calls, static_cast<uint8_t*>(out), bytes); }
        });
    }

    void reduce_scatter(float* out, const float* inp, size_t count, Stream& stream,
                        Traffic* traffic) override {
        reduce(out, inp, count, size_t(rank_) * count, stream, traffic);
    }

    void all_reduce(float* values, size_t count, Stream& stream, Traffic* traffic) override {
        reduce(values, values, count, 0, stream, traffic);
    }

private:
    // out[i] = inp[0][first + i] + inp[1][first + i] + ..., written after all have read.
    void reduce(float* out, const float* inp, size_t count, size_t first, Stream& stream, Traffic* traffic) {
        auto result = std::make_shared<std::vector<float>>(count);
        call(stream, traffic, size_t(size() - 1) * count * sizeof(float), inp, [=] {
            for (size_t i = 0; i < count; i++) {
                for (int r = 0; r < size(); r++) {
                    const float value = reinterpret_cast<const float*>(group.buffer(r))[first + i];
                    float& sum = (*result)[i];
                    sum = r == 0 ? value : sum + value;
                }
            }
        });
        stream.enqueue([=] { memcpy(out, result->data(), count * sizeof(float)); });
    }

    void call(Stream& stream, Traffic* traffic, size_t bytes, const void* inp, std::function<void()> copy) {
        stream.enqueue([=] {
            const auto begin = std::chrono::steady_clock::now();
            if (delay) { std::this_thread::sleep_for(std::chrono::duration<double>(delay(calls))); }
            group.bring(rank_, inp);
            group.meet();
            copy();
            group.meet();
            calls++;
            if (traffic) {
                traffic->bytes_sent += bytes;
                traffic->bytes_received += bytes;
                const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
                traffic->seconds += seconds.count();
            }
        });
    }

    LocalGroup& group;
    int rank_;
    Delay delay;
    Corrupt corrupt;
    long calls = 0;  // counted on the stream
};

// Loops of the calling thread get no team: there are more members than cores, and OpenMP's teams spin.
inline void without_teams() {
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
}

// Runs `work(rank)` on `size` threads and waits for them. Returns the error of each, or "".
inline std::vector<std::string> run_members(int size, const std::function<void(int)>& work) {
    std::vector<std::string> errors(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; rank++) {
        threads.emplace_back([&, rank] {
            without_teams();
            try {
                work(rank);
            } catch (const std::exception& error) {
                errors[rank] = error.what();
            }
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    return errors;
}
