// Progress as a state file holds it, and as the first versions' files did.
#include "llmc/checkpoint/training_state.h"

#include <gtest/gtest.h>

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

}  // namespace test_training_state
