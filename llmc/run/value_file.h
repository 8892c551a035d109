// Values as files, for stores that are folders (FileStore, FileLogStore): one file per value. Keys in a
// bucket are written in the same way. A file gets its name only when it is complete, by rename(2) or
// link(2), which are atomic on network file systems, too, and is never written to again. A network file
// system reports ESTALE if its server replaces a file while it is being read. Every failure throws a
// RunError.
#pragma once
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/owned_array.h"

struct ValueFileError : RunError {
    ValueFileError(const char* call, const std::string& path, int error)
        : RunError(format("the store's file %s: %s failed (%s)", path.c_str(), call, strerror(error))),
          is_full(error == ENOSPC || error == EDQUOT), error(error) {}
    bool is_full;  // the disk, or this user's quota
    int error;     // errno
};

// Whether `error` may be temporary: a network file system may come back, and a full one may get room again.
inline bool may_pass(int error) {
    const std::set<int> passing = {EIO, ESTALE, ENOTCONN, ETIMEDOUT, EHOSTDOWN, ENOSPC, EDQUOT};
    return passing.count(error) > 0;
}

[[noreturn]] inline void fail_value_file(const char* call, const std::string& path) {
    throw ValueFileError(call, path, errno);
}

// The file name of a key: letters, digits, '_', '-' and any '.' but the first character stay; other bytes
// become %XX, and the empty key is "%". No such name begins with a '.', which leaves those for other files.
inline std::string file_name_of(const std::string& key) {
    std::string name;
    for (unsigned char c : key) {
        const bool plain = isalnum(c) || c == '_' || c == '-' || (c == '.' && !name.empty());
        name += plain ? std::string(1, char(c)) : format("%%%02X", c);
    }
    return name.empty() ? "%" : name;
}

// A text in which %XX stand for some bytes; nothing if a '%' is not followed by two digits.
inline std::optional<std::string> percent_decoded(const std::string& text) {
    std::string plain;
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] != '%') { plain += text[i]; continue; }
        const std::string digits = text.substr(i + 1, 2);
        const bool are_hex = digits.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
        if (digits.size() < 2 || !are_hex) { return std::nullopt; }
        plain += char(std::stoi(digits, nullptr, 16));
        i += 2;
    }
    return plain;
}

// The key of a file name, or nothing if no key has that name.
inline std::optional<std::string> key_of_file_name(const std::string& name) {
    const std::optional<std::string> key = percent_decoded(name == "%" ? "" : name);
    return key && file_name_of(*key) == name ? key : std::nullopt;
}

// The paths of the folders on the way from `root` to the folder "a/b/c" in it, which is the last.
inline std::vector<std::string> paths_to(std::string root, const std::string& folder) {
    std::vector<std::string> paths;
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = folder.find('/', begin);
        paths.push_back(root += "/" + file_name_of(folder.substr(begin, end - begin)));
    }
    return paths;
}

// Reads the whole file into `value`. False, with errno set, if it cannot be read.
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
        if (count == 0) {  // shorter than its size: values do not shrink
            errno = EIO;
            return false;
        }
        had += size_t(count);
    }
    return true;
}

// Nothing if there is no such file.
inline std::optional<std::string> read_value_file(const std::string& path) {
    for (int attempt = 0;; attempt++) {
        const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
        if (file < 0 && errno == ENOENT) { return std::nullopt; }
        std::string value;
        if (file >= 0 && read_whole(file, value)) { return value; }
        if (errno != ESTALE || attempt == 100) { fail_value_file(file < 0 ? "open" : "read", path); }
    }
}

// Writes a new file; if that fails, nothing of it is left. With `sync` its bytes survive a loss of power (its
// name does once the folder is synchronized).
inline void write_value_file(const std::string& path, const std::string& value, bool sync) {
    FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (file < 0) { fail_value_file("open", path); }
    const char* failed = write_whole(file, value.data(), value.size()) ? nullptr : "write";
    if (!failed && sync && fsync(file) != 0) { failed = "fsync"; }
    if (!failed && file.close() != 0) { failed = "close"; }
    if (failed) {
        const ValueFileError error(failed, path, errno);
        file.close();
        unlink(path.c_str());
        throw error;
    }
}

// A temporary file, which is removed at the end of its scope unless it was renamed.
struct TemporaryFile {
    std::string path;
    ~TemporaryFile() { unlink(path.c_str()); }
};

// Makes a network file system ask its server what the folder holds. Otherwise it may remember for up to a
// minute which files exist and which do not.
inline void refresh_folder(const std::string& folder) {
    struct statx status;
    statx(AT_FDCWD, folder.c_str(), AT_STATX_FORCE_SYNC, STATX_MTIME, &status);
}

// The names in a folder, and whether each is itself a folder.
using NamesInFolder = std::map<std::string, bool>;

// A name that begins with '.' is no value: .new, and files that NFS keeps while they are open (.nfsXXXX).
// Null: there is no such folder.
inline Owned<DIR, closedir> open_folder(const std::string& path) {
    Owned<DIR, closedir> folder(opendir(path.c_str()));
    if (!folder && errno != ENOENT) { fail_value_file("opendir", path); }
    return folder;
}

inline bool is_folder(const std::string& path, const dirent& entry) {
    if (entry.d_type != DT_UNKNOWN) { return entry.d_type == DT_DIR; }
    struct stat status;
    return stat((path + "/" + entry.d_name).c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

inline void add_names(DIR& folder, const std::string& path, NamesInFolder& names) {
    rewinddir(&folder);
    errno = 0;
    while (const dirent* entry = readdir(&folder)) {
        if (const std::optional<std::string> name = key_of_file_name(entry->d_name)) {
            names[*name] = is_folder(path, *entry);
        }
        errno = 0;
    }
    if (errno != 0) { fail_value_file("readdir", path); }
}

inline NamesInFolder names_in(const std::string& path) {
    NamesInFolder names;
    if (const auto opened = open_folder(path)) { add_names(*opened, path, names); }
    return names;
}
