// StopRequest: SIGTERM, SIGUSR1 (SLURM's warning before it preempts a job) and SIGHUP (an ssh connection that
// drops) ask a run to write a checkpoint and to leave. The first sets a flag that the training loop looks at; a
// second one ends the process at once, as it would have without this. timeout(1) signals its process and then
// that one's group, and systemd all processes of a service, the launcher's too: what comes within a second of
// the first is the same request.
#pragma once
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>

// The exit status of a process that was asked to stop and has written its checkpoint: 128 + SIGTERM.
const int stopped_status = 143;

const std::array<int, 3> stop_signals = {SIGTERM, SIGUSR1, SIGHUP};
const double one_request_seconds = 1;

// For a process that no launcher looks after: until there is a StopRequest these signals end it at once, for
// there is nothing to write yet, but as one that was asked to stop. What it was started to ignore stays so.
inline void leave_at_stop_signals() {
    for (int s : stop_signals) {
        struct sigaction before;
        sigaction(s, nullptr, &before);
        if (before.sa_handler != SIG_IGN) {
            ::signal(s, [](int) { _exit(stopped_status); });
        }
    }
}

// While it lives, these signals are requests; afterwards they do what they did before. One at a time.
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
            // What this process was started to ignore (nohup, trap '') stays ignored.
            if (before[i].sa_handler != SIG_IGN) { sigaction(stop_signals[i], &action, nullptr); }
        }
    }
    StopRequest(const StopRequest&) = delete;
    StopRequest& operator=(const StopRequest&) = delete;
    ~StopRequest() {
        for (size_t i = 0; i < stop_signals.size(); i++) { sigaction(stop_signals[i], &before[i], nullptr); }
    }

    bool is_set() const { return first_signal != 0; }

private:
    // Calls only what a signal handler may call.
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

    // When the first signal came, in nanoseconds; 0: none has. Static, for a handler is given nothing else.
    inline static std::atomic<int64_t> first_signal{0};
    static_assert(std::atomic<int64_t>::is_always_lock_free, "a signal handler must not wait for a lock");
    std::array<struct sigaction, stop_signals.size()> before;
};
