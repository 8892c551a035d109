#!/usr/bin/env python3
"""What distant workers cost in validation loss: data-parallel training, classic DiLoCo, and streaming in fp32 and in
four bits, with AdamW and with Muon, H = 30 and 100, tau = 1 and 5, two and four workers, on equally many tokens. What
the README shows has three seeds. The other runs differ from one of these in one thing, and have one seed.

    dev/bench/quality.py                     makes the runs that are missing, and prints the tables
    dev/bench/quality.py --minutes 30        starts no run that may end later; the same command continues
    dev/bench/quality.py --only muon-data-parallel muon-streaming-m2-h30-tau1
    dev/bench/quality.py --scale trial --text FOLDER    a trial: every kind of run once, within minutes
    dev/bench/quality.py --scale gpu --trainer ./train_gpt --text FOLDER   one GPU, with rates that are given

A finished run is one line of the data file (--data), which is part of the repository, and is not made again with the
same text. A run that was interrupted continues from its last checkpoint.

All runs of a seed start from the same bits and read the same sequences in the same order, and a step has the same
number of sequences for any number of workers. Gaps are paired: each is between two losses of one seed. The losses are
of the global parameters.

Rates are tuned for each optimizer, method and number of workers with runs of a sixth of the length, with seed 1.
Data-parallel training tries nine inner settings (learning rate, and Muon's momentum). What exchanges tries three, and
then with the best of them four other outer settings (learning rate, momentum, alpha): seven runs. Runs that differ only
in H, tau or the format share their rates.

Complete trainings of three lengths, each with its whole learning-rate schedule, show how the gap shrinks as training
gets longer: runs of a sixth of the length (of the method's tuning runs the best), of a third, and the whole ones.
"""
import datetime
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from runs import (KING_JAMES, ROOT, above_zero, check_report, difference_text, first_missing, machine,  # finds dev/
                  markdown, paired, run_missing, start, text_of)
from compare import bytes_sent, read_run, size_text
from metrics import Parser, UserError, exit_status

STATIONS = 10     # validations in a run
LENGTHS = (6, 3)  # divisors of the whole length, for the tuning runs and for the middle of the curve
GOALS = {(2, 30): 1, (4, 30): 3, (2, 100): 2}  # {(workers, H): percent}: the gap to come to


@dataclass(frozen=True)
class Scale:
    """Sizes that fit a machine. A step is `step_tokens` tokens of all workers together."""
    model: dict
    sequence: int
    step_tokens: int
    steps: int
    validation_tokens: int
    warmup: int
    ranks: int             # of data-parallel training
    seeds: int             # of the main methods
    names: tuple = ()      # of the methods; empty: all
    more: tuple = ()       # further options
    learning_rate: float = 0  # a fixed one for AdamW, with the first outer setting; 0: tuned

    def options(self):
        return {**self.model, "-t": self.sequence, "-u": self.warmup, "-k": "cosine", "-q": 0.1, "-c": 0.1,
                "-s": 0, **dict(self.more)}


SCALES = {
    # Two cores, ten hours at most: 0.66M parameters, 20 tokens for each, 110 outer steps with H = 30.
    "cpu": Scale({"--layers": 3, "--heads": 2, "--channels": 128}, 128, 4096, 3300, 40960, 60, 2, 3),
    # The outer rate is the best of small runs on a CPU; two workers share the GPU.
    "gpu": Scale({"--layers": 12, "--heads": 8, "--channels": 512}, 1024, 65536, 1500, 131072, 100, 1, 1,
                 ("adamw-data-parallel", "adamw-diloco-m2-h30", "adamw-streaming-m2-h30-tau1"),
                 (("--outer-transport", "tcp"),), 0.001),
    "trial": Scale({"--layers": 2, "--heads": 2, "--channels": 32}, 32, 256, 360, 1024, 10, 2, 1)}

@dataclass(frozen=True)
class Inner:
    """momentum: Muon's, for the matrices, while AdamW updates the rest with a fifth of the rate; None: AdamW"""
    learning_rate: float
    momentum: float = None

    @property
    def name(self):
        return f"{self.learning_rate:g}" + (f"/{self.momentum:g}" if self.momentum else "")

    def options(self):
        if self.momentum is None:
            return {"-l": self.learning_rate}
        return {"--optimizer": "muon", "--muon-lr": self.learning_rate, "--muon-momentum": self.momentum,
                "-l": round(self.learning_rate / 5, 6)}


INNER = {"adamw": (Inner(0.004), Inner(0.002), Inner(0.008)),
         "muon": (Inner(0.01, 0.9), Inner(0.014, 0.9), Inner(0.01, 0.95))}
MORE_INNER = {"adamw": (Inner(0.0028), Inner(0.0057), Inner(0.0067), Inner(0.0095), Inner(0.0113), Inner(0.016)),
              "muon": (Inner(0.007, 0.9), Inner(0.007, 0.95), Inner(0.01, 0.8), Inner(0.014, 0.8), Inner(0.014, 0.95),
                       Inner(0.02, 0.9))}  # of data-parallel


@dataclass(frozen=True)
class Outer:
    learning_rate: float
    momentum: float
    alpha: float

    @property
    def name(self):
        return f"{self.learning_rate:g}/{self.momentum:g}/{self.alpha:g}"


OUTER = {"streaming": (Outer(0.7, 0.9, 0.5), Outer(0.4, 0.9, 0.5), Outer(1, 0.4, 0), Outer(1, 0, 0), Outer(1, 0.6, 0)),
         "diloco": (Outer(0.7, 0.9, 0), Outer(0.4, 0.9, 0), Outer(1, 0.4, 0), Outer(1, 0, 0), Outer(1, 0.6, 0))}


# --------------------------------------------------------------------------------------------------- methods

@dataclass(frozen=True)
class Method:
    optimizer: str
    kind: str           # data-parallel, diloco or streaming
    workers: int = 1
    inner_steps: int = 0
    overlap: int = 0
    dtype: str = "fp4_e2m1"

    @property
    def name(self):
        name = f"{self.optimizer}-{self.kind}"
        if self.exchanges:
            name += f"-m{self.workers}-h{self.inner_steps}"
        return name + (f"-tau{self.overlap}" + "-fp32" * (self.dtype == "fp32") if self.streams else "")

    @property
    def exchanges(self):
        return self.kind != "data-parallel"

    @property
    def streams(self):
        return self.kind == "streaming"

    @property
    def title(self):
        return {"data-parallel": "data-parallel", "diloco": "DiLoCo, fp32",
                "streaming": "streaming, " + ("fp32" if self.dtype == "fp32" else "four bits")}[self.kind]

    @property
    def group(self):
        """The method from whose tuning runs the rates are taken."""
        return Method(self.optimizer, self.kind, self.workers, 30 * self.exchanges, int(self.streams))

    def base(self):
        return Method(self.optimizer, "data-parallel")

    def options(self, scale, inner, outer):
        if not self.exchanges:
            return {**inner.options(), "--ranks": scale.ranks}
        return {**inner.options(), "--workers": self.workers, "-H": self.inner_steps, "--overlap": self.overlap,
                "--outer-lr": outer.learning_rate, "--outer-momentum": outer.momentum, "--local-weight": outer.alpha,
                "--fragment-layers": int(self.streams), "--outer-dtype": self.dtype if self.streams else "fp32"}


def of_optimizer(optimizer):
    """(the main methods, with several seeds; the others)"""
    def streaming(workers, inner_steps, overlap, dtype="fp4_e2m1"):
        return Method(optimizer, "streaming", workers, inner_steps, overlap, dtype)
    return ([Method(optimizer, "data-parallel"), streaming(2, 30, 1), streaming(4, 30, 1), streaming(2, 100, 1)],
            [streaming(2, 30, 1, "fp32"), streaming(2, 30, 5), streaming(2, 100, 5),
             Method(optimizer, "diloco", 2, 30)])


MAIN = of_optimizer("muon")[0] + of_optimizer("adamw")[0]
METHODS = MAIN + of_optimizer("muon")[1] + of_optimizer("adamw")[1]

# Evaluation losses of arXiv 2501.18512, table 5, at 35M parameters on C4, two workers, AdamW; its four bits are E3M0.
PAPERS = {("data-parallel", 0): 3.51, ("diloco", 30): 3.54, ("streaming", 30): 3.53, ("streaming", 100): 3.56}


# ------------------------------------------------------------------------------------------------------ runs

@dataclass(frozen=True)
class Job:
    method: Method
    steps: int
    seed: int
    inner: Inner
    outer: Outer  # None: data-parallel
    options: dict

    @property
    def name(self):
        rates = f"lr{self.inner.name}" + (f"-outer{self.outer.name}" if self.outer else "")
        return f"{self.method.name}-{rates}-steps{self.steps}-seed{self.seed}"


def make_job(scale, method, steps, seed, inner, outer):
    options = method.options(scale, inner, outer)
    ranks = options.get("--ranks", 1)  # ranks share a validation batch, workers do not
    batch = scale.step_tokens // scale.sequence // (method.workers * ranks)
    return Job(method, steps, seed, inner, outer if method.exchanges else None, {
        **scale.options(), **options, "-b": batch, "-x": steps, "--seed": seed, "-v": max(1, steps // STATIONS),
        "-m": scale.validation_tokens // scale.sequence // (batch * ranks)})


def last_loss(record):
    return record["evals"][-1][1]


class Finished:
    """The runs of a data file that were made of one text, by their options. A record that names no text is of the King
    James Bible as bytes."""

    def __init__(self, path, text=KING_JAMES):
        self.path = path
        try:
            lines = path.read_text().splitlines() if path.exists() else []
            self.records = [one for one in map(json.loads, lines) if one.get("text", KING_JAMES) == text]
            self.by_options = {self.key(record["options"]): record for record in self.records}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a data file of this benchmark ({error}): give another --data") from error

    @staticmethod
    def key(options):
        return json.dumps(options, sort_keys=True)

    def find(self, job):
        return self.by_options.get(self.key(job.options))

    def loss(self, job):
        """The last validation loss; None if the run has not finished."""
        record = self.find(job)
        return last_loss(record) if record else None

    def add(self, record):
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        self.by_options[self.key(record["options"])] = record


class Tuning:
    """The tuning runs of a group that are known so far, and the best rates once all have finished."""

    def __init__(self, arguments, finished, group):
        scale = arguments.scale
        outers = OUTER.get(group.kind, (None,))
        steps = arguments.steps // LENGTHS[0]
        run = lambda inner, outer: make_job(scale, group, steps, 1, inner, outer)
        self.inner, self.outer = [], []
        if scale.learning_rate:
            self.best = run(Inner(scale.learning_rate), outers[0])
            return
        inners = INNER[group.optimizer] + (() if group.exchanges else MORE_INNER[group.optimizer])
        self.inner = [run(inner, outers[0]) for inner in inners]
        best = self.least(finished, self.inner)
        if best and group.exchanges:
            self.outer = [run(best.inner, outer) for outer in outers]
            best = self.least(finished, self.outer)
        self.best = best

    @staticmethod
    def least(finished, jobs):
        losses = [finished.loss(job) for job in jobs]
        return None if None in losses else jobs[losses.index(min(losses))]

    def jobs(self):
        return list({job.name: job for job in self.inner + self.outer}.values())


class Plan:
    """All runs that are known so far, in the order in which they are made. The rates of the long runs depend on the
    tuning runs."""

    def __init__(self, arguments, finished):
        self.arguments = arguments
        chosen = [method for method in METHODS if method.name in arguments.names]
        self.tuning = {group: Tuning(arguments, finished, group)
                       for group in dict.fromkeys(method.group for method in chosen)}
        main = [method for method in chosen if method in MAIN]
        seeds = range(1, arguments.seeds + 1)
        self.long = [*self.runs(main, arguments.steps, seeds),
                     *self.runs([one for one in chosen if one not in MAIN], arguments.steps, [1])]
        self.middle = self.runs(main, arguments.steps // LENGTHS[1], [1])
        borrow = [method for method in main if method != method.group and self.tuning[method.group].jobs()]
        self.short = self.runs(borrow, arguments.steps // LENGTHS[0], [1])  # the others were tuned in this length
        tuning = [job for one in self.tuning.values() for job in one.jobs()]
        self.all = list({job.name: job for job in [*tuning, *self.long, *self.middle, *self.short]}.values())

    def runs(self, methods, steps, seeds):
        made = []
        for seed in seeds:
            for method in methods:
                best = self.tuning[method.group].best
                if best:
                    made.append(make_job(self.arguments.scale, method, steps, seed, best.inner, best.outer))
        return made


def folder_of(arguments, job):
    """Where the run lies until it has finished."""
    text = text_of(arguments.text)
    of_text = "" if text == KING_JAMES else "-" + hashlib.sha256(text.encode()).hexdigest()[:8]
    return arguments.out / (job.name.replace("/", "-") + of_text)


def train(arguments, job):
    """Makes the run, or continues it, and returns its line of the data file."""
    folder = folder_of(arguments, job)
    checkpoint = max(1, job.steps // 4)
    start(arguments.trainer, {**job.options, "-i": f"{arguments.text}/*_train_*.bin",
                              "-j": f"{arguments.text}/*_val_*.bin", "-n": checkpoint, "-nk": 1, "-y": 1},
          folder, job.name)
    run = read_run(folder)
    record = {"name": job.name, "text": text_of(arguments.text), "options": job.options, "parameters": run.parameters,
              "evals": [[line["step"], round(line["loss"], 6)] for line in run.processes[0].evals],
              "bytes": bytes_sent(run), "seconds": round(sum(line["seconds"] for line in run.processes[0].steps), 1),
              "program": hashlib.sha256(arguments.trainer.read_bytes()).hexdigest()[:12],
              "machine": machine(), "date": str(datetime.date.today())}
    shutil.rmtree(folder)
    return record


def run_all(arguments, finished):
    def run(number, job):
        begin = datetime.datetime.now()
        finished.add(train(arguments, job))
        seconds = (datetime.datetime.now() - begin).total_seconds()
        print(f"{number:3}  {job.name:80} {finished.loss(job):.4f}  {seconds:.0f} s", flush=True)
        return seconds
    run_missing(arguments.minutes, lambda: first_missing(Plan(arguments, finished).all, finished.find), run)


# ---------------------------------------------------------------------------------------------------- tables

def by_method(finished, jobs):
    """{method: {seed: record}} of the finished runs."""
    found = {}
    for job in jobs:
        record = finished.find(job)
        if record:
            found.setdefault(job.method, {})[job.seed] = record
    return found


def papers_gap_text(method):
    loss = PAPERS.get((method.kind, method.inner_steps))
    known = loss and method.exchanges and method.workers == 2 and method.overlap <= 1 and method.dtype != "fp32"
    return f"{100 * (loss / PAPERS['data-parallel', 0] - 1):+.1f}%" if known else "-"


def shape_cells(method):
    if not method.exchanges:
        return ["-", "-", "-", method.title]
    return [str(method.workers), str(method.inner_steps), str(method.overlap), method.title]


def main_table(found):
    reference = Method("adamw", "data-parallel")
    gap_text = lambda runs, base, digits: difference_text(paired(runs, found.get(base, {}), last_loss), digits)
    rows = []
    for method in METHODS:
        runs = found.get(method)
        if not runs:
            continue
        losses = [last_loss(record) for record in runs.values()]
        rows.append([method.optimizer, *shape_cells(method), f"{statistics.mean(losses):.4f}",
                     gap_text(runs, method.base(), 2) if method.exchanges else "-",
                     "-" if method == reference else gap_text(runs, reference, 1),
                     papers_gap_text(method), size_text(max(record["bytes"] for record in runs.values())),
                     str(len(runs))])
    return markdown(["optimizer", "workers", "H", "tau", "method", "loss", "to data-parallel, same optimizer",
                     "to AdamW, data-parallel", "paper, 35M", "sent by a process", "seeds"], rows)


def gaps_by_length(finished, plan):
    """{method: {steps: gap in percent}} of complete trainings of seed 1."""
    losses = {}  # {(method, steps): loss}
    tuned = [one.best for one in plan.tuning.values() if one.best and one.jobs()]
    for job in [*tuned, *plan.short, *plan.middle, *plan.long]:
        if job.seed == 1 and finished.find(job):
            losses[job.method, job.steps] = finished.loss(job)
    found = {}
    for (method, steps), loss in losses.items():
        base = losses.get((method.base(), steps))
        if method in MAIN and method.exchanges and base:
            found.setdefault(method, {})[steps] = 100 * (loss / base - 1)
    return found


def lengths_table(plan, found):
    lengths = [plan.arguments.steps // length for length in (*LENGTHS, 1)]
    cell = lambda method, steps: ("-" if steps not in found[method] else
                                  f"{found[method][steps]:+.2f}% ({steps // method.inner_steps})")
    rows = [[method.optimizer, *shape_cells(method)[:2], *(cell(method, steps) for steps in lengths)]
            for method in MAIN if method in found]
    tokens = [f"{steps * plan.arguments.scale.step_tokens / 1e6:.1f}M tokens" for steps in lengths]
    return markdown(["optimizer", "workers", "H", *tokens], rows) if rows else ""


def crossings(plan, finished, found):
    """For each method that ends above its goal: where a power law of outer steps would fall to it. Its exponent is
    fitted to the gaps of all lengths, its level is the mean of the longest runs, its range their spread."""
    lines, by_seed = [], by_method(finished, plan.long)
    for method, gaps in found.items():
        differences = paired(by_seed.get(method, {}), by_seed.get(method.base(), {}), last_loss)
        goal = GOALS[method.workers, method.inner_steps]
        if len(differences) < 2 or len(gaps) < 3 or statistics.mean(differences) <= goal or min(gaps.values()) <= 0:
            continue
        points = [(math.log(steps), math.log(gap)) for steps, gap in gaps.items()]
        exponent = statistics.linear_regression(*zip(*points)).slope
        mean, spread = statistics.mean(differences), statistics.stdev(differences)
        if exponent >= 0 or mean <= spread:
            continue
        steps = [max(gaps) // method.inner_steps * (goal / gap) ** (1 / exponent)
                 for gap in (mean, mean - spread, mean + spread)]
        lines.append(f"- {method.optimizer}, {method.workers} workers, H = {method.inner_steps}: the gap falls with "
                     f"outer steps to the power of {exponent:.2f}. It would be {goal}% after {steps[0]:.0f} outer "
                     f"steps ({steps[1]:.0f} to {steps[2]:.0f}, by the spread of the {len(differences)} seeds).")
    return "\n".join(lines)


def draw_figure(arguments, finished):
    from quality_figure import draw  # takes a second to load
    plan = Plan(arguments, finished)
    tokens = arguments.scale.step_tokens
    curves = {job.method: [(step * tokens, loss) for step, loss in record["evals"]]
              for job in plan.long if job.seed == 1 and job.method in MAIN and (record := finished.find(job))}
    gaps = {method: sorted((steps // method.inner_steps, gap) for steps, gap in of_method.items())
            for method, of_method in gaps_by_length(finished, plan).items()}
    draw(arguments.report.with_suffix(".png"), curves, gaps)


def tuning_lines(finished, plan):
    lines = []
    for group, tuning in plan.tuning.items():
        if not tuning.jobs():
            continue
        text = lambda job, value: f"{value}: " + ("-" if (loss := finished.loss(job)) is None else f"{loss:.4f}")
        line = f"- {group.optimizer}, {group.title}" + f", {group.workers} workers" * group.exchanges
        line += ": " + ", ".join(text(job, job.inner.name) for job in tuning.inner)
        if tuning.outer:
            line += "; outer " + ", ".join(text(job, job.outer.name) for job in tuning.outer)
        if tuning.best:
            best, rates = tuning.best, [job.inner.learning_rate for job in tuning.inner]
            line += f". Taken: {best.inner.name}" + (f" and {best.outer.name}" if best.outer else "")
            line += " (the end of the range)" if best.inner.learning_rate in (min(rates), max(rates)) else ""
        lines.append(line + ".")
    return lines


def report(arguments, finished):
    plan = Plan(arguments, finished)
    found = by_method(finished, plan.long)
    records = [record for job in plan.all if (record := finished.find(job))]
    if not records:
        return "No run has finished: run it again.\n"
    scale, hours = arguments.scale, sum(record["seconds"] for record in records) / 3600
    machines = sorted({record["machine"] for record in records})
    dates = sorted({record["date"] for record in records})
    intro = (f"`make bench-quality`, {', '.join(machines)}, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}: "
             f"{records[0]['parameters'] / 1e6:.2f}M parameters, {arguments.steps * scale.step_tokens:,} tokens of "
             f"{text_of(arguments.text)}, {scale.step_tokens} a step of all workers together, {arguments.steps} "
             f"steps. Validation loss of the global parameters on {scale.validation_tokens:,} tokens. {len(records)} runs, "
             f"{hours:.1f} hours of training.")
    parts = [intro, main_table(found) if found else "No long run has finished.", NOTES]
    missing = [job for job in plan.all if not finished.find(job)]
    if missing:
        parts.append(f"{len(missing)} of the {len(plan.all)} runs that are known so far are missing: the command above "
                     "makes them.")
    gaps = gaps_by_length(finished, plan)
    if lengths := lengths_table(plan, gaps):
        parts.append(LENGTHS_NOTE + "\n\n" + lengths)
        parts += filter(None, [crossings(plan, finished, gaps)])
    if tuned := tuning_lines(finished, plan):
        parts.append(TUNING_NOTE + "\n\n" + "\n".join(tuned))
    programs = len({record["program"] for record in records})
    if programs > 1:
        parts.append(f"The runs were made by {programs} different builds of the trainer.")
    return "\n\n".join(parts) + "\n"


NOTES = """The paper's gaps are those of its table 5 (arXiv 2501.18512): 35M parameters, C4, two workers, AdamW, its own four
bits (E3M0) with tau = 1. With four workers a step here has the same number of tokens, half as many on each worker.
DiLoCo exchanges all parameters at once, in fp32, with tau 0. Streaming has a layer in each fragment."""

LENGTHS_NOTE = """## As training gets longer

Gaps to data-parallel training with the same optimizer, in complete trainings of seed 1, each with its whole
learning-rate schedule; in brackets, the outer steps."""

TUNING_NOTE = """## Rates

Validation losses of the tuning runs, a sixth of the length, by inner learning rate (of Muon with its momentum; AdamW's
rate beside it is a fifth of Muon's) and, at the best of them, by outer learning rate/momentum/alpha."""


# ---------------------------------------------------------------------------------------------- command line

def parse_arguments(words):
    names = [method.name for method in METHODS]
    parser = Parser(description="What distant workers cost in validation loss.",
                    epilog="The beginning of dev/bench/quality.py describes the runs.")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    parser.add_argument("--text", type=Path, default=ROOT / "build/quality/text", help="folder of token shards")
    parser.add_argument("--out", type=Path, default=ROOT / "build/quality", help="folder of unfinished runs")
    parser.add_argument("--data", type=Path, help="file of finished runs (dev/results/quality.jsonl; of other scales "
                        "OUT/SCALE.jsonl)")
    parser.add_argument("--report", type=Path, help="write the tables here too, and a figure beside them")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="sizes for this machine (cpu)")
    parser.add_argument("--quick", action="store_true", help="--scale trial and three methods: a trial of this program")
    parser.add_argument("--seeds", type=above_zero(int), help="number of seeds of the main methods")
    parser.add_argument("--minutes", type=above_zero(float, or_zero=True), default=120,
                        help="start no run that may end later (120; 0: only the tables of the finished runs)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", dest="names",
                        help="of " + " ".join(names))
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.scale, arguments.names = "trial", arguments.names or [method.name for method in METHODS[:3]]
    is_main = arguments.scale == "cpu"
    arguments.data = arguments.data or (ROOT / "dev/results/quality.jsonl" if is_main else
                                        arguments.out / f"{arguments.scale}.jsonl")
    scale = arguments.scale = SCALES[arguments.scale]
    arguments.steps = scale.steps
    arguments.seeds = arguments.seeds or scale.seeds
    arguments.names = arguments.names or list(scale.names) or names
    return arguments


def check(arguments):
    if not arguments.trainer.exists():
        raise UserError(f"there is no {arguments.trainer}: run make train_gpt_cpu")
    if not list(arguments.text.glob("*_train_*.bin")) or not list(arguments.text.glob("*_val_*.bin")):
        raise UserError(f"{arguments.text} holds no token shards: run make bench-quality, or give another --text")
    check_report(arguments.report)


def main(words):
    arguments = parse_arguments(words)
    check(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    finished = Finished(arguments.data, text_of(arguments.text))
    run_all(arguments, finished)
    text = report(arguments, finished)
    print("\n" + text, end="")
    if arguments.report:
        figure = arguments.report.with_suffix(".png")
        draw_figure(arguments, finished)
        arguments.report.write_text("# What distant workers cost in validation loss\n\n" + text +
                                    "\n![loss in the second half of training, and the gap over outer steps]"
                                    f"({figure.name})\n")


if __name__ == "__main__":
    sys.exit(exit_status(main))
