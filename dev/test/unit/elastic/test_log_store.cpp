// The sync log's stores: the same claims for a folder, a Redis server, one over TLS, and a bucket of S3; then
// what only a folder or a server can suffer: killed writers, full disks, restarts, refusals.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <set>
#include <thread>

#include "dev/test/certificates.h"
#include "dev/test/files.h"
#include "dev/test/processes.h"
#include "dev/test/s3_server.h"
#include "dev/test/unit/elastic/sync_log_simulation.h"
#include "streaming/elastic/log_stores.h"
#include "streaming/elastic/sync_log_records.h"

namespace test_log_store {

using Values = std::map<std::string, std::string>;

const std::vector<std::string> durable = {"--appendonly", "yes", "--appendfsync", "always"};

StoreAnswer ask(LogStore& store, StoreRequest::Kind kind, const std::string& folder,
                const std::string& name = "", const std::string& value = "") {
    const StoreAnswer answer = store.perform({kind, folder, name, value});
    EXPECT_FALSE(answer.lost) << answer.trouble;
    EXPECT_EQ(answer.trouble, "");
    return answer;
}
std::optional<std::string> get(LogStore& store, const std::string& folder, const std::string& name) {
    const StoreAnswer answer = ask(store, StoreRequest::get, folder, name);
    return answer.found ? std::optional<std::string>(answer.value) : std::nullopt;
}
std::string put(LogStore& store, const std::string& folder, const std::string& name,
                const std::string& value) {
    return ask(store, StoreRequest::put, folder, name, value).value;
}
std::string put_if_absent(LogStore& store, const std::string& folder, const std::string& name,
                          const std::string& value) {
    return ask(store, StoreRequest::put_if_absent, folder, name, value).value;
}
void remove(LogStore& store, const std::string& folder, const std::string& name = "") {
    ask(store, StoreRequest::remove, folder, name);
}
Values list(LogStore& store, const std::string& folder) {
    return ask(store, StoreRequest::list, folder).listing;
}
std::set<std::string> folders(LogStore& store, const std::string& begin) {
    std::set<std::string> names;
    for (const auto& [name, nothing] : ask(store, StoreRequest::folders, begin).listing) {
        names.insert(name);
        EXPECT_EQ(nothing, "");
    }
    return names;
}

std::string every_byte() {
    std::string text;
    for (int c = 0; c < 256; c++) { text += char(c); }
    return text;
}

using Names = std::set<std::string>;

// ---- all of them

enum class Kind { folder, redis, tls, s3 };
std::string name_of_store(const testing::TestParamInfo<Kind>& info) {
    const char* const names[] = {"folder", "redis", "tls", "s3"};
    return names[int(info.param)];
}

class LogStores : public testing::TestWithParam<Kind> {
protected:
    void SetUp() override {
        if (GetParam() == Kind::folder) {
            url = "file:" + folder.name() + "/store";
            return;
        }
        if (GetParam() == Kind::s3) {
            const S3Server* const bucket = S3Server::shared();
            if (!bucket) { GTEST_SKIP() << S3Server::missing; }
            environment = std::make_unique<Environment>(s3_environment(bucket->endpoint));
            url = "s3://runs/of+ us/" + random_hex(8);
            return;
        }
        if (GetParam() == Kind::tls) { certificates = std::make_unique<Certificates>(); }
        server = certificates ? certificates->server("right", "p@ss") : std::make_unique<RedisServer>("p@ss");
        if (server->port == 0) {
            GTEST_SKIP() << "redis-server is not installed, knows no TLS, or there is no openssl";
        }
        if (certificates) { trusted = std::make_unique<TrustedAuthority>(certificates->authority()); }
        url = std::string(certificates ? "rediss" : "redis") +
              "://:p%40ss@localhost:" + std::to_string(server->port);
    }
    std::unique_ptr<LogStore> open(const std::string& run = "run 7*") const {
        return open_log_store(url, run, 5);
    }

    TemporaryFolder folder;
    std::unique_ptr<Certificates> certificates;
    std::unique_ptr<RedisServer> server;
    std::unique_ptr<TrustedAuthority> trusted;
    std::unique_ptr<Environment> environment;
    std::string url;
};

TEST_P(LogStores, a_value_comes_back_until_it_is_replaced_or_removed) {
    auto store = open(), other = open();
    EXPECT_EQ(get(*store, "G/beat", "0"), std::nullopt);
    EXPECT_EQ(put(*store, "G/beat", "0", "1"), "1");
    EXPECT_EQ(get(*other, "G/beat", "0"), "1");
    EXPECT_EQ(put(*store, "G/beat", "0", ""), "");
    EXPECT_EQ(get(*other, "G/beat", "0"), "");
    EXPECT_EQ(get(*other, "G/beat", "1"), std::nullopt);
    EXPECT_EQ(get(*other, "G/bea", "0"), std::nullopt);
    remove(*store, "G/beat", "0");
    EXPECT_EQ(get(*other, "G/beat", "0"), std::nullopt);
    EXPECT_EQ(folders(*other, ""), Names{});
}

TEST_P(LogStores, the_first_one_wins_and_all_are_told) {
    auto store = open(), other = open();
    EXPECT_EQ(put_if_absent(*store, "G/entry", "12", ""), "");
    EXPECT_EQ(put_if_absent(*other, "G/entry", "12", "second"), "");
    EXPECT_EQ(get(*store, "G/entry", "12"), "");
    remove(*store, "G/entry");
    EXPECT_EQ(put_if_absent(*other, "G/entry", "12", "third"), "third");
    EXPECT_EQ(put(*store, "G/entry", "12", "over"), "over");
    EXPECT_EQ(put_if_absent(*store, "G/entry", "12", "fourth"), "over");
}

TEST_P(LogStores, a_request_that_does_not_ask_for_the_winner_is_not_told) {
    auto store = open();
    const bool asks_winner = false;
    for (const char* value : {"first", "second"}) {
        const StoreAnswer answer =
            store->perform({StoreRequest::put_if_absent, "G/payload/1", "0.1.0", value, asks_winner});
        EXPECT_FALSE(answer.lost) << answer.trouble;
        EXPECT_EQ(answer.value, "");
        EXPECT_EQ(get(*store, "G/payload/1", "0.1.0"), "first");
    }
}

TEST_P(LogStores, what_is_done_twice_does_no_harm) {
    auto store = open();
    for (int i = 0; i < 2; i++) {
        EXPECT_EQ(put_if_absent(*store, "G/sent/1", "0.1", "line"), "line");
        EXPECT_EQ(put(*store, "G/durable", "0", "3"), "3");
    }
    EXPECT_EQ(list(*store, "G/sent/1"), (Values{{"0.1", "line"}}));
    for (int i = 0; i < 2; i++) {
        remove(*store, "G/sent/1", "0.1");
        remove(*store, "G/durable");
    }
    EXPECT_EQ(folders(*store, ""), Names{});
}

TEST_P(LogStores, folders_are_listed_with_their_values_and_found_by_how_they_begin) {
    auto store = open();
    put(*store, "run", "generation", "G");
    put(*store, "G/payload/1", "0.1.0", "a");
    put(*store, "G/payload/1", "1.1.0", "b");
    put(*store, "G/payload/12", "0.1.0", "c");
    put(*store, "G/pay", "0", "d");
    put(*store, "H*/payload/1", "0.1.0", "e");
    EXPECT_EQ(list(*store, "G/payload/1"), (Values{{"0.1.0", "a"}, {"1.1.0", "b"}}));
    EXPECT_EQ(list(*store, "G/payload/2"), Values{});
    EXPECT_EQ(list(*store, "G/payload"), Values{});
    EXPECT_EQ(folders(*store, "G/payload/"), (Names{"G/payload/1", "G/payload/12"}));
    EXPECT_EQ(folders(*store, "G/pay"), (Names{"G/pay", "G/payload/1", "G/payload/12"}));
    EXPECT_EQ(folders(*store, "H*"), Names{"H*/payload/1"});
    EXPECT_EQ(folders(*store, "*"), Names{});
    EXPECT_EQ(folders(*store, "").size(), 5u);
    remove(*store, "G/payload/1");
    EXPECT_EQ(folders(*store, "G/payload"), Names{"G/payload/12"});
    EXPECT_EQ(list(*store, "G/payload/1"), Values{});
}

TEST_P(LogStores, a_folder_within_a_removed_one_stays) {
    auto store = open();
    put(*store, "G/a", "name", "1");
    put(*store, "G/a/b", "name", "2");
    EXPECT_EQ(list(*store, "G/a"), (Values{{"name", "1"}}));
    remove(*store, "G/a");
    EXPECT_EQ(folders(*store, ""), Names{"G/a/b"});
    EXPECT_EQ(get(*store, "G/a/b", "name"), "2");
}

TEST_P(LogStores, names_and_values_hold_any_bytes) {
    auto store = open();
    std::vector<std::string> names = {"a/b", "a:b", "a%2Fb", ".", "..", "../../x", ".hidden", "a b", "*"};
    for (const char* name : {"[a]", "\\", "%", "%%", "\n", "\xc3\xa4", "?"}) { names.push_back(name); }
    names.push_back(every_byte().substr(0, 60));
    Values all;
    for (const std::string folder : {"G/*/[x]\\?", "G/..", "G//", "../.new"}) {
        for (const std::string& name : names) {
            all[name] = every_byte() + folder + name;
            put(*store, folder, name, all[name]);
            EXPECT_EQ(put_if_absent(*store, folder, name, "late"), all[name]);
            EXPECT_EQ(get(*store, folder, name), all[name]);
        }
        EXPECT_EQ(list(*store, folder), all);
        EXPECT_EQ(folders(*store, folder), Names{folder});
        remove(*store, folder);
        EXPECT_EQ(folders(*store, ""), Names{});
    }
}

TEST_P(LogStores, a_payload_of_many_megabytes_goes_through_in_chunks) {
    auto store = open(), reader = open();
    const size_t chunk = 64 << 20, bytes = 70'000'000;
    std::string payload(bytes, '\0');
    uint64_t state = 1;
    for (char& byte : payload) {
        state = state * 6364136223846793005 + 1;
        byte = char(state >> 56);
    }
    std::string read;
    for (size_t c = 0; c < chunks_of(bytes, chunk); c++) {
        StoreRequest request = {StoreRequest::put_if_absent, "G/payload/1", "0.1." + std::to_string(c),
                                payload.substr(c * chunk, chunk)};
        const StoreAnswer answer = store->perform(request);
        ASSERT_FALSE(answer.lost) << answer.trouble;
        ASSERT_TRUE(answer.value == request.value);
        request.kind = StoreRequest::get;
        read += reader->perform(request).value;
    }
    EXPECT_EQ(read.size(), bytes);
    EXPECT_EQ(digest_of(read), digest_of(payload));
}

TEST_P(LogStores, of_eight_threads_one_wins_and_all_see_it) {
    const int rounds = 25;
    std::vector<std::vector<std::string>> seen(8);
    std::vector<std::unique_ptr<LogStore>> stores;
    for (int i = 0; i < 8; i++) { stores.push_back(open()); }
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++) {
        threads.emplace_back([&, i] {
            LogStore& store = *stores[size_t(i)];
            Patience patience(60);
            for (int round = 0; round < rounds; round++) {
                const StoreRequest request = {StoreRequest::put_if_absent, "G/entry", std::to_string(round),
                                              std::string(5000, char('0' + i))};
                StoreAnswer answer = store.perform(request);
                // As the log does. SeaweedFS may let the last of eight wait for longer than a client does.
                while (answer.lost && GetParam() == Kind::s3 && !patience.is_over()) {
                    patience.pause();
                    answer = store.perform(request);
                }
                EXPECT_FALSE(answer.lost) << answer.trouble;
                seen[size_t(i)].push_back(answer.value);
            }
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    const Values listed = list(*open(), "G/entry");
    ASSERT_EQ(listed.size(), size_t(rounds));
    for (int round = 0; round < rounds; round++) {
        const std::string winner = listed.at(std::to_string(round));
        EXPECT_EQ(winner, std::string(5000, winner.at(0)));
        for (const auto& one : seen) { EXPECT_EQ(one[size_t(round)], winner); }
    }
}

TEST_P(LogStores, a_listing_of_a_folder_that_is_being_removed_has_all_of_it_or_nothing) {
    if (GetParam() == Kind::s3) { GTEST_SKIP() << "a bucket's objects are removed one by one"; }
    std::atomic<bool> done{false};
    std::thread writer([&] {
        auto store = open();
        for (int round = 0; round < 40; round++) {
            // Until "-whole" is there, a listing may be incomplete. It is the first of the names.
            for (int i = 0; i < 10; i++) {
                put(*store, "G/payload/1", std::to_string(i), std::string(3000, char('a' + i)));
            }
            put(*store, "G/payload/1", "-whole", "");
            remove(*store, "G/payload/1");
        }
        done = true;
    });
    auto store = open();
    while (!done) {
        const Values seen = list(*store, "G/payload/1");
        EXPECT_TRUE(!seen.count("-whole") || seen.size() == 11) << seen.size();
        for (const auto& [name, value] : seen) { EXPECT_EQ(value.size(), name == "-whole" ? 0u : 3000u); }
    }
    writer.join();
    EXPECT_EQ(folders(*store, ""), Names{});
}

TEST_P(LogStores, a_late_writer_finds_the_folder_that_it_needs) {
    std::atomic<bool> done{false};
    std::thread writer([&] {
        auto store = open();
        for (int i = 0; i < 60; i++) {
            EXPECT_EQ(put_if_absent(*store, "G/payload/1", std::to_string(i), "late"), "late");
        }
        done = true;
    });
    auto store = open();
    while (!done) { remove(*store, "G/payload/1"); }
    writer.join();
    remove(*store, "G/payload/1");
    EXPECT_EQ(list(*store, "G/payload/1"), Values{});
}

TEST_P(LogStores, what_is_replaced_all_the_time_is_whole_and_in_every_listing) {
    put(*open(), "G/beat", "0", "a");
    std::atomic<bool> done{false};
    std::thread writer([&] {
        auto store = open();
        for (int round = 0; round < 300; round++) {
            put(*store, "G/beat", "0", std::string(size_t(1 + round * 50), char('a' + round % 26)));
        }
        done = true;
    });
    auto store = open();
    while (!done) {
        const Values seen = list(*store, "G/beat");
        ASSERT_EQ(seen.size(), 1u);
        const std::string value = seen.at("0");
        const size_t round = (value.size() - 1) / 50;
        EXPECT_EQ(value, std::string(1 + round * 50, char('a' + round % 26)));
        EXPECT_TRUE(get(*store, "G/beat", "0"));
    }
    writer.join();
}

TEST_P(LogStores, requests_that_go_out_together_are_answered_in_their_order) {
    auto store = open(), other = open();
    put(*other, "G/entry", "1", "winner");
    const auto answers =
        store->perform_all({{StoreRequest::put_if_absent, "G/payload/1", "0.1.0", every_byte()},
                            {StoreRequest::put_if_absent, "G/sent/1", "0.1", "line"},
                            {StoreRequest::put_if_absent, "G/entry", "1", "late"},
                            {StoreRequest::get, "G/entry", "2", ""},
                            {StoreRequest::list, "G/sent/1", "", ""},
                            {StoreRequest::folders, "G/", "", ""},
                            {StoreRequest::remove, "G/sent/1", "", ""},
                            {StoreRequest::put, "G/beat", "0", "beat"},
                            {StoreRequest::list, "G/sent/1", "", ""},
                            {StoreRequest::remove, "G/beat", "0", ""},
                            {StoreRequest::get, "G/payload/1", "0.1.0", ""}});
    ASSERT_EQ(answers.size(), 11u);
    for (const StoreAnswer& answer : answers) { ASSERT_FALSE(answer.lost) << answer.trouble; }
    EXPECT_EQ(answers[0].value, every_byte());
    EXPECT_EQ(answers[1].value, "line");
    EXPECT_EQ(answers[2].value, "winner");
    EXPECT_FALSE(answers[3].found);
    EXPECT_EQ(answers[4].listing, (Values{{"0.1", "line"}}));
    EXPECT_EQ(answers[5].listing.size(), 3u);
    EXPECT_EQ(answers[7].value, "beat");
    EXPECT_EQ(answers[8].listing, Values{});
    EXPECT_EQ(answers[10].value, every_byte());
    EXPECT_EQ(folders(*other, ""), (Names{"G/entry", "G/payload/1"}));
    EXPECT_TRUE(store->perform_all({}).empty());
}

TEST_P(LogStores, a_client_that_awaits_a_decision_is_told_as_soon_as_it_is_there) {
    auto store = open(), other = open();
    const bool is_bucket = GetParam() == Kind::s3;  // there nobody asks for a decision
    const auto kind = is_bucket ? StoreRequest::get : StoreRequest::decision;
    const std::string folder = is_bucket ? "G/0/entry" : "G/0";
    const std::vector<StoreRequest> requests = {{kind, folder, "4", "0.1"},
                                                {kind, folder, "5", "0.1"},
                                                {StoreRequest::get, "run", "generation"}};
    const double begin = now_seconds();
    EXPECT_FALSE(store->await(requests, 0.05)[1].found);
    EXPECT_GE(now_seconds() - begin, 0.05);
    put_if_absent(*other, "run", "generation", "G");
    std::vector<StoreAnswer> answers;
    std::thread waiting([&] { answers = store->await(requests, 2); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    put_if_absent(*other, "G/0/entry", "5", "text");
    waiting.join();
    ASSERT_EQ(answers.size(), 3u);
    EXPECT_FALSE(answers[0].lost || answers[0].found);
    EXPECT_EQ(answers[1].value, "text");
    EXPECT_EQ(answers[2].value, "G");
    EXPECT_EQ(store->await(requests, 1)[1].value, "text");
}

TEST_P(LogStores, runs_do_not_meet) {
    auto first = open("a"), second = open("a*"), third = open("a/log");
    put(*first, "run", "generation", "1");
    EXPECT_EQ(get(*second, "run", "generation"), std::nullopt);
    EXPECT_EQ(folders(*second, ""), Names{});
    EXPECT_EQ(folders(*third, ""), Names{});
    remove(*second, "run");
    EXPECT_EQ(get(*open("a"), "run", "generation"), "1");
}

INSTANTIATE_TEST_SUITE_P(All, LogStores, testing::Values(Kind::folder, Kind::redis, Kind::tls, Kind::s3),
                         name_of_store);

// ---- a folder

Names files_in(const std::string& folder) {
    Names names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        names.insert(entry.path().filename());
    }
    return names;
}

TEST(Pauses, the_first_one_adapts_from_answer_to_answer_and_the_others_start_from_the_shortest) {
    Pauses pauses{0.04, 1, 2.5, 0.6};
    EXPECT_DOUBLE_EQ(pauses.after(false), 0.04);
    EXPECT_DOUBLE_EQ(pauses.after(false), 0.1);
    EXPECT_DOUBLE_EQ(pauses.after(false), 0.25);
    EXPECT_DOUBLE_EQ(pauses.after(true), 0.04);
    for (const double first : {0.1, 0.25}) {
        EXPECT_DOUBLE_EQ(pauses.after(false), 0.04);
        EXPECT_DOUBLE_EQ(pauses.after(true), first);
    }
    EXPECT_DOUBLE_EQ(pauses.after(true), 0.15);
    for (int i = 0; i < 9; i++) { pauses.after(false); }
    EXPECT_DOUBLE_EQ(pauses.pause, 1);
    EXPECT_DOUBLE_EQ(pauses.begin_again(), 0.375);  // not the pause of the questions that were given up
}

TEST(Pauses, where_questions_cost_nothing_the_first_one_is_always_short) {
    Pauses pauses;
    for (int i = 0; i < 30; i++) {
        EXPECT_DOUBLE_EQ(pauses.after(false), 0.002);
        EXPECT_DOUBLE_EQ(pauses.after(false), 0.0024);
        EXPECT_DOUBLE_EQ(pauses.after(true), 0.002);
    }
}

TEST(FileLogStore, its_folders_and_values_are_to_be_seen_with_ls_and_cat) {
    TemporaryFolder folder;
    auto store = open_log_store("file:" + folder.name(), "run 7", 5);
    put(*store, "G/entry", "12", "text");
    put_if_absent(*store, "G/entry", "12", "late");
    put(*store, "G/payload/1", "0.1.0", "bytes");
    remove(*store, "G/payload/1");
    EXPECT_EQ(read_bytes(folder / "log/run%207/G/entry/12"), "text");
    EXPECT_EQ(files_in(folder / "log/run%207"), (Names{".new", "G"}));
    EXPECT_EQ(files_in(folder / "log/run%207/.new"), Names{});
    EXPECT_EQ(store->warning(), "");
}

TEST(FileLogStore, what_is_no_value_is_not_listed) {
    TemporaryFolder folder;
    auto store = open_log_store("file:" + folder.name(), "run", 5);
    put(*store, "G/beat", "0", "1");
    for (const char* name : {".nfs0000000001", "copy~", "half%2", "low%2f", "space here"}) {
        write_bytes(folder / ("log/run/G/beat/" + std::string(name)), "not ours");
    }
    EXPECT_EQ(list(*store, "G/beat"), (Values{{"0", "1"}}));
    remove(*store, "G/beat");
    EXPECT_EQ(folders(*store, ""), Names{});
}

TEST(FileLogStore, what_killed_writers_leave_is_never_listed_and_swept_once_it_is_old) {
    TemporaryFolder folder;
    const std::string unnamed = folder / "log/run/.new";
    const std::string url = "file:" + folder.name();
    for (int victim = 0; victim < 5; victim++) {
        TestProcess writer([&]() -> std::string {
            auto store = open_log_store(url, "run", 5);
            for (int i = 0;; i++) {
                put(*store, "G/payload/1", std::to_string(i % 3), std::string(20'000'000, 'x'));
            }
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(60 + 17 * victim));
        writer.send_signal(SIGKILL);
        ASSERT_EQ(writer.wait(10), 128 + SIGKILL) << writer.report;
    }
    EXPECT_LE(files_in(unnamed).size(), 5u);
    auto store = open_log_store(url, "run", 5);
    for (const auto& [name, value] : list(*store, "G/payload/1")) {
        EXPECT_EQ(value.size(), 20'000'000u) << name;
    }

    write_bytes(unnamed + "/young", "1");
    write_bytes(unnamed + "/old", "1");
    std::filesystem::create_directory(unnamed + "/removed");
    write_bytes(unnamed + "/removed/0.1.0", "1");
    const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::minutes(11);
    for (const auto& name : files_in(unnamed)) {
        if (name != "young") { std::filesystem::last_write_time(unnamed + "/" + name, long_ago); }
    }
    open_log_store(url, "run", 5);
    EXPECT_EQ(files_in(unnamed), Names{"young"});
}

TEST(FileLogStore, a_writer_that_finds_its_value_swept_writes_it_again) {
    TemporaryFolder folder;
    const std::string url = "file:" + folder.name();
    auto store = open_log_store(url, "run", 5);
    std::atomic<bool> done{false};
    std::atomic<int> swept{0};
    std::thread sweeper([&] {
        while (!done) {
            std::error_code gone;
            for (const auto& name : files_in(folder / "log/run/.new")) {
                if (!std::filesystem::remove(folder / "log/run/.new/" + name, gone)) { continue; }
                swept++;
                std::this_thread::sleep_for(std::chrono::milliseconds(5));  // lets a writer through
            }
            std::this_thread::yield();
        }
    });
    size_t written = 0;
    for (Patience patience(60); swept < 30 && !patience.is_over(); written++) {
        StoreAnswer answer;
        do {
            answer = store->perform({StoreRequest::put_if_absent, "G/entry", std::to_string(written), "value"});
            EXPECT_EQ(answer.lost, !answer.trouble.empty());
        } while (answer.lost);
    }
    done = true;
    sweeper.join();
    EXPECT_GE(swept, 30);
    EXPECT_EQ(list(*store, "G/entry").size(), written);
}

// Runs `work` in a process with a disk of two megabytes at `folder`; "no disk" if this user may not mount it.
std::string on_a_small_disk(const std::string& folder, const std::function<std::string()>& work) {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=2m") != 0) {
        return "no disk";
    }
    return work();
}

TEST(FileLogStore, a_full_disk_is_a_lost_answer_until_there_is_room) {
    TemporaryFolder folder;
    TestProcess process([&] {
        return on_a_small_disk(folder.name(), [&]() -> std::string {
            auto store = open_log_store("file:" + folder.name(), "run", 5);
            put(*store, "G/payload/1", "0.1.0", std::string(1 << 20, 'x'));
            for (StoreRequest::Kind kind : {StoreRequest::put, StoreRequest::put_if_absent}) {
                const StoreAnswer full =
                    store->perform({kind, "G/payload/2", "0.1.0", std::string(3 << 20, 'x')});
                if (!full.lost || !full.is_full) { return "not lost, or not for want of room"; }
                if (full.trouble.find("No space left on device") == std::string::npos) {
                    return full.trouble;
                }
                if (full.trouble.find('\n') != std::string::npos) { return "two lines"; }
            }
            if (store->perform({StoreRequest::list, "G/payload/2", "", ""}).listing.size() != 0) {
                return "half a value is there";
            }
            remove(*store, "G/payload/1");
            const std::string fits(1'500'000, 'y');
            if (put_if_absent(*store, "G/payload/2", "0.1.0", fits) != fits) { return "no room"; }
            return "fine";
        });
    });
    ASSERT_EQ(process.wait(20), 0) << process.report;
    if (process.report == "no disk") { GTEST_SKIP() << "a small disk cannot be mounted here: not root"; }
    EXPECT_EQ(process.report, "fine");
}

TEST(FileLogStore, a_folder_that_cannot_be_used_is_a_user_error) {
    TemporaryFolder folder;
    write_bytes(folder / "file", "");
    for (const std::string& where :
         {folder / "file", std::string("/proc/self"), std::string("/sys/kernel")}) {
        const std::string error = user_error([&] { open_log_store("file:" + where, "run", 5); });
        EXPECT_TRUE(contains(error, where));
        EXPECT_TRUE(contains(error, "give --store a folder that can be written"));
    }
    const std::string error = user_error([&] { open_log_store("ftp://:secret@host", "run", 5); });
    EXPECT_TRUE(contains(error, "is of an unknown kind"));
    EXPECT_FALSE(contains(error, "secret"));
}

TEST(FileLogStore, a_name_that_is_a_folder_is_trouble_and_no_endless_loop) {
    TemporaryFolder folder;
    auto store = open_log_store("file:" + folder.name(), "run", 5);
    put(*store, "G/a", "b", "1");
    for (StoreRequest::Kind kind : {StoreRequest::get, StoreRequest::put, StoreRequest::put_if_absent}) {
        EXPECT_TRUE(store->perform({kind, "G", "a", "x"}).lost);
    }
    EXPECT_TRUE(store->perform({StoreRequest::put, "G/a/b", "c", "x"}).lost);
    const auto answers = store->perform_all({{StoreRequest::put, "G/before", "b", "1"},
                                             {StoreRequest::put_if_absent, "G", "a", "x"},
                                             {StoreRequest::put, "G/behind", "b", "1"}});
    EXPECT_FALSE(answers[0].lost);
    EXPECT_TRUE(answers[1].lost && answers[2].lost);
    EXPECT_EQ(answers[2].trouble, answers[1].trouble);
    EXPECT_EQ(get(*store, "G/before", "b"), "1");
    EXPECT_EQ(get(*store, "G/behind", "b"), std::nullopt);
    EXPECT_EQ(get(*store, "G/a", "b"), "1");
}

// ---- a server

#define NEED_REDIS(server)                                                                  \
    if ((server).port == 0) {                                                               \
        GTEST_SKIP() << "redis-server is not installed, or does not start as it should be"; \
    }

StoreAnswer lost_answer(LogStore& store, StoreRequest::Kind kind = StoreRequest::put) {
    const StoreAnswer answer = store.perform({kind, "G/beat", "0", "value"});
    EXPECT_TRUE(answer.lost);
    EXPECT_EQ(answer.trouble.find('\n'), std::string::npos) << answer.trouble;
    EXPECT_EQ(answer.trouble.find("secret"), std::string::npos) << answer.trouble;
    return answer;
}

TEST(RedisLogStore, a_killed_server_is_lost_and_with_its_data_had_again) {
    RedisServer server("secret", durable);
    NEED_REDIS(server);
    const std::string where = "127.0.0.1:" + std::to_string(server.port);
    auto store = open_log_store(server.url(), "run", 2);
    put_if_absent(*store, "G/entry", "1", every_byte());
    server.stop();
    for (int i = 0; i < 2; i++) { EXPECT_TRUE(contains(lost_answer(*store).trouble, where)); }
    server.start(server.port);
    EXPECT_EQ(get(*store, "G/entry", "1"), every_byte());
    EXPECT_EQ(put(*store, "G/beat", "0", "1"), "1");
}

TEST(RedisLogStore, a_wrong_password_is_a_user_error_and_a_changed_one_a_lost_answer) {
    RedisServer server("secret");
    NEED_REDIS(server);
    const std::string where = "127.0.0.1:" + std::to_string(server.port);
    for (const char* credentials : {"", ":guess@", "me:guess@"}) {
        const std::string url = "redis://" + std::string(credentials) + where;
        const std::string error = user_error([&] { open_log_store(url, "run", 2); });
        EXPECT_TRUE(contains(error, "the store at " + where + " refuses the password"));
        EXPECT_FALSE(contains(error, "guess"));
    }
    auto store = open_log_store(server.url(), "run", 2);
    put(*store, "G/beat", "0", "1");
    RedisConnection admin(server.url(), 5);
    admin.connect(5);
    admin.ask({"CONFIG", "SET", "requirepass", "another"});
    admin.ask({"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"});
    lost_answer(*store);  // of the connection
    EXPECT_TRUE(contains(lost_answer(*store).trouble, "refuses the password"));
    admin.ask({"CONFIG", "SET", "requirepass", "secret"});
    EXPECT_EQ(get(*store, "G/beat", "0"), "1");
}

TEST(RedisLogStore, what_a_server_refuses_is_a_lost_answer_that_says_why) {
    RedisServer server("secret");
    NEED_REDIS(server);
    auto store = open_log_store(server.url(), "run", 2);
    RedisConnection admin(server.url(), 5);
    admin.connect(5);
    const std::string where = "the store at 127.0.0.1:" + std::to_string(server.port);

    admin.ask({"CONFIG", "SET", "maxmemory", "1"});
    EXPECT_TRUE(contains(lost_answer(*store).trouble, where + " answers HSET with: OOM"));
    EXPECT_TRUE(contains(lost_answer(*store, StoreRequest::put_if_absent).trouble, " with: OOM"));
    admin.ask({"CONFIG", "SET", "maxmemory", "0"});
    EXPECT_EQ(put(*store, "G/beat", "0", "1"), "1");

    admin.ask({"REPLICAOF", "127.0.0.1", "1"});
    EXPECT_TRUE(contains(lost_answer(*store).trouble, "READONLY"));
    admin.ask({"REPLICAOF", "NO", "ONE"});
    EXPECT_EQ(put(*store, "G/beat", "0", "2"), "2");

    admin.ask({"SET", "run/log/G/text", "not a hash"});
    const StoreAnswer answer = store->perform({StoreRequest::list, "G/text", "", ""});
    EXPECT_TRUE(answer.lost && contains(answer.trouble, "WRONGTYPE"));
}

TEST(RedisLogStore, a_server_without_memory_removes_what_it_is_told_to) {
    RedisServer server("secret");
    NEED_REDIS(server);
    auto store = open_log_store(server.url(), "run", 2);
    for (const char* sync : {"1", "2", "3"}) { put(*store, "G/payload/" + std::string(sync), "0.1.0", "x"); }
    RedisConnection admin(server.url(), 5);
    admin.connect(5);
    admin.ask({"CONFIG", "SET", "maxmemory", "1"});
    const std::vector<StoreRequest> requests = {{StoreRequest::remove, "G/payload/1", "", ""},
                                                {StoreRequest::list, "G/payload/2", "", ""},
                                                {StoreRequest::remove, "G/payload/2", "0.1.0", ""},
                                                {StoreRequest::put_if_absent, "G/sent/4", "0.1", "line"},
                                                {StoreRequest::put, "G/beat", "0", "1"},
                                                {StoreRequest::remove, "G/payload/3", "", ""}};
    const auto answers = store->perform_all(requests);
    for (size_t i = 0; i < requests.size(); i++) {
        EXPECT_EQ(answers[i].lost, i >= 3) << i << ": " << answers[i].trouble;
        EXPECT_EQ(answers[i].is_full, i >= 3) << i;
    }
    EXPECT_TRUE(contains(answers[3].trouble, " with: OOM")) << answers[3].trouble;
    EXPECT_EQ(folders(*store, ""), Names{"G/payload/3"});
    admin.ask({"CONFIG", "SET", "maxmemory", "0"});
    for (const StoreAnswer& answer : store->perform_all(requests)) { EXPECT_FALSE(answer.lost); }
    EXPECT_EQ(folders(*store, ""), (Names{"G/beat", "G/sent/4"}));
}

TEST(RedisLogStore, where_a_write_is_refused_nothing_that_went_out_with_it_is_done) {
    RedisServer server("secret");
    NEED_REDIS(server);
    RedisConnection admin(server.url(), 5);
    admin.connect(5);
    admin.ask({"ACL", "SETUSER", "worker", "on", ">hidden", "~run/log/G/sent/*", "~run/told/*", "+@all"});
    const std::string where = "127.0.0.1:" + std::to_string(server.port);
    auto store = open_log_store("redis://worker:hidden@" + where, "run", 2);
    const auto answers = store->perform_all({{StoreRequest::put_if_absent, "G/payload/1", "0.1.0", "bytes"},
                                             {StoreRequest::put_if_absent, "G/sent/1", "0.1", "line"}});
    for (const StoreAnswer& answer : answers) {
        EXPECT_TRUE(answer.lost);
        EXPECT_TRUE(contains(answer.trouble, "answers EVAL with: NOPERM")) << answer.trouble;
    }
    EXPECT_EQ(folders(*open_log_store(server.url(), "run", 2), ""), Names{});
    EXPECT_EQ(put_if_absent(*store, "G/sent/1", "0.1", "line"), "line");
}

TEST(RedisLogStore, settings_that_endanger_the_run_are_said_where_they_can_be_seen) {
    RedisServer forgetful("secret"), keeper("secret", durable);
    NEED_REDIS(forgetful);
    NEED_REDIS(keeper);
    const std::string warning = open_log_store(forgetful.url(), "run", 2)->warning();
    EXPECT_TRUE(contains(warning, "127.0.0.1:" + std::to_string(forgetful.port)));
    EXPECT_TRUE(contains(warning, "--appendonly yes"));
    EXPECT_FALSE(contains(warning, "secret"));
    EXPECT_EQ(open_log_store(keeper.url(), "run", 2)->warning(), "");

    RedisConnection admin(forgetful.url(), 5);
    admin.connect(5);
    admin.ask({"ACL", "SETUSER", "worker", "on", ">hidden", "~*", "+@all", "-config"});
    const std::string url = "redis://worker:hidden@127.0.0.1:" + std::to_string(forgetful.port);
    auto store = open_log_store(url, "run", 2);
    EXPECT_TRUE(contains(store->warning(), "does not show its settings")) << store->warning();
    EXPECT_EQ(put(*store, "G/beat", "0", "1"), "1");

    RedisConnection other(keeper.url(), 5);
    other.connect(5);
    other.ask({"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"});
    EXPECT_TRUE(contains(open_log_store(keeper.url(), "run", 2)->warning(), "--maxmemory-policy noeviction"));
    other.ask({"CONFIG", "SET", "no-appendfsync-on-rewrite", "yes"});
    EXPECT_TRUE(contains(open_log_store(keeper.url(), "run", 2)->warning(), "--no-appendfsync-on-rewrite no"));
}

TEST(RedisLogStore, a_server_with_a_replica_is_said_to_be_no_place_for_a_fail_over) {
    RedisServer server("secret", durable);
    NEED_REDIS(server);
    const std::string of = "127.0.0.1 " + std::to_string(server.port);
    RedisServer replica("secret", {"--replicaof", of, "--masterauth", "secret"});
    std::string warning;
    for (int tries = 0; tries < 100 && warning.empty(); tries++) {  // until the replica has found its server
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        warning = open_log_store(server.url(), "run", 2)->warning();
    }
    EXPECT_TRUE(contains(warning, "run without fail-over")) << warning;
}

TEST(RedisLogStore, what_a_script_decides_and_brings_along_is_what_the_simulation_does) {
    RedisServer server;
    NEED_REDIS(server);
    auto store = open_log_store(server.url(), "run", 5);
    simulation::Random random(1);
    int decided = 0;
    for (int round = 0; round < 400; round++) {
        const std::string run = "G" + std::to_string(round) + "/0", sync = std::to_string(random.among(0, 30));
        SimulatedStore simulated(SyncSchedule(std::vector<Fragment>(1), 4), 4);
        const auto both = [&](const StoreRequest& request) {
            const StoreAnswer answer = store->perform(request);
            EXPECT_FALSE(answer.lost) << answer.trouble;
            simulated.perform(request);
            return answer;
        };
        const uint64_t hash = ~0ull - uint64_t(round);
        for (int worker : {11, 2, 0}) {
            const std::string name = Incarnation{worker, int(random.among(1, 12))}.text();
            const LogLine line{random.happens(0.95) ? hash : 7, random.happens(0.8) ? 40ull : 0, 3, ~0ull};
            both({StoreRequest::put, run + "/payload/" + sync, chunk_name(Incarnation::parse(name), 0), name});
            if (random.happens(0.9)) { both({StoreRequest::put, run + "/sent/" + sync, name, line.text()}); }
            const long promise = random.happens(0.3) ? random.among(-3, -1)
                                 : random.happens(0.5) ? LogBeat::nothing : random.among(0, 20);
            const std::string beat = LogBeat{1, 5, promise, random.among(-1, 9)}.text();
            if (random.happens(0.9)) { both({StoreRequest::put, run + "/beat", std::to_string(worker), beat}); }
        }
        if (random.happens(0.05)) { both({StoreRequest::put, run + "/sent/" + sync, "2.13", "1 1 1 1"}); }
        const std::string question = words(hash, "0.1", random.among(1, 3)) + ";" +
                                     (random.happens(0.3) ? "2 11" : "") + ";" + (random.happens(0.3) ? "11 0" : "");
        both({StoreRequest::decide, run, sync, question});
        const StoreAnswer there = store->perform({StoreRequest::decision, run, sync, "2.1"});
        const StoreAnswer expected = simulated.perform({StoreRequest::decision, run, sync, "2.1"});
        EXPECT_EQ(there.found, expected.found) << round << ", " << question;
        EXPECT_EQ(there.value, expected.value);
        EXPECT_EQ(there.listing, expected.listing);
        decided += there.found;
    }
    EXPECT_GT(decided, 100);
    EXPECT_LT(decided, 350);
}

TEST(RedisLogStore, keys_begin_with_the_name_of_the_run) {
    RedisServer server;
    NEED_REDIS(server);
    put(*open_log_store(server.url(), "run 7", 2), "G/entry", "12", "text");
    RedisConnection admin(server.url(), 5);
    admin.connect(5);
    const auto reply = admin.ask({"HGET", "run 7/log/G/entry", "12"});
    EXPECT_EQ(std::string(reply->str, reply->len), "text");
}

// ---- a bucket

TEST(S3LogStore, only_a_server_whose_certificate_is_right_is_spoken_to) {
    const Certificates certificates;
    const std::string files = certificates.authority().substr(0, certificates.authority().rfind('/') + 1);
    const S3Server server({"-s3.cert.file=" + files + "right.crt", "-s3.key.file=" + files + "right.key"}, "https",
                          certificates.authority());
    if (!server.is_there) { GTEST_SKIP() << S3Server::missing; }
    const Environment environment(s3_environment(server.endpoint));
    const std::string error = user_error([&] { open_log_store("s3://runs/tls", "run", 2); });
    EXPECT_TRUE(contains(error, "the certificate of " + server.endpoint + " is not trusted")) << error;
    EXPECT_TRUE(contains(error, "DILOCO_CA"));
    const TrustedAuthority trusted(certificates.authority());
    auto store = open_log_store("s3://runs/tls", "run", 2);
    EXPECT_EQ(put_if_absent(*store, "G/entry", "1", every_byte()), every_byte());
    EXPECT_EQ(list(*store, "G/entry"), (Values{{"1", every_byte()}}));
}

TEST(S3LogStore, a_silent_server_is_lost_within_the_limit_and_had_again) {
    S3Server server;
    if (!server.is_there) { GTEST_SKIP() << S3Server::missing; }
    const Environment environment(s3_environment(server.endpoint));
    auto store = open_log_store("s3://runs/silent", "run", 2);
    put(*store, "G/beat", "0", "1");
    server.pause();
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_TRUE(contains(lost_answer(*store).trouble, "silent for 2 s"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    server.go_on();
    const std::string there = get(*store, "G/beat", "0").value_or("nothing");
    EXPECT_TRUE(there == "1" || there == "value") << there;  // what was lost may have been done
}

}  // namespace test_log_store
