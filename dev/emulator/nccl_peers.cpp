// Sockets between the ranks of a communicator. Data goes by bare system calls: thread sanitizer would take
// send() and recv() for an ordering between all streams of this process that communicate. Compiled without
// -fsanitize=thread (see sanitizers.h).
#include "dev/emulator/nccl_peers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "dev/emulator/sanitizers.h"

namespace emulator {
namespace {

constexpr int poll_milliseconds = 5;

long send_some(int socket, const void* p, size_t bytes) {
    return syscall(SYS_sendto, socket, p, bytes, MSG_NOSIGNAL, nullptr, 0);
}

long receive_some(int socket, void* p, size_t bytes) {
    return syscall(SYS_recvfrom, socket, p, bytes, 0, nullptr, nullptr);
}

// Of a rank's listening socket: its length.
socklen_t address_of(const std::string& name, int rank, sockaddr_un* address) {
    *address = {};
    address->sun_family = AF_UNIX;
    const int length =
        snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "%s-%d", name.c_str(), rank);
    return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + size_t(length));
}

const char* name_of(Collective kind) {
    switch (kind) {
        case Collective::all_gather:
            return "all-gather";
        case Collective::reduce_scatter:
            return "reduce-scatter";
        case Collective::all_reduce:
            return "all-reduce";
        case Collective::broadcast:
            return "broadcast";
        default:
            return "send or receive";
    }
}

const char* name_of(ncclRedOp_t reduction) {
    const char* const names[] = {"sum", "product", "maximum", "minimum", "average"};
    return reduction < ncclNumOps ? names[reduction] : "unknown";
}

}  // namespace

size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
        case ncclFloat8e4m3:
        case ncclFloat8e5m2:
            return 1;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64:
            return 8;
        default:
            return 4;
    }
}

std::string text_of(const Call& call) {
    const char* const types[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                 "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
    std::string text = name_of(call.kind);
    if (call.kind == Collective::all_reduce || call.kind == Collective::reduce_scatter) {
        text += std::string(" (") + name_of(call.reduction) + ")";
    }
    if (call.kind == Collective::broadcast) { text += " from rank " + std::to_string(call.root); }
    return text + " of " + std::to_string(call.count) + " " +
           (call.type < ncclNumTypes ? types[call.type] : "?");
}

// ---- connecting: with lower ranks actively, with higher ones passively

bool Peers::connect(const Stops& stops, std::string* error) {
    OwnAccesses own;  // a descriptor counts as memory
    sockaddr_un address;
    const socklen_t length = address_of(name, rank, &address);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        listen(listener, int(sockets.size())) != 0) {
        *error = "is there twice: " + std::string(strerror(errno));
        ::close(listener);
        return false;
    }
    const bool connected = connect_with_lower_ranks(stops) && accept_higher_ranks(listener, stops);
    ::close(listener);
    for (int socket : sockets) {
        if (socket >= 0) { fcntl(socket, F_SETFL, O_NONBLOCK); }
    }
    return connected;
}

bool Peers::connect_with_lower_ranks(const Stops& stops) {
    for (int peer = 0; peer < rank; peer++) {
        sockaddr_un address;
        const socklen_t length = address_of(name, peer, &address);
        const int to = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockets[size_t(peer)] = to;
        while (::connect(to, reinterpret_cast<sockaddr*>(&address), length) != 0) {
            if (stops()) { return false; }
            usleep(2000);
        }
        send_some(to, &rank, sizeof(rank));
    }
    return true;
}

bool Peers::accept_higher_ranks(int listener, const Stops& stops) {
    for (int missing = int(sockets.size()) - 1 - rank; missing > 0;) {
        if (stops()) { return false; }
        pollfd ready{listener, POLLIN, 0};
        if (poll(&ready, 1, poll_milliseconds) < 1) { continue; }
        const int from = accept(listener, nullptr, nullptr);
        int peer = -1;
        if (from < 0) { continue; }
        if (receive_some(from, &peer, sizeof(peer)) != sizeof(peer) || peer <= rank ||
            size_t(peer) >= sockets.size()) {
            ::close(from);
            continue;
        }
        sockets[size_t(peer)] = from;
        missing--;
    }
    return true;
}

void Peers::close() {
    OwnAccesses own;
    for (int& socket : sockets) {
        if (socket >= 0) { ::close(socket); }
        socket = -1;
    }
}

// ---- exchanging

struct Peers::Transfer {
    Message message;
    Header header;
    size_t moved = 0;  // of header and data

    bool done() const { return moved == sizeof(Header) + message.bytes; }
    char* next() {
        return moved < sizeof(Header) ? reinterpret_cast<char*>(&header) + moved
                                      : message.data + (moved - sizeof(Header));
    }
    size_t left() const {
        return moved < sizeof(Header) ? sizeof(Header) - moved : sizeof(Header) + message.bytes - moved;
    }
};

// What goes to one peer, or comes from it.
struct Peers::Lane {
    int peer;
    bool sends;
    std::vector<Transfer> transfers;
    size_t at = 0;
    bool done() const { return at == transfers.size(); }
};

// Moves what can be moved now. False: the exchange has ended, with `outcome`.
bool Peers::progress(Lane& lane, std::string* error, Outcome* outcome) {
    const int socket = sockets[size_t(lane.peer)];
    while (!lane.done()) {
        Transfer& transfer = lane.transfers[lane.at];
        const long moved = lane.sends ? send_some(socket, transfer.next(), transfer.left())
                                      : receive_some(socket, transfer.next(), transfer.left());
        if (moved < 0 && (errno == EAGAIN || errno == EINTR)) { return true; }
        if (moved <= 0) {
            *error = "the connection with rank " + std::to_string(lane.peer) + " is lost";
            *outcome = Outcome::lost;
            return false;
        }
        transfer.moved += size_t(moved);
        const Header& header = transfer.header;
        if (!lane.sends && transfer.moved == sizeof(Header) &&
            (header.number != received[size_t(lane.peer)]++ || !(header.call == transfer.message.call))) {
            *error = "rank " + std::to_string(rank) + " calls " + text_of(transfer.message.call) + ", rank " +
                     std::to_string(lane.peer) + " calls " + text_of(header.call);
            *outcome = Outcome::mismatch;
            return false;
        }
        if (transfer.done()) { lane.at++; }
    }
    return true;
}

Peers::Outcome Peers::exchange(const std::vector<Message>& out, const std::vector<Message>& in,
                               const Stops& stops, std::string* error) {
    std::vector<Lane> lanes;
    for (int peer = 0; peer < int(sockets.size()); peer++) {
        Lane sending{peer, true, {}}, receiving{peer, false, {}};
        for (const Message& message : out) {
            if (message.peer != peer) { continue; }
            sending.transfers.push_back({message, {sent[size_t(peer)]++, message.call}});
        }
        for (const Message& message : in) {
            if (message.peer == peer) { receiving.transfers.push_back({message, {0, message.call}}); }
        }
        lanes.push_back(std::move(sending));
        lanes.push_back(std::move(receiving));
    }
    while (true) {
        std::vector<pollfd> waiting;
        for (Lane& lane : lanes) {
            Outcome outcome = Outcome::done;
            if (!progress(lane, error, &outcome)) { return outcome; }
            const short event = lane.sends ? POLLOUT : POLLIN;
            if (!lane.done()) { waiting.push_back({sockets[size_t(lane.peer)], event, 0}); }
        }
        if (waiting.empty()) { return Outcome::done; }
        if (stops()) { return Outcome::stopped; }
        poll(waiting.data(), waiting.size(), poll_milliseconds);
    }
}

}  // namespace emulator
