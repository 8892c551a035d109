"""One worker of an elastic run: its process, the blows to it, and its logs."""
import collections
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "dev/tools"), str(ROOT / "dev/break/chaos"), str(ROOT / "dev/test")]
from conftest import children, command  # noqa: E402
from metrics import log_name  # noqa: E402
from run_logs import StartLog  # noqa: E402


class Worker:
    """One worker of the run, and its process, if there is one."""

    def __init__(self, number, chaos):
        self.number, self.chaos = number, chaos
        self.process, self.folder, self.output, self.logs = None, None, None, []
        self.starts = 0
        self.wanted = False     # whether it should be running
        self.ended = False      # whether it ended by itself: it completed the run, or started after the run's end
        self.slowing = None     # (thread, event that ends it)
        self.hindered = set()   # what hinders it now: stopped, slow, cut off
        self.free_since = None  # time.monotonic() since when it could continue
        self.moved = 0          # when it last logged a step
        self.counted_at = 0     # when it last logged a sync that it is counted in
        self.started_at = 0
        self.back_at = 0        # when it was last started, or could continue again
        self.counted_again = None  # when it was first counted after that
        self.news_from = 0      # the first sync that no worker had merged when it was back
        self.step = 0
        self.took = collections.deque(maxlen=21)  # seconds of its last steps
        self.losses = []        # of all starts

    def start(self, resume):
        """resume: in its last start's folder; otherwise in an empty one."""
        self.chaos.read()  # what the last start has logged
        self.starts += 1
        if not resume or self.folder is None:
            self.folder = self.chaos.base / f"worker{self.number}.{self.starts}"
            self.folder.mkdir(parents=True)
        self.output = self.folder / f"output{self.starts}.txt"
        self.logs = self.open_logs()
        self.process = self.launch(self.folder, self.output, {"-y": int(resume)})
        self.wanted, self.ended, self.hindered, self.free_since = True, False, set(), None
        self.started_at = time.monotonic()
        self.note_back()
        self.chaos.tell(f"worker {self.number}", f"is started{' with -y 1' if resume else ''}, process "
                                                 f"{self.process.pid}, {self.folder.name}")

    # ---- whether it can continue

    def note(self, state, when=None):
        """state: one of waits.History"""
        when = time.monotonic() if when is None else when
        self.chaos.waits.histories[self.number].note(state, when)

    def step_seconds(self):
        """The duration of a step without a wait."""
        return statistics.median(self.took) if self.took else 0

    def note_back(self):
        self.back_at, self.counted_again = time.monotonic(), None
        self.news_from = self.chaos.newest + 1
        self.note("back", self.back_at)

    def note_counted(self, sync, when):
        """Its own log says that this sync counts it. Syncs from before it was away do not matter."""
        if sync < self.news_from:
            return
        self.counted_at = max(self.counted_at, when)
        if self.counted_again is None and when > self.back_at:
            self.counted_again = when
            self.note("well", when)

    def hinder(self, how):
        self.hindered.add(how)
        self.note("away")

    def free(self, how):
        """Ends one hindrance. The worker is back, unless something else hinders it."""
        if how in self.hindered:
            self.hindered.discard(how)
            if self.is_alive() and not self.hindered:
                self.note_back()

    def open_logs(self):
        """[(rank, the rank's log)]"""
        ranks, name = self.chaos.options["--ranks"], f"start {self.starts} of worker {self.number}"
        return [(rank, StartLog(self.folder / log_name(self.number * ranks + rank), name))
                for rank in range(ranks)]

    def launch(self, folder, output, options, **password):
        merged = {**self.chaos.options, **options, "--worker": self.number}
        words = command(self.chaos.tokens, folder, merged, self.chaos.trainer)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.chaos.base),
                       **self.chaos.place.environment(self.number, **password)}
        with output.open("w") as file:
            return subprocess.Popen([*self.chaos.share_of(self.number), *self.chaos.place.inside(self.number),
                                     *words], stdout=file,
                                    stderr=subprocess.STDOUT, cwd=self.chaos.base, env=environment)

    def is_alive(self):
        return self.process is not None and self.process.poll() is None

    def pids(self):
        """The launcher and, if there are several, the ranks."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return [*children(self.process.pid), self.process.pid]
        return []

    def signal(self, number):
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self):
        """Kills all of its processes at once."""
        self.wanted = False
        self.speed_up()
        if self.is_alive():
            self.note("away")
            self.signal(signal.SIGKILL)
            self.process.wait()
        self.hindered.discard("stopped")

    def stop(self):
        self.hinder("stopped")
        self.signal(signal.SIGSTOP)

    def resume(self):
        self.signal(signal.SIGCONT)
        self.free("stopped")

    def slow_down(self, share):
        """Lets it run for this share of the time only."""
        is_over = threading.Event()

        def alternate():
            while not is_over.wait(0.1 * share):
                self.signal(signal.SIGSTOP)
                is_over.wait(0.1 * (1 - share))
                self.signal(signal.SIGCONT)

        self.hinder("slow")
        self.slowing = threading.Thread(target=alternate), is_over
        self.slowing[0].start()

    def speed_up(self):
        if self.slowing:
            self.slowing[1].set()
            self.slowing[0].join()
            self.slowing = None
        self.free("slow")

    def text(self):
        return self.output.read_text(errors="replace") if self.output and self.output.exists() else ""

    def path_of_model(self):
        return self.folder / f"worker_{self.number}" / f"model_{self.chaos.options['-x']:08d}.bin"

    def is_through(self):
        """Whether it has completed the run by itself."""
        return (self.process is not None and self.process.poll() == 0
                and self.path_of_model().exists())
