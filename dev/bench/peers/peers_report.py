"""The report and the figure of peers.py, from its finished runs."""
import os
import statistics
from dataclasses import dataclass

import peers
from runs import markdown

MARKS = "# user: from here", "# user: to here"


@dataclass(frozen=True)
class Row:
    title: str
    values: dict  # {program: a number, where less is better, or None}
    texts: dict   # {program: text}


def runs_of(records, name, line=None, killed=False):
    own = [one for one in records if one["name"] == name and one["killed"] == killed and line in (None, one["line"])]
    return sorted(own, key=lambda one: one["seed"])


def failures(own):
    return "; ".join(sorted({f"FAILED: {one['failed']}" for one in own if "failed" in one}))


def cell(own, field, show, wanted=1):
    """(mean over runs, its text). If any of the runs failed, the text says so."""
    if failed := failures(own):
        return None, failed
    if len(own) < wanted:
        return None, f"{len(own)} of {wanted} runs" if wanted > 1 else "not run"
    values = [statistics.mean(one[field]) if isinstance(one[field], list) else one[field] for one in own]
    mean = statistics.mean(values)
    spread = f" ± {statistics.stdev(values):{show}}" if len(values) > 1 else ""
    return mean, f"{mean:{show}}{spread}"


def scaled(found, factor):
    value, text = found
    return (None, text) if value is None else (value * factor, f"{value * factor:.0f}")


def row(title, cells):
    return Row(title, {name: value for name, (value, _) in cells.items()},
               {name: text for name, (_, text) in cells.items()})


def measured_rows(records, scale):
    near, seeds = next(iter(peers.LINES)), peers.SCALES[scale].seeds
    of_each = lambda make: {name: make(name) for name in peers.TITLES}
    rows = [row(f"bytes a worker sends each {peers.H // peers.FRAGMENTS} steps",
                of_each(lambda name: cell(runs_of(records, name, near)[:1], "bytes", ",.0f")))]
    rows += [row(f"seconds waited a sync, {line}",
                 of_each(lambda name: cell(runs_of(records, name, line)[:1], "waited", ".3f"))) for line in peers.LINES]
    rows.append(row("a step over the last line (median), ms; tau hides five of them", of_each(
        lambda name: scaled(cell(runs_of(records, name, list(peers.LINES)[-1])[:1], "step_seconds", ".4f"), 1000))))
    rows.append(row("longest step after the other worker was killed, s",
                    of_each(lambda name: cell(runs_of(records, name, near, True), "stall", ".1f"))))
    if peers.SCALES[scale].kills_of_all_seeds:
        rows.append(row("loss after that",
                        of_each(lambda name: cell(runs_of(records, name, near, True), "loss", ".4f", seeds))))
    rows.append(row(f"validation loss, {seeds} seeds",
                    of_each(lambda name: cell(runs_of(records, name, near), "loss", ".4f", seeds))))
    return rows


def equality(records, name):
    """Whether workers were equal in all runs without a kill."""
    own = runs_of(records, name)
    if failed := failures(own):
        return failed
    if not own:
        return "not run"
    return "equal" if all(one["equal"] for one in own) else \
        f"NOT EQUAL in {sum(not one['equal'] for one in own)} of {len(own)} runs"


def size_of(path):
    """Megabytes on disk."""
    if path.is_file():
        return path.stat().st_size / 1e6
    files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_size for file in files) / 1e6


def user_lines(path):
    """The number of lines that a user writes for it, without empty lines and comments."""
    text = path.read_text()
    own = text[text.index(MARKS[0]) + len(MARKS[0]):text.index(MARKS[1])]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in own.splitlines())


def sizes():
    """{program: MB on disk}, for the installed programs."""
    paths = {name: peers.ROOT / "train_gpt_cpu" if name in peers.OURS else peers.python_of(name).parents[1]
             for name in peers.TITLES}
    measured = {path: size_of(path) for path in set(paths.values()) if path.exists()}
    return {name: measured[path] for name, path in paths.items() if path in measured}


def fixed_rows(installed):
    megabytes = {name: (installed[name], f"{installed[name]:,.0f} MB") if name in installed else (None, "not installed")
                 for name in peers.TITLES}
    lines = {name: 0 if name in peers.OURS else user_lines(peers.program_of(name)) for name in peers.TITLES}
    return [row("installed", megabytes),
            row("lines that a user writes", {name: (count, str(count)) for name, count in lines.items()})]


def better(one):
    """Says which peer is better than which of diloco.c's ways."""
    found = []
    for peer in peers.PEERS:
        value = one.values[peer]
        worse = [name for name in peers.OURS if value is not None and
                 (one.texts[name].startswith("FAILED") or (one.values[name] or 0) > value)]
        if worse:
            of_us = "all of diloco.c's ways" if len(worse) == len(peers.OURS) else \
                "diloco.c's " + " and ".join(peers.OURS[name].partition(", ")[2] for name in worse)
            found.append(f"{peers.PEERS[peer]} is better than {of_us}")
    return "; ".join(found) or "-"


def text_of(records, scale, installed):
    """installed: see sizes()"""
    rows = measured_rows(records, scale) + fixed_rows(installed)
    same = Row("both workers' parameters", {}, {name: equality(records, name) for name in peers.TITLES})
    lines = [[one.title, *(one.texts[name].replace("|", "/") for name in peers.TITLES),
              better(one) if one.values else "-"] for one in [*rows, same]]
    own, asked = peers.SCALES[scale], peers.jobs_of(scale, list(peers.TITLES))
    made = [one for one in records if one["scale"] == scale]
    machines = sorted({one["machine"] for one in made})
    missing = sum(peers.made(records, one) is None for one in asked)
    text = [f"`PEERS=1 make bench-peers{' ARGUMENTS=--quick' if scale == 'quick' else ''}`, {', '.join(machines)}, "
            f"{max(one['date'] for one in made)}: the demo's model (4 layers of 128 channels) from the same initial "
            "bits, with the same rows in the same order and the same rates, two workers, "
            f"H = {peers.H}, {peers.FRAGMENTS} fragments, {own.steps} steps. Each worker and the store (or lighthouse) "
            "is in a network namespace of its own, behind an emulated line. The workers share two cores with whatever "
            "else the machine does: "
            "**times compare the programs of this page with each other, and nothing else**.", "",
            markdown(["", *peers.TITLES.values(), "where a peer is better"], lines), "",
            *notes(scale)]
    if missing:
        text += ["", f"{missing} of {len(asked)} runs are missing: run it again."]
    return "\n".join(text) + "\n"


def notes(scale):
    kill = "" if peers.SCALES[scale].kills_of_all_seeds else \
        " Only one of the short runs is killed, so its loss is not given."
    return ["- Bytes: all that the kernel counted at the worker's interface after the "
            f"first {peers.H} steps, headers and requests included; the mean of both workers.",
            "- Waited: for diloco.c by its log; for torchft the time in its optimizer hook; for GradientMail the time "
            "between two steps without loading data. The peers' times include encoding and merging, diloco.c's do "
            "not.",
            "- diloco.c sends four bits, in lock-step through its own TCP exchange. torchft sends fp32 in buckets "
            "through gloo; its 8 bits need a GPU. With its defaults GradientMail sends fp32, polls once a second and "
            "never waits; in the last column it sends F4, waits after 5 steps, has alpha 0.5 and polls every 20 ms. "
            "Its syncer runs beside SeaweedFS.",
            "- Killed: worker 1 by SIGKILL in the middle of the run; it is not restarted." + kill,
            "- Losses: if means differ by less than their spread, neither is better, whatever the last column says.",
            "- Parameters: for diloco.c the hashes of every sync that both workers merged; for the peers the global "
            "parameters at the end.",
            "- Installed: for diloco.c the program without the system's libraries; for the peers their environments "
            "with PyTorch."]


def draw(path, records):
    from plot import COLORS, plt
    figure, (waits, sent) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    names, lines = list(peers.TITLES), list(peers.LINES)
    of = lambda name, line, field: cell(runs_of(records, name, line)[:1], field, ".3f")[0]
    for number, (name, color) in enumerate(zip(names, [*COLORS, "#56B4E9"])):
        places = [place + (number - len(names) / 2 + 0.5) * 0.13 for place in range(len(lines))]
        heights = [of(name, line, "waited") or 0 for line in lines]
        waits.bar(places, heights, 0.12, color=color, label=peers.TITLES[name])
        sent.barh(peers.TITLES[name], (of(name, lines[0], "bytes") or 0) / 1e6, color=color)
    waits.set_xticks(range(len(lines)), lines)
    waits.set_ylabel("seconds waited a sync")
    waits.legend(frameon=False, fontsize=8)
    sent.invert_yaxis()
    sent.set_xlabel(f"MB a worker sends each {peers.H // peers.FRAGMENTS} steps")
    for axes in (waits, sent):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)
