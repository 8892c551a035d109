// The emulator's interface to kernels and to launches: settings, the checks of a launch, asynchronous copies,
// and what becomes of an access that faults. Compiled without -fsanitize=thread (see sanitizers.h).
#include "dev/emulator/emulator.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "dev/emulator/device_memory.h"
#include "dev/emulator/machine.h"
#include "dev/emulator/runtime.h"

namespace emulator {

static bool switched(const char* variable, bool otherwise) {
    const char* value = getenv(variable);
    return value ? strcmp(value, "0") != 0 : otherwise;
}

Settings& settings() {
    static Settings current = [] {
        Settings initial;
        if (const char* seed = getenv("EMULATOR_SEED")) { initial.seed = strtoull(seed, nullptr, 10); }
        initial.asynchronous = switched("EMULATOR_ASYNCHRONOUS", initial.asynchronous);
        initial.protect = switched("EMULATOR_PROTECT", initial.protect);
        initial.no_default_stream = switched("EMULATOR_NO_DEFAULT_STREAM", initial.no_default_stream);
        return initial;
    }();
    return current;
}

namespace {

constexpr size_t static_shared_limit = 48 * 1024;

void print_position() {
    const Machine& machine = Machine::of_this_thread();
    if (machine.in_kernel()) { fprintf(stderr, "emulator: %s\n", machine.position().c_str()); }
}

struct sigaction previous_action[NSIG];

// A fault in a kernel ends the launch like any other mistake; elsewhere the previous handler gets it.
void on_fault(int number, siginfo_t* info, void*) {
    Machine& machine = Machine::of_this_thread();
    const void* at = info->si_addr;
    if (!machine.in_kernel()) {
        if (number != SIGFPE) {
            fprintf(stderr, "emulator: invalid access: %s\n", DeviceMemory::instance().explain(at).c_str());
        }
        sigaction(number, &previous_action[number], nullptr);
        return;  // and it happens again
    }
    const std::string what = number == SIGFPE ? "integer division by zero"
                             : machine.is_stack_guard(at)
                                 ? "stack overflow: a thread's variables are larger than the emulator's " +
                                       std::to_string(stack_bytes) + " bytes"
                                 : "invalid access: " + DeviceMemory::instance().explain(at);
    machine.fail_in_signal_handler(what + " (gdb or a build with -fsanitize=address shows the line)");
}

bool handle_faults() {
    if (address_sanitizer || thread_sanitizer) {
        call_at_death(print_position);
        return true;
    }
    for (int number : {SIGSEGV, SIGBUS, SIGFPE}) {
        struct sigaction action {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(number, &action, &previous_action[number]);
    }
    return true;
}

// Once for each thread of the host: the handler needs a stack where a fiber's has overflowed. Sanitizers
// bring their own.
bool make_signal_stack() {
    if (address_sanitizer || thread_sanitizer) { return true; }
    static thread_local char memory[65536];
    stack_t stack{};
    stack.ss_sp = memory;
    stack.ss_size = sizeof(memory);
    return sigaltstack(&stack, nullptr) == 0;
}

// Limits that all devices share: CUDA C++ Programming Guide, "Compute Capabilities".
void check_launch(const Launch& launch) {
    const dim3 grid = launch.grid, block = launch.block;
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    std::string what;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) { what = "an empty grid or block"; }
    if (grid.y > 65535 || grid.z > 65535 || grid.x > 0x7FFFFFFF) {
        what = "more blocks than a grid can have";
    }
    if (threads > 1024 || block.z > 64) { what = "more threads than a block can have"; }
    if (launch.shared_bytes > settings().shared_bytes_per_block) {
        what = "too much shared memory: " + std::to_string(launch.shared_bytes) + " bytes of " +
               std::to_string(settings().shared_bytes_per_block);
    }
    if (!what.empty()) {
        throw Error(text_of(launch.site) + ": launch of kernel " + name_of(launch.kernel) + ": " + what);
    }
}

}  // namespace

// ---- the interface

void catch_faults() {
    static const bool handled = handle_faults();
    if (!handled) { throw Error("no signal handler for accesses that fault"); }
}

static void run(const Launch& launch, const std::function<void()>& body) {
    static thread_local const bool has_signal_stack = make_signal_stack();
    if (!has_signal_stack) { throw Error("no signal stack for kernels that fault"); }
    Machine::of_this_thread().run(launch, body);
    const std::string damage = DeviceMemory::instance().damage();
    if (!damage.empty()) {
        throw Error("kernel " + name_of(launch.kernel) + ", launched at " + text_of(launch.site) + ", " +
                    damage + " (a build with -fsanitize=address shows thread and line)");
    }
}

void launch(const Launch& launch, const std::function<void()>& body) {
    catch_faults();
    if (Machine::of_this_thread().in_kernel()) { fail("a kernel launches a kernel", launch.site); }
    check_launch(launch);
    const StreamRef stream = find_stream(launch.stream, "a launch");
    if (!stream) { throw Error(text_of(launch.site) + ": launch on something that is no stream"); }
    enqueue(stream, "a launch", [launch, body] { run(launch, body); });
}

void fail(const std::string& what, Site site) {
    Machine& machine = Machine::of_this_thread();
    if (!machine.in_kernel()) { throw Error(text_of(site) + ": " + what); }
    machine.fail(what, site);
}

void fail_lane(int lane, const std::string& what) { Machine::of_this_thread().fail_lane(lane, what); }

int lane() { return Machine::of_this_thread().lane(); }

void* shared_variable(const void* key, const char* name, size_t bytes, Site site) {
    SharedMemory& shared = Machine::of_this_thread().shared;
    if (void* there = shared.find(key)) { return there; }
    void* added = shared.add(key, name, bytes, site);
    const size_t in_variables = shared.bytes_of_variables(), all = in_variables + shared.dynamic_bytes();
    if (!added || in_variables > static_shared_limit || all > settings().shared_bytes_per_block) {
        fail("too much shared memory: " + std::to_string(in_variables) + " bytes in variables (at most " +
                 std::to_string(static_shared_limit) + "), " + std::to_string(all) + " in all (at most " +
                 std::to_string(settings().shared_bytes_per_block) + ")",
             site);
    }
    return added;
}

void* dynamic_shared() { return Machine::of_this_thread().shared.dynamic(); }

bool is_shared(const void* p, size_t bytes) { return Machine::of_this_thread().shared.holds(p, bytes); }

int block_barrier(const char* name, bool predicate, Site site) {
    return Machine::of_this_thread().barrier(name, predicate, site);
}

void warp_operation(const char* name, unsigned mask, void* operand, void (*combine)(Operands), Site site,
                    bool orders_memory) {
    Machine::of_this_thread().warp_operation(name, mask, operand, combine, site, orders_memory);
}

void copy_async_16(void* shared, const void* global, bool valid, Site site) {
    check_aligned(shared, 16, site);
    if (!is_shared(shared, 16)) {
        fail("asynchronous copy to an address that is not in shared memory", site);
    }
    if (valid) { check_aligned(global, 16, site); }
    if (valid && is_shared(global, 1)) { fail("asynchronous copy from shared memory", site); }
    note_write(shared, 16);
    Thread& self = Machine::of_this_thread().self();
    OwnAccesses own;
    memset(shared, poison, 16);
    forbid(shared, 16);
    self.copies.push_back({shared, global, valid, self.copy_group});
}

void copy_async_commit() { Machine::of_this_thread().self().copy_group++; }

void copy_async_wait(int groups_in_flight) {
    Thread& self = Machine::of_this_thread().self();
    size_t done = 0;
    for (; done < self.copies.size(); done++) {
        const PendingCopy& copy = self.copies[done];
        if (copy.group >= self.copy_group - groups_in_flight) { break; }
        allow(copy.shared, 16);
        note_write(copy.shared, 16);
        if (copy.valid) { note_read(copy.global, 16); }
        OwnAccesses own;
        if (copy.valid) {
            memcpy(copy.shared, copy.global, 16);
        } else {
            memset(copy.shared, 0, 16);
        }
    }
    OwnAccesses own;
    self.copies.erase(self.copies.begin(), self.copies.begin() + long(done));
}

}  // namespace emulator
