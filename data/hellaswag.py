#!/usr/bin/env python3
"""HellaSwag's validation set (Zellers et al. 2019: 10,042 beginnings with four endings each) as an eval set.

    data/hellaswag.py                                  GPT-2's tokens              -> data/hellaswag/
    data/hellaswag.py --tokenizer data/mine            for a model trained on that -> data/hellaswag-mine/
    data/hellaswag.py --from DIR                       from DIR/hellaswag_val.jsonl, downloaded elsewhere

Writes hellaswag_val.bin, in the format that llmc/text/eval_set.h describes, and tokenizer.bin. A model needs
the questions in the vocabulary that it was trained with: --tokenizer takes the folder of its corpus. As in
llm.c, the context is `ctx`, an ending has a space before it, and both are tokenized separately.
"""
import argparse
import json
import shutil
import sys

from corpus import (
    Parser,
    UserError,
    add_output_options,
    header,
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
from parallel import whole_characters

SOURCE = Remote("https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
                sha256="0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588")
VERSION = 1  # of the output: after a change, older output is made again
MAGIC = 20240522
START = 65535  # begins an example, and so is no token
MOST_EXAMPLES = LONGEST = 65535  # an index and an example's bytes are uint16


def read_examples(path):
    """(label, [context, ending, ...]) for every line."""
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            label, context, endings = int(item["label"]), item["ctx"], [f" {end}" for end in item["endings"]]
            examples.append((label, [whole_characters(text) for text in (context, *endings)]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} line {number} is not an example of HellaSwag: download it again") from error
        if not 0 <= label < len(endings):
            raise UserError(f"{path} line {number} has no correct ending: give the validation set")
    return examples


def example_words(index, label, encoded):
    """One example as uint16: START, bytes, index, label, number of endings; n and n tokens of each text."""
    words = [START, 0, index, label, len(encoded) - 1]
    for tokens in encoded:
        words += [len(tokens), *tokens.tolist()]
    words[1] = 2 * len(words)
    if words[1] > LONGEST or START in words[1:] or any(len(tokens) == 0 for tokens in encoded):
        raise UserError(f"example {index} does not fit in this vocabulary: use another tokenizer")
    return np.array(words, "<u2")


def make(options, source, work):
    examples = read_examples(obtain(options, source, "hellaswag_val.jsonl", work / "download"))
    shutil.rmtree(work / "download", ignore_errors=True)
    examples = examples[:options.max_examples][:MOST_EXAMPLES]
    if not examples:
        raise UserError("there is no example in hellaswag_val.jsonl: download it again")
    tokenizer = make_tokenizer(options.tokenizer, None)
    encoded = iter(tokenizer.encode([text for _, texts in examples for text in texts]))
    words = [example_words(index, label, [next(encoded) for _ in texts])
             for index, (label, texts) in enumerate(examples)]
    with open(work / "hellaswag_val.bin", "wb") as file:
        file.write(header(MAGIC, 1, len(words), max(example.nbytes for example in words)))
        for example in words:
            file.write(example.tobytes())
    write_tokenizer(work, tokenizer)
    return f"{len(words):,} examples, vocabulary {len(tokenizer.vocabulary)}"


def parse_options(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser, "hellaswag")
    parser.add_argument("--max-examples", type=token_count, metavar="N", help="the first N examples (all)")
    add_source_options(parser, "hellaswag_val.jsonl", SOURCE.url, "address of that file elsewhere")
    options = parser.parse_args(arguments)
    if options.tokenizer.startswith("bpe:"):
        raise UserError(f"--tokenizer {options.tokenizer} would be a new vocabulary, which no model knows: "
                        "give the folder of the corpus that the model was trained on")
    return options


def run(options, source=SOURCE):
    settings = {"corpus": "hellaswag", "version": VERSION, "max_examples": options.max_examples,
                "tokenizer": tokenizer_settings(options.tokenizer)}
    make_whole(output_folder(options, "hellaswag"), settings, ("hellaswag_val.bin",),
               lambda work: make(options, source, work))


if __name__ == "__main__":
    sys.exit(run_script(lambda: run(parse_options(sys.argv[1:]))))
