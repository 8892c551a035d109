"""Torture (dev/break/torture.py): runs that are killed again and again end with the bits of undisturbed ones. And
torture notices what it should: differences, hangs and unclear errors."""
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT, TRAINER

from torture import (COMMON, CONFIGURATIONS, Failure, Start, Torture, Written, compare,  # noqa: E402
                     state_sections, torture)

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")


def test_runs_that_are_killed_eight_times_end_with_the_bits_of_undisturbed_ones(tmp_path):
    rows = torture(8, 1, TRAINER, tmp_path, ["ranks", "all in flight"], kills_a_run=4)
    assert sum(row.kills for row in rows.values()) == 8
    assert all(row.runs > 0 and row.starts > row.kills for row in rows.values())


@pytest.mark.long
def test_runs_that_are_killed_fifty_times_end_with_the_bits_of_undisturbed_ones(tmp_path):
    rows = torture(50, 2, TRAINER, tmp_path, list(CONFIGURATIONS), kills_a_run=5)
    assert sum(row.kills for row in rows.values()) == 50 and rows.keys() == CONFIGURATIONS.keys()
    assert sum(row.in_a_write for row in rows.values()) > 0 < sum(row.of_one for row in rows.values())


# -----------------------------------------------------------------------------------------------------------
# What torture notices

@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory):
    options = {**COMMON, **CONFIGURATIONS["ranks"], "-x": 20}
    start = Start(options, tmp_path_factory.mktemp("run"), TRAINER, tokens)
    assert start.wait() == [0], start.output()
    return start


def edit(name, change):
    def work(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))
    return work


def flip_last_of(section):
    """Flips a bit of one array in a state file."""
    def work(folder):
        path = folder / "state_00000006_00002.bin"
        data = path.read_bytes()
        at = data.index(state_sections(path)[section]) + len(state_sections(path)[section]) - 1
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
    return work


def replace(old, new):
    return lambda data: data.replace(old, new)


def without_line(word):
    return lambda data: b"".join(line for line in data.splitlines(True) if word not in line)


def twice(word):
    return lambda data: b"".join(line * (1 + (word in line)) for line in data.splitlines(True))


DIFFERENCES = {
    "bit_of_a_model": (edit("model_00000006.bin", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
                       "model_00000006.bin has other bits"),
    "no_last_model": (lambda folder: (folder / "model_00000020.bin").unlink(), "no model_00000020.bin"),
    "bit_of_the_moments": (flip_last_of("v"), "state_00000006_00002.bin: v differ"),
    "bit_of_a_mean_in_flight": (flip_last_of("in_flight.1.mean"), "in_flight.1.mean differ"),
    "step_missing": (edit("metrics_00001.jsonl", without_line(b'"step","step":7,')),
                     "process 1, step 7: None"),
    "step_twice": (edit("metrics.jsonl", twice(b'"step","step":7,')), "contains step 7 twice"),
    "sync_missing": (edit("metrics_00003.jsonl", without_line(b'"sync","sync":4,')),
                     "process 3, sync 4: None"),
    "eval_differs": (edit("metrics.jsonl", replace(b'"eval","step":20', b'"eval","step":19')), "eval 19"),
    "hash_differs": (edit("metrics_00002.jsonl", replace(b'"global_hash":"', b'"global_hash":"x')),
                     "process 2, sync 0"),
    "main_log": (edit("main.log", without_line(b"s:9 ")), "main.log"),
    "left_behind": (lambda folder: (folder / "state_00000006_00000.bin.tmp").touch(),
                    "are left: state_00000006_00000.bin.tmp"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_every_difference_is_found_and_named(finished, tmp_path, difference):
    change, words = DIFFERENCES[difference]
    shutil.copytree(finished.folders[0], tmp_path / "run")
    other = finished.written()
    other.folders = [tmp_path / "run"] * 2
    compare(other, finished.written())
    change(tmp_path / "run")
    with pytest.raises(Failure) as failure:
        compare(other, finished.written())
    assert words in str(failure.value)


def test_a_run_that_hangs_is_found_and_ended(tokens, tmp_path):
    start = Start({**COMMON, **CONFIGURATIONS["two machines"], "-x": 10**6}, tmp_path, TRAINER, tokens)
    with pytest.raises(Failure, match="has not ended"):
        start.wait(1)
    assert all(launcher.wait(20) for launcher in start.launchers)


@pytest.mark.parametrize("text", ["", "Segmentation fault\n", "error: one\nterminate called\n",
                                  "error: x\n" * 9])
def test_an_error_that_is_not_one_clear_line_is_found(text):
    start = SimpleNamespace(launchers=[SimpleNamespace(pid=1, returncode=1)], stderr=lambda w: text)
    with pytest.raises(Failure, match="no clear error line"):
        Torture("two workers", 1, TRAINER, None, None).check_errors(start, [])


def test_a_run_that_resumes_from_an_earlier_step_than_its_newest_checkpoint_is_found():
    start = SimpleNamespace(launchers=[0], stdout=lambda w: "resumed after step 6\n", output=lambda: "")
    one = Torture("two workers", 1, TRAINER, None, None)
    one.check_resume(start, 6)
    with pytest.raises(Failure, match="the state of step 12"):
        one.check_resume(start, 12)


def test_states_that_two_runs_left_are_no_checkpoint_of_either(tmp_path):
    def write(step, process, lineage):
        (tmp_path / f"state_{step:08d}_{process:05d}.bin").write_bytes(bytes(32) + lineage + bytes(976))
    written = Written([tmp_path], 2)
    for step, lineages in [(4, [b"a" * 16, b"a" * 16]), (8, [b"a" * 16, b"b" * 16])]:
        for process, lineage in enumerate(lineages):
            write(step, process, lineage)
    assert written.newest_whole() == 4
    write(8, 1, b"a" * 16)
    assert written.newest_whole() == 8


def run_tool(*words):
    return subprocess.run([sys.executable, ROOT / "dev" / "break" / "torture.py", *map(str, words)],
                          capture_output=True, text=True)


def test_a_failure_ends_with_status_1_and_says_how_to_reproduce_it(tmp_path):
    trainer = tmp_path / "trainer"
    trainer.write_text("#!/bin/sh\necho oh dear >&2\nexit 3\n")
    trainer.chmod(0o755)
    result = run_tool("--kills", 1, "--seed", 5, "--configuration", "two workers", "--trainer", trainer)
    assert result.returncode == 1 and "oh dear" in result.stdout, result.stderr
    assert "--seed 5 --configuration 'two workers'" in result.stdout


def test_a_missing_trainer_is_reported(tmp_path):
    result = run_tool("--trainer", tmp_path / "nowhere")
    assert result.returncode == 2 and result.stderr.startswith("error: ") and "make" in result.stderr
