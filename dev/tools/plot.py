#!/usr/bin/env python3
"""Draws runs beside each other, finished or not. Panels that no run has data for are left out.

    dev/tools/plot.py RUN... -o FILE.png                      against steps
    dev/tools/plot.py RUN... -o FILE.png --x tokens           or tokens of all workers, or time

The panels:

    losses     training (light, mean over workers) and validation (dots)
    HellaSwag  the share of right answers
    traffic    bytes that process 0 sent in each step, on a logarithmic scale; of long runs a part from the
               middle. A sync counts in the step that sends it, and a step without a mark sent nothing
    cosines    for each run of several workers and each fragment: between the workers' outer gradients, as the
               mean over pairs (of more than eight workers: with the mean of all). 1 is the same direction;
               independent gradients have 0
    waits      for each worker, the seconds so far that its longest-waiting rank stood still before merges

Time is the log's, without the time between a stop and a resume.
"""
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from compare import (bytes_by_step, bytes_sent, hellaswag_accuracy, longest_waiter, peak, size_text, tokens_by_step,
                     validation_loss)
from metrics import Parser, Run, UserError, exit_status, read_runs, require

require("matplotlib")
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ["#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"]

EXCERPT = 120  # steps whose traffic is drawn
BESIDE = 3     # panels in a row


@dataclass
class Drawn:
    """A run, and the places of its steps on the axis."""
    run: Run
    name: str
    color: str
    at: dict  # {step: x}, with step 0

    def places(self, steps):
        """The x of each step. Steps that worker 0 skipped, to catch up with elastic workers, lie between its own."""
        return np.interp(list(steps), list(self.at), list(self.at.values()))


def step_places(run, x):
    """{step: x}, from worker 0's first process, and for tokens from all workers."""
    if x == "tokens":
        counts = tokens_by_step(run)
        return dict(zip([0, *counts], itertools.accumulate(counts.values(), initial=0)))
    lines = run.processes[0].steps
    begin = lines[0]["time"] - lines[0]["seconds"]
    return {0: 0, **{line["step"]: line["step"] if x == "step" else line["time"] - begin for line in lines}}


def draw_x(axes, x, note=""):
    """Names the axis; tokens and times have units of their own."""
    longest = axes.get_xlim()[1]
    if x == "tokens":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count / 1e6:g}M"))
    elif x == "time":
        units = [("hours", 3600, 7200), ("minutes", 60, 120), ("seconds", 1, 0)]
        unit, size = next((name, size) for name, size, least in units if longest >= least)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds / size:g}"))
        x = unit
    axes.set_xlabel(x + note)


def training_losses(run, window):
    """(steps, losses): the mean over the workers that made a step, and over the last `window` steps."""
    logs = [{line["step"]: line["loss"] for line in run.of_worker(worker)[0].steps}
            for worker in run.worker_numbers]
    means = {}
    for step in logs[0]:
        finite = [log[step] for log in logs if log.get(step) is not None]
        if finite:
            means[step] = sum(finite) / len(finite)
    losses = list(means.values())
    smooth = [sum(losses[i - window:i]) / window for i in range(window, len(losses) + 1)]
    return list(means)[window - 1:], smooth


def draw_losses(axes, drawn):
    window = max(1, min(len(one.run.processes[0].steps) for one in drawn) // 100)
    shown = []  # losses that the axis must span: the first steps are far above and may be cut off
    for one in drawn:
        steps, losses = training_losses(one.run, window)
        shown += losses[len(losses) // 20:]
        axes.plot(one.places(steps), losses, color=one.color, alpha=0.35, linewidth=0.9)
        evals = [line for line in one.run.processes[0].evals if line["step"] > 0 and line["loss"] is not None]
        shown += [line["loss"] for line in evals if line["step"] > len(losses) // 20]
        end = validation_loss(one.run)
        label = one.name + (f": {end:.3f}" if end is not None else "")
        axes.plot(one.places(line["step"] for line in evals), [line["loss"] for line in evals],
                  color=one.color, marker="o", markersize=4, linewidth=1.6, label=label)
    if shown:
        margin = 0.05 * (max(shown) - min(shown)) + 1e-6
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_ylabel("loss")
    axes.legend(title="validation loss at the end", frameon=False, alignment="left", loc="upper right")
    note = "light: training" + (f" (mean of {window} steps)" if window > 1 else "") + ", dots: validation"
    axes.text(0.01, 0.04, note, transform=axes.transAxes, color="#777777", fontsize=9)


def draw_hellaswag(axes, drawn):
    for one in drawn:
        lines = one.run.processes[0].hellaswags
        if lines:
            axes.plot(one.places(line["step"] for line in lines), [line["accuracy"] for line in lines],
                      color=one.color, marker="o", markersize=4, linewidth=1.6,
                      label=f"{one.name}: {hellaswag_accuracy(one.run):.4f}")
    axes.set_ylabel("HellaSwag accuracy")
    axes.legend(frameon=False)


def excerpt(drawn):
    """(from, to) on the axis, for the traffic: from the middle of the part that all runs have, as long as
    EXCERPT steps of the run with the most steps in it."""
    end = min(max(one.at.values()) for one in drawn)
    most = max(sum(x <= end for x in one.at.values()) - 1 for one in drawn)
    width = end * min(1, EXCERPT / most)
    return (end - width) / 2, (end + width) / 2


def draw_traffic(axes, drawn):
    begin, end = excerpt(drawn)
    shown = []
    for number, one in enumerate(drawn):
        drawable = [step for step, x in one.at.items() if begin < x <= end]
        counts = bytes_by_step(one.run.processes[0])
        sent = {step: counts[step] for step in drawable if counts.get(step, 0) > 0}
        largest, what = peak(one.run)
        label = f"{one.name}: {size_text(bytes_sent(one.run))} in all, at most {size_text(largest)} in {what}"
        every_step = len(sent) > 0.9 * len(drawable)
        axes.plot(one.places(sent), list(sent.values()), color=one.color, label=label,
                  zorder=3 + 0.1 * number, linestyle="-" if every_step else "none", linewidth=2,
                  marker=None if every_step else "o", markersize=5)
        if not every_step:
            axes.vlines(one.places(sent), 1, list(sent.values()), color=one.color, linewidth=1.2, alpha=0.6)
        shown += sent.values()
    if shown:
        axes.set_yscale("log")
        axes.set_ylim(min(shown) / 5, max(shown) * 3)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda count, _: size_text(round(count)).replace(".00", "").replace(".0", "")))
    axes.set_ylabel("sent by a process in a step")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0)


def cosines_by_fragment(run):
    """{fragment: (send steps, cosines)} of process 0's shard: the mean over pairs, or over workers where the log
    has each one's with the mean."""
    result = {}
    for line in run.processes[0].syncs:
        logged = line.get("cosines") or line.get("mean_cosines") or []
        pairs = [cosine for cosine in logged if cosine is not None]
        if pairs:
            steps, means = result.setdefault(line["fragment"], ([], []))
            steps.append(line["send_step"])
            means.append(sum(pairs) / len(pairs))
    return dict(sorted(result.items()))


def draw_cosines(axes, one):
    fragments = cosines_by_fragment(one.run)
    for number, (fragment, (steps, means)) in enumerate(fragments.items()):
        shade = 0.1 + 0.8 * number / max(1, len(fragments) - 1)
        axes.plot(one.places(steps), means, color=plt.cm.viridis(shade), linewidth=1.3, marker=".",
                  label=str(fragment))
    axes.axhline(0, color="#777777", linewidth=0.8)
    axes.set_title(one.name, fontsize=10, color=one.color)
    axes.legend(title="fragment", frameon=False, fontsize=7, title_fontsize=8, ncols=1 + len(fragments) // 4,
                loc="best")


def waits(run, worker):
    """(steps, seconds so far) of the rank whose total wait is longest."""
    process = longest_waiter(run, worker)
    seconds = itertools.accumulate(line["waited_seconds"] for line in process.syncs)
    return [line["apply_step"] for line in process.syncs], list(seconds)


def draw_waits(axes, drawn):
    for one in drawn:
        for worker in one.run.worker_numbers:
            steps, seconds = waits(one.run, worker)
            axes.plot(one.places(steps), seconds, color=one.color, linewidth=1.4, drawstyle="steps-post",
                      linestyle=["-", "--", ":", "-."][worker % 4], label=f"{one.name}, worker {worker}")
    axes.set_ylabel("seconds waited so far")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left", fontsize=9)


def rows_of(drawn):
    """(height, [functions that draw a panel], addition to the axis's name) for each row of panels that has
    data. The panels of a row stand side by side on the same axes."""
    rows = [(1.3, [lambda axes: draw_losses(axes, drawn)], "")]
    if any(one.run.processes[0].hellaswags for one in drawn):
        rows.append((0.7, [lambda axes: draw_hellaswag(axes, drawn)], ""))
    note = " (an excerpt)" if excerpt(drawn)[0] > 0 else ""
    rows.append((1, [lambda axes: draw_traffic(axes, drawn)], note))
    cosines = [lambda axes, one=one: draw_cosines(axes, one) for one in drawn if cosines_by_fragment(one.run)]
    rows += [(0.8, list(cosines[i:i + BESIDE]), "") for i in range(0, len(cosines), BESIDE)]
    exchanging = [one for one in drawn if one.run.processes[0].syncs]
    if exchanging:
        rows.append((0.7, [lambda axes: draw_waits(axes, exchanging)], ""))
    return rows


def draw_row(figure, place, panels, x, note):
    """Side by side on the same axes: only the first has numbers on the left."""
    grid, first = place.subgridspec(1, len(panels), wspace=0.05), None
    for number, draw_panel in enumerate(panels):
        axes = figure.add_subplot(grid[number], sharex=first, sharey=first)
        draw_panel(axes)
        draw_x(axes, x, note)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        if first is not None:
            axes.tick_params(labelleft=False)
        elif not axes.get_ylabel():
            axes.set_ylabel("cosine between workers")
        first = first or axes


def draw(runs, path, x="step"):
    drawn = [Drawn(run, run.name, color, step_places(run, x)) for run, color in zip(runs, COLORS)]
    rows = rows_of(drawn)
    heights = [height for height, _, _ in rows]
    figure = plt.figure(figsize=(9, 3.7 * sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    for number, (_, panels, note) in enumerate(rows):
        draw_row(figure, grid[number], panels, x, note)
    workers = max(run.workers for run in runs)
    title = f"{runs[0].parameters / 1e6:.2f}M parameters, up to {workers} worker{'s' * (workers > 1)}"
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path} ({error}): give a name such as losses.png") from error
    finally:
        plt.close(figure)


def main(words):
    parser = Parser(description="Draws losses, traffic, cosines and waits of runs, finished or not.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (its -o)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--x", choices=["step", "tokens", "time"], default="step", help="the axis (step)")
    arguments = parser.parse_args(words)
    if len(arguments.runs) > len(COLORS):
        raise UserError(f"{len(arguments.runs)} runs are too many: give at most {len(COLORS)}")
    if not arguments.output.suffix:  # matplotlib would add one
        raise UserError(f"{arguments.output} names no format: give a name such as losses.png")
    draw(read_runs(arguments.runs), arguments.output, arguments.x)
    print(f"drew {arguments.output}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
