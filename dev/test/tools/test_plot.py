"""compare.py and plot.py on logs made here, whose table is known."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

import compare
import plot

STEPS = 200


def write_process(path, worker, rank, workers, ranks, loss, inner_bytes, syncs, waited, cosines=()):
    """inner_bytes: sent in every step.   syncs: [(send step, bytes)], whose fragments are 0, 1, 2, 0, 1, ...
    cosines: between workers' outer gradients, of the first syncs"""
    lines = [{"type": "run", "version": 2, "worker": worker, "rank": rank, "workers": workers, "ranks": ranks,
              "parameters": 1_240_000, "options": {"--seed": "1"}}]
    lines.append({"type": "eval", "step": 0, "time": 0.1, "loss": 5.5})
    for step in range(1, STEPS + 1):
        now = loss + 4 / (1 + step / 8)
        noise = 0.03 * ((step * 7 + worker) % 5 - 2)
        lines.append({"type": "step", "step": step, "time": step * 0.1, "loss": now + noise, "lr": 1e-3,
                      "norm": 1.0, "seconds": 0.1, "tokens": step * 1000 * ranks, "tokens_per_second": 1e4 * ranks,
                      "inner_bytes_sent": step * inner_bytes, "inner_bytes_received": step * inner_bytes})
        lines += [{"type": "sync", "sync": sync, "fragment": sync % 3, "send_step": sent, "apply_step": step,
                   "time": step * 0.1, "bytes_sent": count, "bytes_received": count, "wire_seconds": 0.01,
                   "waited_seconds": waited / len(syncs),
                   **({"cosines": cosines[sync]} if sync < len(cosines) else {})}
                  for sync, (sent, count) in enumerate(syncs) if sent == step - 1]
        if step % 25 == 0:
            lines.append({"type": "eval", "step": step, "time": step * 0.1,
                          "loss": loss if step == STEPS else now})
    lines.append({"type": "end", "step": STEPS, "time": 21.0, "train_seconds": 20.0,
                  "inner_bytes_sent": STEPS * inner_bytes,
                  "outer_bytes_sent": sum(count for _, count in syncs), "waited_seconds": waited})
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path):
    """Data-parallel (1 x 2), classic (2 x 1) and streaming (2 x 1) folders."""
    for rank in range(2):
        write_process(tmp_path / "data-parallel" / ("metrics.jsonl" if rank == 0 else "metrics_00001.jsonl"),
                      0, rank, 1, 2, 2.0, 5_000_000, [], 0)
    for worker in range(2):
        file = "metrics.jsonl" if worker == 0 else "metrics_00001.jsonl"
        write_process(tmp_path / "classic" / file, worker, 0, 2, 1, 2.05, 0,
                      [(step, 5_000_000) for step in range(25, STEPS, 25)], 1.5 + worker)
        write_process(tmp_path / "streaming" / file, worker, 0, 2, 1, 2.02, 0,
                      [(step, 250_000) for step in range(8, STEPS, 8)], 0.05 + worker)
    return [tmp_path / name for name in ("data-parallel", "classic", "streaming")]


def command(script, *arguments):
    return subprocess.run([sys.executable, ROOT / "dev/tools" / script, *arguments], capture_output=True, text=True)


def test_the_table_holds_the_numbers_of_the_logs(runs):
    rows = {row[0].strip(): row[1:] for row in compare.table([compare.read_run(folder) for folder in runs])}
    assert rows["validation loss"] == ["2.0000", "2.0500 (+2.50%)", "2.0200 (+1.00%)"]
    assert rows["sent by a process"] == ["1.00 GB", "35.0 MB", "6.00 MB"]
    assert rows["fewer than data-parallel, as sent"] == ["-", "29x", "167x"]
    assert rows["fewer than that in bf16"] == ["-", "14x", "83x"]
    assert rows["most sent at once"] == ["5.00 MB in a step", "5.00 MB in a sync", "250 kB in a sync"]
    assert rows["worker 0 waited"] == ["-", "1.50 s (7.50%)", "0.05 s (0.25%)"]
    assert rows["worker 1 waited"] == ["-", "2.50 s (12.50%)", "1.05 s (5.25%)"]
    assert rows["tokens trained on"] == ["400,000", "400,000", "400,000"]
    assert rows["tokens/s, all workers"] == ["20,000", "20,000", "20,000"]
    assert [compare.ratio_text(*bytes) for bytes in [(0, 1), (2, 95), (19, 10), (167, 1)]] == ["-", "0.021x", "1.9x", "167x"]


def test_the_table_takes_the_process_that_sent_most(runs):
    write_process(runs[2] / "metrics_00001.jsonl", 1, 0, 2, 1, 2.02, 0, [(100, 7_000_000)], 0)
    assert compare.bytes_sent(compare.read_run(runs[2])) == 7_000_000


def test_compare_prints_aligned_columns(runs):
    result = command("compare.py", *runs)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len({len(line) for line in lines}) == 1 and "167x" in result.stdout
    assert "different numbers of tokens" not in result.stdout


def test_runs_of_different_lengths_are_pointed_out(runs):
    log = runs[1] / "metrics.jsonl"
    log.write_text(log.read_text().replace('"tokens_per_second": 10000.0', '"tokens_per_second": 9000.0', 1))
    assert "different numbers of tokens" in command("compare.py", *runs).stdout


def test_tokens_are_counted_where_a_resume_changed_the_workers(tmp_path):
    """Three workers, from step 100 on one worker of two ranks, from step 150 on two. Worker 1's counter begins anew."""
    places = {(0, 0): (0, 0, 3, 1), (1, 0): (1, 0, 3, 1), (2, 0): (2, 0, 3, 1),  # process, step: its place
              (0, 100): (0, 0, 1, 2), (1, 100): (0, 1, 1, 2), (0, 150): (0, 0, 2, 1), (1, 150): (1, 0, 2, 1)}
    for process in range(3):
        log = tmp_path / ("metrics.jsonl" if process == 0 else f"metrics_0000{process}.jsonl")
        write_process(log, *places[process, 0], 2.0, 0, [], 0)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for step in (100, 150):
            if (process, step) in places:
                names = zip(("worker", "rank", "workers", "ranks"), places[process, step])
                at = [line.get("step") for line in lines if line["type"] == "step"].index(step)
                lines.insert(lines.index([line for line in lines if line["type"] == "step"][at]) + 1,
                             {"type": "resume", "step": step, **dict(names)})
            elif step == 100:
                lines = [line for line in lines if line.get("step", 0) <= 100 and line["type"] != "end"]
        for line in lines:
            if process == 1 and line["type"] == "step" and line["step"] > 150:
                line["tokens"] -= 150_000
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = compare.read_run(tmp_path)
    assert compare.tokens(run) == 100 * 3000 + 50 * 1000 + 50 * 2000
    assert [plot.step_places(run, "tokens")[step] for step in (0, 100, 150, 200)] == [0, 300_000, 350_000, 450_000]


def test_a_picture_is_drawn(runs, tmp_path):
    result = command("plot.py", *runs, "-o", tmp_path / "losses.png")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "losses.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_cosines_are_the_mean_over_pairs_for_each_fragment(runs):
    cosines = [[0.5, 0.25, 0.75], [1, None, 0], None, [-0.5, 0, 0.5], [], [None, None, None], [0.1, 0.2, 0.6]]
    write_process(runs[2] / "metrics.jsonl", 0, 0, 2, 1, 2.02, 0, [(step, 10) for step in range(8, STEPS, 8)],
                  0, cosines)
    found = plot.cosines_by_fragment(compare.read_run(runs[2]))
    assert found == {0: ([8, 32, 56], [0.5, 0, pytest.approx(0.3)]), 1: ([16], [0.5])}
    assert plot.cosines_by_fragment(compare.read_run(runs[1])) == {}


def test_waits_sum_up_over_the_steps_of_the_rank_that_waited_longest(runs):
    steps, seconds = plot.waits(compare.read_run(runs[1]), 1)
    assert steps == list(range(26, STEPS, 25))
    assert seconds[0] == pytest.approx(2.5 / 7) and seconds[-1] == pytest.approx(2.5)
    write_process(runs[0] / "metrics.jsonl", 0, 0, 1, 2, 2.0, 0, [(5, 1)], 1)
    write_process(runs[0] / "metrics_00001.jsonl", 0, 1, 1, 2, 2.0, 0, [(6, 1)], 3)
    assert plot.waits(compare.read_run(runs[0]), 0) == ([7], [3])


def panels(*runs, x="step"):
    """How many in each row."""
    return [len(row[1]) for row in plot.rows_of(drawn(*runs, x=x))]


def drawn(*runs, x="step"):
    return [plot.Drawn(run, run.name, "black", plot.step_places(run, x)) for run in runs]


def test_steps_lie_where_their_tokens_and_times_are(runs):
    dp, classic, _ = (compare.read_run(folder) for folder in runs)
    assert plot.step_places(dp, "step")[STEPS] == STEPS and plot.step_places(dp, "time")[0] == 0
    assert [plot.step_places(run, "tokens")[50] for run in (dp, classic)] == [100_000, 100_000]
    assert plot.step_places(dp, "time")[50] == pytest.approx(5.0)
    assert plot.excerpt(drawn(dp, classic)) == (40, 160)
    begin, end = plot.excerpt(drawn(dp, classic, x="time"))
    assert (begin, end) == (pytest.approx(4), pytest.approx(16))


@pytest.mark.parametrize("x", ["tokens", "time"])
def test_a_picture_against_tokens_or_time_is_another_one(runs, tmp_path, x):
    for name, more in [("steps.png", []), ("other.png", ["--x", x])]:
        assert command("plot.py", *runs, "-o", tmp_path / name, *more).returncode == 0
    assert (tmp_path / "other.png").read_bytes() != (tmp_path / "steps.png").read_bytes()


def test_runs_of_the_same_name_are_told_apart(runs, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs[0 if name == "a" else 1].rename(tmp_path / name / "log")
    result = command("compare.py", tmp_path / "a/log", tmp_path / "b/log")
    assert result.stdout.split("\n")[0].split() == ["a/log", "b/log"]


def test_hellaswag_mfu_and_skipped_updates_have_rows_where_a_run_has_them(runs):
    dp, classic, _ = (compare.read_run(folder) for folder in runs)
    names = [row[0] for row in compare.table([dp, classic])]
    assert not {"HellaSwag accuracy", "MFU", "updates skipped"} & set(names)
    classic.processes[0].hellaswags.append({"step": STEPS, "accuracy": 0.29446})
    classic.processes[1].steps[3]["skipped"] = True
    for line, mfu in zip(dp.processes[0].steps, [None, 0.5, 0.25, 0.25]):
        line["mfu"] = mfu
    dp.processes[0].steps[1]["seconds"] = 0.2
    rows = {row[0]: row[1:] for row in compare.table([dp, classic])}
    assert rows["MFU"] == ["0.375", "-"]
    assert rows["HellaSwag accuracy"] == ["-", "0.2945"] and rows["updates skipped"] == ["0", "1"]


def test_only_what_was_measured_gets_a_panel(runs, tmp_path):
    dp, classic, streaming = (compare.read_run(folder) for folder in runs)
    assert panels(dp) == [1, 1]  # losses and traffic
    assert panels(dp, classic) == [1, 1, 1]  # and waits
    for run in (classic, streaming):
        run.processes[0].syncs[0]["cosines"] = [0.5]
    assert panels(dp, classic, streaming) == [1, 1, 2, 1]  # cosines beside each other
    streaming.processes[0].hellaswags.append({"step": 100, "accuracy": 0.25})
    assert panels(dp, classic, streaming) == [1, 1, 1, 2, 1]
    plot.draw([dp, classic, streaming], tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("x, places", [("step", [0, 1, 12, 15]), ("tokens", [0, 1000, 11000, 13000]),
                                       ("time", [0, 0.1, 1.2, 1.5])])
def test_a_merge_in_a_step_that_worker_0_skipped_has_a_place(runs, tmp_path, x, places):
    """An elastic worker that was behind goes on at a later step, and so worker 0's log lacks some of worker 1's steps."""
    streaming = compare.read_run(runs[2])
    for process in streaming.processes:
        for line in process.steps:  # workers of half the tokens: 1000 of both in a step
            line["tokens_per_second"] /= 2
    first = streaming.processes[0]
    first.steps[:] = [line for line in first.steps if not 10 < line["step"] < 15]
    first.syncs[:] = [line for line in first.syncs if not 10 < line["apply_step"] < 15]
    streaming.processes[1].syncs[0].update(send_step=11, apply_step=12)
    [one] = drawn(streaming, x=x)
    assert list(one.places([0, 1, 12, 15])) == pytest.approx(places)
    if x == "tokens":  # nor does it go back where another worker skips steps
        [one] = drawn(compare.read_run(runs[2]), x=x)
        one.run.processes[1].steps[:] = [line for line in one.run.processes[1].steps if not 20 < line["step"] < 25]
        at = list(plot.step_places(one.run, x).values())
        assert at == sorted(at)
    if x == "step":
        plot.draw([streaming], tmp_path / "elastic.png", x)
        assert (tmp_path / "elastic.png").exists()


def test_elastic_workers_without_an_end_are_left_out_and_named(tmp_path):
    """Of four workers one was dead when the others ended, and one never came."""
    folder = tmp_path / "elastic"
    for worker in range(3):
        log = folder / ("metrics.jsonl" if worker == 0 else f"metrics_0000{worker}.jsonl")
        write_process(log, worker, 0, 4, 1, 2.02, 0, [(step, 250_000) for step in range(8, STEPS, 8)], 0.05)
        lines = log.read_text().replace('{"--seed": "1"}', '{"outer-transport": "store"}').splitlines(True)
        log.write_text("".join(lines[:-1] if worker == 1 else lines))
    result = command("compare.py", folder)
    assert result.returncode == 0 and result.stderr.count("warning: left out: ") == 2
    assert "did not finish" in result.stderr and "metrics_00003.jsonl" in result.stderr
    assert "4 x 1" in result.stdout and "worker 2 waited" in result.stdout and "worker 1 waited" not in result.stdout
    result = command("plot.py", folder, "-o", tmp_path / "x.png")
    assert result.returncode == 0 and (tmp_path / "x.png").exists()


@pytest.mark.parametrize("script, more, package", [
    ("plot.py", ["x", "-o", "x.png"], "matplotlib"), ("export_hf.py", ["x", "y"], "numpy"),
    ("import_hf.py", ["x", "y"], "numpy"), ("simulate.py", ["--paper"], "numpy"),
    ("simulate.py", ["--plot", "x.png"], "matplotlib")])
def test_a_missing_python_package_is_one_line(tmp_path, script, more, package):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{package}'\")")
    result = subprocess.run([sys.executable, ROOT / "dev/tools" / script, *more], capture_output=True, text=True,
                            env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert f"error: {package} is missing: run make setup" in result.stderr and script in result.stderr


@pytest.mark.parametrize("script, more", [("compare.py", []), ("plot.py", ["-o", "x.png"])])
def test_what_is_not_a_run_is_one_line_and_exit_2(script, more, runs, tmp_path):
    log = runs[0] / "metrics_00001.jsonl"
    good = log.read_bytes()
    just_begun = b"".join(good.splitlines(True)[:2])
    not_utf8 = good.replace(b"--seed", b"--s\xe9ed")
    for text, word in [(just_begun, "has no step yet"), (b"nonsense\n", "line 1"), (not_utf8, "line 1"),
                       (None, "metrics_00001.jsonl is missing: copy the logs of all processes")]:
        log.unlink() if text is None else log.write_bytes(text)
        result = command(script, *runs, *more)
        assert result.returncode == 2 and word in result.stderr
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_a_run_that_goes_on_or_diverged_is_compared_and_drawn_as_far_as_it_is(runs, tmp_path):
    """Its sums are those of an end line at this place; a copied log may end within a line."""
    whole = compare.read_run(runs[2])
    for process, log in enumerate(sorted(runs[2].glob("metrics*.jsonl"))):
        lines = log.read_text().splitlines(True)[:-1]
        if process == 0:
            last = {**json.loads(lines[-2]), "loss": None}  # before the last validation: the step that diverged
            lines[-2:] = [json.dumps(last) + "\n", '{"type":"ev']
        log.write_text("".join(lines))
    with pytest.raises(compare.UserError, match="did not finish"):
        compare.read_run(runs[2])
    result = command("compare.py", *runs)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[0].split() == ["data-parallel", "classic", "streaming", "(unfinished)"]
    [run] = compare.read_runs([runs[2]])
    assert [p.end[name] for p in run.processes for name in ("outer_bytes_sent", "inner_bytes_sent")] == \
        [p.end[name] for p in whole.processes for name in ("outer_bytes_sent", "inner_bytes_sent")]
    for process, before in zip(run.processes, whole.processes):
        assert process.end["waited_seconds"] == pytest.approx(before.end["waited_seconds"])
        assert process.end["train_seconds"] == pytest.approx(before.end["train_seconds"])
    result = command("plot.py", *runs, "-o", tmp_path / "x.png")
    assert result.returncode == 0, result.stderr
    steps, losses = plot.training_losses(run, 1)
    assert steps[-1] == STEPS and None not in losses  # the other worker's


def test_only_data_parallel_in_fp32_is_compared_as_if_in_bf16(runs):
    dp, classic, _ = (compare.read_run(folder) for folder in runs)
    assert compare.sends_fp32(dp) and not compare.sends_fp32(classic)
    for line in dp.processes[0].steps:  # parameters in bf16, as on a GPU
        line["inner_bytes_sent"] *= 6 / 8
    assert not any("in bf16" in row[0] for row in compare.table([dp, classic]))


def test_an_elastic_run_needs_no_worker_0(runs, tmp_path):
    """It may have died, or have written its log at another site."""
    for log in runs[2].glob("metrics*.jsonl"):
        log.write_text(log.read_text().replace('{"--seed": "1"}', '{"outer-transport": "store"}'))
    first = runs[2] / "metrics.jsonl"
    first.write_text("".join(first.read_text().splitlines(True)[:-1]))
    for _ in ("unfinished", "missing"):
        result = command("compare.py", runs[2])
        assert result.returncode == 0 and "metrics.jsonl" in result.stderr
        assert "worker 1 waited" in result.stdout and "worker 0 waited" not in result.stdout
        assert "unfinished" not in result.stdout
        first.unlink(missing_ok=True)
    assert command("plot.py", runs[2], "-o", tmp_path / "x.png").returncode == 0


def test_more_than_eight_workers_cosines_are_with_the_mean(runs):
    streaming = compare.read_run(runs[2])
    streaming.processes[0].syncs[0].update(cosines=None, mean_cosines=[0.5, 0.7])
    assert plot.cosines_by_fragment(streaming) == {0: ([8], [pytest.approx(0.6)])}
