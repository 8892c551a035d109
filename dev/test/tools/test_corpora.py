"""data/: corpora arrive whole, in llm.c's formats, from a site that fails in every way and from a folder.

The site is a local server, the corpora are stand-ins made here.
"""

import hashlib
import http.server
import importlib
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time

import numpy
import pytest

from conftest import ROOT

DATA = ROOT / "data"
END = b"<|endoftext|>"
QUICK = ["--timeout", "1", "--retries", "2"]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """What they import is beside them; no proxy stands between them and the local server."""
    monkeypatch.syspath_prepend(str(DATA))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def load(name):
    return importlib.import_module(name)


# A site


class Answers(http.server.BaseHTTPRequestHandler):
    """Files of the site, or what its next fault makes of them."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        site = self.server.site
        begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        site.asked.append((self.path, begin))
        site.headers.append(dict(self.headers))
        if self.path in site.moved:
            return self.answer(302, b"", {"Location": site.moved[self.path]})
        content = site.files.get(self.path)
        if content is None:
            return self.answer(404, b"nothing here")
        faults = site.faults.get(self.path, [])
        fault = faults.pop(0) if faults else "none"
        if fault.isdecimal():
            return self.answer(int(fault), b"no", {"Retry-After": "0"})
        if fault == "whole" or begin == 0:
            return self.send(200, content, 0, fault)
        if begin >= len(content):
            return self.answer(416, b"")
        return self.send(206, content, begin, fault)

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def send(self, status, content, begin, fault):
        body = content[begin:]
        if fault == "wrong":
            body = bytes(len(body))
        self.send_response(status)
        if self.path in self.server.site.links:
            self.send_header("Link", self.server.site.links[self.path])
        if fault == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif fault != "unsaid":
            self.send_header("Content-Length", str(len(body) + (7 if fault == "longer" else 0)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if fault == "chunked":
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            return
        self.wfile.write(body[:len(body) // 2] if fault in ("drop", "stall", "unsaid") else body)
        if fault == "stall":
            self.wfile.flush()
            self.server.site.released.wait(60)
        if fault in ("drop", "stall", "unsaid", "longer"):
            self.close_connection = True

    def log_message(self, *_):
        pass


class Site:
    """files: {path: bytes}; faults: {path: what happens to its next requests, in order}; asked: (path, first
    byte) of all requests; moved: {path: where to}; links: {path: header that tells the next page}."""

    def __init__(self):
        self.files, self.faults, self.asked, self.headers, self.moved = {}, {}, [], [], {}
        self.links = {}
        self.released = threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.server.daemon_threads, self.server.site = True, self
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def remote(self, path, **known):
        content = self.files[path]
        known = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), **known}
        return load("download").Remote(self.address + path, **known)


@pytest.fixture
def site():
    site = Site()
    yield site
    site.released.set()
    site.server.shutdown()
    site.server.server_close()


# Running scripts


def run_here(capsys, module, arguments, source):
    """(status, output, errors) of a script whose source has the checksum of a stand-in."""
    module = load(module)
    arguments = [*map(str, arguments)]
    status = load("corpus").run_script(lambda: module.run(module.parse_options(arguments), source))
    return (status, *capsys.readouterr())


def made_here(capsys, *arguments):
    status, output, errors = run_here(capsys, *arguments)
    assert status == 0, errors
    return output


def failed_here(capsys, *arguments):
    """The one line of a user's mistake."""
    status, _, errors = run_here(capsys, *arguments)
    assert status == 2 and errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors


def script(name, *arguments, **environment):
    return subprocess.run([sys.executable, DATA / name, *map(str, arguments)], capture_output=True, text=True,
                          timeout=120, env={**os.environ, **environment})


def failed(name, *arguments, **environment):
    result = script(name, *arguments, **environment)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def made(name, *arguments, **environment):
    result = script(name, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def shard(path):
    """The tokens of a file whose header says what llm.c's says."""
    data = path.read_bytes()
    header = numpy.frombuffer(data[:1024], "<i4")
    tokens = numpy.frombuffer(data[1024:], "<u2")
    assert [*header[:3]] == [20240520, 1, len(tokens)] and not header[3:].any()
    return tokens


def vocabulary(folder):
    data, at, tokens = (folder / "tokenizer.bin").read_bytes(), 1024, []
    while at < len(data):
        tokens.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    header = numpy.frombuffer(data[:1024], "<i4")
    assert [*header[:4]] == [20240328, 2, len(tokens), len(tokens) - 1] and tokens[-1] == END
    return tokens


def text_of(folder, tokens):
    tokens_bytes = vocabulary(folder)
    return b"".join(tokens_bytes[token] for token in tokens)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# Downloads


def fetch(site, path, target, limits=(1, 2), **known):
    download = load("download")
    download.fetch(site.remote(path, **known), target, download.Limits(*limits))


@pytest.mark.parametrize("faults", [
    ["drop"],
    ["drop", "drop", "drop", "drop", "drop"],  # each brings something, so none counts
    ["stall"],
    ["500", "503"],
    ["429"],
    ["chunked"],
    ["drop", "chunked"],
    ["drop", "whole"],  # a server without ranges
    ["wrong"],
    ["drop", "wrong"],
    ["unsaid"],  # no length, and cut
], ids="-".join)
def test_a_download_is_whole_whatever_the_connection_does(site, tmp_path, faults):
    site.files["/a"] = random.Random(1).randbytes(300000)
    site.faults["/a"] = [*faults]
    fetch(site, "/a", tmp_path / "a")
    assert contents(tmp_path) == {"a": site.files["/a"]}
    assert site.faults["/a"] == []


def test_a_download_goes_on_where_it_broke(site, tmp_path):
    site.files["/a"] = random.Random(1).randbytes(100000)
    site.faults["/a"] = ["drop", "drop"]
    fetch(site, "/a", tmp_path / "a")
    assert site.asked == [("/a", 0), ("/a", 50000), ("/a", 75000)]


def test_a_later_run_goes_on_with_a_download_and_throws_away_what_is_of_another_file(site, tmp_path):
    site.files["/a"] = random.Random(1).randbytes(100000)
    (tmp_path / "a.partial").write_bytes(site.files["/a"][:30000])
    fetch(site, "/a", tmp_path / "a")
    assert site.asked == [("/a", 30000)]
    (tmp_path / "b.partial").write_bytes(b"old" * 10000)
    fetch(site, "/a", tmp_path / "b")
    assert site.asked[1:] == [("/a", 30000), ("/a", 0)]
    (tmp_path / "c.partial").write_bytes(bytes(200000))  # longer than the file ever was
    fetch(site, "/a", tmp_path / "c")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == site.files["/a"]


@pytest.mark.parametrize("faults, message", [
    (["404"], "the server answers 404 Not Found"),
    (["403"], "the server answers 403 Forbidden"),
    (["500"] * 3, "the server answers 500 Internal Server Error"),
    (["429"] * 3, "the server answers 429 Too Many Requests"),
    (["whole", "whole"], "wrong checksum"),
], ids=["404", "403", "500", "429", "checksum"])
def test_a_download_that_fails_says_what_to_do_and_leaves_nothing(site, tmp_path, faults, message):
    site.files["/a"] = bytes(1000)
    site.faults["/a"] = [*faults]
    known = {"sha256": "0" * 64} if faults[0] == "whole" else {}
    with pytest.raises(load("corpus").UserError, match=f"{message}.*--from DIR"):
        fetch(site, "/a", tmp_path / "new" / "a", **known)
    assert not (tmp_path / "new" / "a").exists() and not (tmp_path / "new" / "a.partial").exists()
    assert len(site.asked) == (1 if faults[0].startswith("40") else len(faults))


def test_a_file_of_another_size_than_its_source_says_is_refused(site, tmp_path):
    site.files["/a"] = bytes(1000)
    with pytest.raises(load("corpus").UserError, match="it has 1,000 bytes there, not 999"):
        fetch(site, "/a", tmp_path / "a", size=999)
    site.faults["/a"] = ["chunked"]
    with pytest.raises(load("corpus").UserError, match="it has more than 999 bytes there"):
        fetch(site, "/a", tmp_path / "a", size=999)


def test_a_server_that_never_sends_what_it_announces_is_given_up(site, tmp_path):
    """Otherwise it would be asked forever: every second answer seems to bring all bytes anew."""
    site.files["/a"], site.faults["/a"] = bytes(1000), ["longer"] * 100
    with pytest.raises(load("corpus").UserError, match="cannot be downloaded"):
        fetch(site, "/a", tmp_path / "a", size=None)
    assert len(site.asked) == 4


def test_a_server_that_cannot_be_reached_is_a_clear_error(site, tmp_path):
    site.files["/a"] = b"x"
    remote = site.remote("/a")
    site.server.server_close()
    download = load("download")
    with pytest.raises(load("corpus").UserError, match="no connection: .*refused.*--from DIR"):
        download.fetch(remote, tmp_path / "a", download.Limits(1, 1))
    assert [*tmp_path.iterdir()] == []


def test_the_hubs_token_is_not_sent_where_the_hub_redirects_to(site, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", site.address + "/")
    monkeypatch.setenv("HF_TOKEN", "secret")
    site.files["/b"] = b"content"
    site.moved["/a"] = f"http://localhost:{site.server.server_port}/b"
    download = load("download")
    download.fetch(download.Remote(f"{site.address}/a"), tmp_path / "a", download.Limits(5, 0))
    assert (tmp_path / "a").read_bytes() == b"content"
    assert [headers.get("Authorization") for headers in site.headers] == ["Bearer secret", None]


# Tiny Shakespeare


def plays():
    speeches = [f"Speaker {i}:\nLine é {i} of many, and <|endoftext|> too." for i in range(1500)]
    return "\n\n".join(speeches) + "\n"


def write_plays(folder, site):
    folder.mkdir()
    (folder / "input.txt").write_text(plays(), encoding="utf-8")
    site.files["/input.txt"] = plays().encode()
    return site.remote("/input.txt")


@pytest.mark.parametrize("way", ["from", "url"])
def test_every_speech_is_a_document_and_the_first_32768_tokens_are_held_out(capsys, site, tmp_path, way):
    source = write_plays(tmp_path / "there", site)
    where = ["--from", tmp_path / "there"] if way == "from" else ["--url", site.address + "/input.txt"]
    arguments = [*where, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    made_here(capsys, "tinyshakespeare", arguments, source)
    assert len(site.asked) == (0 if way == "from" else 1)
    assert sorted(contents(tmp_path / "out")) == ["prepare.json", "tiny_shakespeare_train.bin",
                                                  "tiny_shakespeare_val.bin", "tokenizer.bin"]
    parts = [shard(tmp_path / "out" / f"tiny_shakespeare_{part}.bin") for part in ("val", "train")]
    assert len(parts[0]) == 32768
    tokens = numpy.concatenate(parts)
    speeches = plays().encode().split(b"\n\n")
    assert (tokens == 256).sum() == len(speeches) == 1500
    ends = numpy.flatnonzero(tokens == 256)
    assert text_of(tmp_path / "out", tokens[1:ends[1]]) == speeches[0] + b"\n\n"
    assert text_of(tmp_path / "out", tokens[ends[-1] + 1:]) == speeches[-1]
    assert "already there" in made_here(capsys, "tinyshakespeare", arguments, source)


def test_a_part_of_the_training_tokens_is_taken(capsys, site, tmp_path):
    source = write_plays(tmp_path / "there", site)
    arguments = ["--from", tmp_path / "there", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    made_here(capsys, "tinyshakespeare", arguments, source)
    whole = shard(tmp_path / "out" / "tiny_shakespeare_train.bin")
    made_here(capsys, "tinyshakespeare", [*arguments, "--max-tokens", "1e3"], source)
    assert (shard(tmp_path / "out" / "tiny_shakespeare_train.bin") == whole[:1000]).all()
    assert len(shard(tmp_path / "out" / "tiny_shakespeare_val.bin")) == 32768


def test_a_file_that_is_not_the_original_is_refused(capsys, site, tmp_path):
    source = write_plays(tmp_path / "there", site)
    (tmp_path / "there" / "input.txt").write_text(plays().replace("many", "mony"), encoding="utf-8")
    arguments = ["--from", tmp_path / "there", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    message = failed_here(capsys, "tinyshakespeare", arguments, source)
    assert "wrong checksum" in message and source.url in message
    (tmp_path / "there" / "input.txt").write_text("short")
    assert "5 bytes, not" in failed_here(capsys, "tinyshakespeare", arguments, source)
    (tmp_path / "there" / "input.txt").unlink()
    assert f"download it from {source.url}" in failed_here(capsys, "tinyshakespeare", arguments, source)
    assert not (tmp_path / "out").exists()


def test_a_failed_download_leaves_no_folder(capsys, site, tmp_path):
    source = write_plays(tmp_path / "there", site)
    for faults in (["404"], ["drop", "500", "500", "500"]):
        site.faults["/input.txt"] = faults
        arguments = ["--url", source.url, *QUICK, "--tokenizer", "bytes", "--out", tmp_path / "out"]
        message = failed_here(capsys, "tinyshakespeare", arguments, source)
        assert "start again" in message and "--from DIR" in message
        assert not (tmp_path / "out").exists()


# HellaSwag


QUESTIONS = [
    {"ind": 24, "ctx": "A man sits on a roof. he", "label": 3, "endings": ["sits.", "sings é.", "x", "ro"]},
    {"ind": 25, "ctx": "Two", "label": 0, "endings": ["are three.", "b", "c", "d \u2028 e"]},
]


def write_questions(folder, questions=QUESTIONS):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
    (folder / "hellaswag_val.jsonl").write_text(text, encoding="utf-8")
    return load("download").Remote("https://there", None, hashlib.sha256(text.encode()).hexdigest())


def read_eval_set(path):
    """[(label, [context, endings ...])], in tokens."""
    data = path.read_bytes()
    header, words, at = numpy.frombuffer(data[:1024], "<i4"), numpy.frombuffer(data[1024:], "<u2"), 0
    examples, longest = [], 0
    while at < len(words):
        start, size, index, label, endings = words[at:at + 5].tolist()
        assert start == 65535 and index == len(examples)
        longest, end, at, texts = max(longest, size), at + size // 2, at + 5, []
        for _ in range(endings + 1):
            texts.append(words[at + 1:at + 1 + words[at]])
            at += 1 + int(words[at])
        assert at == end
        examples.append((label, texts))
    assert [*header[:4]] == [20240522, 1, len(examples), longest] and not header[4:].any()
    return examples


def test_hellaswag_has_contexts_and_endings_with_a_space_before_them(capsys, tmp_path):
    source = write_questions(tmp_path)
    arguments = ["--from", tmp_path, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    assert "2 examples" in made_here(capsys, "hellaswag", arguments, source)
    for (label, texts), question in zip(read_eval_set(tmp_path / "out" / "hellaswag_val.bin"), QUESTIONS):
        assert label == question["label"]
        expected = [question["ctx"], *(" " + ending for ending in question["endings"])]
        assert [text_of(tmp_path / "out", text).decode() for text in texts] == expected


def test_hellaswag_is_in_the_vocabulary_of_the_models_corpus(capsys, tmp_path):
    pytest.importorskip("tokenizers")
    source = write_questions(tmp_path)
    (tmp_path / "text.txt").write_text("the man sits on the roof and the man sings\n" * 300)
    corpus = tmp_path / "corpus"
    made("prepare.py", "--text", tmp_path / "text.txt", "--tokenizer", "bpe:300", "--out", corpus)
    arguments = ["--from", tmp_path, "--tokenizer", corpus, "--out", tmp_path / "out"]
    made_here(capsys, "hellaswag", arguments, source)
    assert contents(tmp_path / "out")["tokenizer.bin"] == contents(corpus)["tokenizer.bin"]
    texts = read_eval_set(tmp_path / "out" / "hellaswag_val.bin")[0][1]
    assert text_of(tmp_path / "out", texts[0]).decode() == QUESTIONS[0]["ctx"]
    assert len(texts[0]) < len(QUESTIONS[0]["ctx"])  # in merged tokens
    (corpus / "tokenizer.json").unlink()
    message = failed_here(capsys, "hellaswag", [*arguments[:4], "--out", tmp_path / "other"], source)
    assert "does not say how text becomes tokens" in message
    before = contents(tmp_path / "out")
    (tmp_path / "plays").mkdir()
    message = failed("tinyshakespeare.py", "--from", tmp_path / "plays", "--out", tmp_path / "out")
    assert "holds another corpus" in message and contents(tmp_path / "out") == before
    message = failed("hellaswag.py", "--tokenizer", "bpe:300")
    assert "give the folder of the corpus that the model was trained on" in message


def test_hellaswag_is_read_by_the_trainers_reader(capsys, tmp_path):
    source = write_questions(tmp_path)
    arguments = ["--from", tmp_path, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    made_here(capsys, "hellaswag", arguments, source)
    program = '#include <cstdio>\n#include "llmc/text/eval_set.h"\nint main(int, char** args) {\n' \
              'EvalSet set(args[1], 257); EvalExample example = set.example(1);\n' \
              'std::printf("%ld %d %zu %zu", set.size(), example.label, example.context.size(), ' \
              'example.completions[3].size()); }\n'
    (tmp_path / "read.cpp").write_text(program)
    compile_it = ["g++", "-std=c++17", f"-I{ROOT}", tmp_path / "read.cpp", "-o", tmp_path / "read"]
    subprocess.run(compile_it, check=True)
    command = [tmp_path / "read", tmp_path / "out" / "hellaswag_val.bin"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.split() == ["2", "0", "3", str(len(" d \u2028 e".encode()))]


@pytest.mark.parametrize("question, message", [
    ({"ctx": "A", "label": 0}, "line 1 is not an example"),
    ({"ctx": "A", "label": 4, "endings": ["a", "b", "c", "d"]}, "line 1 has no correct ending"),
    ({"ctx": "A", "label": "", "endings": ["a", "b", "c", "d"]}, "line 1 is not an example"),
    ({"ctx": "A" * 40000, "label": 0, "endings": ["a", "b", "c", "d"]}, "example 0 does not fit"),
    ({"ctx": "", "label": 0, "endings": ["a", "b", "c", "d"]}, "example 0 does not fit"),
])
def test_what_is_no_question_is_named(capsys, tmp_path, question, message):
    source = write_questions(tmp_path, [question])
    arguments = ["--from", tmp_path, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    assert message in failed_here(capsys, "hellaswag", arguments, source)
    assert not (tmp_path / "out").exists()


# TinyStories


STORIES = [[f" \nStory {file}.{i}: once upon a time, há {i * i}.\n" for i in range(20)] for file in range(4)]


def write_stories(folder, site):
    folder.mkdir()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for file in (2, 0, 3, 1):  # in no order
            content = json.dumps([{"story": story, "source": "GPT-4"} for story in STORIES[file]]).encode()
            (folder / f"data{file:02d}.json").write_bytes(content)
            member = tarfile.TarInfo(f"./data{file:02d}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    site.files["/all.tar.gz"] = archive.getvalue()
    return site.remote("/all.tar.gz")


def expected_stories():
    """(for validation, for training): the first file, and the others; shuffled by file as llm.c does it."""
    files = [[*file] for file in STORIES]
    for number, file in enumerate(files):
        random.Random(1337 + max(number - 1, 0)).shuffle(file)
    join = lambda stories: b"".join(END + story.strip().encode() for story in stories)
    return join(files[0]), join(sum(files[1:], []))


@pytest.mark.parametrize("way", ["url", "archive", "files"])
def test_stories_are_shuffled_as_llmc_does_and_the_first_file_is_held_out(capsys, site, tmp_path, way):
    source = write_stories(tmp_path / "there", site)
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "TinyStories_all_data.tar.gz").write_bytes(site.files["/all.tar.gz"])
    where = {"url": ["--url", source.url], "archive": ["--from", tmp_path / "archive"],
             "files": ["--from", tmp_path / "there"]}[way]
    arguments = [*where, "--tokenizer", "bytes", "--out", tmp_path / "out", "--processes", 2]
    site.faults["/all.tar.gz"] = ["drop"]
    made_here(capsys, "tinystories", arguments, source)
    assert len(site.asked) == (2 if way == "url" else 0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "TinyStories_train.bin", "TinyStories_val.bin", "prepare.json", "tokenizer.bin"]
    for part, text in zip(("val", "train"), expected_stories()):
        assert text_of(tmp_path / "out", shard(tmp_path / "out" / f"TinyStories_{part}.bin")) == text
    assert len([*(tmp_path / "there").iterdir()]) == 4  # what is not ours stays
    assert "already there" in made_here(capsys, "tinystories", arguments, source)


def test_what_a_user_has_in_a_folder_named_downloads_stays(capsys, site, parquet, tmp_path):
    source, mine = write_stories(tmp_path / "there", site), tmp_path / "out" / "downloads" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("the user's own")
    arguments = ["--tokenizer", "bytes", "--out", tmp_path / "out", "--processes", 1]
    made_here(capsys, "tinystories", ["--url", source.url, *arguments], source)
    assert [*mine.parent.iterdir()] == [mine]
    serve_hub(site, parquet)
    mine = mine.rename(tmp_path / "mine.txt")
    fineweb = tmp_path / "web" / "downloads" / SAMPLE
    fineweb.mkdir(parents=True)
    mine = mine.rename(fineweb / "mine.txt")
    made("fineweb.py", "--url", site.address, *QUICK, *FINEWEB, "--out", tmp_path / "web")
    assert [*fineweb.iterdir()] == [mine]


def test_a_part_of_the_stories_and_a_vocabulary_of_their_own(capsys, site, tmp_path):
    pytest.importorskip("tokenizers")
    source = write_stories(tmp_path / "there", site)
    arguments = ["--from", tmp_path / "there", "--tokenizer", "bpe:280", "--processes", 1,
                 "--max-tokens", 150, "--out", tmp_path / "out"]
    made_here(capsys, "tinystories", arguments, source)
    tokens = shard(tmp_path / "out" / "TinyStories_train.bin")
    assert len(tokens) == 150 and len(vocabulary(tmp_path / "out")) == 280
    assert expected_stories()[1].startswith(text_of(tmp_path / "out", tokens))


def test_an_archive_that_breaks_off_is_gone_on_with_and_one_that_is_damaged_is_named(capsys, site, tmp_path):
    source = write_stories(tmp_path / "there", site)
    arguments = ["--url", source.url, *QUICK, "--tokenizer", "bytes", "--processes", 1,
                 "--out", tmp_path / "out"]
    site.faults["/all.tar.gz"] = ["drop", "500", "500", "500"]
    assert "start again" in failed_here(capsys, "tinystories", arguments, source)
    assert [*(tmp_path / "out").iterdir()] == [tmp_path / "out" / "downloads"]
    made_here(capsys, "tinystories", [*arguments, "--keep"], source)
    assert site.asked[-1] == ("/all.tar.gz", len(site.files["/all.tar.gz"]) // 2)
    assert "already there" in made_here(capsys, "tinystories", arguments, source)
    kept = tmp_path / "out" / "downloads" / "TinyStories_all_data.tar.gz"
    assert kept.read_bytes() == site.files["/all.tar.gz"]

    site.files["/all.tar.gz"] = site.files["/all.tar.gz"][:400]
    arguments[-1] = tmp_path / "other"
    message = failed_here(capsys, "tinystories", arguments, site.remote("/all.tar.gz"))
    assert "TinyStories_all_data.tar.gz is damaged" in message


# FineWeb


def pages(files=3, rows=60):
    """Documents of different lengths, of which some are longer than a shard."""
    return [[f"Page {file}.{i} é " + "word " * ((37 * i + file) % 90) + ("long " * 900 if i == 41 else "")
             for i in range(rows)] for file in range(files)]


SAMPLE = "sample/10BT"
COMMIT = "0123456789abcdef"
REPOSITORY = "HuggingFaceFW/fineweb"


@pytest.fixture(scope="session")
def parquet(tmp_path_factory):
    pytest.importorskip("pyarrow", reason="needs pyarrow: make setup")
    import pyarrow
    import pyarrow.parquet
    folder = tmp_path_factory.mktemp("hub") / SAMPLE
    folder.mkdir(parents=True)
    for number, texts in enumerate(pages()):
        table = pyarrow.table({"id": [*map(str, range(len(texts)))], "text": texts})
        pyarrow.parquet.write_table(table, folder / f"{number:03d}_00000.parquet", row_group_size=25)
    return folder.parents[1]


def serve_hub(site, parquet):
    """As the hub has them: in two pages, and elsewhere; and a file that would go where it should not."""
    files = sorted((parquet / SAMPLE).iterdir())
    listing = [{"type": "directory", "path": f"{SAMPLE}/x", "oid": "d", "size": 0},
               {"type": "file", "path": f"{SAMPLE}/../../../x.parquet", "oid": "1", "size": 5}]
    for file in files:
        content, path = file.read_bytes(), f"{SAMPLE}/{file.name}"
        listing.append({"type": "file", "path": path, "size": len(content), "oid": "1",
                        "lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}})
        site.files[f"/cdn/{file.name}"] = content
        site.moved[f"/datasets/{REPOSITORY}/resolve/{COMMIT}/{path}"] = f"{site.address}/cdn/{file.name}"
    site.files[f"/api/datasets/{REPOSITORY}/revision/main"] = json.dumps({"sha": COMMIT}).encode()
    page = f"/api/datasets/{REPOSITORY}/tree/{COMMIT}/{SAMPLE}"
    pages_of_it = [json.dumps(part).encode() for part in (listing[:3], listing[3:])]
    site.files[page], site.files[page + "?next"] = pages_of_it
    site.links[page] = f'<{site.address}{page}?next>; rel="next"'


def stream():
    return b"".join(END + text.encode() for file in pages() for text in file)


FINEWEB = ["--tokenizer", "bytes", "--shard-tokens", 5000, "--processes", 1]


@pytest.fixture(scope="session")
def undisturbed(parquet, tmp_path_factory):
    """What FineWeb's stand-in becomes in one go."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    made("fineweb.py", "--from", parquet, *FINEWEB, "--processes", 3, "--out", out)
    return out


def without_record(folder):
    """The files, but for prepare.json, which knows where the source was."""
    return {name: content for name, content in contents(folder).items() if name != "prepare.json"}


def test_fineweb_is_one_stream_cut_into_shards_of_which_the_first_is_held_out(undisturbed):
    names = [name for name in sorted(contents(undisturbed)) if name.startswith("fineweb_")]
    count = len(stream()) - stream().count(END) * (len(END) - 1)
    shards = count // 5000 + (count % 5000 >= 500)
    assert names == [f"fineweb_train_{i:06d}.bin" for i in range(1, shards)] + ["fineweb_val_000000.bin"]
    parts = [shard(undisturbed / name) for name in [names[-1], *names[:-1]]]
    assert {len(part) for part in parts[:-1]} == {5000}
    assert text_of(undisturbed, numpy.concatenate(parts)) == stream()


def test_fineweb_from_the_hub_is_the_same_and_a_second_start_does_nothing(
    site, parquet, undisturbed, tmp_path
):
    arguments = ["--url", site.address, *QUICK, *FINEWEB, "--out", tmp_path / "out"]
    serve_hub(site, parquet)
    site.faults["/cdn/000_00000.parquet"] = ["drop", "503"]
    site.faults["/cdn/001_00000.parquet"] = ["429", "stall", "wrong"]
    made("fineweb.py", *arguments)
    assert without_record(tmp_path / "out") == without_record(undisturbed)
    assert [*filter(os.path.isdir, (tmp_path / "out").iterdir())] == []  # what was downloaded is gone
    asked = len(site.asked)
    assert "already there" in made("fineweb.py", *arguments)
    assert len(site.asked) == asked


def start(*arguments):
    command = [sys.executable, DATA / "fineweb.py", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                            start_new_session=True)


def kill_when(process, condition):
    """SIGKILL, of the one process alone; the others must find out themselves."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    while group_lives(process.pid):
        assert time.monotonic() < deadline, "processes outlive the one that started them"
        time.sleep(0.05)


def group_lives(group):
    try:
        os.killpg(group, 0)
        return True
    except ProcessLookupError:
        return False


def test_a_killed_run_goes_on_to_the_same_bytes(site, parquet, undisturbed, tmp_path):
    """Killed while it waits for the second file, then when one more shard is there, then run to its end."""
    serve_hub(site, parquet)
    arguments = ["--url", site.address, "--timeout", 50, *FINEWEB, "--out", tmp_path / "out"]
    site.faults["/cdn/001_00000.parquet"] = ["stall"]

    def shards():
        return [name for name in contents(tmp_path / "out") if name.endswith(".bin") and "fineweb" in name]

    first = start(*arguments)
    kill_when(first, lambda: (tmp_path / "out").exists() and len(shards()) >= 2)
    site.released.set()
    there = len(shards())
    kill_when(start(*arguments), lambda: len(shards()) > there)
    whole = contents(undisturbed)
    assert all(content == whole[name] for name, content in without_record(tmp_path / "out").items())
    made("fineweb.py", *arguments)
    assert without_record(tmp_path / "out") == without_record(undisturbed)
    assert len([path for path, _ in site.asked if path.startswith("/api/")]) == 3  # pinned by the first run


def test_shards_that_went_are_made_again_on_request(parquet, undisturbed, tmp_path):
    arguments = ["--from", parquet, *FINEWEB, "--out", tmp_path / "out"]
    made("fineweb.py", *arguments)
    (tmp_path / "out" / "fineweb_train_000003.bin").unlink()
    os.truncate(tmp_path / "out" / "fineweb_train_000005.bin", 2000)
    before = contents(tmp_path / "out")
    message = failed("fineweb.py", *arguments)
    assert "fineweb_train_000003.bin is missing" in message and "--again" in message
    assert contents(tmp_path / "out") == before
    assert "after shard 2" in made("fineweb.py", *arguments, "--again")
    assert without_record(tmp_path / "out") == without_record(undisturbed)


def test_a_shard_that_is_not_listed_is_left_alone(parquet, tmp_path):
    arguments = ["--from", parquet, *FINEWEB, "--out", tmp_path / "out"]
    made("fineweb.py", *arguments, "--max-tokens", 10000)
    (tmp_path / "out" / "fineweb_train_000007.bin").write_bytes(b"the user's own")
    before = contents(tmp_path / "out")
    assert "fineweb_train_000007.bin was not made by this script" in failed("fineweb.py", *arguments)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("tokens", [400, 10000, 10100, 12000])
def test_a_part_of_fineweb_is_its_beginning_and_can_be_gone_on_with(parquet, undisturbed, tmp_path, tokens):
    """A rest below a tenth of a shard goes to the last one, but not to what is held out, and leaves it when
    more is asked for.
    """
    arguments = ["--from", parquet, *FINEWEB, "--out", tmp_path / "out"]
    made("fineweb.py", *arguments, "--max-tokens", tokens)
    parts = [shard(path) for path in sorted((tmp_path / "out").glob("fineweb_train_*.bin"))]
    assert [*map(len, parts)] == {400: [400], 10000: [5000] * 2, 10100: [5000, 5100],
                                  12000: [5000, 5000, 2000]}[tokens]
    whole = numpy.concatenate([shard(path) for path in sorted(undisturbed.glob("fineweb_train_*.bin"))])
    assert (numpy.concatenate(parts) == whole[:tokens]).all()
    assert "already there" in made("fineweb.py", *arguments, "--max-tokens", tokens)
    if tokens == 12000:  # fewer than the whole shards that are there: that is not all
        (tmp_path / "out" / "fineweb_train_000003.bin").unlink()
        made("fineweb.py", *arguments, "--max-tokens", 5000)
    made("fineweb.py", *arguments)
    assert without_record(tmp_path / "out") == without_record(undisturbed)
    assert "already there" in made("fineweb.py", *arguments, "--max-tokens", tokens)


def test_little_of_fineweb_is_downloaded_for_few_tokens(site, parquet, tmp_path):
    serve_hub(site, parquet)
    arguments = [*FINEWEB, "--max-tokens", "1e3"]
    made("fineweb.py", "--url", site.address, *QUICK, *arguments, "--out", tmp_path / "out", "--keep")
    assert {path for path, _ in site.asked if path.startswith("/cdn/")} == {"/cdn/000_00000.parquet"}
    kept = tmp_path / "out" / "downloads"
    made("fineweb.py", "--from", kept, *arguments, "--out", tmp_path / "again")
    assert without_record(tmp_path / "again") == without_record(tmp_path / "out")


def test_fineweb_has_a_vocabulary_of_its_own_and_keeps_it(site, parquet, tmp_path):
    pytest.importorskip("tokenizers")
    arguments = ["--from", parquet, *FINEWEB, "--tokenizer", "bpe:300", "--shard-tokens", 2000, "--out",
                 tmp_path / "out"]
    made("fineweb.py", *arguments)
    names = sorted(path for path in contents(tmp_path / "out") if path.startswith("fineweb"))
    tokens = numpy.concatenate([shard(tmp_path / "out" / name) for name in [names[-1], *names[:-1]]])
    assert text_of(tmp_path / "out", tokens) == stream()
    before = without_record(tmp_path / "out")
    (tmp_path / "out" / names[1]).unlink()
    made("fineweb.py", *arguments, "--again")
    assert without_record(tmp_path / "out") == before


def test_shards_that_another_program_made_are_left_alone(parquet, undisturbed, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for path in undisturbed.glob("fineweb_*.bin"):  # llm.c's have the same names, and no record
        (out / path.name).write_bytes(path.read_bytes())
    before = contents(out)
    assert "no prepare.json" in failed("fineweb.py", "--from", parquet, *FINEWEB, "--out", out)
    assert contents(out) == before


def test_other_settings_or_files_in_the_same_folder_are_refused(parquet, tmp_path):
    out, arguments = tmp_path / "out", [*FINEWEB, "--out", tmp_path / "out"]
    made("fineweb.py", "--from", parquet, *arguments, "--max-tokens", 5000)
    before = contents(out)
    message = failed("fineweb.py", "--from", parquet, *arguments, "--shard-tokens", 4000)
    assert "holds something else" in message and "another --out" in message
    other = tmp_path / "other" / SAMPLE
    other.mkdir(parents=True)
    for path in sorted((parquet / SAMPLE).iterdir())[:2]:
        (other / path.name).write_bytes(path.read_bytes())
    message = failed("fineweb.py", "--from", tmp_path / "other", *arguments)
    assert "was begun from other files" in message
    assert contents(out) == before


def test_mistakes_are_one_line_and_write_nothing(site, parquet, tmp_path):
    out = tmp_path / "out"
    damaged, other = tmp_path / "damaged", tmp_path / "other"
    damaged.mkdir()
    other.mkdir()
    (damaged / "x.parquet").write_bytes((parquet / SAMPLE / "000_00000.parquet").read_bytes()[:-100])
    serve_hub(site, parquet)
    site.faults["/cdn/000_00000.parquet"] = ["404"]
    del site.moved[f"/datasets/{REPOSITORY}/resolve/{COMMIT}/{SAMPLE}/001_00000.parquet"]
    for arguments, message in ((["--from", damaged], "is not a complete parquet file"),
                               (["--from", other], "there is no parquet file in"),
                               (["--from", tmp_path / "none"], "there is no folder"),
                               (["--from", parquet, "--version", "10"], "invalid choice"),
                               (["--from", parquet, "--max-tokens", "0"], "is not a number of tokens"),
                               (["--from", parquet, "--processes", "0"], "is not a number of processes"),
                               (["--from", parquet, "--tokenizer", "words"], "there is no tokenizer"),
                               (["--from", parquet, "--shard-tokens", "1000000"], "do not fill a shard"),
                               (["--url", "ftp://x"], "is not an address"),
                               (["--url", site.address], "404 Not Found"),
                               (["--url", site.address, "--type", "edu"], "404 Not Found"),
                               (["--url", site.address + "/cdn"], "404 Not Found")):
        assert message in failed("fineweb.py", *FINEWEB, *QUICK, *arguments, "--out", out)
        assert not out.exists(), arguments
    site.files[f"/api/datasets/{REPOSITORY}/revision/main"] = b"<html>log in</html>"
    assert "it is not JSON" in failed("fineweb.py", *FINEWEB, *QUICK, "--url", site.address, "--out", out)
    site.files[f"/api/datasets/{REPOSITORY}/revision/main"] = b"[]"
    assert "does not answer as" in failed("fineweb.py", *FINEWEB, *QUICK, "--url", site.address, "--out", out)
    assert not out.exists()


def test_a_download_that_is_given_up_is_gone_on_with_by_the_next_start(site, parquet, undisturbed, tmp_path):
    serve_hub(site, parquet)
    site.faults["/cdn/001_00000.parquet"] = ["drop"] + ["500"] * 3
    arguments = ["--url", site.address, *QUICK, *FINEWEB, "--out", tmp_path / "out"]
    message = failed("fineweb.py", *arguments)
    assert "start again" in message and "--from DIR" in message
    assert not [name for name in contents(tmp_path / "out") if name.endswith(".partial")]
    made("fineweb.py", *arguments)
    half = len(site.files["/cdn/001_00000.parquet"]) // 2
    assert ("/cdn/001_00000.parquet", half) in site.asked[-4:]
    assert without_record(tmp_path / "out") == without_record(undisturbed)


@pytest.mark.parametrize("keep", [False, True])
def test_files_that_are_used_up_make_room_unless_they_are_to_be_kept(tmp_path, keep):
    files = [load("download").HubFile(f"{SAMPLE}/{number}.parquet", 5, None) for number in range(4)]
    downloads = load("fineweb").Downloads(files, str, tmp_path, load("download").Limits(1, 0), keep)
    (tmp_path / SAMPLE).mkdir(parents=True)
    for file in files:
        (tmp_path / file.path).write_bytes(b"12345")
    downloads.release(2)
    assert [(tmp_path / file.path).exists() for file in files] == [keep, keep, True, True]
    assert downloads.downloaded == 10


def test_what_was_begun_from_a_folder_can_be_gone_on_with_from_the_hub(site, parquet, undisturbed, tmp_path):
    arguments = [*FINEWEB, "--out", tmp_path / "out"]
    made("fineweb.py", "--from", parquet, *arguments, "--max-tokens", 40000)
    serve_hub(site, parquet)
    made("fineweb.py", "--url", site.address, *arguments)
    assert "/cdn/002_00000.parquet" in [path for path, _ in site.asked]
    assert without_record(tmp_path / "out") == without_record(undisturbed)


def test_a_missing_pyarrow_is_one_line(tmp_path):
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError(\"No module named 'pyarrow'\")")
    message = failed("fineweb.py", "--out", tmp_path / "out", PYTHONPATH=str(tmp_path))
    assert "run make setup" in message
    assert not (tmp_path / "out").exists()


# What they share


def test_progress_has_a_line_now_and_then_and_the_time_left(monkeypatch):
    now, stream = [0.0], io.StringIO()
    progress = load("parallel").Progress(stream, lambda: now[0])
    for second in range(121):
        now[0] = float(second)
        progress.show(second / 1000, f"{second} tokens")
    assert stream.getvalue().splitlines() == [
        "3.0%, 30 tokens, 16:10 left", "6.0%, 60 tokens, 15:40 left", "9.0%, 90 tokens, 15:10 left",
        "12.0%, 120 tokens, 14:40 left"]


def test_a_process_that_does_not_start_is_one_line():
    broken = type("Tokenizer", (), {"__reduce__": lambda self: (os._exit, (1,))})()  # unpickling it ends the process
    parallel = load("parallel")
    with pytest.raises(load("corpus").UserError, match="could not start or was killed.*fewer --processes"):
        with parallel.Processes(1, broken) as processes:
            list(processes.in_order(parallel.tokenize, [(0, ["text"])]))


def test_gpt2s_tokens_are_llmcs_tokenizer_file_in_the_order_of_merges():
    """With a small vocabulary of the same kind: GPT-2's is a download."""
    pytest.importorskip("tiktoken")
    pytest.importorskip("tokenizers")
    corpus = load("corpus")
    text = "the quick brown fox – número 12 – jumps over\n the lazy dogs' den\n"
    peer = corpus.train_bpe([text] * 9, 330)
    ours = corpus.gpt2_of(peer.vocabulary)
    assert ours.vocabulary == peer.vocabulary and ours.end_of_text == peer.end_of_text
    texts = ["the quick dogs' número\n\n 12 over – <|endoftext|> jumps", "", "  the  \n "]
    assert [[*tokens] for tokens in ours.encode(texts)] == [[*tokens] for tokens in peer.encode(texts)]
    assert b"".join(ours.vocabulary[token] for token in ours.encode(texts)[0]) == texts[0].encode()


def test_gpt2s_tokens_are_what_they_always_were():
    """Skipped where GPT-2's vocabulary has not been downloaded: TIKTOKEN_CACHE_DIR says where it lies."""
    cache = pathlib.Path(os.environ.get("TIKTOKEN_CACHE_DIR") or "there is none")
    address = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
    if not (cache / hashlib.sha1(address.encode()).hexdigest()).exists():
        pytest.skip("needs GPT-2's vocabulary in TIKTOKEN_CACHE_DIR")
    corpus = load("corpus")
    whole = corpus.make_tokenizer("gpt2", None)
    for tokenizer in (whole, corpus.gpt2_of(whole.vocabulary)):
        assert [[*tokens] for tokens in tokenizer.encode(["Hello world", " the"])] == [[15496, 995], [262]]
        assert len(tokenizer.vocabulary) == 50257 and tokenizer.end_of_text == 50256


def test_half_characters_become_replacement_characters():
    whole = load("parallel").whole_characters
    assert whole("né 😀") == "né 😀"
    assert whole("a\ud83db") == "a\ufffdb"
