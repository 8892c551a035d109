"""Table 4 of arXiv 2501.18512: the Gbit/s that a method needs for a utilization, simulated."""
from dataclasses import dataclass

import numpy as np

from simulation.graph import utilization

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)


@dataclass(frozen=True)
class Size:
    name: str
    parameters: float
    layers: int
    step_seconds: float


SIZES = (Size("1B", 1e9, 24, 0.1), Size("10B", 10e9, 48, 0.8), Size("100B", 100e9, 108, 4.9))


@dataclass(frozen=True)
class Method:
    name: str
    inner_steps: int      # H; 1: data-parallel
    fragment_layers: int  # 0: all
    overlap: int          # tau
    bits: float           # a value


METHODS = (Method("data-parallel", 1, 0, 0, 16), Method("DiLoCo", 100, 0, 0, 16),
           Method("streaming", 100, 3, 0, 16), Method("+ overlap", 100, 3, 1, 16),
           Method("+ FP4", 100, 3, 1, 4))

# The paper's numbers, {size: a row for each method}, as it prints them.
PUBLISHED = {
    "1B": ("86.8 152.6 184.2 222.3 569.0", "1.4 6.2 13.3 23.3 86.8", "1.4 5.2 9.1 16.0 28.1",
           "1.4 4.3 6.2 9.1 11.0", "0.4 0.9 1.7 2.0 3.0"),
    "10B": ("104.8 222.3 222.3 268.3 471.5", "1.7 7.5 16.0 33.9 104.8", "1.7 5.2 9.1 13.3 19.3",
            "1.7 3.6 5.2 6.2 7.5", "0.4 0.9 1.4 1.4 1.7"),
    "100B": ("184.2 323.8 390.7 390.7 471.5", "3.0 11.0 23.3 49.4 184.2", "2.4 6.2 9.1 11.0 19.3",
             "1.7 3.6 4.3 5.2 5.2", "0.5 0.9 1.1 1.1 1.4")}

ASSUMPTIONS = """\
From the paper: a graph of 4L - 1 nodes a step; only the link between workers is modelled; the sizes, layers
and step times above; H = 100, 3 layers a fragment, tau = 1, bf16, and 4 bits for FP4.
Our assumptions, fitted to its table:
- Bandwidths: 50 from 0.1 to 1000 Gbit/s, evenly spaced in the logarithm, rounded to two decimals and then to
  one. A cell is the last bandwidth that does not reach the target yet; the first that does would put all
  cells a grid step higher.
- Sizes: parameters / L in each layer, and no embedding. An all-reduce moves every value once.
- Time: no latency; the three compute nodes of a layer take T / (3L) each, activations before parameters.
- Order: one link, first in, first out. A reduction is ready after its layer's backward by parameters. That
  layer's forward waits for it in the next step, or tau steps later with overlap.
- Fragments: strided, one every round(H / P) steps, halves rounded to even.
- Utilization is compute time over cycle time, once the cycle repeats itself."""

GRID = 10 ** (-1 + 4 * np.arange(50) / 49)  # Gbit/s


def sends_of(method, layers):
    """Layers, from 1, that are sent in each step of a period."""
    if method.fragment_layers == 0:
        return [[]] * (method.inner_steps - 1) + [range(1, layers + 1)]
    fragments = layers // method.fragment_layers
    every = round(method.inner_steps / fragments)
    sends = [[] for _ in range(fragments * every)]
    for p in range(fragments):
        sends[p * every] = range(1 + p, layers + 1, fragments)
    return sends


def utilizations(size, method, gigabits):
    """At each of these rates of the link."""
    reduction = size.parameters / size.layers * method.bits / (np.asarray(gigabits) * 1e9)
    node = size.step_seconds / (3 * size.layers)
    return utilization(size.layers, node, sends_of(method, size.layers), method.overlap, reduction)


def needed(size, method):
    """Numbers of the grid's bandwidths, one for each target: the last that does not reach it."""
    reached = utilizations(size, method, GRID)
    return [max(0, int(np.argmax(reached >= target)) - 1) if (reached >= target).any() else len(GRID) - 1
            for target in TARGETS]


def printed(gigabits):
    """As the paper prints a bandwidth: 0.4498 is 0.5 there, 6.2505 is 6.2 and 2.947 is 3.0."""
    return f"{round(gigabits, 2):.1f}"


def steps_apart(number, text):
    """Grid steps between the bandwidth of this number and the nearest one that is printed as `text`."""
    return min(abs(number - other) for other in range(len(GRID)) if printed(GRID[other]) == text)


@dataclass
class Cell:
    text: str       # ours
    published: str
    apart: int      # grid steps


def table(methods=METHODS):
    """{size: rows of cells}."""
    result = {}
    for size in SIZES:
        rows = zip((needed(size, method) for method in methods), PUBLISHED[size.name])
        result[size.name] = [[Cell(printed(GRID[number]), text, steps_apart(number, text))
                              for number, text in zip(numbers, row.split())] for numbers, row in rows]
    return result


def agreement(cells):
    """(exact, within one grid step, of how many)"""
    apart = [cell.apart for rows in cells.values() for row in rows for cell in row]
    return sum(a == 0 for a in apart), sum(a <= 1 for a in apart), len(apart)
