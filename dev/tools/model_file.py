"""llm.c's model files in NumPy, memory-mapped for reading and written tensor by tensor, at any size.

A file is a header of 256 int32 {20240326, version, max_seq_len, vocab_size, layers, heads, channels,
padded_vocab_size}, then GPT-2's sixteen tensors, those of the layers as one (L, ...) each. Version 3 is fp32,
version 5 bf16, represented here by the upper halves of fp32 values as uint16.
"""
import contextlib
import os
from dataclasses import astuple, dataclass
from pathlib import Path

from metrics import UserError, require

require("numpy")
import numpy as np

MAGIC = 20240326
VERSIONS = {3: "float32", 5: "bfloat16"}
HEADER_BYTES = 1024
STORED_AS = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}
LARGEST_SIZE = 1 << 24  # far above any model's


@dataclass(frozen=True)
class Shape:
    max_seq_len: int
    vocab_size: int
    layers: int
    heads: int
    channels: int
    padded_vocab_size: int

    def is_possible(self):
        return (all(0 < size <= LARGEST_SIZE for size in astuple(self)) and self.channels % self.heads == 0
                and self.vocab_size <= self.padded_vocab_size)


def describe(shape):
    return (f"{shape.layers} layers, {shape.heads} heads, {shape.channels} channels, vocabulary "
            f"{shape.vocab_size} (padded to {shape.padded_vocab_size}), {shape.max_seq_len} positions")


def parts(shape):
    """The tensors in the order of the file, a layer at a time: (name, layer or None, shape)."""
    C, L = shape.channels, shape.layers
    of_a_layer = {
        "ln1w": (C,), "ln1b": (C,),
        "qkvw": (3 * C, C), "qkvb": (3 * C,), "attprojw": (C, C), "attprojb": (C,),
        "ln2w": (C,), "ln2b": (C,),
        "fcw": (4 * C, C), "fcb": (4 * C,), "fcprojw": (C, 4 * C), "fcprojb": (C,),
    }
    yield "wte", None, (shape.padded_vocab_size, C)
    yield "wpe", None, (shape.max_seq_len, C)
    for name, dimensions in of_a_layer.items():
        for layer in range(L):
            yield name, layer, dimensions
    yield "lnfw", None, (C,)
    yield "lnfb", None, (C,)


def count_values(shape):
    """Values in all tensors, without a loop over them: a damaged header may promise millions of layers."""
    C = shape.channels
    return (shape.padded_vocab_size + shape.max_seq_len + 2) * C + shape.layers * (12 * C + 13) * C


class ModelFile:
    """A model file, checked. UserError for another kind or version, or a wrong size."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
        if len(header) < HEADER_BYTES:
            self.fail("is truncated (no whole header)")
        magic, version, *sizes = np.frombuffer(header, "<i4")[:8].tolist()
        if magic != MAGIC or version not in VERSIONS:
            self.fail(f"is not a model file of version 3 or 5 (magic {magic}, version {version})")
        self.shape, self.dtype = Shape(*sizes), VERSIONS[version]
        if not self.shape.is_possible():
            self.fail(f"has a damaged header ({self.shape})")
        expected = HEADER_BYTES + count_values(self.shape) * STORED_AS[self.dtype].itemsize
        if size != expected:
            self.fail(f"is {'truncated' if size < expected else 'too long'} ({size} bytes, its header "
                      f"promises {expected})")
        self.values = np.memmap(path, STORED_AS[self.dtype], "r", HEADER_BYTES)
        self.places, at = {}, 0
        for name, layer, dimensions in parts(self.shape):
            self.places[name, layer] = at, dimensions
            at += int(np.prod(dimensions))

    def fail(self, what):
        raise UserError(f"{self.path} {what}: give a complete model file, as the trainer writes it")

    def tensor(self, name, layer=None):
        """Values as stored: float32, or uint16 that hold bf16."""
        at, dimensions = self.places[name, layer]
        return self.values[at:at + int(np.prod(dimensions))].reshape(dimensions)


def write_model(path, shape, dtype, tensor):
    """Writes the file from tensor(name, layer), called for each of its parts, stored as dtype."""
    version = {name: version for version, name in VERSIONS.items()}[dtype]
    with appearing_whole(path) as beside, open(beside, "wb") as file:
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:8] = MAGIC, version, *astuple(shape)
        file.write(header.tobytes())
        for name, layer, dimensions in parts(shape):
            values = tensor(name, layer)
            assert values.shape == dimensions and values.dtype == STORED_AS[dtype], (name, layer)
            file.write(values.tobytes())


def convert(values, dtype, wanted):
    """Converts between the two types: to float32 exactly, to bfloat16 to nearest, ties to even."""
    if dtype == wanted:
        return values
    if wanted == "float32":
        return (values.astype("<u4") << 16).view("<f4")
    bits = np.ascontiguousarray(values).view("<u4")
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype("<u2")  # NaN stays NaN


@contextlib.contextmanager
def appearing_whole(path):
    """Yields a name beside `path`. The file or folder of files that is there at the end is synced and
    renamed to `path`, which is not touched before, and stays as it was if anything fails."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        for made in [*beside.glob("*"), beside]:
            sync(made)
        os.rename(beside, path)
    except BaseException:
        for made in [*beside.glob("*")]:
            made.unlink()
        if beside.is_dir():
            beside.rmdir()
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the new name is an entry of that folder


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
