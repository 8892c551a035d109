"""What the other processes do when one process of the CUDA trainer dies, hangs or fails. They are started one by one,
as torchrun does, so that the survivors end only by themselves."""

import concurrent.futures
import os
import shutil
import signal
import subprocess
import time

import numpy
import pytest

from conftest import ROOT, command, write_shard

TRAINER = ROOT / "build" / "plain" / "train_gpt"
NAMES = [f"worker {worker} rank {rank}" for worker in range(2) for rank in range(2)]
# Two fragments. A step has five operations inside a worker: two blocks' gradients, the norm, two blocks'
# parameters. Before step 1 come two rehearsals of a step, and one of an exchange between the workers.
OPTIONS = {"--layers": 1, "--heads": 1, "--channels": 64, "-t": 16, "-b": 1, "-x": 5, "--timeout": 40,
           "--workers": 2, "--ranks": 2, "-H": 5, "--overlap": 4, "--fragment-layers": 1}
LONG = {"-x": 100000}
TCP = {"--outer-transport": "tcp"}
SOON = {"--timeout": 8}
LATE = {"--timeout": 600}
ONE = {"--workers": 1, **SOON}


def environment(variables):
    emulator = {"EMULATOR_ASYNCHRONOUS": "1", "EMULATOR_SEED": "1", "EMULATOR_PROTECT": "0",
                "OMP_NUM_THREADS": "1"}
    return {**os.environ, **emulator, **{name: str(value) for name, value in variables.items()}}


class Together:
    """The processes of a run, started one by one; the victim with a fault or other tokens than the rest."""

    def __init__(self, tokens, folder, options, victim=None, fault=None, own_tokens=None, variables=None):
        self.folder, self.victim, self.dies = folder / "out", victim, (fault or "").startswith("kill")
        folder.mkdir()
        options = {**OPTIONS, "--store": f"file:{folder}/store", **options}
        size = options["--workers"] * options["--ranks"]
        self.running = []
        for process in range(size):
            own = {"EMULATOR_NCCL_FAULT": fault} if process == victim and fault else {}
            places = {"RANK": process, "WORLD_SIZE": size, "LOCAL_RANK": process, **(variables or {})}
            text = own_tokens if process == victim and own_tokens else tokens
            self.running.append(subprocess.Popen(
                command(text, self.folder, options, TRAINER), env=environment({**places, **own}), cwd=folder,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))

    def steps(self):
        """Steps that process 0 has logged."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count('"type":"step"') if path.exists() else 0

    def wait_for_step(self, step):
        while self.steps() < step and all(process.poll() is None for process in self.running):
            time.sleep(0.05)

    def end(self):
        """{process: (status, its own lines)} of all but the victim, once they have ended by themselves."""
        limit = time.monotonic() + 100
        try:
            if self.dies:
                self.running[self.victim].wait(100)
            died, ends = time.monotonic(), {}
            for process, running in enumerate(self.running):
                if process != self.victim:
                    error = running.communicate(timeout=max(1, limit - time.monotonic()))[1]
                    own_lines = [line for line in error.splitlines() if not line.startswith("emulator: ")]
                    ends[process] = (running.returncode, own_lines)
            assert not self.dies or time.monotonic() - died < 30, "noticed whatever --timeout is"
            return ends
        finally:
            for running in self.running:
                running.kill()
                running.communicate()


# Process 1 (worker 0 rank 1) is rank 1 inside its worker and rank 0 between the workers, process 2 (worker 1
# rank 0) the other way round: so the rank in a fault says in which communicator it strikes. With one worker
# only the watchdog sees a hang; with two, another worker's wait for an exchange usually ends before that.
# name: (victim, fault, options, steps that are done by then, what the survivors say)
FAULTS = {
    "dies while the ranks of its worker join": (2, "kill:0:0", LATE, "none", NAMES[2]),
    "dies while the workers join": (1, "kill:0:0", LATE, "none", NAMES[1]),
    "dies in the first collectives": (2, "kill:0:2", {}, "none", NAMES[2]),
    "dies in the validation before step 1": (2, "kill:0:13", {"-v": 3}, "none", NAMES[2]),
    "dies in the first exchange": (1, "kill:0:1", {}, "none", NAMES[1]),
    "dies in a step": (2, "kill:0:38", LONG, "some", NAMES[2]),
    "dies in an exchange under a step": (1, "kill:0:3", LONG, "some", NAMES[1]),
    "dies in the last exchange": (1, "kill:0:3", {}, "all", NAMES[1]),
    "dies in its last operation": (2, "kill:0:37", SOON, "all", NAMES[2]),
    "dies in the first collectives, over TCP": (2, "kill:0:2", TCP, "none", NAMES[2]),
    "dies in a step, over TCP": (2, "kill:0:38", {**LONG, **TCP}, "some", NAMES[2]),
    "dies in a step, silently": (2, "kill:0:38", {**LONG, **LATE}, "some", f"{NAMES[2]} has died"),
    "dies in an exchange, silently": (1, "kill:0:3", {**LONG, **LATE}, "some", f"{NAMES[1]} has died"),
    "fails in a step": (2, "error:0:38", LONG, "some", NAMES[2]),
    "hangs in a step": (2, "hang:0:38", {**LONG, **SOON}, "some", "waited "),  # the exchange's 8 s, or 16 s
    "hangs in an exchange": (1, "hang:0:3", {**LONG, **SOON}, "some", "waited 8 s"),
    "of one worker hangs while it joins": (1, "hang:1:0", ONE, "none", "connection of the processes to"),
    "of one worker hangs in the first collectives": (1, "hang:1:2", ONE, "none", "the first collectives to"),
    "of one worker hangs in the validation": (1, "hang:1:11", {"-v": 3, **ONE}, "none", "evaluation before step 1 to"),
    "of one worker hangs in a step": (1, "hang:1:38", {**LONG, **ONE}, "some", "to finish: another"),
}


# What the others prove as well, of another moment or another transport.
LONG_FAULTS = {"dies in the validation before step 1", "dies in its last operation", "dies in the first exchange",
               "dies in the first collectives, over TCP", "of one worker hangs in the first collectives",
               "of one worker hangs in the validation", "hangs in a step"}


@pytest.fixture(scope="module")
def ended(tokens, tmp_path_factory, request):
    """{name: (run, how it ended)}. They mostly wait, and so go side by side."""
    def end(name):
        victim, fault, options = FAULTS[name][:3]
        variables = {"EMULATOR_NCCL_SILENT": 1} if "silently" in name else {}
        folder = tmp_path_factory.mktemp("fault") / "run"
        run = Together(tokens, folder, options, victim, fault, variables=variables)
        return run, run.end()

    names = [name for name in FAULTS if request.config.getoption("--long") or name not in LONG_FAULTS]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        return dict(zip(names, pool.map(end, names)))


@pytest.fixture(scope="module")
def undisturbed(tokens, tmp_path_factory):
    run = Together(tokens, tmp_path_factory.mktemp("undisturbed") / "run", {})
    assert run.end() == {process: (0, []) for process in range(len(NAMES))}
    return run


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG_FAULTS else [])
                                  for name in FAULTS])
def test_when_a_process(name, ended, undisturbed):
    """... then the others end by themselves, each with one line and status 1; a model is whole or absent."""
    _, _, options, done, said = FAULTS[name]
    run, ends = ended[name]
    for process, (status, lines) in ends.items():
        assert status == 1 and len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0], ends
    steps = {**OPTIONS, **options}["-x"]
    least = steps - 1  # the death may be noticed before the last step's line is written
    assert {"none": run.steps() == 0, "some": 0 < run.steps() < steps, "all": run.steps() >= least}[done], run.steps()
    models = {path.name: path.read_bytes() for path in run.folder.glob("model*")}
    whole = {path.name: path.read_bytes() for path in undisturbed.folder.glob("model*")}
    assert models in ({}, whole)


def test_a_process_s_own_failure_is_what_all_others_report(tokens, tmp_path):
    """While it trains, its text is overwritten with tokens beyond the vocabulary."""
    own = tmp_path / "own"
    shutil.copytree(tokens, own)
    run = Together(tokens, tmp_path / "run", LONG, victim=3, own_tokens=own)
    run.wait_for_step(2)
    for shard in own.glob("x_train_*.bin"):
        write_shard(shard, numpy.full(18000, 64))
    for status, lines in run.end().values():
        assert status == 1 and len(lines) == 1 and f"{NAMES[3]} has stopped: {own}" in lines[0], lines


def test_a_process_that_stands_still_between_workers_on_tcp_is_named(tokens, tmp_path):
    run = Together(tokens, tmp_path / "run", {**LONG, **TCP, **SOON, "--ranks": 1}, victim=1)
    run.wait_for_step(2)
    run.running[1].send_signal(signal.SIGSTOP)
    [(status, lines)] = run.end().values()
    assert status == 1 and len(lines) == 1 and "worker 1 rank 0 has been silent" in lines[0], lines


@pytest.mark.long
def test_time_in_which_all_are_stopped_counts_as_no_ones_silence(tokens, tmp_path):
    """As when a job is suspended: process 0 waits for an exchange through NCCL, and is stopped as well."""
    run = Together(tokens, tmp_path / "run", {**LONG, **SOON, "--ranks": 1})
    run.wait_for_step(2)
    try:
        for process in (1, 0):
            run.running[process].send_signal(signal.SIGSTOP)
            time.sleep(2)
        time.sleep(8)
        step = run.steps()
        for process in run.running:
            process.send_signal(signal.SIGCONT)
        run.wait_for_step(step + 20)
        assert [process.poll() for process in run.running] == [None, None]
    finally:
        for process in run.running:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("gpus", [1, 2])
def test_workers_started_one_by_one_on_a_machine_take_different_gpus_if_there_are(tokens, tmp_path, gpus):
    options = {**OPTIONS, "--ranks": 1, "--store": f"file:{tmp_path}/store"}
    running = [subprocess.Popen(command(tokens, tmp_path / "out", {**options, "--worker": worker}, TRAINER),
                                env=environment({"EMULATOR_DEVICES": gpus}), stdout=subprocess.PIPE, text=True)
               for worker in range(2)]
    outputs = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert ("processes share a GPU" in outputs[0]) == (gpus == 1)


def test_three_ranks_on_two_gpus_are_refused(tokens, tmp_path):
    """As where one of three has failed."""
    options = {**OPTIONS, "--workers": 1, "--ranks": 3}
    words = command(tokens, tmp_path / "out", options, TRAINER)
    done = subprocess.run(words, env=environment({"EMULATOR_DEVICES": 2}), capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and not (tmp_path / "out").exists(), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: worker 0 rank 0 and its worker's other ranks share GPUs unevenly")
