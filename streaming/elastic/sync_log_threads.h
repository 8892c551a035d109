// The threads of a sync log (sync_log.h): one asks the store what the log wants to know, one waits to be told
// what was decided, one shows that this process is alive, each over a connection of its own. The trainer's
// thread waits only when the log says so.
//
// No lock is held while the store works. The trainer holds the log's lock while it applies a sync; the
// store's thread may wait for that, but the heartbeat must not. It shows a copy of the log's last pulse,
// under a lock that is held only briefly.
#pragma once
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/clock.h"
#include "llmc/run/log_store.h"
#include "streaming/elastic/sync_log.h"

// Shows that this process is alive, over a connection of its own, since a payload may take a minute. After
// each beat it asks whether the store still has the run. Like the sync log itself it only says what to ask.
class Heartbeat {
public:
    // looks: each beat asks for the others', too (SyncLog::hear_beats). Over a bucket that takes two round
    // trips, for which no payload waits here.
    Heartbeat(double interval, bool looks) : interval(interval), looks(looks) {}

    // A beat that says something new goes out at once. The first ones follow each other fast, to show life.
    std::vector<StoreRequest> requests(const LogPulse& pulse, double now) {
        if (pulse.folder.empty() || (now < next && pulse == shown)) { return {}; }
        shown = pulse;
        next = now + std::min(interval, 0.1 * double(count + 1));
        const StoreRequest generation = {StoreRequest::get, "run", "generation"};
        if (!looks) { return {show(pulse.beat), generation}; }
        return {show(pulse.beat), {StoreRequest::list, shown.folder}, generation};
    }

    // False: the store has lost the run, as SyncLog::check_generation() will see.   answer: the last one
    bool answer(const StoreAnswer& answer) {
        is_heard = !answer.lost && answer.found && answer.value == shown.generation;
        return answer.lost || is_heard;
    }

    // The last beat of a process that ends: it tells the others not to wait for that process any more.
    std::vector<StoreRequest> farewell() {
        LogBeat last = shown.beat;
        last.promise = LogBeat::ends;
        return is_heard ? std::vector<StoreRequest>{show(last)} : std::vector<StoreRequest>();
    }

    // Seconds until there is something to ask, if the pulse stays as it is.
    double rest(double now) const { return std::clamp(next - now, 0.001, interval); }

private:
    StoreRequest show(LogBeat beat) {
        beat.count = ++count;
        return {StoreRequest::put, shown.folder, std::to_string(shown.worker), beat.text()};
    }

    double interval, next = 0;
    bool looks;
    LogPulse shown;
    bool is_heard = false;  // by the store that has the run
    long count = 0;
};

class SyncLogThreads {
public:
    // open: a connection to the store. It is called here, so that the caller gets what it throws.
    SyncLogThreads(const SyncLogOptions& options, const SyncSchedule& schedule, int worker, LogShard& shard,
                   const LogStart& start, const std::function<std::unique_ptr<LogStore>()>& open)
        : log(options, schedule, worker, shard, rules, start),
          heartbeat(options.expiry / 4, options.in_line > 0),
          store(open()), pulse_store(open()), listen_store(open()),
          asking([this] { guarded(&SyncLogThreads::ask); }),
          beating([this] { guarded(&SyncLogThreads::beat); }),
          listening([this] { guarded(&SyncLogThreads::listen); }) {}

    // Returns within the store's time limit, even if the store does not answer.
    ~SyncLogThreads() {
        {
            const std::scoped_lock locks(mutex, pulse_mutex);
            ending = true;
        }
        needed.notify_all();
        listens.notify_all();
        pulse_changed.notify_all();
        for (std::thread* thread : {&asking, &beating, &listening}) { thread->join(); }
    }

    LogTurn turn(long step) { return take_turn([&] { return log.turn(step, now_seconds()); }); }
    LogTurn finish(long last_step) { return take_turn([&] { return log.finish(last_step, now_seconds()); }); }

    // Until turn() has something to do, but no longer than this.
    void wait(double seconds) {
        std::unique_lock<std::mutex> lock(mutex);
        answered.wait_for(lock, std::chrono::duration<double>(seconds),
                          [this] { return thrown || log.is_turn_due(); });
    }

    void checkpointed(const std::vector<long>& positions) {
        const std::lock_guard<std::mutex> lock(mutex);
        log.checkpointed(positions);
        wake();
    }

    std::vector<LogEvent> events() { return locked([&] { return log.events(); }); }
    std::string warning() const { return store->warning(); }  // of the store, when it was opened
    std::vector<long> positions() const { return locked([&] { return log.positions(); }); }
    std::string generation() const { return locked([&] { return log.current_generation(); }); }
    std::string helpless() const { return locked([&] { return log.helpless(); }); }
    LogStop stopped() const { return locked([&] { return log.stopped(); }); }
    // CPU time of the three threads, the store's client included.
    double cpu_seconds() const { return asking_cpu + beating_cpu + listening_cpu; }

private:
    static double cpu_seconds_of_thread() {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
    }

    template <class What>
    auto locked(const What& what) const -> decltype(what()) {
        const std::lock_guard<std::mutex> lock(mutex);
        return what();
    }

    template <class Turn>
    LogTurn take_turn(const Turn& turn) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (thrown) { std::rethrow_exception(thrown); }
        const LogTurn said = turn();
        show_changes();
        return said;
    }

    // Tells all threads what a turn or an answer has changed. The caller holds the log's lock.
    void show_changes() {
        if (const LogPulse now = log.pulse(); !(now == pulse)) {
            const std::lock_guard<std::mutex> lock(pulse_mutex);
            pulse = now;
            pulse_changed.notify_all();
        }
        if (now_seconds() + log.rest(now_seconds()) < asks_at - soon) { wake(); }
        if (log.listens()) { listens.notify_all(); }
        if (log.is_turn_due()) { answered.notify_all(); }
    }

    // Wakes the store's thread: a system call. The caller holds the log's lock.
    void wake() {
        asks_at = 0;
        needed.notify_all();
    }

    // What a thread throws is a bug or a lack of memory: the trainer's thread gets it.
    void guarded(void (SyncLogThreads::*what)()) {
        try {
            (this->*what)();
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex);
            thrown = std::current_exception();
        }
        answered.notify_all();
    }

    void ask() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!ending) {
            const std::vector<StoreRequest> requests = log.requests(now_seconds());
            asking_cpu = cpu_seconds_of_thread();
            if (requests.empty()) {
                asks_at = now_seconds() + log.rest(now_seconds());
                needed.wait_for(lock, std::chrono::duration<double>(asks_at - now_seconds()),
                                [this] { return ending || asks_at == 0; });
                asks_at = 0;
                continue;
            }
            lock.unlock();
            const std::vector<StoreAnswer> answers = store->perform_all(requests);
            lock.lock();
            log.answer(answers, now_seconds());
            show_changes();
        }
    }

    void listen() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!ending) {
            const std::vector<StoreRequest> requests = log.listen();
            listening_cpu = cpu_seconds_of_thread();
            if (requests.empty()) {
                listens.wait(lock, [this] { return ending || log.listens(); });
                continue;
            }
            const double patience = log.patience;
            lock.unlock();
            const auto answers = patience > 0 ? listen_store->await(requests, patience)
                                              : listen_store->perform_all(requests);
            lock.lock();
            log.hear(answers, now_seconds());
            show_changes();
            const std::chrono::duration<double> retry(answers.back().lost ? retry_pause : 0);
            listens.wait_for(lock, retry, [&] { return ending || retry.count() == 0; });
        }
    }

    void beat() {
        std::unique_lock<std::mutex> lock(pulse_mutex);
        while (!ending) {
            const std::vector<StoreRequest> requests = heartbeat.requests(pulse, now_seconds());
            beating_cpu = cpu_seconds_of_thread();
            if (requests.empty()) {
                const LogPulse shown = pulse;
                pulse_changed.wait_for(lock, std::chrono::duration<double>(heartbeat.rest(now_seconds())),
                                       [&] { return ending || !(pulse == shown); });
                continue;
            }
            lock.unlock();
            const double from = now_seconds();
            const std::vector<StoreAnswer> answers = pulse_store->perform_all(requests);
            if (!heartbeat.answer(answers.back())) {
                const std::lock_guard<std::mutex> log_lock(mutex);
                log.check_generation(answers.back());
                show_changes();
            }
            if (const std::unique_lock<std::mutex> is_free(mutex, std::try_to_lock); is_free) {
                log.hear_beats(answers, from, now_seconds());
                show_changes();
            }
            lock.lock();
        }
        const std::vector<StoreRequest> last = heartbeat.farewell();
        lock.unlock();
        if (!last.empty()) { pulse_store->perform_all(last); }
    }

    static constexpr double soon = 0.001;     // seconds: waking the thread would take as long
    static constexpr double retry_pause = 0.5;  // seconds

    const SyncLogRules rules;

    mutable std::mutex mutex;  // guards what follows, up to the next mutex
    std::condition_variable needed, listens, answered;
    SyncLog log;
    double asks_at = 0;         // when the store's thread looks again; 0: it is working
    std::exception_ptr thrown;  // by one of the threads
    std::atomic<double> asking_cpu{0}, beating_cpu{0}, listening_cpu{0};

    std::mutex pulse_mutex;
    std::condition_variable pulse_changed;
    LogPulse pulse;  // written under both mutexes, so that holding either is enough to read it
    Heartbeat heartbeat;

    std::atomic<bool> ending{false};  // written under both mutexes
    const std::unique_ptr<LogStore> store, pulse_store, listen_store;
    std::thread asking, beating, listening;  // the last members: they use all others
};
