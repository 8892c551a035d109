// Values as files, for the stores that are folders (FileStore, streaming/elastic/log_store_file.h): one file a value,
// never written to once it has its name. rename(2) and link(2), which give it the name, are atomic on network
// file systems, too. These say with ESTALE that a file was replaced on its server while it was being read.
// What fails is a RunError.
#pragma once
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>

#include "llmc/error.h"

struct ValueFileError : RunError {
    ValueFileError(const char* call, const std::string& path, int error)
        : RunError(format("the store's file %s: %s failed (%s)", path.c_str(), call, strerror(error))),
          is_full(error == ENOSPC || error == EDQUOT) {}
    bool is_full;  // the disk, or what this user may have of it
};

[[noreturn]] inline void fail_value_file(const char* call, const std::string& path) {
    throw ValueFileError(call, path, errno);
}

// A key as the name of a file: what is not a letter, digit, '_', '-' or inner '.' becomes %XX, nothing '%'.
// So names that begin with a '.' are free for what is no value.
inline std::string file_name_of(const std::string& key) {
    std::string name;
    for (unsigned char c : key) {
        const bool plain = isalnum(c) || c == '_' || c == '-' || (c == '.' && !name.empty());
        name += plain ? std::string(1, char(c)) : format("%%%02X", c);
    }
    return name.empty() ? "%" : name;
}

// And back; nothing for what is no key's name.
inline std::optional<std::string> key_of_file_name(const std::string& name) {
    auto is_digit = [&](size_t i) { return i < name.size() && isxdigit((unsigned char)name[i]); };
    std::string key;
    for (size_t i = 0; name != "%" && i < name.size(); i++) {
        if (name[i] != '%') {
            key += name[i];
            continue;
        }
        if (!is_digit(i + 1) || !is_digit(i + 2)) { return std::nullopt; }
        key += char(std::stoi(name.substr(i + 1, 2), nullptr, 16));
        i += 2;
    }
    return file_name_of(key) == name ? std::optional<std::string>(key) : std::nullopt;
}

// False, with errno, where it cannot be read.
inline bool read_whole(int file, std::string& value) {
    struct stat status;
    if (fstat(file, &status) != 0) { return false; }
    if (S_ISDIR(status.st_mode)) {
        errno = EISDIR;
        return false;
    }
    value.resize(size_t(status.st_size));
    for (size_t had = 0; had < value.size();) {
        const ssize_t count = read(file, &value[had], value.size() - had);
        if (count < 0 && errno == EINTR) { continue; }
        if (count < 0) { return false; }
        if (count == 0) {  // values do not shrink
            errno = EIO;
            return false;
        }
        had += size_t(count);
    }
    return true;
}

// Nothing where there is no such file.
inline std::optional<std::string> read_value_file(const std::string& path) {
    for (int attempt = 0;; attempt++) {
        const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file < 0 && errno == ENOENT) { return std::nullopt; }
        if (file >= 0) {
            std::string value;
            const bool is_read = read_whole(file, value);
            const int error = errno;
            close(file);
            if (is_read) { return value; }
            errno = error;
        }
        if (errno != ESTALE || attempt == 100) { fail_value_file(file < 0 ? "open" : "read", path); }
    }
}

// A new file. `sync`: it survives a loss of power once it has a name that does. Nothing is left of one that
// fails.
inline void write_value_file(const std::string& path, const std::string& value, bool sync) {
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) { fail_value_file("open", path); }
    const char* failed = nullptr;
    for (size_t written = 0; written < value.size() && !failed;) {
        const ssize_t count = write(file, value.data() + written, value.size() - written);
        if (count < 0 && errno != EINTR) { failed = "write"; }
        written += size_t(std::max<ssize_t>(count, 0));
    }
    if (!failed && sync && fsync(file) != 0) { failed = "fsync"; }
    int error = errno;
    if (close(file) != 0 && !failed) {  // where a network file system says that the disk is full
        failed = "close";
        error = errno;
    }
    if (failed) {
        unlink(path.c_str());
        errno = error;
        fail_value_file(failed, path);
    }
}

// A network file system remembers for a while, up to a minute, what a folder holds, and that something is not
// there. This makes it ask its server.
inline void refresh_folder(const std::string& folder) {
    struct statx status;
    statx(AT_FDCWD, folder.c_str(), AT_STATX_FORCE_SYNC, STATX_MTIME, &status);
}
