// FileLogStore: the sync log of an elastic run in a folder that all workers see, on one machine or on a
// network file system.
// A folder of the log is a folder here, "G/0/payload/12" three deep in G; a name is a file in it. Values
// appear whole: written as ROOT/.new/TOKEN.n, then renamed, or linked where the first one wins.
//
// After a power cut: a value that was put if absent (entries, lines, payloads) is on the disk with its name
// before the answer. A value that was put (beats, positions of checkpoints) may be lost: beats are written
// again, and an older position only keeps payloads longer.
//
// A killed process leaves at most one file in .new. A process that opens the store removes files there that
// are ten minutes old by the file server's clock; if a stopped process still needs one, its request is lost
// and it asks again. A removed folder is moved to .new first, and deleted there.
#pragma once
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/run/log_store.h"
#include "llmc/run/store.h"
#include "llmc/run/value_file.h"

class FileLogStore : public LogStore {
public:
    // UserError if the folder cannot be made or written to, or its file system has no links;
    // TemporaryFailure if it may serve later.
    explicit FileLogStore(const std::string& folder)
        : root(folder), unnamed(folder + "/.new"), token(random_hex(8)) {
        FileStore::make_usable(root);
        try {
            if (mkdir(unnamed.c_str(), 0777) != 0 && errno != EEXIST) { fail_value_file("mkdir", unnamed); }
            sweep(now_on_its_server());
        } catch (const ValueFileError& error) {
            if (may_pass(error.error)) { throw TemporaryFailure(error.what()); }
            throw UserError(std::string(error.what()) +
                            ": give --store a folder that can be written, on a file system with hard links");
        }
    }

    StoreAnswer perform(const StoreRequest& request) override {
        const std::string &folder = request.folder, &name = request.name;
        StoreAnswer answer;
        try {
            switch (request.kind) {
                case StoreRequest::decide: break;  // the workers do it, from their listings
                case StoreRequest::decision: return perform({StoreRequest::get, folder + "/entry", name});
                case StoreRequest::get:
                    if (std::optional<std::string> value = get(folder, name)) {
                        answer.found = true;
                        answer.value = std::move(*value);
                    }
                    break;
                case StoreRequest::put:
                    put(folder, name, request.value);
                    answer.value = request.value;
                    break;
                case StoreRequest::put_if_absent:
                    answer.value = put_if_absent(folder, name, request.value, request.asks_winner);
                    break;
                case StoreRequest::remove: name.empty() ? remove_folder(folder) : remove(folder, name); break;
                case StoreRequest::list: answer.listing = list(folder); break;
                case StoreRequest::folders: answer.listing = folders(folder); break;
            }
            return answer;
        } catch (const ValueFileError& error) {
            return lost_answer(error.what(), error.is_full);
        } catch (const std::exception& error) { return lost_answer(error.what(), false); }
    }

private:
    std::optional<std::string> get(const std::string& folder, const std::string& name) const {
        if (std::optional<std::string> value = read_value_file(path(folder, name))) { return value; }
        refresh(folder);
        return read_value_file(path(folder, name));
    }

    void put(const std::string& folder, const std::string& name, const std::string& value) {
        const TemporaryFile file{new_path()};
        write_value_file(file.path, value, /*sync=*/false);
        give_name(folder, name, [&](const char* path) { return rename(file.path.c_str(), path) == 0; });
    }

    // Returns the value that is there afterwards, if asked for.
    std::string put_if_absent(const std::string& folder, const std::string& name, const std::string& value,
                              bool asks_winner) {
        while (true) {
            if (std::optional<std::string> winner = get(folder, name)) { return asks_winner ? *winner : ""; }
            const TemporaryFile file{new_path()};
            write_value_file(file.path, value, /*sync=*/true);
            bool won = true;
            const bool is_new_folder = give_name(folder, name, [&](const char* path) {
                won = link(file.path.c_str(), path) == 0;
                return won || errno == EEXIST;
            });
            if (won) {
                sync_names(folder, is_new_folder);
                return asks_winner ? value : "";
            }
        }
    }

    void remove(const std::string& folder, const std::string& name) const {
        if (unlink(path(folder, name).c_str()) != 0 && errno != ENOENT) {
            fail_value_file("unlink", path(folder, name));
        }
    }

    void remove_folder(const std::string& folder) {
        const std::string from = path(folder), away = new_path();
        const NamesInFolder names = names_in(from);
        for (const auto& [name, is_folder] : names) {
            if (is_folder) { return remove_values(folder, names); }
        }
        if (rename(from.c_str(), away.c_str()) == 0) {
            std::error_code left_for_the_sweep;
            std::filesystem::remove_all(away, left_for_the_sweep);
        } else if (errno == ENOSPC || errno == EDQUOT) {  // no room for another name
            remove_values(folder, names);
        } else if (errno != ENOENT) {
            fail_value_file("rename", from);
        }
    }

    // If the folder is removed meanwhile the listing is whole or empty. Names are read twice: some file
    // systems skip a name that is being replaced, and beats are replaced all the time.
    std::map<std::string, std::string> list(const std::string& folder) const {
        const std::string where = path(folder);
        while (true) {
            refresh(folder);
            const auto opened = open_folder(where);
            std::map<std::string, std::string> listing;
            if (!opened) { return listing; }
            NamesInFolder names;
            add_names(*opened, where, names);
            add_names(*opened, where, names);
            for (const auto& [name, is_folder] : names) {
                if (is_folder) { continue; }
                if (auto value = read_value_file(where + "/" + file_name_of(name))) {
                    listing[name] = std::move(*value);
                }
            }
            struct stat before, after;
            if (fstat(dirfd(opened.get()), &before) != 0) { fail_value_file("fstat", where); }
            if (stat(where.c_str(), &after) == 0 && before.st_ino == after.st_ino) { return listing; }
        }
    }

    std::map<std::string, std::string> folders(const std::string& text) const {
        std::map<std::string, std::string> found;
        refresh(text);
        find_folders(root, "", text, found);
        return found;
    }

    // ---- where things are

    std::string path(const std::string& folder) const { return paths_to(root, folder).back(); }
    std::string path(const std::string& folder, const std::string& name) const {
        return path(folder) + "/" + file_name_of(name);
    }
    std::string new_path() { return unnamed + "/" + token + "." + std::to_string(++count); }

    void refresh(const std::string& folder) const {
        refresh_folder(root);
        for (const std::string& path : paths_to(root, folder)) { refresh_folder(path); }
    }

    // ---- one value

    // `name_it` fails with ENOENT if the folder does not exist, or was just removed. Returns whether it was
    // made.
    template <class NameIt>
    bool give_name(const std::string& folder, const std::string& name, NameIt name_it) {
        const std::string whole = path(folder, name);
        int attempt = 0;
        for (; !name_it(whole.c_str()); attempt++) {
            if ((errno != ENOENT && errno != ESTALE) || attempt == 100) { fail_value_file("naming", whole); }
            for (const std::string& path : paths_to(root, folder)) {
                if (mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) { fail_value_file("mkdir", path); }
            }
        }
        return attempt > 0;
    }

    void sync_names(const std::string& folder, bool is_new) const {
        if (!is_new) { return sync_folder(path(folder)); }
        sync_folder(root);
        for (const std::string& path : paths_to(root, folder)) { sync_folder(path); }
    }

    // ---- folders

    // Folders with a value in them whose names begin with `text`.   path: that of `folder`; "" is the root
    void find_folders(const std::string& path, const std::string& folder, const std::string& text,
                      std::map<std::string, std::string>& found) const {
        for (const auto& [name, is_folder] : names_in(path)) {
            if (!is_folder) {
                if (path != root && folder.rfind(text, 0) == 0) { found[folder]; }
                continue;
            }
            const std::string inner = path == root ? name : folder + "/" + name;
            if (inner.rfind(text, 0) == 0 || text.rfind(inner + "/", 0) == 0) {
                find_folders(path + "/" + file_name_of(name), inner, text, found);
            }
        }
    }

    void remove_values(const std::string& folder, const NamesInFolder& names) const {
        for (const auto& [name, is_folder] : names) {
            if (!is_folder) { remove(folder, name); }
        }
    }

    // ---- when it is opened

    timespec now_on_its_server() {
        const TemporaryFile file{new_path()}, other{new_path()};
        write_value_file(file.path, "", /*sync=*/false);
        if (link(file.path.c_str(), other.path.c_str()) != 0) { fail_value_file("link", other.path); }
        struct stat status;
        if (stat(file.path.c_str(), &status) != 0) { fail_value_file("stat", file.path); }
        return status.st_mtim;
    }

    void sweep(const timespec& now) const {
        const auto opened = open_folder(unnamed);
        while (const dirent* entry = opened ? readdir(opened.get()) : nullptr) {
            const std::string name = entry->d_name, path = unnamed + "/" + name;
            struct stat status;
            const bool is_left = name[0] != '.' && stat(path.c_str(), &status) == 0 &&
                                 status.st_mtim.tv_sec < now.tv_sec - 600;
            std::error_code gone;
            if (is_left) { std::filesystem::remove_all(path, gone); }
        }
    }

    const std::string root, unnamed, token;
    long count = 0;
};
