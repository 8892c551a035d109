#!/usr/bin/env python3
"""FineWeb and FineWeb-Edu (Penedo et al. 2024: text of the web, 10 or 100 billion tokens) to token shards.

    data/fineweb.py                               FineWeb, 28 GB to download      -> data/fineweb10B/
    data/fineweb.py --type edu                    FineWeb-Edu                     -> data/edu_fineweb10B/
    data/fineweb.py --type edu --version 100B     ten times as much               -> data/edu_fineweb100B/
    data/fineweb.py --max-tokens 1e9              the first billion, to train on; later with more, or all
    data/fineweb.py --from DIR                    from DIR/sample/10BT/*.parquet (or DIR/*.parquet),
                                                  downloaded elsewhere, as by: hf download
                                                  HuggingFaceFW/fineweb --repo-type dataset
                                                  --include 'sample/10BT/*' --local-dir DIR

Writes fineweb_val_000000.bin, then fineweb_train_000001.bin, ... (edu_fineweb_... of FineWeb-Edu), 10^8
tokens each, the last with the rest, and tokenizer.bin. A shard appears when it is whole. A later start
continues after it and gives the same bytes as a run that was never interrupted. While processes tokenize one
file, the next two are downloaded into downloads/ (2 GB each) and removed after use. A BPE of its own (bpe:N)
is trained on the last documents of the first file.
"""
import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import threading
from concurrent.futures import Future, TimeoutError as NotYet
from pathlib import Path
from typing import NamedTuple

from corpus import (
    HEADER_BYTES,
    WORK,
    Parser,
    ShardWriter,
    UserError,
    add_output_options,
    load_tokenizer,
    locked,
    make_tokenizer,
    np,
    output_folder,
    read_record,
    rewrite_shard,
    run_script,
    shard_size,
    token_count,
    tokenizer_settings,
    write_tokenizer,
)
from download import (
    HubFile,
    Remote,
    add_source_options,
    discard,
    fetch,
    hub_address,
    hub_file_address,
    hub_files,
    limits_of,
    partial_of,
)
from parallel import Processes, Progress, add_process_options, size, tokenize

VERSION = 1  # of the output: older output is not continued after a change
DATASETS = {"classic": ("HuggingFaceFW/fineweb", "fineweb"),
            "edu": ("HuggingFaceFW/fineweb-edu", "edu_fineweb")}
ROWS = 500  # documents that a process takes at a time, some megabytes
BPE_ROWS = 20000  # documents that a BPE is trained on
EVERY_TOKEN = 10**15
AHEAD = 2  # files downloaded before they are needed
CONNECTIONS = 2


class Position(NamedTuple):
    """A place in the stream of all tokens: a document, and the number of its tokens before the place."""
    file: int
    row: int
    skip: int


# Where the files are


class LocalFiles:
    """The files of --from."""

    def __init__(self, paths):
        self.paths = paths
        self.downloaded = sum(path.stat().st_size for path in paths)

    def wait(self, number, wanted=None):
        return self.paths[number]

    def release(self, before):
        pass


class Downloads:
    """Files of the hub, downloaded in order, some of them ahead of their use, and removed when released."""

    def __init__(self, files, address, folder, limits, keep):
        self.files, self.address, self.folder, self.limits, self.keep = files, address, folder, limits, keep
        self.started, self.connections = {}, threading.Semaphore(CONNECTIONS)
        self.counts, self.first = [0] * len(files), 0

    @property
    def downloaded(self):
        return sum(self.counts)

    def path(self, number):
        return self.folder / self.files[number].path

    def wait(self, number, wanted=lambda number: False):
        """The path of a file, or None if it is not ready soon. wanted(i): whether to download i ahead."""
        for ahead in range(number, min(number + AHEAD + 1, len(self.files))):
            if ahead == number or wanted(ahead):
                self.start(ahead)
        try:
            self.started[number].result(timeout=0.2)
            return self.path(number)
        except NotYet:
            return None

    def start(self, number):
        if number not in self.started:
            self.started[number] = Future()
            threading.Thread(target=self.download, args=(number,), daemon=True).start()

    def download(self, number):
        file, path = self.files[number], self.path(number)
        self.counts[number] = sum(each.stat().st_size for each in (path, partial_of(path)) if each.exists())

        def received(count):
            self.counts[number] += count

        try:
            with self.connections:
                fetch(Remote(self.address(file.path), file.size, file.sha256), path, self.limits, received)
            self.started[number].set_result(None)
        except BaseException as error:  # wait() raises it
            self.started[number].set_exception(error)

    def release(self, before):
        """Files of lower numbers are no longer needed."""
        for number in range(self.first, before):
            self.counts[number] = self.files[number].size
            if not self.keep:
                self.path(number).unlink(missing_ok=True)
        self.first = max(self.first, before)


def local_files(folder, sample):
    """The parquet files of a sample in --from, as the hub lists them, and their paths."""
    for place in (folder / "sample" / sample, folder):
        paths = sorted(place.glob("*.parquet"))
        if paths:
            return [HubFile(f"sample/{sample}/{path.name}", path.stat().st_size, None)
                    for path in paths], paths
    raise UserError(f"there is no parquet file in {folder}/sample/{sample} or {folder}: download the "
                    "sample's files there (--help says how)")


# Documents


def open_parquet(path):
    import pyarrow
    import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a complete parquet file: download it again") from error
    if "text" not in file.schema_arrow.names:
        raise UserError(f"{path} has no column `text`: give FineWeb's files")
    return file


def batches(path, begin):
    """(number of the first row, texts) of a file, from row `begin` on; earlier rows are not decoded."""
    import pyarrow
    file = open_parquet(path)
    row, group = 0, 0
    while group < file.num_row_groups and row + file.metadata.row_group(group).num_rows <= begin:
        row += file.metadata.row_group(group).num_rows
        group += 1
    try:
        for batch in file.iter_batches(ROWS, row_groups=range(group, file.num_row_groups), columns=["text"]):
            skipped = max(begin - row, 0)
            if skipped < len(batch):
                yield row + skipped, batch.column(0)[skipped:].to_pylist()
            row += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged: download it again") from error


def documents(files, position, report):
    """((file, first row), texts) of all files from a position on; None from time to time during a wait."""
    for number in range(position.file, len(report.sizes)):
        while report.most != EVERY_TOKEN and report.made_chunks < report.chunks:
            yield None  # ask for no file before it is known that the earlier ones are too few
        while (path := files.wait(number, report.wants)) is None:
            report.show()
            yield None  # finished tokens can be written in the meantime
        report.rows[number] = open_parquet(path).metadata.num_rows
        for row, texts in batches(path, position.row if number == position.file else 0):
            report.chunks += 1
            yield (number, row), texts


# Shards


class Output:
    """The folder of shards. Its prepare.json records where in the stream each whole shard ends."""

    def __init__(self, folder, name, settings, files, commit):
        self.folder, self.name, self.settings, self.files, self.commit = folder, name, settings, files, commit
        self.positions = []  # where each whole shard ends
        self.complete = None  # once all are written: the number of training tokens asked for, 0 for all

    def path(self, shard):
        return self.folder / f"{self.name}_{'val' if shard == 0 else 'train'}_{shard:06d}.bin"

    def whole(self, shard):
        """Whether a shard exists, with or without an appended rest."""
        path, expected = self.path(shard), HEADER_BYTES + 2 * self.settings["shard_tokens"]
        return path.is_file() and path.stat().st_size >= expected

    def save(self):
        made = [self.folder / "tokenizer.bin", self.folder / "tokenizer.json", *self.shards()]
        record = {"settings": self.settings, "complete": self.complete, "commit": self.commit,
                  "source": [[file.path, file.size, file.sha256] for file in self.files],
                  "positions": self.positions,
                  "files": {path.name: path.stat().st_size for path in made if path.exists()}}
        temporary = self.folder / WORK / "prepare.json"
        temporary.write_text(json.dumps(record) + "\n")
        os.replace(temporary, self.folder / "prepare.json")

    def shards(self):
        return sorted(self.folder.glob(f"{self.name}_*_??????.bin"))

    def writer(self):
        """A writer that continues after the whole shards. A partial shard after them is removed."""
        tokens, shards = self.settings["shard_tokens"], len(self.positions)
        for path in self.shards():
            if path not in map(self.path, range(shards)):
                path.unlink()
        if shards > 0 and self.path(shards - 1).stat().st_size > HEADER_BYTES + 2 * tokens:
            rewrite_shard(self.path(shards - 1), tokens, np.empty(0, np.uint16), self.unfinished)
        return ShardWriter(self.path, tokens, self.unfinished, [tokens] * shards, alone=1)

    def remove(self):
        for path in (*self.shards(), *(self.folder / name for name in ("tokenizer.bin", "tokenizer.json",
                                                                       "prepare.json"))):
            path.unlink(missing_ok=True)

    def end(self):
        """The position in the stream at which the whole shards end."""
        return self.positions[-1] if self.positions else Position(0, 0, 0)

    @property
    def unfinished(self):
        return self.folder / WORK / "unfinished.bin"


def write_shards(output, chunks, most, report):
    """chunks: ((file, row), (tokens, lengths)) from where the whole shards end. Stops at `most` tokens."""
    writer, resumed = output.writer(), output.end()
    for (file, row), (tokens, lengths) in chunks if writer.tokens < most else ():
        ends, at = np.cumsum(lengths), resumed.skip if (file, row) == resumed[:2] else 0
        tokens = tokens[:at + most - writer.tokens]
        while at < len(tokens):
            part = tokens[at:at + writer.room]
            writer.write(part)
            at += len(part)
            if writer.in_shard == 0:  # a shard ends here
                document = int(np.searchsorted(ends, at, side="right"))
                skip = at - int(ends[document - 1] if document > 0 else 0)
                output.positions.append(Position(file, row + document, skip))
                output.save()
        report.made(file, row + len(lengths), writer.tokens, output.end().file)
        if writer.tokens >= most:
            break
    writer.close()
    return writer.counts


class Report:
    """Progress of the run."""

    def __init__(self, files, sizes, output, most):
        self.files, self.sizes, self.most = files, sizes, most
        self.rows = {}  # number of rows of each open file
        self.chunks = self.made_chunks = 0  # given to processes, and tokenized
        self.file, self.row, _ = output.end()
        self.tokens = len(output.positions) * output.settings["shard_tokens"]
        self.progress = Progress()

    def bytes_done(self):
        share = self.row / self.rows[self.file] if self.file in self.rows else 0
        return sum(self.sizes[:self.file]) + share * self.sizes[self.file]

    def wants(self, number):
        """Whether a file is needed, estimated from the bytes per token so far."""
        before = sum(self.sizes[:number])
        return self.most == EVERY_TOKEN or self.tokens * before < self.most * self.bytes_done()

    def made(self, file, row, tokens, needed):
        """needed: the first file that a later run would need."""
        self.file, self.row, self.tokens = file, row, tokens
        self.made_chunks += 1
        self.files.release(needed)
        self.show()

    def show(self):
        self.progress.show(max(self.bytes_done() / sum(self.sizes), self.tokens / self.most),
                           f"{self.tokens / 1e9:.3f} billion tokens",
                           f"file {self.file + 1} of {len(self.sizes)}",
                           f"{size(self.files.downloaded)} of {size(sum(self.sizes))} there")


# The run


def describe(options, tokenizer):
    return {"corpus": "fineweb", "version": VERSION, "type": options.type, "sample": options.version,
            "tokenizer": tokenizer, "shard_tokens": options.shard_tokens}


def take_up(output, record, again):
    """The output of an earlier run with the same settings: shards up to the first missing one.
    again: whether whole shards after a missing one may be made again"""
    shown = os.path.relpath(output.folder)
    if not record and output.shards():  # llm.c's shards have these names, too
        raise UserError(f"{shown} holds shards and no prepare.json that says how they were made: use them as "
                        "they are, or give another --out")
    if not record:
        return
    if record.get("settings") != output.settings:
        raise UserError(f"{shown} holds something else (another tokenizer or size of shards, perhaps): give "
                        "another --out, or remove it")
    if [[file.path, file.size] for file in output.files] != [entry[:2] for entry in record["source"]]:
        raise UserError(f"{shown} was begun from other files: give those, or another --out")
    positions = [Position(*position) for position in record["positions"]]
    made = {*record["files"], output.path(len(positions)).name}  # a run may end before it lists its last shard
    if others := [path for path in output.shards() if path.name not in made]:
        raise UserError(f"{shown}/{others[0].name} was not made by this script: move it away, or give another "
                        "--out")
    shards = next((shard for shard in range(len(positions)) if not output.whole(shard)), len(positions))
    if not again and any(map(output.whole, range(shards, len(positions)))):
        raise UserError(f"{shown}/{output.path(shards).name} is missing or too short, though later shards are "
                        "there: put it back, or give --again to make it and all later ones again")
    output.positions = positions[:shards]
    output.commit = output.commit or record["commit"]


def is_complete(options, record, folder):
    """Whether all tokens that are asked for exist."""
    complete = record.get("complete")
    if complete is None or not all((folder / name).is_file() and (folder / name).stat().st_size == size
                                   for name, size in record["files"].items()):
        return False
    return complete == 0 or (options.max_tokens is not None and options.max_tokens <= complete)


def find_source(options, record):
    """(commit, files, paths): paths only with --from. A resumed run keeps the commit that it began with."""
    sample = f"{options.version}T"
    if options.source is not None:
        return None, *local_files(options.source, sample)
    if record.get("commit"):
        return record["commit"], [HubFile(*entry) for entry in record["source"]], None
    commit, files = hub_files(options.url, DATASETS[options.type][0], f"sample/{sample}", limits_of(options))
    files = [file for file in files if re.fullmatch(rf"sample/{sample}/[\w.-]+\.parquet", file.path)]
    if not files:
        raise UserError(f"{options.url} has no sample/{sample} of {DATASETS[options.type][0]}: "
                        "give --from DIR")
    return commit, files, None


def find_files(options, folder, files, commit, paths):
    if paths is not None:
        return LocalFiles(paths)

    def address(path):
        return hub_file_address(options.url, DATASETS[options.type][0], commit, path)

    return Downloads(files, address, folder / "downloads", limits_of(options), options.keep)


def get(files, number, report):
    """The path of one file, without downloading others ahead: if the source fails, nothing is left behind."""
    while (path := files.wait(number)) is None:
        report.show()
    return path


def find_tokenizer(options, output, files, report):
    """The tokenizer of the run that is resumed, else the one asked for."""
    if output.positions:
        return load_tokenizer(output.folder)

    def texts():
        path = get(files, 0, report)
        rows = open_parquet(path).metadata.num_rows
        return (text or "" for _, batch in batches(path, max(rows - BPE_ROWS, 0)) for text in batch)

    return make_tokenizer(options.tokenizer, texts)


def make(options, output, files):
    """Writes all missing shards. Returns the line that sums the corpus up."""
    sizes = [file.size for file in output.files]
    most = options.shard_tokens + options.max_tokens if options.max_tokens else EVERY_TOKEN
    begun = f", after shard {len(output.positions) - 1}, which is there" if output.positions else ""
    print(f"{len(sizes)} files, {size(sum(sizes))}, {options.processes} processes{begun}", flush=True)
    report = Report(files, sizes, output, most)
    open_parquet(get(files, output.end().file, report))  # before anything is written
    tokenizer = find_tokenizer(options, output, files, report)
    write_tokenizer(output.folder, tokenizer)
    output.save()
    with Processes(options.processes, tokenizer) as processes:
        chunks = processes.in_order(tokenize, documents(files, output.end(), report))
        counts = write_shards(output, chunks, most, report)
    report.progress.clear()
    if len(counts) < 2:
        output.remove()
        raise UserError(f"{sum(counts):,} tokens do not fill a shard for validation and another one to train "
                        "on: give a smaller --shard-tokens, or more files")
    output.complete = options.max_tokens if sum(counts) >= most else 0
    output.save()
    return (f"{sum(counts[1:]):,} training tokens in {len(counts) - 1} shard(s), {counts[0]:,} for "
            f"validation, vocabulary {len(tokenizer.vocabulary)}")


def parse_options(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--type", choices=("classic", "edu"), default="classic",
                        help="FineWeb, or its educational part (classic)")
    parser.add_argument("-v", "--version", choices=("10B", "100B"), default="10B", help="tokens (10B)")
    parser.add_argument("-s", "--shard-tokens", "--shard_size", type=shard_size, default=10**8, metavar="N",
                        help="tokens in a shard (10^8)")
    add_output_options(parser, "fineweb10B or the like")
    parser.add_argument("--max-tokens", type=token_count, metavar="N", help="training tokens at most (all)")
    add_process_options(parser)
    parser.add_argument("--again", action="store_true",
                        help="where a shard is missing, make it and all later ones again")
    parser.add_argument("--keep", action="store_true", help="leave downloads in the folder's downloads/")
    add_source_options(parser, "sample/10BT/*.parquet", hub_address(),
                       "a mirror of the Hugging Face hub (HF_ENDPOINT)")
    options = parser.parse_args(arguments)
    try:
        import pyarrow.parquet  # noqa: F401 (before anything is written)
    except ImportError as error:
        raise UserError(f"FineWeb's files need pyarrow ({error}): run make setup, then .venv/bin/python "
                        "data/fineweb.py") from error
    return options


def run(options):
    name = DATASETS[options.type][1]
    folder = output_folder(options, f"{name}{options.version}")
    shown, settings = os.path.relpath(folder), describe(options, tokenizer_settings(options.tokenizer))
    with locked(folder):
        record = read_record(folder)
        if record.get("settings") == settings and is_complete(options, record, folder):
            print(f"{shown}: already there")
            return
        commit, files, paths = find_source(options, record)
        output = Output(folder, name, settings, files, commit)
        take_up(output, record, options.again)
        work = folder / WORK
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            summary = make(options, output, find_files(options, folder, files, commit, paths))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        if not options.keep:
            downloads = folder / "downloads"
            discard(downloads, [downloads / file.path for file in files])
    print(f"{shown}: {summary}")


if __name__ == "__main__":
    sys.exit(run_script(lambda: run(parse_options(sys.argv[1:]))))
