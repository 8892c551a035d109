// Token shards, and the batches that two processes read from them, in order and shuffled.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/text/dataloader.h"

const int vocabulary = 1000;

void read_epoch(const std::string& path, int process, bool shuffle) {
    DataLoader loader(path, 1, 4, process, 2, vocabulary, 7, shuffle);
    require(loader.num_batches() > 0, "an accepted shard has a batch");
    for (long batch = 0; batch <= loader.num_batches(); batch++) {
        loader.next_batch();
        for (int i = 0; i < 4; i++) {
            require(loader.inputs()[i] >= 0 && loader.inputs()[i] < vocabulary, "an input is a token");
            require(loader.targets()[i] >= 0 && loader.targets()[i] < vocabulary, "a target is a token");
        }
    }
    const DataPosition position = loader.position();
    loader.seek(position);
    require(position.epoch >= 1, "the next epoch follows all batches");
}

// A shard, and the position in it where a resumed run continues: two numbers from a state file.
void fuzz(const std::string& bytes) {
    DataPosition position;
    if (bytes.size() < sizeof position) { return; }
    memcpy(&position, bytes.data(), sizeof position);
    const MemoryFile file(bytes.substr(sizeof position));
    read_epoch(file.path(), 0, false);
    read_epoch(file.path(), 1, true);
    DataLoader resumed(file.path(), 1, 4, 0, 2, vocabulary, 7, true);
    resumed.seek(position);
    resumed.next_batch();
}

std::string shard(const DataPosition& position, int count) {
    std::vector<uint16_t> tokens;
    for (int i = 0; i < count; i++) { tokens.push_back(uint16_t(i * 37 % vocabulary)); }
    return bytes_of(std::vector<DataPosition>{position}) + header_bytes({tokens_magic, 1, count}) +
           bytes_of(tokens);
}

std::vector<std::string> seeds() {
    return {shard({0, 0}, 9), shard({0, 2}, 40), shard({5, 17}, 100)};
}
