// Which GPU each process takes, how processes may share them, and whose traffic an interface may move.
#include "llmc/run/accelerator.h"

#include <gtest/gtest.h>

namespace test_accelerator {

Process process_of(int index, int workers, int ranks) {
    Process process;
    process.workers = workers;
    process.ranks = ranks;
    process.worker = index / ranks;
    process.rank = index % ranks;
    process.local_rank = process.rank;
    return process;
}

TEST(Accelerator, takes_the_number_that_whoever_started_the_process_has_counted) {
    const std::vector<std::string> machines = {"a", "a", "b", "b"}, local_ranks = {"0", "1", "0", "1"};
    for (int i = 0; i < 4; i++) {
        EXPECT_EQ(local_number(process_of(i, 2, 2), machines, local_ranks), i % 2) << i;
    }
}

TEST(Accelerator, workers_started_one_by_one_on_a_machine_take_different_numbers) {
    const std::vector<std::string> machines = {"a", "a", "b", "b", "a", "a"};
    const std::vector<std::string> local_ranks = {"0", "1", "0", "1", "0", "1"};
    const int expected[] = {0, 1, 0, 1, 2, 3};
    for (int i = 0; i < 6; i++) {
        EXPECT_EQ(local_number(process_of(i, 3, 2), machines, local_ranks), expected[i]) << i;
    }
}

TEST(Accelerator, refuses_to_load_one_device_of_a_worker_more_than_another) {
    EXPECT_NO_THROW(check_shares(process_of(0, 1, 4), {"a/0", "a/0", "a/1", "a/1"}));
    EXPECT_NO_THROW(check_shares(process_of(0, 2, 2), {"a/0", "a/0", "b/0", "b/1"}));
    EXPECT_NO_THROW(check_shares(process_of(0, 4, 1), {"a/0", "a/1", "a/2", "a/0"}));
    EXPECT_THROW(check_shares(process_of(0, 1, 4), {"a/0", "a/1", "a/2", "a/0"}), UserError);
    EXPECT_THROW(check_shares(process_of(0, 2, 3), {"a/0", "a/1", "a/2", "b/0", "b/1", "b/1"}), UserError);
}

TEST(Accelerator, an_interface_for_NCCL_wants_each_worker_on_one_machine) {
    const Process process = process_of(0, 2, 2);
    EXPECT_NO_THROW(check_interface(process, {"a", "a", "b", "b"}));
    EXPECT_NO_THROW(check_interface(process, {"a", "a", "a", "a"}));
    EXPECT_NO_THROW(check_interface(process_of(0, 4, 1), {"a", "b", "c", "d"}));
    try {
        check_interface(process, {"a", "a", "b", "c"});
        FAIL() << "worker 1 is on two machines";
    } catch (const UserError& error) {
        EXPECT_NE(std::string(error.what()).find("inside worker 1"), std::string::npos) << error.what();
    }
}

}  // namespace test_accelerator
