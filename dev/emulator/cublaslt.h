// What the emulated cuBLASLt (cublaslt.cpp) tells tests, and what the emulated NCCL tells it.
#pragma once

namespace emulator {

// How often the heuristic was asked so far: it takes tens of microseconds, so a shape's plan is kept.
long heuristics_asked();

// SMs that collectives may hold for long: the CTAs of the communicators that are open and say how many.
int sms_of_communicators();

}  // namespace emulator
