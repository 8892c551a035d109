// Neighbours: the other processes of a run on this machine, and whether they are alive. Through shared memory
// and NVLink no process hears that its peer has died, and NCCL does not say it either.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/machine.h"

class Neighbours {
public:
    // introductions: of all processes of the run, which are alive. Those of other machines are not watched,
    // nor those whose number means another process here, as between containers.
    explicit Neighbours(std::vector<std::string> introductions) : watched(std::move(introductions)) {
        for (std::string& text : watched) { text = is_alive(text) ? text : ""; }
    }

    // Of a process on this machine: "MACHINE PID BIRTH", the time in the kernel's ticks (proc(5): field 22 of
    // stat). There is none once it has ended, even if its parent has not noticed yet.
    static std::string introduction(int pid) {
        std::string line, state, birth;
        std::ifstream stat(format("/proc/%d/stat", pid));
        std::getline(stat, line);
        std::istringstream words(line.substr(line.rfind(')') + 1));  // before it, a name of any letters
        words >> state;
        for (int i = 4; i <= 22 && state != "Z" && state != "X"; i++) { words >> birth; }
        return machine_name() + format(" %d %s", pid, birth.c_str());
    }

    // The number among all processes of one that has died; -1: none has.
    int dead() const {
        int i = int(watched.size()) - 1;
        while (i >= 0 && (watched[size_t(i)].empty() || is_alive(watched[size_t(i)]))) { i--; }
        return i;
    }

private:
    static bool is_alive(const std::string& text) {
        return text == introduction(atoi(text.c_str() + std::min(text.find(' '), text.size())));
    }

    std::vector<std::string> watched;
};
