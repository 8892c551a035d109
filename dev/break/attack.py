#!/usr/bin/env python3
"""Attacks the trainer in every way that this folder offers, one blow after another, drawn from a seed.

    dev/break/attack.py --minutes 10 [--seed S] [--only KIND] [--trainer ./train_gpt_cpu]

Each blow prints a line that ends with its verdict. At the end each kind of blow gets its blows' worst verdict:

    same bits               all ended well, with the model of an undisturbed run (elastic workers: with one model)
    refused with one line   status 1 or 2, and one line that says why
    waited and said so      status 75, or an event in the log says what a living worker waits for
    DEFECT                  everything else: other bits, a hang, a signal, an error without its one line

The kind `quiet` measures an undisturbed run: how its memory grows, and how busy its cores are while processes wait. It,
`killed` and `chaos` report success as "same bits", and `fuzz` as "refused with one line". The status is 1 if there was
a defect, and then its files are kept.
"""
import argparse
import contextlib
import itertools
import os
import random
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("dev/break", "dev/break/attack", "dev/break/chaos", "dev/test")]
import redis_server  # noqa: E402
from conftest import children  # noqa: E402
from ends import DEFECT, HANG, REFUSED, SAME, VERDICTS, Runs, ends, model_of, worst  # noqa: E402
from records import ELASTIC, record, wrong_type  # noqa: E402
from torture import CONFIGURATIONS, Failure, torture, write_tokens  # noqa: E402

MOST_GROWTH = 60e6  # bytes by which the memory of an undisturbed run may grow
MOST_BUSY = 0.2     # share of a core that a waiting process may use

LOCKSTEP = {"--workers": 2, "--ranks": 2, "-H": 6, "--fragment-layers": 1, "-x": 12, "--timeout": 20}
EDGES = ["-1", 0, 1, 2**31 - 1, 2**31, 10**12, 10**12 + 1, 2**63 - 1, 2**63, 2**64, "1e3", "", " 1", "nan", "0x10"]


# -----------------------------------------------------------------------------------------------------------
# Blows. Each takes the runs and a source of random numbers, and returns a description of the blow, the verdict, and
# the symptoms of a defect.

def listeners(pids):
    """[(process, address, port)] of all listening sockets."""
    owners = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # the process, or one of its files, is gone
            for number in os.listdir(f"/proc/{pid}/fd"):
                owners[os.readlink(f"/proc/{pid}/fd/{number}")] = pid
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [(owners.get(f"socket:[{row[9]}]"), *row[1].split(":")) for row in rows if row[3] == "0A"]
    return [(pid, socket.inet_ntoa(struct.pack("=I", int(address, 16))), int(port, 16))
            for pid, address, port in found if pid]


def knock(address, number):
    """Connects like a port scanner or a health check. Every other connection is reset."""
    with socket.socket() as stranger:
        stranger.settimeout(1)
        stranger.connect(address)
        if number % 3:
            stranger.sendall([b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000)][number % 3 - 1])
        if number % 2:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def signal_to(pid, number):
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        os.kill(pid, number)


def visit(runs, draw, name, count):
    """Starts a run, stops one of its processes again and again so that the others keep listening for it, and connects
    strangers to them. Returns the run and the number of connections."""
    run, knocks, until = runs.start(name, LOCKSTEP), 0, time.monotonic() + HANG
    while len(children(run.pid)) < 4 and time.monotonic() < until:
        time.sleep(0.001)
    held = draw.choice(children(run.pid))
    while knocks < count and time.monotonic() < until and held in (pids := children(run.pid)):
        signal_to(held, signal.SIGSTOP)
        time.sleep(0.01)
        for _, *address in listeners(pids):
            while knocks < count:
                try:
                    knock(tuple(address), knocks)
                except OSError:
                    break  # the process has all of its connections and no longer listens
                knocks += 1
        signal_to(held, signal.SIGCONT)
        time.sleep(0.0005)
    return run, knocks


def strangers(runs, draw, count=10):
    verdict, seen = ends([expected := runs.start("undisturbed", LOCKSTEP)])
    for attempt in range(5):
        run, knocks = visit(runs, draw, f"visited{attempt}", count)
        both = [(verdict, seen), ends([run])]
        if {one for one, _ in both} != {SAME}:
            return f"{knocks} connections", DEFECT, str(both)
        if model_of(run) != model_of(expected):
            return f"{knocks} connections", DEFECT, "other bits than without strangers"
        if knocks == count:
            break  # otherwise no process was listening at the right moments: try again
    return f"{knocks} connections", SAME, ""


def killed(runs, draw):
    name = draw.choice(list(CONFIGURATIONS))
    try:
        torture(3, draw.randrange(10**6), runs.trainer, runs.base, [name], kills_a_run=3)
    except Failure as failure:
        return name, DEFECT, str(failure)
    return name, SAME, ""


def chaos(runs, draw):
    words = ["--minutes", 0.4, "--events", 2, "--steps", 500, "--workers", 3, "--seed", draw.randrange(10**6),
             "--store", "redis" if not redis_server.missing() else "file", "--share", 0, "--trainer", runs.trainer]
    result = subprocess.run([sys.executable, ROOT / "dev/break/chaos.py", *map(str, words)], text=True,
                            capture_output=True, env={**os.environ, "TMPDIR": str(runs.base)})
    return " ".join(map(str, words[2:-2])), SAME if result.returncode == 0 else DEFECT, result.stdout[-500:]


def fuzz(runs, draw):
    name = draw.choice(sorted(path.stem[5:] for path in (ROOT / "dev/break/fuzz").glob("fuzz_*.cpp")))
    result = subprocess.run(["make", f"fuzz-{name}", "SECONDS=5"], cwd=ROOT, text=True, capture_output=True)
    return name, REFUSED if result.returncode == 0 else DEFECT, result.stderr[-500:]


def numbers(runs, draw):
    table = subprocess.run([runs.trainer, "--options-table"], text=True, capture_output=True).stdout
    names = re.findall(r"^\| `(?:-\w` `)?(--[\w-]+)` \| -?\d+(?:\.\d+)? \|", table, re.M)
    name, value = draw.choice(names), draw.choice(EDGES)
    small = {"-x": 6, "-n": 3, **({"--workers": 2} if draw.random() < 0.5 else {"--outer-optimizer": "none"})}
    # Some valid values start endless runs or thousands of processes: a missing file ends those at once.
    limits = {"--max-steps": 10, "--ranks": 4, "--workers": 4, "--batch": 100, "--sample-length": 100}
    if isinstance(value, int) and value > limits.get(name, value):
        small["-j"] = "missing.bin"
    return f"{name} {value!r}", *ends([runs.start("edge", {**small, name: value})])


def twice(runs, draw):
    name, other, value = draw.choice([("--lr", 0.5, 0.01), ("--max-steps", 3, 6), ("--seed", 1, 2), ("--batch", 2, 4)])
    once = runs.start("once", {"-x": 6, "--outer-optimizer": "none", name: value})
    verdict, seen = ends([once])
    again = runs.start("twice", {name: other, "-x": 6, "--outer-optimizer": "none", **{f"{name}={value}": True}})
    both = ends([again])
    is_same = verdict == both[0] == SAME and model_of(once) == model_of(again)
    return f"{name} {other} and {value}", *((SAME, "") if is_same else (DEFECT, f"{seen} {both[1]} other bits"))


# -----------------------------------------------------------------------------------------------------------
# What an undisturbed run costs

def cpu_seconds(pids):
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def resident(pid):
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def busiest(processes, seconds=2):
    """The largest share of a core that one of these processes uses while all wait."""
    pids = [pid for process in processes for pid in (process.pid, *children(process.pid))]
    before = [cpu_seconds([pid]) for pid in pids]
    time.sleep(seconds)
    return max((cpu_seconds([pid]) - start) / seconds for pid, start in zip(pids, before))


def quiet(runs, draw):
    url, shares = f"file:{runs.base}/store", {}
    alone = runs.start("alone", {**LOCKSTEP, "--worker": 0, "--store": url})  # for worker 1
    lonely = runs.start("lonely", {**ELASTIC, "--worker": 0, "--store": url})
    time.sleep(2)
    shares["a start"] = busiest([alone, lonely])
    run = runs.start("stopped", {**LOCKSTEP, "-x": 10**6, "-n": 50, "-nk": 2, "--timeout": 60})
    until = time.monotonic() + HANG
    while len(children(run.pid)) < 4 or not (run.folder / "run/metrics.jsonl").exists():
        if time.monotonic() > until:
            return "", DEFECT, "the run does not start"
        time.sleep(0.1)
    time.sleep(2)
    pids, victim = children(run.pid), children(run.pid)[-1]
    early = [resident(pid) for pid in pids]
    time.sleep(10)
    growth = max(resident(pid) - before for pid, before in zip(pids, early))
    os.kill(victim, signal.SIGSTOP)
    time.sleep(1)
    shares["a peer that is stopped"] = busiest([run])
    os.kill(victim, signal.SIGCONT)
    text = f"memory grew by {growth / 1e6:.1f} MB, and a process used " + ", ".join(
        f"{100 * share:.0f}% of a core while waiting for {what}" for what, share in shares.items())
    is_good = growth <= MOST_GROWTH and max(shares.values()) <= MOST_BUSY
    return text, SAME if is_good else DEFECT, "" if is_good else "more than 60 MB, or more than 20% of a core"


KINDS = {"strangers": strangers, "killed": killed, "chaos": chaos, "numbers": numbers, "twice": twice,
         "records in a folder": lambda runs, draw: record(runs, draw, "file"),
         "records in Redis": lambda runs, draw: record(runs, draw, "redis"), "wrong types": wrong_type,
         "fuzz": fuzz, "quiet": quiet}
ONCE = {"chaos", "fuzz", "quiet"}  # these take long: once in an attack
TIMES = {"strangers": 2, "numbers": 10, "twice": 2}  # these are short: so many times in a row


def possible_kinds():
    lack = {"fuzz"} if not shutil.which("clang++") else set()
    lack |= {"records in Redis", "wrong types"} if redis_server.missing() else set()
    for kind in sorted(lack):
        print(f"note: no {kind}: what it needs is not installed")
    return [kind for kind in KINDS if kind not in lack]


def attack(arguments, seed, base):
    """{kind: verdicts}"""
    kinds = [arguments.only] if arguments.only else possible_kinds()
    kinds = [kind for kind in kinds for _ in range(TIMES.get(kind, 1) if not arguments.only else 1)]
    tokens, found, begin = write_tokens(base / "tokens"), {}, time.monotonic()
    until = begin + 60 * arguments.minutes
    for number, kind in enumerate(itertools.cycle(kinds)):
        if number >= len(kinds) and time.monotonic() > until:
            return found
        if time.monotonic() > until and not arguments.only or (kind in ONCE and kind in found):
            continue
        runs = Runs(arguments.trainer.resolve(), tokens, base / f"blow{number}")
        runs.base.mkdir()
        try:
            what, verdict, seen = KINDS[kind](runs, random.Random(f"{seed} {number}"))
        finally:
            runs.close()
        found.setdefault(kind, []).append(verdict)
        print(f"{time.monotonic() - begin:6.0f} s  {kind}: {what}: {verdict}", flush=True)
        if verdict == DEFECT:
            print(f"          {seen}\n          its files: {runs.base}", flush=True)
        else:
            shutil.rmtree(runs.base)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--only", choices=KINDS, help="blows of this kind alone")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    arguments = parser.parse_args()
    if not arguments.trainer.exists():
        print(f"error: there is no {arguments.trainer}: run make", file=sys.stderr)
        return 2
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.minutes:g} minutes", flush=True)
    base = Path(tempfile.mkdtemp(prefix="attack-"))
    found = attack(arguments, seed, base)
    for kind, verdicts in found.items():
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts)
        print(f"{kind:<20} {worst(verdicts):<22} ({counts})")
    if DEFECT in itertools.chain(*found.values()):
        return 1
    shutil.rmtree(base)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that finally clauses end the processes it started
    sys.exit(main())
