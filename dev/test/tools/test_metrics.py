"""dev/tools/metrics.md says what is in a log; dev/tools/metrics.py reads it, while it is written and after it is cut."""
import json
import os
import re
import sys
from pathlib import Path

import pytest

from conftest import ROOT, TRAINER
from test_evaluation import eval_set, random_examples

from metrics import GrowingLog, UserError, labels, read_run  # noqa: E402

STREAMING = {"--workers": 2, "-H": 6, "--fragment-layers": 1, "--overlap": 2, "-x": 20, "-v": 10, "-m": 1,
             "-n": 10}
IS_OF_TYPE = {
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: type(value) is bool,
    "string": lambda value: type(value) is str,
    "object": lambda value: type(value) is dict and all(type(text) is str for text in value.values()),
    "list": lambda value: type(value) is list and all(type(one) in (int, float, type(None)) for one in value),
}


def documented():
    """{type of line: {field: (type, whether it may be null)}}, from the tables of dev/tools/metrics.md."""
    schema = {}
    for line in (ROOT / "dev/tools/metrics.md").read_text().splitlines():
        if heading := re.fullmatch(r"## (\w+)", line):
            fields = schema[heading[1]] = {}
        if row := re.match(r"\| `(\w+)` \| (\w+) \| ([^|]+) \|", line):
            assert row[1] not in fields and row[2] in IS_OF_TYPE
            fields[row[1]] = row[2], row[3] != "never"
    return schema


def faults(rows, schema):
    """What in the lines is not as the schema has it."""
    for row in rows:
        fields = schema.get(row["type"])
        if fields is None:
            yield f"type {row['type']} is not documented"
            continue
        for name in row.keys() - fields.keys() - {"type"}:
            yield f"{row['type']}.{name} is not documented"
        for name, (kind, may_be_null) in fields.items():
            if name not in row:
                yield f"{row['type']}.{name} is missing"
            elif row[name] is None and not may_be_null:
                yield f"{row['type']}.{name} is null"
            elif row[name] is not None and not IS_OF_TYPE[kind](row[name]):
                yield f"{row['type']}.{name} is no {kind}: {row[name]}"


def rows_of(folder):
    return [json.loads(line) for path in sorted(folder.glob("metrics*.jsonl")) for line in path.open()]


@pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")
def test_every_line_of_runs_is_documented_and_everything_documented_appears(train, tmp_path):
    (tmp_path / "set.bin").write_bytes(eval_set(random_examples(4)))
    runs = [train("streaming", {**STREAMING, "-h": 1, "--hellaswag-data": tmp_path / "set.bin"}),
            train("streaming", {**STREAMING, "-x": 24, "-y": 1}),
            train("long", {"-x": 140, "-sg": 0.5}),  # z-scores want 128 steps
            train("log", {**STREAMING, "--outer-transport": "store"}),
            train("many", {"--workers": 9, "-H": 2, "--fragment-layers": 0, "-x": 3})]
    rows, schema = [row for run in runs for row in rows_of(run.folder)], documented()
    assert sorted(set(faults(rows, schema))) == []
    assert {row["type"] for row in rows} == schema.keys()
    seen = {(row["type"], name) for row in rows for name, value in row.items() if value is not None}
    unseen = {(kind, name) for kind, fields in schema.items() for name in fields} - seen
    assert unseen <= {("step", "mfu")}  # GPUs have one
    assert {row["skipped"] for row in rows if row["type"] == "step"} == {True, False}


def test_what_is_not_as_documented_is_noticed():
    schema = documented()
    assert len(schema) == 9 and all(schema.values())
    good = {"type": "eval", "step": 1, "time": 0.5, "loss": 2.0}
    for changes, word in [({}, None), ({"loss": None}, None), ({"more": 1}, "not documented"),
                          ({"step": None}, "null"), ({"step": 1.5}, "no integer"),
                          ({"loss": "2"}, "no number"), ({"type": "other"}, "not documented"),
                          ({"type": "checkpoint"}, "missing")]:
        found = " ".join(faults([{**good, **changes}], schema))
        assert found == "" if word is None else word in found


def write(path, rows, mode="a"):
    with path.open(mode) as file:
        file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def steps(first, last, loss=1.0):
    return [{"type": "step", "step": n, "time": n * 0.5, "loss": loss} for n in range(first, last + 1)]


def numbers(rows):
    return [row["step"] for row in rows]


def test_runs_are_named_by_the_shortest_ends_of_their_paths_that_differ():
    assert labels([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert labels([Path("/runs/log"), Path("/log")]) == ["runs/log", "log"]  # relative, since files are named so


def test_a_growing_log_gives_each_line_once_and_waits_for_the_end_of_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = GrowingLog(path)
    assert log.read() == []
    write(path, steps(1, 3))
    assert numbers(log.read()) == [1, 2, 3] and log.read() == []
    with path.open("a") as file:
        file.write('{"type":"step","st')
        file.flush()
        assert log.read() == []
        file.write('ep":4}\n{"type":"step","step":5}\n{"ty')
    assert numbers(log.read()) == [4, 5] and log.is_read
    assert log.beginnings == 0 and log.unreadable == 0


def test_a_log_that_is_cut_begins_anew_even_where_it_has_grown_past_its_old_length(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = GrowingLog(path)
    for how in ("in place", "another file", "longer than before", "gone"):
        write(path, steps(1, 50), "w")
        log.read()
        before = log.beginnings
        lines = path.read_bytes().splitlines(True)[:20]
        if how == "in place":
            os.truncate(path, sum(map(len, lines)))
        elif how == "gone":
            path.unlink()
            assert log.read() == [] and log.beginnings == before + 1
            write(path, steps(1, 20))
        else:
            (tmp_path / "new").write_bytes(b"".join(lines))
            os.replace(tmp_path / "new", path)
            if how == "longer than before":
                write(path, steps(21, 80, loss=2.0))
        expected = list(range(1, 81 if how == "longer than before" else 21))
        assert numbers(log.read()) == expected and log.beginnings == before + 1, how


def test_a_copy_that_is_another_file_each_time_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = GrowingLog(path)
    for last in (10, 20, 30):
        write(tmp_path / "new", steps(1, last), "w")
        os.replace(tmp_path / "new", path)
        assert numbers(log.read()) == list(range(last - 9, last + 1))
    assert log.beginnings == 0


def test_a_long_log_is_read_in_pieces_and_its_old_steps_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"type": "run", "version": 2}, *steps(1, 1000), {"type": "eval", "step": 1000},
                 *steps(1001, 3000)])
    log = GrowingLog(path, tail=5000)
    rows, reads = log.read(4096), 1
    while not log.is_read:
        rows += log.read(4096)
        reads += 1
    assert reads > 10 and [row["type"] for row in rows[:3]] == ["run", "eval", "step"]
    assert numbers(rows[2:]) == list(range(rows[2]["step"], 3001)) and 2800 < rows[2]["step"] < 2950
    write(path, steps(3001, 3002))
    assert numbers(log.read()) == [3001, 3002]


def test_lines_that_are_not_of_metrics_are_counted_and_a_later_version_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\0\0\0\n[1]\n{"type":3}\n{"type":"of later","x":1}\n\xff\n{"type":"eval","step":1}\n')
    log = GrowingLog(path)
    assert [row["type"] for row in log.read()] == ["of later", "eval"] and log.unreadable == 4
    write(path, [{"type": "run", "version": 3}], "w")
    with pytest.raises(UserError, match="version 3.*reads 1 and 2"):
        GrowingLog(path).read()


def test_unknown_types_and_fields_are_ignored_and_missing_ones_are_null(tmp_path):
    place = {"worker": 0, "rank": 0, "workers": 1, "ranks": 1}
    write(tmp_path / "metrics.jsonl", [
        {"type": "run", "version": 1, **place, "parameters": 10, "new": 1}, {"type": "new", "x": 1},
        *steps(1, 3),
        {"type": "end", "step": 3, "train_seconds": 1, "inner_bytes_sent": 0, "outer_bytes_sent": 0,
         "waited_seconds": 0}])
    run = read_run(tmp_path)
    assert run.parameters == 10 and len(run.processes[0].steps) == 3 and run.processes[0].hellaswags == []


def test_a_run_has_the_processes_that_it_ended_with(tmp_path):
    for process, workers in ((0, 3), (1, 3), (2, 3)):
        rows = [{"type": "run", "version": 2, "worker": process, "rank": 0, "workers": workers, "ranks": 1,
                 "parameters": 10}, *steps(1, 3)]
        if process < 2:
            rows += [{"type": "resume", "step": 3, "worker": 0, "rank": process, "workers": 1, "ranks": 2},
                     *steps(4, 5), {"type": "end", "step": 5}]
        write(tmp_path / ("metrics.jsonl" if process == 0 else f"metrics_{process:05d}.jsonl"), rows)
    run = read_run(tmp_path)
    assert (run.workers, run.ranks) == (1, 2)
    assert [(p.worker, p.rank, len(p.steps)) for p in run.processes] == [(0, 0, 5), (0, 1, 5)]
