// What the fuzzing harnesses share. A harness is one file: the parser is given bytes that libFuzzer makes up
// and may refuse them as a user's mistake; anything else that it does with them is a bug of the parser.
// A harness defines
//     void fuzz(const std::string& bytes);     what is done with an input; require() what must be true then
//     std::vector<std::string> seeds();        good inputs to start from
//
//     build/fuzz/NAME seeds=DIR                writes the seeds and leaves
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

// What holds for any input. Not assert(): it ends the program in every build.
inline void require(bool fact, const char* what) {
    if (fact) { return; }
    fprintf(stderr, "not so: %s\n", what);
    abort();
}

// Bytes as a file: in memory, since there is a new one for each input.
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

// The bytes of values; of a header of 256 int32.
template <class T>
std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

inline std::string header_bytes(std::initializer_list<int32_t> values) {
    std::vector<int32_t> header(values);
    header.resize(256);
    return bytes_of(header);
}

// A folder of its own, in $TMPDIR: make's rule has that in memory, and removes what a crash leaves.
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

// What `write` writes to the path that it is given.
template <class Write>
std::string written_by(Write write) {
    const Folder folder;
    write(folder.path() + "/file");
    return whole_file(folder.path() + "/file");
}

// A terminal shows the message: it is one line, and nothing in it is a command to the terminal.
inline void check_message(const std::string& message) {
    require(!message.empty(), "an error has a message");
    for (const char c : message) {
        require(uint8_t(c) >= 0x20 && c != 0x7f, "a message has no control characters");
    }
}

// Does `work`, which may refuse its input: as the user's mistake, or as a file or a peer that failed.
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

// Seeds must be taken: a parser that refuses everything would never be tested.
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
