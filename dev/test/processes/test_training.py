"""Runs of the trainer with real processes: what it learns, what it logs, and which runs must agree."""

import json
import re
from pathlib import Path

import numpy
import pytest

from conftest import TINY
from token_files import write_tokenizer

STREAMING = {"--workers": 2, "-H": 6, "--fragment-layers": 1, "-x": 24}


def close(a, b, limit):
    return len(a) == len(b) and all(abs(x - y) <= limit for x, y in zip(a, b))


def test_two_ranks_give_the_losses_of_one(train):
    one = train("one", {"-x": 10, "-b": 8, "-l": 0.001, "-c": 0.1})
    two = train("two", {"-x": 10, "-b": 4, "-l": 0.001, "-c": 0.1, "--ranks": 2})
    assert close(one.losses(), two.losses(), 1e-5)
    assert two.losses(0) == two.losses(1)


def test_micro_steps_give_the_losses_of_one_batch(train):
    one = train("one", {"-x": 10, "-b": 8, "-l": 0.001, "--shuffle": 0})
    two = train("two", {"-x": 10, "-b": 4, "-d": 8 * TINY["-t"], "-l": 0.001, "--shuffle": 0})
    assert close(one.losses(), two.losses(), 1e-5)


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_recomputing_activations_changes_no_bit(train, precision):
    runs = [train(f"r{level}", {"-x": 5, "-r": level, "--matmul-precision": precision}) for level in (0, 1, 2)]
    assert runs[0].losses() == runs[1].losses() == runs[2].losses()


def test_a_run_is_repeated_bit_for_bit(train):
    a, b = train("a", STREAMING), train("b", STREAMING)
    assert a.losses() == b.losses() and a.losses(1) == b.losses(1) and a.model() == b.model()


@pytest.mark.skipif(" avx512f " not in Path("/proc/cpuinfo").read_text(),
                    reason="without AVX512 oneDNN divides even these sums among threads")
def test_the_number_of_threads_changes_no_bit(train):
    """All other tests have one thread. In a model as small as this one oneDNN divides no sum among its threads."""
    runs = [train(f"t{threads}", STREAMING, environment={"OMP_NUM_THREADS": str(threads)}) for threads in (1, 2, 3)]
    assert runs[0].losses() == runs[1].losses() == runs[2].losses()
    assert runs[0].model() == runs[1].model() == runs[2].model()


def test_streaming_learns_and_logs_every_sync(train):
    run = train("run", {**STREAMING, "-x": 60, "--overlap": 2, "-v": 20, "-m": 5})
    assert run.losses()[-1] < 0.8 * run.losses()[0]
    evals = [row["loss"] for row in run.lines("eval")]
    assert len(evals) == 4 and evals[-1] < 0.8 * evals[0]
    for process in (0, 1):
        syncs = run.lines("sync", process)
        # Three fragments (two layers and the embedding), each sent once in six steps, first within the first six.
        assert len(syncs) == 30
        assert sorted({row["fragment"] for row in syncs}) == [0, 1, 2]
        assert all(row["bytes_sent"] > 0 and row["bytes_sent"] == row["bytes_received"] for row in syncs)
        assert all(row["apply_step"] == min(row["send_step"] + 2, 60) for row in syncs)
    assert [row["bytes_sent"] for row in run.lines("sync", 0)] == [
        row["bytes_sent"] for row in run.lines("sync", 1)
    ]


@pytest.mark.parametrize("workers", [2, 3])
def test_global_parameters_are_bitwise_equal_on_all_workers_after_every_sync(train, workers):
    run = train("run", {**STREAMING, "--workers": workers, "--overlap": 3, "-x": 36})
    hashes = [
        [(row["sync"], row["global_hash"]) for row in run.lines("sync", process)]
        for process in range(workers)
    ]
    assert all(hashes[0] == other for other in hashes)
    assert len(hashes[0]) == 18 and len({h for _, h in hashes[0]}) == 18


def test_evaluation_on_global_parameters_puts_back_every_bit(train):
    quiet = train("quiet", {**STREAMING, "-v": 0})
    watched = train("watched", {**STREAMING, "-v": 1, "-m": 2})
    assert quiet.losses() == watched.losses() and quiet.losses(1) == watched.losses(1)
    assert quiet.model() == watched.model()


def test_evaluation_puts_back_every_bit_with_two_ranks_too(train):
    quiet = train("quiet", {**STREAMING, "--ranks": 2, "-v": 0, "-b": 2})
    watched = train("watched", {**STREAMING, "--ranks": 2, "-v": 1, "-m": 2, "-b": 2})
    assert [quiet.losses(p) for p in range(4)] == [watched.losses(p) for p in range(4)]
    assert quiet.model() == watched.model()


def test_all_workers_evaluate_the_same_global_parameters(train):
    run = train("run", {**STREAMING, "--workers": 3, "-v": 12, "-m": 5})
    evals = [[row["loss"] for row in run.lines("eval", process)] for process in range(3)]
    assert evals[0] == evals[1] == evals[2] and len(evals[0]) == 3


def test_with_local_weight_one_the_exchange_does_not_touch_training(train):
    often = train("often", {**STREAMING, "--local-weight": 1, "-H": 4})
    seldom = train("seldom", {**STREAMING, "--local-weight": 1, "-H": 24, "--overlap": 0})
    assert often.losses(0) == seldom.losses(0) and often.losses(1) == seldom.losses(1)


def test_overlap_may_differ_from_worker_to_worker(tmp_path, start_worker):
    options = {**STREAMING, "--store": f"file:{tmp_path}/store", "-v": 24, "-m": 5}
    runs = [start_worker(w, {**options, "--overlap": tau}) for w, tau in ((0, 1), (1, 4))]
    assert [run.wait() for run in runs] == [0, 0], [run.output() for run in runs]
    syncs = [run.result().lines("sync", w) for w, run in enumerate(runs)]
    for rows, tau in zip(syncs, (1, 4)):
        assert all(row["apply_step"] == min(row["send_step"] + tau, 24) for row in rows)
    hashes = [[(row["sync"], row["global_hash"]) for row in rows] for rows in syncs]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 12
    # At the end all is applied everywhere: both evaluate the same parameters.
    assert runs[0].result().lines("eval", 0)[-1]["loss"] == runs[1].result().lines("eval", 1)[-1]["loss"]


@pytest.mark.parametrize("options", [{"--overlap": 3}, {"--overlap": 0, "--fragment-layers": 0}])
def test_streaming_with_two_ranks_is_streaming_with_one(train, options):
    options = {**STREAMING, **options, "--outer-dtype": "fp32", "-l": 0.001, "-v": 24, "-m": 0}
    one = train("one", {**options, "-b": 8})
    two = train("two", {**options, "-b": 4, "--ranks": 2})
    for worker in (0, 1):
        assert close(one.losses(worker), two.losses(2 * worker), 1e-5)
        assert close(one.losses(worker), two.losses(2 * worker + 1), 1e-5)
    a, b = (numpy.frombuffer(run.model(), "<f4", offset=1024) for run in (one, two))
    assert numpy.linalg.norm(a - b) <= 1e-4 * numpy.linalg.norm(a)


def test_samples_and_models_on_the_way_disturb_nothing(train, tokens):
    write_tokenizer(tokens / "letters.bin", 64)
    options = {**STREAMING, "--ranks": 2, "-b": 2, "-d": 4 * TINY["-t"] * 2}  # two micro-steps
    quiet = train("quiet", options)
    busy = train("busy", {**options, "--tokenizer": tokens / "letters.bin", "-s": 5, "-g": 40, "-n": 10})
    assert [quiet.losses(p) for p in range(4)] == [busy.losses(p) for p in range(4)]
    assert quiet.model() == busy.model()
    assert busy.stdout.count("sample after step") == 5
    names = [path.name for path in sorted(busy.folder.glob("model_*.bin"))]
    assert names == ["model_00000010.bin", "model_00000020.bin", "model_00000024.bin"]


def test_local_parameters_are_evaluated_and_saved_on_demand(train):
    options = {**STREAMING, "-v": 24, "-m": 5}
    of_global, of_local = train("global", options), train("local", {**options, "--eval": "local"})
    assert of_global.losses() == of_local.losses()
    assert of_global.model() != of_local.model()
    evals = [of_local.lines("eval", process)[-1]["loss"] for process in (0, 1)]
    assert evals[0] != evals[1] and evals[0] != of_global.lines("eval")[-1]["loss"]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_the_learning_rate_follows_its_schedule(train, schedule):
    run = train("run", {"-x": 20, "-k": schedule, "-u": 4, "-q": 0.1, "-l": 0.01})
    rates = [row["lr"] for row in run.lines("step")]
    assert close(rates[:4], [0.0025, 0.005, 0.0075, 0.01], 1e-8)
    assert close([rates[-1]], [0.01], 1e-8) if schedule == "constant" else 0.001 < rates[-1] < 0.01


def test_one_worker_with_nesterov_is_legal(train):
    run = train("run", {**STREAMING, "--workers": 1, "--outer-optimizer": "nesterov"})
    assert len(run.lines("sync")) == 12 and all(row["bytes_sent"] == 0 for row in run.lines("sync"))


@pytest.mark.parametrize("dtype,bits", [("fp4", 4.125), ("bf16", 16), ("fp32", 32)])
def test_bytes_on_the_wire_are_the_format_s(train, dtype, bits):
    run = train("run", {**STREAMING, "--outer-dtype": dtype, "-v": 0})
    sent = sum(row["bytes_sent"] for row in run.lines("sync"))
    values = run.lines("run")[0]["parameters"] * 4  # 24 steps, H 6: everything four times
    assert values * bits / 8 <= sent <= values * bits / 8 * 1.02 + 12 * 96 * 4  # padding and headers
    assert run.lines("end")[0]["outer_bytes_sent"] == sent


def test_a_model_file_starts_a_run_where_it_ended(train):
    first = train("first", {"-x": 20, "-v": 20, "-m": 5})
    names = ("--layers", "--heads", "--channels", "--vocab-size")
    second = train(
        "second",
        {
            **{name: None for name in names},
            "-e": first.folder / "model_00000020.bin",
            "-x": 5,
            "-v": 5,
            "-m": 5,
        },
    )
    assert close([first.lines("eval")[-1]["loss"]], [second.lines("eval")[0]["loss"]], 1e-6)


def test_the_config_file_repeats_the_run(train):
    first = train("first", STREAMING)
    text = (first.folder / "config.toml").read_text()
    second = train("second", {"--config": first.folder / "config.toml"})
    assert "inner-steps=6" in text and first.losses() == second.losses() and first.model() == second.model()


def test_main_log_is_what_llm_c_writes(train):
    run = train("run", {"-x": 4, "-v": 2, "-m": 2})
    lines = (run.folder / "main.log").read_text().splitlines()
    assert [
        line
        for line in lines
        if not re.fullmatch(r"s:\d+ (tel:\d+\.\d{4}|trl:\d+\.\d{4} lr:\d+\.\d{6} norm:\d+\.\d{2})", line)
    ] == []
    assert len(lines) == 3 + 4


def test_nothing_is_written_without_an_output_folder(train, tmp_path):
    train("run", {"-o": None, "-x": 2})
    assert list(tmp_path.iterdir()) == []


def test_metrics_hold_one_json_object_a_line(train):
    run = train("run", STREAMING)
    kinds = [json.loads(line)["type"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert kinds[0] == "run" and kinds[-1] == "end" and kinds.count("step") == 24
