// The connections of one rank of a communicator with all others: Unix sockets, in the abstract namespace, so
// that no file remains. Each message begins with a header that names the call which the sender is making.
#pragma once
#include <nccl.h>

#include <functional>
#include <string>
#include <vector>

namespace emulator {

enum class Collective { all_gather, reduce_scatter, all_reduce, broadcast, send_receive };

// What all ranks must agree on.
struct Call {
    Collective kind;
    ncclDataType_t type;
    ncclRedOp_t reduction;  // of the reductions; else ncclSum
    int root;               // of broadcast; else 0
    size_t count;

    bool operator==(const Call& other) const {
        return kind == other.kind && type == other.type && reduction == other.reduction &&
               root == other.root && count == other.count;
    }
};
std::string text_of(const Call& call);
size_t bytes_of(ncclDataType_t type);

class Peers {
public:
    Peers(const std::string& name, int rank, int size) : name(name), rank(rank), sockets(size_t(size), -1) {}
    ~Peers() { close(); }
    Peers(const Peers&) = delete;
    Peers& operator=(const Peers&) = delete;

    // Each of these asks `stops`, again and again, whether to give up.
    using Stops = std::function<bool()>;

    // With all other ranks. False if it was stopped; an error is in `error`.
    bool connect(const Stops& stops, std::string* error);

    struct Message {
        Call call;
        int peer;
        char* data;
        size_t bytes;
    };
    enum class Outcome { done, stopped, lost, mismatch };
    // Sends and receives all, in order for each peer. `error`: of a lost peer and a mismatch.
    Outcome exchange(const std::vector<Message>& out, const std::vector<Message>& in, const Stops& stops,
                     std::string* error);

    // Closes all connections, which the other ranks notice.
    void close();

private:
    struct Header {
        uint64_t number;
        Call call;
    };
    struct Transfer;
    struct Lane;

    bool connect_with_lower_ranks(const Stops& stops);
    bool accept_higher_ranks(int listener, const Stops& stops);
    bool progress(Lane& lane, std::string* error, Outcome* outcome);

    std::string name;
    int rank;
    std::vector<int> sockets;                                            // by rank; -1: none
    std::vector<uint64_t> sent = std::vector<uint64_t>(sockets.size());  // messages, by rank
    std::vector<uint64_t> received = sent;
};

}  // namespace emulator
