// Real processes for tests: fork() a function, read what it reports, end it by a signal, wait for it.
#pragma once
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dev/test/files.h"
#include "llmc/run/store.h"

// A process that runs `work`. What work returns, or throws as an exception's text, comes back as its report.
class TestProcess {
public:
    explicit TestProcess(const std::function<std::string()>& work) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) != 0) { throw std::runtime_error("pipe failed"); }
        pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            std::string text;
            int code = 0;
            try {
                text = work();
            } catch (const std::exception& error) {
                text = error.what();
                code = 1;
            }
            const ssize_t written = write(ends[1], text.data(), text.size());
            _exit(written == ssize_t(text.size()) ? code : 99);
        }
        close(ends[1]);
        report_end = ends[0];
    }
    TestProcess(TestProcess&& other) noexcept
        : pid(std::exchange(other.pid, -1)), report_end(std::exchange(other.report_end, -1)) {}
    ~TestProcess() {
        if (pid > 0) {
            kill(pid, SIGKILL);
            waitpid(pid, nullptr, 0);
        }
        if (report_end >= 0) { close(report_end); }
    }

    void send_signal(int signal) { kill(pid, signal); }

    // Waits for the end: exit code, or 128 + the signal; -1 if it still runs after `seconds` (and then kills
    // it).
    int wait(double seconds) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        int status = 0;
        while (waitpid(pid, &status, WNOHANG) == 0) {
            if (std::chrono::steady_clock::now() > end) { return -1; }
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        pid = -1;
        char buffer[4096];
        ssize_t count;
        while ((count = read(report_end, buffer, sizeof buffer)) > 0) {
            report.append(buffer, size_t(count));
        }
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }

    pid_t pid;
    std::string report;

private:
    int report_end;
};

inline std::vector<TestProcess> start_processes(int count, const std::function<std::string(int)>& work) {
    std::vector<TestProcess> processes;
    for (int i = 0; i < count; i++) { processes.emplace_back([&, i] { return work(i); }); }
    return processes;
}

// Waits until the key has a value, at most so long.
inline std::string wait_for_value(Store& store, const std::string& key, double seconds) {
    Patience patience(seconds);
    while (true) {
        if (std::optional<std::string> value = store.try_get(key)) { return *value; }
        if (patience.is_over()) { throw std::runtime_error("no process has set " + key); }
        patience.pause();
    }
}

// Returns when all threads of a child process have stopped.
inline void stop_child(pid_t pid) {
    kill(pid, SIGSTOP);
    waitpid(pid, nullptr, WUNTRACED);
}

// A private redis-server on a free port. port 0: redis-server is not installed, or did not start.
class RedisServer {
public:
    // `options`: more words of redis-server's, PORT for the port; the last one of a kind counts.
    explicit RedisServer(const std::string& password = "", const std::vector<std::string>& options = {})
        : password(password), options(options) {
        for (int attempt = 0; attempt < 3 && port == 0; attempt++) { start(free_port()); }
    }
    RedisServer(const RedisServer&) = delete;
    ~RedisServer() { stop(); }

    void stop() {
        if (pid > 0) {
            kill(pid, SIGKILL);
            waitpid(pid, nullptr, 0);
            pid = -1;
        }
    }

    // It does nothing more, and does not end.
    void pause() { stop_child(pid); }

    void start(int candidate) {
        pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            const int null = open("/dev/null", O_RDWR);
            dup2(null, 1);
            dup2(null, 2);
            std::vector<std::string> words = command(candidate);
            std::vector<char*> pointers;
            for (std::string& word : words) { pointers.push_back(&word[0]); }
            pointers.push_back(nullptr);
            execvp(pointers[0], pointers.data());
            _exit(127);
        }
        for (int i = 0; i < 300; i++) {
            if (waitpid(pid, nullptr, WNOHANG) == pid) {
                pid = -1;
                return;
            }
            if (answers(candidate)) {
                port = candidate;
                return;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        stop();
    }

    std::string url() const {
        return "redis://" + (password.empty() ? "" : ":" + password + "@") +
               "127.0.0.1:" + std::to_string(port);
    }

    static int free_port() {
        const int probe = socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in address = local(0);
        socklen_t length = sizeof address;
        const bool bound = bind(probe, (sockaddr*)&address, length) == 0 &&
                           getsockname(probe, (sockaddr*)&address, &length) == 0;
        close(probe);
        return bound ? ntohs(address.sin_port) : 0;
    }

    int port = 0;

private:
    std::vector<std::string> command(int port) const {
        std::vector<std::string> words = {"redis-server", "--port", "PORT", "--bind", "127.0.0.1"};
        words.insert(words.end(), {"--save", "", "--appendonly", "no", "--dir", folder.name()});
        if (!password.empty()) { words.insert(words.end(), {"--requirepass", password}); }
        words.insert(words.end(), options.begin(), options.end());
        std::replace(words.begin(), words.end(), std::string("PORT"), std::to_string(port));
        return words;
    }

    static sockaddr_in local(int port) {
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_port = htons(uint16_t(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return address;
    }

    static bool answers(int port) {
        const int probe = socket(AF_INET, SOCK_STREAM, 0);
        const sockaddr_in address = local(port);
        const bool connected = connect(probe, (const sockaddr*)&address, sizeof address) == 0;
        close(probe);
        return connected;
    }

    const std::string password;
    const std::vector<std::string> options;
    TemporaryFolder folder;
    pid_t pid = -1;
};
