// Comm: a group of processes and its collectives. The program has two: the inner one joins the ranks of a
// worker, the outer one joins the processes that own the same shard on all workers.
//
// Calls are stream-ordered like NCCL's: they return at once, buffers belong to the call until the stream has
// completed it, and all members issue the same calls in the same order. Sums are formed in a fixed order
// (TCP: by rank; NCCL: along its rings), so that every member, and every run, gets the same bits. A failure
// is a CommError, thrown by wait(), check(), the stream's events and synchronize().
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/stream.h"

class Store;

// The members of a communicator, and how they find each other.
struct CommGroup {
    Store& store;                      // must live as long as the communicator
    std::string name;                  // used once in the store's keys
    int rank, size;                    // this process among the members
    std::string interface;             // of the network to use; empty: the one that leads to the store
    double timeout;                    // seconds, for joining and for each call
    std::vector<std::string> members = {};  // names in errors, the same on all; empty: "rank R of NAME"

    std::string member(int r) const {
        return members.empty() ? "rank " + std::to_string(r) + " of " + name : members[size_t(r)];
    }
};

// The other side is gone, silent for longer than the time limit, or out of step.
struct CommError : RunError {
    CommError(int peer, const std::string& what) : RunError(what), peer(peer) {}
    int peer;  // rank in the communicator, -1 if the transport does not know it
};

// Bytes and time on the wire. A call that is given one adds to it; the sum is valid once the stream has
// completed the call.
struct Traffic {
    uint64_t bytes_sent = 0;
    uint64_t bytes_received = 0;
    double seconds = 0;  // from the start of the call on its stream to its end
};

// On the CPU's or the GPU's streams. A GPU build uses both, since TCP works in the host's memory.
template <class StreamT, class EventT>
class BasicComm {
public:
    virtual ~BasicComm() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;

    // SMs of a GPU that its collectives hold while they wait for other workers; 0: none, or only briefly.
    virtual int sms() const { return 0; }

    // out: (size, bytes), part r from rank r.   inp: (bytes)
    virtual void all_gather(void* out, const void* inp, size_t bytes, StreamT&, Traffic* = nullptr) = 0;

    // out: (size, bytes), part r from rank r.   inp: (size, bytes), part r for rank r
    virtual void all_to_all(void* out, const void* inp, size_t bytes, StreamT&, Traffic* = nullptr) = 0;

    // out[i] = sum over ranks of inp[rank()][i].   out: (count)   inp: (size, count)
    // out may be inp's own part.
    virtual void reduce_scatter(float* out, const float* inp, size_t count, StreamT&, Traffic* = nullptr) = 0;

    // values[i] = sum over ranks.   values: (count)
    // For small counts: sends (size - 1) * count values.
    virtual void all_reduce(float* values, size_t count, StreamT&, Traffic* = nullptr) = 0;

    // Throws a CommError if a call is known to have failed. Does not wait. On any thread.
    virtual void check() {}

    // Grows while data of a call moves, as far as that is known. On any thread.
    virtual uint64_t progress() const { return 0; }

    // Blocks the host until `event`, recorded after calls, is complete and none of the calls has failed.
    virtual void wait(const EventT& event) { event.synchronize(); }
};

namespace cpu {
using Comm = BasicComm<Stream, Event>;  // for buffers in the host's memory
}
using Comm = BasicComm<Stream, Event>;  // for buffers where the parameters lie
