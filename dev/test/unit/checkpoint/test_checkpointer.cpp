// The writer of checkpoints: a checkpoint counts only when all processes have theirs, whatever fails on the
// way, and only then are older ones deleted. The processes of a run are objects here, with a writer each.
#include "llmc/checkpoint/checkpointer.h"

#include <sys/resource.h>

#include <csignal>
#include <future>

#include "dev/test/files.h"
#include "dev/test/processes.h"

namespace test_checkpointer {

const char* const lineage = "0123456789abcdef";
const char* const stranger = "fedcba9876543210";

bool exists(const std::string& path) { return std::filesystem::exists(path); }

struct Member {
    Process process;
    std::string folder;
    std::unique_ptr<Checkpointer> checkpointer;
};

// M workers of R ranks, each worker with a folder of its own unless `shares_folder`.
class Processes {
public:
    Processes(int workers, int ranks, bool shares_folder = false, const std::string& store_url = "",
              double timeout = 60, bool elastic = false)
        : workers(workers), ranks(ranks), members(size_t(workers * ranks)) {
        auto memory = std::make_shared<MemoryStore>();
        for (int i = 0; i < workers * ranks; i++) {
            Process& process = members[size_t(i)].process;
            process.worker = i / ranks, process.rank = i % ranks;
            process.workers = workers, process.ranks = ranks;
            if (elastic) { process.become_elastic(); }
            process.timeout = timeout;
            std::shared_ptr<Store> everything = memory;
            if (!store_url.empty()) { everything = open_store(store_url, 5); }
            const std::string run = elastic ? format("run of worker %d/", process.worker) : "run/";
            process.store = std::make_shared<PrefixStore>(everything, run);
            members[size_t(i)].folder = folder / (shares_folder ? "all" : "w" + std::to_string(i / ranks));
            std::filesystem::create_directories(members[size_t(i)].folder);
        }
    }

    void start(long keep = 0, long major = 0) {
        for (Member& member : members) {
            member.checkpointer = std::make_unique<Checkpointer>(member.folder, member.process, keep, major);
        }
    }

    CheckpointJob job(int i, long step) const {
        const Process& process = members[size_t(i)].process;
        CheckpointJob job;
        job.identity = {step, process.worker, process.rank, workers, ranks, lineage, process.gives_way};
        job.ready = [] {};
        job.sections = [i] { return std::vector<StateSection>{{"index", &data()[i], sizeof(int)}}; };
        if (process.index() == 0) {
            job.write_model = [](const std::string& path) { write_bytes(path, "a model"); };
        }
        return job;
    }

    void begin(int i, long step) { members[size_t(i)].checkpointer->begin(job(i, step)); }
    void wait() {
        for (Member& member : members) { member.checkpointer->wait(); }
    }
    void checkpoint(long step) {
        for (int i = 0; i < int(members.size()); i++) { begin(i, step); }
        wait();
    }

    std::string state(int i, long step) const {
        return state_path(members[size_t(i)].folder, step, members[size_t(i)].process.index());
    }
    bool is_done(int i, long step) const { return exists(done_path(members[size_t(i)].folder, step)); }
    std::vector<std::string> messages(int i) { return members[size_t(i)].checkpointer->take_messages(); }
    std::string last_message(int i) {
        const std::vector<std::string> lines = messages(i);
        return lines.empty() ? "nothing was said" : lines.back();
    }
    Checkpointer& operator[](int i) { return *members[size_t(i)].checkpointer; }
    Store& store(int i) { return *members[size_t(i)].process.store; }

    // The names of all files in the folder of a process, in order.
    std::string files(int i) const {
        std::set<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator(members[size_t(i)].folder)) {
            names.insert(entry.path().filename().string());
        }
        std::string all;
        for (const std::string& name : names) { all += name + " "; }
        return all;
    }

private:
    static const std::vector<int>& data() {
        static const std::vector<int> numbers = {0, 1, 2, 3};
        return numbers;
    }

    TemporaryFolder folder;
    int workers, ranks;

public:
    std::vector<Member> members;
};

// Writes a state of another step, worker or run, such as an earlier run may have left in the folder.
void leave_behind(const std::string& folder, long step, int index, const std::string& of, bool done) {
    const StateIdentity who{step, index, 0, 4, 1, of};
    write_state(state_path(folder, step, index), who, {});
    if (done) { write_done(folder, who); }
}

void expect_done_only_when_all_have_theirs(Processes& run) {
    run.start();
    std::promise<void> copied;
    std::shared_future<void> is_copied = copied.get_future().share();
    for (int i = 0; i < 3; i++) { run.begin(i, 40); }
    CheckpointJob slow = run.job(3, 40);
    slow.ready = [is_copied] { is_copied.wait(); };
    run[3].begin(slow);
    for (int i = 0; i < 3; i++) {
        EXPECT_EQ(wait_for_value(run.store(i), "checkpoint/40/" + std::to_string(i), 20), "whole");
        StateReader(run.state(i, 40)).verify();
    }
    for (int i = 0; i < 4; i++) {
        EXPECT_FALSE(run.is_done(i, 40));
        EXPECT_FALSE(run[i].is_idle());
    }
    copied.set_value();
    run.wait();
    for (int i = 0; i < 4; i++) {
        EXPECT_TRUE(run.is_done(i, 40));
        EXPECT_TRUE(run[i].is_idle());
        EXPECT_FALSE(run[i].has_failed());
        const StateReader state(run.state(i, 40));
        state.verify();
        EXPECT_EQ(state.identity().process(), i);
        EXPECT_EQ(saved_values<int>(state, "index"), std::vector<int>{i});
        if (i != 0) { EXPECT_TRUE(run.messages(i).empty()); }
    }
    const std::vector<std::string> lines = run.messages(0);
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_TRUE(contains(lines[0], "checkpoint of step 40 is whole (1.2 kB in "));
    EXPECT_TRUE(run.messages(0).empty()) << "a message was given twice";
    EXPECT_EQ(run.files(0),
              "DONE_00000040 model_00000040.bin state_00000040_00000.bin state_00000040_00001.bin ");
    EXPECT_EQ(run.files(2), "DONE_00000040 state_00000040_00002.bin state_00000040_00003.bin ");
}

// A store in front of another one, which can be away for a while.
class AbsentStore : public Store {
public:
    explicit AbsentStore(std::shared_ptr<Store> store) : store(std::move(store)) {}
    void set(const std::string& key, const std::string& value) override { there().set(key, value); }
    std::optional<std::string> try_get(const std::string& key) override { return there().try_get(key); }
    std::string set_if_absent(const std::string& key, const std::string& value) override {
        return there().set_if_absent(key, value);
    }
    void remove(const std::string& key) override { there().remove(key); }
    std::string url() const override { return store->url(); }

    std::atomic<bool> is_away{false};
    std::atomic<int> refused{0};

private:
    Store& there() {
        if (is_away) {
            refused++;
            throw RunError("the store is away");
        }
        return *store;
    }

    std::shared_ptr<Store> store;
};

// Puts an AbsentStore in front of each process's store.
std::vector<std::shared_ptr<AbsentStore>> absent_stores_of(Processes& run) {
    std::vector<std::shared_ptr<AbsentStore>> stores;
    for (Member& member : run.members) {
        stores.push_back(std::make_shared<AbsentStore>(member.process.store));
        member.process.store = std::make_shared<PrefixStore>(stores.back(), "");
    }
    return stores;
}

// After how many seconds process 0 says that it gave up process 1.
int seconds_of_silence(const std::string& message) {
    const std::string words = "worker 1 rank 0: has not been heard from for ";
    const size_t at = message.find(words);
    return at == std::string::npos ? -1 : std::stoi(message.substr(at + words.size()));
}

TEST(Checkpointer, done_appears_only_when_all_processes_have_theirs) {
    Processes run(2, 2);
    expect_done_only_when_all_have_theirs(run);
}

TEST(Checkpointer, processes_agree_through_a_folder_too) {
    TemporaryFolder store;
    Processes run(2, 2, false, "file:" + store.name());
    expect_done_only_when_all_have_theirs(run);
}

TEST(Checkpointer, processes_agree_through_redis_too) {
    RedisServer server;
    if (server.port == 0) { GTEST_SKIP() << "redis-server is not installed or does not start"; }
    Processes run(2, 2, false, server.url());
    expect_done_only_when_all_have_theirs(run);
}

TEST(Checkpointer, where_one_process_fails_there_is_no_checkpoint_and_all_know_why) {
    Processes run(2, 2);
    run.start(1);
    run.checkpoint(10);
    EXPECT_EQ(run.messages(0).size(), 1u);
    std::filesystem::rename(run.members[2].folder, run.members[2].folder + ".gone");
    run.checkpoint(20);
    const std::string why = run.state(2, 20) + ".tmp: No such file or directory";
    for (int i = 0; i < 4; i++) {
        EXPECT_TRUE(run[i].has_failed());
        const std::vector<std::string> lines = run.messages(i);
        ASSERT_EQ(lines.size(), i == 1 ? 0u : 1u) << i;
        if (i == 1) { continue; }
        EXPECT_TRUE(
            contains(lines[0], "there is no checkpoint of step 20: worker 1 rank 0: cannot write " + why));
        EXPECT_TRUE(contains(lines[0], " and worker 1 rank 1: cannot write "));
        EXPECT_TRUE(contains(lines[0], "; the last whole one is of step 10"));
    }
    // Nothing old is deleted, and what the others had written has been taken back.
    std::filesystem::rename(run.members[2].folder + ".gone", run.members[2].folder);
    EXPECT_EQ(run.files(0),
              "DONE_00000010 model_00000010.bin state_00000010_00000.bin state_00000010_00001.bin ");
    EXPECT_EQ(run.files(2), "DONE_00000010 state_00000010_00002.bin state_00000010_00003.bin ");

    run.checkpoint(30);
    EXPECT_FALSE(run[0].has_failed());
    EXPECT_EQ(run.files(0),
              "DONE_00000030 model_00000030.bin state_00000030_00000.bin state_00000030_00001.bin ");
    EXPECT_EQ(run.files(2), "DONE_00000030 state_00000030_00002.bin state_00000030_00003.bin ");
}

// A process that is killed while it writes leaves no model that no state belongs to: nothing would delete it.
TEST(Checkpointer, a_model_is_written_when_its_state_is_on_the_disk_but_for_its_name_and_the_last_one_first) {
    Processes run(1, 1);
    run.start();
    for (const bool is_last : {false, true}) {
        CheckpointJob job = run.job(0, is_last ? 20 : 10);
        const std::string state = run.state(0, job.identity.step);
        std::string before;
        job.is_last = is_last;
        job.write_model = [&](const std::string& path) {
            EXPECT_FALSE(exists(state));
            if (exists(state + ".tmp")) { before = read_bytes(state + ".tmp"); }
            write_bytes(path, "a model");
        };
        run[0].begin(job);
        run.wait();
        EXPECT_EQ(before, is_last ? "" : read_bytes(state));
        EXPECT_TRUE(run.is_done(0, job.identity.step));
    }
}

// The run's result is not lost when there is no room for a state, whichever process it is.
TEST(Checkpointer, the_model_of_the_last_step_stays_where_its_checkpoint_is_not_whole) {
    for (int failing : {0, 1}) {
        Processes run(2, 1);
        run.start(1);
        run.checkpoint(10);
        for (int i : {0, 1}) {
            CheckpointJob job = run.job(i, 20);
            job.is_last = true;
            if (i == failing) {
                job.sections = []() -> std::vector<StateSection> { throw RunError("there is no room"); };
            }
            run[i].begin(job);
        }
        run.wait();
        EXPECT_EQ(run.files(0),
                  "DONE_00000010 model_00000010.bin model_00000020.bin state_00000010_00000.bin ");
        EXPECT_EQ(run.files(1), "DONE_00000010 state_00000010_00001.bin ");
        for (int i : {0, 1}) {
            std::string said;
            try {
                run[i].finish([](const std::string&) {});
            } catch (const RunError& error) { said = error.what(); }
            EXPECT_EQ(said,
                      format("the last checkpoint is not whole (there is no checkpoint of step 20: worker %d "
                             "rank 0: there is no room; the last whole one is of step 10; the model of this "
                             "step is complete: ", failing) +
                          model_path(run.members[0].folder, 20) +
                          "): correct that and resume (-y 1) from the newest checkpoint that is whole");
        }
    }
}

TEST(Checkpointer, an_elastic_worker_agrees_with_its_ranks_alone) {
    Processes run(2, 2, false, "", 60, true);
    run.start(1);
    for (long step : {10, 30}) {
        for (int i : {2, 3}) { run.begin(i, step); }
        run.wait();
    }
    for (int i : {0, 1}) { run.begin(i, 20); }
    run.wait();
    const char* const files = "DONE_000000%d model_000000%d.bin state_000000%d_00000.bin "
                              "state_000000%d_00001.bin ";
    EXPECT_EQ(run.files(0), format(files, 20, 20, 20, 20));
    EXPECT_EQ(run.files(2), format(files, 30, 30, 30, 30));
    EXPECT_TRUE(contains(run.last_message(0), "checkpoint of step 20 is whole "));
    EXPECT_TRUE(contains(run.last_message(2), "checkpoint of step 30 is whole "));
    EXPECT_TRUE(run.messages(1).empty() && run.messages(3).empty());
    const StateIdentity who = StateReader(run.state(3, 30)).identity();
    EXPECT_TRUE(who.elastic);
    EXPECT_EQ(who.worker, 1);
    EXPECT_EQ(who.rank, 1);
    EXPECT_EQ(who.workers, 2);
    EXPECT_EQ(read_done(run.members[2].folder, 30).worker, 1);
}

TEST(Checkpointer, where_a_rank_of_an_elastic_worker_fails_its_process_0_says_so) {
    Processes run(2, 2, false, "", 60, true);
    run.start();
    CheckpointJob job = run.job(3, 10);
    job.ready = [] { throw RunError("a mean did not arrive"); };
    run[3].begin(job);
    for (int i : {0, 1, 2}) { run.begin(i, 10); }
    run.wait();
    EXPECT_FALSE(run[0].has_failed() || run[1].has_failed());
    EXPECT_TRUE(run[2].has_failed() && run[3].has_failed());
    EXPECT_EQ(run.last_message(2), "there is no checkpoint of step 10: worker 1 rank 1: a mean did not "
                                   "arrive; there is none before it");
    EXPECT_TRUE(run.messages(3).empty());
    EXPECT_EQ(run.files(2), "");
}

TEST(Checkpointer, what_its_thread_throws_is_a_failure_like_any_other) {
    Processes run(1, 1);
    run.start();
    CheckpointJob job = run.job(0, 5);
    job.write_model = [](const std::string&) { throw std::bad_alloc(); };
    run[0].begin(job);
    run.wait();
    EXPECT_TRUE(run[0].has_failed());
    EXPECT_NE(run.last_message(0).find("checkpoint of step 5"), std::string::npos) << run.last_message(0);
}

TEST(Checkpointer, a_model_or_data_that_cannot_be_had_is_a_failure_like_any_other) {
    Processes run(1, 2);
    run.start();
    CheckpointJob job = run.job(0, 5);
    job.write_model = [](const std::string&) { throw RunError("the model is too large"); };
    run[0].begin(job);
    job = run.job(1, 5);
    job.ready = [] { throw RunError("a mean did not arrive"); };
    run[1].begin(job);
    run.wait();
    const std::vector<std::string> lines = run.messages(0);
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_EQ(lines[0],
              "there is no checkpoint of step 5: worker 0 rank 0: the model is too large and "
              "worker 0 rank 1: a mean did not arrive; there is none before it");
    EXPECT_EQ(run.files(0), "");
}

// DONE_ of worker 1 is a folder here, which no file can replace.
TEST(Checkpointer, where_done_cannot_be_written_nothing_counts_and_nothing_is_deleted) {
    Processes run(2, 1);
    run.start(1);
    run.checkpoint(10);
    std::filesystem::create_directories(done_path(run.members[1].folder, 20) + "/in the way");
    run.checkpoint(20);
    EXPECT_TRUE(run[0].has_failed());
    EXPECT_TRUE(run[1].has_failed());
    EXPECT_EQ(run.files(0), "DONE_00000010 model_00000010.bin state_00000010_00000.bin ");
    EXPECT_EQ(run.files(1), "DONE_00000010 DONE_00000020 state_00000010_00001.bin ");
    EXPECT_TRUE(contains(run.last_message(0), "there is no checkpoint of step 20: worker 1 rank 0: "));
    EXPECT_TRUE(contains(run.last_message(1), "there is no checkpoint of step 20: worker 1 rank 0: "));
}

TEST(Checkpointer, the_newest_and_the_major_ones_stay) {
    Processes run(2, 2, true);
    run.start(2, 20);
    for (long step = 10; step <= 60; step += 10) { run.checkpoint(step); }
    std::string expected;
    for (const char* step : {"20", "40", "50", "60"}) { expected += format("DONE_000000%s ", step); }
    for (const char* step : {"20", "40", "50", "60"}) { expected += format("model_000000%s.bin ", step); }
    for (const char* step : {"20", "40", "50", "60"}) {
        for (int i = 0; i < 4; i++) { expected += format("state_000000%s_%05d.bin ", step, i); }
    }
    EXPECT_EQ(run.files(0), expected);
}

// An elastic worker jumps over steps, and -n need not divide -nm.
TEST(Checkpointer, the_first_one_at_or_after_a_multiple_is_a_major_one) {
    Processes run(2, 1);
    run.start(1, 20);
    for (long step : {7, 14, 21, 28, 35, 66, 73}) { run.checkpoint(step); }
    for (int i : {0, 1}) {
        std::string whole;
        for (long step : {7, 14, 21, 28, 35, 66, 73}) {
            if (run.is_done(i, step) && exists(run.state(i, step))) { whole += std::to_string(step) + " "; }
        }
        EXPECT_EQ(whole, "21 66 73 ");
    }
}

TEST(Checkpointer, without_a_limit_all_stay) {
    Processes run(1, 1);
    run.start(0, 20);
    for (long step : {10, 20, 30}) { run.checkpoint(step); }
    for (long step : {10, 20, 30}) {
        EXPECT_TRUE(run.is_done(0, step) && exists(run.state(0, step))) << step;
    }
}

TEST(Checkpointer, older_ones_of_the_lineage_go_and_all_else_stays) {
    Processes run(1, 1);
    const std::string& folder = run.members[0].folder;
    leave_behind(folder, 4, 0, lineage, true);
    leave_behind(folder, 5, 0, stranger, true);
    leave_behind(folder, 6, 0, lineage, false);  // was being written when the power failed
    leave_behind(folder, 6, 3, lineage, false);  // of a process that the run no longer has
    leave_behind(folder, 7, 3, stranger, false);
    leave_behind(folder, 9, 0, lineage, true);  // later than the one that is written
    for (const char* name : {"model_00000004.bin", "model_00000005.bin", "state_00000004_00000.bin.old",
                             "state_00000003_00000.bin", "state_4_00000.bin", "DONE_00000003", "main.log"}) {
        write_bytes(folder + "/" + name, "not a state");
    }
    run.start(1);
    run.checkpoint(8);
    EXPECT_FALSE(run[0].has_failed());
    EXPECT_EQ(run.files(0),
              "DONE_00000003 DONE_00000005 DONE_00000008 DONE_00000009 main.log model_00000005.bin "
              "model_00000008.bin state_00000003_00000.bin state_00000004_00000.bin.old "
              "state_00000005_00000.bin state_00000007_00003.bin state_00000008_00000.bin "
              "state_00000009_00000.bin state_4_00000.bin ");
}

TEST(Checkpointer, a_resumed_run_forgets_what_comes_later) {
    Processes run(2, 1);
    for (int i : {0, 1}) {
        for (long step : {10, 20, 30}) {
            leave_behind(run.members[size_t(i)].folder, step, i, lineage, true);
        }
        leave_behind(run.members[size_t(i)].folder, 40, i, stranger, true);
        std::filesystem::remove(state_path(run.members[size_t(i)].folder, 30, 1));
    }
    run.start();
    for (int i : {0, 1}) { run[i].forget_later(10, lineage); }
    EXPECT_EQ(run.files(0), "DONE_00000010 DONE_00000040 state_00000010_00000.bin state_00000040_00000.bin ");
    EXPECT_EQ(run.files(1), "DONE_00000010 DONE_00000040 state_00000010_00001.bin state_00000040_00001.bin ");
}

// The status with which a run ends whose last checkpoint this is.
int status_of_finish(Checkpointer& checkpointer) {
    try {
        checkpointer.finish([](const std::string&) {});
        return 0;
    } catch (const RunError& error) { return exit_status(error); }
}

TEST(Checkpointer, a_silent_process_is_named_after_the_time_limit) {
    Processes run(2, 1, false, "", 0.2);
    run.start();
    run.begin(0, 10);
    run[0].wait();
    EXPECT_TRUE(run[0].has_failed());
    EXPECT_TRUE(contains(run.last_message(0), "it is not known whether the checkpoint of step 10 is whole: "
                                              "worker 1 rank 0: has not been heard from for 0 s"));
    EXPECT_EQ(status_of_finish(run[0]), retry_status);
    // It comes after all: the verdict is still there, and a resume finds the files of both.
    run.begin(1, 10);
    run[1].wait();
    EXPECT_TRUE(run[1].has_failed());
    EXPECT_EQ(run.files(0), "model_00000010.bin state_00000010_00000.bin ");
    EXPECT_EQ(run.files(1), "state_00000010_00001.bin ");
    run.checkpoint(20);
    EXPECT_FALSE(run[0].has_failed());
    EXPECT_TRUE(run.is_done(1, 20));
}

// No file can be opened from one call of the store to another.
class ExhaustingStore : public PrefixStore {
public:
    explicit ExhaustingStore(std::shared_ptr<Store> store) : PrefixStore(std::move(store), "") {}
    std::optional<std::string> try_get(const std::string& key) override {
        const std::optional<std::string> value = PrefixStore::try_get(key);
        if (value && key == "checkpoint/40/done/1") { limit_files(0); }
        return value;
    }
    void set(const std::string& key, const std::string& value) override {
        if (key == "checkpoint/40/done/verdict") { limit_files(before); }
        PrefixStore::set(key, value);
    }

private:
    void limit_files(rlim_t most) {
        rlimit limit;
        getrlimit(RLIMIT_NOFILE, &limit);
        if (limit.rlim_cur > 0) { before = limit.rlim_cur; }
        limit.rlim_cur = most;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    rlim_t before = 0;
};

// Checkpoints that process 0 does not see for a moment may be the ones to keep.
TEST(Checkpointer, a_folder_that_cannot_be_read_loses_no_checkpoint) {
    Processes run(2, 1);
    run.members[0].process.store = std::make_shared<PrefixStore>(
        std::make_shared<ExhaustingStore>(run.members[0].process.store), "");
    run.start(2);
    for (long step : {10, 20, 30, 40}) {
        run.checkpoint(step);
        ASSERT_FALSE(run[0].has_failed()) << run.last_message(0);
    }
    EXPECT_TRUE(run.is_done(1, 20) && run.is_done(1, 30) && run.is_done(1, 40));
    run.checkpoint(50);
    EXPECT_FALSE(run.is_done(1, 20) || run.is_done(1, 30));
    EXPECT_TRUE(run.is_done(1, 40) && run.is_done(1, 50));
}

// The loops notice by themselves if a process is gone. Others may be steps behind, or have slow disks.
TEST(Checkpointer, loops_that_train_give_others_all_the_time_they_need) {
    Processes run(2, 1, false, "", 0.01);
    run.start();
    run.begin(0, 10);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_FALSE(run[0].is_idle());
    run.begin(1, 10);
    for (Patience patience(20); !(run[0].is_idle() && run[1].is_idle()) && !patience.is_over();) {
        patience.pause();
    }
    EXPECT_FALSE(run[0].has_failed() || run[1].has_failed());
    EXPECT_TRUE(run.is_done(0, 10) && run.is_done(1, 10));
}

TEST(Checkpointer, a_store_may_be_away_for_a_while) {
    Processes run(2, 1);
    const auto stores = absent_stores_of(run);
    run.start();
    run.checkpoint(10);
    for (auto& store : stores) { store->is_away = true; }
    for (int i : {0, 1}) { run.begin(i, 20); }
    for (Patience patience(20); (!stores[0]->refused || !stores[1]->refused) && !patience.is_over();) {
        patience.pause();
    }
    EXPECT_FALSE(run[0].is_idle() || run[1].is_idle());
    for (auto& store : stores) { store->is_away = false; }
    run.wait();
    EXPECT_FALSE(run[0].has_failed() || run[1].has_failed());
    EXPECT_TRUE(run.is_done(0, 20) && run.is_done(1, 20));
}

// Training needs no store: a loop that waits for a checkpoint continues long before the time limit, which is
// meant for silent processes.
TEST(Checkpointer, a_store_that_is_gone_for_good_holds_no_process_up) {
    const double timeout = 8;
    Processes run(2, 1, false, "", timeout);
    const auto stores = absent_stores_of(run);
    run.start();
    run.checkpoint(10);
    run.messages(0);
    run.begin(1, 20);  // has told that its own is there, and waits for process 0
    EXPECT_EQ(wait_for_value(run.store(0), "checkpoint/20/1", 20), "whole");
    for (auto& store : stores) { store->is_away = true; }
    run.begin(0, 20);
    const Patience since(60);
    run.wait();
    EXPECT_LT(since.waited(), timeout);
    for (int i : {0, 1}) {
        EXPECT_TRUE(run[i].has_failed());
        EXPECT_EQ(run.last_message(i),
                  "it is not known whether the checkpoint of step 20 is whole: the store is away");
        EXPECT_EQ(status_of_finish(run[i]), retry_status);
        EXPECT_TRUE(run.is_done(i, 10) && exists(run.state(i, 10)) && exists(run.state(i, 20)));
    }
}

TEST(Checkpointer, a_process_that_finds_the_store_again_waits_little_for_others_that_may_have_given_up) {
    Processes run(2, 1, false, "", 8);
    const auto stores = absent_stores_of(run);
    run.start();
    stores[0]->is_away = true;
    run.begin(0, 10);
    auto waited = std::async(std::launch::async, [&] { run[0].wait(); });
    for (Patience patience(20); !stores[0]->refused && !patience.is_over();) { patience.pause(); }
    std::this_thread::sleep_for(std::chrono::seconds(1));
    stores[0]->is_away = false;
    waited.get();
    const std::string message = run.last_message(0);
    EXPECT_GE(seconds_of_silence(message), 4) << message;
    EXPECT_LT(seconds_of_silence(message), 8) << message;
}

// Old states do not fill the disk, but those stay that may be the newest that all other processes have.
TEST(Checkpointer, without_the_store_the_newest_stay_and_what_others_may_count_on) {
    Processes run(2, 1, false, "", 1.5);
    const auto stores = absent_stores_of(run);
    run.start(1, 40);
    run.checkpoint(10);
    run.begin(1, 20);
    EXPECT_EQ(wait_for_value(run.store(0), "checkpoint/20/1", 20), "whole");
    for (auto& store : stores) { store->is_away = true; }
    run[1].wait();
    for (long step = 30; step <= 70; step += 10) { run.checkpoint(step); }
    EXPECT_EQ(run.files(0), "DONE_00000010 model_00000010.bin model_00000040.bin model_00000060.bin "
                            "model_00000070.bin state_00000010_00000.bin state_00000040_00000.bin "
                            "state_00000060_00000.bin state_00000070_00000.bin ");
    EXPECT_EQ(run.files(1), "DONE_00000010 state_00000010_00001.bin state_00000020_00001.bin "
                            "state_00000040_00001.bin state_00000060_00001.bin state_00000070_00001.bin ");
    for (auto& store : stores) { store->is_away = false; }
    run.checkpoint(80);
    EXPECT_EQ(run.files(0), "DONE_00000080 model_00000080.bin state_00000080_00000.bin ");
    EXPECT_EQ(run.files(1), "DONE_00000080 state_00000080_00001.bin ");
}

TEST(Checkpointer, without_the_store_the_first_at_or_after_a_multiple_stays_too) {
    Processes run(2, 1, false, "", 1.5);
    const auto stores = absent_stores_of(run);
    run.start(1, 40);
    run.checkpoint(10);
    for (auto& store : stores) { store->is_away = true; }
    for (long step : {35, 45, 55, 65, 75}) { run.checkpoint(step); }
    for (int i : {0, 1}) {
        std::string here;
        for (long step : {10, 35, 45, 55, 65, 75}) {
            if (exists(run.state(i, step))) { here += std::to_string(step) + " "; }
        }
        EXPECT_EQ(here, "10 45 65 75 ");
    }
}

TEST(Checkpointer, states_that_all_have_stay_when_a_process_dies_before_done) {
    Processes run(2, 1, false, "", 0.2);
    run.start(1);
    leave_behind(run.members[1].folder, 10, 1, lineage, false);
    run.store(1).set("checkpoint/10/1", "whole");
    run.begin(0, 10);
    run[0].wait();
    EXPECT_TRUE(run[0].has_failed());
    EXPECT_TRUE(contains(run.last_message(0), "it is not known whether the checkpoint of step 10 is whole: "
                                              "worker 1 rank 0: has not been heard from for "));
    EXPECT_TRUE(exists(run.state(0, 10)) && exists(run.state(1, 10)));
}

TEST(Checkpointer, nobody_waits_for_a_run_that_has_failed) {
    Processes run(2, 1);
    run.start();
    record_cause(run.store(0), {"worker 0 rank 0", "has stopped"});
    run.begin(1, 10);
    run[1].wait();
    EXPECT_TRUE(run[1].has_failed());
    EXPECT_EQ(run.last_message(1),
              "it is not known whether the checkpoint of step 10 is whole: worker 0 rank 0 has not answered");
    EXPECT_EQ(run.files(1), "state_00000010_00001.bin ") << "the others may have theirs";
}

TEST(Checkpointer, abandoning_ends_a_wait_and_keeps_what_is_whole) {
    Processes run(2, 1, false, "", 100000);
    run.start();
    run.begin(0, 10);
    EXPECT_EQ(wait_for_value(run.store(0), "checkpoint/10/0", 20), "whole");
    run[0].abandon();
    run[0].wait();
    EXPECT_TRUE(run[0].has_failed());
    EXPECT_TRUE(run.messages(0).empty());
    EXPECT_EQ(run.files(0), "model_00000010.bin state_00000010_00000.bin ");
    EXPECT_THROW(run.begin(0, 20), std::logic_error);
}

TEST(Checkpointer, abandoning_ends_a_write_and_leaves_no_half_of_it) {
    Processes run(1, 1);
    run.start();
    const std::vector<char> chunk(1 << 22);
    std::promise<void> begun;
    CheckpointJob job = run.job(0, 10);
    job.sections = [&] {
        begun.set_value();
        std::vector<StateSection> sections;  // a gigabyte
        for (int i = 0; i < 250; i++) { sections.push_back({std::to_string(i), chunk.data(), chunk.size()}); }
        return sections;
    };
    run[0].begin(job);
    begun.get_future().wait();
    run[0].abandon();
    run[0].wait();
    EXPECT_TRUE(run[0].has_failed());
    EXPECT_EQ(run.files(0), "");
}

TEST(Checkpointer, its_end_does_not_wait_for_others) {
    Processes run(2, 1, false, "", 100000);
    run.start();
    run.begin(1, 10);
}

TEST(Checkpointer, one_at_a_time_and_each_step_once) {
    Processes run(1, 1);
    run.start();
    std::promise<void> copied;
    CheckpointJob job = run.job(0, 10);
    job.ready = [&] { copied.get_future().wait(); };
    run[0].begin(job);
    EXPECT_THROW(run.begin(0, 20), std::logic_error);
    copied.set_value();
    run.wait();
    EXPECT_THROW(run.begin(0, 10), std::logic_error);
    run.checkpoint(20);
    EXPECT_TRUE(run.is_done(0, 20));
}

TEST(Checkpointer, keys_of_older_steps_are_removed_from_the_store) {
    Processes run(2, 1);
    run.start();
    for (long step : {10, 20}) { run.checkpoint(step); }
    for (const char* key : {"0", "1", "verdict", "done/0", "done/1", "done/verdict"}) {
        EXPECT_FALSE(run.store(0).try_get(std::string("checkpoint/10/") + key)) << key;
        EXPECT_TRUE(run.store(0).try_get(std::string("checkpoint/20/") + key)) << key;
    }
}

TEST(Checkpointer, a_full_disk_stops_a_checkpoint_and_not_the_run) {
    Processes run(1, 1);
    TestProcess child([&]() -> std::string {
        run.start(1);
        run.checkpoint(10);
        run.messages(0);
        signal(SIGXFSZ, SIG_IGN);
        rlimit before;
        getrlimit(RLIMIT_FSIZE, &before);
        const rlimit limit = {4096, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &limit);
        const std::string large(100000, 'x');
        CheckpointJob job = run.job(0, 20);
        job.sections = [&] { return std::vector<StateSection>{{"large", large.data(), large.size()}}; };
        run[0].begin(job);
        run.wait();
        const std::string said = run.last_message(0);
        setrlimit(RLIMIT_FSIZE, &before);
        run.checkpoint(30);
        return said + (run[0].has_failed() ? "" : "|whole again");
    });
    ASSERT_EQ(child.wait(60), 0) << child.report;
    EXPECT_EQ(child.report, "there is no checkpoint of step 20: worker 0 rank 0: cannot write " +
                                run.state(0, 20) + ".tmp: File too large; the last whole one is of step 10" +
                                "|whole again");
    EXPECT_EQ(run.files(0), "DONE_00000030 model_00000030.bin state_00000030_00000.bin ");
}

}  // namespace test_checkpointer
