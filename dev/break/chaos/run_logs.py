"""The logs of a run's workers, start by start, and what must be true of all of them.

In all logs, of any start of any worker, a sync has the same global parameters (by their hash) and counts the same
workers.
"""
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "dev/tools"))
from metrics import GrowingLog  # noqa: E402

PLACES = ("run", "resume")  # types of the line with which a start begins a log or continues one


class Divergence(Exception):
    """Two workers have different global parameters, or different decisions."""


class StartLog:
    """The lines of one start of a process, in a log that may begin with lines of an earlier start."""

    def __init__(self, path, name):
        """name: of the start, for messages. Create this just before the process starts."""
        self.log, self.name, self.begun = GrowingLog(path), name, int(time.time())
        self.begin_again()

    def begin_again(self):
        """A log that a resumed run has cut is read anew, and skipped up to the line where the run continues it."""
        self.beginning, self.is_own = self.log.beginnings, False
        self.zero = float("inf")  # time.monotonic() when the log's clock stood at 0: the best estimate so far

    def read(self):
        """The lines that have come since the last call."""
        lines = self.log.read()
        if self.log.beginnings != self.beginning:
            self.begin_again()
        now, own = time.monotonic(), []
        for line in lines:
            self.is_own = self.is_own or (line["type"] in PLACES and line["unix_time"] >= self.begun)
            if self.is_own:
                self.zero = min(self.zero, now - line["time"])
                own.append(line)
        return own

    def at(self, line):
        """When the line was written, by time.monotonic()."""
        return self.zero + line["time"]


class Agreement:
    """What the first log says of each sync. All later logs must say the same."""

    def __init__(self):
        self.syncs, self.compared = {}, 0

    def add(self, rank, line, writer):
        """line: of type sync   writer: the start that wrote it, for messages"""
        said = {name: line[name] for name in ("global_hash", "contributors", "decider")}
        key = rank, line["sync"]
        if key not in self.syncs:
            self.syncs[key] = said, writer
            return
        other, other_name = self.syncs[key]
        self.compared += 1
        for name in said:
            if said[name] != other[name]:
                raise Divergence(f"sync {line['sync']} of rank {rank}: {name} is {said[name]} for {writer} and "
                                 f"{other[name]} for {other_name}")
