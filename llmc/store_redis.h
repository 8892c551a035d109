// RedisStore: processes meet through a Redis or Valkey server that all of them reach, over hiredis.
//     redis://[:PASSWORD@]HOST[:PORT]
// A connection that is lost is made again for some seconds, so that a server may be started anew.
#pragma once
#include <hiredis/hiredis.h>
#include <netdb.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/store.h"

struct RedisAddress {
    std::string host, user, password;
    int port = 6379;
};

// redis://[[USER]:PASSWORD@]HOST[:PORT]; %XX in user and password; an IPv6 address stands in brackets.
inline RedisAddress parse_redis_url(const std::string& url) {
    auto wrong = [&] {
        return UserError(
            "the store's address is not of the form redis://[:PASSWORD@]HOST:PORT: write it so, e.g. "
            "redis://10.0.0.1:6379");
    };
    auto decoded = [&](const std::string& text) {
        std::string plain;
        for (size_t i = 0; i < text.size(); i++) {
            if (text[i] != '%') { plain += text[i]; continue; }
            if (i + 2 >= text.size() || !isxdigit(text[i + 1]) || !isxdigit(text[i + 2])) { throw wrong(); }
            plain += char(std::stoi(text.substr(i + 1, 2), nullptr, 16));
            i += 2;
        }
        return plain;
    };
    RedisAddress address;
    std::string rest = url.substr(strlen("redis://"));
    const size_t at = rest.rfind('@');
    if (at != std::string::npos) {
        const std::string credentials = rest.substr(0, at);
        const size_t colon = credentials.find(':');
        if (colon == std::string::npos) { throw wrong(); }
        address.user = decoded(credentials.substr(0, colon));
        address.password = decoded(credentials.substr(colon + 1));
        rest = rest.substr(at + 1);
    }
    if (!rest.empty() && rest.back() == '/') { rest.pop_back(); }
    size_t colon = rest.rfind(':');
    if (!rest.empty() && rest[0] == '[') {
        const size_t close = rest.find(']');
        if (close == std::string::npos) { throw wrong(); }
        address.host = rest.substr(1, close - 1);
        if (close + 1 < rest.size() && rest[close + 1] != ':') { throw wrong(); }
        colon = close + 1 < rest.size() ? close + 1 : std::string::npos;
    } else {
        address.host = rest.substr(0, colon);
    }
    if (colon != std::string::npos) {
        const std::string port = rest.substr(colon + 1);
        if (port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos) {
            throw wrong();
        }
        address.port = std::stoi(port);
    }
    if (address.host.empty() || rest[0] == ':' ||
        address.host.find_first_of("/@?#") != std::string::npos || address.port < 1 ||
        address.port > 65535) {
        throw wrong();
    }
    return address;
}

class RedisStore : public Store {
public:
    // UserError where the server cannot be reached within `timeout` seconds (at most 10) or refuses the
    // password.
    RedisStore(const std::string& url, double timeout)
        : address(parse_redis_url(url)), timeout(std::min(timeout, 10.0)) {
        connect();
    }

    void set(const std::string& key, const std::string& value) override { command({"SET", key, value}); }

    std::optional<std::string> try_get(const std::string& key) override {
        Reply reply = command({"GET", key});
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

    std::string url() const override { return "redis://" + where(); }

    std::string local_address() override {
        std::lock_guard<std::mutex> lock(mutex);
        sockaddr_storage local;
        socklen_t length = sizeof local;
        char text[NI_MAXHOST];
        if (!connection || getsockname(connection->fd, (sockaddr*)&local, &length) != 0 ||
            getnameinfo((sockaddr*)&local, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
            throw RunError("the connection to the store at " + where() + " was lost");
        }
        return text;
    }

private:
    struct Free {
        void operator()(redisContext* context) const { redisFree(context); }
        void operator()(redisReply* reply) const { freeReplyObject(reply); }
    };
    using Connection = std::unique_ptr<redisContext, Free>;
    using Reply = std::unique_ptr<redisReply, Free>;

    std::string where() const {
        const bool is_ipv6 = address.host.find(':') != std::string::npos;
        return (is_ipv6 ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
    }

    // Null where the connection failed.
    static Reply ask(redisContext& context, const std::vector<std::string>& words) {
        NoSigpipe no_sigpipe;
        std::vector<const char*> texts;
        std::vector<size_t> lengths;
        for (const std::string& word : words) {
            texts.push_back(word.data());
            lengths.push_back(word.size());
        }
        return Reply(
            (redisReply*)redisCommandArgv(&context, int(words.size()), texts.data(), lengths.data()));
    }

    void connect() {
        connection.reset();
        const timeval limit = {time_t(timeout), suseconds_t((timeout - double(time_t(timeout))) * 1e6)};
        Connection made(redisConnectWithTimeout(address.host.c_str(), address.port, limit));
        if (!made || made->err) {
            throw UserError("cannot reach the store at " + where() + " (" +
                            (made ? made->errstr : "out of memory") +
                            "): start a Redis or Valkey server there, or correct --store");
        }
        redisSetTimeout(made.get(), limit);
        redisEnableKeepAlive(made.get());
        if (!address.password.empty()) {
            std::vector<std::string> words = {"AUTH", address.user, address.password};
            if (address.user.empty()) { words.erase(words.begin() + 1); }
            Reply reply = ask(*made, words);
            check_answer(made.get(), reply.get());
        }
        Reply reply = ask(*made, {"PING"});
        check_answer(made.get(), reply.get());
        connection = std::move(made);
    }

    void check_answer(const redisContext* context, const redisReply* reply) const {
        if (!reply) {
            throw UserError("the server at " + where() + " does not answer like Redis (" + context->errstr +
                            "): correct --store");
        }
        if (reply->type != REDIS_REPLY_ERROR) { return; }
        const std::string text(reply->str, size_t(reply->len));
        if (text.rfind("NOAUTH", 0) == 0 || text.rfind("WRONGPASS", 0) == 0 ||
            text.find("password") != std::string::npos) {
            throw UserError("the store at " + where() + " refuses the password (" + text +
                            "): give --store redis://:PASSWORD@" + where());
        }
        throw UserError("the store at " + where() + " refuses to serve (" + text +
                        "): look at the server's settings");
    }

    // A lost connection is made again, for some seconds: each of the commands in use may be sent twice.
    Reply command(const std::vector<std::string>& words) {
        std::lock_guard<std::mutex> lock(mutex);
        Patience patience(std::min(timeout, 5.0));
        while (true) {
            std::string trouble;
            try {
                if (!connection) { connect(); }
                if (Reply reply = ask(*connection, words)) {
                    if (reply->type != REDIS_REPLY_ERROR) { return reply; }
                    throw RunError("the store at " + where() + " answers " + words[0] +
                                   " with: " + reply->str);
                }
                trouble = connection->errstr;
            } catch (const UserError& error) {
                trouble = error.what();
            }
            connection.reset();
            if (patience.is_over()) { throw RunError("lost the store at " + where() + " (" + trouble + ")"); }
            patience.pause();
        }
    }

    const RedisAddress address;
    const double timeout;
    mutable std::mutex mutex;
    Connection connection;
};

inline std::unique_ptr<Store> open_redis_store(const std::string& url, double timeout) {
    return std::make_unique<RedisStore>(url, timeout);
}
