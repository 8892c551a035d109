// relay: a wide-area network on one machine. It makes sites, each a network namespace (and a host name) whose
// only way out is a TUN device, and carries IPv4 packets between them as access lines and the distance would.
// What site s sends to site d passes, in this order,
//
//     s's uplink     a queue, and a line of so many bits a second; what finds the queue full is dropped
//     the distance   delay_s + delay_d; each packet is lost with s's probability (seeded)
//     d's downlink   a queue and a line again
//
// Lines are virtual time: a packet is through at max(when it came, when the line was free) + bits / rate. So
// this process being late delays a packet and does not slow a busy line. Unlimited lines take no time.
//
// Prints a line of JSON when all sites are there, and one of what it counted when SIGTERM or SIGINT ends it.
// Sites have no names and no files: they are gone with the last process that is in them or holds them open.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <net/route.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using Time = int64_t;  // nanoseconds of the monotonic clock
const Time second = 1000000000;
const char* const interface = "wan0";
const size_t largest_packet = 65536;

// A mistake of the user's: what is wrong, and what to do.
struct UserError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] static void fail(const std::string& what, const std::string& what_to_do) {
    throw UserError(what + " (" + strerror(errno) + "): " + what_to_do);
}

static Time now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * second + t.tv_nsec;
}

// -----------------------------------------------------------------------------------------------------------
// Options: of a site, one value for all of them or one for each, with commas between them

struct Options {
    int sites = 2;
    int mtu = 1500;
    uint64_t seed = 1;
    std::vector<double> up = {0}, down = {0};  // Mbit/s; 0: unlimited
    std::vector<double> delay = {0};           // ms between the site and the middle of the network
    std::vector<double> loss = {0};            // probability
    std::vector<double> buffer = {50};         // ms that a full queue takes to leave
    std::vector<std::string> sysctls;          // NAME=VALUE, set in each site: net/ipv4/tcp_sack=0
};

static double of_site(const std::vector<double>& values, int site) {
    return values.size() == 1 ? values[0] : values[size_t(site)];
}

static double parse_number(const std::string& text, const std::string& option) {
    char* end;
    const double value = strtod(text.c_str(), &end);
    if (text.empty() || *end != 0 || !(value >= 0 && value < 1e9)) {
        throw UserError(option + " has '" + text + "': give a number of at least 0");
    }
    return value;
}

static std::vector<double> parse_list(const std::string& text, const std::string& option) {
    std::vector<double> values;
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        values.push_back(parse_number(text.substr(at, end - at), option));
        at = end + 1;
    }
    return values;
}

static void check(const Options& o) {
    if (o.sites < 2 || o.sites > 64) { throw UserError("--sites is none of 2 to 64: correct it"); }
    if (o.mtu < 576 || o.mtu > 65000) { throw UserError("--mtu is none of 576 to 65000: correct it"); }
    for (const auto* values : {&o.up, &o.down, &o.delay, &o.loss, &o.buffer}) {
        if (values->size() != 1 && int(values->size()) != o.sites) {
            throw UserError("a list has neither one value nor one for each site: correct it");
        }
    }
    for (double p : o.loss) {
        if (p >= 1) { throw UserError("--loss is a probability: give less than 1"); }
    }
    for (const std::string& sysctl : o.sysctls) {  // all others are the whole machine's
        if (sysctl.rfind("net/", 0) != 0 || sysctl.find("..") != std::string::npos) {
            throw UserError("--sysctl " + sysctl + " is none of a site's network: give net/...=VALUE");
        }
    }
}

static Options parse_options(int argc, char** argv) {
    Options o;
    for (int i = 1; i < argc; i += 2) {
        const std::string name = argv[i];
        if (i + 1 == argc) { throw UserError(name + " lacks its value: give one"); }
        const std::string value = argv[i + 1];
        const std::map<std::string, std::vector<double>*> lists = {{"--up", &o.up},
                                                                   {"--down", &o.down},
                                                                   {"--delay", &o.delay},
                                                                   {"--loss", &o.loss},
                                                                   {"--buffer", &o.buffer}};
        if (const auto list = lists.find(name); list != lists.end()) {
            *list->second = parse_list(value, name);
        } else if (name == "--sites") {
            o.sites = int(parse_number(value, name));
        } else if (name == "--mtu") {
            o.mtu = int(parse_number(value, name));
        } else if (name == "--seed") {
            o.seed = uint64_t(parse_number(value, name));
        } else if (name == "--sysctl" && value.find('=') != std::string::npos) {
            o.sysctls.push_back(value);
        } else {
            throw UserError(name + " " + value +
                            " is unknown: give --sites --mtu --seed --sysctl NAME=VALUE "
                            "--up --down (Mbit/s) --delay --buffer (ms) --loss (probability)");
        }
    }
    check(o);
    return o;
}

// -----------------------------------------------------------------------------------------------------------
// Lines

struct Packet {
    std::unique_ptr<char[]> data;
    size_t bytes;
};

// One direction of a site's access line.
struct Line {
    double rate;       // bits a nanosecond; 0: unlimited
    Time longest;      // what a full queue takes to leave
    Time free_at = 0;  // when all that it has taken will have left
    uint64_t packets = 0, bytes = 0, dropped = 0;

    // At least 32 packets find room in a queue, as in those of routers, which are counted in packets.
    Line(double megabits, double buffer_ms, int mtu) : rate(megabits / 1000), longest(Time(buffer_ms * 1e6)) {
        if (rate > 0) { longest = std::max(longest, Time(32 * 8 * mtu / rate)); }
    }

    // When a packet that comes at `time` has left the line; -1 where it finds the queue full.
    Time pass(Time time, size_t size) {
        const Time takes = rate > 0 ? Time(8 * double(size) / rate) : 0;
        const Time start = std::max(time, free_at);
        if (rate > 0 && start - time + takes > longest) {
            dropped++;
            return -1;
        }
        packets++;
        bytes += size;
        return free_at = start + takes;
    }
};

// -----------------------------------------------------------------------------------------------------------
// Sites

struct Descriptor {
    explicit Descriptor(int number = -1) : number(number) {}
    Descriptor(Descriptor&& other) noexcept : number(std::exchange(other.number, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number, other.number);
        return *this;
    }
    ~Descriptor() {
        if (number >= 0) { close(number); }
    }
    int number;
};

struct Site {
    Descriptor tun, network, host_name;
    Line up, down;
    Time delay;
    double loss;
    std::mt19937_64 random;          // of the losses
    uint64_t lost = 0, refused = 0;  // refused: packets that the device did not take, or for nobody's address
};

static in_addr_t address_of(int site) { return htonl(0x0A4D0001u + uint32_t(site)); }  // 10.77.0.1 and so on

static sockaddr ipv4(in_addr_t address) {
    sockaddr_in in = {};
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = address;
    sockaddr any;
    memcpy(&any, &in, sizeof any);
    return any;
}

static void set_sysctl(const std::string& name, const std::string& value) {
    std::ofstream file("/proc/sys/" + name);
    if (!(file << value << std::flush)) { fail("cannot set " + name + " to " + value, "leave it out"); }
}

static ifreq request_for(const char* name) {
    ifreq request = {};
    strncpy(request.ifr_name, name, sizeof request.ifr_name - 1);
    return request;
}

// Address, MTU and a default route on the present network's device; a loopback, as every machine has.
static void configure(int site, const Options& o) {
    const Descriptor any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    auto set = [&](unsigned long what, void* request, const char* name) {
        if (ioctl(any.number, what, request) != 0) {
            fail(std::string("cannot set the ") + name + " of " + interface, "run it as root");
        }
    };
    ifreq loopback = request_for("lo");
    loopback.ifr_flags = IFF_UP | IFF_LOOPBACK | IFF_RUNNING;
    set(SIOCSIFFLAGS, &loopback, "loopback");
    ifreq request = request_for(interface);
    request.ifr_mtu = o.mtu;
    set(SIOCSIFMTU, &request, "MTU");
    request.ifr_qlen = 2000;  // this process is late at times, and the queue of the line is not this one
    set(SIOCSIFTXQLEN, &request, "queue");
    request.ifr_addr = ipv4(address_of(site));
    set(SIOCSIFADDR, &request, "address");
    request.ifr_netmask = ipv4(htonl(0xFFFFFF00u));
    set(SIOCSIFNETMASK, &request, "mask");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    set(SIOCSIFFLAGS, &request, "state");
    rtentry route = {};
    route.rt_dst = route.rt_genmask = ipv4(0);
    route.rt_flags = RTF_UP;
    route.rt_dev = const_cast<char*>(interface);
    set(SIOCADDRT, &route, "route");
    for (const std::string& sysctl : o.sysctls) {
        const size_t at = sysctl.find('=');
        set_sysctl(sysctl.substr(0, at), sysctl.substr(at + 1));
    }
}

// This process is in the new site's network from now on; its descriptors of others stay what they are.
static Site make_site(int number, const Options& o) {
    if (unshare(CLONE_NEWNET | CLONE_NEWUTS) != 0) {
        fail("cannot make a network namespace", "run it as root, on Linux, where containers allow that");
    }
    const std::string name = "site" + std::to_string(number);
    if (sethostname(name.c_str(), name.size()) != 0) { fail("cannot set a host name", "run it as root"); }
    if (access("/proc/sys/net/ipv6", F_OK) == 0) {  // its discoveries would be counted as traffic
        set_sysctl("net/ipv6/conf/default/disable_ipv6", "1");
    }
    Descriptor tun(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
    if (tun.number < 0) { fail("cannot open /dev/net/tun", "it takes root and a kernel with TUN"); }
    ifreq request = request_for(interface);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (ioctl(tun.number, TUNSETIFF, &request) != 0) { fail("cannot make a TUN device", "run it as root"); }
    configure(number, o);
    const double buffer = of_site(o.buffer, number);
    return Site{std::move(tun),
                Descriptor(open("/proc/self/ns/net", O_RDONLY)),
                Descriptor(open("/proc/self/ns/uts", O_RDONLY)),
                Line(of_site(o.up, number), buffer, o.mtu),
                Line(of_site(o.down, number), buffer, o.mtu),
                Time(of_site(o.delay, number) * 1e6),
                of_site(o.loss, number),
                std::mt19937_64(o.seed * 1000 + uint64_t(number))};
}

// -----------------------------------------------------------------------------------------------------------
// The relay

class Relay {
public:
    explicit Relay(const Options& o) : buffer(new char[largest_packet]) {
        for (int s = 0; s < o.sites; s++) { sites.push_back(make_site(s, o)); }
        epoll = Descriptor(epoll_create1(EPOLL_CLOEXEC));
        for (int s = 0; s < o.sites; s++) { watch(sites[size_t(s)].tun.number, s); }
    }

    void print_sites() const {
        std::string list;
        for (const Site& site : sites) {
            const std::string mine = "/proc/" + std::to_string(getpid()) + "/fd/";
            in_addr address;
            address.s_addr = address_of(int(&site - sites.data()));
            list += std::string(list.empty() ? "" : ", ") + "{\"address\": \"" + inet_ntoa(address) +
                    "\", \"network\": \"" + mine + std::to_string(site.network.number) +
                    "\", \"host_name\": \"" + mine + std::to_string(site.host_name.number) + "\"}";
        }
        printf("{\"interface\": \"%s\", \"sites\": [%s]}\n", interface, list.c_str());
        fflush(stdout);
    }

    // Until one of the signals comes.
    void run(const sigset_t& ends) {
        const Descriptor signals(signalfd(-1, &ends, SFD_CLOEXEC));
        watch(signals.number, -1);
        begin = now();
        while (true) {
            epoll_event events[65];
            const int count = wait(events);
            for (int i = 0; i < count; i++) {
                const int site = int(events[i].data.u32);
                if (site < 0) { return; }
                take_from(site);
            }
            deliver();
        }
    }

    void print_statistics() const {
        rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        auto seconds = [](const timeval& t) { return double(t.tv_sec) + double(t.tv_usec) * 1e-6; };
        std::string list;
        for (const Site& site : sites) {
            auto line = [](const Line& l) {
                return "{\"packets\": " + std::to_string(l.packets) +
                       ", \"bytes\": " + std::to_string(l.bytes) +
                       ", \"dropped\": " + std::to_string(l.dropped) + "}";
            };
            list += std::string(list.empty() ? "" : ", ") + "{\"up\": " + line(site.up) +
                    ", \"down\": " + line(site.down) + ", \"lost\": " + std::to_string(site.lost) +
                    ", \"refused\": " + std::to_string(site.refused) + "}";
        }
        printf(
            "{\"seconds\": %.3f, \"cpu_seconds\": %.3f, \"wakeups\": %llu, \"late_ms_mean\": %.3f, "
            "\"late_ms_max\": %.3f, \"sites\": [%s]}\n",
            double(now() - begin) / second, seconds(usage.ru_utime) + seconds(usage.ru_stime),
            (unsigned long long)wakeups, deliveries ? double(late) / double(deliveries) * 1e-6 : 0.0,
            double(latest) * 1e-6, list.c_str());
        fflush(stdout);
    }

private:
    // A packet that is on its way: to d's downlink, or through it and to d.
    struct Hop {
        Packet packet;
        int to;
        bool is_through;
    };

    void watch(int descriptor, int site) {
        epoll_event event = {};
        event.events = EPOLLIN;
        event.data.u32 = uint32_t(site);
        if (epoll_ctl(epoll.number, EPOLL_CTL_ADD, descriptor, &event) != 0) {
            fail("epoll_ctl", "report it");
        }
    }

    // Sleeps until a packet comes or one on its way is due, but by the clock wakes at most every 0.2 ms: what
    // is due meanwhile is delivered with one waking.
    int wait(epoll_event* events) {
        timespec limit;
        if (!on_the_way.empty()) {
            const Time at = std::max(on_the_way.begin()->first, last_waking + second / 5000);
            const Time left = std::max<Time>(0, at - now());
            limit = {left / second, left % second};
        }
        const int count =
            epoll_pwait2(epoll.number, events, 65, on_the_way.empty() ? nullptr : &limit, nullptr);
        if (count < 0 && errno != EINTR) { fail("epoll_pwait2", "it takes Linux 5.11 or later"); }
        if (count == 0) { last_waking = now(); }
        wakeups++;
        return std::max(count, 0);
    }

    // What the site has sent: into its uplink, and off into the distance.
    void take_from(int from) {
        Site& site = sites[size_t(from)];
        for (int i = 0; i < 64; i++) {
            const ssize_t bytes = read(site.tun.number, buffer.get(), largest_packet);
            if (bytes <= 0) { return; }
            const int to = destination(buffer.get(), size_t(bytes));
            if (to < 0) {
                site.refused++;
                continue;
            }
            const Time left = site.up.pass(now(), size_t(bytes));
            if (left < 0) { continue; }
            if (site.loss > 0 && uniform(site.random) < site.loss) {
                site.lost++;
                continue;
            }
            Packet packet{std::unique_ptr<char[]>(new char[size_t(bytes)]), size_t(bytes)};
            memcpy(packet.data.get(), buffer.get(), size_t(bytes));
            on_the_way.emplace(left + site.delay + sites[size_t(to)].delay,
                               Hop{std::move(packet), to, false});
        }
    }

    // The site of an IPv4 packet's destination; -1: none.
    int destination(const char* packet, size_t bytes) const {
        if (bytes < 20 || (packet[0] & 0xF0) != 0x40) { return -1; }
        in_addr_t address;
        memcpy(&address, packet + 16, sizeof address);
        const uint32_t site = ntohl(address) - ntohl(address_of(0));
        return site < sites.size() ? int(site) : -1;
    }

    // Moves on what is due. The clock is read once: what becomes due meanwhile is for the next time.
    void deliver() {
        const Time time = now();
        while (!on_the_way.empty() && on_the_way.begin()->first <= time) {
            auto node = on_the_way.extract(on_the_way.begin());
            Hop& hop = node.mapped();
            Site& site = sites[size_t(hop.to)];
            if (!hop.is_through) {
                hop.is_through = true;
                node.key() = site.down.pass(node.key(), hop.packet.bytes);
                if (node.key() >= 0) { on_the_way.insert(std::move(node)); }
                continue;
            }
            deliveries++;
            late += time - node.key();
            latest = std::max(latest, time - node.key());
            if (write(site.tun.number, hop.packet.data.get(), hop.packet.bytes) < 0) { site.refused++; }
        }
    }

    std::vector<Site> sites;
    Descriptor epoll;
    std::multimap<Time, Hop> on_the_way;  // by when they are due; of equals, in the order in which they came
    std::uniform_real_distribution<double> uniform{0.0, 1.0};
    std::unique_ptr<char[]> buffer;
    Time begin = 0, last_waking = 0, late = 0, latest = 0;
    uint64_t wakeups = 0, deliveries = 0;
};

// A router does not wait for the machines that it joins: this process goes before them, for the little time
// that it takes. It ends with the process that has started it.
static void take_precedence() {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    prctl(PR_SET_TIMERSLACK, 1);
    const sched_param parameters = {1};
    if (sched_setscheduler(0, SCHED_FIFO, &parameters) != 0) { setpriority(PRIO_PROCESS, 0, -20); }
}

int main(int argc, char** argv) {
    try {
        sigset_t ends;
        sigemptyset(&ends);
        sigaddset(&ends, SIGTERM);
        sigaddset(&ends, SIGINT);
        sigprocmask(SIG_BLOCK, &ends, nullptr);
        Relay relay(parse_options(argc, argv));
        take_precedence();
        relay.print_sites();
        relay.run(ends);
        relay.print_statistics();
        return 0;
    } catch (const UserError& error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 2;
    }
}
