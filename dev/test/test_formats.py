"""The number formats of streaming/formats.h against ml_dtypes, which is written by others."""

import pathlib
import subprocess

import numpy
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")

ROOT = pathlib.Path(__file__).resolve().parents[2]

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
    # Every upper half of an fp32 with lower halves around 0 and the middle: all boundaries of these formats, +-1 ulp.
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
