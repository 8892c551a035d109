// The machine that runs a kernel's blocks, one after another. The threads of a block are fibers, and switch
// only where they wait for each other: in a barrier or a warp operation. In between, one warp runs as far
// ahead of the others as it can, its lanes and the warps in an order drawn from a seed: that shows more
// missing barriers than a fair order does.
#pragma once
#include <sys/mman.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dev/emulator/emulator.h"
#include "dev/emulator/sanitizers.h"
#include "dev/emulator/shared_memory.h"
#include "llmc/error.h"

namespace emulator {

using boost::context::detail::fcontext_t;
using boost::context::detail::transfer_t;

constexpr size_t page = 4096;
constexpr size_t stack_bytes = (address_sanitizer || thread_sanitizer ? 128 : 64) * 1024;

std::string text_of(const uint3& v);
std::string text_of(Site site);
std::string name_of(const void* kernel);

struct Random {  // SplitMix64 (Steele, Lea, Flood 2014)
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

inline std::string describe(const Thread& thread) {
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

// Runs blocks, one after another. Each thread of the host that launches kernels has its own machine.
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
    std::vector<unsigned> returned;          // by warp: lanes that have returned from the kernel
    std::vector<int> warp_order;             // the first warp with a runnable thread continues
    int runnable_count = 0, unfinished = 0;
    int at_barrier = 0, true_predicates = 0, result_of_barrier = 0;
    unsigned barrier_number = 0;
    int running = -1;  // the running thread; -1: the host
    int leaving = -1;  // the thread that is being switched from
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

}  // namespace emulator
