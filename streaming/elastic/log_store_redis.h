// RedisLogStore: the sync log in a Redis or Valkey server (llmc/run/redis.h). A folder is a hash under the
// key RUN/log/FOLDER. Values are bytes of any kind; a hash that is listed holds small ones.
//
// With `appendonly yes` and `appendfsync always` a server forgets nothing that it has answered, even if it is
// killed or loses power. One that comes back with old data would let syncs be decided twice; warning() says
// if it may.
#pragma once
#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/redis.h"
#include "streaming/elastic/log_store.h"

class RedisLogStore : public LogStore {
public:
    // UserError if the server cannot be reached within `timeout` seconds, refuses the password, or has
    // another certificate than it should. It counts as lost after as long a silence (both at most 10 s).
    RedisLogStore(const std::string& url, const std::string& run_name, double timeout)
        : prefix(run_name + "/log/"), timeout(std::min(timeout, 10.0)), connection(url, this->timeout) {
        connection.connect(this->timeout);
        try {
            look_at_settings();
        } catch (const ConnectionLost&) {}  // the first request will tell
    }

    StoreAnswer perform(const StoreRequest& request) override {
        return std::move(answers_to(&request, 1).front());
    }

    std::vector<StoreAnswer> perform_all(const std::vector<StoreRequest>& requests) override {
        return answers_to(requests.data(), requests.size());
    }

    std::string warning() const override { return warned; }

private:
    using Reply = RedisConnection::Reply;
    struct OutOfMemory : RunError {  // of the server's
        using RunError::RunError;
    };

    std::vector<StoreAnswer> answers_to(const StoreRequest* requests, size_t count) {
        std::vector<StoreAnswer> answers;
        try {
            // Other requests wait behind this one.
            if (!connection.is_open()) { connection.connect(std::min(timeout, 3.0)); }
            while (answers.size() < count) { answer_next(requests, count, answers); }
        } catch (const ConnectionLost& error) {
            const std::string where = "the connection to the store at " + connection.where();
            answers.resize(count, lost_answer(where + " is lost (" + error.what() + ")", false));
        } catch (const std::exception& error) {
            connection.close();  // the next connection shows the password again
            const bool is_full = dynamic_cast<const OutOfMemory*>(&error) != nullptr;
            answers.resize(count, lost_answer(error.what(), is_full));
        }
        return answers;
    }

    // Answers one `folders` request, which takes many commands, or all requests before the next one together.
    // Removals do not go with writes: a server without memory refuses a transaction as a whole.
    void answer_next(const StoreRequest* requests, size_t count, std::vector<StoreAnswer>& answers) {
        const size_t first = answers.size();
        if (requests[first].kind == StoreRequest::folders) {
            StoreAnswer answer;
            find_folders(requests[first].folder, answer.listing);
            return answers.push_back(std::move(answer));
        }
        bool removes = false, writes = false;
        size_t end = first;
        for (; end < count && requests[end].kind != StoreRequest::folders; end++) {
            removes |= requests[end].kind == StoreRequest::remove;
            writes |= is_write(requests[end]);
            if (removes && writes) { break; }
        }
        answer_together(requests + first, end - first, answers);
    }

    // Several writes are a transaction: if the server refuses one for lack of memory, it must do none after
    // it.
    void answer_together(const StoreRequest* requests, size_t count, std::vector<StoreAnswer>& answers) {
        std::vector<std::string> keys;
        for (size_t i = 0; i < count; i++) { keys.push_back(prefix + requests[i].folder); }
        std::vector<RedisConnection::Words> commands;
        for (size_t i = 0; i < count; i++) { commands.push_back(command_of(requests[i], keys[i])); }
        const bool is_transaction = std::count_if(requests, requests + count, is_write) > 1;
        if (is_transaction) {
            commands.insert(commands.begin(), RedisConnection::Words{"MULTI"});
            commands.push_back(RedisConnection::Words{"EXEC"});
        }
        const std::vector<Reply> replies = connection.ask_all(commands);
        for (size_t i = 0; i < commands.size(); i++) { check(*replies[i], commands[i][0]); }
        const redisReply& last = *replies.back();
        if (is_transaction && (last.type != REDIS_REPLY_ARRAY || last.elements != count)) {
            throw RunError("the store's answer to EXEC is not Redis'");
        }
        for (size_t i = 0; i < count; i++) {
            const redisReply& reply = is_transaction ? *last.element[i] : *replies[i];
            if (is_transaction) { check(reply, commands[i + 1][0]); }
            answers.push_back(answer_of(requests[i], keys[i], reply));
        }
    }

    static bool is_write(const StoreRequest& request) {
        return request.kind == StoreRequest::put || request.kind == StoreRequest::put_if_absent;
    }

    static RedisConnection::Words command_of(const StoreRequest& request, const std::string& key) {
        switch (request.kind) {
            case StoreRequest::get:
                return {"HGET", key, request.name};
            case StoreRequest::put:
                return {"HSET", key, request.name, request.value};
            case StoreRequest::put_if_absent:
                return {"HSETNX", key, request.name, request.value};
            case StoreRequest::list:
                return {"HGETALL", key};
            case StoreRequest::remove:
                if (!request.name.empty()) { return {"HDEL", key, request.name}; }
                return {"UNLINK", key};
            case StoreRequest::folders:
                break;
        }
        throw std::logic_error("folders are found by many commands");
    }

    StoreAnswer answer_of(const StoreRequest& request, const std::string& key, const redisReply& reply) {
        StoreAnswer answer;
        switch (request.kind) {
            case StoreRequest::get:
                answer.found = reply.type != REDIS_REPLY_NIL;
                if (answer.found) { answer.value = text(reply); }
                break;
            case StoreRequest::put:
                answer.value = request.value;
                break;
            case StoreRequest::put_if_absent:
                if (!request.asks_winner) { break; }
                answer.value = reply.integer == 1 ? request.value : winner(request, key);
                break;
            case StoreRequest::list:
                for (size_t i = 0; i + 1 < reply.elements; i += 2) {
                    answer.listing[text(*reply.element[i])] = text(*reply.element[i + 1]);
                }
                break;
            case StoreRequest::remove:
            case StoreRequest::folders:
                break;
        }
        return answer;
    }

    // The value that was there before. If it has been removed meanwhile, the write is tried again.
    std::string winner(const StoreRequest& request, const std::string& key) {
        while (true) {
            const Reply there = command({"HGET", key, request.name});
            if (there->type != REDIS_REPLY_NIL) { return text(*there); }
            if (command({"HSETNX", key, request.name, request.value})->integer == 1) { return request.value; }
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
        check(*reply, words[0]);
        return reply;
    }

    void check(const redisReply& reply, std::string_view command) const {
        if (reply.type != REDIS_REPLY_ERROR) { return; }
        const std::string error = text(reply);
        const std::string trouble =
            "the store at " + connection.where() + " answers " + std::string(command) + " with: " + error;
        if (error.compare(0, 3, "OOM") == 0) { throw OutOfMemory(trouble); }
        throw RunError(trouble);
    }

    static std::string text(const redisReply& reply) { return std::string(reply.str, size_t(reply.len)); }

    // If CONFIG is forbidden there is nothing to say.
    void look_at_settings() {
        const std::string store = "the store at " + connection.where();
        const std::string fsync = setting("appendfsync");
        if (setting("appendonly") == "no") {
            warned = store + " does not write down all that it is told: if it is killed, the run is lost; " +
                     "start it with --appendonly yes --appendfsync always";
        } else if (fsync != "always" && !fsync.empty()) {
            warned = store + " writes down only later what it is told: if its machine fails, it forgets " +
                     "what it has answered, and workers may come to differ; " +
                     "start it with --appendfsync always";
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
