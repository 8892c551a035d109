"""What others have written: the number formats against ml_dtypes, the random numbers against cuRAND; and the
same bits from a plain build and a vectorised one."""

import os
import pathlib
import subprocess

import numpy
import pytest

from conftest import ROOT

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: make setup installs it")


# E3M0 is not among ml_dtypes' formats: test_formats.cpp has it from its definition.
FORMATS = {
    "fp4_e2m1": (ml_dtypes.float4_e2m1fn, 4),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 8),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, 8),
    "bf16": (ml_dtypes.bfloat16, 16),
}

# argv: format, encode or decode. Words of 32 bits from stdin to stdout: bits of an fp32 to its code, or back.
PROGRAM = """
#include <cstdio>
#include "streaming/formats.h"
int main(int, char** argv) {
    const bool encode = std::string(argv[2]) == "encode";
    return with_format(parse_format(argv[1]), [=](auto f) {
        using F = decltype(f);
        uint32_t word;
        while (fread(&word, sizeof(word), 1, stdin) == 1) {
            word = encode ? F::encode(bits_to_float(word)) : float_to_bits(F::decode(word));
            fwrite(&word, sizeof(word), 1, stdout);
        }
        return 0;
    });
}
"""


@pytest.fixture(scope="module")
def convert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    (folder / "convert.cpp").write_text(PROGRAM)
    subprocess.run(["g++", "-std=c++17", "-O2", "-ffp-contract=off", f"-I{ROOT}", folder / "convert.cpp",
                    "-o", folder / "convert"], check=True)

    def run(name, direction, words):
        result = subprocess.run([folder / "convert", name, direction], input=words.astype("<u4").tobytes(),
                                capture_output=True, check=True)
        return numpy.frombuffer(result.stdout, dtype="<u4")

    return run


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_as_in_ml_dtypes(convert, name):
    dtype, bits = FORMATS[name]
    codes = numpy.arange(1 << bits, dtype=numpy.uint32)
    ours = convert(name, "decode", codes).view(numpy.float32)
    theirs = codes.astype(numpy.uint16 if bits == 16 else numpy.uint8).view(dtype).astype(numpy.float32)
    assert numpy.array_equal(numpy.isnan(ours), numpy.isnan(theirs))
    numbers = ~numpy.isnan(theirs)
    assert numpy.array_equal(ours[numbers].view(numpy.uint32), theirs[numbers].view(numpy.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_every_boundary_and_its_neighbours_encode_as_in_ml_dtypes(convert, name):
    dtype, bits = FORMATS[name]
    # Every upper half of an fp32, lower halves around 0 and the middle: all boundaries and their neighbours.
    upper = numpy.arange(1 << 16, dtype=numpy.uint32)[:, None] << 16
    lower = numpy.array([0, 1, 0x4000, 0x7fff, 0x8000, 0x8001, 0xffff], dtype=numpy.uint32)
    words = (upper | lower).ravel()
    values = words.view(numpy.float32)
    largest = numpy.float32(ml_dtypes.finfo(dtype).max)
    keep = ~numpy.isnan(values) if bits == 16 else numpy.abs(values) <= largest
    words, values = words[keep], values[keep]
    with numpy.errstate(over="ignore"):
        theirs = values.astype(dtype).view(numpy.uint16 if bits == 16 else numpy.uint8)
    assert len(words) > 200_000
    assert numpy.array_equal(convert(name, "encode", words), theirs.astype(numpy.uint32))


# Payload, mean and outer step of numbers made from a seed: one checksum for each number format.
BITS_PROGRAM = """
#include <cstdio>
#include <vector>
#include "llmc/random.h"
#include "streaming/outer.h"
#include "dev/test/one_part.h"
#include "streaming/quantize.h"
int main() {
    const long n = 128 * 65;
    std::vector<float> global(n), momentum(n), local(n), params(n), mean(n), residual(n);
    for (long i = 0; i < n; i++) {
        float scale = bits_to_float(uint32_t(1 + i / 128 * 3) << 23);  // from denormals upwards
        global[i] = scale * standard_normal(1, RandomUse::parameters, i);
        local[i] = scale * standard_normal(2, RandomUse::parameters, i);
    }
    Stream stream;
    for (int i = 0; i < 12; i++) {
        const Format format = all_formats[i / 2];
        const bool stochastic = i % 2 != 0;
        const size_t bytes = payload_bytes(format, n);
        Buffer<uint8_t> payloads(long(3 * bytes));
        for (int worker = 0; worker < 3; worker++) {
            uint8_t* payload = payloads + worker * bytes;
            device::write_header(payload, PayloadHeader(), stream);
            device::add_hash(payload, 0, local.data(), n, stream);
            const Rounding rounding =
                stochastic ? stochastic_rounding(9, worker, 4, RandomUse::send_rounding).at(13) : Rounding();
            const Source source{global.data(), local.data(), stochastic ? residual.data() : nullptr};
            device::quantize(payload, format, rounding, n, 0, source, n, stream);
            for (float& value : local) { value = fma_rn(value, 0.7f, 1e-20f); }
        }
        device::dequantize_mean(mean.data(), payloads, bytes, 3, format, n, stream);
        device::outer_step(global.data(), momentum.data(), local.data(), params.data(), mean.data(), n,
                           {0.4f, 0.9f, 0.3f}, stream);
        uint64_t sum = 0;
        for (size_t i = 0; i < 3 * bytes; i++) { sum = sum * 31 + payloads[i]; }
        for (long i = 0; i < n; i++) {
            for (float x : {mean[i], momentum[i], global[i], params[i], residual[i]}) {
                sum = sum * 31 + float_to_bits(x);
            }
        }
        printf("%s%d %016llx\\n", name_of(format).c_str(), stochastic, (unsigned long long)sum);
    }
}
"""


def test_payload_mean_and_outer_step_have_the_same_bits_on_cpus_with_and_without_vectors(tmp_path):
    (tmp_path / "bits.cpp").write_text(BITS_PROGRAM)
    common = ["g++", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
              "-fno-strict-aliasing", f"-I{ROOT}", tmp_path / "bits.cpp", "-pthread"]
    outputs = []
    for name, flags in {"plain": ["-O0"], "native": ["-O3", "-march=native", "-fopenmp"]}.items():
        subprocess.run([*common, *flags, "-o", tmp_path / name], check=True)
        outputs.append(subprocess.run([tmp_path / name], capture_output=True, check=True, text=True).stdout)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 24  # six formats, two roundings, a checksum each


CUDA = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))

# cuRAND's generator as it is in its header, which is for host code, too, beside ours. Prints both.
CURAND_PROGRAM = """
#include <cstdio>
#include <curand_kernel.h>
#include "streaming/rounding.h"
int main() {
    for (uint64_t seed : {uint64_t(0), uint64_t(42), uint64_t(0xfedcba9876543210)}) {
        for (int worker : {0, 3, (1 << 24) - 1}) {
            for (uint64_t sync : {0u, 17u, 0xffffffffu}) {
                for (RandomUse use : {RandomUse::send_rounding, RandomUse::owner_rounding}) {
                    for (uint64_t first : {uint64_t(0), uint64_t(1003), (uint64_t(1) << 34) - 6}) {
                        const Rounding ours = stochastic_rounding(seed, worker, sync, use);
                        curandStatePhilox4_32_10_t theirs;
                        curand_init(seed, uint64_t(ours.use) << 32 | ours.sync, first, &theirs);
                        for (uint64_t i = first; i < first + 12; i++) {
                            printf("%08x %08x\\n", random_quad(ours, i / 4).v[i % 4], curand(&theirs));
                        }
                    }
                }
            }
        }
    }
}
"""


@pytest.mark.skipif(not (CUDA / "include/curand_kernel.h").exists(),
                    reason="cuRAND's headers are not installed: CUDA_HOME says where they are")
def test_the_wires_random_numbers_are_those_of_curand(tmp_path):
    (tmp_path / "curand.cpp").write_text(CURAND_PROGRAM)
    subprocess.run(["g++", "-std=c++17", "-O1", f"-I{ROOT}", "-isystem", CUDA / "include",
                    tmp_path / "curand.cpp", "-o", tmp_path / "curand"], check=True)
    printed = subprocess.run([tmp_path / "curand"], capture_output=True, check=True, text=True).stdout
    pairs = [line.split() for line in printed.splitlines()]
    assert len(pairs) == 3 * 3 * 3 * 2 * 3 * 12
    assert all(ours == theirs for ours, theirs in pairs)
    assert len({ours for ours, _ in pairs}) == len(pairs)
