// Opens a store by its URL (store.h). A program may be built without hiredis, or without libcurl and expat:
// make then defines WITHOUT_HIREDIS or WITHOUT_CURL, which only this file and streaming/elastic/log_stores.h
// know.
#pragma once
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "llmc/error.h"
#include "llmc/run/store.h"
#ifdef WITHOUT_HIREDIS
[[noreturn]] inline void refuse_redis(const std::string& url) {
    throw UserError("--store " + url.substr(0, url.find(':')) +
                    ":// is not in this build: give file:DIR, or build again with hiredis");
}
struct RedisStore : MemoryStore {
    RedisStore(const std::string& url, double) { refuse_redis(url); }
};
#else
#include "llmc/run/store_redis.h"
#endif
#ifdef WITHOUT_CURL
[[noreturn]] inline void refuse_s3() {
    throw UserError("--store s3:// is not in this build: give file:DIR or redis://, or build again with "
                    "libcurl and expat");
}
struct S3Store : MemoryStore {
    S3Store(const std::string&, double) { refuse_s3(); }
};
#else
#include "llmc/run/store_s3.h"
#endif

inline bool is_redis_url(const std::string& url) {
    return url.rfind("redis://", 0) == 0 || url.rfind("rediss://", 0) == 0;
}

inline bool is_s3_url(const std::string& url) { return url.rfind("s3://", 0) == 0; }

// The folder of file:DIR or file:///DIR. UserError for a URL of no known kind.
inline std::string folder_of_store(const std::string& url) {
    if (url.rfind("file:///", 0) == 0) { return url.substr(strlen("file://")); }
    if (url.rfind("file:", 0) == 0 && url.rfind("file://", 0) != 0 && url.size() > strlen("file:")) {
        return url.substr(strlen("file:"));
    }
    // The message quotes only the kind, if there is one: the rest may contain a password.
    const std::string kind = url.substr(0, url.find(':'));
    throw UserError("the store '" + (kind.find('@') == kind.npos ? kind : "") +
                    ":...' is of an unknown kind: give --store file:DIR, redis://[:PASSWORD@]HOST:PORT or "
                    "s3://BUCKET/PREFIX");
}

// UserError for a URL of no known kind, and for a store that cannot be used.
inline std::unique_ptr<Store> open_store(const std::string& url, double timeout) {
    if (is_redis_url(url)) { return std::make_unique<RedisStore>(url, timeout); }
    if (is_s3_url(url)) { return std::make_unique<S3Store>(url, timeout); }
    return std::make_unique<FileStore>(folder_of_store(url));
}

// Returns once the store can be opened, or after `timeout` seconds: the caller's own open_store() then
// throws.   is_loud: says on stderr what it waits for
inline void wait_for_store(const std::string& url, double timeout, bool is_loud) {
    Patience patience(timeout);
    for (double next_notice = 0; !patience.is_over(); patience.has_waited(1)) {
        try {
            open_store(url, timeout);
            return;
        } catch (const TemporaryFailure& failure) {
            if (is_loud && patience.waited() >= next_notice) {
                fprintf(stderr, "waiting for the store (%.0f of %g s): %s\n", patience.waited(), timeout,
                        failure.what());
                next_notice = patience.waited() + 30;
            }
        }
        patience.has_worked();
        std::this_thread::sleep_for(std::chrono::duration<double>(std::min(1.0, patience.left())));
    }
}

// Makes the folder, unless another process of the job has made it. UserError if it is not this user's alone:
// another user who can write there could make the processes connect to another machine.
inline void make_private_folder(const std::string& path) {
    struct stat info;
    do {
        if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
            throw UserError("cannot make the temporary folder " + path + " (" + strerror(errno) +
                            "): set TMPDIR to a writable folder, or give --store file:DIR");
        }
    } while (lstat(path.c_str(), &info) != 0 && errno == ENOENT);  // just removed by another process
    if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0) {
        throw UserError("the temporary folder " + path +
                        " is not yours alone: remove it, set TMPDIR to another place, or give --store "
                        "file:DIR");
    }
}

// The store in the folder of a job, which is removed with its last process. A run that is killed leaves some
// kB there. A job that SLURM requeues finds these keys under the same name; like those of any earlier run
// they do not matter (meeting.h).
inline std::shared_ptr<Store> open_job_store(const std::string& folder) {
    make_private_folder(folder);
    return {new FileStore(folder), [folder](Store* store) {
                delete store;
                rmdir(folder.c_str());  // fails while another process has keys there
            }};
}
