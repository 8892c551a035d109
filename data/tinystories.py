#!/usr/bin/env python3
"""TinyStories (Eldan & Li 2023, GPT-3.5's and GPT-4's stories) to tokens: 926 million of GPT-2's to train on.

    data/tinystories.py                     GPT-2's tokens                      -> data/tinystories/
    data/tinystories.py --max-tokens 1e8    a part of it
    data/tinystories.py --tokenizer bpe:4096                                    -> data/tinystories-bpe4096/
    data/tinystories.py --from DIR          from DIR/TinyStories_all_data.tar.gz, downloaded elsewhere, or
                                            from what is in it: DIR/data00.json, ...

Downloads 1.6 GB, unpacks it and writes TinyStories_train.bin, TinyStories_val.bin and tokenizer.bin. As in
llm.c, the first file of the archive is for validation, and stories are shuffled within their files, in the
same order; unlike llm.c, files follow each other in the order of their names. A BPE of its own (bpe:N) is
trained on the first file of the training part.
"""
import argparse
import contextlib
import json
import os
import random
import re
import shutil
import sys
import tarfile
import zlib

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
from download import HUB, Remote, add_source_options, check, discard, fetch, hub_address, limits_of
from parallel import Processes, Progress, add_process_options, size, tokenize

ARCHIVE = "TinyStories_all_data.tar.gz"
SOURCE = Remote("https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
                f"f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/{ARCHIVE}", 1608001638,
                "26cf7605aca15bc4ea6fa637256400d9d01317b28ed296172b2d1dd160cd7699")
EVERY_TOKEN = 10**12
VERSION = 1  # of the output: after a change, older output is made again
SEED = 1337  # llm.c's seed, plus the number of the file in its part
SHARD_TOKENS = 10**9  # GPT-2's tokens fit into one shard; bytes continue in TinyStories_train_000001.bin, ...


def get_archive(options, source, downloads):
    if options.source is not None:
        path = options.source / ARCHIVE
        if not path.is_file():
            raise UserError(f"there is neither {ARCHIVE} nor data00.json in {options.source}: download "
                            f"{source.url} into it")
        check(path, source)
        return path
    progress, done = Progress(), [0]

    def received(count):
        done[0] += count
        progress.show(done[0] / source.size, f"{size(done[0])} of {size(source.size)} downloaded")

    path = downloads / ARCHIVE
    with contextlib.suppress(OSError):
        done[0] = path.with_name(ARCHIVE + ".partial").stat().st_size
    fetch(source._replace(url=options.url), path, limits_of(options), received)
    progress.clear()
    return path


def story_files(folder):
    """data00.json, data01.json, ..., in the order of their names."""
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"data\d+\.json", path.name))


def unpack(archive, folder):
    print(f"unpacking {archive.name}", flush=True)
    folder.mkdir()
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if member.isfile() and re.fullmatch(r"data\d+\.json", name):
                    with open(folder / name, "wb") as file:
                        shutil.copyfileobj(tar.extractfile(member), file)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{archive} is damaged ({error}): download it again") from error


def find_files(options, source, downloads, work):
    """The files of stories, and whether this script made them and may remove them."""
    if options.source is not None:
        for folder in (options.source, options.source / "TinyStories_all_data"):
            if folder.is_dir() and story_files(folder):
                return story_files(folder), False
    unpack(get_archive(options, source, downloads), work / "stories")
    return story_files(work / "stories"), True


def read_stories(path):
    try:
        with open(path, encoding="utf-8") as file:
            return [item["story"].strip() for item in json.load(file)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a file of stories: download the archive again") from error


def tokens_of(job):
    """Runs in one of the processes."""
    path, seed = job
    stories = read_stories(path)
    random.Random(seed).shuffle(stories)
    return tokenize(stories)[0] if stories else np.empty(0, np.uint16)


def jobs(files):
    """((bytes of the file, whether it is for validation), the argument of tokens_of) for every file."""
    for number, path in enumerate(files):
        yield (path.stat().st_size, number == 0), (path, SEED + max(number - 1, 0))


def write_parts(files, processes, work, most):
    """Returns the number of tokens for training (`most` at most) and for validation."""
    def writer(part):
        return ShardWriter(lambda shard: work / f"TinyStories_{part}{f'_{shard:06d}' if shard else ''}.bin",
                           SHARD_TOKENS, work / f"{part}.unfinished")

    training, validation = writer("train"), writer("val")
    progress, done, whole = Progress(), 0, sum(path.stat().st_size for path in files)
    for (bytes_done, held_out), tokens in processes.in_order(tokens_of, jobs(files)):
        (validation if held_out else training).write(tokens if held_out else tokens[:most - training.tokens])
        done += bytes_done
        progress.show(max(done / whole, training.tokens / most),
                      f"{training.tokens / 1e6:.1f} million training tokens")
        if training.tokens >= most:
            break
    progress.clear()
    training.close()
    validation.close()
    return training.tokens, validation.tokens


def make(options, source, downloads, work):
    files, ours = find_files(options, source, downloads, work)
    if len(files) < 2:
        raise UserError(f"there are {len(files)} files of stories, and the first one is for validation: "
                        "download the archive again")
    tokenizer = make_tokenizer(options.tokenizer, lambda: read_stories(files[1]))
    print(f"tokenizing {len(files)} files with {options.processes} processes", flush=True)
    with Processes(options.processes, tokenizer) as processes:
        training, validation = write_parts(files, processes, work, options.max_tokens or EVERY_TOKEN)
    if training == 0 or validation == 0:
        raise UserError("there is no story to train on or to hold out: download the archive again")
    if ours:
        shutil.rmtree(work / "stories")
    write_tokenizer(work, tokenizer)
    return (f"{training:,} training tokens, {validation:,} for validation, vocabulary "
            f"{len(tokenizer.vocabulary)}")


def parse_options(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser, "tinystories")
    parser.add_argument("--max-tokens", type=token_count, metavar="N", help="training tokens at most (all)")
    add_process_options(parser)
    parser.add_argument("--keep", action="store_true", help="leave the archive in the folder's downloads/")
    add_source_options(parser, f"{ARCHIVE}, or data00.json, ... out of it,",
                       SOURCE.url.replace(HUB, hub_address()), "address of the archive elsewhere")
    return parser.parse_args(arguments)


def run(options, source=SOURCE):
    folder = output_folder(options, "tinystories")
    downloads = folder / "downloads"
    settings = {"corpus": "tinystories", "version": VERSION, "max_tokens": options.max_tokens,
                "tokenizer": tokenizer_settings(options.tokenizer)}
    made = make_whole(folder, settings, ("TinyStories_*.bin",),
                      lambda work: make(options, source, downloads, work))
    if made and not options.keep:
        discard(downloads, [downloads / ARCHIVE])


if __name__ == "__main__":
    sys.exit(run_script(lambda: run(parse_options(sys.argv[1:]))))
