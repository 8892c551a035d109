"""dev/tools/export_tensorboard.py writes what logs say, by step and fragment, also while they grow and are cut."""
import json
import os
import subprocess
import sys
import time

import pytest

from conftest import ROOT

import export_tensorboard  # noqa: E402
from test_watch import first_line, steps, sync, write  # noqa: E402

EXPORT = ROOT / "dev/tools/export_tensorboard.py"


class Recorder:
    """Stands for the package: an event is a line of JSON."""

    @staticmethod
    def Event(**fields):
        return fields

    class Summary(dict):
        @staticmethod
        def Value(tag, simple_value):
            return tag, simple_value

    class EventFileWriter:
        files = 0

        def __init__(self, folder):
            os.makedirs(folder, exist_ok=True)
            Recorder.EventFileWriter.files += 1
            self.folder = folder
            self.file = open(f"{folder}/events.out.tfevents.{Recorder.EventFileWriter.files}", "w")

        def get_logdir(self):
            return self.folder

        def add_event(self, event):
            for tag, value in event["summary"]["value"]:
                self.file.write(json.dumps([tag, event["step"], value, event["wall_time"]]) + "\n")

        def flush(self):
            self.file.flush()

        def close(self):
            self.file.close()


def recorded(folder, tag):
    """[(step, value)]"""
    (path,) = folder.glob("events.out.tfevents.*")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(step, value) for name, step, value, _ in rows if name == tag]


@pytest.fixture
def run(tmp_path):
    """Two workers of two ranks."""
    for process in range(4):
        write(tmp_path / "run", process, [first_line(process, ranks=2),
                                          *steps(1, 20, skipped=False, mfu=None)])
    write(tmp_path / "run", 1, [{**sync(2, 10, 15, 0.25), "cosines": [0.5, None, -0.25], "delta_norm": None}])
    write(tmp_path / "run", 0, [{"type": "eval", "step": 20, "time": 10.0, "loss": 1.25},
                                {"type": "hellaswag", "step": 20, "time": 10.0, "accuracy": 0.25,
                                 "examples": 4},
                                {"type": "of later", "step": 20}])
    return tmp_path / "run"


def test_every_number_goes_to_its_process_step_and_fragment(run, tmp_path):
    export_tensorboard.RunExport(run, tmp_path / "out", Recorder).export()
    assert sorted(os.listdir(tmp_path / "out")) == ["worker0", "worker0_rank1", "worker1", "worker1_rank1"]
    first, second = tmp_path / "out/worker0", tmp_path / "out/worker0_rank1"
    assert recorded(first, "loss/train") == [(n, 1 + 10 / n) for n in range(1, 21)]
    assert recorded(first, "optimizer/skipped")[0] == (1, 0.0) and recorded(first, "speed/mfu") == []
    assert recorded(first, "loss/validation") == [(20, 1.25)]
    assert recorded(first, "hellaswag/accuracy") == [(20, 0.25)]
    assert recorded(second, "loss/train") == []
    assert recorded(second, "inner/bytes_sent")[-1] == (20, 20000)
    assert recorded(second, "sync_waited_seconds/fragment_2") == [(15, 0.25)]
    assert recorded(second, "sync_cosine/fragment_2") == [(15, 0.125)]
    assert recorded(second, "sync_delta_norm/fragment_2") == []


def test_events_are_at_the_time_of_the_clock_and_a_resume_moves_it(run, tmp_path):
    write(run, 2, [{**first_line(2, ranks=2), "type": "resume", "step": 20, "time": 10.0, "unix_time": 5000},
                   *steps(21, 22)])
    export_tensorboard.RunExport(run, tmp_path / "out", Recorder).export()
    (path,) = (tmp_path / "out/worker1").glob("*")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    times = {step: at for tag, step, _, at in rows if tag == "loss/train"}
    assert times[1] == 1000.5 and times[20] == 1010 and times[21] == 5000.5 and times[22] == 5001


def test_what_comes_is_added_and_a_log_that_is_cut_is_written_anew(run, tmp_path):
    export = export_tensorboard.RunExport(run, tmp_path / "out", Recorder)
    export.export()
    write(run, 0, steps(21, 30))
    assert export.export() == 10 and export.export() == 0
    assert recorded(tmp_path / "out/worker0", "loss/train") == [(n, 1 + 10 / n) for n in range(1, 31)]
    write(run, 0, [first_line(0, ranks=2), *steps(1, 10), *steps(11, 12, loss=9.0)], "w")
    export.export()
    expected = [(n, 1 + 10 / n) for n in range(1, 11)] + [(11, 9.0), (12, 9.0)]
    assert recorded(tmp_path / "out/worker0", "loss/train") == expected
    assert len(recorded(tmp_path / "out/worker1", "loss/train")) == 20
    (run / "metrics.jsonl").unlink()
    export.export()


def command(*words, **environment):
    return subprocess.run([sys.executable, EXPORT, *words], capture_output=True, text=True,
                          env={**os.environ, **environment})


def assert_is_one_line(result, part):
    assert result.returncode == 2 and result.stdout == "", result
    assert result.stderr.startswith("error: ") and part in result.stderr and result.stderr.count("\n") == 1


def test_a_mistake_is_one_line_and_nothing_is_written(run, tmp_path):
    package = tmp_path / "missing/tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not here')\n")
    without = command(run, "-o", tmp_path / "out", PYTHONPATH=str(package.parent))
    assert_is_one_line(without, "pip install tensorboard")
    assert_is_one_line(command(tmp_path, "-o", tmp_path / "out"), "no metrics.jsonl")
    assert_is_one_line(command(run), "--help")
    assert_is_one_line(command(run, "-o", tmp_path / "out", "--interval", "0"), "--interval 0")
    assert not (tmp_path / "out").exists()
    held = tmp_path / "out/run/worker0/events.out.tfevents.1"
    held.parent.mkdir(parents=True)
    held.touch()
    assert_is_one_line(command(run, "-o", tmp_path / "out"), "already holds events")


def test_tensorboard_reads_what_was_written_and_what_follows(run, tmp_path):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed in this Python")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder, tag):
        events = EventAccumulator(str(folder))
        events.Reload()
        there = tag in events.Tags()["scalars"]
        return [(event.step, event.value) for event in events.Scalars(tag)] if there else []

    result = command(run, "-o", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    losses = [(n, pytest.approx(1 + 10 / n)) for n in range(1, 21)]
    assert read(tmp_path / "out/run/worker1", "loss/train") == losses
    assert read(tmp_path / "out/run/worker0_rank1", "sync_waited_seconds/fragment_2") == [(15, 0.25)]
    words = [run, "-o", tmp_path / "follow", "--follow", "--interval", "0.05"]
    following = subprocess.Popen([sys.executable, EXPORT, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert "wrote" in following.stdout.readline()
        write(run, 0, steps(21, 25))
        end = time.monotonic() + 60
        while len(read(tmp_path / "follow/run/worker0", "loss/train")) < 25:
            assert time.monotonic() < end and following.poll() is None
    finally:
        following.kill()
        following.wait()
