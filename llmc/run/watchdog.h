// Watchdog: a thread that sees what a blocked host cannot see: that a collective has failed, that another
// process has failed or died, or that the host has waited longer than anything may take. Then it ends the
// process (Process::leave_with).
//
//     Watchdog dog(process);
//     dog.guard(inner);
//     {
//         Watchdog::Watch watch(dog, "step 12");
//         ...               // exits if `inner` fails, a process dies, or nothing moves in twice the limit
//         dog.progress();   // restarts the time limit
//     }
//
// Only on a GPU: on the CPU the host waits only for the transport, which has its own time limits.
#pragma once
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/run/cause.h"
#include "llmc/comm.h"
#include "llmc/device.h"
#include "llmc/run/neighbours.h"
#include "llmc/run/process.h"
#include "llmc/run/store.h"

class Watchdog {
public:
    // is_awake: whether it watches
    explicit Watchdog(const Process& process, bool is_awake = runs_on_gpu)
        : process(process), is_awake(is_awake && process.size() > 1), patience(2 * process.timeout),
          thread([this] { run(); }) {}

    ~Watchdog() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
        }
        changed.notify_all();
        thread.join();
    }

    // From now on watches `comm`, which must live as long as anything is watched.
    void guard(Comm& comm) {
        std::lock_guard<std::mutex> lock(mutex);
        comms.push_back(&comm);
    }

    // From now on watches the processes on this machine. Collective.
    void meet_neighbours(Process& own) {
        if (!is_awake) { return; }
        const std::vector<std::string> all = own.gather("alive", Neighbours::introduction(getpid()));
        std::lock_guard<std::mutex> lock(mutex);
        neighbours = Neighbours(all);
    }

    // Says that the host's work has moved on. To be called often, compared with the time limit.
    void progress() {
        std::lock_guard<std::mutex> lock(mutex);
        patience.begin_again();
    }

    // Watches the host during this object's life. `what` it does, for the message. One at a time.
    struct Watch {
        Watch(Watchdog& dog, const std::string& what) : dog(dog) { dog.set(what); }
        ~Watch() { dog.set(""); }
        Watch(const Watch&) = delete;
        Watchdog& dog;
    };

    // Within a Watch: during this object's life the host works alone, and takes the time that it needs. (The
    // other processes wait for it, as long as the time limit says.)
    struct Alone {
        explicit Alone(Watchdog& dog) : dog(dog) { dog.stop_the_clock(true); }
        ~Alone() { dog.stop_the_clock(false); }
        Alone(const Alone&) = delete;
        Watchdog& dog;
    };

private:
    void set(const std::string& now) {
        std::lock_guard<std::mutex> lock(mutex);
        what = now;
        patience.begin_again();
    }

    void stop_the_clock(bool stopped) {
        std::lock_guard<std::mutex> lock(mutex);
        is_stopped = stopped;
        patience.begin_again();
    }

    // The thread holds the lock while it looks, so that the host does not get past a failure that it has
    // found; but not while it asks the store, every two seconds, since the store may take long to answer.
    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        const auto is_closing = [&] { return closing; };
        for (int looks = 1; !changed.wait_for(lock, std::chrono::milliseconds(200), is_closing); looks++) {
            patience.has_waited(0.2);
            if (!is_awake || what.empty()) { continue; }
            std::string failure;
            if (looks % 10 == 0) {
                const Neighbours known = neighbours;
                lock.unlock();
                failure = failure_elsewhere(known);
                lock.lock();
            }
            try {
                if (!what.empty()) { look(failure); }
            } catch (const std::exception& error) { process.leave_with(error); }
            patience.has_worked();  // a store that has failed takes seconds to say so
        }
    }

    // The limit here is twice --timeout: an exchange has its own, whose error says more.   failure: may be ""
    void look(const std::string& failure) {
        uint64_t now = 0;
        for (Comm* comm : comms) { comm->check(), now += comm->progress(); }
        if (std::exchange(progress_seen, now) != now) { patience.begin_again(); }
        if (is_stopped) { return; }
        if (!failure.empty()) { throw CommError(-1, failure); }
        if (!patience.is_over()) { return; }
        const std::string seen = format("waited %.0f s (twice --timeout) for %s to finish: another process "
                                        "has stopped or is cut off", patience.waited(), what.c_str());
        throw CommError(-1, find_cause(*process.store, {process.name(), seen}).text());
    }

    // The first failure of another process that is known, in words, or "".
    std::string failure_elsewhere(const Neighbours& known) const {
        try {
            const int dead = known.dead();
            if (dead < 0 && !process.store->try_get("cause")) { return ""; }
            const std::string what = "has died: see its output and dmesg, and resume with -y 1";
            return record_cause(*process.store, {process.member(std::max(dead, 0)), what}).text();
        } catch (const std::exception&) { return ""; }  // training does not need the store
    }

    const Process& process;
    const bool is_awake;
    std::vector<Comm*> comms;
    uint64_t progress_seen = 0;  // of all of them, when look() was last called
    Neighbours neighbours{{}};
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    std::string what;  // empty: nothing is watched
    bool is_stopped = false;
    Patience patience;
    std::thread thread;
};
