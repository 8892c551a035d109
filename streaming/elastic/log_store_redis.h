// RedisLogStore: the sync log in a Redis or Valkey server (llmc/run/redis.h). A folder is a hash under the
// key RUN/log/FOLDER. Values are bytes of any kind; only hashes with small values are listed.
//
// With `appendonly yes` and `appendfsync always` a server keeps all that it has confirmed, even if it is
// killed or loses power. One that came back with old data would let syncs be decided twice; warning() says
// whether this server might.
//
// A request that takes several commands is a script: it costs one round trip and is atomic. A worker that
// waits for a value reads the stream RUN/told/FOLDER/NAME, which exists for ten seconds.
#pragma once
#include <algorithm>
#include <deque>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/redis.h"
#include "llmc/run/log_store.h"

namespace redis_scripts {

// Keeps the first value, and returns it.   KEYS: hash, stream; ARGV: name, value
const char* const put_if_absent = R"(
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return redis.call('HGET', KEYS[1], ARGV[1]) end
redis.call('XADD', KEYS[2], '*', '', '')
redis.call('EXPIRE', KEYS[2], 10)
return ARGV[2])";

// Writes the LogEntry if nobody is still awaited and all lines name one hash.
// KEYS: entry, its stream, sent/s, beat; ARGV: sync, the request's value
const char* const decide = R"(
local insert = table.insert
local ours, decider, least, awaited, dead = string.match(ARGV[2], '^(%d+) (%S+) (%d+);(.*);(.*)$')
local lines, beats, has = redis.call('HGETALL', KEYS[3]), redis.call('HGETALL', KEYS[4]), {}
local counted, abstained, text = {}, {}, {}
for i = 1, #lines, 2 do
  local worker = tonumber(string.match(lines[i], '^%d+'))
  local hash, tokens, bytes, digest = string.match(lines[i + 1], '^(%d+) (%d+) (%d+) (%d+)$')
  if hash ~= ours or has[worker] then return end
  has[worker] = table.concat({lines[i], bytes, digest, tokens}, ' ')
  insert(tokens == '0' and abstained or counted, worker)
end
if #lines / 2 < tonumber(least) then return end
for worker in string.gmatch(awaited, '%d+') do
  if not has[tonumber(worker)] then return end
end
for worker in string.gmatch(dead, '%d+') do has[tonumber(worker)] = has[tonumber(worker)] or '' end
for i = 1, #beats, 2 do
  if not has[tonumber(beats[i])] and string.match(beats[i + 1], '^%d+ %d+ %d') then return end
end
table.sort(counted)
table.sort(abstained)
for _, worker in ipairs(counted) do insert(text, has[worker]) end
insert(text, #abstained)
for _, worker in ipairs(abstained) do insert(text, worker) end
text = table.concat({ours, decider, #counted, table.concat(text, ' '), '0 0'}, ' ')
if redis.call('HSETNX', KEYS[1], ARGV[1], text) == 0 then return end
redis.call('XADD', KEYS[2], '*', '', '')
redis.call('EXPIRE', KEYS[2], 10))";

// The entry, under an empty name, and the first chunks of the payloads that it counts, until these exceed
// 4 MiB in total.   KEYS: entry, payload/s; ARGV: sync, the start whose payload is not needed
const char* const decision = R"(
local answer, bytes, place = {'', redis.call('HGET', KEYS[1], ARGV[1])}, 0, 0
for word in string.gmatch(answer[2] or '', '%S+') do
  local is_name = place > 2 and place % 4 == 3 and string.find(word, '.', 1, true) and word ~= ARGV[2]
  local chunk = is_name and bytes < 4194304 and redis.call('HGET', KEYS[2], word .. '.0')
  if chunk then
    table.insert(answer, word .. '.0')
    table.insert(answer, chunk)
    bytes = bytes + #chunk
  end
  place = place + 1
end
return answer[2] and answer or {})";

// ARGV: pattern; the place in a key, from 1, where the folder's name begins
const char* const folders = R"(
local cursor, found = '0', {}
repeat
  local reply = redis.call('SCAN', cursor, 'MATCH', ARGV[1], 'COUNT', 1000)
  cursor = reply[1]
  for _, key in ipairs(reply[2]) do
    table.insert(found, string.sub(key, ARGV[2]))
    table.insert(found, '')
  end
until cursor == '0'
return found)";

}  // namespace redis_scripts

class RedisLogStore : public LogStore {
public:
    // TemporaryFailure if the server cannot be reached within `timeout` seconds, UserError if it refuses the
    // password or has another certificate. It counts as lost after as long a silence (both at most 10 s).
    RedisLogStore(const std::string& url, const std::string& run_name, double timeout)
        : prefix(run_name + "/log/"), told(run_name + "/told/"), timeout(std::min(timeout, 10.0)),
          connection(url, this->timeout) {
        connection.connect(this->timeout);
        try {
            look_at_settings();
        } catch (const ConnectionLost&) {}  // the first request will tell
    }

    std::vector<StoreAnswer> perform_all(const std::vector<StoreRequest>& requests) override {
        return answers_to(requests, {});
    }

    std::vector<StoreAnswer> await(const std::vector<StoreRequest>& requests, double seconds) override {
        const long milliseconds = long(1000 * std::min(seconds, timeout / 2));
        Command wait = {"XREAD", "BLOCK", std::to_string(milliseconds), "STREAMS"};
        for (const StoreRequest& one : requests) {
            if (one.kind != StoreRequest::decision) { continue; }
            wait.push_back(told + one.folder + "/entry/" + one.name);
        }
        wait.resize(2 * wait.size() - 4, "0");
        return answers_to(requests, wait);
    }

    std::string warning() const override { return warned; }

private:
    using Reply = RedisConnection::Reply;
    using Command = std::vector<std::string>;
    struct OutOfMemory : RunError {  // the server has no memory left
        using RunError::RunError;
    };

    // wait: a command that goes before them; its reply counts for nothing
    std::vector<StoreAnswer> answers_to(const std::vector<StoreRequest>& requests, Command wait) {
        std::vector<StoreAnswer> answers;
        try {
            // A short limit, since other requests wait for this call.
            if (!connection.is_open()) { connection.connect(std::min(timeout, 3.0)); }
            for (size_t first = 0, end = 0; end < requests.size(); first = end) {
                for (bool writes = false; end < requests.size(); end++) {
                    if (writes && requests[end].kind == StoreRequest::remove) { break; }
                    writes |= is_write(requests[end]);
                }
                answer_together(&requests[first], end - first, std::exchange(wait, {}), answers);
            }
        } catch (const ConnectionLost& error) {
            const std::string where = "the connection to the store at " + connection.where();
            answers.resize(requests.size(), lost_answer(where + " is lost (" + error.what() + ")", false));
        } catch (const std::exception& error) {
            connection.close();  // the next connection authenticates again
            const bool is_full = dynamic_cast<const OutOfMemory*>(&error) != nullptr;
            answers.resize(requests.size(), lost_answer(error.what(), is_full));
        }
        return answers;
    }

    // Several writes form a transaction: if the server refuses one for lack of memory, it must do none of the
    // later ones. No removal is part of it, since a server without memory refuses a transaction as a whole.
    void answer_together(const StoreRequest* requests, size_t count, const Command& wait,
                         std::vector<StoreAnswer>& answers) {
        const bool is_transaction = std::count_if(requests, requests + count, is_write) > 1;
        const size_t first_write = size_t(std::find_if(requests, requests + count, is_write) - requests);
        const size_t first = is_transaction ? first_write : count;
        std::deque<std::string> texts;
        std::vector<RedisConnection::Words> commands;
        if (!wait.empty()) { commands.emplace_back(wait.begin(), wait.end()); }
        const size_t before = commands.size();
        for (size_t i = 0; i < count; i++) {
            if (i == first) { commands.push_back({"MULTI"}); }
            commands.push_back(command_of(requests[i], texts));
        }
        if (is_transaction) { commands.push_back({"EXEC"}); }
        const std::vector<Reply> replies = connection.ask_all(commands);
        for (size_t i = 0; i < commands.size(); i++) {
            check(*replies[i], commands[i][0]);
            const bool is_alone = before <= i && i < before + first;  // not in the transaction
            if (is_alone) { answers.push_back(answer_of(requests[i - before], *replies[i])); }
        }
        const redisReply& last = *replies.back();
        if (is_transaction && (last.type != REDIS_REPLY_ARRAY || last.elements != count - first)) {
            throw RunError("the store's answer to EXEC is not Redis'");
        }
        for (size_t i = first; i < count; i++) {
            const redisReply& reply = *last.element[i - first];
            check(reply, commands[before + i + 1][0]);
            answers.push_back(answer_of(requests[i], reply));
        }
    }

    static bool is_write(const StoreRequest& request) {
        return request.kind == StoreRequest::put || request.kind == StoreRequest::put_if_absent ||
               request.kind == StoreRequest::decide;
    }

    // texts: owns those of the command's words that do not lie in the request
    RedisConnection::Words command_of(const StoreRequest& request, std::deque<std::string>& texts) const {
        const auto key_of = [&](const std::string& rest) -> std::string_view {
            return texts.emplace_back(prefix + request.folder + rest);
        };
        const auto stream_of = [&](const std::string& rest) -> std::string_view {
            return texts.emplace_back(told + request.folder + rest + "/" + request.name);
        };
        const std::string &name = request.name, &value = request.value;
        switch (request.kind) {
            case StoreRequest::get: return {"HGET", key_of(""), name};
            case StoreRequest::put: return {"HSET", key_of(""), name, value};
            case StoreRequest::list: return {"HGETALL", key_of("")};
            case StoreRequest::put_if_absent:
                if (!request.asks_winner) { return {"HSETNX", key_of(""), name, value}; }
                return {"EVAL", redis_scripts::put_if_absent, "2", key_of(""), stream_of(""), name, value};
            case StoreRequest::remove:
                if (!name.empty()) { return {"HDEL", key_of(""), name}; }
                return {"UNLINK", key_of("")};
            case StoreRequest::folders:
                return {"EVAL", redis_scripts::folders, "0",
                        texts.emplace_back(without_wildcards(prefix + request.folder) + "*"),
                        texts.emplace_back(std::to_string(prefix.size() + 1))};
            case StoreRequest::decide:
                return {"EVAL", redis_scripts::decide, "4", key_of("/entry"), stream_of("/entry"),
                        key_of("/sent/" + name), key_of("/beat"), name, value};
            case StoreRequest::decision: break;
        }
        return {"EVAL", redis_scripts::decision, "2", key_of("/entry"), key_of("/payload/" + name),
                name,   value};
    }

    static StoreAnswer answer_of(const StoreRequest& request, const redisReply& reply) {
        StoreAnswer answer;
        answer.found = reply.type == REDIS_REPLY_STRING;
        if (answer.found) { answer.value = text(reply); }
        if (request.kind == StoreRequest::put) { answer.value = request.value; }
        for (size_t i = 0; reply.type == REDIS_REPLY_ARRAY && i + 1 < reply.elements; i += 2) {
            answer.listing[text(*reply.element[i])] = text(*reply.element[i + 1]);
        }
        if (request.kind != StoreRequest::decision || answer.listing.empty()) { return answer; }
        answer.found = true;
        answer.value = answer.listing[""];
        answer.listing.erase("");
        return answer;
    }

    static std::string without_wildcards(const std::string& text) {
        std::string pattern;
        for (char c : text) {
            if (std::string("*?[]\\").find(c) != std::string::npos) { pattern += '\\'; }
            pattern += c;
        }
        return pattern;
    }

    void check(const redisReply& reply, std::string_view command) const {
        if (reply.type != REDIS_REPLY_ERROR) { return; }
        const std::string error = text(reply);
        const std::string trouble =
            "the store at " + connection.where() + " answers " + std::string(command) + " with: " + error;
        if (error.find("OOM command") != std::string::npos) { throw OutOfMemory(trouble); }
        throw RunError(trouble);
    }

    static std::string text(const redisReply& reply) { return std::string(reply.str, size_t(reply.len)); }

    void look_at_settings() {
        const std::string store = "the store at " + connection.where();
        const std::string fsync = setting("appendfsync");
        if (fsync.empty()) {
            warned = store + " does not show its settings: it must have appendonly yes, appendfsync always";
        } else if (setting("appendonly") == "no") {
            warned = store + " does not persist its data: if it is killed, the run is lost; " +
                     "start it with --appendonly yes --appendfsync always";
        } else if (fsync != "always" || setting("no-appendfsync-on-rewrite") == "yes") {
            warned = store + " may lose confirmed writes if its machine fails, and workers may then "
                     "diverge; start it with --appendfsync always --no-appendfsync-on-rewrite no";
        } else if (has_replicas()) {
            warned = store + " has replicas: if one takes over, workers may diverge; run without fail-over";
        } else if (setting("maxmemory-policy").compare(0, 8, "allkeys-") == 0) {
            warned = store + " evicts keys when its memory is full, including the run's; " +
                     "start it with --maxmemory-policy noeviction";
        }
    }
    std::string setting(const char* name) {
        const Reply reply = connection.ask({"CONFIG", "GET", name});
        return reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 ? text(*reply->element[1]) : "";
    }
    bool has_replicas() {
        const std::string info = text(*connection.ask({"INFO", "replication"})), name = "connected_slaves:";
        return info.find(name) != std::string::npos && info.find(name + "0") == std::string::npos;
    }

    const std::string prefix, told;
    const double timeout;
    RedisConnection connection;
    std::string warned;
};
