// The store: its addresses, keys of any bytes as names of files, and values that other processes have put
// there.
//
//     | which of the functions below | its argument |
#include "dev/break/fuzz/fuzz.h"
#include "llmc/run/process.h"

// redis://...
void try_address([[maybe_unused]] const std::string& bytes) {
#ifndef WITHOUT_HIREDIS
    const RedisAddress address = parse_redis_url("redis://" + bytes);
    require(!address.host.empty() && address.port >= 1 && address.port <= 65535, "the address is valid");
#endif
}

// Any key has its own file in the folder, and its value is read back.
void try_key(const std::string& bytes) {
    static const Folder folder;
    FileStore store(folder.path());
    const size_t half = bytes.size() / 2;
    const std::string key = bytes.substr(0, half), other = key + "x";
    store.set(key, bytes);
    store.set(other, "");
    require(store.try_get(key) == bytes, "a value that was set is there");
    require(store.set_if_absent(key, "late") == bytes, "set_if_absent keeps it");
    store.remove(key);
    store.remove(other);
    require(!store.try_get(key), "a value that was removed is gone");
    require(std::filesystem::is_empty(folder.path()), "no file is left");
}

// A refusal may quote other processes' values unchanged: only members of the run can write to the store.
template <class Work>
void may_quote(Work work) {
    try {
        work();
    } catch (const UserError&) {}
}

// Process 0 compares its options with those that another process has put into the store.
void try_options(const std::string& bytes) {
    Process process;
    process.workers = 2;
    auto memory = std::make_shared<MemoryStore>();
    process.store = std::make_shared<PrefixStore>(memory, "");
    memory->set("fingerprint/1", bytes);
    may_quote([&] { process.check_fingerprint({{"--inner-steps", "10"}, {"--model", "d6"}}); });
}

// Another process reads process 0's verdict.
void try_verdict(const std::string& bytes) {
    Process process;
    process.workers = 2;
    process.worker = 1;
    auto memory = std::make_shared<MemoryStore>();
    process.store = std::make_shared<PrefixStore>(memory, "");
    memory->set("fingerprint/verdict", bytes);
    may_quote([&] { process.check_fingerprint({}); });
}

void fuzz(const std::string& bytes) {
    if (bytes.empty()) { return; }
    const std::string rest = bytes.substr(1);
    switch (bytes[0] % 4) {
        case 0:
            return try_address(rest);
        case 1:
            return try_key(rest);
        case 2:
            return try_options(rest);
        case 3:
            return try_verdict(rest);
    }
}

std::vector<std::string> seeds() {
    using namespace std::string_literals;
    return {"\0host"s,
            "\0:p%41ss@[::1]:6379/"s,
            "\0user:pass@10.0.0.1:7000"s,
            "\1join/0 value"s,
            "\1"s + std::string(500, '/'),
            "\2--inner-steps\0"s + "10\0"s + "--model\0d6\0"s,
            "\3"s};
}
