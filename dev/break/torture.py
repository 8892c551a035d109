#!/usr/bin/env python3
"""Pulls the plug. A run of many short steps writes a checkpoint every few steps. At some moment SIGKILL hits all of
its processes, those of one machine, or a single process (then the others must end by themselves). The run is
resumed (-y 1) and killed again, until one start completes it. Then models, states and logs must have the bits of an
undisturbed run. The next run has another configuration.

    dev/break/torture.py --kills 500 [--seed S] [--configuration NAME] [--trainer ./train_gpt_cpu]

A strike comes at a random time, as soon as a file is being written (NAME.tmp exists), or a few milliseconds after a
checkpoint is whole. After two starts without a new checkpoint, the next start is left alone until it has written
one. The times of the kills follow from the seed; what a process is doing at that time depends on the machine.
"""
import argparse
import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "test"))
from conftest import children, command, is_running, write_shard  # noqa: E402

# Three fragments, sent at steps 2, 5 and 8 of 8. No process waits long for a dead one.
COMMON = {"-b": 2, "-H": 8, "--fragment-layers": 1, "-k": "cosine", "-v": 50, "-m": 2, "-x": 200, "-n": 6,
          "--outer-optimizer": "nesterov", "--timeout": 10}

# A list has one value for each worker. Then each worker is started by its own launcher, with its own folder.
CONFIGURATIONS = {
    "one worker": {"--ranks": 1, "--overlap": 3},
    "two workers": {"--workers": 2, "--overlap": 1},
    "two machines": {"--workers": 2, "--overlap": [0, 5], "--outer-dtype": "fp8_e4m3"},
    "ranks": {"--workers": 2, "--ranks": 2, "--overlap": 5, "--outer-error-feedback": True, "--optimizer": "muon"},
    "all-to-all": {"--workers": 4, "--overlap": 4, "--outer-exchange": "all_to_all",
                   "--outer-error-feedback": True, "--outer-rounding": "stochastic"},
    "data parallel": {"--ranks": 2, "--outer-optimizer": "none"},
    "no overlap": {"--workers": 2, "--overlap": 0, "--outer-dtype": "bf16"},
    "few are kept": {"--workers": 2, "--overlap": 2, "-nk": 2, "-nm": 60, "--outer-dtype": "fp4_e2m1"},
    "all in flight": {"--workers": 2, "--ranks": 2, "--overlap": 7, "-n": 8, "--outer-exchange": "all_to_all",
                      "--outer-dtype": "fp8_e5m2", "--outer-error-feedback": True},
    "machines of ranks": {"--workers": 2, "--ranks": 2, "--overlap": [5, 2], "--outer-weights": "tokens",
                          "-d": [64, 128]},
}

TIMES = {"time", "wire_seconds", "waited_seconds"}
START_SECONDS = 120  # a start that takes longer counts as hanging


class Failure(Exception):
    """Something forbidden: different bits, a process that hangs, an unclear error."""


# -----------------------------------------------------------------------------------------------------------
# What a run wrote

def log_name(process):
    return "metrics.jsonl" if process == 0 else f"metrics_{process:05d}.jsonl"


def history(path):
    """A log's steps, evaluations and syncs, without times, by kind and number. Each must occur once."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        kind = row["type"]
        if kind in ("run", "resume", "checkpoint", "end"):
            continue
        names = ["loss", "lr", "norm", "tokens"] if kind == "step" else sorted(row.keys() - TIMES)
        key = kind, row["sync" if kind == "sync" else "step"]
        if key in found:
            raise Failure(f"{path} contains {kind} {key[1]} twice")
        found[key] = [(name, row[name]) for name in names]
    return found


def state_sections(path):
    """The arrays of a state file: the sections whose bytes depend on the training alone."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("<i", data, 12 * 4)
    found = {}
    for i in range(count):
        name, offset, size = struct.unpack_from("<48sqq", data, 1024 + 64 * i)
        found[name.rstrip(b"\0").decode()] = data[offset:offset + size]
    return {name: data for name, data in found.items() if name not in ("fields", "options")}


def step_of(path):
    """The step of a model, state or DONE_ file."""
    return int(path.name.split("_")[1].split(".")[0])


def lineage_of(path):
    """Which run wrote a state file: starts that resume keep it, one that finds no whole checkpoint has a new one."""
    return path.read_bytes()[8 * 4:12 * 4]


def set_back(folders, step):
    """Removes all checkpoints of later steps."""
    for folder in folders:
        for path in [*folder.glob("state_*"), *folder.glob("model_*"), *folder.glob("DONE_*")]:
            if step_of(path) > step:
                path.unlink()


class Written:
    """The folders of a finished run: where each worker's logs, models and states are."""

    def __init__(self, folders, ranks):
        self.folders, self.ranks = folders, ranks  # folders: by worker

    def processes(self):
        return range(len(self.folders) * self.ranks)

    def folder_of(self, process):
        return self.folders[process // self.ranks]

    def history(self, process):
        return history(self.folder_of(process) / log_name(process))

    def models(self):
        return {path.name: path for path in sorted(self.folders[0].glob("model_*.bin"))}

    def states(self, process):
        paths = sorted(self.folder_of(process).glob(f"state_*_{process:05d}.bin"))
        return {path.name: path for path in paths}

    def unfinished(self):
        return sorted({path.name for folder in self.folders for path in folder.glob("*.tmp")})

    def newest_done(self):
        """The newest step that some machine has recorded as whole; 0 if there is none."""
        done = [path for folder in self.folders for path in folder.glob("DONE_*[0-9]")]
        return max(map(step_of, done), default=0)

    def newest_whole(self):
        """The newest step for which every process has its state, all of one run; 0 if there is none."""
        found = [{(step_of(path), lineage_of(path)) for path in self.states(process).values()}
                 for process in self.processes()]
        return max(set.intersection(*found), default=(0, b""))[0]


def compare_logs(run, expected):
    for process in expected.processes():
        ours, theirs = run.history(process), expected.history(process)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise Failure(f"process {process}, {key[0]} {key[1]}: {ours.get(key)} instead of "
                              f"{theirs.get(key)}")
    if (run.folders[0] / "main.log").read_bytes() != (expected.folders[0] / "main.log").read_bytes():
        raise Failure("main.log differs from that of the undisturbed run")


def compare_models(run, expected):
    ours, theirs = run.models(), expected.models()
    last = max(theirs)
    if last not in ours:
        raise Failure(f"there is no {last}")
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].read_bytes() != theirs[name].read_bytes():
            raise Failure(f"{name} has other bits than in the undisturbed run")


def compare_states(run, expected):
    """Compares the states of all steps that both runs still have."""
    for process in expected.processes():
        ours, theirs = run.states(process), expected.states(process)
        for name in sorted(ours.keys() & theirs.keys()):
            a, b = state_sections(ours[name]), state_sections(theirs[name])
            different = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
            if different:
                raise Failure(f"{name}: {', '.join(different)} differ from the undisturbed run's")


def compare(run, expected):
    """Raises a Failure unless `run` has the bits of `expected` in each file that both have, and the same logs."""
    compare_logs(run, expected)
    compare_models(run, expected)
    compare_states(run, expected)
    if run.unfinished():
        raise Failure(f"unfinished files are left: {', '.join(run.unfinished())}")


# -----------------------------------------------------------------------------------------------------------
# Processes

def of_worker(options, worker):
    return {name: value[worker] if isinstance(value, list) else value for name, value in options.items()}


class Start:
    """All processes of a run, started by one launcher, or by one for each worker if their options differ."""

    def __init__(self, options, base, trainer, tokens, environment=None, preexec=None):
        """base: the folder for the run's files   preexec: called in each new process"""
        self.base, self.ranks = Path(base), options.get("--ranks", 1)
        workers = options.get("--workers", 1)
        self.is_apart = any(isinstance(value, list) for value in options.values())
        self.base.mkdir(parents=True, exist_ok=True)
        self.folders = [self.base / (f"run{w}" if self.is_apart else "run") for w in range(workers)]
        self.launchers, self.logs = [], []
        for w in range(workers if self.is_apart else 1):
            own = of_worker(options, w)
            if self.is_apart:
                own = {**own, "--worker": w, "--store": f"file:{self.base}/store"}
            outputs = [self.base / f"{name}{w}.txt" for name in ("stdout", "stderr")]
            self.logs.append(outputs)
            with outputs[0].open("w") as out, outputs[1].open("w") as error:
                self.launchers.append(subprocess.Popen(
                    command(tokens, self.folders[w], own, trainer), stdout=out, stderr=error, cwd=self.base,
                    preexec_fn=preexec,
                    env={**os.environ, "TMPDIR": str(self.base), "OMP_NUM_THREADS": "1",
                         **(environment or {})}))

    def written(self):
        return Written(self.folders, self.ranks)

    def processes(self, launcher):
        """The processes that train: the launcher's children, or the launcher itself if it has none."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return children(launcher.pid) or [launcher.pid]
        return []

    def kill(self, victim, choose=random.choice):
        """victim: all, machine (a worker with its own launcher) or process"""
        launchers = [launcher for launcher in self.launchers if launcher.poll() is None]
        if victim == "machine" and launchers:
            launchers = [choose(launchers)]
        killed = [pid for launcher in launchers for pid in self.processes(launcher)]
        if victim == "process":
            killed = [choose(killed)] if killed else []
        else:
            killed += [launcher.pid for launcher in launchers]
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return killed

    def has_ended(self):
        return all(launcher.poll() is not None for launcher in self.launchers)

    def wait(self, seconds=START_SECONDS):
        """The status of each launcher. If one does not end in time, kills all and raises a Failure."""
        end = time.monotonic() + seconds
        try:
            return [launcher.wait(max(0.01, end - time.monotonic())) for launcher in self.launchers]
        except subprocess.TimeoutExpired:
            self.kill("all")
            raise Failure(f"the run has not ended after {seconds} s; its last output:\n"
                          f"{self.output()[-1000:]}") from None

    def stdout(self, w=0):
        return self.logs[w][0].read_text(errors="replace")

    def stderr(self, w=0):
        return self.logs[w][1].read_text(errors="replace")

    def output(self):
        return "".join(path.read_text(errors="replace") for outputs in self.logs for path in outputs)


def wait_until_gone(pids):
    end = time.monotonic() + START_SECONDS
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > end:
            raise Failure("processes are still there after SIGKILL")
        time.sleep(0.001)


# -----------------------------------------------------------------------------------------------------------
# Torture

@dataclass
class Counts:
    """One row of the table."""
    runs: int = 0
    starts: int = 0
    kills: int = 0
    in_a_write: int = 0     # kills while a file was half written
    of_one: int = 0         # kills of one process or machine, after which the others ended by themselves
    resumes: list = field(default_factory=list)  # the step that each start continued from; 0: from the beginning
    passed_over: int = 0
    seconds: float = 0

    def add(self, other):
        for name in ("runs", "starts", "kills", "in_a_write", "of_one", "resumes", "passed_over", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def text(self, name):
        resumed = sorted(step for step in self.resumes if step > 0)
        steps = f"{resumed[0]}-{resumed[len(resumed) // 2]}-{resumed[-1]}" if resumed else "-"
        anew = len(self.resumes) - len(resumed)
        return (f"{name:<18}{self.runs:>5}{self.starts:>8}{self.kills:>7}{self.in_a_write:>10}"
                f"{self.of_one:>8}{len(resumed):>9}{steps:>13}{anew:>7}{self.passed_over:>8}"
                f"{self.seconds:>8.0f}")


HEADER = (f"{'':<18}{'runs':>5}{'starts':>8}{'kills':>7}{'in write':>10}{'of one':>8}{'resumes':>9}"
          f"{'from step':>13}{'anew':>7}{'passed':>8}{'s':>8}")


class Strike:
    """When to kill which processes of one start, drawn at random."""

    def __init__(self, random, span, is_apart, patient):
        self.random = random
        self.victim = random.choices(["all", "process", "machine" if is_apart else "all"], [5, 3, 2])[0]
        self.kind = "checkpoint" if patient else random.choices(["any", "write", "checkpoint"], [3, 5, 3])[0]
        self.after = random.uniform(0, span)                    # any: seconds after the start
        self.file = random.choice(["state_", "state_", "model_", ""])  # write: how the file's name begins
        self.skip = random.randrange(4)                         # write: files that are spared first
        self.delay = random.choice([0, random.uniform(0, 0.005)])  # seconds between the moment and the kill

    def wait(self, start):
        """Returns when the moment has come, or the run has ended."""
        begin, seen = time.monotonic(), set()
        written = start.written()
        done = written.newest_done()
        while not start.has_ended() and time.monotonic() < begin + START_SECONDS:
            if self.kind == "any" and time.monotonic() > begin + self.after:
                break
            if self.kind == "write":
                seen.update(name for name in written.unfinished() if name.startswith(self.file))
                if len(seen) > self.skip:
                    break
            if self.kind == "checkpoint" and written.newest_done() > done:
                break
            time.sleep(0.0001 if self.kind == "write" else 0.001)
        if start.is_apart and self.victim != "all":
            self.let_them_meet(start)
        time.sleep(self.delay)

    @staticmethod
    def let_them_meet(start):
        """Waits until all machines have begun. The others notice an earlier death only after --timeout."""
        while not start.has_ended() and not all(start.stdout(w) for w in range(len(start.launchers))):
            time.sleep(0.001)


class Torture:
    """One run of a configuration, from its first start to its end."""

    def __init__(self, name, seed, trainer, tokens, folder):
        self.name, self.seed, self.random = name, seed, random.Random(seed)
        self.options = {**COMMON, **CONFIGURATIONS[name]}
        self.trainer, self.tokens, self.folder = trainer, tokens, folder
        self.counts = Counts()

    def start(self, base, resume):
        self.counts.starts += resume
        return Start({**self.options, "-y": int(resume)}, base, self.trainer, self.tokens)

    def run_undisturbed(self):
        """Returns the run to compare with, and how many seconds it took."""
        begin = time.monotonic()
        start = self.start(self.folder / "undisturbed", False)
        statuses = start.wait()
        if any(statuses):
            raise Failure(f"the undisturbed run has failed:\n{start.output()}")
        return start.written(), time.monotonic() - begin

    def run(self, expected, span, most_kills):
        """Kills and resumes the run until it is complete, and compares it. After `most_kills` it is left alone."""
        begin = time.monotonic()
        stuck = 0  # the latest starts without a new checkpoint
        promised = there = done = 0  # newest step: printed as whole, present in all processes, recorded in a DONE file
        while True:
            start = self.start(self.folder / "tortured", True)
            was_killed = self.counts.kills < most_kills and self.strike(
                start, Strike(self.random, span, start.is_apart, stuck >= 2))
            statuses = start.wait()
            self.check_resume(start, there)
            stuck = 0 if start.written().newest_done() > done else stuck + 1
            if not any(statuses):
                break
            if not was_killed:
                raise Failure(f"a start failed although no process was killed:\n{start.output()}")
            done, there = start.written().newest_done(), start.written().newest_whole()
            said = re.findall("^checkpoint of step ([0-9]+) is whole", start.stdout(), re.M)
            promised = max([promised, *map(int, said)])
            if there < promised:
                raise Failure(f"the checkpoint of step {promised} was whole, but the newest one now is of step "
                              f"{there}")
        compare(start.written(), expected)
        self.counts.runs += 1
        self.counts.seconds += time.monotonic() - begin

    def strike(self, start, strike):
        """Returns whether the strike hit: the run may have ended before it."""
        strike.wait(start)
        running = [pid for launcher in start.launchers for pid in start.processes(launcher)]
        killed = start.kill(strike.victim, self.random.choice)
        is_writing = bool(start.written().unfinished())
        statuses = start.wait()
        wait_until_gone(running)
        if not killed or not any(statuses):
            return False
        self.counts.kills += 1
        self.counts.in_a_write += is_writing
        self.counts.of_one += strike.victim != "all"
        self.check_errors(start, killed)
        return True

    def check_errors(self, start, killed):
        """Launchers that were not killed must have ended with errors that a user can read, each in one line."""
        for w, launcher in enumerate(start.launchers):
            if launcher.pid in killed or launcher.returncode == 0:
                continue
            lines = start.stderr(w).splitlines()
            are_clear = all(line.startswith("error: ") for line in lines)
            if not are_clear or not 0 < len(lines) <= self.most_errors():
                raise Failure(f"status {launcher.returncode}, and no clear error line:\n"
                              f"{start.stderr(w)}")

    def most_errors(self):
        return 1 + self.options.get("--ranks", 1) * self.options.get("--workers", 1)

    def check_resume(self, start, there):
        """A start, if it got that far, continued from the newest step for which all processes have their state."""
        steps = []
        for w in range(len(start.launchers)):
            text = start.stdout(w)
            self.counts.passed_over += len(re.findall("^step [0-9]+ was passed over", text, re.M))
            steps += [int(step) for step in re.findall("^resumed after step ([0-9]+)$", text, re.M)]
            steps += [0] * len(re.findall("training starts at step 1$", text, re.M))
        if any(step != there for step in steps):
            raise Failure(f"all processes had the state of step {there}, but workers resumed from {steps}:\n"
                          f"{start.output()}")
        self.counts.resumes += steps[:1]


def write_tokens(folder):
    """Writes a noisy cycle of 64 tokens as two training shards and one validation shard."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, token, stream = random.Random(1), 0, []
    for _ in range(20000):
        token = (token + numbers.randrange(1, 4)) % 64
        stream.append(token)
    write_shard(folder / "x_train_000000.bin", stream[:9000])
    write_shard(folder / "x_train_000001.bin", stream[9000:18000])
    write_shard(folder / "x_val_000000.bin", stream[18000:])
    return folder


def torture(kills, seed, trainer, folder, names, kills_a_run=10):
    """Returns the table's rows by configuration. A Failure has the `configuration` and `seed` of its run."""
    tokens, rows, undisturbed = write_tokens(folder / "tokens"), {}, {}
    number, killed = 0, 0
    while killed < kills:
        name = names[number % len(names)]
        one = Torture(name, seed + number, trainer, tokens, folder / name.replace(" ", "-"))
        try:
            if name not in undisturbed:
                undisturbed[name] = one.run_undisturbed()
            shutil.rmtree(one.folder / "tortured", ignore_errors=True)
            one.run(*undisturbed[name], min(kills - killed, kills_a_run))
        except Failure as failure:
            failure.configuration, failure.seed = name, one.seed
            raise
        rows.setdefault(name, Counts()).add(one.counts)
        killed += one.counts.kills
        number += 1
    return rows


def print_table(rows):
    total = Counts()
    print(HEADER)
    for name, counts in rows.items():
        print(counts.text(name))
        total.add(counts)
    print(total.text("all"))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--configuration", choices=CONFIGURATIONS, help="default: all of them, in turn")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    arguments = parser.parse_args()
    if not arguments.trainer.exists():
        print(f"error: there is no {arguments.trainer}: run make", file=sys.stderr)
        return 2
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    names = [arguments.configuration] if arguments.configuration else list(CONFIGURATIONS)
    print(f"seed {seed}, {arguments.kills} kills", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        rows = torture(arguments.kills, seed, arguments.trainer.resolve(), folder, names)
    except Failure as failure:
        print(f"{failure}\nits files are in {folder}; to reproduce it:\n    dev/break/torture.py "
              f"--kills {arguments.kills} --seed {failure.seed} --configuration '{failure.configuration}' "
              f"--trainer {arguments.trainer}")
        return 1
    print_table(rows)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
