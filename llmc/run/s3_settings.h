// Where a bucket is, and with which keys it is opened: as the AWS command line and its libraries find it.
//   keys      AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or else the profile AWS_PROFILE
//             ("default") of ~/.aws/credentials (AWS_SHARED_CREDENTIALS_FILE) and ~/.aws/config
//             (AWS_CONFIG_FILE); read again when the store refuses them
//   region    AWS_REGION, AWS_DEFAULT_REGION, or the profile's; else us-east-1
//   endpoint  AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or the profile's endpoint_url; else AWS
//   style     the bucket is in the name of the host at AWS, and in the path elsewhere or if its name has a
//             dot; addressing_style = virtual or path in the profile decides
// The authority of the certificate is one of the system's, or in the file that DILOCO_CA names.
#pragma once
#include <arpa/inet.h>
#include <ctype.h>
#include <netdb.h>
#include <string.h>

#include <fstream>
#include <map>
#include <string>
#include <tuple>

#include "llmc/error.h"
#include "llmc/owned_array.h"
#include "llmc/run/world.h"

struct S3Keys {
    std::string id, secret, token;  // token: that of a session, or empty
    bool operator!=(const S3Keys& other) const {
        return std::tie(id, secret, token) != std::tie(other.id, other.secret, other.token);
    }
};

struct S3Settings {
    std::string url, bucket, prefix;  // prefix: empty, or with a '/' at its end
    std::string endpoint, base;       // base: what the key's path is added to
    std::string region, authority;
    S3Keys keys;
};

// Every byte but letters, digits and "-._~" becomes %XX; a '/' stays in a path.
inline std::string uri_encoded(const std::string& text, bool is_path = false) {
    std::string encoded;
    for (unsigned char c : text) {
        const bool plain = isalnum(c) || strchr("-._~", c) != nullptr || (is_path && c == '/');
        encoded += plain && c != 0 ? std::string(1, char(c)) : format("%%%02X", c);
    }
    return encoded;
}

using S3Profile = std::map<std::string, std::string>;

// Adds the settings of one section of an INI file, including those that are nested below another setting.
inline void read_profile(const std::string& path, const std::string& section, S3Profile& profile) {
    const char* blanks = " \t\r";
    std::ifstream file(path);
    bool is_inside = false;
    for (std::string line; std::getline(file, line);) {
        auto trimmed = [&](const std::string& text) {
            const size_t begin = text.find_first_not_of(blanks);
            return begin == std::string::npos ? ""
                                              : text.substr(begin, text.find_last_not_of(blanks) + 1 - begin);
        };
        line = trimmed(line);
        if (!line.empty() && line[0] == '[') { is_inside = line == "[" + section + "]"; }
        const size_t equals = line.find('=');
        if (!is_inside || equals == std::string::npos || line[0] == '#' || line[0] == ';') { continue; }
        profile.emplace(trimmed(line.substr(0, equals)), trimmed(line.substr(equals + 1)));
    }
}

inline S3Profile s3_profile() {
    const std::string home = environment("HOME") + "/.aws/", chosen = environment("AWS_PROFILE");
    const std::string name = chosen.empty() ? "default" : chosen;
    auto path = [&](const char* name, const char* usual) {
        return environment(name).empty() ? home + usual : environment(name);
    };
    S3Profile profile;
    const bool has_keys = !environment("AWS_ACCESS_KEY_ID").empty();
    const std::pair<const char*, const char*> variables[] = {
        {"AWS_ACCESS_KEY_ID", "aws_access_key_id"}, {"AWS_SECRET_ACCESS_KEY", "aws_secret_access_key"},
        {"AWS_SESSION_TOKEN", "aws_session_token"}, {"AWS_REGION", "region"},
        {"AWS_DEFAULT_REGION", "region"},           {"AWS_ENDPOINT_URL_S3", "endpoint_url"},
        {"AWS_ENDPOINT_URL", "endpoint_url"}};
    for (const auto& [variable, key] : variables) {
        if (!environment(variable).empty()) { profile.emplace(key, environment(variable)); }
    }
    if (has_keys) { profile.emplace("aws_session_token", ""); }  // a file's belongs to the file's keys
    read_profile(path("AWS_SHARED_CREDENTIALS_FILE", "credentials"), name, profile);
    read_profile(path("AWS_CONFIG_FILE", "config"), name == "default" ? name : "profile " + name, profile);
    return profile;
}

inline S3Keys s3_keys(S3Profile profile) {
    return {profile["aws_access_key_id"], profile["aws_secret_access_key"], profile["aws_session_token"]};
}

// Whether all addresses of a host are of this machine or a private network. TemporaryFailure if it has none.
inline bool is_private_host(const std::string& host) {
    addrinfo hints = {}, *list = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host.c_str(), nullptr, &hints, &list) != 0) {
        throw TemporaryFailure("no address for " + host + ": try again, or correct AWS_ENDPOINT_URL");
    }
    const Owned<addrinfo, freeaddrinfo> freed(list);
    for (const addrinfo* one = list; one; one = one->ai_next) {
        if (one->ai_family == AF_INET) {
            const uint32_t ip = ntohl(reinterpret_cast<const sockaddr_in*>(one->ai_addr)->sin_addr.s_addr);
            const bool is_private = ip >> 24 == 10 || ip >> 24 == 127 || ip >> 20 == 0xac1 ||
                                    ip >> 16 == 0xc0a8 || ip >> 16 == 0xa9fe || ip >> 22 == 0x191;
            if (!is_private) { return false; }
        } else if (one->ai_family == AF_INET6) {
            const in6_addr& ip = reinterpret_cast<const sockaddr_in6*>(one->ai_addr)->sin6_addr;
            if (!IN6_IS_ADDR_LOOPBACK(&ip) && !IN6_IS_ADDR_LINKLOCAL(&ip) && (ip.s6_addr[0] & 0xfe) != 0xfc) {
                return false;
            }
        }
    }
    return true;
}

// The host of http://HOST[:PORT] or https://HOST[:PORT]. UserError for another address.
inline std::string host_of_endpoint(const std::string& endpoint) {
    const size_t begin = endpoint.rfind("http://", 0) == 0 ? 7 : endpoint.rfind("https://", 0) == 0 ? 8 : 0;
    const std::string rest = endpoint.substr(begin);
    const size_t end = rest[0] == '[' ? rest.find(']') + 1 : std::min(rest.find(':'), rest.size());
    const std::string host = rest.substr(0, end), port = end < rest.size() ? rest.substr(end + 1) : "1";
    const bool is_port = !port.empty() && port.find_first_not_of("0123456789") == std::string::npos;
    if (begin == 0 || host.empty() || rest.find_first_of("/@?# ") != std::string::npos || !is_port) {
        throw UserError("the address in AWS_ENDPOINT_URL is not of the form https://HOST[:PORT]: write it "
                        "so, without the bucket");
    }
    return host[0] == '[' ? host.substr(1, host.size() - 2) : host;
}

inline S3Settings s3_settings(const std::string& url) {
    S3Settings s;
    const std::string rest = url.substr(strlen("s3://"));
    const size_t slash = std::min(rest.find('/'), rest.size());
    s.bucket = rest.substr(0, slash);
    const bool is_name =
        s.bucket.size() >= 3 && s.bucket.size() <= 63 && isalnum((unsigned char)s.bucket[0]) &&
        s.bucket.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789.-_") == std::string::npos;
    if (!is_name) {
        throw UserError("the store's address is not of the form s3://BUCKET/PREFIX: write it so, e.g. "
                        "s3://my-bucket/my-run; keys come from the environment");
    }
    s.prefix = slash < rest.size() ? rest.substr(slash + 1) : "";
    while (!s.prefix.empty() && s.prefix.back() == '/') { s.prefix.pop_back(); }
    s.url = "s3://" + s.bucket + (s.prefix.empty() ? "" : "/" + s.prefix);
    if (!s.prefix.empty()) { s.prefix += '/'; }
    S3Profile profile = s3_profile();
    s.keys = s3_keys(profile);
    if (s.keys.id.empty() || s.keys.secret.empty()) {
        throw UserError("there are no keys for " + s.url +
                        ": set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                        "or write them to ~/.aws/credentials and name their profile in AWS_PROFILE");
    }
    s.region = profile["region"].empty() ? "us-east-1" : profile["region"];
    s.endpoint = profile["endpoint_url"];
    const bool is_aws = s.endpoint.empty();
    if (is_aws) { s.endpoint = "https://s3." + s.region + ".amazonaws.com"; }
    if (s.endpoint.back() == '/') { s.endpoint.pop_back(); }
    const std::string host = host_of_endpoint(s.endpoint), style = profile["addressing_style"];
    const bool is_plain = s.endpoint.rfind("http://", 0) == 0;
    if (is_plain && !is_private_host(host)) {
        throw UserError(s.endpoint + " is a public address without TLS, over which others could read the "
                        "run: give https:// in AWS_ENDPOINT_URL");
    }
    const bool in_host =
        style == "virtual" || (is_aws && style != "path" && s.bucket.find('.') == std::string::npos);
    const size_t begin = s.endpoint.find("://") + 3;
    s.base = in_host ? s.endpoint.substr(0, begin) + s.bucket + "." + s.endpoint.substr(begin)
                     : s.endpoint + "/" + s.bucket;
    s.authority = environment("DILOCO_CA");
    return s;
}
