#!/usr/bin/env python3
"""Converts a GPT-2 in a folder of Hugging Face's transformers to a model file, for the trainer's -e.

    dev/tools/import_hf.py FOLDER OUT.bin

FOLDER is what save_pretrained writes: config.json and model.safetensors, or several such files and
model.safetensors.index.json. OUT.bin is llm.c's model file, of version 5 if all tensors are bf16, else of
version 3 in fp32, unless --dtype says otherwise. The vocabulary is padded with zero rows to a multiple of
128. The architecture must be the trainer's, GPT-2 with GELU in the tanh form; all others are refused.
"""
import argparse
import json
import os
import sys
from pathlib import Path

from huggingface import PREFIX, TRANSPOSED, TYPES, Safetensors, tensor_name
from metrics import Parser, exit_status
from model_file import STORED_AS, Shape, UserError, convert, describe, np, parts, write_model

# Accepted values in config.json; the first one is the default.
FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}
HEAD = "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")  # of older versions: constants


def read_json(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    except (ValueError, RecursionError):
        pass
    raise UserError(f"{path} is not a JSON object: get it again")


def read_shape(path):
    """The model's shape from its config.json. UserError for any other model than the trainer's GPT-2."""
    config = read_json(path)
    if config.get("model_type") != "gpt2":
        raise UserError(f"{path} describes a model of type {config.get('model_type')!r}, not 'gpt2': give a "
                        "folder with a GPT-2")
    for key, allowed in FIXED.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} {config[key]!r} is not the trainer's GPT-2: give a model with "
                            f"{' or '.join(map(repr, allowed))}")
    keys = "n_positions", "vocab_size", "n_layer", "n_head", "n_embd"
    sizes = [config.get(key) for key in keys]
    if not all(type(size) is int for size in sizes):
        raise UserError(f"{path} does not give numbers for all of {', '.join(keys)}: get it again")
    shape = Shape(*sizes, (sizes[1] + 127) // 128 * 128)
    if not shape.is_possible():
        raise UserError(f"{path} describes an impossible model ({shape}): get it again")
    if config.get("n_inner") not in (None, 4 * shape.channels):
        raise UserError(f"{path}: n_inner {config['n_inner']!r} is not 4 n_embd: give a model where it is")
    return shape


def open_tensors(folder):
    """The folder's tensors: {name: the Safetensors that has it}."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        whole = Safetensors(folder / "model.safetensors")
        return {name: whole for name in whole.entries}
    if not index.exists():
        raise UserError(f"{folder} has neither model.safetensors nor {index.name}: save the model with "
                        "save_pretrained (pickled files, .bin or .pt, are not read)")
    places = read_json(index).get("weight_map")
    names = [*places.values()] if isinstance(places, dict) else [None]
    if not all(isinstance(name, str) and Path(name).suffix and Path(name).name == name for name in names):
        raise UserError(f"{index} does not map tensors to files beside it: get it again")
    files = {name: Safetensors(folder / name) for name in sorted(set(names))}
    for tensor, name in places.items():
        if tensor not in files[name].entries:
            raise UserError(f"{folder / name} has no tensor {tensor}, as {index.name} says: get both again")
    return {tensor: files[name] for tensor, name in places.items()}


class Folder:
    """A GPT-2 in a folder, checked to have every tensor in the right shape, and no others."""

    def __init__(self, folder):
        self.path = folder
        self.shape = read_shape(folder / "config.json")
        self.files = open_tensors(folder)
        self.prefix = PREFIX if PREFIX + "wte.weight" in self.files else ""
        known = set()
        for name, layer, dimensions in parts(self.shape):
            known.add(self.check(name, layer, dimensions))
        for name in self.files:
            if name not in known and name != HEAD and not name.endswith(MASKS):
                raise UserError(f"{folder} has a tensor {name}, which GPT-2 does not have: give a plain GPT-2")
        if HEAD in self.files:
            self.check_head()

    def check(self, name, layer, dimensions):
        full = self.prefix + tensor_name(name, layer)
        if full not in self.files:
            raise UserError(f"{self.path} has no tensor {full}: get it again")
        if name == "wte":
            dimensions = (self.shape.vocab_size, self.shape.channels)
        elif name in TRANSPOSED:
            dimensions = dimensions[::-1]
        _, shape, kind = self.files[full].places[full]
        if shape != dimensions:
            raise UserError(f"{self.path}: tensor {full} has the shape {shape}, and by config.json it is "
                            f"{dimensions}: get both again")
        if kind not in TYPES:
            raise UserError(f"{self.path}: tensor {full} is {kind}: save the model in float32, float16 or "
                            "bfloat16")
        return full

    def check_head(self):
        """Refuses a classifier of its own, which would be lost: the trainer's is wte."""
        wte = self.prefix + "wte.weight"
        (_, *head), (_, *embedding) = (self.files[name].places[name] for name in (HEAD, wte))
        if head != embedding or not np.array_equal(self.stored(HEAD).view(np.uint8),
                                                   self.stored(wte).view(np.uint8)):
            raise UserError(f"{self.path}: {HEAD} is a different matrix from {wte}: give a model where they are "
                            "tied")

    def stored(self, name):
        return self.files[name].tensor(name)

    def dtype(self):
        """bfloat16 if every tensor is, else float32, which also holds all values of float16."""
        kinds = {self.files[name].places[name][2] for name in self.files if not name.endswith(MASKS)}
        return "bfloat16" if kinds == {"BF16"} else "float32"

    def tensor(self, name, layer, dtype):
        """A tensor in llm.c's shape."""
        full = self.prefix + tensor_name(name, layer)
        values = self.stored(full)
        kind = TYPES[self.files[full].places[full][2]][0]
        if kind == "float16":
            values, kind = values.astype("<f4"), "float32"
        values = convert(values, kind, dtype)
        if name == "wte":
            padded = np.zeros((self.shape.padded_vocab_size, self.shape.channels), values.dtype)
            padded[:len(values)] = values
            return padded
        return values.T if name in TRANSPOSED else values


def import_model(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what save_pretrained wrote")
    parser.add_argument("out", type=Path, metavar="OUT.bin", help="the model file to make")
    parser.add_argument("--dtype", choices=list(STORED_AS), help="of the file (default: the folder's)")
    options = parser.parse_args(arguments)
    if os.path.lexists(options.out):
        raise UserError(f"{options.out} exists: give the name of a new file")
    folder = Folder(options.folder)
    shape, dtype = folder.shape, options.dtype or folder.dtype()
    write_model(options.out, shape, dtype, lambda name, layer: folder.tensor(name, layer, dtype))
    print(f"wrote {options.out}: {describe(shape)}, {dtype}")


if __name__ == "__main__":
    sys.exit(exit_status(import_model, "cannot be read or written"))
