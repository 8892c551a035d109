#!/usr/bin/env python3
"""Draws the figures of streaming/README.md, and computes the example that it goes through.

    dev/results/figures.py             writes streaming/figures/*.svg; with one matplotlib always the same bytes
    dev/results/figures.py --example   prints the example: inputs and results of one exchange between two workers
    dev/results/figures.py -o DIR      writes the figures elsewhere

Nothing is measured here. Bytes are those that the trainer sends (dev/simulation/payloads.py), the example's
numbers those of the independent version of the algorithm (dev/reference/reference_diloco.py), in float32.
"""
import sys
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("dev", "dev/tools", "dev/reference")]
import reference_diloco
from metrics import Parser, UserError, exit_status
from simulation.payloads import choose_exchange, exchange_bytes, gpt_shape, make_fragments

FOLDER = ROOT / "streaming/figures"
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#555555"]  # Okabe and Ito's
# Text stays text, which is small; a white ground is legible on a dark page, too.
STYLE = {"svg.hashsalt": "diloco.c", "svg.fonttype": "none", "font.family": "sans-serif",
         "font.sans-serif": ["DejaVu Sans", "Arial"], "font.size": 10, "axes.spines.top": False,
         "axes.spines.right": False}

# ------------------------------------------------------------------------------------------------ the example

# Four values of a block of 128; the others are zero everywhere. Locals as they are when the fragment is sent,
# and of worker 0 one inner step later, when the mean is merged.
GLOBAL = [1.0, 0.5, -0.5, 0.25]
LOCAL = [[0.25, 0.3, -0.2, 0.23], [0.6, 0.6, -0.2, 0.19]]
LATER = [0.2, 0.28, -0.18, 0.22]
OUTER_LR, MOMENTUM, LOCAL_WEIGHT = 0.4, 0.9, 0.5


def example_block(values):
    return np.concatenate([np.float32(values), np.zeros(reference_diloco.BLOCK - len(values), np.float32)])


def scale_of(delta, largest_code):
    """Of a block: the smallest bf16 with which its largest magnitude does not clip."""
    return float(reference_diloco.bf16_rounded_up(np.abs(delta).max() / largest_code))


def example(format="fp4_e2m1"):
    """{name of a row: its four values}, and the two scales. The names are the page's."""
    start = example_block(GLOBAL)
    deltas = [start - example_block(local) for local in LOCAL]
    decoded = [np.float32(reference_diloco.through_four_bits(np.float64(delta), format)) for delta in deltas]
    scales = [scale_of(delta, reference_diloco.FOUR_BITS[format][1]) for delta in deltas]
    mean = (decoded[0] + decoded[1]) / np.float32(2)
    state = SimpleNamespace(options={"--local-weight": LOCAL_WEIGHT}, outer_lr=OUTER_LR, mu=MOMENTUM,
                            momentum=start * 0, parameters=start.copy(), local=example_block(LATER))
    reference_diloco.Worker.apply(state, slice(None), mean)
    rows = {"global": start}
    for worker, (local, delta, scale, value) in enumerate(zip(LOCAL, deltas, scales, decoded)):
        rows |= {f"local {worker}": example_block(local), f"delta {worker}": delta,
                 f"delta {worker} / scale {worker}": delta / scale, f"code {worker}": value / scale,
                 f"code {worker} * scale {worker}": value, f"lost {worker}": delta - value}
    rows |= {"mean": mean, "momentum": state.momentum, "new global": state.parameters,
             "local 0, a step later": example_block(LATER), "local 0, merged": state.local}
    return {name: row[:len(GLOBAL)] for name, row in rows.items()}, scales


def example_text():
    rows, scales = example()
    lines = [f"scale {worker:<20} {scale:9.5f}" for worker, scale in enumerate(scales)]
    lines += [f"{name:26} " + " ".join(f"{value + 0.0:9.5f}" for value in row) for name, row in rows.items()]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------- timeline

# Nine layers, three in a fragment, and an embedding: four fragments, sent every three steps.
STEPS, INNER_STEPS, OVERLAP = 26, 12, 4
TIMELINE = make_fragments([100] * 10, 9, 3, "strided", INNER_STEPS)


def sends(offset, inner_steps, steps):
    """The steps from 1 to `steps` at which a fragment of this offset is sent."""
    return [step for step in range(1, steps + 1) if (step - offset) % inner_steps == 0]


def in_flight(fragments, inner_steps, overlap, steps):
    """The number of exchanges that are under way just after each step's sends."""
    all_sends = [sent for one in fragments for sent in sends(one.offset, inner_steps, steps)]
    return [sum(sent <= step <= sent + overlap for sent in all_sends) for step in range(1, steps + 1)]


def draw_timeline():
    figure, (axes, counts) = plt.subplots(2, 1, figsize=(8, 3.6), sharex=True, height_ratios=(3, 1),
                                          layout="constrained")
    for p, (fragment, color) in enumerate(zip(TIMELINE, COLORS)):
        sent = np.array(sends(fragment.offset, INNER_STEPS, STEPS))
        axes.hlines([p] * len(sent), sent, sent + OVERLAP, color=color, linewidth=7, alpha=0.35)
        axes.plot(sent, [p] * len(sent), ">", color=color, markersize=8)
        axes.plot(sent + OVERLAP, [p] * len(sent), "o", color=color, markersize=8)
    names = ["layers " + ", ".join(map(str, one.blocks)) for one in TIMELINE[:-1]] + ["embedding"]
    axes.set_yticks(range(len(TIMELINE)), [f"fragment {p}: {name}" for p, name in enumerate(names)])
    axes.set_ylim(len(TIMELINE) - 0.5, -0.6)
    axes.set_title(f"H = {INNER_STEPS}, tau = {OVERLAP}; a triangle sends, a dot merges, a bar is in flight",
                   fontsize=10, loc="left")
    counts.step(range(1, STEPS + 1), in_flight(TIMELINE, INNER_STEPS, OVERLAP, STEPS), where="mid",
                color=COLORS[5])
    counts.set_ylabel("in flight")
    counts.set_yticks([0, 1, 2])
    counts.set_xticks(range(2, STEPS + 1, 2))
    counts.set_xlim(0.4, STEPS + 0.6)
    counts.set_xlabel("inner step t")
    return figure


# --------------------------------------------------------------------------------------------------- traffic

# GPT-2 124M as llm.c has it (its vocabulary padded to 50304), two workers of one rank, H = 100.
GPT2 = gpt_shape(layers=12, channels=768, parameters=124_475_904)
PERIOD = 100


def sync_bytes(format, fragment_layers):
    """[(offset, bytes that a worker sends)] of the fragments."""
    sizes = GPT2.blocks(1, fragment_layers)
    fragments = make_fragments(sizes, GPT2.layers, fragment_layers, "strided", PERIOD)
    values = [sum(sizes[block] for block in one.blocks) for one in fragments]
    kind = choose_exchange("auto", format, values, 2)
    return [(one.offset, sum(exchange_bytes(kind, format, n, 2))) for one, n in zip(fragments, values)]


def traffic():
    """{method: [(step within H, bytes that a process sends)]}. Data-parallel: two ranks of one worker, that
    scatter fp32 gradients and gather bf16 parameters, half of them each."""
    return {"data-parallel": [(step, GPT2.values // 2 * (4 + 2)) for step in range(PERIOD)],
            "DiLoCo, fp32": sync_bytes("fp32", 0),
            "Streaming DiLoCo, fp32": sync_bytes("fp32", 3),
            "Streaming DiLoCo, fp4_e2m1": sync_bytes("fp4_e2m1", 3)}


def draw_traffic():
    figure, panels = plt.subplots(1, 4, figsize=(9, 3), sharey=True, layout="constrained")
    for axes, (name, sent), color in zip(panels, traffic().items(), [COLORS[5], *COLORS]):
        megabytes = [count / 1e6 for _, count in sent]
        average = sum(megabytes) / PERIOD
        bars = [(step or PERIOD, high) for (step, _), count in zip(sent, megabytes)
                for high in (0.03, count, np.nan)]
        axes.plot(*zip(*bars), color=color, linewidth=1.5)
        axes.axhline(average, color="black", linewidth=1, linestyle="--")
        axes.set_title(f"{name}\npeak {max(megabytes):.3g} MB, average {average:.3g} MB", fontsize=8)
        axes.set_xlabel("step")
        axes.set_xticks([1, 50, 100])
    panels[0].set_yscale("log")
    panels[0].set_ylim(0.03, 1500)
    panels[0].set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1000"])
    panels[0].minorticks_off()  # of the axis that all share
    panels[0].set_ylabel("MB sent in a step")
    return figure


# ----------------------------------------------------------------------------------------------------- codes

def gaussian_block():
    """128 values that lie as a Gaussian's do: its quantiles at the middles of 128 equal shares."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / 128) for i in range(128)])


def lost_share(format):
    """|lost| / |delta| of such a block."""
    delta = gaussian_block()
    lost = delta - reference_diloco.through_four_bits(delta, format)
    return float(np.linalg.norm(lost) / np.linalg.norm(delta))


CODES = {"fp4": [0, *(2.0**(e - 7) for e in range(1, 8))], "fp4_e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6]}


def draw_codes():
    figure, axes = plt.subplots(figsize=(8, 2.5), layout="constrained")
    delta = gaussian_block()
    names = {"fp4_e2m1": "E2M1", "fp4": "E3M0"}
    axes.plot(delta / np.abs(delta).max(), np.full(len(delta), 2.0), "|", color=COLORS[5], markersize=12)
    for row, (format, name) in enumerate(names.items()):
        magnitudes = np.array(CODES[format]) / max(CODES[format])
        values = np.unique(np.concatenate([-magnitudes, magnitudes]))
        axes.plot(values, np.full(len(values), 1.0 - row), "o", color=COLORS[row], markersize=6)
        names[format] = f"{name}, loses {100 * lost_share(format):.0f}%"
    axes.set_yticks([2, 1, 0], ["a Gaussian block", *names.values()])
    axes.set_ylim(-0.5, 2.5)
    axes.set_xlabel("value / largest magnitude of the block")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure


FIGURES = {"timeline": draw_timeline, "traffic": draw_traffic, "codes": draw_codes}


def write_figures(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            for name, draw in FIGURES.items():
                figure = draw()
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                plt.close(figure)
                print(f"wrote {folder / name}.svg")
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): give another folder with -o") from error


def main(arguments):
    parser = Parser(description="Draws the figures of streaming/README.md.")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, metavar="DIR",
                        help="folder of the figures")
    parser.add_argument("--example", action="store_true", help="print the page's example instead")
    chosen = parser.parse_args(arguments)
    if chosen.example:
        print(example_text())
    else:
        write_figures(chosen.output)


if __name__ == "__main__":
    sys.exit(exit_status(main))
