// A bucket of S3, or of a store that speaks its protocol (R2, MinIO, Ceph, SeaweedFS, ...), for the
// stores in such a bucket (store_s3.h, log_store_s3.h): s3://BUCKET[/PREFIX]. libcurl does HTTP, TLS and the
// signatures (AWS Signature Version 4), expat reads XML. s3_settings.h says where the bucket is and with
// which keys it is opened.
//
// The requests of one call travel in parallel over a few persistent connections. A request is retried, with
// growing pauses, after a lost connection or a transient answer (409, 429, 5xx, RequestTimeout, a proxy's
// 404); other errors are final. After a failure the keys are read again, as a run may outlive temporary ones.
#pragma once
#include <curl/curl.h>
#include <expat.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "llmc/clock.h"
#include "llmc/error.h"
#include "llmc/owned_array.h"
#include "llmc/run/s3_settings.h"
#include "llmc/run/socket.h"
#include "llmc/run/store.h"

struct S3Request {
    const char* method;
    std::string key;         // below the prefix; empty: the bucket itself
    std::string query = "";  // encoded, in the order of its names
    const std::string* body = nullptr;
    bool if_absent = false;  // a PUT that must not replace an object
    double after = 0;        // seconds until it begins
};

struct S3Answer {
    long status = 0;
    std::string body;
    double seconds = 0;  // until the answer began; connecting is not counted
    bool found() const { return status != 404; }
    bool is_taken() const { return status == 412; }  // if_absent: an object is there
};

// After a UserError the request has not been done; after a TemporaryFailure, such as this, it may have been.
struct S3Full : TemporaryFailure {
    using TemporaryFailure::TemporaryFailure;
};

// The texts of an XML document's elements with the names of the elements around them, "Error/Code", in the
// order of the document. RunError if it is not XML.
inline std::vector<std::pair<std::string, std::string>> texts_of_xml(const std::string& document) {
    struct Reader {
        std::vector<std::pair<std::string, std::string>> texts;
        std::string path, text;
    } reader;
    const Owned<XML_ParserStruct, XML_ParserFree> parser(XML_ParserCreate(nullptr));
    XML_SetUserData(parser.get(), &reader);
    XML_SetElementHandler(
        parser.get(),
        [](void* data, const XML_Char* name, const XML_Char**) {
            auto& reader = *static_cast<Reader*>(data);
            reader.path += (reader.path.empty() ? "" : "/") + std::string(name);
            reader.text.clear();
        },
        [](void* data, const XML_Char*) {
            auto& reader = *static_cast<Reader*>(data);
            reader.texts.emplace_back(reader.path, std::exchange(reader.text, ""));
            reader.path.erase(std::min(reader.path.rfind('/'), reader.path.size()));
        });
    XML_SetCharacterDataHandler(parser.get(), [](void* data, const XML_Char* text, int length) {
        static_cast<Reader*>(data)->text.append(text, size_t(length));
    });
    if (XML_Parse(parser.get(), document.data(), int(document.size()), XML_TRUE) != XML_STATUS_OK) {
        throw RunError("the store's answer is not S3's XML");
    }
    return std::move(reader.texts);
}

// The text of the first element with this path; "" if there is none.
inline std::string text_in_xml(const std::string& document, const std::string& path) try {
    for (const auto& [found, text] : texts_of_xml(document)) {
        if (found == path) { return text; }
    }
    return "";
} catch (const RunError&) { return ""; }

// Whether this is what a store answers to keys that are wrong or no longer valid.
inline bool are_keys_refused(const std::string& code) {
    return code == "ExpiredToken" || code == "TokenRefreshRequired" || code == "InvalidToken" ||
           code == "InvalidTokenId" || code == "InvalidAccessKeyId" || code == "SignatureDoesNotMatch";
}

class S3Client {
public:
    // UserError if the URL or the environment is wrong.
    // silence: seconds after which a connection counts as lost (at most 10). check() gives its request a
    // second try: a store may serialize writes of one key (SeaweedFS: for a second each).
    S3Client(const std::string& url, double silence)
        : settings(s3_settings(url)), keys(settings.keys), silence(std::min(silence, 10.0)),
          patience(2 * this->silence) {
        static const CURLcode once = curl_global_init(CURL_GLOBAL_ALL);
        multi.reset(once == CURLE_OK ? curl_multi_init() : nullptr);
        if (!multi) { throw RunError("libcurl cannot be initialized"); }
        curl_multi_setopt(multi.get(), CURLMOPT_MAX_HOST_CONNECTIONS, most_connections);
        curl_multi_setopt(multi.get(), CURLMOPT_MAXCONNECTS, most_connections);
    }

    // UserError if the bucket cannot be used, or is in a store that ignores If-None-Match: then two workers
    // could both win.
    void check() {
        const std::string nothing;
        const S3Request write = {"PUT", ".check", "", &nothing, true};
        if (!ask(write).is_taken() && !ask(write).is_taken()) {
            throw UserError("the store of " + where() + " ignores If-None-Match, so two workers could both " +
                            "be the first to write: use one with conditional writes (S3, R2, MinIO, Ceph, " +
                            "SeaweedFS)");
        }
        ask_all({{"GET", "", list_query(".check")}, {"GET", ".absent"}});
        patience = std::min(silence, 5.0);  // from now on the caller repeats requests
        is_served = true;
    }

    S3Answer ask(const S3Request& request) { return std::move(ask_all({request}).front()); }

    // In parallel, in no order. Throws one of the three errors above.
    std::vector<S3Answer> ask_all(const std::vector<S3Request>& requests) {
        NoSigpipe no_sigpipe;
        std::vector<Transfer> transfers(requests.size());
        for (size_t i = 0; i < requests.size(); i++) {
            transfers[i].request = &requests[i];
            transfers[i].start_at = requests[i].after > 0 ? now_seconds() + requests[i].after : 0;
        }
        size_t done = 0;
        const Ended ended{multi.get(), transfers};
        while (done < transfers.size()) {
            for (Transfer& transfer : transfers) {
                if (!transfer.easy && !transfer.is_done && now_seconds() >= transfer.start_at) {
                    start(transfer);
                }
            }
            int running = 0, rest = 0;
            curl_multi_perform(multi.get(), &running);
            while (const CURLMsg* message = curl_multi_info_read(multi.get(), &rest)) {
                if (message->msg != CURLMSG_DONE) { continue; }
                Transfer* transfer = nullptr;
                curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &transfer);
                done += end(*transfer, message->data.result);
            }
            if (done == transfers.size()) { break; }
            curl_multi_poll(multi.get(), nullptr, 0, milliseconds_to_start(transfers), nullptr);
        }
        std::vector<S3Answer> answers;
        for (Transfer& transfer : transfers) { answers.push_back(std::move(transfer.answer)); }
        return answers;
    }

    // The keys below the prefix that begin with `begin`, from the page on that `token` names.
    std::string list_query(const std::string& begin, const std::string& token = "",
                           const std::string& delimiter = "") const {
        return (token.empty() ? "" : "continuation-token=" + uri_encoded(token) + "&") +
               (delimiter.empty() ? "" : "delimiter=" + uri_encoded(delimiter) + "&") +
               "list-type=2&prefix=" + uri_encoded(settings.prefix + begin);
    }

    const std::string& prefix() const { return settings.prefix; }
    std::string where() const { return "s3://" + settings.bucket + " at " + settings.endpoint; }
    std::string url() const { return settings.url; }
    std::string local_address() const { return address; }  // that the last request came from

private:
    struct Transfer {
        const S3Request* request = nullptr;
        S3Keys keys;  // that it is signed by
        S3Answer answer;
        Owned<CURL, curl_easy_cleanup> easy;  // while it is under way
        Owned<curl_slist, curl_slist_free_all> headers;
        bool is_done = false;
        int failures = 0;
        double start_at = 0, failed_since = 0;
        double heard_at = 0, silence = 0;
        long heard = -1;
    };

    // Removes from curl the transfers that are still under way, before they are destroyed.
    struct Ended {
        CURLM* multi;
        std::vector<Transfer>& transfers;
        ~Ended() {
            for (Transfer& transfer : transfers) {
                if (transfer.easy) { curl_multi_remove_handle(multi, transfer.easy.get()); }
            }
        }
    };

    void start(Transfer& transfer) {
        const S3Request& request = *transfer.request;
        transfer.easy.reset(curl_easy_init());
        CURL* const easy = transfer.easy.get();
        if (!easy) { throw std::bad_alloc(); }
        transfer.answer = {};
        transfer.heard_at = now_seconds();
        transfer.silence = silence;
        transfer.heard = -1;
        const std::string key = request.key.empty() ? "" : settings.prefix + request.key;
        const std::string url =
            settings.base + "/" + uri_encoded(key, true) + (request.query.empty() ? "" : "?" + request.query);
        curl_easy_setopt(easy, CURLOPT_URL, url.c_str());
        curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, request.method);
        curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
        curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
        curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 256L << 10);
        curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE, 256L << 10);
        curl_easy_setopt(easy, CURLOPT_PRIVATE, &transfer);
        if (!settings.authority.empty()) {
            curl_easy_setopt(easy, CURLOPT_CAINFO, settings.authority.c_str());
        }
        transfer.keys = keys;
        curl_easy_setopt(easy, CURLOPT_AWS_SIGV4, ("aws:amz:" + settings.region + ":s3").c_str());
        curl_easy_setopt(easy, CURLOPT_USERNAME, keys.id.c_str());
        curl_easy_setopt(easy, CURLOPT_PASSWORD, keys.secret.c_str());
        add_header(transfer, "X-Amz-Content-Sha256: UNSIGNED-PAYLOAD");  // payloads have digests
        if (request.body) {
            curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, curl_off_t(request.body->size()));
            curl_easy_setopt(easy, CURLOPT_POSTFIELDS, request.body->data());  // not copied
            add_header(transfer, "Content-Type: application/octet-stream");
            curl_easy_setopt(easy, CURLOPT_EXPECT_100_TIMEOUT_MS, 1L);  // barely waits for "100 Continue"
        }
        if (request.if_absent) { add_header(transfer, "If-None-Match: *"); }
        if (!keys.token.empty()) { add_header(transfer, "X-Amz-Security-Token: " + keys.token); }
        curl_easy_setopt(easy, CURLOPT_HTTPHEADER, transfer.headers.get());
        curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, take_body);
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, &transfer);
        curl_easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
        curl_easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, watch);
        curl_easy_setopt(easy, CURLOPT_XFERINFODATA, &transfer);
        curl_multi_add_handle(multi.get(), easy);
    }

    static void add_header(Transfer& transfer, const std::string& line) {
        curl_slist* const longer = curl_slist_append(transfer.headers.get(), line.c_str());
        if (!longer) { throw std::bad_alloc(); }
        transfer.headers.release();
        transfer.headers.reset(longer);
    }

    static size_t take_body(char* data, size_t, size_t bytes, void* user) {
        Transfer& transfer = *static_cast<Transfer*>(user);
        std::string& body = transfer.answer.body;
        curl_off_t whole = 0;
        curl_easy_getinfo(transfer.easy.get(), CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &whole);
        if (body.empty() && whole > 0 && whole < most_bytes) { body.reserve(size_t(whole)); }
        if (body.size() + bytes > size_t(most_bytes)) { return 0; }
        body.append(data, bytes);
        return bytes;
    }

    // Ends a transfer in which nothing moves: neither bytes from the store, nor acknowledged ones to it.
    static int watch(void* user, curl_off_t, curl_off_t down, curl_off_t, curl_off_t up) {
        Transfer& transfer = *static_cast<Transfer*>(user);
        curl_socket_t descriptor = CURL_SOCKET_BAD;
        curl_easy_getinfo(transfer.easy.get(), CURLINFO_ACTIVESOCKET, &descriptor);
        const long heard = long(down + up) - bytes_on_their_way(descriptor);
        if (std::exchange(transfer.heard, heard) != heard) { transfer.heard_at = now_seconds(); }
        return now_seconds() - transfer.heard_at > transfer.silence;
    }

    // Whether the transfer has its answer; if not it starts again later. Throws if there will be none.
    bool end(Transfer& transfer, CURLcode result) {
        CURL* const easy = transfer.easy.get();
        S3Answer& answer = transfer.answer;
        const char* local = nullptr;
        double connected = 0, all = 0, began = 0;
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &answer.status);
        curl_easy_getinfo(easy, CURLINFO_PRETRANSFER_TIME, &connected);
        curl_easy_getinfo(easy, CURLINFO_STARTTRANSFER_TIME, &began);
        curl_easy_getinfo(easy, CURLINFO_TOTAL_TIME, &all);
        answer.seconds = (transfer.request->body ? all : began) - connected;
        curl_easy_getinfo(easy, CURLINFO_LOCAL_IP, &local);
        if (local && *local) { address = local; }
        const std::string lost = result == CURLE_ABORTED_BY_CALLBACK
                                     ? format("silent for %.3g s", transfer.silence)
                                     : curl_easy_strerror(result);
        curl_multi_remove_handle(multi.get(), easy);
        transfer.easy.reset();
        transfer.headers.reset();
        const std::string code = answer.status >= 300 ? text_in_xml(answer.body, "Error/Code") : "";
        const bool is_absent = answer.status == 404 && code == "NoSuchKey" && !transfer.request->body;
        const bool is_answer = answer.status == 200 || answer.status == 204 || answer.is_taken() || is_absent;
        if (result == CURLE_OK && is_answer) { return transfer.is_done = true; }
        // Reads the keys again, whatever the failure, since a refusal may be lost on the way.
        const S3Keys found = s3_keys(s3_profile());
        if (!found.id.empty() && !found.secret.empty()) { keys = found; }  // else the file is away
        // Keys that were good once are renewed sooner or later.
        const bool may_pass = are_keys_refused(code) &&
                              (keys != transfer.keys || is_served || code == "ExpiredToken");
        if (result == CURLE_OK && !may_pass) { refuse_if_final(answer, code); }
        if (result == CURLE_PEER_FAILED_VERIFICATION || result == CURLE_SSL_CACERT_BADFILE) {
            throw UserError("the certificate of " + settings.endpoint + " is not trusted (" + lost +
                            "): set DILOCO_CA to the certificate of the authority that signed it");
        }
        const double now = now_seconds();
        if (transfer.failures++ == 0) { transfer.failed_since = transfer.heard_at; }
        if (now - transfer.failed_since >= patience) {
            give_up(result == CURLE_OK, answer.status, code, lost);
        }
        transfer.start_at = now + std::min(2.0, 0.05 * double(1 << std::min(transfer.failures, 6)));
        return false;
    }

    // Throws a UserError, TemporaryFailure or S3Full, unless the request may succeed another time.
    void refuse_if_final(const S3Answer& answer, const std::string& code) const {
        const long status = answer.status;
        if (status == 507 || code == "QuotaExceeded") {
            throw S3Full("the store of " + where() + " has no room (" + code + ")");
        }
        if (status == 501) {
            throw UserError(where() + " lacks what is needed (501): use a store that supports If-None-Match");
        }
        const bool is_proxys = status == 404 && code != "NoSuchBucket";  // of a proxy whose store is down
        const bool is_busy = status == 409 || status == 429 || status >= 500 || code == "RequestTimeout";
        if (is_busy || is_proxys) { return; }
        const std::string region = text_in_xml(answer.body, "Error/Region");
        const std::string said = format("%ld%s", status, code.empty() ? "" : (" " + code).c_str());
        std::string advice = "check the store's settings, or correct --store and AWS_ENDPOINT_URL";
        if (code == "NoSuchBucket") {
            advice = "create the bucket, or correct --store";
        } else if (code == "RequestTimeTooSkewed") {
            advice = "set this machine's clock: signatures depend on it";
        } else if (status == 301 || status == 307 || !region.empty()) {
            advice = "set AWS_REGION to the bucket's region" + (region.empty() ? "" : ", " + region);
        } else if (code == "InvalidToken") {
            advice = "correct AWS_SESSION_TOKEN, which must belong to the same keys";
        } else if (code == "AccessDenied" || code == "AllAccessDisabled") {
            advice = "allow this key to get, put, delete and list below " + settings.url;
        } else if (status == 403 && code.empty()) {
            advice = "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or check the proxies on the way";
        } else if (status == 401 || status == 403) {
            advice = "correct AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION";
        }
        const std::string text = where() + " refuses to serve (" + said + "): " + advice;
        if (code == "RequestTimeTooSkewed") { throw TemporaryFailure(text); }  // NTP may correct the clock
        throw UserError(text);
    }

    [[noreturn]] void give_up(bool answers, long status, const std::string& code,
                              const std::string& lost) const {
        if (answers) {
            const char* advice = status == 404            ? "correct AWS_ENDPOINT_URL, or try"
                                 : are_keys_refused(code) ? "renew the keys, or try"
                                                          : "try";
            throw TemporaryFailure(where() + format(" has answered for %.3g s with %ld %s: %s again later",
                                                    patience, status, code.c_str(), advice));
        }
        throw TemporaryFailure("cannot reach " + where() + format(" for %.3g s (", patience) + lost +
                               "): correct AWS_ENDPOINT_URL or AWS_REGION, or try again later");
    }

    static int milliseconds_to_start(const std::vector<Transfer>& transfers) {
        double next = now_seconds() + 0.25;
        for (const Transfer& transfer : transfers) {
            if (!transfer.easy && !transfer.is_done) { next = std::min(next, transfer.start_at); }
        }
        return std::max(1, int(1000 * (next - now_seconds())));
    }

    static constexpr long most_connections = 8;
    static constexpr curl_off_t most_bytes = curl_off_t(1) << 32;  // of a value

    const S3Settings settings;
    S3Keys keys;  // the newest
    const double silence;
    bool is_served = false;  // check() has passed
    double patience;  // seconds for which a request that fails is repeated
    Owned<CURLM, curl_multi_cleanup> multi;
    std::string address;
};
