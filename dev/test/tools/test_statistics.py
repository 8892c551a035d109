"""What metrics.jsonl says of the outer gradients, from models that runs save: all deltas by subtraction."""

import numpy
import pytest

from conftest import ROOT

EMULATED = ROOT / "build" / "plain" / "train_gpt"

# One sync, of everything, at the end; the global parameters move by the mean. Local parameters stay.
ONE_SYNC = {"--workers": 2, "-H": 8, "-x": 8, "--overlap": 0, "--local-weight": 1, "--fragment-layers": 0,
            "--outer-optimizer": "average", "--outer-dtype": "fp32"}


def parameters(run):
    """Of the model that a run has saved: what follows the header of 256 words."""
    return numpy.frombuffer(run.model()[1024:], dtype="<f4").astype(numpy.float64)


def cosine(a, b):
    return a @ b / numpy.linalg.norm(a) / numpy.linalg.norm(b)


def close(a, b):
    return abs(a - b) <= 1e-5 * abs(b)  # fp32: what is subtracted is a hundred times as large


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_norms_and_cosines_are_those_of_the_models_that_were_saved(train, exchange):
    options = {**ONE_SYNC, "--outer-exchange": exchange}
    initial = parameters(train("initial", {"-x": 1, "-l": 0}))
    run = train("run", options)
    local = parameters(train("local", {**options, "--eval": "local"}))  # worker 0's
    mean = initial - parameters(run)
    deltas = [initial - local, 2 * mean - (initial - local)]
    assert 0.1 < cosine(*deltas) < 0.999
    for process, delta in enumerate(deltas):
        (row,) = run.lines("sync", process)
        assert close(row["delta_norm"], numpy.linalg.norm(delta))
        assert close(row["mean_norm"], numpy.linalg.norm(mean))
        assert row["quantization_error"] == 0 and row["staleness"] == 0
        assert len(row["cosines"]) == 1 and close(row["cosines"][0], cosine(*deltas))
        assert row["mean_cosines"] is None


def test_coarser_formats_lose_more_and_staleness_is_tau_but_for_what_the_end_brings_in(train):
    errors = {}
    for name in ("fp4", "fp8_e4m3", "bf16"):
        run = train(name, {"--workers": 3, "-H": 6, "-x": 20, "--overlap": 3, "--fragment-layers": 1,
                           "--outer-dtype": name})
        rows = run.lines("sync", 1)
        errors[name] = numpy.mean([row["quantization_error"] for row in rows])
        for row in rows:
            assert row["staleness"] == min(3, 20 - row["send_step"])
            assert row["delta_norm"] > 0 and row["mean_norm"] > 0
            assert len(row["cosines"]) == 3 and all(-1 <= value <= 1 for value in row["cosines"])
        assert [row["cosines"] for row in rows] == [row["cosines"] for row in run.lines("sync", 2)]
        assert {row["staleness"] for row in rows} > {3}
    assert 0.05 < errors["fp4"] < 0.5
    assert 0.005 < errors["fp8_e4m3"] < 0.05
    assert 0.0005 < errors["bf16"] < 0.005


def test_one_worker_has_no_cosines_and_its_mean_is_its_delta(train):
    run = train("run", {"--outer-optimizer": "nesterov", "-H": 5, "-x": 10, "--outer-dtype": "fp32"})
    rows = run.lines("sync")
    assert len(rows) == 4 and all(row["cosines"] is None for row in rows)
    assert all(close(row["mean_norm"], row["delta_norm"]) for row in rows)


# Heads of 64 values, as attention on GPUs requires. tau = 0: a merge follows its send at once.
ON_GPUS = {"--layers": 1, "--heads": 1, "--channels": 64, "-t": 16, "-b": 1, "-x": 7, "--workers": 2, "-H": 4,
           "--overlap": 0, "--fragment-layers": 1, "--timeout": 100}
FIELDS = ("sync", "delta_norm", "mean_norm", "quantization_error", "cosines")


def numbers(run, process):
    return [[row[field] for field in FIELDS] for row in run.lines("sync", process)]


@pytest.mark.long  # test_emulated_orders.py compares these numbers, too, in other runs
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_under_emulated_cuda_the_host_reads_the_same_numbers_in_every_order_of_the_streams(train, exchange):
    options = {**ON_GPUS, "--outer-exchange": exchange}
    calm = train("calm", options, trainer=EMULATED)
    assert len(numbers(calm, 0)) >= 3 and all(None not in row for row in numbers(calm, 0))
    for seed, transport in ((1, "nccl"), (2, "tcp")):
        environment = {"EMULATOR_ASYNCHRONOUS": "1", "EMULATOR_SEED": str(seed), "OMP_NUM_THREADS": "1"}
        run = train(transport, {**options, "--outer-transport": transport}, environment=environment,
                    trainer=EMULATED)
        assert [numbers(run, process) for process in (0, 1)] == [numbers(calm, process) for process in (0, 1)]
