"""What the process tests share: the trainer, a small text as tokens, runs and their logs."""

import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys

import numpy
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAINER = ROOT / "train_gpt_cpu"

# Where the tests find the programs' modules, and each other's helpers.
FOLDERS = ["dev", "dev/tools", "dev/bench", "dev/wan", "dev/break", "dev/break/chaos", "dev/reference", "dev/results",
           "dev/test", "dev/test/processes", "dev/test/tools"]
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

# A model that trains a step in a millisecond or two, and has three fragments at --fragment-layers 1.
TINY = {
    "--layers": 2,
    "--heads": 2,
    "--channels": 32,
    "--vocab-size": 64,
    "-t": 16,
    "-b": 4,
    "-l": 0.01,
    "-k": "constant",
    "-s": 0,
    "-v": 0,
    "--matmul-precision": "highest",
    "--timeout": 30,
}


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also what takes long (make test-long)")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes too long for make test")
    config.addinivalue_line("markers", "short: only for make test, since a long test does the same and more")


# Fixtures of a module or a session that are cheap enough to be made anew in each of pytest-xdist's processes.
CHEAP = {"tokens", "tmp_path_factory", "needs_clang", "needs_the_program"}


def costly_fixture(item):
    """The fixture of a module or a session that a test shares with others, and its parameter; or None."""
    definitions = item._fixtureinfo.name2fixturedefs
    shared = sorted(name for name, found in definitions.items()
                    if found[-1].scope in ("module", "session") and name not in CHEAP and found[-1].baseid)
    if not shared:
        return None
    parameters = getattr(item, "callspec", None)
    return f"{item.path.stem}:{shared[0]}:{parameters.params.get(shared[0], '') if parameters else ''}"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Tests that are marked with pytest.mark.long are skipped unless --long is given, and those with pytest.mark.short
    if it is. With pytest-xdist, tests that share a costly fixture run in one process."""
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes long: make test-long runs it"))
        if item.get_closest_marker("short") and config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="a long test does the same and more"))
        group = costly_fixture(item)
        if group and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    header = numpy.zeros(256, dtype="<i4")
    header[:3] = [magic, version, len(tokens) if count is None else count]
    path.write_bytes(header.tobytes() + numpy.asarray(tokens, dtype="<u2").tobytes())


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    """No launcher that pytest was started by tells the runs their places; what they leave is the test's. A process has
    one thread: tests run beside each other, and threads that wait for each other on a busy core take far longer."""
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("OMPI_", "SLURM_", "DILOCO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A pattern of two training shards and a validation shard: a noisy cycle of 64 tokens, easily learned."""
    folder = tmp_path_factory.mktemp("tokens")
    random = numpy.random.default_rng(1)
    stream = numpy.cumsum(random.integers(1, 4, size=40000)) % 64
    write_shard(folder / "x_train_000000.bin", stream[:18000])
    write_shard(folder / "x_train_000001.bin", stream[18000:36000])
    write_shard(folder / "x_val_000000.bin", stream[36000:])
    return folder


def command(tokens, output, options, trainer=TRAINER):
    merged = {**TINY, "-i": f"{tokens}/x_train_*.bin", "-j": f"{tokens}/x_val_*.bin", "-o": output, **options}
    words = [(name,) if value is True else (name, value) for name, value in merged.items() if value is not None]
    return [str(trainer)] + [str(word) for option in words for word in option]


def children(pid):
    """Processes that process `pid` has started."""
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    """A process that has ended may stay a zombie until its parent waits for it."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def peak_memory(pid):
    """The most memory that a process has held until now, in bytes."""
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)
    return 1024 * int(kilobytes)


def take_signals():
    """In a new process: what a shell ignores for its background jobs counts again."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """A finished run: its status, what it printed, and its logs by process."""

    def __init__(self, folder, result):
        self.folder = pathlib.Path(folder)
        self.status, self.stdout, self.stderr = result.returncode, result.stdout, result.stderr

    def lines(self, kind, process=0):
        name = "metrics.jsonl" if process == 0 else f"metrics_{process:05d}.jsonl"
        rows = [json.loads(line) for line in (self.folder / name).read_text().splitlines()]
        return [row for row in rows if row["type"] == kind]

    def losses(self, process=0):
        return [row["loss"] for row in self.lines("step", process)]

    def model(self):
        """Bytes of the newest model file."""
        return sorted(self.folder.glob("model_*.bin"))[-1].read_bytes()


@pytest.fixture
def train(tokens, tmp_path):
    """train(name, {option: value, ...}) runs the trainer to its end, with status 0 unless told otherwise."""

    def run(name, options, status=0, environment=None, trainer=TRAINER, seconds=120):
        folder = tmp_path / name
        result = subprocess.run(
            command(tokens, folder, options, trainer),
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, **(environment or {})},
            cwd=tmp_path,
        )
        assert result.returncode == status, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
        return Run(folder, result)

    return run


class Worker:
    """A worker that was started on its own (--worker W --store URL)."""

    def __init__(self, folder, process):
        self.folder, self.process, self.text = folder, process, None

    def wait(self, seconds=60):
        self.text = (self.text or "") + self.process.communicate(timeout=seconds)[0]
        return self.process.returncode

    def output(self):
        return self.text if self.text is not None else "(still running)"

    def kill(self):
        for child in children(self.process.pid):
            os.kill(child, signal.SIGKILL)
        self.process.kill()

    def result(self):
        return Run(self.folder, subprocess.CompletedProcess([], self.process.returncode, self.text, ""))


@pytest.fixture
def start_worker(tokens, tmp_path):
    """start_worker(w, options, name) starts one worker in the background; what runs at the end is killed."""
    started = []

    def start(w, options, name=""):
        folder = tmp_path / f"worker{w}{name}"
        process = subprocess.Popen(
            command(tokens, folder, {**options, "--worker": w}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        started.append(Worker(folder, process))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.poll() is None:
            worker.kill()
            worker.process.communicate()
