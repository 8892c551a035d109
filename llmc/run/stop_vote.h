// StopVote: in a step of several micro-steps, whether the ranks of a worker leave it because one of them was
// asked to stop. All must leave at the same place, since a rank that continues would wait for the others in
// the next collective. So before each micro-step but the first the ranks all-reduce one value, during
// the computation. It is read at the next vote, by when it has usually arrived.
#pragma once
#include <functional>

#include "llmc/buffer.h"
#include "llmc/comm.h"

class StopVote {
public:
    std::function<bool()> is_asked = [] { return false; };  // whether this rank was asked to stop
    bool may_leave_steps = false;  // otherwise steps are always completed; the same on all ranks

    // comm, stream: between the ranks of the worker, for its life. Votes are not counted as its traffic.
    StopVote(Comm& comm, Stream& stream) : comm(comm), stream(stream) { one.data()[0] = 1; }

    // Sets *stop, which the ranks sum with the loss, if this rank was asked.
    void tell(float* stop, Stream& main) {
        if (is_asked()) { device::copy_to_device(stop, one.data(), 1, main); }
    }

    // Between two micro-steps. Collective; the answer is the same on all ranks.
    bool votes_to_leave() {
        if (!may_leave_steps) { return false; }
        if (comm.size() == 1) { return is_asked(); }
        comm.wait(has_heard);
        if (votes.data()[0] > 0) { return true; }
        votes.data()[0] = is_asked() ? 1 : 0;
        device::copy_to_device(sum.data(), votes.data(), 1, stream);
        comm.all_reduce(sum.data(), 1, stream);
        device::copy_to_host_later(votes.data(), sum.data(), 1, stream);
        stream.record(has_heard);
        return false;
    }

private:
    Comm& comm;
    Stream& stream;
    Buffer<float> sum = Buffer<float>(1);
    HostBuffer<float> votes{1};  // of this rank, then of all
    HostBuffer<float> one{1};    // 1
    Event has_heard;
};
