// DataLoader: batches of tokens from the shards that data/prepare.py writes.
//
// A shard has llm.c's format: a header of 256 int32 {20240520, 1, token count}, then uint16 tokens. A sample
// is B * T * processes + 1 consecutive tokens; samples overlap by one token, since the last target of one is
// the first input of the next. Process p reads its own B * T (+ 1) tokens of each sample:
//
//     shard   | sample 0                          | sample 1       ...  | rest, unused |
//     sample  | process 0: B rows of T | process 1 | ... |
//
// So one process with B = 8 and two with B = 4 see the same tokens in a step. Processes may also differ in B:
// see share(). With `shuffle`, the order of the shards and of the samples in a shard is drawn from the seed
// for each epoch, the same on all processes.
#pragma once
#include <glob.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/random.h"

const int32_t tokens_magic = 20240520;

// Where the next batch lies. Part of the training state.
struct DataPosition {
    uint64_t epoch = 0;
    uint64_t shard = 0;   // index in this epoch's order of shards
    uint64_t sample = 0;  // index in this epoch's order of the shard's samples
};

class DataLoader {
public:
    // pattern: a glob of shards ("data/kjv-bytes/kjv_train_*.bin"), read in the order of their names.
    // UserError, naming the file, if none matches, or one is of another kind, truncated, without a whole
    // sample, or has a token >= vocab_size. Such a token is found here if all shards together have at most
    // full_check_bytes, else when its batch is read.
    DataLoader(const std::string& pattern, int B, int T, int process, int processes, int vocab_size,
               uint64_t seed, bool shuffle)
        : B(B), T(T), first_row(long(B) * process), rows(long(B) * processes), vocab_size(vocab_size),
          seed(seed), shuffle(shuffle) {
        for (const std::string& path : matching_files(pattern)) { shards.push_back(look_at_shard(path)); }
        // Not earlier: a batch that is larger than the shards may not fit into memory.
        const size_t count = size_t(B) * size_t(T);
        tokens.resize(count + 1);
        input.resize(count);
        target.resize(count);
        if (num_tokens() * int64_t(sizeof(uint16_t)) <= full_check_bytes) {
            for (const Shard& shard : shards) { check_all_tokens(shard); }
        }
        reset();
    }

    // Redefines samples, and starts over: a sample has `all` rows of T tokens for all processes together, and
    // this process reads B of them, from row `first` on. UserError if a shard has no whole sample.
    void share(long first, long all) {
        first_row = first;
        rows = all;
        for (Shard& shard : shards) { shard.samples = samples_of(shard.path, shard.tokens); }
        reset();
    }

    // Limits this process to the `part`-th of `parts` equal parts of each shard, which `processes` processes
    // share, and starts over. UserError if a part has no whole sample.
    void take_part(long part, long parts, int process, int processes) {
        first_row = long(B) * process;
        rows = long(B) * processes;
        for (Shard& shard : shards) {
            shard.first = shard.tokens * part / parts;
            shard.samples = samples_of(shard.path, shard.tokens * (part + 1) / parts - shard.first);
        }
        reset();
    }

    long num_shards() const { return long(shards.size()); }

    // Tokens in all shards.
    long num_tokens() const { return sum(&Shard::tokens); }

    // Batches in an epoch: the whole samples of all shards.
    long num_batches() const { return sum(&Shard::samples); }

    // A hash of the names, without folders, and the lengths of all shards: 16 hex digits. With other shards,
    // a position means another place in the data, and `shuffle` gives another order.
    std::string shards_hash() const {
        std::string names;
        for (const Shard& shard : shards) {
            names += format("%s %ld\n", shard.path.substr(shard.path.rfind('/') + 1).c_str(), shard.tokens);
        }
        return format("%016llx", (unsigned long long)XXH3_64bits(names.data(), names.size()));
    }

    // Reads the next batch; after the last one of an epoch, the first one of the next epoch.
    void next_batch() {
        if (next.sample == sample_order.size()) { advance_shard(); }
        const uint64_t sample = sample_order[next.sample];
        const int64_t count = int64_t(B) * T;
        const Shard& shard = shards[shard_order[next.shard]];
        read_tokens(shard, shard.first + (int64_t(sample) * rows + first_row) * T);
        for (int64_t i = 0; i < count; i++) {
            input[i] = tokens[i];
            target[i] = tokens[i + 1];
        }
        next.sample++;
    }

    const int* inputs() const { return input.data(); }    // (B, T)
    const int* targets() const { return target.data(); }  // (B, T), inputs shifted by one token

    // Tokens in a sample, of all processes together. Positions count samples.
    long tokens_of_a_sample() const { return rows * T; }

    DataPosition position() const { return next; }

    // Continues at a saved position. UserError if these shards do not have it.
    void seek(const DataPosition& position) {
        next = position;
        shard_order = order(shards.size(), next.epoch << 32);
        if (next.shard >= shards.size()) { fail_position(); }
        order_samples();
        if (next.sample > sample_order.size()) { fail_position(); }
    }

    // Back to the first batch of the first epoch: every validation sees the same tokens.
    void reset() { seek({}); }

private:
    struct Shard {
        std::string path;
        long tokens;
        long samples;
        long first = 0;  // token of the first sample
    };

    // Reading a GiB takes well under a second if it is cached, and seconds from a disk.
    static constexpr int64_t full_check_bytes = int64_t(1) << 30;

    long sum(long Shard::* count) const {
        long all = 0;
        for (const Shard& shard : shards) { all += shard.*count; }
        return all;
    }

    static std::vector<std::string> matching_files(const std::string& pattern) {
        glob_t found;
        const int status = glob(pattern.c_str(), 0, nullptr, &found);
        std::vector<std::string> paths;
        if (status == 0) { paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc); }
        globfree(&found);
        if (paths.empty()) {
            throw UserError("no file matches " + pattern + ": make token shards with data/prepare.py, or "
                            "correct the pattern (in quotes, so that the shell leaves it alone)");
        }
        std::sort(paths.begin(), paths.end());
        return paths;
    }

    Shard look_at_shard(const std::string& path) const {
        const InputFile file(path, "make it again with data/prepare.py");
        const FileHeader header = file.read_header(tokens_magic, "token shard");
        if (header[1] != 1) { file.fail(format("is a token shard of version %d, not 1", header[1])); }
        if (header[2] < 0) { file.fail(format("has a damaged header (%d tokens)", header[2])); }
        file.check_size(int64_t(header[2]) * int64_t(sizeof(uint16_t)));
        return {path, header[2], samples_of(path, header[2])};
    }

    // Whole samples in a shard of `count` tokens.
    long samples_of(const std::string& path, long count) const {
        const long sample = rows * T;
        if (count < sample + 1) {
            throw UserError(format("%s has %ld tokens, less than one step takes (%ld = %ld sequences of all "
                                   "processes x %d tokens, and one): use a smaller batch, or a longer text",
                                   path.c_str(), count, sample + 1, rows, T));
        }
        return (count - 1) / sample;
    }

    // The shard's file. Only one is open at a time, since there may be more shards than a process may open
    // files. RunError if it has changed since the start, which is not a mistake in the options.
    const InputFile& file_of(const Shard& shard) {
        if (file && file->name() == shard.path) { return *file; }
        file.reset();
        try {
            auto opened = std::make_unique<InputFile>(shard.path, "it was there at the start");
            opened->check_size(shard.tokens * int64_t(sizeof(uint16_t)));
            file = std::move(opened);
        } catch (const UserError& error) { throw RunError(error.what()); }
        return *file;
    }

    void check_all_tokens(const Shard& shard) {
        std::vector<uint16_t> block(size_t(std::min(shard.tokens, 1L << 19)));
        for (long begin = 0; begin < shard.tokens; begin += long(block.size())) {
            const size_t count = size_t(std::min(long(block.size()), shard.tokens - begin));
            file_of(shard).read(block.data(), count * sizeof(uint16_t), data_offset(begin));
            check_tokens(shard, block.data(), count, begin);
        }
    }

    void read_tokens(const Shard& shard, int64_t begin) {
        file_of(shard).read(tokens.data(), tokens.size() * sizeof(uint16_t), data_offset(begin));
        check_tokens(shard, tokens.data(), tokens.size(), begin);
    }

    static int64_t data_offset(int64_t token) {
        return int64_t(sizeof(FileHeader)) + token * int64_t(sizeof(uint16_t));
    }

    // Finds the largest token first, without branches, so that the usual case is a vector loop.
    void check_tokens(const Shard& shard, const uint16_t* values, size_t count, int64_t begin) const {
        uint16_t largest = 0;
        for (size_t i = 0; i < count; i++) { largest = std::max(largest, values[i]); }
        if (largest < vocab_size) { return; }
        auto beyond = [&](int token) { return token >= vocab_size; };
        const long bad = std::find_if(values, values + count, beyond) - values;
        throw UserError(format("%s has token %d at position %lld, beyond the vocabulary of %d: give the "
                               "tokenizer or the vocabulary size that it was made with",
                               shard.path.c_str(), values[bad], (long long)(begin + bad), vocab_size));
    }

    void advance_shard() {
        DataPosition after{next.epoch, next.shard + 1, 0};
        if (after.shard == shards.size()) { after = {next.epoch + 1, 0, 0}; }
        seek(after);
    }

    void order_samples() {
        const uint64_t shard = shard_order[next.shard];
        sample_order = order(uint64_t(shards[shard].samples), next.epoch << 32 | (shard + 1));
    }

    // 0, 1, ... count - 1; with shuffle, a permutation of these. `purpose` is a number that no other
    // permutation uses: the epoch in the upper half; in the lower half 0 for the order of shards, 1 + shard
    // for its samples.
    std::vector<uint64_t> order(uint64_t count, uint64_t purpose) const {
        std::vector<uint64_t> indices(count);
        std::iota(indices.begin(), indices.end(), uint64_t(0));
        if (!shuffle) { return indices; }
        for (uint64_t i = count; i > 1; i--) {  // Fisher and Yates
            const uint64_t bits = random_bits(seed, RandomUse::shuffle, purpose, uint32_t(i)).v[0];
            std::swap(indices[i - 1], indices[(bits * i) >> 32]);
        }
        return indices;
    }

    [[noreturn]] void fail_position() const {
        throw UserError(format("the saved position in the data (shard %llu, sample %llu) is not in these "
                               "shards (%s, ...): resume with the data and batch size of the stopped run",
                               (unsigned long long)next.shard, (unsigned long long)next.sample,
                               shards[0].path.c_str()));
    }

    int B, T;
    long first_row, rows;  // of a sample: this process's first one, and all
    int vocab_size;
    uint64_t seed;
    bool shuffle;
    std::vector<Shard> shards;
    std::unique_ptr<InputFile> file;  // the one that was read last
    DataPosition next;
    std::vector<uint64_t> shard_order, sample_order;
    std::vector<uint16_t> tokens;  // (B * T + 1), as they lie in the file
    std::vector<int> input, target;
};
