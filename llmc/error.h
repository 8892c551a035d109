// Errors, by who can do something about them.
//   UserError     an option, a file or the environment is wrong: main prints `error: what: what to do`,
//                 exits 2
//   TemporaryFailure   a UserError that may resolve itself: other processes or the store were silent, or an
//                 earlier start still runs. A batch system may retry: exits 75 (sysexits.h: EX_TEMPFAIL)
//   RunError      something outside this process failed (a peer died, a disk is full): one line, exits 1, or
//                 with a status of its own
// Anything else that is thrown is a bug of this program.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

struct UserError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct TemporaryFailure : UserError {
    using UserError::UserError;
};

struct RunError : std::runtime_error {
    explicit RunError(const std::string& what, int status = 1) : std::runtime_error(what), status(status) {}
    int status;
};

const int mistake_status = 2;  // a person must act: another start would end in the same way
const int retry_status = 75;
// The exit status of a process that another one has replaced. It must not be restarted: that would replace
// the other one in turn.
const int replaced_status = 76;

inline int exit_status(const std::exception& error) {
    if (dynamic_cast<const TemporaryFailure*>(&error)) { return retry_status; }
    if (dynamic_cast<const UserError*>(&error)) { return mistake_status; }
    const RunError* const run_error = dynamic_cast<const RunError*>(&error);
    return run_error ? run_error->status : 1;
}

inline std::string message_of(const std::exception& error) {
    const bool is_memory = dynamic_cast<const std::bad_alloc*>(&error);
    return is_memory ? "not enough memory for this model and batch: lower -b, -t or the model's sizes"
                     : error.what();
}

// printf into a std::string.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* text, ...) {
    va_list arguments, again;
    va_start(arguments, text);
    va_copy(again, arguments);
    int length = vsnprintf(nullptr, 0, text, arguments);
    va_end(arguments);
    std::string result(size_t(length), '\0');
    vsnprintf(&result[0], size_t(length) + 1, text, again);
    va_end(again);
    return result;
}

// "a, b and c"; of a long list, the first few.
inline std::string list_in_words(const std::vector<std::string>& names) {
    const size_t shown = names.size() > 9 ? 8 : names.size();
    std::string text;
    for (size_t i = 0; i < shown; i++) {
        text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
    }
    return shown < names.size() ? text + format(" and %zu more", names.size() - shown) : text;
}

// "worker 3", "workers 0, 1 and 2"
inline std::string workers_in_words(const std::vector<int>& workers) {
    std::vector<std::string> names;
    for (int worker : workers) { names.push_back(std::to_string(worker)); }
    return (workers.size() == 1 ? "worker " : "workers ") + list_in_words(names);
}

// The index of `word` in `words`, an option's choices; else a UserError that lists them.   what: the option
inline size_t place_of(const std::string& word, const std::vector<std::string>& words,
                       const std::string& what) {
    for (size_t i = 0; i < words.size(); i++) {
        if (words[i] == word) { return i; }
    }
    throw UserError("unknown " + what + " '" + word + "': use one of " + list_in_words(words));
}
