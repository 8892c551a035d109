// Shared by the fuzzing harnesses. A harness is one file: it gives a parser bytes that libFuzzer makes up.
// The parser may refuse them as a user's mistake, but a crash, a hang or a violated require() is a bug. A
// harness defines
//     void fuzz(const std::string& bytes);     uses an input; require() states what must then be true
//     std::vector<std::string> seeds();        valid inputs to start from
//
//     build/fuzz/NAME seeds=DIR                writes the seeds and exits
//     build/fuzz/NAME [libFuzzer's options] CORPUS_DIR SEED_DIR
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include "llmc/error.h"

void fuzz(const std::string& bytes);
std::vector<std::string> seeds();

// Something that holds for any input. Unlike assert(), it ends the program in every build.
inline void require(bool fact, const char* what) {
    if (fact) { return; }
    fprintf(stderr, "violated: %s\n", what);
    abort();
}

// Bytes as a file, in memory because each input has a new one.
class MemoryFile {
public:
    explicit MemoryFile(const std::string& bytes) {
        descriptor = memfd_create("fuzz", MFD_CLOEXEC);
        if (descriptor < 0) { fail("memfd_create"); }
        for (size_t at = 0; at < bytes.size();) {
            const ssize_t put = write(descriptor, bytes.data() + at, bytes.size() - at);
            if (put < 0) { fail("write"); }
            at += size_t(put);
        }
    }
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;
    ~MemoryFile() { close(descriptor); }

    std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor); }

private:
    [[noreturn]] static void fail(const char* call) {
        perror(call);
        _exit(3);
    }

    int descriptor;
};

inline std::string whole_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The bytes of some values.
template <class T>
std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// The bytes of a header of 256 int32 that begins with these values.
inline std::string header_bytes(std::initializer_list<int32_t> values) {
    std::vector<int32_t> header(values);
    header.resize(256);
    return bytes_of(header);
}

// A new folder in $TMPDIR, which make's rule puts in memory and removes after a crash.
class Folder {
public:
    Folder() {
        name = (std::filesystem::temp_directory_path() / "fuzz-XXXXXX").string();
        if (!mkdtemp(&name[0])) { throw RunError("no temporary folder"); }
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() { std::filesystem::remove_all(name); }

    const std::string& path() const { return name; }

private:
    std::string name;
};

// The bytes that `write` writes to the path that it is given.
template <class Write>
std::string written_by(Write write) {
    const Folder folder;
    write(folder.path() + "/file");
    return whole_file(folder.path() + "/file");
}

// The message is shown in a terminal: it must be one line, without commands to the terminal.
inline void check_message(const std::string& message) {
    require(!message.empty(), "an error has a message");
    for (const char c : message) {
        require(uint8_t(c) >= 0x20 && c != 0x7f, "a message has no control characters");
    }
}

// Does `work`, which may refuse its input as the user's mistake, or as the failure of a file or a peer.
template <class Work>
void may_refuse(Work work) {
    try {
        work();
    } catch (const UserError& error) { check_message(error.what()); } catch (const RunError& error) {
        check_message(error.what());
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string bytes(reinterpret_cast<const char*>(data), size);
    may_refuse([&] { fuzz(bytes); });
    return 0;
}

// All seeds must be accepted: a parser that refuses everything would never be tested.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
    if (*argc != 2 || strncmp((*argv)[1], "seeds=", 6) != 0) { return 0; }
    const std::string folder = (*argv)[1] + 6;
    int number = 0;
    for (const std::string& seed : seeds()) {
        try {
            fuzz(seed);
        } catch (const std::exception& error) {
            fprintf(stderr, "error: seed %d is refused: %s\n", number, error.what());
            exit(1);
        }
        std::ofstream(folder + "/" + std::to_string(number++), std::ios::binary) << seed;
    }
    printf("%d seeds\n", number);
    exit(0);
}
