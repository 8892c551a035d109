"""The whole CUDA trainer on a CPU (train_gpt_emulated): streams as threads that an adversary delays, NCCL between
processes, faults on purpose."""

import re
import struct
import subprocess
import time

import pytest

from conftest import ROOT, TRAINER
from test_evaluation import eval_set, random_examples
from token_files import write_tokenizer

EMULATED = ROOT / "build" / "plain" / "train_gpt"
RACES = ROOT / "build" / "thread" / "train_gpt"
# Heads of 64 values, which attention on GPUs wants; three fragments, of which up to two are in flight.
SMALL = {"--layers": 2, "--heads": 1, "--channels": 64, "-t": 64, "-b": 1, "-x": 10, "-l": 1e-3, "--timeout": 40,
         "--workers": 2, "--ranks": 2, "-H": 5, "--overlap": 2, "--fragment-layers": 1, "--outer-dtype": "fp4"}


def environment(seed):
    known = ROOT / "dev" / "test" / "thread_sanitizer.supp"
    return {"EMULATOR_ASYNCHRONOUS": "1", "EMULATOR_SEED": str(seed), "OMP_NUM_THREADS": "1",
            "TSAN_OPTIONS": f"halt_on_error=1 suppressions={known}"}


def hashes(run, process):
    return [(row["sync"], row["global_hash"]) for row in run.lines("sync", process)]


@pytest.fixture
def calm(train):
    """The run that all others are compared with: every call is done when it returns."""
    return train("calm", SMALL, trainer=EMULATED)


def test_workers_hold_the_same_global_parameters_and_losses_are_the_cpu_s(train, calm):
    for rank in range(2):
        assert hashes(calm, rank) == hashes(calm, 2 + rank) != []
    cpu = train("cpu", SMALL)
    assert calm.losses() == pytest.approx(cpu.losses(), abs=5e-3)  # bf16 against fp32
    assert calm.losses()[-1] < calm.losses()[0]


def test_muon_s_ranks_have_the_losses_of_one_rank_and_of_the_cpu(train):
    options = {**SMALL, "--workers": 1, "-H": None, "--overlap": None, "--fragment-layers": None, "--outer-dtype": None,
               "--optimizer": "muon"}
    two = train("two", options, trainer=EMULATED)
    watched = train("watched", options, environment=environment(1), trainer=EMULATED)
    assert watched.model() == two.model()
    one = train("one", {**options, "--ranks": 1, "-b": 2}, trainer=EMULATED)
    cpu = train("cpu", {**options, "--matmul-precision": "highest"})
    assert two.losses() == pytest.approx(one.losses(), abs=2e-3)
    assert two.losses() == pytest.approx(cpu.losses(), abs=5e-3)
    assert two.losses()[-1] < two.losses()[0]


def test_micro_steps_have_the_cpu_s_losses_whatever_the_memory_of_gradients_held(train):
    """A step's first micro-step overwrites that memory, through which checkpoints and evaluations pass."""
    options = {**SMALL, "-d": 256, "-n": 3, "-v": 2}
    emulated, cpu = train("micro", options, trainer=EMULATED), train("cpu", options)
    assert emulated.losses() == pytest.approx(cpu.losses(), abs=5e-3)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_no_order_of_the_streams_changes_a_bit(train, calm, seed):
    run = train("watched", SMALL, environment=environment(seed), trainer=EMULATED)
    assert run.model() == calm.model()
    assert run.losses(3) == calm.losses(3)


def test_the_host_waits_in_no_call_of_a_step_nor_of_its_checkpoint(train):
    def calls(steps):
        options = {**SMALL, "-x": steps, "-n": 1, "-v": 0, "-s": 0, "--workers": 1, "--ranks": 1, "-H": None,
                   "--overlap": None, "--fragment-layers": None, "--outer-dtype": None}
        run = train(str(steps), options, environment={**environment(0), "EMULATOR_COUNT_WAITS": "1"},
                    trainer=EMULATED)
        return int(re.search(r"the host waited in (\d+) calls", run.stderr)[1])
    assert calls(2) == calls(5) > 0


def test_the_host_enqueues_a_step_while_the_device_computes_the_one_before(train):
    def most_queued(steps):
        options = {**SMALL, "-x": steps, "-v": 0, "-s": 0, "--workers": 1, "--ranks": 1, "-H": None,
                   "--overlap": None, "--fragment-layers": None, "--outer-dtype": None}
        run = train(str(steps), options, environment={**environment(0), "EMULATOR_COUNT_WAITS": "1"},
                    trainer=EMULATED)
        return int(re.search(r"queue held up to (\d+) items", run.stderr)[1])
    one = most_queued(1)
    assert any(most_queued(steps) > 1.5 * one for steps in (4, 5, 6))  # on a busy machine the host may be late


def test_launches_of_a_micro_step_of_the_largest_gpt_2_fit_into_a_stream_s_queue(train):
    """About 1,000 do; beyond that the host waits in a launch. d48, GELU in the forward's product, as on Hopper."""
    def launches(layers, micro_steps):
        options = {**SMALL, "--layers": layers, "-x": 1, "-d": 64 * micro_steps, "-v": 0, "-s": 0, "--workers": 1,
                   "--ranks": 1, "-H": None, "--overlap": None, "--fragment-layers": None, "--outer-dtype": None,
                   "--fuse-gelu": 1}
        run = train(f"{layers}-{micro_steps}", options,
                    environment={**environment(0), "EMULATOR_COUNT_WAITS": "1"}, trainer=EMULATED)
        return int(re.search(r"the host launched (\d+) times", run.stderr)[1])
    one, two = (launches(layers, 3) - launches(layers, 2) for layers in (1, 2))
    assert 0 < one + 47 * (two - one) <= 1024


def test_tcp_under_the_gpu_s_stream_gives_nccl_s_bits(train, calm):
    run = train("tcp", {**SMALL, "--outer-transport": "tcp"}, environment=environment(1), trainer=EMULATED)
    assert run.model() == calm.model()


def test_elastic_workers_have_the_bits_of_all_gather(train, tmp_path):
    options = {**SMALL, "--workers": 3, "--ranks": 1}
    lock_step = train("lock_step", {**options, "--outer-exchange": "all_gather"}, trainer=EMULATED)
    elastic = train("elastic", {**options, "--outer-transport": "store", "--store": f"file:{tmp_path}/store",
                                "--grace": 60, "--max-lag": 1000},
                    environment=environment(1), trainer=EMULATED)
    for worker in range(3):
        assert hashes(elastic, worker) == hashes(lock_step, worker) != []
        assert elastic.losses(worker) == lock_step.losses(worker)


@pytest.mark.long
@pytest.mark.xdist_group("thread sanitizer's trainers")  # one at a time: a process takes 3 GB
@pytest.mark.parametrize("transport", ["nccl", "tcp"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_trainer_has_no_race_between_its_streams(train, workers, transport):
    """Thread sanitizer knows the orders that CUDA promises, and no others: what one misses is a race in every process,
    under every seed. A worker that exchanges with itself has all orders between streams."""
    options = {**SMALL, "--workers": workers, "--outer-optimizer": "nesterov", "--layers": 1, "-t": 16, "-x": 4,
               "-n": 3, "-H": 3, "--timeout": 250, "--outer-transport": transport}
    calm = train("calm", options, trainer=EMULATED)
    run = train("watched", options, environment=environment(1), trainer=RACES, seconds=300)
    assert run.model() == calm.model()


def model_file(path, padded):
    """A model of zeros, whose vocabulary of 64 is padded to so many rows."""
    T, V, L, NH, C = 64, 64, 1, 1, 64
    values = (padded + T) * C + L * (12 * C * C + 13 * C) + 2 * C
    path.write_bytes(struct.pack("<8i", 20240326, 3, T, V, L, NH, C, padded) + bytes(1024 - 32 + 4 * values))
    return path


@pytest.mark.parametrize("sizes, words", [((1, 2, 192), "heads of 96 values"), ((1, 1, 32), "heads of 32 values"),
                                          ((1, 65, 8320), "8320 channels"), (None, "its vocabulary to 68 rows")])
def test_a_shape_that_the_kernels_lack_is_a_user_s_mistake(train, tmp_path, sizes, words):
    names = ("--layers", "--heads", "--channels")
    model = dict(zip(names, sizes or (None,) * 3))
    if sizes is None:
        model.update({"--vocab-size": None, "-e": model_file(tmp_path / "model.bin", 68)})
    run = train("run", {**SMALL, **model}, status=2, trainer=EMULATED)
    assert run.stderr.startswith("error: ") and words in run.stderr and run.stderr.count("\n") == 1
    assert not run.folder.exists()


def test_an_interface_that_nccl_would_not_find_is_a_user_s_mistake(train):
    run = train("nowhere", {**SMALL, "--interface": "nowhere0"}, status=2, trainer=EMULATED)
    assert run.stderr.startswith("error: no network interface nowhere0: ") and run.stderr.count("\n") == 1
    assert not run.folder.exists()


@pytest.mark.parametrize("fault,what,status", [("kill:1:30", "was killed by signal 9", 137),
                                               ("hang:1:30", "waited", 1), ("error:0:30", "NCCL", 1)])
def test_a_fault_of_a_process_ends_the_run_of_its_launcher_with_a_message(train, fault, what, status):
    begin = time.monotonic()
    run = train("fault", {**SMALL, "-x": 1000, "--timeout": 5}, status=status,
                environment={**environment(1), "EMULATOR_NCCL_FAULT": fault}, trainer=EMULATED)
    assert time.monotonic() - begin < 60
    assert what in run.stderr


def test_what_evaluates_and_writes_text_gives_the_cpu_s_answers(train, tmp_path):
    """In bf16 a likeliest token may be another: here a model that has learned a cycle is sure of each."""
    write_tokenizer(tmp_path / "tokenizer.bin", 64)
    (tmp_path / "set.bin").write_bytes(eval_set(random_examples(40, most=16)))
    options = {**SMALL, "--workers": 1, "--ranks": 1, "--layers": 1, "-x": 60, "-b": 4, "-v": 60, "-l": 1e-2,
               "-h": 1, "--hellaswag-data": tmp_path / "set.bin", "--tokenizer": tmp_path / "tokenizer.bin"}
    runs = [train(name, options, trainer=trainer) for name, trainer in (("cpu", TRAINER), ("gpu", EMULATED))]
    accuracies = [run.lines("hellaswag")[0]["accuracy"] for run in runs]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.1)
    words = ["--generate", "-e", next(runs[0].folder.glob("model_*.bin")), "--tokenizer", tmp_path / "tokenizer.bin",
             "--prompt", "!#%", "--temperature", 0, "-g", 30]
    texts = [subprocess.run([str(word) for word in (trainer, *words)], capture_output=True, text=True, timeout=100,
                            check=True).stdout for trainer in (TRAINER, EMULATED)]
    assert texts[0] == texts[1] and len(texts[0]) > 4
