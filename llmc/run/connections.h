// The TCP connections between the members of a communicator, each of which has one with every other. A member
// publishes its address and a random word in the store, which only the run's processes can read:
//     NAME/address/R     "WORD ADDRESS PORT"
// It connects to every member of a lower rank, shows that member's word, and expects its own word in
// return. Whoever connects without the word, such as a port scanner or a health check, is turned away.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <list>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/run/store.h"

// A TCP socket, made non-blocking, that child processes do not inherit.
// A keepalive probe each minute keeps firewalls from forgetting an idle connection. Unanswered probes end it
// only after two hours; long before that, its user has found the other side silent.
inline FileDescriptor tcp_socket(int descriptor) {
    const int yes = 1, seconds = 60, unanswered = 127;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);  // what is sent goes out at once
    setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
    setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
    setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
    setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPCNT, &unanswered, sizeof unanswered);
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
    return FileDescriptor(descriptor);
}

// True if it succeeded, or will when the socket is ready again; false if the connection is lost.
inline bool is_only_not_ready(ssize_t result) {
    return result >= 0 || errno == EAGAIN || errno == EINTR || errno == EINPROGRESS;
}

// Waits up to `milliseconds` until the socket is ready for the events (POLLIN, POLLOUT).
inline bool is_ready(int descriptor, short events, int milliseconds) {
    pollfd one = {descriptor, events, 0};
    return poll(&one, 1, milliseconds) > 0;
}

// Where a member listens, and the word that others show it.
struct MemberAddress {
    std::string word, host;
    int port = 0;

    std::string text() const { return word + " " + host + " " + std::to_string(port); }
    static MemberAddress parse(const std::string& text) {
        MemberAddress address;
        std::istringstream(text) >> address.word >> address.host >> address.port;
        return address;
    }

    // A socket of the address's family, bound to it (listens) or connecting with it. -1, with errno, if that
    // fails.
    FileDescriptor open(bool listens) const {
        addrinfo hints = {}, *found = nullptr;
        hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
        hints.ai_socktype = SOCK_STREAM;
        if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
            errno = EADDRNOTAVAIL;
            return FileDescriptor();
        }
        FileDescriptor socket = tcp_socket(::socket(found->ai_family, SOCK_STREAM, 0));
        const bool is_open =
            listens ? bind(socket, found->ai_addr, found->ai_addrlen) == 0 && listen(socket, SOMAXCONN) == 0
                    : is_only_not_ready(connect(socket, found->ai_addr, found->ai_addrlen));
        freeaddrinfo(found);
        return is_open ? std::move(socket) : FileDescriptor();
    }
};

// What the connecting side sends first; the other answers with a word of the same length.
struct Greeting {
    static constexpr int word_bytes = 32;
    char word[word_bytes];
    int32_t rank;
};

class Listener {
public:
    // On a free port of the address. RunError if there is none.
    explicit Listener(const std::string& host) {
        own = {random_hex(Greeting::word_bytes / 2), host, 0};
        socket = own.open(true);
        if (socket < 0) { throw RunError("cannot listen on " + host + " (" + strerror(errno) + ")"); }
        sockaddr_storage bound;
        socklen_t length = sizeof bound;
        getsockname(socket, (sockaddr*)&bound, &length);
        own.port = ntohs(bound.ss_family == AF_INET6 ? ((sockaddr_in6&)bound).sin6_port
                                                     : ((sockaddr_in&)bound).sin_port);
    }

    const MemberAddress& address() const { return own; }

    // Waits up to 0.1 s, and calls member(rank, connection) for each connection that has shown the word.
    template <class Member>
    void accept(Member member) {
        std::vector<pollfd> ready = {{socket, POLLIN, 0}};
        for (const Guest& guest : guests) { ready.push_back({guest.socket, POLLIN, 0}); }
        poll(ready.data(), ready.size(), 100);
        const auto stays = [&](Guest& guest) {
            const bool is_unheard = guest.listens() && !guest.patience.is_over();
            if (guest.is_whole() && memcmp(guest.greeting.word, own.word.data(), own.word.size()) == 0) {
                member(int(guest.greeting.rank), std::move(guest.socket));
            }
            return is_unheard;
        };
        for (auto guest = guests.begin(); guest != guests.end();) {
            guest = stays(*guest) ? std::next(guest) : guests.erase(guest);
        }
        for (int one; (one = ::accept(socket, nullptr, nullptr)) >= 0;) {
            guests.emplace_back(one);  // each is heard at least once before it makes room for others
            if (!stays(guests.back())) { guests.pop_back(); }
            if (guests.size() > most_guests) { guests.pop_front(); }
        }
        if (errno == EMFILE || errno == ENFILE) { poll(nullptr, 0, 100); }  // until there is room for one
    }

private:
    // A connection that has not shown the word yet.
    struct Guest {
        explicit Guest(int descriptor) : socket(tcp_socket(descriptor)) {}

        // Reads more of the greeting. False: it is whole, or the connection is lost.
        bool listens() {
            char* const to = reinterpret_cast<char*>(&greeting);
            const ssize_t count = recv(socket, to + bytes, sizeof greeting - bytes, 0);
            bytes += size_t(std::max<ssize_t>(count, 0));
            return count != 0 && !is_whole() && is_only_not_ready(count);
        }
        bool is_whole() const { return bytes == sizeof greeting; }

        FileDescriptor socket;
        Greeting greeting;
        size_t bytes = 0;
        Patience patience{10};
    };
    static constexpr size_t most_guests = 200;

    MemberAddress own;
    FileDescriptor socket;
    std::list<Guest> guests;
};

// Connects to a member that listens, as member `rank`, and checks that it answers with `own_word`.
// goes_on(): called every tenth of a second; it throws to end the wait. An invalid socket, with errno, if the
// member is gone.
template <class GoesOn>
FileDescriptor connect_with(const MemberAddress& member, int rank, const std::string& own_word,
                            GoesOn goes_on) {
    FileDescriptor socket = member.open(false);
    const auto wait_for = [&](short events) {
        while (!is_ready(socket, events, 100)) { goes_on(); }
    };
    if (socket < 0) { return socket; }
    wait_for(POLLOUT);
    Greeting greeting;
    memcpy(greeting.word, member.word.data(), sizeof greeting.word);
    greeting.rank = rank;
    const bool is_sent = send(socket, &greeting, sizeof greeting, MSG_NOSIGNAL) == sizeof greeting;
    if (!is_sent) { return FileDescriptor(); }
    std::string answer(own_word.size(), '\0');
    for (size_t bytes = 0; bytes < answer.size();) {
        wait_for(POLLIN);
        const ssize_t count = recv(socket, &answer[bytes], answer.size() - bytes, 0);
        if (count == 0 || !is_only_not_ready(count)) { return FileDescriptor(); }
        bytes += size_t(std::max<ssize_t>(count, 0));
    }
    return answer == own_word ? std::move(socket) : FileDescriptor();
}
