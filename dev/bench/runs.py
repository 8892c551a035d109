"""What benchmarks of training quality share: runs that are made once and kept, and tables of their losses.

A finished run is a folder that is not run again, with how it was made in made_by.json. One that was stopped
leaves NAME.part, and begins anew.
"""
import argparse
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
sys.path.insert(0, str(ROOT / "dev"))
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


def train(trainer, options, folder, finish=lambda part: {}):
    """Trains into `folder`, which appears when the run is complete. Returns its seconds.
    finish: told where the run lies before that; what it returns is kept in made_by.json."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    program = hashlib.sha256(Path(trainer).read_bytes()).hexdigest()[:12]
    begin = time.monotonic()
    start(trainer, options, part, folder.name)
    found = finish(part)
    seconds = time.monotonic() - begin
    for pattern in ("model_*.bin", "state_*.bin", "DONE_*"):
        for file in part.glob(pattern):
            file.unlink()
    made = {"options": options, "program": program, "seconds": seconds, **found}
    (part / KEPT).write_text(json.dumps(made))
    part.rename(folder)
    return seconds


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


# ----------------------------------------------------------------------------------------------------- tables

def paired(runs, base):
    """Differences of losses in percent of the base's, over the seeds that both have.   {seed: run}"""
    return [100 * (validation_loss(runs[seed]) / validation_loss(base[seed]) - 1)
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
