// Launcher: starts processes of this program on this machine and watches over them until the last has ended.
//   - What they print comes through pipes, line by line, after "[worker.rank] " (process 0's without).
//   - The first that fails ends all others: SIGTERM, and SIGKILL after some seconds. The launcher's last line
//     names it, unless it has given its reason itself; its status is the launcher's. A line "error: ..." is
//     printed once, however many processes say the same.
//   - Independent workers are a unit each: a process that fails ends its worker alone. A line says so, and
//     the worker is started again, a few times; not where it was a user's mistake from the beginning, or
//     asked to stop, or where another process has taken its place: two launchers of one worker would end each
//     other's processes in turn. The status is 0 where one of them has completed the run, unless a mistake
//     has kept another from it.
//   - SIGINT, SIGTERM and SIGHUP are passed on, unless they are ignored (nohup), and end the run; if the
//     launcher is killed, the kernel kills the processes.
//   - Processes that stop gracefully (stop.h) have all the time they need after a first SIGTERM, SIGUSR1 or
//     SIGHUP; where they have only begun to start, all end at once, and that is a stop by request too. Those
//     that leave with stopped_status have not failed, whether the request came here or elsewhere.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/stop.h"
#include "llmc/run/store.h"

// A folder in $TMPDIR or /tmp that is removed with all that is in it.
class TemporaryDirectory {
public:
    TemporaryDirectory() {
        const char* parent = getenv("TMPDIR");
        path = std::string(parent && *parent ? parent : "/tmp") + "/diloco-XXXXXX";
        if (!mkdtemp(&path[0])) {
            throw UserError("no temporary folder " + path + " (" + strerror(errno) +
                            "): set TMPDIR to a folder that can be written");
        }
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    std::string path;
};

// The cores that this process may use; in a container no more than its share of time is worth
// ("200000 100000" in cpu.max: two; "max 100000": no limit).
inline int usable_cores() {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    double microseconds, period;
    const bool is_limited = bool(std::ifstream("/sys/fs/cgroup/cpu.max") >> microseconds >> period);
    return is_limited ? std::max(1, std::min(count, int(microseconds / period))) : count;
}

// A process to start, and what is known of it since.
struct Child {
    Child(int worker, int rank, bool is_first) : worker(worker), rank(rank), is_first(is_first) {}

    std::string name() const { return format("worker %d rank %d", worker, rank); }
    std::string prefix() const { return is_first ? "" : format("[%d.%d] ", worker, rank); }
    bool has_stopped() const { return has_exited && status == stopped_status; }

    struct Output {
        int pipe = -1;     // our end; -1 when closed
        std::string line;  // what has come since the last newline
    };

    int worker, rank;
    bool is_first;  // process 0 of the run
    pid_t pid = -1;
    bool has_ended = false;
    bool has_exited = false;  // has ended, and not by a signal
    int status = 0;           // exit code, or 128 + signal
    Output out, err;
};

// When a worker that fails is started again: up to so many times, after 1, 2, 4 ... 30 seconds. Ten minutes
// without a failure, and the count begins anew.
class Restarts {
public:
    explicit Restarts(int most) : most(most) {}

    // It has failed, so many seconds after its last start. Returns those to wait before the next one; 0:
    // there is none.
    double next(double seconds) {
        if (seconds >= 600) { count = 0; }
        if (count >= most) { return 0; }
        return std::min(double(1 << std::min(count++, 5)), 30.0);
    }

    const int most;
    int count = 0;  // of those since the last long time without a failure
};

// Processes that end together: all of them, or of independent workers those of one.
struct Unit {
    using Clock = std::chrono::steady_clock;
    enum class State { running, waiting, over };

    explicit Unit(int restarts) : restarts(restarts) {}

    bool has_ended() const {
        return std::all_of(children.begin(), children.end(),
                           [](const Child* child) { return child->has_ended; });
    }

    std::vector<Child*> children;
    Restarts restarts;
    State state = State::running;
    const Child* culprit = nullptr;  // the one to blame for its end
    bool stopping = false, was_terminated = false;
    Clock::time_point start_time = Clock::now(), restart_time, term_time, kill_time;
};

class Launcher {
public:
    // `store`: URL; empty: a fresh temporary folder, for as long as the launcher lives.  argv: this program's
    // `stops_gracefully`: asked to stop, the processes write a checkpoint and end by themselves.
    // `independent`: a worker that fails ends alone, and is started again up to `restarts` times.
    // children: in ascending order of their workers
    Launcher(std::vector<Child> children, const std::string& store, char** argv, bool stops_gracefully,
             bool independent = false, int restarts = 0)
        : children(std::move(children)),
          store(store),
          argv(argv),
          stops_gracefully(stops_gracefully),
          independent(independent) {
        for (Child& child : this->children) {
            const bool is_next =
                independent && !units.empty() && units.back().children[0]->worker != child.worker;
            if (units.empty() || is_next) { units.emplace_back(restarts); }
            units.back().children.push_back(&child);
        }
        if (store.empty()) {
            folder = std::make_unique<TemporaryDirectory>();
            this->store = "file:" + folder->path;
        }
    }

    // Returns the exit status of the run, once no process is left.
    int run() {
        take_signals();
        start_all();
        while (!is_over()) {
            wait_for_something();
            for (Child& child : children) { relay(child); }
            look_after_children();
            for (Unit& unit : units) { look_after(unit); }
            if (!mistakes.empty() && Clock::now() >= mistake_time) { print_mistakes(); }
        }
        return report();
    }

private:
    using Clock = Unit::Clock;
    using State = Unit::State;
    static constexpr double grace_seconds = 5;  // between SIGTERM and SIGKILL
    // From the first failure to SIGTERM. The others usually find the same, and may say so; and where one that
    // has lost its peer leaves before the peer is seen to be dead, it is the dead one that counts.
    static constexpr double agreement_seconds = 1;

    struct Error {
        const Child* child;
        std::string text;  // without "error: "
    };
    struct Failure {
        int status;
        std::string what;
    };

    // ---- starting

    // From now on signals wait to be read from a descriptor; SIGPIPE becomes an error of write(). What this
    // process was started to ignore stays ignored, by the processes too.
    void take_signals() {
        sigset_t taken;
        sigemptyset(&taken);
        signal(SIGCHLD, SIG_DFL);
        for (int s : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGUSR1}) {
            struct sigaction action;
            sigaction(s, nullptr, &action);
            const bool is_taken = s != SIGUSR1 || stops_gracefully;
            if (is_taken && action.sa_handler != SIG_IGN) { sigaddset(&taken, s); }
        }
        sigprocmask(SIG_BLOCK, &taken, &mask_before);
        signals = signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK);
        if (signals < 0) { throw RunError(format("signalfd failed (%s)", strerror(errno))); }
        signal(SIGPIPE, SIG_IGN);
    }

    void start_all() {
        try {
            for (Child& child : children) { start(child); }
        } catch (const RunError&) {
            signal_all(SIGKILL);
            throw;
        }
    }

    // restart: how often its worker was started before
    void start(Child& child, int restart = 0) {
        int out[2], err[2];
        if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) {
            throw RunError(format("no pipe for %s (%s)", child.name().c_str(), strerror(errno)));
        }
        fflush(nullptr);
        const pid_t launcher = getpid();
        child.pid = fork();
        if (child.pid == 0) { become(child, restart, launcher, out[1], err[1]); }
        const int error = errno;
        close(out[1]);
        close(err[1]);
        if (child.pid < 0) {
            close(out[0]);
            close(err[0]);
            throw RunError(format("cannot start %s (%s)", child.name().c_str(), strerror(error)));
        }
        child.out.pipe = out[0];
        child.err.pipe = err[0];
        fcntl(child.out.pipe, F_SETFL, O_NONBLOCK);
        fcntl(child.err.pipe, F_SETFL, O_NONBLOCK);
    }

    // In the new process. Its own process group: a terminal's Ctrl-C reaches it once, through the launcher.
    [[noreturn]] void become(const Child& child, int restart, pid_t launcher, int out, int err) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != launcher) { _exit(1); }
        setpgid(0, 0);
        signal(SIGPIPE, SIG_DFL);
        sigprocmask(SIG_SETMASK, &mask_before, nullptr);
        const int null = open("/dev/null", O_RDONLY);
        dup2(null, STDIN_FILENO);
        const bool terminal = isatty(STDOUT_FILENO);
        dup2(out, STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
        setenv("DILOCO_WORKER", std::to_string(child.worker).c_str(), 1);
        setenv("DILOCO_RANK", std::to_string(child.rank).c_str(), 1);
        setenv("DILOCO_LOCAL_RANK", std::to_string(&child - children.data()).c_str(), 1);
        setenv("DILOCO_RESTART", std::to_string(restart).c_str(), 1);
        setenv("DILOCO_STORE", store.c_str(), 1);
        setenv("DILOCO_TERMINAL", terminal && child.is_first ? "1" : "0", 1);
        const bool replace = false;  // the user's own number
        setenv("OMP_NUM_THREADS", std::to_string(threads_of_a_child()).c_str(), replace);
        hide_password();
        execv("/proc/self/exe", argv);
        dprintf(STDERR_FILENO, "error: cannot start %s again (%s)\n", argv[0], strerror(errno));
        _exit(127);
    }

    // The arguments of a process can be read by all on this machine, so the store's password is struck from
    // them: the processes have the store from DILOCO_STORE.
    void hide_password() {
        const size_t end = store.rfind('@');
        if (store.rfind("redis", 0) != 0 || end == std::string::npos) { return; }
        const std::string hidden = store.substr(0, store.find("//") + 2) + store.substr(end + 1);
        for (char** argument = argv; *argument; argument++) {
            std::string text = *argument;
            const size_t at = text.find(store);
            if (at == std::string::npos) { continue; }
            *argument = strdup(text.replace(at, store.size(), hidden).c_str());
        }
    }

    // The cores shared out. Processes are not pinned to them: the scheduler keeps as many busy threads as
    // cores apart by itself, and the communicators' threads run where one is idle.
    int threads_of_a_child() const { return std::max(1, usable_cores() / int(children.size())); }

    // ---- what they print

    void wait_for_something() {
        std::vector<pollfd> polled = {{signals, POLLIN, 0}};
        for (Child& child : children) {
            for (Child::Output* output : {&child.out, &child.err}) {
                if (output->pipe >= 0) { polled.push_back({output->pipe, POLLIN, 0}); }
            }
        }
        poll(polled.data(), polled.size(), has_deadline() ? 100 : -1);
    }

    // Whether time alone makes something happen.
    bool has_deadline() const {
        auto has_one = [](const Unit& unit) {
            return unit.state == State::waiting || (unit.state == State::running && unit.stopping);
        };
        return !mistakes.empty() || std::any_of(units.begin(), units.end(), has_one);
    }

    void relay(Child& child) {
        relay(child, child.out, STDOUT_FILENO);
        relay(child, child.err, STDERR_FILENO);
    }

    // Passes on what is there; whole lines, except process 0's to a terminal, which may redraw a line.
    void relay(Child& child, Child::Output& output, int to) {
        char buffer[65536];
        ssize_t count = -1;
        while (output.pipe >= 0 && (count = read(output.pipe, buffer, sizeof buffer)) > 0) {
            output.line.append(buffer, size_t(count));
            size_t begin = 0, end;
            while ((end = output.line.find('\n', begin)) != std::string::npos) {
                pass_on(child, output.line.substr(begin, end + 1 - begin), to);
                begin = end + 1;
            }
            output.line.erase(0, begin);
            if (child.is_first && to == STDOUT_FILENO && isatty(to)) {
                pass_on(child, output.line, to);
                output.line.clear();
            }
        }
        if (count == 0) {
            close(output.pipe);
            output.pipe = -1;
        }
    }

    // A last line without an end.
    void flush(Child& child) {
        if (!child.out.line.empty()) { pass_on(child, child.out.line + "\n", STDOUT_FILENO); }
        if (!child.err.line.empty()) { pass_on(child, child.err.line + "\n", STDERR_FILENO); }
    }

    // "error: ..." waits for the end, when it is known who else says the same.
    void pass_on(const Child& child, const std::string& text, int to) {
        if (text.empty()) { return; }
        if (to == STDERR_FILENO && text.rfind("error: ", 0) == 0) {
            errors.push_back({&child, text.substr(strlen("error: "))});
            return;
        }
        if (!(child.is_first && to == STDOUT_FILENO)) { make_room(); }
        write_all(to, child.prefix() + text);
        if (child.is_first && to == STDOUT_FILENO) { is_inside_line = text.back() != '\n'; }
    }

    // Removes the line being redrawn; process 0 will draw it again.
    void make_room() {
        if (std::exchange(is_inside_line, false)) { write_all(STDOUT_FILENO, "\r\033[K"); }
    }

    // A reader that has gone (| head) ends the run like a signal. One that stalls (| less) holds it up, but
    // no signal: after one, what the reader does not take is dropped. So is what cannot be written at all (a
    // disk or a quota is full, a terminal is gone): training is worth more.
    void write_all(int to, const std::string& text) {
        size_t written = 0;
        while (written < text.size() && wait_for_reader(to)) {
            // So much a pipe takes at once when it takes anything.
            const size_t part = std::min<size_t>(text.size() - written, PIPE_BUF);
            const ssize_t count = write(to, text.data() + written, part);
            if (count >= 0) {
                written += size_t(count);
            } else if (errno == EPIPE) {
                if (!stopped_by) { stop_by(SIGPIPE); }
                return;
            } else if (errno != EINTR && errno != EAGAIN) {
                warn_of_loss(to, errno);
                return;
            }
        }
    }

    // Once, where it can be said: on the other stream.
    void warn_of_loss(int to, int error) {
        if (std::exchange(has_lost_text, true)) { return; }
        const bool is_stdout = to == STDOUT_FILENO;
        make_room();
        write_all(is_stdout ? STDERR_FILENO : STDOUT_FILENO,
                  format("warning: %s cannot be written (%s): lines are lost there, and the run goes on\n",
                         is_stdout ? "standard output" : "standard error", strerror(error)));
    }

    // False if a signal ends the run and the reader has stalled.
    bool wait_for_reader(int to) {
        bool& has_stalled = to == STDOUT_FILENO ? stdout_has_stalled : stderr_has_stalled;
        while (true) {
            pollfd polled[] = {{to, POLLOUT, 0}, {signals, POLLIN, 0}};
            const int ready = poll(polled, 2, has_stalled ? 0 : has_deadline() ? 100 : -1);
            look_after_children();
            if (polled[0].revents) { return true; }
            has_stalled = stopped_by && ready == 0;
            if (has_stalled) { return false; }
        }
    }

    // ---- their ends

    bool is_over() const {
        return std::all_of(units.begin(), units.end(),
                           [](const Unit& unit) { return unit.state == State::over; });
    }

    void look_after_children() {
        handle_signals();
        for (Unit& unit : units) {
            if (!unit.stopping || Clock::now() <= unit.kill_time) { continue; }
            send(unit, SIGKILL);
            unit.kill_time += std::chrono::hours(1);
        }
    }

    void handle_signals() {
        signalfd_siginfo info;
        while (read(signals, &info, sizeof info) == sizeof info) {
            if (info.ssi_signo != SIGCHLD) { obey(int(info.ssi_signo)); }
        }
        for (Unit& unit : units) { reap(unit); }
    }

    // The first request to stop is the processes' business; a second one, and any other signal, ends the run.
    void obey(int signal) {
        const bool is_request =
            std::find(stop_signals.begin(), stop_signals.end(), signal) != stop_signals.end();
        auto is_ending = [](const Unit& unit) { return unit.stopping || unit.state == State::over; };
        if (!is_request || !stops_gracefully || std::all_of(units.begin(), units.end(), is_ending)) {
            stop_by(signal);
        } else if (!requested_by) {
            requested_by = signal;
            request_time = Clock::now();
            signal_all(signal);
            start_nothing_more();
            make_room();
            write_all(STDERR_FILENO, format("signal %d (%s): the run writes a checkpoint and stops; a second "
                                            "signal ends it at once\n",
                                            signal, strsignal(signal)));
        } else if (Clock::now() - request_time > to_duration(one_request_seconds)) {
            stop_by(signal);
        }
    }

    // Passes a signal on; the second time there is no more waiting.
    void stop_by(int signal) {
        for (Unit& unit : units) {
            if (stopped_by) { unit.kill_time = Clock::now(); }
            stop_within(unit, grace_seconds);
        }
        stopped_by = signal;
        signal_all(signal == SIGPIPE ? SIGTERM : signal);
        start_nothing_more();
    }

    void start_nothing_more() {
        for (Unit& unit : units) {
            if (unit.state == State::waiting) { give_up(unit, end_in_words(unit)); }
        }
    }

    void reap(Unit& unit) {
        for (Child* child : unit.children) {
            int status;
            if (child->has_ended || waitpid(child->pid, &status, WNOHANG) != child->pid) { continue; }
            child->has_ended = true;
            child->has_exited = WIFEXITED(status);
            child->status = child->has_exited ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            const bool has_failed = child->status != 0 && !child->has_stopped();
            if (!has_failed || stopped_by || unit.was_terminated) { continue; }
            if (requested_by && !child->has_exited && child->status == 128 + requested_by && !independent) {
                had_not_begun = true;  // it was still starting: there is nothing to write
                stop_by(requested_by);
            } else {
                blame(unit, *child);
            }
        }
        if (unit.culprit && !unit.was_terminated && Clock::now() >= unit.term_time) {
            unit.was_terminated = true;
            send(unit, SIGTERM);
        }
    }

    // The first to fail is to blame, unless another turns out to be the cause before all are ended: those
    // that lose a peer leave with status 1, and may be seen to end before it.
    static void blame(Unit& unit, const Child& child) {
        auto weight = [](const Child& c) { return c.status > 128 ? 3 : c.status != 1 ? 2 : 1; };
        if (!unit.culprit) {
            unit.term_time = Clock::now() + to_duration(agreement_seconds);
            stop_within(unit, agreement_seconds + grace_seconds);
        }
        if (!unit.culprit || weight(child) > weight(*unit.culprit)) { unit.culprit = &child; }
    }

    static Clock::duration to_duration(double seconds) {
        return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }

    static void stop_within(Unit& unit, double seconds) {
        if (!unit.stopping) { unit.kill_time = Clock::now() + to_duration(seconds); }
        unit.stopping = true;
    }

    static void send(const Unit& unit, int signal) {
        for (const Child* child : unit.children) {
            if (child->pid > 0 && !child->has_ended) { kill(child->pid, signal); }
        }
    }

    void signal_all(int signal) const {
        for (const Unit& unit : units) { send(unit, signal); }
    }

    // Nothing that may have to wait for a reader is done while it looks after children; here it is.
    void look_after(Unit& unit) {
        if (unit.state == State::waiting && Clock::now() >= unit.restart_time) { restart(unit); }
        if (unit.state != State::running || !unit.has_ended()) { return; }
        unit.state = State::over;
        for (Child* child : unit.children) {
            relay(*child);
            flush(*child);
        }
        if (independent && !stopped_by) { settle(unit); }
    }

    // ---- independent workers

    // What its end means, once all processes of a worker have ended.
    void settle(Unit& unit) {
        std::vector<Error> own = take_errors(unit);
        const Child* culprit = unit.culprit;
        // One that had no mistake when it was started first has lost what it needs: the store may come back.
        if (culprit && culprit->status == 2 && unit.restarts.count == 0) {
            hold_mistake(unit, own);
            return;
        }
        print_errors(std::move(own), culprit);
        if (culprit && !was_asked_to_stop(*culprit)) {
            fail(unit);
            return;
        }
        const bool is_complete = std::all_of(unit.children.begin(), unit.children.end(),
                                             [](const Child* child) { return child->status == 0; });
        any_is_complete |= is_complete;
        any_has_stopped |= !is_complete;
        say(culprit       ? end_in_words(unit) + ", a request to stop"
            : is_complete ? name(unit) + " has completed the run"
                          : name(unit) + " has stopped by request");
    }

    // By who sent it a signal that means just that, before it was ready to take it.
    static bool was_asked_to_stop(const Child& child) {
        auto is_cause = [&](int signal) { return child.status == 128 + signal; };
        return !child.has_exited && std::any_of(stop_signals.begin(), stop_signals.end(), is_cause);
    }

    // Of a user's mistake only those speak who found it themselves; and only after a moment, in which others
    // may find the same.
    void hold_mistake(const Unit& unit, const std::vector<Error>& own) {
        if (mistakes.empty()) { mistake_time = Clock::now() + to_duration(agreement_seconds); }
        const size_t before = mistakes.size();
        std::copy_if(own.begin(), own.end(), std::back_inserter(mistakes),
                     [](const Error& error) { return error.child->status == 2; });
        if (mistakes.size() == before) { mistakes.push_back({unit.culprit, "it left with exit code 2\n"}); }
        any_is_mistaken = true;
    }

    void print_mistakes() { print_errors(std::exchange(mistakes, {}), nullptr); }

    void fail(Unit& unit) {
        const std::chrono::duration<double> lived = Clock::now() - unit.start_time;
        const bool is_replaced = unit.culprit->status == replaced_status;
        const double pause = requested_by || is_replaced ? 0 : unit.restarts.next(lived.count());
        const int most = unit.restarts.most;
        std::string line = end_in_words(unit);
        if (pause > 0) {
            unit.state = State::waiting;
            unit.restart_time = Clock::now() + to_duration(pause);
            line += format("; restart %d of %d in %g s", unit.restarts.count, most, pause);
        } else {
            give_up(unit, line);
            if (is_replaced) {
                line += "; it is not started again: another process is this worker now";
            } else if (most > 0 && !requested_by) {
                line += format("; none of %d restarts is left", most);
            }
        }
        say(line);
    }

    void give_up(Unit& unit, const std::string& why) {
        unit.state = State::over;
        if (!first_failure) { first_failure = Failure{unit.culprit->status, why}; }
    }

    void restart(Unit& unit) {
        unit.culprit = nullptr;
        unit.stopping = unit.was_terminated = false;
        unit.state = State::running;
        unit.start_time = Clock::now();
        for (Child* child : unit.children) {
            for (const Child::Output* output : {&child->out, &child->err}) {
                if (output->pipe >= 0) { close(output->pipe); }  // whoever else has it outlives the process
            }
            *child = Child(child->worker, child->rank, child->is_first);
        }
        for (Child* child : unit.children) {
            try {
                start(*child, unit.restarts.count);
            } catch (const RunError& error) {
                errors.push_back({child, error.what() + std::string("\n")});
                child->has_ended = child->has_exited = true;
                child->status = 1;
                blame(unit, *child);
            }
        }
    }

    static std::string name(const Unit& unit) { return format("worker %d", unit.children[0]->worker); }

    // "worker 2 was killed by signal 9 (Killed)", of several ranks "worker 2 rank 1 left with exit code 1"
    std::string end_in_words(const Unit& unit) const {
        return (unit.children.size() == 1 ? name(unit) : unit.culprit->name()) + how_it_ended(*unit.culprit);
    }

    void say(const std::string& line) {
        make_room();
        write_all(STDERR_FILENO, line + "\n");
    }

    // ---- the end of the run

    // The processes' own error lines, then the launcher's. Returns the exit status.
    int report() {
        if (std::exchange(is_inside_line, false)) { write_all(STDOUT_FILENO, "\n"); }
        print_mistakes();
        const Child* culprit = independent ? nullptr : units[0].culprit;
        print_errors(errors, culprit);
        if (independent && !stopped_by) { return report_workers(); }
        if (all_have_stopped() || (had_not_begun && stopped_by == requested_by)) {
            write_all(STDERR_FILENO, "stopped by request\n");
            return stopped_status;
        }
        if (stopped_by) {
            if (stopped_by != SIGPIPE) {
                print_error(format("stopped by signal %d (%s)\n", stopped_by, strsignal(stopped_by)));
            }
            return 128 + stopped_by;
        }
        if (!culprit) { return 0; }
        const bool has_spoken =
            std::any_of(errors.begin(), errors.end(), [&](const Error& e) { return e.child == culprit; });
        if (culprit->status > 128 || !has_spoken) {
            print_error(culprit->name() + how_it_ended(*culprit) + "\n");
        }
        return culprit->status;
    }

    // Of independent workers the best that one has come to.
    int report_workers() {
        if (any_is_mistaken) { return 2; }
        if (any_is_complete) { return 0; }
        if (any_has_stopped) {
            write_all(STDERR_FILENO, "stopped by request\n");
            return stopped_status;
        }
        print_error("no worker has completed the run: " + first_failure->what + "\n");
        return first_failure->status;
    }

    // By request, those that had not ended before it.
    bool all_have_stopped() const {
        auto has_stopped = [](const Child& child) { return child.has_stopped(); };
        auto is_well = [](const Child& child) { return child.status == 0 || child.has_stopped(); };
        return std::any_of(children.begin(), children.end(), has_stopped) &&
               std::all_of(children.begin(), children.end(), is_well);
    }

    // " was killed by signal 9 (Killed)"
    static std::string how_it_ended(const Child& child) {
        const int signal = child.status - 128;
        return signal > 0 ? format(" was killed by signal %d (%s)", signal, strsignal(signal))
                          : format(" left with exit code %d", child.status);
    }

    void print_error(const std::string& text) { write_all(STDERR_FILENO, "error: " + text); }

    // Those of its processes.
    std::vector<Error> take_errors(const Unit& unit) {
        auto is_others = [&](const Error& error) { return error.child->worker != unit.children[0]->worker; };
        const auto own = std::stable_partition(errors.begin(), errors.end(), is_others);
        const std::vector<Error> taken(own, errors.end());
        errors.erase(own, errors.end());
        return taken;
    }

    // Each line once, without a name where several say it or process 0 does; the culprit's last. Of a
    // UserError only those who found it themselves.
    void print_errors(std::vector<Error> lines, const Child* culprit) {
        std::stable_partition(lines.begin(), lines.end(),
                              [&](const Error& error) { return error.child != culprit; });
        for (auto error = lines.begin(); error != lines.end(); error++) {
            auto is_same = [&](const Error& other) { return other.text == error->text; };
            const bool is_consequence = culprit && culprit->status == 2 && error->child->status != 2;
            if (is_consequence || std::any_of(error + 1, lines.end(), is_same)) { continue; }
            const bool is_common = std::any_of(lines.begin(), error, is_same);
            const bool needs_name = !is_common && !error->child->is_first;
            make_room();
            print_error((needs_name ? error->child->name() + ": " : "") + error->text);
        }
    }

    std::vector<Child> children;
    std::vector<Unit> units;
    std::string store;
    char** argv;
    const bool stops_gracefully, independent;
    std::unique_ptr<TemporaryDirectory> folder;
    sigset_t mask_before;
    int signals = -1;
    std::vector<Error> errors;
    bool is_inside_line = false;  // the terminal's last line is process 0's and has no end yet
    int requested_by = 0;         // the signal that asked the processes to stop
    int stopped_by = 0;           // the signal that ends the run
    bool had_not_begun = false;   // when it was asked to stop
    bool stdout_has_stalled = false, stderr_has_stalled = false;
    bool has_lost_text = false;  // that could not be written
    Clock::time_point request_time;
    // Of independent workers: what any of them has come to, and what is yet to be said.
    bool any_is_complete = false, any_has_stopped = false, any_is_mistaken = false;
    std::optional<Failure> first_failure;  // of those that are not started again
    std::vector<Error> mistakes;
    Clock::time_point mistake_time;
};
