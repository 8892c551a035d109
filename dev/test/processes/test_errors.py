"""A user's mistake gets one line and status 2, and nothing is written."""

import shutil
import struct

import pytest

from conftest import write_shard
from token_files import write_tokenizer

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
        ({**WORKERS, "--local-weight": 2}, ["local weight", "0 to 1"]),
        ({**WORKERS, "--outer-dtype": "fp3"}, ["fp3", "fp4"]),
        ({**WORKERS, "-x": 5}, ["5 steps"]),
        ({**WORKERS, "--outer-optimizer": "none"}, ["outer optimizer"]),
        ({**WORKERS, "--outer-transport": "nccl"}, ["nccl", "GPUs"]),
        ({**WORKERS, "--outer-exchange": "merged"}, ["merged", "auto", "all_gather", "all_to_all"]),
        ({**WORKERS, "--restart": 3}, ["--restart is for elastic workers", "--outer-transport store"]),
        ({**WORKERS, "--min-workers": 1}, ["--min-workers is for elastic workers", "--outer-transport store"]),
        ({**WORKERS, "--grace": 60}, ["--grace is for"]),
        ({**RUN, "--max-lag": 8}, ["--max-lag is for"]),
        ({**WORKERS, "--retain": 5, "--join-moments": True}, ["--retain and --join-moments are for"]),
        ({**WORKERS, "--outer-exchange": "all_to_all", "--outer-transport": "store"}, ["all_to_all", "all_gather"]),
        ({**WORKERS, "--outer-optimizer": "adam"}, ["adam"]),
        ({**RUN, "--channels": 30, "--heads": 4}, ["30 channels", "4 heads"]),
        ({**RUN, "-d": 100}, ["100", "-b 4"]),
        ({**RUN, "--max-seq-len": 8}, ["-t 16", "8"]),
        ({**RUN, "--vocab-size": 50}, ["x_train_00000", "vocabulary of 50"]),
        ({**RUN, "-i": "nowhere/*.bin"}, ["nowhere"]),
        ({**RUN, "-i": None}, ["no training data"]),
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
        ({**RUN, "--keep-checkpoints": 2**63 - 1}, ["--keep-checkpoints", str(2**63 - 1), "is not an integer from"]),
        ({**RUN, "-n": 2**64}, ["--save-every", str(2**64), "is not an integer from"]),
        ({**RUN, "-m": 10**12 + 1}, ["--val-batches", str(10**12)]),
        ({**RUN, "--seed": -1}, ["--seed", "-1"]),
        ({**RUN, "--seed": 2**64}, ["--seed", str(2**64)]),
        ({**RUN, "-g": 2**31}, ["--sample-length", str(2**31)]),
        ({**RUN, "-b": "1e3"}, ["--batch", "1e3", "is not an integer"]),
        ({**RUN, "-b": " 4"}, ["--batch", "' 4'"]),
        ({**RUN, "-t": "0x10"}, ["--seq-len", "0x10"]),
        ({**RUN, "-v": ""}, ["--val-every"]),
        ({**RUN, "-b": 0}, ["--batch"]),
        ({**RUN, "-b": "x"}, ["--batch"]),
        ({**RUN, "-l": "inf"}, ["--lr"]),
        ({**RUN, "-l": "nan"}, ["--lr"]),
        ({**RUN, "--optimizer": "adam"}, ["--optimizer", "adam", "adamw", "muon"]),
        ({**RUN, "--optimizer": "muon", "--muon-lr": -0.01}, ["--muon-lr", "-0.01"]),
        ({**RUN, "--optimizer": "muon", "--muon-momentum": 1}, ["--muon-momentum"]),
        ({**RUN, "--muon-lr": 0.02}, ["--muon-lr is for Muon", "--optimizer muon"]),
        ({**RUN, "--beta1": 1}, ["--beta1"]),
        ({**RUN, "--beta2": "nan"}, ["--beta2"]),
        ({**RUN, "--epsilon": 0}, ["--epsilon"]),
        ({**RUN, "--timeout": "inf"}, ["--timeout"]),
        ({**RUN, "--vocab-size": 70000}, ["--vocab-size"]),
        ({**RUN, "-w": 0}, ["-w 0"]),
        ({**RUN, "-H": 0}, ["inner steps"]),
        ({**RUN, "--outer-dtype": "fp3"}, ["fp3", "fp4"]),
        ({**RUN, "-x": -1, "-d": 64000}, ["less than one step"]),
        ({**RUN, "--outer-optimizer": "nesterov", "-H": 20}, ["12 steps"]),
        ({**RUN, "--config": "missing.toml"}, ["missing.toml"]),
        ({**RUN, "-k": "magic"}, ["magic"]),
        ({**RUN, "-h": 1, "--hellaswag-data": "set.bin", "-v": 0}, ["-h 1", "-v 0"]),
        ({**RUN, "--tokenizer": "missing.bin"}, ["missing.bin"]),
        ({**WORKERS, "--worker": 2}, ["--worker 2"]),
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


@pytest.mark.parametrize("text", ["batchh=3\n", "[section]\nbatch=2\n", "\x00\x01rubbish\n"])
def test_a_config_file_with_what_is_no_option_is_refused(train, tmp_path, text):
    (tmp_path / "bad.toml").write_text(text)
    refused(train("run", {**RUN, "--config": tmp_path / "bad.toml"}, status=2), "--config")


def test_a_tokenizer_of_another_model_is_refused(train, tmp_path):
    write_tokenizer(tmp_path / "large.bin", 1000)
    refused(train("run", {**RUN, "--tokenizer": tmp_path / "large.bin"}, status=2), "1000", "64")


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


def test_different_numbers_of_workers_are_named(tmp_path, start_worker):
    options = {**WORKERS, "--store": f"file:{tmp_path}/store"}
    runs = [start_worker(0, options), start_worker(1, {**options, "--workers": 3})]
    assert [run.wait() for run in runs] == [2, 2], [run.output() for run in runs]
    for run in runs:
        assert "--workers" in run.output() and not run.folder.exists()


def test_different_model_files_are_named(train, tmp_path, start_worker):
    files = [
        train(name, {"-x": 2, "--seed": seed}).folder / "model_00000002.bin"
        for name, seed in (("a", 1), ("b", 2))
    ]
    shape = {"--layers": None, "--heads": None, "--channels": None, "--vocab-size": None}
    options = {**WORKERS, **shape, "--store": f"file:{tmp_path}/store"}
    runs = [start_worker(w, {**options, "-e": file}) for w, file in enumerate(files)]
    assert [run.wait() for run in runs] == [2, 2], [run.output() for run in runs]
    assert all("initial parameters" in run.output() for run in runs)


def test_a_worker_that_fails_before_training_is_reported_by_the_others(tmp_path, start_worker):
    options = {**WORKERS, "--store": f"file:{tmp_path}/store", "--timeout": 60}
    runs = [start_worker(0, options), start_worker(1, {**options, "--interface": "nowhere0"})]
    assert runs[1].wait(50) == 2 and "nowhere0" in runs[1].output()
    assert runs[0].wait(50) == 1 and "worker 1" in runs[0].output()
    assert not runs[1].folder.exists()


def test_a_worker_that_never_comes_is_named_and_a_batch_system_may_try_again(tmp_path, start_worker):
    run = start_worker(0, {**WORKERS, "--store": f"file:{tmp_path}/store", "--timeout": 2})
    assert run.wait() == 75 and "worker 1" in run.output()  # EX_TEMPFAIL


def test_the_statuses_are_in_the_help(train):
    text = train("help", {"--help": True}).stdout
    assert all(f" {status} " in text.split("Exit status:")[1] for status in (0, 1, 2, 75, 76, 143))
