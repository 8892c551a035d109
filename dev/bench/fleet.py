"""The workers of one run for benchmarks, each its own process, with or without a share of a core (quota.py), each in
its own site behind a line (dev/wan/sites.py) or all on this machine; and the store through which they meet.

    with Fleet(trainer, options, folder, workers=4, shares={3: 0.15}) as fleet:
        for worker in range(4):
            fleet.start(worker)
        fleet.wait()
"""
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/tools"), str(ROOT / "dev/break/chaos"), str(ROOT / "dev/wan")]
from metrics import GrowingLog, UserError, log_name
from quota import Quotas
from redis_server import RedisServer
from sites import Sites


class Fleet:
    """options: of all workers   shares: {worker: share of a core}; a worker that is not in it has no limit
    lines: one for each worker's site, and the store's; none: all are on this machine

    A worker's output is in folder/workerW.txt; all logs are in `folder`."""

    def __init__(self, trainer, options, folder, workers, shares=None, store="redis", lines=(), relay=None):
        self.trainer, self.options, self.folder = Path(trainer).resolve(), options, Path(folder)
        self.workers, self.shares, self.kind = workers, shares or {}, store
        self.lines, self.relay = lines, relay
        self.processes, self.outputs, self.logs, self.steps = {}, [], {}, {}
        self.alone = []  # processes that train alone, outside of the run, and are not waited for
        self.sites = self.server = None
        self.traffic = []  # counters of each site's device, when all workers have ended
        self.tcp = None    # TCP's settings in the sites
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as opened:
            self.folder.mkdir(parents=True)
            self.quotas = opened.enter_context(Quotas()) if self.shares else None
            if self.lines:
                self.sites = opened.enter_context(Sites(self.lines, relay=self.relay))
                self.tcp = self.sites.tcp()
            if self.kind == "redis":
                site = (self.sites.addresses[-1], self.sites.inside(self.workers)) if self.sites else ()
                self.server = start_server(self.folder / "redis", site)
                opened.callback(self.server.stop)
            self.stack = opened.pop_all()
        self.begun, self.before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        return self

    def __exit__(self, *_):
        try:
            for process in [*self.processes.values(), *self.alone]:
                end(process)
        finally:
            self.stack.close()
            for output in self.outputs:
                output.close()
        self.wall = time.monotonic() - self.begun
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - self.before.ru_utime - self.before.ru_stime
        self.cores = used / self.wall
        for leftover in ("redis", "store"):
            shutil.rmtree(self.folder / leftover, ignore_errors=True)

    def url(self):
        return self.server.url() if self.server else f"file:{self.folder / 'store'}"

    def place(self, worker):
        """The words before the worker's command."""
        words = self.sites.inside(worker) if self.sites else ["setpriv", "--pdeathsig", "KILL"]
        if worker in self.shares:
            words = [*words, *self.quotas.inside(f"worker{worker}", self.shares[worker])]
        return words

    def start(self, worker, options=None):
        """options: further options of this worker"""
        self.logs[worker] = GrowingLog(self.folder / log_name(worker))
        interface = {"--interface": self.sites.interface} if self.sites else {}
        merged = {**self.options, **(options or {}), "--worker": worker, **interface, "-o": self.folder}
        self.processes[worker] = self.launch(worker, merged)

    def start_alone(self, worker, options):
        """Starts the worker in its site and with its share, but in its own run, which lasts as long as the fleet."""
        folder = self.folder / f"alone{worker}"
        self.alone.append(self.launch(worker, {**options, "-x": 10**7, "-v": 0, "-o": folder}))

    def launch(self, worker, options):
        """Starts a process with one thread, since there are few cores."""
        words = [str(word) for name, value in options.items()
                 for word in ((name,) if value is True else (name, value))]
        output = open(self.folder / f"worker{worker}.txt", "a")
        self.outputs.append(output)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DILOCO_STORE": self.url()}
        return subprocess.Popen([*self.place(worker), str(self.trainer), *words], stdout=output,
                                stderr=subprocess.STDOUT, env=environment)

    def kill(self, worker):
        """Kills a worker, as when a machine loses power."""
        end(self.processes[worker])

    def wait_for_step(self, worker, step):
        while self.step_of(worker) < step:
            if self.processes[worker].poll() is not None:
                raise self.failure(worker, f"ended before step {step}")
            time.sleep(0.02)

    def step_of(self, worker):
        for line in self.logs[worker].read():
            if line["type"] == "step":
                self.steps[worker] = line["step"]
        return self.steps.get(worker, 0)

    def wait(self):
        """Waits until all workers have ended well. Raises a UserError as soon as one fails, for the others might wait
        for it forever."""
        running = dict(self.processes)
        while running:
            for worker, process in list(running.items()):
                if process.poll() == 0:
                    del running[worker]
                elif process.poll() is not None:
                    raise self.failure(worker, "failed")
            time.sleep(0.05)
        if self.sites:
            self.traffic = [self.sites.counters(site) for site in range(len(self.lines))]

    def failure(self, worker, what):
        lines = (self.folder / f"worker{worker}.txt").read_text().strip().splitlines() or ["no message"]
        return UserError(f"worker {worker} {what} ({lines[-1]}): see {self.folder}/worker*.txt")


def start_server(folder, site):
    try:
        return RedisServer(folder, *site)
    except RuntimeError as error:
        raise UserError(f"{error}: try to start redis-server by hand") from error


def end(process):
    if process.poll() is None:
        process.kill()
    process.wait()
