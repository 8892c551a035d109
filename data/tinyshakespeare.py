#!/usr/bin/env python3
"""Tiny Shakespeare (1.1 MB of plays, github.com/karpathy/char-rnn) to tokens.

    data/tinyshakespeare.py                      GPT-2's tokens    -> data/tinyshakespeare/
    data/tinyshakespeare.py --tokenizer bytes    bytes             -> data/tinyshakespeare-bytes/
    data/tinyshakespeare.py --from DIR           from DIR/input.txt, downloaded elsewhere

Writes tiny_shakespeare_train.bin, tiny_shakespeare_val.bin and tokenizer.bin. As in llm.c, every speech is
a document, and the first 32,768 tokens are for validation. A BPE of its own (bpe:N) is trained on the text
after its first tenth.
"""
import argparse
import shutil
import sys

from corpus import (
    Parser,
    ShardWriter,
    UserError,
    add_output_options,
    make_tokenizer,
    make_whole,
    np,
    output_folder,
    run_script,
    token_count,
    tokenizer_settings,
    write_tokenizer,
)
from download import Remote, add_source_options, obtain

SOURCE = Remote("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                1115394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")
VERSION = 1  # of the output; with another number, older output is made again
VALIDATION = 32768


def speeches(text):
    """Documents, each of which ends with an empty line."""
    *whole, last = text.split("\n\n")
    return [speech + "\n\n" for speech in whole] + [last]


def write(path, tokens):
    writer = ShardWriter(lambda _: path, max(len(tokens), 1), path.with_suffix(".unfinished"))
    writer.write(tokens)
    writer.close()


def make(options, source, work):
    text = obtain(options, source, "input.txt", work / "download").read_text(encoding="utf-8")
    shutil.rmtree(work / "download", ignore_errors=True)
    documents = speeches(text)
    tokenizer = make_tokenizer(options.tokenizer, lambda: documents[len(documents) // 10:])
    begin = np.array([tokenizer.end_of_text], np.uint16)
    tokens = np.concatenate([part for document in tokenizer.encode(documents) for part in (begin, document)])
    training = tokens[VALIDATION:][:options.max_tokens]
    if len(training) == 0:
        raise UserError(f"{len(tokens)} tokens are too few to hold out {VALIDATION}: use a smaller bpe:N")
    write(work / "tiny_shakespeare_val.bin", tokens[:VALIDATION])
    write(work / "tiny_shakespeare_train.bin", training)
    write_tokenizer(work, tokenizer)
    return (f"{len(training):,} training tokens, {VALIDATION:,} for validation, "
            f"vocabulary {len(tokenizer.vocabulary)}")


def parse_options(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser, "tinyshakespeare")
    parser.add_argument("--max-tokens", type=token_count, metavar="N", help="training tokens at most (all)")
    add_source_options(parser, "input.txt", SOURCE.url, "address of that file elsewhere")
    return parser.parse_args(arguments)


def run(options, source=SOURCE):
    settings = {"corpus": "tinyshakespeare", "version": VERSION, "max_tokens": options.max_tokens,
                "tokenizer": tokenizer_settings(options.tokenizer)}
    make_whole(output_folder(options, "tinyshakespeare"), settings, ("tiny_shakespeare_*.bin",),
               lambda work: make(options, source, work))


if __name__ == "__main__":
    sys.exit(run_script(lambda: run(parse_options(sys.argv[1:]))))
