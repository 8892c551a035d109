"""Real processes of train_gpt_cpu against Algorithm 2 in PyTorch (dev/reference/reference_diloco.py): the losses of
every step of every worker, and the global parameters at the end."""
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT

import reference_diloco
from reference import tensors

TRAINER = ROOT / "train_gpt_cpu"
pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")

# llm.c's model files: wte, wpe, each of a layer's tensors for all layers, then the final LayerNorm.
LAYER_ORDER = ["ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb", "ln2w", "ln2b", "fcw", "fcb",
               "fcprojw", "fcprojb"]


def read_model(path, shape):
    """A model file as the flat model in the order of llmc/layout.h."""
    data = path.read_bytes()
    head = np.frombuffer(data, dtype="<i4", count=256)
    assert list(head[:8]) == [20240326, 3, shape.max_seq_len, shape.vocab_size, shape.layers, shape.heads,
                              shape.channels, shape.padded_vocab_size]
    sizes = dict(tensors(shape))
    of_layers = [f"h.{layer}.{name}" for name in LAYER_ORDER for layer in range(shape.layers)]
    names = ["wte", "wpe", *of_layers, "lnfw", "lnfb"]
    values, offset = {}, 1024
    for name in names:
        count = int(np.prod(sizes[name]))
        values[name] = np.frombuffer(data, dtype="<f4", count=count, offset=offset)
        offset += 4 * count
    assert offset == len(data)
    return np.concatenate([values[name] for name in sizes])


def steps(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["type"] == "step"]


def flags_of(options):
    words = [(name,) if value is True else (name, str(value)) for name, value in options.items()]
    return [word for option in words for word in option]


def train(options, folder):
    """Each worker is started by itself, since it may have options of its own."""
    common = {**reference_diloco.COMMON, **options, "-i": reference_diloco.TOKENS, "-o": folder, "-s": 0,
              "--timeout": 60, "--store": f"file:{folder}/store"}
    with contextlib.ExitStack() as stack:
        workers = []
        for w in range(common["--workers"]):
            command = [TRAINER, *flags_of(reference_diloco.of_worker(common, w)), "--worker", str(w)]
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.callback(worker.kill)
            workers.append(worker)
        texts = [worker.communicate(timeout=120)[0] for worker in workers]
        assert all(worker.returncode == 0 for worker in workers), "\n".join(texts)


@pytest.mark.parametrize("name", reference_diloco.SETTINGS)
def test_processes_follow_algorithm_2(name, tmp_path):
    options = {**reference_diloco.COMMON, **reference_diloco.SETTINGS[name]}
    train(options, tmp_path)
    logs = [steps(tmp_path / ("metrics.jsonl" if w == 0 else f"metrics_{w:05d}.jsonl"))
            for w in range(options["--workers"])]
    model = read_model(tmp_path / f"model_{options['-x']:08d}.bin", reference_diloco.model_shape(options))
    found = {"losses": [[line["loss"] for line in log] for log in logs],
             "norms": [[line["norm"] for line in log] for log in logs],
             **reference_diloco.model_results(model, options)}
    expected, tolerance = reference_diloco.stored(name)
    difference = reference_diloco.errors(options, found, expected)
    print(name, reference_diloco.text(difference), "allowed:", reference_diloco.text(tolerance))
    assert all(difference[kind] <= tolerance[kind] for kind in tolerance), (difference, tolerance)
