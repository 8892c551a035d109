// TlsSocket: a socket whose bytes are encrypted by OpenSSL. The server must show a certificate for the name
// or address that was connected to, signed by an authority that the system trusts, or by the one whose
// certificate is in a file that the user names.
#pragma once
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>

#include <string>

#include "llmc/error.h"
#include "llmc/owned_array.h"
#include "llmc/run/socket.h"

// The settings of all connections.
class TlsContext {
public:
    // authority: a file of certificates; empty: the system's. UserError if it cannot be read.
    explicit TlsContext(const std::string& authority) {
        // OpenSSL must not clean up at exit: another thread may still use it.
        OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
        context.reset(SSL_CTX_new(TLS_client_method()));
        if (!context) { throw RunError("OpenSSL cannot be initialized"); }
        SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
        SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
        SSL_CTX_set_client_cert_cb(context.get(), [](SSL* tls, X509**, EVP_PKEY**) {
            *static_cast<bool*>(SSL_get_app_data(tls)) = true;
            return 0;
        });
        SSL_CTX_set_mode(context.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        if (authority.empty()) {
            SSL_CTX_set_default_verify_paths(context.get());
        } else if (SSL_CTX_load_verify_locations(context.get(), authority.c_str(), nullptr) != 1) {
            throw UserError("there are no certificates in " + authority +
                            ": set DILOCO_CA to a PEM certificate of the authority that signed the store's");
        }
    }

    // asks: set when the server asks for a certificate of ours. It gets none, and may then just close the
    // connection.
    SSL* new_connection(bool& asks) const {
        SSL* tls = SSL_new(context.get());
        if (!tls) { throw RunError("OpenSSL cannot be initialized"); }
        SSL_set_app_data(tls, &asks);
        return tls;
    }

private:
    Owned<SSL_CTX, SSL_CTX_free> context;
};

class TlsSocket : public Socket {
public:
    // Does the handshake. UserError if the certificate is wrong.   where: the server, for messages
    TlsSocket(const TlsContext& context, int descriptor, double silence, const std::string& host,
              const std::string& where)
        : Socket(descriptor, silence), where(where), tls(context.new_connection(asks)) {
        NoSigpipe no_sigpipe;
        expect(host);
        SSL_set_fd(tls.get(), descriptor);
        move([&](size_t&) { return SSL_connect(tls.get()); });
    }

protected:
    size_t send_some(const char* data, size_t bytes) override {
        return move([&](size_t& count) { return SSL_write_ex(tls.get(), data, bytes, &count); });
    }
    size_t receive_some(char* data, size_t bytes) override {
        const size_t had = move([&](size_t& count) { return SSL_read_ex(tls.get(), data, bytes, &count); });
        has_answered = true;
        return had;
    }

private:
    // Sets the name or address that the certificate must hold. The server, which may have several
    // certificates, is told the name.
    void expect(const std::string& host) {
        if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(tls.get()), host.c_str()) == 1) { return; }
        SSL_set_hostflags(tls.get(), X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
        if (SSL_set1_host(tls.get(), host.c_str()) != 1 ||
            SSL_set_tlsext_host_name(tls.get(), host.c_str()) != 1) {
            throw RunError("OpenSSL does not take the name " + host);
        }
    }

    // Calls OpenSSL until it has made progress.
    template <class Call>
    size_t move(Call call) {
        while (true) {
            ERR_clear_error();
            size_t count = 0;
            const int result = call(count);
            if (result > 0) { return count; }
            const int system_error = errno, error = SSL_get_error(tls.get(), result);
            if (error == SSL_ERROR_SYSCALL && system_error) { lose(strerror(system_error)); }
            if (error == SSL_ERROR_SYSCALL || error == SSL_ERROR_ZERO_RETURN) {
                lose("the server closed the connection");
            }
            if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) { fail(); }
            wait_for(error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT);
        }
    }

    [[noreturn]] void lose(const std::string& why) const {
        const char* hint = ", and it asks its clients for certificates: start it with tls-auth-clients no";
        throw ConnectionLost(why + (asks && !has_answered ? hint : ""));
    }

    [[noreturn]] void fail() const {
        const long verdict = SSL_get_verify_result(tls.get());
        const std::string certificate = "the certificate of the store at " + where;
        if (verdict == X509_V_ERR_HOSTNAME_MISMATCH || verdict == X509_V_ERR_IP_ADDRESS_MISMATCH) {
            throw UserError(certificate + " is for another name: give --store the name that it holds");
        }
        if (verdict != X509_V_OK) {
            throw UserError(certificate + " is not trusted (" + X509_verify_cert_error_string(verdict) +
                            "): set DILOCO_CA to the certificate of the authority that signed it");
        }
        const char* reason = ERR_reason_error_string(ERR_get_error());
        lose(std::string("TLS: ") + (reason ? reason : "an unknown error"));
    }

    const std::string where;
    bool asks = false, has_answered = false;
    Owned<SSL, SSL_free> tls;
};
