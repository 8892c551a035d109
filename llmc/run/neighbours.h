// Neighbours: the other processes of a run on this machine, and whether they are alive. A process does not
// notice that a peer behind shared memory or NVLink has died, and NCCL does not report it either.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/machine.h"

class Neighbours {
public:
    // introductions: of all processes of the run. Only those in this process's own PID namespace are watched:
    // elsewhere, as in another container, their numbers mean other processes. One may have died by now.
    explicit Neighbours(const std::vector<std::string>& introductions) {
        for (const std::string& text : introductions) {
            const size_t end = text.rfind(' '), begin = text.rfind(' ', end - 1);
            const bool is_here = begin < end && end + 1 < text.size() && text.substr(0, begin) == place();
            watched.push_back(is_here ? Process{atoi(text.c_str() + begin + 1), text.substr(end + 1)} : Process());
        }
    }

    // How a process of this namespace introduces itself: "PLACE PID BIRTH", without BIRTH if it is unknown.
    static std::string introduction(int pid) {
        return place() + format(" %d %s", pid, birth_of(pid).value_or("").c_str());
    }

    // The index, among all processes, of one that has died; -1: none has.
    int dead() const {
        int i = int(watched.size()) - 1;
        while (i >= 0 && (watched[size_t(i)].pid == 0 || !is_dead(watched[size_t(i)]))) { i--; }
        return i;
    }

private:
    struct Process {
        int pid = 0;  // 0: not watched
        std::string birth;
    };

    // The scope within which PIDs are unique: "HOST/BOOT pid:[NUMBER]".
    static std::string place() {
        char name[64] = "";
        return machine_name() + (readlink("/proc/self/ns/pid", name, sizeof name - 1) > 0 ? " " : "") + name;
    }

    // When a process began, in the kernel's ticks (proc(5): field 22 of stat). "" once it has ended, even if
    // its parent has not noticed yet. None if it is unknown, as without free file descriptors.
    static std::optional<std::string> birth_of(int pid) {
        std::string line, state, birth;
        std::ifstream stat(format("/proc/%d/stat", pid));
        if (!std::getline(stat, line)) {
            const bool is_gone = kill(pid, 0) != 0 && errno == ESRCH;
            return is_gone ? std::optional<std::string>("") : std::nullopt;
        }
        std::istringstream words(line.substr(line.rfind(')') + 1));  // before it, a name of any letters
        words >> state;
        for (int i = 4; i <= 22 && state != "Z" && state != "X"; i++) { words >> birth; }
        return birth;
    }

    static bool is_dead(const Process& one) {
        const std::optional<std::string> birth = birth_of(one.pid);
        return birth && *birth != one.birth;
    }

    std::vector<Process> watched;
};
