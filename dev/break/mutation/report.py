"""Verdicts on changes: tables, survivors and their explanations."""
import collections
import dataclasses
import pathlib
import re

from mutation.source import Change, one_line

SURVIVORS = pathlib.Path(__file__).resolve().parents[1] / "mutants.md"
LEAST_KILLED = 0.97


@dataclasses.dataclass
class Verdict:
    change: Change
    outcome: str    # killed, survived or not compiled
    by: str = ""    # what noticed it: "BUILD, PROGRAM: HOW"

@dataclasses.dataclass
class Explanation:
    """Why a survivor changes nothing. The code of its line identifies it: line numbers and comments would not last."""
    file: str
    function: str
    was: str
    becomes: str
    reason: str

    def is_of(self, change):
        return (self.file, self.function, code_of(self.was), code_of(self.becomes)) == \
            (change.file, change.function, code_of(change.was), code_of(change.becomes))


def code_of(line):
    return re.sub(r"\s*//.*", "", line)


def read_explanations(text):
    """text: paragraphs that begin with `FILE`, `FUNCTION`: REASON, each followed by the changes that it explains,
    as difference() formats them."""
    found, file, function, reason, was = [], None, None, "", None
    for paragraph in re.split(r"\n\s*\n", text):
        start = re.match(r"`([^`]+)`, `([^`]+)`:\s*(.*)", paragraph, re.DOTALL)
        if start:
            file, function, reason = start[1], start[2], one_line(start[3])
        for line in paragraph.splitlines():
            if line.startswith("    - "):
                was = one_line(line[6:])
            elif line.startswith("    +"):
                found.append(Explanation(file, function, was, one_line(line[5:]), reason))
    return found


def difference(change):
    return f"    - {change.was}\n    + {change.becomes}"


def table(verdicts, key, title):
    """A table of the numbers of changes, killed and survived, and the percentage killed, by `key`."""
    rows = {}
    for verdict in verdicts:
        for name in (key(verdict.change), "all"):
            rows.setdefault(name, []).append(verdict.outcome)
    rows["all"] = rows.pop("all")
    width = max(len(name) for name in (*rows, title))
    lines = [f"{title:{width}}  changes  killed  survived  killed, %"]
    for name, outcomes in rows.items():
        killed, survived = outcomes.count("killed"), outcomes.count("survived")
        lines.append(f"{name:{width}}  {killed + survived:7}  {killed:6}  {survived:8}  "
                     f"{100 * killed / max(1, killed + survived):9.1f}")
    return "\n".join(lines)


def report(verdicts, survivors, all_changes):
    """Prints the results. Returns whether enough were killed and the explanations fit the survivors."""
    ok = True
    survived = [verdict.change for verdict in verdicts if verdict.outcome == "survived"]
    for change in survived:
        reason = next((entry.reason for entry in survivors if entry.is_of(change)), None)
        ok &= reason is not None
        print(f"\n{change.id} in {change.function} survived: {reason or 'NOT EXPLAINED'}\n{difference(change)}")
    killed = [verdict.change for verdict in verdicts if verdict.outcome == "killed"]
    for entry in survivors:
        matching = [change for change in all_changes if entry.is_of(change)]
        where = f"{SURVIVORS.name}: {entry.file}, {entry.function}: {entry.becomes}"
        if not matching:
            print(f"\n{where}: the file no longer has such a change")
            ok = False
        elif all(change in killed for change in matching):
            print(f"\n{where}: was killed, although it is listed as a survivor")
            ok = False
    print()
    print(table(verdicts, lambda change: change.kind, "kind"))
    print()
    print(table(verdicts, lambda change: change.file, "file"))
    noticed = collections.Counter(verdict.by.rsplit(": ", 1)[-1] for verdict in verdicts if verdict.outcome == "killed")
    print("\nnoticed as: " + ", ".join(f"{how} {count}" for how, count in noticed.most_common()))
    broken = [verdict for verdict in verdicts if verdict.outcome == "not compiled"]
    print(f"\nnot counted, because they do not compile: {len(broken)}")
    share = len(killed) / max(1, len(killed) + len(survived))
    if share < LEAST_KILLED:
        print(f"fewer than {100 * LEAST_KILLED:.0f}% were killed: {100 * share:.1f}%")
        ok = False
    return ok
