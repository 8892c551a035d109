"""The wire between real processes: every format, rounding and exchange gives all workers the same global
parameters at every sync, with the bytes of the formula; workers with batches of their own."""

import itertools

import pytest

from conftest import ROOT

FORMATS = {"fp4": 4, "fp4_e2m1": 4, "fp8_e4m3": 8, "fp8_e5m2": 8, "bf16": 16, "fp32": 32}  # bits of a code
ROUNDINGS = ["nearest", "stochastic"]
EXCHANGES = ["all_gather", "all_to_all"]

# Three fragments, of 200 steps 6 or 7 syncs each.
FOUR = {"--workers": 4, "-H": 30, "--overlap": 7, "--fragment-layers": 1, "-x": 200, "-b": 1}

# Each format with each rounding and each exchange, and each rounding with each exchange: half of all.
PAIRWISE = [
    (name, ROUNDINGS[(i + j) % 2], exchange)
    for i, name in enumerate(FORMATS)
    for j, exchange in enumerate(EXCHANGES)
]
ALL = [
    pytest.param(*case, marks=[] if case in PAIRWISE else [pytest.mark.long])
    for case in itertools.product(FORMATS, ROUNDINGS, EXCHANGES)
]


def syncs(run, process):
    return [
        (row["sync"], row["fragment"], row["send_step"], row["global_hash"])
        for row in run.lines("sync", process)
    ]


def whole_16(count):
    return (count + 15) // 16 * 16


def payload_bytes(name, blocks, headers=1, sums=0):
    scales = whole_16(2 * blocks) if FORMATS[name] < 16 else 0
    return 64 * headers + whole_16(8 * sums) + scales + blocks * 128 * FORMATS[name] // 8


def exchange_bytes(exchange, name, blocks, workers):
    if exchange == "all_gather":
        return (workers - 1) * payload_bytes(name, blocks)
    part = -(-blocks // workers)
    of_mean = payload_bytes(name, part, 1 + workers, sums=workers * (workers + 1) // 2)
    return (workers - 1) * (payload_bytes(name, part) + of_mean)


# A layer has 12 C^2 + 13 C values (C = 32), the embedding (128 + 16 + 2) C.
BLOCKS = [-(-(12 * 32 * 32 + 13 * 32) // 128)] * 2 + [-(-(128 + 16 + 2) * 32 // 128)]


def assert_bytes_are_those_of_the_formula(run, exchange, name, workers):
    rows = [row for process in range(workers) for row in run.lines("sync", process)]
    assert rows
    for row in rows:
        expected = exchange_bytes(exchange, name, BLOCKS[row["fragment"]], workers)
        assert (row["bytes_sent"], row["bytes_received"]) == (expected, expected)


@pytest.mark.parametrize("name, rounding, exchange", ALL)
def test_four_workers_hold_the_same_global_parameters_at_every_sync(train, name, rounding, exchange):
    options = {"--outer-dtype": name, "--outer-rounding": rounding, "--outer-exchange": exchange}
    if rounding == "stochastic":
        options["--outer-error-feedback"] = True
    run = train("run", {**FOUR, **options})
    of_worker = [syncs(run, process) for process in range(4)]
    assert of_worker == [of_worker[0]] * 4
    assert len({row[3] for row in of_worker[0]}) == len(of_worker[0]) == 20  # each differs from all others
    assert_bytes_are_those_of_the_formula(run, exchange, name, 4)
    assert run.losses()[-1] < 3 < run.losses()[0]


@pytest.mark.parametrize(
    "workers, exchange", [(2, "all_to_all"), (3, "all_gather"), (3, "all_to_all"), (8, "all_to_all")]
)
def test_bytes_are_those_of_the_formula_for_any_number_of_workers(train, workers, exchange):
    run = train("run", {**FOUR, "--workers": workers, "--outer-exchange": exchange, "-x": 60})
    assert [syncs(run, process) for process in range(workers)] == [syncs(run, 0)] * workers
    assert_bytes_are_those_of_the_formula(run, exchange, "fp4", workers)


def test_auto_takes_all_gather_for_two_workers_and_all_to_all_for_four(train):
    for workers, exchange in ((2, "all_gather"), (4, "all_to_all")):
        run = train(f"of{workers}", {**FOUR, "--workers": workers, "-x": 30})
        assert_bytes_are_those_of_the_formula(run, exchange, "fp4", workers)
        assert f" by {exchange}, " in run.stdout


UNEVEN = {"--workers": 2, "-H": 6, "--fragment-layers": 1, "-x": 24, "--outer-weights": "tokens"}


def start_two(start_worker, tmp_path, options, own):
    workers = [
        start_worker(w, {**options, **own[w], "--store": f"file:{tmp_path}/store"}) for w in (0, 1)
    ]
    for worker in workers:
        worker.wait()
    return workers


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_worker_with_half_the_batch_keeps_step_and_all_hold_the_same(start_worker, tmp_path, exchange):
    options = {**UNEVEN, "--outer-exchange": exchange, "-v": 12}
    workers = start_two(start_worker, tmp_path, options, [{"-b": 4, "-d": 128}, {"-b": 2, "-d": 64}])
    assert [worker.process.returncode for worker in workers] == [0, 0], [w.output() for w in workers]
    runs = [worker.result() for worker in workers]
    sent = [syncs(run, process) for process, run in enumerate(runs)]
    assert sent[0] == sent[1] and len(sent[0]) == 12
    for process, (run, tokens_a_step) in enumerate(zip(runs, (128, 64))):
        steps = run.lines("step", process)
        assert [row["tokens"] for row in steps] == [tokens_a_step * step for step in range(1, 25)]
    assert runs[0].losses()[-1] < runs[0].losses()[0]


def test_once_through_the_data_is_what_uneven_workers_take_together(start_worker, tmp_path):
    options = {**UNEVEN, "-x": None}
    workers = start_two(start_worker, tmp_path, options, [{"-b": 4, "-d": 256}, {"-b": 4, "-d": 128}])
    assert [worker.process.returncode for worker in workers] == [0, 0], [w.output() for w in workers]
    for process, worker in enumerate(workers):
        assert len(worker.result().lines("step", process)) == 36000 // (256 + 128)


def test_with_equal_weights_a_batch_of_its_own_is_refused(start_worker, tmp_path):
    equal = {**UNEVEN, "--outer-weights": "equal"}
    workers = start_two(start_worker, tmp_path, equal, [{"-b": 4}, {"-b": 2}])
    for worker in workers:
        assert worker.process.returncode == 2
        assert "--batch" in worker.output() and "give all processes the same" in worker.output()


def test_uneven_workers_with_different_steps_are_told(start_worker, tmp_path):
    workers = start_two(start_worker, tmp_path, UNEVEN, [{"-b": 4}, {"-b": 2, "-x": 30}])
    for worker in workers:
        assert worker.process.returncode == 2
        assert "--max-steps" in worker.output() and "--batch" not in worker.output()


# Heads of 64 values, which attention on GPUs wants; two fragments are in flight at times.
ON_GPUS = {"--layers": 2, "--heads": 1, "--channels": 64, "-t": 16, "-b": 1, "-x": 9, "--workers": 3, "-H": 5,
           "--overlap": 2, "--fragment-layers": 1, "--outer-exchange": "all_to_all", "--timeout": 100,
           "--outer-rounding": "stochastic", "--outer-error-feedback": True, "--outer-weights": "tokens"}
EMULATED = ROOT / "build" / "plain" / "train_gpt"
RACES = ROOT / "build" / "thread" / "train_gpt"
SEEDED = {"EMULATOR_ASYNCHRONOUS": "1", "EMULATOR_SEED": "1", "OMP_NUM_THREADS": "1",
          "TSAN_OPTIONS": f"halt_on_error=1 suppressions={ROOT}/dev/test/thread_sanitizer.supp"}


@pytest.mark.parametrize("other", [
    pytest.param({"--outer-transport": "tcp"}, id="tcp"),
    # test_emulated_orders.py has a shorter run of these.
    pytest.param({"--outer-transport": "nccl"}, id="nccl", marks=pytest.mark.long),
    pytest.param({"--outer-offload": True}, id="offloaded", marks=pytest.mark.long)])
def test_means_by_all_to_all_under_emulated_cuda_have_the_same_bits_in_every_order_and_over_tcp(train, other):
    """NCCL with every call done when it returns; streams that an adversary delays."""
    calm = train("calm", ON_GPUS, trainer=EMULATED)
    assert syncs(calm, 0) == syncs(calm, 1) == syncs(calm, 2) != []
    run = train("delayed", {**ON_GPUS, **other}, environment=SEEDED, trainer=EMULATED)
    assert run.model() == calm.model() and syncs(run, 1) == syncs(calm, 1)


@pytest.mark.long
@pytest.mark.xdist_group("thread sanitizer's trainers")  # one at a time: a process takes 3 GB
@pytest.mark.parametrize("transport", ["nccl", "tcp"])
def test_all_to_all_has_no_race_between_its_streams(train, transport):
    options = {**ON_GPUS, "--layers": 1, "-x": 4, "-H": 3, "--timeout": 250, "--outer-transport": transport}
    calm = train("calm", options, trainer=EMULATED)
    run = train("watched", options, environment=SEEDED, trainer=RACES, seconds=300)
    assert run.model() == calm.model()
