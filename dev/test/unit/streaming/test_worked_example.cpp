// The example of streaming/README.md: two workers and one fragment of one block, with the numbers that the
// page shows. What it starts from is read from the page and goes through the trainer's own state machine;
// what comes out must be what the page says, in all the digits that it has. Workers are threads. And the
// bytes that the page names for GPT-2 124M, by the trainer's plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>

#include "dev/test/one_part.h"
#include "dev/test/unit/local_comm.h"
#include "llmc/run/report.h"
#include "streaming/diloco.h"

namespace test_worked_example {

using Rows = std::map<std::string, std::vector<double>>;

const char* const page_path = "streaming/README.md";
const double shown = 0.0000055;  // half of the page's last digit, and an fp32's rounding

// The rows of the page's block of numbers, by name: "local 0   0.25000   0.30000 ...".
Rows read_example() {
    std::ifstream page(page_path);
    Rows rows;
    std::string line;
    while (std::getline(page, line)) {
        const size_t numbers = line.find_first_of("-0123456789", std::min(line.size(), size_t(30)));
        if (line.rfind("    ", 0) != 0 || numbers == std::string::npos) { continue; }
        std::istringstream values(line.substr(numbers));
        std::vector<double> row;
        for (double value; values >> value;) { row.push_back(value); }
        const std::string name = line.substr(4, line.find("  ", 4) - 4);
        if (values.eof() && !row.empty()) { rows[name] = row; }
    }
    return rows;
}

// Its words, with one space between them.
std::string page_text() {
    std::ifstream page(page_path);
    std::string text;
    for (std::string word; page >> word;) { text += word + " "; }
    return text;
}

// Most and mean of what a worker sends in a step, in MB: GPT-2 124M, two workers, H = 100.
std::pair<double, double> megabytes(Format format, int fragment_layers) {
    DilocoOptions options;
    options.inner_steps = 100;
    options.outer_format = name_of(format);
    const Layout layout = gpt_layout(GptShape(), 1, fragment_layers);
    const std::vector<Fragment> fragments =
        make_fragments(layout, fragment_layers, FragmentPattern::strided, options.inner_steps);
    const std::vector<size_t> sent =
        sent_in_period(fragments, sync_bytes(options, fragments, layout, 2), options.inner_steps);
    const double sum = double(std::accumulate(sent.begin(), sent.end(), size_t(0)));
    return {double(*std::max_element(sent.begin(), sent.end())) / 1e6, sum / 1e6 / double(sent.size())};
}

// Values 0 to 3 of a block; the others are zero.
std::vector<float> block_of(const std::vector<double>& row) {
    std::vector<float> block(128);
    std::copy(row.begin(), row.end(), block.begin());
    return block;
}

void expect_row(const std::vector<double>& row, const float* values, const std::string& name) {
    ASSERT_EQ(row.size(), 4u) << name;
    for (size_t i = 0; i < row.size(); i++) {
        EXPECT_NEAR(values[i], row[i], shown) << name << ", value " << i;
    }
}

// One fragment of one block: sent in step 4, merged in step 5, with the options' defaults otherwise.
struct Example {
    Example() {
        layout.layers = 1;
        layout.size = layout.values = 128;
        layout.blocks.push_back({"h.0", 0, 128, 128, 0, 0});
        options.inner_steps = 4;
    }
    Layout layout;
    DilocoOptions options;
};

TEST(WorkedExample, the_payloads_of_the_page_are_those_that_quantize_writes) {
    const Rows rows = read_example();
    ASSERT_EQ(rows.size(), 20u) << "rows of numbers in streaming/README.md";
    const std::vector<float> global = block_of(rows.at("global"));
    for (int worker = 0; worker < 2; worker++) {
        const std::string number = std::to_string(worker);
        const std::vector<float> local = block_of(rows.at("local " + number));
        Buffer<uint8_t> payload(144);
        Stream stream;
        cpu::write_header(payload, PayloadHeader(), stream);
        const Source delta{global.data(), local.data()};
        cpu::quantize(payload, Format::fp4_e2m1, Rounding(), 128, 0, delta, 128, stream);
        stream.synchronize();
        const uint16_t scale = uint16_t(payload[64] | payload[65] << 8);
        EXPECT_NEAR(Bf16::decode(scale), rows.at("scale " + number).at(0), shown);
        const std::string bytes = format("`%02x %02x`", payload[80], payload[81]);
        EXPECT_NE(page_text().find(bytes), std::string::npos) << bytes;
        for (int i = 0; i < 4; i++) {
            const uint32_t code = payload[80 + i / 2] >> (i % 2 * 4) & 15;
            EXPECT_EQ(double(E2M1::decode(code)), rows.at("code " + number).at(size_t(i))) << i;
        }
    }
}

TEST(WorkedExample, two_workers_come_to_the_numbers_of_the_page) {
    const Rows rows = read_example();
    const Example example;
    LocalGroup group(2);
    const std::vector<std::string> errors = run_members(2, [&](int worker) {
        LocalComm comm(group, worker);
        Stream main, outer(Stream::Kind::communicate);
        const int blocks = int(example.layout.blocks.size());
        Diloco diloco(example.options, make_fragments(1, blocks, 3, FragmentPattern::strided, 4),
                      example.layout, 0, comm, outer);
        std::vector<float> local = block_of(rows.at("global"));
        std::vector<floatX> params(128);
        diloco.start(local.data(), main);
        for (long step = 1; step <= 5; step++) {
            if (step == 4) { local = block_of(rows.at("local " + std::to_string(worker))); }
            if (step == 5 && worker == 0) { local = block_of(rows.at("local 0, a step later")); }
            const auto reports = diloco.after_inner_step(step, 0, local.data(), params.data(), main).syncs;
            main.synchronize();
            ASSERT_EQ(reports.size(), step == 5 ? 1u : 0u);
            if (step == 5) { EXPECT_EQ(reports[0].traffic.bytes_sent, 144u); }
        }
        expect_row(rows.at("new global"), diloco.global(main), "new global");
        if (worker == 0) { expect_row(rows.at("local 0, merged"), local.data(), "local 0, merged"); }
    });
    EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(WorkedExample, the_traffic_of_the_page_is_that_of_the_plan) {
    const auto [whole, average] = megabytes(Format::fp32, 0);
    const double peak = megabytes(Format::fp32, 3).first;
    const auto [least_peak, least] = megabytes(Format::fp4_e2m1, 3);
    for (const std::string& said :
         {format("DiLoCo in fp32 sends %.2f MB a step on average, but all %.0f MB at once", average, whole),
          format("Fragments lower the peak to %.1f MB, four bits to %.3g MB, and the average to %.3f MB",
                 peak, least_peak, least)}) {
        EXPECT_NE(page_text().find(said), std::string::npos) << said;
    }
}

}  // namespace test_worked_example
