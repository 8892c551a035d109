// Memory: computes from the options how many bytes a run needs, and compares them with what the machine has,
// before any is taken. A model that does not fit is a user's mistake like any other: one line, and status 2.
#pragma once
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/layers.h"
#include "llmc/layout.h"
#include "llmc/run/accelerator.h"
#include "llmc/run/inputs.h"
#include "llmc/run/options.h"

// Bytes of one process. On the CPU all of them are the host's.
struct MemoryNeed {
    double device;        // parameters, gradients, activations, the optimizers' state
    double outer_device;  // what the exchange between workers takes there,
    double outer_host;    // and in the host's memory
    double snapshot;      // the host's copy of the state, for checkpoints
    double model;         // a copy of all parameters, for the model file
};

const double program_bytes = 20e6;  // a process without a model

// Activations of B x T tokens, as allocate_activations() in train_gpt.cu takes them. The unused rest of an
// array's last page (llmc/cpu/buffer.h) is left out: it matters only in small runs.
inline double activation_bytes(const GptShape& shape, int recompute, MatmulPrecision precision,
                               double tokens) {
    const double C = shape.channels, L = shape.layers;
    const double once = 4 * C + shape.padded_vocab_size, of_a_layer = 2 * C;
    const double rounded = C * (8 + 8 * L + 4 * (recompute >= 1 ? 1 : L) + (recompute >= 2 ? 1 : 2 * L));
    const size_t size = device::activation_size(precision);
    // Where matmuls round, fp32 gradients are rounded into scratch; the logits' are the largest. GELU's
    // backward also has scratch, in fp32.
    const bool rounds = size < sizeof(floatX);
    const double scratch = rounds ? std::max(C, double(shape.padded_vocab_size)) : 0;
    const double of_floats = 3 + L * (4 + shape.heads) + 2 + (rounds ? 4 * C : 0);
    return tokens * (sizeof(floatX) * (once + L * of_a_layer) + double(size) * (rounded + scratch) +
                     sizeof(float) * of_floats);
}

// Muon's scratch memory (ShardedMuon in llmc/muon.h): the matrices of a layer have 12 C^2 values.
inline double muon_bytes(const Options& o, const GptShape& shape) {
    if (!o.uses_muon()) { return 0; }
    const double square = double(shape.channels) * shape.channels;
    return square * (sizeof(floatX) * (12 * (o.ranks > 1 ? 2 : 1) + 8 + 12) + sizeof(float));
}

// outer: what the exchange between workers takes of it (OuterBytes)
template <class Outer>
MemoryNeed memory_need(const Options& o, const GptShape& shape, const Layout& layout, const Outer& outer) {
    const double all = double(layout.size), shard = double(layout.shard_size());
    const double state = (has_master_copy(o.ranks) ? 3 : 2) * sizeof(float);  // moments, and master weights
    const double reduced = o.ranks > 1 ? sizeof(float) : 0;
    return {all * (sizeof(floatX) + sizeof(float)) + shard * (state + reduced) +
                activation_bytes(shape, o.recompute, matmul_precision(o.matmul_precision),
                                 double(o.batch) * o.seq_len) +
                muon_bytes(o, shape),
            outer.device, outer.host,
            o.save_every > 0 ? shard * (3 * sizeof(float) + sizeof(floatX)) + outer.snapshot : 0,
            all * sizeof(float)};
}

// Bytes of the host's memory.
struct HostMemory {
    double all;        // with swap, and no more than this process's control groups allow
    double available;  // without anything that is in use now
};

// The least limit of this process's control groups and their parents, which /proc/self/cgroup lists: 0::/a/b
// is one of version 2, and 4:memory:/a/b one of version 1. Infinite without a limit.
inline double limit_of_groups() {
    double least = INFINITY;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const bool is_old = line.find(":memory:") != std::string::npos;
        if (!is_old && line.rfind("0::", 0) != 0) { continue; }
        const std::string root = is_old ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
        const std::string name = is_old ? "/memory.limit_in_bytes" : "/memory.max";
        std::string path = line.substr(line.find('/'));
        for (size_t end = path.size(); end != std::string::npos; end = path.rfind('/')) {
            path.resize(end);
            double limit;  // "max" is no number
            if (std::ifstream(root + path + name) >> limit) { least = std::min(least, limit); }
        }
    }
    return least;
}

inline HostMemory host_memory() {
    double total = INFINITY, swap = 0, available = INFINITY, kilobytes;
    std::ifstream machine("/proc/meminfo");
    for (std::string line; std::getline(machine, line);) {
        if (sscanf(line.c_str(), "MemTotal: %lf kB", &kilobytes) == 1) { total = 1024 * kilobytes; }
        if (sscanf(line.c_str(), "SwapTotal: %lf kB", &kilobytes) == 1) { swap = 1024 * kilobytes; }
        if (sscanf(line.c_str(), "MemAvailable: %lf kB", &kilobytes) == 1) { available = 1024 * kilobytes; }
    }
    return {std::min(total, limit_of_groups()) + swap, available};
}

[[noreturn]] inline void refuse_memory(double needed, double there, const std::string& where) {
    throw UserError(format("this run needs about %.2f GB of memory%s, but there are only %.2f GB: lower -b, "
                           "-t or the model's sizes, or raise -r", needed / 1e9, where.c_str(), there / 1e9));
}

inline void warn_if_too_little(double needed, double available, const std::string& where) {
    if (needed <= available) { return; }
    fprintf(stderr, "warning: this run takes about %.2f GB of memory%s, but other programs leave %.2f GB\n",
            needed / 1e9, where.c_str(), available / 1e9);
}

// Before any process allocates memory: checks that all processes that this one starts here can have enough,
// and warns if other programs use too much now. A process that mpirun, torchrun or srun has started checks
// its own need alone. Throws a UserError; a mistake in the input files is reported first.
// outer_bytes: of the exchange between workers, by its options, the layout and the number of workers
template <class OuterBytes>
void check_memory(const Options& o, OuterBytes outer_bytes) {
    if (has_launcher()) { return; }
    const std::unique_ptr<Tokenizer> tokenizer = find_tokenizer(o, o.train_data);
    const GptShape shape = resolve_shape(o, tokenizer.get());
    check_shape(shape, o);
    const Layout layout = gpt_layout(shape, o.ranks, o.diloco.streams() ? o.diloco.fragment_layers : 0);
    const MemoryNeed need = memory_need(o, shape, layout, outer_bytes(o.diloco, layout, o.workers));
    const bool is_alone = o.world || find_world(0);
    const double processes = is_alone ? 1 : double(o.ranks) * (o.worker >= 0 ? 1 : o.workers);
    const double writers = is_alone || o.worker >= 0 || !o.diloco.is_elastic() ? 1 : o.workers;
    // At the start each process has a copy of the initial parameters, but no outer state or snapshot yet.
    const double alone = program_bytes + (runs_on_gpu ? 0 : need.device);
    const double exchange = need.outer_host + (runs_on_gpu ? 0 : need.outer_device);
    const double later = processes * (alone + exchange + need.snapshot) +
                         (o.output.empty() ? 0 : writers * need.model);
    const double needed = std::max(processes * (alone + need.model), later);
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    const double of_a_process = limit.rlim_cur == RLIM_INFINITY ? INFINITY : double(limit.rlim_cur);
    const HostMemory host = host_memory();
    const double there = std::min(host.all, processes * of_a_process);
    const std::string where = processes > 1 ? format(" in %.0f processes", processes) : "";
    if (needed > there) {
        Process first;
        first.workers = o.workers;
        first.ranks = o.ranks;
        open_files(o, first);
        refuse_memory(needed, there, where);
    }
    warn_if_too_little(needed, host.available, where);
}

// The same on a GPU, once it is chosen.   returns the device
inline device::Device checked_for_memory(const device::Device& device, const MemoryNeed& need) {
    const double needed = need.device + need.outer_device;
    const auto [free, there] = device::memory_size();
    if (needed > there) { refuse_memory(needed, there, " on " + device.name); }
    warn_if_too_little(needed, free, " on " + device.name);
    return device;
}
