// The stores by URL (see store.h). hiredis may be missing where a program is built: make then defines
// WITHOUT_HIREDIS, and this file alone knows it.
#pragma once
#include <string.h>

#include <memory>
#include <string>

#include "llmc/error.h"
#include "llmc/store.h"
#ifdef WITHOUT_HIREDIS
inline std::unique_ptr<Store> open_redis_store(const std::string&, double) {
    throw UserError("--store redis:// is not in this build: give file:DIR, or build again with hiredis");
}
#else
#include "llmc/store_redis.h"
#endif

// UserError for a URL of no known kind and for a store that cannot be used.
inline std::unique_ptr<Store> open_store(const std::string& url, double timeout) {
    if (url.rfind("redis://", 0) == 0) { return open_redis_store(url, timeout); }
    if (url.rfind("file:///", 0) == 0) { return std::make_unique<FileStore>(url.substr(strlen("file://"))); }
    if (url.rfind("file:", 0) == 0 && url.rfind("file://", 0) != 0 && url.size() > strlen("file:")) {
        return std::make_unique<FileStore>(url.substr(strlen("file:")));
    }
    // No more of it than the kind: there may be a password in the rest.
    throw UserError("the store '" + url.substr(0, url.find(':')) +
                    ":...' is of no known kind: give --store file:DIR or redis://[:PASSWORD@]HOST:PORT");
}
