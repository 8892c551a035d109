#!/usr/bin/env python3
"""The reference that test_gpt compares with: GPT-2 in PyTorch, float64 and autograd, on parameters and tokens
that both sides draw from Philox, so that none need to be stored.

    dev/reference/reference.py            writes the files below
    dev/reference/reference.py --check    computes everything again and compares it with them

dev/test/data/reference.bin is of a model of 4 heads, reference_head64.bin of one that is the same but for its
one head of 64 values, since attention on GPUs has no smaller ones.

Both are little-endian:
    16 int32    magic 20250130, version 1, layers, heads, channels, max_seq_len, vocab_size,
                padded_vocab_size, B, T, seed, optimizer steps, number of arrays, 0, 0, 0
    64 bytes for each array: name (32 bytes, NUL-padded), int32 dimensions, 4 int32 shape (unused: 1),
                int32 0, int64 offset of its data in bytes from the start of the file
    the arrays, float32, one after the other, each starting on 64 bytes

    loss, logits (B, T, vocab_size), gradient.NAME for every tensor, in the order of llmc/layout.h
    losses (steps)        before each AdamW update on the one batch: losses[0] is loss
    norms (tensors)       of the parameters after the last update; qkvb without its middle third, the key
                          bias: softmax is blind to it, its gradient is rounding noise, and AdamW makes steps
                          of that
    muon.losses, muon.norms   the same of a run with Muon for the layers' matrices and AdamW for the rest
    muon.NAME                 the last layer's matrices after it
"""
import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

PARAMETERS, SHUFFLE = 1, 2  # RandomUse of llmc/random.h
MAGIC, VERSION = 20250130, 1
FILES = Path(__file__).resolve().parents[1] / "test/data"


@dataclass
class Shape:
    layers: int
    heads: int
    channels: int
    max_seq_len: int
    vocab_size: int

    @property
    def padded_vocab_size(self):
        return -(-self.vocab_size // 128) * 128


REFERENCE_SHAPE = Shape(layers=2, heads=4, channels=64, max_seq_len=64, vocab_size=500)
SHAPES = {"reference.bin": REFERENCE_SHAPE, "reference_head64.bin": replace(REFERENCE_SHAPE, heads=1)}
B, T, SEED, STEPS = 2, 64, 1337, 10
ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
MUON = dict(lr=2e-3, momentum=0.95, weight_decay=0.1)


# --------------------------------------------------------------------------------------------- random numbers

def random_bits(seed, use, indices, draw=0):
    """Philox4x32-10 (Salmon et al., SC 2011).   indices: (n) integers.   Returns (4, n) uint32."""
    indices = np.asarray(indices, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    counter = [indices & low, indices >> np.uint64(32), np.full_like(indices, draw),
               np.full_like(indices, use)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a = counter[0] * np.uint64(0xD2511F53)
        b = counter[2] * np.uint64(0xCD9E8D57)
        counter = [(b >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]), b & low,
                   (a >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(counter).astype(np.uint32)


def standard_normal(seed, use, indices):
    """The sum of twelve 24-bit uniforms less six, float32: exactly the numbers of llmc/random.h."""
    total = sum((random_bits(seed, use, indices, draw) >> 8).astype(np.int64).sum(axis=0)
                for draw in range(3))
    return (total - 6 * 2**24).astype(np.float32) * np.float32(2.0**-24)


# ------------------------------------------------------------------------------------------------------ model

def tensors(shape):
    """(name, shape) in the order of llmc/layout.h, which gives each value its index in the unpadded model."""
    C = shape.channels
    result = []
    for layer in range(shape.layers):
        for name, dimensions in [
                ("qkvw", (3 * C, C)), ("attprojw", (C, C)), ("fcw", (4 * C, C)), ("fcprojw", (C, 4 * C)),
                ("ln1w", (C,)), ("ln1b", (C,)), ("qkvb", (3 * C,)), ("attprojb", (C,)),
                ("ln2w", (C,)), ("ln2b", (C,)), ("fcb", (4 * C,)), ("fcprojb", (C,))]:
            result.append((f"h.{layer}.{name}", dimensions))
    return result + [("wte", (shape.padded_vocab_size, C)), ("wpe", (shape.max_seq_len, C)), ("lnfw", (C,)),
                     ("lnfb", (C,))]


def initial_values(shape, seed, std):
    """The flat model: std(name) * standard_normal, plus 1 in LayerNorm's weights; wte is padded with 0."""
    parts, offset = [], 0
    for name, dimensions in tensors(shape):
        count = int(np.prod(dimensions))
        values = np.float32(std(name)) * standard_normal(seed, PARAMETERS, np.arange(offset, offset + count))
        if name.endswith(("ln1w", "ln2w", "lnfw")):
            values += np.float32(1)
        if name == "wte":
            values[shape.vocab_size * shape.channels:] = 0
        parts.append(values)
        offset += count
    return np.concatenate(parts)


def decay_mask(shape):
    """1 where AdamW decays weights: in matrices."""
    return np.concatenate([np.full(np.prod(d), float(len(d) == 2)) for _, d in tensors(shape)])


def unflatten(flat, shape):
    """Views of the flat model by name. Of one split, so that autograd makes the flat gradient at once."""
    counts = [int(np.prod(dimensions)) for _, dimensions in tensors(shape)]
    parts = np.split(flat, np.cumsum(counts)[:-1]) if isinstance(flat, np.ndarray) else flat.split(counts)
    return {name: part.reshape(dimensions) for (name, dimensions), part in zip(tensors(shape), parts, strict=True)}


def gpt_logits(flat, tokens, shape):
    """GPT-2: learned positions, LayerNorm before attention and MLP, tanh GELU, output tied to wte.

    flat: (parameters) torch tensor   tokens: (B, T) int64   returns (B, T, vocab_size)
    """
    import torch
    from torch.nn import functional as F
    p = unflatten(flat, shape)
    batch, time = tokens.shape
    C, heads = shape.channels, shape.heads
    future = torch.ones(time, time, dtype=torch.bool).triu(1)

    x = p["wte"][tokens] + p["wpe"][:time]
    for layer in range(shape.layers):
        prefix = f"h.{layer}."
        w = {name[len(prefix):]: values for name, values in p.items() if name.startswith(prefix)}
        normed = F.layer_norm(x, (C,), w["ln1w"], w["ln1b"], eps=1e-5)
        qkv = F.linear(normed, w["qkvw"], w["qkvb"])
        q, k, v = (part.view(batch, time, heads, C // heads).transpose(1, 2) for part in qkv.split(C, dim=2))
        scores = (q @ k.transpose(2, 3) / (C // heads) ** 0.5).masked_fill(future, float("-inf"))
        attention = (scores.softmax(dim=3) @ v).transpose(1, 2).reshape(batch, time, C)
        x = x + F.linear(attention, w["attprojw"], w["attprojb"])
        normed = F.layer_norm(x, (C,), w["ln2w"], w["ln2b"], eps=1e-5)
        hidden = F.gelu(F.linear(normed, w["fcw"], w["fcb"]), approximate="tanh")
        x = x + F.linear(hidden, w["fcprojw"], w["fcprojb"])
    x = F.layer_norm(x, (C,), p["lnfw"], p["lnfb"], eps=1e-5)
    return F.linear(x, p["wte"][:shape.vocab_size])


def loss_and_gradient(flat, inputs, targets, shape):
    """Mean cross entropy over B * T tokens, and its gradient for the flat model. Also returns the logits."""
    from torch.nn import functional as F
    leaf = flat.detach().requires_grad_()
    logits = gpt_logits(leaf, inputs, shape)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), leaf.grad, logits.detach()


class AdamW:
    """Loshchilov & Hutter, arXiv 1711.05101, as in torch.optim.AdamW; `mask` is 1 where weights decay."""

    def __init__(self, flat, mask, lr, beta1, beta2, eps, weight_decay):
        self.m, self.v, self.t = flat * 0, flat * 0, 0
        self.mask, self.lr, self.eps, self.weight_decay = mask, lr, eps, weight_decay
        self.beta1, self.beta2 = beta1, beta2

    def update(self, flat, gradient):
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * gradient
        self.v = self.beta2 * self.v + (1 - self.beta2) * gradient**2
        step = self.m / (1 - self.beta1**self.t) / ((self.v / (1 - self.beta2**self.t)).sqrt() + self.eps)
        return flat - self.lr * (step + self.weight_decay * self.mask * flat)


def newton_schulz(matrix):
    """Keller Jordan's five iterations: singular vectors stay, singular values become about 1."""
    if matrix.shape[0] > matrix.shape[1]:  # the same of the transpose, with smaller products
        return newton_schulz(matrix.T).T
    X = matrix / matrix.norm()
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


class Muon:
    """Muon with Nesterov's momentum for the layers' matrices, Q, K and V apart, scaled as in arXiv 2502.16982; `adamw`
    updates the rest."""

    def __init__(self, shape, adamw, lr, momentum, weight_decay):
        self.shape, self.adamw, self.buffers = shape, adamw, {}
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def update(self, flat, gradient):
        result = self.adamw.update(flat, gradient)
        old, new, gradients = (unflatten(values, self.shape) for values in (flat, result, gradient))
        for name in layer_matrices(self.shape):
            parts = 3 if name.endswith("qkvw") else 1
            for i, (w, g, out) in enumerate(zip(*(x[name].chunk(parts) for x in (old, gradients, new)))):
                buffer = self.momentum * self.buffers.get((name, i), 0 * g) + g
                self.buffers[name, i] = buffer
                direction = newton_schulz(g + self.momentum * buffer)
                out.copy_(w - self.lr * (self.weight_decay * w + 0.2 * max(w.shape) ** 0.5 * direction))
        return result


def layer_matrices(shape):
    return [name for name, dimensions in tensors(shape) if name.startswith("h.") and len(dimensions) == 2]


def visible_norms(flat, shape):
    """Norms of all tensors of a flat model in NumPy, of qkvb without the key bias (above: why)."""
    C = shape.channels
    result = []
    for name, values in unflatten(flat, shape).items():
        values = np.float64(values)
        if name.endswith("qkvb"):
            values = values[np.r_[0:C, 2 * C:3 * C]]
        result.append(np.linalg.norm(values))
    return np.array(result)


# --------------------------------------------------------------------------------------------------- the file

def compute(shape):
    """All arrays of a file, in order."""
    import torch
    tokens = (random_bits(SEED, SHUFFLE, np.arange(B * T + 1))[0] % shape.vocab_size).astype(np.int64)
    inputs = torch.from_numpy(tokens[:-1].reshape(B, T))
    targets = torch.from_numpy(tokens[1:].reshape(B, T))
    flat = torch.from_numpy(initial_values(shape, SEED, lambda name: 0.05)).double()
    mask = torch.from_numpy(decay_mask(shape))

    loss, gradient, logits = loss_and_gradient(flat, inputs, targets, shape)
    arrays = {"loss": np.array([loss]), "logits": logits.numpy()}
    for name, values in unflatten(gradient, shape).items():
        arrays["gradient." + name] = values.numpy()

    def train(flat, optimizer):
        losses = []
        for _ in range(STEPS):
            loss, gradient, _ = loss_and_gradient(flat, inputs, targets, shape)
            losses.append(loss)
            flat = optimizer.update(flat, gradient)
        return np.array(losses), flat.numpy()

    arrays["losses"], trained = train(flat, AdamW(flat, mask, **ADAMW))
    arrays["norms"] = visible_norms(trained, shape)
    arrays["muon.losses"], trained = train(flat, Muon(shape, AdamW(flat, mask, **ADAMW), **MUON))
    arrays["muon.norms"] = visible_norms(trained, shape)
    for name in layer_matrices(shape)[-4:]:
        arrays["muon." + name] = unflatten(trained, shape)[name]
    return {name: values.astype("<f4") for name, values in arrays.items()}


def header(shape, arrays):
    return np.array([MAGIC, VERSION, shape.layers, shape.heads, shape.channels, shape.max_seq_len,
                     shape.vocab_size, shape.padded_vocab_size, B, T, SEED, STEPS, len(arrays), 0, 0, 0],
                    dtype="<i4")


ENTRY = np.dtype([("name", "S32"), ("dimensions", "<i4"), ("shape", "<i4", 4), ("zero", "<i4"),
                  ("offset", "<i8")])


def write(path, shape, arrays):
    entries = np.zeros(len(arrays), dtype=ENTRY)
    offset = 64 + entries.nbytes
    data = b""
    for entry, (name, values) in zip(entries, arrays.items()):
        entry["name"], entry["dimensions"], entry["offset"] = name.encode(), values.ndim, offset + len(data)
        entry["shape"] = list(values.shape) + [1] * (4 - values.ndim)
        data += values.tobytes() + b"\0" * (-values.nbytes % 64)
    path.write_bytes(header(shape, arrays).tobytes() + entries.tobytes() + data)


def read(path):
    """(header, arrays) of the file."""
    data = path.read_bytes()
    head = np.frombuffer(data, dtype="<i4", count=16)
    if head[0] != MAGIC or head[1] != VERSION:
        sys.exit(f"error: {path} is no reference of version {VERSION}: write it again with dev/reference/reference.py")
    arrays = {}
    for entry in np.frombuffer(data, dtype=ENTRY, count=head[12], offset=64):
        dimensions = entry["shape"][:entry["dimensions"]]
        values = np.frombuffer(data, dtype="<f4", count=int(np.prod(dimensions)), offset=entry["offset"])
        arrays[entry["name"].decode()] = values.reshape(dimensions)
    return head, arrays


def relative_error(a, b):
    return float(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(np.float64(b)))


def check(path, shape, tolerance=1e-6):
    """Whether the file says what this script computes: float64 against stored float32, so within 1e-6."""
    head, stored = read(path)
    computed = compute(shape)
    if not np.array_equal(head, header(shape, computed)) or list(stored) != list(computed):
        print(f"{path} is of another model: write it again with dev/reference/reference.py")
        return False
    errors = {name: relative_error(stored[name], computed[name]) for name in computed}
    worst = list(errors)[np.argmax(list(errors.values()))]  # a NaN, where there is one
    print(f"{path}: {len(errors)} arrays, largest relative error {errors[worst]:.1e} ({worst}), "
          f"allowed {tolerance:.0e}")
    return errors[worst] <= tolerance


def main():
    parser = argparse.ArgumentParser(description="Writes or checks the reference of test_gpt.")
    parser.add_argument("--check", action="store_true", help="compare the file with what is computed now")
    parser.add_argument("--folder", type=Path, default=FILES)
    arguments = parser.parse_args()
    if arguments.check:
        good = [check(arguments.folder / name, shape) for name, shape in SHAPES.items()]
        sys.exit(0 if all(good) else 1)
    for name, shape in SHAPES.items():
        write(arguments.folder / name, shape, compute(shape))
        print(f"wrote {arguments.folder / name}, {(arguments.folder / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
