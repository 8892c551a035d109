#!/usr/bin/env python3
"""Compares finished runs by what they wrote into their folders (metrics.jsonl and metrics_00001.jsonl, ...).

    dev/compare.py RUN...      the first is what the others are compared with

Bytes are those that one process sent, the largest over processes; of a sync, likewise. "In bf16" halves the
first run's bytes: on a CPU, data-parallel training here sends fp32. A worker's wait is that of its rank that
waited longest: the time for which training stood still before a merge. Waiting for a slower worker is in it.
"""
import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path


class UserError(Exception):
    """A mistake of the user's: what is wrong, and what to do."""


@dataclass
class ProcessLog:
    """The lines of one process by type."""
    worker: int
    rank: int
    steps: list
    evals: list
    syncs: list
    end: dict


@dataclass
class Run:
    name: str
    workers: int
    ranks: int
    parameters: int
    processes: list  # of ProcessLog: worker 0's ranks, worker 1's ranks, ...

    def of_worker(self, worker):
        return [p for p in self.processes if p.worker == worker]


def read_lines(path):
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give the folder of a run") from error
    lines = {"run": [], "step": [], "eval": [], "sync": [], "checkpoint": [], "resume": [], "end": []}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fields = json.loads(line)
            lines.setdefault(fields["type"], []).append(fields)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} line {number} is no line of metrics: give a run's folder") from error
    if len(lines["run"]) != 1 or lines["run"][0]["version"] not in (1, 2):
        raise UserError(f"{path} is not the log of one run, version 1 or 2: give the folder of a run")
    if len(lines["end"]) != 1 or not lines["step"]:
        raise UserError(f"the run in {path.parent} did not finish: wait for it, or start it again")
    return lines


def read_run(folder):
    """The run in a folder, all of its processes."""
    first = read_lines(folder / "metrics.jsonl")
    run = first["run"][0]
    logs = [first] + [read_lines(folder / f"metrics_{process:05d}.jsonl")
                      for process in range(1, run["workers"] * run["ranks"])]
    processes = [ProcessLog(lines["run"][0]["worker"], lines["run"][0]["rank"], lines["step"], lines["eval"],
                            lines["sync"], lines["end"][0]) for lines in logs]
    return Run(folder.resolve().name, run["workers"], run["ranks"], run["parameters"], processes)


# --------------------------------------------------------------------------------------------------- measures

def validation_loss(run):
    """Of the last validation; None where the run had none."""
    return run.processes[0].evals[-1]["loss"] if run.processes[0].evals else None


def bytes_sent(run):
    return max(p.end["inner_bytes_sent"] + p.end["outer_bytes_sent"] for p in run.processes)


def bytes_by_step(process):
    """{step: bytes}: inner ones in the step that reports them, a sync's in the step that sends it."""
    result, before = {}, 0
    for line in process.steps:
        result[line["step"]] = line["inner_bytes_sent"] - before
        before = line["inner_bytes_sent"]
    for line in process.syncs:
        result[line["send_step"]] += line["bytes_sent"]
    return result


def peak(run):
    """(bytes, of what): the most that a process sends at once."""
    syncs = [line["bytes_sent"] for p in run.processes for line in p.syncs]
    if syncs:
        return max(syncs), "a sync"
    return max(max(bytes_by_step(p).values()) for p in run.processes), "a step"


def waited(run, worker):
    """(seconds, fraction of the training time), of the rank that waited longest."""
    end = max((p.end for p in run.of_worker(worker)), key=lambda end: end["waited_seconds"])
    return end["waited_seconds"], end["waited_seconds"] / end["train_seconds"]


def tokens(run):
    return sum(run.of_worker(worker)[0].steps[-1]["tokens"] for worker in range(run.workers))


def tokens_per_second(run):
    return tokens(run) / max(p.end["train_seconds"] for p in run.processes)


# ------------------------------------------------------------------------------------------------------ table

def size_text(count):
    """1234567 -> '1.23 MB'"""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            digits = 2 if count < 10 * size else 1 if count < 100 * size else 0
            return f"{count / size:.{digits}f} {unit}"
    return f"{count} bytes"


def ratio_text(more, less):
    """How many times fewer bytes; '-' where one of them sent nothing."""
    if more == 0 or less == 0:
        return "-"
    ratio = more / less
    return f"{ratio:.{1 if ratio < 10 else 0}f}x"


def loss_text(loss, first):
    if loss is None:
        return "-"
    return f"{loss:.4f}" + ("" if first in (None, loss) else f" ({100 * (loss / first - 1):+.2f}%)")


def waited_text(run, worker):
    if worker >= run.workers or not any(p.syncs for p in run.processes):
        return "-"
    seconds, fraction = waited(run, worker)
    return f"{seconds:.2f} s ({100 * fraction:.2f}%)"


def table(runs):
    """Rows of text: a label, then a cell for each run."""
    first = runs[0]
    rows = [
        ["", *(run.name for run in runs)],
        ["workers x ranks", *(f"{run.workers} x {run.ranks}" for run in runs)],
        ["tokens trained on", *(f"{tokens(run):,}" for run in runs)],
        ["validation loss", loss_text(validation_loss(first), None),
         *(loss_text(validation_loss(run), validation_loss(first)) for run in runs[1:])],
        ["sent by a process", *(size_text(bytes_sent(run)) for run in runs)],
        [f"  fewer than {first.name}, as sent", "-",
         *(ratio_text(bytes_sent(first), bytes_sent(run)) for run in runs[1:])],
        ["  fewer than that in bf16", "-",
         *(ratio_text(bytes_sent(first) / 2, bytes_sent(run)) for run in runs[1:])],
        ["most sent at once", *("{} in {}".format(size_text(peak(run)[0]), peak(run)[1]) for run in runs)],
    ]
    for worker in range(max(run.workers for run in runs)):
        if any(waited_text(run, worker) != "-" for run in runs):
            rows.append([f"worker {worker} waited", *(waited_text(run, worker) for run in runs)])
    rows.append(["tokens/s, all workers", *(f"{tokens_per_second(run):,.0f}" for run in runs)])
    return rows


def print_table(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join(cells))
        if number == 0:
            print("-" * (sum(widths) + 2 * (len(widths) - 1)))


def main():
    parser = argparse.ArgumentParser(description="Compares runs by loss, bytes sent and time waited.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (its -o)")
    try:
        runs = [read_run(folder) for folder in parser.parse_args().runs]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print_table(table(runs))
    if len({tokens(run) for run in runs}) > 1:
        print("The runs trained on different numbers of tokens: losses and bytes do not compare.")


if __name__ == "__main__":
    main()
