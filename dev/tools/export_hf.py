#!/usr/bin/env python3
"""Converts a model file to a folder that Hugging Face's transformers opens.

    dev/tools/export_hf.py log/model_00001000.bin OUT --tokenizer data/kjv-bytes/tokenizer.bin

Then GPT2LMHeadModel.from_pretrained("OUT") and AutoTokenizer.from_pretrained("OUT"). OUT holds
model.safetensors (in the file's fp32 or bf16, or as --dtype says), config.json, generation_config.json,
tokenizer.json and tokenizer_config.json. The rows of wte beyond the vocabulary are left out, and the four
matrices of a layer are transposed for transformers' Conv1D.

--tokenizer is the tokenizer.bin that the model was trained with, or gpt2 for GPT-2's, which tiktoken
downloads once. A tokenizer.bin has tokens, but no merges. If data/prepare.py bpe:N left a tokenizer.json
beside it, that is copied. Otherwise the merges follow from the tokens, since a byte-level BPE such as
GPT-2's numbers its tokens in the order of its merges (bytes have none), and text is split into words as by
GPT-2.
"""
import argparse
import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface import PREFIX, TRANSPOSED, tensor_name, write_safetensors
from metrics import Parser, exit_status
from model_file import STORED_AS, ModelFile, UserError, appearing_whole, convert, describe, np, parts

TOKENIZER_MAGIC, HEADER_BYTES = 20240328, 1024
MODEL_ALONE = "or export the model alone with --no-tokenizer"

# How a byte-level BPE writes a byte: printable characters of Latin-1 stay, the others are U+0100, U+0101, ...
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_CHARACTERS = [chr(byte if byte in PRINTABLE else 0x100 + OTHERS.index(byte)) for byte in range(256)]


# The model


def exported(model, dtype, name, layer):
    """One tensor of the model, in transformers' shape."""
    values = convert(model.tensor(name, layer), model.dtype, dtype)
    if name == "wte":
        return values[:model.shape.vocab_size]
    return values.T if name in TRANSPOSED else values


def write_weights(path, model, dtype):
    tensors = {}
    for name, layer, dimensions in parts(model.shape):
        if name == "wte":
            dimensions = (model.shape.vocab_size, model.shape.channels)
        elif name in TRANSPOSED:
            dimensions = dimensions[::-1]
        values_of = partial(exported, model, dtype, name, layer)
        tensors[PREFIX + tensor_name(name, layer)] = dtype, dimensions, values_of
    write_safetensors(path, tensors)


def config(shape, dtype, end_of_text):
    """end_of_text: the token, or None without a tokenizer."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.max_seq_len,
        "n_ctx": shape.max_seq_len,
        "n_embd": shape.channels,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": None,  # 4 n_embd
        "activation_function": "gelu_new",  # the tanh form
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": 0.0,  # trained without dropout
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": dtype,
    }


# The tokenizer


@dataclass
class Tokenizer:
    vocabulary: list  # the bytes of every token
    end_of_text: int
    merges: str = ""  # their source, for messages
    content: dict = None  # of tokenizer.json

    def end_of_text_content(self):
        """The text of the end-of-text token, which is not written byte by byte."""
        try:
            return self.vocabulary[self.end_of_text].decode()
        except UnicodeDecodeError as error:
            raise UserError("the tokenizer's end-of-text token is not UTF-8: make it again with "
                            f"data/prepare.py, {MODEL_ALONE}") from error

    def ids(self):
        """{name: id}, by the names of tokens in tokenizer.json."""
        names = [*map(written, self.vocabulary)]
        names[self.end_of_text] = self.end_of_text_content()
        return {name: token for token, name in enumerate(names)}


def written(token):
    return "".join(BYTE_CHARACTERS[byte] for byte in token)


def read_tokenizer(path):
    """llm.c's tokenizer file."""
    data = path.read_bytes()
    header = np.frombuffer(data[:HEADER_BYTES], "<i4")[:4].tolist() if len(data) > HEADER_BYTES else [0] * 4
    magic, version, size, end_of_text = header
    if magic != TOKENIZER_MAGIC or version not in (1, 2):
        raise UserError(f"{path} is not a tokenizer of version 1 or 2: give the tokenizer.bin beside the "
                        f"training data, {MODEL_ALONE}")
    vocabulary, at = [], HEADER_BYTES
    while at < len(data):
        vocabulary.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    end_of_text = 50256 if version == 1 else end_of_text
    if at != len(data) or len(vocabulary) != size or b"" in vocabulary or not 0 <= end_of_text < size:
        raise UserError(f"{path} is damaged: make it again with data/prepare.py, {MODEL_ALONE}")
    return Tokenizer(vocabulary, end_of_text)


def gpt2_tokenizer():
    try:
        import tiktoken
    except ImportError as error:
        raise UserError(f"tiktoken is missing ({error}): run make setup, {MODEL_ALONE}") from error
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken has no exception type of its own for failed downloads
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"GPT-2's tokenizer cannot be loaded from tiktoken ({reason}): connect to the internet "
                        f"once, {MODEL_ALONE}") from error
    tokens = map(encoding.decode_single_token_bytes, range(encoding.eot_token))
    return Tokenizer([*tokens, b"<|endoftext|>"], encoding.eot_token)


def merge(pieces, ranks, limit):
    """Byte-pair encoding of a token by the merges of rank below `limit`."""
    while True:
        pairs = [ranks.get(a + b, limit) for a, b in zip(pieces, pieces[1:])]
        lowest = min(pairs, default=limit)
        if lowest >= limit:
            return pieces
        at = pairs.index(lowest)
        pieces = [*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2:]]


def merges_of(tokenizer):
    """The two tokens that each token of several bytes was merged from, in order: the result of all earlier
    merges. UserError if the tokens are not numbered in the order of merges."""
    ranks = {token: rank for rank, token in enumerate(tokenizer.vocabulary) if rank != tokenizer.end_of_text}
    pairs = [merge([bytes([byte]) for byte in token], ranks, rank)
             for token, rank in ranks.items() if len(token) > 1]
    if (len(ranks) != len(tokenizer.vocabulary) - 1 or any(bytes([byte]) not in ranks for byte in range(256))
            or any(len(pair) != 2 for pair in pairs)):
        raise UserError("the tokens are not those of a byte-level BPE in the order of its merges: put its "
                        f"tokenizer.json beside tokenizer.bin, {MODEL_ALONE}")
    return pairs


def tokenizer_json(tokenizer, merges):
    """The tokenizer in the format of Hugging Face's tokenizers, with GPT-2's splitting into words."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": tokenizer.end_of_text, "content": tokenizer.end_of_text_content(),
                          "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True}],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": False, "vocab": tokenizer.ids(),
                  "merges": [[written(a), written(b)] for a, b in merges]},
    }


def read_tokenizer_json(path, tokenizer):
    """The content of a tokenizer.json. UserError unless its tokens are the tokenizer's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids = {**content["model"]["vocab"],
               **{added["content"]: added["id"] for added in content["added_tokens"]}}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: make it again with data/prepare.py, {MODEL_ALONE}") from error
    if ids != tokenizer.ids():
        raise UserError(f"{path} has other tokens than the tokenizer.bin beside it: make both again with "
                        f"data/prepare.py, {MODEL_ALONE}")
    return content


def open_tokenizer(name):
    """The tokenizer that --tokenizer names, with the content of its tokenizer.json."""
    if name != "gpt2" and Path(name).is_dir():
        name = Path(name) / "tokenizer.bin"
    tokenizer = gpt2_tokenizer() if name == "gpt2" else read_tokenizer(Path(name))
    beside = Path(name).with_name("tokenizer.json")
    if name != "gpt2" and beside.exists():
        tokenizer.content = read_tokenizer_json(beside, tokenizer)
        tokenizer.merges = f"merges as in {beside}"
    else:
        merges = merges_of(tokenizer)
        tokenizer.content = tokenizer_json(tokenizer, merges)
        tokenizer.merges = f"{len(merges)} merges, from the order of the tokens" if merges else "bytes"
    return tokenizer


def tokenizer_config(tokenizer, shape):
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json as it is
        "bos_token": tokenizer.end_of_text_content(),
        "eos_token": tokenizer.end_of_text_content(),
        "model_max_length": shape.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }


# The folder


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parse_options(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.bin", help="a model file of the trainer or of llm.c")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.bin of the training data, or gpt2")
    parser.add_argument("--no-tokenizer", action="store_true", help="export the model alone")
    parser.add_argument("--dtype", choices=list(STORED_AS), help="of the tensors (default: as in MODEL.bin)")
    options = parser.parse_args(arguments)
    if (options.tokenizer is None) != options.no_tokenizer:
        raise UserError("a model file does not record how its text became tokens: give --tokenizer FILE (the "
                        f"tokenizer.bin beside the training data, or its folder), {MODEL_ALONE}")
    is_empty = options.out.is_dir() and not any(options.out.iterdir())
    if not options.out.name or os.path.lexists(options.out) and not is_empty:
        raise UserError(f"{options.out} exists: give the name of a new folder")
    return options


def export(arguments):
    options = parse_options(arguments)
    model = ModelFile(options.model)
    shape, dtype = model.shape, options.dtype or model.dtype
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else None
    if tokenizer and len(tokenizer.vocabulary) > shape.vocab_size:
        raise UserError(f"the tokenizer has {len(tokenizer.vocabulary)} tokens and the model's vocabulary "
                        f"{shape.vocab_size}: give the tokenizer that the model was trained with")
    end_of_text = tokenizer.end_of_text if tokenizer else None
    with appearing_whole(options.out) as folder:
        folder.mkdir()
        write_weights(folder / "model.safetensors", model, dtype)
        write_json(folder / "config.json", config(shape, dtype, end_of_text))
        write_json(folder / "generation_config.json", {"bos_token_id": end_of_text,
                                                       "eos_token_id": end_of_text})
        if tokenizer:
            write_json(folder / "tokenizer.json", tokenizer.content)
            write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer, shape))
    print(f"wrote {options.out}: {describe(shape)}, {dtype}")
    print(f"tokenizer of {len(tokenizer.vocabulary)} tokens: {tokenizer.merges}" if tokenizer
          else "the model alone: AutoTokenizer will not open this folder")


if __name__ == "__main__":
    sys.exit(exit_status(export, "cannot be read or written"))
