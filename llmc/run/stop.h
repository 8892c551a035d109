// StopRequest: SIGTERM, SIGUSR1 (SLURM's warning before it preempts a job) and SIGHUP (a lost ssh connection)
// ask a run to write a checkpoint and to leave. The first signal sets a flag that the training loop reads; a
// second one ends the process at once, as it would without a StopRequest. timeout(1) signals its process and
// then that process's group, and systemd signals all processes of a service, so signals within a second of
// the first are the same request.
#pragma once
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <future>
#include <optional>
#include <thread>

// The exit status of a process that was asked to stop and has written its checkpoint: 128 + SIGTERM.
const int stopped_status = 143;

const std::array<int, 3> stop_signals = {SIGTERM, SIGUSR1, SIGHUP};
const double one_request_seconds = 1;

// For a process without a launcher: until there is a StopRequest these signals end it at once with
// stopped_status, since there is nothing to write yet. Signals that it was started to ignore stay ignored.
inline void leave_at_stop_signals() {
    for (int s : stop_signals) {
        struct sigaction before;
        sigaction(s, nullptr, &before);
        if (before.sa_handler != SIG_IGN) {
            ::signal(s, [](int) { _exit(stopped_status); });
        }
    }
}

// During its life these signals are requests; afterwards they do what they did before. One at a time.
class StopRequest {
public:
    StopRequest() {
        first_signal = 0;
        struct sigaction action = {};
        action.sa_handler = handle;
        action.sa_flags = SA_RESTART;
        sigemptyset(&action.sa_mask);
        for (int s : stop_signals) { sigaddset(&action.sa_mask, s); }
        for (size_t i = 0; i < stop_signals.size(); i++) {
            sigaction(stop_signals[i], nullptr, &before[i]);
            // Signals that this process was started to ignore (nohup, trap '') stay ignored.
            if (before[i].sa_handler != SIG_IGN) { sigaction(stop_signals[i], &action, nullptr); }
        }
    }
    StopRequest& operator=(StopRequest&&) = delete;  // which also rules out copies
    ~StopRequest() {
        for (size_t i = 0; i < stop_signals.size(); i++) { sigaction(stop_signals[i], &before[i], nullptr); }
    }

    bool is_set() const { return first_signal != 0; }

private:
    // Calls only functions that are safe in a signal handler.
    static void handle(int signal) {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        const int64_t now = int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
        int64_t first = 0;
        const bool is_first = first_signal.compare_exchange_strong(first, now);
        if (is_first || double(now - first) < one_request_seconds * 1e9) { return; }
        ::signal(signal, SIG_DFL);
        raise(signal);  // waits until this handler has returned
    }

    // The time of the first signal, in nanoseconds; 0: there was none. Static, since a handler gets no
    // context.
    inline static std::atomic<int64_t> first_signal{0};
    static_assert(std::atomic<int64_t>::is_always_lock_free, "a signal handler must not wait for a lock");
    std::array<struct sigaction, stop_signals.size()> before;
};

// During its life stop signals that reach the process are handled on a thread of their own. The calling thread
// and those that it starts block them: while oneDNN's fp32 kernel for AVX2 runs, the stack pointer points into
// a buffer on the heap, and a signal's frame would overwrite what lies below. Create it before other threads.
class SignalThread {
public:
    // leaves: see leave_at_stop_signals()
    explicit SignalThread(bool leaves) : thread([end = ended.get_future()] { end.wait(); }) {
        if (leaves) { leave_at_stop_signals(); }
        sigset_t signals;
        sigemptyset(&signals);
        for (int s : stop_signals) { sigaddset(&signals, s); }
        pthread_sigmask(SIG_BLOCK, &signals, &before);
    }
    ~SignalThread() {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        ended.set_value();
        thread.join();
    }

private:
    std::promise<void> ended;
    sigset_t before;
    std::thread thread;
};

// Stopping: how a request that reaches one process ends the run of all processes after the same step.
//
//     the loss   carries the request to all ranks of the worker
//     a sync     carries it to all workers in lock-step; they stop when the slowest has merged that sync
//
// A worker that is alone, or elastic, stops one update after the request arrived with the loss. If a step has
// several micro-steps, it may stop sooner, between two of them; the resumed run then repeats that step.
class Stopping {
public:
    // From now on signals are requests. Until then they end the process at once: nothing could be saved.
    void accept_requests() { request.emplace(); }
    bool is_requested() const { return request && request->is_set(); }

    // The loss of `update` carried a request.
    void heard_with_loss(long update) {
        if (heard_in == 0) { heard_in = update; }
    }

    // A worker that is alone, or elastic, has left the step that it was in.
    void note_step_left() { has_left_step = true; }

    // Whether this worker's sends in `update` should carry the request: from two updates later on, since the
    // host of another rank may not have read the loss of the previous update yet.
    bool should_tell_workers(long update) const { return heard_in > 0 && heard_in + 2 <= update; }

    // Some of these syncs (SyncReport) may have carried a request.
    // largest_overlap: the largest tau of all workers
    template <class Syncs>
    void heard_with(const Syncs& syncs, long largest_overlap) {
        for (const auto& sync : syncs) {
            if (sync.stops && last_step == 0) { last_step = sync.send_step + largest_overlap; }
        }
    }

    bool is_last_step_together(long step) const { return last_step > 0 && step == last_step; }
    bool is_last_update_alone(long update) const {
        return has_left_step || (heard_in > 0 && update > heard_in);
    }

private:
    std::optional<StopRequest> request;  // of this process
    long heard_in = 0;                   // update whose loss carried the request; 0: none did
    bool has_left_step = false;
    long last_step = 0;                  // after which workers in lock-step stop; 0: not known
};
