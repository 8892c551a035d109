// What processes agree to resume from: processes in threads, over a store in a folder, with state files that
// are missing, cut, damaged or of another run.
#include "llmc/checkpoint/resume.h"

#include <thread>

#include "dev/test/files.h"

namespace test_resume_point {

static const std::string run_a = "aaaaaaaaaaaaaaaa", run_b = "bbbbbbbbbbbbbbbb";

struct Shape {
    int workers, ranks;
    int size() const { return workers * ranks; }
};

static StateIdentity identity(long step, int process, const Shape& shape, const std::string& lineage) {
    StateIdentity who;
    who.step = step;
    who.worker = process / shape.ranks;
    who.rank = process % shape.ranks;
    who.workers = shape.workers;
    who.ranks = shape.ranks;
    who.lineage = lineage;
    return who;
}

static void add_state(const std::string& folder, long step, int process, const Shape& shape,
                      const std::string& lineage = run_a) {
    const std::vector<float> master(1000, float(step + process));
    write_state(state_path(folder, step, process), identity(step, process, shape, lineage),
                {{"master", master.data(), master.size() * sizeof(float)}});
}

static void add_done(const std::string& folder, long step, const Shape& shape,
                     const std::string& lineage = run_a) {
    write_done(folder, identity(step, 0, shape, lineage));
}

// Adds a complete checkpoint to a folder that all processes share.
static void add_checkpoint(const std::string& folder, long step, const Shape& shape,
                           const std::string& lineage = run_a) {
    for (int i = 0; i < shape.size(); i++) { add_state(folder, step, i, shape, lineage); }
    add_done(folder, step, shape, lineage);
}

static void flip_bit(const std::string& path, size_t byte) {
    std::string bytes = read_bytes(path);
    bytes.at(byte) ^= 4;
    write_bytes(path, bytes);
}

static void cut(const std::string& path, size_t bytes) {
    write_bytes(path, read_bytes(path).substr(0, bytes));
}

// "40 aaaaaaaaaaaaaaaa 2x1", "none" or "error: ...", and the notes.
struct Agreement {
    std::string result;
    std::vector<std::string> notes;
};

static Agreement agree(Process& process, const StateIdentity& who, const std::string& folder) {
    Agreement agreement;
    try {
        process.meet();
        const auto point = agree_on_checkpoint(process, folder, who, agreement.notes);
        agreement.result =
            point ? format("%ld %s %dx%d", point->step, point->lineage.c_str(), point->workers, point->ranks)
                  : "none";
    } catch (const std::exception& error) { agreement.result = std::string("error: ") + error.what(); }
    return agreement;
}

static Process process_of(const Shape& shape, int index) {
    Process process;
    process.worker = index / shape.ranks;
    process.rank = index % shape.ranks;
    process.workers = shape.workers;
    process.ranks = shape.ranks;
    process.timeout = 20;
    return process;
}

// The agreement of processes with one folder each. All must have the same result.
static Agreement agreement_among(std::vector<Process> processes, const Shape& shape,
                                 const std::vector<std::string>& folders) {
    TemporaryFolder store;
    std::vector<Agreement> agreements(folders.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < folders.size(); i++) {
        processes[i].meeting_point = std::make_shared<FileStore>(store.name());
        const StateIdentity who{0, processes[i].worker, processes[i].rank, shape.workers, shape.ranks, "",
                                processes[i].gives_way};
        threads.emplace_back([&, i, who] { agreements[i] = agree(processes[i], who, folders[i]); });
    }
    for (std::thread& thread : threads) { thread.join(); }
    for (const Agreement& other : agreements) {
        EXPECT_EQ(other.result, agreements[0].result);
        EXPECT_EQ(other.notes.size(), agreements[0].notes.size());
    }
    return agreements[0];
}

static Agreement agreement_of(const Shape& shape, const std::vector<std::string>& folders) {
    std::vector<Process> processes;
    for (int i = 0; i < int(folders.size()); i++) { processes.push_back(process_of(shape, i)); }
    return agreement_among(std::move(processes), shape, folders);
}

// The agreement of the ranks of an elastic worker.
static Agreement agreement_in_worker(int worker, const std::string& folder, const Shape& shape) {
    std::vector<Process> processes;
    for (int rank = 0; rank < shape.ranks; rank++) {
        processes.push_back(process_of(shape, worker * shape.ranks + rank));
        processes.back().become_elastic();
    }
    return agreement_among(std::move(processes), shape, std::vector<std::string>(size_t(shape.ranks), folder));
}

// Adds a checkpoint of an elastic worker.
static void add_own_checkpoint(const std::string& folder, long step, int worker, const Shape& shape,
                               const std::string& lineage = run_a) {
    for (int rank = 0; rank < shape.ranks; rank++) {
        StateIdentity who = identity(step, worker * shape.ranks + rank, shape, lineage);
        who.elastic = true;
        write_state(state_path(folder, step, rank), who, {{"step", &step, sizeof step}});
        if (rank == 0) { write_done(folder, who); }
    }
}

static Agreement agreement_in(const std::string& folder, const Shape& shape) {
    return agreement_of(shape, std::vector<std::string>(size_t(shape.size()), folder));
}

using Notes = std::vector<std::string>;

TEST(ResumePoint, is_the_newest_step_and_nothing_is_said_where_all_is_well) {
    for (const Shape& shape : {Shape{1, 1}, Shape{2, 1}, Shape{2, 2}}) {
        TemporaryFolder folder;
        for (long step : {20, 40, 100000020}) { add_checkpoint(folder.name(), step, shape); }
        const Agreement a = agreement_in(folder.name(), shape);
        EXPECT_EQ(a.result, format("100000020 %s %dx%d", run_a.c_str(), shape.workers, shape.ranks));
        EXPECT_EQ(a.notes, Notes{});
    }
}

TEST(ResumePoint, is_the_newest_step_that_every_process_has_in_its_own_folder) {
    const Shape shape{2, 1};
    TemporaryFolder first, second;
    for (long step : {20, 40, 60}) { add_state(first.name(), step, 0, shape); }
    for (long step : {20, 40}) { add_state(second.name(), step, 1, shape); }
    const Agreement a = agreement_of(shape, {first.name(), second.name()});
    EXPECT_EQ(a.result, "40 " + run_a + " 2x1");
    EXPECT_EQ(a.notes, Notes{"step 60 was passed over: worker 1 rank 0: " + state_path(second.name(), 60, 1) +
                             " is missing"});
}

TEST(ResumePoint, a_file_that_was_cut_is_passed_over_and_the_note_says_where_and_why) {
    const Shape shape{2, 1};
    for (size_t bytes : {size_t(0), size_t(1000), size_t(1024), size_t(1500), size_t(5000)}) {
        TemporaryFolder folder;
        for (long step : {40, 60}) { add_checkpoint(folder.name(), step, shape); }
        const std::string victim = state_path(folder.name(), 60, 1);
        cut(victim, bytes);
        const Agreement a = agreement_in(folder.name(), shape);
        EXPECT_EQ(a.result, "40 " + run_a + " 2x1");
        ASSERT_EQ(a.notes.size(), 1u);
        const std::string expected =
            "step 60 was passed over: worker 1 rank 0: " + victim + " is truncated (";
        EXPECT_EQ(a.notes[0].rfind(expected, 0), 0u) << a.notes[0];
        EXPECT_EQ(a.notes[0].back(), ')') << "a hint is no use in a note: " << a.notes[0];
    }
}

TEST(ResumePoint, a_flipped_bit_anywhere_in_a_file_makes_the_one_before_it_count) {
    for (const Shape& shape : {Shape{1, 1}, Shape{1, 2}}) {
        TemporaryFolder folder;
        for (long step : {40, 60}) { add_checkpoint(folder.name(), step, shape); }
        const std::string victim = state_path(folder.name(), 60, 0);
        const size_t size = read_bytes(victim).size();
        // Each number of the header, the table, the data and the checksum.
        for (size_t byte = 0; byte < size; byte += byte < 128 ? 4 : 509) {
            flip_bit(victim, byte);
            const Agreement a = agreement_in(folder.name(), shape);
            flip_bit(victim, byte);
            EXPECT_EQ(a.result, "40 " + run_a + format(" 1x%d", shape.ranks)) << "byte " << byte;
            const std::string notes = a.notes.empty() ? "" : a.notes.front() + a.notes.back();
            EXPECT_TRUE(contains(notes, "step 60 was passed over: worker 0 rank 0: " + victim)) << byte;
        }
        EXPECT_EQ(agreement_in(folder.name(), shape).result, "60 " + run_a + format(" 1x%d", shape.ranks));
    }
}

TEST(ResumePoint, damaged_files_of_different_processes_are_each_passed_over) {
    const Shape shape{2, 1};
    TemporaryFolder folder;
    for (long step : {20, 40, 60}) { add_checkpoint(folder.name(), step, shape); }
    flip_bit(state_path(folder.name(), 60, 0), 3000);
    flip_bit(state_path(folder.name(), 40, 1), 3000);
    const Agreement a = agreement_in(folder.name(), shape);
    EXPECT_EQ(a.result, "20 " + run_a + " 2x1");
    const std::string why = " is damaged (its checksum does not match)";
    EXPECT_EQ(a.notes,
              (Notes{"step 60 was passed over: worker 0 rank 0: " + state_path(folder.name(), 60, 0) + why,
                     "step 40 was passed over: worker 1 rank 0: " + state_path(folder.name(), 40, 1) + why}));
}

TEST(ResumePoint, a_step_of_which_no_file_can_be_read_is_named_too) {
    const Shape shape{1, 1};
    TemporaryFolder folder;
    add_checkpoint(folder.name(), 40, shape);
    write_bytes(state_path(folder.name(), 60, 0), "");
    const Agreement a = agreement_in(folder.name(), shape);
    EXPECT_EQ(a.result, "40 " + run_a + " 1x1");
    ASSERT_EQ(a.notes.size(), 1u);
    EXPECT_EQ(a.notes[0].rfind("step 60 was passed over: worker 0 rank 0: ", 0), 0u) << a.notes[0];
}

TEST(ResumePoint, states_of_different_runs_do_not_mix) {
    const Shape shape{2, 1};
    TemporaryFolder first, second;
    add_state(first.name(), 60, 0, shape, run_a);
    add_state(second.name(), 60, 1, shape, run_b);
    add_state(first.name(), 40, 0, shape, run_b);
    add_state(second.name(), 40, 1, shape, run_b);
    EXPECT_EQ(agreement_of(shape, {first.name(), second.name()}).result, "40 " + run_b + " 2x1");
}

TEST(ResumePoint, of_two_runs_in_one_folder_the_one_with_the_newest_done_counts_and_a_note_says_so) {
    const Shape shape{2, 1};
    TemporaryFolder folder;
    add_checkpoint(folder.name(), 20, shape, run_b);
    add_checkpoint(folder.name(), 40, shape, run_a);
    for (int i : {0, 1}) { add_state(folder.name(), 60, i, shape, run_b); }
    const Agreement a = agreement_in(folder.name(), shape);
    EXPECT_EQ(a.result, "40 " + run_a + " 2x1");
    EXPECT_EQ(a.notes, Notes{"there are checkpoints of 2 runs: those of " + run_a +
                             " are tried first, the run that wrote DONE_00000040"});
}

TEST(ResumePoint, a_file_under_another_ones_name_is_not_taken_for_it) {
    const Shape shape{2, 1};
    for (auto [step, process] : {std::pair(40L, 1), std::pair(60L, 0)}) {
        TemporaryFolder folder;
        for (long s : {40, 60}) { add_checkpoint(folder.name(), s, shape); }
        const std::string victim = state_path(folder.name(), 60, 1);
        write_bytes(victim, read_bytes(state_path(folder.name(), step, process)));
        const Agreement a = agreement_in(folder.name(), shape);
        EXPECT_EQ(a.result, "40 " + run_a + " 2x1");
        EXPECT_EQ(a.notes,
                  Notes{"step 60 was passed over: worker 1 rank 0: " + victim +
                        format(" is the state of worker %d rank 0 at step %ld, which does not match its name",
                               process, step)});
    }
}

TEST(ResumePoint, another_number_of_processes_resumes_what_all_of_them_see_whole) {
    const Shape old{2, 2};
    for (const Shape& shape : {Shape{1, 1}, Shape{4, 1}, Shape{2, 1}, Shape{3, 2}}) {
        TemporaryFolder folder;
        for (long step : {40, 60}) { add_checkpoint(folder.name(), step, old); }
        EXPECT_EQ(agreement_in(folder.name(), shape).result, "60 " + run_a + " 2x2");
        flip_bit(state_path(folder.name(), 60, 3), 3000);
        const Agreement a = agreement_in(folder.name(), shape);
        EXPECT_EQ(a.result, "40 " + run_a + " 2x2");
        ASSERT_EQ(a.notes.size(), 1u);
        EXPECT_TRUE(contains(a.notes[0], "step 60 was passed over: worker 0 rank 0: " +
                                             state_path(folder.name(), 60, 3) + " is damaged"));
        EXPECT_TRUE(contains(
            a.notes[0], format("of 2 workers x 2 ranks: to resume with %d x %d", shape.workers, shape.ranks)));
    }
}

TEST(ResumePoint, another_number_of_processes_needs_all_files_in_every_folder) {
    const Shape old{2, 1};
    TemporaryFolder whole, partial;
    add_checkpoint(whole.name(), 40, old);
    add_checkpoint(partial.name(), 40, old);
    std::filesystem::remove(state_path(partial.name(), 40, 0));
    const Agreement a = agreement_of({1, 2}, {whole.name(), partial.name()});
    EXPECT_EQ(
        a.result,
        "error: no checkpoint is whole on all processes (step 40: worker 0 rank 1: " +
            state_path(partial.name(), 40, 0) +
            " is missing (it is of 2 workers x 1 ranks: to resume with 1 x 2, each process needs all "
            "its files)): give every process the -o that it had, or leave out -y and start anew in "
            "another folder");
}

TEST(ResumePoint, checkpoints_of_two_shapes_of_one_run_are_taken_newest_first) {
    TemporaryFolder folder;
    add_checkpoint(folder.name(), 40, {2, 1});
    add_checkpoint(folder.name(), 60, {1, 2});
    EXPECT_EQ(agreement_in(folder.name(), {2, 1}).result, "60 " + run_a + " 1x2");
    EXPECT_EQ(agreement_in(folder.name(), {1, 2}).result, "60 " + run_a + " 1x2");
    std::filesystem::remove(state_path(folder.name(), 60, 1));
    EXPECT_EQ(agreement_in(folder.name(), {1, 2}).result, "40 " + run_a + " 2x1");
}

TEST(ResumePoint, a_newer_one_of_another_shape_whose_files_lie_elsewhere_is_not_passed_over) {
    TemporaryFolder folders[2];
    for (int worker : {0, 1}) {
        const std::string folder = folders[worker].name();
        add_state(folder, 20, worker, {2, 1});
        add_done(folder, 20, {2, 1});
        for (int rank : {0, 1}) { add_state(folder, 40, 2 * worker + rank, {2, 2}); }
        add_done(folder, 40, {2, 2});
    }
    const std::vector<std::string> both = {folders[0].name(), folders[1].name()};
    EXPECT_EQ(agreement_of({2, 1}, both).result,
              "error: step 40, of 2 x 2 processes, is newer than step 20, the newest that can be resumed here: "
              "give the --workers and --ranks that the run had last, or copy all files of that step to each "
              "process, or remove DONE_00000040");
    for (const std::string& folder : both) { std::filesystem::remove(done_path(folder, 40)); }
    EXPECT_EQ(agreement_of({2, 1}, both).result, "20 " + run_a + " 2x1");
}

TEST(ResumePoint, where_there_is_nothing_training_starts_anew_and_a_note_says_so) {
    TemporaryFolder folder;
    write_bytes(folder / "main.log", "s:0 tel:1\n");
    write_bytes(folder / "state_1_0.bin", "not a name that is written here");
    for (const std::string& name : {folder.name(), folder / "not/there"}) {
        const Agreement a = agreement_in(name, {2, 1});
        EXPECT_EQ(a.result, "none");
        EXPECT_EQ(a.notes, Notes{"nothing to resume from in " + name + ": training starts at step 1"});
    }
}

TEST(ResumePoint, where_no_checkpoint_was_ever_complete_training_starts_anew_and_a_note_says_so) {
    const Shape shape{2, 1};
    TemporaryFolder folder;
    add_state(folder.name(), 20, 0, shape);
    const Agreement a = agreement_in(folder.name(), shape);
    EXPECT_EQ(a.result, "none");
    EXPECT_EQ(a.notes,
              (Notes{"step 20 was passed over: worker 1 rank 0: " + state_path(folder.name(), 20, 1) +
                         " is missing",
                     "no checkpoint in " + folder.name() + " was ever complete: training starts at step 1"}));
}

TEST(ResumePoint, where_a_complete_one_was_lost_all_throw_the_same_error_that_says_what_each_lacks) {
    const Shape shape{2, 1};
    TemporaryFolder first, second;
    add_state(first.name(), 40, 0, shape);
    add_done(first.name(), 40, shape);
    add_state(first.name(), 60, 0, shape);
    EXPECT_EQ(agreement_of(shape, {first.name(), second.name()}).result,
              "error: no checkpoint is whole on all processes (step 60: worker 1 rank 0: " +
                  state_path(second.name(), 60, 1) +
                  " is missing and step 40: worker 1 rank 0: " + state_path(second.name(), 40, 1) +
                  " is missing): give every process the -o that it had, or leave out -y and start anew in "
                  "another folder");
}

TEST(ResumePoint, a_done_counts_even_if_it_cannot_be_read_and_no_state_is_left) {
    const Shape shape{2, 1};
    TemporaryFolder folder;
    write_bytes(done_path(folder.name(), 40), "");
    const std::string result = agreement_in(folder.name(), shape).result;
    EXPECT_TRUE(
        contains(result, "error: no checkpoint is whole on all processes (step 40: worker 0 rank 0: "));
}

TEST(ResumePoint, a_folder_that_cannot_be_read_is_the_same_error_on_all) {
    TemporaryFolder folder;
    write_bytes(folder / "file", "");
    EXPECT_EQ(agreement_of({2, 1}, {folder.name(), folder / "file"}).result,
              "error: worker 1 rank 0 cannot read the folder " + folder / "file" +
                  " (Not a directory): make it readable, or give another -o");
}

TEST(ResumePoint, a_checkpoint_that_cannot_be_opened_now_is_not_passed_over) {
    const Shape shape{2, 1};
    for (const bool is_state : {true, false}) {
        TemporaryFolder folder;
        for (long step : {20, 40}) {
            for (int i = 0; i < 2; i++) { add_state(folder.name(), step, i, shape); }
            add_done(folder.name(), step, shape);
        }
        const std::string path = is_state ? state_path(folder.name(), 40, 1) : done_path(folder.name(), 40);
        std::filesystem::remove(path);
        std::filesystem::create_symlink(path, path);
        const std::string result = agreement_in(folder.name(), shape).result;
        EXPECT_EQ(result, "error: worker 0 rank 0 cannot read the folder " + folder.name() + " (" +
                              std::filesystem::path(path).filename().string() +
                              ": Too many levels of symbolic links): make it readable, or give another -o");
        std::filesystem::remove(path);
        std::filesystem::create_symlink(folder / "gone", path);  // known to be gone: the step before is taken
        const std::string without = agreement_in(folder.name(), shape).result;
        EXPECT_EQ(without.substr(0, 3), is_state ? "20 " : "40 ") << without;
    }
}

TEST(ResumePoint, what_a_process_was_writing_when_it_was_killed_is_removed) {
    const Shape shape{2, 1};
    TemporaryFolder first, second;
    const std::vector<std::string> own = {"state_00000060_00000.bin.tmp", "model_00000060.bin.tmp",
                                          "DONE_00000060.0.tmp", "state_00000060_00007.bin.tmp"};
    const std::vector<std::string> others = {"state_00000060_00001.bin.tmp", "DONE_00000060.1.tmp",
                                             "mine.tmp", "state_00000040_00000.bin.tmp2"};
    for (const auto& names : {own, others}) {
        for (const std::string& name : names) { write_bytes(first / name, "x"); }
    }
    agreement_of(shape, {first.name(), second.name()});
    for (const std::string& name : own) { EXPECT_FALSE(std::filesystem::exists(first / name)) << name; }
    for (const std::string& name : others) { EXPECT_TRUE(std::filesystem::exists(first / name)) << name; }
}

// -----------------------------------------------------------------------------------------------------------
// Elastic workers

TEST(ResumePoint, of_an_elastic_worker_is_the_newest_that_all_its_ranks_have) {
    const Shape shape{3, 2};
    TemporaryFolder folder;
    for (long step : {20, 40, 60}) { add_own_checkpoint(folder.name(), step, 2, shape); }
    EXPECT_EQ(agreement_in_worker(2, folder.name(), shape).result, "60 " + run_a + " 3x2");
    flip_bit(state_path(folder.name(), 60, 1), 1100);
    std::filesystem::remove(state_path(folder.name(), 40, 1));
    const Agreement a = agreement_in_worker(2, folder.name(), shape);
    EXPECT_EQ(a.result, "20 " + run_a + " 3x2");
    const std::string over = " was passed over: worker 2 rank 1: ";
    EXPECT_EQ(a.notes, (Notes{"step 60" + over + state_path(folder.name(), 60, 1) +
                                  " is damaged (its checksum does not match)",
                              "step 40" + over + state_path(folder.name(), 40, 1) + " is missing"}));
}

TEST(ResumePoint, a_flipped_bit_in_an_elastic_workers_header_makes_the_one_before_it_count) {
    const Shape shape{3, 2};
    TemporaryFolder folder;
    for (long step : {40, 60}) { add_own_checkpoint(folder.name(), step, 2, shape); }
    for (int rank : {0, 1}) {
        const std::string victim = state_path(folder.name(), 60, rank);
        for (size_t byte = 0; byte < 72; byte += 4) {
            flip_bit(victim, byte);
            EXPECT_EQ(agreement_in_worker(2, folder.name(), shape).result, "40 " + run_a + " 3x2") << byte;
            flip_bit(victim, byte);
        }
    }
    EXPECT_EQ(agreement_in_worker(2, folder.name(), shape).result, "60 " + run_a + " 3x2");
}

TEST(ResumePoint, an_elastic_worker_without_a_checkpoint_begins) {
    TemporaryFolder folder;
    EXPECT_EQ(agreement_in_worker(1, folder.name(), {2, 1}).result, "none");
}

TEST(ResumePoint, of_another_worker_is_refused_and_both_are_named) {
    for (const Shape& shape : {Shape{2, 1}, Shape{2, 2}}) {
        TemporaryFolder folder;
        add_own_checkpoint(folder.name(), 60, 0, shape);
        EXPECT_EQ(agreement_in_worker(1, folder.name(), shape).result,
                  "error: the checkpoint of step 60 in " + folder.name() +
                      " belongs to worker 0, not to worker 1: give each worker the folder that it had");
    }
}

TEST(ResumePoint, of_an_elastic_worker_of_another_shape_is_refused_and_both_are_named) {
    const Shape old{2, 2};
    for (const Shape& shape : {Shape{3, 2}, Shape{2, 1}, Shape{2, 3}}) {
        TemporaryFolder folder;
        add_own_checkpoint(folder.name(), 60, 1, old);
        EXPECT_EQ(agreement_in_worker(1, folder.name(), shape).result,
                  "error: the checkpoint of step 60 in " + folder.name() +
                      format(" belongs to a run of 2 workers x 2 ranks, not %d x %d: with --outer-transport "
                             "store a worker resumes with the --workers and --ranks that it had",
                             shape.workers, shape.ranks));
    }
}

TEST(ResumePoint, of_a_run_in_lock_step_is_none_for_an_elastic_worker_nor_the_other_way_round) {
    TemporaryFolder together, apart;
    add_checkpoint(together.name(), 60, {2, 1});
    EXPECT_EQ(agreement_in_worker(0, together.name(), {2, 1}).result,
              "error: the checkpoint of step 60 in " + together.name() +
                  " belongs to a run of 2 workers x 1 ranks in lock-step: resume it with the "
                  "--outer-transport that it had, or give another -o");
    add_own_checkpoint(apart.name(), 60, 0, {2, 1});
    EXPECT_EQ(agreement_in(apart.name(), {2, 1}).result,
              "error: the checkpoint of step 60 in " + apart.name() +
                  " belongs to worker 0 of a run with --outer-transport store: resume it with that "
                  "option, or give another -o");
}

TEST(ResumePoint, a_damaged_one_of_another_worker_is_passed_over) {
    const Shape shape{2, 1};
    TemporaryFolder folder;
    add_own_checkpoint(folder.name(), 40, 1, shape);
    add_own_checkpoint(folder.name(), 60, 0, shape);
    flip_bit(state_path(folder.name(), 60, 0), 1100);
    EXPECT_EQ(agreement_in_worker(1, folder.name(), shape).result, "40 " + run_a + " 2x1");
}

}  // namespace test_resume_point
