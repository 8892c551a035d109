"""dev/bench/quality.py: its runs read the same tokens, its rates come from its sweeps, its tables are of
the logs and the local losses those of the run's own bits. Most logs are made here; the last test trains."""
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import TRAINER

import quality

STEPS = 480
ONLY = ["data-parallel", "classic-m2-h30", "fp4_e2m1-m2-h30-tau1", "fp4-m2-h100-tau1"]
LOSSES = {"data-parallel": [2.0, 2.2], "classic-m2-h30": [2.02, 2.2], "fp4_e2m1-m2-h30-tau1": [2.03, 2.222],
          "fp4-m2-h100-tau1": [2.1]}


@pytest.fixture
def arguments(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "val"):
        (text / f"x_{split}_000000.bin").touch()
    return quality.parse_arguments(["--scale", "trial", "--seeds", "2", "--out", str(tmp_path), "--text",
                                    str(text), "--trainer", "/bin/false", "--tokens", str(256 * STEPS),
                                    "--only", *ONLY])


def make_run(arguments, one, loss, along=(2.5, 2.4, 2.3), local=None):
    """A finished run of one line a step, with `along` after each quarter but the last."""
    folder, options = arguments.out / one.name, one.options
    ranks = options.get("--ranks", 1)
    folder.mkdir()
    steps = options["-x"]
    losses = dict(zip(range(steps // 4, steps, steps // 4), along)) | {steps: loss}
    for process in range(one.method.workers * ranks):
        lines = [{"type": "run", "version": 1, "worker": process // ranks, "rank": process % ranks,
                  "workers": one.method.workers, "ranks": ranks, "parameters": 860_000, "options": {}},
                 {"type": "step", "step": steps, "tokens": 1, "inner_bytes_sent": 0}]
        lines += [{"type": "eval", "step": step, "loss": of_step} for step, of_step in losses.items()]
        lines.append({"type": "end", "step": steps, "train_seconds": 1.0, "inner_bytes_sent": 0,
                      "outer_bytes_sent": 1000 * one.method.workers, "waited_seconds": 0.0})
        name = "metrics.jsonl" if process == 0 else f"metrics_{process:05d}.jsonl"
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {"options": options, "program": "a", "seconds": 60, "local": local or []}
    (folder / "made_by.json").write_text(json.dumps(found))
    return folder


def make_sweeps(arguments, by_learning_rate=(2.3, 2.0, 2.1), by_outer_lr=(3.3, 3.15, None, 3.09),
                classic=(3.2, None, 3.15, 3.3)):
    """The best inner rates are 0.004 for data-parallel and 0.002 for the others, the best outer ones 0.7 and
    0.4 (None: the loss of LOSSES, for it is a long run, too). In short runs the gaps are 2% and 4%."""
    def make(sweep, losses):
        for one, loss in zip(sweep.values(), losses):
            loss = loss or LOSSES[one.method.name][0]
            if not (arguments.out / one.name).exists():  # one of them is of both sweeps
                make_run(arguments, one, loss, local=[loss + 0.1, loss + 0.2] * (one.method.workers > 1))

    jobs = quality.Jobs(arguments)
    make(jobs.by_learning_rate[quality.DATA_PARALLEL], by_learning_rate)
    make(jobs.by_learning_rate[quality.STREAMING], (by_outer_lr[2], 4.0, 4.1))
    jobs = quality.Jobs(arguments)
    make(jobs.by_outer_lr[quality.STREAMING], by_outer_lr)
    make(jobs.by_outer_lr[quality.CLASSIC], classic)
    make(jobs.by_rate_short[quality.DATA_PARALLEL], (3.2, 3.1, 3.0))
    make(jobs.by_rate_short[quality.STREAMING], (3.3, 3.15, 3.06, 3.09))
    make(jobs.by_rate_short[quality.CLASSIC], (3.2, 3.12, 3.15, 3.3))


def missing(arguments):
    """The long runs but that which is of a sweep."""
    return [one for one in quality.Jobs(arguments).long if not (arguments.out / one.name).exists()]


def make_long_runs(arguments):
    for one in missing(arguments):
        loss = LOSSES[one.method.name][one.seed - 1]
        make_run(arguments, one, loss, local=[loss + 0.1, loss + 0.2] if one.method.workers > 1 else None)


def rows(text, title):
    """{first cells: other cells} of the table that has a column of this title."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    begin = next(n for n, line in enumerate(lines) if title in line)
    width = len(lines[begin])
    same = [line for line in lines[begin + 2:] if len(line) == width]
    return {tuple(line[:4]): line[4:] for line in same}


@pytest.mark.parametrize("scale", quality.SCALES)
def test_all_runs_train_and_validate_on_the_same_tokens(scale, tmp_path):
    arguments = quality.parse_arguments(["--scale", scale, "--text", str(tmp_path), "--out", str(tmp_path)])
    sizes = arguments.scale
    names = [method.name for method in quality.METHODS]
    assert len(names) == len(set(names)) == 14 and set(quality.MAIN) < set(names)
    for method in quality.METHODS:
        options = quality.job(arguments, method, sizes.steps, 1, 0.001, 0.4, "name").options
        ranks = options.get("--ranks", 1)
        assert options["-b"] * options["-t"] * method.workers * ranks == sizes.step_tokens
        assert options["-b"] * options["-t"] * options["-m"] * ranks == sizes.validation_tokens
        assert sizes.steps % method.inner_steps == 0 if method.inner_steps and scale != "trial" else True


def test_the_rates_are_those_of_the_best_runs_and_the_long_runs_wait_for_them(arguments):
    jobs = quality.Jobs(arguments)
    assert [one.options["-l"] for one in jobs.all()] == [0.002, 0.004, 0.008] * 3
    for one in jobs.all():
        short = one in jobs.by_rate_short[quality.DATA_PARALLEL].values()
        assert (one.options["-x"], one.seed) == ((STEPS // 2, quality.SWEEP_SEED) if short else (STEPS, 1))
    make_sweeps(arguments)
    jobs = quality.Jobs(arguments)
    assert len(jobs.all()) == 3 + 3 + 4 + 4 - 1 + 7 - 3 + 3 + 4 + 4  # -: those that are in two of these
    assert jobs.learning_rate == {quality.DATA_PARALLEL: 0.004, quality.STREAMING: 0.002}
    assert jobs.outer_lr == {quality.STREAMING: 0.7, quality.CLASSIC: 0.4}
    assert [one.method.name for one in jobs.long] == [*ONLY[:3], *ONLY[:3], ONLY[3]]
    assert [one.seed for one in jobs.long] == [1, 1, 1, 2, 2, 2, 1]
    for one in jobs.long:
        assert one.options["-l"] == (0.004 if one.method.kind == "data-parallel" else 0.002)
        assert one.options["-x"] == STEPS
        rates = {"data-parallel": None, "classic": 0.4}
        assert one.options.get("--outer-lr") == rates.get(one.method.kind, 0.7)


def test_a_rate_that_is_given_is_not_looked_for(arguments):
    arguments.learning_rates, arguments.outer_lrs = [0.003], [0.4]
    jobs = quality.Jobs(arguments)
    assert jobs.all() == jobs.long and len(jobs.long) == 7
    assert {one.options["-l"] for one in jobs.long} == {0.003}


def test_the_tables_hold_paired_gaps_local_losses_and_the_trend(arguments):
    make_sweeps(arguments)
    make_long_runs(arguments)
    text = quality.report(arguments)
    table = rows(text, "to data-parallel: mean ± std")
    assert table["-", "-", "-", "data-parallel"][:4] == ["2.1000", "-", "-", "-"]
    assert table["2", "30", "0", "DiLoCo, fp32"] == ["2.1100", "+0.50% ± 0.71", "+0.9%", "2.2600", "2.00 kB",
                                                     "2"]
    assert table["2", "30", "1", "streaming, fp4 E2M1"][1:3] == ["+1.25% ± 0.35", "+0.6%"]
    assert table["2", "100", "1", "streaming, fp4 E3M0"][:4] == ["2.1000", "+5.00%", "+1.4%", "2.2500"]
    assert "tau = 1: +0.75% ± 0.36 to DiLoCo's loss: not more than 1% above it." in text
    trend = rows(text, "trained on 50% alone")
    assert trend["2", "30", "0", "DiLoCo, fp32"] == ["+4.00%", "+0.00%", "+0.00%", "+0.00%", "+0.50%"]
    assert trend["2", "30", "1", "streaming, fp4 E2M1"][0] == "+2.00%"
    assert "rate of data-parallel: 0.002: 2.3000, 0.004: 2.0000, 0.008: 2.1000. Taken: 0.004." in text
    assert "Short runs, rate of data-parallel: 0.002: 3.2000, 0.004: 3.1000, 0.008: 3.0000.\n" in text
    assert "7 long runs, 7 minutes" in text and "missing" not in text


def test_a_rate_at_the_end_of_its_range_and_a_bar_that_is_missed_are_said(arguments):
    make_sweeps(arguments, by_outer_lr=(3.3, 3.2, 3.1, 2.1))
    missed = {**LOSSES, "fp4_e2m1-m2-h30-tau1": [2.1, 2.3]}
    for one in missing(arguments):
        make_run(arguments, one, missed[one.method.name][one.seed - 1])
    text = quality.report(arguments)
    assert "Taken: 1, the end of the range" in text
    assert "+4.25% ± 0.41 to DiLoCo's loss: MORE than 1% above it." in text


def test_what_is_there_is_not_run_again_and_what_is_missing_is_said(arguments, capsys):
    with pytest.raises(quality.UserError, match="data-parallel-lr0.002-seed1 failed"):
        quality.run_all(arguments)  # the trainer is /bin/false
    assert "No long run has finished" in quality.report(arguments)
    make_sweeps(arguments)
    assert "4 of 7 long runs are missing" in quality.report(arguments)  # three are of a sweep
    make_long_runs(arguments)
    quality.run_all(arguments)
    name = "classic-m2-h30-lr0.002-outer0.4-seed2"
    (arguments.out / name).rename(arguments.out / f"{name}.part")
    assert "1 of 7 long runs are missing" in quality.report(arguments)
    with pytest.raises(quality.UserError, match=f"{name} failed"):
        quality.run_all(arguments)
    arguments.minutes = 0
    quality.run_all(arguments)
    assert "0 minutes are over" in capsys.readouterr().out


def test_runs_with_other_options_are_not_taken_for_these(arguments):
    make_sweeps(arguments)
    arguments.scale = replace(arguments.scale, warmup=11)
    with pytest.raises(quality.UserError, match="was run with other options"):
        quality.run_all(arguments)


def test_another_build_of_the_trainer_is_said_even_if_only_short_runs_are_of_it(arguments):
    make_sweeps(arguments)
    make_long_runs(arguments)
    assert "different builds" not in quality.report(arguments)
    path = arguments.out / quality.Jobs(arguments).by_outer_lr[quality.CLASSIC][0.4].name / "made_by.json"
    path.write_text(path.read_text().replace('"program": "a"', '"program": "b"'))
    assert "made by 2 different builds" in quality.report(arguments)


def test_a_trainer_beside_the_shell_is_found_and_one_that_does_not_start_is_one_line(arguments, tmp_path):
    (tmp_path / "trainer").write_text("#!/bin/sh\necho 'error: it was found: good' >&2; exit 2\n")
    words = ["--scale", "trial", "--text", str(arguments.text), "--out", "runs", "--trainer", "./trainer"]
    for mode, message in ((0o755, "it was found"), (0o644, "trainer cannot be used (Permission denied)")):
        (tmp_path / "trainer").chmod(mode)
        result = subprocess.run([sys.executable, quality.__file__, *words], capture_output=True, text=True,
                                cwd=tmp_path)
        assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("words, what", [
    (["--tokens", "25600"], "give --tokens 30720 or more"),
    (["--text", "nowhere"], "nowhere holds no token shards"),
    (["--tokens", "0"], "0 is not above zero"), (["--seeds", "-1"], "-1 is not above zero"),
    (["--learning-rate", "nan"], "nan is not above zero"), (["--minutes", "nan"], "nan is not above zero"),
    (["--minutes", "x"], "invalid float value"),
    (["--report", "nowhere/report.md"], "nowhere/report.md cannot be written"),
    (["--trainer", "nowhere"], "nowhere is not there"), (["--only", "x"], "invalid choice")])
def test_wrong_options_are_the_users_mistake(arguments, words, what):
    given = ["--scale", "trial", "--text", str(arguments.text), "--out", str(arguments.out / "new"),
             "--trainer", "/bin/false"]
    with pytest.raises(quality.UserError, match=what):
        quality.main([*given, *words])
    assert not (arguments.out / "new").exists()


def test_local_losses_are_those_of_the_same_run_evaluated_on_local_parameters(arguments, train, tokens):
    arguments.text, arguments.trainer = tokens, TRAINER
    arguments.learning_rates, arguments.outer_lrs, arguments.seeds = [0.004], [0.4], 1
    arguments.scale = replace(arguments.scale, more=(("--vocab-size", 64),), validation_tokens=256)
    arguments.tokens, arguments.names = 256 * 120, ["data-parallel", "fp4_e2m1-m2-h30-tau1"]
    quality.run_all(arguments)
    one = quality.Jobs(arguments).long[1]
    made = quality.made_by(arguments.out / one.name, one.options)
    local = train("local", {**one.options, "-k": "cosine", "--eval": "local", "--timeout": None,
                            "--matmul-precision": None})
    losses = [local.lines("eval", worker)[-1]["loss"] for worker in (0, 1)]
    assert made["local"] == losses and losses[0] != losses[1]
    assert made["local"][0] != quality.loss_of(arguments, one)
    assert not list(arguments.out.glob("*.part*")) and not list((arguments.out / one.name).glob("*.bin"))
    assert "streaming, fp4 E2M1" in quality.report(arguments)
