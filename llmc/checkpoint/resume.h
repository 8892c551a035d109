// Resume: the processes of a run agree on the checkpoint that they resume from. Each looks into its own
// folder and tells the others in the store what it sees, so that all find the same answer:
//   - the newest step at which every process has its own file, all of the same run (lineage);
//   - or, for a run with another number of workers or ranks, the newest step at which every process has all
//     files of the old run. An elastic worker resumes neither from such a checkpoint nor from another
//     worker's.
// Then each process reads the files it needs in full. If one is damaged, the next older step is tried. Names
// and headers are not covered by a checksum yet at that point: they decide only which checkpoint is tried.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/process.h"
#include "llmc/checkpoint/state_file.h"

// A checkpoint, and the shape of the run that wrote it.
struct ResumePoint {
    long step = 0;
    std::string lineage;
    int workers = 1, ranks = 1;
    int worker = -1;  // the elastic worker that wrote it; -1: all workers did, in lock-step

    bool is_of_one_worker() const { return worker >= 0; }
    long size() const { return is_of_one_worker() ? ranks : long(workers) * ranks; }
    bool operator==(const ResumePoint& other) const { return key() == other.key(); }
    bool operator<(const ResumePoint& other) const { return key() < other.key(); }

private:
    std::tuple<long, const std::string&, int, int, int> key() const {
        return {step, lineage, workers, ranks, worker};
    }
};

inline ResumePoint point_of(const StateIdentity& who) {
    return {who.step, who.lineage, who.workers, who.ranks, who.elastic ? who.worker : -1};
}

// "4 x 2 processes", "worker 1 of 4 x 2 processes"
inline std::string writers_of(const ResumePoint& point) {
    return (point.is_of_one_worker() ? format("worker %d of ", point.worker) : "") +
           format("%d x %d processes", point.workers, point.ranks);
}

// -----------------------------------------------------------------------------------------------------------
// What a process sees in its folder

struct FolderView {
    struct State {
        ResumePoint point;
        std::string flaw;  // why the file cannot be used; `point` is then unknown
    };

    std::string folder;
    std::string trouble;                           // why the folder, or a file of it, cannot be read
    std::map<std::pair<long, int>, State> states;  // by step and process
    std::map<long, ResumePoint> done;              // lineage empty: the file cannot be read

    // As text for the store, a line for each entry. An end of line in a name becomes a space.
    std::string pack() const {
        auto line = [](std::string text) {
            std::replace(text.begin(), text.end(), '\n', ' ');
            return text + "\n";
        };
        auto pack_entry = [&](const char* kind, long step, int process, const ResumePoint& p,
                              const std::string& flaw) {
            return line(format("%s %ld %d %d %d %d %s ", kind, step, process, p.workers, p.ranks, p.worker,
                               p.lineage.empty() ? "-" : p.lineage.c_str()) +
                        flaw);
        };
        std::string text = line(folder) + line(trouble);
        for (const auto& [at, state] : states) {
            text += pack_entry("state", at.first, at.second, state.point, state.flaw);
        }
        for (const auto& [step, point] : done) { text += pack_entry("done", step, 0, point, ""); }
        return text;
    }

    static FolderView unpack(const std::string& text) {
        FolderView view;
        std::istringstream lines(text);
        std::getline(lines, view.folder);
        std::getline(lines, view.trouble);
        for (std::string line; std::getline(lines, line);) {
            std::istringstream words(line);
            std::string kind, flaw;
            ResumePoint point;
            int process;
            words >> kind >> point.step >> process >> point.workers >> point.ranks >> point.worker >>
                point.lineage;
            std::getline(words >> std::ws, flaw);
            if (point.lineage == "-") { point.lineage.clear(); }
            if (kind == "done") {
                view.done[point.step] = point;
            } else {
                view.states[{point.step, process}] = {point, flaw};
            }
        }
        return view;
    }
};

// The message without its hint: a user need not act on a checkpoint that is passed over.
inline std::string without_hint(const UserError& error) {
    const std::string text = error.what(), hint = std::string(": ") + checkpoint_hint();
    const size_t end = text.size() < hint.size() ? 0 : text.size() - hint.size();
    return text.compare(end, std::string::npos, hint) == 0 ? text.substr(0, end) : text;
}

// What a state's header says.
inline FolderView::State look_at_state(const std::string& folder, long step, int process) {
    const std::string path = state_path(folder, step, process);
    try {
        const StateReader reader(path);
        const StateIdentity& who = reader.identity();
        if (who.step == step && who.process() == process) { return {point_of(who), ""}; }
        return {{}, path + format(" is the state of %s at step %ld, which does not match its name",
                                  Process::name(who.worker, who.rank).c_str(), who.step)};
    } catch (const UserError& error) { return {{}, without_hint(error)}; }
}

inline FolderView view_folder(const std::string& folder) {
    FolderView view;
    view.folder = folder;
    std::error_code error;
    for (const std::string& name : names_in(folder, error)) {
        const bool is_checkpoint = state_named(name) || done_named(name);
        // It may be whole: a run that ignored it would resume earlier, and delete the others' later files.
        if (is_checkpoint && access((folder + "/" + name).c_str(), R_OK) != 0 && errno != ENOENT) {
            view.trouble = name + ": " + strerror(errno);
        }
        if (const auto state = state_named(name)) {
            view.states[*state] = look_at_state(folder, state->first, state->second);
        } else if (const auto step = done_named(name)) {
            view.done[*step] = ResumePoint{*step, ""};
            try {
                if (const auto who = peek_done(folder, *step)) { view.done[*step] = point_of(*who); }
            } catch (const RunError&) {}  // only the order in which checkpoints are tried depends on it
        }
    }
    if (error && error != std::errc::no_such_file_or_directory) { view.trouble = error.message(); }
    return view;
}

// Removes unfinished files that this process left when it was killed while writing, and those of processes
// that the run no longer has.
inline void remove_leftovers(const Process& process, const std::string& folder) {
    std::error_code ignored;
    for (const std::string& name : names_in(folder, ignored)) {
        const std::string path = folder + "/" + name;
        long step = -1;
        int writer = 0;
        const bool is_leftover =
            (sscanf(name.c_str(), "state_%ld_%d", &step, &writer) == 2 &&
             path == state_path(folder, step, writer) + ".tmp") ||
            (sscanf(name.c_str(), "DONE_%ld.%d", &step, &writer) == 2 &&
             path == done_path(folder, step) + format(".%d.tmp", writer)) ||
            (sscanf(name.c_str(), "model_%ld", &step) == 1 && path == model_path(folder, step) + ".tmp");
        if (is_leftover && (writer == process.index() || writer >= process.size())) {
            std::filesystem::remove(path, ignored);
        }
    }
}

// -----------------------------------------------------------------------------------------------------------
// What all processes see

// own: a checkpoint that these processes write (its step and lineage mean nothing)
inline bool is_of_same_shape(const ResumePoint& own, const ResumePoint& point) {
    return point.workers == own.workers && point.ranks == own.ranks && point.worker == own.worker;
}

// The range of processes whose files process `index` reads: itself, or all if the shapes differ.
inline std::pair<long, long> files_needed(const ResumePoint& own, int index, const ResumePoint& point) {
    const bool is_own = is_of_same_shape(own, point);
    return is_own ? std::pair(long(index), index + 1L) : std::pair(0L, point.size());
}

// The first reason why process `index` cannot resume there, as far as names and headers tell; empty: none.
inline std::string find_lack(const ResumePoint& own, int index, const FolderView& view,
                             const ResumePoint& point) {
    const auto [begin, end] = files_needed(own, index, point);
    for (long i = begin; i < end; i++) {
        const std::string path = state_path(view.folder, point.step, int(i));
        const auto found = view.states.find({point.step, int(i)});
        if (found == view.states.end()) { return path + " is missing"; }
        const FolderView::State& state = found->second;
        if (!state.flaw.empty()) { return state.flaw; }
        if (state.point.lineage != point.lineage) {
            return path + " is of another run (" + state.point.lineage + ", not " + point.lineage + ")";
        }
        if (!(state.point == point)) {
            return path + " was written by " + writers_of(state.point) + ", not " + writers_of(point);
        }
    }
    return "";
}

// The same, after this process has read the files in its own folder in full.
inline std::string find_damage(const ResumePoint& own, int index, const std::string& folder,
                               const ResumePoint& point) {
    const auto [begin, end] = files_needed(own, index, point);
    try {
        for (long i = begin; i < end; i++) { StateReader(state_path(folder, point.step, int(i))).verify(); }
    } catch (const UserError& error) { return without_hint(error); }
    return "";
}

// All processes' views, and what follows from them, which is the same on all processes.
class CheckpointSearch {
public:
    CheckpointSearch(Process& process, const std::string& folder, const ResumePoint& own)
        : process(process), folder(folder), own(own) {
        for (const std::string& text : process.gather("resume/folder", view_folder(folder).pack())) {
            views.push_back(FolderView::unpack(text));
        }
        for (int i = 0; i < process.size(); i++) {
            const FolderView& view = views[size_t(i)];
            if (!view.trouble.empty()) {
                throw UserError(
                    format("%s cannot read the folder %s (%s): make it readable, or give another -o",
                           process.member(i).c_str(), view.folder.c_str(), view.trouble.c_str()));
            }
            for (const auto& [step, point] : view.done) {
                has_done = true;
                if (!point.lineage.empty() && step >= newest_done.step) { newest_done = point; }
            }
        }
        collect_points();
    }

    // The checkpoints in the order in which they are tried. Those of the run that wrote the newest DONE_STEP
    // come first, then the newest first: in a folder that several runs used, a stray file of another run must
    // not win.
    const std::vector<ResumePoint>& in_order() const { return points; }

    // Why this checkpoint cannot be used, in words; empty: it is whole on all processes. Collective.
    std::string find_flaws(const ResumePoint& point) {
        std::vector<std::string> flaws;
        for (int i = 0; i < process.size(); i++) {
            flaws.push_back(find_lack(own, i, views[size_t(i)], point));
        }
        auto is_empty = [](const std::string& flaw) { return flaw.empty(); };
        if (std::all_of(flaws.begin(), flaws.end(), is_empty)) {
            const std::string key = format("resume/%ld/%dx%d/%d/%s", point.step, point.workers, point.ranks,
                                           point.worker, point.lineage.c_str());
            flaws = process.gather(key, find_damage(own, process.index(), folder, point));
        }
        return in_words(flaws, point);
    }

    // Whether any checkpoint, or this one, was ever complete.
    bool was_ever_complete() const { return has_done; }
    bool was_complete(const ResumePoint& point) const {
        return std::any_of(views.begin(), views.end(), [&](const FolderView& view) {
            const auto done = view.done.find(point.step);
            return done != view.done.end() && done->second == point;
        });
    }

    // UserError for a checkpoint that is whole but not of this kind of run. Only runs in lock-step are
    // reshaped.
    void check_shape(const ResumePoint& point) const {
        const bool may_reshape = !own.is_of_one_worker() && !point.is_of_one_worker();
        if (may_reshape || is_of_same_shape(own, point)) { return; }
        const std::string what =
            format("the checkpoint of step %ld in %s belongs to ", point.step, views[0].folder.c_str());
        const std::string whole_run = format("a run of %d workers x %d ranks", point.workers, point.ranks);
        if (!own.is_of_one_worker()) {
            throw UserError(what + format("worker %d of a run with --outer-transport store: resume it with "
                                          "that option, or give another -o", point.worker));
        }
        if (!point.is_of_one_worker()) {
            throw UserError(what + whole_run + " in lock-step: resume it with the --outer-transport that it "
                            "had, or give another -o");
        }
        if (point.workers != own.workers || point.ranks != own.ranks) {
            throw UserError(what + whole_run +
                            format(", not %d x %d: with --outer-transport store a worker "
                                   "resumes with the --workers and --ranks that it had",
                                   own.workers, own.ranks));
        }
        throw UserError(what + format("worker %d, not to worker %d: give each worker the folder that it had",
                                      point.worker, own.worker));
    }

    // A note for the user if the folders hold checkpoints of several runs; else empty.
    std::string note_of_runs() const {
        std::set<std::string> lineages;
        for (const ResumePoint& point : points) { lineages.insert(point.lineage); }
        lineages.erase("");
        if (lineages.size() < 2) { return ""; }
        return format("there are checkpoints of %zu runs: ", lineages.size()) +
               (newest_done.lineage.empty()
                    ? std::string("the newest is tried first, whichever run wrote it")
                    : format("those of %s are tried first, the run that wrote DONE_%08ld",
                             newest_done.lineage.c_str(), newest_done.step));
    }

private:
    void collect_points() {
        std::set<ResumePoint> found;
        std::set<long> steps, known;
        auto add = [&](long step, const ResumePoint& point) {
            steps.insert(step);
            if (point.lineage.empty()) { return; }
            known.insert(step);
            found.insert(point);
        };
        for (const FolderView& view : views) {
            for (const auto& [at, state] : view.states) { add(at.first, state.point); }
            for (const auto& [step, point] : view.done) { add(step, point); }
        }
        // A step without any readable header is tried, too, so that the user learns why it is passed over.
        for (long step : steps) {
            if (!known.count(step)) { found.insert({step, "", own.workers, own.ranks, own.worker}); }
        }
        points.assign(found.rbegin(), found.rend());
        if (newest_done.lineage.empty()) { return; }
        std::stable_partition(points.begin(), points.end(), [&](const ResumePoint& point) {
            return point.lineage.empty() || point.lineage == newest_done.lineage;
        });
    }

    // "worker 1 rank 0: /x/state_00000060_00001.bin is truncated (...)", for the first few processes.
    std::string in_words(const std::vector<std::string>& flaws, const ResumePoint& point) const {
        const size_t most = 3;
        size_t count = 0;
        std::string text;
        for (size_t i = 0; i < flaws.size(); i++) {
            if (flaws[i].empty() || ++count > most) { continue; }
            text += (text.empty() ? "" : "; ") + process.member(int(i)) + ": " + flaws[i];
        }
        if (count > most) { text += format("; and %zu more processes", count - most); }
        if (count > 0 && !own.is_of_one_worker() && !is_of_same_shape(own, point)) {
            text += format(" (it is of %d workers x %d ranks: to resume with %d x %d, each process needs all "
                           "its files)", point.workers, point.ranks, own.workers, own.ranks);
        }
        return text;
    }

    Process& process;
    const std::string folder;
    const ResumePoint own;
    std::vector<FolderView> views;
    std::vector<ResumePoint> points;
    ResumePoint newest_done;  // lineage empty: there is none
    bool has_done = false;
};

// The checkpoint to resume from; nothing: start at step 1. All processes call it once after meet(), each with
// its own folder; all get the same, or throw the same UserError. `who`: this process in its state files,
// whose step and lineage are not known yet. `notes`: what a user should know, a line each.
inline std::optional<ResumePoint> agree_on_checkpoint(Process& process, const std::string& folder,
                                                      const StateIdentity& who,
                                                      std::vector<std::string>& notes) {
    remove_leftovers(process, folder);
    CheckpointSearch search(process, folder, point_of(who));
    if (search.in_order().empty()) {
        notes.push_back("nothing to resume from in " + folder + ": training starts at step 1");
        return std::nullopt;
    }
    if (!search.note_of_runs().empty()) { notes.push_back(search.note_of_runs()); }
    std::vector<std::string> passed_over;
    std::optional<ResumePoint> newer;  // the newest of another shape: its files may lie elsewhere
    for (const ResumePoint& point : search.in_order()) {
        const std::string flaws = search.find_flaws(point);
        if (flaws.empty()) {
            search.check_shape(point);
            if (newer && newer->lineage == point.lineage && newer->step > point.step &&
                !is_of_same_shape(*newer, point)) {
                throw UserError(format("step %ld, of %s, is newer than step %ld, the newest that can be "
                                       "resumed here: give the --workers and --ranks that the run had last, "
                                       "or copy all files of that step to each process, or remove DONE_%08ld",
                                       newer->step, writers_of(*newer).c_str(), point.step, newer->step));
            }
            return point;
        }
        const bool is_of_others = !point.is_of_one_worker() && !is_of_same_shape(point_of(who), point);
        if (!newer && is_of_others && search.was_complete(point)) { newer = point; }
        notes.push_back(format("step %ld was passed over: ", point.step) + flaws);
        if (passed_over.size() < 3) { passed_over.push_back(format("step %ld: ", point.step) + flaws); }
    }
    if (search.was_ever_complete()) {
        throw UserError("no checkpoint is whole on all processes (" + list_in_words(passed_over) + "): give "
                        "every process the -o that it had, or leave out -y and start anew in another folder");
    }
    notes.push_back("no checkpoint in " + folder + " was ever complete: training starts at step 1");
    return std::nullopt;
}
