// A lock with a condition, for the emulator's own bookkeeping. Not a pthread mutex: thread sanitizer would
// take that for an ordering which the program under test had made.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "dev/emulator/sanitizers.h"

namespace emulator {

inline double seconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

class Monitor {
public:
    void lock() {
        int before = 0;
        if (__atomic_compare_exchange_n(&state, &before, held, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            return;
        }
        while (__atomic_exchange_n(&state, wanted, __ATOMIC_ACQUIRE) != 0) { sleep_while(&state, wanted, 1); }
    }

    void unlock() {
        if (__atomic_exchange_n(&state, 0, __ATOMIC_RELEASE) == wanted) { wake(&state, 1); }
    }

    // Releases the lock until a notification, or for so many seconds; it may also wake up spuriously.
    void wait(double seconds = 1) {
        const int seen = version;
        unlock();
        sleep_while(&version, seen, seconds);
        lock();
    }

    // With the lock held.
    void notify() {
        __atomic_add_fetch(&version, 1, __ATOMIC_RELEASE);
        wake(&version, INT_MAX);
    }

private:
    static constexpr int held = 1, wanted = 2;

    static void sleep_while(int* word, int value, double seconds) {
        const timespec limit{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &limit, nullptr, 0);
    }
    static void wake(int* word, int count) {
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
    }

    int state = 0, version = 0;
};

// What is done while one lives is no part of the program under test.
class Locked {
public:
    explicit Locked(Monitor& monitor) : monitor(monitor) { monitor.lock(); }
    ~Locked() { monitor.unlock(); }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

private:
    Monitor& monitor;
    OwnAccesses own;
};

}  // namespace emulator
