// Checkpointer: writes a run's checkpoints on a thread of its own while training continues.
//
// A checkpoint is whole when every process has its state of that step on its disk. The processes agree on
// that through the store, led by process 0:
//     checkpoint/STEP/I             process I: "whole", or "failed: " and the reason
//     checkpoint/STEP/verdict       process 0's summary: the same, or "silent: " and who has not answered:
//                                   then all files stay, since a resume may find them whole
//     checkpoint/STEP/done/I        rank 0 of each worker, once its folder has DONE_STEP: as above
//     checkpoint/STEP/done/verdict  process 0's summary: "whole" and the steps to keep, or as above
// Only after the last of these is anything old deleted, and only files of the same lineage. A checkpoint that
// fails is reported but does not end the run: its files are deleted, and all older ones stay. The one
// exception is the model of the run's last step, which always stays, since it is the result of the run.
//
// While the loop trains, the writer waits for the other processes without a limit: they may be many steps
// behind, their disks may be slow, or the store may be down, and the loop notices by itself if one of them is
// gone. Once the loop waits for the writer, the run's time limit applies, and a much shorter one to a store
// that is down, since training itself does not need the store. In that case nobody knows whether the
// checkpoint is whole; a resume finds out from the files.
#pragma once
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
#include "llmc/run/store.h"

struct CheckpointJob {
    StateIdentity identity;
    // Called on the writer's thread, in this order; of the last step write_model comes before sections.
    std::function<void()> ready;  // returns when the data is in host memory
    std::function<std::vector<StateSection>()> sections;
    std::function<void(const std::string& path)> write_model;  // empty: this process writes no model
    std::function<void()> when_whole = [] {};
    bool is_last = false;  // the run's last step: its model stays even if the checkpoint fails
};

// -----------------------------------------------------------------------------------------------------------
// The files of one process in its folder

class CheckpointFolder {
public:
    CheckpointFolder(std::string folder, const Process& process)
        : folder(std::move(folder)), index(process.index()), size(process.size()),
          is_first_rank(process.rank == 0) {}

    std::string state(long step) const { return state_path(folder, step, index); }
    std::string model(long step) const { return model_path(folder, step); }
    std::string done(long step) const { return done_path(folder, step); }
    void write_done(const StateIdentity& who) const { ::write_done(folder, who); }

    // The size of this process's files, such as "2.31 GB".
    std::string size_in_words(long step, bool with_model) const {
        std::error_code gone;
        double bytes = double(std::filesystem::file_size(state(step), gone));
        if (with_model && !gone) { bytes += double(std::filesystem::file_size(model(step), gone)); }
        if (gone) { return "of unknown size"; }
        if (bytes < 1e6) { return format("%.1f kB", bytes / 1e3); }
        return bytes < 1e9 ? format("%.1f MB", bytes / 1e6) : format("%.2f GB", bytes / 1e9);
    }

    // The steps of this lineage that have DONE_STEP in this folder.
    std::set<long> whole_steps(const std::string& lineage) const {
        return steps([&](const std::string& name) {
            const std::optional<long> step = done_named(name);
            return step && is_of(peek_done(folder, *step), lineage) ? step : std::nullopt;
        });
    }

    // The steps of this lineage for which this process's own state is there.
    std::set<long> own_steps(const std::string& lineage) const {
        return steps([&](const std::string& name) {
            const std::optional<long> step = own_step(name);
            return step && is_of(peek_identity(state(*step)), lineage) ? step : std::nullopt;
        });
    }

    // Removes this process's files of this lineage, of the steps that are `unwanted`. DONE_STEP goes first
    // and the state last: if the power fails in between, the remains do not look whole, and the next removal
    // finds them.
    template <class Condition>
    void remove(const std::string& lineage, Condition unwanted) const {
        for (long step : is_first_rank ? whole_steps(lineage) : std::set<long>()) {
            if (unwanted(step)) { unlink_file(done(step)); }
        }
        for (const std::string& name : names()) {
            const std::string path = folder + "/" + name;
            const std::optional<long> step = own_step(name);
            if (!step || !unwanted(*step) || !is_of(peek_identity(path), lineage)) { continue; }
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
    // RunError if the folder cannot be read: what seems to be missing may be there.
    std::vector<std::string> names() const {
        std::error_code error;
        const std::vector<std::string> names = names_in(folder, error);
        if (!error || error == std::errc::no_such_file_or_directory) { return names; }
        throw RunError("cannot read the folder " + folder + ": " + error.message());
    }

    template <class StepOf>
    std::set<long> steps(StepOf step_of) const {
        std::set<long> found;
        for (const std::string& name : names()) {
            if (const std::optional<long> step = step_of(name)) { found.insert(*step); }
        }
        return found;
    }

    // The step of a state that this process looks after: its own, or one of a process that the run no
    // longer has.
    std::optional<long> own_step(const std::string& name) const {
        const auto state = state_named(name);
        const bool is_own = state && (state->second == index || state->second >= size);
        return is_own ? std::optional<long>(state->first) : std::nullopt;
    }

    static bool is_of(const std::optional<StateIdentity>& who, const std::string& lineage) {
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
    // keep (-nk): how many of the newest whole checkpoints stay; 0: all. major (-nm): the first checkpoint at
    // or after each multiple of it stays for ever; 0: none. Process 0's values count.
    Checkpointer(std::string folder, const Process& process, long keep, long major)
        : files(std::move(folder), process), process(process), store(*process.store), keep(keep),
          major(major), absence_limit(std::min(process.timeout / 4, 30.0)), thread([this] { run(); }) {}
    ~Checkpointer() {
        give_up();
        thread.join();
    }

    // For a run that has resumed from `step`, before it trains: removes this process's files of later steps,
    // which the run will write anew. Old and new ones must never mix, not even after a loss of power, so this
    // returns when the removal is on the disk.
    void forget_later(long step, const std::string& lineage) const {
        files.remove(lineage, [&](long later) { return later > step; });
        files.sync();
    }

    // Starts to write a checkpoint, and returns at once. Requires is_idle(), and a later step than before.
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

    // Returns when no checkpoint is being written.
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        is_waited_for = true;
        changed.wait(lock, [&] { return !next; });
        is_waited_for = false;
    }

    // Waits for the last checkpoint. RunError if it does not become whole, or if that remains unknown.
    void finish(const std::function<void(const std::string& message)>& print) {
        wait();
        for (const std::string& message : take_messages()) { print(message); }
        if (!has_failed()) { return; }  // nothing below changes any more
        if (is_unknown) {  // the store was down, for example; all files may be there
            throw RunError("it is not known whether the last checkpoint is whole: -y 1 resumes from the "
                           "newest one that is", retry_status);
        }
        // If a disk refuses it, another start would only repeat the training since the newest checkpoint.
        const std::string reason = why.empty() ? "" : " (" + why + ")";
        throw RunError("the last checkpoint is not whole" + reason +
                           ": correct that and resume (-y 1) from the newest checkpoint that is whole",
                       why.empty() || process.gives_way ? 1 : mistake_status);
    }

    // Messages for the user, in order, each returned once.
    std::vector<std::string> take_messages() {
        std::lock_guard<std::mutex> lock(mutex);
        return std::exchange(messages, {});
    }

    // Whether the latest checkpoint that has ended failed: it is not whole on all processes.
    bool has_failed() const {
        std::lock_guard<std::mutex> lock(mutex);
        return failed;
    }

    // To be called when the loop has failed: stops writing, deletes the unfinished file and waits for no
    // other process. If ready() blocks, make it throw first. A disk that hangs is given a few seconds only,
    // since this process is about to end.
    void abandon() {
        give_up();
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait_for(lock, std::chrono::seconds(5), [&] { return !next; });
    }

private:
    struct Abandoned {};

    // A process's verdict on its own files, or process 0's on the checkpoint.
    struct Verdict {
        bool is_whole = false;
        std::string words;       // whole: the steps to keep, empty for all; else why it is not whole
        bool is_silent = false;  // not whole, and the only reason is that some processes have not answered

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

    bool carry_out(const CheckpointJob& job) {
        is_unknown = false;
        try {
            return write_and_agree(job);
        } catch (const Abandoned&) {
            return false;
        } catch (const std::exception& error) {
            // It is unknown how the other processes fared. The files stay: theirs may be complete, too.
            say(format("it is not known whether the checkpoint of step %ld is whole: %s", job.identity.step,
                       error.what()));
            is_unknown = true;
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
            if (process.rank == 0) {
                own = attempt([&] { files.write_done(who); });
                std::error_code gone;  // it may be there even if its folder's sync has failed
                written.done = std::filesystem::is_regular_file(files.done(who.step), gone);
            }
            verdict = agree(key + "/done", own, process.ranks, who);
        }
        announce(who, own, verdict, written);
        if (verdict.is_whole) { job.when_whole(); }
        tidy(who.step, [&] { clean_up(who, verdict, written); });
        return verdict.is_whole;
    }

    // Runs `work`. A failure is reported, but the checkpoint stays as it is.
    template <class Work>
    void tidy(long step, Work work) {
        const Verdict clean = attempt(work);
        if (!clean.is_whole) { say(format("clean-up after checkpoint %ld failed: ", step) + clean.words); }
    }

    // Wherever process 0 has a state, the model exists, too. Old checkpoints are found by their states: a
    // model that a killed process left without one would never be deleted. So the model is written once the
    // state is on the disk and lacks only its name; but the last model, the run's result, is written first.
    void write_files(const CheckpointJob& job, Written& written) {
        const long step = job.identity.step;
        job.ready();
        check();
        const double start = now_seconds();
        const auto write_model = [&] {
            if (!job.write_model || written.model) { return; }
            check();
            job.write_model(files.model(step));
            written.model = true;
            model_stays = job.is_last;
        };
        if (job.is_last) { write_model(); }
        written.state = true;  // even if it fails: a file may have got its name before a folder's sync failed
        try {
            write_state(files.state(step), job.identity, job.sections(), [&] { check(); }, write_model);
        } catch (...) {
            if (written.model && !model_stays) { unlink(files.model(step).c_str()); }
            throw;
        }
        untold.insert(step);
        written.seconds = now_seconds() - start;
    }

    // "whole", or what went wrong in `work`.
    template <class Work>
    Verdict attempt(Work work) {
        try {
            work();
            return {true, ""};
        } catch (const std::exception& error) {
            check();  // the others need not hear of work that was abandoned
            return {false, error.what()};
        }
    }

    // Publishes this process's verdict under `key`, and returns process 0's summary of the verdicts of every
    // `stride`-th process.
    Verdict agree(const std::string& key, const Verdict& own, int stride, const StateIdentity& who) {
        if (process.index() % stride == 0) {
            tell(who.step, key + "/" + std::to_string(process.index()), own.text());
        }
        if (process.index() != 0) {
            // Process 0 may take a time limit to write, and another one to wait for the others.
            Patience patience(2 * process.timeout + 5);
            const std::optional<std::string> verdict = await(key + "/verdict", patience);
            if (verdict) { return heard(Verdict::parse(*verdict)); }
            throw RunError(process.member(0) + " has not answered");
        }
        Verdict verdict = collect(key, own, stride);
        try {
            verdict.words = verdict.is_whole ? steps_that_stay(who) : verdict.words + what_remains(who);
        } catch (const RunError&) {}  // the disk fails: all steps stay
        tell(who.step, key + "/verdict", verdict.text());
        return heard(verdict);
    }

    // A process that was silent may have its state after all, and a resume may take it: no file may go.
    static Verdict heard(const Verdict& verdict) {
        if (verdict.is_silent) { throw RunError(verdict.words); }
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
                     : Verdict{false, format("has not been heard from for %.0f s", patience.waited()), true};
            if (theirs.is_whole) { continue; }
            is_silent = is_silent && theirs.is_silent;
            failures.push_back(process.member(i) + ": " + theirs.words);
        }
        return {failures.empty(), list_in_words(failures), !failures.empty() && is_silent};
    }

    // Sets a key. Reads from the store first: if that already fails, no other process has heard of the step.
    void tell(long step, const std::string& key, const std::string& value) {
        Patience patience(process.timeout);
        ask_until(patience, [&] {
            store.try_get("cause");
            untold.erase(step);
            store.set(key, value);
            return true;
        });
    }

    // The value of the key; nothing if it does not come in time, or if the run has failed.
    std::optional<std::string> await(const std::string& key, Patience& patience) {
        std::optional<std::string> value;
        ask_until(patience, [&] {
            // In this order, so that a value that was set before the failure counts.
            const bool run_has_failed = store.try_get("cause").has_value();
            value = store.try_get(key);
            return value || run_has_failed;
        });
        return value;
    }

    // Calls `ask` until it returns true, or patience is over. Throws the store's RunError if the store is
    // down at that moment, or has been down for absence_limit while the loop waits. After an outage that the
    // loop has waited through, the other processes get little more time, since they may have given up: in all
    // less than the time limit of a collective, in which they may already be waiting.
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

    // Removes the previous checkpoint's keys. All processes have reached the current checkpoint, so none of
    // them reads those keys any more.
    void forget_keys(long step) {
        const long before = std::exchange(last_in_store, step);
        if (before < 0) { return; }
        const std::string key = format("checkpoint/%ld", before);
        try {
            for (const std::string& part : {key, key + "/done"}) {
                store.remove(part + "/" + std::to_string(process.index()));
                if (process.index() == 0) { store.remove(part + "/verdict"); }
            }
        } catch (const RunError&) {}  // a store that is down keeps them until the end of the run
    }

    // The steps to keep, such as " 20 30 40"; empty: all.
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

    // For each multiple of `major`, the first step at or after it: -n need not divide the multiple, and a
    // worker may jump over it.
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

    // What the user can resume from instead of the checkpoint that failed.
    std::string what_remains(const StateIdentity& who) const {
        const std::set<long> whole = files.whole_steps(who.lineage);
        const auto after = whole.lower_bound(who.step);
        const std::string last = after == whole.begin()
                                     ? "; there is none before it"
                                     : format("; the last whole one is of step %ld", *std::prev(after));
        return last + (model_stays ? "; the model of this step is complete: " + files.model(who.step) : "");
    }

    // While the store is down, this process does not know which states the others have. A checkpoint that it
    // has told them of may be the only whole one, so it deletes only states that no other process has heard
    // of. The newest `keep` of these stay, and one more, since the others may be one checkpoint behind.
    void thin_out(const std::string& lineage) {
        while (keep > 0 && long(untold.size()) > keep + 1) {
            const long oldest = *untold.begin();
            untold.erase(untold.begin());
            if (first_of_multiples(files.own_steps(lineage)).count(oldest)) { continue; }
            files.remove(lineage, [&](long step) { return step == oldest; });
        }
    }

    // Deletes what the new checkpoint replaces; or, if it failed, its own files: the disk may be full.
    void clean_up(const StateIdentity& who, const Verdict& verdict, const Written& written) {
        if (!verdict.is_whole) {
            if (written.done) { CheckpointFolder::unlink_file(files.done(who.step)); }
            if (written.model && !model_stays) { CheckpointFolder::unlink_file(files.model(who.step)); }
            if (written.state) { CheckpointFolder::unlink_file(files.state(who.step)); }
            return;
        }
        untold.clear();
        std::istringstream words(verdict.words);
        std::set<long> kept;
        for (long step; words >> step;) { kept.insert(step); }
        if (!kept.count(who.step)) { return; }  // empty: all stay
        files.remove(who.lineage, [&](long step) { return step < who.step && !kept.count(step); });
    }

    // Process 0 reports for all. A process of another worker, whose output may be elsewhere, reports its own
    // failure, too.
    void announce(const StateIdentity& who, const Verdict& own, const Verdict& verdict,
                  const Written& written) {
        const bool is_first = process.index() == 0;
        const bool is_of_another_worker = process.worker != process.first_worker;
        const std::string missing = format("there is no checkpoint of step %ld: ", who.step) + verdict.words;
        if (!verdict.is_whole) {
            std::lock_guard<std::mutex> lock(mutex);
            why = missing;
        }
        if (verdict.is_whole && is_first) {
            const std::string size = files.size_in_words(who.step, written.model);
            say(format("checkpoint of step %ld is whole (%s in %.1f s)", who.step, size.c_str(),
                       written.seconds));
        } else if (!verdict.is_whole && (is_first || (is_of_another_worker && !own.is_whole))) {
            say(missing);
        }
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
    // Used by the writer's thread alone:
    long last_in_store = -1;
    bool has_missed_store = false;  // the store was down while the loop waited for the current checkpoint
    bool model_stays = false;       // the current checkpoint's model stays even if the checkpoint fails
    std::set<long> untold;          // steps with a state here that no other process can know of

    mutable std::mutex mutex;
    std::condition_variable changed;
    std::optional<CheckpointJob> next;  // the checkpoint that is being written
    long newest = -1;
    bool failed = false;
    bool is_unknown = false;  // nobody could say whether the last checkpoint is whole
    std::string why;          // the same words on all processes; empty: this process does not know
    std::atomic<bool> is_abandoned{false}, is_waited_for{false};
    std::vector<std::string> messages;
    std::thread thread;
};
