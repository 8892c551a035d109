// A connection to a Redis or Valkey server, for the stores on such a server (store_redis.h,
// log_store_redis.h): redis://[[USER]:PASSWORD@]HOST[:PORT], or rediss:// over TLS, where DILOCO_CA names the
// authority's certificate unless it is one of the system's. hiredis connects and speaks the protocol. The
// bytes go through a Socket, because not every version of hiredis knows TLS, and none checks the name in a
// certificate.
#pragma once
#include <hiredis/hiredis.h>
#include <string.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/owned_array.h"
#include "llmc/run/socket.h"
#include "llmc/run/store.h"
#include "llmc/run/value_file.h"
#include "llmc/run/world.h"
#ifdef WITHOUT_OPENSSL
struct TlsContext {
    explicit TlsContext(const std::string&) {
        throw UserError("--store rediss:// is not in this build: build again with OpenSSL, or give redis://");
    }
};
struct TlsSocket : Socket {
    TlsSocket(const TlsContext&, int descriptor, double silence, const std::string&, const std::string&)
        : Socket(descriptor, silence) {}
};
#else
#include "llmc/run/tls.h"
#endif

struct RedisAddress {
    std::string host, user, password;
    int port = 6379;
    bool tls = false;
};

// User and password may contain %XX; an IPv6 address stands in brackets.
inline RedisAddress parse_redis_url(const std::string& url) {
    auto wrong = [&] {
        return UserError("the store's address is not of the form redis://[:PASSWORD@]HOST:PORT: write it so, "
                         "e.g. redis://10.0.0.1:6379");
    };
    auto decoded = [&](const std::string& text) {
        const std::optional<std::string> plain = percent_decoded(text);
        if (!plain) { throw wrong(); }
        return *plain;
    };
    RedisAddress address;
    address.tls = url.rfind("rediss://", 0) == 0;
    std::string rest = url.substr(strlen(address.tls ? "rediss://" : "redis://"));
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
    const bool has_brackets = rest[0] == '[';
    const size_t end = has_brackets ? rest.find(']') + 1 : rest.rfind(':');  // of the host; 0: no ]
    address.host = has_brackets && end > 0 ? rest.substr(1, end - 2) : rest.substr(0, end);
    if (end < rest.size()) {
        const std::string port = rest.substr(end + 1);
        if (rest[end] != ':' || port.empty() || port.size() > 5 ||
            port.find_first_not_of("0123456789") != std::string::npos) {
            throw wrong();
        }
        address.port = std::stoi(port);
    }
    if (address.host.empty() || rest[0] == ':' || address.host.find_first_of("/@?#") != std::string::npos ||
        address.port < 1 || address.port > 65535) {
        throw wrong();
    }
    return address;
}

class RedisConnection {
public:
    using Reply = Owned<redisReply, freeReplyObject>;
    using Words = std::vector<std::string_view>;

    // Does not connect yet. UserError if the URL is no address or the authority's certificate cannot be read.
    // `silence`: seconds after which a connection is lost.
    RedisConnection(const std::string& url, double silence)
        : address(parse_redis_url(url)), silence(silence), buffer(1 << 16) {
        if (address.tls) { tls = std::make_unique<TlsContext>(environment("DILOCO_CA")); }
    }

    bool is_open() const { return bool(socket); }

    // TemporaryFailure if the server cannot be reached, or still reads its data, after `timeout` seconds;
    // UserError if it is not the one that the URL names, or refuses the password.
    void connect(double timeout) {
        close();
        timeval limit = {time_t(timeout), suseconds_t((timeout - double(time_t(timeout))) * 1e6)};
        context.reset(redisConnectWithTimeout(address.host.c_str(), address.port, limit));
        if (!context || context->err) {
            throw TemporaryFailure("cannot reach the store at " + where() + " (" +
                                   (context ? context->errstr : "out of memory") +
                                   "): start a Redis or Valkey server there, or correct --store");
        }
        redisEnableKeepAlive(context.get());
        reader.reset(redisReaderCreate());
        try {
            socket = open_socket(timeout);
            log_in(timeout);
            socket->limit_silence(silence);
        } catch (const ConnectionLost& error) {
            // If it was closed at once: a proxy whose server is down, or a server that wants TLS.
            const bool is_other =
                strstr(error.what(), "Protocol error") || strstr(error.what(), "wrong version number");
            close();
            const char* other = address.tls ? "without TLS it is redis://)" : "over TLS it is rediss://)";
            const std::string text = "the server at " + where() + " does not answer like Redis (" +
                                     error.what() + "): try again later, or correct --store (" + other;
            if (is_other) { throw UserError(text); }
            throw TemporaryFailure(text);
        } catch (...) {
            close();
            throw;
        }
    }

    void close() {
        socket.reset();
        reader.reset();
        context.reset();
    }

    // Returns the server's reply, which may be an error. Throws ConnectionLost, and is closed then.
    Reply ask(const Words& words) { return std::move(ask_all({words}).front()); }

    // The replies to several commands, which are sent together.
    std::vector<Reply> ask_all(const std::vector<Words>& commands) {
        try {
            for (const Words& words : commands) { send(words); }
            std::vector<Reply> replies;
            for (size_t i = 0; i < commands.size(); i++) { replies.push_back(receive()); }
            return replies;
        } catch (...) {
            close();
            throw;
        }
    }

    // HOST:PORT, and the URL without the password.
    std::string where() const {
        const bool is_ipv6 = address.host.find(':') != std::string::npos;
        return (is_ipv6 ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
    }
    std::string url() const { return (address.tls ? "rediss://" : "redis://") + where(); }

    // This machine's address on the way to the server; empty if there is no connection.
    std::string local_address() const { return context ? ::local_address(context->fd) : ""; }

private:
    std::unique_ptr<Socket> open_socket(double timeout) const {
        if (!tls) { return std::make_unique<Socket>(context->fd, timeout); }
        return std::make_unique<TlsSocket>(*tls, context->fd, timeout, address.host, where());
    }

    void log_in(double timeout) {
        if (!address.password.empty()) {
            Words words = {"AUTH", address.user, address.password};
            if (address.user.empty()) { words.erase(words.begin() + 1); }
            check(*ask(words));
        }
        Reply reply = ask({"PING"});
        for (Patience patience(timeout); begins_with(*reply, "LOADING") && !patience.is_over();) {
            patience.pause();
            reply = ask({"PING"});
        }
        if (begins_with(*reply, "LOADING")) {
            throw TemporaryFailure("the store at " + where() + " is still loading its data: try again later");
        }
        check(*reply);
    }

    static bool begins_with(const redisReply& reply, const char* word) {
        return reply.type == REDIS_REPLY_ERROR && strncmp(reply.str, word, strlen(word)) == 0;
    }

    void check(const redisReply& reply) const {
        if (reply.type != REDIS_REPLY_ERROR) { return; }
        const std::string text(reply.str, size_t(reply.len));
        if (begins_with(reply, "NOAUTH") || begins_with(reply, "WRONGPASS") ||
            text.find("password") != std::string::npos) {
            throw UserError("the store at " + where() + " refuses the password (" + text +
                            "): give --store " + (address.tls ? "rediss" : "redis") + "://:PASSWORD@" +
                            where());
        }
        for (const char* passing : {"MISCONF", "BUSY", "MASTERDOWN", "OOM", "ERR max number of clients"}) {
            if (!begins_with(reply, passing)) { continue; }
            throw TemporaryFailure("the store at " + where() + " cannot serve now (" + text +
                                   "): try again later");
        }
        throw UserError("the store at " + where() + " refuses to serve (" + text +
                        "): check the server's settings");
    }

    void send(const Words& words) {
        std::vector<const char*> texts;
        std::vector<size_t> lengths;
        for (const std::string_view& word : words) {
            texts.push_back(word.data());
            lengths.push_back(word.size());
        }
        char* command = nullptr;
        const auto length = redisFormatCommandArgv(&command, int(words.size()), texts.data(), lengths.data());
        if (length < 0) { throw std::bad_alloc(); }
        const Owned<char, redisFreeCommand> freed(command);
        socket->send(command, size_t(length));
    }

    Reply receive() {
        void* reply = nullptr;
        while (redisReaderGetReply(reader.get(), &reply) == REDIS_OK) {
            if (reply) { return Reply(static_cast<redisReply*>(reply)); }
            const size_t count = socket->receive(buffer.data(), buffer.size());
            if (redisReaderFeed(reader.get(), buffer.data(), count) != REDIS_OK) { break; }
        }
        throw ConnectionLost(reader->errstr);
    }

    const RedisAddress address;
    const double silence;
    std::unique_ptr<TlsContext> tls;
    Owned<redisContext, redisFree> context;
    Owned<redisReader, redisReaderFree> reader;
    std::unique_ptr<Socket> socket;
    std::vector<char> buffer;
};
