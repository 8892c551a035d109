// Options: the table and what follows from a row; llm.c's letters and the command lines of its scripts; which
// values and combinations are refused, with which advice; how many ranks mpirun and its siblings imply; and
// that a run's config.toml describes the run.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <sstream>

#include "dev/test/files.h"
#include "dev/test/launch_environment.h"
#include "llmc/run/option_checks.h"
#include "llmc/run/options.h"

namespace test_options {

static std::vector<std::string> words_of(const std::string& line) {
    std::istringstream stream(line);
    return {std::istream_iterator<std::string>(stream), {}};
}

static Options parsed_words(std::vector<std::string> words, const Variables& variables = {}) {
    const LaunchEnvironment environment(variables);
    words.insert(words.begin(), "train_gpt");
    std::vector<char*> arguments;
    for (std::string& word : words) { arguments.push_back(&word[0]); }
    return parse_options(int(arguments.size()), arguments.data());
}

static Options parsed(const std::string& line, const Variables& variables = {}) {
    return parsed_words(words_of(line), variables);
}

static std::string value_of(const Options& o, const std::string& name) {
    for (const auto& [option, value] : o.resolved) {
        if (option == name) { return value; }
    }
    return "(no such option)";
}

// Makes a folder the working directory for as long as this object lives.
class InFolder {
public:
    explicit InFolder(const std::string& path) : before(std::filesystem::current_path()) {
        std::filesystem::current_path(path);
    }
    ~InFolder() { std::filesystem::current_path(before); }

private:
    const std::filesystem::path before;
};

// -----------------------------------------------------------------------------------------------------------
// llm.c's letters

struct Letter {
    const char *line, *name, *value;
};

TEST(LlmcFlags, each_sets_its_option) {
    for (const Letter& c : {Letter{"-i x_*.bin", "train-data", "x_*.bin"},
                            {"-j y_*.bin", "val-data", "y_*.bin"},
                            {"-e gpt3:c768", "model", "gpt3:c768"},
                            {"-o log", "output", "log"},
                            {"-n 5000", "save-every", "5000"},
                            {"-nk 5", "keep-checkpoints", "5"},
                            {"-nm 50000", "major-checkpoints", "50000"},
                            {"-y 1", "resume", "1"},
                            {"-b 64", "batch", "64"},
                            {"-t 2048", "seq-len", "2048"},
                            {"-d 524288", "total-batch", "524288"},
                            {"-d -1", "total-batch", "4096"},
                            {"-x 100", "max-steps", "100"},
                            {"-k wsd", "lr-schedule", "wsd"},
                            {"-l 0.0006", "lr", "0.0006"},
                            {"-u 700", "warmup", "700"},
                            {"-q 0.1", "final-lr-fraction", "0.1"},
                            {"-c 0.1", "weight-decay", "0.1"},
                            {"-sl 7.0", "skip-loss-zscore", "7.0"},
                            {"-sg 3.5", "skip-norm-zscore", "3.5"},
                            {"-v 250", "val-every", "250"},
                            {"-m 7", "val-batches", "7"},
                            {"-m -1", "val-batches", "0"},
                            {"-s 20000", "sample-every", "20000"},
                            {"-g 144", "sample-length", "144"},
                            {"-h 1", "hellaswag", "1"},
                            {"-a 1", "overfit", "1"},
                            {"-f 0", "matmul-precision", "highest"},
                            {"-f 1", "matmul-precision", "medium"},
                            {"-r 2", "recompute", "2"},
                            {"-ge 0", "fuse-gelu", "0"},
                            {"-pn 8 -pr 3", "ranks", "8"}}) {
        EXPECT_EQ(value_of(parsed(c.line), c.name), c.value) << c.line;
    }
}

TEST(LlmcFlags, all_that_llm_c_s_parser_takes_are_in_the_table) {
    const std::vector<std::string> same = words_of(llmc_same_flags);
    std::set<std::string> known(same.begin(), same.end());
    for (const LlmcFlag& flag : llmc_flags) { known.insert(flag.flag); }
    for (const std::string& flag : words_of(
             "-i -j -e -o -n -y -b -t -d -l -lg -u -q -c -x -v -m -s -ge -g -a -f -w -z -r -h -k -pi -pf "
             "-ps -pn -pr -pg -sl -sg -nk -nm -pm -pp")) {
        EXPECT_EQ(known.count(flag), 1u) << flag;
    }
}

TEST(LlmcFlags, the_table_names_options_that_there_are) {
    CLI::App app;
    Options options;
    add_options(app, option_table(options));
    for (const std::string& flag : words_of(llmc_same_flags)) {
        EXPECT_NE(app.get_option_no_throw(flag), nullptr) << flag;
    }
    for (const LlmcFlag& flag : llmc_flags) {
        if (flag.kind == LlmcKind::same || flag.kind == LlmcKind::option) {
            EXPECT_NE(app.get_option_no_throw(flag.here), nullptr) << flag.flag;
        }
        if (flag.kind == LlmcKind::same) { EXPECT_STREQ(flag.flag, flag.here); }
        if (flag.kind == LlmcKind::alias) { EXPECT_NE(flag.here, std::string(flag.flag)); }
    }
}

TEST(LlmcFlags, a_value_may_follow_its_two_letters_at_once) {
    for (const char* line : {"-nk 5 -nm 50 -sl 2 -sg 3", "-nk5 -nm50 -sl2 -sg3", "-nk=5 -nm=50 -sl=2 -sg=3",
                             "-nk 9 -nk 5 -nm50 -sl2 -sg3"}) {
        const Options o = parsed(line);
        EXPECT_EQ(o.keep_checkpoints, 5) << line;
        EXPECT_EQ(o.major_checkpoints, 50) << line;
        EXPECT_EQ(o.outliers.loss_zscore, 2) << line;
        EXPECT_EQ(o.outliers.norm_zscore, 3) << line;
    }
    EXPECT_EQ(parsed("-f0").matmul_precision, "highest");
    EXPECT_EQ(parsed("-f=0 --matmul-precision high").matmul_precision, "highest");
    EXPECT_EQ(parsed("-pn=4 -pr2 -pi=fs -pf=/x").store, "file:/x");
}

TEST(LlmcFlags, what_an_option_takes_is_no_flag) {
    EXPECT_EQ(parsed_words({"--prompt", "-nk 5", "-b", "2"}).prompt, "-nk 5");
    EXPECT_EQ(parsed_words({"-o", "-sl", "-nk", "4"}).output, "-sl");
    EXPECT_EQ(parsed("--tokenizer=-z -nk 4").tokenizer, "-z");
    EXPECT_EQ(parsed("-e d12 -opn").output, "pn");
    EXPECT_EQ(parsed("--outer-offload -nk 4").keep_checkpoints, 4);
}

TEST(LlmcFlags, those_that_change_nothing_are_named_in_one_note) {
    const Options o = parsed("-z 1 -w 1 -lg 10 -i x -ps 10.0.0.1");
    ASSERT_EQ(o.notes.size(), 1u);
    for (const char* flag : {"-z (", "-w (", "-lg (", "-ps ("}) {
        EXPECT_TRUE(contains(o.notes[0], flag));
    }
    EXPECT_EQ(o.notes[0].find('\n'), std::string::npos);
    EXPECT_TRUE(parsed("-i x -o x -n 9 -nk 5 -f 1 -pn 1 -pr 0 -pi mpi").notes.empty());
}

struct Refusal {
    const char *line, *reason, *advice;
};

TEST(LlmcFlags, what_cannot_be_is_refused_with_the_reason_and_what_to_do) {
    for (const Refusal& c :
         {Refusal{"-z 2", "-z 2: gradients and parameters are not sharded", "leave it out"},
          {"-z 3", "-z 3", "leave it out"},
          {"-z all", "-z is 'all'", "correct"},
          {"-z", "-z has no value", "give it one"},
          {"-w 0", "-w 0: the outer step needs fp32 weights", "leave it out"},
          {"-f 2", "-f must be 0", "correct"},
          {"-ge x", "--fuse-gelu", "--help"},
          {"-ge 3", "--fuse-gelu", "--help"},
          {"-nk", "--keep-checkpoints", "--help"},
          {"-nk five", "--keep-checkpoints", "--help"},
          {"-sl -1", "--skip-loss-zscore", "--help"},
          {"-pn 8", "but not which of them this is", "give -pr"},
          {"-pr 3", "how many there are", "give -pn"},
          {"-pn 8 -pr 8", "-pr 8 is out of range for -pn 8", "0 to 7"},
          {"-pn 0", "-pn is '0'", "correct"},
          {"-pn 2 -pr -1", "-pr is '-1'", "correct"},
          {"-pn 2 -pr 0 -pg 0", "-pg is '0'", "correct"},
          {"-pn 2 -pr 0 -pi tcp -ps 10.0.1.220", "-pi tcp", "--store redis://10.0.1.220:6379"},
          {"-pn 2 -pr 0 -pi udp", "-pi udp", "mpi, fs or tcp"},
          {"-pn 2 -pr 0 -pi fs", "-pi fs needs a folder", "give -pf DIR"},
          {"-pn 2 -pr 0 -pi fs -pf /x --store file:/y", "two places to meet", "give one"}}) {
        const std::string message = user_error([&] { parsed(c.line); });
        EXPECT_TRUE(contains(message, c.reason)) << c.line;
        EXPECT_TRUE(contains(message, c.advice)) << c.line;
        EXPECT_EQ(message.find('\n'), std::string::npos);
    }
}

// -----------------------------------------------------------------------------------------------------------
// Its scripts

// The environment of one process, as the launcher that a script calls would set it.
static Variables mpirun(const char* rank, const char* size) {
    return {{"OMPI_COMM_WORLD_RANK", rank}, {"OMPI_COMM_WORLD_SIZE", size}, {"PMIX_NAMESPACE", "job"}};
}
static Variables srun(const char* rank, const char* size) {
    return {{"SLURM_PROCID", rank}, {"SLURM_NTASKS", size}, {"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "0"}};
}

struct Script {
    const char* name;  // in llm.c's scripts/
    Variables started_by;
    const char* line;  // the program's arguments, with the shell's variables replaced
    long ranks, micro_steps, layers;
    const char* store = "";
};

// github.com/karpathy/llm.c. 1558M without the stray quote that some versions have at its end.
static const std::vector<Script> scripts = {
    {"run_gpt2_124M.sh", mpirun("3", "8"),
     "-i dev/data/fineweb10B/fineweb_train_*.bin -j dev/data/fineweb10B/fineweb_val_*.bin -o log_gpt2_124M "
     "-v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 "
     "-y 1 -e d12",
     8, 1, 12},
    {"run_gpt2_350M.sh", mpirun("3", "8"),
     "-i dev/data/fineweb100B/fineweb_train_*.bin -j dev/data/fineweb100B/fineweb_val_*.bin "
     "-o log_gpt2_350M -v 250 -s 100000 -g 144 -h 1 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0003 "
     "-q 0.0 -u 700 -n 2000 -x 60000 -y 1 -e d24 -pn 8 -pr 3",
     8, 1, 24},
    {"run_gpt2_774M.sh", mpirun("3", "8"),
     "-i dev/data/fineweb100B/fineweb_train_*.bin -j dev/data/fineweb100B/fineweb_val_*.bin "
     "-o log_gpt2_774M -v 250 -s 300000 -g 144 -h 1 -b 32 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.00025 "
     "-q 0.0 -u 700 -n 4000 -x 286102 -y 1 -e d36",
     8, 2, 36},
    {"run_gpt2_1558M.sh", mpirun("3", "8"),
     "-i dev/data/edu_fineweb100B/edu_fineweb_train_*.bin -j dev/data/edu_fineweb100B/edu_fineweb_val_*.bin "
     "-o log_gpt2_1558M -v 250 -s 300000 -g 384 -h 1 -b 16 -t 1024 -d 1048576 -r 0 -z 1 -c 0.1 -k cosine "
     "-l 0.0006 -q 0.1 -u 700 -n 2000 -x 32000 -ge 1 -y 1 -e d48",
     8, 8, 48},
    {"run_gpt3_125M.sh", mpirun("3", "8"),
     "-i dev/data/fineweb100B/fineweb_train_*.bin -j dev/data/fineweb100B/fineweb_val_*.bin "
     "-o log_gpt3_125M -v 250 -s 20000 -g 144 -h 1 -b 32 -t 2048 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.1 "
     "-u 700 -n 10000 -nk 5 -nm 50000 -ge 1 -sl 7.0 -sg 7.0 -y 1 -x 572204 -e gpt3:c768",
     8, 1, 12},
    {"multi_node/run_gpt2_124M_mpi.sh", mpirun("11", "16"),
     "-i /ephemeral/data/fineweb/bin_10B/fineweb_train_*.bin -j /ephemeral/data/fineweb/bin_10B/"
     "fineweb_val_*.bin -o /ephemeral/data/fineweb/log_gpt2_124M_multi -v 250 -s 20000 -g 144 -h 1 -b 64 "
     "-t 1024 -d 2097152 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.1 -u 700 -n 1000 -y 0 -e gpt2:12 -pi mpi",
     16, 2, 12},
    {"multi_node/run_gpt2_124M_fs.sbatch", srun("11", "16"),
     "-i /ephemeral/data/fineweb/bin_10B/fineweb_train_*.bin -j /ephemeral/data/fineweb/bin_10B/"
     "fineweb_val_*.bin -o /ephemeral/data/fineweb/log_gpt2_124M_multi -v 250 -s 20000 -g 144 -h 1 -b 64 "
     "-t 1024 -d 2097152 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -y 1 -e d12 -pn 16 -pr 11 -pg 8 "
     "-pf /ephemeral/data/fineweb/log_gpt2_124M_multi -pi fs",
     16, 2, 12, "file:/ephemeral/data/fineweb/log_gpt2_124M_multi"},
    {"run_gpt2_124M.sbatch (2024-06)", srun("11", "32"),
     "-i dev/data/fineweb100B/fineweb_train_*.bin -j dev/data/fineweb100B/fineweb_val_*.bin -o log124M "
     "-v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 2097152 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 "
     "-u 700 -n 10000 -y 1 -e d12 -pn 32 -pr 11 -pg 8 -pd /dfs/llm.c/log124M",
     32, 1, 12, "file:/dfs/llm.c/log124M"},
};

TEST(LlmcScripts, are_taken_as_they_stand) {
    for (const Script& script : scripts) {
        SCOPED_TRACE(script.name);
        const Options o = parsed(script.line, script.started_by);
        EXPECT_EQ(o.workers, 1);
        EXPECT_EQ(o.ranks, script.ranks);
        EXPECT_EQ(o.total_batch % o.micro_batch(), 0);
        EXPECT_EQ(o.micro_steps(), script.micro_steps);
        EXPECT_EQ(parse_descriptor(o.model).layers, script.layers);
        EXPECT_EQ(o.store, script.store);
        EXPECT_FALSE(o.world.has_value()) << "mpirun and srun say it themselves";
    }
}

static const char* tcp_script =
    "-i x -o log -v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 2097152 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 "
    "-u 700 -n 5000 -y 1 -e d12 -pn 16 -pr 11 -pg 8 -ps 10.0.1.220 -pi tcp";

TEST(LlmcScripts, the_one_that_meets_over_tcp_needs_a_store_and_takes_one_from_the_environment) {
    const std::string message = user_error([] { parsed(tcp_script, srun("11", "16")); });
    EXPECT_TRUE(contains(message, "--store redis://10.0.1.220:6379"));
    Variables variables = srun("11", "16");
    variables.emplace_back("DILOCO_STORE", "redis://10.0.1.220");
    EXPECT_EQ(parsed(tcp_script, variables).ranks, 16);
}

// -----------------------------------------------------------------------------------------------------------
// Ranks

TEST(Ranks, are_all_processes_of_the_one_worker_that_another_program_has_started) {
    const Variables torchrun = {{"RANK", "1"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}};
    const Variables mpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}};
    for (const Variables& variables : {mpirun("1", "8"), srun("1", "8"), torchrun, mpich}) {
        const Options o = parsed("-b 2 -t 16", variables);
        EXPECT_EQ(o.workers, 1);
        EXPECT_EQ(o.ranks, 8);
        EXPECT_EQ(o.diloco.outer_optimizer, "none");
        EXPECT_EQ(o.total_batch, 2 * 16 * 8);
        EXPECT_EQ(value_of(o, "ranks"), "8");
        EXPECT_TRUE(contains(o.toml, "\nranks=8\n"));
    }
}

TEST(Ranks, are_shared_out_where_workers_are_given) {
    EXPECT_EQ(parsed("--workers 4", mpirun("1", "8")).ranks, 2);
    EXPECT_EQ(parsed("--workers 2 --worker 0", mpirun("1", "8")).ranks, 8);
    EXPECT_EQ(parsed("--workers 3", mpirun("1", "8")).ranks, 1);  // launch says that they do not agree
    EXPECT_EQ(parsed("--workers 2 -pn 8 -pr 1").ranks, 4);
}

TEST(Ranks, are_as_given_where_they_are) {
    EXPECT_EQ(parsed("--ranks 2", mpirun("1", "8")).ranks, 2);
    EXPECT_EQ(parsed("", srun("0", "1")).ranks, 1);
    EXPECT_EQ(parsed("", {}).ranks, 1);
    TemporaryFolder folder;
    write_bytes(folder / "c.toml", "ranks=3\n");
    EXPECT_EQ(parsed("--config " + folder / "c.toml", mpirun("1", "8")).ranks, 3);
}

TEST(Ranks, of_a_process_of_the_program_s_own_launcher_are_its_launcher_s) {
    Variables variables = mpirun("0", "8");
    variables.insert(variables.end(), {{"DILOCO_WORKER", "1"}, {"DILOCO_RANK", "0"}});
    EXPECT_EQ(parsed("--workers 2", variables).ranks, 1);
}

TEST(World, is_what_pn_and_pr_say) {
    const Options o = parsed("-pn 16 -pr 11 -pg 4 -pi fs -pf /x");
    ASSERT_TRUE(o.world.has_value());
    EXPECT_EQ(o.world->number, 11);
    EXPECT_EQ(o.world->size, 16);
    EXPECT_EQ(o.world->local_rank, 3);
    EXPECT_EQ(parsed("-pn 16 -pr 11").world->local_rank, 3) << "eight on a machine, as in llm.c";
    EXPECT_FALSE(parsed("-pn 1 -pr 0 -pg 8").world.has_value());
}

TEST(World, that_mpirun_and_pn_do_not_agree_on_is_refused) {
    for (const char* line : {"-pn 4 -pr 1", "-pn 8 -pr 2", "-pr 2", "-pn 4"}) {
        const std::string message = user_error([&] { parsed(line, mpirun("1", "8")); });
        EXPECT_TRUE(contains(message, "mpirun that it is 1 of 8: leave them out")) << line;
    }
    EXPECT_EQ(parsed("-pn 8", mpirun("1", "8")).ranks, 8);
}

// -----------------------------------------------------------------------------------------------------------
// Models by name

TEST(Descriptors, have_llm_c_s_sizes) {
    struct Case {
        const char* name;
        int layers, channels, heads, positions;
    };
    for (const Case& c : {Case{"d12", 12, 768, 12, 0},
                          {"gpt2:d12", 12, 768, 12, 0},
                          {"gpt2:12", 12, 768, 12, 0},
                          {"gpt2:d48", 48, 1600, 25, 0},
                          {"d72", 72, 2880, 30, 0},
                          {"gpt3:c768", 12, 768, 12, 2048},
                          {"gpt3:c1536", 24, 1536, 16, 2048},
                          {"gpt3:c12288", 96, 12288, 96, 2048}}) {
        const GptShape shape = parse_descriptor(c.name);
        EXPECT_EQ(shape.layers, c.layers) << c.name;
        EXPECT_EQ(shape.channels, c.channels) << c.name;
        EXPECT_EQ(shape.heads, c.heads) << c.name;
        EXPECT_EQ(shape.max_seq_len, c.positions) << c.name;
    }
}

TEST(Descriptors, all_have_heads_that_divide_their_channels_and_are_in_the_help) {
    CLI::App app;
    Options options;
    add_options(app, option_table(options));
    for (const Descriptor& d : descriptors) {
        EXPECT_EQ(d.channels % d.heads, 0) << d.name;
        EXPECT_TRUE(contains(app.get_option("--model")->get_description(), d.name));
    }
}

TEST(Descriptors, that_are_unknown_are_refused_with_those_there_are) {
    for (const char* name :
         {"d7", "", "d", "gpt2:", "gpt2:gpt3:c768", "gpt3:768", "gpt3:c5140", "gpt3:d12"}) {
        const std::string message = user_error([&] { parse_descriptor(name); });
        EXPECT_TRUE(contains(message, "d6, d12, ")) << name;
        EXPECT_TRUE(contains(message, "gpt3:c768")) << name;
    }
}

// -----------------------------------------------------------------------------------------------------------
// Files by default

TEST(DefaultData, is_tinyshakespeare_and_the_user_is_told) {
    TemporaryFolder folder;
    const InFolder in(folder.name());
    for (const std::string place : {"dev/data/tinyshakespeare", "data/tinyshakespeare"}) {
        std::filesystem::create_directories(place);
        write_bytes(place + "/tiny_shakespeare_train.bin", "");
        write_bytes(place + "/tiny_shakespeare_val.bin", "");
        const Options o = parsed("");
        EXPECT_EQ(o.train_data, place + "/tiny_shakespeare_train.bin");
        EXPECT_EQ(o.validation_data, place + "/tiny_shakespeare_val.bin");
        EXPECT_EQ(value_of(o, "train-data"), o.train_data);
        ASSERT_EQ(o.notes.size(), 1u);
        EXPECT_TRUE(contains(o.notes[0], o.train_data));
    }
    EXPECT_EQ(parsed("-i mine.bin").validation_data, "");
    EXPECT_EQ(parsed("-j mine.bin").validation_data, "mine.bin");
    EXPECT_EQ(parsed("--generate").train_data, "");
}

TEST(DefaultData, is_none_where_it_is_not_there) {
    TemporaryFolder folder;
    const InFolder in(folder.name());
    EXPECT_EQ(parsed("").train_data, "");
    EXPECT_TRUE(parsed("").notes.empty());
}

TEST(HellaSwag, is_looked_for_here_and_in_llm_c_s_folder) {
    TemporaryFolder folder;
    const InFolder in(folder.name());
    EXPECT_EQ(parsed("-i x -h 1").hellaswag_data, "");
    for (const std::string place : {"dev/data/hellaswag", "data/hellaswag"}) {
        std::filesystem::create_directories(place);
        write_bytes(place + "/hellaswag_val.bin", "");
        EXPECT_EQ(parsed("-i x -h 1").hellaswag_data, place + "/hellaswag_val.bin");
    }
    EXPECT_EQ(parsed("-h 1 --hellaswag-data mine.bin").hellaswag_data, "mine.bin");
    EXPECT_EQ(parsed("-h 0").hellaswag_data, "");
}

// -----------------------------------------------------------------------------------------------------------
// config.toml

TEST(Config, of_each_script_brings_back_what_the_script_said) {
    TemporaryFolder folder;
    for (const Script& script : scripts) {
        SCOPED_TRACE(script.name);
        const Options first = parsed(script.line, script.started_by);
        write_bytes(folder / "config.toml", first.toml);
        const Options second = parsed("--config " + folder / "config.toml", script.started_by);
        EXPECT_EQ(second.resolved, first.resolved);
        EXPECT_EQ(second.toml, first.toml);
    }
}

TEST(Config, brings_a_prompt_back_or_the_prompt_is_refused) {
    TemporaryFolder folder;
    for (const char* prompt : {"Once upon a time", "it's", "say \"so\"", " [a, b] = 5; true", "\\n", "7"}) {
        write_bytes(folder / "config.toml", parsed_words({"--prompt", prompt}).toml);
        EXPECT_EQ(parsed("--config " + folder / "config.toml").prompt, prompt);
    }
    for (const char* prompt : {"two\nlines", "number # 1 # 2", "'a' and \"b\""}) {
        EXPECT_TRUE(contains(user_error([&] { parsed_words({"--prompt", prompt}); }), "config.toml"));
        EXPECT_EQ(parsed_words({"--generate", "--prompt", prompt}).prompt, prompt);
    }
}

// A resumed run shows these for options that the state of an earlier version lacks.
TEST(Config, has_the_default_of_each_option_by_its_name) {
    TemporaryFolder folder;
    const InFolder in(folder.name());
    const Options options = parsed("");
    ASSERT_GT(options.resolved.size(), 50u);
    for (const auto& [name, value] : options.resolved) {
        if (name == "outer-optimizer" || name == "total-batch") { continue; }  // depends on others
        if (name == "inner-steps") { continue; }                               // and so does H
        EXPECT_EQ(default_of(name), value) << name;
    }
    EXPECT_EQ(default_of("top-p"), "1");
}

TEST(Config, does_not_choose_between_training_and_writing) {
    TemporaryFolder folder;
    write_bytes(folder / "config.toml", "generate=true\n");
    user_error([&] { parsed("--config " + folder / "config.toml"); });
    EXPECT_EQ(parsed("--generate").toml.find("generate="), std::string::npos);
}

// Files of earlier versions set --master-weights, which had to be 1, and --fragment-offsets.
TEST(Config, that_sets_what_is_fixed_now_is_read) {
    TemporaryFolder folder;
    write_bytes(folder / "c.toml", "master-weights=1\nfragment-offsets=\"\"\nbatch=7\n");
    EXPECT_EQ(parsed("--config " + folder / "c.toml").batch, 7);
    for (const char* line : {"master-weights=0\n", "fragment-offsets=\"0,7,14\"\n"}) {
        write_bytes(folder / "c.toml", line);
        const std::string message = user_error([&] { parsed("--config " + folder / "c.toml"); });
        EXPECT_TRUE(contains(message, std::string(line).substr(0, 14))) << message;
    }
}

// -----------------------------------------------------------------------------------------------------------
// H

TEST(InnerSteps, suit_the_length_of_the_run) {
    EXPECT_EQ(usual_inner_steps(100000), 100);
    EXPECT_EQ(usual_inner_steps(99999), 30);
    EXPECT_EQ(usual_inner_steps(300), 30);
    EXPECT_EQ(usual_inner_steps(299), 29);
    EXPECT_EQ(usual_inner_steps(0), 10);
}

TEST(InnerSteps, are_chosen_if_they_are_not_given_and_the_user_is_told) {
    const Options o = parsed("--workers 2 -x 1000 -i x");
    EXPECT_EQ(o.diloco.inner_steps, 30);
    EXPECT_EQ(value_of(o, "inner-steps"), "30");
    EXPECT_TRUE(contains(o.toml, "inner-steps=30\n"));
    EXPECT_EQ(o.notes, std::vector<std::string>{
                           "-H is not given: H = 30 for 1000 steps (100 from 100000 steps on)"});
    EXPECT_EQ(parsed("--workers 2 -x 100000 -i x").diloco.inner_steps, 100);
    EXPECT_EQ(parsed("--workers 2 -x 180 -i x -H 0").diloco.inner_steps, 18);
    // The same on all workers, whatever is their own.
    EXPECT_EQ(parsed("--workers 2 -x 180 -i x --overlap 17").diloco.inner_steps, 18);
    const Options given = parsed("--workers 2 -x 80 -i x -H 7"), alone = parsed("-x 80 -i x");
    EXPECT_EQ(given.diloco.inner_steps, 7);
    EXPECT_TRUE(given.notes.empty());
    EXPECT_EQ(alone.diloco.inner_steps, 100);  // which nothing uses
    EXPECT_TRUE(alone.notes.empty());
}

TEST(InnerSteps, of_a_run_once_through_the_data_follow_from_its_tokens) {
    TemporaryFolder folder;
    for (const char* name : {"a.bin", "b.bin"}) {
        std::vector<int32_t> header(256);
        header[0] = tokens_magic, header[1] = 1, header[2] = 800;
        const std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
        write_bytes(folder / name, bytes + std::string(1600, '\0'));
    }
    const std::string line = "--workers 2 -t 4 -b 1 -i " + folder / "*.bin";
    EXPECT_EQ(parsed(line).diloco.inner_steps, 20);  // 200 steps
    EXPECT_EQ(parsed(line + " -d 8").diloco.inner_steps, 10);
    EXPECT_EQ(parsed(line + " --outer-weights tokens").diloco.inner_steps, 30);  // batches may differ
    EXPECT_TRUE(contains(user_error([&] { parsed("--workers 2 -i " + folder / "c.bin"); }), "no file matches"));
}

TEST(InnerSteps, of_a_run_that_is_resumed_stay) {
    TemporaryFolder folder;
    const std::string line = "--workers 2 -x 1000 -i x -o " + folder.name();
    EXPECT_EQ(parsed(line + " -y 1").diloco.inner_steps, 30);
    write_bytes(folder / "config.toml", parsed("--workers 2 -i x -H 50 -x 90").toml);
    const Options resumed = parsed(line + " -y 1");
    EXPECT_EQ(resumed.diloco.inner_steps, 50);
    EXPECT_EQ(resumed.notes[0], "-H is not given: H = 50, as in " + folder.name() + "/config.toml");
    EXPECT_EQ(parsed(line).diloco.inner_steps, 30);
    std::filesystem::create_directories(folder / "elastic/worker_1");  // where an elastic worker's lies
    write_bytes(folder / "elastic/worker_1/config.toml", parsed("--workers 2 -i x -H 40 -x 90").toml);
    EXPECT_EQ(parsed(line + "/elastic -y 1 --worker 1").diloco.inner_steps, 40);
    EXPECT_EQ(parsed(line + " -y 1 -H 20").diloco.inner_steps, 20);
    write_bytes(folder / "config.toml", parsed("-i x -x 90").toml);  // of one worker, which had no use for H
    EXPECT_EQ(parsed(line + " -y 1").diloco.inner_steps, 30);
}

// -----------------------------------------------------------------------------------------------------------
// Sampling

TEST(Sampling, options_have_limits) {
    const Options o = parsed("--temperature 0 --top-k 40 --top-p 0.9");
    EXPECT_EQ(o.sampling.temperature, 0);
    EXPECT_EQ(o.sampling.top_k, 40);
    EXPECT_EQ(o.sampling.top_p, 0.9f);
    for (const char* line : {"--temperature -1", "--top-k -1", "--top-p 0", "--top-p 1.1", "--top-p nan"}) {
        user_error([&] { parsed(line); });
    }
}

// -----------------------------------------------------------------------------------------------------------
// The table

TEST(OptionTable, a_flag_is_saved_as_true_or_false_however_it_is_given) {
    for (const char* line : {"--feeds-back", "--feeds-back=1", "--feeds-back=on", "--feeds-back=true"}) {
        bool feeds_back = false;
        OptionTable table;
        add_section(table, "New", true, {{"--feeds-back", &feeds_back, "Add what was lost", Scope::run}});
        CLI::App app;
        add_options(app, table);
        EXPECT_EQ(saved_values(app, table), OptionValues({{"feeds-back", "false"}}));
        app.parse(line);
        EXPECT_EQ(saved_values(app, table), OptionValues({{"feeds-back", "true"}})) << line;
        app.parse("--feeds-back=0");
        EXPECT_EQ(saved_values(app, table), OptionValues({{"feeds-back", "false"}}));
    }
}

TEST(OptionTable, an_option_is_a_field_and_a_row) {
    long patience = 3;               // the field
    OptionTable table;
    add_section(table, "New", true,  // and the row
                {{"-P,--patience", &patience, "Steps to wait", Scope::run, at_least_1}});
    CLI::App app;
    add_options(app, table);
    EXPECT_TRUE(contains(app.help(), "-P,--patience INT:at least 1=3"));
    EXPECT_TRUE(contains(app.help(), "Steps to wait"));
    testing::internal::CaptureStdout();
    print_options_table(app);
    const std::string markdown = testing::internal::GetCapturedStdout();
    EXPECT_TRUE(contains(markdown, "| `-P` `--patience` | 3 | Steps to wait |"));
    EXPECT_EQ(saved_values(app, table), OptionValues({{"patience", "3"}}));

    app.parse("-P 5");
    EXPECT_EQ(patience, 5);
    EXPECT_TRUE(contains(app.config_to_str(true, true), "\npatience=5\n"));
    EXPECT_EQ(saved_values(app, table), OptionValues({{"patience", "5"}}));
    EXPECT_EQ(values_of(table, Scope::run), OptionValues({{"--patience", "5"}}));
    EXPECT_THROW(app.parse("-P 0"), CLI::ValidationError);
    std::istringstream config("patience = 7");
    app.clear();
    app.parse_from_stream(config);
    EXPECT_EQ(patience, 7);
}

TEST(OptionTable, processes_compare_the_rows_of_a_scope_that_the_run_uses) {
    int of_run = 1, of_lockstep = 2, of_worker = 3, unused = 4;
    OptionTable table;
    add_section(table, "Used", true,
                {{"--run", &of_run, "", Scope::run},
                 {"--lockstep", &of_lockstep, "", Scope::lockstep},
                 {"--worker", &of_worker, "", Scope::worker}});
    add_section(table, "Unused", false, {{"--unused", &unused, "", Scope::run}});
    EXPECT_EQ(values_of(table, Scope::run), OptionValues({{"--run", "1"}}));
    EXPECT_EQ(values_of(table, Scope::lockstep), OptionValues({{"--lockstep", "2"}}));
}

TEST(OptionTable, values_are_written_so_that_different_ones_differ) {
    bool flag = true;
    long steps = 1048576001;
    uint64_t seed = ~0ull;
    float rate = 0.1f, next_rate = std::nextafter(rate, 1.0f);
    double seconds = 1e-8;
    std::string word = "a b";
    OptionTable table;
    add_section(table, "All types", true,
                {{"--flag", &flag, ""}, {"--steps", &steps, ""}, {"--seed", &seed, ""}, {"--rate", &rate, ""},
                 {"--next-rate", &next_rate, ""}, {"--seconds", &seconds, ""}, {"--word", &word, ""}});
    const OptionValues values = values_of(table);
    EXPECT_EQ(values[0].second, "true");
    EXPECT_EQ(values[1].second, "1048576001");
    EXPECT_EQ(values[2].second, "18446744073709551615");
    EXPECT_NE(values[3].second, values[4].second);
    EXPECT_EQ(values[5].second, "1e-08");
    EXPECT_EQ(values[6].second, "a b");
}

TEST(OptionTable, each_option_has_one_row_and_each_row_a_long_name_and_a_help) {
    Options options;
    std::set<std::string> names;
    for (const OptionRow& row : option_table(options)) {
        EXPECT_EQ(row.name().rfind("--", 0), 0u) << row.names;
        EXPECT_FALSE(row.help.empty()) << row.names;
        EXPECT_TRUE(names.insert(row.name()).second) << row.names;
    }
    EXPECT_GT(names.size(), 60u);
}

// -----------------------------------------------------------------------------------------------------------
// Checks

struct Mistake {
    const char *line, *reason;
};

TEST(OptionChecks, combinations_that_make_no_run_are_refused) {
    const std::string good = "-i x -b 2 -t 8 ", elastic = good + "--workers 2 -H 9 --outer-transport store ";
    EXPECT_NO_THROW(check_options(parsed(good)));
    EXPECT_NO_THROW(check_options(parsed(elastic + "--restart 3 --join-moments --max-lag 7")));
    for (const Mistake& c : {Mistake{"-d 17", "-d 17 tokens"},
                             {"-y 1", "-y 1 resumes"},
                             {"-n 5", "-n 5 writes"},
                             {"-n 5 -o out --workers 2 -H 9 --overlap 5", "-n 5 must be larger than the 5 steps"},
                             {"-h 1 --hellaswag-data x -v 0", "-v 0 has none"},
                             {"-sl 12", "-sl and -sg of 12"},
                             {"--grace 3", "--grace is for elastic workers"},
                             {"--restart 1 --retain 5", "--restart and --retain are for elastic workers"}}) {
        const std::string message = user_error([&] { check_options(parsed(good + c.line)); });
        EXPECT_TRUE(contains(message, c.reason)) << c.line << ": " << message;
    }
    for (const Mistake& c : {Mistake{"--outer-optimizer none", "no outer optimizer"},
                             {"--outer-exchange all_to_all", "lock-step"},
                             {"--min-workers 3", "more than the 2 workers"},
                             {"--outer-weights tokens", "give -x"}}) {
        const std::string message = user_error([&] { check_options(parsed(elastic + c.line)); });
        EXPECT_TRUE(contains(message, c.reason)) << c.line << ": " << message;
    }
}

}  // namespace test_options
