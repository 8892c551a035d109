// The emulated device's global memory, between cudaMalloc and cudaFree.
//
// It is 0xFF when new (NaN), no address is used twice, and each allocation ends at a page that nobody may
// touch: what lies beyond it, before its first page or in freed memory faults. The few bytes up to its first
// page and, since starts are aligned to 256 bytes, behind its end are 0xFF and looked at after each launch;
// address sanitizer forbids them.
#pragma once
#include <cstddef>
#include <string>

namespace emulator {

// Whether [p, p + bytes) lies in one allocation.
bool is_device_memory(const void* p, size_t bytes);

// Which allocation was written beside, and where; empty if none was.
std::string damage_of_device_memory();

// What an address that faulted is.
std::string explain_address(const void* p);

}  // namespace emulator
