#pragma once
#include <chrono>

// Seconds since some point in the past; never goes back.
inline double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
