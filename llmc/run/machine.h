#pragma once
#include <unistd.h>

#include <fstream>
#include <string>

// Tells machines apart, containers too: host name and this boot's id.
inline std::string machine_name() {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return std::string(host) + "/" + boot;
}
