"""Shared by dev/tools/export_hf.py and dev/tools/import_hf.py: names of tensors, and safetensors files.

A safetensors file is 8 bytes with the length of its header, the header (JSON: type, shape and offset of every
tensor), and the tensors' values, little-endian. This module reads and writes such files itself, tensor by
tensor and in bf16, which NumPy does not know.
"""
import json
import os

from metrics import UserError
from model_file import np

PREFIX = "transformer."
# Hugging Face's Conv1D multiplies by a matrix from the right: (in, out), where llm.c has (out, in).
TRANSPOSED = ("qkvw", "attprojw", "fcw", "fcprojw")
NAMES = {
    "wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias",
    "ln1w": "ln_1.weight", "ln1b": "ln_1.bias", "ln2w": "ln_2.weight", "ln2b": "ln_2.bias",
    "qkvw": "attn.c_attn.weight", "qkvb": "attn.c_attn.bias",
    "attprojw": "attn.c_proj.weight", "attprojb": "attn.c_proj.bias",
    "fcw": "mlp.c_fc.weight", "fcb": "mlp.c_fc.bias",
    "fcprojw": "mlp.c_proj.weight", "fcprojb": "mlp.c_proj.bias",
}
TYPES = {"F32": ("float32", np.dtype("<f4")), "BF16": ("bfloat16", np.dtype("<u2")),
         "F16": ("float16", np.dtype("<f2"))}
LONGEST_HEADER = 100 << 20  # the library's own limit


def tensor_name(name, layer):
    """The name without PREFIX, which is missing in files of the model without its head."""
    return NAMES[name] if layer is None else f"h.{layer}.{NAMES[name]}"


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, function that returns the values)}."""
    kinds = {dtype: (kind, stored) for kind, (dtype, stored) in TYPES.items()}
    header, at = {"__metadata__": {"format": "pt"}}, 0  # "pt": transformers asks for it
    for name, (dtype, shape, _) in tensors.items():
        kind, stored = kinds[dtype]
        end = at + int(np.prod(shape)) * stored.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape, values_of) in tensors.items():
            values = values_of()
            assert values.shape == tuple(shape) and values.dtype == kinds[dtype][1], name
            file.write(values.tobytes())


class Safetensors:
    """A safetensors file whose header is checked against its size. UserError if it is damaged."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 10 or length > min(size - 8, LONGEST_HEADER):
                self.fail(f"is truncated, or not a safetensors file ({size} bytes, a header of {length})")
            text = file.read(length)
        try:
            self.entries = json.loads(text)
            self.entries.pop("__metadata__", None)
            self.places = {name: self.check(8 + length, size, entry) for name, entry in self.entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.fail("has a damaged header")
        self.check_all(size - 8 - length)

    def fail(self, what):
        raise UserError(f"{self.path} {what}: get it again")

    def check(self, data, size, entry):
        """The place of a tensor's values in the file. ValueError and the like for an invalid header."""
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise ValueError
        if not begin <= end <= size - data:
            self.fail("is truncated")
        kind = entry["dtype"]
        if kind in TYPES:  # other types are not read
            count = 1
            for number in shape:
                count *= number
            if count * TYPES[kind][1].itemsize != end - begin:
                raise ValueError
        return data + begin, shape, kind

    def check_all(self, size):
        """By the format, the tensors' values follow each other without overlap or gap, up to the end of the file."""
        at = 0
        for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in self.entries.items()):
            if begin != at:
                self.fail(f"has a tensor {name} that {'overlaps another' if begin < at else 'follows a gap'}")
            at = end
        if at != size:
            self.fail(f"has {size - at} bytes that are no tensor's")

    def tensor(self, name):
        """Values as stored: float32, float16, or uint16 that hold bf16."""
        at, shape, kind = self.places[name]
        return np.memmap(self.path, TYPES[kind][1], "r", at, shape)
