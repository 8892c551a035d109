// What the emulated cuBLASLt (cublaslt.cpp) tells tests.
#pragma once

namespace emulator {

// How often the heuristic was asked so far: it takes tens of microseconds, so a shape's plan is kept.
long heuristics_asked();

}  // namespace emulator
