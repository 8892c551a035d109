#!/usr/bin/env python3
"""make gpu-report: all that is to be known of the CUDA build on this GPU, in the order that finds trouble early.

    versions       GPU, driver, compiler, commit
    memory         two steps of the largest batch that is measured below
    kernels        each against the CPU's function
    model          against PyTorch's numbers; the same bits twice; the losses of the other builds
    communicators  ranks and workers over NCCL and TCP, and one that is killed
    streaming      the kernels of an exchange against copies, and what an exchange costs
    speed          tokens/s and MFU, ways to make products, each kind of kernel, what dev/tools/predict.py predicts
    sanitizer      NVIDIA's compute-sanitizer on kernels and on a short training

A part takes at most ten minutes. If versions fail, the rest is not tried. The page is build/gpu_report.md, in Markdown
and short enough for an issue. --dry-run runs the same parts in the emulator (dev/emulator/README.md) on small shapes,
which shows that this program works, and nothing of a GPU.
"""
import argparse
import datetime
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

from bench_gpu import ROOT, Full, Tiny, about_machine, fail, last_line, write_tokens
from registers import default_nvcc

TESTS = "dev/test/processes/test_gpu.py"
OF_PART = {
    "kernels": ["test_kernels_agree_with_the_cpu"],
    "model": ["test_the_model_agrees_with_pytorch", "test_a_run_repeats_itself_bit_by_bit_and_learns",
              "test_losses_are_those_of_the_other_builds", "test_outer_state_in_host_memory_gives_the_same_bits"],
    "communicators": ["test_ranks_share_gradients",
                      "test_workers_hold_the_same_bits_over_nccl_over_tcp_and_again",
                      "test_means_by_all_to_all_have_the_same_bits_over_nccl_over_tcp_and_again",
                      "test_two_exchanges_of_the_same_workers_differ_in_what_they_round",
                      "test_a_killed_worker_ends_the_other_with_a_message",
                      "test_a_killed_rank_ends_the_run_with_a_message"],
    "sanitizer": ["test_sanitizer_finds_a_mistake_made_on_purpose", "test_sanitizer_finds_nothing_in_the_kernels",
                  "test_sanitizer_finds_nothing_in_a_short_training"],
}
NEEDED = ("versions",)           # by all that follow
SECONDS = 600                    # of a part
LINES = 60                       # of a part's output on the page
COMMIT = "git log -1 --format='commit %h of %cs' || echo 'no git repository: the commit is not known'"


@dataclass
class Part:
    name: str
    commands: list  # of words
    results: list = field(default_factory=list)  # a Result each

    @property
    def verdict(self):
        if not self.results:
            return "not tried"
        return next((one.verdict for one in self.results if not one.is_good()), "passed")


@dataclass
class Result:
    verdict: str  # passed, failed, took too long, or nothing ran
    seconds: float
    output: str

    def is_good(self):
        return self.verdict == "passed"


# ---- what the parts run

def trainer_words(trainer, folder, size, more):
    options = {"-i": folder / "random_train_*.bin", **size.trainer, "-v": 0, "-s": 0, "-l": 1e-4, **more}
    return [trainer, *(word for pair in options.items() for word in pair)]


def pytest(python, part):
    return [python, "-m", "pytest", "-q", "-rs", "--no-header", "--tb=short",
            *(f"{TESTS}::{name}" for name in OF_PART[part])]


def bench(programs, size, out, *parts):
    tiny = ["--tiny"] if size is Tiny else []
    return [sys.executable, ROOT / "dev/bench/bench_gpu.py", *parts, *tiny, "--bench", programs.bench,
            "--trainer", programs.trainer, "--peer-python", programs.peer, "--out", out]


def predictions(name):
    """name: nvidia-smi's "GPU, driver, memory". The predictions for that GPU, or only a check if it is not known."""
    name = name.split(",")[0].lower()
    gpu = next((key for key in ("h200", "h100") if key in name), None)
    if "a100" in name:
        gpu = "a100" if "80gb" in name else "a100-40"
    predict = [sys.executable, ROOT / "dev/tools/predict.py"]
    return [[*predict, "--gpu", gpu, "--model", "d12", "-b", 64]] if gpu else [[*predict, "--check"]]


@dataclass
class Programs:
    """What the parts run: of a GPU, or of the emulator."""
    trainer: pathlib.Path
    bench: pathlib.Path
    python: str
    peer: str


def parts_of(programs, folder, is_dry):
    """All parts in their order."""
    size = Tiny if is_dry else Full
    small = {"--layers": 2, "--heads": 1, "--channels": 64, "-b": 1, "-t": 64}
    write_tokens(folder / "random_train_000000.bin", size.vocabulary, size.tokens)

    def train(name, more):
        return trainer_words(programs.trainer, folder, size, {**more, "-o": folder / name})

    def table(*parts):
        return bench(programs, size, folder / f"{parts[0]}.txt", *parts)

    commands = {
        "versions": [["sh", "-c", COMMIT], [programs.trainer, "--help"],
                     *([] if is_dry else [["nvidia-smi"], [default_nvcc(), "--version"]])],
        "memory": [train("memory", {"-x": 2, "--workers": 1, "--outer-optimizer": "none"})],
        "streaming": [table("streaming"), table("exchange1"), table("exchange2")],
        "speed": [table("d12"), table("d48"), table("layers"), table("matmuls"), *predictions(about_machine())],
    }
    if is_dry:
        two = {**small, "--workers": 2, "--ranks": 2, "-x": 4, "-H": 2, "--fragment-layers": 1}
        commands["kernels"] = [[ROOT / "build/plain/test_elementwise"]]
        commands["model"] = [[ROOT / "build/plain/test_gpt", ROOT / "dev/test/data/reference_head64.bin"]]
        commands["communicators"] = [train("two", {**two, "--outer-transport": "nccl"}),
                                     train("tcp", {**two, "--outer-transport": "tcp"})]
        commands["sanitizer"] = [[programs.python, "-m", "pytest", "-qq", "--collect-only", TESTS]]
    else:
        commands.update({name: [pytest(programs.python, name)] for name in OF_PART})
    order = ("versions", "memory", "kernels", "model", "communicators", "streaming", "speed", "sanitizer")
    return [Part(name, commands[name]) for name in order]


# ---- running them

def verdict_of(words, status, output):
    if status != 0:
        return "failed"
    if "pytest" in map(str, words) and "--collect-only" not in words and not re.search(r"\b\d+ passed", output):
        return "nothing ran"
    return "passed"


def run(words, seconds):
    """A Result. The command gets no longer than `seconds`, and nor do the processes that it has started."""
    begin = time.monotonic()
    words = [str(word) for word in words]
    with tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                                       start_new_session=True)
        except OSError as error:
            return Result("failed", 0.0, f"{words[0]}: {error.strerror}")
        try:
            status = process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        output = said.read()
    verdict = "took too long" if status is None else verdict_of(words, status, output)
    return Result(verdict, time.monotonic() - begin, output)


def run_part(part, seconds):
    end = time.monotonic() + seconds
    for words in part.commands:
        part.results.append(run(words, end - time.monotonic()))
        if part.results[-1].verdict == "took too long":
            break


def run_all(parts, seconds):
    for part in parts:
        run_part(part, seconds)
        print(f"{part.name:14} {part.verdict:14} {sum(one.seconds for one in part.results):6.0f} s", flush=True)
        if part.name in NEEDED and part.verdict != "passed":
            print(f"{part.name} is needed by what follows: {last_line(part.results[-1].output)}", flush=True)
            break


# ---- the page

def shown_words(words):
    return " ".join(str(word).replace(f"{ROOT}/", "").replace(sys.executable, "python3") for word in words)


def shortened(output):
    """The first and the last lines of what a command said."""
    lines = output.rstrip().splitlines()
    if len(lines) <= LINES:
        return "\n".join(lines)
    return "\n".join([*lines[:10], f"... {len(lines) - LINES} lines left out ...", *lines[10 - LINES:]])


def of_part(part):
    text = [f"## {part.name}: {part.verdict}"]
    for words, result in zip(part.commands, part.results):
        output = "" if words[-1] == "--help" and result.is_good() else shortened(result.output)
        text += [f"`{shown_words(words)}`: {result.verdict}, {result.seconds:.0f} s", f"```\n{output}\n```"]
    return "\n\n".join(text)


def page(parts, is_dry):
    title = "in the emulator: a dry run, whose times mean nothing" if is_dry else "on a GPU"
    rows = [f"| {part.name} | {part.verdict} | {sum(one.seconds for one in part.results):.0f} |" for part in parts]
    table = "\n".join(["| part | verdict | seconds |", "|---|---|---:|", *rows])
    about = f"{about_machine()}; {datetime.date.today()}; `make gpu-report{' DRY_RUN=1' if is_dry else ''}`"
    tried = [of_part(part) for part in parts if part.results]
    return "\n\n".join([f"# The CUDA build {title}", about, table, *tried]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="in the emulator, without a GPU")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts")
    parser.add_argument("--python", default=sys.executable, help="a Python with pytest and NumPy")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with PyTorch")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a part, at most")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/gpu_report.md")
    args = parser.parse_args()
    built = ROOT / "build/plain" if args.dry_run else ROOT
    programs = Programs(built / "train_gpt", built / ("bench_gpu" if args.dry_run else "build/gpu/bench_gpu"),
                        args.python, args.peer_python)
    for program in (programs.trainer, programs.bench):
        if not program.exists():
            fail(f"{program.relative_to(ROOT)} is not built: make gpu-report builds it")
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        parts = parts_of(programs, pathlib.Path(folder), args.dry_run)
        unknown = set(args.only or []) - {part.name for part in parts}
        if unknown:
            fail(f"there is no part {', '.join(sorted(unknown))}: give some of "
                 f"{', '.join(part.name for part in parts)}")
        parts = [part for part in parts if not args.only or part.name in args.only]
        run_all(parts, args.seconds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(parts, args.dry_run))
    print(f"wrote {args.out}: paste it into an issue")
    sys.exit(0 if all(part.verdict == "passed" for part in parts) else 1)


if __name__ == "__main__":
    main()
