"""What chaos comes to: counts and times by kind of blow, and all that happened in one log."""
from collections import defaultdict
from dataclasses import dataclass, field

from blows import GRACE


@dataclass
class Row:
    """Of one kind of blow: seconds."""
    blows: int = 0
    others: list = field(default_factory=list)   # until the others' next sync without the victims
    victims: list = field(default_factory=list)  # from its undoing until a victim is counted again


@dataclass
class Totals:
    rows: dict = field(default_factory=lambda: defaultdict(Row))
    runs: int = 0
    events: int = 0
    compared: int = 0
    waited: float = 0      # seconds that workers waited for syncs, while all was well,
    calm: float = 0        # of so many
    waited_ever: float = 0
    trained: float = 0


def spread(seconds):
    """Median, 90% and the longest."""
    if not seconds:
        return f"{'-':>7}{'-':>7}{'-':>7}"
    ordered = sorted(seconds)
    at = [ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], ordered[-1]]
    return "".join(f"{value:>7.2f}" for value in at)


def table(totals):
    lines = [f"{'':<22}{'':>6}{'others go on':>21}{'it is counted':>21}",
             f"{'blows':<22}{'':>6}" + f"{'50%':>7}{'90%':>7}{'max':>7}" * 2]
    for kind, row in sorted(totals.rows.items()):
        lines.append(f"{kind:<22}{row.blows:>6}{spread(row.others)}{spread(row.victims)}")
    others = [value for row in totals.rows.values() for value in row.others]
    victims = [value for row in totals.rows.values() for value in row.victims]
    blows = sum(row.blows for row in totals.rows.values())
    lines.append(f"{'all':<22}{blows:>6}{spread(others)}{spread(victims)}")
    return "\n".join(lines)


def verdict(totals):
    others = [value for row in totals.rows.values() for value in row.others]
    share = totals.waited / max(totals.calm, 1e-9)
    slowest = max(others, default=0)
    return (f"{totals.runs} runs, {totals.events} events; {totals.compared} merged syncs compared with what "
            "others logged: no difference, no hang\n"
            f"others go on after {slowest:.2f} s at most: "
            f"{'met' if slowest <= GRACE + 2 else 'NOT met'} (the grace and 2 s: {GRACE + 2} s)\n"
            f"waits between events: {100 * share:.2f}% of {totals.calm:.0f} s: "
            f"{'met' if share <= 0.05 else 'NOT met'} (5%); in all "
            f"{100 * totals.waited_ever / max(totals.trained, 1e-9):.1f}% of training")


def write_journal(journal, path):
    """Merged by time; workers' clocks are mapped to this program's."""
    zero = min((when for when, _, _ in journal), default=0)
    with path.open("w") as file:
        for when, who, text in sorted(journal):
            file.write(f"{when - zero:10.3f}  {who:<11} {text}\n")
