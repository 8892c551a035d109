"""Two real processes of train_gpt_cpu against Algorithm 2 in PyTorch (dev/reference_diloco.py): the losses of
every step, and the global parameters at the end."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import reference_diloco
from reference import tensors

ROOT = Path(__file__).parents[2]
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


def train(options, folder):
    flags = {**reference_diloco.COMMON, **options, "-i": reference_diloco.TOKENS, "-o": folder, "-s": 0,
             "--timeout": 60}
    command = [str(TRAINER)] + [str(word) for option in flags.items() for word in option]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", reference_diloco.SETTINGS)
def test_two_processes_follow_algorithm_2(name, tmp_path):
    options = reference_diloco.SETTINGS[name]
    train(options, tmp_path)
    logs = [steps(tmp_path / file) for file in ("metrics.jsonl", "metrics_00001.jsonl")]
    model = read_model(tmp_path / f"model_{options['-x']:08d}.bin", reference_diloco.model_shape(options))
    found = {"losses": [[line["loss"] for line in log] for log in logs],
             "norms": [[line["norm"] for line in log] for log in logs],
             **reference_diloco.model_results(model, options)}
    difference = reference_diloco.errors(options, found, reference_diloco.stored_results(name))
    print(name, *(f"{kind} {value:.1e}" for kind, value in difference.items()))
    assert all(difference[kind] <= reference_diloco.TOLERANCE[kind] for kind in difference), difference
