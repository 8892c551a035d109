"""A run that is stopped, killed, or set back to an older checkpoint, and resumed, is the run that never
stopped: the same bits in models, states and logs. Real processes; and what a user reads when a checkpoint
cannot be written, or cannot be had."""
import errno
import itertools
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT, TRAINER, write_shard

from torture import Start, compare, log_name, set_back, step_of, wait_until_gone  # noqa: E402

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")

# Three fragments, sent at steps 2, 5 and 8 of 8. Checkpoints between sends, and at the very step of one.
H = 8
RUN = {"-b": 2, "-H": H, "--fragment-layers": 1, "-k": "cosine", "-v": 20, "-m": 2, "-x": 60, "-n": 10,
       "--outer-optimizer": "nesterov", "-y": 1}
PARALLEL = {**RUN, "--outer-optimizer": "none", "--ranks": 2}
TWO = {**RUN, "--workers": 2, "--overlap": 2}
# Without an end, and with a request to stop that waits long for the next sync.
ENDLESS = {**TWO, "-x": 10**6, "-n": 0}
FAR = {**ENDLESS, "-H": 10**5, "--overlap": 0}
MODEL_SIZES = {"--layers": None, "--heads": None, "--channels": None, "--vocab-size": None}

FACTORS = {
    "workers": [1, 2, 4],
    "ranks": [1, 2],
    "overlap": [0, 1, 4, H - 1, "different"],  # 4: more than there are steps between two sends
    "dtype": ["fp4", "fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "bf16", "fp32"],
    "rounding": ["nearest", "stochastic"],
    "exchange": ["all_gather", "all_to_all"],
    "feedback": [False, True],
    "optimizer": ["nesterov", "average"],
    "inner": ["adamw", "muon"],
    "weights": ["equal", "tokens"],
    "interruption": ["SIGKILL", "SIGTERM", "set back"],
}


# -----------------------------------------------------------------------------------------------------------
# Which combinations

def is_possible(case):
    """Of some or of all factors."""
    return not (case.get("workers") == 1 and case.get("overlap") == "different")


def wanted(strength):
    """All possible combinations of values of that many factors."""
    for names in itertools.combinations(FACTORS, strength):
        for values in itertools.product(*(FACTORS[name] for name in names)):
            if is_possible(dict(zip(names, values))):
                yield frozenset(zip(names, values))


def cover(strength):
    """Few cases that have them all. Each begins with a combination that is still missing; then it takes
    factor by factor the value that adds most, of equals the one that was used least."""
    missing = dict.fromkeys(wanted(strength))
    used = dict.fromkeys(((name, value) for name, values in FACTORS.items() for value in values), 0)
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for name, values in FACTORS.items():
            if name in case:
                continue
            others = [frozenset(some) for some in itertools.combinations(case.items(), strength - 1)]
            possible = [value for value in values if is_possible({**case, name: value})]

            def gain(value):
                return sum(some | {(name, value)} in missing for some in others), -used[name, value]

            case[name] = max(possible, key=gain)
        for item in case.items():
            used[item] += 1
        for some in itertools.combinations(case.items(), strength):
            missing.pop(frozenset(some), None)
        cases.append({name: case[name] for name in FACTORS})
    return cases


def name_of(case):
    words = [f"{case['workers']}x{case['ranks']}", f"tau={case['overlap']}", case["dtype"], case["rounding"],
             case["exchange"], "feedback" if case["feedback"] else "", case["optimizer"], case["inner"],
             case["weights"], case["interruption"].replace(" ", "_")]
    return "-".join(word for word in words if word)


def options_of(case):
    """A list has a value for each worker: then they are started one by one, each with a folder of its own."""
    workers, tokens = case["workers"], 32 * case["ranks"]
    # The end comes before what the checkpoint of step 60 lacks with the larger overlaps.
    options = {**RUN, "-x": 63, "--workers": workers, "--ranks": case["ranks"],
               "--outer-dtype": case["dtype"], "--outer-rounding": case["rounding"],
               "--outer-exchange": case["exchange"], "--outer-optimizer": case["optimizer"],
               "--optimizer": case["inner"], "--outer-weights": case["weights"],
               "--overlap": [4, 0, H - 1, 1][:workers] if case["overlap"] == "different" else case["overlap"]}
    if case["feedback"]:
        options["--outer-error-feedback"] = True
    if case["weights"] == "tokens" and workers > 1:
        options["-d"] = [2 * tokens, tokens, tokens, 3 * tokens][:workers]
    return options


@pytest.mark.parametrize("strength", [2, 3])
def test_the_cases_cover_all_combinations_of_so_many_factors(strength):
    cases = cover(strength)
    assert all(case.keys() == FACTORS.keys() and is_possible(case) for case in cases)
    for names in itertools.combinations(FACTORS, strength):
        found = {tuple(case[name] for name in names) for case in cases}
        possible = {values for values in itertools.product(*(FACTORS[name] for name in names))
                    if not {("workers", 1), ("overlap", "different")} <= set(zip(names, values))}
        assert found == possible


# -----------------------------------------------------------------------------------------------------------
# Runs and their interruptions

@pytest.fixture
def begin(tokens, tmp_path):
    """begin(name, options) starts the processes of a run in the background; at the end they are killed."""
    started = []

    def start(name, options, **more):
        started.append(Start(options, tmp_path / name, TRAINER, tokens, **more))
        return started[-1]

    yield start
    for run in started:
        run.kill("all")
        for launcher in run.launchers:
            launcher.wait()


@pytest.fixture
def run(begin):
    """run(name, options) runs to the end, with the same status on all machines."""

    def finish(name, options, status=0, **more):
        start = begin(name, options, **more)
        assert set(start.wait()) == {status}, start.output()
        return start

    return finish


def wait_until(condition, start, seconds=60):
    """False where the run ends before the condition is met."""
    end = time.monotonic() + seconds
    while not condition():
        if start.has_ended():
            return condition()
        assert time.monotonic() < end, f"not after {seconds} s:\n{start.output()}"
        time.sleep(0.001)
    return True


def steps_logged(start, process=0):
    path = start.written().folder_of(process) / log_name(process)
    return path.read_text().count('"type":"step"') if path.exists() else 0


def resumed_step(start, w=0):
    name = rf"(?:\[{w}.0\] )?" if w else ""  # where a launcher has started it
    found = re.findall(f"^{name}resumed after step ([0-9]+)$", start.stdout(w), re.M)
    assert len(found) == 1, start.output()
    return int(found[0])


def kill_in_time(begin, name, options):
    """After a checkpoint, before the end: tried again where the run was faster."""
    for attempt in range(10):
        start = begin(f"{name}{attempt}", options)
        if not wait_until(lambda: start.written().newest_done() > 0, start):
            continue
        pids = [pid for launcher in start.launchers for pid in start.processes(launcher)]
        start.kill("all")
        if any(start.wait()):
            wait_until_gone(pids)
            return f"{name}{attempt}"
    raise AssertionError("the run always ended before it could be killed")


def stop_in_time(begin, name, options, number=signal.SIGTERM):
    """One launcher is asked, as soon as all train: tried again where the run was faster."""
    for attempt in range(10):
        start = begin(f"{name}{attempt}", options)
        last = options.get("--workers", 1) * options.get("--ranks", 1) - 1
        wait_until(lambda: steps_logged(start) > 0 and steps_logged(start, last) > 0, start)
        start.launchers[-1].send_signal(number)
        statuses = set(start.wait())
        if statuses == {143}:
            return start, f"{name}{attempt}"
        assert statuses == {0}, start.output()
    raise AssertionError("the run always ended before it could be stopped")


def interrupt(begin, base, options, how, expected, back_to):
    """Leaves in a folder what an interrupted run leaves there; returns its name."""
    if how == "SIGKILL":
        return kill_in_time(begin, "killed", options)
    if how == "SIGTERM":
        return stop_in_time(begin, "stopped", options)[1]
    shutil.copytree(expected.base, base / "set_back", ignore=shutil.ignore_patterns("store"))
    back = [base / "set_back" / folder.name for folder in expected.folders]
    set_back(back, back_to)
    return "set_back"


def check_case(begin, run, base, options, how, back_to=10):
    expected = run("undisturbed", options)
    name = interrupt(begin, base, options, how, expected, back_to)
    resumed = run(name, options)
    step = resumed_step(resumed)
    assert 0 < step < options["-x"] and (how != "set back" or step == back_to)
    assert "is resumed by" not in resumed.stdout()  # from its own state as it is, and not from a reshaped one
    compare(resumed.written(), expected.written())


PAIRS = cover(2)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=map(name_of, PAIRS))
def test_a_resumed_run_has_the_bits_of_the_run_that_never_stopped(begin, run, tmp_path, number):
    case = PAIRS[number]
    check_case(begin, run, tmp_path, options_of(case), case["interruption"], 10 * (1 + number % 5))


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_all_combinations_of_three_factors_resume_to_the_same_bits(begin, run, tmp_path, part):
    for number, case in list(enumerate(cover(3)))[part::8]:
        print(name_of(case), flush=True)
        base = f"{number}"
        (tmp_path / base).mkdir()

        def within(function):
            return lambda name, options, **more: function(f"{base}/{name}", options, **more)

        check_case(within(begin), within(run), tmp_path / base, options_of(case), case["interruption"],
                   10 * (1 + number % 5))
        shutil.rmtree(tmp_path / base)


def test_a_run_without_an_outer_optimizer_resumes_to_the_same_bits(begin, run, tmp_path):
    for ranks, how in ((2, "SIGTERM"), (2, "set back"), (1, "SIGTERM"), (1, "SIGKILL")):
        (tmp_path / f"{ranks}{how}").mkdir()
        check_case(lambda name, *more: begin(f"{ranks}{how}/{name}", *more),
                   lambda name, *more: run(f"{ranks}{how}/{name}", *more),
                   tmp_path / f"{ranks}{how}", {**PARALLEL, "--ranks": ranks}, how)


def test_a_run_goes_on_beyond_its_end(begin, run):
    """A checkpoint of the last step is of the run before it brings in what is in flight."""
    options = {**TWO, "--overlap": 5, "-k": "constant", "-v": 0}
    expected = run("long", options)
    run("short", {**options, "-x": 34, "-n": 17})
    longer = run("short", options)
    assert resumed_step(longer) == 34
    compare(longer.written(), expected.written())


def test_resuming_a_finished_run_changes_nothing(run):
    options = {**TWO, "--ranks": 2}
    first = run("run", options)
    before = [first.written().history(process) for process in range(4)]
    models = {name: path.read_bytes() for name, path in first.written().models().items()}
    again = run("run", options)
    assert resumed_step(again) == 60
    assert [again.written().history(process) for process in range(4)] == before
    assert {name: path.read_bytes() for name, path in again.written().models().items()} == models


def test_evaluated_local_parameters_resume_to_the_same_bits(begin, run, tmp_path):
    check_case(begin, run, tmp_path, {**TWO, "--eval": "local", "--overlap": 4}, "set back", 20)


# -----------------------------------------------------------------------------------------------------------
# Stopping by request

def stopped_step(start, w=0):
    name = rf"(?:\[{w}.0\] )?" if w else ""  # where a launcher has started it
    found = re.findall(f"^{name}stopped by request after step ([0-9]+) of ", start.stdout(w), re.M)
    assert len(found) == 1, start.output()
    return int(found[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_machines_stop_at_the_same_step_when_one_of_them_is_asked(begin, run, ranks):
    options = {**TWO, "--ranks": ranks, "--overlap": [2, 6], "-n": 0}
    expected = run("undisturbed", options)
    stopped, name = stop_in_time(begin, "stopped", options)
    step = stopped_step(stopped, 0)
    assert step == stopped_step(stopped, 1) == stopped.written().newest_whole()
    assert all((folder / f"DONE_{step:08d}").exists() for folder in stopped.folders)
    assert "error" not in stopped.output()
    resumed = run(name, options)
    assert resumed_step(resumed, 0) == resumed_step(resumed, 1) == step
    compare(resumed.written(), expected.written())


def test_sigusr1_is_a_request_to_stop_too(begin, run):
    expected = run("undisturbed", TWO)
    stopped, name = stop_in_time(begin, "stopped", TWO, signal.SIGUSR1)
    step = stopped_step(stopped)
    resumed = run(name, TWO)
    assert resumed_step(resumed) == step
    compare(resumed.written(), expected.written())


# A step of a second, which has 600 micro-steps.
LONG = {**RUN, "-x": 3, "-n": 0, "-v": 0, "-H": 2, "--overlap": 1, "-d": 600 * 32}
ELASTIC = {**LONG, "--outer-transport": "store", "--workers": 2, "--min-workers": 1, "--worker": 0,
           "--grace": 0.1}


@pytest.mark.parametrize("options", [{**LONG, "--outer-optimizer": "none"}, {**LONG, "--ranks": 2, "-d": 600 * 64},
                                     ELASTIC], ids=["alone", "ranks", "elastic"])
def test_a_worker_leaves_between_two_micro_steps_and_does_the_step_again(begin, run, tmp_path, options):
    is_elastic = options is ELASTIC
    names = [{"--store": f"file:{tmp_path}/store", "--run-name": name} if is_elastic else {} for name in "ab"]
    expected = run("undisturbed", {**options, **names[0]})
    start = begin("stopped", {**options, **names[1]})
    assert wait_until(lambda: steps_logged(start) == 1, start)
    asked = time.monotonic()
    start.launchers[0].send_signal(signal.SIGTERM)
    assert start.wait() == [143], start.output()
    assert stopped_step(start) == 1 and time.monotonic() - asked < 10
    resumed = run("stopped", {**options, **names[1]})
    assert resumed_step(resumed) == 1
    losses = [[row["loss"] for row in map(json.loads, (one.folders[0] / log_name(0)).read_text().splitlines())
               if row["type"] == "step"] for one in (resumed, expected)]
    assert losses[0][:2] == losses[1][:2] and len(losses[0]) == 3
    if not is_elastic:  # the others may have decided without it, meanwhile
        compare(resumed.written(), expected.written())


def cpu_seconds(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_end_is_left_at_once(begin, ranks):
    start = begin("run", {**LONG, "--outer-optimizer": "none", "--ranks": ranks, "-x": 1, "-d": 2**31})
    assert wait_until(lambda: "1 step" in start.stdout(), start)
    (pid, *_) = start.processes(start.launchers[0])
    begun = cpu_seconds(pid)
    assert wait_until(lambda: cpu_seconds(pid) > begun + 0.5, start)  # of the step
    start.launchers[0].send_signal(signal.SIGTERM)
    assert start.wait(20) == [143], start.output()
    assert "stopped by request after step 0 of 1" in start.stdout()


@pytest.mark.parametrize("options", [{**ENDLESS, "-n": 10}, {**PARALLEL, "-x": 10**6}], ids=["workers", "ranks"])
def test_a_second_start_leaves_the_first_run_alone(begin, options):
    first = begin("run", options)
    assert wait_until(lambda: steps_logged(first) > 20, first)
    second = begin("run", options)
    assert second.wait() == [75] and "another run is still writing into" in second.output()
    steps = steps_logged(first)
    assert wait_until(lambda: steps_logged(first) > steps + 20, first)
    first.launchers[0].send_signal(signal.SIGTERM)
    assert first.wait() == [143], first.output()
    lines = (first.folders[0] / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["step"] for line in lines if '"type":"step"' in line]
    assert logged == list(range(1, len(logged) + 1))


@pytest.mark.parametrize("options", [FAR, {**FAR, "--overlap": [0, 0]}], ids=["launcher", "process"])
def test_a_second_request_ends_a_run_at_once(begin, options):
    start = begin("run", {**options, "-n": 0})
    assert wait_until(lambda: steps_logged(start) > 3, start)
    start.launchers[0].send_signal(signal.SIGTERM)
    time.sleep(3)  # within a second it would count as the same request
    assert not start.has_ended()  # the next sync is far away
    start.launchers[0].send_signal(signal.SIGTERM)
    assert start.launchers[0].wait(30) == (-signal.SIGTERM if start.is_apart else 143), start.output()
    assert not list(start.folders[0].glob("state_*")) and not list(start.folders[0].glob("DONE_*"))


def blocked_signals(task):
    return int(re.search("^SigBlk:\\s*([0-9a-f]+)", (task / "status").read_text(), re.M)[1], 16)


@pytest.mark.parametrize("more", [{}, {**ELASTIC, "-x": 10**6, "-d": 0}], ids=["lock-step", "elastic"])
def test_no_thread_that_computes_takes_a_signal(begin, tmp_path, more, monkeypatch):
    """A signal's frame goes to where the stack pointer points: in oneDNN's kernel for AVX2 into the heap."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    start = begin("run", {**FAR, **more, "-n": 0, "--store": f"file:{tmp_path / 'store'}"})
    assert wait_until(lambda: steps_logged(start) > 3, start), start.output()
    (pid, *_) = start.processes(start.launchers[0])
    tasks = {int(task.name): blocked_signals(task) for task in Path(f"/proc/{pid}/task").iterdir()}
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        takers = [task for task, blocked in tasks.items() if not blocked >> (number - 1) & 1]
        assert len(tasks) > 3 and len(takers) == 1 and takers != [pid], tasks


def test_processes_that_were_started_to_ignore_a_signal_go_on(begin, run):
    """As under nohup, or trap '' TERM."""
    options = {**RUN, "--workers": 1, "-x": 200}
    start = begin("run", options, preexec=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    assert wait_until(lambda: steps_logged(start) > 3, start)
    start.launchers[0].send_signal(signal.SIGTERM)
    assert start.wait() == [0], start.output()


# -----------------------------------------------------------------------------------------------------------
# Which checkpoints there are

def steps_of(folder, pattern):
    return sorted(set(map(step_of, folder.glob(pattern))))


ALL = [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("options,kept", [
    ({}, ALL), ({"-nm": 30}, ALL), ({"-nk": 1}, [60]), ({"-nk": 2}, [50, 60]),
    ({"-nk": 2, "-nm": 30}, [30, 50, 60])])
def test_old_checkpoints_are_deleted_as_asked(run, options, kept):
    done = run("run", {**TWO, "--overlap": [2, 2], **options})
    for process, folder in enumerate(done.folders):
        assert steps_of(folder, "DONE_*") == kept
        assert steps_of(folder, f"state_*_{process:05d}.bin") == steps_of(folder, "state_*") == kept
    assert steps_of(done.folders[0], "model_*.bin") == kept
    assert not list(done.folders[1].glob("model_*.bin"))


def test_a_resumed_run_deletes_those_of_before_too(run):
    run("run", {**TWO, "-x": 30})
    resumed = run("run", {**TWO, "-nk": 2})
    assert steps_of(resumed.folders[0], "state_*") == [50, 60] == steps_of(resumed.folders[0], "DONE_*")


def test_without_n_only_the_last_model_is_written(run):
    done = run("run", {**TWO, "-n": 0})
    assert steps_of(done.folders[0], "model_*.bin") == [60]
    assert not list(done.folders[0].glob("state_*")) and not list(done.folders[0].glob("DONE_*"))


def test_logs_say_for_how_long_training_paused(run):
    done = run("run", {**TWO, "--ranks": 2}).written()
    for process in done.processes():
        rows = [row for row in log_rows(done, process) if row["type"] == "checkpoint"]
        assert [row["step"] for row in rows] == ALL
        assert all(0 <= row["paused_seconds"] <= row["time"] for row in rows)


def log_rows(written, process):
    path = written.folder_of(process) / log_name(process)
    return [json.loads(line) for line in path.read_text().splitlines()]


# -----------------------------------------------------------------------------------------------------------
# What a user is told

def refused(start, *words):
    """One line, and what is there is left alone."""
    assert start.stderr().startswith("error: ") and start.stderr().count("\n") == 1, start.stderr()
    for word in words:
        assert word in start.stderr()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def checkpoints(tokens, tmp_path_factory):
    """A finished run of two workers with checkpoints of the steps 10 to 60; tests take copies."""
    start = Start(TWO, tmp_path_factory.mktemp("checkpoints"), TRAINER, tokens)
    assert start.wait() == [0], start.output()
    return start


@pytest.fixture
def copy(checkpoints, tmp_path):
    """copy(name, after): the run up to that checkpoint."""

    def make(name, after=60):
        shutil.copytree(checkpoints.base, tmp_path / name)
        set_back([tmp_path / name / "run"], after)
        return tmp_path / name / "run"

    return make


def test_a_resumed_run_has_sent_what_the_run_that_never_stopped_has(train, tmp_path):
    """A checkpoint counts the bytes that gathering its model took."""
    options = {"--ranks": 2, "-b": 2, "-x": 12, "-n": 6, "-y": 1}
    whole = train("run", options).lines("end")[-1]
    set_back([tmp_path / "run"], 6)
    again = train("run", options).lines("end")[-1]
    assert whole["inner_bytes_sent"] == again["inner_bytes_sent"] > 0


UNREADABLE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
ssize_t pread64(int file, void *to, size_t count, off64_t offset) {
    ssize_t (*real)(int, void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pread64");
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "state_00000012") && offset > 4096) {
        errno = atoi(getenv("FAILURE"));
        return -1;
    }
    return real(file, to, count, offset);
}
ssize_t pread(int file, void *to, size_t count, off64_t offset) { return pread64(file, to, count, offset); }
"""


@pytest.mark.parametrize("failure", [errno.ESTALE, errno.EIO])
def test_a_state_that_cannot_be_read_for_now_is_not_passed_over(train, tmp_path, failure):
    """A resume from an older one would delete it. (A bad sector stays bad: then the older one is taken.)"""
    options = {"-x": 12, "-n": 6, "-y": 1}
    train("run", options)
    (tmp_path / "unreadable.c").write_text(UNREADABLE)
    library = tmp_path / "unreadable.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "unreadable.c", "-ldl"], check=True)
    broken = {"LD_PRELOAD": str(library), "FAILURE": str(int(failure))}
    may_pass = failure == errno.ESTALE
    run = train("run", {**options, "-x": 13}, status=75 if may_pass else 0, environment=broken)
    assert (f"error: cannot read {run.folder}/state_00000012" in run.stderr) == may_pass, run.stderr
    assert ("resumed after step 6" in run.stdout) == (not may_pass)
    if may_pass:
        assert "resumed after step 12" in train("run", {**options, "-x": 13}).stdout


def test_where_nothing_is_to_resume_a_run_begins(run, checkpoints):
    begun = run("run", TWO)
    assert f"nothing to resume from in {begun.folders[0]}: training starts at step 1\n" in begun.stdout()
    compare(begun.written(), checkpoints.written())


def test_what_a_run_left_that_was_killed_in_its_first_checkpoint_is_no_obstacle(run, checkpoints, copy):
    folder = copy("run", 10)
    (folder / "DONE_00000010").unlink()
    (folder / "state_00000010_00001.bin").rename(folder / "state_00000010_00001.bin.tmp")
    resumed = run("run", TWO)
    assert "training starts at step 1\n" in resumed.stdout()
    compare(resumed.written(), checkpoints.written())


def test_options_that_cannot_be_written_end_a_new_run_but_not_one_that_resumes(run, copy, tmp_path):
    (copy("run", 40) / "config.toml.0.tmp").mkdir()
    resumed = run("run", TWO)
    assert resumed_step(resumed) == 40 and "warning: the old config.toml is kept: cannot write " in resumed.output()
    (tmp_path / "new/run/config.toml.0.tmp").mkdir(parents=True)
    (tmp_path / "new/run/config.toml").write_text("")
    assert "cannot write " in run("new", {**TWO, "-y": 0}, status=1).stderr()


def test_changed_options_are_named(run, copy):
    copy("run", 40)
    resumed = run("run", {**TWO, "-l": 0.02, "--local-weight": 0.25, "-x": 80, "--overlap": 3})
    assert resumed_step(resumed) == 40
    (line,) = re.findall("^resumed with changed options: (.*)$", resumed.stdout(), re.M)
    changes = set(line.split(", "))
    assert {change for change in changes if not change.startswith("output ")} == {
        "lr 0.01 -> 0.02", "local-weight 0.5 -> 0.25", "max-steps 60 -> 80", "overlap 2 -> 3"}


def test_other_training_data_is_named(run, tmp_path):
    """More shards under the same pattern: their order is another, and so is the number of steps."""
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(2):
        write_shard(data / f"y_{shard}.bin", [7 * i % 64 for i in range(2000)])
    options = {**TWO, "-i": f"{data}/y_*.bin", "-x": -1}

    def notes():
        return re.findall("^resumed with (.*)$", run("run", options).stdout(), re.M)

    assert notes() == []  # it begins
    assert notes() == []
    write_shard(data / "y_2.bin", [7 * i % 64 for i in range(3000)])
    assert notes() == ["other training data: 2 -> 3 shards, 4000 -> 7000 tokens; 62 -> 109 steps"]
    assert notes() == []
    (data / "y_2.bin").rename(data / "y_3.bin")
    assert notes() == ["other training data: shards of other names or lengths"]
    (data / "y_3.bin").rename(data / "y_2.bin")
    options["-b"] = 1
    assert "another number of steps: 109 -> 218" in notes()


def test_models_of_a_run_are_not_overwritten_by_another(run, copy):
    folder = copy("run")
    before = contents(folder)
    refused(run("run", {**TWO, "-y": 0}, status=2), "already holds the models")
    assert contents(folder) == before


def test_resuming_needs_a_folder(run):
    refused(run("run", {**TWO, "-o": None}, status=2), "-y 1", "-o")


def test_checkpoints_need_a_folder(run):
    refused(run("run", {**TWO, "-y": 0, "-o": None}, status=2), "-n 10", "-o")


@pytest.mark.parametrize("change,words", [
    ({"-x": 40}, ["step 60", "after step 40", "-x"]),
    ({"--channels": 64}, ["another model"]),
    ({"--layers": 3}, ["another model"]),
])
def test_a_checkpoint_that_does_not_suit_the_options_is_refused(run, copy, change, words):
    folder = copy("run")
    before = contents(folder)
    refused(run("run", {**TWO, **change}, status=2), *words)
    assert contents(folder) == before


@pytest.mark.parametrize("change", [{}, {"--workers": 1}, {"--ranks": 2}], ids=["same", "M", "R"])
def test_missing_files_are_named(run, copy, change):
    folder = copy("run", 20)
    for path in folder.glob("state_*_00001.bin"):
        path.unlink()
    before = contents(folder)
    refused(run("run", {**TWO, **change}, status=2), "state_00000020_00001.bin is missing",
            "state_00000010_00001.bin is missing", "-o")
    assert contents(folder) == before


DAMAGES = {
    "empty": lambda data: b"",
    "cut_in_the_header": lambda data: data[:100],
    "cut_in_the_table": lambda data: data[:1100],
    "cut_in_the_middle": lambda data: data[:len(data) // 2],
    "cut_at_the_end": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "flipped_magic": lambda data: flip(data, 0),
    "flipped_in_the_table": lambda data: flip(data, 1030),
    "flipped_in_the_middle": lambda data: flip(data, len(data) // 2),
    "flipped_checksum": lambda data: flip(data, len(data) - 1),
    "llm_c": lambda data: struct.pack("<i", 20240527) + data[4:],
}


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1:]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_is_taken(run, checkpoints, copy, damage):
    folder = copy("run", 30)
    path = folder / "state_00000030_00001.bin"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    resumed = run("run", TWO)
    assert resumed_step(resumed) == 20
    assert f"step 30 was passed over: worker 1 rank 0: {path} " in resumed.stdout()
    compare(resumed.written(), checkpoints.written())


def test_several_damaged_checkpoints_are_passed_over(run, checkpoints, copy):
    folder = copy("run", 40)
    (folder / "state_00000040_00000.bin").unlink()
    for step, process in ((30, 0), (20, 1)):
        path = folder / f"state_{step:08d}_{process:05d}.bin"
        path.write_bytes(flip(path.read_bytes(), 5000))
    resumed = run("run", TWO)
    assert resumed_step(resumed) == 10
    assert re.findall("^step ([0-9]+) was passed over", resumed.stdout(), re.M) == ["40", "30", "20"]
    compare(resumed.written(), checkpoints.written())


# -----------------------------------------------------------------------------------------------------------
# Another shape

@pytest.mark.parametrize("workers,ranks", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)])
def test_a_model_file_starts_any_number_of_processes(run, checkpoints, workers, ranks):
    model = checkpoints.folders[0] / "model_00000060.bin"
    options = {**TWO, **MODEL_SIZES, "-e": model, "-x": 20}
    start = run("run", {**options, "--workers": workers, "--ranks": ranks, "-m": 4 // ranks})
    again = run("again", {**options, "-m": 4})
    first = [dict(written.history(0)["eval", 0])["loss"] for written in (start.written(), again.written())]
    assert first[0] == pytest.approx(first[1], abs=1e-5)
    assert dict(start.written().history(0)["step", 20])["loss"] < 3.5


def losses_of(start, process=0):
    return [row["loss"] for row in log_rows(start.written(), process) if row["type"] == "step"]


CHANGES = {
    "ranks": ({"--ranks": 2, "-b": 1}, ["is resumed by 2 x 2", "parameters, global parameters, outer momentum"]),
    "more_workers": ({"--workers": 4},
                     ["is resumed by 4 x 1", "every worker starts from the global parameters"]),
    "fewer_workers": ({"--workers": 1},
                      ["is resumed by 1 x 1", "every worker starts from the global parameters"]),
    "data_parallel": ({"--workers": 1, "--ranks": 2, "--outer-optimizer": "none"},
                      ["is resumed by 1 x 2", "not carried over", "outer momentum"]),
    "H": ({"-H": 12}, ["inner-steps 8 -> 12", "carried over"]),
    "fragments": ({"--fragment-layers": 2}, ["fragment-layers 1 -> 2", "carried over"]),
    "feedback": ({"--outer-error-feedback": True}, ["residuals of error feedback"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_of_another_shape_goes_on_and_says_what_was_carried_over(run, checkpoints, copy, change):
    options, words = CHANGES[change]
    copy("run", 40)
    resumed = run("run", {**TWO, **options})
    assert resumed_step(resumed) == 40
    for word in words:
        assert word in resumed.stdout(), resumed.stdout()
    losses, undisturbed = losses_of(resumed), losses_of(checkpoints)
    assert len(losses) == 60 and losses[:40] == undisturbed[:40]
    # It learns: where the run that never stopped is, and not where it began.
    begun = sum(undisturbed[:5])
    assert sum(losses[40:45]) < begun - 0.7 * (begun - sum(undisturbed[40:45]))


@pytest.mark.parametrize("options", [{"--ranks": 2, "-b": 4}, {"--ranks": 4, "-b": 1}, {"-b": 1, "-d": 128}],
                         ids=["ranks", "ranks_and_micro_batches", "micro_batches"])
def test_a_run_that_is_cut_anew_goes_on_with_the_sequences_that_it_would_have_taken(run, tokens, options):
    """-d and the data say what a step is made of, also where an epoch ends in mid-step (here after 249)."""
    whole = {**PARALLEL, "-i": f"{tokens}/x_val_*.bin", "--ranks": 1, "-b": 8, "-d": 128, "-k": "constant",
             "--matmul-precision": "highest"}
    expected = run("whole", whole)
    run("cut", {**whole, "-x": 30})
    cut = run("cut", {**whole, **options})
    assert resumed_step(cut) == 30 and "about the same" not in cut.stdout()
    assert losses_of(cut) == pytest.approx(losses_of(expected), rel=1e-4)


def test_processes_that_are_cut_anew_and_back_have_a_run_s_state(run, copy):
    """Two ranks and one again: what is in flight is merged at once, so it is not the run that never stopped;
    but its parameters are all there."""
    copy("run", 40)
    run("run", {**TWO, "--ranks": 2, "-b": 1, "-x": 50})
    back = run("run", {**TWO, "-x": 60})
    assert resumed_step(back) == 50
    assert dict(back.written().history(0)["step", 60])["loss"] < 3.5


# -----------------------------------------------------------------------------------------------------------
# Disks

def messages(start, w=0):
    return re.findall("^there is no checkpoint of step .*$", start.stdout(w), re.M)


def ignore_file_limit():
    """A write beyond the limit fails, and does not end the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def test_a_checkpoint_that_finds_no_room_is_one_line_and_the_one_before_resumes(begin, run):
    """No file may be larger than a few thousand bytes, once the first checkpoint is there."""
    options = {**TWO, "--ranks": 2, "-x": 200, "-n": 10}
    expected = run("undisturbed", options)
    start = begin("run", options, preexec=ignore_file_limit)
    assert wait_until(lambda: start.written().newest_done() > 0, start)
    victim = start.processes(start.launchers[0])[-1]
    resource.prlimit(victim, resource.RLIMIT_FSIZE, (100000, 100000))
    assert start.wait() == [2], start.output()  # another start would find no room, either
    assert start.written().newest_done() < 200
    lines = messages(start)
    for words in ("worker 1 rank 1: cannot write ", "File too large"):
        assert lines and all(words in line for line in lines)
    assert steps_logged(start) == 200
    assert not start.written().unfinished()
    (error,) = start.stderr().splitlines()
    assert error.startswith("error: the last checkpoint is not whole") and "-y 1" in error
    model = start.folders[0] / "model_00000200.bin"
    assert f"the model of this step is complete: {model}" in error
    assert model.read_bytes() == (expected.folders[0] / model.name).read_bytes()
    resumed = run("run", options)
    assert 0 < resumed_step(resumed) < 200
    compare(resumed.written(), expected.written())


def test_a_folder_that_is_gone_is_one_line_and_training_goes_on(begin, run):
    options = {**TWO, "-x": 600, "-n": 20}
    start = begin("run", options)
    folder = start.folders[0]
    assert wait_until(lambda: start.written().newest_done() > 0, start)
    folder.rename(folder.with_name("elsewhere"))
    assert start.wait() == [2], start.output()
    assert messages(start) and all("No such file" in line for line in messages(start))
    folder.with_name("elsewhere").rename(folder)
    assert steps_logged(start) == 600
    assert run("run", options).written().newest_done() == 600


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two megabytes. Skips the test if this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder],
                             capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system ({mounted.stderr.strip()})")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_on_a_full_disk_the_last_whole_checkpoint_resumes(run, begin, small_disk, tmp_path):
    options = {**TWO, "-x": 200}
    expected = run("undisturbed", options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "run").symlink_to(small_disk)
    start = begin("full", options)
    assert start.wait() == [2], start.output()
    # It trains to its end without what does not fit: checkpoints, and lines of its logs.
    lost = (r"(\[1\.0\] )?warning: a log cannot be written \(No space left on device\): "
            r"lines are lost there, and the run continues")
    told = [line for line in start.stderr().splitlines() if not re.fullmatch(lost, line)]
    assert told and all(line.startswith("error: ") for line in told), start.stderr()
    assert "No space left on device" in start.stderr()
    step = start.written().newest_done()
    assert 0 < step < 200
    shutil.copytree(small_disk, tmp_path / "larger" / "run")
    resumed = run("larger", options)
    assert resumed_step(resumed) == step
    compare(resumed.written(), expected.written())
