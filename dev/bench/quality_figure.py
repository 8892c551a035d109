"""The figure of dev/bench/quality.py: validation loss over tokens of the main methods, and how the gap to data-parallel
training shrinks with the number of outer steps."""
from matplotlib.ticker import LogLocator

from plot import COLORS, plt

LINES = {"muon": "-", "adamw": "--"}


def label_of(method):
    if not method.exchanges:
        return f"{method.optimizer}, data-parallel"
    return f"{method.optimizer}, {method.workers} workers, H = {method.inner_steps}"


def color_of(method, methods):
    shapes = list(dict.fromkeys((one.workers, one.inner_steps) for one in methods))
    return COLORS[shapes.index((method.workers, method.inner_steps)) % len(COLORS)]


def draw(path, curves, gaps):
    """curves: {method: [(tokens, loss), ...]} of one seed, of which the second half is shown, where lines differ
    gaps: {method: [(outer steps, percent), ...]}"""
    figure, (losses, shrinking) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for method, points in curves.items():
        half = max(tokens for tokens, _ in points) / 2
        shown = [(tokens / 1e6, loss) for tokens, loss in points if tokens >= half]
        losses.plot(*zip(*shown), color=color_of(method, curves), linestyle=LINES[method.optimizer],
                    label=label_of(method))
    losses.set_xlabel("million tokens, all workers")
    losses.set_ylabel("validation loss")
    for method, points in gaps.items():
        shrinking.plot(*zip(*points), color=color_of(method, curves), linestyle=LINES[method.optimizer], marker="o",
                       label=label_of(method))
    shrinking.axhline(0, color="#555555", linewidth=0.8)
    shrinking.set_xscale("log")
    shrinking.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    shrinking.xaxis.set_major_formatter("{x:g}")
    shrinking.set_xlabel("outer steps of a complete training")
    shrinking.set_ylabel("% above data-parallel, same optimizer")
    for axes in (losses, shrinking):
        axes.grid(alpha=0.25)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
