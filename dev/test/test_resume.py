"""A run that is stopped, killed, or set back to an older checkpoint, and resumed, is the run that never stopped: the
same bits in models, states and logs. Real processes; and what a user reads when a checkpoint cannot be had."""
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT, TRAINER

sys.path.insert(0, str(ROOT / "dev"))
from torture import Start, compare, history, log_name, state_sections, wait_until_gone

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
    "weights": ["equal", "tokens"],
    "interruption": ["SIGKILL", "SIGTERM", "set back"],
}


# ---------------------------------------------------------------------------------------------------------------------
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
    """Few cases that have them all. Each begins with a combination that is still missing; then it takes factor by
    factor the value that adds most, of equals the one that was used least."""
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
            case[name] = max(possible, key=lambda value: (sum(some | {(name, value)} in missing for some in others),
                                                          -used[name, value]))
        for item in case.items():
            used[item] += 1
        for some in itertools.combinations(case.items(), strength):
            missing.pop(frozenset(some), None)
        cases.append({name: case[name] for name in FACTORS})
    return cases


def name_of(case):
    words = [f"{case['workers']}x{case['ranks']}", f"tau={case['overlap']}", case["dtype"], case["rounding"],
             case["exchange"], "feedback" if case["feedback"] else "", case["optimizer"], case["weights"],
             case["interruption"].replace(" ", "_")]
    return "-".join(word for word in words if word)


def options_of(case):
    """A list has a value for each worker: then they are started one by one, each with a folder of its own."""
    workers, tokens = case["workers"], 32 * case["ranks"]
    options = {**RUN, "--workers": workers, "--ranks": case["ranks"], "--outer-dtype": case["dtype"],
               "--outer-rounding": case["rounding"], "--outer-exchange": case["exchange"],
               "--outer-optimizer": case["optimizer"], "--outer-weights": case["weights"],
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


# ---------------------------------------------------------------------------------------------------------------------
# Runs and their interruptions

@pytest.fixture
def begin(tokens, tmp_path):
    """begin(name, options) starts the processes of a run in the background; what runs at the end is killed."""
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


def remove_checkpoints(folders, after):
    """Those of later steps."""
    for folder in folders:
        for path in [*folder.glob("state_*"), *folder.glob("model_*"), *folder.glob("DONE_*")]:
            if int(re.findall("[0-9]+", path.name)[0]) > after:
                path.unlink()


def resumed_step(start, w=0):
    found = re.findall("^resumed after step ([0-9]+)$", start.stdout(w), re.M)
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
    remove_checkpoints(back, back_to)
    return "set_back"


def check_case(begin, run, base, options, how, back_to=10):
    expected = run("undisturbed", options)
    name = interrupt(begin, base, options, how, expected, back_to)
    resumed = run(name, options)
    step = resumed_step(resumed)
    assert 0 < step < options["-x"] and (how != "set back" or step == back_to)
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
