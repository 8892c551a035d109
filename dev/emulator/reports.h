// What a test expects of reports: of the emulator's, which a program can read, and of the sanitizers', which
// end it.
#pragma once
#include <gtest/gtest.h>

#include <fstream>
#include <initializer_list>
#include <string>

#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_options() { return "halt_on_error=1"; }
constexpr bool has_thread_sanitizer = true;
#else
constexpr bool has_thread_sanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool has_address_sanitizer = true;
#else
constexpr bool has_address_sanitizer = false;
#endif

// FILE:LINE of the mark `mistake(NAME)`, which is in the calling file once.
inline std::string line_of(const std::string& mark, const char* file = __builtin_FILE()) {
    std::ifstream source(file);
    std::string line;
    for (int number = 1; std::getline(source, line); number++) {
        if (line.find("// mistake(" + mark + ")") != std::string::npos) {
            return std::string(file) + ":" + std::to_string(number);
        }
    }
    ADD_FAILURE() << "no mistake(" << mark << ") in " << file << ": run from the root of the repository";
    return "";
}

inline testing::AssertionResult contains(const std::string& text, std::initializer_list<std::string> parts) {
    for (const std::string& part : parts) {
        if (text.find(part) == std::string::npos) {
            return testing::AssertionFailure() << "no \"" << part << "\" in:\n" << text;
        }
    }
    return testing::AssertionSuccess();
}

// Ends the process: a sanitizer must report the mistake, at its line, in the thread that the emulator names.
// gtest's expressions are POSIX: a dot matches the end of a line, too.
#define EXPECT_SANITIZER(statement, what, mark, thread)                                                \
    do {                                                                                               \
        testing::FLAGS_gtest_death_test_style = "threadsafe";                                          \
        EXPECT_DEATH(statement, "(" what ").*" + line_of(mark) + ".*emulator: in kernel .*" + thread); \
    } while (false)
