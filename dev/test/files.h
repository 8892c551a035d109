// What tests of files share: a folder that goes away, files of llm.c's kind, expected errors.
#pragma once
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "llmc/error.h"

class TemporaryFolder {
public:
    TemporaryFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "test-XXXXXX").string();
        if (!mkdtemp(&name[0])) { throw std::runtime_error("no temporary folder"); }
        path = name;
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    ~TemporaryFolder() { std::filesystem::remove_all(path); }

    std::string operator/(const std::string& name) const { return path + "/" + name; }
    const std::string& name() const { return path; }

private:
    std::string path;
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The bytes of a header of 256 int32.
inline std::string header_bytes(std::initializer_list<int32_t> values) {
    std::vector<int32_t> header(values);
    header.resize(256);
    return std::string(reinterpret_cast<const char*>(header.data()), 1024);
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// The values of a section of a state.
template <typename T, typename State>
std::vector<T> saved_values(const State& state, const std::string& section) {
    std::vector<T> values(state.bytes(section) / sizeof(T));
    state.read(section, values.data(), values.size() * sizeof(T));
    return values;
}

// The message of the UserError that `call` must throw; anything else fails the test.
template <typename Call>
std::string user_error(Call call) {
    try {
        call();
    } catch (const UserError& error) {
        return error.what();
    }
    ADD_FAILURE() << "no UserError was thrown";
    return "";
}

// `text` contains `part`: with both in the message where not.
inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) { return ::testing::AssertionSuccess(); }
    return ::testing::AssertionFailure() << "'" << text << "' does not contain '" << part << "'";
}
