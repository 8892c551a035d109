"""What the trainer prints of its plan: fragments by pattern and offsets; Mbit/s, once steps are measured."""

import re

import pytest

OUTER = {"--workers": 2, "--layers": 5, "--fragment-layers": 2, "--inner-steps": 6, "--overlap": 2}


def fragments(run):
    """[(offset, bytes a sync, blocks)] of the plan."""
    rows = re.findall(r"^ +\d+ +(\d+) +6 +(\d+)  (\S.*)$", run.stdout, re.M)
    return [(int(offset), int(count), blocks) for offset, count, blocks in rows]


def test_balanced_fragments_are_as_many_as_strided_ones_and_the_largest_is_smaller(train):
    of_three = {**OUTER, "-x": 6, "--fragment-layers": 3}
    strided = fragments(train("strided", {**of_three, "--fragment-pattern": "strided"}))
    balanced = fragments(train("balanced", {**of_three, "--fragment-pattern": "balanced"}))
    assert [blocks for _, _, blocks in strided] == ["h.0, h.2, h.4", "h.1, h.3", "embedding"]
    assert [blocks for _, _, blocks in balanced] == ["h.0, h.3", "h.1, h.4", "h.2, embedding"]
    assert max(count for _, count, _ in balanced) < 0.7 * max(count for _, count, _ in strided)


def test_the_plan_in_megabits_is_printed_once_and_is_that_of_the_steps_measured(train):
    run = train("rates", {**OUTER, "-x": 30})
    (seconds, average, peak, link), = re.findall(
        r"^at (\S+) s a step a process sends (\S+) Mbit/s on average and (\S+) Mbit/s in the step that sends "
        r"most; with an overlap of 2 a link of (\S+) Mbit/s keeps up$", run.stdout, re.M)
    steps = [row["seconds"] for row in run.lines("step")]
    assert float(seconds) == pytest.approx(sum(steps[1:11]) / 10, rel=1e-3)
    sizes = [count for _, count, _ in fragments(run)]
    assert float(average) == pytest.approx(sum(sizes) / 6 * 8e-6 / float(seconds), rel=1e-3)
    assert float(peak) == pytest.approx(max(sizes) * 8e-6 / float(seconds), rel=1e-3)
    assert float(average) <= float(link) <= float(peak)
    # 2 steps at most from one send to the next, tau = 2, and 3 until the request is on its way.
    (stop,) = re.findall(r"^a stop \(SIGTERM\) takes up to 7 steps, (\S+) s, and a checkpoint$", run.stdout,
                         re.M)
    assert float(stop) == pytest.approx(7 * float(seconds), rel=1e-2)


def test_without_H_one_is_chosen_from_the_steps_and_a_resumed_run_keeps_it(train):
    options = {name: value for name, value in OUTER.items() if name not in ("--inner-steps", "--overlap")}
    run = train("run", {**options, "-x": 40, "-n": 20, "-y": 1})
    assert "\nnote       -H is not given: H = 10 for 40 steps (100 from 100000 steps on)\n" in run.stdout
    assert "\nouter      4 outer steps, H = 10: few, so expect a loss more than 12% above data-parallel's" in run.stdout
    longer = train("run", {**options, "-x": 80, "-n": 20, "-y": 1})
    assert f"H = 10, as in {longer.folder}/config.toml" in longer.stdout and "8 outer steps" in longer.stdout
    assert "resumed after step 40" in longer.stdout and "inner-steps" not in longer.stdout
    assert "outer steps" not in train("alone", {"--layers": 2, "-x": 4}).stdout


def test_what_does_nothing_without_checkpoints_is_said(train):
    said = "note       -nk and -nm do nothing without -n"
    assert said in train("without", {"-nk": 3, "-x": 2}).stdout
    assert said not in train("with", {"-nk": 3, "-x": 2, "-n": 1}).stdout


def test_workers_at_other_sites_keep_their_H_too(start_worker, tmp_path):
    options = {name: value for name, value in OUTER.items() if name not in ("--inner-steps", "--overlap")}
    for steps in (40, 400):
        runs = [start_worker(w, {**options, "--store": f"file:{tmp_path}/meet", "-x": steps, "-n": 20, "-y": 1})
                for w in (0, 1)]
        assert [run.wait() for run in runs] == [0, 0], [run.output() for run in runs]
    for run in runs:
        assert f"H = 10, as in {run.folder}/config.toml" in run.output()
