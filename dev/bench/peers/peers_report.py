"""The report and the figure of peers.py, from its finished runs."""
import datetime
import os
import statistics
from dataclasses import dataclass

import peers
from runs import machine, markdown

MARKS = "# user: from here", "# user: to here"


@dataclass(frozen=True)
class Row:
    title: str
    values: dict  # by program: a number, of which less is better; or None
    texts: dict   # by program


def runs_of(records, name, line=None, killed=False):
    return [one for one in records if one["name"] == name and one["killed"] == killed and line in (None, one["line"])]


def failures(own):
    return "; ".join(sorted({f"FAILED: {one['failed']}" for one in own if "failed" in one}))


def cell(own, field, show, wanted=1):
    """(the mean of what the runs have, its text). A failed run is shown, whatever others of its kind give."""
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
    """Of all runs of which no worker was killed."""
    own = runs_of(records, name)
    if failed := failures(own):
        return failed
    if not own:
        return "not run"
    return "equal" if all(one["equal"] for one in own) else \
        f"NOT EQUAL in {sum(not one['equal'] for one in own)} of {len(own)} runs"


def size_of(path):
    """Megabytes on the disk."""
    if path.is_file():
        return path.stat().st_size / 1e6
    files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_size for file in files) / 1e6


def user_lines(path):
    """What a user writes for it, without empty lines and comments."""
    text = path.read_text()
    own = text[text.index(MARKS[0]) + len(MARKS[0]):text.index(MARKS[1])]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in own.splitlines())


def sizes():
    """{program: MB on the disk}, of those that are here."""
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
    """In words, which peer is better than which of ours."""
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
    """installed: what sizes() returns"""
    rows = measured_rows(records, scale) + fixed_rows(installed)
    same = Row("both workers' parameters", {}, {name: equality(records, name) for name in peers.TITLES})
    lines = [[one.title, *(one.texts[name].replace("|", "/") for name in peers.TITLES),
              better(one) if one.values else "-"] for one in [*rows, same]]
    own, asked = peers.SCALES[scale], peers.jobs_of(scale, list(peers.TITLES))
    missing = sum(peers.made(records, one) is None for one in asked)
    text = [f"`PEERS=1 make bench-peers{' ARGUMENTS=--quick' if scale == 'quick' else ''}`, {machine()}, "
            f"{datetime.date.today()}: the demo's model (4 layers of 128 channels) from the same initial bits, with "
            f"the same rows in the same order and the same rates, two workers, H = {peers.H}, {peers.FRAGMENTS} "
            f"fragments, {own.steps} steps. Each worker and the store (or lighthouse) is in a network namespace of "
            "its own, behind an emulated line. The workers share two cores with whatever else the machine does: "
            "**times compare the programs of this page with each other, and nothing else**.", "",
            markdown(["", *peers.TITLES.values(), "where a peer is better"], lines), "",
            *notes(scale)]
    if missing:
        text += ["", f"{missing} of {len(asked)} runs are missing: run it again."]
    return "\n".join(text) + "\n"


def notes(scale):
    kill = "" if peers.SCALES[scale].kills_of_all_seeds else \
        " Of the short runs one is killed, so that no loss is given for it."
    return ["- Bytes: all that the kernel counted at the worker's interface, headers and requests included, behind the "
            f"first {peers.H} steps; the mean of both workers.",
            "- Waited: diloco.c by its log; torchft the time in its optimizer hook; GradientMail the time between two "
            "steps beside the data's. The peers' times include what they compute (encoding, merging), diloco.c's do "
            "not.",
            "- diloco.c sends four bits, in lock-step by its own TCP exchange. torchft sends fp32 in buckets, by "
            "gloo; its 8 bits need a GPU. GradientMail by its defaults sends fp32, polls once a second and never "
            "waits; in the last column it sends F4, waits after 5 steps, has alpha 0.5 and polls each 20 ms. Its "
            "syncer runs beside SeaweedFS.",
            "- Killed: worker 1 by SIGKILL in the middle, and not started again." + kill,
            "- Losses: where means differ by less than their spread, neither is better, whatever the last column says.",
            "- Parameters: diloco.c's hashes of every sync that both merged; the peers' global parameters at the end.",
            "- Installed: diloco.c's program without the system's libraries; the peers' environments with PyTorch."]


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
