#!/usr/bin/env python3
"""What the wire's formats cost in quality. A model of about 3M parameters is trained on the King James Bible with each
format, from several seeds, and the validation loss of each run is compared with the loss of the same run with fp32
on the wire.

    dev/bench/wire_quality.py            makes the runs that are missing, and prints the table
    dev/bench/wire_quality.py --quick    two formats, one seed, few tokens: a trial of this program

A finished run is a folder in --out and is not repeated, so this program can be stopped at any time and started again.
When --minutes are over, no other run starts. All runs of a seed start from the same bits and read the same tokens in
the same order, whatever the number of workers: a step is TOKENS_A_STEP tokens of all workers together. So
data-parallel is one run for all numbers of workers.

A paired difference is between two losses of one seed, so that the effects of the seed and the tokens cancel.
The table has its mean and its standard deviation over seeds. The standard error is that deviation, divided by
the square root of the number of seeds.
"""
import datetime
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from runs import (ROOT, Budget, above_zero, check_report, difference_text, machine, made_by,  # finds dev/, too
                  markdown, paired, text_of, train)
from compare import bytes_sent, read_run, size_text, validation_loss
from metrics import Parser, UserError, exit_status

SEQUENCE, TOKENS_A_STEP, VALIDATION_SEQUENCES = 128, 2048, 320

# The model and AdamW, similar to the demo's.
COMMON = {"--layers": 4, "--heads": 4, "--channels": 240, "-t": SEQUENCE, "-l": 0.0015, "-u": 40,
          "-k": "cosine", "-q": 0.1, "-c": 0.1, "-s": 0}
# A run has 585 steps: with H = 20 every fragment is exchanged 29 times. The rest is the demo's.
STREAMING = {"-H": 20, "--fragment-layers": 1, "--overlap": 2, "--local-weight": 0.5, "--outer-lr": 0.7,
             "--outer-momentum": 0.9}


@dataclass
class Setting:
    name: str
    workers: int  # 1: data-parallel
    options: dict
    title: str
    rounding: str = "nearest"


def of_format(workers, dtype, title, stochastic=False, feedback=False):
    options = {**STREAMING, "--outer-dtype": dtype}
    if stochastic:
        options["--outer-rounding"] = "stochastic"
    if feedback:
        options["--outer-error-feedback"] = True
    name = f"m{workers}-{dtype}" + "-stochastic" * stochastic + "-feedback" * feedback
    rounding = ("stochastic" if stochastic else "nearest") + ", error feedback" * feedback
    return Setting(name, workers, options, title, rounding)


E3M0, E2M1 = ("fp4", "fp4 E3M0"), ("fp4_e2m1", "fp4 E2M1")
SETTINGS = [
    Setting("data-parallel", 1, {"--ranks": 2}, "data-parallel", "-"),
    of_format(2, "fp32", "fp32"), of_format(2, *E3M0), of_format(2, *E2M1),
    of_format(2, "bf16", "bf16"), of_format(2, "fp8_e4m3", "fp8 E4M3"),
    *(of_format(2, *format, stochastic, feedback) for format in (E3M0, E2M1)
      for stochastic, feedback in ((True, False), (False, True), (True, True))),
    of_format(4, "fp32", "fp32"), of_format(4, *E3M0), of_format(4, *E2M1)]


# --------------------------------------------------------------------------------------------------- running

def options_of(setting, seed, tokens, text):
    """All options of a run except -o. A step has the same tokens in all runs, and so has validation."""
    processes = setting.workers * setting.options.get("--ranks", 1)
    batch = TOKENS_A_STEP // SEQUENCE // processes
    validation_batch = batch * setting.options.get("--ranks", 1)  # ranks share a batch, workers do not
    return {**COMMON, **setting.options, "--workers": setting.workers, "-b": batch,
            "-x": tokens // TOKENS_A_STEP, "--seed": seed, "-v": 10**9,
            "-m": VALIDATION_SEQUENCES // validation_batch,
            "-i": f"{text}/*_train_*.bin", "-j": f"{text}/*_val_*.bin"}


def run_all(arguments, settings):
    """Seed by seed, so that the finished runs can be compared whenever this is stopped."""
    budget = Budget(arguments.minutes)
    todo = [(seed, setting) for seed in range(1, arguments.seeds + 1) for setting in settings]
    for number, (seed, setting) in enumerate(todo, 1):
        folder = arguments.out / f"{setting.name}-seed{seed}"
        options = options_of(setting, seed, arguments.tokens, arguments.text)
        if made_by(folder, options):
            continue
        if budget.is_spent():
            print(f"{arguments.minutes} minutes are over: run this again to continue", flush=True)
            return
        seconds = train(arguments.trainer, options, folder)
        budget.spend(seconds)
        print(f"{number:3} of {len(todo)}  {folder.name:34} {validation_loss(read_run(folder)):.4f}  "
              f"{seconds:.0f} s", flush=True)


# ----------------------------------------------------------------------------------------------------- table

def read_losses(arguments, settings):
    """{setting: {seed: Run}} of the finished runs, and a list of how each was made."""
    runs, made = {}, []
    for setting in settings:
        runs[setting.name] = {}
        for seed in range(1, arguments.seeds + 1):
            folder = arguments.out / f"{setting.name}-seed{seed}"
            one = made_by(folder, options_of(setting, seed, arguments.tokens, arguments.text))
            if one:
                runs[setting.name][seed] = read_run(folder)
                made.append(one)
    return runs, made


def row(setting, workers, runs):
    own, base = runs[setting.name], runs.get(f"m{workers}-fp32", {})
    if not own:
        return None
    is_base = setting.name == f"m{workers}-fp32"
    differences = [] if is_base else paired(own, base)
    losses = [validation_loss(run) for run in own.values()]
    sent = size_text(max(bytes_sent(run) for run in own.values()))
    each = " ".join(f"{difference:+.2f}" for difference in differences) or "-"
    return [str(workers), setting.title, setting.rounding, f"{statistics.mean(losses):.4f}",
            difference_text(differences), each, sent, str(len(own))]


def rows(settings, runs):
    """For each number of workers: data-parallel, then fp32 and the other formats."""
    result = []
    for workers in (2, 4):
        if any(setting.workers == workers for setting in settings):
            result += [row(setting, workers, runs) for setting in settings
                       if setting.workers in (1, workers)]
    return [one for one in result if one]


def verdicts(runs):
    """Whether four bits, rounded to nearest, meet the bar: 0.3% from fp32."""
    lines = []
    for workers, (dtype, title) in [(workers, format) for workers in (2, 4) for format in (E3M0, E2M1)]:
        differences = paired(runs.get(f"m{workers}-{dtype}", {}), runs.get(f"m{workers}-fp32", {}))
        if differences:
            mean, spread = statistics.mean(differences), "one seed"
            if len(differences) > 1:
                spread = f"standard error {statistics.stdev(differences) / math.sqrt(len(differences)):.3f}"
            within = "within" if mean <= 0.3 else "NOT within"
            lines.append(f"{workers} workers: {title} to nearest is {mean:+.3f}% ({spread}) from fp32, "
                         f"{within} 0.3%.")
    return lines


def report(arguments, settings):
    runs, made = read_losses(arguments, settings)
    table = rows(settings, runs)
    if not table:
        raise UserError("no run has finished: give it more --minutes")
    parameters = next(run for seeds in runs.values() for run in seeds.values()).parameters
    header = ["workers", "on the wire", "rounding", "loss", "to fp32: mean ± std", "each seed",
              "sent by a process", "seeds"]
    minutes = sum(one["seconds"] for one in made) / 60
    text = [f"`make bench-wire-quality`, {machine()}, {datetime.date.today()}: {parameters / 1e6:.2f}M "
            f"parameters, {arguments.tokens:,} tokens of {text_of(arguments.text)}, {TOKENS_A_STEP} a "
            f"step; validation loss of the global parameters on {VALIDATION_SEQUENCES * SEQUENCE:,} tokens. "
            f"{len(made)} runs, {minutes:.0f} minutes.", "", markdown(header, table), "", *verdicts(runs),
            "Data-parallel is the same in both parts, since a step has the same number of tokens for any number of "
            "workers; its bytes are of fp32 gradients. With four workers the exchange is all-to-all, which rounds "
            "means once more."]
    missing = len(settings) * arguments.seeds - len(made)
    if missing:
        text.append(f"{missing} of {missing + len(made)} runs are missing: run it again.")
    programs = len({one["program"] for one in made})
    if programs > 1:
        text.append(f"The runs were made by {programs} different builds of the trainer.")
    return "\n".join(text) + "\n"


def parse_arguments(words):
    names = [setting.name for setting in SETTINGS]
    parser = Parser(description="What the wire's formats cost in quality.")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    parser.add_argument("--text", type=Path, default=ROOT / "build/wire_quality/text", help="token shards")
    parser.add_argument("--out", type=Path,
                        help="folder of the runs (build/wire_quality, or build/wire_quality/quick)")
    parser.add_argument("--report", type=Path, help="write the table here too")
    parser.add_argument("--tokens", type=above_zero(int), default=1_200_000, help="tokens of a run")
    parser.add_argument("--seeds", type=above_zero(int), default=3)
    parser.add_argument("--minutes", type=above_zero(float, or_zero=True), default=75,
                        help="start no run that may end later (75; 0: only the table of the finished runs)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=" ".join(names))
    parser.add_argument("--quick", action="store_true", help="two formats, one seed, few tokens: a trial")
    arguments = parser.parse_args(words)
    arguments.out = arguments.out or ROOT / "build/wire_quality" / ("quick" if arguments.quick else "")
    if arguments.quick:
        arguments.tokens, arguments.seeds = 60_000, 1
        arguments.only = arguments.only or ["m2-fp32", "m2-fp4"]
    return arguments


def main(words):
    arguments = parse_arguments(words)
    settings = [one for one in SETTINGS if not arguments.only or one.name in arguments.only]
    if not arguments.trainer.exists():
        raise UserError(f"there is no {arguments.trainer}: run make train_gpt_cpu")
    check_report(arguments.report)
    arguments.out.mkdir(parents=True, exist_ok=True)
    run_all(arguments, settings)
    text = report(arguments, settings)
    print("\n" + text, end="")
    if arguments.report:
        arguments.report.write_text("# What the wire's formats cost in quality\n\n" + text)


if __name__ == "__main__":
    sys.exit(exit_status(main))
