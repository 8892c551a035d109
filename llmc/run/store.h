// Store: the key-value store that processes meet through. Values are byte strings of any content.
//   file:DIR                          a folder that all processes see (one machine, or a shared file system)
//   redis://[:PASSWORD@]HOST[:PORT]   a Redis or Valkey server that all processes reach (store_redis.h);
//                                     rediss://: over TLS
//   s3://BUCKET[/PREFIX]              a bucket (store_s3.h)
// It carries addresses, run ids and the cause of a failure, not gradients. A single process uses a
// MemoryStore.
//
// A user's mistake (unknown scheme, wrong password, unwritable folder) is a UserError when the store is
// opened, a server that cannot be reached a TemporaryFailure; a store that fails later is a RunError. All
// methods are thread-safe.
#pragma once
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "llmc/clock.h"
#include "llmc/error.h"
#include "llmc/run/value_file.h"

// -----------------------------------------------------------------------------------------------------------
// Waiting, random names, signals

// A wait with a time limit, for polling: each pause is longer than the one before.
class Patience {
public:
    explicit Patience(double seconds) : limit(seconds) {}
    double waited() const { return now_seconds() - start; }
    double left() const { return std::max(0.0, limit - waited()); }
    bool is_over() const { return waited() >= limit; }
    void begin_again() { start = looked_at = now_seconds(); }

    // To be called after a wait other than pause(), of at most `seconds`. If this process was stopped
    // meanwhile (SIGSTOP, a machine that sleeps), that time does not count: it could not have heard an
    // answer.
    void has_waited(double seconds) {
        const double now = now_seconds(), stopped = now - looked_at - seconds;
        if (stopped > 1) { start += stopped; }
        looked_at = now;
    }

    // To be called after work instead of a wait: its time counts in full.
    void has_worked() { looked_at = now_seconds(); }

    // Sleeps 1 ms at first, then longer, up to 100 ms, but not past the time limit.
    void pause() {
        const double seconds = std::min(step, left() + 0.001);
        looked_at = now_seconds();
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        has_waited(seconds);
        step = std::min(step * 1.3, 0.1);
    }

private:
    double start = now_seconds(), looked_at = start;
    double limit, step = 0.001;
};

// 2 * `bytes` hexadecimal digits from the kernel's random numbers (at most 64 bytes).
inline std::string random_hex(int bytes) {
    unsigned char data[64];
    if (bytes > int(sizeof data) || getrandom(data, size_t(bytes), 0) != bytes) {
        throw RunError("getrandom failed");
    }
    std::string text;
    for (int i = 0; i < bytes; i++) { text += format("%02x", data[i]); }
    return text;
}

// During its life this thread, and threads that it starts, get an error instead of a SIGPIPE when they write
// to a connection that the other side has closed. Otherwise hiredis and OpenSSL would end the process.
class NoSigpipe {
public:
    NoSigpipe() {
        sigset_t pending;
        sigpending(&pending);
        was_pending = sigismember(&pending, SIGPIPE);
        sigemptyset(&pipe);
        sigaddset(&pipe, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &pipe, &before);
    }
    NoSigpipe& operator=(NoSigpipe&&) = delete;  // which also rules out copies
    ~NoSigpipe() {
        const timespec now = {0, 0};
        while (!was_pending && sigtimedwait(&pipe, nullptr, &now) == SIGPIPE) {}
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

private:
    sigset_t pipe, before;
    bool was_pending;
};

// -----------------------------------------------------------------------------------------------------------
// The interface

class Store {
public:
    virtual ~Store() = default;

    virtual void set(const std::string& key, const std::string& value) = 0;

    // Returns the value, if there is one.
    virtual std::optional<std::string> try_get(const std::string& key) = 0;

    // Sets the key unless it has a value. Of several calls at once exactly one wins; all return its value.
    virtual std::string set_if_absent(const std::string& key, const std::string& value) = 0;

    // Removes the key, if it exists.
    virtual void remove(const std::string& key) = 0;

    // The URL without its password, for messages.
    virtual std::string url() const = 0;

    // The address of this machine on its way to the store, for other processes to connect to.
    virtual std::string local_address() { return "127.0.0.1"; }
};

// The keys of one run, which all start with `prefix`.
class PrefixStore : public Store {
public:
    PrefixStore(std::shared_ptr<Store> inner, std::string prefix)
        : inner(std::move(inner)), prefix(std::move(prefix)) {}
    void set(const std::string& key, const std::string& value) override {
        remember(key);
        inner->set(prefix + key, value);
    }
    std::optional<std::string> try_get(const std::string& key) override {
        return inner->try_get(prefix + key);
    }
    std::string set_if_absent(const std::string& key, const std::string& value) override {
        remember(key);
        return inner->set_if_absent(prefix + key, value);
    }
    void remove(const std::string& key) override {
        inner->remove(prefix + key);
        std::lock_guard<std::mutex> lock(mutex);
        own.erase(key);
    }
    std::string url() const override { return inner->url(); }
    std::string local_address() override { return inner->local_address(); }

    // Removes all keys that were set through this object.
    void remove_own() {
        std::lock_guard<std::mutex> lock(mutex);
        for (const std::string& key : own) { inner->remove(prefix + key); }
        own.clear();
    }

private:
    void remember(const std::string& key) {
        std::lock_guard<std::mutex> lock(mutex);
        own.insert(key);
    }

    std::mutex mutex;
    std::set<std::string> own;
    std::shared_ptr<Store> inner;
    std::string prefix;
};

// For the threads of one process.
class MemoryStore : public Store {
public:
    void set(const std::string& key, const std::string& value) override {
        std::lock_guard<std::mutex> lock(mutex);
        values[key] = value;
    }
    std::optional<std::string> try_get(const std::string& key) override {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = values.find(key);
        return found == values.end() ? std::nullopt : std::optional<std::string>(found->second);
    }
    std::string set_if_absent(const std::string& key, const std::string& value) override {
        std::lock_guard<std::mutex> lock(mutex);
        return values.emplace(key, value).first->second;
    }
    void remove(const std::string& key) override {
        std::lock_guard<std::mutex> lock(mutex);
        values.erase(key);
    }
    std::string url() const override { return "memory"; }

private:
    std::mutex mutex;
    std::map<std::string, std::string> values;
};

// -----------------------------------------------------------------------------------------------------------
// A folder

// One file a key (value_file.h). A value is written to a temporary file, which is then renamed to the key's
// file, or linked to it if only the first value may win.
class FileStore : public Store {
public:
    explicit FileStore(std::string folder) : folder(std::move(folder)) { make_usable(this->folder); }

    // UserError if the folder cannot hold a store, TemporaryFailure if it may later.
    static void make_usable(const std::string& folder) {
        std::error_code error;
        std::filesystem::create_directories(folder, error);
        if (!error && access(folder.c_str(), R_OK | W_OK | X_OK) == 0) { return; }
        refuse(folder, error ? error.value() : errno);
    }
    [[noreturn]] static void refuse(const std::string& folder, int error) {
        const std::string text = "the store's folder " + folder + " cannot be used (" + strerror(error) +
                                 "): give --store a folder that can be written";
        if (may_pass(error)) { throw TemporaryFailure(text); }
        throw UserError(text);
    }

    void set(const std::string& key, const std::string& value) override {
        const TemporaryFile file{write_temporary(value)};
        if (rename(file.path.c_str(), path(key).c_str()) != 0) { fail_value_file("rename", file.path); }
    }

    std::optional<std::string> try_get(const std::string& key) override {
        if (std::optional<std::string> value = read_value_file(path(key))) { return value; }
        refresh_folder(folder);
        return read_value_file(path(key));
    }

    std::string set_if_absent(const std::string& key, const std::string& value) override {
        const TemporaryFile file{write_temporary(value)};
        while (true) {
            const bool won = link(file.path.c_str(), path(key).c_str()) == 0;
            if (!won && errno != EEXIST) { fail_value_file("link", path(key)); }
            if (std::optional<std::string> winner = won ? value : try_get(key)) { return *winner; }
        }
    }

    void remove(const std::string& key) override {
        if (unlink(path(key).c_str()) != 0 && errno != ENOENT) { fail_value_file("unlink", path(key)); }
    }

    std::string url() const override { return "file:" + folder; }

    // A long name is shortened and ends in a hash of the key; no other name contains "%%".
    static std::string name_of(const std::string& key) {
        std::string name = file_name_of(key);
        if (name.size() > 200) {
            const XXH128_hash_t hash = XXH3_128bits(key.data(), key.size());
            name = name.substr(0, 150) + format("%%%%%016llx%016llx", (unsigned long long)hash.high64,
                                                (unsigned long long)hash.low64);
        }
        return name;
    }

private:
    std::string path(const std::string& key) const { return folder + "/" + name_of(key); }

    std::string write_temporary(const std::string& value) const {
        const std::string temporary = folder + "/.new-" + random_hex(12);
        write_value_file(temporary, value, /*sync=*/false);  // after a loss of power the processes meet again
        return temporary;
    }

    std::string folder;
};
