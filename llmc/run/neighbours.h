// Neighbours: the other processes of a run on this machine, and whether they are alive. Through shared memory
// and NVLink no process hears that its peer has died, and NCCL does not say it either.
#pragma once
#include <signal.h>

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
    // introductions: of all processes of the run, which are alive. Those of other machines are not watched,
    // nor those whose number means another process here, as between containers.
    explicit Neighbours(const std::vector<std::string>& introductions) {
        for (const std::string& text : introductions) {
            const size_t end = text.rfind(' '), begin = text.rfind(' ', end - 1);
            const bool is_here = begin < end && text.substr(0, begin) == machine_name();
            Process one;
            if (is_here) { one = {atoi(text.c_str() + begin + 1), text.substr(end + 1)}; }
            watched.push_back(is_here && birth_of(one.pid) == one.birth ? one : Process());
        }
    }

    // Of a process on this machine: "MACHINE PID BIRTH".
    static std::string introduction(int pid) {
        return machine_name() + format(" %d %s", pid, birth_of(pid).value_or("").c_str());
    }

    // The number among all processes of one that has died; -1: none has.
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

    // When a process began, in the kernel's ticks (proc(5): field 22 of stat). "" once it has ended, even if
    // its parent has not noticed yet. None if nobody can say, as without free file descriptors.
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
