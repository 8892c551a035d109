// --config files: TOML with the options of the table.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/run/options.h"

Options read_options(const std::string& toml) {
    const MemoryFile file(toml);
    std::string words[] = {"train_gpt", "--config", file.path()};
    char* arguments[] = {&words[0][0], &words[1][0], &words[2][0], nullptr};
    return parse_options(3, arguments);
}

void fuzz(const std::string& bytes) {
    const Options options = read_options(bytes);
    require(options.batch >= 1 && options.seq_len >= 1, "a batch has tokens");
    require(options.workers >= 1 && options.workers <= 4096, "the number of workers is possible");
    require(options.ranks >= 1 && options.ranks <= 4096, "the number of ranks is possible");
    require(options.adamw.clip >= 0 && options.schedule.peak >= 0, "nothing is NaN or negative");
    require(options.sampling.temperature >= 0 && options.sampling.top_k >= 0, "sampling is possible");
    require(options.sampling.top_p > 0 && options.sampling.top_p <= 1, "top-p is a share of probability");
    require(options.adamw.beta2 < 1, "beta2 is within the table's limits");
    require(options.muon.learning_rate >= 0 && options.muon.momentum < 1, "Muon's options are within limits");
}

std::vector<std::string> seeds() {
    std::string few = "# a comment\nbatch = 8\nlr = 3e-4\nouter-dtype = \"fp8_e4m3\"\n";
    few += "train-data = 'data/x/x_train_*.bin'\nouter-error-feedback = true\nseed = 16\n";
    std::vector<std::string> all{few, read_options("").toml, ""};
    for (const auto& [name, value] : read_options("").resolved) {
        all.push_back(name + " = \"" + value + "\"\n");
    }
    return all;
}
