// Checkpointer: writes the checkpoints of a run on a thread of its own, while training goes on.
// A checkpoint counts when it is whole: when every process has its state of that step on its disk (of an
// elastic worker: every rank). They agree on that through the store of their run, led by its process 0:
//     checkpoint/STEP/I             process I: "whole", or "failed: " and why
//     checkpoint/STEP/verdict       process 0, of all of these: the same, or "silent: " and who
//     checkpoint/STEP/done/I        rank 0 of each worker, when its folder has DONE_STEP: as before
//     checkpoint/STEP/done/verdict  process 0: "whole" and the steps that stay, or else as before
// Only after the last of them is anything old deleted, and only what is of the same lineage. A checkpoint
// that fails is an announcement, not the end of the run: what it has written is taken back, all older ones
// stay. Only the model of the run's last step is not taken back: it is what the run was for.
// While the loop trains, the writer waits for others as long as it takes: they may be many steps behind, or
// their disks slow, or the store away, and the loop sees for itself who is gone. The run's time limit begins
// when the loop waits; and a far shorter one for a store that is away, which nobody needs for training. It is
// not known then whether the checkpoint is whole: a resume sees for itself what all have.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/clock.h"
#include "llmc/error.h"
#include "llmc/run/process.h"
#include "llmc/checkpoint/state_file.h"
#include "llmc/run/stop.h"
#include "llmc/run/store.h"

struct CheckpointJob {
    StateIdentity identity;
    std::function<void()> ready;  // on the writer's thread: returns when the data is in host memory
    std::function<std::vector<StateSection>()> sections;       // after ready()
    std::function<void(const std::string& path)> write_model;  // empty: this process writes no model
    std::function<void()> when_whole = [] {};                  // on the writer's thread
    bool is_last = false;  // of the run: its model stays, whatever becomes of the states
};

// -----------------------------------------------------------------------------------------------------------
// The files of one process in its folder

class CheckpointFolder {
public:
    CheckpointFolder(std::string folder, const Process& process)
        : folder(std::move(folder)),
          index(process.index()),
          size(process.size()),
          is_first_rank(process.rank == 0) {}

    std::string state(long step) const { return state_path(folder, step, index); }
    std::string model(long step) const { return model_path(folder, step); }
    std::string done(long step) const { return done_path(folder, step); }
    void write_done(const StateIdentity& who) const { ::write_done(folder, who); }

    // "2.31 GB", of what this process has written.
    std::string size_in_words(long step, bool with_model) const {
        std::error_code gone;
        double bytes = double(std::filesystem::file_size(state(step), gone));
        if (with_model && !gone) { bytes += double(std::filesystem::file_size(model(step), gone)); }
        if (gone) { return "of unknown size"; }
        if (bytes < 1e6) { return format("%.1f kB", bytes / 1e3); }
        return bytes < 1e9 ? format("%.1f MB", bytes / 1e6) : format("%.2f GB", bytes / 1e9);
    }

    // The steps that this folder knows to be whole.
    std::set<long> whole_steps(const std::string& lineage) const {
        std::set<long> steps;
        for (const std::string& name : names()) {
            const std::optional<long> step = done_named(name);
            if (step && is_done(*step, lineage)) { steps.insert(*step); }
        }
        return steps;
    }

    // The steps of which this process's own state is there.
    std::set<long> own_steps(const std::string& lineage) const {
        std::set<long> steps;
        for (const std::string& name : names()) {
            const std::optional<long> step = own_step(name);
            if (step && is_of(state(*step), lineage)) { steps.insert(*step); }
        }
        return steps;
    }

    // Removes this process's files of the steps that are `unwanted`, none of another lineage. DONE_ first and
    // the state last: what is left when the power fails meanwhile is not taken for whole, and is found again.
    template <class Condition>
    void remove(const std::string& lineage, Condition unwanted) const {
        for (long step : is_first_rank ? whole_steps(lineage) : std::set<long>()) {
            if (unwanted(step)) { unlink_file(done(step)); }
        }
        for (const std::string& name : names()) {
            const std::string path = folder + "/" + name;
            const std::optional<long> step = own_step(name);
            if (!step || !unwanted(*step) || !is_of(path, lineage)) { continue; }
            if (index == 0) { unlink_file(model(*step)); }
            unlink_file(path);
        }
    }

    void sync() const { sync_folder(folder); }

    static void unlink_file(const std::string& path) {
        if (unlink(path.c_str()) != 0 && errno != ENOENT) {
            throw RunError("cannot delete " + path + ": " + strerror(errno));
        }
    }

private:
    std::vector<std::string> names() const {
        std::error_code unreadable;
        return names_in(folder, unreadable);
    }

    // Of this process's own states, and of those of processes that the run no longer has.
    std::optional<long> own_step(const std::string& name) const {
        const auto state = state_named(name);
        const bool is_own = state && (state->second == index || state->second >= size);
        return is_own ? std::optional<long>(state->first) : std::nullopt;
    }

    bool is_done(long step, const std::string& lineage) const {
        try {
            return read_done(folder, step).lineage == lineage;
        } catch (const std::runtime_error&) {
            return false;
        }
    }

    static bool is_of(const std::string& path, const std::string& lineage) {
        const std::optional<StateIdentity> who = peek_identity(path);
        return who && who->lineage == lineage;
    }

    const std::string folder;
    const int index, size;
    const bool is_first_rank;
};

// -----------------------------------------------------------------------------------------------------------
// The writer

class Checkpointer {
public:
    // keep (-nk): so many of the newest whole ones stay, 0: all. major (-nm): the first one at or after each
    // multiple of it stays for ever, 0: none. Process 0's count.   folder: an elastic worker has its own
    Checkpointer(std::string folder, const Process& process, long keep, long major)
        : files(std::move(folder), process),
          process(process),
          store(*process.store),
          keep(keep),
          major(major),
          absence_limit(std::min(process.timeout / 4, 30.0)),
          thread([this] { run(); }) {}
    Checkpointer(const Checkpointer&) = delete;
    Checkpointer& operator=(const Checkpointer&) = delete;
    ~Checkpointer() {
        give_up();
        thread.join();
    }

    // For a run that has resumed from `step`, before it trains: removes what this process has of later steps.
    // It belongs to a future that will not be, and must not be mixed with this one's checkpoints: not after a
    // loss of power either, and so this returns when the disk has forgotten it, too.
    void forget_later(long step, const std::string& lineage) const {
        files.remove(lineage, [&](long later) { return later > step; });
        files.sync();
    }

    // Returns at once. Only when is_idle(), and for each step once.
    void begin(CheckpointJob job) {
        std::lock_guard<std::mutex> lock(mutex);
        if (next || is_abandoned || job.identity.step <= newest) {
            throw std::logic_error(format("no checkpoint of step %ld can begin now", job.identity.step));
        }
        newest = job.identity.step;
        next = std::move(job);
        changed.notify_all();
    }

    bool is_idle() {
        std::lock_guard<std::mutex> lock(mutex);
        return !next;
    }

    // Returns when nothing is being written.
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        is_waited_for = true;
        changed.wait(lock, [&] { return !next; });
        is_waited_for = false;
    }

    // Returns when the last checkpoint is whole. RunError where it is not.
    void finish(const std::function<void(const std::string& message)>& print) {
        wait();
        for (const std::string& message : take_messages()) { print(message); }
        if (!has_failed()) { return; }
        throw RunError("the last checkpoint is not whole" + (failure().empty() ? "" : " (" + failure() + ")") +
                       ": see to that and resume (-y 1), from the newest one that is whole");
    }

    // Lines for people, in their order; each once.
    std::vector<std::string> take_messages() {
        std::lock_guard<std::mutex> lock(mutex);
        return std::exchange(messages, {});
    }

    // Of the last one that has ended: whether it is not whole on all processes.
    bool has_failed() const {
        std::lock_guard<std::mutex> lock(mutex);
        return failed;
    }

    // And why not: the same words on all processes. Empty where a process does not know.
    std::string failure() const {
        std::lock_guard<std::mutex> lock(mutex);
        return failed ? why : "";
    }

    // The loop has failed: no half file stays, nobody is waited for. Make a ready() that blocks throw first.
    // The disk has some seconds to come back; a process that leaves cannot wait for it longer.
    void abandon() {
        give_up();
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait_for(lock, std::chrono::seconds(5), [&] { return !next; });
    }

private:
    struct Abandoned {};

    // What process 0 says of all, or a process of itself.
    struct Verdict {
        bool is_whole = false;
        std::string words;       // whole: which steps stay, none: all; else why not
        bool is_silent = false;  // not whole only because some have not said anything

        std::string text() const {
            return (is_whole ? "whole" : is_silent ? "silent: " : "failed: ") + words;
        }
        static Verdict parse(const std::string& text) {
            if (text.rfind("whole", 0) == 0) { return {true, text.substr(5)}; }
            if (text.rfind("silent: ", 0) == 0) { return {false, text.substr(8), true}; }
            return {false, text.rfind("failed: ", 0) == 0 ? text.substr(8) : "it says '" + text + "'"};
        }
    };

    // What this process has written of the checkpoint.
    struct Written {
        bool model = false, state = false, done = false;
        double seconds = 0;
    };

    void give_up() {
        std::lock_guard<std::mutex> lock(mutex);
        is_abandoned = true;
        changed.notify_all();
    }

    void run() {
        leave_requests_to_others();
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [&] { return next || is_abandoned; });
            if (!next) { return; }
            why.clear();
            lock.unlock();
            const bool is_whole = carry_out(*next);
            lock.lock();
            failed = !is_whole;
            next.reset();
            changed.notify_all();
        }
    }

    // To stop: a signal that this thread took would interrupt it, which some file systems report as failure.
    static void leave_requests_to_others() {
        sigset_t requests;
        sigemptyset(&requests);
        for (int signal : stop_signals) { sigaddset(&requests, signal); }
        pthread_sigmask(SIG_BLOCK, &requests, nullptr);
    }

    bool carry_out(const CheckpointJob& job) {
        try {
            return write_and_agree(job);
        } catch (const Abandoned&) {
            return false;
        } catch (const std::exception& error) {
            // Nobody can say for all. What is written stays, for the others may have theirs.
            say(format("it is not known whether the checkpoint of step %ld is whole: %s", job.identity.step,
                       error.what()));
            return false;
        }
    }

    bool write_and_agree(const CheckpointJob& job) {
        const StateIdentity& who = job.identity;
        const std::string key = format("checkpoint/%ld", who.step);
        Written written;
        has_missed_store = model_stays = false;
        Verdict own = attempt([&] { write_files(job, written); });
        tidy(who.step, [&] { thin_out(who.lineage); });
        Verdict verdict = agree(key, own, 1, who);
        forget_keys(who.step);
        if (verdict.is_whole) {
            if (process.rank == 0) { own = attempt([&] { write_done(who, written); }); }
            verdict = agree(key + "/done", own, process.ranks, who);
            // Who is silent now has its state: a resume takes this step, so nobody may delete any of it.
            if (verdict.is_silent) { throw RunError(verdict.words); }
        }
        announce(who, own, verdict, written);
        if (verdict.is_whole) { job.when_whole(); }
        tidy(who.step, [&] { clean_up(who, verdict, written); });
        return verdict.is_whole;
    }

    // What fails here changes nothing for the checkpoint.
    template <class Work>
    void tidy(long step, Work work) {
        const Verdict clean = attempt(work);
        if (!clean.is_whole) { say(format("after the checkpoint of step %ld: ", step) + clean.words); }
    }

    // The model first: where there is a state of process 0, its model is there.
    void write_files(const CheckpointJob& job, Written& written) {
        const long step = job.identity.step;
        job.ready();
        check();
        const double start = now_seconds();
        if (job.write_model) {
            job.write_model(files.model(step));
            written.model = true;
            model_stays = job.is_last;
        }
        try {
            write_state(files.state(step), job.identity, job.sections(), [&] { check(); });
        } catch (...) {
            // A model without its state would not be found again when old checkpoints are deleted.
            if (written.model && !model_stays) { unlink(files.model(step).c_str()); }
            throw;
        }
        written.state = true;
        untold.insert(step);
        written.seconds = now_seconds() - start;
    }

    void write_done(const StateIdentity& who, Written& written) {
        files.write_done(who);
        written.done = true;
    }

    // "whole", or what went wrong in `work`.
    template <class Work>
    Verdict attempt(Work work) {
        try {
            work();
            return {true, ""};
        } catch (const std::exception& error) {
            check();  // what fails because it was abandoned is no failure to tell others of
            return {false, error.what()};
        }
    }

    // Each `stride`-th process has said under `key` how it stands; what process 0 makes of that.
    Verdict agree(const std::string& key, const Verdict& own, int stride, const StateIdentity& who) {
        if (process.index() % stride == 0) {
            tell(who.step, key + "/" + std::to_string(process.index()), own.text());
        }
        if (process.index() != 0) {
            // Process 0 may have as long to write, and as long again to wait for others.
            Patience patience(2 * process.timeout + 5);
            const std::optional<std::string> verdict = await(key + "/verdict", patience);
            if (verdict) { return Verdict::parse(*verdict); }
            throw RunError(process.member(0) + " does not say");
        }
        Verdict verdict = collect(key, own, stride);
        verdict.words = verdict.is_whole ? steps_that_stay(who) : verdict.words + what_there_is(who);
        tell(who.step, key + "/verdict", verdict.text());
        return verdict;
    }

    Verdict collect(const std::string& key, const Verdict& own, int stride) {
        std::vector<std::string> failures;
        bool is_silent = own.is_whole;
        if (!own.is_whole) { failures.push_back(process.name() + ": " + own.words); }
        Patience patience(process.timeout);
        for (int i = stride; i < process.size(); i += stride) {
            const std::optional<std::string> said = await(key + "/" + std::to_string(i), patience);
            const Verdict theirs =
                said ? Verdict::parse(*said)
                     : Verdict{false, format("has not been heard of for %.0f s", patience.waited()), true};
            if (theirs.is_whole) { continue; }
            is_silent = is_silent && theirs.is_silent;
            failures.push_back(process.member(i) + ": " + theirs.words);
        }
        return {failures.empty(), list_in_words(failures), !failures.empty() && is_silent};
    }

    // Asks first: as long as there is no store it is certain that nobody has been told of the step.
    void tell(long step, const std::string& key, const std::string& value) {
        Patience patience(process.timeout);
        ask_until(patience, [&] {
            store.try_get("cause");
            untold.erase(step);
            store.set(key, value);
            return true;
        });
    }

    // The value of the key; nothing where it does not come in time, or the run has failed.
    std::optional<std::string> await(const std::string& key, Patience& patience) {
        std::optional<std::string> value;
        ask_until(patience, [&] {
            // In this order: a value that was set before the failure counts.
            const bool run_has_failed = store.try_get("cause").has_value();
            value = store.try_get(key);
            return value || run_has_failed;
        });
        return value;
    }

    // Asks the store again and again until `ask` says that it is done, or there is no patience left.
    // Throws a RunError where there is no store at the end of it, or none for absence_limit while the loop
    // waits. Who finds it again before that gives the others little more time, for they may have given up.
    // That is less together than the time limit of a collective, in which these may wait already.
    template <class Ask>
    void ask_until(Patience& patience, Ask ask) {
        Patience absence(absence_limit);
        while (true) {
            check();
            if (!is_waited_for) {
                patience.begin_again();
                absence.begin_again();
            }
            try {
                if (ask() || patience.is_over()) { return; }
                absence.begin_again();
            } catch (const RunError&) {
                has_missed_store = has_missed_store || is_waited_for;
                if (absence.is_over() || patience.is_over()) { throw; }
            }
            if (has_missed_store && patience.left() > 2 * absence_limit) {
                patience = Patience(2 * absence_limit);
            }
            patience.pause();
        }
    }

    // Nobody reads the keys of the step before any more: all have come to this one.
    void forget_keys(long step) {
        const long before = std::exchange(last_in_store, step);
        if (before < 0) { return; }
        const std::string key = format("checkpoint/%ld", before);
        try {
            for (const std::string& part : {key, key + "/done"}) {
                store.remove(part + "/" + std::to_string(process.index()));
                if (process.index() == 0) { store.remove(part + "/verdict"); }
            }
        } catch (const RunError&) {}  // a store that is away keeps them until the end of the run
    }

    // " 20 30 40"; empty: all.
    std::string steps_that_stay(const StateIdentity& who) const {
        if (keep <= 0) { return ""; }
        std::set<long> whole = files.whole_steps(who.lineage);
        whole.erase(whole.upper_bound(who.step), whole.end());
        whole.insert(who.step);
        const std::set<long> stay_for_ever = first_of_multiples(whole);
        std::string steps;
        long newer = 0;
        for (auto step = whole.rbegin(); step != whole.rend(); ++step, newer++) {
            const bool stays = newer < keep || stay_for_ever.count(*step);
            if (stays) { steps += " " + std::to_string(*step); }
        }
        return steps;
    }

    // Of each multiple of `major` the first step at or after it. A worker may jump over the multiple itself,
    // and -n need not divide it.
    std::set<long> first_of_multiples(const std::set<long>& steps) const {
        std::set<long> first;
        long multiple = 0;
        for (long step : steps) {
            if (major > 0 && step / major > multiple) {
                multiple = step / major;
                first.insert(step);
            }
        }
        return first;
    }

    // Where the checkpoint of the step is not whole.
    std::string what_there_is(const StateIdentity& who) const {
        const std::set<long> whole = files.whole_steps(who.lineage);
        const auto after = whole.lower_bound(who.step);
        const std::string last = after == whole.begin()
                                     ? "; there is none before it"
                                     : format("; the last whole one is of step %ld", *std::prev(after));
        return last + (model_stays ? "; the model of this step is complete: " + files.model(who.step) : "");
    }

    // While there is no store this process does not know what the others have, and so deletes nothing for
    // whose sake one of them may have deleted older ones: only what it has told nobody of. The newest of that
    // stay, and one more, for others may not have come further yet.
    void thin_out(const std::string& lineage) {
        while (keep > 0 && long(untold.size()) > keep + 1) {
            const long oldest = *untold.begin();
            untold.erase(untold.begin());
            if (first_of_multiples(files.own_steps(lineage)).count(oldest)) { continue; }
            files.remove(lineage, [&](long step) { return step == oldest; });
        }
    }

    // What is not whole is of no use, and the disk may be full.
    void clean_up(const StateIdentity& who, const Verdict& verdict, const Written& written) {
        if (verdict.is_whole) {
            untold.clear();
            remove_old(who, verdict.words);
        } else {
            if (written.done) { CheckpointFolder::unlink_file(files.done(who.step)); }
            if (written.model && !model_stays) { CheckpointFolder::unlink_file(files.model(who.step)); }
            if (written.state) { CheckpointFolder::unlink_file(files.state(who.step)); }
        }
    }

    void remove_old(const StateIdentity& who, const std::string& stay) const {
        std::istringstream words(stay);
        std::set<long> kept;
        for (long step; words >> step;) { kept.insert(step); }
        if (!kept.count(who.step)) { return; }  // all stay
        files.remove(who.lineage, [&](long step) { return step < who.step && !kept.count(step); });
    }

    // Process 0 speaks for all. The output of another worker may be elsewhere: there who has failed speaks,
    // too.
    void announce(const StateIdentity& who, const Verdict& own, const Verdict& verdict,
                  const Written& written) {
        const bool is_first = process.index() == 0;
        const bool is_of_another_worker = process.worker != process.first_worker;
        const std::string missing = format("there is no checkpoint of step %ld: ", who.step) + verdict.words;
        if (!verdict.is_whole) { remember(missing); }
        if (verdict.is_whole && is_first) {
            const std::string size = files.size_in_words(who.step, written.model);
            say(format("checkpoint of step %ld is whole (%s in %.1f s)", who.step, size.c_str(),
                       written.seconds));
        } else if (!verdict.is_whole && (is_first || (is_of_another_worker && !own.is_whole))) {
            say(missing);
        }
    }

    void remember(const std::string& failure) {
        std::lock_guard<std::mutex> lock(mutex);
        why = failure;
    }

    void say(const std::string& line) {
        std::lock_guard<std::mutex> lock(mutex);
        messages.push_back(line);
    }

    void check() const {
        if (is_abandoned) { throw Abandoned(); }
    }

    const CheckpointFolder files;
    const Process& process;
    Store& store;
    const long keep, major;
    const double absence_limit;
    // Of the writer's thread alone:
    long last_in_store = -1;
    bool has_missed_store = false;  // while the loop waited for the present step
    bool model_stays = false;       // of the present step, also where its checkpoint is not whole
    std::set<long> untold;          // steps whose states are here, and that the store cannot have heard of

    mutable std::mutex mutex;
    std::condition_variable changed;
    std::optional<CheckpointJob> next;  // what is being written
    long newest = -1;
    bool failed = false;
    std::string why;
    std::atomic<bool> is_abandoned{false}, is_waited_for{false};
    std::vector<std::string> messages;
    std::thread thread;
};
