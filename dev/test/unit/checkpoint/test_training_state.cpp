// Progress as a state file holds it, and as the first versions' files did.
#include "llmc/checkpoint/training_state.h"

#include <gtest/gtest.h>

#include "dev/test/files.h"

namespace test_training_state {

Fields fields_of_step_12() {
    Progress progress;
    progress.step = 12, progress.steps = 100, progress.adamw_updates = 11;
    progress.totals.updates = 10, progress.totals.joined_after = 2;
    Fields fields;
    for_fields(progress, [&](const char* name, const auto& value) { fields.set(name, value); });
    return fields;
}

TEST(TrainingState, progress_comes_back) {
    const Progress back = progress_of(fields_of_step_12());
    EXPECT_EQ(back.step, 12);
    EXPECT_EQ(back.steps, 100);
    EXPECT_EQ(back.adamw_updates, 11);
    EXPECT_EQ(back.totals.updates, 10);
    EXPECT_EQ(back.totals.joined_after, 2);
}

TEST(TrainingState, the_first_versions_files_are_read) {
    Fields old = fields_of_step_12();
    for (const char* name : {"steps", "updates", "adamw_updates", "joined_after"}) { old.remove(name); }
    const Progress back = progress_of(old);
    EXPECT_EQ(back.step, 12);
    EXPECT_EQ(back.adamw_updates, 12);  // every step was an update
    EXPECT_EQ(back.totals.updates, 12);
    EXPECT_EQ(back.totals.joined_after, -1);
}

TEST(TrainingState, a_state_that_lacks_another_field_is_refused) {
    Fields fields = fields_of_step_12();
    fields.remove("tokens");
    EXPECT_THROW(progress_of(fields), UserError);
}

// Rows of 4 tokens, 25 of them; batches of 2.
DataLoader open_data(const TemporaryFolder& folder, bool shuffle, int T = 4) {
    const std::vector<uint16_t> tokens(101);
    write_bytes(folder / "a.bin", header_bytes({tokens_magic, 1, 101}) + bytes_of(tokens));
    return DataLoader(folder / "a.bin", 2, T, 0, 1, 64, 7, shuffle);
}

TEST(TrainingState, the_data_go_on_where_they_were) {
    TemporaryFolder folder;
    DataLoader before = open_data(folder, true), after = open_data(folder, true);
    for (int batch = 0; batch < 20; batch++) { before.next_batch(); }
    const Fields fields = fields_of({}, {}, before);
    EXPECT_EQ(seek_data(fields, after), "");
    EXPECT_EQ(after.position().epoch, 1u);
    EXPECT_EQ(after.position().row, 40u - 25u);
    DataLoader longer_rows = open_data(folder, true, 10);
    EXPECT_EQ(seek_data(fields, longer_rows),
              "an epoch has 10 sequences of 10 tokens, not 25 of 4: the position in the data is about the "
              "same, and some sequences may be read again or skipped");
    EXPECT_EQ(longer_rows.position().epoch, 1u);
    EXPECT_EQ(longer_rows.position().row, 6u);
}

TEST(TrainingState, only_data_that_are_not_shuffled_go_on_where_an_earlier_version_was) {
    TemporaryFolder folder;
    DataLoader data = open_data(folder, false), shuffled = open_data(folder, true);
    Fields old;
    old.set("data.epoch", 3L);
    old.set("data.shard", 0L);
    old.set("data.sample", 5L);
    old.set("data.sample_tokens", 8L);
    EXPECT_EQ(seek_data(old, data), "");
    EXPECT_EQ(data.position().epoch, 3u);
    EXPECT_EQ(data.position().row, 10u);
    EXPECT_EQ(seek_data(old, shuffled),
              "epoch 4 of the data starts over: the checkpoint is from a version that shuffled batches, not "
              "sequences");
    EXPECT_EQ(shuffled.position().epoch, 3u);
    EXPECT_EQ(shuffled.position().row, 0u);
}

}  // namespace test_training_state
