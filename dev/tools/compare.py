#!/usr/bin/env python3
"""Compares runs by the logs in their folders (metrics.jsonl and metrics_00001.jsonl, ...), finished or not.

    dev/tools/compare.py RUN...      compares the others with the first

Bytes are those that one process sent, in the run or in a sync, and the largest over processes. "In bf16"
halves the first run's bytes, if that was data-parallel on a CPU, where it sends fp32. A worker's wait is the time
for which training stood still before merges, on the rank that waited longest. It includes waiting for a
slower worker.
"""
import sys
from pathlib import Path

from metrics import Parser, UserError, exit_status, read_run, read_runs, tokens_of_step  # for other tools, too

# --------------------------------------------------------------------------------------------------- measures

def validation_loss(run):
    """The loss of the last validation; None if the run had none."""
    return run.processes[0].evals[-1]["loss"] if run.processes[0].evals else None


def hellaswag_accuracy(run):
    """The last accuracy; None if the run had none."""
    return run.processes[0].hellaswags[-1]["accuracy"] if run.processes[0].hellaswags else None


def skipped_updates(run):
    """All workers' together."""
    return sum(line.get("skipped") is True
               for worker in run.worker_numbers for line in run.of_worker(worker)[0].steps)


def mfu(run):
    """Model flops utilization of worker 0, over its steps; None if the device's peak is unknown."""
    steps = [line for line in run.processes[0].steps if line.get("mfu") is not None]
    seconds = sum(line["seconds"] for line in steps)
    return sum(line["mfu"] * line["seconds"] for line in steps) / seconds if seconds > 0 else None


def bytes_sent(run):
    return max(p.end["inner_bytes_sent"] + p.end["outer_bytes_sent"] for p in run.processes)


def bytes_by_step(process):
    """{step: bytes}: inner bytes in the step that reports them, a sync's bytes in the step that sends it."""
    result, before = {}, 0
    for line in process.steps:
        result[line["step"]] = line["inner_bytes_sent"] - before
        before = line["inner_bytes_sent"]
    for line in process.syncs:
        result[line["send_step"]] = result.get(line["send_step"], 0) + line["bytes_sent"]
    return result


def peak(run):
    """(bytes, in what): the most that a process sends at once; if workers exchange, only what it sends in a sync."""
    syncs = [line["bytes_sent"] for p in run.processes for line in p.syncs]
    if syncs:
        return max(syncs), "a sync"
    return max(max(bytes_by_step(p).values()) for p in run.processes), "a step"


def sends_fp32(run):
    """Whether a data-parallel run's ranks send a value's gradient and parameter in 8 bytes, not 6 as on GPUs (with
    Muon up to 8 there)."""
    sent = [line["inner_bytes_sent"] for line in run.processes[0].steps]
    if run.workers > 1 or run.ranks == 1 or len(sent) < 2:
        return False
    of_a_step = min(now - before for before, now in zip(sent, sent[1:]))  # without a checkpoint's
    return of_a_step * run.ranks / (run.ranks - 1) / run.parameters > 7.99


def seconds_waited(process):
    return sum(line["waited_seconds"] for line in process.syncs)


def longest_waiter(run, worker):
    """The rank of the worker that waited longest."""
    return max(run.of_worker(worker), key=seconds_waited)


def waited(run, worker):
    """(seconds, fraction of the training time) of the rank that waited longest."""
    process = longest_waiter(run, worker)
    seconds = seconds_waited(process)
    return seconds, seconds / sum(line["seconds"] for line in process.steps)


def tokens_by_step(run):
    """{step: tokens that all workers trained on in it}, from the lines that each process wrote as a rank 0."""
    found = {}
    for lines in run.logs:
        ranks = [(line.get("step", 0), line["rank"]) for line in lines["run"] + lines["resume"]]
        for line in lines["step"]:
            if [rank for begin, rank in ranks if begin < line["step"]][-1] == 0:
                found[line["step"]] = found.get(line["step"], 0) + tokens_of_step(line)
    return dict(sorted(found.items()))


def tokens(run):
    return sum(tokens_by_step(run).values())


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
    """The factor by which bytes are fewer; '-' if one of the runs sent nothing."""
    if more == 0 or less == 0:
        return "-"
    ratio = more / less
    return f"{ratio:.2g}x" if ratio < 1 else f"{ratio:.{1 if ratio < 10 else 0}f}x"


def loss_text(loss, first):
    if loss is None:
        return "-"
    return f"{loss:.4f}" + ("" if first in (None, loss) else f" ({100 * (loss / first - 1):+.2f}%)")


def waited_text(run, worker):
    if worker not in run.worker_numbers or not any(p.syncs for p in run.processes):
        return "-"
    seconds, fraction = waited(run, worker)
    return f"{seconds:.2f} s ({100 * fraction:.2f}%)"


def optional_rows(runs):
    """Rows that only some runs have."""
    for label, measure, digits in [("HellaSwag accuracy", hellaswag_accuracy, 4), ("MFU", mfu, 3)]:
        values = [measure(run) for run in runs]
        if any(value is not None for value in values):
            yield [label, *("-" if value is None else f"{value:.{digits}f}" for value in values)]
    skipped = [skipped_updates(run) for run in runs]
    if any(skipped):
        yield ["updates skipped", *map(str, skipped)]


def table(runs):
    """Rows of text: a label, then a cell for each run."""
    first = runs[0]
    rows = [
        ["", *(run.name for run in runs)],
        ["workers x ranks", *(f"{run.workers} x {run.ranks}" for run in runs)],
        ["tokens trained on", *(f"{tokens(run):,}" for run in runs)],
        ["validation loss", loss_text(validation_loss(first), None),
         *(loss_text(validation_loss(run), validation_loss(first)) for run in runs[1:])],
        *optional_rows(runs),
        ["sent by a process", *(size_text(bytes_sent(run)) for run in runs)],
        [f"  fewer than {first.name}, as sent", "-",
         *(ratio_text(bytes_sent(first), bytes_sent(run)) for run in runs[1:])],
        *([["  fewer than that in bf16", "-",
            *(ratio_text(bytes_sent(first) / 2, bytes_sent(run)) for run in runs[1:])]] if sends_fp32(first) else []),
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


def main(words):
    parser = Parser(description="Compares runs, finished or not, by loss, bytes sent and time waited.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (its -o)")
    runs = read_runs(parser.parse_args(words).runs)
    print_table(table(runs))
    if len({tokens(run) for run in runs}) > 1:
        print("The runs trained on different numbers of tokens: losses and bytes are not comparable.")


if __name__ == "__main__":
    sys.exit(exit_status(main))
