// For tests of rediss://: an authority of their own, and servers that show certificates signed by it.
#pragma once
#include <stdlib.h>

#include <memory>
#include <string>

#include "dev/test/files.h"
#include "dev/test/processes.h"

// In a folder: authority.crt; right.crt, made out to localhost and 127.0.0.1; other.crt, to another name.
class Certificates {
public:
    Certificates() {
        const std::string key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
        const std::string sign = " -CA authority.crt -CAkey authority.key";
        is_made =
            openssl("req -x509 " + key + " -subj /CN=authority -keyout authority.key -out authority.crt") &&
            openssl("req -x509 " + key + sign + " -subj /CN=right -keyout right.key -out right.crt" +
                    " -addext subjectAltName=DNS:localhost,IP:127.0.0.1") &&
            openssl("req -x509 " + key + sign + " -subj /CN=other -keyout other.key -out other.crt" +
                    " -addext subjectAltName=DNS:elsewhere.invalid,IP:10.1.2.3");
    }

    // port 0: there is no openssl, or the redis-server here knows no TLS.
    std::unique_ptr<RedisServer> server(const std::string& which, const std::string& password = "",
                                        const std::string& asks_clients = "no") const {
        return std::make_unique<RedisServer>(
            password,
            std::vector<std::string>{"--port", "0", "--tls-port", is_made ? "PORT" : "-1", "--tls-cert-file",
                                     folder / (which + ".crt"), "--tls-key-file", folder / (which + ".key"),
                                     "--tls-ca-cert-file", authority(), "--tls-auth-clients", asks_clients});
    }

    std::string authority() const { return folder / "authority.crt"; }

private:
    bool openssl(const std::string& words) const {
        return system(("cd '" + folder.name() + "' && openssl " + words + " >/dev/null 2>&1").c_str()) == 0;
    }

    TemporaryFolder folder;
    bool is_made = false;
};

// DILOCO_CA, while it lives.
class TrustedAuthority {
public:
    explicit TrustedAuthority(const std::string& file) { setenv("DILOCO_CA", file.c_str(), 1); }
    TrustedAuthority(const TrustedAuthority&) = delete;
    ~TrustedAuthority() { unsetenv("DILOCO_CA"); }
};
