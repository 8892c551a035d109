// The stores: the same claims for a folder, a Redis server, memory and a prefix; contention between real
// processes.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <set>
#include <thread>

#include "dev/test/certificates.h"
#include "dev/test/processes.h"
#include "dev/test/s3_server.h"
#include "llmc/run/store.h"
#include "llmc/run/store_redis.h"
#include "llmc/run/stores.h"

namespace test_store {

enum class Kind { folder, redis, s3, memory, prefix };

class Stores : public testing::TestWithParam<Kind> {
protected:
    void SetUp() override {
        if (GetParam() == Kind::redis) {
            server = std::make_unique<RedisServer>("p@ss:w/rd");
            if (server->port == 0) { GTEST_SKIP() << "redis-server is not installed or does not start"; }
            url = "redis://:p%40ss%3Aw%2Frd@127.0.0.1:" + std::to_string(server->port);
        } else if (GetParam() == Kind::s3) {
            const S3Server* const bucket = S3Server::shared();
            if (!bucket) { GTEST_SKIP() << S3Server::missing; }
            environment = std::make_unique<Environment>(s3_environment(bucket->endpoint));
            url = "s3://runs/" + random_hex(8);
        } else {
            url = "file:" + folder.name() + "/store";
        }
    }
    std::unique_ptr<Store> open() const {
        if (GetParam() == Kind::memory) { return std::make_unique<MemoryStore>(); }
        if (GetParam() == Kind::prefix) {
            return std::make_unique<PrefixStore>(open_store(url, 5), "run 7/");
        }
        return open_store(url, 5);
    }

    TemporaryFolder folder;
    std::unique_ptr<RedisServer> server;
    std::unique_ptr<Environment> environment;
    std::string url;
};

// Stores that several processes can share.
class SharedStores : public Stores {};

TEST_P(Stores, a_value_comes_back_until_it_is_replaced_or_removed) {
    auto store = open();
    EXPECT_FALSE(store->try_get("a"));
    store->set("a", "1");
    EXPECT_EQ(store->try_get("a"), "1");
    store->set("a", "22");
    EXPECT_EQ(store->try_get("a"), "22");
    store->remove("a");
    EXPECT_FALSE(store->try_get("a"));
    store->remove("a");
}

TEST_P(Stores, set_if_absent_returns_the_winner) {
    auto store = open();
    EXPECT_EQ(store->set_if_absent("a", "first"), "first");
    EXPECT_EQ(store->set_if_absent("a", "second"), "first");
    EXPECT_EQ(store->try_get("a"), "first");
    store->remove("a");
    EXPECT_EQ(store->set_if_absent("a", "third"), "third");
}

TEST_P(Stores, keys_and_values_may_hold_any_bytes) {
    auto store = open();
    std::string every_byte;
    for (int c = 0; c < 256; c++) { every_byte += char(c); }
    const std::string large(3'000'000, '\0');
    const std::vector<std::string> keys = {"",
                                           ".",
                                           "..",
                                           "/",
                                           "a/b",
                                           "a%2Fb",
                                           "a b",
                                           "../../etc/passwd",
                                           "\n",
                                           "\xc3\xa4",
                                           "%",
                                           "%%",
                                           ".hidden",
                                           every_byte,
                                           std::string(1000, 'x'),
                                           std::string(999, 'x') + "y"};
    for (size_t i = 0; i < keys.size(); i++) { store->set(keys[i], every_byte + std::to_string(i)); }
    for (size_t i = 0; i < keys.size(); i++) {
        EXPECT_EQ(store->try_get(keys[i]), every_byte + std::to_string(i)) << i;
    }
    store->set("empty", "");
    EXPECT_EQ(store->try_get("empty"), "");
    store->set("large", large);
    EXPECT_EQ(store->try_get("large"), large);
}

TEST_P(SharedStores, of_many_processes_exactly_one_wins_and_all_know_it) {
    const int rounds = 40;
    auto processes = start_processes(4, [&](int i) {
        auto store = open();
        store->set("here/" + std::to_string(i), "");
        for (int other = 0; other < 4; other++) {
            wait_for_value(*store, "here/" + std::to_string(other), 20);
        }
        std::string winners;
        for (int round = 0; round < rounds; round++) {
            winners += store->set_if_absent("prize/" + std::to_string(round),
                                            std::string(5000, char('0' + i)))[4999];
        }
        return winners;
    });
    for (auto& process : processes) {
        ASSERT_EQ(process.wait(30), 0) << process.report;
        EXPECT_EQ(process.report, processes[0].report);
    }
    auto store = open();
    ASSERT_EQ(processes[0].report.size(), size_t(rounds));
    for (int round = 0; round < rounds; round++) {
        EXPECT_EQ(store->try_get("prize/" + std::to_string(round)),
                  std::string(5000, processes[0].report[size_t(round)]));
    }
}

TEST_P(SharedStores, a_reader_never_sees_half_a_value) {
    auto processes = start_processes(2, [&](int i) -> std::string {
        auto store = open();
        if (i == 0) {
            for (int round = 0; round < 200; round++) {
                store->set("value", std::string(size_t(1 + round * 500), char('a' + round % 26)));
            }
            store->set("value", "end");
            return "";
        }
        while (true) {
            const std::string value = wait_for_value(*store, "value", 20);
            if (value == "end") { return ""; }
            const size_t round = (value.size() - 1) / 500;
            if (value != std::string(1 + round * 500, char('a' + round % 26))) {
                throw std::runtime_error("a torn value");
            }
        }
    });
    for (auto& process : processes) { EXPECT_EQ(process.wait(30), 0) << process.report; }
}

static std::string kind_name(const testing::TestParamInfo<Kind>& info) {
    switch (info.param) {
        case Kind::folder: return "folder";
        case Kind::redis: return "redis";
        case Kind::s3: return "s3";
        case Kind::memory: return "memory";
        case Kind::prefix: return "prefix";
    }
    return "";
}

INSTANTIATE_TEST_SUITE_P(
    All, Stores, testing::Values(Kind::folder, Kind::redis, Kind::s3, Kind::memory, Kind::prefix), kind_name);
INSTANTIATE_TEST_SUITE_P(
    All, SharedStores, testing::Values(Kind::folder, Kind::redis, Kind::s3, Kind::prefix), kind_name);

TEST(FileStore, leaves_no_temporary_files_and_no_file_outside_its_folder) {
    TemporaryFolder folder;
    FileStore store(folder.name() + "/a/b");
    store.set("../../escape", "1");
    store.set_if_absent("x", "1");
    store.set_if_absent("x", "2");
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.name() + "/a/b")) {
        names.insert(entry.path().filename());
    }
    EXPECT_EQ(names, (std::set<std::string>{"%2E.%2F..%2Fescape", "x"}));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.name()), {}), 1);
}

TEST(FileStore, a_folder_that_is_away_may_come_back_and_one_that_others_own_is_a_mistake) {
    for (int error : {EIO, ESTALE, ENOTCONN, ENOSPC, EDQUOT}) {
        EXPECT_THROW(FileStore::refuse("/net/store", error), TemporaryFailure) << error;
    }
    for (int error : {EACCES, EPERM, EROFS, ENOTDIR}) {
        try {
            FileStore::refuse("/net/store", error);
        } catch (const UserError& mistake) {
            EXPECT_EQ(exit_status(mistake), 2) << error;
            EXPECT_EQ(std::string(mistake.what()).find("the store's folder /net/store cannot be used ("), 0u);
        }
    }
}

TEST(PrefixStore, removes_what_it_has_set_and_nothing_else) {
    auto shared = std::make_shared<MemoryStore>();
    PrefixStore first(shared, "run/"), second(shared, "run/");
    first.set("a", "1");
    first.set_if_absent("b", "1");
    second.set("c", "1");
    first.remove_own();
    EXPECT_FALSE(shared->try_get("run/a"));
    EXPECT_FALSE(shared->try_get("run/b"));
    EXPECT_EQ(shared->try_get("run/c"), "1");
}

TEST(PrefixStore, what_it_has_removed_is_no_longer_its_own) {
    auto shared = std::make_shared<MemoryStore>();
    PrefixStore first(shared, "run/"), second(shared, "run/");
    first.set("a", "1");
    first.remove("a");
    second.set("a", "2");
    first.remove_own();
    EXPECT_EQ(shared->try_get("run/a"), "2");
}

TEST_P(Stores, threads_of_one_process_may_use_it_at_once) {
    auto store = open();
    std::atomic<int> torn{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++) {
        threads.emplace_back([&, i] {
            const std::string own = "own/" + std::to_string(i);
            for (int round = 0; round < 100; round++) {
                const std::string value(size_t(1 + 37 * round), char('a' + i));
                store->set(own, value);
                torn += store->try_get(own) != value;
                store->set("shared", value);
                const std::string seen = store->try_get("shared").value_or("");
                torn += seen.empty() || seen.find_first_not_of(seen[0]) != std::string::npos;
                const std::string winner = store->set_if_absent("prize", own);
                torn += store->try_get("prize") != winner;
                store->remove(own);
                torn += store->try_get(own).has_value();
            }
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    EXPECT_EQ(torn, 0);
}

TEST(PrefixStore, keys_of_two_runs_do_not_meet) {
    auto shared = std::make_shared<MemoryStore>();
    PrefixStore first(shared, "run 1/"), second(shared, "run 2/");
    first.set("key", "1");
    EXPECT_FALSE(second.try_get("key"));
    EXPECT_EQ(second.set_if_absent("key", "2"), "2");
    EXPECT_EQ(shared->try_get("run 1/key"), "1");
}

static std::string open_error(const std::string& url) {
    try {
        open_store(url, 2);
    } catch (const UserError& error) {
        return error.what();
    }
    return "accepted";
}

TEST(OpenStore, what_cannot_be_used_is_a_user_error_that_says_what_to_do) {
    TemporaryFolder folder;
    std::ofstream(folder.name() + "/file") << "not a folder";
    for (const char* url : {"", "nonsense", "ftp://x", "file:", "file://host/dir", "http://127.0.0.1:6379"}) {
        EXPECT_NE(open_error(url).find("is of an unknown kind: give --store file:DIR, redis://"),
                  std::string::npos)
            << url;
    }
    for (const char* url :
         {"redis://", "redis://:1", "redis://host:", "redis://host:0", "redis://host:99999",
          "redis://host:6379x", "redis://host/0", "redis://[::1", "redis://secret@host:1",
          "redis://:%zz@host:1"}) {
        EXPECT_NE(open_error(url).find("is not of the form redis://[:PASSWORD@]HOST:PORT: write it so"),
                  std::string::npos)
            << url;
    }
    EXPECT_NE(open_error("file:" + folder.name() + "/file").find("give --store a folder that can be written"),
              std::string::npos);
    EXPECT_EQ(open_error("file://" + folder.name()), "accepted");
    EXPECT_EQ(open_error("redis://127.0.0.1:1"),
              "cannot reach the store at 127.0.0.1:1 (Connection refused): start a Redis or "
              "Valkey server there, or correct --store");
}

TEST(OpenStore, no_error_shows_a_password) {
    for (const char* url :
         {"rediss://:secret@host:0", "unix://:secret@/run/redis.sock", "REDIS://:secret@host",
          "redis://secret@host", "redis://:secret@host:port", "redis://:secret/host:1",
          "redis://:secret@127.0.0.1:1", "rediss://:secret@127.0.0.1:1"}) {
        EXPECT_NE(open_error(url), "accepted") << url;
        EXPECT_EQ(open_error(url).find("secret"), std::string::npos) << open_error(url);
    }
}

TEST(OpenStore, redis_urls_are_taken_apart) {
    const RedisAddress plain = parse_redis_url("redis://example.org");
    EXPECT_EQ(plain.host, "example.org");
    EXPECT_EQ(plain.port, 6379);
    EXPECT_EQ(plain.password, "");
    const RedisAddress full = parse_redis_url("redis://me:a%40b@c@[fe80::1]:7000/");
    EXPECT_EQ(full.user, "me");
    EXPECT_EQ(full.password, "a@b@c");
    EXPECT_EQ(full.host, "fe80::1");
    EXPECT_EQ(full.port, 7000);
    EXPECT_FALSE(full.tls);
    const RedisAddress encrypted = parse_redis_url("rediss://:pass@example.org:7001");
    EXPECT_EQ(encrypted.host, "example.org");
    EXPECT_EQ(encrypted.port, 7001);
    EXPECT_TRUE(encrypted.tls);
}

TEST(RedisStore, a_wrong_or_missing_password_is_a_user_error_without_the_password) {
    RedisServer server("secret");
    if (server.port == 0) { GTEST_SKIP() << "redis-server is not installed or does not start"; }
    const std::string where = "127.0.0.1:" + std::to_string(server.port);
    for (const char* credentials : {"", ":guess@"}) {
        const std::string error = open_error("redis://" + std::string(credentials) + where);
        EXPECT_NE(error.find("the store at " + where + " refuses the password"), std::string::npos) << error;
        EXPECT_EQ(error.find("guess"), std::string::npos);
    }
    EXPECT_EQ(open_error(server.url()), "accepted");
    EXPECT_EQ(open_store(server.url(), 2)->url(), "redis://" + where);
    EXPECT_EQ(open_store(server.url(), 2)->local_address(), "127.0.0.1");
}

TEST(RedisStore, a_server_that_restarts_is_found_again_and_one_that_is_gone_is_a_run_error) {
    RedisServer server;
    if (server.port == 0) { GTEST_SKIP() << "redis-server is not installed or does not start"; }
    auto store = open_store(server.url(), 1);
    store->set("a", "1");
    server.stop();
    server.start(server.port);
    store->set("b", "2");
    EXPECT_EQ(store->try_get("b"), "2");
    server.stop();
    const Patience since(60);
    EXPECT_THROW(store->set("c", "3"), RunError);
    EXPECT_LT(since.waited(), 10);
}

// ---- rediss://

class TlsStores : public testing::Test {
protected:
    // Empty where such a server cannot be had.
    std::string start(const std::string& certificate, const std::string& asks_clients = "no") {
        server = certificates.server(certificate, "secret", asks_clients);
        return server->port == 0 ? "" : "127.0.0.1:" + std::to_string(server->port);
    }

    Certificates certificates;
    std::unique_ptr<RedisServer> server;
};

#define NEED_TLS(where) \
    if ((where).empty()) { GTEST_SKIP() << "there is no openssl, or no redis-server that knows TLS"; }

TEST_F(TlsStores, a_server_whose_authority_is_known_is_a_store_like_others) {
    const std::string where = start("right");
    NEED_TLS(where);
    const TrustedAuthority trusted(certificates.authority());
    auto store = open_store("rediss://:secret@" + where, 5);
    const std::string large(3'000'000, '\0');
    store->set("large", large);
    EXPECT_EQ(store->try_get("large"), large);
    EXPECT_EQ(store->set_if_absent("large", "late"), large);
    EXPECT_EQ(store->url(), "rediss://" + where);
    EXPECT_EQ(store->local_address(), "127.0.0.1");
    EXPECT_EQ(open_error("rediss://:secret@localhost:" + std::to_string(server->port)), "accepted");
    EXPECT_NE(open_error("rediss://:guess@" + where).find("give --store rediss://:PASSWORD@"),
              std::string::npos);
    server->stop();
    server->start(server->port);
    store->set("a", "1");
    EXPECT_EQ(store->try_get("a"), "1");
}

TEST_F(TlsStores, a_server_that_shows_no_certificate_of_its_own_is_refused) {
    const std::string where = start("right");
    NEED_TLS(where);
    const std::string url = "rediss://:secret@" + where;
    const std::string unknown = open_error(url);
    EXPECT_NE(unknown.find("the certificate of the store at " + where + " is not trusted"),
              std::string::npos)
        << unknown;
    EXPECT_NE(unknown.find("DILOCO_CA"), std::string::npos) << unknown;
    {
        const TrustedAuthority missing("/nowhere/ca.crt");
        EXPECT_NE(open_error(url).find("there are no certificates in /nowhere/ca.crt"), std::string::npos);
    }
    const TrustedAuthority trusted(certificates.authority());
    EXPECT_EQ(open_error(url), "accepted");
    const std::string other = start("other");
    NEED_TLS(other);
    for (const std::string& host : {std::string("127.0.0.1:"), std::string("localhost:")}) {
        const std::string error = open_error("rediss://:secret@" + host + std::to_string(server->port));
        EXPECT_NE(error.find(" is for another name: give --store the name"), std::string::npos) << error;
    }
}

TEST_F(TlsStores, a_server_that_wants_certificates_of_clients_is_told_apart) {
    const std::string where = start("right", "yes");
    NEED_TLS(where);
    const TrustedAuthority trusted(certificates.authority());
    const std::string error = open_error("rediss://:secret@" + where);
    EXPECT_NE(error.find("start it with tls-auth-clients no"), std::string::npos) << error;
}

TEST_F(TlsStores, with_and_without_tls_do_not_meet) {
    const std::string where = start("right");
    NEED_TLS(where);
    const std::string plain = open_error("redis://:secret@" + where);
    EXPECT_NE(plain.find("correct --store (over TLS it is rediss://)"), std::string::npos) << plain;
    RedisServer without;
    const std::string encrypted = open_error("rediss://127.0.0.1:" + std::to_string(without.port));
    EXPECT_NE(encrypted.find("correct --store (without TLS it is redis://)"), std::string::npos) << encrypted;
}

// ---- silence

// A server that accepts one connection, or several in turn.
class FakeServer {
public:
    explicit FakeServer(const std::function<void(int connection)>& serve, int connections = 1)
        : listening(socket(AF_INET, SOCK_STREAM, 0)) {
        const int small = 16 << 10;
        setsockopt(listening, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof address;
        if (bind(listening, (sockaddr*)&address, length) != 0 || listen(listening, 1) != 0 ||
            getsockname(listening, (sockaddr*)&address, &length) != 0) {
            throw std::runtime_error("no server");
        }
        port = ntohs(address.sin_port);
        thread = std::thread([=] {
            for (int i = 0; i < connections; i++) {
                const int connection = accept(listening, nullptr, nullptr);
                if (connection < 0) { return; }
                serve(connection);
                close(connection);
            }
        });
    }
    ~FakeServer() {
        shutdown(listening, SHUT_RDWR);  // one that never came is not waited for
        thread.join();
        close(listening);
    }

    int port;

private:
    const int listening;
    std::thread thread;
};

struct Connected {
    explicit Connected(int port) : descriptor(socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_port = htons(uint16_t(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        EXPECT_EQ(connect(descriptor, (const sockaddr*)&address, sizeof address), 0);
    }
    ~Connected() { close(descriptor); }

    const int descriptor;
};

// Receives piece by piece, sleeps after each, answers after `bytes` bytes, and then waits until the other
// side disconnects.
static void serve_slowly(int connection, size_t bytes, const std::string& answer) {
    char buffer[16 << 10];
    ssize_t count;
    size_t had = 0;
    while (had < bytes && (count = recv(connection, buffer, sizeof buffer, 0)) > 0) {
        had += size_t(count);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    send(connection, answer.data(), answer.size(), MSG_NOSIGNAL);
    while (recv(connection, buffer, sizeof buffer, 0) > 0) {}
}

// 4 MB in pieces of at most 16 kB, 20 ms each, take five seconds, most of them after send() has returned.
TEST(Socket, what_takes_long_is_not_lost_while_it_moves) {
    const std::string value(4'000'000, 'x');
    FakeServer server([&](int connection) { serve_slowly(connection, value.size(), "answer"); });
    const Connected connected(server.port);
    Socket socket(connected.descriptor, 2);
    socket.send(value.data(), value.size());
    char buffer[16];
    std::string answer;
    while (answer.size() < 6) { answer.append(buffer, socket.receive(buffer, sizeof buffer)); }
    EXPECT_EQ(answer, "answer");
}

TEST(Socket, silence_is_an_end) {
    FakeServer server([](int connection) { serve_slowly(connection, 1, ""); });
    const Connected connected(server.port);
    Socket socket(connected.descriptor, 0.2);
    socket.send("x", 1);
    char buffer[16];
    EXPECT_THROW(socket.receive(buffer, sizeof buffer), ConnectionLost);
}

// Answers each command with the next of `answers`.
static void answer_with(int connection, const std::vector<std::string>& answers) {
    char buffer[1000];
    for (const std::string& answer : answers) {
        if (recv(connection, buffer, sizeof buffer, 0) <= 0) { return; }
        send(connection, answer.data(), answer.size(), MSG_NOSIGNAL);
    }
}

TEST(RedisStore, a_server_that_still_reads_its_data_is_waited_for) {
    const std::string loading = "-LOADING Redis is loading the dataset in memory\r\n";
    FakeServer server([&](int connection) {
        answer_with(connection, {loading, loading, loading, "+PONG\r\n", "$5\r\nvalue\r\n"});
    });
    auto store = open_store("redis://127.0.0.1:" + std::to_string(server.port), 10);
    EXPECT_EQ(store->try_get("key"), "value");
}

TEST(RedisStore, a_server_that_cannot_serve_now_may_be_tried_again) {
    for (const std::string reply : {"MISCONF Redis is configured to save RDB snapshots",
                                    "ERR max number of clients reached"}) {
        FakeServer server([&](int connection) { answer_with(connection, {"-" + reply + "\r\n"}); });
        EXPECT_THROW(open_store("redis://127.0.0.1:" + std::to_string(server.port), 1), TemporaryFailure);
    }
}

TEST(RedisStore, a_connection_that_has_fallen_silent_is_made_again) {
    int connections = 0;
    FakeServer server([&](int connection) {
        if (++connections == 1) {
            answer_with(connection, {"+PONG\r\n"});
            for (char byte; recv(connection, &byte, 1, 0) > 0;) {}
        } else {
            answer_with(connection, {"+PONG\r\n", "$5\r\nvalue\r\n"});
        }
    }, 2);
    auto store = open_store("redis://127.0.0.1:" + std::to_string(server.port), 2);
    EXPECT_EQ(store->try_get("key"), "value");
}

TEST(RedisStore, what_does_not_speak_redis_is_a_user_error) {
    FakeServer server([](int connection) { answer_with(connection, {"HTTP/1.1 400 Bad Request\r\n\r\n"}); });
    EXPECT_NE(open_error("redis://127.0.0.1:" + std::to_string(server.port))
                  .find("does not answer like Redis (Protocol error"),
              std::string::npos);
}

TEST(Socket, a_server_that_takes_nothing_more_is_lost) {
    RedisServer server;
    if (server.port == 0) { GTEST_SKIP() << "redis-server is not installed or does not start"; }
    RedisConnection connection(server.url(), 0.3);
    connection.connect(5);
    server.pause();
    const std::string value(16 << 20, 'x');
    EXPECT_THROW(connection.ask({"SET", "key", value}), ConnectionLost);
    EXPECT_FALSE(connection.is_open());
}

}  // namespace test_store
