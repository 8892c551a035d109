// Comm over Gloo's TCP transport: every member is connected with every other and sends each its part.
//
//     all_gather, all_to_all   each member sends and receives (size - 1) * bytes
//     reduce_scatter           each member sends each owner its part; the owner adds them in order of rank
//     all_reduce               all values to all members, for the few scalars of a step
//
// Gloo moves the bytes: its own thread sits in epoll and the stream's thread sleeps, so that waiting costs no
// core. Gloo's collectives are not used, since they cannot say which member failed. Here a lost connection or
// a member that is silent for too long is a CommError that names the first failure of the run (cause.h).
#pragma once
#include <arpa/inet.h>
#include <gloo/common/error.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/run/cause.h"
#include "llmc/comm.h"
#include "llmc/error.h"
#include "llmc/run/machine.h"
#include "llmc/run/socket.h"
#include "llmc/run/store.h"
#include "llmc/stream.h"

// -----------------------------------------------------------------------------------------------------------
// Addresses

inline bool is_link_local(const std::string& address) { return address.rfind("fe80:", 0) == 0; }

// The address of a network interface: IPv4 if it has one, link-local only if it has no other. If it has none,
// the UserError names all interfaces that have one.
inline std::string interface_address(const std::string& interface) {
    ifaddrs* list = nullptr;
    if (getifaddrs(&list) != 0) { throw RunError(format("getifaddrs failed (%s)", strerror(errno))); }
    std::string ipv4, ipv6, names;
    for (const ifaddrs* i = list; i; i = i->ifa_next) {
        const int family = i->ifa_addr ? i->ifa_addr->sa_family : AF_UNSPEC;
        if (family != AF_INET && family != AF_INET6) { continue; }
        if ((names + ",").find(std::string(i->ifa_name) + ",") == std::string::npos) {
            names += (names.empty() ? "" : ", ") + std::string(i->ifa_name);
        }
        if (interface != i->ifa_name) { continue; }
        const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
        const std::string address = numeric_address(i->ifa_addr, length);
        if (family == AF_INET) {
            ipv4 = address;
        } else if (ipv6.empty() || is_link_local(ipv6)) {
            ipv6 = address;
        }
    }
    freeifaddrs(list);
    if (ipv4.empty() && ipv6.empty()) {
        throw UserError("no network interface " + interface + " with an address: give --interface one of " +
                        names);
    }
    return ipv4.empty() ? ipv6 : ipv4;
}

// The address from which this machine reaches other networks. Connecting a UDP socket sends nothing.
inline std::string default_route_address() {
    sockaddr_in far = {};
    far.sin_family = AF_INET;
    far.sin_port = htons(9);
    inet_pton(AF_INET, "192.0.2.1", &far.sin_addr);  // reserved for documentation: never a local network
    const int descriptor = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    std::string address;
    if (connect(descriptor, (const sockaddr*)&far, sizeof far) == 0) { address = local_address(descriptor); }
    close(descriptor);
    return address;
}

inline bool is_loopback(const std::string& address) {
    return address.rfind("127.", 0) == 0 || address == "::1";
}

// -----------------------------------------------------------------------------------------------------------
// One transfer

// One send to a peer, or one receive from it, of `bytes` at `data`.
struct Transfer {
    Transfer(gloo::transport::Context& context, void* data, size_t bytes, int peer, bool receives)
        : buffer(context.createUnboundBuffer(data, bytes)), peer(peer), receives(receives) {}

    void start(uint64_t slot) { receives ? buffer->recv(peer, slot) : buffer->send(peer, slot); }

    // Returns true when it is done, false when interrupted. Throws gloo::Exception if the connection has
    // failed. There is no time limit, because a wait of Gloo's that times out closes all connections: the
    // others would report this process before it can write down which process was silent.
    bool wait() {
        const std::chrono::milliseconds unlimited = std::chrono::hours(24 * 365);
        return receives ? buffer->waitRecv(unlimited) : buffer->waitSend(unlimited);
    }

    // Makes the present wait, or else the next one, return false.
    void interrupt() { receives ? buffer->abortWaitRecv() : buffer->abortWaitSend(); }

    // Throws gloo::Exception if the connection has failed. Returns at once.
    void check() {
        interrupt();
        wait();
    }

    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    const int peer;
    const bool receives;
    bool is_done = false;  // as a wait has found
};

// Interrupts a wait ten times a second, so that the waiting thread can look at all its transfers.
class Interrupter {
public:
    Interrupter() : thread([this] { run(); }) {}
    ~Interrupter() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
        }
        changed.notify_all();
        thread.join();
    }

    // From now on the wait for `transfer` is interrupted, and no other; null: none is.
    void watch(Transfer* transfer) {
        std::lock_guard<std::mutex> lock(mutex);
        awaited = transfer;
    }

private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return closing; })) {
            if (awaited) { awaited->interrupt(); }
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    Transfer* awaited = nullptr;
    bool closing = false;
    std::thread thread;
};

// Threads that are started during its life do not preempt other threads when they wake up. It is meant for
// Gloo's thread, which spins on the lock of a connection: if it preempts the very thread that holds the lock,
// it spins for a whole time slice. (Exchanges of one value, on two busy cores: 0.2 to 0.7 ms instead of up to
// 4 ms, and a tenth of the CPU time.)
class PatientThreads {
public:
    PatientThreads() : is_usual(sched_getscheduler(0) == SCHED_OTHER) { set(SCHED_BATCH); }
    PatientThreads(const PatientThreads&) = delete;
    PatientThreads& operator=(const PatientThreads&) = delete;
    ~PatientThreads() { set(SCHED_OTHER); }

private:
    void set(int policy) const {
        const sched_param parameters = {};
        if (is_usual) { sched_setscheduler(0, policy, &parameters); }
    }
    const bool is_usual;
};

// -----------------------------------------------------------------------------------------------------------
// The communicator

class GlooComm : public cpu::Comm {
public:
    explicit GlooComm(const CommGroup& group)
        : store(group.store),
          name(group.name),
          my_rank(group.rank),
          my_size(group.size),
          timeout(group.timeout),
          members(names_of_members(group)) {
        if (my_size > 1) { connect(group.interface); }
    }

    int rank() const override { return my_rank; }
    int size() const override { return my_size; }

    void all_gather(void* out, const void* inp, size_t bytes, cpu::Stream& stream,
                    Traffic* traffic) override {
        enqueue(stream, traffic, bytes, [=](uint64_t call) {
            char* const parts = static_cast<char*>(out);
            char* const own = parts + size_t(my_rank) * bytes;
            if (own != inp) { memmove(own, inp, bytes); }
            exchange(call, bytes, [=](int) { return static_cast<const char*>(inp); },
                     [=](int peer) { return parts + size_t(peer) * bytes; });
        });
    }

    void all_to_all(void* out, const void* inp, size_t bytes, cpu::Stream& stream,
                    Traffic* traffic) override {
        enqueue(stream, traffic, bytes, [=](uint64_t call) {
            char* const to = static_cast<char*>(out);
            const char* const from = static_cast<const char*>(inp);
            memcpy(to + size_t(my_rank) * bytes, from + size_t(my_rank) * bytes, bytes);
            exchange(call, bytes, [=](int peer) { return from + size_t(peer) * bytes; },
                     [=](int peer) { return to + size_t(peer) * bytes; });
        });
    }

    void reduce_scatter(float* out, const float* inp, size_t count, cpu::Stream& stream,
                        Traffic* traffic) override {
        enqueue(stream, traffic, count * sizeof(float), [=](uint64_t call) {
            reduce(call, out, inp + size_t(my_rank) * count, count, Reduction::sum,
                   [=](int peer) { return inp + size_t(peer) * count; });
        });
    }

    void all_reduce(float* values, size_t count, Reduction reduction, cpu::Stream& stream,
                    Traffic* traffic) override {
        enqueue(stream, traffic, count * sizeof(float), [=](uint64_t call) {
            reduce(call, values, values, count, reduction, [=](int) { return values; });
        });
    }

private:
    using Clock = std::chrono::steady_clock;

    static std::vector<std::string> names_of_members(const CommGroup& group) {
        std::vector<std::string> names;
        for (int r = 0; r < group.size; r++) { names.push_back(group.member(r)); }
        return names;
    }

    // out = sum or maximum over the members of what each sends this one; `own` is this one's part.
    template <class OutPart>
    void reduce(uint64_t call, float* out, const float* own, size_t count, Reduction reduction,
                OutPart out_part) {
        float* const received = scratch_for(size_t(my_size) * count);
        exchange(call, count * sizeof(float),
                 [=](int peer) { return reinterpret_cast<const char*>(out_part(peer)); },
                 [=](int peer) { return reinterpret_cast<char*>(received + size_t(peer) * count); });
        std::vector<const float*> parts;
        for (int r = 0; r < my_size; r++) {
            parts.push_back(r == my_rank ? own : received + size_t(r) * count);
        }
        reduce_parts(out, parts, count, reduction);
    }

    // out[i] = parts[0][i] + parts[1][i] + ..., in this order, or their maximum (NaN if one is).
    // out may be one of the parts: sums are formed block by block beside it.
    static void reduce_parts(float* out, const std::vector<const float*>& parts, size_t count,
                             Reduction reduction) {
        const size_t block = 2048;
        float sums[block];
        for (size_t begin = 0; begin < count; begin += block) {
            const size_t n = std::min(block, count - begin);
            memcpy(sums, parts[0] + begin, n * sizeof(float));
            for (size_t r = 1; r < parts.size(); r++) {
                const float* const part = parts[r] + begin;
                if (reduction == Reduction::sum) {
                    for (size_t i = 0; i < n; i++) { sums[i] += part[i]; }
                } else {
                    for (size_t i = 0; i < n; i++) {
                        sums[i] = part[i] > sums[i] || part[i] != part[i] ? part[i] : sums[i];
                    }
                }
            }
            memcpy(out + begin, sums, n * sizeof(float));
        }
    }

    // Kept from call to call: calls of one communicator run one after the other, on one stream.
    float* scratch_for(size_t count) {
        if (count > scratch_count) {
            scratch.reset(new float[count]);
            scratch_count = count;
        }
        return scratch.get();
    }

    // Numbers the call in the order of issue, the same on all members, and runs `work` on the stream.
    template <class Work>
    void enqueue(cpu::Stream& stream, Traffic* traffic, size_t bytes, Work work) {
        const uint64_t call = calls++;
        stream.enqueue([=] {
            const Clock::time_point start = Clock::now();
            if (bytes > 0) { work(call); }
            if (traffic) {
                traffic->bytes_sent += size_t(my_size - 1) * bytes;
                traffic->bytes_received += size_t(my_size - 1) * bytes;
                traffic->seconds += std::chrono::duration<double>(Clock::now() - start).count();
            }
        });
    }

    // Sends out_part(peer) to every peer and receives in_part(peer) from it, `bytes` each. Throws CommError.
    template <class OutPart, class InPart>
    void exchange(uint64_t call, size_t bytes, OutPart out_part, InPart in_part) {
        if (my_size == 1) { return; }
        if (failure) { std::rethrow_exception(failure); }
        NoSigpipe no_sigpipe;
        // The bytes of different calls never meet in one slot, even if members are out of step.
        const uint64_t slot = (call & 0xFFFFFF) << 40 | bytes;
        std::vector<Transfer> transfers;
        // Each member begins with the next one, so that no member is the first target of all others.
        for (bool receives : {true, false}) {
            for (int distance = 1; distance < my_size; distance++) {
                const int peer = (my_rank + (receives ? my_size - distance : distance)) % my_size;
                void* const data = receives ? in_part(peer) : const_cast<char*>(out_part(peer));
                transfers.emplace_back(*context, data, bytes, peer, receives);
                guard(transfers.back(), [&](Transfer& transfer) { transfer.start(slot); });
            }
        }
        wait_for_all(transfers, bytes);
    }

    // Waits a moment for each in turn, until all are done. The time limit starts again with each that is
    // done: many transfers may share a slow line. In between it checks all of them: the transfer whose peer
    // has died need not be the one that is waited for.
    void wait_for_all(std::vector<Transfer>& transfers, size_t bytes) {
        Patience patience(timeout);
        for (size_t done = 0, next = 0; done < transfers.size(); next = (next + 1) % transfers.size()) {
            if (transfers[next].is_done) { continue; }
            if (is_done_soon(transfers[next])) {
                done++;
                patience.begin_again();
                continue;
            }
            patience.has_waited(0.1);
            for (Transfer& transfer : transfers) { guard(transfer, [](Transfer& t) { t.check(); }); }
            if (patience.is_over()) { return report_silence(transfers, bytes); }
        }
    }

    // Waits for the transfer, at most a tenth of a second.
    bool is_done_soon(Transfer& transfer) {
        if (transfer.is_done) { return true; }
        interrupter->watch(&transfer);
        guard(transfer, [](Transfer& t) { t.is_done = t.wait(); });
        interrupter->watch(nullptr);
        return transfer.is_done;
    }

    // A silent peer may itself wait for a third process, in an earlier call. So every process that waits in
    // vain says so in the store, and the error names a peer that does not say so.
    // Returns if all transfers are done after all, otherwise throws CommError. `bytes`: of one transfer
    void report_silence(std::vector<Transfer>& transfers, size_t bytes) {
        std::vector<int> silent;
        for (Transfer& transfer : transfers) {
            if (!is_done_soon(transfer)) { silent.push_back(transfer.peer); }
        }
        if (silent.empty()) { return; }
        int culprit = silent[0];
        try {
            store.set("waiting/" + members[size_t(my_rank)], "");
            std::this_thread::sleep_for(std::chrono::milliseconds(500));
            auto says_nothing = [&](int peer) { return !store.try_get("waiting/" + members[size_t(peer)]); };
            const auto found = std::find_if(silent.begin(), silent.end(), says_nothing);
            if (found != silent.end()) { culprit = *found; }
        } catch (const RunError&) {}  // the store has failed: name the first
        if (bytes < 1'000'000) { fail(culprit, format("has been silent for %g s (--timeout)", timeout)); }
        // Part of a large transfer may have arrived, which cannot be seen from here.
        fail(culprit, format("did not finish an exchange of %.0f MB within %g s (--timeout)",
                             double(bytes) / 1e6, timeout));
    }

    // Does `work`. An exception of Gloo's means that the transfer's peer is gone.
    template <class Work>
    void guard(Transfer& transfer, Work work) {
        try {
            work(transfer);
        } catch (const gloo::Exception&) {
            interrupter->watch(nullptr);
            fail(transfer.peer, "is gone (its connection was closed)");
        }
    }

    // Reports the first failure of the run, which need not be the one seen here, and then closes the
    // connections: in this order, or the others would report this process.
    [[noreturn]] void fail(int peer, const std::string& what) {
        const Cause cause = record_cause(store, {members[size_t(peer)], what});
        for (int r = 0; context && r < my_size; r++) {
            if (r != my_rank && context->getPair(r)) { context->getPair(r)->close(); }
        }
        const auto found = std::find(members.begin(), members.end(), cause.process);
        const int culprit = found == members.end() ? -1 : int(found - members.begin());
        failure = std::make_exception_ptr(CommError(culprit, cause.text()));
        std::rethrow_exception(failure);
    }

    // Waits for the value that `peer` sets. CommError if the run has failed meanwhile, or after the time
    // limit.
    std::string await(const std::string& key, int peer, Patience& patience) {
        while (true) {
            if (std::optional<std::string> value = store.try_get(key)) { return *value; }
            if (store.try_get("cause")) { fail(peer, "did not come"); }
            if (patience.is_over()) {
                fail(peer, format("did not connect within %g s (--timeout)", timeout));
            }
            patience.pause();
        }
    }

    std::string key(const char* what, int r) const { return name + "/" + what + "/" + std::to_string(r); }

    // The address for others to connect to: the interface's, or the one that leads to the store. If that is
    // the loopback and there are members on other machines, the one that leads out.
    std::string choose_address(const std::string& interface, Patience& patience) {
        const std::string machine = machine_name();
        store.set(key("machine", my_rank), machine);
        std::string other;
        for (int r = 0; r < my_size; r++) {
            const std::string theirs = await(key("machine", r), r, patience);
            if (theirs != machine) { other = theirs; }
        }
        std::string address = interface.empty() ? store.local_address() : interface_address(interface);
        if (is_loopback(address) && !other.empty()) {
            address = interface.empty() ? default_route_address() : "";
            if (address.empty() || is_loopback(address)) {
                throw UserError(
                    "processes run on " + machine.substr(0, machine.find('/')) + " and " +
                    other.substr(0, other.find('/')) +
                    ", which the loopback does not join: give --interface the name of a network interface");
            }
        }
        return address;
    }

    // Publishes an address for each peer (Gloo listens on a socket for each), then connects in order of rank.
    void connect(const std::string& interface) {
        NoSigpipe no_sigpipe;  // Gloo's thread is started here and never gets one
        Patience patience(timeout);
        const std::string address = choose_address(interface, patience);
        gloo::transport::tcp::attr attributes(address.c_str());
        try {
            PatientThreads patient_threads;
            device = gloo::transport::tcp::CreateDevice(attributes);
        } catch (const std::exception& error) {
            throw RunError("cannot listen on " + address + " (" + error.what() + ")");
        }
        context = device->createContext(my_rank, my_size);
        interrupter = std::make_unique<Interrupter>();
        // Gloo waits five times as long for a connection.
        const double milliseconds = std::min(std::max(1.0, timeout * 1000 / 5), 1e9);
        context->setTimeout(std::chrono::milliseconds(long(milliseconds)));
        auto address_key = [&](int of, int for_peer) {
            return key("address", of) + "/" + std::to_string(for_peer);
        };
        for (int r = 0; r < my_size; r++) {
            if (r == my_rank) { continue; }
            const std::vector<char> own = context->createPair(r)->address().bytes();
            store.set(address_key(my_rank, r), std::string(own.begin(), own.end()));
        }
        for (int r = 0; r < my_size; r++) {
            if (r == my_rank) { continue; }
            const std::string bytes = await(address_key(r, my_rank), r, patience);
            const std::vector<char> theirs(bytes.begin(), bytes.end());
            try {
                context->getPair(r)->connect(theirs);
            } catch (const gloo::Exception&) {
                fail(r, "has died, or cannot be reached from " + members[size_t(my_rank)] + " at " + address +
                        " (then look at --interface and at firewalls)");
            }
        }
    }

    Store& store;
    const std::string name;
    const int my_rank, my_size;
    const double timeout;
    const std::vector<std::string> members;
    std::shared_ptr<gloo::transport::Device> device;
    std::shared_ptr<gloo::transport::Context> context;
    std::unique_ptr<Interrupter> interrupter;
    uint64_t calls = 0;
    std::unique_ptr<float[]> scratch;
    size_t scratch_count = 0;
    std::exception_ptr failure;
};

// Joins the members of a group. Blocks until all are connected. Throws UserError (no such interface) or
// CommError.
inline std::unique_ptr<cpu::Comm> make_comm_gloo(const CommGroup& group) {
    return std::make_unique<GlooComm>(group);
}
