// Watchdog: a thread that sees what a blocked host cannot see: that a collective has failed, or that the host
// has waited longer than anything may take. Then it ends the process (Process::leave_with).
//
//     Watchdog dog(process);
//     dog.guard(inner);
//     {
//         Watchdog::Watch watch(dog, "step 12");
//         ...               // if `inner` fails, or no progress() for twice the time limit: the end
//         dog.progress();   // the time starts again
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
#include <vector>

#include "llmc/run/cause.h"
#include "llmc/comm.h"
#include "llmc/device.h"
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

    // Says that the host's work has moved on. To be called often, compared with the time limit.
    void progress() {
        std::lock_guard<std::mutex> lock(mutex);
        patience.begin_again();
    }

    // Watches the host during this object's life. `what` it does, for the message. One at a time.
    class Watch {
    public:
        Watch(Watchdog& dog, const std::string& what) : dog(dog) { dog.set(what); }
        ~Watch() { dog.set(""); }
        Watch(const Watch&) = delete;
        Watch& operator=(const Watch&) = delete;

    private:
        Watchdog& dog;
    };

    // Within a Watch: during this object's life the host works alone, and takes the time that it needs. (The
    // other processes wait for it, as long as the time limit says.)
    class Alone {
    public:
        explicit Alone(Watchdog& dog) : dog(dog) { dog.stop_the_clock(true); }
        ~Alone() { dog.stop_the_clock(false); }
        Alone(const Alone&) = delete;
        Alone& operator=(const Alone&) = delete;

    private:
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

    // It holds the lock while it looks, so that the host does not get past a failure that it has found.
    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return closing; })) {
            patience.has_waited(0.2);
            if (!is_awake || what.empty()) { continue; }
            try {
                look();
            } catch (const std::exception& error) { process.leave_with(error); }
            patience.has_worked();  // a store that has failed takes seconds to say so
        }
    }

    // The limit here is twice --timeout: an exchange has its own limit, and its error says more. From
    // --timeout on it also ends the process if another one has written down a failure.
    void look() const {
        for (Comm* comm : comms) { comm->check(); }
        if (is_stopped || patience.waited() <= process.timeout) { return; }
        if (!patience.is_over() && !is_cause_known()) { return; }
        const std::string seen = format("waited %.0f s (twice --timeout) for the end of %s: another process "
                                        "has stopped or is cut off", patience.waited(), what.c_str());
        throw CommError(-1, find_cause(*process.store, {process.name(), seen}).text());
    }

    bool is_cause_known() const {
        try {
            return process.store->try_get("cause").has_value();
        } catch (const std::exception&) { return false; }  // training does not need the store
    }

    const Process& process;
    const bool is_awake;
    std::vector<Comm*> comms;
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    std::string what;  // empty: nothing is watched
    bool is_stopped = false;
    Patience patience;
    std::thread thread;
};
