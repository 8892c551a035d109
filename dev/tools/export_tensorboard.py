#!/usr/bin/env python3
"""Writes runs' logs as TensorBoard's event files, where the package `tensorboard` is installed.

    dev/tools/export_tensorboard.py RUN... -o DIR             the logs as they are now
    dev/tools/export_tensorboard.py RUN... -o DIR --follow    and all that is added, until Ctrl-C
    tensorboard --logdir DIR

Each process becomes a run in TensorBoard: DIR/RUN/worker0, DIR/RUN/worker0_rank1, ... Losses, the learning
rate and everything else that concerns a whole worker are in its rank 0's run; waits, bytes and exchanges (by
fragment) are in each rank's own. Steps are the trainer's; an exchange has the step that merged it. When a
resume cuts a log, its run is written anew.
"""
import sys
import time
from pathlib import Path

from metrics import GrowingLog, Parser, UserError, exit_status, labels

OF_WORKER = {  # field of a step: tag
    "loss": "loss/train", "lr": "optimizer/lr", "norm": "optimizer/norm",
    "loss_zscore": "optimizer/loss_zscore", "norm_zscore": "optimizer/norm_zscore",
    "skipped": "optimizer/skipped",
    "tokens": "speed/tokens",
    "tokens_per_second": "speed/tokens_per_second", "mfu": "speed/mfu"}
OF_PROCESS = {"inner_bytes_sent": "inner/bytes_sent", "inner_bytes_received": "inner/bytes_received"}
OF_SYNC = ["waited_seconds", "wire_seconds", "bytes_sent", "bytes_received", "staleness", "delta_norm",
           "mean_norm", "quantization_error"]


def scalars_of(line, rank):
    """(step, {tag: value}) for a line of a log; values may be None."""
    kind = line["type"]
    if kind == "step":
        tags = {**(OF_WORKER if rank == 0 else {}), **OF_PROCESS}
        return line["step"], {tag: line.get(field) for field, tag in tags.items()}
    if kind == "eval" and rank == 0:
        return line["step"], {"loss/validation": line["loss"]}
    if kind == "hellaswag" and rank == 0:
        return line["step"], {"hellaswag/accuracy": line["accuracy"]}
    if kind == "checkpoint":
        return line["step"], {"checkpoint/paused_seconds": line["paused_seconds"]}
    if kind == "sync":
        values = {f"sync_{field}/fragment_{line['fragment']}": line.get(field) for field in OF_SYNC}
        cosines = [one for one in line.get("cosines") or line.get("mean_cosines") or [] if one is not None]
        if cosines:
            values[f"sync_cosine/fragment_{line['fragment']}"] = sum(cosines) / len(cosines)
        return line["apply_step"], values
    return 0, {}


class ProcessExport:
    """One log and the events that have been written for it."""

    def __init__(self, path, folder, tensorboard):
        self.log, self.folder, self.tensorboard = GrowingLog(path), folder, tensorboard
        self._begin()

    def _begin(self):
        self.beginning = self.log.beginnings
        self.writer = self.place = self.started = None

    def export(self):
        """Writes new lines. Returns their number."""
        count = 0
        while True:
            lines = self.log.read()
            if self.log.beginnings != self.beginning:
                self._remove()
            for line in lines:
                try:
                    self._take(line)
                except (KeyError, TypeError, ValueError) as error:
                    raise UserError(f"{self.log.path} has a line of type {line['type']} that is damaged "
                                    f"({error!r}): give the folder of a run") from error
            count += len(lines)
            if self.log.is_read:
                break
        if count:
            self.writer.flush()
        return count

    def _take(self, line):
        if line["type"] in ("run", "resume"):
            self._take_place(line)
        if self.place is None:
            raise UserError(f"{self.log.path} does not begin with its run: give the folder of a run")
        self._write(line)

    def _take_place(self, line):
        self.place = line
        if "unix_time" in line:
            self.started = line["unix_time"] - line["time"]
        elif self.started is None:  # in version 1: approximately
            self.started = self.log.written_at
        if self.writer is None:
            self.writer = self.tensorboard.EventFileWriter(str(self.folder_of(line)))

    def folder_of(self, place):
        rank = f"_rank{place['rank']}" if place["rank"] else ""
        return self.folder / f"worker{place['worker']}{rank}"

    def _write(self, line):
        step, scalars = scalars_of(line, self.place["rank"])
        values = [self.tensorboard.Summary.Value(tag=tag, simple_value=float(value))
                  for tag, value in scalars.items() if value is not None]
        if values:
            self.writer.add_event(self.tensorboard.Event(wall_time=self.started + line["time"], step=step,
                                                         summary=self.tensorboard.Summary(value=values)))

    def _remove(self):
        """Removes old events: TensorBoard would show steps that were cut beside the repeated ones."""
        if self.writer is not None:
            folder = Path(self.writer.get_logdir())
            self.writer.close()
            for path in folder.glob("events.out.tfevents.*"):
                path.unlink()
        self._begin()

    def close(self):
        if self.writer is not None:
            self.writer.close()


class RunExport:
    def __init__(self, run, folder, tensorboard):
        self.run, self.folder, self.tensorboard = run, folder, tensorboard
        self.processes = {}

    def export(self):
        for path in sorted(self.run.glob("metrics*.jsonl")):
            if path not in self.processes:
                self.processes[path] = ProcessExport(path, self.folder, self.tensorboard)
        return sum(process.export() for process in self.processes.values())


def import_tensorboard():
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import event_file_writer
    except ImportError as error:
        raise UserError(f"the package tensorboard is missing ({error}): install it with {sys.executable} -m "
                        "pip install tensorboard") from error

    class Tensorboard:
        EventFileWriter = event_file_writer.EventFileWriter
        Event, Summary = event_pb2.Event, summary_pb2.Summary

    return Tensorboard


def check(runs, folders, follow):
    """Runs before anything is written."""
    for run, folder in zip(runs, folders):
        if not follow and not (run / "metrics.jsonl").exists() and not list(run.glob("metrics_*.jsonl")):
            raise UserError(f"{run} has no metrics.jsonl: give the folder of a run, or --follow one that is "
                            "to come")
        if list(folder.glob("worker*/events.out.tfevents.*")):
            raise UserError(f"{folder} already holds events: give another -o, or remove it")


def main(words):
    parser = Parser(description="Writes the logs of runs as TensorBoard's event files.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (its -o)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--follow", action="store_true", help="continue until Ctrl-C with new lines")
    parser.add_argument("--interval", type=float, default=5, metavar="SECONDS", help="between readings (5)")
    arguments = parser.parse_args(words)
    if not 0.05 <= arguments.interval <= 3600:
        raise UserError(f"--interval {arguments.interval:g}: give 0.05 to 3600 seconds")
    folders = [arguments.output / label for label in labels(arguments.runs)]
    check(arguments.runs, folders, arguments.follow)
    tensorboard = import_tensorboard()
    exports = [RunExport(run, folder, tensorboard) for run, folder in zip(arguments.runs, folders)]
    try:
        count = sum(export.export() for export in exports)
        print(f"wrote {count} lines into {arguments.output}", flush=True)
        while arguments.follow:
            time.sleep(arguments.interval)
            for export in exports:
                export.export()
    except OSError as error:
        raise UserError(f"cannot write {arguments.output} ({error.strerror}): give another -o") from error
    finally:
        for export in exports:
            for process in export.processes.values():
                process.close()


if __name__ == "__main__":
    sys.exit(exit_status(main))
