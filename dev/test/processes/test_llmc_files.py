"""llm.c's files: what it would write is read, and what is written is what it would write, byte for byte."""

import subprocess
import sys

import numpy
import pytest

from conftest import ROOT, TINY
from llmc_files import (
    mean_loss,
    model_bytes,
    random_model,
    token_bytes,
    tokenizer_bytes,
    validation_batches,
)

PREPARE = ROOT / "data" / "prepare.py"
EMULATED = ROOT / "build" / "plain" / "train_gpt"  # the CUDA trainer on a CPU: parameters in bf16
GIVEN = {"--layers": None, "--heads": None, "--channels": None, "--vocab-size": None}  # by the model file


def run_from(train, tmp_path, name, content, options):
    (tmp_path / f"{name}.bin").write_bytes(content)
    return train(name, {**GIVEN, "-e": tmp_path / f"{name}.bin", **options})


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize(
    "processes",
    [
        {},
        {"--ranks": 2},
        {"--workers": 2, "--ranks": 2, "-H": 4, "--fragment-layers": 1, "--outer-dtype": "fp32"},
    ],
    ids=["one process", "two ranks", "two workers of two ranks"],
)
def test_a_model_that_no_step_changed_is_what_llmc_would_write(train, tmp_path, version, processes):
    model = random_model(exact_in=version)
    run = run_from(train, tmp_path, "run", model_bytes(model, 2, version), {**processes, "-x": 4, "-l": 0})
    assert run.model() == model_bytes(model, 2, 3)


@pytest.mark.parametrize("version", [3, 5])
def test_the_gpu_trainers_model_is_in_fp32_whatever_it_computes_with(train, tmp_path, version):
    model = random_model(exact_in=version, L=1, C=64)
    (tmp_path / "m.bin").write_bytes(model_bytes(model, 1, version))
    options = {**GIVEN, "-e": tmp_path / "m.bin", "-x": 2, "-b": 1, "-l": 0}
    assert train("run", options, trainer=EMULATED).model() == model_bytes(model, 1, 3)


@pytest.mark.parametrize("version", [3, 5])
def test_a_model_file_means_here_what_it_means_to_llmc(train, tmp_path, tokens, version):
    model = random_model(seed=2)
    run = run_from(train, tmp_path, "run", model_bytes(model, 2, version), {"-x": 0, "-v": 1, "-m": 9})
    stream = numpy.fromfile(next(tokens.glob("x_val_*.bin")), "<u2", offset=1024)
    stream = stream[: 9 * TINY["-b"] * TINY["-t"] + 1]
    expected = mean_loss(model, 2, *validation_batches(stream, TINY["-b"], TINY["-t"]))
    assert [row["loss"] for row in run.lines("eval")] == [pytest.approx(expected, abs=2e-5)]


def test_tokens_are_decoded_as_llmcs_tokenizer_file_says(train, tmp_path):
    """A model whose next token depends on the position alone."""
    model = {name: numpy.zeros_like(values) for name, values in random_model(C=64).items()}
    said = [5, 0, 17, 62, 40, 41, 1]
    model["wte"][:] = numpy.eye(64)
    for position in range(16):
        model["wpe"][position] = 100 * model["wte"][said[position % len(said)]]
    for name in ("ln1w", "ln2w", "lnfw"):
        model[name][:] = 1
    vocabulary = [bytes([97 + i % 26]) * (1 + i % 3) for i in range(64)]
    vocabulary[40:42] = [b"\xc3", b"\xa9\n"]  # a character in two tokens
    vocabulary[63] = b"<|endoftext|>"
    (tmp_path / "t.bin").write_bytes(tokenizer_bytes(vocabulary, 63))
    options = {"-x": 1, "-l": 0, "-s": 1, "-g": 9, "--temperature": 0.01, "--tokenizer": tmp_path / "t.bin"}
    run = run_from(train, tmp_path, "run", model_bytes(model, 2, 3), options)
    text = b"".join(vocabulary[token] for token in (said * 2)[:9]).decode()
    assert f"---\n{text}\n---\n" in run.stdout


def test_prepared_files_are_what_llmc_would_write(tmp_path):
    documents = [b"In the beginning", "é, naïve – and\tso\n".encode() * 60]
    (tmp_path / "a.txt").write_bytes(b"<|endoftext|>".join(documents))
    command = [sys.executable, PREPARE, "--text", tmp_path / "a.txt", "--out", tmp_path / "out"]
    subprocess.run([*command, "--validation", "0", "--shard-tokens", "1000"], check=True)
    stream = [token for document in documents for token in (256, *document)]
    assert (tmp_path / "out" / "a_train_000000.bin").read_bytes() == token_bytes(stream[:1000])
    assert (tmp_path / "out" / "a_train_000001.bin").read_bytes() == token_bytes(stream[1000:])
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<|endoftext|>"]
    assert (tmp_path / "out" / "tokenizer.bin").read_bytes() == tokenizer_bytes(vocabulary, 256)
