// The machine that a process runs on.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

inline std::string host_name() {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    return host;
}

// The host name and the boot's id, which tell machines and containers apart.
inline std::string machine_name() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return host_name() + "/" + boot;
}

// The cores that this process may use, at most the CPU quota of its container (cpu.max "200000 100000": two
// cores; "max 100000": no limit).
inline int usable_cores() {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    double microseconds, period;
    const bool is_limited = bool(std::ifstream("/sys/fs/cgroup/cpu.max") >> microseconds >> period);
    return is_limited ? std::max(1, std::min(count, int(microseconds / period))) : count;
}
