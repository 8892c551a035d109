"""Shared by the scripts of this folder: tokenizers, token shards, and folders that record their content.

Files are llm.c's: shards of 256 int32 {20240520, 1, token count}, then uint16 tokens; tokenizer.bin of 256
int32 {20240328, 2, vocabulary size, end of text}, then of every token a length byte and its bytes. Every
document begins with the end-of-text token. A folder holds a whole corpus when its prepare.json lists the
settings that made it and the sizes of its files.
"""
import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

SCRIPT = Path(sys.argv[0]).name
try:
    import numpy as np
except ImportError:
    sys.exit(f"error: NumPy is missing: run make setup, then .venv/bin/python data/{SCRIPT}")

SHARD_MAGIC, TOKENIZER_MAGIC = 20240520, 20240328
HEADER_BYTES = 1024
END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 1 << 16  # a token is a uint16
LONGEST_TOKEN = 255  # bytes: its length is one byte
GPT2_VOCABULARY = 50257
WORK = ".part"  # output stays in this folder until it is whole


class UserError(Exception):
    """A mistake of the user. The message names the mistake and the remedy."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}: see --help")


def run_script(script):
    """Calls script() and prints errors that a user can correct in one line. Returns the exit status."""
    try:
        script()
        return 0
    except UserError as error:
        message, status = f"error: {error}\n", 2
    except OSError as error:
        message = (f"error: {error.filename or 'a file'} cannot be read or written ({error.strerror}): check "
                   "the path, permissions and free space\n")
        status = 2
    except KeyboardInterrupt:
        message, status = "", 130
    progress = "\r\033[K" if sys.stderr.isatty() else ""  # clears the progress line
    print(end=progress + message, file=sys.stderr, flush=True)
    return status


# Tokenizers have: `vocabulary`, the bytes of every token; `end_of_text`, that token; encode(texts), which gives
# arrays of uint16 and treats END_OF_TEXT as plain text; and perhaps `threads`, the number to encode with.


class Bytes:
    vocabulary = [bytes([value]) for value in range(256)] + [END_OF_TEXT.encode()]
    end_of_text = 256

    def encode(self, texts):
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]


class Bpe:
    """A byte-level BPE of Hugging Face tokenizers whose last token is END_OF_TEXT."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        bytes_of = byte_level_characters()
        self.vocabulary = [bytes(map(bytes_of.get, name)) for name, _ in by_id[:-1]] + [END_OF_TEXT.encode()]

    def encode(self, texts):
        self.tokenizer.encode_special_tokens = True
        encoded = [np.array(encoding.ids, np.uint16) for encoding in self.tokenizer.encode_batch_fast(texts)]
        self.tokenizer.encode_special_tokens = False
        return encoded


class Gpt2:
    """GPT-2's way to split words, with an encoding of tiktoken's."""

    threads = 8

    def __init__(self, encoding):
        self.encoding = encoding
        self.end_of_text = encoding.eot_token
        self.vocabulary = [*map(encoding.decode_single_token_bytes, range(self.end_of_text)),
                           END_OF_TEXT.encode()]

    def encode(self, texts):
        encoded = self.encoding.encode_ordinary_batch(texts, num_threads=self.threads)
        return [np.array(tokens, np.uint16) for tokens in encoded]


def byte_level_characters():
    """{character: byte}: the byte that each character stands for in a byte-level BPE.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100, U+0101, ... in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    return dict(zip(characters, printable + others))


def train_bpe(texts, size):
    """A byte-level BPE like GPT-2's, trained on `texts`. A short text may give fewer than `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False,
                                  max_token_length=LONGEST_TOKEN)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])  # after training: the last one, as in GPT-2
    return Bpe(tokenizer)


def download_gpt2():
    """GPT-2's own vocabulary. tiktoken downloads it into TIKTOKEN_CACHE_DIR, or a folder in /tmp."""
    import tiktoken
    try:
        return Gpt2(tiktoken.get_encoding("gpt2"))
    except Exception as error:  # requests' errors, or a damaged cache: tiktoken has no type of its own
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"GPT-2's vocabulary cannot be downloaded ({reason}): connect to the internet "
                        "once, with TIKTOKEN_CACHE_DIR=DIR to keep it in DIR rather than in /tmp, or use "
                        "--tokenizer bytes, bpe:N, or llm.c's gpt2_tokenizer.bin") from error


def gpt2_of(vocabulary):
    """GPT-2's tokenizer from its tokens alone, whose order is the order of its merges."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    return Gpt2(tiktoken.Encoding("gpt2", pat_str=r50k_pat_str,
                                  mergeable_ranks={token: rank for rank, token in enumerate(vocabulary[:-1])},
                                  special_tokens={END_OF_TEXT: len(vocabulary) - 1}))


def make_tokenizer(kind, texts):
    """kind: as for tokenizer_choice. texts(): the texts that a BPE is trained on."""
    try:
        if kind == "bytes":
            return Bytes()
        if kind == "gpt2":
            return download_gpt2()
        if kind.startswith("bpe:"):
            return train_bpe(texts(), int(kind.removeprefix("bpe:")))
        return load_tokenizer(Path(kind))
    except ImportError as error:
        raise UserError(f"{kind} needs a Python package ({error}): run make setup, then .venv/bin/python "
                        f"data/{SCRIPT}") from error


def is_kind(text):
    """Whether a --tokenizer names a kind of tokenizer, rather than a folder or a file."""
    kind, _, size = text.partition(":")
    return text in ("bytes", "gpt2") or (kind == "bpe" and size.isdecimal()
                                         and 257 <= int(size) <= LARGEST_VOCABULARY)


def tokenizer_choice(text):
    if is_kind(text) or tokenizer_file(Path(text)).is_file():
        return text
    raise UserError(f"there is no tokenizer {text}: use bytes, gpt2, bpe:N with N from 257 (256 bytes, end "
                    f"of text) to {LARGEST_VOCABULARY} (a token is a uint16), or a folder with tokenizer.bin")


def tokenizer_label(choice):
    """For the names of folders."""
    path = Path(choice).resolve()
    return choice.replace(":", "") if is_kind(choice) else (path.name if path.is_dir() else path.stem)


def tokenizer_file(path):
    return path / "tokenizer.bin" if path.is_dir() else path


def load_tokenizer(path):
    """The tokenizer of a corpus in the folder `path`, or of the file `path`."""
    path = tokenizer_file(path)
    vocabulary, merges = read_vocabulary(path), path.with_name("tokenizer.json")
    if vocabulary == Bytes.vocabulary:
        return Bytes()
    if merges.is_file():
        return load_bpe(merges, vocabulary)
    if len(vocabulary) == GPT2_VOCABULARY:
        return gpt2_of(vocabulary)
    raise UserError(f"{path} does not say how text becomes tokens: give the folder that data/prepare.py "
                    "made, with tokenizer.json in it")


def load_bpe(path, vocabulary):
    from tokenizers import Tokenizer
    try:
        tokenizer = Bpe(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library has no exception type of its own
        raise UserError(f"{path} is damaged: make it again with data/prepare.py") from error
    if tokenizer.vocabulary != vocabulary:
        raise UserError(f"{path} has other tokens than the tokenizer.bin beside it: make both again with "
                        "data/prepare.py")
    return tokenizer


def read_vocabulary(path):
    """The tokens of a tokenizer.bin. llm.c's own, of version 1, is GPT-2's and has no end-of-text field."""
    data = path.read_bytes()
    if len(data) < HEADER_BYTES or np.frombuffer(data[:8], "<i4").tolist() not in ([TOKENIZER_MAGIC, 1],
                                                                                   [TOKENIZER_MAGIC, 2]):
        raise UserError(f"{path} is not a tokenizer.bin: give a folder that data/prepare.py made, or llm.c's "
                        "gpt2_tokenizer.bin")
    at, vocabulary = HEADER_BYTES, []
    while at < len(data):
        vocabulary.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    size, end_of_text = np.frombuffer(data[8:16], "<i4").tolist()
    last = len(vocabulary) - 1
    if at != len(data) or len(vocabulary) != size or (data[4] == 2 and end_of_text != last):
        raise UserError(f"{path} is damaged: make it again with data/prepare.py")
    return vocabulary[:-1] + [END_OF_TEXT.encode()]


def identity(tokenizer):
    """A hash that is equal for tokenizers with the same tokens."""
    tokens = b"".join(bytes([len(token)]) + token for token in tokenizer.vocabulary)
    return hashlib.sha256(tokens).hexdigest()


# Options


def add_output_options(parser, folder):
    parser.add_argument("--tokenizer", type=tokenizer_choice, default="gpt2", metavar="TOKENIZER",
                        help="gpt2, bytes, bpe:N, or the folder of a corpus for its vocabulary (gpt2)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help=f"folder to write to (data/{folder}, followed by a tokenizer's name other than gpt2)")


def output_folder(options, name):
    if options.tokenizer != "gpt2":
        name += f"-{tokenizer_label(options.tokenizer)}"
    return options.out or Path(__file__).resolve().parent / name


def shard_size(text):
    count = token_count(text)
    if 1000 <= count <= 10**9:
        return count
    raise UserError(f"{text} is not a valid shard size: give 1000 to 1000000000 tokens")


def token_count(text):
    """A number of tokens: 100000, 1e9."""
    try:
        count = float(text)
        if count >= 1 and count == int(count):
            return int(count)
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{text} is not a number of tokens: give one such as 1000000 or 1e6")


def tokenizer_settings(choice):
    """Identifies a --tokenizer, even if its folder has moved."""
    return choice if is_kind(choice) else identity(load_tokenizer(Path(choice)))


# Files


def header(*values):
    return np.array(values, "<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def write_tokenizer(folder, tokenizer):
    with open(folder / "tokenizer.bin", "wb") as file:
        file.write(header(TOKENIZER_MAGIC, 2, len(tokenizer.vocabulary), tokenizer.end_of_text))
        for token in tokenizer.vocabulary:
            file.write(bytes([len(token)]) + token)
    if isinstance(tokenizer, Bpe):
        tokenizer.tokenizer.save(str(folder / "tokenizer.json"))


class ShardWriter:
    """Writes tokens to path_of(0), path_of(1), ... with `shard_tokens` in each. A shard has the name
    `unfinished` until it is whole.

    A rest of less than a tenth of a shard is appended to the last shard, because a loader cannot use shards
    of a few tokens. The first `alone` shards take no rest. counts: tokens of the shards that exist already.
    """

    def __init__(self, path_of, shard_tokens, unfinished, counts=(), alone=0):
        self.path_of, self.shard_tokens, self.unfinished = path_of, shard_tokens, unfinished
        self.alone = alone
        self.counts = list(counts)
        self.file, self.in_shard = None, 0

    @property
    def room(self):
        """Number of tokens until the shard ends."""
        return self.shard_tokens - self.in_shard

    @property
    def tokens(self):
        return sum(self.counts) + self.in_shard

    def write(self, tokens):
        while len(tokens) > 0:
            if self.file is None:
                self.file = open(self.unfinished, "wb")
                self.file.write(header())
            part = tokens[:self.room]
            self.file.write(part.astype("<u2").tobytes())
            self.in_shard += len(part)
            tokens = tokens[len(part):]
            if self.room == 0:
                self.finish_shard()

    def finish_shard(self):
        seal(self.file, self.in_shard, self.path_of(len(self.counts)))
        self.counts.append(self.in_shard)
        self.file, self.in_shard = None, 0

    def close(self):
        if self.file is None:
            return
        if len(self.counts) > self.alone and self.in_shard * 10 < self.shard_tokens:
            self.file.close()
            rest = np.fromfile(self.unfinished, "<u2", offset=HEADER_BYTES)
            rewrite_shard(self.path_of(len(self.counts) - 1), self.counts[-1], rest, self.unfinished)
            self.counts[-1] += self.in_shard
            self.file, self.in_shard = None, 0
        else:
            self.finish_shard()


def seal(file, tokens, path):
    """Gives a shard whose tokens are written its header and its name."""
    file.seek(0)
    file.write(header(SHARD_MAGIC, 1, tokens))
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)


def rewrite_shard(path, keep, rest, unfinished):
    """Replaces a shard by its first `keep` tokens, followed by `rest`."""
    kept = np.memmap(path, "<u2", "r", HEADER_BYTES, (keep,))
    file = open(unfinished, "wb")
    file.write(header())
    kept.tofile(file)
    rest.tofile(file)
    seal(file, keep + len(rest), path)


# Folders


@contextlib.contextmanager
def locked(folder):
    """Makes the folder and locks it against other runs on this machine. A run that fails removes the folder
    that it made."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        take_turn(lock, folder)
        yield
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # if it is not empty, the first error counts
                folder.rmdir()
        raise
    finally:
        os.close(lock)


def take_turn(lock, folder):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{os.path.relpath(folder)}: waiting for another run", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def read_record(folder):
    """The content of prepare.json; empty if there is no valid one."""
    try:
        record = json.loads((folder / "prepare.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def is_there(folder, settings):
    """Whether `folder` holds the whole output of these settings."""
    record = read_record(folder)
    try:
        return record.get("settings") == settings and all((folder / name).stat().st_size == size
                                                          for name, size in record["files"].items())
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def files_made(folder):
    """The files in the folder that prepare.json lists, whatever text they were made of."""
    names = read_record(folder).get("files")
    if not isinstance(names, dict):
        return []
    return [folder / name for name in names if Path(name).name == name and (folder / name).is_file()]


def not_made_here(folder, patterns):
    """The user's files: they have names of the output, but prepare.json does not list them."""
    ours = files_made(folder)
    return [path for pattern in (*patterns, "tokenizer.bin", "tokenizer.json")
            for path in sorted(folder.glob(pattern)) if path not in ours]


def replace_output(work, folder, settings):
    """Moves the new files into place and removes those of an earlier corpus, also of another text, since
    their tokenizer is replaced. Before that, prepare.json lists all of these files without settings, so that
    a run which is killed in between leaves files that are listed but not valid. The final prepare.json
    comes last.
    """
    def save(settings, files):
        (work / "prepare.json").write_text(json.dumps({"settings": settings, "files": files}, indent=1) + "\n")
        os.replace(work / "prepare.json", folder / "prepare.json")

    files, earlier = {path.name: path.stat().st_size for path in sorted(work.iterdir())}, files_made(folder)
    save(None, {path.name: None for path in earlier} | files)
    for old in earlier:
        old.unlink()
    for name in files:
        os.replace(work / name, folder / name)
    save(settings, files)


def make_whole(folder, settings, patterns, make):
    """Lets make(work) write a corpus, which then appears in `folder` all at once. Does nothing if it exists.

    patterns: of the names of its files; the user must have no files with such names. make returns a line that
    sums the corpus up. Returns whether make was called.
    """
    shown = os.path.relpath(folder)
    with locked(folder):
        if is_there(folder, settings):
            print(f"{shown}: already there")
            return False
        held = read_record(folder).get("settings")
        if isinstance(held, dict) and held.get("corpus") != settings.get("corpus"):
            raise UserError(f"{shown} holds another corpus, whose files this would remove: give another --out")
        if others := not_made_here(folder, patterns):  # for example llm.c's
            raise UserError(f"{shown}/{others[0].name} was not made by this script: use it as it is, or give "
                            "another --out")
        work = folder / WORK
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            summary = make(work)
            replace_output(work, folder, settings)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{shown}: {summary}")
    return True
