// The watchdog, enabled as on a GPU; how a process leaves; whose failure counts.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dev/test/files.h"
#include "dev/test/processes.h"
#include "llmc/clock.h"
#include "llmc/run/cause.h"
#include "llmc/run/meeting.h"
#include "llmc/run/process.h"
#include "llmc/run/watchdog.h"

namespace test_watchdog {

void pause_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Process 0 of `size` processes.
Process first_of(int size, double timeout) {
    Process process;
    process.ranks = size;
    process.timeout = timeout;
    process.store = std::make_shared<PrefixStore>(std::make_shared<MemoryStore>(), "run/");
    return process;
}

struct End {
    int status;
    std::string said;  // on stderr
};

// How a process ends that runs `work`. It has 30 seconds.
End end_of(const std::function<void()>& work) {
    TemporaryFolder folder;
    const std::string path = folder.name() + "/stderr";
    TestProcess process([&] {
        if (!freopen(path.c_str(), "w", stderr)) { throw std::runtime_error("cannot write " + path); }
        work();
        return std::string();
    });
    const int status = process.wait(30);
    return {status, read_bytes(path)};
}

// How a process ends whose watched step consists of `work`.
End end_of_step(int size, double timeout, const std::function<void(Watchdog&)>& work) {
    return end_of([&] {
        const Process process = first_of(size, timeout);
        Watchdog dog(process, true);
        const Watchdog::Watch watch(dog, "step 7");
        work(dog);
    });
}

class FailedComm : public Comm {
public:
    int rank() const override { return 0; }
    int size() const override { return 2; }
    void all_gather(void*, const void*, size_t, Stream&, Traffic*) override {}
    void all_to_all(void*, const void*, size_t, Stream&, Traffic*) override {}
    void reduce_scatter(float*, const float*, size_t, Stream&, Traffic*) override {}
    void all_reduce(float*, size_t, Stream&, Traffic*) override {}
    void check() override { throw CommError(1, "worker 0 rank 1 is gone"); }
};

// Moves for as long as it is told to.
class MovingComm : public FailedComm {
public:
    void check() override {}
    uint64_t progress() const override { return now_seconds() < until ? ++moves : moves.load(); }
    double until = now_seconds() + 1.5;
    mutable std::atomic<uint64_t> moves{0};
};

// What a library might throw, which no caller expects.
class BrokenComm : public FailedComm {
public:
    void check() override { throw std::bad_alloc(); }
};

class BrokenStore : public MemoryStore {
public:
    std::optional<std::string> try_get(const std::string& key) override {
        if (is_broken) {
            asked++;
            throw std::bad_alloc();
        }
        return MemoryStore::try_get(key);
    }
    std::atomic<bool> is_broken{false};
    std::atomic<int> asked{0};
};

// A store whose server is gone, which takes 1.5 seconds to notice.
class GoneStore : public MemoryStore {
public:
    std::optional<std::string> try_get(const std::string&) override {
        fprintf(stderr, "asked\n");
        pause_for(1.5);
        throw RunError("the store is gone");
    }
};

TEST(Watchdog, EndsAProcessInWhichNothingMoves) {
    const End end = end_of_step(2, 0.3, [](Watchdog&) { pause_for(60); });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said.rfind("error: worker 0 rank 0 waited ", 0), 0u) << end.said;
    EXPECT_NE(end.said.find("for step 7 to finish"), std::string::npos) << end.said;
}

TEST(Watchdog, AStepMayTakeAsLongAsItLikesWhileSomethingMoves) {
    const End end = end_of_step(2, 1, [](Watchdog& dog) {
        for (int micro_step = 0; micro_step < 60; micro_step++) {
            pause_for(0.05);
            dog.progress();
        }
    });
    EXPECT_EQ(end.status, 0) << end.said;
}

TEST(Watchdog, WhoWorksAloneTakesTheTimeThatItNeedsAndIsWatchedAgainAfterwards) {
    const End end = end_of_step(2, 0.3, [](Watchdog& dog) {
        {
            const Watchdog::Alone alone(dog);
            pause_for(1.5);
        }
        fprintf(stderr, "done\n");
        pause_for(60);
    });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said.rfind("done\nerror: ", 0), 0u) << end.said;
}

TEST(Watchdog, OneProcessWaitsForNobody) {
    const End end = end_of_step(1, 0.1, [](Watchdog&) { pause_for(1); });
    EXPECT_EQ(end.status, 0) << end.said;
}

TEST(Watchdog, AnExchangeMayTakeAsLongAsItLikesWhileItsDataMoves) {
    const End end = end_of_step(2, 0.3, [](Watchdog& dog) {
        MovingComm comm;
        dog.guard(comm);
        pause_for(1.5);
        fprintf(stderr, "moved\n");
        pause_for(60);
    });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said.rfind("moved\nerror: ", 0), 0u) << end.said;
}

TEST(Watchdog, EndsAProcessWhoseCommunicatorHasFailed) {
    FailedComm comm;
    const End end = end_of_step(2, 600, [&](Watchdog& dog) {
        dog.guard(comm);
        pause_for(60);
    });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said, "error: worker 0 rank 1 is gone\n");
}

TEST(Watchdog, WhatItsThreadThrowsEndsTheProcessWithALine) {
    BrokenComm comm;
    const End end = end_of_step(2, 600, [&](Watchdog& dog) {
        dog.guard(comm);
        pause_for(60);
    });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said.rfind("error: ", 0), 0u) << end.said;
}

TEST(Watchdog, AStoreThatThrowsAnythingDoesNotEndAProcessBeforeItsLimit) {
    const End end = end_of([] {
        auto store = std::make_shared<BrokenStore>();
        Process process = first_of(2, 2);
        process.store = std::make_shared<PrefixStore>(store, "run/");
        store->is_broken = true;
        Watchdog dog(process, true);
        const Watchdog::Watch watch(dog, "step 7");
        pause_for(3);  // more than the time limit, less than twice
        fprintf(stderr, "asked %s\n", store->asked > 0 ? "it" : "nothing");
        fflush(stderr);
    });
    EXPECT_EQ(end.status, 0);
    EXPECT_EQ(end.said, "asked it\n");
}

TEST(PlaceKeeper, WhatItsThreadThrowsDoesNotEndTheProcess) {
    const End end = end_of([] {
        auto store = std::make_shared<BrokenStore>();
        auto meeting = std::make_unique<Meeting>(store, "run", std::vector<std::string>{"worker 0"}, 0, 10, false);
        meeting->meet();
        PlaceKeeper keeper(std::move(meeting), true);
        store->is_broken = true;
        for (int i = 0; i < 100 && store->asked < 2; i++) { pause_for(0.1); }  // it tries again
        fprintf(stderr, "asked %s\n", store->asked < 2 ? "once" : "again");
        fflush(stderr);
    });
    EXPECT_EQ(end.status, 0);
    EXPECT_EQ(end.said, "asked again\n");
}

TEST(Watchdog, AFailureThatIsWrittenDownEndsAWaitWithinSeconds) {
    const End end = end_of([] {
        const Process process = first_of(2, 600);
        record_cause(*process.store, {"worker 0 rank 1", "has stopped: the disk is full"});
        Watchdog dog(process, true);
        const Watchdog::Watch watch(dog, "step 7");
        pause_for(60);
    });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said, "error: worker 0 rank 1 has stopped: the disk is full\n");
}

// A process that is only stopped is alive. One that has died may still have to be waited for by its parent.
TEST(Watchdog, ADeathOnThisMachineEndsAWaitWithinSeconds) {
    const End end = end_of([] {
        Process process = first_of(2, 600);
        const pid_t other = fork();
        if (other == 0) { pause_for(60), _exit(0); }
        const std::string introduction = Neighbours::introduction(other);
        process.store->set("alive/1", introduction);
        const Neighbours neighbours({"elsewhere 1 1", introduction});
        kill(other, SIGSTOP);
        fprintf(stderr, "%d dead\n", neighbours.dead());
        Watchdog dog(process, true);
        dog.meet_neighbours(process);
        const Watchdog::Watch watch(dog, "step 7");
        kill(other, SIGKILL);
        pause_for(60);
    });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said.rfind("-1 dead\nerror: worker 0 rank 1 has died: ", 0), 0u) << end.said;
}

// Between its introduction and the moment when another process reads it, a process may die.
TEST(Watchdog, ADeathBeforeTheIntroductionIsReadIsSeen) {
    const pid_t other = fork();
    if (other == 0) { pause_for(60), _exit(0); }
    const std::string introduction = Neighbours::introduction(other);
    kill(other, SIGKILL);
    waitpid(other, nullptr, 0);
    EXPECT_EQ(Neighbours({"elsewhere 1 1", introduction}).dead(), 1);
    EXPECT_EQ(Neighbours({"other " + introduction}).dead(), -1) << "in another namespace";
}

// It ends as soon as it has waited for twice the limit, although asking the store took most of that time.
TEST(Watchdog, TimeInWhichAStoreThatIsGoneWasAskedCounts) {
    const End end = end_of([] {
        Process process = first_of(2, 1.5);
        process.store = std::make_shared<PrefixStore>(std::make_shared<GoneStore>(), "run/");
        Watchdog dog(process, true);
        const Watchdog::Watch watch(dog, "step 7");
        pause_for(60);
    });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said.rfind("asked\nasked\nerror: worker 0 rank 0 waited ", 0), 0u) << end.said;
}

TEST(Leaving, SeveralThreadsWithAnErrorPrintOneLine) {
    const End end = end_of([] {
        const Process process = first_of(2, 1);
        std::vector<std::thread> threads;
        for (int i = 0; i < 8; i++) {
            threads.emplace_back([&] { process.leave_with(RunError("the disk is full")); });
        }
        pause_for(60);
    });
    EXPECT_EQ(end.status, 1);
    EXPECT_EQ(end.said, "error: the disk is full\n");
}

TEST(Cause, WhoSeesAConsequenceReportsTheCauseThatIsWrittenDownAMomentLater) {
    MemoryStore store;
    std::thread failed([&] {
        pause_for(0.3);
        record_cause(store, {"worker 1 rank 0", "has stopped: the disk is full"});
    });
    const Cause cause = find_cause(store, {"worker 0 rank 0", "lost worker 1 rank 0"});
    failed.join();
    EXPECT_EQ(cause.text(), "worker 1 rank 0 has stopped: the disk is full");
}

TEST(Cause, WhereNobodyKnowsMoreWhatWasSeenIsTheCauseForAll) {
    MemoryStore store;
    EXPECT_EQ(find_cause(store, {"worker 0 rank 0", "lost worker 1 rank 0"}).process, "worker 0 rank 0");
    EXPECT_EQ(find_cause(store, {"worker 0 rank 1", "lost worker 1 rank 1"}).process, "worker 0 rank 0");
}

}  // namespace test_watchdog
