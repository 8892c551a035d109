#!/usr/bin/env python3
"""Compares diloco.c with torchft and GradientMail: two workers of each train the demo's model over dev/wan's lines.

    PEERS=1 make bench-peers                       installs the peers and makes the runs that are missing (root)
    PEERS=1 make bench-peers ARGUMENTS=--quick     short runs, at most a quarter of an hour with the installation;
                                                   run it again for losses of three seeds
    dev/bench/peers/peers.py --minutes 0           only reports the finished runs
    dev/bench/peers/peers.py --tau 40              how long diloco.c's workers wait over the last line with this tau
                                                   and H = 108

A finished run, or one that failed, with its message, is a line of the data file and is not repeated. To repeat it,
delete its line. Workers write metrics.jsonl as the trainer does (the peers through work.py), the kernel counts the
bytes at each worker's interface, and worker 1 is killed in the middle of the runs named "killed".
"""
import contextlib
import datetime
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "dev/bench"), str(ROOT / "dev/break/chaos")]
from runs import above_zero, check_report, command_of, first_missing, machine, run_missing  # finds dev/tools, too
from fleet import end
from metrics import GrowingLog, Parser, UserError, exit_status, log_name
from redis_server import RedisServer
from sites import Line, Sites, missing

HERE, H, FRAGMENTS = Path(__file__).parent, 27, 3
H_OF_TAU = 108  # H with --tau: large enough that the line is idle between two syncs
DEMO = {"--layers": 4, "--heads": 4, "--channels": 128, "-t": 128, "-b": 2, "-l": 0.0015, "-k": "cosine", "-q": 0.1,
        "-c": 0.1, "-s": 0, "--workers": 2}
STREAMING = {"-H": H, "--outer-lr": 0.7, "--outer-momentum": 0.9, "--fragment-layers": 2, "--overlap": 5,
             "--outer-dtype": "fp4_e2m1", "--local-weight": 0.5}
LINES = {"unlimited": Line(mtu=9000), "100 Mbit/s, 20 ms": Line(100, 20, buffer_ms=50),
         "20 Mbit/s, 80 ms": Line(20, 80, buffer_ms=80)}
OURS = {"lock-step": "diloco.c, lock-step", "redis": "diloco.c, elastic, Redis", "s3": "diloco.c, elastic, S3"}
PEERS = {"torchft": "torchft 0.2.0", "gradientmail": "GradientMail 0.0.2, its defaults",
         "gradientmail-streaming": "GradientMail 0.0.2, tau 5, alpha 0.5, F4"}
TITLES = {**OURS, **PEERS}


@dataclass(frozen=True)
class Scale:
    steps: int
    warm_up: int
    validation: int  # batches
    seeds: int
    limit: int       # seconds that a run may take
    kills_of_all_seeds: bool  # else of one seed, and then its loss is not reported
    tau: int = STREAMING["--overlap"]
    last_line_alone: bool = False
    H: int = H


SCALES = {"full": Scale(4000, 100, 320, 3, 900, True), "quick": Scale(135, 15, 40, 3, 75, False)}


def scale_of_tau(tau):
    """The name of the scale for --tau: long enough for payloads that are no longer needed to be removed, too."""
    name = f"tau {tau}, H {H_OF_TAU}"
    SCALES[name] = Scale(10 * H_OF_TAU, 15, 40, 1, 180, False, tau, True, H_OF_TAU)
    return name


@dataclass(frozen=True)
class Job:
    name: str  # the program
    line: str
    seed: int
    killed: bool
    scale: str

    def title(self):
        return f"{self.name}, {self.line}, seed {self.seed}" + (", killed" if self.killed else "")


def jobs_of(scale, names):
    """Seed by seed, all programs in turn, so that finished runs can be compared whenever this is stopped. The line on
    which losses are compared has all seeds, the other lines have one."""
    found = []
    for seed in range(1, SCALES[scale].seeds + 1):
        is_first = seed == 1
        near, middle, far = LINES
        places = [(near, False), *([(far, False)] if is_first else []),
                  *([(near, True)] if is_first or SCALES[scale].kills_of_all_seeds else []),
                  *([(middle, False)] if is_first else [])]
        if SCALES[scale].last_line_alone:
            places = [(far, False)]
        found += [Job(name, line, seed, killed, scale) for line, killed in places for name in names]
    return found


def options_of(one, text):
    scale = SCALES[one.scale]
    return {**DEMO, "-x": scale.steps, "-u": scale.warm_up, "-v": scale.steps, "-m": scale.validation,
            "--seed": one.seed, "-i": f"{text}/*_train_*.bin", "-j": f"{text}/*_val_*.bin"}


# --------------------------------------------------------------------------------------------------- programs

def store_lines(line):
    """The workers' lines and the store's, which is as long but no bottleneck."""
    return [line, line, Line(0, line.round_trip_ms, buffer_ms=line.buffer_ms, mtu=line.mtu)]


class Run:
    """The processes of a run: the workers in sites 0 and 1, and the store or lighthouse in site 2."""

    def __init__(self, one, arguments, folder, sites):
        self.one, self.arguments, self.folder, self.sites = one, arguments, folder, sites
        self.options, self.started, self.environment = options_of(one, arguments.text), [], {}
        self.address, self.with_hosts = sites.addresses[2], ()
        if one.name == "torchft":
            self.with_hosts = self.resolvable()

    def start(self, site, command, name):
        output = open(self.folder / f"{name}.txt", "w")
        words = [*self.sites.inside(site), *map(str, self.with_hosts), *map(str, command)]
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT,
                                   env={**os.environ, **self.environment})
        output.close()
        self.started.append(process)
        return process

    def resolvable(self):
        """The words before a command that resolves the sites' host names, as torchft's workers must."""
        names = [subprocess.run([*self.sites.inside(site), "uname", "-n"], capture_output=True, text=True,
                                check=True).stdout for site in range(3)]
        hosts = [f"{address} {name}" for address, name in zip(self.sites.addresses, names)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', self.folder / "hosts"]

    def serve(self):
        if self.one.name == "lock-step":
            self.environment = {"DILOCO_STORE": f"file:{self.folder / 'store'}"}
        elif self.one.name == "redis":
            server = RedisServer(self.folder / "redis", self.address, self.sites.inside(2))
            self.started.append(server.process)
            self.environment = {"DILOCO_STORE": server.url()}
        elif self.one.name == "torchft":
            program = python_of("torchft").parent / "torchft_lighthouse"
            self.start(2, [program, "--bind", "[::]:29510", "--min_replicas", 1], "lighthouse")
        else:
            self.start(2, [sys.executable, HERE / "serve_s3.py", self.folder / "s3", self.address], "s3")
            self.environment = json.loads(first_line(self.folder / "s3.txt", 120))
            del self.environment["AWS_PROFILE"]  # it is empty, and boto3 would take that for a name
        self.environment["OMP_NUM_THREADS"] = "1"

    def start_workers(self):
        if self.one.name in OURS:
            more = {} if self.one.name == "lock-step" else {"--outer-transport": "store"}
            scale = SCALES[self.one.scale]
            options = {**self.options, **STREAMING, "-H": scale.H, "--overlap": scale.tau, **more,
                       "--interface": self.sites.interface}
            words = command_of(self.arguments.trainer, options, self.folder)
            return [self.start(worker, [*words, "--worker", worker], f"worker{worker}") for worker in range(2)]
        program, _, mode = self.one.name.partition("-")
        self.environment["GLOO_SOCKET_IFNAME"] = self.sites.interface
        given = {"options": self.options, "folder": str(self.folder), "text": str(self.arguments.text), "mode": mode,
                 "lighthouse": f"http://{self.address}:29510", "endpoint": self.environment.get("AWS_ENDPOINT_URL"),
                 "bucket": self.environment.get("bucket")}
        processes = []
        for site in range(3 if program == "gradientmail" else 2):
            own = {**given, "worker": site, "role": "learner" if site < 2 else "syncer",
                   "address": self.sites.addresses[site]}
            words = [python_of(program), program_of(program), json.dumps(own)]
            processes.append(self.start(site, words, f"worker{site}"))
        return processes[:2]

    def close(self):
        for process in reversed(self.started):
            end(process)


def python_of(name):
    return ROOT / f".venv-peers-{name.partition('-')[0]}/bin/python"


def program_of(name):
    return HERE / f"{name.partition('-')[0]}_worker.py"


def first_line(path, seconds):
    """The first line of a helper's output, which it prints when it is ready."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (text := path.read_text()).endswith("\n"):
            return text.splitlines()[0]
        time.sleep(0.05)
    raise UserError(f"{path.stem} does not start: see {path}")


# ------------------------------------------------------------------------------------------------------- runs

def log_of(folder, worker):
    return GrowingLog(folder / log_name(worker))


class Progress:
    """The last step in a worker's log. Each line is read only once, since the workers need the cores."""

    def __init__(self, folder, worker=0):
        self.log, self.last = log_of(folder, worker), 0

    def step(self):
        for line in self.log.read():
            if line["type"] == "step":
                self.last = max(self.last, line["step"])
        return self.last


def watch(run, workers, limit):
    """Waits for the workers' end. Returns (first counters, last counters, step at which worker 1 was killed). Bytes are
    counted from step H on, without those sent at the start, until worker 0 has ended."""
    one, until, progress = run.one, time.monotonic() + limit, Progress(run.folder)
    begin = last = killed_at = None

    def check():
        for worker, process in enumerate(workers):
            if process.poll() and not (worker == 1 and killed_at):
                raise UserError(last_words(run.folder / f"worker{worker}.txt"))

    while any(process.poll() is None for process in workers):
        step = progress.step()
        if time.monotonic() > until:
            raise UserError(f"not finished after {limit} s, at step {step}")
        check()
        counters = (step, [run.sites.counters(site).bytes_sent for site in range(2)])
        if step >= SCALES[one.scale].H and begin is None:
            begin = counters
        if one.killed and killed_at is None and step >= SCALES[one.scale].steps // 2:
            (run.folder / "killed1").touch()
            end(workers[1])
            killed_at = step
        if begin and step < SCALES[one.scale].steps:
            last = counters
        time.sleep(0.1)
    check()
    return begin, last, killed_at


def last_words(path):
    """A failed worker's error, or its last line."""
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()] or ["no message"]
    return next((line for line in reversed(lines) if "rror" in line.split(":")[0]), lines[-1])[:300]


def measures(logs, begin, last, killed_at, H):
    """The record of a run. A turn is H / FRAGMENTS steps, in which one fragment is synchronized."""
    steps = [[line for line in log if line["type"] == "step"] for log in logs]

    def waited(log, before=math.inf):
        return sum(line["waited_seconds"] for line in log if "waited_seconds" in line and line["type"] != "end"
                   and H < line.get("apply_step", line.get("step")) < before)

    waits = [waited(log) for log in logs]
    turns = (len(steps[0]) - H) * FRAGMENTS / H
    found = {"syncs": sum(line["type"] == "sync" for line in logs[0]), "turns": turns,
             "step_seconds": sorted(line["seconds"] for line in steps[0])[len(steps[0]) // 2]}
    ends = [line["loss"] for line in logs[0] if line["type"] == "eval"] + \
           [line["loss"] for line in logs[0] if line["type"] == "end" and "loss" in line]
    found["loss"] = ends[-1]
    if killed_at is not None:
        later = [line["seconds"] for line in steps[0] if line["step"] > killed_at]
        found["stall"] = max(later, default=0.0)
        return found
    counted = last[0] - begin[0]
    found["bytes"] = [(after - before) / (counted * FRAGMENTS / H) for before, after in zip(begin[1], last[1])]
    found["waited"] = sum(waits) / len(waits) / turns
    # No tau hides what the last steps wait for.
    found["share"] = sum(waited(log, own[-1]["step"]) / sum(line["seconds"] for line in own if line["step"] > H)
                         for log, own in zip(logs, steps)) / len(logs)
    found["equal"] = are_equal(logs)
    return found


def are_equal(logs):
    """Whether the workers' final hashes are equal; for the trainer, the hashes of every sync that both merged."""
    ends = [[line["hash"] for line in log if line["type"] == "end" and "hash" in line] for log in logs]
    if all(ends):
        return ends[0] == ends[1]
    hashes = [{line["sync"]: line["global_hash"] for line in log if line["type"] == "sync"} for log in logs]
    common = hashes[0].keys() & hashes[1].keys()
    return bool(common) and all(hashes[0][sync] == hashes[1][sync] for sync in common)


def run_job(arguments, number, one):
    folder, begun = arguments.out / f"{number:03}-{one.name}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = {**asdict(one), "machine": machine(), "date": str(datetime.date.today())}
    with Sites(store_lines(LINES[one.line]), relay=arguments.relay) as sites, \
            contextlib.closing(Run(one, arguments, folder, sites)) as run:
        try:
            run.serve()
            found = watch(run, run.start_workers(), SCALES[one.scale].limit)
            record.update(measures([log_of(folder, worker).read() for worker in range(2)], *found, SCALES[one.scale].H))
        except (UserError, RuntimeError) as error:
            record["failed"] = str(error)
    seconds = record["seconds"] = time.monotonic() - begun
    with open(arguments.data, "a") as data:
        print(json.dumps(record), file=data)
    print(f"{number:3}  {one.title():62} {record.get('failed') or format(record['loss'], '.4f')}  {seconds:.0f} s",
          flush=True)
    return seconds


def read_data(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def made(records, one):
    """The record of a job; None if there is none."""
    own = asdict(one)
    return next((record for record in records if all(record[name] == value for name, value in own.items())), None)


def parse_arguments(words):
    parser = Parser(description="Compares diloco.c with torchft and GradientMail: bytes, waits, a kill, losses.")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    parser.add_argument("--relay", type=Path, default=ROOT / "build/relay")
    parser.add_argument("--text", type=Path, default=ROOT / "build/peers/text", help="token shards")
    parser.add_argument("--out", type=Path, default=ROOT / "build/peers", help="folder of the runs' logs (build/peers)")
    parser.add_argument("--data", type=Path, default=ROOT / "dev/results/peers.jsonl", help="file of finished runs")
    parser.add_argument("--report", type=Path, help="write the report here, and a figure beside it")
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--minutes", type=above_zero(float, or_zero=True), help="start no run that may end later "
                        "(180, with --quick 8; 0: only report the finished runs)")
    parser.add_argument("--tau", type=above_zero(int), help="instead: how long diloco.c's workers wait over the last "
                        f"line with this tau and H = {H_OF_TAU}")
    parser.add_argument("--only", nargs="+", choices=list(TITLES), metavar="NAME", default=list(TITLES),
                        help=" ".join(TITLES))
    arguments = parser.parse_args(words)
    arguments.scale, arguments.out = "quick" if arguments.quick else "full", arguments.out.absolute()
    if arguments.tau:
        if arguments.tau >= H_OF_TAU:
            raise UserError(f"--tau is less than H, {H_OF_TAU} steps")
        arguments.scale = scale_of_tau(arguments.tau)
        arguments.only = [name for name in arguments.only if name in OURS]
    if arguments.minutes is None:
        arguments.minutes = 8 if arguments.quick else 180
    return arguments


def main(words):
    arguments = parse_arguments(words)
    check_report(arguments.report)
    if arguments.minutes > 0:
        if lack := missing():
            raise UserError(lack)
        for program in {name.partition("-")[0] for name in arguments.only if name in PEERS}:
            if not python_of(program).exists():
                raise UserError(f"{program} is not installed: PEERS=1 make bench-peers installs it")
        arguments.out.mkdir(parents=True, exist_ok=True)
        jobs = jobs_of(arguments.scale, arguments.only)
        run_missing(arguments.minutes, lambda: first_missing(jobs, partial(made, read_data(arguments.data))),
                    lambda number, one: run_job(arguments, number, one))
    records = [record for record in read_data(arguments.data) if record["scale"] == arguments.scale]
    if not records:
        raise UserError("no run has finished: give it more --minutes")
    if arguments.tau:
        for one in records:
            print(one.get("failed") or f"{TITLES[one['name']]}: {one['waited']:.3f} s a sync; without the last step "
                  f"{one['share']:.1%} of the time")
        return
    import peers_report
    text = peers_report.text_of(records, arguments.scale, peers_report.sizes())
    print("\n" + text, end="")
    if arguments.report:
        arguments.report.write_text("# Beside torchft and GradientMail\n\n" + text +
                                    f"\n![waits and bytes]({arguments.report.stem}.png)\n")
        peers_report.draw(arguments.report.with_suffix(".png"), records)


if __name__ == "__main__":
    sys.exit(exit_status(main))
