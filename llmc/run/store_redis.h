// RedisStore: processes meet through a Redis or Valkey server that all of them reach (redis.h). It reconnects
// for some seconds after it has lost the connection, so that a server may be restarted.
#pragma once
#include <algorithm>
#include <mutex>
#include <optional>
#include <string>

#include "llmc/error.h"
#include "llmc/run/redis.h"
#include "llmc/run/store.h"

class RedisStore : public Store {
public:
    // TemporaryFailure if the server cannot be reached within `timeout` seconds (at most 10), UserError if it
    // refuses the password.
    RedisStore(const std::string& url, double timeout)
        : timeout(std::min(timeout, 10.0)), connection(url, this->timeout) {
        connection.connect(this->timeout);
    }

    void set(const std::string& key, const std::string& value) override { command({"SET", key, value}); }

    std::optional<std::string> try_get(const std::string& key) override {
        const RedisConnection::Reply reply = command({"GET", key});
        if (reply->type == REDIS_REPLY_NIL) { return std::nullopt; }
        return std::string(reply->str, size_t(reply->len));
    }

    std::string set_if_absent(const std::string& key, const std::string& value) override {
        while (true) {
            command({"SETNX", key, value});
            if (std::optional<std::string> winner = try_get(key)) { return *winner; }
        }
    }

    void remove(const std::string& key) override { command({"DEL", key}); }

    std::string url() const override { return connection.url(); }

    std::string local_address() override {
        std::lock_guard<std::mutex> lock(mutex);
        const std::string address = connection.local_address();
        if (address.empty()) {
            throw RunError("the connection to the store at " + connection.where() + " was lost");
        }
        return address;
    }

private:
    // Sends a command, and repeats it if the connection was lost: the commands in use are idempotent.
    RedisConnection::Reply command(const RedisConnection::Words& words) {
        std::lock_guard<std::mutex> lock(mutex);
        Patience patience(std::min(timeout, 5.0));
        while (true) {
            std::string trouble;
            const bool was_open = connection.is_open();
            try {
                if (!was_open) { connection.connect(timeout); }
                RedisConnection::Reply reply = connection.ask(words);
                if (reply->type != REDIS_REPLY_ERROR) { return reply; }
                throw RunError("the store at " + connection.where() + " answers " + std::string(words[0]) +
                               " with: " + reply->str);
            } catch (const UserError& error) {
                trouble = error.what();
            } catch (const ConnectionLost& error) {
                trouble = error.what();
            }
            if (was_open) { patience.begin_again(); }  // it is known to be lost only now
            if (patience.is_over()) {
                throw RunError("lost the store at " + connection.where() + " (" + trouble + ")");
            }
            patience.pause();
        }
    }

    const double timeout;
    std::mutex mutex;
    RedisConnection connection;
};
