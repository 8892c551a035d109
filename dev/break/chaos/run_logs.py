"""What the workers of a run have written about it, start by start, and what must be true of all of it.

Between any two logs, of any start of any worker: who has merged a sync stood on the same global parameters
(their hash) and counted the same workers.
"""
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "dev/tools"))
from metrics import GrowingLog  # noqa: E402

PLACES = ("run", "resume")  # the lines with which a start begins its log, or goes on with it


class Divergence(Exception):
    """Two workers hold different global parameters, or believe in different decisions."""


class StartLog:
    """The lines of one start of a process, whose log may begin with what an earlier start has left there."""

    def __init__(self, path, name):
        """name: of the start, for people. To be made just before the process starts."""
        self.log, self.name, self.begun = GrowingLog(path), name, int(time.time())
        self.begin_again()

    def begin_again(self):
        """A log that a resumed run has cut is read anew, up to where the run goes on with it."""
        self.beginning, self.is_own = self.log.beginnings, False
        self.zero = float("inf")  # time.monotonic() when the log's clock stood at 0, as close as can be seen

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
        """When it was written, by time.monotonic()."""
        return self.zero + line["time"]


class Agreement:
    """What the first who tells of a sync has said, and everybody after it must say as well."""

    def __init__(self):
        self.syncs, self.compared = {}, 0

    def add(self, rank, line, who):
        """line: of type sync   who: has written it, for people"""
        said = {name: line[name] for name in ("global_hash", "contributors", "decider")}
        key = rank, line["sync"]
        if key not in self.syncs:
            self.syncs[key] = said, who
            return
        other, other_name = self.syncs[key]
        self.compared += 1
        for name in said:
            if said[name] != other[name]:
                raise Divergence(f"sync {line['sync']} of rank {rank}: {name} is {said[name]} for {who} and "
                                 f"{other[name]} for {other_name}")
