"""A user's mistake gets one line and status 2, and nothing is written."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import TRAINER, children, command, peak_memory, write_shard
from token_files import write_tokenizer

RUN = {"-x": 12}
PATIENCE = 4  # times as long as on an idle machine
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
        ({**WORKERS, "-H": -1}, ["inner steps"]),
        ({**WORKERS, "--overlap": 6}, ["overlap", "6"]),
        ({**WORKERS, "--overlap": -1}, ["overlap"]),
        ({**WORKERS, "--local-weight": 2}, ["--local-weight", "0 to 1"]),
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
        ({**RUN, "-H": -1}, ["inner steps"]),
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
        ({**WORKERS, "--worker": 0, "--store": "hunter2@10.7.0.1:6379"}, ["the store ':...'"]),
    ],
)
def test_one_line_and_nothing_written(train, options, words):
    refused(train("run", options, status=2), *words)


def test_a_store_that_cannot_be_reached_may_be_there_later(train):
    options = {**WORKERS, "--worker": 0, "--store": "redis://127.0.0.1:1", "--timeout": 3}
    refused(train("run", options, status=75), "cannot reach the store at 127.0.0.1:1")


@pytest.mark.parametrize("signaled", [False, True])
def test_a_run_with_a_checkpoint_waits_for_its_store(tokens, tmp_path, signaled):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "state_00000001_00000.bin").touch()
    options = {**WORKERS, "--worker": 0, "--store": "redis://127.0.0.1:1", "--timeout": 60 if signaled else 2, "-y": 1}
    process = subprocess.Popen(command(tokens, folder, options), stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    assert line.startswith("waiting for the store (0 of ") and "cannot reach the store at 127.0.0.1:1" in line, line
    if signaled:
        process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    process.wait(60)
    assert process.returncode == (143 if signaled else 75), rest
    assert signaled or rest.startswith("error: cannot reach the store at 127.0.0.1:1"), rest


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


# -----------------------------------------------------------------------------------------------------------
# Numbers at their edges

def integer_options():
    """The names of all options whose default is an integer."""
    table = subprocess.run([TRAINER, "--options-table"], capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^\| (`-[^|]*`) \| (-?\d+) \|", table, re.M)
    return [re.findall(r"--[\w-]+", names)[0] for names, _ in rows]


EDGES = ["-1", "0", 2**31 - 1, 2**31, 10**12, 10**12 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, "1e3", "", " 1"]


def test_every_integer_option_with_values_at_the_edges_is_taken_or_refused_with_one_line(tokens, tmp_path):
    """A run that would be possible ends with the missing file of its validation data. Each has 5 seconds."""
    names = integer_options()
    assert {"--batch", "--seed", "--save-every", "--keep-checkpoints", "--max-lag", "--ranks", "--overlap"} <= {*names}
    assert len(names) > 30

    def attempt(case):
        name, value = case
        words = command(tokens, tmp_path / "run", {**WORKERS, "-t": 4, "-j": "missing.bin", name: value})
        result = subprocess.run(words, capture_output=True, text=True, timeout=5 * PATIENCE, cwd=tmp_path)
        lines = result.stderr.splitlines()
        is_one_line = len(lines) == 1 and lines[0].startswith("error: ") and "\n" not in lines[0]
        return "" if result.returncode == 2 and is_one_line else f"{name} {value!r}: {result}"

    with ThreadPoolExecutor(2) as threads:
        assert [text for text in threads.map(attempt, itertools.product(names, EDGES)) if text] == []
    assert not (tmp_path / "run").exists()


def test_of_an_option_that_is_given_twice_the_last_value_counts_and_the_run_says_so(tokens, tmp_path):
    words = command(tokens, tmp_path / "run", {"-x": 3})
    run = subprocess.run([*words, "--max-steps", "2", "-l", "0.01"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and (tmp_path / "run/model_00000002.bin").exists()
    assert re.search(r"^note +--max-steps was given 3 and 2: the last one counts$", run.stdout, re.M), run.stdout
    assert run.stdout.count("was given") == 1  # not of a value that is the same
    assert "several times, the last value counts" in subprocess.run(
        [TRAINER, "--help"], capture_output=True, text=True).stdout


def test_no_steps_are_a_run_without_steps(train):
    run = train("run", {"-x": 0})
    assert run.lines("step") == [] and "0 steps" in run.stdout


# -----------------------------------------------------------------------------------------------------------
# Memory

LARGE = {"--layers": 4, "--heads": 4, "--channels": 256, "--vocab-size": 1024, "-t": 64, "-x": 4, "-H": 4,
         "-j": None}


def said_of_memory(run):
    """(bytes that it takes, bytes that are there), in GB"""
    (both,) = re.findall(r"needs about ([0-9.]+) GB of memory.*, but there are only ([0-9.]+) GB: ", run.stderr)
    return tuple(map(float, both))


@pytest.mark.parametrize("options", [{"-b": 64, "-x": 2}, {"-b": 64, "-x": 2, "--matmul-precision": "medium"},
                                     {"-b": 1, "--channels": 512, "-n": 2},
                                     {"-b": 4, "--workers": 2, "--ranks": 2, "-n": 2, "--outer-dtype": "fp32",
                                      "--outer-error-feedback": True, "--fragment-layers": 0, "--channels": 384},
                                     {"-b": 1, "--workers": 2, "--outer-transport": "store", "--outer-dtype": "fp32",
                                      "--fragment-layers": 1, "--channels": 640, "-H": 8, "-x": 16, "--overlap": 4},
                                     {"-b": 1, "--workers": 2, "--outer-transport": "store", "--fragment-layers": 1,
                                      "--outer-error-feedback": True, "--channels": 640, "-H": 8, "-x": 16, "-n": 8},
                                     {"-b": 1, "--workers": 3, "--outer-error-feedback": True, "-n": 3,
                                      "--fragment-layers": 0, "--channels": 640}],
                         ids=["activations", "bf16", "checkpoints", "processes", "elastic", "elastic feedback",
                              "owners"])
def test_the_memory_that_a_run_takes_is_known_before(tokens, tmp_path, options):
    words = command(tokens, tmp_path / "run", {**LARGE, **options})
    refused = subprocess.run(["prlimit", f"--as={100 << 20}", *words], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2, refused.stderr
    assert not (tmp_path / "run").exists()
    needed, there = said_of_memory(refused)
    processes = options.get("--workers", 1) * options.get("--ranks", 1)
    assert there == pytest.approx(processes * (100 << 20) / 1e9, abs=0.01)
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    highest = {}  # by process, in bytes
    while run.poll() is None:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            for pid in children(run.pid) or [run.pid]:
                highest[pid] = max(highest.get(pid, 0), peak_memory(pid))
        time.sleep(0.01)
    assert run.returncode == 0 and len(highest) - (processes > 1) <= processes
    assert needed == pytest.approx(sum(highest.values()) / 1e9, rel=0.15)


@pytest.mark.parametrize("options", [{"--layers": 10000, "--channels": 8192},
                                     {**WORKERS, "--workers": 1000, "--channels": 8192, "-t": 1, "-b": 4}],
                         ids=["parameters", "processes"])
def test_a_run_that_does_not_fit_into_memory_is_refused_before_it_takes_any(train, options):
    begin = time.monotonic()
    run = train("run", {**LARGE, **options}, status=2)
    refused(run, "of memory", "but there are only", "lower -b, -t or the model's sizes")
    needed, there = said_of_memory(run)
    assert needed > there > 0 and time.monotonic() - begin < 5 * PATIENCE


def test_two_processes_that_claim_one_worker_are_both_refused(tmp_path, start_worker):
    options = {**WORKERS, "--workers": 3, "--store": f"file:{tmp_path}/store"}
    twins = [start_worker(1, options, "a"), start_worker(1, options, "b")]
    assert [twin.wait() for twin in twins] == [2, 2], [twin.output() for twin in twins]
    for twin in twins:
        assert "two processes claim worker 1" in twin.output()


def test_a_rank_whose_shards_differ_from_its_workers_is_named(tmp_path, tokens):
    """A node whose copy of the data is not whole. Workers may have different data."""
    for ranks, status in ((2, 2), (1, 0)):
        runs = []
        for process in (0, 1):
            options = {**RUN, "--workers": 2 // ranks, "--ranks": ranks, "-x": 2, "-H": 2, "--overlap": 1,
                       "--store": f"file:{tmp_path}/store", "-i": f"{tokens}/x_train_00000{'*' if process == 0 else 1}.bin"}
            world = {"RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": "2"}
            runs.append(subprocess.Popen(command(tokens, tmp_path / "run", options), env={**os.environ, **world},
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path))
        outputs = [run.communicate(timeout=120)[0] for run in runs]
        assert [run.returncode for run in runs] == [status] * 2, outputs
        if status != 0:
            assert all("worker 0 rank 1 has other training data (-i)" in text for text in outputs), outputs


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


def test_a_worker_without_its_interface_ends_before_the_others_have_met_it(tmp_path, start_worker):
    options = {**WORKERS, "--store": f"file:{tmp_path}/store", "--timeout": 60}
    first, wrong = start_worker(0, options), start_worker(1, {**options, "--interface": "nowhere0"})
    assert wrong.wait(50) == 2 and "nowhere0" in wrong.output() and not wrong.folder.exists()
    assert [run.wait() for run in (start_worker(1, options), first)] == [0, 0]


def test_a_worker_that_never_comes_is_named_and_a_batch_system_may_try_again(tmp_path, start_worker):
    run = start_worker(0, {**WORKERS, "--store": f"file:{tmp_path}/store", "--timeout": 2})
    assert run.wait() == 75 and "worker 1" in run.output()  # EX_TEMPFAIL


def test_the_statuses_are_in_the_help(train):
    text = train("help", {"--help": True}).stdout
    assert all(f" {status} " in text.split("Exit status:")[1] for status in (0, 1, 2, 75, 76, 143))
