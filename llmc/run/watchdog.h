// Watchdog: a thread that sees what a blocked host cannot: that a collective has failed, or that the host has
// waited for longer than anything may take. It ends the process then (Process::leave_with).
//
//     Watchdog dog(process);
//     dog.guard(inner);
//     {
//         Watchdog::Watch watch(dog, "step 12");
//         ...               // `inner` fails, or nothing moves for twice the run's time limit: the end
//         dog.progress();   // something has moved: the time starts anew
//     }
//
// Only on a GPU: on the CPU the host waits for nothing but the transport, which has limits of its own.
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
    // is_awake: whether it watches at all
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

    // From now on a failure of `comm` is seen. It must live as long as anything is watched.
    void guard(Comm& comm) {
        std::lock_guard<std::mutex> lock(mutex);
        comms.push_back(&comm);
    }

    // What the host waits for has moved. Often enough, that is: long before a time limit is over.
    void progress() {
        std::lock_guard<std::mutex> lock(mutex);
        patience.begin_again();
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

    // Within a Watch: for as long as this lives the host works alone, and takes the time that it needs. (The
    // others have to wait for it. How long they do is what the time limit says.)
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

    // The lock is held while it looks, and so the host goes nowhere once something was found.
    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return closing; })) {
            patience.has_waited(0.2);
            if (!is_awake || what.empty()) { continue; }
            try {
                look();
            } catch (const std::exception& error) { process.leave_with(error); }
            patience.has_worked();  // a store that is gone takes seconds to say so
        }
    }

    // Twice the time limit, since an exchange that is waited for has that limit and knows more of its end.
    // Before that only a failure that others have written down counts.
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
        } catch (const RunError&) { return false; }  // a store that is gone stops nobody who needs it no more
    }

    const Process& process;
    const bool is_awake;
    std::vector<Comm*> comms;
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    std::string what;  // empty: nothing to watch
    bool is_stopped = false;
    Patience patience;
    std::thread thread;
};
