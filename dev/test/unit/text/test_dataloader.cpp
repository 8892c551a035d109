// The loader: which tokens a batch holds, for any split into processes, any epoch, and after a restart.
#include "llmc/text/dataloader.h"

#include <sys/resource.h>

#include <numeric>
#include <set>

#include "dev/test/files.h"
#include "dev/test/processes.h"

namespace test_dataloader {

const int vocabulary = 60000;

void write_shard(const std::string& path, const std::vector<uint16_t>& tokens) {
    write_bytes(path, header_bytes({20240520, 1, int32_t(tokens.size())}) + bytes_of(tokens));
}

std::vector<uint16_t> count_up(int begin, int count) {
    std::vector<uint16_t> tokens(static_cast<size_t>(count));
    std::iota(tokens.begin(), tokens.end(), uint16_t(begin));
    return tokens;
}

// Two shards whose tokens tell their positions: 0 ... 99 and 1000 ... 1064.
void write_two_shards(const TemporaryFolder& folder) {
    write_shard(folder / "x_train_000001.bin", count_up(1000, 65));
    write_shard(folder / "x_train_000000.bin", count_up(0, 100));
}

std::vector<int> next_inputs(DataLoader& loader, int count) {
    loader.next_batch();
    return {loader.inputs(), loader.inputs() + count};
}

DataLoader open_two_shards(const TemporaryFolder& folder, int B, int process, int processes, uint64_t seed,
                           bool shuffle) {
    return DataLoader(folder / "x_train_*.bin", B, 4, process, processes, vocabulary, seed, shuffle);
}

TEST(DataLoader, reads_shards_in_the_order_of_their_names_and_starts_over) {
    TemporaryFolder folder;
    write_two_shards(folder);
    DataLoader loader = open_two_shards(folder, 4, 0, 1, 0, false);
    EXPECT_EQ(loader.num_tokens(), 165);
    EXPECT_EQ(loader.num_batches(), 6 + 4);  // (100 - 1) / 16 and (65 - 1) / 16
    for (int epoch = 0; epoch < 2; epoch++) {
        for (int begin : {0, 16, 32, 48, 64, 80, 1000, 1016, 1032, 1048}) {
            loader.next_batch();
            for (int i = 0; i < 16; i++) {
                ASSERT_EQ(loader.inputs()[i], begin + i);
                ASSERT_EQ(loader.targets()[i], begin + i + 1);
            }
        }
    }
}

// The first tokens of a batch's rows, which tell what the rows are.
std::vector<int> next_rows(DataLoader& loader, int B, int T = 4) {
    loader.next_batch();
    std::vector<int> rows;
    for (int i = 0; i < B; i++) { rows.push_back(loader.inputs()[i * T]); }
    return rows;
}

TEST(DataLoader, two_processes_with_half_the_batch_see_the_same_tokens_in_a_step) {
    TemporaryFolder folder;
    write_two_shards(folder);
    for (bool shuffle : {false, true}) {
        DataLoader whole = open_two_shards(folder, 4, 0, 1, 7, shuffle);
        DataLoader first = open_two_shards(folder, 2, 0, 2, 7, shuffle);
        DataLoader second = open_two_shards(folder, 2, 1, 2, 7, shuffle);
        for (int step = 0; step < 25; step++) {
            std::vector<int> both = next_inputs(first, 8), rest = next_inputs(second, 8);
            both.insert(both.end(), rest.begin(), rest.end());
            ASSERT_EQ(next_inputs(whole, 16), both) << "step " << step;
        }
    }
}

TEST(DataLoader, processes_with_batches_of_their_own_share_what_one_would_read) {
    TemporaryFolder folder;
    write_two_shards(folder);
    for (bool shuffle : {false, true}) {
        DataLoader whole = open_two_shards(folder, 6, 0, 1, 7, shuffle);
        DataLoader first = open_two_shards(folder, 4, 0, 2, 7, shuffle);
        DataLoader second = open_two_shards(folder, 2, 1, 2, 7, shuffle);
        first.share(0, 6);
        second.share(4, 6);
        EXPECT_EQ(second.num_batches(), whole.num_batches());
        for (int step = 0; step < 25; step++) {
            std::vector<int> both = next_inputs(first, 16), rest = next_inputs(second, 8);
            both.insert(both.end(), rest.begin(), rest.end());
            ASSERT_EQ(next_inputs(whole, 24), both) << "step " << step;
        }
        EXPECT_TRUE(contains(user_error([&] { first.share(0, 100); }), "too few for one batch"));
    }
}

TEST(DataLoader, processes_with_micro_steps_of_their_own_read_every_row_once_an_epoch) {
    TemporaryFolder folder;
    write_two_shards(folder);
    for (bool shuffle : {false, true}) {
        DataLoader small = open_two_shards(folder, 1, 0, 2, 7, shuffle);  // four batches in a step
        DataLoader large = open_two_shards(folder, 4, 1, 2, 7, shuffle);  // one
        small.share(0, 8, 4);
        large.share(4, 8, 1);
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            std::set<int> seen;
            for (uint64_t step = 0; step < 5; step++) {  // of 8 of the 40 rows
                EXPECT_EQ(small.position().row, 8 * step);
                EXPECT_EQ(large.position().row, 8 * step);
                for (int i = 0; i < 4; i++) { seen.insert(next_rows(small, 1)[0]); }
                for (int row : next_rows(large, 4)) { seen.insert(row); }
            }
            EXPECT_EQ(seen.size(), 40u);
        }
        small.next_batch();
        small.seek(small.position());  // a step that is left begins anew
        DataLoader again = open_two_shards(folder, 1, 0, 2, 7, shuffle);
        again.share(0, 8, 4);
        for (int i = 0; i < 60; i++) { again.next_batch(); }
        for (int i = 0; i < 4; i++) { EXPECT_EQ(next_rows(small, 1), next_rows(again, 1)); }
    }
}

TEST(DataLoader, skips_to_where_that_many_batches_end_but_never_back) {
    TemporaryFolder folder;
    write_two_shards(folder);
    for (long count : {0, 1, 7, 13, 14, 50}) {  // of 3 rows for each of two processes: more than an epoch
        DataLoader reader = open_two_shards(folder, 3, 1, 2, 7, true);
        DataLoader skipper = open_two_shards(folder, 3, 1, 2, 7, true);
        for (long i = 0; i < count; i++) { reader.next_batch(); }
        skipper.skip_to(count);
        skipper.skip_to(count / 2);
        EXPECT_EQ(skipper.position().epoch, reader.position().epoch) << count;
        EXPECT_EQ(next_rows(skipper, 3), next_rows(reader, 3)) << count;
    }
}

TEST(DataLoader, shuffling_visits_every_row_once_an_epoch_in_an_order_of_its_own) {
    TemporaryFolder folder;
    write_two_shards(folder);
    auto epochs = [&](uint64_t seed) {
        DataLoader loader = open_two_shards(folder, 1, 0, 1, seed, true);
        std::vector<std::vector<int>> orders(6);
        for (std::vector<int>& order : orders) {
            for (long i = 0; i < loader.num_rows(); i++) { order.push_back(next_rows(loader, 1)[0]); }
        }
        return orders;
    };
    const auto orders = epochs(7);
    std::set<int> expected;
    for (int i = 0; i < 24; i++) { expected.insert(4 * i); }
    for (int i = 0; i < 16; i++) { expected.insert(1000 + 4 * i); }
    for (const std::vector<int>& order : orders) {
        EXPECT_EQ(order.size(), expected.size());
        EXPECT_EQ(std::set<int>(order.begin(), order.end()), expected);
        EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
        auto is_of_second = [](int token) { return token >= 1000; };
        const long of_second = std::count_if(order.begin(), order.begin() + 20, is_of_second);
        EXPECT_TRUE(of_second > 2 && of_second < 14) << of_second;  // 8 of 20 where the shards are mixed
    }
    EXPECT_EQ(std::set<std::vector<int>>(orders.begin(), orders.end()).size(), orders.size());
    EXPECT_EQ(epochs(7), orders);
    EXPECT_NE(epochs(8)[0], orders[0]);
}

TEST(DataLoader, a_step_has_the_same_rows_however_it_is_cut) {
    TemporaryFolder folder;
    write_two_shards(folder);
    const int rows_of_a_step = 12;  // not a divisor of 40: some steps have rows of two epochs
    auto steps = [&](int B, int processes) {
        std::vector<DataLoader> loaders;
        for (int p = 0; p < processes; p++) {
            loaders.push_back(open_two_shards(folder, B, p, processes, 7, true));
        }
        std::vector<std::multiset<int>> steps(25);
        for (std::multiset<int>& step : steps) {
            for (int done = 0; done < rows_of_a_step; done += B * processes) {
                for (DataLoader& loader : loaders) {
                    const std::vector<int> rows = next_rows(loader, B);
                    step.insert(rows.begin(), rows.end());
                }
            }
        }
        return steps;
    };
    const auto expected = steps(12, 1);
    for (const auto& [B, processes] : {std::pair{1, 1}, {4, 1}, {3, 2}, {2, 3}, {1, 12}, {6, 2}}) {
        EXPECT_EQ(steps(B, processes), expected) << B << " x " << processes;
    }
}

TEST(DataLoader, an_epoch_goes_on_in_the_next_one_in_mid_batch_and_nothing_is_read_twice_or_left_out) {
    TemporaryFolder folder;
    write_two_shards(folder);
    DataLoader one = open_two_shards(folder, 1, 0, 1, 7, true);
    DataLoader seven = open_two_shards(folder, 7, 0, 1, 7, true);
    for (int batch = 0; batch < 40; batch++) {
        std::vector<int> expected;
        for (int i = 0; i < 7; i++) { expected.push_back(next_rows(one, 1)[0]); }
        ASSERT_EQ(next_rows(seven, 7), expected) << batch;
        ASSERT_EQ(one.position().epoch, seven.position().epoch);
        ASSERT_EQ(one.position().row, seven.position().row);
    }
    EXPECT_EQ(seven.position().epoch, 7u);
    EXPECT_EQ(seven.position().row, 0u);
}

TEST(DataLoader, workers_with_parts_of_their_own_share_all_rows) {
    TemporaryFolder folder;
    write_two_shards(folder);
    for (bool shuffle : {false, true}) {
        std::multiset<int> seen;
        for (int worker = 0; worker < 2; worker++) {
            for (int rank = 0; rank < 2; rank++) {
                DataLoader loader = open_two_shards(folder, 2, 0, 1, 7, shuffle);
                loader.take_part(worker, 2, rank, 2);
                // (50 - 1) / 4 + (32 - 1) / 4, and (50 - 1) / 4 + (33 - 1) / 4
                EXPECT_EQ(loader.num_rows(), (shuffle ? 19 : 16) + (worker == 0 ? 0 : shuffle ? 1 : 4));
                for (long i = 0; i < loader.num_batches(); i++) {
                    for (int row : next_rows(loader, 2)) {
                        EXPECT_EQ(row < 1000 ? row >= 50 : row >= 1032, worker == 1);
                        seen.insert(row);
                    }
                }
            }
        }
        EXPECT_EQ(seen.size(), std::set<int>(seen.begin(), seen.end()).size());
        EXPECT_EQ(seen.size(), 16u + 20);
    }
}

TEST(DataLoader, a_shard_that_is_shorter_than_a_batch_counts_where_rows_are_shuffled) {
    TemporaryFolder folder;
    for (int i = 0; i < 4; i++) { write_shard(folder / format("x_%d.bin", i), count_up(100 * i, 4 * i + 1)); }
    auto open = [&](int B, bool shuffle) {
        return DataLoader(folder / "*.bin", B, 4, 0, 1, vocabulary, 7, shuffle);
    };
    EXPECT_EQ(open(6, true).num_rows(), 0 + 1 + 2 + 3);
    EXPECT_TRUE(contains(user_error([&] { open(7, true); }), "x_0.bin, ... has 28 tokens, too few for one"));
    EXPECT_TRUE(contains(user_error([&] { open(1, false); }), "x_0.bin has 1 tokens, too few for one"));
    DataLoader loader = open(6, true);
    const std::vector<int> rows = next_rows(loader, 6);
    EXPECT_EQ(std::set<int>(rows.begin(), rows.end()), std::set<int>({100, 200, 204, 300, 304, 308}));
}

TEST(DataLoader, continues_at_a_saved_position_and_at_the_start_after_reset) {
    TemporaryFolder folder;
    write_two_shards(folder);
    DataLoader loader = open_two_shards(folder, 3, 0, 1, 3, true);
    const std::vector<int> very_first = next_inputs(loader, 12);
    for (int before = 1; before < 45; before++) {  // every place in three epochs
        const DataPosition saved = loader.position();
        DataLoader resumed = open_two_shards(folder, 3, 0, 1, 3, true);
        resumed.seek(saved);
        ASSERT_EQ(next_inputs(resumed, 12), next_inputs(loader, 12)) << "after " << before << " batches";
        ASSERT_EQ(resumed.position().row, loader.position().row);
    }
    loader.reset();
    EXPECT_EQ(next_inputs(loader, 12), very_first);
    loader.seek({3, 40});
    EXPECT_EQ(loader.position().epoch, 4u);
    EXPECT_EQ(loader.position().row, 0u);
    EXPECT_TRUE(contains(user_error([&] { loader.seek({0, 1000}); }), "saved position"));
}

TEST(DataLoader, continues_at_the_position_of_an_earlier_version_where_the_order_is_the_same) {
    TemporaryFolder folder;
    write_two_shards(folder);
    DataLoader loader = open_two_shards(folder, 4, 0, 1, 3, false);
    DataLoader resumed = open_two_shards(folder, 4, 0, 1, 3, false);
    const std::vector<uint64_t> samples = {6, 4};
    for (uint64_t epoch : {0, 1}) {
        for (uint64_t shard : {0, 1}) {
            for (uint64_t sample = 0; sample < samples[shard]; sample++) {
                loader.next_batch();
                // The last one is at the end of the shard.
                EXPECT_TRUE(resumed.seek_in_shard(epoch, shard, (sample + 1) * 16));
                ASSERT_EQ(resumed.position().epoch, loader.position().epoch);
                ASSERT_EQ(resumed.position().row, loader.position().row);
            }
        }
    }
    EXPECT_TRUE(contains(user_error([&] { resumed.seek_in_shard(0, 2, 0); }), "saved position"));
    EXPECT_TRUE(contains(user_error([&] { resumed.seek_in_shard(0, 1, 66); }), "saved position"));
    DataLoader shuffled = open_two_shards(folder, 4, 0, 1, 3, true);
    EXPECT_FALSE(shuffled.seek_in_shard(5, 1, 16));
    EXPECT_FALSE(shuffled.seek_in_shard(5, 1, 80));  // more than shard 1 has: another one had been drawn
    EXPECT_EQ(shuffled.position().epoch, 5u);
    EXPECT_EQ(shuffled.position().row, 0u);
}

TEST(DataLoader, the_hash_of_the_shards_tells_their_names_lengths_and_number) {
    auto hash_of = [](const std::vector<std::pair<std::string, int>>& shards) {
        TemporaryFolder folder;  // a new one each time: its path must not matter
        for (const auto& [name, count] : shards) { write_shard(folder / name, count_up(0, count)); }
        return DataLoader(folder / "*.bin", 2, 4, 0, 1, vocabulary, 0, true).shards_hash();
    };
    const std::string hash = hash_of({{"a_0.bin", 20}, {"a_1.bin", 30}});
    EXPECT_EQ(hash.size(), 16u);
    EXPECT_EQ(hash_of({{"a_1.bin", 30}, {"a_0.bin", 20}}), hash);
    EXPECT_NE(hash_of({{"a_0.bin", 30}, {"a_1.bin", 20}}), hash);
    EXPECT_NE(hash_of({{"a_0.bin", 20}, {"b_1.bin", 30}}), hash);
    EXPECT_NE(hash_of({{"a_0.bin", 20}, {"a_1.bin", 30}, {"a_2.bin", 30}}), hash);
}

TEST(DataLoader, reads_more_shards_than_a_process_may_have_files_open) {
    TemporaryFolder folder;
    const int shards = 64;
    for (int i = 0; i < shards; i++) { write_shard(folder / format("x_%03d.bin", i), count_up(10 * i, 9)); }
    TestProcess process([&]() -> std::string {
        const rlimit few = {32, 32};
        setrlimit(RLIMIT_NOFILE, &few);
        DataLoader train(folder / "x_*.bin", 1, 4, 0, 1, vocabulary, 3, true);
        DataLoader other(folder / "x_*.bin", 1, 4, 0, 1, vocabulary, 3, false);
        std::set<int> seen;
        for (int i = 0; i < 2 * shards; i++) {
            seen.insert(next_inputs(train, 4)[0]);
            if (next_inputs(other, 4)[0] != 10 * (i / 2) + 4 * (i % 2)) { return "wrong tokens"; }
        }
        return std::to_string(seen.size());
    });
    EXPECT_EQ(process.wait(60), 0) << process.report;
    EXPECT_EQ(process.report, std::to_string(2 * shards));
}

TEST(DataLoader, a_shard_that_is_replaced_or_removed_under_a_run_is_no_mistake_of_the_user_s) {
    TemporaryFolder folder;
    write_two_shards(folder);
    const std::string first = folder / "x_train_000000.bin";
    DataLoader loader = open_two_shards(folder, 4, 0, 1, 0, false);  // has checked the second shard last
    auto message = [&]() -> std::string {
        try {
            loader.next_batch();
        } catch (const RunError& error) { return error.what(); }
        return "";
    };
    write_shard(first, count_up(0, 99));
    EXPECT_TRUE(contains(message(), first + " is truncated"));
    std::filesystem::remove(first);
    EXPECT_TRUE(contains(message(), first + " cannot be opened"));
    write_shard(first, count_up(0, 100));
    EXPECT_EQ(message(), "");
    EXPECT_EQ(loader.inputs()[15], 15);
}

TEST(DataLoader, a_damaged_shard_is_an_error_that_names_the_file) {
    TemporaryFolder folder;
    const std::string path = folder / "bad.bin", tokens = bytes_of(count_up(0, 20));
    auto open = [&] { DataLoader(folder / "*.bin", 1, 4, 0, 1, vocabulary, 0, false); };
    auto message = [&](const std::string& bytes) {
        write_bytes(path, bytes);
        std::string text = user_error(open);
        EXPECT_TRUE(contains(text, path));
        return text;
    };
    EXPECT_TRUE(contains(user_error(open), "no file matches"));
    EXPECT_TRUE(contains(message(""), "truncated"));
    EXPECT_TRUE(contains(message(header_bytes({20240520, 1, 20}).substr(0, 1000)), "truncated"));
    EXPECT_TRUE(contains(message(header_bytes({20240521, 1, 20}) + tokens), "magic 20240521, not 20240520"));
    EXPECT_TRUE(contains(message(header_bytes({20240520, 2, 20}) + tokens), "version 2"));
    EXPECT_TRUE(contains(message(header_bytes({20240520, 1, -1}) + tokens), "damaged"));
    EXPECT_TRUE(contains(message(header_bytes({20240520, 1, 21}) + tokens),
                         "truncated (1064 bytes, its header promises 1066)"));
    EXPECT_TRUE(contains(message(header_bytes({20240520, 1, 19}) + tokens), "too long"));
    EXPECT_TRUE(contains(message(header_bytes({20240520, 1, 4}) + tokens.substr(0, 8)), "has 4 tokens"));
    write_bytes(path, header_bytes({20240520, 1, 5}) + tokens.substr(0, 10));
    EXPECT_NO_THROW(open());  // one sample, exactly
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);
    EXPECT_TRUE(contains(user_error(open), "is not a file"));
}

TEST(DataLoader, a_pipe_is_refused_at_once) {
    TemporaryFolder folder;
    ASSERT_EQ(mkfifo((folder / "a.bin").c_str(), 0600), 0);
    auto open = [&] { DataLoader(folder / "a.bin", 4, 8, 0, 1, vocabulary, 0, false); };
    EXPECT_TRUE(contains(user_error(open), "is not a file"));
}

TEST(DataLoader, a_batch_that_no_memory_holds_is_too_large_for_the_shard) {
    TemporaryFolder folder;
    write_shard(folder / "a.bin", count_up(0, 101));
    auto open = [&] { DataLoader(folder / "a.bin", 1 << 30, 1 << 20, 0, 1, vocabulary, 0, false); };
    EXPECT_TRUE(contains(user_error(open), "too few for one batch"));
}

TEST(DataLoader, a_token_beyond_the_vocabulary_is_found_before_training) {
    TemporaryFolder folder;
    std::vector<uint16_t> tokens = count_up(0, 2000000);
    for (uint16_t& token : tokens) { token %= 256; }
    tokens[1700000] = 257;
    write_shard(folder / "a.bin", tokens);
    auto open = [&](int size) { DataLoader(folder / "a.bin", 8, 16, 0, 1, size, 0, false); };
    const std::string message = user_error([&] { open(257); });
    EXPECT_TRUE(contains(message, folder / "a.bin"));
    EXPECT_TRUE(contains(message, "token 257 at position 1700000, beyond the vocabulary of 257"));
    EXPECT_NO_THROW(open(258));
    tokens.back() = 65535;
    write_shard(folder / "a.bin", tokens);
    EXPECT_TRUE(contains(user_error([&] { open(65535); }), "token 65535 at position 1999999"));
    EXPECT_NO_THROW(open(65536));
}

TEST(DataLoader, data_too_large_to_search_at_the_start_is_checked_as_it_is_read) {
    TemporaryFolder folder;
    const int32_t count = (1 << 29) + 1;  // a sparse file of a GiB and a bit: zeros that take no space
    std::vector<uint16_t> tokens(100, 7);
    tokens[50] = 300;
    write_bytes(folder / "a.bin", header_bytes({20240520, 1, count}) + bytes_of(tokens));
    std::filesystem::resize_file(folder / "a.bin", 1024 + 2 * uintmax_t(count));
    DataLoader loader(folder / "a.bin", 4, 10, 0, 1, 257, 0, false);
    loader.next_batch();
    EXPECT_TRUE(contains(user_error([&] { loader.next_batch(); }), "token 300 at position 50"));
}

TEST(DataLoader, a_shard_that_becomes_shorter_under_a_run_is_an_error) {
    TemporaryFolder folder;
    write_shard(folder / "a.bin", count_up(0, 101));
    DataLoader loader(folder / "a.bin", 5, 10, 0, 1, vocabulary, 0, false);
    loader.next_batch();
    std::filesystem::resize_file(folder / "a.bin", 1024 + 2 * 60);
    EXPECT_THROW(loader.next_batch(), RunError);
}

}  // namespace test_dataloader
