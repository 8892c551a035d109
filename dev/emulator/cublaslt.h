// What the emulated cuBLASLt (cublaslt.cpp) tells tests, and what the emulated NCCL tells it.
#pragma once

namespace emulator {

// How often the heuristic was asked so far: it takes tens of microseconds, so a shape's plan is kept.
long heuristics_asked();

// SMs that collectives hold now, perhaps for long: the CTAs of communicators that say how many they use.
int sms_of_communicators();

}  // namespace emulator
