"""Reads metrics.jsonl, whose lines dev/tools/metrics.md describes, of finished and of running runs.

Unknown types and fields are passed through; an unknown version is refused.
"""
import argparse
import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

VERSIONS = (1, 2)


class UserError(Exception):
    """A mistake of the user. The message names the mistake and the remedy."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}: see --help")


def exit_status(work, trouble="cannot be used"):
    """Calls work(arguments). A user's mistake gives one line and status 2. trouble: what is wrong with a file."""
    try:
        work(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has left: head, less
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error.filename or 'a file'} {trouble} ({error.strerror}): check the path, "
              "permissions and free space", file=sys.stderr)
        return 2
    return 0


def require(package):
    """Ends the program with one line if a Python package that it is about to import is missing."""
    try:
        importlib.import_module(package)
    except ImportError:
        print(f"error: {package} is missing: run make setup, then .venv/bin/python {sys.argv[0]}", file=sys.stderr)
        sys.exit(2)


def log_name(process):
    """Names of the processes 0 to M R - 1; worker 0's ranks come first."""
    return "metrics.jsonl" if process == 0 else f"metrics_{process:05d}.jsonl"


def labels(folders):
    """The shortest names that differ: x and y for a/x and b/y, but a/log and b/log for a/log and b/log."""
    paths = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-count:]).lstrip("/") for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def parse(line):
    """The fields of a line. ValueError if it is not a line of metrics."""
    fields = json.loads(line)
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise ValueError("no type")
    return fields


def tokens_of_step(line):
    """Tokens that a worker trained on in one step. (The counter `tokens` continues from another worker's where a resume
    adds workers, and begins at 0 again where an elastic worker returns without a checkpoint.)"""
    return round(line["tokens_per_second"] * line["seconds"])


def check_version(fields, path):
    """Checks the version in a run's first line."""
    if fields.get("version") not in VERSIONS:
        raise UserError(f"{path} is of version {fields.get('version')}, but this program reads "
                        f"{' and '.join(map(str, VERSIONS))}: use the dev/ folder of its trainer")


# -------------------------------------------------------------------------------------------------- whole runs

@dataclass
class ProcessLog:
    """The lines of one process by type."""
    worker: int
    rank: int
    steps: list
    evals: list
    syncs: list
    end: dict
    hellaswags: list


@dataclass
class Run:
    name: str
    workers: int
    ranks: int
    parameters: int
    processes: list  # a ProcessLog each: worker 0's ranks, worker 1's ranks, ...
    logs: list       # read_lines() of these, and of processes that it had before it was resumed with fewer
    is_finished: bool = True

    @property
    def worker_numbers(self):
        """Those that have a log: of elastic workers some may not."""
        return sorted({p.worker for p in self.processes})

    def of_worker(self, worker):
        return [p for p in self.processes if p.worker == worker]


def read_lines(path, unfinished=False):
    """{type: lines} of a process's log. `end` is empty if the run has not ended, which only `unfinished` allows."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give the folder of a run") from error
    text = text[:text.rfind(b"\n") + 1]  # the last line may be incomplete
    lines = {"run": [], "step": [], "eval": [], "hellaswag": [], "sync": [], "resume": [], "end": []}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fields = parse(line)
        except ValueError as error:
            raise UserError(f"{path} line {number} is not a line of metrics: give a run's folder") from error
        lines.setdefault(fields["type"], []).append(fields)
    if len(lines["run"]) != 1:
        raise UserError(f"{path} is not the log of one run: give the folder of a run")
    check_version(lines["run"][0], path)
    if not lines["step"]:
        raise UserError(f"{path} has no step yet: wait for one, or start the run again")
    if not unfinished and not lines["end"]:
        raise UserError(f"the run in {path} did not finish: wait for it, or start it again")
    return lines


def read_if_good(path):
    try:
        return read_lines(path, unfinished=True)
    except UserError as error:
        print(f"warning: left out: {error}", file=sys.stderr)
        return None


def first_good_log(folder):
    """read_lines() of the lowest process whose log has a step: of elastic workers any may be missing."""
    mistakes = []
    for path in sorted(folder.glob("metrics*.jsonl")) or [folder / log_name(0)]:
        try:
            return read_lines(path, unfinished=True)
        except UserError as error:
            mistakes.append(error)
    raise mistakes[0]


def read_logs(folder, unfinished=False):
    """read_lines() of each process that the run had at its end. Elastic workers that never came, or that did not
    finish where others did, are left out with a warning."""
    first = first_good_log(folder)
    run = (first["run"] + first["resume"])[-1]
    paths = [folder / log_name(process) for process in range(run["workers"] * run["ranks"])]
    if run.get("options", {}).get("outer-transport") != "store":
        if missing := [path for path in paths if not path.exists()]:
            raise UserError(f"{missing[0]} is missing: copy the logs of all processes (metrics_*.jsonl) from "
                            "their sites into one folder")
        return [read_lines(path, unfinished) for path in paths]
    logs = {path: lines for path in paths if (lines := read_if_good(path))}
    finished = {path: lines for path, lines in logs.items() if lines["end"]}
    if unfinished and not finished:
        return list(logs.values())
    for path in logs.keys() - finished.keys():
        print(f"warning: left out: {path}, which did not finish", file=sys.stderr)
    if not finished:
        raise UserError(f"the run in {folder} did not finish: wait for it, or start it again")
    return list(finished.values())


def former_logs(folder, processes):
    """read_lines() of the processes that a run had before it was resumed with fewer."""
    numbers = range(processes, processes + len(list(folder.glob("metrics_*.jsonl"))))
    return [lines for path in map(folder.joinpath, map(log_name, numbers))
            if path.exists() and (lines := read_if_good(path))]


def end_so_far(lines):
    """What an `end` line would say, of a run that goes on or was stopped."""
    return {"train_seconds": sum(line["seconds"] for line in lines["step"]),
            "inner_bytes_sent": lines["step"][-1]["inner_bytes_sent"],
            "outer_bytes_sent": sum(line["bytes_sent"] for line in lines["sync"]),
            "waited_seconds": sum(line["waited_seconds"] for line in lines["sync"])}


def read_run(folder, unfinished=False):
    """The run in a folder, with all processes that it had when it ended.   unfinished: it need not have ended"""
    logs = read_logs(folder, unfinished)
    last = (logs[0]["run"] + logs[0]["resume"])[-1]
    processes = []
    for lines in logs:
        place = (lines["run"] + lines["resume"])[-1]
        processes.append(ProcessLog(place["worker"], place["rank"], lines["step"], lines["eval"], lines["sync"],
                                    (lines["end"] or [end_so_far(lines)])[0], lines["hellaswag"]))
    is_finished = all(lines["end"] for lines in logs)
    former = former_logs(folder, last["workers"] * last["ranks"])
    return Run(folder.resolve().name, last["workers"], last["ranks"], logs[0]["run"][0]["parameters"], processes,
               [*logs, *former], is_finished)


def read_runs(folders):
    """The runs in these folders, finished or not, under names that tell them apart."""
    runs = [read_run(folder, unfinished=True) for folder in folders]
    for run, name in zip(runs, labels(folders)):
        run.name = name if run.is_finished else f"{name} (unfinished)"
    return runs


# ----------------------------------------------------------------------------------------------- growing logs

class GrowingLog:
    """The lines of a log while it is written, in order and once each; an incomplete line is read later.

    A resumed run cuts its log back to its checkpoint, and a copy (rsync) may be a new file each time. So the
    bytes before the current place are compared again. If they have changed, the log is read from its
    beginning, and `beginnings` counts this.
    """
    LOOKED_AT = 256  # bytes

    def __init__(self, path, tail=None):
        """tail: bytes at the log's end whose steps are of interest. Earlier steps, which make up most of a
        long log, are left out; all other lines are read."""
        self.path, self.tail = Path(path), tail
        self.beginnings = 0
        self._begin()

    def _begin(self):
        self.offset, self.before, self.first_step_at = 0, b"", 0
        self.size = 0           # the file's, when it was last read
        self.written_at = None  # by the clock of the file's machine
        self.is_read = False    # the log was read up to its end, except for an incomplete line
        self.unreadable = 0     # lines that are not metrics

    def _begin_again(self):
        self._begin()
        self.beginnings += 1

    def read(self, most=1 << 24):
        """The next lines, from at most `most` bytes, which is longer than any line."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset - len(self.before))
                if file.read(len(self.before)) != self.before:
                    self._begin_again()
                    file.seek(0)
                data = file.read(most)
                self.size = file.seek(0, 2)
                self.written_at = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            if self.offset > 0:
                self._begin_again()
            self.is_read = True
            return []
        except OSError as error:
            raise UserError(f"cannot read {self.path} ({error.strerror}): give a run's folder") from error
        if self.offset == 0 and self.tail is not None:
            self.first_step_at = self.size - self.tail
        self.is_read = len(data) < most
        data = data[:data.rfind(b"\n") + 1]
        lines = list(self._parsed(data))
        self.offset += len(data)
        self.before = (self.before + data)[-self.LOOKED_AT:]
        return lines

    def _parsed(self, data):
        begin = self.offset
        for line in data.split(b"\n")[:-1]:
            is_old, begin = begin < self.first_step_at, begin + len(line) + 1
            if is_old and line.startswith(b'{"type":"step"'):
                continue
            try:
                fields = parse(line)
            except ValueError:
                self.unreadable += 1
                continue
            if fields["type"] == "run":
                check_version(fields, self.path)
            yield fields
