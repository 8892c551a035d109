"""The outcome of chaos: counts and times by kind of blow, and one log of all that happened."""
import math
from collections import defaultdict
from dataclasses import dataclass, field

from blows import GRACE
from waits import CAUSES, HIT, Costs


@dataclass
class Row:
    """One kind of blow; times in seconds."""
    blows: int = 0
    others: list = field(default_factory=list)   # until the others' next sync without the victims
    victims: list = field(default_factory=list)  # from a victim's return until it is counted again


@dataclass
class Totals:
    rows: dict = field(default_factory=lambda: defaultdict(Row))
    runs: int = 0
    events: int = 0
    compared: int = 0
    living: float = 0  # seconds, summed over workers, in which they could continue
    waits: dict = field(default_factory=lambda: {cause: Costs() for cause in CAUSES})
    purpose: float = 0  # seconds that workers waited while they could not continue: too few, no store, just back


def spread(seconds):
    """The median, the 90th percentile and the longest."""
    if not seconds:
        return f"{'-':>7}{'-':>7}{'-':>7}"
    ordered = sorted(seconds)
    at = [ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], ordered[-1]]
    return "".join(f"{value:>7.2f}" for value in at)


def table(totals):
    lines = [f"{'':<22}{'':>6}{'others continue':>21}{'it is counted':>21}",
             f"{'blows':<22}{'':>6}" + f"{'50%':>7}{'90%':>7}{'max':>7}" * 2]
    for kind, row in sorted(totals.rows.items()):
        lines.append(f"{kind:<22}{row.blows:>6}{spread(row.others)}{spread(row.victims)}")
    others = [value for row in totals.rows.values() for value in row.others]
    victims = [value for row in totals.rows.values() for value in row.victims]
    blows = sum(row.blows for row in totals.rows.values())
    lines.append(f"{'all':<22}{blows:>6}{spread(others)}{spread(victims)}")
    return "\n".join([*lines, "", *table_of_waits(totals)])


def table_of_waits(totals):
    """Waits of workers that could otherwise have continued. Counts and spreads are of waits longer than a step."""
    lines = [f"{'waits':<34}{'count':>6}{'share':>8}{'50%':>7}{'90%':>7}{'max':>7}"]
    for cause, costs in totals.waits.items():
        lines.append(f"{cause:<34}{len(costs.long):>6}{share(costs.seconds, totals):>7.2f}%"
                     f"{spread(costs.long)}")
    return [*lines, f"of {totals.living:.0f} s in which workers could continue; they also waited "
                    f"{totals.purpose:.0f} s because too few were well or the store was gone, or to catch up"]


def share(seconds, totals):
    return 100 * seconds / max(totals.living, 1e-9)


def met(bar):
    return "met" if bar else "NOT met"


def verdict(totals):
    others = [value for row in totals.rows.values() for value in row.others]
    slowest = max(others, default=math.inf)
    recovery = (f"others continued after {slowest:.2f} s at most (cases: {len(others)})" if others
                else "time until others continued: not measured")
    waited = share(sum(costs.seconds for cause, costs in totals.waits.items() if cause != HIT), totals)
    with_recovery = waited + share(totals.waits[HIT].seconds, totals)
    return (f"{totals.runs} runs, {totals.events} events; {totals.compared} merged syncs compared with what "
            "others logged: no difference, no hang\n"
            f"{recovery}: {met(slowest <= GRACE + 2)} (the grace and 2 s: {GRACE + 2} s)\n"
            f"waits between events: {waited:.2f}% of the time in which workers could continue: "
            f"{met(waited <= 5)} (5%); with those until others continued {with_recovery:.2f}%")


def write_journal(journal, path):
    """Sorted by time; workers' clocks are mapped to this program's."""
    zero = min((when for when, _, _ in journal), default=0)
    with path.open("w") as file:
        for when, who, text in sorted(journal):
            file.write(f"{when - zero:10.3f}  {who:<11} {text}\n")
