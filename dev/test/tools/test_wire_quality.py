"""dev/bench/wire_quality.py: its runs read the same tokens, its table is of the logs, and what is there is
not run again. The logs are made here."""
import json
import sys
from pathlib import Path

import pytest

import wire_quality
from test_plot import write_process

LOSSES = {"data-parallel": [2.0, 2.2], "m2-fp32": [2.1, 2.3], "m2-fp4": [2.121, 2.3], "m4-fp32": [2.2, 2.4]}


@pytest.fixture
def arguments(tmp_path):
    words = ["--seeds", "2", "--out", str(tmp_path), "--text", "text",
             "--trainer", "/bin/false", "--only", *LOSSES]
    return wire_quality.parse_arguments(words)


@pytest.fixture
def settings(arguments):
    return [one for one in wire_quality.SETTINGS if one.name in LOSSES]


def make_run(arguments, setting, seed, seconds=60):
    folder = arguments.out / f"{setting.name}-seed{seed}"
    options = wire_quality.options_of(setting, seed, arguments.tokens, arguments.text)
    workers, ranks = setting.workers, setting.options.get("--ranks", 1)
    for process in range(workers * ranks):
        write_process(folder / ("metrics.jsonl" if process == 0 else f"metrics_{process:05d}.jsonl"),
                      process // ranks, process % ranks, workers, ranks, LOSSES[setting.name][seed - 1], 0,
                      [(50, 1000 * workers)], 0)
    (folder / "made_by.json").write_text(json.dumps({"options": options, "program": "a", "seconds": seconds}))
    return folder


def test_all_runs_train_and_validate_on_the_same_tokens():
    names = [setting.name for setting in wire_quality.SETTINGS]
    assert len(names) == len(set(names)) == 15
    for setting in wire_quality.SETTINGS:
        options = wire_quality.options_of(setting, 1, 1_200_000, "text")
        ranks = options.get("--ranks", 1)
        assert options["-b"] * options["-t"] * options["--workers"] * ranks == wire_quality.TOKENS_A_STEP
        assert options["-b"] * options["-m"] * ranks == wire_quality.VALIDATION_SEQUENCES
        assert options["-x"] == 1_200_000 // wire_quality.TOKENS_A_STEP


def test_the_table_holds_paired_differences_over_seeds(arguments, settings):
    for setting in settings:
        for seed in (1, 2):
            make_run(arguments, setting, seed)
    text = wire_quality.report(arguments, settings)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    table = {(line[0], line[1]): line[3:] for line in lines}
    assert table["2", "fp32"] == ["2.2000", "-", "-", "2.00 kB", "2"]
    assert table["2", "fp4 E3M0"] == ["2.2105", "+0.500% ± 0.707", "+1.00 +0.00", "2.00 kB", "2"]
    assert table["2", "data-parallel"][1] == "-4.555% ± 0.293"
    assert table["4", "data-parallel"][1] == "-8.712% ± 0.536"
    assert "2 workers: fp4 E3M0 to nearest is +0.500% (standard error 0.500) from fp32, NOT within" in text
    assert "8 runs, 8 minutes" in text and "missing" not in text
    assert f"1,200,000 tokens of {Path('text').resolve()}, 2048 a step" in text


def test_what_is_there_is_not_run_again_and_what_is_missing_is_said(arguments, settings):
    for setting in settings:
        for seed in (1, 2):
            make_run(arguments, setting, seed)
    wire_quality.run_all(arguments, settings)  # the trainer is /bin/false
    missing = arguments.out / "m2-fp4-seed2"
    missing.rename(arguments.out / "m2-fp4-seed2.part")
    assert "1 of 8 runs are missing" in wire_quality.report(arguments, settings)
    with pytest.raises(wire_quality.UserError, match="m2-fp4-seed2 failed"):
        wire_quality.run_all(arguments, settings)
    arguments.minutes = 0
    wire_quality.run_all(arguments, settings)  # no run begins


def test_runs_with_other_options_are_not_taken_for_these(arguments, settings):
    folder = make_run(arguments, settings[0], 1)
    arguments.tokens //= 2
    with pytest.raises(wire_quality.UserError, match=f"{folder.name} was run with other options"):
        wire_quality.run_all(arguments, settings)
    (folder / "made_by.json").unlink()
    with pytest.raises(wire_quality.UserError, match="is not a run of this benchmark"):
        wire_quality.report(arguments, settings)


@pytest.mark.parametrize("words, what", [
    (["--seeds", "0"], "0 is not above zero"), (["--tokens", "many"], "invalid int value"),
    (["--only", "x"], "invalid choice"), (["--report", "nowhere/x.md"], "nowhere/x.md cannot be written"),
    (["--trainer", "nowhere"], "there is no nowhere")])
def test_wrong_options_are_the_users_mistake(tmp_path, words, what):
    with pytest.raises(wire_quality.UserError, match=what):
        wire_quality.main(["--trainer", "/bin/false", "--out", str(tmp_path / "new"), *words])
    assert not (tmp_path / "new").exists()
