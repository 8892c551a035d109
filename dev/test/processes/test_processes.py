"""Launching, meeting, dying: real processes, over file and Redis stores, in launchers' environments."""

import os
import select
import shutil
import signal
import socket
import subprocess
import time

import pytest

from conftest import children, command, is_running, take_signals

WORKERS = {"--workers": 2, "-H": 6, "--fragment-layers": 1, "-x": 24}
LONG = {**WORKERS, "-x": 100000}


def environment_of(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(entry.split("=", 1) for entry in file.read().decode().split("\0") if "=" in entry)


def wait_until(condition, seconds=20):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def steps_logged(folder, process=0):
    name = "metrics.jsonl" if process == 0 else f"metrics_{process:05d}.jsonl"
    path = folder / name
    return path.read_text().count('"type":"step"') if path.exists() else 0


@pytest.fixture
def launched(tokens, tmp_path):
    """A long run of several processes that this test must end."""
    started = []

    def start(options):
        folder = tmp_path / "run"
        process = subprocess.Popen(
            command(tokens, folder, options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=take_signals,
        )
        started.append(process)
        assert wait_until(lambda: steps_logged(folder) > 5), "the run does not start"
        return process, folder

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def redis(tmp_path):
    """URL of a Redis server of this test's own, with a password."""
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--requirepass",
            "secret",
            "--save",
            "",
            "--dir",
            str(tmp_path),
        ],
        stdout=subprocess.DEVNULL,
    )

    def answers():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        assert wait_until(answers), "the Redis server does not start"
        yield f"redis://:secret@127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def test_separate_workers_meet_through_a_folder_and_agree_with_self_started_ones(
    train, tmp_path, start_worker
):
    together = train("together", WORKERS)
    apart = [start_worker(w, {**WORKERS, "--store": f"file:{tmp_path}/store"}) for w in (0, 1)]
    assert [run.wait() for run in apart] == [0, 0], [run.output() for run in apart]
    assert apart[0].result().losses() == together.losses()
    assert apart[0].result().model() == together.model()


def test_separate_workers_meet_through_redis(train, redis, start_worker):
    together = train("together", WORKERS)
    apart = [start_worker(w, {**WORKERS, "--store": redis}) for w in (0, 1)]
    assert [run.wait() for run in apart] == [0, 0], [run.output() for run in apart]
    assert apart[0].result().model() == together.model()


def test_a_second_run_in_the_same_store_is_not_confused_by_the_first(redis, start_worker):
    for attempt in "ab":
        runs = [start_worker(w, {**WORKERS, "--store": redis}, attempt) for w in (0, 1)]
        assert [run.wait() for run in runs] == [0, 0], [run.output() for run in runs]


def test_the_store_may_be_given_by_the_environment(redis, monkeypatch, start_worker):
    monkeypatch.setenv("DILOCO_STORE", redis)
    runs = [start_worker(w, WORKERS) for w in (0, 1)]
    assert [run.wait() for run in runs] == [0, 0], [run.output() for run in runs]


def test_a_store_is_made_only_when_processes_meet(tmp_path, start_worker):
    run = start_worker(0, {**WORKERS, "--store": f"file:{tmp_path}/store", "-i": tmp_path / "nowhere"})
    assert run.wait() == 2 and not (tmp_path / "store").exists(), run.output()


def test_a_store_that_is_lost_before_the_end_loses_no_model_and_is_status_75(tmp_path, start_worker):
    options = {**WORKERS, "-x": 400, "-n": 0, "--store": f"file:{tmp_path}/store", "--timeout": 10}
    runs = [start_worker(worker, options) for worker in (0, 1)]
    assert wait_until(lambda: steps_logged(runs[0].folder) > 5), "the run does not start"
    shutil.rmtree(tmp_path / "store")
    assert [run.wait() for run in runs] == [75, 75], [run.output() for run in runs]
    assert list(runs[0].folder.glob("model_00000400.bin"))


def test_a_wrong_password_is_one_line(redis, start_worker):
    run = start_worker(0, {**WORKERS, "--store": redis.replace("secret", "wrong")})
    assert run.wait() == 2 and "password" in run.output()


LAUNCHERS = {
    "torchrun": lambda rank, size: {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "TORCHELASTIC_RUN_ID": "job",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    },
    "mpirun": lambda rank, size: {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "PMIX_NAMESPACE": "job",
    },
    "slurm": lambda rank, size: {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": size,
        "SLURM_LOCALID": rank,
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_other_launchers_find_their_places(train, tokens, tmp_path, launcher):
    options = {**WORKERS, "--ranks": 2, "-b": 2}
    ours = train("ours", options)
    folder = tmp_path / launcher
    running = [
        subprocess.Popen(
            command(tokens, folder, {**options, "--store": f"file:{tmp_path}/store"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **{k: str(v) for k, v in LAUNCHERS[launcher](rank, 4).items()},
            },
        )
        for rank in range(4)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4, outputs
    assert sorted(folder.glob("model_*.bin"))[-1].read_bytes() == ours.model()


def test_a_world_of_another_size_is_refused(train):
    run = train("run", WORKERS, status=2, environment={"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"})
    assert "3" in run.stderr and "2" in run.stderr


@pytest.mark.parametrize("workers", [2, 3])
def test_a_killed_worker_ends_the_run_and_is_named(launched, workers):
    process, folder = launched({**LONG, "--workers": workers})
    victim = next(pid for pid in children(process.pid) if environment_of(pid).get("DILOCO_WORKER") == "1")
    others = [pid for pid in children(process.pid) if pid != victim]
    os.kill(victim, signal.SIGKILL)
    start = time.time()
    out, error = process.communicate(timeout=20)
    assert time.time() - start < 10
    assert process.returncode not in (0, 2) and "worker 1" in error.strip().splitlines()[-1], error
    assert wait_until(lambda: not any(is_running(pid) for pid in others), 10)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_separately_started_worker_that_dies_is_named_by_the_others(tmp_path, start_worker, workers):
    runs = [
        start_worker(w, {**LONG, "--workers": workers, "--store": f"file:{tmp_path}/store"})
        for w in range(workers)
    ]
    assert wait_until(lambda: steps_logged(runs[0].folder) > 5), runs[0].output()
    runs[1].kill()
    start = time.time()
    for run in runs[:1] + runs[2:]:
        assert run.wait() == 1, run.output()
        assert "worker 1" in run.output().strip().splitlines()[-1], run.output()
    assert time.time() - start < 10


def test_a_run_that_loses_a_worker_leaves_no_half_checkpoint(tmp_path, start_worker):
    """Of process 0's state, which goes into a pipe that is read slowly: it is being written all the time."""
    step, folder = 500, tmp_path / "worker0"
    folder.mkdir()
    half = folder / f"state_{step:08d}_00000.bin.tmp"
    os.mkfifo(half)
    options = {**LONG, "-n": step, "--store": f"file:{tmp_path}/store"}
    reader = os.open(half, os.O_RDONLY | os.O_NONBLOCK)
    runs = [start_worker(w, options) for w in (0, 1)]
    assert select.select([reader], [], [], 60)[0], "nothing is written"
    os.set_blocking(reader, True)
    runs[1].kill()
    while os.read(reader, 2000):
        time.sleep(0.01)
    os.close(reader)
    assert runs[0].wait() == 1, runs[0].output()
    assert "worker 1" in runs[0].output().strip().splitlines()[-1], runs[0].output()
    assert not half.exists() and not list(folder.glob("state_*")) and not list(folder.glob("model_*"))


def test_a_dead_rank_inside_a_worker_is_named(launched):
    process, folder = launched({**LONG, "--workers": 1, "--ranks": 2})
    victim = next(pid for pid in children(process.pid) if environment_of(pid).get("DILOCO_RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    out, error = process.communicate(timeout=20)
    assert process.returncode not in (0, 2) and "worker 0 rank 1" in error.strip().splitlines()[-1], error


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(launched, with_signal):
    process, folder = launched(LONG)
    started = children(process.pid)
    assert len(started) == 2
    process.send_signal(with_signal)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert wait_until(lambda: not any(is_running(pid) for pid in started), 10)
