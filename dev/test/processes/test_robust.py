"""What a run does when training goes wrong: outliers, losses that are no numbers; and -a, one batch forever."""

import os
import subprocess

import numpy
import pytest

from conftest import TINY, command, write_shard


@pytest.fixture
def poisoned(tmp_path):
    """A shard of a noisy cycle, easily learned, and after 260 steps of 64 tokens one token all through a step."""
    random = numpy.random.default_rng(1)
    stream = numpy.cumsum(random.integers(1, 3, size=20000)) % 32
    stream[16640:16704] = 63
    write_shard(tmp_path / "p_train_000000.bin", stream)
    return {"-i": f"{tmp_path}/p_train_*.bin", "-j": None, "--shuffle": 0, "-x": 280, "-l": 0.003}


def test_a_step_whose_loss_is_an_outlier_is_skipped(train, poisoned):
    run = train("run", {**poisoned, "-sl": 8})
    steps = run.lines("step")
    assert [row["step"] for row in steps if row["skipped"]] == [261]
    assert steps[260]["loss_zscore"] > 8
    assert "step 261: loss" in run.stdout and "skipped" in run.stdout
    # Until 128 losses are known there is nothing to compare with.
    assert all(row["loss_zscore"] is None for row in steps[:128])
    assert all(row["loss_zscore"] is not None for row in steps[128:])


def test_a_step_whose_gradient_is_an_outlier_is_skipped(train, poisoned):
    run = train("run", {**poisoned, "-sg": 8})
    assert [row["step"] for row in run.lines("step") if row["skipped"]] == [261]


def test_what_is_skipped_changes_nothing_but_the_count_of_steps(train, poisoned):
    """Until it is skipped a run with limits is a run without; the step after it is of the same parameters."""
    plain, careful = train("plain", poisoned), train("careful", {**poisoned, "-sl": 8})
    assert plain.losses()[:261] == careful.losses()[:261]
    assert plain.losses()[261] != careful.losses()[261]
    before = train("before", {**poisoned, "-x": 260})
    after = train("after", {**poisoned, "-x": 261, "-k": "constant", "-sl": 8})
    assert before.model() == after.model()


def test_all_ranks_skip_the_same_step(train, poisoned):
    run = train("run", {**poisoned, "-sl": 6, "--ranks": 2, "-b": 2})
    skipped = [[row["step"] for row in run.lines("step", process) if row["skipped"]] for process in (0, 1)]
    assert skipped[0] == skipped[1] and 261 in skipped[0]
    assert run.losses(0) == run.losses(1)


def test_outliers_are_told_by_the_losses_from_before_a_resume(train, poisoned):
    whole = train("whole", {**poisoned, "-sl": 8, "-n": 100})
    train("parts", {**poisoned, "-sl": 8, "-n": 100, "-x": 100})
    parts = train("parts", {**poisoned, "-sl": 8, "-n": 100, "-y": 1})
    assert [row["loss_zscore"] for row in whole.lines("step")] == [row["loss_zscore"] for row in parts.lines("step")]
    assert whole.model() == parts.model()


DIVERGING = {"-l": 1e18, "-k": "constant", "-u": 0, "-x": 60, "--clip": 0}


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_last_good_checkpoint(train, tmp_path):
    good = {"-n": 4, "-x": 8, "-k": "constant"}
    train("run", good)
    run = train("run", {**DIVERGING, "-n": 4, "-y": 1}, status=2)
    assert "checkpoint, of step 8," in run.stderr and "loss of step" in run.stderr, run.stderr
    assert run.stderr.count("\n") == 1
    # Checkpoints of parameters that are no numbers would only be in the way of a resume.
    last = max(row["step"] for row in run.lines("step"))
    done = [int(path.name[5:]) for path in run.folder.glob("DONE_*")]
    assert max(done) < last
    again = train("run", {**good, "-x": 12, "-y": 1})
    assert numpy.isfinite(again.losses()).all()


@pytest.mark.parametrize("shape", [{}, {"--ranks": 2, "-b": 2}])
def test_what_it_says_to_remove_is_in_the_way_and_its_removal_is_enough(train, shape):
    """A checkpoint may hold the parameters that gave that loss: finite, and good for nothing."""
    plain = {**shape, "-n": 4, "--clip": 0, "-y": 1}
    train("run", {**plain, "-x": 8})
    train("run", {**plain, "-x": 9, "-l": 1e18})
    run = train("run", {**plain, "-x": 12}, status=2)
    named = run.folder / "state_00000009_*.bin"
    assert f"remove {named}, then" in run.stderr and "checkpoint, of step 8," in run.stderr, run.stderr
    assert run.stderr.count("\n") == 1
    states = list(run.folder.glob(named.name))
    assert len(states) == shape.get("--ranks", 1)
    for state in states:
        state.unlink()
    again = train("run", {**plain, "-x": 12})
    assert "resumed after step 8" in again.stdout and numpy.isfinite(again.losses()).all()


def test_a_loop_tries_once_more_only_if_a_start_has_gained_a_checkpoint(train):
    """Here the parameters grow until a loss is not a number, at step 11."""
    options = {"-l": 3e9, "-u": 60, "-k": "constant", "-x": 60, "--clip": 0, "-n": 1, "-y": 1}
    first = train("run", options, status=1)
    again = train("run", options, status=2)
    assert "loss of step" in first.stderr and "resumed after step" in again.stdout


def test_without_checkpoints_it_says_to_start_again(train):
    run = train("run", DIVERGING, status=2)
    assert "start again" in run.stderr and run.stderr.count("\n") == 1


def test_the_checkpoint_of_the_parameters_that_gave_that_loss_is_not_called_good(train):
    train("run", {**DIVERGING, "-x": 1, "-n": 1})
    run = train("run", {**DIVERGING, "-x": 4, "-n": 4, "-y": 1}, status=2)
    assert "start again" in run.stderr and "no earlier checkpoint" in run.stderr, run.stderr


@pytest.mark.parametrize("shape", [{}, {"--workers": 2, "-H": 1, "--overlap": 0}])
def test_a_validation_loss_that_is_no_number_ends_the_run_before_its_model_is_written(train, shape):
    run = train("run", {**DIVERGING, **shape, "-x": 1, "-v": 1, "--eval": "local"}, status=2)
    assert "the validation loss after step 1 is not a number: start again" in run.stderr, run.stderr
    assert run.stderr.count("\n") == 1 and not list(run.folder.glob("model_*"))


def test_on_a_terminal_why_a_run_ends_is_a_line_of_its_own(tokens, tmp_path):
    master, terminal = os.openpty()
    words = command(tokens, tmp_path / "run", {**DIVERGING, "-x": 60})
    started = subprocess.Popen(words, stdout=terminal, stderr=terminal, cwd=tmp_path)
    os.close(terminal)
    shown = b""
    try:
        while more := os.read(master, 4096):
            shown += more
    except OSError:  # Linux says so at the end of what a terminal has
        pass
    os.close(master)
    assert started.wait(timeout=60) == 2
    last = shown.decode().rstrip().split("\r\n")[-1]
    assert b"step 1/60" in shown and last.split("\x1b[K")[-1].startswith("error: the loss of step"), shown


def test_workers_that_diverge_end_their_run(train):
    run = train("run", {**DIVERGING, "--workers": 2, "-H": 6, "--fragment-layers": 1}, status=2)
    assert "loss of step" in run.stderr


def test_overfit_trains_on_one_batch_again_and_again(train):
    run = train("run", {"-a": 1, "-x": 40, "-b": 2})
    other = train("other", {"-x": 40, "-b": 2})
    assert run.losses()[0] == other.losses()[0]
    assert run.losses()[-1] < 0.5 * other.losses()[-1]


def test_overfit_takes_the_micro_steps_of_one_step(train):
    one = train("one", {"-a": 1, "-x": 10, "-b": 4, "-l": 0.001, "--shuffle": 0})
    two = train("two", {"-a": 1, "-x": 10, "-b": 2, "-d": 4 * TINY["-t"], "-l": 0.001, "--shuffle": 0})
    assert numpy.allclose(one.losses(), two.losses(), atol=1e-5)
