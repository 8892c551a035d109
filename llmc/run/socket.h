// A connected TCP socket as a stream of bytes; over TLS: tls.h. The time limit is one of silence, not of the
// whole transfer: 64 MiB take a minute at 10 Mbit/s, and longer on a shared line. The other side is silent
// while it neither sends anything nor acknowledges bytes that were sent to it.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "llmc/error.h"
#include "llmc/run/store.h"

inline std::string numeric_address(const sockaddr* address, socklen_t length) {
    char text[NI_MAXHOST];
    if (getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) { return ""; }
    return text;
}

// This machine's address on a connection; empty if that cannot be found.
inline std::string local_address(int descriptor) {
    sockaddr_storage local;
    socklen_t length = sizeof local;
    if (getsockname(descriptor, (sockaddr*)&local, &length) != 0) { return ""; }
    return numeric_address((const sockaddr*)&local, length);
}

struct ConnectionLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Bytes sent on a connection that the other side has not acknowledged. 0: there is no connection.
inline int bytes_on_their_way(int descriptor) {
    int bytes = 0;
    return ioctl(descriptor, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

class Socket {
public:
    // The caller closes `descriptor`; processes that this one starts do not inherit it. `silence`: seconds
    // after which the connection is lost.
    Socket(int descriptor, double silence) : descriptor(descriptor), silence(silence) {
        fcntl(descriptor, F_SETFD, FD_CLOEXEC);
        fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
    }
    Socket(const Socket&) = delete;
    virtual ~Socket() = default;

    void limit_silence(double seconds) { silence = seconds; }

    // Returns when the kernel has all of it. Throws ConnectionLost, as do all functions below.
    void send(const char* data, size_t bytes) {
        NoSigpipe no_sigpipe;
        for (size_t sent = 0; sent < bytes;) { sent += send_some(data + sent, bytes - sent); }
    }

    // Returns the number of bytes received: at least one.
    size_t receive(char* data, size_t bytes) {
        NoSigpipe no_sigpipe;
        return receive_some(data, bytes);
    }

protected:
    virtual size_t send_some(const char* data, size_t bytes) {
        while (true) {
            const ssize_t count = ::send(descriptor, data, bytes, 0);
            if (count >= 0) { return size_t(count); }
            wait_or_fail(POLLOUT);
        }
    }
    virtual size_t receive_some(char* data, size_t bytes) {
        while (true) {
            const ssize_t count = recv(descriptor, data, bytes, 0);
            if (count > 0) { return size_t(count); }
            if (count == 0) { throw ConnectionLost("the server closed the connection"); }
            wait_or_fail(POLLIN);
        }
    }

    // Returns when the socket can be read (POLLIN) or written to (POLLOUT).
    void wait_for(short events) const {
        const int step = int(1000 * std::clamp(silence / 4, 0.001, 0.25));
        Patience patience(silence);
        int unacknowledged = bytes_on_their_way(descriptor);
        while (true) {
            pollfd one = {descriptor, events, 0};
            const int ready = poll(&one, 1, step);
            patience.has_waited(0.001 * step);
            if (ready > 0) { return; }
            if (ready < 0 && errno != EINTR) { throw ConnectionLost(strerror(errno)); }
            const int rest = bytes_on_their_way(descriptor);
            if (rest < unacknowledged) { patience.begin_again(); }
            unacknowledged = rest;
            if (patience.is_over()) { throw ConnectionLost(format("silent for %.3g s", silence)); }
        }
    }

    const int descriptor;

private:
    void wait_or_fail(short events) const {
        if (errno == EINTR) { return; }
        if (errno != EAGAIN) { throw ConnectionLost(strerror(errno)); }
        wait_for(events);
    }

    double silence;
};
