// S3Store: processes meet through a bucket (s3.h), in objects PREFIX/meet/KEY. They ask for single keys and
// list nothing. A request that fails is repeated for some seconds.
#pragma once
#include <mutex>
#include <optional>
#include <string>

#include "llmc/error.h"
#include "llmc/run/s3.h"
#include "llmc/run/store.h"

class S3Store : public Store {
public:
    // UserError if the bucket cannot be used.
    S3Store(const std::string& url, double timeout) : client(url, timeout) { client.check(); }

    void set(const std::string& key, const std::string& value) override {
        ask({"PUT", object(key), "", &value});
    }

    std::optional<std::string> try_get(const std::string& key) override {
        S3Answer answer = ask({"GET", object(key)});
        return answer.found() ? std::optional<std::string>(std::move(answer.body)) : std::nullopt;
    }

    std::string set_if_absent(const std::string& key, const std::string& value) override {
        while (true) {
            if (!ask({"PUT", object(key), "", &value, /*if_absent=*/true}).is_taken()) { return value; }
            if (std::optional<std::string> winner = try_get(key)) { return *winner; }
        }
    }

    void remove(const std::string& key) override { ask({"DELETE", object(key)}); }

    std::string url() const override { return client.url(); }

    std::string local_address() override {
        const std::lock_guard<std::mutex> lock(mutex);
        return client.local_address();
    }

private:
    static std::string object(const std::string& key) { return "meet/" + FileStore::name_of(key); }

    S3Answer ask(const S3Request& request) {
        const std::lock_guard<std::mutex> lock(mutex);
        try {
            return client.ask(request);
        } catch (const UserError& error) { throw RunError(std::string("lost the store: ") + error.what()); }
    }

    std::mutex mutex;
    S3Client client;
};
