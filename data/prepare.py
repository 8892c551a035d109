#!/usr/bin/env python3
"""Text to token shards.

    data/prepare.py                                     the King James Bible, as bytes    -> data/kjv-bytes/
    data/prepare.py --tokenizer bpe:1024                the same, in a vocabulary of 1024 -> data/kjv-bpe1024/
    data/prepare.py --text a.txt b.txt --out data/mine  your own text, UTF-8
    data/prepare.py --text a.jsonl --out data/mine      the same, a document in the field "text" of each line

Writes NAME_train_000000.bin, ..., NAME_val_000000.bin (llm.c's shards: 256 int32 {20240520, 1, token count},
then uint16 tokens), tokenizer.bin (llm.c's: 256 int32 {20240328, 2, vocabulary size, end of text}, then of
every token a length byte and its bytes), and for bpe the tokenizer.json of Hugging Face tokenizers.

A document is a file, a line of a .jsonl file, a chapter of the Bible, or a part between two
<|endoftext|>; it begins with the end-of-text token. Pieces spread evenly over the text are held out for
validation, so that both parts are of the same kind. Where a piece was cut out of a document, the next piece
begins like a new document. A BPE vocabulary is trained on the training part alone.
"""
import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from corpus import (
    END_OF_TEXT,
    Parser,
    ShardWriter,
    UserError,
    is_kind,
    make_tokenizer,
    make_whole,
    np,
    run_script,
    shard_size,
    tokenizer_choice,
    tokenizer_file,
    tokenizer_label,
    write_tokenizer,
)
from parallel import whole_characters

VERSION = 1  # of the output: after a change, older output is made again
BLOCK = 1 << 20  # characters read or tokenized at a time


# Text comes in blocks of any size, in which END_OF_TEXT begins a document, and is then cut into pieces, of
# which few are in memory at a time.


def bible_text():
    """The King James Bible from Debian's bible-kjv: verses without their numbers, one a line."""
    try:
        run = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"the program bible does not run ({error}): install Debian's bible-kjv (make setup "
                        "does as root, without DEPS_HOME), or give a text of your own with --text") from error
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
    """The files one after another, each a document, with line ends of any system turned into newlines."""
    for path in paths:
        try:
            with open(path, encoding="utf-8-sig") as file:  # drops a byte order mark
                if path.endswith(".jsonl"):
                    yield from json_documents(path, file)
                    continue
                yield END_OF_TEXT
                while block := file.read(BLOCK):
                    yield block
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 ({error.reason}): convert it with iconv") from error
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror}): give text files") from error


def json_documents(path, lines):
    texts, size = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = whole_characters(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f'{path} line {number} is not a JSON object whose field "text" holds a string: correct '
                            "it, or give plain text under another name") from error
        texts.append(END_OF_TEXT + text.replace("\r\n", "\n").replace("\r", "\n"))
        size += len(text)
        if size >= BLOCK:
            yield "".join(texts)
            texts, size = [], 0
    yield "".join(texts)


def cut_position(text, begin, size):
    """The end of a piece of at most `size` characters: after a paragraph, else a line, else a word."""
    for separator in ("\n\n", "\n", " "):
        at = text.rfind(separator, begin + size // 2, begin + size)
        if at >= 0:
            return at + len(separator)
    return begin + size


def pieces(blocks, size):
    """Cuts text into documents, and these into pieces of at most `size`. Yields (begins a document, text)."""
    text, at, begins = "", 0, True
    for block in itertools.chain(blocks, [None]):
        text, at = text[at:] + (block or ""), 0
        # Until the end of the text, keep back enough for a whole piece and a whole marker after it.
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
    """Distributes the pieces. Yields (validation, begins, text). A piece also begins a document if the one
    before went to the other part.
    """
    seen = held_out = 0
    previous = None
    for begins, text in pieces(blocks, size):
        seen += len(text)
        validation = held_out + len(text) <= fraction * seen
        held_out += len(text) if validation else 0
        yield validation, begins or validation != previous, text
        previous = validation


# Output


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
    """parts: as split() yields them. writers: for training and validation."""
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


def prepare(options, name, folder):
    """Writes all files into `folder`. Returns the line that sums them up."""
    bible = None if options.text else bible_text()
    size = len(bible) if bible else sum(os.path.getsize(path) for path in options.text)
    print(f"tokenizing {size / 1e6:.1f} MB of text ({options.tokenizer})", flush=True)
    # At least sixteen pieces are held out, unless they would be too short.
    piece = int(min(max(size * (options.validation or 1) / 16, 512), BLOCK))

    def parts():
        return split([bible] if bible else file_blocks(options.text), piece, options.validation)

    def writer(part):
        return ShardWriter(lambda shard: folder / f"{name}_{part}_{shard:06d}.bin", options.shard_tokens,
                           folder / f"{part}.unfinished")

    tokenizer = make_tokenizer(options.tokenizer,
                               lambda: (text for validation, _, text in parts() if not validation))
    training, validation = writer("train"), writer("val")
    write_shards(parts(), tokenizer, (training, validation))
    if not training.counts or (options.validation > 0 and not validation.counts):
        raise UserError(f"{size} bytes are too few to train on and to hold out {options.validation:g} of: "
                        "give more text or a larger --validation")
    write_tokenizer(folder, tokenizer)
    return (f"{sum(training.counts):,} training tokens in {len(training.counts)} shard(s), "
            f"{sum(validation.counts):,} for validation, vocabulary {len(tokenizer.vocabulary)}")


# Settings


def held_out_fraction(text):
    try:
        if 0 <= float(text) <= 0.5:
            return float(text)
    except ValueError:
        pass
    raise UserError(f"{text} is not a fraction to hold out: give 0 to 0.5")


def parse_options(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", metavar="FILE", help="text or .jsonl files in UTF-8 (default: the Bible)")
    parser.add_argument("--tokenizer", type=tokenizer_choice, default="bytes",
                        help="bytes, bpe:N, gpt2, or the folder of a corpus with that vocabulary (bytes)")
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
    """The settings that the output depends on. Files with the same sizes and times count as unchanged."""
    def stamp(path):
        return [os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns]

    tokenizer = options.tokenizer
    if not is_kind(tokenizer):
        tokenizer = stamp(tokenizer_file(Path(tokenizer)))
    described = {"version": VERSION, "text": [*map(stamp, options.text or [])] or "bible-kjv",
                 "tokenizer": tokenizer, "shard_tokens": options.shard_tokens, "validation": options.validation}
    if any(path.endswith(".jsonl") for path in options.text or []):
        described["jsonl"] = "text"  # earlier versions took it for plain text
    return described


def run(options):
    name = Path(options.text[0]).stem if options.text else "kjv"
    # Patterns such as *_train_*.bin must not match the validation shards of a text named wiki_train.txt.
    name = name.replace("_train", "-train").replace("_val", "-val")
    folder = options.out or Path(__file__).resolve().parent / f"{name}-{tokenizer_label(options.tokenizer)}"
    make_whole(folder, describe(options), (f"{name}_train_*.bin", f"{name}_val_*.bin"),
               lambda work: prepare(options, name, work))


if __name__ == "__main__":
    sys.exit(run_script(lambda: run(parse_options(sys.argv[1:]))))
