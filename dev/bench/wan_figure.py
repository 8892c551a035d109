"""The figure of dev/bench/wan.py: utilization over the rate of the line, a panel for each round trip."""
from plot import COLORS, plt


def draw_panel(axes, titles, rows):
    for title, color in zip(titles, [*COLORS, "#56B4E9"]):
        points = sorted((row for row in rows if row.method.title == title), key=lambda row: row.line.megabits)
        rates = [row.line.megabits for row in points]
        axes.plot(rates, [100 * row.best for row in points], color=color, marker="o", label=title)
        axes.plot(rates, [100 * row.predicted for row in points], color=color, marker="o", markersize=10,
                  fillstyle="none", linestyle="none", alpha=0.7)
    rates = sorted({row.line.megabits for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("Mbit/s, each way")
    axes.grid(alpha=0.25)


def draw(path, titles, rows):
    """titles: of the methods   rows: of lines with a rate and without losses"""
    trips = sorted({row.line.round_trip_ms for row in rows})
    figure, panels = plt.subplots(1, len(trips), figsize=(12, 5), sharey=True, layout="constrained",
                                  squeeze=False)
    for axes, trip in zip(panels[0], trips):
        draw_panel(axes, titles, [row for row in rows if row.line.round_trip_ms == trip])
        axes.set_title(f"round trip {trip:g} ms")
    panels[0][0].set_ylabel("% of the time without waits over an unlimited line\n(data-parallel: of its tokens/s)")
    panels[0][0].set_ylim(0, 105)
    panels[0][-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5),
                         title="measured\n(rings: predicted)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
