#!/usr/bin/env python3
"""Streaming DiLoCo (arXiv 2501.18512, Algorithm 2) in PyTorch, float64: all workers in one process, written
without a look at streaming/, so that dev/test/test_diloco_processes.py can compare real processes of
train_gpt_cpu with it.

    dev/reference_diloco.py            writes reference_diloco.json and _tokens.bin in dev/test/data
    dev/reference_diloco.py --check    computes everything again and compares
    dev/reference_diloco.py --drift    computes everything in float32 and prints how far that is from float64

The JSON holds, for each setting, the trainer's options, and as results
    losses, norms     [worker][step]: loss and gradient norm (before clipping) of every inner step
    tensor_norms      of the final global parameters; of qkvb without the key bias (dev/reference.py: why)
    sample            every SAMPLE_STRIDEth value of the final global parameters in the unpadded model's
                      order, key biases left out

Tolerance: a correct trainer in fp32 on a CPU differs by rounding only; how far that goes, --drift shows.
PyTorch 2.15 drifts by 2e-7 (losses), 3e-6 (norms), 2e-5 (tensor norms, those of small biases) and 4e-5 (the
sample's movement from its initial values), the trainer by less. But a drift of 1e-7 in a parameter is one of
1e-5 in a delta, which now and then carries a value over a boundary of fp4 to another code, or a block's
largest value over one of bf16 to another scale: 1e-4 in the norm of a tensor has been seen. TOLERANCE leaves
room for that. Mistakes are larger where it counts: 0.1% more outer lr moves losses by 2e-5, one step of delay
by 1e-2.
"""
import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from reference import (ADAMW, SHUFFLE, AdamW, Shape, decay_mask, initial_values, loss_and_gradient,
                       random_bits, relative_error, tensors, visible_norms)

DATA = Path(__file__).parent / "test/data"
RESULTS, TOKENS = DATA / "reference_diloco.json", DATA / "reference_diloco_tokens.bin"
TOLERANCE = {"losses": 1e-5, "norms": 1e-4, "tensor_norms": 1e-3, "sample": 1e-2}
TOKEN_COUNT, TOKEN_VALUES = 1700, 100
SAMPLE_STRIDE = 61
WORKERS, MAX_GRADIENT_NORM, BLOCK = 2, 1.0, 128

# The trainer's options. Together: several fragments in flight, and some still so at the end of training; a
# step that sends one fragment and receives another; gradients clipped and not; an embedding in two blocks;
# both patterns.
COMMON = {"--workers": WORKERS, "--ranks": 1, "-k": "constant", "-u": 0, "-c": 0.1, "--shuffle": 0,
          "--outer-optimizer": "nesterov", "--matmul-precision": "highest"}
SETTINGS = {
    "streaming_fp32": {
        "--layers": 4, "--heads": 2, "--channels": 32, "--vocab-size": 120,
        "-b": 4, "-t": 16, "-d": 64, "-x": 24, "-l": 0.003, "--seed": 7,
        "--inner-steps": 4, "--fragment-layers": 2, "--fragment-pattern": "strided",
        "--overlap": 2, "--local-weight": 0.5, "--outer-lr": 0.4, "--outer-momentum": 0.9,
        "--outer-dtype": "fp32"},
    "streaming_fp4": {
        "--layers": 3, "--heads": 2, "--channels": 16, "--vocab-size": 500,
        "-b": 4, "-t": 16, "-d": 64, "-x": 23, "-l": 0.002, "--seed": 11,
        "--inner-steps": 5, "--fragment-layers": 2, "--fragment-pattern": "sequential",
        "--overlap": 3, "--local-weight": 0.25, "--outer-lr": 0.6, "--outer-momentum": 0.8,
        "--outer-dtype": "fp4"},
    "classic": {
        "--layers": 2, "--heads": 4, "--channels": 32, "--vocab-size": 120,
        "-b": 4, "-t": 16, "-d": 64, "-x": 20, "-l": 0.003, "--seed": 5,
        "--inner-steps": 6, "--fragment-layers": 0, "--fragment-pattern": "strided",
        "--overlap": 0, "--local-weight": 0.0, "--outer-lr": 0.7, "--outer-momentum": 0.9,
        "--outer-dtype": "fp32"},
}


# ------------------------------------------------------------------------------------------------------- data

def make_tokens():
    """Small tokens are likelier than large ones (the smaller of two draws): something to learn."""
    words = random_bits(2024, SHUFFLE, np.arange(TOKEN_COUNT)) % TOKEN_VALUES
    return np.minimum(words[0], words[1]).astype(np.int64)


def token_shard(tokens):
    """llm.c's shard: 256 int32 {20240520, 1, tokens}, then uint16 tokens."""
    head = np.zeros(256, dtype="<i4")
    head[:3] = 20240520, 1, len(tokens)
    return head.tobytes() + tokens.astype("<u2").tobytes()


def batches(tokens, worker, batch, time):
    """(inputs, targets) of a worker, for ever: its part of each WORKERS * B * T; a short rest is left."""
    import torch
    part = batch * time
    while True:
        for start in range(0, len(tokens) - WORKERS * part, WORKERS * part):
            begin = start + worker * part
            yield (torch.from_numpy(tokens[begin:begin + part].reshape(batch, time)),
                   torch.from_numpy(tokens[begin + 1:begin + part + 1].reshape(batch, time)))


# -------------------------------------------------------------------------------------------------- fragments

def model_shape(options):
    return Shape(layers=options["--layers"], heads=options["--heads"], channels=options["--channels"],
                 max_seq_len=options["-t"], vocab_size=options["--vocab-size"])


def make_fragments(shape, per_fragment, pattern):
    """Fragments as lists of (begin, end) in the unpadded model: groups of layers, then the embedding."""
    L, C = shape.layers, shape.channels
    values = sum(int(np.prod(dimensions)) for _, dimensions in tensors(shape))
    if per_fragment == 0:
        groups, largest = [list(range(L))], values
    else:
        count = math.ceil(L / per_fragment)
        groups = [list(range(p, L, count)) if pattern == "strided" else
                  list(range(p * per_fragment, min(L, (p + 1) * per_fragment))) for p in range(count)]
        layer = 12 * C * C + 13 * C
        largest = min(per_fragment, L) * math.ceil(layer / BLOCK) * BLOCK

    layer = 12 * C * C + 13 * C
    fragments = [[(l * layer, (l + 1) * layer) for l in group] for group in groups]
    unit = math.lcm(C, BLOCK)  # the embedding is cut at whole rows and whole blocks of quantization
    begin, embedding = L * layer, []
    while values - begin > largest:
        embedding.append((begin, begin + largest // unit * unit))
        begin = embedding[-1][1]
    embedding.append((begin, values))
    if per_fragment == 0:
        return [fragments[0] + embedding]
    return fragments + [[block] for block in embedding]


# ----------------------------------------------------------------------------------------------------- format

def bf16_rounded_up(x):
    """The smallest bf16 that is at least x > 0, as float64."""
    single = np.float32(x)
    if single < x:
        single = np.nextafter(single, np.float32(np.inf))
    bits = int(single.view(np.uint32))
    return float(np.uint32((bits + 0xFFFF) & 0xFFFF0000).view(np.float32))


def through_fp4(delta):
    """What the others read: 0, +-2^-6 ... +-1 (E3M0) times the block's scale; nearest, ties away from 0."""
    padded = np.concatenate([delta, np.zeros(-len(delta) % BLOCK)])
    for block in padded.reshape(-1, BLOCK):
        largest = np.abs(block).max()
        if largest == 0:
            continue
        scale = bf16_rounded_up(largest)
        ratio = np.abs(block) / scale
        fraction, exponent = np.frexp(ratio)  # ratio = fraction * 2^exponent, fraction in [0.5, 1)
        nearest = np.exp2(exponent - 1 + (fraction >= 0.75))
        magnitude = np.where(ratio < 2.0**-7, 0.0, np.maximum(nearest, 2.0**-6))
        block[:] = np.sign(block) * magnitude * scale
    return padded[:len(delta)]


# -------------------------------------------------------------------------------------------------- algorithm

class Worker:
    def __init__(self, initial, shape, batches, lr):
        import torch
        self.shape, self.batches, self.local = shape, batches, initial.clone()
        mask = torch.from_numpy(decay_mask(shape)).to(initial.dtype)
        self.optimizer = AdamW(initial, mask, **{**ADAMW, "lr": lr})
        self.losses, self.norms = [], []

    def inner_step(self):
        inputs, targets = next(self.batches)
        loss, gradient, _ = loss_and_gradient(self.local, inputs, targets, self.shape)
        norm = gradient.norm().item()
        self.losses.append(loss)
        self.norms.append(norm)
        self.local = self.optimizer.update(self.local, gradient * min(1.0, MAX_GRADIENT_NORM / norm))


class Outer:
    """The shared parameters and their Nesterov momentum; sends and receives fragments of all workers."""

    def __init__(self, initial, options):
        self.parameters, self.momentum = initial.clone(), initial * 0
        self.lr, self.mu = options["--outer-lr"], options["--outer-momentum"]
        self.alpha = options["--local-weight"]
        self.dtype = options["--outer-dtype"]

    def sent(self, block, worker):
        import torch
        delta = self.parameters[slice(*block)] - worker.local[slice(*block)]
        if self.dtype == "fp4":
            delta = torch.from_numpy(through_fp4(delta.double().numpy())).to(delta.dtype)
        return delta

    def mean(self, fragment, workers):
        return [sum(self.sent(block, worker) for worker in workers) / len(workers) for block in fragment]

    def receive(self, fragment, mean, workers):
        for block, delta in zip(fragment, mean):
            at = slice(*block)
            self.momentum[at] = self.mu * self.momentum[at] + delta
            self.parameters[at] -= self.lr * (delta + self.mu * self.momentum[at])
            for worker in workers:
                worker.local[at] = self.alpha * worker.local[at] + (1 - self.alpha) * self.parameters[at]


def train(options, tokens, dtype="float64"):
    """Algorithm 2. Returns the workers and the final global parameters."""
    import torch
    shape = model_shape(options)
    initial = torch.from_numpy(trainer_initial_values(shape, options["--seed"])).to(getattr(torch, dtype))
    workers = [Worker(initial, shape, batches(tokens, w, options["-b"], options["-t"]), options["-l"])
               for w in range(WORKERS)]
    outer = Outer(initial, options)
    fragments = make_fragments(shape, options["--fragment-layers"], options["--fragment-pattern"])
    H, tau = options["--inner-steps"], options["--overlap"]
    offsets = [p * H // len(fragments) for p in range(len(fragments))]

    in_flight = []  # (due step, fragment, mean), in the order of sending
    for step in range(1, options["-x"] + 1):
        for worker in workers:
            worker.inner_step()
        for p, fragment in enumerate(fragments):
            if (step - offsets[p]) % H == 0:
                in_flight.append((step + tau, fragment, outer.mean(fragment, workers)))
        while in_flight and in_flight[0][0] == step:
            _, fragment, mean = in_flight.pop(0)
            outer.receive(fragment, mean, workers)
    for _, fragment, mean in in_flight:
        outer.receive(fragment, mean, workers)
    return workers, outer.parameters


def trainer_initial_values(shape, seed):
    """GPT-2's: 0.02, less by sqrt(2 layers) where added to the residual stream; LayerNorm 1, biases 0."""
    residual = np.float32(0.02) / np.sqrt(np.float32(2 * shape.layers))

    def std(name):
        kind = name.split(".")[-1]
        if kind in ("attprojw", "fcprojw"):
            return residual
        return np.float32(0.02) if kind in ("qkvw", "fcw", "wte", "wpe") else np.float32(0)
    return initial_values(shape, seed, std)


# ---------------------------------------------------------------------------------------------------- results

def sample_indices(shape):
    keys, offset = np.zeros(0, dtype=np.int64), 0
    for name, dimensions in tensors(shape):
        if name.endswith("qkvb"):
            keys = np.concatenate([keys, np.arange(offset + shape.channels, offset + 2 * shape.channels)])
        offset += int(np.prod(dimensions))
    return np.setdiff1d(np.arange(0, offset, SAMPLE_STRIDE), keys)


def model_results(flat, options):
    """What is compared of the final global parameters.   flat: the unpadded model, NumPy"""
    shape = model_shape(options)
    names = [name for name, _ in tensors(shape)]
    return {"tensor_norms": dict(zip(names, visible_norms(flat, shape).tolist())),
            "sample": np.float64(flat[sample_indices(shape)]).tolist()}


def results(options, tokens, dtype="float64"):
    workers, parameters = train(options, tokens, dtype)
    return {"losses": [worker.losses for worker in workers], "norms": [worker.norms for worker in workers],
            **model_results(parameters.numpy(), options)}


def stored_results(name):
    return json.loads(RESULTS.read_text())[name]["results"]


def errors(options, found, expected):
    """By kind: the largest relative difference; for the sample, of its movement from the initial values."""
    largest = lambda a, b: float(np.max(np.abs(np.array(a) - np.array(b)) / np.array(b)))
    shape = model_shape(options)
    start = np.float64(trainer_initial_values(shape, options["--seed"])[sample_indices(shape)])
    names = list(expected["tensor_norms"])
    return {"losses": largest(found["losses"], expected["losses"]),
            "norms": largest(found["norms"], expected["norms"]),
            "tensor_norms": largest([found["tensor_norms"][name] for name in names],
                                    [expected["tensor_norms"][name] for name in names]),
            "sample": relative_error(np.array(found["sample"]) - start, np.array(expected["sample"]) - start)}


def rounded(value):
    """Nine digits: a float32 and more."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else float(f"{value:.9g}")


def write(path, tokens):
    settings = {name: {"options": {**COMMON, **options}, "results": rounded(results(options, tokens))}
                for name, options in SETTINGS.items()}
    path.write_text(json.dumps(settings, separators=(",", ":")).replace(',"', ',\n"') + "\n")


def compare(path, tokens, dtype):
    """Prints the differences from the stored results and returns the largest by kind."""
    stored = json.loads(path.read_text())
    worst = dict.fromkeys(TOLERANCE, 0.0)
    for name, options in SETTINGS.items():
        if stored[name]["options"] != {**COMMON, **options}:
            sys.exit(f"error: {path} is of other options: write it again with dev/reference_diloco.py")
        difference = errors(options, results(options, tokens, dtype), stored[name]["results"])
        print(name, *(f"{kind} {value:.1e}" for kind, value in difference.items()))
        worst = {kind: float(np.maximum(worst[kind], difference[kind])) for kind in worst}  # a NaN stays
    return worst


def main():
    parser = argparse.ArgumentParser(description="Writes or checks the reference of the trainer's workers.")
    parser.add_argument("--check", action="store_true", help="compare the files with what is computed now")
    parser.add_argument("--drift", action="store_true", help="compare float32 with the stored float64")
    arguments = parser.parse_args()
    tokens = make_tokens()
    if arguments.check:
        same_tokens = TOKENS.read_bytes() == token_shard(tokens)
        worst = compare(RESULTS, tokens, "float64")
        sys.exit(0 if same_tokens and all(error <= 1e-6 for error in worst.values()) else 1)
    if arguments.drift:
        worst = compare(RESULTS, tokens, "float32")
        sys.exit(0 if all(worst[kind] <= TOLERANCE[kind] for kind in worst) else 1)
    TOKENS.write_bytes(token_shard(tokens))
    write(RESULTS, tokens)
    print(f"wrote {RESULTS}, {RESULTS.stat().st_size} bytes, and {TOKENS}, {TOKENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
