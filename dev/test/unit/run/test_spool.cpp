// Spool: what was appended is read, in pieces, and nothing of it is left.
#include "llmc/run/spool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>

TEST(Spool, reads_what_was_appended_and_leaves_no_file) {
    const std::string folder = testing::TempDir() + "spool";
    std::filesystem::create_directories(folder);
    std::string all;
    Spool spool(folder);
    for (size_t count : {1u, 3u, 4095u, 4096u, 100'000u, 0u, 7u}) {
        std::string some(count, '\0');
        for (char& byte : some) { byte = char(all.size() + size_t(&byte - some.data()) * 31); }
        spool.append(some.data(), count);
        all += some;
    }
    EXPECT_EQ(spool.size(), all.size());
    EXPECT_EQ(spool.digest(), XXH3_64bits(all.data(), all.size()));
    for (size_t at : {size_t(90'000), size_t(0), size_t(3), all.size() - 1, all.size()}) {
        EXPECT_EQ(spool.read(at, 10'000), all.substr(at, 10'000)) << at;
    }
    Spool moved = std::move(spool);
    EXPECT_EQ(moved.read(0, all.size()), all);
    EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(Spool, names_the_folder_that_it_cannot_use) {
    try {
        const Spool spool("/does/not/exist");
        FAIL();
    } catch (const SpoolError& error) {
        EXPECT_STREQ(error.what(), "a temporary file in /does/not/exist failed: No such file or directory");
    }
}

TEST(Spool, refuses_a_TMPDIR_that_does_not_exist) {
    const char* const before = getenv("TMPDIR");
    const std::string kept = before ? before : "";
    setenv("TMPDIR", "/does/not/exist", 1);
    EXPECT_THROW(Spool(""), SpoolError);
    before ? setenv("TMPDIR", kept.c_str(), 1) : unsetenv("TMPDIR");
}

// A snapshot's memory, in the small: what is appended and read is not held.
TEST(Spool, holds_nothing_in_memory) {
    const auto peak = [] {
        rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        return usage.ru_maxrss;  // KiB
    };
    const std::string piece(1 << 20, 'x');
    Spool spool(testing::TempDir());
    spool.append(piece.data(), piece.size());
    const long before = peak();
    for (int i = 1; i < 256; i++) { spool.append(piece.data(), piece.size()); }
    for (int i = 0; i < 256; i++) { EXPECT_EQ(spool.read(size_t(i) << 20, 1 << 20), piece); }
    EXPECT_LT(peak() - before, 16 << 10);
}
