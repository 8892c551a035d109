// The communicator over TCP, between real processes: results, bits, byte counts, and which process is named
// when one dies.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "dev/test/processes.h"
#include "llmc/run/comm_tcp.h"

namespace test_comm {

static void require(bool condition, const char* what) {
    if (!condition) { throw std::runtime_error(what); }
}

// Values that make sums depend on their order.
static float value(int from, int to, size_t i) {
    return sinf(float(from * 7919 + to * 104729) + float(i)) * powf(10.0f, float(int(i % 9) - 4));
}

static void expect_all_well(std::vector<TestProcess>& processes, double seconds = 30) {
    for (size_t i = 0; i < processes.size(); i++) {
        EXPECT_EQ(processes[i].wait(seconds), 0) << "process " << i << ": " << processes[i].report;
    }
}

// Calls every collective once, with `count` values per part, on a stream of `kind`. Returns the reduced bits.
static std::string check_collectives(Comm& comm, size_t count, Stream::Kind kind) {
    const int size = comm.size(), rank = comm.rank();
    std::vector<float> own(count), gathered(count * size_t(size)), parts(count * size_t(size)),
        exchanged(count * size_t(size)), sum(count), in_place, all(count);
    for (size_t i = 0; i < count; i++) { own[i] = value(rank, 99, i); }
    for (int to = 0; to < size; to++) {
        for (size_t i = 0; i < count; i++) { parts[size_t(to) * count + i] = value(rank, to, i); }
    }
    in_place = parts;
    all = own;
    Traffic traffic;
    Stream stream(kind);
    const size_t bytes = count * sizeof(float);
    comm.all_gather(gathered.data(), own.data(), bytes, stream, &traffic);
    comm.all_to_all(exchanged.data(), parts.data(), bytes, stream, &traffic);
    comm.reduce_scatter(sum.data(), parts.data(), count, stream, &traffic);
    float* const own_part = in_place.data() + size_t(rank) * count;
    comm.reduce_scatter(own_part, in_place.data(), count, stream, &traffic);
    comm.all_reduce(all.data(), count, stream, &traffic);
    stream.synchronize();

    for (size_t i = 0; i < count; i++) {
        float expected_sum = value(0, rank, i), expected_all = value(0, 99, i);
        for (int r = 1; r < size; r++) {
            expected_sum += value(r, rank, i);
            expected_all += value(r, 99, i);
        }
        for (int r = 0; r < size; r++) {
            require(gathered[size_t(r) * count + i] == value(r, 99, i), "all_gather");
            require(exchanged[size_t(r) * count + i] == value(r, rank, i), "all_to_all");
        }
        require(sum[i] == expected_sum, "reduce_scatter");
        require(own_part[i] == expected_sum, "reduce_scatter in place");
        require(all[i] == expected_all, "all_reduce sum");
    }
    const uint64_t expected_bytes = 5 * uint64_t(size - 1) * bytes;
    require(traffic.bytes_sent == expected_bytes && traffic.bytes_received == expected_bytes, "byte counts");
    require(size == 1 || traffic.seconds > 0, "time");
    return std::string(reinterpret_cast<char*>(all.data()), bytes);
}

TEST(CommTcp, collectives_are_exact_and_the_same_bits_on_all_ranks) {
    for (int size : {1, 2, 3, 4}) {
        TemporaryFolder folder;
        auto processes = start_processes(size, [&](int rank) {
            FileStore store(folder.name());
            auto comm = make_comm_tcp({store, "test", rank, size, "", 20});
            std::string bits;
            for (size_t count : {1, 3, 1000, 4099, 100001}) {
                bits += check_collectives(*comm, count, Stream::Kind::communicate);
                bits += check_collectives(*comm, count, Stream::Kind::compute);
            }
            const XXH64_hash_t hash = XXH3_64bits(bits.data(), bits.size());
            return std::to_string(hash);
        });
        expect_all_well(processes);
        for (auto& process : processes) {
            EXPECT_EQ(process.report, processes[0].report) << size << " processes";
        }
    }
}

TEST(CommTcp, traffic_of_a_call_is_size_minus_one_times_its_bytes) {
    TemporaryFolder folder;
    auto processes = start_processes(3, [&](int rank) {
        FileStore store(folder.name());
        auto comm = make_comm_tcp({store, "test", rank, 3, "", 20});
        Stream stream(Stream::Kind::communicate);
        std::vector<char> own(1234), all(3 * 1234);
        Traffic traffic;
        comm->all_gather(all.data(), own.data(), own.size(), stream, &traffic);
        stream.synchronize();
        require(traffic.bytes_sent == 2 * 1234 && traffic.bytes_received == 2 * 1234, "byte counts");
        float loss = 1;
        const uint64_t before = comm->progress();
        comm->all_reduce(&loss, 1, stream, nullptr);
        stream.synchronize();
        require(loss == 3, "a call without traffic");
        require(before > 0 && comm->progress() > before, "a watchdog sees that data moves");
        return std::string();
    });
    expect_all_well(processes);
}

TEST(CommTcp, calls_in_flight_and_two_communicators_do_not_mix) {
    TemporaryFolder folder;
    auto processes = start_processes(3, [&](int rank) {
        FileStore store(folder.name());
        auto inner = make_comm_tcp({store, "inner", rank, 3, "", 20});
        auto outer = make_comm_tcp({store, "outer", 2 - rank, 3, "", 20});
        Stream inner_stream(Stream::Kind::communicate), outer_stream(Stream::Kind::communicate);
        const int calls = 50;
        std::vector<std::vector<float>> sums, gathers;
        for (int call = 0; call < calls; call++) {
            const size_t count =
                size_t(1 + (call * 379) % 5000);  // the same size comes again only by accident
            sums.emplace_back(count, float(call * (rank + 1)));
            gathers.emplace_back(4 * count, float(-1));
            std::fill_n(gathers.back().end() - long(count), count, float(call * 10 + 2 - rank));
            inner->all_reduce(sums.back().data(), count, inner_stream, nullptr);
            outer->all_gather(gathers.back().data(), gathers.back().data() + 3 * count, count * sizeof(float),
                              outer_stream, nullptr);
        }
        outer_stream.synchronize();
        inner_stream.synchronize();
        for (int call = 0; call < calls; call++) {
            for (float sum : sums[size_t(call)]) { require(sum == float(6 * call), "inner"); }
            const std::vector<float>& gather = gathers[size_t(call)];
            for (size_t i = 0; i < gather.size() / 4 * 3; i++) {
                require(gather[i] == float(call * 10) + float(i / (gather.size() / 4)), "outer");
            }
        }
        return std::string();
    });
    expect_all_well(processes);
}

TEST(CommTcp, hundreds_of_megabytes_pass) {
    TemporaryFolder folder;
    auto processes = start_processes(2, [&](int rank) {
        FileStore store(folder.name());
        auto comm = make_comm_tcp({store, "test", rank, 2, "", 60});
        Stream stream(Stream::Kind::communicate);
        const size_t count = 25'000'000;  // 100 MB a part
        std::vector<float> parts(2 * count), sum(count);
        for (size_t i = 0; i < 2 * count; i++) { parts[i] = float(i % 1000 + size_t(rank)); }
        comm->reduce_scatter(sum.data(), parts.data(), count, stream, nullptr);
        comm->all_gather(parts.data(), sum.data(), count * sizeof(float), stream, nullptr);
        stream.synchronize();
        for (size_t i = 0; i < 2 * count; i++) { require(parts[i] == float(2 * (i % 1000) + 1), "sum"); }
        return std::string();
    });
    expect_all_well(processes, 60);
}

TEST(CommTcp, waiting_uses_no_core) {
    TemporaryFolder folder;
    auto processes = start_processes(2, [&](int rank) {
        FileStore store(folder.name());
        auto comm = make_comm_tcp({store, "test", rank, 2, "", 20});
        Stream stream(Stream::Kind::communicate);
        if (rank == 1) { std::this_thread::sleep_for(std::chrono::milliseconds(700)); }
        const clock_t before = clock();
        float one = 1;
        comm->all_reduce(&one, 1, stream, nullptr);
        stream.synchronize();
        require(double(clock() - before) / CLOCKS_PER_SEC < 0.1, "CPU time while waiting");
        return std::string();
    });
    expect_all_well(processes);
}

// Both processes are stopped for longer than the limit, as ranks are when their machine sleeps.
TEST(CommTcp, time_for_which_a_process_is_stopped_is_not_its_peers_silence) {
    TemporaryFolder folder;
    FileStore store(folder.name());
    auto processes = start_processes(2, [&](int rank) {
        auto comm = make_comm_tcp({store, "test", rank, 2, "", 2});
        Stream stream(Stream::Kind::communicate);
        store.set("running/" + std::to_string(rank), "1");
        if (rank == 1) { wait_for_value(store, "go on", 20); }
        float one = 1;
        comm->all_reduce(&one, 1, stream, nullptr);
        stream.synchronize();
        return std::string();
    });
    for (int rank = 0; rank < 2; rank++) { wait_for_value(store, "running/" + std::to_string(rank), 20); }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    for (TestProcess& process : processes) { process.send_signal(SIGSTOP); }
    std::this_thread::sleep_for(std::chrono::seconds(4));
    store.set("go on", "");
    for (TestProcess& process : processes) { process.send_signal(SIGCONT); }
    expect_all_well(processes);
}

// Each process comes 2.5 s after another one, within the limit of 4 s, but the whole call takes longer.
TEST(CommTcp, an_exchange_that_moves_may_take_longer_than_the_time_limit) {
    TemporaryFolder folder;
    auto processes = start_processes(3, [&](int rank) {
        FileStore store(folder.name());
        auto comm = make_comm_tcp({store, "test", rank, 3, "", 4});
        Stream stream(Stream::Kind::communicate);
        if (rank > 0) {
            wait_for_value(store, "begins/" + std::to_string(rank - 1), 20);
            std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        }
        store.set("begins/" + std::to_string(rank), "");
        float one = 1;
        comm->all_reduce(&one, 1, stream, nullptr);
        stream.synchronize();
        return format("%g", one);
    });
    expect_all_well(processes);
    for (const TestProcess& process : processes) { EXPECT_EQ(process.report, "3"); }
}

// What port scanners, health checks and lost processes do to an address on which a member listens.
static void knock(const MemberAddress& address, int i) {
    FileDescriptor socket = address.open(false);
    if (!is_ready(socket, POLLOUT, 5000)) { throw std::runtime_error("cannot knock"); }
    Greeting greeting = {};
    greeting.rank = 1;
    std::string words(reinterpret_cast<char*>(&greeting), sizeof greeting);  // the wrong word
    if (i % 5 == 1) { words = "GET / HTTP/1.1\r\n\r\n"; }                    // part of a greeting
    if (i % 5 == 2) { words = std::string(100'000, 'x'); }
    if (i % 5 == 3) {  // the right word, but no member's rank
        memcpy(&words[0], address.word.data(), address.word.size());
        words[sizeof greeting.word] = 7;
    }
    if (i % 5 > 0) { send(socket, words.data(), words.size(), MSG_NOSIGNAL); }
    const linger reset = {1, 0};
    if (i % 2 == 0) { setsockopt(socket, SOL_SOCKET, SO_LINGER, &reset, sizeof reset); }
}

TEST(CommTcp, a_start_survives_hundreds_of_strangers_that_connect_and_close_or_reset) {
    TemporaryFolder folder;
    FileStore store(folder.name());
    auto processes = start_processes(3, [&](int rank) {
        if (rank == 2) { wait_for_value(store, "go on", 20); }
        auto comm = make_comm_tcp({store, "test", rank, 3, "", 20});
        check_collectives(*comm, 1000, Stream::Kind::communicate);
        return std::string();
    });
    store.set("test/machine/2", machine_name());  // so that the others listen already
    std::vector<FileDescriptor> silent;
    for (int rank : {0, 1}) {
        wait_for_value(store, "test/address/" + std::to_string(rank), 20);
        const auto address = MemberAddress::parse(*store.try_get("test/address/" + std::to_string(rank)));
        for (int i = 0; i < 200; i++) { knock(address, i); }
        for (int i = 0; i < 20; i++) { silent.push_back(address.open(false)); }
    }
    store.set("go on", "");
    expect_all_well(processes);
}

TEST(Listener, a_member_with_more_strangers_behind_it_than_are_kept_is_heard) {
    Listener listener("127.0.0.1");
    const MemberAddress& address = listener.address();
    Greeting greeting;
    memcpy(greeting.word, address.word.data(), sizeof greeting.word);
    greeting.rank = 3;
    const FileDescriptor member = address.open(false);
    ASSERT_EQ(send(member, &greeting, sizeof greeting, MSG_NOSIGNAL), ssize_t(sizeof greeting));
    std::vector<FileDescriptor> silent;
    for (int i = 0; i < 300; i++) { silent.push_back(address.open(false)); }
    std::vector<int> heard;
    for (int i = 0; i < 5; i++) {
        listener.accept([&](int rank, FileDescriptor) { heard.push_back(rank); });
    }
    EXPECT_EQ(heard, std::vector<int>{3});
}

TEST(CommTcp, a_member_whose_address_is_another_program_s_is_named) {
    TemporaryFolder folder;
    FileStore store(folder.name());
    const Listener other("127.0.0.1");  // answers nothing, like a server that waits for a request
    store.set("test/machine/0", machine_name());
    store.set("test/address/0", other.address().text());
    try {
        make_comm_tcp({store, "test", 1, 2, "", 0.5, {"worker 0 rank 0", "worker 1 rank 0"}});
        FAIL() << "accepted";
    } catch (const CommError& error) {
        EXPECT_STREQ(error.what(), "worker 0 rank 0 did not connect within 0.5 s (--timeout)");
    }
    FileStore second(folder.name() + "/second");
    second.set("test/machine/0", machine_name());
    second.set("test/address/0", "nonsense");
    try {
        make_comm_tcp({second, "test", 1, 2, "", 5, {"worker 0 rank 0", "worker 1 rank 0"}});
        FAIL() << "accepted";
    } catch (const CommError& error) {
        EXPECT_STREQ(error.what(), "worker 0 rank 0 has no valid address in the store");
    }
}

// Three processes call all_reduce until one of them does not come back. Returns the reports of the other two.
static std::vector<std::string> reports_after(int signal, double timeout, double* seconds) {
    TemporaryFolder folder;
    FileStore store(folder.name());
    const std::vector<std::string> members = {"worker 0 rank 0", "worker 1 rank 0", "worker 2 rank 0"};
    auto processes = start_processes(3, [&](int rank) {
        auto comm = make_comm_tcp({store, "outer.0", rank, 3, "", timeout, members});
        Stream stream(Stream::Kind::communicate);
        for (int call = 0;; call++) {
            float one = 1;
            comm->all_reduce(&one, 1, stream, nullptr);
            try {
                stream.synchronize();
            } catch (const CommError& error) { return std::to_string(error.peer) + ": " + error.what(); }
            if (call == 20) { store.set("running/" + std::to_string(rank), "1"); }
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    });
    for (int rank = 0; rank < 3; rank++) { wait_for_value(store, "running/" + std::to_string(rank), 20); }
    processes[1].send_signal(signal);
    const Patience since(60);
    std::vector<std::string> reports;
    for (size_t survivor : {0, 2}) {
        EXPECT_EQ(processes[survivor].wait(20), 0) << processes[survivor].report;
        reports.push_back(processes[survivor].report);
    }
    *seconds = since.waited();
    return reports;
}

TEST(CommTcp, a_killed_peer_is_named_by_all_others_at_once) {
    double seconds;
    for (const std::string& report : reports_after(SIGKILL, 60, &seconds)) {
        EXPECT_EQ(report, "1: worker 1 rank 0 is gone (its connection was closed)");
    }
    EXPECT_LT(seconds, 10);
}

TEST(CommTcp, a_stopped_peer_is_named_by_all_others_after_the_time_limit) {
    double seconds;
    for (const std::string& report : reports_after(SIGSTOP, 1, &seconds)) {
        EXPECT_EQ(report, "1: worker 1 rank 0 has been silent for 1 s (--timeout)");
    }
    EXPECT_GT(seconds, 0.9);
    EXPECT_LT(seconds, 10);
}

TEST(CommTcp, the_first_death_is_named_even_by_those_not_connected_with_it) {
    TemporaryFolder folder;
    FileStore store(folder.name());
    // 0 and 1 share one communicator, 1 and 2 another: 2 only sees that 1 leaves.
    const std::vector<std::string> names = {"worker 0 rank 0", "worker 0 rank 1", "worker 1 rank 1"};
    auto processes = start_processes(3, [&](int i) -> std::string {
        std::unique_ptr<Comm> first, second;
        if (i < 2) { first = make_comm_tcp({store, "first", i, 2, "", 20, {names[0], names[1]}}); }
        if (i > 0) { second = make_comm_tcp({store, "second", i - 1, 2, "", 20, {names[1], names[2]}}); }
        store.set("running/" + std::to_string(i), "1");
        Stream stream;
        float one = 1;
        try {
            if (i == 0) { pause(); }
            (i == 1 ? first : second)->all_reduce(&one, 1, stream, nullptr);
        } catch (const CommError& error) { return std::to_string(error.peer) + ": " + error.what(); }
        return "no error";
    });
    for (int i = 0; i < 3; i++) { wait_for_value(store, "running/" + std::to_string(i), 20); }
    processes[0].send_signal(SIGKILL);
    EXPECT_EQ(processes[1].wait(20), 0);
    EXPECT_EQ(processes[2].wait(20), 0);
    EXPECT_EQ(processes[1].report, "0: worker 0 rank 0 is gone (its connection was closed)");
    EXPECT_EQ(processes[2].report, "-1: worker 0 rank 0 is gone (its connection was closed)");
}

TEST(CommTcp, members_out_of_step_are_an_error_and_never_wrong_data) {
    TemporaryFolder folder;
    auto processes = start_processes(2, [&](int rank) {
        FileStore store(folder.name());
        auto comm = make_comm_tcp({store, "test", rank, 2, "", 1});
        Stream stream(Stream::Kind::communicate);
        std::vector<float> values(10, 1.0f);
        comm->all_reduce(values.data(), rank == 0 ? 10 : 9, stream, nullptr);
        try {
            stream.synchronize();
        } catch (const CommError&) { return std::string("refused"); }
        return std::string("accepted");
    });
    for (auto& process : processes) {
        EXPECT_EQ(process.wait(20), 0);
        EXPECT_EQ(process.report, "refused");
    }
}

TEST(CommTcp, an_unknown_interface_is_a_user_error_that_lists_the_known_ones) {
    TemporaryFolder folder;
    auto processes = start_processes(2, [&](int rank) {
        FileStore store(folder.name());
        try {
            make_comm_tcp({store, "test", rank, 2, "nonsense0", 20});
        } catch (const UserError& error) { return std::string(error.what()); }
        return std::string("accepted");
    });
    for (auto& process : processes) {
        EXPECT_EQ(process.wait(20), 0);
        EXPECT_EQ(process.report.rfind(
                      "no network interface nonsense0 with an address: give --interface one of lo", 0),
                  0u)
            << process.report;
    }
}

TEST(CommTcp, a_named_interface_is_used) {
    TemporaryFolder folder;
    auto processes = start_processes(2, [&](int rank) {
        FileStore store(folder.name());
        auto comm = make_comm_tcp({store, "test", rank, 2, "lo", 20});
        check_collectives(*comm, 11, Stream::Kind::communicate);
        return std::string();
    });
    expect_all_well(processes);
}

TEST(CommTcp, a_member_that_does_not_come_is_named_after_the_time_limit) {
    TemporaryFolder folder;
    FileStore store(folder.name());
    try {
        make_comm_tcp({store, "outer.0", 0, 2, "", 0.3, {"worker 0 rank 0", "worker 1 rank 0"}});
        FAIL() << "accepted";
    } catch (const CommError& error) {
        EXPECT_EQ(error.peer, 1);
        EXPECT_STREQ(error.what(), "worker 1 rank 0 did not connect within 0.3 s (--timeout)");
    }
}

}  // namespace test_comm
