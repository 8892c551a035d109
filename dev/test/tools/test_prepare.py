"""data/prepare.py: every byte of the text arrives, in the formats of the trainer; nothing is half-done."""

import contextlib
import fcntl
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy
import pytest

from conftest import ROOT

PREPARE = ROOT / "data" / "prepare.py"
END = b"<|endoftext|>"


def prepare(*arguments, **environment):
    command = [sys.executable, str(PREPARE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment})


def made(*arguments, **environment):
    result = prepare(*arguments, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def failed(*arguments, **environment):
    """The one line of a user's mistake."""
    result = prepare(*arguments, **environment)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def read_shards(folder, part):
    """The tokens of all shards of a part, joined; the header of each is checked."""
    tokens = []
    for path in sorted(folder.glob(f"*_{part}_*.bin")):
        data = path.read_bytes()
        header = numpy.frombuffer(data[:1024], "<i4")
        tokens.append(numpy.frombuffer(data[1024:], "<u2"))
        assert [*header[:3]] == [20240520, 1, len(tokens[-1])] and not header[3:].any()
    return numpy.concatenate(tokens) if tokens else numpy.zeros(0, "<u2")


def read_vocabulary(path):
    data = path.read_bytes()
    header, at, vocabulary = numpy.frombuffer(data[:1024], "<i4"), 1024, []
    assert [*header[:2]] == [20240328, 2]
    while at < len(data):
        vocabulary.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    assert header[2] == len(vocabulary) and vocabulary[header[3]] == END
    return vocabulary


def decode(folder, part):
    vocabulary = read_vocabulary(folder / "tokenizer.bin")
    return b"".join(vocabulary[token] for token in read_shards(folder, part))


def documents(folder, part):
    text = decode(folder, part)
    assert text.startswith(END)
    return text.split(END)[1:]


def numbered_lines(count):
    return [f"{i}: the quick brown fox – número {i * i} – jumps\n" for i in range(count)]


def load_module():
    if str(PREPARE.parent) not in sys.path:
        sys.path.insert(0, str(PREPARE.parent))
    spec = importlib.util.spec_from_file_location("prepare", PREPARE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Some 300 kB of lines, each different, with characters of one to three bytes."""
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(numbered_lines(6000)), encoding="utf-8")
    return path


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_line_arrives_once_in_training_or_validation(text, tmp_path, tokenizer):
    made("--text", text, "--out", tmp_path, "--tokenizer", tokenizer, "--validation", 0.1)
    parts = {part: b"".join(documents(tmp_path, part)).decode().splitlines(True) for part in ("train", "val")}

    def number(line):
        return int(line.split(":")[0])

    assert sorted(parts["train"] + parts["val"], key=number) == numbered_lines(6000)
    assert all(lines == sorted(lines, key=number) for lines in parts.values())


def test_held_out_pieces_are_spread_evenly_over_the_text(text, tmp_path):
    made("--text", text, "--out", tmp_path, "--validation", 0.1)
    training, validation = len(decode(tmp_path, "train")), len(decode(tmp_path, "val"))
    assert 0.09 < validation / (training + validation) < 0.101
    pieces = documents(tmp_path, "val")
    middles = [int(piece.split(b":")[0]) / 6000 for piece in pieces]
    assert len(pieces) >= 14
    assert numpy.allclose(numpy.diff(middles), 1 / len(pieces), atol=0.5 / len(pieces))
    # Cut at ends of lines, and what follows a gap in training begins like a document.
    assert all(piece.endswith(b"jumps\n") for piece in pieces)
    assert abs(len(documents(tmp_path, "train")) - len(pieces)) <= 1


def test_documents_begin_with_the_end_of_text_token(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("one<|endoftext|>two\r\nlines<|endoftext|>")
    second.write_text("\ufeffthree, with a byte order mark", encoding="utf-8")
    made("--text", first, second, "--out", tmp_path / "out", "--validation", 0)
    assert [*filter(None, documents(tmp_path / "out", "train"))] == [b"one", b"two\nlines",
                                                                     b"three, with a byte order mark"]
    assert not [*(tmp_path / "out").glob("*_val_*")]


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    lines = tmp_path / "mine.jsonl"
    rows = [{"text": "one\r\nline\rends"}, {"id": 2, "text": "two<|endoftext|>halves"}, {"text": "caf\xe9 \ud800!"}]
    lines.write_text("\n".join([*map(json.dumps, rows), "", ""]))
    plain = tmp_path / "plain.txt"
    plain.write_text("plain")
    made("--text", lines, plain, "--out", tmp_path / "out", "--validation", 0)
    expected = ["one\nline\nends", "two", "halves", "caf\xe9 \ufffd!", "plain"]
    assert [*filter(None, documents(tmp_path / "out", "train"))] == [text.encode() for text in expected]
    for bad in ("{", "[1]", '{"txt": "x"}', '{"text": 3}', "null"):
        lines.write_text(json.dumps(rows[0]) + "\n" + bad + "\n")
        assert "mine.jsonl line 2 is not a JSON object whose field" in failed("--text", lines, "--out", tmp_path / "bad")
        assert not (tmp_path / "bad").exists()


def test_shards_hold_the_tokens_asked_for_and_the_last_one_takes_a_small_rest(text, tmp_path):
    made("--text", text, "--out", tmp_path / "one", "--validation", 0)
    whole = read_shards(tmp_path / "one", "train")
    tokens = len(whole)
    for shard, counts in ((tokens // 3, [tokens // 3] * 2 + [tokens // 3 + tokens % 3]),
                          (tokens * 10 // 25, [tokens * 10 // 25] * 2 + [tokens - 2 * (tokens * 10 // 25)]),
                          (tokens, [tokens])):
        folder = tmp_path / str(shard)
        made("--text", text, "--out", folder, "--validation", 0, "--shard-tokens", shard)
        sizes = [path.stat().st_size for path in sorted(folder.glob("lines_train_*.bin"))]
        assert sizes == [1024 + 2 * count for count in counts]
        assert (read_shards(folder, "train") == whole).all()


def test_bpe_is_the_same_every_time_and_in_its_two_files(text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    for out, parallel in ((tmp_path / "a", "true"), (tmp_path / "b", "false")):
        made("--text", text, "--out", out, "--tokenizer", "bpe:400", TOKENIZERS_PARALLELISM=parallel)
    names = sorted(path.name for path in (tmp_path / "a").iterdir() if path.name != "prepare.json")
    assert names == ["lines_train_000000.bin", "lines_val_000000.bin", "tokenizer.bin", "tokenizer.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    vocabulary = read_vocabulary(tmp_path / "a" / "tokenizer.bin")
    assert len(vocabulary) == 400 and vocabulary[399] == END and len(set(vocabulary)) == 400
    assert {bytes([value]) for value in range(256)} < set(vocabulary)
    peer = tokenizers.Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    line = "12: the quick brown fox – número"
    assert b"".join(vocabulary[token] for token in peer.encode(line).ids) == line.encode()
    assert peer.encode(END.decode()).ids == [399]


def test_gpt2_takes_its_vocabulary_from_tiktoken(text, tmp_path, monkeypatch):
    """With an encoding of tiktoken's own kind but bytes as its vocabulary: the real one is a download."""
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", special_tokens={END.decode(): 257},
                                 mergeable_ranks={**{bytes([i]): i for i in range(256)}, b"th": 256})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)
    module = load_module()
    module.run(module.parse_options(["--text", str(text), "--out", str(tmp_path), "--tokenizer", "gpt2",
                                     "--validation", "0"]))
    assert documents(tmp_path, "train") == [text.read_bytes()]
    assert (read_shards(tmp_path, "train") == 256).sum() == 6000  # "the", once a line


def test_gpt2_without_a_network_is_a_clear_error(text, tmp_path):
    pytest.importorskip("tiktoken")
    nowhere = "http://127.0.0.1:9"
    message = failed("--text", text, "--out", tmp_path / "out", "--tokenizer", "gpt2",
                     TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY=nowhere, https_proxy=nowhere)
    assert "GPT-2's vocabulary cannot be downloaded" in message and "TIKTOKEN_CACHE_DIR=DIR" in message
    assert not (tmp_path / "out").exists()


def test_output_of_the_same_settings_is_left_alone_and_any_other_is_made_again(text, tmp_path):
    arguments = ["--text", text, "--out", tmp_path / "out"]

    def times():
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}

    made(*arguments, "--shard-tokens", 100000)
    assert len(times()) == 7  # four shards, validation, tokenizer.bin, prepare.json
    before = times()
    assert "already there" in made(*arguments, "--shard-tokens", 100000)
    assert times() == before

    assert "already there" not in made(*arguments)  # other settings: the other old shards go
    assert sorted(times()) == ["lines_train_000000.bin", "lines_val_000000.bin", "prepare.json",
                               "tokenizer.bin"]
    before = (tmp_path / "out" / "lines_train_000000.bin").read_bytes()
    os.truncate(tmp_path / "out" / "lines_train_000000.bin", 2000)
    assert "already there" not in made(*arguments)
    assert (tmp_path / "out" / "lines_train_000000.bin").read_bytes() == before


def test_another_text_in_the_same_folder_replaces_the_first_one(text, tmp_path):
    """Two texts would share tokenizer.bin, and a trainer's pattern would take the shards of both."""
    other, out = tmp_path / "other.txt", tmp_path / "out"
    other.write_text("".join(numbered_lines(3000)), encoding="utf-8")
    made("--text", text, "--out", out, "--shard-tokens", 100000)
    listed = json.loads((out / "prepare.json").read_text())
    listed["files"]["../other.txt"] = 1  # no name in the folder: not ours to remove
    (out / "prepare.json").write_text(json.dumps(listed))
    (out / "lines_notes.bin").write_bytes(b"the user's own")
    made("--text", other, "--out", out)
    assert sorted(path.name for path in out.iterdir()) == ["lines_notes.bin", "other_train_000000.bin",
                                                           "other_val_000000.bin", "prepare.json",
                                                           "tokenizer.bin"]
    assert other.exists()


@pytest.mark.parametrize("name", ["wiki_train", "my_val_train", "train", "val"])
def test_no_name_makes_held_out_text_match_the_pattern_of_the_training_text(text, tmp_path, name):
    shutil.copy(text, tmp_path / f"{name}.txt")
    out = tmp_path / "out"
    made("--text", tmp_path / f"{name}.txt", "--out", out)
    named = name.replace("_", "-")
    assert [path.name for path in out.glob("*_train_*.bin")] == [f"{named}_train_000000.bin"]
    assert [path.name for path in out.glob("*_val_*.bin")] == [f"{named}_val_000000.bin"]


def test_a_run_that_was_killed_leaves_nothing_that_counts(text, tmp_path):
    out = tmp_path / "out"
    (out / ".part").mkdir(parents=True)
    (out / ".part" / "lines_train_000000.bin").write_bytes(b"half")
    (out / "notes.txt").write_text("the user's own")
    made("--text", text, "--out", out)
    assert sorted(path.name for path in out.iterdir()) == ["lines_train_000000.bin", "lines_val_000000.bin",
                                                           "notes.txt", "prepare.json", "tokenizer.bin"]


@pytest.mark.parametrize("at", range(6))
def test_a_run_that_is_killed_among_its_last_moves_is_gone_on_with(text, tmp_path, at, monkeypatch):
    """Files of the text before, of the new one, some of both: all are replaced, and counted last."""
    other, out, moves = tmp_path / "other.txt", tmp_path / "out", []
    other.write_text("".join(numbered_lines(500)), encoding="utf-8")
    made("--text", text, "--out", out)
    monkeypatch.syspath_prepend(str(PREPARE.parent))
    spec = importlib.util.spec_from_file_location("prepare_to_kill", PREPARE)
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    corpus, replace = sys.modules["corpus"], os.replace

    def killed(source, target):
        if pathlib.Path(target).parent == out:
            moves.append(target)
            if len(moves) > at:
                raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(corpus.os, "replace", killed)
    arguments = ["--text", str(other), "--out", str(out)]
    with pytest.raises(KeyboardInterrupt) if at < 5 else contextlib.nullcontext():
        prepare.run(prepare.parse_options(arguments))
    monkeypatch.undo()
    assert ("already there" in made(*arguments)) == (at == 5)
    made("--text", other, "--out", tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert len([*out.iterdir()]) == 4


@pytest.mark.parametrize("name", ["lines_train_000007.bin", "tokenizer.bin", "tokenizer.json"])
def test_a_file_that_it_has_not_made_is_left_alone(text, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"the user's own")
    message = failed("--text", text, "--out", out)
    assert f"{name} was not made by this script" in message and "another --out" in message
    assert [path.read_bytes() for path in out.iterdir()] == [b"the user's own"]


def test_a_second_run_at_the_same_time_waits_and_finds_the_work_done(text, tmp_path):
    arguments = ["--text", text, "--out", tmp_path / "out"]
    made(*arguments)
    first = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    command = [sys.executable, PREPARE, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
        assert "waiting for another run" in second.stdout.readline()
        assert second.poll() is None
        os.close(first)
        assert "already there" in second.communicate(timeout=60)[0]


def test_a_vocabulary_is_that_of_a_corpus_made_before(text, tmp_path):
    pytest.importorskip("tokenizers")
    other = tmp_path / "other.txt"
    lines = "".join(numbered_lines(500)) + "Words, – and <|endoftext|> more words.\n"
    other.write_text(lines, encoding="utf-8")
    made("--text", text, "--out", tmp_path / "a", "--tokenizer", "bpe:400")
    made("--text", other, "--out", tmp_path / "b", "--tokenizer", tmp_path / "a", "--validation", 0)
    for name in ("tokenizer.bin", "tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert b"".join(documents(tmp_path / "b", "train")) == other.read_bytes().replace(END, b"")
    os.truncate(tmp_path / "a" / "tokenizer.bin", 1500)
    message = failed("--text", other, "--out", tmp_path / "c", "--tokenizer", tmp_path / "a")
    assert "tokenizer.bin is damaged" in message


def test_bad_input_is_one_line_and_writes_nothing(text, tmp_path):
    out = tmp_path / "out"
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 " * 1000)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for arguments, message in ((["--text", tmp_path / "none.txt"], "there is no file"),
                               (["--text", latin], "is not UTF-8"),
                               (["--text", latin, "--tokenizer", "bpe:300"], "is not UTF-8"),
                               (["--text", short], "too few"),
                               (["--text", text, "--tokenizer", "words"], "there is no tokenizer words"),
                               (["--text", text, "--tokenizer", "bpe:256"], "no tokenizer bpe:256"),
                               (["--text", text, "--tokenizer", "bpe:65537"], "no tokenizer bpe:65537"),
                               (["--text", text, "--validation", "0.6"], "0.6 is not a fraction"),
                               (["--text", text, "--validation", "nan"], "nan is not a fraction"),
                               (["--text", text, "--shard-tokens", "1e10"], "1e10 is not a valid shard size"),
                               (["--text"], "expected at least one argument"),
                               (["--txt", text], "unrecognized arguments")):
        assert message in failed(*arguments, "--out", out)
        assert not out.exists(), arguments
    assert f"{short} cannot be read or written" in failed("--text", text, "--out", short)


@pytest.mark.parametrize("package, tokenizer", [("tokenizers", "bpe:300"), ("tiktoken", "gpt2")])
def test_a_missing_python_package_is_one_line(text, tmp_path, package, tokenizer):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{package}'\")")
    message = failed("--text", text, "--out", tmp_path / "out", "--tokenizer", tokenizer,
                     PYTHONPATH=str(tmp_path))
    assert f"No module named '{package}'" in message and "make setup" in message
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_removed_does_not_hide_what_went_wrong(text, tmp_path, monkeypatch):
    module = load_module()

    def prepare_badly(options, name, folder):
        (folder.parent / "notes.txt").write_text("put here meanwhile")
        raise module.UserError("what went wrong")

    monkeypatch.setattr(module, "prepare", prepare_badly)
    with pytest.raises(module.UserError, match="what went wrong"):
        module.run(module.parse_options(["--text", str(text), "--out", str(tmp_path / "out")]))


@pytest.mark.skipif(not shutil.which("bible"), reason="needs Debian's bible-kjv")
def test_the_default_text_is_the_king_james_bible_without_verse_numbers(tmp_path):
    summary = made("--out", tmp_path)
    training, validation = (documents(tmp_path, part) for part in ("train", "val"))
    verses = b"".join(training + validation).splitlines()
    assert len(verses) == 31102
    assert training[0].startswith(b"In the beginning God created the heaven and the earth.\nAnd the earth")
    assert b"The grace of our Lord Jesus Christ be with you all. Amen." in verses
    assert not any(verse[:1].isdigit() or b":1 " in verse for verse in verses)
    assert 1189 <= len(training) + len(validation) < 1189 + 100  # chapters, and what was cut out of long ones
    assert f"{len(read_shards(tmp_path, 'train')):,} training tokens" in summary
    assert json.loads((tmp_path / "prepare.json").read_text())["settings"]["text"] == "bible-kjv"
