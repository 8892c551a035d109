#!/usr/bin/env python3
"""Text to token shards.

    data/prepare.py                                     the King James Bible, as bytes    -> data/kjv-bytes/
    data/prepare.py --tokenizer bpe:1024                the same, in a vocabulary of 1024 -> data/kjv-bpe1024/
    data/prepare.py --text a.txt b.txt --out data/mine  your own text, UTF-8

Writes NAME_train_000000.bin, ..., NAME_val_000000.bin (llm.c's shards: 256 int32 {20240520, 1, token count},
then uint16 tokens), tokenizer.bin (llm.c's: 256 int32 {20240328, 2, vocabulary size, end of text}, then of
every token a length byte and its bytes), and for bpe the tokenizer.json of Hugging Face tokenizers.

A document is a file, a chapter of the Bible, or what <|endoftext|> separates; it begins with the end-of-text
token. Held out for validation are pieces spread evenly over the text, so that both parts are of the same
kind. Where a piece was cut out of a document, the next one begins like a new document. A BPE vocabulary sees
the training part alone.
"""
import argparse
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

try:
    import numpy as np
except ImportError:
    sys.exit("error: NumPy is missing: run make setup, then .venv/bin/python data/prepare.py")

VERSION = 1  # of the output: after a change, older output is made again
SHARD_MAGIC, TOKENIZER_MAGIC = 20240520, 20240328
HEADER_BYTES = 1024
END_OF_TEXT = "<|endoftext|>"
BLOCK = 1 << 20  # characters read or tokenized at a time
LARGEST_VOCABULARY = 1 << 16  # a token is a uint16
LONGEST_TOKEN = 255  # bytes: its length is one byte


class UserError(Exception):
    """A mistake of the user's: what is wrong, and what to do."""


# Text: in blocks of any size, in which END_OF_TEXT begins a document; then in pieces, few of them in memory.


def bible_text():
    """The King James Bible from Debian's bible-kjv: verses without their numbers, one a line."""
    try:
        run = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"the program bible does not run ({error}): install Debian's bible-kjv (make setup "
                        "does), or give a text of your own with --text") from error
    lines, chapter = [], None
    for line in run.stdout.splitlines():
        reference, _, verse = line.partition(" ")  # "Ge1:1 In the beginning God created ..."
        if not verse or ":" not in reference:
            raise UserError(f"the program bible printed {line!r}, not a verse: install Debian's bible-kjv, "
                            "or give a text of your own with --text")
        if reference.split(":")[0] != chapter:  # a document is a chapter
            chapter = reference.split(":")[0]
            lines.append(END_OF_TEXT)
        lines.append(verse + "\n")
    return "".join(lines)


def file_blocks(paths):
    """The files one after another, each a document; line ends of any system become newlines."""
    for path in paths:
        yield END_OF_TEXT
        try:
            with open(path, encoding="utf-8-sig") as file:  # drops a byte order mark
                while block := file.read(BLOCK):
                    yield block
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 ({error.reason}): convert it, as with iconv") from error
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror}): give text files") from error


def cut_position(text, begin, size):
    """Where a piece of at most `size` characters ends: after a paragraph, else a line, else a word."""
    for separator in ("\n\n", "\n", " "):
        at = text.rfind(separator, begin + size // 2, begin + size)
        if at >= 0:
            return at + len(separator)
    return begin + size


def pieces(blocks, size):
    """Cuts text into documents and those into pieces of at most `size`. Yields (begins a document, text)."""
    text, at, begins = "", 0, True
    for block in itertools.chain(blocks, [None]):
        text, at = text[at:] + (block or ""), 0
        # Until the end of the text, enough is kept back for a whole piece and a whole marker behind it.
        while len(text) - at > (size + len(END_OF_TEXT) if block is not None else 0):
            marker = text.find(END_OF_TEXT, at, at + size + len(END_OF_TEXT))
            if marker == at:
                at, begins = at + len(END_OF_TEXT), True
                continue
            if marker > 0:
                end = marker
            else:
                end = len(text) if len(text) - at <= size else cut_position(text, at, size)
            yield begins, text[at:end]
            at, begins = end, False


def split(blocks, size, fraction):
    """Deals the pieces out. Yields (validation, begins, text): a piece begins a document where the one before
    went to the other part, too.
    """
    seen = held_out = 0
    previous = None
    for begins, text in pieces(blocks, size):
        seen += len(text)
        validation = held_out + len(text) <= fraction * seen
        held_out += len(text) if validation else 0
        yield validation, begins or validation != previous, text
        previous = validation


# Tokenizers: `vocabulary`, every token's bytes; `end_of_text`, its token; encode(texts), arrays of uint16.


class Bytes:
    vocabulary = [bytes([value]) for value in range(256)] + [END_OF_TEXT.encode()]
    end_of_text = 256

    def encode(self, texts):
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]


class Bpe:
    """Byte-level BPE like GPT-2's, trained on `texts`. A short text may give fewer than `size` tokens."""

    def __init__(self, texts, size):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False,
                                      max_token_length=LONGEST_TOKEN)
        self.tokenizer.train_from_iterator(texts, trainer)
        self.tokenizer.add_special_tokens([END_OF_TEXT])  # after training: the last one, as in GPT-2
        self.end_of_text = self.tokenizer.token_to_id(END_OF_TEXT)
        by_id = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        bytes_of = byte_level_characters()
        self.vocabulary = [bytes(map(bytes_of.get, name)) for name, _ in by_id[:-1]] + [END_OF_TEXT.encode()]

    def encode(self, texts):
        return [np.array(encoding.ids, np.uint16) for encoding in self.tokenizer.encode_batch_fast(texts)]


def byte_level_characters():
    """The character that stands for each byte in a byte-level BPE, turned around: {character: byte}.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100, U+0101, ... in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    return dict(zip(characters, printable + others))


class Gpt2:
    """GPT-2's own vocabulary, by tiktoken, which downloads it once."""

    def __init__(self):
        import tiktoken
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' errors, or a damaged cache: tiktoken has no type of its own
            reason = str(error).splitlines()[0][:200]
            raise UserError(f"GPT-2's vocabulary cannot be downloaded ({reason}): connect to the internet "
                            "once, or use --tokenizer bytes or bpe:N") from error
        self.end_of_text = self.encoding.eot_token
        self.vocabulary = [*map(self.encoding.decode_single_token_bytes, range(self.end_of_text)),
                           END_OF_TEXT.encode()]

    def encode(self, texts):
        return [np.array(tokens, np.uint16) for tokens in self.encoding.encode_ordinary_batch(texts)]


# Output


def header(*values):
    return np.array(values, "<i4").tobytes().ljust(HEADER_BYTES, b"\0")


class ShardWriter:
    """Writes tokens to STEM_000000.bin, STEM_000001.bin, ... of `shard_tokens` each.

    The last takes a rest below a tenth of a shard with it: a loader has no use for shards of a few tokens.
    """

    def __init__(self, stem, shard_tokens):
        self.stem, self.shard_tokens = stem, shard_tokens
        self.counts = []
        self.file = None

    def path(self, shard):
        return Path(f"{self.stem}_{shard:06d}.bin")

    def write(self, tokens):
        while len(tokens) > 0:
            if self.file is None or self.counts[-1] == self.shard_tokens:
                self.finish_shard()
                self.file = open(self.path(len(self.counts)), "wb")
                self.file.write(header())
                self.counts.append(0)
            part = tokens[:self.shard_tokens - self.counts[-1]]
            self.file.write(part.astype("<u2").tobytes())
            self.counts[-1] += len(part)
            tokens = tokens[len(part):]

    def finish_shard(self):
        if self.file is not None:
            self.file.seek(0)
            self.file.write(header(SHARD_MAGIC, 1, self.counts[-1]))
            self.file.close()
            self.file = None

    def close(self):
        self.finish_shard()
        if len(self.counts) > 1 and self.counts[-1] * 10 < self.shard_tokens:
            rest, last = self.path(len(self.counts) - 1), self.path(len(self.counts) - 2)
            self.counts[-2:] = [sum(self.counts[-2:])]
            with open(last, "r+b") as file:
                file.write(header(SHARD_MAGIC, 1, self.counts[-1]))
                file.seek(0, os.SEEK_END)
                file.write(rest.read_bytes()[HEADER_BYTES:])
            rest.unlink()


def write_tokenizer(path, tokenizer):
    with open(path, "wb") as file:
        file.write(header(TOKENIZER_MAGIC, 2, len(tokenizer.vocabulary), tokenizer.end_of_text))
        for token in tokenizer.vocabulary:
            file.write(bytes([len(token)]) + token)


def batches(items):
    """Lists of consecutive items with a few BLOCKs of text: the tokenizers encode a list in parallel."""
    batch, characters = [], 0
    for item in items:
        batch.append(item)
        characters += len(item[2])
        if characters >= 4 * BLOCK:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def write_shards(parts, tokenizer, writers):
    """parts: what split() yields. writers: for training and validation."""
    done = 0
    for batch in batches(parts):
        encoded = tokenizer.encode([text for _, _, text in batch])
        for (validation, begins, text), tokens in zip(batch, encoded):
            if begins:
                writers[validation].write(np.array([tokenizer.end_of_text]))
            writers[validation].write(tokens)
            done += len(text)
        if sys.stderr.isatty():
            print(f"\r{done / 1e6:.1f} million characters", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr, flush=True)
    for writer in writers:
        writer.close()


def make_tokenizer(kind, parts):
    if kind == "bytes":
        return Bytes()
    try:
        if kind == "gpt2":
            return Gpt2()
        return Bpe((text for validation, _, text in parts if not validation), int(kind.removeprefix("bpe:")))
    except ImportError as error:
        raise UserError(f"{kind} needs a Python package ({error}): run make setup, then .venv/bin/python "
                        "data/prepare.py") from error


def prepare(options, name, folder):
    """Writes all files into `folder`. Returns the line that sums them up."""
    bible = None if options.text else bible_text()
    size = len(bible) if bible else sum(os.path.getsize(path) for path in options.text)
    print(f"tokenizing {size / 1e6:.1f} MB of text ({options.tokenizer})", flush=True)
    # Sixteen or more pieces to hold out, unless they were too short to say much.
    piece = int(min(max(size * (options.validation or 1) / 16, 512), BLOCK))

    def parts():
        return split([bible] if bible else file_blocks(options.text), piece, options.validation)

    tokenizer = make_tokenizer(options.tokenizer, parts())
    training = ShardWriter(folder / f"{name}_train", options.shard_tokens)
    validation = ShardWriter(folder / f"{name}_val", options.shard_tokens)
    write_shards(parts(), tokenizer, (training, validation))
    if not training.counts or (options.validation > 0 and not validation.counts):
        raise UserError(f"{size} bytes are too few to train on and to hold out {options.validation:g} of: "
                        "give more text or a larger --validation")
    write_tokenizer(folder / "tokenizer.bin", tokenizer)
    if isinstance(tokenizer, Bpe):
        tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    return (f"{sum(training.counts):,} training tokens in {len(training.counts)} shard(s), "
            f"{sum(validation.counts):,} for validation, vocabulary {len(tokenizer.vocabulary)}")


# Settings, and what was made with them before


def tokenizer_name(text):
    kind, _, size = text.partition(":")
    if text in ("bytes", "gpt2"):
        return text
    if kind == "bpe" and size.isdecimal() and 257 <= int(size) <= LARGEST_VOCABULARY:
        return f"bpe:{int(size)}"
    raise UserError(f"there is no tokenizer {text}: use bytes, gpt2, or bpe:N with N from 257 "
                    f"(256 bytes, end of text) to {LARGEST_VOCABULARY} (a token is a uint16)")


def held_out_fraction(text):
    try:
        if 0 <= float(text) <= 0.5:
            return float(text)
    except ValueError:
        pass
    raise UserError(f"{text} is not a fraction to hold out: give 0 to 0.5")


def shard_size(text):
    if text.isdecimal() and 1000 <= int(text) <= 10**9:
        return int(text)
    raise UserError(f"{text} is no size of a shard: give 1000 to 1000000000 tokens")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}: see --help")


def parse_options(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", metavar="FILE", help="text files in UTF-8 (default: the Bible)")
    parser.add_argument("--tokenizer", type=tokenizer_name, default="bytes",
                        help="bytes, bpe:N or gpt2 (bytes)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (data/NAME-TOKENIZER)")
    parser.add_argument("--shard-tokens", type=shard_size, default=10**8, metavar="N",
                        help="tokens in a shard (10^8)")
    parser.add_argument("--validation", type=held_out_fraction, default=0.05, metavar="FRACTION",
                        help="how much of the text to hold out (0.05)")
    options = parser.parse_args(arguments)
    for path in options.text or []:
        if not os.path.isfile(path):
            raise UserError(f"there is no file {path}: give text files")
    return options


def describe(options):
    """What the output depends on. Text files count as the same while their sizes and times are."""
    texts = [[os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns]
             for path in options.text or []]
    return {"version": VERSION, "text": texts or "bible-kjv", "tokenizer": options.tokenizer,
            "shard_tokens": options.shard_tokens, "validation": options.validation}


def is_there(folder, settings):
    """Whether `folder` holds the whole output of these settings."""
    try:
        made = json.loads((folder / "prepare.json").read_text())
        return made["settings"] == settings and all((folder / name).stat().st_size == size
                                                    for name, size in made["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def files_made(folder):
    """What prepare.json lists, whatever text it was of; of its names only those of files in the folder."""
    try:
        names = json.loads((folder / "prepare.json").read_text())["files"]
        return [folder / name for name in names if Path(name).name == name and (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def replace_output(work, folder, name, settings):
    """Moves the new files into place. prepare.json goes before they come, and comes last: without it, and
    without all that it lists, nothing counts. Files of another text go too: their tokenizer is replaced.
    """
    for old in files_made(folder):
        old.unlink()
    (folder / "prepare.json").unlink(missing_ok=True)
    for pattern in (f"{name}_train_*.bin", f"{name}_val_*.bin", "tokenizer.bin", "tokenizer.json"):
        for old in folder.glob(pattern):
            old.unlink()
    files = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
    (work / "prepare.json").write_text(json.dumps({"settings": settings, "files": files}, indent=1) + "\n")
    for path in [*files, "prepare.json"]:
        os.replace(work / path, folder / path)


def run(options):
    name = Path(options.text[0]).stem if options.text else "kjv"
    folder = options.out or Path(__file__).resolve().parent / f"{name}-{options.tokenizer.replace(':', '')}"
    shown = os.path.relpath(folder)
    settings = describe(options)
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # several runs at once: the others find the work done
    if is_there(folder, settings):
        print(f"{shown}: already there")
        return
    work = folder / ".part"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        summary = prepare(options, name, work)
        replace_output(work, folder, name, settings)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # it is not empty: what went wrong before is to be told
                folder.rmdir()
        raise
    work.rmdir()
    print(f"{shown}: {summary}")


def main():
    try:
        run(parse_options(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'a file'} cannot be read or written ({error.strerror}): check the "
              "path, permissions and free space", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
