"""The processes of a blow, and the verdict on their ends."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "dev/tools"), str(ROOT / "dev/test")]
from conftest import command  # noqa: E402
from metrics import log_name  # noqa: E402

SAME, REFUSED, WAITED, DEFECT = VERDICTS = ("same bits", "refused with one line", "waited and said so", "DEFECT")
HANG = 60   # seconds within which a run must end, unless it still trains: the machine may be busy
LONGEST = 600  # seconds within which a run must end in any case
STILL = 10  # seconds without a new line in the log after which a run counts as still: longer than --timeout


def worst(verdicts):
    return max(verdicts, key=VERDICTS.index, default=SAME)


class Runs:
    """Starts the processes of a blow, and kills those that are left."""

    def __init__(self, trainer, tokens, base):
        self.trainer, self.tokens, self.base, self.started = trainer, tokens, base, []

    def start(self, name, options, before=()):
        folder = self.base / name
        folder.mkdir(parents=True, exist_ok=True)
        words = [*before, *command(self.tokens, folder / "run", options, self.trainer)]
        with (folder / "said.txt").open("w") as out, (folder / "errors.txt").open("w") as errors:
            process = subprocess.Popen(words, stdout=out, stderr=errors, cwd=folder, start_new_session=True,
                                       env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)})
        worker = options.get("--worker")
        process.folder, process.worker = folder, worker if worker in (0, 1) else 0
        self.started.append(process)
        return process

    def close(self):
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_of(process):
    return process.folder / "run" / log_name(process.worker)


def model_of(process):
    paths = sorted(process.folder.glob("run/**/model_*.bin"))
    return paths[-1].read_bytes() if paths else None


def is_still(process):
    """Whether nothing was logged in the last STILL seconds."""
    return not log_of(process).exists() or time.time() - log_of(process).stat().st_mtime > STILL


def says_that_it_waits(process):
    """Whether the process has logged that it waits, and nothing in the last STILL seconds."""
    if not log_of(process).exists() or not is_still(process):
        return False
    rows = map(json.loads, log_of(process).read_text().split("\n")[:-1])
    return any(row["type"] == "event" and row["kind"] in ("too_few", "store_lost") for row in rows)


def end(process, until):
    """The verdict on one process's end, or the symptoms of a defect. A process that waits and says so is asked to
    stop."""
    while process.poll() is None and not says_that_it_waits(process):
        late = time.monotonic() - until
        if late > LONGEST - HANG or (late > 0 and is_still(process)):
            return f"hangs: {(process.folder / 'said.txt').read_text()[-300:]}"
        time.sleep(0.1)
    if process.poll() is None:
        process.terminate()
        try:
            status = process.wait(20)
        except subprocess.TimeoutExpired:
            return "waits, and does not stop when asked to"
        return WAITED if status in (75, 143) else f"status {status} after it was asked to stop"
    status = process.returncode
    said = (process.folder / "errors.txt").read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    if status == 0:
        return SAME if not lines else f"status 0, and an error: {lines[0]}"
    if status not in (1, 2, 75) or len(lines) != 1 or "terminate called" in said:
        return f"status {status}: {said[-300:]}"
    return WAITED if status == 75 else REFUSED


def ends(processes, seconds=HANG):
    """(verdict, symptoms of a defect)"""
    until = time.monotonic() + seconds
    seen = [end(process, until) for process in processes]
    bad = [text for text in seen if text not in VERDICTS]
    models = {model_of(process) for process, text in zip(processes, seen) if text == SAME}
    if len(models) > 1:
        bad.append(f"{len(models)} different models")
    return (DEFECT, "; ".join(bad)) if bad else (worst(seen), "")
