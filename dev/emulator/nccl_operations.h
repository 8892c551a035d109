// What one rank does in a collective operation: which part of which buffer goes where.
//
// Sums are formed in ascending order of ranks, rounded to the buffers' type after each addition as on a ring
// whose links carry that type. The real order is not specified: it depends on the algorithm, and a ring
// begins elsewhere for each part.
#pragma once
#include <vector>

#include "dev/emulator/nccl_peers.h"

namespace emulator {

struct Operation {
    Call call;
    const void* from;  // null: nothing is sent
    void* to;          // null: nothing is received
    int peer;          // of sends and receives
    const void* caller;

    size_t bytes() const { return call.count * bytes_of(call.type); }
};

// The sizes in bytes of the operation's `from` and `to`, for `size` ranks.
size_t source_bytes(const Operation& operation, int size);
size_t target_bytes(const Operation& operation, int size);

struct Member {
    Peers& peers;
    int rank, size;
    const Peers::Stops& stops;
};

Peers::Outcome perform(const Member& member, const Operation& operation, std::string* error);
// The sends and receives of a group, all at once.
Peers::Outcome perform_transfers(const Member& member, const std::vector<Operation>& operations,
                                 std::string* error);

}  // namespace emulator
