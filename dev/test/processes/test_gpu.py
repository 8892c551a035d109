"""On a GPU (make test-gpu): the kernels, the model against PyTorch's numbers, runs of several processes that share
the GPU over NCCL and over TCP, and NVIDIA's compute-sanitizer on both. Without a GPU all of it is skipped."""

import functools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import ROOT, Run, children, command, take_signals

TRAINER, CPU, EMULATED = ROOT / "train_gpt", ROOT / "train_gpt_cpu", ROOT / "build" / "plain" / "train_gpt"
KERNELS = sorted(path.stem for path in (ROOT / "dev" / "test" / "kernels").glob("test_*.cpp")) + ["test_kernels"]
# Heads of 64 values, which attention on GPUs wants.
SMALL = {"--layers": 2, "--heads": 1, "--channels": 64, "-t": 64, "-b": 1, "-x": 10, "-l": 1e-3, "--timeout": 60}
# Three fragments, of which up to two are in flight.
STREAMING = {**SMALL, "-H": 5, "--overlap": 2, "--fragment-layers": 1, "--outer-dtype": "fp4"}
SANITIZED = 9  # compute-sanitizer's exit status where it has found something


def why_not():
    """Why nothing here can run, or None."""
    if not shutil.which("nvidia-smi"):
        return "no GPU here: there is no nvidia-smi"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    if listed.returncode != 0 or "GPU" not in listed.stdout:
        return f"no GPU here: nvidia-smi -L says: {(listed.stdout + listed.stderr).strip()}"
    return None if TRAINER.exists() else "train_gpt is not built: make test-gpu builds it"


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def ends_well(words, seconds=300):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout[-6000:]}{result.stderr[-3000:]}"
    return result.stdout


# ---- one process

@pytest.mark.parametrize("program", KERNELS)
def test_kernels_agree_with_the_cpu(program):
    assert "[  PASSED  ]" in ends_well([ROOT / "build" / "gpu" / program])


@pytest.mark.parametrize("program", ["test_gpt", "build/gpu/test_gpt_fp32"])
def test_the_model_agrees_with_pytorch(program):
    ends_well([ROOT / program, ROOT / "dev" / "test" / "data" / "reference_head64.bin"])


def test_a_run_repeats_itself_bit_by_bit_and_learns(train):
    first, second = (train(name, {**SMALL, "-b": 4, "-x": 50}, trainer=TRAINER) for name in ("first", "second"))
    assert first.model() == second.model()
    assert first.losses() == second.losses()
    assert first.losses()[-1] < first.losses()[0] - 0.1


@pytest.mark.parametrize("other", [CPU, EMULATED], ids=["cpu", "emulated"])
def test_losses_are_those_of_the_other_builds(train, other):
    if not other.exists():
        pytest.skip(f"{other.relative_to(ROOT)} is not built: nothing to compare with")
    gpu = train("gpu", {**STREAMING, "--outer-optimizer": "nesterov"}, trainer=TRAINER)
    theirs = train("theirs", {**STREAMING, "--outer-optimizer": "nesterov"}, trainer=other)
    assert gpu.losses() == pytest.approx(theirs.losses(), abs=5e-3)  # bf16 against fp32, or other sums


# ---- processes that share the GPU, each with an NCCL_HOSTID of its own

def hashes(run, process):
    return [(row["sync"], row["global_hash"]) for row in run.lines("sync", process)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_gradients(train, ranks):
    options = {**SMALL, "--ranks": ranks}
    first, second = (train(name, options, trainer=TRAINER) for name in ("first", "second"))
    assert first.model() == second.model()
    assert first.losses() == second.losses()
    for rank in range(1, ranks):
        assert first.losses(rank) == first.losses()
    if CPU.exists():
        assert first.losses() == pytest.approx(train("cpu", options).losses(), abs=5e-3)


def assert_same_bits(runs, workers, ranks):
    """All workers of a run have the same global parameters at every sync, and all runs the first one's bits."""
    first = next(iter(runs.values()))
    for name, run in runs.items():
        for rank in range(ranks):
            assert hashes(run, rank) != []
            for worker in range(1, workers):
                assert hashes(run, rank) == hashes(run, worker * ranks + rank), f"{name}, worker {worker}, rank {rank}"
        assert run.model() == first.model(), name
        for process in range(workers * ranks):
            assert run.losses(process) == first.losses(process), name
    assert first.losses()[-1] < first.losses()[0]


@pytest.mark.parametrize("workers,ranks", [(2, 1), (2, 2), (4, 1)])
def test_workers_hold_the_same_bits_over_nccl_over_tcp_and_again(train, workers, ranks):
    options = {**STREAMING, "--workers": workers, "--ranks": ranks}
    runs = {transport: train(transport, {**options, "--outer-transport": transport}, trainer=TRAINER)
            for transport in ("nccl", "tcp")}
    runs["again"] = train("again", options, trainer=TRAINER)
    first = runs["nccl"]
    assert_same_bits(runs, workers, ranks)
    if CPU.exists():
        assert first.losses() == pytest.approx(train("cpu", options).losses(), abs=5e-3)


# Everything the wire has a choice in: a mean that its owner rounds once more, random rounding, what rounding lost kept by
# sender and owner, weights by tokens. Fragments of 391 and 97 blocks, which three and four workers do not divide by.
ALL_TO_ALL = {**STREAMING, "--outer-exchange": "all_to_all", "--outer-rounding": "stochastic",
              "--outer-error-feedback": True, "--outer-weights": "tokens"}


@pytest.mark.parametrize("workers,ranks", [(3, 1), (4, 1), (3, 2)])
def test_means_by_all_to_all_have_the_same_bits_over_nccl_over_tcp_and_again(train, workers, ranks):
    options = {**ALL_TO_ALL, "--workers": workers, "--ranks": ranks}
    runs = {name: train(name, {**options, "--outer-transport": transport}, trainer=TRAINER, seconds=300)
            for name, transport in (("nccl", "nccl"), ("tcp", "tcp"), ("again", "nccl"))}
    first = runs["nccl"]
    assert " by all_to_all, " in first.stdout
    assert_same_bits(runs, workers, ranks)
    for name, run in runs.items():
        for rank in range(ranks):
            assert hashes(run, rank) == hashes(first, rank), name
    if CPU.exists():
        assert first.losses() == pytest.approx(train("cpu", options).losses(), abs=5e-3)


def test_two_exchanges_of_the_same_workers_differ_in_what_they_round(train):
    """Or the option would do nothing: by all-to-all a mean is rounded by its owner, too."""
    options = {**STREAMING, "--workers": 3}
    gathered, owned = (train(exchange, {**options, "--outer-exchange": exchange}, trainer=TRAINER)
                       for exchange in ("all_gather", "all_to_all"))
    assert hashes(gathered, 0)[0] == hashes(owned, 0)[0]  # of the first sends, before any mean
    assert hashes(gathered, 0)[-1] != hashes(owned, 0)[-1]
    assert gathered.losses() == pytest.approx(owned.losses(), abs=5e-2)


def test_outer_state_in_host_memory_gives_the_same_bits(train, tmp_path):
    config = tmp_path / "offload.toml"
    config.write_text("outer-offload = true\n")
    options = {**STREAMING, "--workers": 2}
    on_gpu, on_host = (train(name, {**options, "--config": file}, trainer=TRAINER)
                       for name, file in (("gpu", None), ("host", config)))
    assert on_host.model() == on_gpu.model()
    assert "outer-offload=true" in (on_host.folder / "config.toml").read_text()


# ---- a peer that dies

def steps_logged(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"type":"step"') if path.exists() else 0


def family(pid):
    return [pid] + [one for child in children(pid) for one in family(child)]


def kill_all(process):
    if process.poll() is None:
        for pid in reversed(family(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def start(tokens, tmp_path):
    """start(name, options) starts a long run in the background."""
    started = []

    def run(name, options):
        folder, said = tmp_path / name, (tmp_path / f"{name}.txt").open("w")
        words = command(tokens, folder, {**STREAMING, "-x": 1000000, "--timeout": 15, **options}, TRAINER)
        process = subprocess.Popen(words, stdout=said, stderr=said, cwd=tmp_path, preexec_fn=take_signals)
        said.close()
        started.append(process)
        return process, folder, tmp_path / f"{name}.txt"

    yield run
    for process in started:
        kill_all(process)


def wait_for_steps(folder, process, seconds=90):
    end = time.monotonic() + seconds
    while steps_logged(folder) < 20:
        assert process.poll() is None and time.monotonic() < end, "the run does not start"
        time.sleep(0.1)


@pytest.mark.parametrize("transport", ["nccl", "tcp"])
def test_a_killed_worker_ends_the_other_with_a_message(start, tmp_path, transport):
    options = {"--workers": 2, "--store": f"file:{tmp_path}/store", "--outer-transport": transport}
    survivor, folder, said = start("survivor", {**options, "--worker": 0})
    victim, _, _ = start("victim", {**options, "--worker": 1})
    wait_for_steps(folder, survivor)
    kill_all(victim)
    assert survivor.wait(timeout=90) not in (0, -signal.SIGKILL)
    assert "error: " in said.read_text(), said.read_text()


def test_a_killed_rank_ends_the_run_with_a_message(start):
    run, folder, said = start("run", {"--workers": 1, "--ranks": 2, "--outer-optimizer": "none"})
    wait_for_steps(folder, run)
    os.kill(children(run.pid)[-1], signal.SIGKILL)
    assert run.wait(timeout=90) not in (0, -signal.SIGKILL)
    assert "was killed by signal 9" in said.read_text(), said.read_text()


# ---- compute-sanitizer

@functools.cache
def sanitizer():
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), Path("/usr/local/cuda")]
    places = [home / place for home in homes for place in ("bin", "compute-sanitizer")]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, [os.environ["PATH"], *places])))
    if not found:
        return None, "compute-sanitizer is not installed: it belongs to the CUDA toolkit"
    tried = subprocess.run([found, "--error-exitcode", str(SANITIZED), str(ROOT / "build/gpu/test_kernels")],
                           capture_output=True, text=True, timeout=120, cwd=ROOT)
    if "not supported" in tried.stdout + tried.stderr:  # in some virtual machines
        return None, f"compute-sanitizer cannot check this device: {(tried.stdout + tried.stderr)[-300:]}"
    return found, None


def sanitized(tool, words, others=False):
    """A program under a tool. others: it runs kernels of libraries, too; then the tool looks at ours only, which are
    all in namespace cuda."""
    program, why = sanitizer()
    if not program:
        pytest.skip(why)
    ours = ["--kernel-name", "kns=4cuda"] if others else []
    # Calls that the program checks itself, such as a query of a stream that has not finished, are no mistakes.
    if tool == "memcheck":
        ours += ["--report-api-errors", "no"]
    options = ["--tool", tool, "--error-exitcode", SANITIZED, "--target-processes", "all", "--print-limit", 20, *ours]
    return [str(word) for word in [program, *options, *words]]


MISTAKES = r"""
#include <cstdio>
__global__ void write_beyond(int* out) { out[threadIdx.x + 1] = 1; }
__global__ void no_barrier(int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[63 - threadIdx.x];
}
int main(int argc, char**) {
    int* out;
    cudaMalloc(&out, 64 * sizeof(int));
    if (argc > 1) { no_barrier<<<1, 64>>>(out); } else { write_beyond<<<1, 64>>>(out); }
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
"""


@pytest.mark.parametrize("tool,words", [("memcheck", []), ("racecheck", ["no_barrier"])])
def test_sanitizer_finds_a_mistake_made_on_purpose(tmp_path, tool, words):
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ['PATH']}")
    if not nvcc:
        pytest.skip("no nvcc: the program with the mistake cannot be built")
    (tmp_path / "mistakes.cu").write_text(MISTAKES)
    ends_well([nvcc, "-arch=native", tmp_path / "mistakes.cu", "-o", tmp_path / "mistakes"])
    result = subprocess.run(sanitized(tool, [tmp_path / "mistakes", *words]), capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == SANITIZED, result.stdout + result.stderr


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("program", [name for name in KERNELS if name != "test_kernels"])
def test_sanitizer_finds_nothing_in_the_kernels(tool, program):
    ends_well(sanitized(tool, [ROOT / "build" / "gpu" / program], others=program == "test_matmul"))


def test_sanitizer_finds_nothing_in_a_short_training(tokens, tmp_path):
    options = {**STREAMING, "-x": 5, "-H": 3, "--outer-optimizer": "nesterov"}
    ends_well(sanitized("memcheck", command(tokens, tmp_path / "run", options, TRAINER), others=True))
    result = subprocess.CompletedProcess([], 0, "", "")
    assert len(Run(tmp_path / "run", result).losses()) == 5
