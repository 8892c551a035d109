// Places from environments; meeting, fingerprints and leaving between real processes; the launcher, with this
// very test program as the program that it starts.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <sstream>

#include "dev/test/files.h"
#include "dev/test/launch_environment.h"
#include "dev/test/processes.h"
#include "llmc/run/comm_tcp.h"
#include "llmc/run/launch.h"

namespace test_launch {

// -----------------------------------------------------------------------------------------------------------
// The program that the launcher tests run: PROGRAM MODE WORKERS RANKS WORKER STORE

static void all_reduce_for_ever(Process& process) {
    auto inner = make_comm_tcp(process.inner_group());
    auto outer = make_comm_tcp(process.outer_group());
    Stream stream;
    process.store->set("training/" + std::to_string(process.index()), "");
    while (true) {
        float one = 1;
        inner->all_reduce(&one, 1, stream);
        outer->all_reduce(&one, 1, stream);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

// Runs, as training does, until one of the processes has been asked to stop. Returns the exit status.
static int train_until_stopped(const std::string& mode, Process& process) {
    const StopRequest request;
    process.meet();
    const bool is_victim = process.name() == "worker 1 rank 0";
    printf("pid %d\n", getpid());
    if (mode == "stop or die" && is_victim) { raise(SIGKILL); }
    while (!process.store->try_get("stop")) {
        if (request.is_set()) { process.store->set("stop", ""); }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    printf("asked\n");
    if (mode == "stop with a failure" && is_victim) { return 3; }
    if (mode == "stop at the end" && is_victim) { return 0; }
    if (mode == "stop never") { std::this_thread::sleep_for(std::chrono::hours(1)); }
    if (mode == "stop slowly") { std::this_thread::sleep_for(std::chrono::milliseconds(5500)); }
    return stopped_status;
}

static void run_mode(const std::string& mode, Process& process) {
    const bool is_victim = process.name() == "worker 1 rank 0";
    if (mode == "where") {
        printf("I am %s of %dx%d, threads %s, terminal %d\n", process.name().c_str(), process.workers,
               process.ranks, getenv("OMP_NUM_THREADS"), process.terminal);
        fprintf(stderr, "a warning\n");
        printf("no newline at the end");
        return;
    }
    if (mode == "arguments") {
        std::string arguments;
        std::getline(std::ifstream("/proc/self/cmdline"), arguments);
        std::replace(arguments.begin(), arguments.end(), '\0', ' ');
        printf("%s, store %s\n", arguments.c_str(), process.store_url.c_str());
        return;
    }
    if (mode == "flood") {
        fprintf(stderr, "pid %d\n", getpid());
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        while (true) { printf("a line that nobody reads\n"); }
    }
    if (mode == "long output") {
        for (int i = 0; i < 20000; i++) { printf("a line that nobody reads\n"); }
        return;
    }
    if (mode == "the second dies worse") {
        if (is_victim) { _exit(3); }
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
        raise(SIGKILL);
    }
    if (mode == "quoted") {
        std::this_thread::sleep_for(std::chrono::milliseconds(is_victim ? 300 : 0));
        if (is_victim) { throw RunError("the disk is full"); }
        fprintf(stderr, "error: worker 1 rank 0 has stopped: the disk is full\n");
        std::this_thread::sleep_for(std::chrono::hours(1));
    }
    if (mode == "same mistake") { throw UserError("T is too large: make it smaller"); }
    process.meet();
    if (mode == "one mistake" && is_victim) { throw UserError("no such shard: look"); }
    process.check_fingerprint(
        {{"--lr", "1"}, {"--overlap", mode == "differ" ? std::to_string(process.worker) : "1"}});
    if (mode == "exit 3" && is_victim) { _exit(3); }
    if (mode == "stubborn") {
        signal(SIGTERM, SIG_IGN);
        if (is_victim) { _exit(3); }
    }
    if (mode == "killed" && is_victim) {
        std::thread([&] {
            for (int i = 0; i < process.size(); i++) {
                while (!process.store->try_get("training/" + std::to_string(i))) { usleep(10'000); }
            }
            kill(getpid(), SIGKILL);
        }).detach();
    }
    if (mode == "pids" || mode == "stop-unprepared") {
        printf("pid %d\n", getpid());
        fflush(stdout);
    }
    if (mode != "finish") { all_reduce_for_ever(process); }

    auto inner = make_comm_tcp(process.inner_group());
    auto outer = make_comm_tcp(process.outer_group());
    Stream stream;
    float sum = float(process.index());
    inner->all_reduce(&sum, 1, stream);
    outer->all_reduce(&sum, 1, stream);
    printf("sum %g\n", sum);
    if (process.index() == 0) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }
    process.leave();
}

// A process of an elastic worker, until the test ends it by the file DILOCO_TEST_GO. The mode names workers
// and what they do: "worker 1 dies once". The others wait. Returns the exit status.
static int run_alone(const std::string& mode, Process& process) {
    const bool is_meant = mode.rfind("all ", 0) == 0 || process.worker == 1;
    const std::string act = is_meant ? mode.substr(mode.find(' ', mode.find(' ') + 1) + 1) : "waits";
    const bool is_last_rank = process.rank == process.ranks - 1;
    printf("start %d, pid %d\n", process.restart, getpid());
    if (act == "dies" || (act == "dies once" && process.restart == 0)) { raise(SIGKILL); }
    if (act == "dies and is replaced") {
        if (process.restart == 0) { raise(SIGKILL); }
        throw RunError("another process has started as this worker", replaced_status);
    }
    if (act == "is replaced and one rank knows") {
        if (is_last_rank) { throw RunError("another rank of worker 1 stops"); }
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        throw RunError("another process has started as this worker", replaced_status);
    }
    if (act == "fails") { throw RunError("the disk is full"); }
    if (act == "fails and finds no folder") {
        if (process.restart == 0) { throw RunError("the disk is full"); }
        throw UserError("there is no folder: make it");
    }
    if (act == "loses a rank") {
        if (is_last_rank) { raise(SIGKILL); }
        signal(SIGTERM, SIG_IGN);
        std::this_thread::sleep_for(std::chrono::hours(1));
    }
    if (act == "meets" || act == "meets again") {
        process.meet();
        process.check_fingerprint({{"--overlap", std::to_string(process.worker)}});
        if (act == "meets again" && process.worker == 1 && process.restart == 0 && is_last_rank) {
            raise(SIGKILL);
        }
        auto inner = make_comm_tcp(process.inner_group());
        Stream stream;
        float sum = float(10 * process.worker + process.rank);
        inner->all_reduce(&sum, 1, stream);
        printf("sum %g\n", sum);
        process.leave();
    }
    while (!std::filesystem::exists(getenv("DILOCO_TEST_GO"))) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (act == "makes a mistake") { throw UserError("no such shard: look"); }
    printf("done\n");
    return 0;
}

// Runs before main() if the environment asks for it. Then gtest never starts.
__attribute__((constructor)) static void test_program(int argc, char** argv) {
    if (!getenv("DILOCO_TEST_PROGRAM") || argc < 6) { return; }
    Options options;
    options.workers = atoi(argv[2]);
    options.ranks = atoi(argv[3]);
    options.worker = atoi(argv[4]);
    options.store = argv[5];
    options.timeout = 20;
    const std::string mode = argv[1];
    if (mode.rfind("stop", 0) == 0 || mode == "worker 1 waits") { options.output = "log"; }
    const char* restarts = getenv("DILOCO_TEST_RESTARTS");
    if (getenv("DILOCO_TEST_PATIENCE")) { Launcher::reader_patience = atof(getenv("DILOCO_TEST_PATIENCE")); }
    if (restarts) { options.diloco.transport = "store"; }
    options.elastic.restarts = restarts ? atoi(restarts) : 0;
    int status = 0;
    try {
        Process process = launch(options, false, argv);
        try {
            if (mode.rfind("stop ", 0) == 0) {
                status = train_until_stopped(mode, process);
            } else if (options.diloco.is_elastic()) {
                status = run_alone(mode, process);
            } else {
                run_mode(mode, process);
            }
        } catch (const std::runtime_error& error) { process.leave_with(error); }
    } catch (const UserError& error) {
        fprintf(stderr, "error: %s\n", error.what());
        exit(2);
    }
    exit(status);
}

struct Program {
    // prepare: called in the new process before the program starts
    Program(
        const std::string& mode, int workers, int ranks, int worker = -1, const std::string& store = "",
        const std::function<void()>& prepare = [] {})
        : process([=] { return run(mode, workers, ranks, worker, store, prepare); }) {}

    int wait(double seconds = 20) {
        const int status = process.wait(seconds);
        out = read("out");
        err = read("err");
        return status;
    }

    std::string read(const std::string& name) const {
        std::ostringstream text;
        text << std::ifstream(folder.name() + "/" + name).rdbuf();
        return text.str();
    }

    std::string run(const std::string& mode, int workers, int ranks, int worker, const std::string& store,
                    const std::function<void()>& prepare) const {
        dup2(open((folder.name() + "/out").c_str(), O_CREAT | O_WRONLY, 0600), 1);
        dup2(open((folder.name() + "/err").c_str(), O_CREAT | O_WRONLY, 0600), 2);
        setenv("DILOCO_TEST_PROGRAM", "1", 1);
        setenv("TMPDIR", (folder.name() + "/tmp").c_str(), 1);
        std::filesystem::create_directory(folder.name() + "/tmp");
        unsetenv("OMP_NUM_THREADS");
        const LaunchEnvironment no_launcher({});
        for (int s : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) { signal(s, SIG_DFL); }
        prepare();
        const std::string numbers[] = {std::to_string(workers), std::to_string(ranks),
                                       std::to_string(worker)};
        execl("/proc/self/exe", "program", mode.c_str(), numbers[0].c_str(), numbers[1].c_str(),
              numbers[2].c_str(), store.c_str(), nullptr);
        return "exec failed";
    }

    bool leaves_nothing_in_tmp() const { return std::filesystem::is_empty(folder.name() + "/tmp"); }

    TemporaryFolder folder;
    TestProcess process;
    std::string out, err;
};

static std::vector<std::string> sorted_lines(const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> lines;
    for (std::string line; std::getline(stream, line);) { lines.push_back(line); }
    std::sort(lines.begin(), lines.end());
    return lines;
}

static std::vector<pid_t> wait_for_pids(const Program& program, size_t count) {
    const Patience patience(20);
    while (true) {
        std::vector<pid_t> pids;
        for (const std::string& line : sorted_lines(program.read("out") + program.read("err"))) {
            if (line.find("pid ") != std::string::npos) {
                pids.push_back(atoi(line.c_str() + line.find("pid ") + 4));
            }
        }
        if (pids.size() == count) { return pids; }
        if (patience.is_over()) {
            throw std::runtime_error("the processes do not start: " + program.read("err"));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

// A process that has ended stays a zombie until its parent waits for it, and does not count.
static bool is_running(pid_t pid) {
    std::string stat;
    std::getline(std::ifstream(format("/proc/%d/stat", pid)), stat);
    const size_t state = stat.rfind(") ");
    return state != std::string::npos && stat[state + 2] != 'Z';
}

static bool all_are_gone(const std::vector<pid_t>& pids) {
    const Patience patience(10);
    while (!patience.is_over()) {
        if (std::none_of(pids.begin(), pids.end(), is_running)) { return true; }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
}

// systemd-tmpfiles leaves what is locked alone, however old it is.
TEST(Launch, the_folder_of_a_run_on_one_machine_is_locked) {
    const TemporaryDirectory folder;
    const int other = open(folder.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    EXPECT_EQ(flock(other, LOCK_EX | LOCK_NB), -1);
    EXPECT_EQ(errno, EWOULDBLOCK);
    close(other);
}

TEST(Launcher, every_place_is_started_once_and_lines_are_prefixed) {
    Program program("where", 2, 2);
    EXPECT_EQ(program.wait(), 0) << program.err;
    const int threads = std::max(1, usable_cores() / 4);
    std::vector<std::string> expected;
    for (int i = 0; i < 4; i++) {
        const std::string prefix = i == 0 ? "" : format("[%d.%d] ", i / 2, i % 2);
        expected.push_back(
            prefix + format("I am worker %d rank %d of 2x2, threads %d, terminal 0", i / 2, i % 2, threads));
        expected.push_back(prefix + "no newline at the end");
    }
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(sorted_lines(program.out), expected);
    EXPECT_EQ(sorted_lines(program.err), (std::vector<std::string>{"[0.1] a warning", "[1.0] a warning",
                                                                   "[1.1] a warning", "a warning"}));
}

TEST(Launcher, processes_meet_compute_and_leave_and_the_folder_goes_too) {
    Program program("finish", 2, 2);
    EXPECT_EQ(program.wait(), 0) << program.err;
    EXPECT_EQ(sorted_lines(program.out),
              (std::vector<std::string>{"[0.1] sum 6", "[1.0] sum 6", "[1.1] sum 6", "sum 6"}));
    EXPECT_EQ(program.err, "");
    EXPECT_TRUE(program.leaves_nothing_in_tmp());
}

TEST(Launcher, one_process_is_not_launched_at_all) {
    Program program("finish", 1, 1);
    EXPECT_EQ(program.wait(), 0) << program.err;
    EXPECT_EQ(program.out, "sum 0\n");
}

TEST(Launcher, workers_started_separately_meet_in_the_store) {
    TemporaryFolder shared;
    const std::string store = "file:" + shared.name();
    Program first("finish", 2, 2, 0, store), second("finish", 2, 2, 1, store);
    EXPECT_EQ(first.wait(), 0) << first.err;
    EXPECT_EQ(second.wait(), 0) << second.err;
    EXPECT_EQ(sorted_lines(first.out), (std::vector<std::string>{"[0.1] sum 6", "sum 6"}));
    EXPECT_EQ(sorted_lines(second.out), (std::vector<std::string>{"[1.0] sum 6", "[1.1] sum 6"}));
}

TEST(Launcher, a_mistake_that_all_find_is_printed_once_with_status_2) {
    Program program("same mistake", 2, 2);
    EXPECT_EQ(program.wait(), 2);
    EXPECT_EQ(program.err, "error: T is too large: make it smaller\n");
}

TEST(Launcher, a_mistake_that_one_finds_names_it_and_ends_all) {
    Program program("one mistake", 2, 2);
    EXPECT_EQ(program.wait(), 2);
    EXPECT_EQ(program.err, "error: worker 1 rank 0: no such shard: look\n");
}

TEST(Launcher, options_that_differ_are_one_line_with_status_2) {
    Program program("differ", 2, 1);
    EXPECT_EQ(program.wait(), 2);
    EXPECT_EQ(program.err, "error: worker 1 has --overlap 1, worker 0 has 0: give all processes the same\n");
}

TEST(Launcher, a_killed_process_ends_all_and_the_last_line_names_it) {
    Program program("killed", 2, 2);
    EXPECT_EQ(program.wait(10), 128 + SIGKILL);
    const std::string last = "error: worker 1 rank 0 was killed by signal 9 (Killed)\n";
    ASSERT_GE(program.err.size(), last.size());
    EXPECT_EQ(program.err.substr(program.err.size() - last.size()), last) << program.err;
    EXPECT_NE(program.err.find("error: worker 1 rank 0 is gone (its connection was closed)\n"),
              std::string::npos)
        << program.err;
    EXPECT_TRUE(program.leaves_nothing_in_tmp());
}

TEST(Launcher, a_process_that_leaves_with_an_error_ends_all_with_its_status) {
    Program program("exit 3", 2, 1);
    EXPECT_EQ(program.wait(), 3);
    EXPECT_EQ(sorted_lines(program.err).back(), "error: worker 1 rank 0 exited with code 3")
        << program.err;
}

TEST(Launcher, processes_that_do_not_end_by_themselves_are_killed) {
    Program program("stubborn", 2, 2);
    EXPECT_EQ(program.wait(15), 3);
}

TEST(Launcher, signals_are_passed_on_and_no_process_is_left_behind) {
    for (int signal : {SIGINT, SIGTERM, SIGKILL}) {
        Program program("pids", 2, 2);
        const std::vector<pid_t> pids = wait_for_pids(program, 4);
        program.process.send_signal(signal);
        EXPECT_EQ(program.wait(), 128 + signal);
        EXPECT_TRUE(all_are_gone(pids)) << strsignal(signal);
        if (signal != SIGKILL) {
            EXPECT_EQ(program.err, format("error: stopped by signal %d (%s)\n", signal, strsignal(signal)));
            EXPECT_TRUE(program.leaves_nothing_in_tmp());
        }
    }
}

static std::string request_line(int signal) {
    return format("signal %d (%s): the run writes a checkpoint and stops; a second signal ends it at once\n",
                  signal, strsignal(signal));
}

// Waits until `count` processes have said that they were asked to stop.
static void wait_until_asked(const Program& program, int count) {
    const Patience patience(20);
    auto asked = [&] {
        const std::vector<std::string> lines = sorted_lines(program.read("out"));
        return std::count_if(lines.begin(), lines.end(),
                             [](const std::string& line) { return line.find("asked") != std::string::npos; });
    };
    while (asked() < count) {
        if (patience.is_over()) { throw std::runtime_error("nobody is asked to stop"); }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

TEST(Launcher, processes_that_are_asked_to_stop_leave_by_themselves) {
    for (int signal : stop_signals) {
        Program program("stop soon", 2, 2);
        const std::vector<pid_t> pids = wait_for_pids(program, 4);
        program.process.send_signal(signal);
        EXPECT_EQ(program.wait(), stopped_status);
        EXPECT_TRUE(all_are_gone(pids));
        EXPECT_EQ(program.err, request_line(signal) + "stopped by request\n");
        EXPECT_TRUE(program.leaves_nothing_in_tmp());
    }
}

TEST(Launcher, processes_that_are_asked_to_stop_have_time_and_a_repeated_signal_is_the_same) {
    Program program("stop slowly", 2, 1);
    wait_for_pids(program, 2);
    for (int i = 0; i < 2; i++) { program.process.send_signal(SIGTERM); }
    wait_until_asked(program, 1);
    program.process.send_signal(SIGTERM);
    EXPECT_EQ(program.wait(), stopped_status);
    EXPECT_EQ(program.err, request_line(SIGTERM) + "stopped by request\n");
}

TEST(Launcher, a_run_that_is_stopped_elsewhere_has_not_failed_here) {
    Program program("stop soon", 2, 1);
    kill(wait_for_pids(program, 2)[0], SIGUSR1);
    EXPECT_EQ(program.wait(), stopped_status);
    EXPECT_EQ(program.err, "stopped by request\n");
}

TEST(Launcher, one_that_had_finished_when_the_others_were_stopped_has_not_failed) {
    Program program("stop at the end", 2, 1);
    wait_for_pids(program, 2);
    program.process.send_signal(SIGTERM);
    EXPECT_EQ(program.wait(), stopped_status);
    EXPECT_EQ(program.err, request_line(SIGTERM) + "stopped by request\n");
}

TEST(Launcher, the_first_process_that_fails_is_to_blame_whatever_the_others_leave_with) {
    Program program("the second dies worse", 2, 1);
    EXPECT_EQ(program.wait(), 3);
    EXPECT_EQ(program.err, "error: worker 1 rank 0 exited with code 3\n");
}

TEST(Launcher, a_line_that_only_quotes_the_culprits_is_left_out) {
    Program program("quoted", 2, 1);
    EXPECT_EQ(program.wait(), 1);
    EXPECT_EQ(program.err, "error: worker 1 rank 0: the disk is full\n");
}

TEST(Launcher, one_that_fails_while_the_others_stop_is_to_blame) {
    Program program("stop with a failure", 2, 2);
    wait_for_pids(program, 4);
    program.process.send_signal(SIGTERM);
    EXPECT_EQ(program.wait(), 3);
    EXPECT_EQ(program.err, request_line(SIGTERM) + "error: worker 1 rank 0 exited with code 3\n");
}

TEST(Launcher, a_second_signal_ends_processes_that_stop) {
    for (int second : {SIGTERM, SIGUSR1, SIGINT}) {
        Program program("stop never", 2, 1);
        const std::vector<pid_t> pids = wait_for_pids(program, 2);
        program.process.send_signal(SIGTERM);
        wait_until_asked(program, 2);
        if (second != SIGINT) {
            std::this_thread::sleep_for(std::chrono::duration<double>(one_request_seconds + 0.1));
        }
        program.process.send_signal(second);
        EXPECT_EQ(program.wait(), 128 + second);
        EXPECT_TRUE(all_are_gone(pids));
        EXPECT_EQ(program.err, request_line(SIGTERM) +
                                   format("error: stopped by signal %d (%s)\n", second, strsignal(second)));
    }
}

TEST(Launcher, processes_that_were_still_starting_when_they_were_asked_to_stop_just_end) {
    for (int request : {SIGTERM, SIGUSR1, SIGHUP}) {
        Program program("stop-unprepared", 2, 1);
        wait_for_pids(program, 2);
        program.process.send_signal(request);
        EXPECT_EQ(program.wait(), stopped_status);
        EXPECT_EQ(program.err, request_line(request) + "stopped by request\n");
    }
}

TEST(Launcher, ctrl_c_ends_processes_that_could_stop) {
    Program program("stop soon", 2, 1);
    wait_for_pids(program, 2);
    program.process.send_signal(SIGINT);
    EXPECT_EQ(program.wait(), 128 + SIGINT);
    EXPECT_EQ(program.err, "error: stopped by signal 2 (Interrupt)\n");
}

TEST(Launcher, a_signal_that_it_was_started_to_ignore_is_ignored) {
    Program program("pids", 2, 1, -1, "", [] { signal(SIGHUP, SIG_IGN); });  // nohup
    const std::vector<pid_t> pids = wait_for_pids(program, 2);
    program.process.send_signal(SIGHUP);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    kill(pids[0], SIGKILL);
    EXPECT_EQ(program.wait(), 128 + SIGKILL) << program.err;
}

TEST(Launcher, a_signal_ends_it_even_while_its_output_is_not_read) {
    Program program("flood", 1, 2, -1, "", [] {
        int ends[2];
        if (pipe(ends) == 0) { dup2(ends[1], STDOUT_FILENO); }
    });
    const std::vector<pid_t> pids = wait_for_pids(program, 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    program.process.send_signal(SIGINT);
    EXPECT_EQ(program.wait(10), 128 + SIGINT);
    EXPECT_TRUE(all_are_gone(pids));
    EXPECT_NE(program.err.find("error: stopped by signal 2"), std::string::npos) << program.err;
}

// Makes a descriptor one of a file on a full disk.
static void fill(int descriptor) { dup2(open("/dev/full", O_WRONLY), descriptor); }

TEST(Launcher, a_full_disk_loses_lines_and_not_the_run) {
    Program program("where", 2, 1, -1, "", [] { fill(STDOUT_FILENO); });
    EXPECT_EQ(program.wait(), 0) << program.err;
    EXPECT_EQ(sorted_lines(program.err),
              (std::vector<std::string>{"[1.0] a warning", "a warning",
                                        "warning: standard output cannot be written (No space left on "
                                        "device): lines are lost there, and the run continues"}));
    Program other("where", 2, 1, -1, "", [] { fill(STDERR_FILENO); });
    EXPECT_EQ(other.wait(), 0);
    EXPECT_EQ(sorted_lines(other.out).size(), 5u) << other.out;
    EXPECT_NE(other.out.find("warning: standard error cannot be written"), std::string::npos) << other.out;
    Program both("where", 2, 1, -1, "", [] { fill(STDOUT_FILENO), fill(STDERR_FILENO); });
    EXPECT_EQ(both.wait(), 0);
}

TEST(Launcher, a_reader_that_stalls_does_not_hold_up_the_run_for_long) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    Program program("long output", 2, 1, -1, "", [&] {
        dup2(ends[1], STDOUT_FILENO);
        setenv("DILOCO_TEST_PATIENCE", "0.3", 1);
    });
    EXPECT_EQ(program.wait(10), 0) << program.err;
    EXPECT_EQ(program.err,
              "warning: standard output cannot be written (nobody reads it): lines are lost there, and the run "
              "continues\n");
    close(ends[0]);
    close(ends[1]);
}

TEST(Launcher, a_reader_that_has_gone_ends_it) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    close(ends[0]);
    Program program("pids", 2, 1, -1, "", [&] { dup2(ends[1], STDOUT_FILENO); });
    EXPECT_EQ(program.wait(10), 128 + SIGPIPE) << program.err;
    EXPECT_EQ(program.err.find("warning"), std::string::npos) << program.err;
    close(ends[1]);
}

TEST(Launcher, a_password_stands_in_no_argument_of_its_processes) {
    const std::string store = "redis://:secret@127.0.0.1:1";
    Program program("arguments", 2, 1, -1, store);
    EXPECT_EQ(program.wait(), 0) << program.err;
    const std::string line = "program arguments 2 1 -1 redis://127.0.0.1:1 , store " + store;
    EXPECT_EQ(sorted_lines(program.out), (std::vector<std::string>{"[1.0] " + line, line}));
}

TEST(Launcher, a_password_is_hidden_with_tls_and_a_store_without_one_is_left_alone) {
    for (const std::string password : {":secret@", "user:secret@", ""}) {
        const std::string store = "rediss://" + password + "127.0.0.1:1";
        Program program("arguments", 2, 1, -1, store);
        EXPECT_EQ(program.wait(), 0) << program.err;
        const std::string line = "program arguments 2 1 -1 rediss://127.0.0.1:1 , store " + store;
        EXPECT_EQ(sorted_lines(program.out), (std::vector<std::string>{"[1.0] " + line, line}));
    }
}

TEST(Launcher, the_store_may_be_given_by_the_environment) {
    TemporaryFolder shared;
    auto prepare = [&] { setenv("DILOCO_STORE", ("file:" + shared.name()).c_str(), 1); };
    Program first("finish", 2, 2, 0, "", prepare), second("finish", 2, 2, 1, "", prepare);
    EXPECT_EQ(first.wait(), 0) << first.err;
    EXPECT_EQ(second.wait(), 0) << second.err;
    Program other("arguments", 2, 1, 1, "file:" + shared.name() + "/other", prepare);
    EXPECT_EQ(other.wait(), 0) << other.err;
    EXPECT_NE(other.out.find("store file:" + shared.name() + "/other\n"), std::string::npos) << other.out;
}

TEST(Launcher, a_mistake_that_is_found_before_processes_meet_leaves_no_store) {
    TemporaryFolder shared;
    Program program("same mistake", 2, 1, 0, "file:" + shared.name() + "/store");
    EXPECT_EQ(program.wait(), 2);
    EXPECT_TRUE(std::filesystem::is_empty(shared.name()));
}

TEST(Launcher, a_dead_worker_is_named_at_the_other_site) {
    TemporaryFolder shared;
    Program first("pids", 2, 1, 0, "file:" + shared.name()), second("pids", 2, 1, 1, "file:" + shared.name());
    const pid_t victim = wait_for_pids(second, 1)[0];
    wait_for_pids(first, 1);
    std::this_thread::sleep_for(std::chrono::seconds(2));  // until they are connected
    kill(victim, SIGKILL);
    EXPECT_EQ(first.wait(10), 1);
    EXPECT_EQ(first.err, "error: worker 1 rank 0 is gone (its connection was closed)\n");
}

// -----------------------------------------------------------------------------------------------------------
// Elastic workers

// Elastic workers in a mode of run_alone(), or in one that stops.
struct Workers {
    Workers(const std::string& mode, int workers, int ranks, int restarts, int worker = -1,
            const std::string& store = "")
        : go(folder / "go"), program(mode, workers, ranks, worker, store, [=, go = go] {
              setenv("DILOCO_TEST_RESTARTS", std::to_string(restarts).c_str(), 1);
              setenv("DILOCO_TEST_GO", go.c_str(), 1);
          }) {}

    void let_go() { write_bytes(go, ""); }
    int wait() { return program.wait(60); }
    std::vector<std::string> errors() const { return sorted_lines(program.err); }

    // Waits for a line of "out" or "err" with this beginning, and returns it.
    std::string wait_for(const std::string& name, const std::string& beginning) const {
        for (const Patience patience(60); !patience.is_over();) {
            std::istringstream lines(program.read(name));
            for (std::string line; std::getline(lines, line) && !lines.eof();) {
                if (line.rfind(beginning, 0) == 0) { return line; }
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        throw std::runtime_error("'" + beginning + "' does not come: " + program.read(name));
    }

    pid_t pid(const std::string& prefix) const {
        const std::string line = wait_for("out", prefix);
        return atoi(line.c_str() + line.find("pid ") + 4);
    }

    int count(const std::string& name, const std::string& part) const {
        const std::vector<std::string> lines = sorted_lines(program.read(name));
        return int(std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
            return line.find(part) != std::string::npos;
        }));
    }

    TemporaryFolder folder;
    const std::string go;
    Program program;
};

static std::vector<std::string> sorted(std::vector<std::string> lines) {
    std::sort(lines.begin(), lines.end());
    return lines;
}

TEST(ElasticWorkers, one_that_dies_does_not_end_the_others_and_a_line_says_so) {
    Workers run("worker 1 dies", 3, 1, 0);
    run.wait_for("err", "worker 1 was killed by signal 9 (Killed)");
    run.let_go();
    EXPECT_EQ(run.wait(), 0);
    EXPECT_EQ(run.errors(), sorted({"worker 1 was killed by signal 9 (Killed)",
                                    "worker 0 has completed the run", "worker 2 has completed the run"}));
    EXPECT_EQ(run.count("out", "done"), 2);
    EXPECT_TRUE(run.program.leaves_nothing_in_tmp());
}

TEST(ElasticWorkers, one_that_failed_is_started_again_and_knows_it) {
    Workers run("worker 1 dies once", 2, 1, 3);
    run.wait_for("out", "[1.0] start 1, ");
    run.let_go();
    EXPECT_EQ(run.wait(), 0);
    EXPECT_EQ(run.errors(), sorted({"worker 1 was killed by signal 9 (Killed); restart 1 of 3 in 1 s",
                                    "worker 0 has completed the run", "worker 1 has completed the run"}));
    EXPECT_EQ(run.count("out", "[1.0] start 0, "), 1);
    EXPECT_EQ(run.count("out", "[1.0] done"), 1);
}

TEST(ElasticWorkers, one_that_fails_again_and_again_is_given_up_and_the_others_go_on) {
    Workers run("worker 1 dies", 2, 1, 2);
    run.wait_for("err", "worker 1 was killed by signal 9 (Killed); all 2 restarts are used up");
    run.let_go();
    EXPECT_EQ(run.wait(), 0);
    EXPECT_EQ(run.errors(), sorted({"worker 1 was killed by signal 9 (Killed); restart 1 of 2 in 1 s",
                                    "worker 1 was killed by signal 9 (Killed); restart 2 of 2 in 2 s",
                                    "worker 1 was killed by signal 9 (Killed); all 2 restarts are used up",
                                    "worker 0 has completed the run"}));
    for (int start : {0, 1, 2}) { EXPECT_EQ(run.count("out", format("[1.0] start %d, ", start)), 1); }
}

TEST(ElasticWorkers, one_whose_place_another_process_has_taken_is_not_restarted) {
    Workers run("worker 1 dies and is replaced", 2, 1, 3);
    run.wait_for("err", "worker 1 exited with code 76");
    run.let_go();
    EXPECT_EQ(run.wait(), 0);
    EXPECT_EQ(run.errors(), sorted({"worker 1 was killed by signal 9 (Killed); restart 1 of 3 in 1 s",
                                    "error: worker 1 rank 0: another process has started as this worker",
                                    "worker 1 exited with code 76; it is not restarted: another process "
                                    "has taken its place",
                                    "worker 0 has completed the run"}));
}

TEST(ElasticWorkers, a_replaced_worker_is_not_restarted_though_the_rank_that_does_not_know_ends_first) {
    Workers run("worker 1 is replaced and one rank knows", 2, 2, 3);
    run.wait_for("err", "worker 1 rank 0 exited with code 76; it is not restarted");
    run.let_go();
    EXPECT_EQ(run.wait(), 0);
    EXPECT_EQ(run.count("err", "restart 1 of 3"), 0) << run.program.err;
}

TEST(ElasticWorkers, where_all_fail_the_status_is_that_of_the_first) {
    Workers run("all workers fails", 2, 1, 0);
    EXPECT_EQ(run.wait(), 1);
    const std::vector<std::string> lines = run.errors();
    for (const char* line : {"error: the disk is full", "error: worker 1 rank 0: the disk is full",
                             "worker 0 exited with code 1", "worker 1 exited with code 1"}) {
        EXPECT_EQ(std::count(lines.begin(), lines.end(), line), 1) << line << "\n" << run.program.err;
    }
    EXPECT_EQ(run.count("err", "error: no worker has completed the run: worker "), 1) << run.program.err;
    EXPECT_EQ(lines.size(), 5u) << run.program.err;
}

TEST(ElasticWorkers, what_would_be_a_mistake_is_a_failure_after_a_restart) {
    Workers run("all workers fails and finds no folder", 1, 1, 1);
    EXPECT_EQ(run.wait(), 1);
    EXPECT_EQ(run.count("err", "there is no folder: make it"), 1) << run.program.err;
}

TEST(ElasticWorkers, a_mistake_is_not_restarted_and_said_once_where_all_make_it) {
    Workers run("all workers makes a mistake", 3, 1, 3);
    wait_for_pids(run.program, 3);
    run.let_go();
    EXPECT_EQ(run.wait(), 2);
    EXPECT_EQ(run.errors().size(), 1u) << run.program.err;
    EXPECT_EQ(run.count("err", "no such shard: look"), 1);
    EXPECT_EQ(run.count("out", "start 1"), 0);
}

TEST(ElasticWorkers, a_mistake_of_one_is_said_and_is_the_status_though_the_others_complete_the_run) {
    Workers run("worker 1 makes a mistake", 2, 1, 3);
    wait_for_pids(run.program, 2);
    run.let_go();
    EXPECT_EQ(run.wait(), 2);
    EXPECT_EQ(run.errors(),
              sorted({"error: worker 1 rank 0: no such shard: look", "worker 0 has completed the run"}));
}

TEST(ElasticWorkers, a_dead_rank_ends_its_worker_though_the_others_hang_and_no_other_worker) {
    Workers run("worker 1 loses a rank", 2, 2, 0);
    run.wait_for("err", "worker 1 rank 1 was killed by signal 9 (Killed)");
    EXPECT_FALSE(is_running(run.pid("[1.0] start")));
    EXPECT_TRUE(is_running(run.pid("start")) && is_running(run.pid("[0.1] start")));
    run.let_go();
    EXPECT_EQ(run.wait(), 0);
    EXPECT_EQ(run.count("out", "done"), 2);
}

TEST(ElasticWorkers, their_ranks_meet_and_agree_among_themselves) {
    Workers run("all workers meets", 2, 2, 0);
    run.let_go();
    EXPECT_EQ(run.wait(), 0) << run.program.err;
    for (const char* sum : {"[0.1] sum 1", "[1.0] sum 21", "[1.1] sum 21"}) {
        EXPECT_EQ(run.count("out", sum), 1) << run.program.out;
    }
    EXPECT_EQ(run.count("out", "sum 1"), 2);
}

TEST(ElasticWorkers, ranks_that_are_started_again_meet_in_the_store_that_their_worker_had) {
    Workers run("all workers meets again", 2, 2, 1);
    run.let_go();
    EXPECT_EQ(run.wait(), 0) << run.program.err;
    EXPECT_EQ(run.count("err", "worker 1 rank 1 was killed by signal 9 (Killed); restart 1 of 1 in 1 s"), 1)
        << run.program.err;
    EXPECT_EQ(run.count("out", "sum 21"), 2);
    EXPECT_EQ(run.count("out", "[1.0] start 1, "), 1);
    EXPECT_EQ(run.count("out", "[0.1] start 1, "), 0);
}

TEST(ElasticWorkers, a_request_to_the_launcher_stops_all) {
    for (int signal : stop_signals) {
        Workers run("stop soon", 3, 1, 3);
        const std::vector<pid_t> pids = wait_for_pids(run.program, 3);
        run.program.process.send_signal(signal);
        EXPECT_EQ(run.wait(), stopped_status);
        EXPECT_TRUE(all_are_gone(pids));
        std::string request = request_line(signal);
        request.pop_back();
        EXPECT_EQ(run.errors(),
                  sorted({request, "worker 0 has stopped by request", "worker 1 has stopped by request",
                          "worker 2 has stopped by request", "stopped by request"}));
    }
}

TEST(ElasticWorkers, a_request_to_one_of_them_stops_that_one_and_it_is_not_started_again) {
    Workers run("stop soon", 2, 1, 3);
    wait_for_pids(run.program, 2);
    kill(run.pid("[1.0] pid"), SIGUSR1);
    run.wait_for("err", "worker 1 has stopped by request");
    EXPECT_TRUE(is_running(run.pid("pid")));
    kill(run.pid("pid"), SIGTERM);
    EXPECT_EQ(run.wait(), stopped_status);
    EXPECT_EQ(run.errors(), sorted({"worker 1 has stopped by request", "worker 0 has stopped by request",
                                    "stopped by request"}));
}

TEST(ElasticWorkers, one_that_waits_for_its_restart_is_not_started_after_a_request) {
    Workers run("stop or die", 2, 1, 5);
    run.wait_for("err", "worker 1 was killed by signal 9 (Killed); restart 3 of 5 in 4 s");
    run.program.process.send_signal(SIGTERM);
    EXPECT_EQ(run.wait(), stopped_status);
    EXPECT_EQ(run.count("out", "[1.0] pid"), 3);
    EXPECT_EQ(run.count("err", "worker 0 has stopped by request"), 1) << run.program.err;
}

TEST(ElasticWorkers, those_that_are_not_ready_to_stop_end_when_they_are_asked_and_are_no_failure) {
    Workers run("worker 1 waits", 2, 1, 3);
    const std::vector<pid_t> pids = wait_for_pids(run.program, 2);
    run.program.process.send_signal(SIGTERM);
    EXPECT_EQ(run.wait(), stopped_status);
    EXPECT_TRUE(all_are_gone(pids));
    EXPECT_EQ(run.count("err", " has stopped by request"), 2)
        << run.program.err;
}

TEST(ElasticWorkers, ctrl_c_ends_all) {
    Workers run("worker 1 dies once", 2, 2, 3);
    run.wait_for("out", "[1.1] start 1, ");
    const std::vector<pid_t> pids = wait_for_pids(run.program, 6);
    run.program.process.send_signal(SIGINT);
    EXPECT_EQ(run.wait(), 128 + SIGINT);
    EXPECT_TRUE(all_are_gone(pids));
    EXPECT_EQ(run.count("err", "error: stopped by signal 2 (Interrupt)"), 1) << run.program.err;
    EXPECT_TRUE(run.program.leaves_nothing_in_tmp());
}

TEST(ElasticWorkers, one_that_is_started_here_alone_is_started_again_too) {
    TemporaryFolder shared;
    Workers run("worker 1 dies once", 2, 1, 1, 1, "file:" + shared.name());
    run.wait_for("out", "[1.0] start 1, ");
    run.let_go();
    EXPECT_EQ(run.wait(), 0) << run.program.err;
}

TEST(Restarts, come_later_each_time_and_only_so_often) {
    Restarts restarts(7);
    for (double pause : {1, 2, 4, 8, 16, 30, 30}) { EXPECT_EQ(restarts.next(599), pause); }
    EXPECT_EQ(restarts.next(599), 0);
    EXPECT_EQ(Restarts(0).next(1), 0);
}

TEST(Restarts, begin_anew_after_ten_minutes_without_a_failure) {
    Restarts restarts(2);
    EXPECT_EQ(restarts.next(1), 1);
    EXPECT_EQ(restarts.next(601), 1);
    EXPECT_EQ(restarts.next(1), 2);
    EXPECT_EQ(restarts.next(1), 0);
    EXPECT_EQ(restarts.next(601), 1);
}

// -----------------------------------------------------------------------------------------------------------
// Meeting

static Process member(const std::string& folder, int worker, int workers, double timeout = 20) {
    Process process;
    process.worker = worker;
    process.workers = workers;
    process.timeout = timeout;
    process.meeting_point = std::make_shared<FileStore>(folder);
    return process;
}

TEST(Meeting, all_get_the_same_run_id_and_the_next_run_another) {
    TemporaryFolder folder;
    std::vector<std::string> ids;
    for (int run = 0; run < 3; run++) {
        auto processes = start_processes(4, [&](int i) {
            Process process = member(folder.name(), i, 4);
            if (i == run) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }
            process.meet();
            process.leave();
            return process.run_id;
        });
        for (auto& process : processes) { ASSERT_EQ(process.wait(20), 0) << process.report; }
        for (auto& process : processes) { EXPECT_EQ(process.report, processes[0].report); }
        ids.push_back(processes[0].report);
    }
    EXPECT_NE(ids[0], ids[1]);
    EXPECT_NE(ids[1], ids[2]);
}

TEST(Meeting, keys_of_a_run_that_died_while_meeting_do_not_matter) {
    TemporaryFolder folder;
    {
        auto dying = start_processes(2, [&](int i) {
            member(folder.name(), i + 1, 3).meet();
            return std::string();
        });
        FileStore store(folder.name());
        wait_for_value(store, "diloco/join/1", 20);
        wait_for_value(store, "diloco/join/2", 20);
    }
    auto processes = start_processes(3, [&](int i) {
        Process process = member(folder.name(), i, 3);
        if (i == 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
        }  // process 0 meets the dead one's key first
        process.meet();
        process.leave();
        return process.run_id;
    });
    for (auto& process : processes) { ASSERT_EQ(process.wait(20), 0) << process.report; }
    for (auto& process : processes) { EXPECT_EQ(process.report, processes[0].report); }
}

TEST(Meeting, two_processes_that_claim_one_place_both_leave_and_so_do_the_others) {
    for (int claimed : {0, 1}) {
        TemporaryFolder folder;
        auto processes = start_processes(3, [&](int i) -> std::string {
            // Process 0 comes last, and worker 2 never: nobody can start.
            const int worker = i < 2 ? claimed : 1 - claimed;
            if (worker == 0) { std::this_thread::sleep_for(std::chrono::milliseconds(500)); }
            try {
                member(folder.name(), worker, 3).meet();
            } catch (const UserError& error) { return error.what(); }
            return "accepted";
        });
        for (auto& process : processes) {
            EXPECT_EQ(process.wait(10), 0);
            EXPECT_EQ(process.report.rfind("two processes claim worker " + std::to_string(claimed) +
                                               " rank 0: start each worker once",
                                           0),
                      0u)
                << process.report;
        }
    }
}

// Two processes that meet without trouble, process 0 some time before the other.
static void expect_a_run(const std::string& folder) {
    auto processes = start_processes(2, [&](int i) {
        if (i == 1) { std::this_thread::sleep_for(std::chrono::milliseconds(300)); }
        Process process = member(folder, i, 2);
        process.meet();
        process.leave();
        return std::string();
    });
    for (auto& process : processes) { EXPECT_EQ(process.wait(10), 0) << process.report; }
}

TEST(Meeting, a_claim_that_was_refused_does_not_stand_in_the_way_of_the_next_run) {
    for (int claimed : {0, 1}) {
        TemporaryFolder folder;
        auto claimers = start_processes(2, [&](int) {
            member(folder.name(), claimed, 2).meet();
            return std::string();
        });
        for (auto& claimer : claimers) {
            EXPECT_EQ(claimer.wait(10), 1);
            EXPECT_EQ(claimer.report.rfind("two processes claim", 0), 0u) << claimer.report;
        }
        expect_a_run(folder.name());
    }
}

TEST(Meeting, one_that_claims_a_place_in_a_running_run_leaves_and_the_run_goes_on) {
    TemporaryFolder folder;
    auto processes = start_processes(2, [&](int i) {
        Process process = member(folder.name(), i, 2);
        process.meet();
        process.meeting_point->set("running/" + std::to_string(i), "");
        wait_for_value(*process.meeting_point, "go on", 20);
        process.leave();
        return std::string();
    });
    FileStore store(folder.name());
    for (int i : {0, 1}) { wait_for_value(store, "running/" + std::to_string(i), 20); }
    for (int claimed : {0, 1}) {
        TestProcess late([&]() -> std::string {
            try {
                member(folder.name(), claimed, 2).meet();
            } catch (const TemporaryFailure& error) { return error.what(); }
            return "accepted";
        });
        EXPECT_EQ(late.wait(20), 0);
        EXPECT_EQ(late.report.rfind("an earlier start of this run still trains: wait until it ends", 0), 0u)
            << late.report;
    }
    store.set("go on", "");
    for (auto& process : processes) { EXPECT_EQ(process.wait(20), 0) << process.report; }
    expect_a_run(folder.name());
}

// A store in front of another one that is away for 20 of 40 calls, or for good.
class FlickeringStore : public PrefixStore {
public:
    FlickeringStore(std::shared_ptr<Store> store, bool comes_back)
        : PrefixStore(std::move(store), ""), comes_back(comes_back) {}
    std::optional<std::string> try_get(const std::string& key) override {
        if (++calls % 40 < 20 || !comes_back) { throw RunError("the store is away"); }
        return PrefixStore::try_get(key);
    }

private:
    const bool comes_back;
    int calls = 0;
};

TEST(Meeting, a_store_may_be_away_for_a_while_but_not_beyond_the_time_limit) {
    for (const bool comes_back : {true, false}) {
        auto memory = std::make_shared<MemoryStore>();
        std::vector<std::future<std::string>> ids;
        for (int i : {0, 1, 2}) {
            ids.push_back(std::async(std::launch::async, [&, i]() -> std::string {
                Meeting meeting(std::make_shared<FlickeringStore>(memory, comes_back), "run",
                                {"a", "b", "c"}, i, comes_back ? 20 : 0.3, false);
                try {
                    return meeting.meet();
                } catch (const TemporaryFailure& error) { return error.what(); }
            }));
        }
        const std::string id = ids[0].get();
        EXPECT_EQ(id == "the store is away", !comes_back) << id;
        for (int i : {1, 2}) { EXPECT_EQ(ids[size_t(i)].get(), id); }
    }
}

TEST(Meeting, processes_missing_after_the_time_limit_are_named) {
    TemporaryFolder folder;
    auto processes = start_processes(2, [&](int i) -> std::string {
        try {
            member(folder.name(), 2 * i, 4, 0.5).meet();
        } catch (const TemporaryFailure& error) { return error.what(); }
        return "accepted";
    });
    for (auto& process : processes) { EXPECT_EQ(process.wait(20), 0); }
    EXPECT_EQ(
        processes[0].report,
        "worker 1 rank 0 and worker 3 rank 0 did not join at file:" + folder.name() +
            " within 0.5 s: start all workers with the same --store, --run-name, --workers and --ranks, or "
            "raise --timeout");
    EXPECT_EQ(processes[1].report.rfind("worker 0 rank 0 did not join at ", 0), 0u);
}

TEST(Meeting, works_over_redis) {
    RedisServer server;
    if (server.port == 0) { GTEST_SKIP() << "redis-server is not installed or does not start"; }
    auto processes = start_processes(3, [&](int i) {
        Process process = member("/", i, 3);
        process.meeting_point = open_store(server.url(), 5);
        process.meet();
        auto outer = make_comm_tcp(process.outer_group());
        Stream stream(Stream::Kind::communicate);
        float one = 1;
        outer->all_reduce(&one, 1, stream);
        stream.synchronize();
        process.leave();
        return std::to_string(one);
    });
    for (auto& process : processes) {
        EXPECT_EQ(process.wait(20), 0);
        EXPECT_EQ(process.report, std::to_string(3.0f));
    }
}

TEST(Fingerprint, all_processes_throw_the_same_error_that_names_every_difference) {
    TemporaryFolder folder;
    auto processes = start_processes(3, [&](int i) -> std::string {
        Process process = member(folder.name(), i, 3);
        process.meet();
        std::vector<std::pair<std::string, std::string>> options = {{"--inner-steps", i == 1 ? "50" : "100"},
                                                                    {"--lr", "0.1"},
                                                                    {"--outer-dtype", i == 2 ? "" : "fp4"}};
        if (i == 1) { options.emplace_back("--new", "1"); }
        try {
            process.check_fingerprint(options);
        } catch (const UserError& error) { return error.what(); }
        return "accepted";
    });
    for (auto& process : processes) {
        EXPECT_EQ(process.wait(20), 0);
        EXPECT_EQ(process.report,
                  "worker 1 has --inner-steps 50, worker 0 has 100; worker 1 has --new 1, which worker 0 does "
                  "not use; worker 2 has --outer-dtype none, worker 0 has fp4: give all processes the same");
    }
}

// Sets the verdict and then the cause right after process 1 has looked for the verdict in vain.
class RacingStore : public MemoryStore {
public:
    std::optional<std::string> try_get(const std::string& key) override {
        const std::optional<std::string> value = MemoryStore::try_get(key);
        if (key == "run/fingerprint/verdict" && !value) {
            set(key, "they differ");
            set("run/cause", "worker 0 rank 0\nhas stopped: they differ");
        }
        return value;
    }
};

TEST(Fingerprint, a_verdict_counts_more_than_the_failure_that_follows_from_it) {
    Process process;
    process.worker = 1;
    process.workers = 2;
    process.store = std::make_shared<PrefixStore>(std::make_shared<RacingStore>(), "run/");
    EXPECT_EQ(user_error([&] { process.check_fingerprint({}); }), "they differ: give all processes the same");
}

TEST(Leaving, removes_all_keys_of_the_run) {
    TemporaryFolder folder;
    auto processes = start_processes(3, [&](int i) {
        Process process = member(folder.name(), i, 3);
        process.meet();
        process.check_fingerprint({{"--lr", "0.1"}});
        auto outer = make_comm_tcp(process.outer_group());
        process.leave();
        return std::string();
    });
    for (auto& process : processes) { EXPECT_EQ(process.wait(20), 0) << process.report; }
    EXPECT_TRUE(std::filesystem::is_empty(folder.name()));
}

TEST(Leaving, waits_for_all_and_reports_one_that_has_failed_instead) {
    TemporaryFolder folder;
    auto processes = start_processes(3, [&](int i) -> std::string {
        Process process = member(folder.name(), i, 3);
        process.meet();
        if (i == 2) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            process.leave_with(RunError("the disk is full"));
        }
        try {
            process.leave();
        } catch (const CommError& error) { return error.what(); }
        return "left";
    });
    for (int i : {0, 1}) {
        EXPECT_EQ(processes[size_t(i)].wait(20), 0);
        EXPECT_EQ(processes[size_t(i)].report, "worker 2 rank 0 has stopped: the disk is full");
    }
    EXPECT_EQ(processes[2].wait(20), 1);
}

// -----------------------------------------------------------------------------------------------------------
// Places

// The place of a process in which a launcher has set these variables and no others.
static Place place_in(const Variables& variables, const Options& options) {
    const LaunchEnvironment environment(variables);
    return find_place(options);
}

struct EnvironmentCase {
    const char* name;
    Variables variables;
    int workers, ranks, worker;
    bool store;
    const char* expected;  // "W.R", "W.R launcher" or the beginning of an error
};

class Environments : public testing::TestWithParam<EnvironmentCase> {};

TEST_P(Environments, say_the_place) {
    const EnvironmentCase& c = GetParam();
    Options options;
    options.workers = c.workers;
    options.ranks = c.ranks;
    options.worker = c.worker;
    if (c.store) { options.store = "file:/tmp/x"; }
    std::string result;
    try {
        const Place place = place_in(c.variables, options);
        result = format("%d.%d", place.worker, place.rank) + (place.starts_others ? " launcher" : "") +
                 (place.job.empty() ? "" : " " + place.job);
    } catch (const UserError& error) { result = std::string(error.what()).substr(0, strlen(c.expected)); }
    EXPECT_EQ(result, c.expected);
}

static Variables torchrun(const char* rank, const char* size) {
    return {{"RANK", rank}, {"WORLD_SIZE", size}, {"LOCAL_RANK", "0"}, {"TORCHELASTIC_RUN_ID", "job7"}};
}
static Variables mpirun(const char* rank, const char* size) {
    return {{"OMPI_COMM_WORLD_RANK", rank}, {"OMPI_COMM_WORLD_SIZE", size}, {"PMIX_NAMESPACE", "prterun-x"}};
}
static Variables srun(const char* rank, const char* size) {
    return {{"SLURM_PROCID", rank}, {"SLURM_NTASKS", size}, {"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "3"}};
}

// Adds the variables of one of the two tasks of a SLURM step that starts the real processes.
static Variables in_a_slurm_job(Variables variables) {
    for (const auto& variable : srun("0", "2")) { variables.push_back(variable); }
    variables.emplace_back("SLURM_LOCALID", "0");
    return variables;
}

INSTANTIATE_TEST_SUITE_P(
    All, Environments,
    testing::Values(
        EnvironmentCase{"alone", {}, 1, 1, -1, false, "0.0"},
        EnvironmentCase{"nothing_given", {}, 2, 3, -1, false, "0.0 launcher"},
        EnvironmentCase{"nothing_but_a_store", {}, 2, 1, -1, true, "0.0 launcher"},
        EnvironmentCase{"a_worker_of_one_rank", {}, 2, 1, 1, true, "1.0"},
        EnvironmentCase{"a_worker_of_two_ranks", {}, 2, 2, 1, true, "1.0 launcher"},
        EnvironmentCase{"a_worker_without_a_store",
                        {},
                        2,
                        1,
                        1,
                        false,
                        "--worker needs a place to meet the other workers: give --store"},
        EnvironmentCase{
            "a_store_from_the_environment", {{"DILOCO_STORE", "file:/tmp/x"}}, 2, 1, 1, false, "1.0"},
        EnvironmentCase{"the_only_worker", {}, 1, 2, 0, false, "0.0 launcher"},
        EnvironmentCase{"a_worker_beyond_the_last",
                        {},
                        2,
                        1,
                        2,
                        true,
                        "--worker 2 is out of range for 2 workers: give 0 to 1"},
        EnvironmentCase{"no_workers", {}, 0, 1, -1, true, "--workers and --ranks must be at least 1"},
        EnvironmentCase{"a_child",
                        {{"DILOCO_WORKER", "1"},
                         {"DILOCO_RANK", "2"},
                         {"RANK", "0"},
                         {"WORLD_SIZE", "1"},
                         {"LOCAL_RANK", "0"}},
                        2,
                        3,
                        -1,
                        false,
                        "1.2"},
        EnvironmentCase{"torchrun_first", torchrun("0", "6"), 2, 3, -1, true, "0.0 job7"},
        EnvironmentCase{"torchrun_last", torchrun("5", "6"), 2, 3, -1, true, "1.2 job7"},
        EnvironmentCase{"torchrun_of_one_worker", torchrun("2", "3"), 2, 3, 1, true, "1.2"},
        EnvironmentCase{"torchrun_without_a_store", torchrun("2", "6"), 2, 3, -1, false,
                        "processes that torchrun starts need a place to meet: give --store"},
        EnvironmentCase{"torchrun_wrong_world", torchrun("2", "4"), 2, 3, -1, true,
                        "torchrun started 4 processes but 2 workers x 3 ranks are 6 processes"},
        EnvironmentCase{"torchrun_wrong_worker", torchrun("2", "6"), 2, 3, 1, true,
                        "torchrun started 6 processes but worker 1 has 3 ranks"},
        EnvironmentCase{"torchrun_of_one", torchrun("0", "1"), 1, 1, -1, false, "0.0 job7"},
        EnvironmentCase{"torchrun_bad_rank", torchrun("x", "2"), 2, 1, -1, true, "RANK is 'x', not a number"},
        EnvironmentCase{"torchrun_rank_beyond", torchrun("2", "2"), 2, 1, -1, true,
                        "torchrun numbers this process 2 of 2"},
        EnvironmentCase{"a_variable_alone_is_no_torchrun", {{"RANK", "1"}}, 2, 1, -1, false, "0.0 launcher"},
        EnvironmentCase{"mpirun", mpirun("3", "4"), 2, 2, -1, true, "1.1 prterun-x"},
        EnvironmentCase{"mpirun_wrong_world", mpirun("0", "1"), 2, 2, -1, true,
                        "mpirun started 1 processes but 2 workers x 2 ranks are 4"},
        EnvironmentCase{"mpirun_of_mpich",
                        {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}},
                        2,
                        2,
                        -1,
                        true,
                        "1.1"},
        EnvironmentCase{"another_launcher", {{"FLUX_TASK_RANK", "1"}}, 2, 2, -1, true,
                        "FLUX_TASK_RANK says that a launcher other than torchrun, mpirun or srun"},
        EnvironmentCase{"another_launcher_of_one_process", {{"PALS_RANKID", "0"}}, 2, 2, -1, true,
                        "0.0 launcher"},
        EnvironmentCase{"a_worker_of_another_launcher", {{"PMI_RANK", "1"}}, 2, 2, 1, true, "1.0 launcher"},
        EnvironmentCase{"mpirun_in_a_slurm_job", in_a_slurm_job(mpirun("3", "4")), 2, 2, -1, true,
                        "1.1 prterun-x"},
        EnvironmentCase{"torchrun_in_a_slurm_job", in_a_slurm_job(torchrun("3", "4")), 2, 2, -1, true,
                        "1.1 job7"},
        EnvironmentCase{"srun", srun("3", "4"), 2, 2, -1, true, "1.1 12.3"},
        EnvironmentCase{"srun_wrong_world", srun("3", "5"), 2, 2, -1, true, "srun started 5 processes but"},
        EnvironmentCase{"srun_step_of_a_larger_job",
                        {{"SLURM_PROCID", "1"},
                         {"SLURM_NTASKS", "8"},
                         {"SLURM_STEP_NUM_TASKS", "2"},
                         {"SLURM_JOB_ID", "12"},
                         {"SLURM_STEP_ID", "3"}},
                        2,
                        1,
                        -1,
                        true,
                        "1.0 12.3"},
        EnvironmentCase{"an_interactive_shell_in_slurm", srun("0", "1"), 2, 2, -1, false, "0.0 launcher"},
        EnvironmentCase{"a_batch_script_in_slurm",
                        {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "12"}},
                        2,
                        1,
                        -1,
                        false,
                        "0.0 launcher"}),
    [](const auto& info) { return std::string(info.param.name); });

static World flagged(long number, long size) {
    World world;
    world.number = number;
    world.size = size;
    world.local_rank = int(number % 8);
    return world;
}

TEST(FlaggedWorld, numbers_processes_as_an_environment_does) {
    Options options;
    options.workers = options.ranks = 2;
    options.store = "file:/tmp/x";
    options.world = flagged(3, 4);
    const Place place = place_in({}, options);
    EXPECT_EQ(place.worker, 1);
    EXPECT_EQ(place.rank, 1);
    EXPECT_EQ(place.local_rank, 3);
    EXPECT_FALSE(place.starts_others);
}

TEST(FlaggedWorld, needs_a_store_and_as_many_processes_as_the_run_has) {
    Options options;
    options.ranks = 4;
    options.world = flagged(3, 4);
    EXPECT_TRUE(contains(user_error([&] { place_in({}, options); }),
                         "processes that -pn and -pr number need a place to meet: give --store"));
    options.world = flagged(3, 8);
    EXPECT_TRUE(contains(user_error([&] { place_in({}, options); }),
                         "-pn says 8 processes but 1 workers x 4 ranks are 4 processes"));
}

// -----------------------------------------------------------------------------------------------------------
// Meeting in a job's folder

static Options ranks(int count) {
    Options options;
    options.ranks = count;
    return options;
}

// Where processes with these variables meet, in $TMPDIR.
static std::string folder_in(const Variables& variables, const Options& options) {
    return place_in(variables, options).folder;
}

static Variables joined(Variables variables, const Variables& more) {
    variables.insert(variables.end(), more.begin(), more.end());
    return variables;
}

TEST(JobFolder, is_of_the_job_where_all_its_processes_are_on_this_machine) {
    const Variables mpi = joined(mpirun("1", "4"), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
    const Variables slurm = joined(srun("1", "4"), {{"SLURM_NNODES", "1"}});
    const Variables step = joined(srun("1", "4"), {{"SLURM_NNODES", "2"}, {"SLURM_STEP_NUM_NODES", "1"}});
    const Variables torch = joined(torchrun("1", "4"), {{"LOCAL_WORLD_SIZE", "4"}, {"MASTER_PORT", "1"}});
    std::set<std::string> folders;
    for (const Variables& variables : {mpi, slurm, torch}) {
        const std::string folder = folder_in(variables, ranks(4));
        EXPECT_TRUE(contains(folder, "/diloco-" + std::to_string(geteuid()) + "-"));
        EXPECT_FALSE(std::filesystem::exists(folder)) << "made only when it is used";
        folders.insert(folder);
    }
    EXPECT_EQ(folder_in(step, ranks(4)), folder_in(slurm, ranks(4)));
    const Variables other = joined(torchrun("1", "4"), {{"LOCAL_WORLD_SIZE", "4"}, {"MASTER_PORT", "2"}});
    folders.insert(folder_in(other, ranks(4)));
    EXPECT_EQ(folders.size(), 4u) << "one for each job";
}

TEST(JobFolder, is_none_where_a_store_is_given_or_none_is_needed) {
    const Variables mpi = joined(mpirun("1", "4"), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
    Options options = ranks(4);
    options.store = "file:/tmp/x";
    EXPECT_EQ(folder_in(mpi, options), "");
    EXPECT_EQ(folder_in(joined(mpi, {{"DILOCO_STORE", "file:/tmp/x"}}), ranks(4)), "");
    const Variables alone = joined(mpirun("0", "1"), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
    EXPECT_EQ(folder_in(alone, ranks(1)), "");
}

TEST(JobFolder, does_not_replace_a_store_for_several_machines_nameless_jobs_and_workers_elsewhere) {
    const Variables mpi = joined(mpirun("1", "4"), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
    Options elsewhere = ranks(4);
    elsewhere.workers = 2;
    elsewhere.worker = 0;
    const Variables mpich = {
        {"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
    using Case = std::pair<Variables, Options>;
    for (const Case& c : {Case{joined(mpirun("1", "4"), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}), ranks(4)},
                          Case{joined(srun("1", "4"), {{"SLURM_NNODES", "2"}}), ranks(4)},
                          Case{mpirun("1", "4"), ranks(4)}, Case{mpich, ranks(4)}, Case{mpi, elsewhere}}) {
        EXPECT_TRUE(contains(user_error([&] { folder_in(c.first, c.second); }),
                             "need a place to meet: give --store"));
    }
}

TEST(JobStore, is_private_and_goes_with_its_last_process) {
    TemporaryFolder folder;
    const std::string path = folder / "job";
    std::shared_ptr<Store> first = open_job_store(path), second = open_job_store(path);
    first->set("key", "value");
    EXPECT_EQ(second->try_get("key").value_or(""), "value");
    struct stat info;
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u);
    second.reset();
    EXPECT_EQ(first->try_get("key").value_or(""), "value");
    first->remove("key");
    first.reset();
    EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(JobStore, that_is_not_used_leaves_nothing) {
    TemporaryFolder folder;
    {
        Process process;
        process.job_folder = folder / "job";
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.name()));
}

TEST(JobStore, does_not_use_what_others_may_write_to) {
    TemporaryFolder folder;
    std::filesystem::create_directory(folder / "open");
    std::filesystem::permissions(folder / "open", std::filesystem::perms(0770));
    std::filesystem::create_directory(folder / "mine");
    std::filesystem::permissions(folder / "mine", std::filesystem::perms(0700));
    std::filesystem::create_directory_symlink(folder / "mine", folder / "link");
    write_bytes(folder / "file", "");
    std::vector<std::string> names = {"open", "link", "file"};
    if (geteuid() == 0) {  // only root can give a file to another user
        std::filesystem::create_directory(folder / "theirs");
        std::filesystem::permissions(folder / "theirs", std::filesystem::perms(0700));
        ASSERT_EQ(chown((folder / "theirs").c_str(), 12345, 12345), 0);
        names.push_back("theirs");
    }
    for (const std::string& name : names) {
        EXPECT_TRUE(contains(user_error([&] { open_job_store(folder / name); }),
                             "is not yours alone: remove it"))
            << name;
    }
    EXPECT_TRUE(contains(user_error([&] { open_job_store(folder / "no/where"); }), "set TMPDIR"));
}

// -----------------------------------------------------------------------------------------------------------
// Places of elastic workers

static Options elastic(int workers, int worker, bool has_store, int restarts = 0) {
    Options options;
    options.workers = workers;
    options.worker = worker;
    if (has_store) { options.store = "file:/tmp/x"; }
    options.diloco.transport = "store";
    options.elastic.restarts = restarts;
    return options;
}

TEST(ElasticPlaces, one_that_is_alone_here_has_a_launcher_where_it_needs_a_store_or_restarts) {
    EXPECT_FALSE(place_in({}, elastic(2, 1, true)).starts_others);
    EXPECT_TRUE(place_in({}, elastic(2, 1, true, 3)).starts_others);
    EXPECT_TRUE(place_in({}, elastic(1, -1, false)).starts_others);
    EXPECT_TRUE(contains(user_error([] { place_in({}, elastic(2, 1, false)); }),
                         "--worker needs a place to meet the other workers: give --store"));
}

TEST(ElasticPlaces, processes_of_other_launchers_need_a_store_and_have_no_restarts) {
    const Variables mpi = joined(mpirun("1", "2"), {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
    const Place place = place_in(mpi, elastic(2, -1, true));
    EXPECT_EQ(place.worker, 1);
    EXPECT_EQ(place.job, "") << "the log goes on when the job comes again";
    EXPECT_TRUE(contains(user_error([&] { place_in(mpi, elastic(2, -1, false)); }),
                         "processes that mpirun starts need a place to meet: give --store"));
    EXPECT_TRUE(contains(user_error([&] { place_in(mpi, elastic(2, -1, true, 1)); }),
                         "--restart is for processes that this program starts: leave it out"));
}

// -----------------------------------------------------------------------------------------------------------
// Local ranks

static int local_rank_in(const Variables& variables) {
    Options options;
    options.workers = options.ranks = 2;
    options.store = "file:/tmp/x";
    return place_in(variables, options).local_rank;
}

TEST(LocalRank, is_what_the_program_says_that_started_the_processes) {
    Variables job = in_a_slurm_job(mpirun("3", "4"));
    EXPECT_EQ(local_rank_in(job), 0);
    job.emplace_back("OMPI_COMM_WORLD_LOCAL_RANK", "3");
    EXPECT_EQ(local_rank_in(job), 3);
    job.insert(job.end(), {{"DILOCO_WORKER", "0"}, {"DILOCO_RANK", "1"}, {"DILOCO_LOCAL_RANK", "2"}});
    EXPECT_EQ(local_rank_in(job), 2);
    EXPECT_EQ(local_rank_in({{"SLURM_LOCALID", "5"}, {"LOCAL_RANK", "6"}}), 0);
    EXPECT_EQ(
        local_rank_in({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"MPI_LOCALRANKID", "3"}}),
        1);
}

}  // namespace test_launch
