// Addresses of this machine that other machines can connect to.
#pragma once
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#include <string>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/run/socket.h"

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
        if (family == AF_INET) { ipv4 = address; }
        const bool is_better = ipv6.empty() || ipv6.rfind("fe80:", 0) == 0;  // than none, or a link-local one
        if (family == AF_INET6 && is_better) { ipv6 = address; }
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
    const FileDescriptor descriptor(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    return connect(descriptor, (const sockaddr*)&far, sizeof far) == 0 ? local_address(descriptor) : "";
}

inline bool is_loopback(const std::string& address) {
    return address.rfind("127.", 0) == 0 || address == "::1";
}
