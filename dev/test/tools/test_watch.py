"""dev/tools/watch.py: it shows what the logs say, whatever becomes of them, and leaves the terminal clean."""
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from conftest import ROOT, TRAINER, take_signals

import watch  # noqa: E402
from metrics import UserError, log_name  # noqa: E402

WATCH = ROOT / "dev/tools/watch.py"
OPTIONS = {"inner-steps": "30", "overlap": "5", "outer-optimizer": "nesterov", "max-steps": "1000"}


def first_line(process, workers=2, ranks=1, version=2, **more):
    line = {"type": "run", "version": version, "time": 0.0, "unix_time": 1000, "worker": process // ranks,
            "rank": process % ranks, "workers": workers, "ranks": ranks, "parameters": 10, "steps": 1000,
            "fragment_offsets": [0, 10, 20], "options": OPTIONS, **more}
    return line if version > 1 else {name: line[name] for name in line.keys() - {"steps", "fragment_offsets"}}


def steps(first, last, seconds=0.5, **more):
    return [{"type": "step", "step": n, "time": n * seconds, "loss": 1 + 10 / n, "lr": 0.1, "norm": 1.0,
             "seconds": seconds, "tokens": 100 * n, "tokens_per_second": 100 / seconds,
             "inner_bytes_sent": 1000 * n, "inner_bytes_received": 2000 * n, **more}
            for n in range(first, last + 1)]


def sync(fragment, send, apply, waited=0.0, seconds=0.5):
    return {"type": "sync", "sync": 0, "fragment": fragment, "send_step": send, "apply_step": apply,
            "time": apply * seconds, "bytes_sent": 5000, "bytes_received": 7000, "wire_seconds": 0.1,
            "waited_seconds": waited}


def write(folder, process, rows, mode="a"):
    folder.mkdir(exist_ok=True)
    with (folder / log_name(process)).open(mode) as file:
        file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def view_of(*folders):
    run = watch.RunView(list(folders))
    run.read()
    return run


def lines_of(run, width=80, height=24, now=None):
    now = now or max((view.grown_at or 0 for view in run.processes.values()), default=0)
    return [line for line, _ in watch.picture(run, width, height, now=now)]


def row_of(run, name, **size):
    (line,) = [line for line in lines_of(run, **size) if line.startswith(name + " ")]
    return line.split()


def once(*words, **environment):
    return subprocess.run([sys.executable, WATCH, "--once", *words], capture_output=True, text=True,
                          env={**os.environ, **environment})


@pytest.fixture
def folder(tmp_path):
    """Two workers after 200 steps of half a second, with three fragments and tau = 5."""
    for process in (0, 1):
        write(tmp_path / "run", process, [first_line(process), *steps(1, 200)])
        write(tmp_path / "run", process, [sync(1, 160, 165), sync(2, 170, 175, 3.0), sync(0, 180, 185, 1.5),
                                          sync(1, 190, 195, 1.5 * process)])
    return tmp_path / "run"


def test_the_picture_holds_what_the_logs_say(folder):
    write(folder, 0, [{"type": "eval", "step": 200, "time": 100, "loss": 1.25},
                      {"type": "hellaswag", "step": 200, "time": 100, "accuracy": 0.2945, "examples": 10},
                      {"type": "checkpoint", "step": 150, "time": 100, "paused_seconds": 0.1}])
    (folder / "DONE_00000100").touch()
    result = once(folder, COLUMNS="80")
    assert result.returncode == 0 and result.stderr == ""
    text = result.stdout
    # 400 tokens/s in all; 800 steps of half a second are left
    for words in ["step 200 of 1,000 (20.0%)", "40,000 tokens", "400 tokens/s", "6:40 left",
                  "11.000 to 1.050 in 200 steps", "validation 1.2500 at 200", "HellaSwag 0.2945 at 200",
                  "whole checkpoint 100"]:
        assert words in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("0.0", "1.0"))]
    assert [row[:9] for row in rows] == [  # waits of 4.5 and 6 s in the 60.5 s that 121 steps took
        ["0.0", "200", "1.0500", "200", "2:0/5", "220k", "428k", "7.4%", "150"],
        ["1.0", "200", "1.0500", "200", "2:0/5", "220k", "428k", "9.9%", "-"]]


def test_rates_and_waits_are_of_the_last_minute_and_the_slowest_worker_says_how_long_it_takes(tmp_path):
    for process, seconds in [(0, 0.5), (1, 0.75)]:
        rows = steps(1, 100, 4.0)  # 400 s, with long waits
        later = [{**row, "time": 400 + row["time"] - 100 * seconds} for row in steps(101, 300, seconds)]
        write(tmp_path, process, [first_line(process), *rows, sync(0, 30, 35, 100.0, 4.0), *later,
                                  {**sync(0, 270, 275, 6.0), "time": 400 + 175 * seconds}])
    run = view_of(tmp_path)
    assert [row_of(run, name)[3] for name in ("0.0", "1.0")] == ["200", "133"]
    assert [row_of(run, name)[-3] for name in ("0.0", "1.0")] == ["9.9%", "9.9%"]
    assert "8:45 left   333 tokens/s" in " ".join(lines_of(run))  # 700 steps of 0.75 s


def test_lines_fit_into_any_terminal(folder):
    write(folder, 0, steps(10**7, 10**7 + 1, loss_zscore=1.0))
    for width, height in [(80, 24), (40, 8), (200, 50), (10, 3), (1, 1)]:
        lines = lines_of(view_of(folder), width, height)
        assert len(lines) <= height and all(len(line) <= width for line in lines)
    assert all(len(line) == 80 for line in lines_of(view_of(folder))[-3:])
    for width, heads in [(80, 10), (78, 9), (70, 8), (50, 6), (24, 3)]:
        (head,) = [line for line in lines_of(view_of(folder), width) if line.startswith("proc ")]
        assert len(head.replace("in flight", "in_flight").split()) == heads and head.endswith("state")
    text = once(folder, COLUMNS="80", PYTHONIOENCODING="ascii").stdout
    assert "loss #" in text and text.isascii()


def test_what_is_in_flight_is_what_was_sent_and_not_merged(folder):
    run = view_of(folder)
    for rows, shown in [(steps(201, 203), "2:3/5"), (steps(204, 205) + [sync(2, 200, 205)], "-"),
                        (steps(206, 212), "0:2/5"), (steps(213, 224), "0:14/5 1:4/5")]:
        write(folder, 0, rows)
        run.read()
        assert watch.in_flight_text(run.processes[0], 20) == shown
    assert watch.in_flight_text(run.processes[0], 10) == "0:14/5 +1"
    assert watch.in_flight_text(run.processes[0], 5) == "2"


@pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")
@pytest.mark.parametrize("version", [1, 2])
def test_what_is_in_flight_is_so_in_every_step_of_a_real_run_that_is_resumed(train, tmp_path, version):
    options = {"--workers": 2, "-H": 7, "--fragment-layers": 1, "--overlap": 5, "-n": 16, "-x": 32}
    train("run", options)
    run = train("run", {**options, "-x": 48, "-y": 1})
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    if version == 1:
        rows = [{name: row[name] for name in row if name != "fragment_offsets"} for row in rows]
    syncs = [(row["fragment"], row["send_step"], row["apply_step"]) for row in rows if row["type"] == "sync"]
    assert [row["step"] for row in rows if row["type"] == "resume"] == [32] and len(syncs) > 15
    seen = 0
    for at, row in enumerate(rows[:-1]):
        if row["type"] != "step" or row["step"] == 48:  # in the last one what is in flight is merged
            continue
        step = row["step"]
        until = [one for one in rows[at + 1:] if one["type"] == "step" or one.get("send_step", step) > step]
        write(tmp_path / "cut", 0, rows[:rows.index(until[0])] if until else rows, "w")
        flying = view_of(tmp_path / "cut").processes[0].in_flight()
        expected = sorted((fragment, step - send) for fragment, send, apply in syncs if send <= step < apply)
        if version == 2 or step >= 16:  # every fragment has been merged by then
            assert flying == expected, step
            seen += len(expected)
    assert seen > 30


def test_after_a_resume_with_other_fragments_only_new_sends_count(folder):
    resumed = {**first_line(0), "type": "resume", "step": 200, "fragment_offsets": [5, 0]}
    write(folder, 0, [resumed, *steps(201, 203)])
    run = view_of(folder)
    assert run.processes[0].in_flight() == []
    write(folder, 0, steps(204, 211))
    run.read()
    assert run.processes[0].in_flight() == [(1, 1)]


def test_a_run_without_an_exchange_has_none_in_flight_and_no_waits(tmp_path):
    alone = first_line(0, 1, options={**OPTIONS, "outer-optimizer": "none"}, fragment_offsets=None)
    write(tmp_path, 0, [alone, *steps(1, 50)])
    assert row_of(view_of(tmp_path), "0.0")[4:8] == ["-", "50.0k", "100k", "-"]


def test_a_process_that_is_behind_or_silent_is_late(folder):
    write(folder, 1, steps(201, 204))
    run = view_of(folder)
    assert row_of(run, "0.0")[-1] == "!-4" and row_of(run, "1.0")[-1] == "ok"
    now = max(view.grown_at for view in run.processes.values())
    for view in run.processes.values():
        view.grown_at = now
    assert [line[-9:] for line in lines_of(run, now=now + 40)[-2:]] == [" !-4 40 s", "    !40 s"]
    assert [line[-9:] for line in lines_of(run, now=now + 4)[-2:]] == ["      !-4", "       ok"]
    styles = dict((line[:3], style) for line, style in watch.picture(run, 80, 24, now=now))
    assert styles["0.0"] == "late" and styles["1.0"] == ""
    write(folder, 0, [{"type": "end", "step": 200, "time": 100}])
    run.read()
    assert row_of(run, "0.0")[-1] == "done"


def test_late_processes_come_first_if_there_is_not_room_for_all(tmp_path):
    for process in range(40):
        write(tmp_path, process, [first_line(process, 20, 2), *steps(1, 90 if process == 33 else 100)])
    lines = lines_of(view_of(tmp_path), 80, 16)
    assert len(lines) <= 16 and lines[-1] == "30 more processes"
    table = lines[[line.startswith("proc ") for line in lines].index(True) + 1:]
    assert table[0].startswith("16.1 ") and table[1].startswith("0.0 ")


def test_a_run_that_has_not_begun_is_waited_for_and_its_sites_come_one_by_one(tmp_path):
    sites = [tmp_path / "a", tmp_path / "b"]
    run = view_of(*sites)
    assert "no such folder yet" in lines_of(run, 200)[1]
    sites[0].mkdir()
    sites[1].mkdir()
    assert "no run has begun" in lines_of(run, 200)[1]
    write(sites[1], 1, [first_line(1), *steps(1, 20)])
    run.read()
    assert row_of(run, "0.0")[-2:] == ["no", "log"] and row_of(run, "1.0")[1] == "20"
    assert "of 1 of 2 workers" in " ".join(lines_of(run, 200))
    write(sites[0], 0, [first_line(0)])
    run.read()
    assert row_of(run, "0.0")[-1] == "starts"
    write(sites[0], 0, steps(1, 25))
    run.read()
    assert row_of(run, "0.0")[1] == "25"
    write(sites[0], 1, [first_line(1)])
    with pytest.raises(UserError, match="same process"):
        run.read()


def test_a_log_that_is_cut_and_goes_on_is_shown_as_it_is(folder):
    run = view_of(folder)
    path = folder / "metrics.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in kept if row.get("step", row.get("apply_step", 0)) <= 180]
    write(folder, 0, [*kept, {**first_line(0), "type": "resume", "step": 180}, *steps(181, 182)], "w")
    with path.open("a") as file:
        file.write('{"type":"step","step":183,"ti')
    run.read()
    # 175 is merged; 180 was sent, and its mean comes in 185
    assert row_of(run, "0.0")[1] == "182" and row_of(run, "0.0")[4:7] == ["0:2/5", "192k", "378k"]
    path.unlink()
    run.read()
    assert row_of(run, "0.0")[-1] == "starts"


def test_lines_that_cannot_be_read_are_counted_and_the_others_shown(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\0\0\0\n{"type":"sync","fragment":1}\n{"type":"step","step":300}\n{"type":"of later"}\n')
    run = view_of(folder)
    assert row_of(run, "0.0")[1] == "200" and "3 unreadable lines" in " ".join(lines_of(run))


def test_a_log_of_weeks_is_read_from_its_end_with_all_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "TAIL", 100_000)
    monkeypatch.setattr(watch, "KEPT_STEPS", 300)
    monkeypatch.setattr(watch, "READ_AT_ONCE", 200_000)
    write(tmp_path, 0, [first_line(0, 1, fragment_offsets=[20])])
    for begin in range(0, 6000, 30):
        write(tmp_path, 0, [*steps(begin + 1, begin + 30), sync(0, begin + 20, begin + 30)])
    run = view_of(tmp_path)
    assert "reading the logs: 1" in " ".join(lines_of(run)) and run.processes[0].steps == watch.deque()
    while not run.processes[0].log.is_read:
        run.read()
    assert len(run.processes[0].steps) == 300 and row_of(run, "0.0")[1] == "6000"
    assert row_of(run, "0.0")[5] == watch.short(6000 * 1000 + 200 * 5000)


@pytest.mark.parametrize("seconds, text", [(0.4, "0 s"), (59, "59 s"), (60, "1:00"), (3725, "1:02:05"),
                                           (200000, "2 d 7 h"), (None, "?")])
def test_durations(seconds, text):
    assert watch.duration(seconds) == text


@pytest.mark.parametrize("count, text", [(0, "0"), (999, "999"), (1000, "1.00k"), (9999, "10.0k"),
                                         (65_640_000, "65.6M"), (999_600_000, "1.00G"),
                                         (123_456_789, "123M")])
def test_counts(count, text):
    assert watch.short(count) == text


@pytest.mark.parametrize("words, part", [(["run"], "--once"), (["--once", "file"], "not a folder"),
                                         (["--once", "--interval", "0", "run"], "--interval 0"),
                                         (["--once", "--interval", "x", "run"], "--help"), ([], "--help")])
def test_a_mistake_is_one_line(words, part, tmp_path):
    (tmp_path / "file").touch()
    result = subprocess.run([sys.executable, WATCH, *words], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and part in result.stderr and result.stderr.count("\n") == 1


class Terminal:
    """watch.py on a pseudo-terminal of 24 x 80."""

    def __init__(self, *words):
        self.master, slave = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(slave)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}

        def prepare():
            take_signals()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen([sys.executable, WATCH, "--interval", "0.05", *words], stdin=slave,
                                        stdout=slave, stderr=slave, env=environment, start_new_session=True,
                                        preexec_fn=prepare)
        self.slave, self.text = slave, ""

    def resize(self, lines, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, seconds=0.1):
        while select.select([self.master], [], [], seconds)[0]:
            self.text += os.read(self.master, 65536).decode(errors="replace")
            seconds = 0

    def wait_for(self, text, seconds=30):
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end and self.process.poll() is None, self.text[-2000:]
            self.read()

    def picture(self):
        """The newest whole one."""
        return self.text.split("\x1b[H")[-2]

    def end(self):
        """Exit status, when the terminal is as it was."""
        status = self.process.wait(timeout=30)
        self.read()
        assert self.text.endswith("\x1b[?25h\x1b[?1049l") or "error: " in self.text.split("\x1b[?1049l")[-1]
        assert termios.tcgetattr(self.slave) == self.before
        return status


@pytest.fixture
def terminal():
    started = []

    def start(*words):
        started.append(Terminal(*words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        os.close(one.master)
        os.close(one.slave)


def test_it_follows_a_run_and_the_size_of_the_terminal_and_ends_on_q(tmp_path, terminal):
    shown = terminal(tmp_path / "run")
    shown.wait_for("no such folder yet")
    for process in (0, 1):
        write(tmp_path / "run", process, [first_line(process), *steps(1, 20)])
    shown.wait_for("step 20 of 1,000")
    for process in (0, 1):
        write(tmp_path / "run", process, steps(21, 40))
    shown.wait_for("step 40 of 1,000")
    shown.text = ""
    shown.resize(24, 50)
    shown.wait_for("in flight  wait     state")  # what there is room for
    os.write(shown.master, b"q")
    assert shown.end() == 0


def test_ctrl_z_gives_the_terminal_back_until_it_is_continued(tmp_path, terminal):
    shown = terminal(tmp_path)
    shown.wait_for("no run has begun")
    os.write(shown.master, b"\x1a")
    assert os.WIFSTOPPED(os.waitpid(shown.process.pid, os.WUNTRACED)[1])
    shown.read()
    assert shown.text.endswith("\x1b[?25h\x1b[?1049l")
    assert termios.tcgetattr(shown.slave) == shown.before
    shown.text = ""
    shown.process.send_signal(signal.SIGCONT)
    shown.wait_for("no run has begun")
    assert shown.text.startswith("\x1b[?1049h\x1b[?25l")
    os.write(shown.master, b"q")
    assert shown.end() == 0


@pytest.mark.parametrize("how, status", [("Ctrl-C", 130), (signal.SIGTERM, 143), ("refused", 2)])
def test_whatever_ends_it_leaves_the_terminal_clean(tmp_path, terminal, how, status):
    shown = terminal(tmp_path)
    shown.wait_for("no run has begun")
    if how == "Ctrl-C":
        os.write(shown.master, b"\x03")
    elif how == "refused":
        write(tmp_path, 0, [first_line(0, version=99)])
    else:
        shown.process.send_signal(how)
    assert shown.end() == status
    assert ("error: " in shown.text) == (how == "refused")


# -----------------------------------------------------------------------------------------------------------
# Elastic workers

STORE = {**OPTIONS, "outer-transport": "store"}


def event(kind, worker, text, after, sync=None):
    """after: seconds since the run's first line"""
    return {"type": "event", "step": 1, "time": after, "unix_time": 1000 + after, "kind": kind, "sync": sync,
            "worker": worker, "text": text}


@pytest.fixture
def elastic(tmp_path):
    """Four workers after 100 steps of half a second."""
    for process in range(4):
        write(tmp_path, process, [first_line(process, 4, options=STORE), *steps(1, 100)])
    return tmp_path


def states(run):
    return [row_of(run, f"{worker}.0")[-1] for worker in range(4)]


@pytest.mark.parametrize("kind, word, end", [
    ("late", "!late", "back"), ("gone", "!gone", "joined"), ("gone", "!gone", "starts"),
    ("needs_snapshot", "!catch-up", "takes_snapshot"), ("store_lost", None, "store_back"),
    ("too_few", None, "counted"), ("stops", "!stopped", "starts"), ("late", "!late", "counted")])
def test_a_worker_that_is_late_gone_or_catching_up_is_shown_until_that_is_over(elastic, kind, word, end):
    words = {"store_lost": "no store", "too_few": "too few"}
    write(elastic, 1, [event(kind, 2, "a change", 40)])
    run = view_of(elastic)
    (line,) = [line for line in lines_of(run) if line.startswith("2.0 ")]
    assert line.endswith(word or "!" + words[kind])
    assert [state for worker, state in enumerate(states(run)) if worker != 2] == ["ok"] * 3
    assert dict((line[:3], style) for line, style in watch.picture(run, 80, 24, now=0))["2.0"] == "late"
    last = ({**sync(0, 90, 95), "time": 45.0, "counted": True} if end == "counted"
            else event(end, 2, "over", 45))
    write(elastic, 2, [last])
    run.read()
    assert states(run) == ["ok"] * 4


def test_a_worker_that_was_counted_before_it_was_missed_is_missed(elastic):
    write(elastic, 2, [{**sync(0, 90, 95), "time": 45.0, "counted": True}])
    write(elastic, 0, [event("gone", 2, "worker 2 is gone", 47)])
    assert states(view_of(elastic)) == ["ok", "ok", "!gone", "ok"]


def test_changes_are_listed_once_in_order_and_as_far_as_there_is_room(elastic):
    write(elastic, 0, [event("gone", 2, "worker 2 is gone", 42), event("decided", 0, "decides", 43)])
    write(elastic, 1, [event("late", 3, "worker 3 is late for sync 8", 41, 8),
                           event("gone", 2, "worker 2 is gone", 43)])
    write(elastic, 3, [event("late", 3, "was late for sync 8", 41, 8), event("jumps", 3, "jumps", 44)])
    told = ["worker 1: worker 3 is late for sync 8", "worker 0: worker 2 is gone", "worker 3: jumps"]
    expected = [time.strftime("%H:%M:%S", time.localtime(at)) + "  " + text
                for at, text in zip((1041, 1042, 1044), told)]
    assert lines_of(view_of(elastic))[-4:] == ["", *expected]
    for height in (11, 9, 8):
        lines = lines_of(view_of(elastic), 80, height)
        assert len(lines) <= height and lines[9:] == (["", expected[-1]] if height == 11 else [])


def test_a_checkpoint_of_an_elastic_run_is_one_that_all_workers_have(elastic):
    assert view_of(elastic).whole_checkpoint() is None
    for worker, step in enumerate((80, 60, 100)):
        (elastic / f"worker_{worker}").mkdir()
        (elastic / f"worker_{worker}" / f"DONE_{step:08}").touch()
    assert view_of(elastic).whole_checkpoint() == 60
    (elastic / "worker_3").mkdir()
    assert view_of(elastic).whole_checkpoint() is None


def test_in_an_elastic_run_the_foremost_says_how_far_the_run_is(elastic):
    write(elastic, 1, steps(101, 140))
    write(elastic, 2, [event("gone", 2, "worker 2 is gone", 42)])
    text = " ".join(lines_of(view_of(elastic), 120))
    assert "step 140 of 1,000" in text and "7:10 left" in text
