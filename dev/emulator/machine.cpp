// Switching between the threads of a block, their meeting points, and the run of a block from its start to
// its end. Compiled without -fsanitize=thread (see sanitizers.h).
#include "dev/emulator/machine.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <numeric>

#if defined(EMULATOR_THREAD_SANITIZER)
// In place of thread sanitizer's: those visit all fibers after each sleep, for a remark in reports, which
// takes a quarter of a trainer's time.
extern "C" int nanosleep(const timespec* time, timespec* left) {
    return int(syscall(SYS_nanosleep, time, left));
}
extern "C" int usleep(useconds_t microseconds) {
    const timespec time = {time_t(microseconds / 1000000), long(microseconds % 1000000) * 1000};
    return nanosleep(&time, nullptr);
}
#endif

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace emulator {

using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;

std::string text_of(const uint3& v) {
    return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string text_of(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

static bool same(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// The name of a kernel, if the program was linked with -rdynamic and the kernel has external linkage.
std::string name_of(const void* kernel) {
    Dl_info info;
    if (dladdr(kernel, &info) == 0 || !info.dli_sname || info.dli_saddr != kernel) { return "(unnamed)"; }
    std::unique_ptr<char, void (*)(void*)> name(
        abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr), free);
    return name ? name.get() : info.dli_sname;
}

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

// Does not return: the block is done, or its launch has failed and its threads are abandoned. Kernels own
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

// The running thread waits, and another one continues.
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

// Only the running thread can have done the damage, since it last waited.
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

// In the same operation, at the same place, for the same lanes.
static bool agree(const Thread& a, const Thread& b) {
    return a.mask == b.mask && a.waits_in == b.waits_in && same(a.site, b.site);
}

// Whether all lanes of the mask wait in the running thread's operation. Fails if one waits for us elsewhere.
bool Machine::warp_is_complete(int first, unsigned mask) {
    const Thread& own = self();
    const unsigned here = waiting[first / 32] & mask, others = here & ~(1u << lane());
    if (here != mask && (returned[first / 32] & mask) == 0) {  // usually; one of them speaks for all
        if (others == 0 || agree(threads[first + __builtin_ctz(others)], own)) { return false; }
    }
    bool complete = true;
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) { continue; }
        const Thread& other = threads[first + lane];
        if (agree(other, own)) { continue; }
        complete = false;
        const bool waits_for_us = other.mask >> (running - first) & 1;
        if (!waits_for_us && !other.returned) { continue; }
        const char* mistake =
            other.returned || other.mask != mask ? "wrong mask" : "divergent warp operation";
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
    returned[running / 32] |= 1u << lane();
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
    returned.assign((count + 31) / 32, 0);
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
        switch_fiber(threads[i].fiber);  // the abandoned threads, too, end before the host continues
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

}  // namespace emulator
