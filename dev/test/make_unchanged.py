#!/usr/bin/env python3
"""Short runs whose results must not change when the program is rearranged, and the data that pins them:

    .venv/bin/python dev/test/make_unchanged.py --program PATH

writes dev/test/data/unchanged/ with what the program at PATH does: which options its processes compare, the
losses, traffic and bits of a table of short runs, and checkpoints with the runs that resume them. The tests
(dev/test/processes/test_unchanged.py) hold train_gpt_cpu to it. The data was made by commit effe1c5, except
for the shuffled runs, made anew when sequences came to be shuffled one by one, and no longer batch by batch, the
run of medium precision, made anew when attention came to be in bf16 there, the lock-step runs with token weights, made
anew when a worker's share of the data came to be its rows of a step, and the options that are compared, to which
--keep-checkpoints and --major-checkpoints were added.

Bits depend on the CPU, its libraries and the compiler, so they are kept for each kind of machine. On another
kind only the numbers are compared, with a tolerance. They were made by commit 0f50087, when
LayerNorm and attention came to add the lanes of vectors by halves, and e^x to be 0 below 2^-125. To add this machine's
bits, build that commit and run

    .venv/bin/python dev/test/make_unchanged.py --program PATH --bits

which adds bits and leaves everything else alone: the same checkpoints are resumed. A change of the numbers
on purpose (say, another order of the data) needs new data from the changed program, and a reason. --only
without --bits writes the numbers of a few runs anew, and drops the other machines' bits of these.
"""
import argparse
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/test")]

from conftest import write_shard  # noqa: E402

DATA = ROOT / "dev/test/data/unchanged"
HANG = 120  # seconds

# Three fragments: one is sent every second step, and merged two steps later.
STREAMING = {"-H": 6, "--fragment-layers": 1, "--overlap": 2}
# Nobody is ever late: each sync waits for everyone, and no worker jumps.
ELASTIC = {**STREAMING, "--workers": 2, "--outer-transport": "store", "--grace": HANG, "--max-lag": 10**6}
BASE = {"--layers": 2, "--heads": 2, "--channels": 16, "--vocab-size": 64, "-t": 8, "-b": 2, "-l": 0.01,
        "-k": "constant", "-s": 0, "-v": 8, "-m": 4, "-x": 20, "--shuffle": 0,
        "--matmul-precision": "highest", "--timeout": 60}


def streaming(workers, **more):
    options = {"--" + name.replace("_", "-"): value for name, value in more.items()}
    return {**STREAMING, "--workers": workers, **options}


# name: options. A list has one value for each worker; then the workers are started one by one.
RUNS = {
    # one worker
    "one process": {"-k": "cosine", "-u": 4, "-q": 0.1, "-c": 0.1},
    "data parallel": {"--ranks": 2, "-d": 64, "-k": "wsd", "-r": 2, "-sl": 2, "-sg": 2},
    "overfit": {"-a": 1, "-k": "linear", "--clip": 0, "--beta1": 0.8, "--beta2": 0.9, "--epsilon": 1e-6},
    "shuffled": {"--ranks": 2, "--shuffle": 1},
    "medium precision": {"--matmul-precision": "medium"},
    "one worker, nesterov": streaming(1, outer_optimizer="nesterov", ranks=2),
    # formats
    **{f"{dtype}": streaming(2, outer_dtype=dtype)
       for dtype in ("fp4", "fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "bf16", "fp32")},
    **{f"{dtype}, stochastic": streaming(3, outer_dtype=dtype, outer_rounding="stochastic",
                                         outer_exchange=exchange)
       for dtype, exchange in [("fp4", "all_to_all"), ("fp4_e2m1", "all_gather"), ("fp8_e4m3", "all_to_all"),
                               ("fp8_e5m2", "all_gather"), ("bf16", "all_to_all")]},
    # exchanges
    "all_gather": streaming(3, outer_exchange="all_gather"),
    "all_to_all": streaming(3, outer_exchange="all_to_all"),
    "auto, 4 workers": streaming(4, outer_dtype="bf16"),
    "all_to_all, 2 ranks": streaming(3, outer_exchange="all_to_all", ranks=2),
    "2 workers x 2 ranks": streaming(2, ranks=2),
    # error feedback
    "error feedback": {**streaming(2), "--outer-error-feedback": True},
    "error feedback, all_to_all": {**streaming(3, outer_exchange="all_to_all", outer_rounding="stochastic"),
                                   "--outer-error-feedback": True},
    # token weights
    "token weights": {**streaming(2, outer_weights="tokens"), "-d": [16, 48]},
    "token weights, all_to_all": {**streaming(3, outer_weights="tokens", outer_exchange="all_to_all"),
                                  "-b": [1, 2, 3], "-d": [16, 16, 48]},
    # the schedule of syncs
    "each its overlap": {**streaming(2), "--overlap": [0, 5]},
    "merge to the global": streaming(2, overlap=0, local_weight=0, fragment_pattern="sequential"),
    "merge to the local": streaming(2, overlap=5, local_weight=1, fragment_pattern="balanced"),
    "classic DiLoCo": streaming(2, fragment_layers=0, overlap=0, local_weight=0, outer_lr=0.7),
    "average": streaming(2, outer_optimizer="average", outer_momentum=0),
    "evaluates local": streaming(2, eval="local"),
    "shuffled, 2 workers": streaming(2, shuffle=1),
    # elastic
    "elastic": ELASTIC,
    "elastic, 2 ranks": {**ELASTIC, "--ranks": 2, "--outer-rounding": "stochastic"},
    "elastic, token weights": {**ELASTIC, "--outer-weights": "tokens", "-d": [16, 48]},
    "elastic, error feedback": {**ELASTIC, "--workers": 3, "--outer-error-feedback": True,
                                "--outer-exchange": "all_gather"},
    "elastic, shuffled": {**ELASTIC, "--shuffle": 1},
}

# Checkpoints, smaller models: what is run before the checkpoint, and what resumes it.
SMALL = {"--channels": 8}
CHECKPOINTS = {
    # At step 10 fragment 1 has been sent for two steps and fragment 2 just now: neither has been merged.
    "lock-step": {**STREAMING, **SMALL, "--workers": 2, "--ranks": 2, "--overlap": 4, "-k": "cosine", "-u": 4,
                  "--outer-error-feedback": True, "--outer-rounding": "stochastic", "-x": 24, "-n": 10},
    # Asked to stop after step 10, with a sync in flight. It is one worker: two would merge the first syncs at
    # steps that depend on which of them starts first.
    "elastic": {**ELASTIC, **SMALL, "--workers": 1, "--ranks": 2, "--outer-optimizer": "nesterov", "-x": 60,
                "-n": 1000},
}

# The options that processes compare, by what kind of run it is. None of these runs ends by itself.
AGREEMENTS = {
    "lock-step": {**streaming(2), "--ranks": 2, "-x": 10**6, "-n": 1000},
    "without outer optimizer": {"--ranks": 2, "-x": 10**6},
    "token weights": {**streaming(2), "--outer-weights": "tokens", "-x": 10**6},
    "token weights, once through the data": {**streaming(2), "--outer-weights": "tokens", "-x": None},
    "elastic": {**ELASTIC, "--ranks": 2, "-x": 10**6},
    "elastic, checkpoints": {**ELASTIC, "--ranks": 2, "-x": 10**6, "-n": 1000},
}
# These options are no more, so nothing is left to agree on.
REMOVED = ("--fragment-offsets", "--outer-exchange (merged from)")


# -----------------------------------------------------------------------------------------------------------
# Runs

def write_tokens(folder, count):
    """A noisy cycle of 64 tokens: two shards to train on, one to validate on. The same bytes everywhere."""
    folder.mkdir()
    state, token, stream = 1, 0, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        token = (token + 1 + (state >> 16) % 3) % 64
        stream.append(token)
    stream = numpy.array(stream)
    write_shard(folder / "x_train_000000.bin", stream[:count // 3])
    write_shard(folder / "x_train_000001.bin", stream[count // 3:2 * count // 3])
    write_shard(folder / "x_val_000000.bin", stream[2 * count // 3:])
    return folder


def commands(program, folder, tokens, options):
    """One command, or one for each worker where an option has a list of values."""
    merged = {**BASE, "-i": f"{tokens}/x_train_*.bin", "-j": f"{tokens}/x_val_*.bin", "-o": folder / "out",
              "--store": f"file:{folder / 'store'}", **options}
    is_split = any(isinstance(value, list) for value in merged.values())
    for worker in range(merged["--workers"]) if is_split else [None]:
        words = [str(program)]
        for name, value in {**merged, **({} if worker is None else {"--worker": worker})}.items():
            value = value[worker] if isinstance(value, list) else value
            words += [] if value is None else [name] if value is True else [name, str(value)]
        yield words


def start(program, folder, tokens, options):
    """Each in a session of its own, so that it can be ended with all the processes that it starts."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
                             env=environment, start_new_session=True)
            for words in commands(program, folder, tokens, options)]


def kill(processes):
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def run(program, folder, tokens, options, status=0):
    """Runs to the end; returns what was printed."""
    processes = start(program, folder, tokens, options)
    text = ""
    try:
        for process in processes:
            output = process.communicate(timeout=HANG)[0]
            assert process.returncode == status, f"status {process.returncode} of {process.args}:\n{output}"
            text += output
    finally:
        kill(processes)
    return text


# -----------------------------------------------------------------------------------------------------------
# What is kept of a run

def rows(folder):
    """(process, rows of its log), in the order of the processes."""
    for path in sorted((folder / "out").glob("metrics*.jsonl")):
        number = int("".join(filter(str.isdigit, path.stem)) or 0)
        yield number, [json.loads(line) for line in path.read_text().splitlines()]


def numbers_of(folder):
    """The losses and the traffic. By process: its last training losses; the bytes it sent to its worker and
    to the other workers; when it sent and merged which fragment."""
    result = {"losses": {}, "inner_bytes": {}, "outer_bytes": {}, "syncs": {}}
    for process, log in rows(folder):
        result["losses"][str(process)] = [row["loss"] for row in log if row["type"] == "step"][-3:]
        (end,) = [row for row in log if row["type"] == "end"]
        result["inner_bytes"][str(process)] = end["inner_bytes_sent"]
        result["outer_bytes"][str(process)] = end["outer_bytes_sent"]
        result["syncs"][str(process)] = " ".join(
            f"{row['sync']}:{row['fragment']}@{row['send_step']}-{row['apply_step']}"
            for row in log if row["type"] == "sync")
        evaluations = [row["loss"] for row in log if row["type"] == "eval"]
        if evaluations:
            result.setdefault("validation", {})[str(process)] = evaluations
    return result


def bits_of(folder):
    """Hashes: of the last model file, of all losses, and of the global parameters at all syncs."""
    models = sorted((folder / "out").glob("**/model_*.bin"))
    last = max(path.name for path in models)
    losses, syncs = [], []
    for process, log in rows(folder):
        losses += [(process, row["step"], row["loss"]) for row in log if row["type"] in ("step", "eval")]
        syncs += [(process, row["sync"], row["global_hash"]) for row in log if row["type"] == "sync"]
    (model,) = {sha(path.read_bytes()) for path in models if path.name == last}
    return {"model": model, "losses": sha(json.dumps(losses).encode()),
            "syncs": sha(json.dumps(syncs).encode())}


def sha(data):
    return hashlib.sha256(data).hexdigest()[:16]


def machine(program):
    """What the bits depend on: CPU, oneDNN and the code that it chooses here, C library, compiler."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    cpu = [re.search(rf"^{field}\s*: (.*)$", info, re.M)
           for field in ("vendor_id", "cpu family", "model", "flags")]
    vendor, family, model, flags = [found.group(1).strip() if found else "?" for found in cpu]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        tokens = write_tokens(folder / "tokens", 300)
        words = [*next(commands(program, folder, tokens, {"-x": 1, "-v": 0, "-o": None, "--store": None}))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_VERBOSE": "1"}
        said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    onednn = re.search(r"verbose,info,(oneDNN v[\d.]+)", said)
    isa = re.search(r"verbose,info,cpu,isa:(.*)", said)
    compiler = re.search(rb"GCC: \([^)]*\) [\d.]+", pathlib.Path(program).read_bytes())
    return ", ".join([f"{vendor} family {family} model {model} flags {sha(flags.encode())[:8]}",
                      onednn.group(1) if onednn else "oneDNN ?", isa.group(1) if isa else "ISA ?",
                      " ".join(platform.libc_ver()), compiler.group().decode() if compiler else "compiler ?"])


# -----------------------------------------------------------------------------------------------------------
# Checkpoints

def archive_of(name):
    return DATA / f"checkpoint_{name}.tar.xz"


def resume(program, folder, tokens, name, more=None):
    """Continues the checkpoint in the archive to its end; more: other options than it had."""
    folder.mkdir()
    with tarfile.open(archive_of(name)) as archive:
        archive.extractall(folder)
    text = run(program, folder, tokens, {**CHECKPOINTS[name], "-y": 1, **(more or {})})
    assert "resumed after step" in text, text
    return text


def make_checkpoint(program, folder, tokens, name):
    """Runs until there is a checkpoint in mid-run, and keeps of the run's files what a resume needs. A stop
    of an elastic run may leave a sync that some resumes count and others do not: then it tries again."""
    for attempt in range(50):
        here = folder / f"{name} {attempt}"
        if name == "elastic":
            if not stop_in_the_middle(program, here, tokens, CHECKPOINTS[name]):
                continue
        else:
            run(program, here, tokens, CHECKPOINTS[name])
            for path in [path for path in (here / "out").iterdir() if "00000010" not in path.name]:
                path.unlink()
        with tarfile.open(archive_of(name), "w:xz") as archive:
            for path in sorted(here.glob("**/*")):
                is_log = path.suffix in (".jsonl", ".log", ".toml") or "/model_" in str(path)
                if path.is_file() and not is_log:
                    member = archive.gettarinfo(path, path.relative_to(here))
                    member.uid = member.gid = 0
                    member.uname = member.gname = ""
                    with path.open("rb") as file:
                        archive.addfile(member, file)
        resumed = [folder / f"{here.name} resumed {i}" for i in range(10)]
        for other in resumed:
            resume(program, other, tokens, name)
        if len({json.dumps([numbers_of(other), bits_of(other)]) for other in resumed}) == 1:
            return
    raise RuntimeError(f"no checkpoint of {name} in mid-run")


def stop_in_the_middle(program, folder, tokens, options):
    """Asks a run to stop after step 10; returns whether it did before its end."""
    (process,) = start(program, folder, tokens, options)
    log = folder / "out/metrics.jsonl"
    try:
        while process.poll() is None and not (log.exists() and '"step":10,' in log.read_text()):
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=HANG)[0]
    finally:
        kill([process])
    assert process.returncode in (0, 143), output
    return process.returncode == 143


# -----------------------------------------------------------------------------------------------------------
# Agreement

def agreements(program, folder, tokens, options):
    """{scope: {option: value}} as the processes wrote it into the store. Scopes: "lock-step", all processes;
    else "whole run" and "one elastic worker", the ranks of one."""
    processes = start(program, folder, tokens, options)
    is_elastic = options.get("--outer-transport") == "store"
    end = time.monotonic() + HANG
    try:
        while True:
            found = {}
            for path in (folder / "store").glob("**/*fingerprint*"):
                name = str(path.relative_to(folder / "store"))
                if name.endswith("%2Ffingerprint%2F0"):
                    found["one elastic worker" if is_elastic else "lock-step"] = unpack(path.read_bytes())
                elif name.endswith("/run/fingerprint"):
                    found["whole run"] = [line.rpartition(" ")[::2] for line in path.read_text().splitlines()
                                          if not line.startswith(REMOVED)]
            if len(found) == (2 if is_elastic else 1):
                break
            assert time.monotonic() < end and all(process.poll() is None for process in processes), \
                [process.communicate(timeout=HANG)[0] for process in processes]
            time.sleep(0.005)
    finally:
        kill(processes)
    return {scope: {name: plain(value) for name, value in pairs if name not in REMOVED}
            for scope, pairs in found.items()}


def unpack(packed):
    words = packed.decode().split("\0")
    return list(zip(words[0::2], words[1::2]))


def plain(value):
    """However a number is written: to six digits, and true as 1."""
    try:
        return f"{float({'true': '1', 'false': '0'}.get(value, value)):.6g}" if len(value) < 16 else value
    except ValueError:
        return value


# -----------------------------------------------------------------------------------------------------------

def write(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, type=pathlib.Path, help="the train_gpt_cpu to pin")
    parser.add_argument("--bits", action="store_true", help="only add this machine's bits")
    parser.add_argument("--only", default="", metavar="WORD",
                        help="only the run with this name, or else the runs with this word in their names")
    arguments = parser.parse_args()
    program = arguments.program.resolve()
    DATA.mkdir(exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp())
    tokens = write_tokens(folder / "tokens", 9000)
    if not arguments.bits and not arguments.only:
        for name in CHECKPOINTS:
            make_checkpoint(program, folder, tokens, name)
        many = write_tokens(folder / "many tokens", 600000)
        write(DATA / "agreements.json",
              {name: agreements(program, folder / f"agreement {name}", many, options)
               for name, options in AGREEMENTS.items()})
    numbers, bits = {}, {}
    for name in [*RUNS, *(f"resumed {name}" for name in CHECKPOINTS)]:
        if arguments.only not in name or (arguments.only in RUNS and arguments.only != name):
            continue
        if name in RUNS:
            run(program, folder / name, tokens, RUNS[name])
        else:
            resume(program, folder / name, tokens, name.removeprefix("resumed "))
        numbers[name], bits[name] = numbers_of(folder / name), bits_of(folder / name)
    of_numbers, of_bits = DATA / "numbers.json", DATA / "bits.json"
    if not arguments.bits:
        write(of_numbers, {**(json.loads(of_numbers.read_text()) if arguments.only else {}), **numbers})
    known = json.loads(of_bits.read_text()) if arguments.bits or arguments.only else {}
    if not arguments.bits:
        known = {kind: {name: old[name] for name in old if name not in bits} for kind, old in known.items()}
    kind = machine(program)
    write(of_bits, {**known, kind: {**known.get(kind, {}), **bits}})
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
