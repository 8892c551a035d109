"""HellaSwag in the loop, samples and --generate, against the model once more in NumPy."""

import os
import subprocess

import numpy
import pytest

from conftest import TRAINER
from llmc_files import header_bytes, mean_loss, model_bytes, random_model, tokenizer_bytes, validation_batches
from token_files import write_tokenizer

HEADS, POSITIONS, VOCABULARY = 2, 16, 64
# The shape is the model file's. A learning rate of 0: what is evaluated is what the file holds.
OF_FILE = {"--layers": None, "--heads": None, "--channels": None, "--vocab-size": None, "-l": 0, "-x": 1}


def eval_set(examples):
    """llm.c's file of {label, context, completions}."""
    rows = []
    for i, (label, context, completions) in enumerate(examples):
        words = [i, label, len(completions), len(context), *context]
        for completion in completions:
            words += [len(completion), *completion]
        rows.append(numpy.array([65535, 2 * (len(words) + 2), *words], "<u2").tobytes())
    return header_bytes(20240522, 1, len(rows), max(map(len, rows))) + b"".join(rows)


def random_examples(count, seed=3, most=8):
    random = numpy.random.default_rng(seed)

    def tokens(least, most):
        return random.integers(0, VOCABULARY, random.integers(least, most + 1)).tolist()

    return [(int(random.integers(4)), tokens(1, most), [tokens(1, most) for _ in range(4)]) for _ in range(count)]


def likeliest(tensors, context, completions):
    """The completion whose tokens have the lowest mean loss."""
    losses = []
    for completion in completions:
        row = numpy.array([context + completion])
        n = len(completion)
        # The mean over the last n positions, from the sums over all of them and over those before.
        inputs, targets = row[:, :-1], row[:, 1:]
        total = mean_loss(tensors, HEADS, inputs, targets) * targets.size
        before = targets.size - n
        if before > 0:
            total -= mean_loss(tensors, HEADS, inputs[:, :before], targets[:, :before]) * before
        losses.append(total / n)
    return int(numpy.argmin(losses))


@pytest.fixture
def model(tmp_path):
    tensors = random_model(V=VOCABULARY, T=POSITIONS)
    (tmp_path / "given.bin").write_bytes(model_bytes(tensors, HEADS, 3))
    return tensors


@pytest.mark.parametrize(
    "shape", [{"-b": 1}, {"-b": 3, "--ranks": 2}, {"-b": 8, "--workers": 2, "-H": 1, "--overlap": 0}]
)
def test_hellaswag_is_the_share_of_right_completions_that_are_likeliest(model, train, tmp_path, shape):
    examples = random_examples(21)
    (tmp_path / "hellaswag.bin").write_bytes(eval_set(examples))
    right = sum(likeliest(model, context, completions) == label for label, context, completions in examples)
    run = train("run", {**OF_FILE, "-e": tmp_path / "given.bin", "-h": 1, "-v": 1, "-j": None,
                        "--hellaswag-data": tmp_path / "hellaswag.bin", **shape})
    rows = run.lines("hellaswag")
    assert [(row["step"], row["examples"]) for row in rows] == [(1, 21)]
    assert rows[0]["accuracy"] == pytest.approx(right / 21, abs=1e-9)
    assert f"s:1 eval:{right / 21:.4f}" in (run.folder / "main.log").read_text()


def test_hellaswag_comes_with_every_validation_but_that_of_step_0(train, tmp_path):
    (tmp_path / "data" / "hellaswag").mkdir(parents=True)
    (tmp_path / "data" / "hellaswag" / "hellaswag_val.bin").write_bytes(eval_set(random_examples(5)))
    run = train("run", {"-h": 1, "-v": 4, "-x": 10})
    assert [row["step"] for row in run.lines("hellaswag")] == [4, 8, 10]
    assert [row["step"] for row in run.lines("eval")] == [0, 4, 8, 10]


def test_hellaswag_leaves_training_as_it_is(train, tmp_path):
    (tmp_path / "set.bin").write_bytes(eval_set(random_examples(9)))
    options = {"--workers": 2, "-H": 4, "--fragment-layers": 1, "-x": 12, "--overlap": 2, "-v": 2, "-m": 1}
    quiet = train("quiet", options)
    asked = train("asked", {**options, "-h": 1, "--hellaswag-data": tmp_path / "set.bin"})
    assert quiet.losses() == asked.losses() and quiet.losses(1) == asked.losses(1)
    assert quiet.model() == asked.model()


def continuation(tensors, tokens, count):
    """The likeliest tokens, one after another, with a window of all positions."""
    tokens = list(tokens)
    for _ in range(count):
        window = tokens[-POSITIONS:]
        losses = [mean_loss(tensors, HEADS, numpy.array([window]), numpy.array([window[1:] + [token]]))
                  for token in range(VOCABULARY)]
        tokens.append(int(numpy.argmin(losses)))
    return tokens[-count:]


def generate(tmp_path, options, status=0):
    words = [str(word) for option in options.items() for word in option if word is not True]
    result = subprocess.run([str(TRAINER), "--generate", *words], capture_output=True, text=True, cwd=tmp_path,
                            timeout=60)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout if status == 0 else result.stderr


def letter(token):
    return chr(33 + token)


@pytest.fixture
def letters(tmp_path):
    """A tokenizer of one letter a token; the last token is the end of text, which the model cannot tell."""
    write_tokenizer(tmp_path / "tokenizer.bin", VOCABULARY)


def test_generate_goes_on_with_a_prompt_as_the_model_does(model, letters, tmp_path):
    prompt = [5, 17, 40, 3]
    # Fewer than fill all positions, and more.
    expected = continuation(model, [VOCABULARY - 1] + prompt, 20)
    if VOCABULARY - 1 in expected:
        expected = expected[: expected.index(VOCABULARY - 1)]
    text = generate(tmp_path, {"-e": "given.bin", "--prompt": "".join(map(letter, prompt)), "--temperature": 0,
                               "-g": 20, "--matmul-precision": "highest"})
    assert text == "".join(map(letter, prompt + expected)) + "\n"


def test_generate_draws_the_same_text_for_the_same_seed(model, letters, tmp_path):
    options = {"-e": "given.bin", "-g": 30, "--matmul-precision": "highest"}
    first = generate(tmp_path, {**options, "--seed": 1})
    assert first == generate(tmp_path, {**options, "--seed": 1})
    assert first != generate(tmp_path, {**options, "--seed": 2})
    likeliest = generate(tmp_path, {**options, "--temperature": 0})
    assert generate(tmp_path, {**options, "--top-k": 1, "--seed": 1}) == likeliest
    assert generate(tmp_path, {**options, "--top-p": 1e-6, "--seed": 2}) == likeliest


def test_samples_in_the_loop_go_on_with_the_prompt(model, letters, train, tmp_path):
    options = {**OF_FILE, "-e": tmp_path / "given.bin", "--tokenizer": tmp_path / "tokenizer.bin", "-s": 1, "-g": 5,
               "--temperature": 0, "--prompt": letter(9) + letter(30)}
    expected = continuation(model, [VOCABULARY - 1, 9, 30], 5)
    shown = "".join(map(letter, [9, 30] + expected))
    assert f"---\n{shown}\n---" in train("run", options).stdout


@pytest.mark.parametrize("options, words", [
    ({"-e": "d12"}, ["--generate", "-e"]),
    ({"-e": "nowhere.bin"}, ["nowhere.bin"]),
    ({"-e": "given.bin", "--tokenizer": "none.bin"}, ["none.bin"]),
    ({"-e": "given.bin", "--prompt": "\u00e9"}, ["prompt"]),
    ({"-e": "given.bin", "--top-p": 0}, ["--top-p"]),
    ({"-e": "given.bin", "--top-k": -1}, ["--top-k"]),
])
def test_wrong_inputs_of_generate_are_one_line(model, letters, tmp_path, options, words):
    error = generate(tmp_path, options, status=2)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(word in error for word in words), error
    assert not os.path.exists(tmp_path / "log")


def test_llm_c_s_tokenizer_that_lies_here_is_taken_where_the_model_has_its_tokens(model, train, tmp_path):
    options = {"-s": 1, "-g": 3, "-x": 1}
    write_tokenizer(tmp_path / "gpt2_tokenizer.bin", VOCABULARY)
    assert "sample after step 1" in train("taken", options).stdout
    assert generate(tmp_path, {"-e": "given.bin", "-g": 3}).strip()
    write_tokenizer(tmp_path / "gpt2_tokenizer.bin", VOCABULARY + 1)
    assert "sample" not in train("passed_over", options).stdout
    of_file = {**OF_FILE, "-e": tmp_path / "given.bin"}
    assert "sample" not in train("of_file", {**options, **of_file}).stdout
    assert "--tokenizer" in generate(tmp_path, {"-e": "given.bin"}, status=2)


def test_without_its_tokenizer_generate_says_what_to_give(model, tmp_path):
    assert "--tokenizer" in generate(tmp_path, {"-e": "given.bin"}, status=2)


@pytest.mark.parametrize("content, words", [
    (None, ["hellaswag_val.bin", "data/hellaswag.py"]),
    (eval_set([(0, [1] * 10, [[2] * 9] * 4)]), ["19", "16"]),  # longer than the model's positions
    (eval_set([(0, [1], [[99]] * 4)]), ["99", "vocabulary"]),
])
def test_wrong_eval_sets_are_refused_before_anything_is_written(train, tmp_path, content, words):
    options = {"-h": 1, "-x": 4, "-v": 2}
    if content is not None:
        (tmp_path / "set.bin").write_bytes(content)
        options["--hellaswag-data"] = tmp_path / "set.bin"
    run = train("run", options, status=2)
    assert run.stderr.count("\n") == 1 and all(word in run.stderr for word in words), run.stderr
    assert not run.folder.exists()
