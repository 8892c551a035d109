// Spool: bytes that are appended, and then read in pieces. They lie in a file without a name rather than in
// memory, and vanish with the process, however it ends.
#pragma once
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/owned_array.h"

// The disk is full, or fails.
struct SpoolError : RunError {
    using RunError::RunError;
};

class Spool {
public:
    Spool() = default;
    // folder: where the file lies; "": the system's folder for temporary files
    explicit Spool(const std::string& folder) : folder(folder) {
        std::error_code error;
        if (folder.empty()) { this->folder = std::filesystem::temp_directory_path(error); }
        if (error) { fail("$TMPDIR", error.value()); }
        std::string name = this->folder + "/spool.XXXXXX";
        const int descriptor = mkostemp(&name[0], O_CLOEXEC);
        if (descriptor < 0) { fail(); }
        unlink(name.c_str());
        file.reset(fdopen(descriptor, "w+"));
        if (!file) { fail(); }
    }

    // SpoolError unless the folder's disk has room for so many bytes, as far as it says.
    static void require_room(const std::string& folder, size_t bytes) {
        std::error_code error;
        const std::string place = folder.empty() ? std::filesystem::temp_directory_path(error).string() : folder;
        const auto disk = std::filesystem::space(place, error);
        if (!error && disk.available < bytes) { fail(place, ENOSPC); }
    }

    size_t size() const { return bytes; }
    bool empty() const { return bytes == 0; }

    void append(const void* data, size_t count) {
        if (fwrite(data, 1, count, file.get()) != count || fflush(file.get()) != 0) { fail(); }
        checksum.add(data, count);
        bytes += count;
    }

    // Only after the last append(), and by one thread at a time: it moves the file's position.
    void read(void* out, size_t at, size_t count) const {
        errno = EIO;  // what an end that comes too early would mean
        const bool is_there = fseeko(file.get(), off_t(at), SEEK_SET) == 0;
        if (!is_there || fread(out, 1, count, file.get()) != count) { fail(); }
    }
    std::string read(size_t at, size_t at_most) const {
        std::string some(std::min(at_most, bytes - at), '\0');
        read(&some[0], at, some.size());
        return some;
    }

    // XXH3_64bits of all bytes.
    uint64_t digest() const { return checksum.value(); }

private:
    [[noreturn]] void fail() const { fail(folder, errno); }
    [[noreturn]] static void fail(const std::string& folder, int error) {
        throw SpoolError("a temporary file in " + folder + " failed: " + strerror(error));
    }

    std::string folder;
    size_t bytes = 0;
    Owned<FILE, fclose> file;
    Checksum checksum;
};
