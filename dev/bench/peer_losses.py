#!/usr/bin/env python3
"""Compares whole runs of the trainer with whole runs in PyTorch: the same model from the same initial bits, the same
rows in the same order, the same rates. Do both end at the same loss?

    dev/bench/peer_losses.py                 makes the runs that are missing, and prints the report
    dev/bench/peer_losses.py --minutes 10    starts no run that may end later; the same command continues
    dev/bench/peer_losses.py --only muon --quick    a trial that takes a minute

The PyTorch program is dev/reference/reference_diloco.py, which was written from the papers and not from the trainer:
GPT-2 with autograd, AdamW, Muon, Algorithm 2 with all workers in one process, and the order of rows. It computes in
float32 with two threads unless OMP_NUM_THREADS says otherwise. The trainer runs as two processes, data-parallel ranks
or workers, with fp32 matmuls.

Rounding differs, so the two runs drift apart, and with four bits on the wire a code differs now and then. The verdict
is therefore on means over seeds, which must be within BAR of each other, and on the losses of the first ten steps,
before any drift, which must be within EARLY_BAR. The exit status is 1 if they are not.
"""
import datetime
import importlib.util
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

try:
    import numpy as np
except ImportError:
    np = None

from runs import (ROOT, above_zero, check_report, first_missing, machine, made_by, making, markdown,  # finds dev/, too
                  run_missing, train)
from compare import validation_loss
from metrics import Parser, UserError, exit_status, read_run

NO_PYTORCH = (f"{sys.executable} has no PyTorch: PEERS=1 make bench-losses installs it, and PEER=PYTHON names a Python "
              "that has it")
if np is None:
    sys.exit(f"error: {NO_PYTORCH}")
sys.path.insert(0, str(ROOT / "dev/reference"))
import reference_diloco
from reference import gpt_logits

BAR, EARLY_BAR, EARLY = 0.01, 1e-4, 10
REFERENCE = ROOT / "dev/reference/reference_diloco.py"
VALIDATION_BATCH = 16  # rows, in PyTorch

# The rows of a step, and of a validation, are those of all processes together.
FULL = {"options": {"--layers": 4, "--heads": 2, "--channels": 128, "-t": 128, "-x": 1000, "-u": 50, "-v": 250},
        "inner_steps": 30, "rows": 16, "validation_rows": 640, "seeds": 3}
QUICK = {"options": {"--layers": 2, "--heads": 2, "--channels": 32, "-t": 32, "-x": 40, "-u": 5, "-v": 20},
         "inner_steps": 10, "rows": 8, "validation_rows": 64, "seeds": 1}
COMMON = {"-q": 0.1, "-c": 0.1, "-k": "cosine", "-s": 0, "--matmul-precision": "highest"}
INNER = {"adamw": {"-l": 0.004}, "muon": {"--optimizer": "muon", "--muon-lr": 0.01, "-l": 0.002}}
STREAMING = {"--workers": 2, "--fragment-layers": 1, "--fragment-pattern": "strided", "--overlap": 1,
             "--local-weight": 0.5, "--outer-optimizer": "nesterov", "--outer-lr": 0.7, "--outer-momentum": 0.9,
             "--outer-dtype": "fp4_e2m1"}
METHODS = {"adamw": "data-parallel, AdamW", "adamw-m2": "streaming, 2 workers, AdamW",
           "muon": "data-parallel, Muon", "muon-m2": "streaming, 2 workers, Muon"}


# ------------------------------------------------------------------------------------------------------ runs

@dataclass(frozen=True)
class Job:
    name: str  # of its folder
    program: str  # "trainer" or "pytorch"
    method: str
    seed: int
    options: dict  # the trainer's


def options_of(scale, method, seed, text):
    """The options of the trainer's two processes, which are ranks or workers."""
    inner, _, workers = method.partition("-")
    processes = {**STREAMING, "-H": scale["inner_steps"]} if workers else {"--workers": 1, "--ranks": 2}
    batch = scale["rows"] // 2
    return {**scale["options"], **COMMON, **INNER[inner], **processes, "-b": batch, "--seed": seed,
            "-m": scale["validation_rows"] // (batch if workers else 2 * batch),  # workers do not share a validation
            "-i": f"{text}/*_train_*.bin", "-j": f"{text}/*_val_*.bin"}


def jobs_of(arguments):
    """Seed by seed, both programs in turn, so that finished runs can be compared whenever this is stopped."""
    return [Job(f"{method}-seed{seed}-{program}", program, method, seed,
                options_of(arguments.scale, method, seed, arguments.text))
            for seed in range(1, arguments.seeds + 1) for method in METHODS if method in arguments.only
            for program in ("trainer", "pytorch")]


def read_tokens(text, part):
    paths = sorted(text.glob(f"*_{part}_*.bin"))
    if len(paths) != 1:
        raise UserError(f"{text} has {len(paths)} shards *_{part}_*.bin, and this benchmark reads one: make it "
                        "with data/prepare.py")
    return np.fromfile(paths[0], dtype="<u2", offset=1024).astype(np.int64)


def options_of_pytorch(options, text):
    """The options of dev/reference/reference_diloco.py, which has no ranks, for the trainer's."""
    batch = options["-b"] * options.get("--ranks", 1)
    vocabulary = int(np.fromfile(text / "tokenizer.bin", dtype="<i4", count=3)[2])
    return {**STREAMING, "--outer-optimizer": "none", **options, "-b": batch, "-d": batch * options["-t"], "--shuffle": 1,
            "--vocab-size": vocabulary, "--inner-steps": options.get("-H", 0)}


def train_in_pytorch(options, text):
    """{"losses": [worker][step], "evals": [{"step", "loss"}]} as in metrics.jsonl."""
    import torch
    from torch.nn import functional as F
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    own = options_of_pytorch(options, text)
    shape, time = reference_diloco.model_shape(own), own["-t"]
    rows = options["-b"] * options["-m"] * options.get("--ranks", 1)
    held_out = torch.from_numpy(read_tokens(text, "val")[:rows * time + 1])
    inputs, targets = held_out[:-1].view(rows, time), held_out[1:].view(rows, time)
    evals = []

    def validate(step, workers):
        if step % options["-v"] and step != options["-x"]:
            return
        with torch.no_grad():
            losses = [F.cross_entropy(gpt_logits(workers[0].parameters, part, shape).flatten(0, 1),
                                      wanted.flatten(), reduction="sum").item()
                      for part, wanted in zip(inputs.split(VALIDATION_BATCH), targets.split(VALIDATION_BATCH))]
        evals.append({"step": step, "loss": sum(losses) / (rows * time)})

    initial = torch.from_numpy(reference_diloco.trainer_initial_values(shape, own["--seed"]))
    workers = reference_diloco.train(own, read_tokens(text, "train"), initial, validate)
    return {"losses": [worker.losses for worker in workers], "evals": evals, "torch": torch.__version__}


def run_job(arguments, number, one):
    folder = arguments.out / one.name
    if one.program == "trainer":
        seconds = train(arguments.trainer, one.options, folder)
    else:
        with making(folder, REFERENCE, one.options) as (part, made):
            losses = train_in_pytorch(one.options, arguments.text)
            part.mkdir(parents=True)
            (part / "losses.json").write_text(json.dumps(losses))
        seconds = made["seconds"]
    print(f"{number:3}  {one.name:26} {read_losses(arguments, one)['evals'][-1]['loss']:.4f}  {seconds:.0f} s", flush=True)
    return seconds


# ------------------------------------------------------------------------------------------------- comparison

def read_losses(arguments, one):
    """The losses in the form of train_in_pytorch(); None while the run is missing."""
    folder = arguments.out / one.name
    if made_by(folder, one.options) is None:
        return None
    if one.program == "pytorch":
        return json.loads((folder / "losses.json").read_text())
    run = read_run(folder)
    return {"losses": [[line["loss"] for line in run.of_worker(worker)[0].steps] for worker in range(run.workers)],
            "evals": [{"step": line["step"], "loss": line["loss"]} for line in run.processes[0].evals if line["step"]],
            "parameters": run.parameters}


@dataclass
class Pair:
    """Both programs' runs of one seed."""
    method: str
    seed: int
    ours: dict
    theirs: dict

    def difference(self):
        """The relative difference of the final validation losses."""
        return self.ours["evals"][-1]["loss"] / self.theirs["evals"][-1]["loss"] - 1

    def largest(self, steps):
        """The largest relative difference of all workers' losses up to this step; NaN if one of them is."""
        ours, theirs = (np.array(run["losses"])[:, :steps] for run in (self.ours, self.theirs))
        return float(np.max(np.abs(ours / theirs - 1)))


def read_pairs(arguments):
    found = {}
    for one in jobs_of(arguments):
        if losses := read_losses(arguments, one):
            found.setdefault((one.method, one.seed), {})[one.program] = losses
    pairs = [Pair(*key, runs["trainer"], runs["pytorch"]) for key, runs in found.items() if len(runs) == 2]
    for pair in pairs:
        steps = [[line["step"] for line in run["evals"]] for run in (pair.ours, pair.theirs)]
        shapes = [np.array(run["losses"]).shape for run in (pair.ours, pair.theirs)]
        if steps[0] != steps[1] or shapes[0] != shapes[1]:
            raise UserError(f"the runs of {pair.method}, seed {pair.seed}, have different steps: remove them")
    return pairs


def by_method(pairs):
    return {method: own for method in METHODS if (own := [pair for pair in pairs if pair.method == method])}


def means(pairs):
    """The mean final validation losses: (the trainer's, PyTorch's)."""
    return tuple(statistics.mean(run["evals"][-1]["loss"] for run in runs)
                 for runs in ([pair.ours for pair in pairs], [pair.theirs for pair in pairs]))


def is_good(pairs):
    ours, theirs = means(pairs)
    return abs(ours / theirs - 1) <= BAR and max_with_nan(pair.largest(EARLY) for pair in pairs) <= EARLY_BAR


def max_with_nan(values):
    return float(np.max(list(values)))


def table_of_losses(pairs):
    rows = []
    for method, own in by_method(pairs).items():
        ours, theirs = means(own)
        rows.append([METHODS[method], f"{ours:.4f}", f"{theirs:.4f}", f"{100 * (ours / theirs - 1):+.2f}%",
                     " ".join(f"{100 * pair.difference():+.2f}" for pair in own), str(len(own))])
    return markdown(["training", "this trainer", "PyTorch", "difference of means", "each seed, %", "seeds"], rows)


def stations(steps):
    return sorted({EARLY, *(step for part in (0.1, 0.25, 0.5, 1) if (step := math.ceil(steps * part)) > EARLY)})


def table_of_curves(pairs):
    steps = stations(len(pairs[0].ours["losses"][0]))
    rows = [[METHODS[method], *(f"{max_with_nan(pair.largest(step) for pair in own):.1e}" for step in steps)]
            for method, own in by_method(pairs).items()]
    return markdown(["training", *(f"steps 1 to {step}" for step in steps)], rows)


def verdict(pairs):
    lines = []
    for method, own in by_method(pairs).items():
        ours, theirs = means(own)
        good = "good" if is_good(own) else "NOT GOOD"
        lines.append(f"- {METHODS[method]}: the means differ by {100 * abs(ours / theirs - 1):.2f}% (allowed "
                     f"{100 * BAR:g}%), the losses of steps 1 to {EARLY} by at most "
                     f"{max_with_nan(pair.largest(EARLY) for pair in own):.0e} (allowed {EARLY_BAR:.0e}): {good}.")
    return lines


def report(arguments, pairs):
    options, rows = arguments.scale["options"], arguments.scale["rows"]
    torch = ", ".join(sorted({pair.theirs["torch"] for pair in pairs}))
    text = [f"`PEERS=1 make bench-losses`, {machine()}, {datetime.date.today()}: {pairs[0].ours['parameters'] / 1e6:.2f}M "
            f"parameters, {options['-x']} steps of {rows * options['-t']:,} tokens; both programs start from the same "
            f"bits and read the same rows in the same order, with the same rates. The trainer in fp32 (two processes, "
            f"`--matmul-precision highest`), PyTorch {torch} in float32 "
            f"(`dev/reference/reference_diloco.py`, written from the papers). Validation loss on "
            f"{arguments.scale['validation_rows'] * options['-t']:,} tokens; streaming with H = "
            f"{arguments.scale['inner_steps']}, tau 1, four bits (E2M1).", "", table_of_losses(pairs), "",
            "Largest relative difference of a step's training loss, over all workers and seeds:", "",
            table_of_curves(pairs), "", *verdict(pairs)]
    missing = len(jobs_of(arguments)) // 2 - len(pairs)
    if missing:
        text += ["", f"{missing} of {missing + len(pairs)} pairs of runs are missing: run it again."]
    return "\n".join(text) + "\n"


def parse_arguments(words):
    parser = Parser(description="Whole runs of the trainer beside whole runs in PyTorch: the same losses?")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    parser.add_argument("--text", type=Path, default=ROOT / "build/peer_losses/text", help="token shards")
    parser.add_argument("--out", type=Path, help="folder of the runs (build/peer_losses, or build/peer_losses/quick)")
    parser.add_argument("--report", type=Path, help="write the report here too")
    parser.add_argument("--seeds", type=above_zero(int), help="number of seeds (3, with --quick 1)")
    parser.add_argument("--minutes", type=above_zero(float, or_zero=True), default=90,
                        help="start no run that may end later (90; 0: only report the finished runs)")
    parser.add_argument("--only", nargs="+", choices=list(METHODS), metavar="NAME", default=list(METHODS),
                        help=" ".join(METHODS))
    parser.add_argument("--quick", action="store_true", help="a small model, one seed, few steps: a trial")
    arguments = parser.parse_args(words)
    arguments.scale = QUICK if arguments.quick else FULL
    arguments.seeds = arguments.seeds or arguments.scale["seeds"]
    arguments.out = arguments.out or ROOT / "build/peer_losses" / ("quick" if arguments.quick else "")
    return arguments


def main(words):
    arguments = parse_arguments(words)
    if not arguments.trainer.exists():
        raise UserError(f"there is no {arguments.trainer}: run make train_gpt_cpu")
    check_report(arguments.report)
    find = lambda: first_missing(jobs_of(arguments), lambda one: made_by(arguments.out / one.name, one.options))
    if find() and arguments.minutes > 0 and importlib.util.find_spec("torch") is None:
        raise UserError(NO_PYTORCH)
    arguments.out.mkdir(parents=True, exist_ok=True)
    run_missing(arguments.minutes, find, lambda number, one: run_job(arguments, number, one))
    pairs = read_pairs(arguments)
    if not pairs:
        raise UserError("no pair of runs has finished: give it more --minutes")
    text = report(arguments, pairs)
    print("\n" + text, end="")
    if arguments.report:
        arguments.report.write_text("# Losses beside PyTorch's\n\n" + text)
    if not all(is_good(own) for own in by_method(pairs).values()):
        sys.exit("error: the losses of the trainer and PyTorch differ too much: see above")


if __name__ == "__main__":
    sys.exit(exit_status(main))
