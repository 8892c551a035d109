// Launcher: starts processes of this program on this machine and watches them until the last has ended.
//   - Their output comes through pipes and is passed on line by line, prefixed with "[worker.rank] " unless
//     it is process 0's. Lines "error: ..." are held back until their run has ended; each is printed once.
//   - The first process that fails ends its run: the others get SIGTERM, and SIGKILL some seconds later. The
//     launcher exits with that process's status, and names the process unless it printed an error itself.
//   - Each elastic worker is a run of its own. If it fails, it is restarted a few times, but not after a
//     request to stop, nor after a user's mistake at its first start, nor if another process has taken its
//     place: two launchers of one worker would end each other's processes in turn. The exit status is 2 if
//     the first worker to fail made a user's mistake, else 0 if one completes.
//   - SIGINT, SIGTERM and SIGHUP are passed on, unless they are ignored (nohup), and end the run. If the
//     launcher is killed, the kernel kills the processes.
//   - Processes that stop gracefully (stop.h) have all the time they need after a first SIGTERM, SIGUSR1 or
//     SIGHUP. Leaving with stopped_status is no failure, wherever the request came from.
#pragma once
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/clock.h"
#include "llmc/error.h"
#include "llmc/run/child.h"
#include "llmc/run/machine.h"
#include "llmc/run/stop.h"

// When a worker that failed is restarted: at most `most` times, after 1, 2, 4 ... 30 seconds. Ten minutes
// without a failure reset the count.
class Restarts {
public:
    explicit Restarts(int most) : most(most) {}

    // For a worker that has failed `lived` seconds after its last start: the seconds to wait before the next
    // start; 0: there is none.
    double next(double lived) {
        if (lived >= 600) { count = 0; }
        if (count >= most) { return 0; }
        return std::min(double(1 << std::min(count++, 5)), 30.0);
    }

    int most;
    int count = 0;
};

// Processes that end together: all of a run in lock-step, or those of one elastic worker.
struct LaunchedRun {
    enum class State { running, waiting, over };  // waiting: for its restart

    explicit LaunchedRun(const Restarts& restarts) : restarts(restarts) {}

    bool has_ended() const {
        return std::all_of(children.begin(), children.end(), [](const Child& c) { return c.has_ended; });
    }
    bool is_ending() const { return state != State::running || kill_time < INFINITY; }
    void end_within(double seconds) {
        if (!is_ending()) { kill_time = now_seconds() + seconds; }
    }
    void signal(int signal) const {
        for (const Child& child : children) { child.signal(signal); }
    }
    std::string name() const { return format("worker %d", children[0].worker); }

    // "worker 2 was killed by signal 9 (Killed)", or with several processes "worker 2 rank 1 was ..."
    std::string failure() const {
        const int signal = culprit->status - 128;
        return (children.size() == 1 ? name() : culprit->name()) +
               (signal > 0 ? format(" was killed by signal %d (%s)", signal, strsignal(signal))
                           : format(" exited with code %d", culprit->status));
    }

    std::vector<Child> children;
    Restarts restarts;
    State state = State::running;
    const Child* culprit = nullptr;  // the first process that failed
    bool was_stopped = false;        // by request
    double start_time = now_seconds(), restart_time = 0;  // times: of now_seconds()
    double term_time = INFINITY, kill_time = INFINITY;    // of signals to its processes
};

class Launcher {
public:
    static inline double reader_patience = 60;  // seconds

    // stops_gracefully: asked to stop, the processes write a checkpoint and end by themselves.
    // store: URL   argv: this program's
    Launcher(std::vector<LaunchedRun> runs, bool is_elastic, const std::string& store, char** argv,
             bool stops_gracefully)
        : runs(std::move(runs)), is_elastic(is_elastic), stops_gracefully(stops_gracefully) {
        size_t processes = 0;
        for (const LaunchedRun& run : this->runs) { processes += run.children.size(); }
        // Processes are not pinned to their share of the cores: the scheduler spreads the busy threads by
        // itself, and the communicators' threads run where a core is idle.
        settings = {store, argv, std::max(1, usable_cores() / int(processes)), {}};
    }

    // Returns the exit status, once no process is left.
    int run() {
        take_signals();
        start_all();
        while (!all_of_runs([](const LaunchedRun& run) { return run.state == State::over; })) {
            wait_for_something();
            for (LaunchedRun& run : runs) {
                for (Child& child : run.children) { relay(child); }
            }
            watch();
            for (LaunchedRun& run : runs) { look_after(run); }
        }
        return report();
    }

private:
    using State = LaunchedRun::State;
    static constexpr double grace_seconds = 5;  // between SIGTERM and SIGKILL
    // From the first failure to SIGTERM: the others usually find it too, and tell the workers elsewhere.
    static constexpr double agreement_seconds = 1;

    template <class Condition>
    bool all_of_runs(Condition condition) const {
        return std::all_of(runs.begin(), runs.end(), condition);
    }

    // From now on signals wait to be read from a descriptor; SIGPIPE becomes an error of write(). Signals
    // that this process was started to ignore stay ignored, by its children too.
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
        sigprocmask(SIG_BLOCK, &taken, &settings.mask);
        signals = signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK);
        if (signals < 0) { throw RunError(format("signalfd failed (%s)", strerror(errno))); }
        signal(SIGPIPE, SIG_IGN);
    }

    void start_all() {
        try {
            for (LaunchedRun& run : runs) {
                for (Child& child : run.children) { child.start(settings, 0); }
            }
        } catch (const RunError&) {
            for (LaunchedRun& run : runs) { run.signal(SIGKILL); }
            throw;
        }
    }

    // ---- what the processes print

    void wait_for_something() {
        std::vector<pollfd> polled = {{signals, POLLIN, 0}};
        for (const LaunchedRun& run : runs) {
            for (const Child& child : run.children) {
                polled.push_back({child.out.pipe, POLLIN, 0});  // -1, when closed, is passed over
                polled.push_back({child.err.pipe, POLLIN, 0});
            }
        }
        poll(polled.data(), polled.size(), poll_milliseconds());
    }

    // -1, for ever, unless something is due at a certain time: a SIGTERM, a SIGKILL or a restart.
    int poll_milliseconds() const {
        auto is_quiet = [](const LaunchedRun& run) { return run.state == State::over || !run.is_ending(); };
        auto has_just_ended = [](const LaunchedRun& run) {
            return run.state == State::running && run.has_ended();  // reaped while a line was being written
        };
        if (std::any_of(runs.begin(), runs.end(), has_just_ended)) { return 0; }
        return all_of_runs(is_quiet) ? -1 : 100;
    }

    void relay(Child& child) {
        relay(child, child.out, STDOUT_FILENO);
        relay(child, child.err, STDERR_FILENO);
    }

    // Passes on whole lines, and to a terminal also parts of process 0's: it may redraw a line.
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
            const bool is_shown = isatty(to) || output.line.size() > 65536;  // the terminal may go away
            if (child.is_first() && to == STDOUT_FILENO && is_shown) {
                pass_on(child, std::exchange(output.line, ""), to);
            }
        }
        if (count == 0) {  // a last line may have no end
            if (!output.line.empty()) { pass_on(child, std::exchange(output.line, "") + "\n", to); }
            output.pipe.close();
        }
    }

    void pass_on(Child& child, const std::string& text, int to) {
        if (text.empty()) { return; }
        if (to == STDERR_FILENO && text.rfind("error: ", 0) == 0) {
            child.errors.push_back(text.substr(strlen("error: "), text.size() - strlen("error: \n")));
            return;
        }
        if (!(child.is_first() && to == STDOUT_FILENO)) { make_room(); }
        write_all(to, child.prefix() + text);
        if (child.is_first() && to == STDOUT_FILENO) { is_inside_line = text.back() != '\n'; }
    }

    // Removes the line being redrawn; process 0 will draw it again.
    void make_room() {
        if (std::exchange(is_inside_line, false)) { write_all(STDOUT_FILENO, "\r\033[K"); }
    }

    void say(const std::string& line) {
        make_room();
        write_all(STDERR_FILENO, line + "\n");
    }

    // A reader that has gone (| head) ends the run like a signal. A reader that stalls (| less) delays the
    // output, but no signal, and training for a minute at most: after that, until the reader takes text again,
    // text is dropped. So is text that cannot be written at all (the disk is full, the terminal is gone).
    void write_all(int to, const std::string& text) {
        size_t written = 0;
        while (written < text.size() && wait_for_reader(to)) {
            // A pipe that takes anything takes this much at once.
            const size_t part = std::min<size_t>(text.size() - written, PIPE_BUF);
            const ssize_t count = write(to, text.data() + written, part);
            if (count >= 0) {
                written += size_t(count);
            } else if (errno == EPIPE) {
                if (!stopped_by) { stop_by(SIGPIPE); }
                return;
            } else if (errno != EINTR && errno != EAGAIN) {
                warn_of_loss(to, strerror(errno));
                return;
            }
        }
    }

    // Once, on the other stream.
    void warn_of_loss(int to, const char* why) {
        if (std::exchange(has_lost_text, true)) { return; }
        const bool is_stdout = to == STDOUT_FILENO;
        make_room();
        write_all(is_stdout ? STDERR_FILENO : STDOUT_FILENO,
                  format("warning: %s cannot be written (%s): lines are lost there, and the run continues\n",
                         is_stdout ? "standard output" : "standard error", why));
    }

    // Returns false if the reader has stalled for too long, or a signal ends the run.
    bool wait_for_reader(int to) {
        const double last = now_seconds() + reader_patience;
        while (true) {
            pollfd polled[] = {{to, POLLOUT, 0}, {signals, POLLIN, 0}};
            const int ready = poll(polled, 2, has_stalled[to] ? 0 : 100);
            watch();
            if (polled[0].revents) {
                has_stalled[to] = false;
                return true;
            }
            if (has_stalled[to]) { return false; }
            has_stalled[to] = now_seconds() > last || (stopped_by && ready == 0);
            if (has_stalled[to] && !stopped_by) { warn_of_loss(to, "nobody reads it"); }
        }
    }

    // ---- signals and ends

    // Prints nothing but the reply to a request to stop, as it also runs while a reader stalls.
    void watch() {
        signalfd_siginfo info;
        while (read(signals, &info, sizeof info) == sizeof info) {
            if (info.ssi_signo != SIGCHLD) { obey(int(info.ssi_signo)); }
        }
        for (LaunchedRun& run : runs) {
            if (run.state != State::running) { continue; }
            reap(run);
            if (now_seconds() >= run.term_time) {
                run.term_time = INFINITY;
                run.signal(SIGTERM);
            }
            if (now_seconds() >= run.kill_time) { run.signal(SIGKILL); }
        }
    }

    // The processes handle a first request to stop; a second one, and any other signal, ends the run.
    void obey(int signal) {
        const bool asks_to_stop = std::count(stop_signals.begin(), stop_signals.end(), signal) > 0;
        const bool is_request = stops_gracefully && asks_to_stop;
        if (!is_request || all_of_runs([](const LaunchedRun& run) { return run.is_ending(); })) {
            stop_by(signal);
        } else if (!requested_by) {
            requested_by = signal;
            one_request_until = now_seconds() + one_request_seconds;
            for (LaunchedRun& run : runs) { run.signal(signal); }
            cancel_restarts();
            say(format("signal %d (%s): the run writes a checkpoint and stops; a second signal ends it at "
                       "once", signal, strsignal(signal)));
        } else if (now_seconds() > one_request_until) {
            stop_by(signal);
        }
    }

    // Passes a signal on that ends all processes. The second one ends them at once.
    void stop_by(int signal) {
        for (LaunchedRun& run : runs) {
            run.end_within(grace_seconds);
            if (stopped_by) { run.kill_time = now_seconds(); }
            run.signal(signal == SIGPIPE ? SIGTERM : signal);
        }
        stopped_by = signal;
        cancel_restarts();
    }

    void cancel_restarts() {
        for (LaunchedRun& run : runs) {
            if (run.state == State::waiting) { give_up(run); }
        }
    }

    void reap(LaunchedRun& run) {
        const Child* failed = nullptr;
        for (Child& child : run.children) {
            if (!child.reap() || child.status == 0) { continue; }
            // The request to stop kills a process that cannot handle it yet: it has nothing to write.
            const bool was_unready = child.was_killed && child.status == 128 + requested_by;
            if (was_unready || (!child.was_killed && child.status == stopped_status)) {
                run.was_stopped = true;
                if (!was_unready) { continue; }
                run.end_within(grace_seconds);
                run.signal(SIGTERM);
            } else if (!run.is_ending() && (!failed || child.status > failed->status)) {
                failed = &child;  // if several failed since the last look: status 1 may mean a lost peer
            }
        }
        if (failed) { blame(run, *failed); }
    }

    static void blame(LaunchedRun& run, const Child& child) {
        run.culprit = &child;
        run.term_time = now_seconds() + agreement_seconds;
        run.end_within(agreement_seconds + grace_seconds);
    }

    // Does the work that may have to wait for a reader of the output.
    void look_after(LaunchedRun& run) {
        if (run.state == State::waiting && now_seconds() >= run.restart_time) { restart(run); }
        if (run.state != State::running || !run.has_ended()) { return; }
        run.state = State::over;
        for (Child& child : run.children) {
            relay(child);
            // The other ranks of a replaced worker stop, too, and may end first.
            if (run.culprit && child.status == replaced_status) { run.culprit = &child; }
        }
        print_errors(run);
        if (stopped_by) { return; }
        if (run.culprit) {
            settle_failure(run);
        } else if (is_elastic) {
            say(run.name() + (run.was_stopped ? " has stopped by request" : " has completed the run"));
        }
    }

    // Each line once, the culprit's last. The others' lines that quote it are left out.
    void print_errors(const LaunchedRun& run) {
        std::map<std::string, int> speakers;
        for (const Child& child : run.children) {
            for (const std::string& text : child.errors) { speakers[text]++; }
        }
        std::set<std::string> told_here;
        std::set<std::string>& told = run.culprit && is_mistake(run) ? told_mistakes : told_here;
        auto quotes_culprit = [&](const std::string& text) {
            return run.culprit && std::any_of(run.culprit->errors.begin(), run.culprit->errors.end(),
                                              [&](const auto& own) { return text.find(own) != text.npos; });
        };
        auto print = [&](const Child& child) {
            for (const std::string& text : child.errors) {
                const bool is_quote = &child != run.culprit && quotes_culprit(text);
                if (is_quote || !told.insert(text).second) { continue; }
                say("error: " + (child.is_first() || speakers[text] > 1 ? "" : child.name() + ": ") + text);
            }
        };
        for (const Child& child : run.children) {
            if (&child != run.culprit) { print(child); }
        }
        if (run.culprit) { print(*run.culprit); }
    }

    // ---- failed runs

    void settle_failure(LaunchedRun& run) {
        const double lived = now_seconds() - run.start_time;
        const int most = run.restarts.most;
        const bool is_replaced = run.culprit->status == replaced_status;
        const double pause = requested_by || is_replaced || is_mistake(run) ? 0 : run.restarts.next(lived);
        std::string line = run.failure();
        if (pause > 0) {
            run.state = State::waiting;
            run.restart_time = now_seconds() + pause;
            line += format("; restart %d of %d in %g s", run.restarts.count, most, pause);
        } else {
            give_up(run);
            if (is_replaced) {
                line += "; it is not restarted: another process has taken its place";
            } else if (most > 0 && !requested_by) {
                line += format("; all %d restarts are used up", most);
            }
        }
        if (is_elastic && !is_mistake(run)) { say(line); }
    }

    // Whether a user's mistake, which was printed, ended the run. Only at the first start: at a later one,
    // status 2 may have another reason, such as a folder that is unavailable for a while.
    static bool is_mistake(const LaunchedRun& run) {
        return run.culprit->status == 2 && !run.culprit->errors.empty() && run.restarts.count == 0;
    }

    void give_up(LaunchedRun& run) {
        run.state = State::over;
        if (!first_failed) { first_failed = &run; }
    }

    void restart(LaunchedRun& run) {
        LaunchedRun next(run.restarts);
        for (const Child& child : run.children) {
            next.children.emplace_back(child.worker, child.rank, child.number);
        }
        run = std::move(next);
        for (Child& child : run.children) {
            try {
                child.start(settings, run.restarts.count);
            } catch (const RunError& error) {
                child.errors.push_back(error.what());
                child.has_ended = true;
                child.status = 1;
                if (!run.culprit) { blame(run, child); }
            }
        }
    }

    // The launcher's own last line. Returns the exit status: the run's, or that of the best worker.
    int report() {
        if (std::exchange(is_inside_line, false)) { write_all(STDOUT_FILENO, "\n"); }
        if (stopped_by) {
            if (stopped_by != SIGPIPE) {
                say(format("error: stopped by signal %d (%s)", stopped_by, strsignal(stopped_by)));
            }
            return 128 + stopped_by;
        }
        const bool is_mistaken = first_failed && is_mistake(*first_failed);
        if (is_elastic && is_mistaken) { return first_failed->culprit->status; }
        if (!all_of_runs([](const LaunchedRun& run) { return run.culprit || run.was_stopped; })) { return 0; }
        if (!all_of_runs([](const LaunchedRun& run) { return run.culprit; })) {
            say("stopped by request");
            return stopped_status;
        }
        const Child& culprit = *first_failed->culprit;
        if (is_elastic) {
            say("error: no worker has completed the run: " + first_failed->failure());
        } else if (culprit.errors.empty() || culprit.was_killed) {
            say("error: " + first_failed->failure());
        }
        return culprit.status == 2 && first_failed->restarts.count > 0 ? 1 : culprit.status;
    }

    std::vector<LaunchedRun> runs;
    const bool is_elastic, stops_gracefully;
    ChildSettings settings;
    int signals = -1;             // the descriptor that they are read from
    bool is_inside_line = false;  // the terminal's last line is process 0's and has no end yet
    int requested_by = 0;         // the signal that asked the processes to stop
    double one_request_until = 0;  // signals until then are the same request
    int stopped_by = 0;           // the signal that ends the run
    bool has_stalled[3] = {}, has_lost_text = false;  // has_stalled: by descriptor
    std::set<std::string> told_mistakes;        // by any worker
    const LaunchedRun* first_failed = nullptr;  // of those that are not restarted
};
