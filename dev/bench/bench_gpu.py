#!/usr/bin/env python3
"""make bench-gpu: how fast the CUDA trainer is on this GPU, in one table, printed and written to a file.

    d12        tokens/s and MFU, and PyTorch's on the same model (peer_pytorch_gpu.py): both hold the GPU's
               memory at once and take turns, a few steps each
    d48        the same one after the other: both at once do not fit
    layers     a d12 step by phase, and each kind of kernel against a matmul's or a copy's rate
    matmuls    a d12 step by how its products are made: with GELU or without it, on fewer SMs
    streaming  kernels of the exchange and its statistics against copies that move as many bytes
    exchange1  what Streaming DiLoCo costs one worker: runs of train_gpt with and without it take turns
    exchange2  the same of two workers that share this GPU, against two runs side by side that never exchange

    python3 dev/bench/bench_gpu.py [PART ...]      all, unless some are named; about 15 minutes on an H200

MFU is llm.c's: 6 N + 6 L C T flops a token, N being all parameters, with positions and the vocabulary's
padding, over the dense bf16 rate in NVIDIA's data sheet (llmc/mfu.h). Steps are timed by the GPU, except in
the exchange parts: there by the trainer's own log (metrics.jsonl), each figure the mean of H steps. --tiny
tries all of it on small shapes; their times say nothing.
"""
import argparse
import datetime
import json
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from array import array

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ["d12", "d48", "layers", "matmuls", "streaming", "exchange1", "exchange2"]
BAR = 0.01  # what an exchange may cost, of a step averaged over H


class Full:
    """What is measured on a GPU."""
    # model, B (0: what fits), T, recompute, whether PyTorch's fits beside it
    models = {"d12": ("d12", 64, 1024, 0, True), "d48": ("d48", 0, 1024, 1, False)}
    peer_batch = 16  # of d48: PyTorch recomputes nothing
    rounds, steps = 5, 8
    layers = ["d12", 64, 1024, 0, 7]
    fragments = [3 * 7087872, 3 * 30740864]  # values of three layers of d12 and d48
    streaming = [9, 1024]  # rounds, MB that launches take turns over
    trainer = {"-e": "d12", "-b": 64, "-t": 1024}
    vocabulary, tokens = 50257, 4 << 20
    inner_steps, all_fragments = 100, 6  # H, and an H in which every step sends one of d12's fragments
    warmup, exchange_rounds = 20, 3


class Tiny(Full):
    models = {"d12": ("tiny", 1, 64, 0, True), "d48": ("tiny", 1, 64, 1, False)}
    peer_batch = 1
    rounds, steps = 1, 1
    layers = ["tiny", 1, 64, 1, 1]
    fragments = [2048]
    streaming = [1, 0]
    trainer = {"--layers": 2, "--heads": 1, "--channels": 64, "-b": 1, "-t": 64, "--fragment-layers": 1,
               "--vocab-size": 250}
    vocabulary, tokens = 250, 1 << 12
    inner_steps, all_fragments = 4, 3
    warmup, exchange_rounds = 1, 1


class Failed(Exception):
    """A program that was to be measured ended early; the message is its last line."""


class Table:
    """What is printed, and written to a file as it comes."""

    def __init__(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")

    def print(self, line=""):
        print(line, flush=True)
        print(line, file=self.file, flush=True)


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


class Server:
    """A program that says in a JSON line what it is, and then answers n with the milliseconds of n steps."""

    def __init__(self, command):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=ROOT)
        self.about = json.loads(self.answer())

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise Failed(last_line(self.errors.read()))
        return line

    def milliseconds(self, steps):
        try:
            print(steps, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # answer() says why
        return [float(word) for word in self.answer().split()]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def speed(about, medians, ours):
    """A row of the table. medians: of each round, in milliseconds. ours: what bench_gpu says of the model"""
    milliseconds = statistics.median(medians)
    rate = about["batch"] * about["seq_len"] / milliseconds * 1e3
    flops = rate * ours["flops_per_token"]
    peak = ours["peak_flops"]  # none of a GPU that is not known
    mfu = f"{100 * flops / peak:6.1f}%" if peak else "-"
    spread = 100 * (max(medians) - min(medians)) / milliseconds
    row = f"{about['batch']:5} {milliseconds:10.2f} {spread:7.2f}% {rate:10.0f} {flops / 1e12:9.1f} {mfu:>8}"
    return row, rate


def take_turns(servers, size):
    """Medians of the rounds of each server."""
    for server in servers:
        server.milliseconds(2)  # warm again
    medians = [[] for _ in servers]
    for _ in range(size.rounds):
        for own, server in zip(medians, servers):
            own.append(statistics.median(server.milliseconds(size.steps)))
    return medians


def peer_command(args, model, batch, length, attention):
    return [args.peer_python, ROOT / "dev/bench/peer_pytorch_gpu.py", "--model", model, "--batch", batch,
            "--seq-len", length, "--attention", attention]


def bench_model(table, args, size, name):
    model, batch, length, recompute, interleaved = size.models[name]
    table.print(f"{'a training step':36} {'B':>5} {'ms':>10} {'spread':>8} {'tokens/s':>10} {'TFLOP/s':>9} "
                f"{'MFU':>8}")
    command = [args.bench, "steps", model, batch, length, recompute]
    ours = Server(command)
    about = ours.about
    [medians] = take_turns([ours], size)
    row, own_rate = speed(about, medians, about)
    table.print(f"  {model + f', recompute {recompute}':34} {row}")
    if not interleaved:
        ours.close()
    peer_batch = about["batch"] if interleaved else size.peer_batch
    for attention in ("flash", "cudnn"):
        name = f"PyTorch, attention {attention}"
        try:
            peer = Server(peer_command(args, model, peer_batch, length, attention))
            if interleaved:
                medians, peer_medians = take_turns([ours, peer], size)
                own_rate = speed(about, medians, about)[1]
            else:
                [peer_medians] = take_turns([peer], size)
            row, rate = speed(peer.about, peer_medians, about)
            how = "in turns" if interleaved else "afterwards"
            table.print(f"    {name:32} {row}   ours / it, {how}: {own_rate / rate:.3f}")
            table.print(f"      PyTorch {peer.about['pytorch']}, torch.compile, bf16 autocast, fused AdamW")
            peer.close()
        except Failed as why:
            table.print(f"    {name:32} not measured: {why}")
    if interleaved:
        ours.close()
    table.print()


def pass_on(table, command):
    """Runs a part of bench_gpu that prints its own table."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=errors,
                                   text=True, cwd=ROOT)
        for line in process.stdout:
            table.print(line.rstrip("\n"))
        if process.wait() != 0:
            errors.seek(0)
            raise Failed(last_line(errors.read()))
    table.print()


def bench_parts_of_a_step(table, args, size, how):
    table.print("{}, B = {}, T = {}".format(*size.layers))
    pass_on(table, [args.bench, how, *size.layers])


def bench_streaming(table, args, size):
    for values in size.fragments:
        pass_on(table, [args.bench, "streaming", values, *size.streaming])


# ---- what the exchange costs, by runs of the trainer

def write_tokens(path, vocabulary, count):
    """Random ones, as a shard of llm.c's format."""
    tokens = array("H", random.Random(1).choices(range(vocabulary), k=count))
    header = array("i", [20240520, 1, len(tokens)] + [0] * 253)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def rows_of(path, kind):
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["type"] == kind]


class Measured:
    """Some steps of every worker of a run: seconds a step, the share that was waited, seconds on the wire."""

    def __init__(self, logs, first, steps):
        inside = range(first, first + steps)
        seconds = [row["seconds"] for log in logs for row in rows_of(log, "step") if row["step"] in inside]
        syncs = [row for log in logs for row in rows_of(log, "sync") if row["apply_step"] in inside]
        if len(seconds) != steps * len(logs):
            raise Failed(f"{len(seconds)} of {steps * len(logs)} steps in the logs")
        self.step = sum(seconds) / len(seconds)
        self.waited = sum(row["waited_seconds"] for row in syncs) / sum(seconds)
        self.wire = statistics.median(row["wire_seconds"] for row in syncs) if syncs else None


def train(args, size, folder, runs, steps):
    """Runs trainers with these options side by side; their logs."""
    common = {"-i": folder / "random_train_*.bin", **size.trainer, "-x": steps, "-v": 0, "-s": 0, "-l": 1e-4}
    started = []
    for i, options in enumerate(runs):
        output = folder / f"run{i}"
        words = [str(word) for pair in {**common, **options, "-o": output}.items() for word in pair]
        errors = (folder / f"errors{i}").open("w+")
        process = subprocess.Popen([args.trainer, *words], stdout=errors, stderr=errors, cwd=ROOT)
        started.append((output, errors, process))
    try:
        for output, errors, process in started:
            try:
                status = process.wait(timeout=600)
            except subprocess.TimeoutExpired:
                raise Failed("a trainer did not end within ten minutes") from None
            if status != 0:
                errors.seek(0)
                raise Failed(last_line(errors.read()))
        return [log for output, _, _ in started for log in sorted(output.glob("metrics*.jsonl"))]
    finally:
        for _, errors, process in started:
            process.kill()
            process.wait()
            errors.close()


def measure(args, size, workers, H, tau):
    """One run. H None: without an exchange, as many processes side by side."""
    options = {"-H": H, "--overlap": tau, "--workers": workers, "--outer-optimizer": "nesterov"}
    alone = {"--workers": 1, "--outer-optimizer": "none"}
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(pathlib.Path(folder) / "random_train_000000.bin", size.vocabulary, size.tokens)
        tail = max(1, size.inner_steps // 20)  # of two runs side by side the last one ends alone
        steps = size.warmup + size.inner_steps + tail
        logs = train(args, size, pathlib.Path(folder), [alone] * workers if H is None else [options], steps)
        return Measured(logs, size.warmup + 1, size.inner_steps)


def percent(values):
    median, low, high = (100 * one(values) for one in (statistics.median, min, max))
    return f"{median:+6.2f}%  ({low:+.2f} to {high:+.2f})"


def noise(without):
    """In words. without: seconds a step of the runs that never exchange"""
    if len(without) < 2:
        return "not known from one run"
    spread = (max(without) - min(without)) / statistics.median(without)
    judged = "more than the bar: these runs cannot show it" if spread > BAR else "less than the bar"
    return f"the runs that never exchange differ by {100 * spread:.2f}%, {judged} of {100 * BAR:g}%"


def print_costs(table, results):
    """results: {a way of exchanging: its runs}; the first way is never to exchange"""
    without = [run.step for run in next(iter(results.values()))]
    table.print(f"  {'exchange':20} {'ms a step':>10}  {'cost, median (range)':28} {'waited':>8} "
                f"{'wire':>12}")
    for name, runs in results.items():
        row = f"  {name:20} {1e3 * statistics.median(run.step for run in runs):10.2f}"
        if runs[0].wire is not None:
            row += f"  {percent([run.step / base - 1 for run, base in zip(runs, without)]):28}"
            row += f" {100 * statistics.median(run.waited for run in runs):7.2f}%"
            row += f" {1e3 * statistics.median(run.wire for run in runs):9.2f} ms"
        table.print(row)
    table.print(f"  noise: {noise(without)}")


def bench_exchange(table, args, size, workers):
    H, every = size.inner_steps, size.all_fragments
    ways = {"never": (None, None), f"H = {H}, tau = 1": (H, 1),
            f"H = {every}, tau = {every - 1}": (every, every - 1)}
    results = {name: [] for name in ways}
    for _ in range(size.exchange_rounds):
        for name, (inner_steps, tau) in ways.items():
            results[name].append(measure(args, size, workers, inner_steps, tau))
    who = "1 worker" if workers == 1 else f"{workers} workers that share this GPU"
    table.print(f"{who}: {size.exchange_rounds} runs of each kind in turns, {H} steps of each run")
    print_costs(table, results)
    table.print(f"  H = {every}: each step sends a fragment, {every - 1} exchanges are always in flight")
    table.print()


# ---- the whole

def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def about_machine():
    """The GPU and its driver, as nvidia-smi names them."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi here"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True)
    return last_line(asked.stdout or asked.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/gpu/bench_gpu")
    parser.add_argument("--trainer", type=pathlib.Path, default=ROOT / "train_gpt")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with PyTorch")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/bench_gpu.txt")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try this program")
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            fail(f"there is no part '{part}': give some of {', '.join(PARTS)}")
    for program in (args.bench, args.trainer):
        if not program.exists():
            fail(f"{program} is not built: make bench-gpu builds it")

    size = Tiny if args.tiny else Full
    table = Table(args.out)
    table.print(f"{about_machine()}; {datetime.date.today()}")
    table.print()
    parts = {"d12": lambda: bench_model(table, args, size, "d12"),
             "d48": lambda: bench_model(table, args, size, "d48"),
             "layers": lambda: bench_parts_of_a_step(table, args, size, "layers"),
             "matmuls": lambda: bench_parts_of_a_step(table, args, size, "matmuls"),
             "streaming": lambda: bench_streaming(table, args, size),
             "exchange1": lambda: bench_exchange(table, args, size, 1),
             "exchange2": lambda: bench_exchange(table, args, size, 2)}
    failed = False
    for name in args.parts or PARTS:
        try:
            parts[name]()
        except Failed as why:
            failed = True
            table.print(f"{name}: failed: {why}")
            table.print()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
