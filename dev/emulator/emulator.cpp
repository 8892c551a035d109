// The emulator's scheduler. The threads of a block are fibers, and switch only where they wait for each
// other: in a barrier or a warp operation. In between, one warp runs as far ahead of the others as it can,
// its lanes and the warps in an order drawn from a seed: that shows more missing barriers than a fair order.
// Compiled without -fsanitize=thread (see sanitizers.h).
#include "dev/emulator/emulator.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <boost/context/detail/fcontext.hpp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

#include "dev/emulator/device_memory.h"
#include "dev/emulator/shared_memory.h"
#include "llmc/error.h"

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace emulator {

Settings& settings() {
    static Settings current = [] {
        Settings initial;
        if (const char* seed = getenv("EMULATOR_SEED")) { initial.seed = strtoull(seed, nullptr, 10); }
        return initial;
    }();
    return current;
}

namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constexpr size_t page = 4096;
constexpr size_t stack_bytes = (address_sanitizer || thread_sanitizer ? 128 : 64) * 1024;
constexpr size_t static_shared_limit = 48 * 1024;

std::string text_of(const uint3& v) {
    return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string text_of(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

bool same(Site a, Site b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }

// The name of a kernel, if the program was linked with -rdynamic and the kernel has external linkage.
std::string name_of(const void* kernel) {
    Dl_info info;
    if (dladdr(kernel, &info) == 0 || !info.dli_sname || info.dli_saddr != kernel) { return "(unnamed)"; }
    std::unique_ptr<char, void (*)(void*)> name(
        abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr), free);
    return name ? name.get() : info.dli_sname;
}

// SplitMix64 (Steele, Lea, Flood 2014).
struct Random {
    uint64_t state = 0;
    uint64_t next() {
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return z ^ z >> 31;
    }
    size_t below(size_t n) { return size_t(next() % n); }
    template <class T>
    void shuffle(std::vector<T>& values) {
        for (size_t i = values.size(); i > 1; i--) { std::swap(values[i - 1], values[below(i)]); }
    }
};

struct PendingCopy {
    void* shared;
    const void* global;
    bool valid;
    int group;
};

// A CUDA thread.
struct Thread {
    fcontext_t context = nullptr;
    uint3 index{};
    bool returned = false;
    const char* waits_in = nullptr;  // the barrier or operation; null: can run
    Site site{};                     // of that; of the last one while it runs
    unsigned mask = 0;               // of the warp operation that it waits in; 0: of none
    void* operand = nullptr;
    int copy_group = 0;
    std::vector<PendingCopy> copies;
    void *address_state = nullptr, *fiber = nullptr;  // the sanitizers'

    std::string state() const {
        if (returned) { return "has returned"; }
        if (!waits_in) { return "is running"; }
        std::string text = std::string("waits in ") + waits_in + " at " + text_of(site);
        if (mask != 0) { text += format(" with mask %08x", mask); }
        return text;
    }
};

std::string describe(const Thread& thread) {
    return "thread " + text_of(thread.index) + " " + thread.state();
}

// Stacks for the threads of a block, each with a guard page below, and thread sanitizer's fibers. Making a
// fiber is slow (0.4 ms), so they are kept.
class Stacks {
public:
    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks() {
        forget_fibers();
        unmap();
    }

    void reserve(size_t threads) {
        if (count < threads) {
            unmap();
            mapping = static_cast<char*>(map_memory(threads * (page + stack_bytes)));
            count = threads;
            for (size_t i = 0; i < threads; i++) { mprotect(bottom(i) - page, page, PROT_NONE); }
        }
        while (thread_sanitizer && fibers.size() < threads) { fibers.push_back(create_fiber()); }
        allow(mapping, count * (page + stack_bytes));  // an abandoned thread's frames
    }

    char* bottom(size_t i) const { return mapping + i * (page + stack_bytes) + page; }
    void* fiber(size_t i) const { return thread_sanitizer ? fibers[i] : nullptr; }
    bool is_guard(const void* p) const {
        const size_t offset = size_t(static_cast<const char*>(p) - mapping);
        return p >= mapping && offset < count * (page + stack_bytes) && offset % (page + stack_bytes) < page;
    }

    // Abandoned threads leave their calls behind in thread sanitizer's books.
    void forget_fibers() {
        for (void* fiber : fibers) { destroy_fiber(fiber); }
        fibers.clear();
    }

private:
    void unmap() {
        if (mapping) { munmap(mapping, count * (page + stack_bytes)); }
    }
    char* mapping = nullptr;
    size_t count = 0;
    std::vector<void*> fibers;
};

// Runs blocks, one after another: one for each thread of the host that launches.
class Machine {
public:
    static Machine& of_this_thread() {
        static thread_local Machine machine;
        return machine;
    }

    void run(const Launch& launch, const std::function<void()>& body);
    [[noreturn]] void fail(int thread, const std::string& what, Site site);
    [[noreturn]] void fail(const std::string& what, Site site) { fail(running, what, site); }
    [[noreturn]] void fail_lane(int lane, const std::string& what) {
        const int thread = running / 32 * 32 + lane;
        fail(thread, what, threads[thread].site);
    }
    [[noreturn]] void fail_in_signal_handler(const std::string& what);
    std::string position() const;
    bool in_kernel() const { return running >= 0; }
    bool is_stack_guard(const void* p) const { return stacks[set].is_guard(p); }

    int lane() const { return running % 32; }
    int barrier(const char* name, bool predicate, Site site);
    void warp_operation(const char* name, unsigned mask, void* operand, void (*combine)(Operands), Site site,
                        bool orders_memory);
    Thread& self() { return threads[running]; }
    SharedMemory shared;

private:
    struct Abandoned {};

    static void thread_main(transfer_t from);
    void set_report(int thread, const std::string& what, Site site);
    void start_block(uint64_t number);
    void finish_block();
    void wake(int thread);
    int take_runnable();
    void yield();
    void arrive(const char* name, Site site);
    bool warp_is_complete(int first, unsigned mask);
    void return_from_kernel();
    void leave_for_good();
    void switch_to(int thread);
    void switch_to_host();
    void jump(fcontext_t to);
    void arrived();
    void check_shared_memory(Site site);
    std::string deadlock() const;

    const Launch* current = nullptr;
    const std::function<void()>* body = nullptr;
    std::vector<Thread> threads;
    std::vector<std::vector<int>> runnable;  // by warp
    std::vector<unsigned> waiting;           // by warp: lanes in a warp operation
    std::vector<int> warp_order;             // the first warp with a runnable thread goes on
    int runnable_count = 0, unfinished = 0;
    int at_barrier = 0, true_predicates = 0, result_of_barrier = 0;
    unsigned barrier_number = 0;
    int running = -1;  // the running thread; -1: the host
    int leaving = -1;  // who is being switched from
    bool failed = false;
    std::string report;
    Random random;

    // Thread sanitizer: blocks take sets of fibers in turn, so that two blocks of different sets are
    // unordered and their races on global memory show. It knows 8128 fibers at most.
    static constexpr int sets = thread_sanitizer ? 4 : 1;
    Stacks stacks[sets];
    int set = 0;
    char start_tag = 0, end_tag = 0, barrier_tags[2] = {};

    fcontext_t host_context = nullptr;
    void *host_fiber = nullptr, *host_state = nullptr;
    const void* host_stack = nullptr;
    size_t host_stack_bytes = 0;
};

// ---- switching

// A context is only known after the jump away from it: the side that arrives stores it.
void Machine::jump(fcontext_t to) {
    const transfer_t from = jump_fcontext(to, nullptr);
    (leaving < 0 ? host_context : threads[leaving].context) = from.fctx;
}

void Machine::switch_to(int thread) {
    leaving = running;
    void** state = leaving < 0                 ? &host_state
                   : threads[leaving].returned ? nullptr
                                               : &threads[leaving].address_state;
    leave_stack(state, stacks[set].bottom(thread), stack_bytes);
    running = thread;
    threadIdx = threads[thread].index;
    switch_fiber(threads[thread].fiber);
    jump(threads[thread].context);
}

// Not to come back: the block is done, or its launch has failed and its threads are abandoned. Kernels own
// nothing that would have to be destroyed.
void Machine::switch_to_host() {
    leaving = running;
    running = -1;
    leave_stack(nullptr, host_stack, host_stack_bytes);
    switch_fiber(host_fiber);
    jump(host_context);
}

// First thing after a switch into a thread.
void Machine::arrived() {
    const void* from = nullptr;
    size_t bytes = 0;
    enter_stack(self().address_state, &from, &bytes);
    if (leaving < 0) {
        host_stack = from;
        host_stack_bytes = bytes;
    }
}

void Machine::wake(int thread) {
    threads[thread].waits_in = nullptr;
    threads[thread].mask = 0;
    runnable[thread / 32].push_back(thread);
    runnable_count++;
}

int Machine::take_runnable() {
    const bool adversary = settings().seed != 0;
    if (adversary && random.below(64) == 0) { random.shuffle(warp_order); }
    runnable_count--;
    for (int warp : warp_order) {
        std::vector<int>& candidates = runnable[warp];
        if (candidates.empty()) { continue; }
        if (adversary) { std::swap(candidates[random.below(candidates.size())], candidates.back()); }
        const int next = candidates.back();
        candidates.pop_back();
        return next;
    }
    abort();  // runnable_count promised one
}

// The running thread waits: others go on.
void Machine::yield() {
    if (runnable_count == 0) { fail(deadlock(), self().site); }
    const int next = take_runnable();
    if (next == running) { return; }
    switch_to(next);
    arrived();
}

// ---- reports

std::string Machine::position() const {
    return "in kernel " + name_of(current->kernel) + ", block " + text_of(blockIdx) + ", thread " +
           text_of(threadIdx) + "; launched at " + text_of(current->site);
}

void Machine::set_report(int thread, const std::string& what, Site site) {
    threadIdx = threads[thread].index;
    report = (site.line != 0 ? text_of(site) + ": " : "") + what + "\n  " + position();
    failed = true;
}

// Unwinds the thread to thread_main; the others are abandoned where they wait.
void Machine::fail(int thread, const std::string& what, Site site) {
    set_report(thread, what, site);
    throw Abandoned{};
}

void Machine::fail_in_signal_handler(const std::string& what) {
    set_report(running, what, Site{});
    switch_to_host();
    abort();  // abandoned threads are never resumed
}

std::string Machine::deadlock() const {
    std::string text = "deadlock: the threads of a block wait for each other";
    for (size_t i = 0, end; i < threads.size(); i = end) {
        const std::string state = threads[i].state();
        for (end = i + 1; end < threads.size() && threads[end].state() == state; end++) {}
        text += "\n  thread " + text_of(threads[i].index);
        if (end > i + 1) { text += " to " + text_of(threads[end - 1].index); }
        text += " " + state;
    }
    return text;
}

// Only the running thread can have done it, since it last waited.
void Machine::check_shared_memory(Site site) {
    const std::string damage = shared.damage();
    if (damage.empty()) { return; }
    const Site since = self().site;
    const std::string where =
        since.line == 0 ? "before it first waited" : "after it waited at " + text_of(since);
    fail(damage + ", " + where, site);
}

// ---- meeting points

void Machine::arrive(const char* name, Site site) {
    check_shared_memory(site);
    self().waits_in = name;
    self().site = site;
}

int Machine::barrier(const char* name, bool predicate, Site site) {
    arrive(name, site);
    char* tag = &barrier_tags[barrier_number % 2];  // some are past this barrier while others still are in it
    release(tag);
    true_predicates += predicate;
    if (++at_barrier == int(threads.size())) {
        for (const Thread& other : threads) {
            if (!same(other.site, site)) {
                fail("divergent barrier: " + describe(self()) + ", but " + describe(other), site);
            }
        }
        result_of_barrier = std::exchange(true_predicates, 0);
        at_barrier = 0;
        barrier_number++;
        if (settings().seed != 0) { random.shuffle(warp_order); }
        for (int i = int(threads.size()); i-- > 0;) { wake(i); }
    }
    yield();
    acquire(tag);
    return result_of_barrier;
}

// Whether all lanes of the mask wait in the running thread's operation. Fails if one waits for it elsewhere.
bool Machine::warp_is_complete(int first, unsigned mask) {
    const Thread& own = self();
    bool complete = true;
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) { continue; }
        const Thread& other = threads[first + lane];
        if (other.mask == mask && other.waits_in == own.waits_in && same(other.site, own.site)) { continue; }
        complete = false;
        const bool waits_for_us = other.mask >> (running - first) & 1;
        const bool returned = other.returned;
        if (!waits_for_us && !returned) { continue; }
        const char* mistake = returned || other.mask != mask ? "wrong mask" : "divergent warp operation";
        fail(std::string(mistake) + ": " + describe(own) + ", but " + describe(other), own.site);
    }
    return complete;
}

void Machine::warp_operation(const char* name, unsigned mask, void* operand, void (*combine)(Operands),
                             Site site, bool orders_memory) {
    const int first = running / 32 * 32, lanes = std::min(32, int(threads.size()) - first);
    if (!(mask >> lane() & 1)) { fail("wrong mask: the calling lane is not in it", site); }
    if (lanes < 32) { mask &= (1u << lanes) - 1; }  // full masks are customary in a last, partial warp
    arrive(name, site);
    self().mask = mask;
    self().operand = operand;
    if (orders_memory) { release(&self()); }
    unsigned& in_operation = waiting[running / 32];
    in_operation |= 1u << lane();
    if (warp_is_complete(first, mask)) {
        void* operands[32] = {};
        for (int i = 0; i < lanes; i++) {
            operands[i] = mask >> i & 1 ? threads[first + i].operand : nullptr;
        }
        {
            OwnAccesses own;
            combine(operands);
        }
        in_operation &= ~mask;
        for (int i = lanes; i-- > 0;) {
            if (mask >> i & 1) { wake(first + i); }
        }
    }
    yield();
    for (int i = 0; orders_memory && i < lanes; i++) {
        if (mask >> i & 1) { acquire(&threads[first + i]); }
    }
}

// ---- blocks

void Machine::thread_main(transfer_t from) {
    Machine& machine = of_this_thread();
    (machine.leaving < 0 ? machine.host_context : machine.threads[machine.leaving].context) = from.fctx;
    machine.arrived();
    acquire(&machine.start_tag);
    try {
        (*machine.body)();
        machine.return_from_kernel();
    } catch (const Abandoned&) {}
    release(&machine.end_tag);
    machine.leave_for_good();
}

void Machine::return_from_kernel() {
    copy_async_commit();
    copy_async_wait(0);
    check_shared_memory(Site{});
    const int first = running / 32 * 32;
    for (int lane = 0; waiting[running / 32] != 0 && lane < 32; lane++) {
        if (!(waiting[running / 32] >> lane & 1)) { continue; }
        const Thread& other = threads[first + lane];
        if (other.mask >> (running - first) & 1) {
            self().returned = true;
            fail("wrong mask: " + describe(other) + ", but " + describe(self()), other.site);
        }
    }
    self().returned = true;
    if (--unfinished > 0 && runnable_count == 0) { fail(deadlock(), Site{}); }
}

void Machine::leave_for_good() {
    if (failed || unfinished == 0) { switch_to_host(); }
    switch_to(take_runnable());
}

void Machine::start_block(uint64_t number) {
    const dim3 grid = current->grid, block = current->block;
    const size_t count = size_t(block.x) * block.y * block.z;
    blockIdx = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y),
                unsigned(number / grid.x / grid.y)};
    blockDim = block;
    gridDim = grid;
    random.state = settings().seed * 0xD1B54A32D192ED03u ^ number;
    set = (set + 1) % (count > 256 ? std::min(2, sets) : sets);
    stacks[set].reserve(count);
    shared.reset(current->shared_bytes);
    threads.resize(count);
    runnable.resize((count + 31) / 32);
    for (std::vector<int>& candidates : runnable) {
        candidates.clear();
        candidates.reserve(32);  // none grows later, on a thread of the kernel
    }
    waiting.assign((count + 31) / 32, 0);
    warp_order.resize((count + 31) / 32);
    std::iota(warp_order.begin(), warp_order.end(), 0);
    if (settings().seed != 0) { random.shuffle(warp_order); }
    runnable_count = at_barrier = true_predicates = 0;
    unfinished = int(count);
    for (size_t i = 0; i < count; i++) {
        Thread thread;
        thread.index = {unsigned(i % block.x), unsigned(i / block.x % block.y),
                        unsigned(i / block.x / block.y)};
        thread.context = make_fcontext(stacks[set].bottom(i) + stack_bytes, stack_bytes, thread_main);
        thread.fiber = stacks[set].fiber(i);
        if (thread_sanitizer) { name_fiber(thread.fiber, ("CUDA thread " + text_of(thread.index)).c_str()); }
        threads[i] = std::move(thread);
    }
    for (int i = int(count); i-- > 0;) { wake(i); }
}

void Machine::finish_block() {
    const void* from;
    size_t bytes;
    enter_stack(host_state, &from, &bytes);
    if (!failed) { return; }
    for (size_t i = 0; thread_sanitizer && i < threads.size(); i++) {
        switch_fiber(threads[i].fiber);  // the abandoned threads, too, end before the host goes on
        release(&end_tag);
        switch_fiber(host_fiber);
    }
    acquire(&end_tag);
    stacks[set].forget_fibers();
    throw Error(report);
}

void Machine::run(const Launch& launch, const std::function<void()>& kernel) {
    const uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    std::vector<uint64_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    if (settings().seed != 0) { Random{settings().seed}.shuffle(order); }
    current = &launch;
    body = &kernel;
    failed = false;
    host_fiber = current_fiber();
    for (uint64_t number : order) {
        {
            OwnAccesses own;
            start_block(number);
        }
        release(&start_tag);
        switch_to(take_runnable());
        finish_block();
    }
    acquire(&end_tag);  // not after each block: blocks are unordered
}

// ---- accesses that fault, and sanitizers' reports

void print_position() {
    const Machine& machine = Machine::of_this_thread();
    if (machine.in_kernel()) { fprintf(stderr, "emulator: %s\n", machine.position().c_str()); }
}

struct sigaction previous_action[NSIG];

// A fault in a kernel ends the launch like any other mistake; elsewhere it is what it was before.
void on_fault(int number, siginfo_t* info, void*) {
    Machine& machine = Machine::of_this_thread();
    if (!machine.in_kernel()) {
        sigaction(number, &previous_action[number], nullptr);
        return;  // and it happens again
    }
    const void* at = info->si_addr;
    const std::string what = number == SIGFPE ? "integer division by zero"
                             : machine.is_stack_guard(at)
                                 ? "stack overflow: a thread's variables are larger than the emulator's " +
                                       std::to_string(stack_bytes) + " bytes"
                                 : "invalid access: " + explain_address(at);
    machine.fail_in_signal_handler(what + " (gdb or a build with -fsanitize=address shows the line)");
}

void prepare_for_faults() {
    if (address_sanitizer || thread_sanitizer) {
        call_at_death(print_position);
        return;
    }
    static thread_local char stack[65536];
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof(stack);
    sigaltstack(&alternate, nullptr);
    for (int number : {SIGSEGV, SIGBUS, SIGFPE}) {
        struct sigaction action {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(number, &action, &previous_action[number]);
    }
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

void launch(const Launch& launch, const std::function<void()>& body) {
    static thread_local const bool prepared = (prepare_for_faults(), true);
    (void)prepared;
    Machine& machine = Machine::of_this_thread();
    if (machine.in_kernel()) { fail("a kernel launches a kernel", launch.site); }
    check_launch(launch);
    machine.run(launch, body);
    const std::string damage = damage_of_device_memory();
    if (!damage.empty()) {
        throw Error("kernel " + name_of(launch.kernel) + ", launched at " + text_of(launch.site) + ", " +
                    damage + " (a build with -fsanitize=address shows thread and line)");
    }
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
