// The stores by URL (see store.h). hiredis may be missing where a program is built: make then defines
// WITHOUT_HIREDIS, and this file and streaming/elastic/log_stores.h alone know it.
#pragma once
#include <string.h>

#include <memory>
#include <string>

#include "llmc/error.h"
#include "llmc/run/store.h"
#ifdef WITHOUT_HIREDIS
[[noreturn]] inline void refuse_redis(const std::string& url) {
    throw UserError("--store " + url.substr(0, url.find(':')) +
                    ":// is not in this build: give file:DIR, or build again with hiredis");
}
inline std::unique_ptr<Store> open_redis_store(const std::string& url, double) { refuse_redis(url); }
#else
#include "llmc/run/store_redis.h"
#endif

inline bool is_redis_url(const std::string& url) {
    return url.rfind("redis://", 0) == 0 || url.rfind("rediss://", 0) == 0;
}

// The folder of file:DIR or file:///DIR. UserError for a URL of no known kind.
inline std::string folder_of_store(const std::string& url) {
    if (url.rfind("file:///", 0) == 0) { return url.substr(strlen("file://")); }
    if (url.rfind("file:", 0) == 0 && url.rfind("file://", 0) != 0 && url.size() > strlen("file:")) {
        return url.substr(strlen("file:"));
    }
    // No more of it than the kind: there may be a password in the rest.
    throw UserError("the store '" + url.substr(0, url.find(':')) +
                    ":...' is of no known kind: give --store file:DIR or redis://[:PASSWORD@]HOST:PORT");
}

// UserError for a URL of no known kind and for a store that cannot be used.
inline std::unique_ptr<Store> open_store(const std::string& url, double timeout) {
    if (is_redis_url(url)) { return open_redis_store(url, timeout); }
    return std::make_unique<FileStore>(folder_of_store(url));
}
