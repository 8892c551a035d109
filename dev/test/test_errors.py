"""A user's mistake gets one line and status 2, and nothing is written."""

import shutil
import struct

import pytest

from conftest import write_shard

RUN = {"-x": 12}
WORKERS = {"--workers": 2, "-H": 6, "-x": 12}


def refused(run, *words):
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), run.stderr
    for word in words:
        assert word in lines[0], lines[0]
    assert not run.folder.exists()


@pytest.mark.parametrize(
    "options,words",
    [
        ({**WORKERS, "-H": 0}, ["inner steps"]),
        ({**WORKERS, "--overlap": 6}, ["overlap", "6"]),
        ({**WORKERS, "--overlap": -1}, ["overlap"]),
        ({**WORKERS, "--local-weight": 2}, ["local weight", "2"]),
        ({**WORKERS, "--outer-dtype": "fp3"}, ["fp3", "fp4"]),
        ({**WORKERS, "-x": 5}, ["5 steps"]),
        ({**WORKERS, "--outer-optimizer": "none"}, ["none"]),
        ({**WORKERS, "--outer-optimizer": "adam"}, ["adam"]),
        ({**RUN, "--channels": 30, "--heads": 4}, ["30", "4"]),
        ({**RUN, "-d": 100}, ["100", "-b 4"]),
        ({**RUN, "--max-seq-len": 8}, ["-t 16", "8"]),
        ({**RUN, "--vocab-size": 50}, ["x_train_00000", "50"]),
        ({**RUN, "-i": "nowhere/*.bin"}, ["nowhere"]),
        ({**RUN, "-i": None}, ["-i"]),
        ({**RUN, "-e": "d7"}, ["d7"]),
        (
            {
                **RUN,
                "-e": "missing.bin",
                "--layers": None,
                "--heads": None,
                "--channels": None,
                "--vocab-size": None,
            },
            ["missing.bin"],
        ),
        ({**RUN, "--nonsense": 1}, ["--nonsense"]),
        ({**RUN, "-b": 0}, ["at least 1"]),
        ({**RUN, "-b": "x"}, ["x"]),
        ({**RUN, "--config": "missing.toml"}, ["missing.toml"]),
        ({**RUN, "-k": "magic"}, ["magic"]),
        ({**RUN, "--tokenizer": "missing.bin"}, ["missing.bin"]),
        ({**WORKERS, "--worker": 2}, ["2"]),
        ({**WORKERS, "--worker": 0}, ["--store"]),
        ({**WORKERS, "--worker": 0, "--store": "ftp://x"}, ["ftp"]),
        ({**WORKERS, "--worker": 0, "--store": "redis://127.0.0.1:1", "--timeout": 3}, ["127.0.0.1", "1"]),
    ],
)
def test_one_line_and_nothing_written(train, options, words):
    refused(train("run", options, status=2), *words)


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), ["truncated"]),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), ["truncated"]),
        (lambda path: path.write_bytes(struct.pack("<i", 1) + path.read_bytes()[4:]), ["magic"]),
        (lambda path: path.write_bytes(path.read_bytes() + b"ab"), ["too long"]),
        (lambda path: write_shard(path, [1] * 10), []),
        (lambda path: write_shard(path, [1] * 500 + [64] + [1] * 500), ["64"]),
        (lambda path: path.unlink(), []),
    ],
)
@pytest.mark.parametrize("processes", [{}, {"--workers": 2, "-H": 6}])
def test_damaged_shards_are_refused(train, tmp_path, tokens, damage, words, processes):
    bad = tmp_path / "data" / "bad.bin"
    bad.parent.mkdir()
    shutil.copy(tokens / "x_train_000000.bin", bad)
    damage(bad)
    refused(train("run", {**RUN, **processes, "-i": bad}, status=2), "bad.bin", *words)


def test_an_unwritable_folder_is_refused(train, tmp_path):
    (tmp_path / "file").write_text("")
    run = train("file/run", RUN, status=2)
    assert run.stderr.startswith("error: ") and "file" in run.stderr


def test_two_processes_that_claim_one_worker_are_both_refused(tmp_path, start_worker):
    options = {**WORKERS, "--workers": 3, "--store": f"file:{tmp_path}/store"}
    twins = [start_worker(1, options, "a"), start_worker(1, options, "b")]
    assert [twin.wait() for twin in twins] == [2, 2], [twin.output() for twin in twins]
    for twin in twins:
        assert "two processes claim worker 1" in twin.output()


def test_an_option_that_differs_is_named_by_all(tmp_path, start_worker):
    options = {**WORKERS, "--store": f"file:{tmp_path}/store"}
    runs = [start_worker(0, options), start_worker(1, {**options, "-H": 4})]
    assert [run.wait() for run in runs] == [2, 2], [run.output() for run in runs]
    for run in runs:
        assert "--inner-steps" in run.output() and "4" in run.output() and "6" in run.output()
        assert not run.folder.exists()


def test_a_worker_that_never_comes_is_named(tmp_path, start_worker):
    run = start_worker(0, {**WORKERS, "--store": f"file:{tmp_path}/store", "--timeout": 2})
    assert run.wait() == 2 and "worker 1" in run.output()
