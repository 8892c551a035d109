// Watchdog: a thread that sees what a blocked host cannot: that a collective has failed, or that what the
// host waits for takes longer than anything may.
//
//     Watchdog dog([&](const CommError& error) { process.leave_with(error); });
//     dog.guard({&inner, &outer}, timeout);
//     {
//         Watchdog::Watch watch(dog, "step 12");
//         ...   // not ended after 2 `timeout` seconds, or a communicator has failed: `bark`, on its thread
//     }
//
// Only on a GPU: on the CPU the host waits for nothing but the transport, which has limits of its own.
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
    // bark: ends the process.
    explicit Watchdog(std::function<void(const CommError&)> bark)
        : bark(std::move(bark)), thread([this] { run(); }) {}

    ~Watchdog() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
        }
        changed.notify_all();
        thread.join();
    }

    // From now on watches what has to do with these; null for one that there is not.
    void guard(std::vector<Comm*> to_guard, double seconds) {
        std::lock_guard<std::mutex> lock(mutex);
        comms = std::move(to_guard);
        timeout = seconds;
    }

    enum Limit { twice_the_timeout, no_limit };  // an exchange in it has a limit of its own, hence twice

    // What the host is about to do, for as long as this lives. One at a time.
    class Watch {
    public:
        Watch(Watchdog& dog, const std::string& what, Limit limit = twice_the_timeout) : dog(dog) {
            dog.set(what, limit);
        }
        ~Watch() { dog.set("", no_limit); }
        Watch(const Watch&) = delete;
        Watch& operator=(const Watch&) = delete;

    private:
        Watchdog& dog;
    };

private:
    using Clock = std::chrono::steady_clock;

    void set(const std::string& now, Limit now_limit) {
        std::lock_guard<std::mutex> lock(mutex);
        what = now;
        limit = now_limit;
        since = Clock::now();
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return closing; })) {
            if (!runs_on_gpu || what.empty() || comms.empty()) { continue; }
            try {
                for (Comm* comm : comms) {
                    if (comm) { comm->check(); }
                }
                const double seconds = std::chrono::duration<double>(Clock::now() - since).count();
                if (limit != no_limit && seconds > 2 * timeout) {
                    throw CommError(-1, format("no end of %s after %.0f s (twice --timeout): another process "
                                               "has stopped or is cut off", what.c_str(), seconds));
                }
            } catch (const CommError& error) { bark(error); }
        }
    }

    std::vector<Comm*> comms;
    double timeout = 0;
    std::function<void(const CommError&)> bark;
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    std::string what;  // empty: nothing to watch
    Limit limit = no_limit;
    Clock::time_point since;
    std::thread thread;
};
