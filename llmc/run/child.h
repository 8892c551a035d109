// Child: a process of this same program, started by the launcher (launcher.h). It learns its place from the
// environment, and what it prints comes back through pipes.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"

// What all children of a launcher are given.
struct ChildSettings {
    std::string store;  // URL
    char** argv;        // this program's
    int threads;        // of each
    sigset_t mask;      // signals that were blocked when this program started
};

// A process to start, and its state since.
struct Child {
    Child(int worker, int rank, int number) : worker(worker), rank(rank), number(number) {}

    std::string name() const { return format("worker %d rank %d", worker, rank); }
    bool is_first() const { return worker == 0 && rank == 0; }
    std::string prefix() const { return is_first() ? "" : format("[%d.%d] ", worker, rank); }

    // restart: the number of earlier starts
    void start(const ChildSettings& settings, int restart) {
        int pipes[2][2];
        if (pipe2(pipes[0], O_CLOEXEC) != 0 || pipe2(pipes[1], O_CLOEXEC) != 0) {
            throw RunError(format("no pipe for %s (%s)", name().c_str(), strerror(errno)));
        }
        fflush(nullptr);
        const pid_t launcher = getpid();
        pid = fork();
        if (pid == 0) { become(settings, restart, launcher, pipes[0][1], pipes[1][1]); }
        const int error = errno;
        for (auto& [read_end, write_end] : pipes) {
            close(write_end);
            fcntl(read_end, F_SETFL, O_NONBLOCK);
        }
        out.pipe = FileDescriptor(pipes[0][0]);
        err.pipe = FileDescriptor(pipes[1][0]);
        if (pid < 0) { throw RunError(format("cannot start %s (%s)", name().c_str(), strerror(error))); }
    }

    void signal(int signal) const {
        if (pid > 0 && !has_ended) { kill(pid, signal); }
    }

    // Returns whether it has ended since the last look.
    bool reap() {
        int code;
        if (has_ended || waitpid(pid, &code, WNOHANG) != pid) { return false; }
        has_ended = true;
        was_killed = WIFSIGNALED(code);
        status = was_killed ? 128 + WTERMSIG(code) : WEXITSTATUS(code);
        return true;
    }

    struct Output {
        FileDescriptor pipe;  // our end; a process that the child has started may still hold the other
        std::string line;     // since the last newline
    };

    const int worker, rank, number;  // number: on this machine
    pid_t pid = -1;
    bool has_ended = false, was_killed = false;
    int status = 0;  // exit code, or 128 + signal
    Output out, err;
    std::vector<std::string> errors;  // its lines "error: ...", without that word

private:
    // In the new process. Its own process group: a terminal's Ctrl-C reaches it once, through the launcher.
    [[noreturn]] void become(const ChildSettings& settings, int restart, pid_t launcher, int out, int err) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != launcher) { _exit(1); }
        setpgid(0, 0);
        ::signal(SIGPIPE, SIG_DFL);
        sigprocmask(SIG_SETMASK, &settings.mask, nullptr);
        dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
        const bool terminal = isatty(STDOUT_FILENO) && is_first();
        winsize size = {};
        ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
        dup2(out, STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
        auto set = [](const char* name, const std::string& value, bool replace = true) {
            setenv(name, value.c_str(), replace);
        };
        set("DILOCO_WORKER", std::to_string(worker));
        set("DILOCO_RANK", std::to_string(rank));
        set("DILOCO_LOCAL_RANK", std::to_string(number));
        set("DILOCO_RESTART", std::to_string(restart));
        set("DILOCO_STORE", settings.store);
        set("DILOCO_TERMINAL", terminal ? "1" : "0");
        if (size.ws_col > 0) { set("DILOCO_COLUMNS", std::to_string(size.ws_col)); }
        set("OMP_NUM_THREADS", std::to_string(settings.threads), false);  // a user's own number stays
        hide_password(settings);
        execv("/proc/self/exe", settings.argv);
        dprintf(STDERR_FILENO, "error: cannot start %s again (%s)\n", settings.argv[0], strerror(errno));
        _exit(127);
    }

    // Everyone on this machine can read a process's arguments. So the store's password is removed from
    // them: the processes take the store's URL from DILOCO_STORE.
    static void hide_password(const ChildSettings& settings) {
        const std::string& store = settings.store;
        const size_t end = store.rfind('@');
        if (store.rfind("redis", 0) != 0 || end == std::string::npos) { return; }
        const std::string hidden = store.substr(0, store.find("//") + 2) + store.substr(end + 1);
        for (char** argument = settings.argv; *argument; argument++) {
            std::string text = *argument;
            const size_t at = text.find(store);
            if (at == std::string::npos) { continue; }
            *argument = strdup(text.replace(at, store.size(), hidden).c_str());
        }
    }
};
