"""Runs of the emulated trainer that together use every ordering of streams and host, and the results of a run.

`make mutate` runs them with orderings removed, dev/test/processes/test_emulated_orders.py with the trainer as it is.
"""
import dataclasses
import json
import os
import pathlib
import re

from torture import state_sections

# Two workers of two ranks; a head of 64 values, as attention on GPUs requires; at times two fragments are in flight.
# Between steps everything happens that may, alone and together: validation, samples and models, which use other
# parameters than the worker's.
STREAMING = {"--layers": 1, "--heads": 1, "--channels": 64, "--vocab-size": 64, "-t": 16, "-b": 1, "-d": 64,
             "-x": 5, "-l": 1e-2, "-k": "constant", "--workers": 2, "--ranks": 2, "-H": 3, "--overlap": 2,
             "--fragment-layers": 1, "--outer-dtype": "fp4", "-v": 3, "-m": 3, "-n": 3, "-s": 2, "-g": 2}

CONFIGURATIONS = {
    "nccl": {**STREAMING, "--outer-offload": True},
    "tcp": {**STREAMING, "--layers": 2, "--outer-transport": "tcp", "--outer-offload": True, "--eval": "local", "-r": 2},
    "no overlap": {**STREAMING, "--overlap": 0, "--ranks": 1, "-d": 32, "-v": 0, "-s": 0, "-n": 0},
    "one worker": {**STREAMING, "--workers": 1, "--outer-optimizer": "none", "--overlap": 0},
    # Fragments of 391 and 73 blocks: one worker's part has fewer blocks than the others'.
    "all to all": {**STREAMING, "--workers": 3, "--ranks": 1, "-d": 16, "-v": 0, "-s": 0, "-n": 0,
                   "--outer-exchange": "all_to_all", "--outer-rounding": "stochastic", "--outer-error-feedback": True,
                   "--outer-weights": "tokens"},
}


def environment(seed, asynchronous=True):
    """Sets the adversary's seed.   asynchronous: if not, every call is complete when it returns"""
    return {**os.environ, "EMULATOR_ASYNCHRONOUS": str(int(asynchronous)), "EMULATOR_SEED": str(seed),
            "OMP_NUM_THREADS": "1"}


@dataclasses.dataclass(frozen=True)
class Seen:
    """The results that must not depend on the order of work: models, states, samples, and all numbers in logs but
    times."""
    models: tuple   # (name, bytes)
    states: tuple   # (name, {section: bytes}) of checkpoints
    samples: tuple  # as printed
    logs: tuple     # (name, type of line, values)

    @staticmethod
    def of(folder, stdout):
        folder = pathlib.Path(folder)
        models = tuple((path.name, path.read_bytes()) for path in sorted(folder.glob("model_*.bin")))
        states = tuple((path.name, state_sections(path)) for path in sorted(folder.glob("state_*.bin")))
        samples = tuple(re.findall(r"^sample .*?\n---\n.*?\n---$", stdout, re.MULTILINE | re.DOTALL))
        logs = tuple(line for path in sorted(folder.glob("metrics*.jsonl")) for line in numbers(path))
        return Seen(models, states, samples, logs)

    def difference(self, other):
        """The first difference in words; "" if there is none."""
        for ours, theirs in zip(self.logs, other.logs):
            if ours != theirs:
                return f"other {ours[1]} in {ours[0]}"
        if len(self.logs) != len(other.logs):
            return "lines missing in a log"
        for what in ("models", "states", "samples"):
            if getattr(self, what) != getattr(other, what):
                return f"other {what}"
        return ""


# The fields that are the same in every run, by type of line.
KEPT = {"step": ("step", "loss", "lr", "norm", "inner_bytes_sent", "inner_bytes_received"),
        "eval": ("step", "loss"),
        "sync": ("sync", "fragment", "send_step", "apply_step", "bytes_sent", "bytes_received", "global_hash",
                 "delta_norm", "quantization_error", "mean_norm", "cosines"),
        "end": ("step", "inner_bytes_sent", "outer_bytes_sent")}


def numbers(path):
    for text in path.read_text().splitlines():
        row = json.loads(text)
        if row["type"] in KEPT:
            yield path.name, row["type"], tuple(row[name] for name in KEPT[row["type"]])
