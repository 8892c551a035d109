"""The fuzzing harnesses (dev/break/fuzz): each finds nothing in a few seconds, and each finds a bug that is planted
for it. `make fuzz` runs them for longer. Without a clang with libFuzzer these tests are skipped."""

import os
import re
import shutil
import subprocess

import pytest

from conftest import ROOT

pytestmark = pytest.mark.long  # the harnesses take minutes to build

HARNESSES = sorted(path.stem.removeprefix("fuzz_") for path in (ROOT / "dev" / "break" / "fuzz").glob("fuzz_*.cpp"))

# For each harness: a header, a part of it, what replaces that part; words of the report.
PLANTED = {
    "config": (
        "llmc/run/options.h",
        "throw UserError(in_one_line(e.what())",
        "throw UserError(std::string(e.what())",
        "a message has no control characters",
    ),
    "done": ("llmc/checkpoint/state_file.h", "who.step != step || ", "", "the run is possible"),
    "encoder": (
        "llmc/text/byte_pair_encoder.h",
        "if (found != numbers.end()) { return found->second; }",
        "return found->second;",
        "null pointer|SEGV",
    ),
    "eval_set": ("llmc/text/eval_set.h", "count > left()", "count > 10000", "heap-buffer-overflow"),
    "model": ("llmc/checkpoint/model_file.h", "        check_size();\n", "", "out-of-memory|a file has at least"),
    "payload": (
        "streaming/exchange.h",
        'same("sender", header.worker, expected.worker);',
        "",
        "in the workers' order",
    ),
    "resume": ("llmc/checkpoint/resume.h", "int(i))).verify();", "int(i))).identity();", "whole and of the run"),
    "state": ("llmc/checkpoint/state_file.h", "who.worker < who.workers && ", "", "the worker belongs to the run"),
    "store": ("llmc/run/value_file.h", "digits.size() < 2 || !are_hex", "digits.size() < 2", "std::invalid_argument"),
    "tokenizer": ("llmc/text/tokenizer.h", " || eot >= vocab_size", "", "the end of text is a token"),
    "tokens": ("llmc/text/dataloader.h", "if (largest < vocab_size) { return; }", "return;", "is a token"),
}


def fuzz(name, seconds, tmp_path, *words):
    """Runs make fuzz-NAME, independently of a make that runs the tests. The seed is fixed, so that the same sources
    give the same inputs. The time limit for an input allows for a loaded machine."""
    environment = {key: value for key, value in os.environ.items() if not re.match("MAKE|MFLAGS", key)}
    command = ["make", "--no-print-directory", f"fuzz-{name}", f"SECONDS={seconds}", "FUZZ_TIMEOUT=60"]
    command += ["FUZZ_OPTIONS=-seed=1", f"FUZZ_CORPUS={tmp_path}/corpus", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module", autouse=True)
def needs_clang(tmp_path_factory):
    source = tmp_path_factory.mktemp("clang") / "empty.cpp"
    source.write_text('extern "C" int LLVMFuzzerTestOneInput() { return 0; }')
    clang, program = os.environ.get("CLANG", "clang++"), source.with_suffix("")
    command = [clang, "-fsanitize=fuzzer,address", source, "-o", program]
    if not shutil.which(clang) or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip(f"there is no {clang} with libFuzzer here: the parsers are not fuzzed")


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_finds_nothing_in_a_few_seconds(name, tmp_path):
    """... or in half a minute, which a busy machine may need to get past the seeds."""
    for seconds in (3, 30):
        result = fuzz(name, seconds, tmp_path / str(seconds))
        assert result.returncode == 0, f"{result.stdout[-8000:]}\n{result.stderr}"
        inputs = re.search(rf"fuzz_{name}: nothing found; inputs: (\d+)", result.stdout)
        seeds = re.search(r"^(\d+) seeds", result.stdout, re.MULTILINE)
        assert inputs and seeds and int(seeds[1]) > 0, result.stdout
        if int(inputs[1]) > int(seeds[1]):
            return
    pytest.fail(result.stdout)


# `make test` runs one of these, to show that a harness that finds nothing does look.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "tokenizer" else [pytest.mark.long]) for name in HARNESSES],
)
def test_a_planted_bug_is_found(name, tmp_path):
    path, text, replacement, told = PLANTED[name]
    for folder in ("llmc", "streaming"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    source = (tmp_path / path).read_text()
    assert source.count(text) == 1, f"{path} has changed: plant another bug"
    (tmp_path / path).write_text(source.replace(text, replacement))

    # The run ends when the bug is found: within seconds, unless the machine is slow.
    result = fuzz(name, 300, tmp_path, f"FUZZ_SOURCES={tmp_path}", f"FUZZ_BUILD={tmp_path}/build")
    assert result.returncode != 0 and "has found a bug" in result.stderr, f"{result.stdout}\n{result.stderr}"
    assert re.search(told, (tmp_path / "build" / f"{name}.log").read_text())
    assert list((tmp_path / "build").glob(f"found-{name}-*")), "the input is kept"


def test_without_clang_make_fuzz_says_so(tmp_path):
    result = fuzz("tokenizer", 1, tmp_path, "CLANG=no-such-clang", f"FUZZ_BUILD={tmp_path}/build")
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert result.returncode == 2 and len(lines) == 1, result.stderr
    assert lines[0].startswith("error: there is no no-such-clang with libFuzzer here: install clang")
