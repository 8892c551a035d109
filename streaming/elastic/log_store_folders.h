// FolderLogStore: the sync log in named folders of values, which lie in a folder of files
// (llmc/run/file_folders.h) or in a bucket (log_store_s3.h).
#pragma once
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "streaming/elastic/log_store.h"

template <class Folders>
class FolderLogStore : public LogStore {
public:
    // UserError if the place cannot be used.
    template <class... Where>
    explicit FolderLogStore(const Where&... where) : folders(where...) {}

    StoreAnswer perform(const StoreRequest& request) override {
        try {
            return answer_to(request);
        } catch (const std::exception& error) { return lost_answer(error.what(), Folders::is_full(error)); }
    }

private:
    StoreAnswer answer_to(const StoreRequest& request) {
        StoreAnswer answer;
        switch (request.kind) {
            case StoreRequest::decide:
                break;  // workers do it, by what they list
            case StoreRequest::decision:
                return answer_to({StoreRequest::get, request.folder + "/entry", request.name});
            case StoreRequest::get:
                if (std::optional<std::string> value = folders.get(request.folder, request.name)) {
                    answer.found = true;
                    answer.value = std::move(*value);
                }
                break;
            case StoreRequest::put:
                folders.put(request.folder, request.name, request.value);
                answer.value = request.value;
                break;
            case StoreRequest::put_if_absent:
                answer.value =
                    folders.put_if_absent(request.folder, request.name, request.value, request.asks_winner);
                break;
            case StoreRequest::remove:
                request.name.empty() ? folders.remove_folder(request.folder)
                                     : folders.remove(request.folder, request.name);
                break;
            case StoreRequest::list:
                answer.listing = folders.list(request.folder);
                break;
            case StoreRequest::folders:
                answer.listing = folders.folders(request.folder);
                break;
        }
        return answer;
    }

protected:
    Folders folders;
};
