#!/usr/bin/env python3
"""Streaming DiLoCo (arXiv 2501.18512, Algorithm 2) in PyTorch, float64: all workers in one process, written
without a look at streaming/, so that dev/test/processes/test_diloco_processes.py can compare real processes of
train_gpt_cpu with it.

    dev/reference/reference_diloco.py            writes reference_diloco.json and _tokens.bin in dev/test/data
    dev/reference/reference_diloco.py --check    computes everything again and compares
    dev/reference/reference_diloco.py --mistakes computes what wrong programs would: each must be beyond a tolerance

The JSON holds, for each setting, the trainer's options (a list is one value for each worker), as results
    losses, norms     [worker][step]: loss and gradient norm (before clipping) of every inner step
    tensor_norms      of the final global parameters; of qkvb without the key bias (dev/reference/reference.py: why)
    sample            every SAMPLE_STRIDEth value of the final global parameters in the unpadded model's
                      order, key biases left out
and, by kind, the drift: how far the results in float32 are from those in float64, at most, in DRIFT_RUNS runs
from initial values that differ in their last bit.

Tolerance: a correct trainer in fp32 on a CPU differs by rounding only, as those runs do. With fp32 on the
wire drift is small (3e-7 in losses, 4e-6 in norms, 2e-5 in tensor norms, those of small biases, and 5e-5 in
the sample's movement from its initial values), and TOLERANCE leaves it room. Formats of four bits are
discontinuous: a drift of 1e-7 in a parameter is one of 1e-5 in a delta, which now and then carries a value
over a boundary to another code, or a block's largest value over one of bf16 to another scale; a value moves
by a quarter of the block's largest, training goes on from there, and more codes change at the next exchange.
No tolerance for each single value bounds that. But what comes of it in losses and norms is what the drift
shows, so that DRIFT_FACTOR times the drift is allowed where that is more than TOLERANCE. Mistakes are larger:
--mistakes shows by how much.
"""
import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from reference import (ADAMW, MUON, SHUFFLE, AdamW, Muon, Shape, decay_mask, initial_values, loss_and_gradient,
                       random_bits, relative_error, tensors, visible_norms)

DATA = Path(__file__).resolve().parents[1] / "test/data"
RESULTS, TOKENS = DATA / "reference_diloco.json", DATA / "reference_diloco_tokens.bin"
TOLERANCE = {"losses": 1e-5, "norms": 1e-4, "tensor_norms": 1e-3, "sample": 1e-2}
DRIFT_RUNS, DRIFT_FACTOR = 8, 4
TOKEN_COUNT, TOKEN_VALUES = 1700, 100
SAMPLE_STRIDE = 61
MAX_GRADIENT_NORM, BLOCK = 1.0, 128

# The trainer's options. Together: several fragments in flight, and some still so at the end of training; a
# step that sends one fragment and receives another; gradients clipped and not; an embedding in two blocks;
# all patterns; uneven offsets; workers with batches, micro-steps and overlaps of their own.
COMMON = {"--workers": 2, "--ranks": 1, "-k": "constant", "-u": 0, "-c": 0.1, "--shuffle": 0,
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
    "unequal_workers": {
        "--layers": 2, "--heads": 2, "--channels": 32, "--vocab-size": 120,
        "-b": [4, 2], "-t": 16, "-d": [64, 96], "-x": 20, "-l": 0.003, "--seed": 3,
        "--inner-steps": 4, "--fragment-layers": 1, "--fragment-pattern": "strided",
        "--overlap": 1, "--local-weight": 0.5, "--outer-lr": 0.5, "--outer-momentum": 0.9,
        "--outer-dtype": "fp32", "--outer-weights": "tokens"},
    "own_overlaps": {
        "--workers": 3, "--layers": 5, "--heads": 2, "--channels": 16, "--vocab-size": 500,
        "-b": 4, "-t": 16, "-d": 64, "-x": 26, "-l": 0.002, "--seed": 13,
        "--inner-steps": 7, "--fragment-layers": 2, "--fragment-pattern": "balanced",
        "--overlap": [0, 3, 6], "--local-weight": 0.5,
        "--outer-lr": 0.4, "--outer-momentum": 0.9, "--outer-dtype": "fp32"},
    "all_to_all_fp4": {
        "--workers": 3, "--layers": 3, "--heads": 2, "--channels": 16, "--vocab-size": 500,
        "-b": [4, 2, 4], "-t": 16, "-d": [64, 32, 64], "-x": 21, "-l": 0.002, "--seed": 17,
        "--inner-steps": 5, "--fragment-layers": 2, "--fragment-pattern": "strided",
        "--overlap": [4, 2, 3], "--local-weight": 0.5, "--outer-lr": 0.5, "--outer-momentum": 0.8,
        "--outer-dtype": "fp4", "--outer-exchange": "all_to_all", "--outer-weights": "tokens"},
    "error_feedback_e2m1": {
        "--workers": 3, "--layers": 2, "--heads": 2, "--channels": 16, "--vocab-size": 500,
        "-b": 4, "-t": 16, "-d": 64, "-x": 21, "-l": 0.002, "--seed": 19,
        "--inner-steps": 3, "--fragment-layers": 1, "--fragment-pattern": "strided",
        "--overlap": 2, "--local-weight": 0.25, "--outer-optimizer": "average",
        "--outer-dtype": "fp4_e2m1", "--outer-exchange": "all_to_all", "--outer-error-feedback": True},
}


def of_worker(options, worker):
    """The options of one worker."""
    return {name: value[worker] if isinstance(value, list) else value for name, value in options.items()}


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


def batches(tokens, worker, options):
    """Yields (inputs, targets) of a worker without end: its rows of each sample. A sample has as many rows as the
    batches of all workers together, or as their steps if they may differ.   options: with lists, of all workers"""
    import torch
    time, all_options = options["-t"], [of_worker(options, w) for w in range(options["--workers"])]
    may_differ, size = options.get("--outer-weights") == "tokens", all_options[worker]["-b"]
    counts = [own["-d"] // time if may_differ else own["-b"] for own in all_options]
    first, sample = sum(counts[:worker]), sum(counts)
    order = row_order((len(tokens) - 1) // time, sample, options)
    while True:
        rows = [next(order) for _ in range(sample)][first:first + counts[worker]]
        for begin in range(0, len(rows), size):
            text = np.stack([tokens[row * time:row * time + time + 1] for row in rows[begin:begin + size]])
            yield torch.from_numpy(text[:, :-1]), torch.from_numpy(text[:, 1:])


def row_order(count, sample, options):
    """Yields numbers of rows without end: in the file's order, without a short rest; or shuffled anew in each epoch."""
    epoch = 0
    while True:
        yield from (shuffled(count, options["--seed"], epoch) if options["--shuffle"]
                    else range(count - count % sample))
        epoch += 1


def shuffled(count, seed, epoch):
    """0 ... count - 1 in the trainer's order: eight rounds of a Feistel network over the least power of four that holds
    all of them, repeated for what falls beyond count."""
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    order, todo = np.arange(count, dtype=np.uint64), np.arange(count)
    while len(todo):
        left, right = order[todo] >> half, order[todo] & (np.uint64(1) << half) - np.uint64(1)
        for draw in range(8):
            random = random_bits(seed, SHUFFLE, np.uint64(epoch << 32) | right, draw)[0]
            left, right = right, left ^ (random & (np.uint64(1) << half) - np.uint64(1))
        order[todo] = left << half | right
        todo = todo[order[todo] >= count]
    return order.tolist()


# -------------------------------------------------------------------------------------------------- fragments

def model_shape(options):
    return Shape(layers=options["--layers"], heads=options["--heads"], channels=options["--channels"],
                 max_seq_len=options["-t"], vocab_size=options["--vocab-size"])


def embedding_blocks(begin, end, largest, channels):
    """The embedding cut at whole rows and whole blocks of quantization into pieces of at most `largest`."""
    piece, blocks = largest // math.lcm(channels, BLOCK) * math.lcm(channels, BLOCK), []
    while end - begin > largest:
        blocks.append((begin, begin + piece))
        begin += piece
    return blocks + [(begin, end)]


def padded(values):
    return -(-values // BLOCK) * BLOCK


def make_fragments(shape, per_fragment, pattern):
    """Fragments as lists of (begin, end) in the unpadded model."""
    L, C = shape.layers, shape.channels
    values = sum(int(np.prod(dimensions)) for _, dimensions in tensors(shape))
    layer = 12 * C * C + 13 * C
    layers = [(l * layer, (l + 1) * layer) for l in range(L)]
    if per_fragment == 0:
        return [layers + embedding_blocks(L * layer, values, values, C)]

    embedding = embedding_blocks(L * layer, values, min(per_fragment, L) * padded(layer), C)
    count = math.ceil(L / per_fragment)
    if pattern == "balanced":
        return balanced(layers + embedding, count + len(embedding))
    return [layers[p::count] if pattern == "strided" else layers[p * per_fragment:(p + 1) * per_fragment]
            for p in range(count)] + [[block] for block in embedding]


def balanced(blocks, count):
    """The largest block that is left goes to the fragment with the fewest bytes; the first of equals."""
    fragments = [[] for _ in range(count)]
    size = lambda block: padded(block[1] - block[0])
    for block in sorted(blocks, key=size, reverse=True):
        min(fragments, key=lambda fragment: sum(map(size, fragment))).append(block)
    return sorted(sorted(fragment) for fragment in fragments)


def send_offsets(options, count):
    return [p * options["--inner-steps"] // count for p in range(count)]


# ----------------------------------------------------------------------------------------------------- format

def bf16_rounded_up(x):
    """The smallest bf16 that is at least x >= 0, as float64."""
    single = np.float32(x)
    single = np.where(single < x, np.nextafter(single, np.float32(np.inf)), single)
    return np.uint32((single.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def nearest_e3m0(ratio):
    """Of 0, 2^-6, ..., 2^-1, 1; ties away from 0."""
    fraction, exponent = np.frexp(ratio)  # ratio = fraction * 2^exponent, fraction in [0.5, 1)
    nearest = np.exp2(exponent - 1 + (fraction >= 0.75))
    return np.where(ratio < 2.0**-7, 0.0, np.maximum(nearest, 2.0**-6))


def nearest_e2m1(ratio):
    """Of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties to the one with an even mantissa."""
    step = np.where(ratio < 2, 0.5, np.where(ratio < 4, 1.0, 2.0))
    return np.rint(ratio / step) * step


FOUR_BITS = {"fp4": (nearest_e3m0, 1.0), "fp4_e2m1": (nearest_e2m1, 6.0)}  # and the largest of the numbers


def through_four_bits(delta, format):
    """What the others read of a delta."""
    nearest, largest_code = FOUR_BITS[format]
    blocks = np.concatenate([delta, np.zeros(-len(delta) % BLOCK)]).reshape(-1, BLOCK)
    scale = np.float64(bf16_rounded_up(np.abs(blocks).max(axis=1, keepdims=True) / largest_code))
    ratio = np.abs(blocks) / np.where(scale == 0, 1, scale)
    return (np.sign(blocks) * nearest(ratio) * scale).reshape(-1)[:len(delta)]


# -------------------------------------------------------------------------------------------------- algorithm

class Worker:
    """A worker: its inner training, and its copy of the global parameters and their Nesterov momentum."""

    def __init__(self, initial, options, batches):
        import torch
        self.options, self.shape, self.batches = options, model_shape(options), batches
        self.local, self.parameters, self.momentum = initial.clone(), initial.clone(), initial * 0
        mask = torch.from_numpy(decay_mask(self.shape)).to(initial.dtype)
        self.adamw = self.optimizer = AdamW(initial, mask, **{**ADAMW, "weight_decay": options["-c"]})
        if options.get("--optimizer") == "muon":
            self.optimizer = Muon(self.shape, self.adamw, **{**MUON, "weight_decay": options["-c"]})
        self.in_flight = []  # (due step, fragment, mean), in the order of sending
        self.losses, self.norms = [], []
        averages = options["--outer-optimizer"] == "average"
        self.outer_lr = 1.0 if averages else options["--outer-lr"]
        self.mu = 0.0 if averages else options["--outer-momentum"]

    def inner_step(self):
        scale = schedule(self.options, len(self.losses))
        self.optimizer.lr = self.options.get("--muon-lr", 0) * scale
        self.adamw.lr = self.options["-l"] * scale
        micro_steps = self.options["-d"] // (self.options["-b"] * self.options["-t"])
        loss, gradient = 0.0, self.local * 0
        for _ in range(micro_steps):
            part, part_gradient, _ = loss_and_gradient(self.local, *next(self.batches), self.shape)
            loss += part / micro_steps
            gradient += part_gradient / micro_steps
        norm = gradient.norm().item()
        self.losses.append(loss)
        self.norms.append(norm)
        self.local = self.optimizer.update(self.local, gradient * min(1.0, MAX_GRADIENT_NORM / norm))

    def receive_due(self, step):
        while self.in_flight and self.in_flight[0][0] <= step:
            _, fragment, mean = self.in_flight.pop(0)
            for block, delta in zip(fragment, mean):
                self.apply(slice(*block), delta)

    def apply(self, at, delta):
        alpha = self.options["--local-weight"]
        self.momentum[at] = self.mu * self.momentum[at] + delta
        self.parameters[at] -= self.outer_lr * (delta + self.mu * self.momentum[at])
        self.local[at] = alpha * self.local[at] + (1 - alpha) * self.parameters[at]


def schedule(options, step):
    """What a peak rate is multiplied by in step 0, 1, ...: a linear warm-up, then constant, or half a cosine."""
    if step < options["-u"]:
        return (step + 1) / options["-u"]
    if options["-k"] == "constant":
        return 1.0
    progress = (step - options["-u"]) / (options["-x"] - options["-u"])
    return options["-q"] + (1 - options["-q"]) * (1 + math.cos(math.pi * progress)) / 2


class Wire:
    """What becomes of deltas on their way to everyone: encoded, averaged, with all_to_all encoded again."""

    def __init__(self, options, initial):
        workers = options["--workers"]
        of_tokens = options.get("--outer-weights") == "tokens"
        parts = [of_worker(options, w)["-d"] if of_tokens else 1 for w in range(workers)]
        self.weights = [part / sum(parts) for part in parts]
        self.format, self.twice = options["--outer-dtype"], options.get("--outer-exchange") == "all_to_all"
        self.feedback = options.get("--outer-error-feedback", False)
        self.lost = [initial * 0 for _ in range(workers + 1)]  # for error feedback; the last: of means

    def encoded(self, values, at, sender):
        import torch
        if self.format == "fp32":
            return values
        if self.feedback:
            values = values + self.lost[sender][at]
        result = torch.from_numpy(through_four_bits(values.double().numpy(), self.format)).to(values.dtype)
        self.lost[sender][at] = values - result
        return result

    def mean(self, fragment, workers):
        result = []
        for block in fragment:
            at = slice(*block)
            mean = sum(weight * self.encoded(worker.parameters[at] - worker.local[at], at, w)
                       for w, (weight, worker) in enumerate(zip(self.weights, workers)))
            result.append(self.encoded(mean, at, len(workers)) if self.twice else mean)
        return result


def train(options, tokens, initial, after_step=lambda step, workers: None):
    """Algorithm 2 from initial values, in their precision. Returns the workers, of equal parameters. One worker without
    an outer optimizer, whose parameters are its local ones, is data-parallel training."""
    import torch
    shape = model_shape(options)
    workers = [Worker(initial, of_worker(options, w), batches(tokens, w, options))
               for w in range(options["--workers"])]
    wire = Wire(options, initial)
    exchanges = options["--outer-optimizer"] != "none"
    fragments = make_fragments(shape, options["--fragment-layers"], options["--fragment-pattern"]) if exchanges else []
    offsets = send_offsets(options, len(fragments))

    for step in range(1, options["-x"] + 1):
        for worker in workers:
            worker.inner_step()
            worker.parameters = worker.parameters if exchanges else worker.local
        for offset, fragment in zip(offsets, fragments, strict=True):
            if (step - offset) % options["--inner-steps"] == 0:
                mean = wire.mean(fragment, workers)
                for worker in workers:
                    worker.in_flight.append((step + worker.options["--overlap"], fragment, mean))
        for worker in workers:
            worker.receive_due(step if step < options["-x"] else math.inf)
        after_step(step, workers)
    for worker in workers:
        assert torch.equal(worker.parameters, workers[0].parameters)
    return workers


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


def results(options, tokens, drift=None):
    """drift: None, or the number of a run in float32 whose initial values differ in the last bit."""
    import torch
    options = {**COMMON, **options}
    initial = trainer_initial_values(model_shape(options), options["--seed"])
    if drift is None:
        initial = np.float64(initial)
    else:
        up = random_bits(drift, SHUFFLE, np.arange(len(initial)))[0] % 2 == 1
        initial = np.where(up, np.nextafter(initial, np.float32(np.inf)), initial)
    workers = train(options, tokens, torch.from_numpy(initial))
    return {"losses": [worker.losses for worker in workers], "norms": [worker.norms for worker in workers],
            **model_results(workers[0].parameters.numpy(), options)}


def stored(name):
    """The results and the tolerances of a setting."""
    entry = json.loads(RESULTS.read_text())[name]
    return entry["results"], {kind: max(TOLERANCE[kind], DRIFT_FACTOR * entry["drift"][kind])
                              for kind in TOLERANCE}


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


def text(errors):
    return "  ".join(f"{kind} {value:.1e}" for kind, value in errors.items())


def write(path, tokens):
    settings = {}
    for name, options in SETTINGS.items():
        exact = results(options, tokens)
        runs = [errors(options, results(options, tokens, run), exact) for run in range(DRIFT_RUNS)]
        drift = {kind: float(np.max([run[kind] for run in runs])) for kind in TOLERANCE}
        print(f"{name:22} {text(drift)}")
        settings[name] = {"options": {**COMMON, **options}, "results": rounded(exact),
                          "drift": {kind: float(f"{value:.2g}") for kind, value in drift.items()}}
    path.write_text(json.dumps(settings, separators=(",", ":")).replace(',"', ',\n"') + "\n")


def check(tokens):
    """Whether the stored files are what is computed now."""
    good = TOKENS.read_bytes() == token_shard(tokens)
    for name, options in SETTINGS.items():
        if json.loads(RESULTS.read_text())[name]["options"] != {**COMMON, **options}:
            sys.exit(f"error: {RESULTS} is of other options: write it again with dev/reference/reference_diloco.py")
        difference = errors(options, results(options, tokens), stored(name)[0])
        print(f"{name:22} {text(difference)}")
        good = good and all(error <= 1e-6 for error in difference.values())
    return good


def wrong_programs(options):
    """Options with one thing other than it should be."""
    tau, H = options["--overlap"], options["--inner-steps"]
    later = [(t + 1) % H for t in tau] if isinstance(tau, list) else (tau + 1) % H
    yield "one step later", {"--overlap": later}
    yield "other local weight", {"--local-weight": options["--local-weight"] + 0.01}
    if "--outer-weights" in options:
        yield "equal weights", {"--outer-weights": "equal"}
    if "--outer-exchange" in options:
        yield "one rounding", {"--outer-exchange": "all_gather"}
    if "--outer-error-feedback" in options:
        yield "no error feedback", {"--outer-error-feedback": False}
    if options["--outer-dtype"] != "fp32":
        yield "no rounding", {"--outer-dtype": "fp32"}
    if "--outer-momentum" in options:
        yield "other momentum", {"--outer-momentum": options["--outer-momentum"] - 0.01}


def all_mistakes_show(tokens):
    """Prints how far wrong programs are off in multiples of the tolerance; whether each is beyond one."""
    good = True
    for name, options in SETTINGS.items():
        expected, tolerance = stored(name)
        for what, change in wrong_programs(options):
            difference = errors(options, results({**options, **change}, tokens), expected)
            ratios = {kind: difference[kind] / tolerance[kind] for kind in tolerance}
            print(f"{name:22} {what:20} {text(ratios)}")
            good = good and max(ratios.values()) > 1
    return good


def main():
    parser = argparse.ArgumentParser(description="Writes or checks the reference of the trainer's workers.")
    parser.add_argument("--check", action="store_true", help="compare the files with what is computed now")
    parser.add_argument("--mistakes", action="store_true", help="how far wrong programs are off")
    arguments = parser.parse_args()
    tokens = make_tokens()
    if arguments.check:
        sys.exit(0 if check(tokens) else 1)
    if arguments.mistakes:
        sys.exit(0 if all_mistakes_show(tokens) else 1)
    TOKENS.write_bytes(token_shard(tokens))
    write(RESULTS, tokens)
    print(f"wrote {RESULTS}, {RESULTS.stat().st_size} bytes, and {TOKENS}, {TOKENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
