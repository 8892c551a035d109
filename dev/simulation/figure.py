"""Figure 4 of arXiv 2501.18512: utilization over the link's rate, for each method and size."""
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from metrics import UserError
from simulation.paper import GRID, METHODS, SIZES, utilizations

COLORS = ["#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7"]  # Okabe and Ito's


def draw(path):
    if not path.suffix:  # matplotlib would give it one
        raise UserError(f"{path} names no format: give a name such as simulated.png")
    figure, panels = plt.subplots(1, len(SIZES), figsize=(11, 4), sharey=True, layout="constrained")
    for axes, size in zip(panels, SIZES):
        for method, color in zip(METHODS, COLORS):
            shares = utilizations(size, method, GRID)
            axes.plot(GRID, 100 * shares, color=color, linewidth=1.8, label=method.name)
        axes.set_xscale("log")
        axes.set_title(f"{size.name}, {size.layers} layers, {size.step_seconds} s a step", fontsize=10)
        axes.set_xlabel("Gbit/s between workers")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
    panels[0].set_ylabel("compute utilization, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS),
                  frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path} ({error}): give a name such as simulated.png") from error
    finally:
        plt.close(figure)
