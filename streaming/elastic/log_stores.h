// Log stores by URL, as in llmc/run/store.h:
//   file:DIR                                        the folder DIR/log/RUN (llmc/run/log_store_file.h)
//   redis://[[USER]:PASSWORD@]HOST[:PORT], rediss://   keys RUN/log/... (log_store_redis.h)
//   s3://BUCKET[/PREFIX]                            objects PREFIX/log/RUN/... (llmc/run/log_store_s3.h)
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "llmc/run/log_store.h"
#include "llmc/run/log_store_file.h"
#include "llmc/run/stores.h"
#include "streaming/elastic/sync_log_types.h"
#ifdef WITHOUT_HIREDIS
struct RedisLogStore : LogStore {
    RedisLogStore(const std::string& url, const std::string&, double) { refuse_redis(url); }
};
#else
#include "streaming/elastic/log_store_redis.h"
#endif
#ifdef WITHOUT_CURL
struct S3LogStore : LogStore {
    S3LogStore(const std::string&, const std::string&, double) { refuse_s3(); }
};
#else
#include "llmc/run/log_store_s3.h"
#endif

// A store with a connection of its own, for one thread at a time. UserError if it cannot be used.
inline std::unique_ptr<LogStore> open_log_store(const std::string& url, const std::string& run_name,
                                                double timeout) {
    if (is_redis_url(url)) { return std::make_unique<RedisLogStore>(url, run_name, timeout); }
    const std::string folder = "log/" + file_name_of(run_name);
    if (is_s3_url(url)) { return std::make_unique<S3LogStore>(url, folder, timeout); }
    return std::make_unique<FileLogStore>(folder_of_store(url) + "/" + folder);
}

// Over a bucket each request takes a round trip and costs money, so there are fewer and larger requests.
inline void suit_store(SyncLogOptions& options, const std::string& url) {
    if (!is_s3_url(url)) { return; }
    options.poll = 1;
    options.in_line = 1 << 20;
}

// A row for LogStart::fingerprint: workers whose versions keep lines elsewhere in a bucket must not meet.
inline std::string log_version(const std::string& url) { return is_s3_url(url) ? "sync-log 2\n" : ""; }

// The options (LogStart::fingerprint) of the run that a store already holds; none if it holds no run.
inline std::optional<std::string> options_in(LogStore& store) {
    const StoreAnswer generation = store.perform({StoreRequest::get, "run", "generation"});
    if (!generation.found) { return std::nullopt; }
    const StoreAnswer options = store.perform({StoreRequest::get, generation.value + "/run", "fingerprint"});
    return options.found ? std::optional<std::string>(options.value) : std::nullopt;
}
