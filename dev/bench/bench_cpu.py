#!/usr/bin/env python3
"""How fast the trainer is on this CPU, how near it comes to oneDNN's own rate, and where its time goes.

    dev/bench/bench_cpu.py                                   the model that cpu.md shows
    dev/bench/bench_cpu.py --models 3x128 6x384 124M
    dev/bench/bench_cpu.py --pytorch .venv-peers/bin/python  and PyTorch on the same model: eager and compiled
    dev/bench/bench_cpu.py --quick                           a trial of this program, whose figures are rough

What is measured is the trainer itself: train_gpt_cpu trains on random tokens, and its log says what a step took. Its
first three steps do not count. The trainer, oneDNN and PyTorch take turns, so that a change of clock or load meets all
of them; all figures are medians over the rounds. Two threads unless OMP_NUM_THREADS says otherwise.

    share = tokens/s times the flops of a token, 6 parameters + 6 L C T, over oneDNN's flops a second

oneDNN's rate is that of the MLP's matmul, (B T, 4 C, C), in layouts that oneDNN chooses and already in its input type
(dev/bench/matmul_rate.cpp). PyTorch's memory is its eager way's: the compiler's own is not in it.

Where the time goes is what `perf record` sees of the steps of one more run. Without perf, or where it may not record,
the tables of the parts are left out, and that is said.
"""
import argparse
import datetime
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from runs import ROOT, check_report, machine, markdown  # finds dev/tools, too
from bench_gpu import write_tokens
from compare import read_run
from metrics import Parser, UserError, exit_status

WARM_UP = 3


@dataclass(frozen=True)
class Model:
    layers: int
    heads: int
    channels: int
    vocabulary: int
    sequence: int
    batch: int

    def flags(self):
        """Those that the trainer and peer_pytorch.py share."""
        return ["--layers", self.layers, "--heads", self.heads, "--channels", self.channels, "-t", self.sequence,
                "-b", self.batch]

    @property
    def tokens(self):
        return self.batch * self.sequence

    @property
    def text(self):
        return (f"{self.layers} layers of {self.channels} channels, {self.heads} heads, vocabulary {self.vocabulary}, "
                f"T = {self.sequence}, B = {self.batch}")


MODELS = {"3x128": Model(3, 2, 128, 1024, 128, 16), "6x384": Model(6, 6, 384, 1024, 256, 8),
          "6x384-t128": Model(6, 6, 384, 1024, 128, 16), "6x384-t2048": Model(6, 6, 384, 1024, 2048, 1),
          "12x768": Model(12, 12, 768, 1024, 256, 4), "124M": Model(12, 12, 768, 50257, 1024, 1)}
PRECISIONS = {"fp32": "highest", "bf16": "medium"}  # the trainer's --matmul-precision

# Parts of a step, by the symbols that perf names; the first that fits.
PARTS = {"attention": r"[aA]ttention|tile|softmax|exponential_row|transpose",
         "GELU, biases": r"gelu|matmul_backward|matmul_forward|column_sums",
         "LayerNorm, residual": r"layernorm|residual",
         "conversions": r"convert|to_bf16",
         "optimizer": r"adamw|muon|norm_squared",
         "embedding, classifier": r"encoder|classifier"}


def environment():
    return {"OMP_NUM_THREADS": "2", **os.environ}


def run(words, **options):
    words = [str(word) for word in words]
    result = subprocess.run(words, capture_output=True, text=True, env=environment(), **options)
    if result.returncode != 0:
        lines = (result.stderr.strip() or "no message").splitlines()
        raise UserError(f"{Path(words[0]).name} failed ({lines[-1]}): run this: {' '.join(words)}")
    return result.stdout


class Trainer:
    """Trains a model on random tokens."""

    def __init__(self, program, model, precision, steps, folder):
        self.folder = folder / precision
        tokens = folder / f"tokens_{model.vocabulary}_train_000000.bin"
        if not tokens.exists():
            write_tokens(tokens, model.vocabulary, model.tokens * 100)
        self.command = [program.resolve(), *model.flags(), "--vocab-size", model.vocabulary, "-i", tokens, "-x",
                        steps + WARM_UP, "-v", 0, "-s", 0, "-l", 1e-4, "--matmul-precision", PRECISIONS[precision],
                        "-o", self.folder]

    def measure(self):
        """{parameters, seconds of a step, peak of the memory in bytes, start: seconds outside of steps}"""
        shutil.rmtree(self.folder, ignore_errors=True)
        begin = time.monotonic()
        process = subprocess.Popen([str(word) for word in self.command], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True, env=environment())
        with process.stderr:
            error = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise UserError(f"the trainer failed ({error.strip()}): run this: {' '.join(map(str, self.command))}")
        found = read_run(self.folder)
        steps = [line["seconds"] for line in found.processes[0].steps]
        return {"parameters": found.parameters, "seconds": statistics.median(steps[WARM_UP:]),
                "peak": usage.ru_maxrss * 1024, "start": wall - sum(steps)}

    def parts(self, start):
        """{part: its share of the processor time after `start` seconds}; empty where perf is missing or fails."""
        if not shutil.which("perf"):
            return {}
        shutil.rmtree(self.folder, ignore_errors=True)
        record = self.folder.with_suffix(".perf")
        try:
            run(["perf", "record", "-q", "-D", int(1000 * start), "-F", 499, "-o", record, "--", *self.command])
            lines = run(["perf", "report", "-i", record, "--stdio", "-F", "period,dso,sym", "-t", ";"]).splitlines()
        except UserError as error:
            print(f"no table of the parts: {error}", file=sys.stderr)
            return {}
        found = {}
        for line in lines:
            fields = [field.strip() for field in line.split(";")]
            if len(fields) == 3 and fields[0].isdigit():
                part = part_of(fields[1], fields[2])
                found[part] = found.get(part, 0) + int(fields[0])
        return {part: period / sum(found.values()) for part, period in found.items()}


def part_of(library, symbol):
    if re.search(r"JIT|dnnl", library):
        return "oneDNN's matmuls"
    if "gomp" in library:
        return "waiting for the other thread"
    if "train_gpt" not in library:
        return "kernel, C library"
    return next((part for part, pattern in PARTS.items() if re.search(pattern, symbol)), "other")


class PyTorch:
    """A process of peer_pytorch.py, which waits between the rounds."""

    def __init__(self, python, model, precision, is_compiled):
        command = [python, ROOT / "dev/bench/peer_pytorch.py", *model.flags(), "--vocabulary", model.vocabulary,
                   *["--compile"] * is_compiled, *["--bf16"] * (precision == "bf16")]
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=environment())
        self.expect("ready")

    def expect(self, text=""):
        line = self.process.stdout.readline().strip()
        if not line or (text and line != text):
            raise UserError(f"PyTorch failed: run this: {' '.join(self.process.args)}")
        return line

    def measure(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return json.loads(self.expect())

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def of_rounds(measured, field):
    return statistics.median(one[field] for one in measured)


def measure(arguments, model, precision, folder):
    """{measured: of the trainer, of oneDNN and, if it is asked, of PyTorch's two ways; parts}"""
    trainer = Trainer(arguments.trainer, model, precision, arguments.steps, folder)
    rate = [ROOT / "build/matmul_rate", model.tokens, 4 * model.channels, model.channels, precision]
    ways = {}
    try:
        if arguments.pytorch:
            ways = {way: PyTorch(arguments.pytorch, model, precision, way == "compiled")
                    for way in ("eager", "compiled")}
        ours, rates, theirs = [], [], {way: [] for way in ways}
        for _ in range(arguments.rounds):
            rates.append(float(run(rate)))
            ours.append(trainer.measure())
            for way, peer in ways.items():
                theirs[way].append(peer.measure(arguments.steps))
    finally:
        for peer in ways.values():
            peer.end()
    return {"ours": ours, "rate": statistics.median(rates), "theirs": theirs,
            "parts": trainer.parts(of_rounds(ours, "start"))}


def row(name, model, precision, found):
    ours, theirs = found["ours"], found["theirs"]
    seconds = of_rounds(ours, "seconds")
    flops = model.tokens * (6 * ours[0]["parameters"] + 6 * model.layers * model.channels * model.sequence)
    cells = [name, precision, f"{model.tokens / seconds:,.0f}", f"{1e3 * seconds:.1f}", f"{flops / seconds / 1e12:.3f}",
             f"{found['rate'] / 1e12:.3f}", f"{flops / seconds / found['rate']:.2f}"]
    memory = f"{of_rounds(ours, 'peak') / 2**20:,.0f}"
    if not theirs:
        return [*cells, memory]
    best = min(of_rounds(one, "seconds") for one in theirs.values())
    return [*cells, memory, *(f"{model.tokens / of_rounds(one, 'seconds'):,.0f}" for one in theirs.values()),
            f"{best / seconds:.2f}", f"{of_rounds(theirs['eager'], 'peak') / 2**20:,.0f}"]


def parts_table(found):
    """found: {(model's name, precision): measured}"""
    names = dict.fromkeys(part for one in found.values() for part in one["parts"])
    order = sorted(names, key=lambda part: -max(one["parts"].get(part, 0) for one in found.values()))
    return markdown(["part of the processor time", *(" ".join(key) for key in found)],
                    [[part, *(f"{100 * one['parts'].get(part, 0):.1f}%" for one in found.values())] for part in order])


def report(arguments, found):
    header = ["model", "matmuls", "tokens/s", "ms a step", "TFLOP/s", "oneDNN's", "share", "MiB"]
    if arguments.pytorch:
        header += ["PyTorch eager", "compiled", "times the best", "PyTorch's MiB"]
    rows = [row(name, MODELS[name], precision, one) for (name, precision), one in found.items()]
    command = "PEERS=1 make bench-cpu" if arguments.pytorch else "make bench-cpu"
    text = [f"`{command}`, {machine()}, {environment()['OMP_NUM_THREADS']} threads, {datetime.date.today()}, medians "
            f"of {arguments.rounds} round{'s' * (arguments.rounds > 1)} of {arguments.steps} steps. \"Share\" is the trainer's rate over oneDNN's "
            "alone on the model's MLP.", markdown(header, rows),
            "\n".join(f"- {name}: {MODELS[name].text}" for name in arguments.models)]
    if all(one["parts"] for one in found.values()):
        text.append(parts_table(found))
    else:
        text.append("No table of the parts: perf is not installed here (Debian: linux-perf), or may not record (the "
                    "sysctl kernel.perf_event_paranoid).")
    return "\n\n".join(text) + "\n"


def other_sections(path):
    """What stands in a report from its first section on: remarks and other machines, which a new report keeps."""
    old = path.read_text() if path.exists() else ""
    return old[old.index("\n## "):] if "\n## " in old else ""


NO_BF16 = "this CPU does not multiply it natively, and the trainer computes in fp32 here"


def multiplies_bf16():
    """As the trainer decides; AMX has AVX512-BF16, too."""
    return " avx512_bf16" in Path("/proc/cpuinfo").read_text()


def parse_arguments(words):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["6x384"], metavar="NAME",
                        help="of " + " ".join(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, metavar="NAME",
                        help="of " + " ".join(PRECISIONS) + " (default: those that this CPU multiplies)")
    parser.add_argument("--pytorch", type=Path, metavar="PYTHON", help="a Python that has PyTorch, to be measured too")
    parser.add_argument("--report", type=Path, help="write the tables here too")
    parser.add_argument("--quick", action="store_true", help="the smallest model, one round of two steps")
    arguments = parser.parse_args(words)
    arguments.rounds, arguments.steps = (1, 2) if arguments.quick else (5, 8)
    if arguments.quick:
        arguments.models = ["3x128"]
    if "bf16" in (arguments.precisions or []) and not multiplies_bf16():
        raise UserError(f"{NO_BF16}: leave bf16 out of --precisions")
    check_report(arguments.report)
    for program in (arguments.trainer, *filter(None, [arguments.pytorch]), ROOT / "build/matmul_rate"):
        if not program.exists():
            raise UserError(f"{program} is not there: run make bench-cpu, with PEERS=1 for PyTorch")
    if not arguments.precisions and not multiplies_bf16():
        arguments.precisions = ["fp32"]
        print(f"bf16 is left out: {NO_BF16}", file=sys.stderr)
    arguments.precisions = arguments.precisions or list(PRECISIONS)
    return arguments


def main(words):
    arguments = parse_arguments(words)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            for precision in arguments.precisions:
                found[name, precision] = measure(arguments, MODELS[name], precision, Path(folder))
                print(f"{name} {precision}: measured", file=sys.stderr, flush=True)
    text = report(arguments, found)
    print(text, end="")
    if arguments.report:
        arguments.report.write_text("# Speed on a CPU\n\n" + text + other_sections(arguments.report))


if __name__ == "__main__":
    sys.exit(exit_status(main))
