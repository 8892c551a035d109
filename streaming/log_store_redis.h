// RedisLogStore: the sync log in a Redis or Valkey server (llmc/redis.h). A folder is a hash under the key
// RUN/log/FOLDER. Values are bytes of any kind; a hash that is listed holds small ones.
//
// How much a server forgets when it is killed or loses its power is its own affair: with `appendonly yes` and
// `appendfsync always` nothing that it has answered. One that comes back with old data would let syncs be
// decided twice; warning() says when it may.
#pragma once
#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "llmc/error.h"
#include "llmc/redis.h"
#include "sync_log_records.h"

class RedisLogStore : public LogStore {
public:
    // UserError where the server cannot be reached within `timeout` seconds, refuses the password or has not
    // the certificate that it should have. It is lost when it is silent for so long (both at most 10).
    RedisLogStore(const std::string& url, const std::string& run_name, double timeout)
        : prefix(run_name + "/log/"), timeout(std::min(timeout, 10.0)), connection(url, this->timeout) {
        connection.connect(this->timeout);
        try {
            look_at_settings();
        } catch (const ConnectionLost&) {}  // the first request says so
    }

    StoreAnswer perform(const StoreRequest& request) override {
        try {
            // Somebody may wait behind this: the heartbeat, the next request.
            if (!connection.is_open()) { connection.connect(std::min(timeout, 3.0)); }
            return answer_to(request);
        } catch (const ConnectionLost& error) {
            return lost("the connection to the store at " + connection.where() + " is lost (" + error.what() +
                        ")");
        } catch (const std::exception& error) {
            connection.close();  // the next one shows the password anew
            return lost(error.what());
        }
    }

    std::string warning() const override { return warned; }

private:
    using Reply = RedisConnection::Reply;

    static StoreAnswer lost(const std::string& trouble) {
        StoreAnswer answer;
        answer.lost = true;
        answer.trouble = trouble;
        return answer;
    }

    StoreAnswer answer_to(const StoreRequest& request) {
        StoreAnswer answer;
        const std::string key = prefix + request.folder;
        switch (request.kind) {
            case StoreRequest::get:
                if (std::optional<std::string> value = get(key, request.name)) {
                    answer.found = true;
                    answer.value = std::move(*value);
                }
                break;
            case StoreRequest::put:
                command({"HSET", key, request.name, request.value});
                answer.value = request.value;
                break;
            case StoreRequest::put_if_absent:
                answer.value = put_if_absent(key, request);
                break;
            case StoreRequest::remove:
                if (request.name.empty()) {
                    command({"UNLINK", key});
                } else {
                    command({"HDEL", key, request.name});
                }
                break;
            case StoreRequest::list:
                list(key, answer.listing);
                break;
            case StoreRequest::folders:
                find_folders(request.folder, answer.listing);
                break;
        }
        return answer;
    }

    std::optional<std::string> get(const std::string& key, const std::string& name) {
        const Reply reply = command({"HGET", key, name});
        return reply->type == REDIS_REPLY_NIL ? std::nullopt : std::optional<std::string>(text(*reply));
    }

    std::string put_if_absent(const std::string& key, const StoreRequest& request) {
        while (true) {
            if (command({"HSETNX", key, request.name, request.value})->integer == 1) { return request.value; }
            if (std::optional<std::string> winner = get(key, request.name)) { return *winner; }
        }
    }

    template <class Listing>
    void list(const std::string& key, Listing& listing) {
        const Reply reply = command({"HGETALL", key});
        for (size_t i = 0; i + 1 < reply->elements; i += 2) {
            listing[text(*reply->element[i])] = text(*reply->element[i + 1]);
        }
    }

    template <class Listing>
    void find_folders(const std::string& begin, Listing& found) {
        const std::string pattern = without_wildcards(prefix + begin) + "*";
        std::string cursor = "0";
        do {
            const Reply reply = command({"SCAN", cursor, "MATCH", pattern, "COUNT", "1000"});
            if (reply->elements != 2) { throw RunError("the store's answer to SCAN is not Redis'"); }
            cursor = text(*reply->element[0]);
            const redisReply& keys = *reply->element[1];
            for (size_t i = 0; i < keys.elements; i++) {
                found[text(*keys.element[i]).substr(prefix.size())];
            }
        } while (cursor != "0");
    }
    static std::string without_wildcards(const std::string& text) {
        std::string pattern;
        for (char c : text) {
            if (std::string("*?[]\\").find(c) != std::string::npos) { pattern += '\\'; }
            pattern += c;
        }
        return pattern;
    }

    Reply command(const RedisConnection::Words& words) {
        Reply reply = connection.ask(words);
        if (reply->type == REDIS_REPLY_ERROR) {
            throw RunError("the store at " + connection.where() + " answers " + std::string(words[0]) +
                           " with: " + text(*reply));
        }
        return reply;
    }

    static std::string text(const redisReply& reply) { return std::string(reply.str, size_t(reply.len)); }

    // Where they are not to be seen (CONFIG is forbidden) there is nothing to say.
    void look_at_settings() {
        const std::string store = "the store at " + connection.where();
        if (setting("appendonly") == "no") {
            warned = store + " does not write down all that it is told: if it is killed, the run is lost; " +
                     "start it with --appendonly yes --appendfsync always";
        } else if (setting("maxmemory-policy").compare(0, 8, "allkeys-") == 0) {
            warned = store + " throws keys away when its memory is full, also the run's; " +
                     "start it with --maxmemory-policy noeviction";
        }
    }
    std::string setting(const char* name) {
        const Reply reply = connection.ask({"CONFIG", "GET", name});
        return reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 ? text(*reply->element[1]) : "";
    }

    const std::string prefix;
    const double timeout;
    RedisConnection connection;
    std::string warned;
};
