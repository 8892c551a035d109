"""What benchmarks of training quality share: runs that are made once and kept, and tables of their losses.

A finished run is a folder that is not run again, with how it was made in made_by.json. One that was stopped
leaves NAME.part, and begins anew.
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


def command_of(trainer, options, folder):
    words = [(name,) if value is True else (name, str(value)) for name, value in options.items()]
    return [str(Path(trainer).resolve()), *(word for option in words for word in option), "-o", str(folder)]


def start(trainer, options, folder, name):
    """Runs the trainer to its end. One thread a process: two of them fill two cores, and matmuls are too
    small for more."""
    command = command_of(trainer, options, folder)
    result = subprocess.run(command, capture_output=True, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines() or ["no message"]
        raise UserError(f"{name} failed ({lines[-1]}): run this: {' '.join(command)}")


@contextlib.contextmanager
def making(folder, trainer, options):
    """(where a run lies until it is complete, what is kept of how it was made: with its seconds, then)"""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    made = {"options": options, "program": hashlib.sha256(Path(trainer).read_bytes()).hexdigest()[:12]}
    begin = time.monotonic()
    yield part, made
    made["seconds"] = time.monotonic() - begin
    (part / KEPT).write_text(json.dumps(made))
    part.rename(folder)


def train(trainer, options, folder, finish=lambda part: {}):
    """Trains into `folder`, which appears when the run is complete. Returns its seconds.
    finish: told where the run lies before that; what it returns is kept in made_by.json."""
    with making(folder, trainer, options) as (part, made):
        start(trainer, options, part, folder.name)
        made.update(finish(part))
        for pattern in ("model_*.bin", "state_*.bin", "DONE_*"):
            for file in part.glob(pattern):
                file.unlink()
    return made["seconds"]


def made_by(folder, options):
    """How a finished run was made; None where there is none."""
    if not folder.exists():
        return None
    try:
        made = json.loads((folder / KEPT).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no run of this benchmark ({error}): remove it") from error
    if made["options"] != options:
        raise UserError(f"{folder} was run with other options: remove it, or give another --out")
    return made


def above_zero(kind, or_zero=False):
    """What argparse takes for a number of this kind that is neither negative, infinite, nan nor zero."""
    def parse(text):
        value = kind(text)
        if not 0 <= value < math.inf or (value == 0 and not or_zero):
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value
    parse.__name__ = kind.__name__  # "invalid int value"
    return parse


def check_report(path):
    """Before hours of runs, not behind them."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UserError(f"--report {path} cannot be written: give a file in a folder that is there")


class Budget:
    """No run begins that may end later than `minutes` from now, by the longest one so far."""

    def __init__(self, minutes):
        self.minutes, self.begin, self.longest = minutes, time.monotonic(), 0.0

    def is_spent(self):
        return time.monotonic() - self.begin + self.longest > self.minutes * 60

    def spend(self, seconds):
        self.longest = max(self.longest, seconds)


def first_missing(jobs, made):
    """(number, job) of the first for which made(job) is None; None where there is none."""
    return next(((number, job) for number, job in enumerate(jobs, 1) if made(job) is None), None)


def run_missing(minutes, find, run):
    """find(): (number, job) of what is to be run next; None: nothing is   run(number, job): its seconds"""
    budget = Budget(minutes)
    while (found := find()) is not None:
        if budget.is_spent():
            print(f"{minutes:g} minutes are over: run this again to go on", flush=True)
            return
        budget.spend(run(*found))


# --------------------------------------------------------------------------------------------------- measures

def time_and_waits(steps, syncs, length):
    """Of a process, behind its first `length` steps: (steps, their seconds, those that it waited for syncs)"""
    seconds = {line["step"]: line["seconds"] for line in steps[length:]}
    waited = sum(line["waited_seconds"] for line in syncs if line["apply_step"] in seconds)
    return len(seconds), sum(seconds.values()), waited


# ----------------------------------------------------------------------------------------------------- tables

def paired(runs, base, loss=validation_loss):
    """Differences of losses in percent of the base's, over the seeds that both have.   {seed: what loss() takes}"""
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
