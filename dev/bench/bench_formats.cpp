// The errors of the wire's formats on deltas, and their speed.
//
//     bench_formats [BEFORE.bin AFTER.bin]
//
// The first table is of values that are quantized and decoded again: from a normal distribution, from a
// Laplace distribution, and the differences of two model files, which like an outer gradient are inner steps
// apart.
//
//     error  mean over blocks of 128 values of  sum (decoded - value)^2 / sum value^2
//     bias   sum (|decoded| - |value|) / sum |value|      0 on average with stochastic rounding
//
// The second table has the rate in gigabytes per second of one core's time, and its ratio to memcpy's in the
// same run. Bytes of all arrays count, read or written: 8 per value for memcpy, 8 and the payload to quantize
// (16 with a residual), 4 and two workers' payloads for the mean. Arrays are larger than caches. The
// functions take turns, so that a change of clock or load affects all of them, and rates are medians.
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "dev/test/one_part.h"
#include "llmc/buffer.h"
#include "llmc/checkpoint/model_file.h"
#include "streaming/quantize.h"

namespace {

const Rounding stochastic = stochastic_rounding(1, 0, 1, RandomUse::send_rounding);

struct Sample {
    std::string name;
    std::vector<float> values;
};

Sample normal_sample(long n) {
    Sample sample{"normal", {}};
    for (long i = 0; i < n; i++) {
        sample.values.push_back(standard_normal(1, RandomUse::sampling, uint64_t(i)));
    }
    return sample;
}

Sample laplace_sample(long n) {
    Sample sample{"Laplace", {}};
    for (long i = 0; i < n; i++) {
        const Philox4 bits = random_bits(2, RandomUse::sampling, uint64_t(i));
        const float magnitude = -std::log(1 - uniform(bits.v[0]));
        sample.values.push_back(bits.v[1] % 2 == 0 ? magnitude : -magnitude);
    }
    return sample;
}

// The difference of two model files, in the order in which blocks are sent.
Sample recorded_sample(const std::string& before, const std::string& after) {
    const Layout layout = gpt_layout(read_model_shape(before), 1, 3);
    Sample sample{"recorded", read_model(before, layout)};
    const std::vector<float> local = read_model(after, layout);
    for (size_t i = 0; i < local.size(); i++) { sample.values[i] = subtract_rn(sample.values[i], local[i]); }
    return sample;
}

struct Loss {
    double error, bias;
};

Loss loss(const std::vector<float>& values, const std::vector<float>& decoded) {
    double ratios = 0, blocks = 0, grown = 0, magnitudes = 0;
    for (size_t block = 0; block < values.size(); block += quantization_block) {
        double squares = 0, lost_squares = 0;
        for (size_t i = block; i < block + quantization_block; i++) {
            squares += double(values[i]) * double(values[i]);
            lost_squares += std::pow(double(decoded[i]) - double(values[i]), 2);
            magnitudes += std::fabs(double(values[i]));
            grown += std::fabs(double(decoded[i])) - std::fabs(double(values[i]));
        }
        if (squares > 0) {  // skips padding and values that were not trained
            ratios += lost_squares / squares;
            blocks++;
        }
    }
    return {ratios / blocks, grown / magnitudes};
}

Loss measure_loss(const Sample& sample, Format format, const Rounding& rounding) {
    const long n = long(sample.values.size());
    Stream stream;
    Buffer<uint8_t> payload(long(payload_bytes(format, n)));
    std::vector<float> decoded(sample.values.size());
    device::quantize(payload, format, rounding, n, 0, {sample.values.data()}, n, stream);
    device::dequantize_mean(decoded.data(), payload, 0, 1, format, n, stream);
    return loss(sample.values, decoded);
}

void print_losses(const std::vector<Sample>& samples) {
    printf("%21s", "");
    for (const Sample& sample : samples) { printf("  %20s", sample.name.c_str()); }
    printf("\nformat    rounding   ");
    for (size_t i = 0; i < samples.size(); i++) { printf("  %10s %9s", "error %", "bias %"); }
    printf("\n");
    for (Format format : all_formats) {
        for (const Rounding& rounding : {Rounding(), stochastic}) {
            printf("%-9s %-11s", name_of(format).c_str(), rounding.stochastic ? "stochastic" : "nearest");
            for (const Sample& sample : samples) {
                const Loss lost = measure_loss(sample, format, rounding);
                printf("  %10.2g %+9.1g", 100 * lost.error, 100 * lost.bias);
            }
            printf("\n");
        }
    }
}

// A function that is timed.
struct Work {
    std::function<void()> run;
    double bytes;
    std::vector<double> seconds;

    double rate() {  // bytes per second
        std::sort(seconds.begin(), seconds.end());
        return bytes / seconds[seconds.size() / 2];
    }
};

// The processor time of this thread: unlike clock time, it excludes other processes' turns on a shared
// machine.
double processor_seconds() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

void take_turns(std::vector<Work>& all, int rounds) {
    for (int round = 0; round <= rounds; round++) {
        for (Work& work : all) {
            const double start = processor_seconds();
            work.run();
            const bool warm = round > 0;  // the first round touches memory
            if (warm) { work.seconds.push_back(processor_seconds() - start); }
        }
    }
}

const int workers = 2;

// Adds one format's functions: quantization to nearest, with error feedback and stochastic, and the mean over
// two workers.
void add_works(std::vector<Work>& all, Format format, Buffer<float>& global, Buffer<float>& local,
               Buffer<float>& out, Buffer<uint8_t>& payloads, Stream& stream) {
    const long n = global.count();
    const size_t bytes = payload_bytes(format, n);
    auto quantize = [&, format, n](Rounding rounding, Buffer<float>* residual) {
        return [&, format, n, rounding, residual] {
            const Source source{global, local, residual == nullptr ? nullptr : residual->data()};
            device::quantize(payloads, format, rounding, n, 0, source, n, stream);
        };
    };
    all.push_back({quantize(Rounding(), nullptr), 8.0 * double(n) + double(bytes), {}});
    all.push_back({quantize(Rounding(), &out), 16.0 * double(n) + double(bytes), {}});
    all.push_back({quantize(stochastic, nullptr), 8.0 * double(n) + double(bytes), {}});
    all.push_back({[&, format, n, bytes] {
                       device::dequantize_mean(out, payloads, bytes, workers, format, n, stream);
                   },
                   4.0 * double(n) + workers * double(bytes),
                   {}});
}

void print_rates(long n, int rounds) {
    Stream stream;
    Buffer<float> global(n), local(n), out(n);
    for (long i = 0; i < n; i++) {
        global[i] = standard_normal(1, RandomUse::sampling, uint64_t(i) % 65536);
        local[i] = 0.9f * standard_normal(2, RandomUse::sampling, uint64_t(i) % 65537);
    }
    std::vector<Buffer<uint8_t>> payloads;
    for (Format format : all_formats) { payloads.emplace_back(long(workers * payload_bytes(format, n))); }
    std::vector<Work> all;
    const size_t bytes = size_t(n) * sizeof(float);
    all.push_back({[&] { memcpy(out.data(), global.data(), bytes); }, 2.0 * double(bytes), {}});
    for (size_t i = 0; i < payloads.size(); i++) {
        add_works(all, all_formats[i], global, local, out, payloads[i], stream);
    }
    take_turns(all, rounds);

    const double copy = all[0].rate();
    printf("memcpy    %.1f GB/s\n\n%-9s %18s %18s %18s %18s\n", copy / 1e9, "", "quantize nearest",
           "with residual", "stochastic", "mean over 2");
    printf("format   ");
    for (int i = 0; i < 4; i++) { printf(" %9s %8s", "GB/s", "share"); }
    double least = INFINITY;
    for (size_t i = 0; i < payloads.size(); i++) {
        printf("\n%-9s", name_of(all_formats[i]).c_str());
        for (size_t k = 0; k < 4; k++) {
            const double rate = all[1 + 4 * i + k].rate();
            printf(" %9.1f %8.2f", rate / 1e9, rate / copy);
            if (k == 0 || k == 3) { least = std::min(least, rate / copy); }
        }
    }
    printf("\n\nleast share of memcpy, to nearest and of the mean: %.2f\n", least);
}

int run(int count, char** arguments) {
    if (count != 1 && count != 3) {
        throw UserError("deltas are the difference of two model files: give BEFORE.bin AFTER.bin of one run");
    }
    omp_set_num_threads(1);
    const long n = 1 << 20;
    std::vector<Sample> samples = {normal_sample(n), laplace_sample(n)};
    if (count == 3) { samples.push_back(recorded_sample(arguments[1], arguments[2])); }
    print_losses(samples);
    printf("\n");
    print_rates(1 << 24, 9);
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    try {
        return run(count, arguments);
    } catch (const UserError& error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 2;
    }
}
