// llm.c's flags. Most of its letters are options of this program (options.h); the table below says what each
// flag becomes. CLI11 takes no option of one dash and two letters, so the command line is translated before
// CLI11 sees it. A flag without an option here is set aside; the functions at the end give it its meaning.
// Facts from llm.c's train_gpt2.cu and llmc/zero.cuh: https://github.com/karpathy/llm.c
#pragma once
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/world.h"

// -----------------------------------------------------------------------------------------------------------
// The table

enum class LlmcKind {
    same,     // an option of the same letter
    option,   // an option of another name
    kept,     // set aside: this file gives it its meaning
    alias,    // another name of a kept flag
    nothing,  // changes nothing; a note names it
};

struct LlmcFlag {
    const char* flag;
    LlmcKind kind;
    const char* here;    // what it becomes
    const char* remark;  // what differs from llm.c, or why it changes nothing
    bool is_text = false;
};

// Options of the same letter and meaning. Those below differ, or their defaults do.
constexpr const char* llmc_same_flags = "-o -n -b -t -x -k -l -u -q -c -v -s -g -h -a";

constexpr LlmcFlag llmc_flags[] = {
    {"-i", LlmcKind::same, "-i", "default: tinyshakespeare in `data/` or llm.c's `dev/data/`, if it exists"},
    {"-j", LlmcKind::same, "-j", "default: tinyshakespeare's if that is trained on, else none"},
    {"-e", LlmcKind::same, "-e", "default: d12, from new weights"},
    {"-lg", LlmcKind::nothing, "nothing", "nvidia-smi shows clocks and temperatures"},
    {"-nk", LlmcKind::option, "--keep-checkpoints", ""},
    {"-nm", LlmcKind::option, "--major-checkpoints", ""},
    {"-y", LlmcKind::same, "-y", "0 refuses a folder that has models: nothing is overwritten"},
    {"-d", LlmcKind::same, "-d", "tokens of each worker, which is all processes unless --workers is given"},
    {"-sl", LlmcKind::option, "--skip-loss-zscore", ""},
    {"-sg", LlmcKind::option, "--skip-norm-zscore", ""},
    {"-m", LlmcKind::same, "-m", "all batches: 0, or -1 as there"},
    {"-f", LlmcKind::kept, "--matmul-precision", "0: highest; 1: changes nothing"},
    {"-w", LlmcKind::nothing, "nothing; 0 is refused", "master weights are always fp32"},
    {"-ge", LlmcKind::option, "--fuse-gelu", "default: 1 on Hopper and server Blackwell, else 0"},
    {"-z", LlmcKind::nothing, "nothing; 2 and 3 are refused",
     "optimizer state is always sharded over a worker's ranks"},
    {"-r", LlmcKind::same, "-r", "default: 0"},
    {"-pn", LlmcKind::kept, "-pn", "number of processes; not needed under mpirun, srun and torchrun"},
    {"-pr", LlmcKind::kept, "-pr", "this process's number; not needed, as above"},
    {"-pg", LlmcKind::kept, "-pg", "processes on each machine; not needed, as above"},
    {"-pi", LlmcKind::kept, "-pi", "mpi: mpirun, srun or torchrun say which process; fs: see -pf; tcp: -ps",
     true},
    {"-pm", LlmcKind::alias, "-pi", "its name in llm.c's usage text", true},
    {"-pf", LlmcKind::kept, "--store file:DIR", "with -pi fs", true},
    {"-pp", LlmcKind::alias, "-pf", "its name in llm.c's usage text", true},
    {"-pd", LlmcKind::alias, "-pf", "its name in early versions; implies -pi fs", true},
    {"-ps", LlmcKind::kept, "--store redis://HOST:PORT", "with -pi tcp; refused without --store", true},
};

// For the documentation, in Markdown.
inline void print_llmc_flags_table() {
    std::string same = llmc_same_flags;
    for (size_t at = 0; (at = same.find(' ', at)) != std::string::npos; at += strlen("` `")) {
        same.replace(at, 1, "` `");
    }
    printf("| llm.c | here | |\n|---|---|---|\n| `%s` | the same | |\n", same.c_str());
    for (const LlmcFlag& flag : llmc_flags) {
        const std::string here = strcmp(flag.flag, flag.here) == 0 ? "the same"
                                 : flag.kind == LlmcKind::nothing  ? flag.here
                                                                   : "`" + std::string(flag.here) + "`";
        printf("| `%s` | %s | %s |\n", flag.flag, here.c_str(), flag.remark);
    }
}

// -----------------------------------------------------------------------------------------------------------
// From words to values

// The values of the flags that were set aside. Of a flag given twice, the last value counts.
struct LlmcFlags {
    std::map<std::string, std::string> values;

    bool has(const std::string& flag) const { return values.count(flag) > 0; }
    std::string text(const std::string& flag) const { return has(flag) ? values.at(flag) : ""; }

    // Throws a UserError unless the value is a whole number of at least `least`.
    long number(const std::string& flag, long fallback, long least) const {
        if (!has(flag)) { return fallback; }
        const std::string value = text(flag);
        char* end = nullptr;
        const long n = strtol(value.c_str(), &end, 10);
        if (value.empty() || value.size() > 9 || *end || n < least) {
            throw UserError(format("%s is '%s', which is not a whole number of at least %ld: correct it",
                                   flag.c_str(), value.c_str(), least));
        }
        return n;
    }
};

// The flag of the table that a word such as -nk, -nk5 or -nk=5 begins with, or null; `glued` gets its value,
// if the word has one.
inline const LlmcFlag* find_llmc_flag(const std::string& word, std::optional<std::string>& glued) {
    for (const LlmcFlag& flag : llmc_flags) {
        if (flag.kind == LlmcKind::same || word.rfind(flag.flag, 0) != 0) { continue; }
        const std::string rest = word.substr(strlen(flag.flag));
        if (rest.empty()) { return &flag; }
        const bool is_number = isdigit((unsigned char)rest[0]) || strchr("+-.", rest[0]);
        if (rest[0] != '=' && (flag.is_text || !is_number)) { continue; }
        glued = rest.substr(rest[0] == '=');
        return &flag;
    }
    return nullptr;
}

// The command line as options of this program; the other flags go to `flags`.
// is_option: whether the word is an option that a value follows
inline std::vector<std::string> translate_llmc_flags(
    const std::vector<std::string>& line, LlmcFlags& flags,
    const std::function<bool(const std::string&)>& is_option) {
    std::vector<std::string> words;
    for (size_t i = 0; i < line.size(); i++) {
        std::optional<std::string> value;
        const LlmcFlag* flag = find_llmc_flag(line[i], value);
        const bool takes_next = flag ? !value : is_option(line[i]);
        words.push_back(flag && flag->kind == LlmcKind::option ? flag->here : line[i]);
        if (takes_next && i + 1 < line.size()) { value = line[++i]; }
        if (flag && flag->kind != LlmcKind::option) {
            words.pop_back();
            if (!value) { throw UserError(std::string(flag->flag) + " has no value: give it one"); }
            if (strcmp(flag->flag, "-pd") == 0) { flags.values["-pi"] = "fs"; }
            flags.values[flag->kind == LlmcKind::alias ? flag->here : flag->flag] = *value;
        } else if (value) {
            words.push_back(*value);
        }
    }
    return words;
}

// -----------------------------------------------------------------------------------------------------------
// What they mean

// -f 0: no TF32, no bf16.
inline bool wants_exact_matmuls(const LlmcFlags& flags) {
    const long tf32 = flags.number("-f", 1, 0);
    if (tf32 > 1) { throw UserError("-f must be 0 (exact matmuls) or 1: correct it"); }
    return tf32 == 0;
}

// This process among all, by -pn, -pr and -pg. Nothing if it is alone, or if the program that started it
// numbers it the same way; a UserError if the flags contradict that program or each other.
inline std::optional<World> llmc_world(const LlmcFlags& flags) {
    if (has_launcher()) { return std::nullopt; }
    const std::optional<World> started = find_world(0);
    const long size = flags.number("-pn", started ? started->size : 1, 1);
    const long number = flags.number("-pr", started ? started->number : 0, 0);
    const long on_a_machine = flags.number("-pg", 8, 1);
    if (started && (size != started->size || number != started->number)) {
        throw UserError(format("-pn and -pr say that this is process %ld of %ld, and %s that it is %ld of "
                               "%ld: leave them out", number, size, started->program.c_str(), started->number,
                               started->size));
    }
    if (started || (size == 1 && number == 0)) { return std::nullopt; }
    if (!flags.has("-pn")) {
        throw UserError("-pr gives this process's number, but not how many there are: give -pn");
    }
    if (!flags.has("-pr")) {
        throw UserError(format("-pn says that there are %ld processes, but not which of them this is: give "
                               "-pr, or start them with mpirun", size));
    }
    if (number >= size) {
        throw UserError(format("-pr %ld is out of range for -pn %ld: give 0 to %ld", number, size, size - 1));
    }
    World world;
    world.number = number;
    world.size = size;
    world.local_rank = int(number % on_a_machine);
    return world;
}

// Where the processes meet: the folder of -pf with -pi fs, else `store`.   store: of --store, may be empty
inline std::string llmc_store(const LlmcFlags& flags, const std::string& store) {
    const std::string way = flags.text("-pi");
    if (way == "tcp" && store.empty() && environment("DILOCO_STORE").empty()) {
        const std::string host = flags.has("-ps") ? flags.text("-ps") : "HOST";
        throw UserError("-pi tcp is a server inside llm.c; here processes meet at a separate server: start "
                        "scripts/multi_node/redis_server.sh there and give --store redis://" + host +
                        ":6379, or meet in a folder that all see (-pi fs -pf DIR)");
    }
    if (!way.empty() && way != "mpi" && way != "fs" && way != "tcp") {
        throw UserError("-pi " + way + " is unknown: give mpi, fs or tcp");
    }
    if (way != "fs") { return store; }
    std::string folder = flags.text("-pf");
    if (folder.empty()) { throw UserError("-pi fs needs a folder that all processes see: give -pf DIR"); }
    while (folder.rfind("//", 0) == 0) { folder.erase(0, 1); }
    const std::string url = "file:" + folder;
    if (!store.empty() && store != url) {
        throw UserError("-pf and --store name two places to meet: give one of them");
    }
    return url;
}

// One line that names the flags that were given and change nothing; empty if there are none.
inline std::string llmc_note(const LlmcFlags& flags) {
    if (flags.number("-z", 0, 0) > 1) {
        throw UserError("-z " + flags.text("-z") + ": gradients and parameters are not sharded, only "
                        "optimizer state, which always is (-z 1): leave it out");
    }
    if (flags.number("-w", 1, 0) != 1) {
        throw UserError("-w " + flags.text("-w") + ": the outer step needs fp32 weights: leave it out");
    }
    std::string list;
    auto name = [&](const std::string& flag, const std::string& why) {
        list += (list.empty() ? "" : ", ") + flag + " (" + why + ")";
    };
    for (const LlmcFlag& flag : llmc_flags) {
        if (flag.kind != LlmcKind::nothing || !flags.has(flag.flag)) { continue; }
        flags.number(flag.flag, 0, -1);
        name(flag.flag, flag.remark);
    }
    if (flags.has("-pf") && flags.text("-pi") != "fs") { name("-pf", "there is no -pi fs"); }
    if (flags.has("-ps")) { name("-ps", "processes meet elsewhere"); }
    return list.empty() ? "" : "without effect here: " + list;
}
