// Requests to stop, in real processes: which signals set the flag, and which end the process after all.
#include "llmc/run/stop.h"

#include "dev/test/processes.h"

namespace test_stop {

// A process that waits for requests; it says "ready" and "asked" in the store, and reports how it has left.
static TestProcess waiting_process(
    const std::string& folder, const std::function<void()>& prepare = [] {}) {
    return TestProcess([=] {
        for (int s : stop_signals) { signal(s, SIG_DFL); }
        prepare();
        FileStore store(folder);
        StopRequest request;
        store.set("ready", "");
        for (Patience patience(20); !request.is_set() && !patience.is_over();) { patience.pause(); }
        if (!request.is_set()) { return std::string("was never asked"); }
        store.set("asked", "");
        wait_for_value(store, "go on", 20);
        return std::string("has left by itself");
    });
}

TEST(StopRequest, a_signal_asks_and_the_process_goes_on) {
    for (int signal : stop_signals) {
        TemporaryFolder folder;
        FileStore store(folder.name());
        TestProcess process = waiting_process(folder.name());
        wait_for_value(store, "ready", 20);
        process.send_signal(signal);
        wait_for_value(store, "asked", 20);
        store.set("go on", "");
        EXPECT_EQ(process.wait(20), 0) << strsignal(signal);
        EXPECT_EQ(process.report, "has left by itself");
    }
}

TEST(StopRequest, the_same_request_may_arrive_twice) {
    TemporaryFolder folder;
    FileStore store(folder.name());
    TestProcess process = waiting_process(folder.name());
    wait_for_value(store, "ready", 20);
    for (int signal : {SIGTERM, SIGTERM, SIGUSR1}) {
        process.send_signal(signal);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    store.set("go on", "");
    EXPECT_EQ(process.wait(20), 0);
    EXPECT_EQ(process.report, "has left by itself");
}

TEST(StopRequest, a_second_request_ends_the_process_at_once) {
    for (auto [first, second] : {std::pair{SIGTERM, SIGTERM}, std::pair{SIGTERM, SIGUSR1}}) {
        TemporaryFolder folder;
        FileStore store(folder.name());
        TestProcess process = waiting_process(folder.name());
        wait_for_value(store, "ready", 20);
        process.send_signal(first);
        wait_for_value(store, "asked", 20);
        std::this_thread::sleep_for(std::chrono::duration<double>(one_request_seconds + 0.1));
        process.send_signal(second);
        EXPECT_EQ(process.wait(20), 128 + second);
    }
}

TEST(StopRequest, a_signal_that_the_process_was_started_to_ignore_is_none) {
    TemporaryFolder folder;
    FileStore store(folder.name());
    TestProcess process = waiting_process(folder.name(), [] { signal(SIGTERM, SIG_IGN); });
    wait_for_value(store, "ready", 20);
    process.send_signal(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_FALSE(store.try_get("asked"));
    process.send_signal(SIGUSR1);
    wait_for_value(store, "asked", 20);
    store.set("go on", "");
    EXPECT_EQ(process.wait(20), 0) << process.report;
}

TEST(StopRequest, before_there_is_one_a_process_leaves_at_once_as_one_that_was_asked_to) {
    for (int first : {SIGTERM, SIGUSR1, SIGHUP}) {
        TestProcess process([first] {
            for (int s : stop_signals) { signal(s, SIG_DFL); }
            leave_at_stop_signals();
            { StopRequest request; }
            raise(first);
            return std::string("survived");
        });
        EXPECT_EQ(process.wait(20), stopped_status) << process.report;
    }
    TestProcess process([] {
        signal(SIGHUP, SIG_IGN);
        leave_at_stop_signals();
        raise(SIGHUP);
        return std::string("survived");
    });
    EXPECT_EQ(process.wait(20), 0);
    EXPECT_EQ(process.report, "survived");
}

TEST(StopRequest, reaches_the_loop_from_whichever_thread_is_signalled) {
    StopRequest request;
    std::thread([] { pthread_kill(pthread_self(), SIGUSR1); }).join();
    EXPECT_TRUE(request.is_set());
}

TEST(StopRequest, afterwards_signals_do_what_they_did_before) {
    TestProcess process([] {
        signal(SIGTERM, SIG_DFL);
        signal(SIGUSR1, SIG_IGN);
        { StopRequest request; }
        raise(SIGUSR1);
        raise(SIGTERM);
        return std::string("survived");
    });
    EXPECT_EQ(process.wait(20), 128 + SIGTERM) << process.report;
}

}  // namespace test_stop
