// Comm over TCP: every member is connected with every other (connections.h) and sends each its part.
//
//     all_gather, all_to_all   each member sends and receives (size - 1) * bytes
//     reduce_scatter           each member sends each owner its part; the owner adds them in order of rank
//     all_reduce               all values to all members, for the few scalars of a step
//
// A call sends to all members and receives from all at once, in one loop around poll(), on the stream's
// thread. Senders wait for no request, so a call takes one way through the network, not a round trip, and
// waiting costs no core. A lost connection, or a member that is silent for too long, is a CommError that
// names the first failure of the run (cause.h).
#pragma once
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/clock.h"
#include "llmc/comm.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/run/addresses.h"
#include "llmc/run/cause.h"
#include "llmc/run/connections.h"
#include "llmc/run/machine.h"
#include "llmc/run/socket.h"
#include "llmc/run/store.h"
#include "llmc/stream.h"

// Goes before the bytes of each call. Members that are out of step therefore notice it.
struct CallHeader {
    uint64_t call = 0, bytes = 0;

    bool operator==(const CallHeader& other) const { return call == other.call && bytes == other.bytes; }
};

// The connection with one member, and what it sends and receives in the present call.
class Link {
public:
    void connect(FileDescriptor connected) { socket = std::move(connected); }
    bool is_connected() const { return socket >= 0; }
    void close() { socket.close(); }

    // Begins to send call.bytes at `out`, and to receive as many at `in`.
    void begin(const CallHeader& call, const char* out, char* in) {
        sends = {call, const_cast<char*>(out), call.bytes, 0};
        receives = {call, in, call.bytes, 0};
    }

    bool is_done() const { return sends.is_done() && receives.is_done(); }

    // What the call still waits for; poll() ignores a descriptor of -1.
    pollfd awaited() const {
        const int events = (sends.is_done() ? 0 : POLLOUT) | (receives.is_done() ? 0 : POLLIN);
        return {is_done() ? -1 : int(socket), short(events), 0};
    }

    // Sends and receives what is possible now. CommError: the peer, of rank `peer`, is gone or out of step.
    void move(const CallHeader& call, int peer) {
        const auto send = [&](msghdr* message) { return sendmsg(socket, message, MSG_NOSIGNAL); };
        const auto receive = [&](msghdr* message) { return recvmsg(socket, message, 0); };
        const bool is_sent = sends.is_done() || sends.advance(send);
        if (!is_sent || !(receives.is_done() || receives.advance(receive))) {
            throw CommError(peer, "is gone (its connection was closed)");
        }
        if (receives.has_header() && !(receives.header == call)) {
            throw CommError(peer, "is out of step with the other members");
        }
    }

    // Bytes that were sent, and that the peer has not acknowledged.
    int unacknowledged() const { return is_done() ? 0 : bytes_on_their_way(socket); }

private:
    // A header and the data after it, in one direction. Initially it is empty and done.
    struct Flow {
        CallHeader header;
        char* data = nullptr;
        size_t bytes = 0;
        size_t moved = sizeof(CallHeader);  // of the header and the data

        bool has_header() const { return moved >= sizeof header; }
        bool is_done() const { return moved == sizeof header + bytes; }

        // transfer: sendmsg or recvmsg, of what is not moved yet. False: the connection is lost.
        template <class Transfer>
        bool advance(Transfer transfer) {
            const size_t of_header = std::min(moved, sizeof header), of_data = moved - of_header;
            iovec parts[] = {{reinterpret_cast<char*>(&header) + of_header, sizeof header - of_header},
                             {data + of_data, bytes - of_data}};
            msghdr message = {};
            message.msg_iov = parts;
            message.msg_iovlen = 2;
            const ssize_t count = transfer(&message);
            moved += size_t(std::max<ssize_t>(count, 0));
            return count != 0 && is_only_not_ready(count);
        }
    };

    FileDescriptor socket;
    Flow sends, receives;
};

// -----------------------------------------------------------------------------------------------------------
// The communicator

class TcpComm : public cpu::Comm {
public:
    explicit TcpComm(const CommGroup& group) : group(group), links(size_t(group.size)) {
        if (group.size > 1) { connect(); }
    }

    int rank() const override { return group.rank; }
    int size() const override { return group.size; }
    uint64_t progress() const override { return moves; }

    void all_gather(void* out, const void* inp, size_t bytes, cpu::Stream& stream,
                    Traffic* traffic) override {
        enqueue(stream, traffic, bytes, [=](uint64_t call) {
            char* const parts = static_cast<char*>(out);
            char* const own = parts + size_t(group.rank) * bytes;
            if (own != inp) { memmove(own, inp, bytes); }
            exchange(
                call, bytes, [=](int) { return static_cast<const char*>(inp); },
                [=](int peer) { return parts + size_t(peer) * bytes; });
        });
    }

    void all_to_all(void* out, const void* inp, size_t bytes, cpu::Stream& stream,
                    Traffic* traffic) override {
        enqueue(stream, traffic, bytes, [=](uint64_t call) {
            char* const to = static_cast<char*>(out);
            const char* const from = static_cast<const char*>(inp);
            memcpy(to + size_t(group.rank) * bytes, from + size_t(group.rank) * bytes, bytes);
            exchange(
                call, bytes, [=](int peer) { return from + size_t(peer) * bytes; },
                [=](int peer) { return to + size_t(peer) * bytes; });
        });
    }

    void reduce_scatter(float* out, const float* inp, size_t count, cpu::Stream& stream,
                        Traffic* traffic) override {
        enqueue(stream, traffic, count * sizeof(float), [=](uint64_t call) {
            reduce(call, out, inp + size_t(group.rank) * count, count,
                   [=](int peer) { return inp + size_t(peer) * count; });
        });
    }

    void all_reduce(float* values, size_t count, cpu::Stream& stream, Traffic* traffic) override {
        enqueue(stream, traffic, count * sizeof(float), [=](uint64_t call) {
            reduce(call, values, values, count, [=](int) { return values; });
        });
    }

private:
    // out = sum over the members of what each sends this one; `own` is this one's part.
    template <class OutPart>
    void reduce(uint64_t call, float* out, const float* own, size_t count, OutPart out_part) {
        scratch.resize(std::max(scratch.size(), size_t(group.size) * count));
        float* const received = scratch.data();
        exchange(
            call, count * sizeof(float),
            [=](int peer) { return reinterpret_cast<const char*>(out_part(peer)); },
            [=](int peer) { return reinterpret_cast<char*>(received + size_t(peer) * count); });
        std::vector<const float*> parts;
        for (int r = 0; r < group.size; r++) {
            parts.push_back(r == group.rank ? own : received + size_t(r) * count);
        }
        sum_parts(out, parts, count);
    }

    // out[i] = parts[0][i] + parts[1][i] + ..., in this order.
    // out may be one of the parts: sums are formed block by block beside it.
    static void sum_parts(float* out, const std::vector<const float*>& parts, size_t count) {
        const size_t block = 2048;
        float sums[block];
        for (size_t begin = 0; begin < count; begin += block) {
            const size_t n = std::min(block, count - begin);
            memcpy(sums, parts[0] + begin, n * sizeof(float));
            for (size_t r = 1; r < parts.size(); r++) {
                const float* const part = parts[r] + begin;
                for (size_t i = 0; i < n; i++) { sums[i] += part[i]; }
            }
            memcpy(out + begin, sums, n * sizeof(float));
        }
    }

    // Numbers the call in the order of issue, the same on all members, and runs `work` on the stream.
    template <class Work>
    void enqueue(cpu::Stream& stream, Traffic* traffic, size_t bytes, Work work) {
        const uint64_t call = calls++;
        stream.enqueue([=] {
            const double start = now_seconds();
            if (bytes > 0) { work(call); }
            if (traffic) {
                traffic->bytes_sent += size_t(group.size - 1) * bytes;
                traffic->bytes_received += size_t(group.size - 1) * bytes;
                traffic->seconds += now_seconds() - start;
            }
        });
    }

    // Sends out_part(peer) to every peer and receives in_part(peer) from it, `bytes` each. Throws CommError.
    // The time limit begins again whenever anything moves: a large part may take long on a slow line.
    template <class OutPart, class InPart>
    void exchange(uint64_t call, size_t bytes, OutPart out_part, InPart in_part) {
        if (group.size == 1) { return; }
        if (failure) { std::rethrow_exception(failure); }
        const CallHeader header{call, bytes};
        for (int r = 0; r < group.size; r++) {
            if (r != group.rank) { links[size_t(r)].begin(header, out_part(r), in_part(r)); }
        }
        Patience patience(group.timeout);
        for (long on_their_way = 0; !is_done();) {
            const bool has_moved = move(header);
            const long rest = has_moved ? on_their_way : unacknowledged();
            patience.has_waited(0.1);
            if (has_moved || rest < on_their_way) { moves++, patience.begin_again(); }
            if (patience.is_over()) { report_silence(); }
            on_their_way = rest;
        }
    }

    bool is_done() const {
        return std::all_of(links.begin(), links.end(), [](const Link& link) { return link.is_done(); });
    }

    // Waits up to a tenth of a second until something can be sent or received. False: nothing could.
    bool move(const CallHeader& header) {
        awaited.clear();
        for (const Link& link : links) { awaited.push_back(link.awaited()); }
        if (poll(awaited.data(), awaited.size(), 100) <= 0) { return false; }
        try {
            for (int r = 0; r < group.size; r++) {
                if (awaited[size_t(r)].revents != 0) { links[size_t(r)].move(header, r); }
            }
        } catch (const CommError& error) { fail(error.peer, error.what()); }
        return true;
    }

    long unacknowledged() const {
        long bytes = 0;
        for (const Link& link : links) { bytes += link.unacknowledged(); }
        return bytes;
    }

    // A silent peer may itself wait for a third process, in an earlier call. So every process that waits in
    // vain says so in the store, and the error names a peer that does not say so.
    [[noreturn]] void report_silence() {
        std::vector<int> silent;
        for (int r = 0; r < group.size; r++) {
            if (!links[size_t(r)].is_done()) { silent.push_back(r); }
        }
        int culprit = silent[0];
        try {
            group.store.set("waiting/" + group.member(group.rank), "");
            std::this_thread::sleep_for(std::chrono::milliseconds(500));
            auto says_nothing = [&](int r) { return !group.store.try_get("waiting/" + group.member(r)); };
            const auto found = std::find_if(silent.begin(), silent.end(), says_nothing);
            if (found != silent.end()) { culprit = *found; }
        } catch (const RunError&) {}  // the store has failed: name the first
        fail(culprit, format("has been silent for %g s (--timeout)", group.timeout));
    }

    // Reports the first failure of the run, which need not be the one seen here, and then closes the
    // connections: in this order, or the others would report this process.
    [[noreturn]] void fail(int peer, const std::string& what) {
        const Cause cause = record_cause(group.store, {group.member(peer), what});
        for (Link& link : links) { link.close(); }
        int culprit = group.size - 1;
        while (culprit >= 0 && group.member(culprit) != cause.process) { culprit--; }
        failure = std::make_exception_ptr(CommError(culprit, cause.text()));
        std::rethrow_exception(failure);
    }

    // Waits for the value that `peer` sets. CommError if the run has failed meanwhile, or after the time
    // limit.
    std::string await(const std::string& key, int peer, Patience& patience) {
        while (true) {
            if (std::optional<std::string> value = group.store.try_get(key)) { return *value; }
            check_joining(peer, patience);
            patience.pause();
        }
    }

    // While members join: CommError if the run has failed meanwhile, or after the time limit.
    void check_joining(int peer, const Patience& patience) {
        if (group.store.try_get("cause")) { fail(peer, "did not join"); }
        if (!patience.is_over()) { return; }
        fail(peer, format("did not connect within %g s (--timeout)", group.timeout));
    }

    std::string key(const char* what, int r) const { return format("%s/%s/%d", group.name.c_str(), what, r); }

    // The address for others to connect to: that of --interface, or else the local address of the route to
    // the store. If that is a loopback address and members run on other machines, that of the default route.
    std::string choose_address(Patience& patience) {
        const std::string machine = machine_name();
        group.store.set(key("machine", group.rank), machine);
        std::string other;
        for (int r = 0; r < group.size; r++) {
            const std::string theirs = await(key("machine", r), r, patience);
            if (theirs != machine) { other = theirs; }
        }
        std::string address =
            group.interface.empty() ? group.store.local_address() : interface_address(group.interface);
        if (is_loopback(address) && !other.empty()) {
            address = group.interface.empty() ? default_route_address() : "";
            if (address.empty() || is_loopback(address)) {
                throw UserError("processes run on " + machine.substr(0, machine.find('/')) + " and " +
                                other.substr(0, other.find('/')) + ", which cannot reach each other over the "
                                "loopback interface: give --interface the name of a network interface");
            }
        }
        return address;
    }

    // Connects to the members of lower ranks, then accepts connections from those of higher ranks.
    void connect() {
        Patience patience(group.timeout);
        Listener listener(choose_address(patience));
        const MemberAddress& own = listener.address();
        group.store.set(key("address", group.rank), own.text());
        const auto address_of = [&](int r) {
            const auto address = MemberAddress::parse(await(key("address", r), r, patience));
            if (address.word.size() != own.word.size()) { fail(r, "has no valid address in the store"); }
            return address;
        };
        for (int r = 0; r < group.rank; r++) {
            const auto goes_on = [&] {
                patience.has_waited(0.1);
                check_joining(r, patience);
            };
            for (int attempt = 1; attempt <= 3 && !links[size_t(r)].is_connected(); attempt++) {
                if (attempt > 1) { std::this_thread::sleep_for(std::chrono::seconds(1)); }
                check_joining(r, patience);
                links[size_t(r)].connect(connect_with(address_of(r), group.rank, own.word, goes_on));
            }
            if (!links[size_t(r)].is_connected()) {
                fail(r, "has died, or " + group.member(group.rank) + " (" + own.host +
                            ") cannot reach it: check --interface and firewalls");
            }
        }
        for (int r = group.rank + 1; r < group.size; r++) {
            while (!links[size_t(r)].is_connected()) {
                listener.accept([&](int rank, FileDescriptor socket) {
                    if (rank <= group.rank || rank >= group.size) { return; }
                    const std::string answer = address_of(rank).word;
                    if (send(socket, answer.data(), answer.size(), MSG_NOSIGNAL) == ssize_t(answer.size())) {
                        links[size_t(rank)].connect(std::move(socket));
                    }
                });
                patience.has_waited(0.1);
                if (!links[size_t(r)].is_connected()) { check_joining(r, patience); }
            }
        }
    }

    const CommGroup group;
    std::vector<Link> links;      // by rank; this member's own is not used
    std::vector<pollfd> awaited;  // by rank, in move()
    uint64_t calls = 0;
    std::atomic<uint64_t> moves{0};  // how often data moved, in all calls
    std::vector<float> scratch;      // kept from call to call: calls run one after the other, on one stream
    std::exception_ptr failure;
};

// Joins the members of a group. Blocks until all are connected. Throws UserError (no such interface) or
// CommError.
inline std::unique_ptr<cpu::Comm> make_comm_tcp(const CommGroup& group) {
    return std::make_unique<TcpComm>(group);
}
