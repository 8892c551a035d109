"""Builds programs in a private copy of the sources, and runs them with a time limit."""
import dataclasses
import os
import pathlib
import resource
import shlex
import shutil
import signal
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[3]


class Failure(Exception):
    """An error that keeps the tool from reaching a verdict."""


@dataclasses.dataclass
class Result:
    status: int
    output: str
    timed_out: bool


def run(command, folder, cpu_seconds, clock_seconds=None, environment=None):
    """Runs a program in its own process group. Each process may use `cpu_seconds` of a processor; the run may take
    `clock_seconds`, by default ten times as many, since the machine may be busy."""
    def limits():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds) + 1, int(cpu_seconds) + 2))

    process = subprocess.Popen([str(word) for word in command], cwd=folder, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limits, env=environment)
    try:
        output, timed_out = process.communicate(timeout=clock_seconds or 10 * cpu_seconds + 10)[0], False
    except subprocess.TimeoutExpired:
        output, timed_out = b"", True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    timed_out |= process.returncode == -signal.SIGXCPU
    return Result(process.returncode, output.decode(errors="replace"), timed_out)


def must(command, folder):
    """Runs a command that has to succeed."""
    result = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        raise Failure(f"{shlex.join(map(str, command))}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")


def copy_sources(folder, root=ROOT):
    """Makes a private copy of all sources that programs are built from."""
    for part in ("Makefile", "scripts", "llmc", "streaming", "dev", "train_gpt.cu", "test_gpt.cu"):
        if (root / part).is_dir():
            shutil.copytree(root / part, folder / part,
                            ignore=shutil.ignore_patterns("results", "__pycache__", "*.png"))
        elif (root / part).exists():
            shutil.copy(root / part, folder / part)
    (folder / ".venv").symlink_to(root / ".venv")
