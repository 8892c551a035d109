// Merged syncs: what others have put into the store. A decider makes a mean of their payloads, the others
// read the mean, and all read the records that say what there is.
//
//     | what to try | format + 6 * (weights + 2 * many) | payloads, one after the other; a mean; a record |
#include <numeric>

#include "dev/break/fuzz/fuzz.h"
#include "streaming/elastic/merged_mean.h"

const Sync sync_of_all = {3, 0, 17, 3 * quantization_block};
const std::vector<Piece> pieces = {{0, 2 * quantization_block, 1000},
                                   {2 * quantization_block, quantization_block, 50000}};

// Nine compare each payload with the mean.
struct Setup {
    explicit Setup(uint8_t code) : workers(code / 12 % 2 == 0 ? 3 : 9) {
        wire.format = all_formats[code % 6];
        wire.token_weights = code / 6 % 2 == 1;
        wire.stochastic = true;
        std::iota(workers.begin(), workers.end(), 0);
    }
    PayloadLayout payload() const { return payload_layout(wire.format, sync_of_all.values); }

    WireOptions wire;
    std::vector<int> workers;
};

void try_mean(const Setup& setup, const std::string& mean) {
    const int count = int(setup.workers.size());
    const Headers headers = checked_mean_headers(mean, setup.workers, sync_of_all, setup.wire.format);
    require(headers.sent.size() == 1 && headers.sent[0].size() == setup.workers.size(), "of every worker");
    const double encoding[encoding_sums] = {1, 1};
    const OuterStatistics statistics = outer_statistics(encoding, headers.sums, count);
    require(statistics.cosines.size() + statistics.mean_cosines.size() == size_t(count == 3 ? 3 : 9),
            "cosines of all pairs, or of all with the mean");
    std::vector<float> values(size_t(sync_of_all.values));
    cpu::Stream here;
    cpu::dequantize_mean(values.data(), reinterpret_cast<const uint8_t*>(mean.data()), 0, 1,
                         merged_layout(setup.wire.format, sync_of_all.values, count), nullptr, here);
}

// What is made of any payloads can be read.
void try_payloads(const Setup& setup, const std::string& payloads) {
    const size_t bytes = setup.payload().bytes;
    std::vector<Contribution> contributions;
    for (int worker : setup.workers) {
        const size_t at = std::min(size_t(worker) * bytes, payloads.size());
        contributions.push_back({worker, payloads.substr(at, bytes)});
    }
    const std::string mean = encode_merged_mean(setup.wire, sync_of_all, pieces, contributions);
    try {
        try_mean(setup, mean);
    } catch (const RunError&) { require(false, "a mean that was made here is taken"); }
}

// What was read of any text is read again as the same.
template <class Record>
void try_record(const std::string& text) {
    const std::string once = Record::parse(text).text();
    require(Record::parse(once).text() == once, "a record is what is written of it");
}

void fuzz(const std::string& bytes) {
    if (bytes.size() < 2) { return; }
    const Setup setup{uint8_t(bytes[1])};
    const std::string rest = bytes.substr(2);
    switch (bytes[0] % 5) {
        case 0:
            return try_payloads(setup, rest);
        case 1:
            return try_mean(setup, rest);
        case 2:
            return try_record<LogEntry>(rest);
        case 3:
            return try_record<LogOffer>(rest);
        case 4:
            return try_record<LogLine>(rest);
    }
}

// Of an honest worker.
std::string payload_of(const Setup& setup, int worker) {
    const PayloadLayout layout = setup.payload();
    std::string payload(layout.bytes, '\0');
    uint8_t* bytes = reinterpret_cast<uint8_t*>(payload.data());
    std::vector<float> values;
    for (long i = 0; i < sync_of_all.values; i++) {
        values.push_back(float(i % 31 - 15) * float(worker + 1));
    }
    cpu::Stream here;
    cpu::write_header(bytes, make_header(sync_of_all, layout, 0, worker, 100), here);
    cpu::quantize(bytes, layout, Rounding(), 0, {values.data()}, sync_of_all.values, here);
    return payload;
}

std::vector<std::string> seeds() {
    using namespace std::string_literals;
    std::vector<std::string> all = {"\2\0"s + "5 1.2 2 0.1 10 11 12 1.2 10 13 14 1 2 0 250"s,
                                    "\3\0"s + "3.2 10 11"s, "\4\0"s + "1 2 3 4"s};
    for (uint8_t code = 0; code < 24; code++) {
        const Setup setup(code);
        std::string payloads;
        std::vector<Contribution> contributions;
        for (int worker : setup.workers) {
            contributions.push_back({worker, payload_of(setup, worker)});
            payloads += contributions.back().payload;
        }
        all.push_back("\0"s + char(code) + payloads);
        all.push_back("\1"s + char(code) +
                      encode_merged_mean(setup.wire, sync_of_all, pieces, contributions));
    }
    return all;
}
