// Files. Those of llm.c begin with a header of 256 int32; the data follow, little-endian.
//   InputFile    reads at offsets; header and size are checked before anything else is read
//   write_file   makes a file that appears whole or not at all: written under another name, synced, renamed
//   Checksum     of a file that is read or written in pieces
//   FileDescriptor   of a file or a socket, closed with its owner
// A file of the wrong kind is a UserError, a disk that fails is a RunError; both name the file.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <utility>

#include "llmc/error.h"
#include "llmc/owned_array.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian and read as they lie");

using FileHeader = std::array<int32_t, 256>;

// RunError if errno is of a disk or a system that fails, not of the file that was asked for.
inline void check_disk(const std::string& what) {
    for (int failure : {EIO, ESTALE, ETIMEDOUT, EMFILE, ENFILE, ENOMEM, ENOSPC, EDQUOT}) {
        if (errno == failure) { throw RunError(what + ": " + strerror(errno), retry_status); }
    }
}

// -1: there is none.
class FileDescriptor {
public:
    explicit FileDescriptor(int number = -1) : number(number) {}
    FileDescriptor(FileDescriptor&& other) noexcept : number(std::exchange(other.number, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        std::swap(number, other.number);
        return *this;
    }
    ~FileDescriptor() { close(); }

    operator int() const { return number; }
    // Returns 0, or -1 with errno: some file systems report a full disk only here.
    int close() { return number < 0 ? 0 : ::close(std::exchange(number, -1)); }

private:
    int number;
};

class InputFile {
public:
    // hint: what a user can do if the file is missing, damaged or of another kind
    InputFile(std::string path, std::string hint) : path(std::move(path)), hint(std::move(hint)) {
        // O_NONBLOCK: a pipe is opened at once, and refused below, instead of waiting for a writer.
        descriptor = FileDescriptor(open(this->path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
        if (descriptor < 0) { check_disk("cannot open " + this->path); }
        if (descriptor < 0) { fail(format("cannot be opened (%s)", strerror(errno))); }
        struct stat status;
        if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) { fail("is not a file"); }
        bytes = status.st_size;
    }

    const std::string& name() const { return path; }
    int64_t size() const { return bytes; }

    // Throws the UserError "PATH what: hint".
    [[noreturn]] void fail(const std::string& what) const {
        throw UserError(path + " " + what + ": " + hint);
    }

    // The header of a `kind` of file. UserError unless it is all there and starts with `magic`.
    FileHeader read_header(int32_t magic, const char* kind) const {
        FileHeader header;
        if (bytes < int64_t(sizeof header)) { fail(format("is truncated (no whole header of a %s)", kind)); }
        read(header.data(), sizeof header, 0);
        if (header[0] != magic) { fail(format("is not a %s (magic %d, not %d)", kind, header[0], magic)); }
        return header;
    }

    // UserError unless the file is exactly header and `data_bytes`.
    void check_size(int64_t data_bytes) const {
        const int64_t expected = int64_t(sizeof(FileHeader)) + data_bytes;
        if (bytes != expected) {
            fail(format("is %s (%lld bytes, its header promises %lld)",
                        bytes < expected ? "truncated" : "too long", (long long)bytes, (long long)expected));
        }
    }

    // Reads `count` bytes at `offset`. RunError if that fails.
    void read(void* out, size_t count, int64_t offset) const {
        char* to = static_cast<char*>(out);
        while (count > 0) {
            const ssize_t got = pread(descriptor, to, count, offset);
            if (got < 0 && errno == EINTR) { continue; }
            if (got < 0 && errno != EIO) { check_disk("cannot read " + path); }  // EIO: perhaps a bad sector
            if (got <= 0) {
                throw RunError(format("cannot read %s at byte %lld: %s", path.c_str(), (long long)offset,
                                      got < 0 ? strerror(errno) : "it has become shorter"));
            }
            to += got;
            offset += got;
            count -= size_t(got);
        }
    }

    // Starts to read `count` bytes at `offset` into the system's cache, and returns at once. Only a hint.
    void will_read(size_t count, int64_t offset) const {
        posix_fadvise(descriptor, offset, off_t(count), POSIX_FADV_WILLNEED);
    }

private:
    std::string path, hint;
    FileDescriptor descriptor;
    int64_t bytes = 0;
};

// Writes all of `data`. Returns false and sets errno if that fails; part of it may have been written then.
inline bool write_whole(int descriptor, const void* data, size_t count) {
    const char* from = static_cast<const char*>(data);
    while (count > 0) {
        const ssize_t put = ::write(descriptor, from, count);
        if (put < 0 && errno == EINTR) { continue; }
        if (put < 0) { return false; }
        from += put;
        count -= size_t(put);
    }
    return true;
}

class OutputFile {
public:
    explicit OutputFile(std::string path) : path(std::move(path)) {
        descriptor = FileDescriptor(open(this->path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
        if (descriptor < 0) { fail(); }
    }

    void write(const void* data, size_t count) {
        if (!write_whole(descriptor, data, count)) { fail(); }
    }

    // Returns once the data is on the disk.
    void sync_and_close() {
        if (fsync(descriptor) != 0 || descriptor.close() != 0) { fail(); }
    }

private:
    [[noreturn]] void fail() const { throw RunError("cannot write " + path + ": " + strerror(errno)); }

    std::string path;
    FileDescriptor descriptor;
};

// XXH3_64bits of what is added to it.
class Checksum {
public:
    Checksum() : state(XXH3_createState()) {
        if (!state || XXH3_64bits_reset(state.get()) != XXH_OK) { throw std::bad_alloc(); }
    }
    void add(const void* data, size_t bytes) { XXH3_64bits_update(state.get(), data, bytes); }
    uint64_t value() const { return XXH3_64bits_digest(state.get()); }

private:
    Owned<XXH3_state_t, XXH3_freeState> state;
};

// Returns once the names that were added to the folder, and removed from it, are on the disk. RunError if
// the disk fails; file systems that cannot do this are left in peace.
inline void sync_folder(const std::string& folder) {
    const FileDescriptor descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (descriptor < 0 || fsync(descriptor) != 0) { check_disk("cannot sync the folder " + folder); }
}

// Creates or replaces `path` with what `write` writes. Until all of that is on the disk, `path` is unchanged.
// tag: part of the temporary name; differs between processes that may write the same file at the same time
// before_named: called when the data is on the disk, just before the file gets its name
inline void write_file(const std::string& path, const std::function<void(OutputFile&)>& write,
                       const std::string& tag = "", const std::function<void()>& before_named = [] {}) {
    const std::string temporary = path + tag + ".tmp";
    try {
        OutputFile file(temporary);
        write(file);
        file.sync_and_close();
        before_named();
        if (rename(temporary.c_str(), path.c_str()) != 0) {
            throw RunError("cannot rename " + temporary + " to " + path + ": " + strerror(errno));
        }
    } catch (...) {
        unlink(temporary.c_str());
        throw;
    }
    // The new name is an entry of the folder, which has to reach the disk as well.
    const size_t slash = path.rfind('/');
    sync_folder(slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1)));
}
