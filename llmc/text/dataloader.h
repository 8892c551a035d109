// DataLoader: batches of tokens from the shards that data/prepare.py writes.
//
// A shard has llm.c's format: a header of 256 int32 {20240520, 1, token count}, then uint16 tokens. A row is
// T + 1 consecutive tokens of a shard, at a multiple of T from its beginning, or from that of the process's
// part (take_part). Rows overlap by one token: the last target of one is the first input of the next.
//
// Batches take the rows of an epoch in their order, B rows for each process, and the epochs follow each other
// without a gap:
//
//     epoch 0                                                   | epoch 1
//     process 0: B rows | process 1: B rows | process 0: B rows | process 1: B rows | ...
//
// With `shuffle`, an epoch is a random permutation of the rows of all shards, drawn from the seed and the
// same on all processes: a step has the same rows however they are divided into processes and micro-batches.
// Without, rows come as they lie, and the last ones of a shard that fill no batch of all processes are left
// out, as in llm.c. Processes may differ in B, and in how many batches they read of a step: see share().
#pragma once
#include <glob.h>
#include <sys/resource.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <memory>
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
    uint64_t row = 0;  // in this epoch's order: the first row of the batch (share(): step) of all processes
};

class DataLoader {
public:
    // pattern: a glob of shards ("data/kjv-bytes/kjv_train_*.bin"), read in the order of their names.
    // UserError, naming the file, if none matches, or one is of another kind, truncated, or has a token
    // >= vocab_size, or if there is no whole batch. Such a token is found here if all shards together have
    // at most full_check_bytes, else when its row is read.
    DataLoader(const std::string& pattern, int B, int T, int process, int processes, int vocab_size,
               uint64_t seed, bool shuffle)
        : B(B), T(T), first_row(long(B) * process), all_rows(long(B) * processes), vocab_size(vocab_size),
          seed(seed), shuffle(shuffle) {
        for (const std::string& path : matching_files(pattern)) { shards.push_back(look_at_shard(path)); }
        count_rows();
        // Only now: a batch that is larger than the shards may not fit into memory.
        tokens.resize(size_t(T) + 1);
        input.resize(size_t(B) * size_t(T));
        target.resize(input.size());
        if (num_tokens() * int64_t(sizeof(uint16_t)) <= full_check_bytes) {
            for (const Shard& shard : shards) { check_all_tokens(shard); }
        }
    }

    // Tokens in all shards that match a pattern.
    static long tokens_in(const std::string& pattern) {
        long all = 0;
        for (const std::string& path : matching_files(pattern)) { all += look_at_shard(path).tokens; }
        return all;
    }

    // Divides the rows anew, and starts over. A step takes the next `all` rows; this process reads `count`
    // batches of them, from the `first`-th on. UserError if there are not that many rows.
    void share(long first, long all, int count = 1) {
        first_row = first;
        all_rows = all;
        batches = count;
        count_rows();
    }

    // Limits this process to the `part`-th of `parts` equal parts of each shard, which `processes` processes
    // share, and starts over. UserError if a part has no whole batch.
    void take_part(long part, long parts, int process, int processes) {
        for (Shard& shard : shards) {
            shard.first = shard.tokens * part / parts;
            shard.count = shard.tokens * (part + 1) / parts - shard.first;
        }
        share(long(B) * process, long(B) * processes);
    }

    long num_shards() const { return long(shards.size()); }

    // Tokens in all shards.
    long num_tokens() const {
        long all = 0;
        for (const Shard& shard : shards) { all += shard.tokens; }
        return all;
    }

    // Rows in an epoch, of all processes together, and the whole batches of these.
    long num_rows() const { return epoch_rows; }
    long num_batches() const { return epoch_rows / all_rows; }

    // A hash of the names, without folders, and the lengths of all shards: 16 hex digits. With other shards,
    // a position means another place in the data, and `shuffle` gives another order.
    std::string shards_hash() const {
        std::string names;
        for (const Shard& shard : shards) {
            names += format("%s %ld\n", shard.path.substr(shard.path.rfind('/') + 1).c_str(), shard.tokens);
        }
        return format("%016llx", (unsigned long long)XXH3_64bits(names.data(), names.size()));
    }

    // Reads the next batch, and has the system read the one after it into its cache, so that the disk works
    // while this batch is trained on.
    void next_batch() {
        for (int i = 0; i < B; i++) { read_row(place_of(next, first_row + long(batch) * B + i), i); }
        batch = (batch + 1) % batches;
        if (batch == 0) { next = after(next, all_rows); }
        for (int i = 0; i < B; i++) { expect_row(place_of(next, first_row + long(batch) * B + i)); }
    }

    const int* inputs() const { return input.data(); }    // (B, T)
    const int* targets() const { return target.data(); }  // (B, T), inputs shifted by one token

    int tokens_of_a_row() const { return T; }

    DataPosition position() const { return next; }

    // Continues at a saved position; one at the end of an epoch is the next one's beginning. UserError if
    // these shards do not have it.
    void seek(const DataPosition& position) {
        if (position.row > uint64_t(num_tokens() / T)) { fail_position(); }
        next = after({position.epoch, std::min(position.row, uint64_t(epoch_rows))}, 0);
        batch = 0;
    }

    // Continues after `count` batches from the first epoch's beginning, unless it is further already.
    void skip_to(long count) {
        const uint64_t rows = uint64_t(count / batches) * uint64_t(all_rows), all = uint64_t(epoch_rows);
        if (rows > next.epoch * all + next.row) { seek({rows / all, rows % all}); }
    }

    // Continues where a run of an earlier version stopped, after `count` tokens of a shard; with shuffle,
    // which gave another order, at the epoch's beginning. Returns whether it is the same place.
    bool seek_in_shard(uint64_t epoch, uint64_t index, uint64_t count) {
        if (index >= shards.size()) { fail_position(); }
        if (shuffle) {  // `index` is a place in the order of shards that was drawn
            seek({epoch, 0});
            return false;
        }
        const Shard& shard = shards[index];
        if (count > uint64_t(shard.count)) { fail_position(); }
        seek({epoch, uint64_t(shard.first_row) + std::min(count / uint64_t(T), uint64_t(shard.rows))});
        return true;
    }

    // Back to the first batch of the first epoch: every validation sees the same tokens.
    void reset() { seek({}); }

private:
    struct Shard {
        std::string path;
        long tokens;
        long first, count;                  // the part of the tokens that take_part() left
        long first_row = 0, rows = 0;       // of the epoch's rows as they lie
        std::unique_ptr<InputFile> file{};  // null: not open
    };

    // A row's shard, and its first token there.
    struct Place {
        Shard& shard;
        long token;
    };

    // Reading a GiB takes well under a second if it is cached, and seconds from a disk.
    static constexpr int64_t full_check_bytes = int64_t(1) << 30;

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

    static Shard look_at_shard(const std::string& path) {
        const InputFile file(path, "make it again with data/prepare.py");
        const FileHeader header = file.read_header(tokens_magic, "token shard");
        if (header[1] != 1) { file.fail(format("is a token shard of version %d, not 1", header[1])); }
        if (header[2] < 0) { file.fail(format("has a damaged header (%d tokens)", header[2])); }
        file.check_size(int64_t(header[2]) * int64_t(sizeof(uint16_t)));
        return {path, header[2], 0, header[2]};
    }

    // Counts the rows of an epoch, and starts over. UserError if there is no whole batch.
    void count_rows() {
        long count = 0;
        epoch_rows = 0;
        for (Shard& shard : shards) {
            shard.first_row = epoch_rows;
            shard.rows = std::max(shard.count - 1, 0L) / T;
            if (!shuffle) {
                check_length(shard.path, shard.count, shard.rows);
                shard.rows -= shard.rows % all_rows;
            }
            epoch_rows += shard.rows;
            count += shard.count;
        }
        check_length(shards[0].path + (shards.size() > 1 ? ", ..." : ""), count, epoch_rows);
        reset();
    }

    void check_length(const std::string& name, long count, long found) const {
        if (found >= all_rows) { return; }
        throw UserError(format("%s has %ld tokens, too few for one batch (%ld = %ld sequences of all "
                               "processes x %d tokens + 1): lower -b or -d, or use a longer text",
                               name.c_str(), count, all_rows * T + 1, all_rows, T));
    }

    DataPosition after(DataPosition position, long rows) const {
        position.row += uint64_t(rows);
        if (position.row >= uint64_t(epoch_rows)) {
            position.row -= uint64_t(epoch_rows);
            position.epoch++;
        }
        return position;
    }

    // Row `i` of the batch at a position.
    Place place_of(const DataPosition& position, long i) {
        const DataPosition at = after(position, i);
        long row = long(at.row);
        if (shuffle) {
            row = long(permuted(at.row, uint64_t(epoch_rows), seed, RandomUse::shuffle, uint32_t(at.epoch)));
        }
        auto begins_later = [](long row, const Shard& shard) { return row < shard.first_row; };
        Shard& shard = std::upper_bound(shards.begin(), shards.end(), row, begins_later)[-1];
        return {shard, shard.first + (row - shard.first_row) * T};
    }

    // The shard's file. At most a quarter of the files that the process may open stay open. RunError if the
    // file has changed since the start, which is not a mistake in the options.
    const InputFile& file_of(Shard& shard) {
        if (shard.file) { return *shard.file; }
        rlimit limit;
        getrlimit(RLIMIT_NOFILE, &limit);
        if (open_shards.size() >= std::max<size_t>(limit.rlim_cur / 4, 1)) {
            open_shards.front()->file.reset();
            open_shards.erase(open_shards.begin());
        }
        try {
            auto opened = std::make_unique<InputFile>(shard.path, "restore it as it was at the start");
            opened->check_size(shard.tokens * int64_t(sizeof(uint16_t)));
            shard.file = std::move(opened);
        } catch (const UserError& error) { throw RunError(error.what()); }
        open_shards.push_back(&shard);
        return *shard.file;
    }

    void check_all_tokens(const Shard& shard) const {
        const InputFile file(shard.path, "restore it as it was before");
        std::vector<uint16_t> block(size_t(std::min(shard.tokens, 1L << 19)));
        for (long begin = 0; begin < shard.tokens; begin += long(block.size())) {
            const size_t count = size_t(std::min(long(block.size()), shard.tokens - begin));
            file.read(block.data(), count * sizeof(uint16_t), data_offset(begin));
            check_tokens(shard, block.data(), count, begin);
        }
    }

    void read_row(const Place& place, long i) {
        file_of(place.shard).read(tokens.data(), row_bytes(), data_offset(place.token));
        check_tokens(place.shard, tokens.data(), tokens.size(), place.token);
        std::copy(tokens.begin(), tokens.end() - 1, input.begin() + i * T);
        std::copy(tokens.begin() + 1, tokens.end(), target.begin() + i * T);
    }

    // Tells the system that a row will be read. If this fails, so will the read, which reports the cause.
    void expect_row(const Place& place) {
        try {
            file_of(place.shard).will_read(row_bytes(), data_offset(place.token));
        } catch (const RunError&) {}
    }

    size_t row_bytes() const { return tokens.size() * sizeof(uint16_t); }

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

    [[noreturn]] void fail_position() const {
        throw UserError("the saved position in the data is not in these shards (" + shards[0].path +
                        ", ...): resume with the data of the stopped run");
    }

    int B, T;
    long first_row, all_rows;  // in a batch, or a step of share(): this process's first row, and all rows
    int batches = 1, batch = 0;  // this process's batches in a step of share(), and how many were read
    int vocab_size;
    uint64_t seed;
    bool shuffle;
    std::vector<Shard> shards;
    std::vector<Shard*> open_shards;  // in the order of opening
    long epoch_rows = 0;
    DataPosition next;
    std::vector<uint16_t> tokens;  // (T + 1): a row, as it lies in the file
    std::vector<int> input, target;
};
