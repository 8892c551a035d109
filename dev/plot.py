#!/usr/bin/env python3
"""Draws finished runs: losses, traffic, cosines and waits; what a run did not measure is left out.

    dev/plot.py RUN... -o FILE.png

Losses: training (light, mean over workers) and validation (dots). Traffic: bytes that process 0 sent in each
step, on a logarithmic scale; of a long run, some steps from its middle. A sync counts in the step that sends
it, and a step without a mark sent nothing. Cosines, for each run of several workers: between their outer
gradients, the mean over pairs of workers, for each fragment; 1 is the same direction, and that of independent
ones is 0. Waits: how long each worker's slowest rank stood still before merges, summed up over the steps.
"""
import argparse
import itertools
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from compare import UserError, bytes_by_step, bytes_sent, peak, read_run, size_text, validation_loss

# Okabe and Ito's, safe for the colour-blind.
COLORS = ["#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"]

EXCERPT = 120  # steps of which the traffic is drawn


def training_losses(run, window):
    """(steps, losses): the mean over workers, and over the last `window` steps."""
    logs = [run.of_worker(worker)[0].steps for worker in range(run.workers)]
    losses = [[line["loss"] for line in lines] for lines in zip(*logs)]
    finite = [(lines[0]["step"], sum(values) / len(values))
              for lines, values in zip(zip(*logs), losses) if None not in values]
    losses = [loss for _, loss in finite]
    means = [sum(losses[i - window:i]) / window for i in range(window, len(losses) + 1)]
    return [step for step, _ in finite][window - 1:], means


def draw_losses(axes, runs):
    window = max(1, min(len(run.processes[0].steps) for run in runs) // 100)
    shown = []  # losses that the axis has to span: the first steps are far above and may leave the picture
    for run, color in zip(runs, COLORS):
        steps, losses = training_losses(run, window)
        shown += losses[len(losses) // 20:]
        axes.plot(steps, losses, color=color, alpha=0.35, linewidth=0.9)
        evals = [line for line in run.processes[0].evals if line["loss"] is not None]
        shown += [line["loss"] for line in evals if line["step"] > len(losses) // 20]
        end = validation_loss(run)
        label = run.name + (f": {end:.3f}" if end is not None else "")
        axes.plot([line["step"] for line in evals], [line["loss"] for line in evals], color=color, marker="o",
                  markersize=4, linewidth=1.6, label=label)
    margin = 0.05 * (max(shown) - min(shown)) + 1e-6
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_ylabel("loss")
    axes.legend(title="validation loss at the end", frameon=False, alignment="left")
    note = "light: training" + (f" (mean of {window} steps)" if window > 1 else "") + ", dots: validation"
    axes.text(0.01, 0.04, note, transform=axes.transAxes, color="#777777", fontsize=9)
    axes.set_xlabel("step")


def draw_traffic(axes, runs):
    steps = min(len(run.processes[0].steps) for run in runs)
    begin = max(0, steps - EXCERPT) // 2
    shown = []
    for number, (run, color) in enumerate(zip(runs, COLORS)):
        sent = {step: count for step, count in bytes_by_step(run.processes[0]).items()
                if count > 0 and begin < step <= begin + EXCERPT}
        largest, what = peak(run)
        label = f"{run.name}: {size_text(bytes_sent(run))} in all, at most {size_text(largest)} in {what}"
        every_step = len(sent) > 0.9 * min(steps, EXCERPT)
        axes.plot(list(sent), list(sent.values()), color=color, label=label, zorder=3 + 0.1 * number,
                  linestyle="-" if every_step else "none", linewidth=2, marker=None if every_step else "o",
                  markersize=5)
        if not every_step:
            axes.vlines(list(sent), 1, list(sent.values()), color=color, linewidth=1.2, alpha=0.6)
        shown += sent.values()
    if shown:
        axes.set_yscale("log")
        axes.set_ylim(min(shown) / 5, max(shown) * 3)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda count, _: size_text(round(count)).replace(".00", "").replace(".0", "")))
    axes.set_ylabel("sent by a process in a step")
    axes.set_xlabel("step" if begin == 0 else f"step ({EXCERPT} of {steps})")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0)


def cosines_by_fragment(run):
    """{fragment: (send steps, cosines)} of process 0's shard: the mean over pairs of workers."""
    result = {}
    for line in run.processes[0].syncs:
        pairs = [cosine for cosine in line.get("cosines") or [] if cosine is not None]
        if pairs:
            steps, means = result.setdefault(line["fragment"], ([], []))
            steps.append(line["send_step"])
            means.append(sum(pairs) / len(pairs))
    return dict(sorted(result.items()))


def draw_cosines(axes, run):
    fragments = cosines_by_fragment(run)
    for number, (fragment, (steps, means)) in enumerate(fragments.items()):
        shade = 0.1 + 0.8 * number / max(1, len(fragments) - 1)
        axes.plot(steps, means, color=plt.cm.viridis(shade), linewidth=1.3, marker=".", label=str(fragment))
    axes.axhline(0, color="#777777", linewidth=0.8)
    axes.set_ylabel("cosine between workers")
    axes.set_xlabel(f"step ({run.name})")
    axes.legend(title="fragment", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8,
                ncols=1 + len(fragments) // 10)


def waits(run, worker):
    """(steps, seconds so far) of the rank that waited longest in all."""
    process = max(run.of_worker(worker), key=lambda one: one.end["waited_seconds"])
    seconds = itertools.accumulate(line["waited_seconds"] for line in process.syncs)
    return [line["apply_step"] for line in process.syncs], list(seconds)


def draw_waits(axes, runs_and_colors):
    for run, color in runs_and_colors:
        for worker in range(run.workers):
            steps, seconds = waits(run, worker)
            axes.plot(steps, seconds, color=color, linewidth=1.4, drawstyle="steps-post",
                      linestyle=["-", "--", ":", "-."][worker % 4], label=f"{run.name}, worker {worker}")
    axes.set_ylabel("seconds waited so far")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left", fontsize=9)


def panels_of(runs):
    """(height, function that draws it) of all that there is to draw."""
    panels = [(1.3, lambda axes: draw_losses(axes, runs)), (1, lambda axes: draw_traffic(axes, runs))]
    panels += [(0.7, lambda axes, run=run: draw_cosines(axes, run)) for run in runs
               if cosines_by_fragment(run)]
    exchanging = [(run, color) for run, color in zip(runs, COLORS) if run.processes[0].syncs]
    if exchanging:
        panels.append((0.7, lambda axes: draw_waits(axes, exchanging)))
    return panels


def draw(runs, path):
    panels = panels_of(runs)
    heights = [height for height, _ in panels]
    figure, all_axes = plt.subplots(len(panels), 1, figsize=(9, 3.7 * sum(heights)), height_ratios=heights,
                                    layout="constrained")
    for axes, (_, draw_panel) in zip(all_axes, panels):
        draw_panel(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    workers = max(run.workers for run in runs)
    title = f"{runs[0].parameters / 1e6:.2f}M parameters, up to {workers} worker{'s' * (workers > 1)}"
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path} ({error}): give a name such as losses.png") from error


def main():
    parser = argparse.ArgumentParser(description="Draws losses, traffic, cosines and waits of finished runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (its -o)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.png")
    arguments = parser.parse_args()
    try:
        if len(arguments.runs) > len(COLORS):
            raise UserError(f"{len(arguments.runs)} runs are too many: give at most {len(COLORS)}")
        draw([read_run(folder) for folder in arguments.runs], arguments.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"drew {arguments.output}")


if __name__ == "__main__":
    main()
