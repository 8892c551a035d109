// The collective operations of one rank. Compiled without -fsanitize=thread (see sanitizers.h).
#include "dev/emulator/nccl_operations.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <stdexcept>

#include "dev/emulator/emulator.h"
#include "dev/emulator/sanitizers.h"
#include "dev/emulator/shared_memory.h"

namespace emulator {
namespace {

using Message = Peers::Message;
using Outcome = Peers::Outcome;

bool reduces(const Operation& operation) {
    return operation.call.kind == Collective::all_reduce || operation.call.kind == Collective::reduce_scatter;
}

// A read that is too early finds NaN there, and so does every read after an abort.
void poison_bytes(char* p, size_t bytes) {
    if (settings().seed == 0) { return; }
    OwnAccesses own;
    memset(p, poison, bytes);
}

// ---- reductions

template <class Wide>
Wide combine(ncclRedOp_t reduction, Wide a, Wide b) {
    switch (reduction) {
        case ncclProd:
            return Wide(a * b);
        case ncclMax:
            return a < b ? b : a;
        case ncclMin:
            return b < a ? b : a;
        default:
            return Wide(a + b);
    }
}

template <class T, class Wide>
void reduce_as(const Call& call, const std::vector<const char*>& parts, char* to) {
    for (size_t i = 0; i < call.count; i++) {
        T total = reinterpret_cast<const T*>(parts[0])[i];
        for (size_t rank = 1; rank < parts.size(); rank++) {
            total = T(combine(call.reduction, Wide(total), Wide(reinterpret_cast<const T*>(parts[rank])[i])));
        }
        if (call.reduction == ncclAvg) { total = T(Wide(total) / Wide(parts.size())); }
        reinterpret_cast<T*>(to)[i] = total;
    }
}

void reduce(const Call& call, const std::vector<const char*>& parts, char* to) {
    switch (call.type) {
        case ncclInt8:
            return reduce_as<int8_t, int8_t>(call, parts, to);
        case ncclUint8:
            return reduce_as<uint8_t, uint8_t>(call, parts, to);
        case ncclInt32:
            return reduce_as<int32_t, int32_t>(call, parts, to);
        case ncclUint32:
            return reduce_as<uint32_t, uint32_t>(call, parts, to);
        case ncclInt64:
            return reduce_as<int64_t, int64_t>(call, parts, to);
        case ncclUint64:
            return reduce_as<uint64_t, uint64_t>(call, parts, to);
        case ncclFloat16:
            return reduce_as<__half, float>(call, parts, to);
        case ncclFloat32:
            return reduce_as<float, float>(call, parts, to);
        case ncclFloat64:
            return reduce_as<double, double>(call, parts, to);
        case ncclBfloat16:
            return reduce_as<__nv_bfloat16, float>(call, parts, to);
        default:
            throw Error("NCCL: the emulator does not reduce " + text_of(call));
    }
}

// ---- which part goes where

// The part of `from` that goes to a rank.
char* outgoing(const Operation& operation, int rank) {
    char* from = static_cast<char*>(const_cast<void*>(operation.from));
    return operation.call.kind == Collective::reduce_scatter ? from + size_t(rank) * operation.bytes() : from;
}

bool sends_data(const Member& member, const Operation& operation) {
    return operation.call.kind != Collective::broadcast || operation.call.root == member.rank;
}

bool receives_data(const Operation& operation, int peer) {
    return operation.call.kind != Collective::broadcast || operation.call.root == peer;
}

// The part of `to` where a rank's data belongs, if it is not to be reduced.
char* incoming(const Operation& operation, int rank) {
    char* to = static_cast<char*>(operation.to);
    return operation.call.kind == Collective::all_gather ? to + size_t(rank) * operation.bytes() : to;
}

void note_accesses(const Member& member, const Operation& operation) {
    CalledFrom caller(operation.caller);
    const size_t bytes = operation.bytes();
    if (sends_data(member, operation)) { note_read(operation.from, source_bytes(operation, member.size)); }
    char* const to = static_cast<char*>(operation.to);
    if (operation.call.kind != Collective::all_gather || to + size_t(member.rank) * bytes != operation.from) {
        note_write(to, target_bytes(operation, member.size));
        return;
    }
    note_write(to, size_t(member.rank) * bytes);  // in place: the own part stays as it is
    note_write(to + size_t(member.rank + 1) * bytes, size_t(member.size - 1 - member.rank) * bytes);
}

}  // namespace

size_t source_bytes(const Operation& operation, int size) {
    return operation.bytes() * (operation.call.kind == Collective::reduce_scatter ? size_t(size) : 1);
}

size_t target_bytes(const Operation& operation, int size) {
    return operation.bytes() * (operation.call.kind == Collective::all_gather ? size_t(size) : 1);
}

Outcome perform(const Member& member, const Operation& operation, std::string* error) {
    note_accesses(member, operation);
    const size_t bytes = operation.bytes();
    std::vector<Message> out, in;
    std::vector<const char*> parts(size_t(member.size));  // of all ranks, to be reduced
    std::vector<char> received(reduces(operation) ? bytes * size_t(member.size) : 0);
    for (int peer = 0; peer < member.size; peer++) {
        char* part = reduces(operation) ? received.data() + size_t(peer) * bytes : incoming(operation, peer);
        parts[size_t(peer)] = peer == member.rank ? outgoing(operation, peer) : part;
        if (peer == member.rank) { continue; }
        const size_t sent = sends_data(member, operation) ? bytes : 0;
        const size_t awaited = receives_data(operation, peer) ? bytes : 0;
        out.push_back({operation.call, peer, outgoing(operation, peer), sent});
        in.push_back({operation.call, peer, part, awaited});
        if (!reduces(operation)) { poison_bytes(part, awaited); }
    }
    const Outcome outcome = member.peers.exchange(out, in, member.stops, error);
    if (outcome != Outcome::done) { return outcome; }
    OwnAccesses own;
    if (reduces(operation)) {
        reduce(operation.call, parts, static_cast<char*>(operation.to));
    } else if (sends_data(member, operation)) {
        memmove(incoming(operation, member.rank), operation.from, bytes);
    }
    return outcome;
}

Outcome perform_transfers(const Member& member, const std::vector<Operation>& operations,
                          std::string* error) {
    std::vector<Message> out, in;
    std::vector<Operation> to_self, from_self;
    for (const Operation& operation : operations) {
        const bool sends = operation.from != nullptr;
        char* data = static_cast<char*>(sends ? const_cast<void*>(operation.from) : operation.to);
        CalledFrom caller(operation.caller);
        if (sends) {
            note_read(data, operation.bytes());
        } else {
            note_write(data, operation.bytes());
            poison_bytes(data, operation.bytes());
        }
        if (operation.peer == member.rank) {
            (sends ? to_self : from_self).push_back(operation);
        } else {
            (sends ? out : in).push_back({operation.call, operation.peer, data, operation.bytes()});
        }
    }
    for (size_t i = 0; i < std::max(to_self.size(), from_self.size()); i++) {
        if (i >= std::min(to_self.size(), from_self.size()) || !(to_self[i].call == from_self[i].call)) {
            *error = "rank " + std::to_string(member.rank) + " sends itself something else than it receives";
            return Outcome::mismatch;
        }
        OwnAccesses own;
        memmove(from_self[i].to, to_self[i].from, to_self[i].bytes());
    }
    return member.peers.exchange(out, in, member.stops, error);
}

}  // namespace emulator
