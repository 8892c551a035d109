// Watchdog: a thread that sees what a blocked host cannot: that a collective has failed, or that what the
// host waits for takes longer than anything may.
//
//     Watchdog dog({&inner, &outer}, timeout, [&](const CommError& error) { process.leave_with(error); });
//     {
//         Watchdog::Watch watch(dog, "step 12");
//         ...   // not ended after `timeout` seconds, or a communicator has failed: `bark`, on its thread
//     }
#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/comm.h"

class Watchdog {
public:
    // bark: ends the process.   comms: null for one that there is not
    Watchdog(std::vector<Comm*> comms, double timeout, std::function<void(const CommError&)> bark)
        : comms(std::move(comms)), timeout(timeout), bark(std::move(bark)), thread([this] { run(); }) {}

    ~Watchdog() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
        }
        changed.notify_all();
        thread.join();
    }

    // What the host is about to do, for as long as this lives. One at a time.
    class Watch {
    public:
        Watch(Watchdog& dog, const std::string& what) : dog(dog) { dog.set(what); }
        ~Watch() { dog.set(""); }
        Watch(const Watch&) = delete;
        Watch& operator=(const Watch&) = delete;

    private:
        Watchdog& dog;
    };

private:
    using Clock = std::chrono::steady_clock;

    void set(const std::string& now) {
        std::lock_guard<std::mutex> lock(mutex);
        what = now;
        since = Clock::now();
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return closing; })) {
            if (what.empty()) { continue; }
            try {
                for (Comm* comm : comms) {
                    if (comm) { comm->check(); }
                }
                if (std::chrono::duration<double>(Clock::now() - since).count() > timeout) {
                    throw CommError(-1, format("no end of %s after %.0f s (--timeout): another process has "
                                               "stopped or is cut off", what.c_str(), timeout));
                }
            } catch (const CommError& error) { bark(error); }
        }
    }

    std::vector<Comm*> comms;
    double timeout;
    std::function<void(const CommError&)> bark;
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    std::string what;  // empty: nothing to watch
    Clock::time_point since;
    std::thread thread;
};
