"""What goes over the wire, in bytes: a model's blocks, its fragments, and their exchanges, counted as the
trainer counts them (llmc/layout.h; streaming/schedule.h, quantize.h and exchange.h).

    blocks      one a layer, then the embedding, cut so that no block is larger than a fragment of layers
    fragments   blocks that are exchanged together, at a step of their own within H
    payload     header, a bf16 scale for 128 values, codes: 4.125 bits a value in the four-bit formats
"""
import math
from dataclasses import dataclass

from metrics import UserError

QUANTIZATION_BLOCK = 128  # values that share a scale
HEADER_BYTES = 64
BITS = {"fp4": 4, "fp4_e2m1": 4, "fp8_e4m3": 8, "fp8_e5m2": 8, "bf16": 16, "fp32": 32}
WITHOUT_SCALES = ("bf16", "fp32")
PATTERNS = ("strided", "sequential", "balanced")
EXCHANGES = ("auto", "all_gather", "all_to_all")  # all_to_all: in lock-step only


def round_up(count, unit):
    return -(-count // unit) * unit


# --------------------------------------------------------------------------------------------------- payloads

def payload_bytes(format, values, before_scales=HEADER_BYTES):
    """values: a multiple of 128. Every section ends on 16 bytes."""
    scales = 0 if format in WITHOUT_SCALES else values // QUANTIZATION_BLOCK * 2
    return before_scales + round_up(scales, 16) + values * BITS[format] // 8


def sums_of_products(workers):
    """How many sums of products of rows the payload of a mean brings along (streaming/statistics.h)."""
    return 2 * workers + 1 if workers > 8 else workers * (workers + 1) // 2


def mean_bytes(format, values, workers):
    """Bytes of the payload of a mean, with the headers of the averaged payloads and the sums of their products in
    double (streaming/exchange.h, mean_payload_layout)."""
    sums = round_up(8 * sums_of_products(workers), 16)
    return payload_bytes(format, values, HEADER_BYTES * (1 + workers) + sums)


def exchange_bytes(kind, format, values, workers):
    """Bytes that a process sends (and receives) in each of the collectives of an exchange, one after the
    other: one by all-gather; by all-to-all the parts of the payload, and then the means of the parts."""
    others = workers - 1
    if kind == "all_gather":
        return [others * payload_bytes(format, values)]
    part = round_up(values, QUANTIZATION_BLOCK * workers) // workers
    return [others * payload_bytes(format, part), others * mean_bytes(format, part, workers)]


def choose_exchange(kind, format, values_of_fragments, workers):
    """In lock-step. Where both send as much, the one that rounds once."""
    if kind != "auto":
        return kind
    bytes_of = {one: sum(sum(exchange_bytes(one, format, values, workers)) for values in values_of_fragments)
                for one in ("all_gather", "all_to_all")}
    return "all_to_all" if bytes_of["all_to_all"] < bytes_of["all_gather"] else "all_gather"


# ------------------------------------------------------------------------------------------------- fragments

@dataclass(frozen=True)
class Shape:
    """A model as the wire sees it: `layers` equal layers, and an embedding in rows."""
    layers: int
    layer_values: int
    embedding_values: int = 0
    row: int = QUANTIZATION_BLOCK  # channels: the embedding is cut between rows only

    @property
    def values(self):
        return self.layers * self.layer_values + self.embedding_values

    def blocks(self, ranks, fragment_layers):
        """Sizes with padding to whole quantization blocks on each rank."""
        unit = QUANTIZATION_BLOCK * ranks
        layer = round_up(self.layer_values, unit)
        rest, embedding = self.embedding_values, []
        limit = min(fragment_layers, self.layers) * layer if fragment_layers > 0 else rest
        cut = limit // math.lcm(self.row, unit) * math.lcm(self.row, unit)
        while cut > 0 and rest > limit:
            embedding.append(cut)
            rest -= cut
        return [layer] * self.layers + embedding + [round_up(rest, unit)] * (rest > 0)


def gpt_shape(layers, channels, parameters):
    """Layers of GPT-2; the rest of `parameters` is the embedding."""
    layer_values = 12 * channels * channels + 13 * channels
    return Shape(layers, layer_values, parameters - layers * layer_values, channels)


@dataclass(frozen=True)
class Fragment:
    offset: int   # t_p: it is sent in the steps t with t mod H = t_p
    blocks: list  # numbers of blocks; those below the number of layers are layers


def balanced(sizes, count):
    """The largest block first, each to the fragment that holds least so far."""
    groups, held = [[] for _ in range(count)], [0] * count
    for block in sorted(range(len(sizes)), key=lambda b: -sizes[b]):
        least = held.index(min(held))
        groups[least].append(block)
        held[least] += sizes[block]
    return sorted(sorted(group) for group in groups)


def make_fragments(sizes, layers, fragment_layers, pattern, inner_steps):
    """The fragments of a model with blocks of these sizes, the first `layers` of which are layers."""
    blocks = range(len(sizes))
    of_layers = math.ceil(layers / fragment_layers) if fragment_layers else 0
    if fragment_layers == 0:
        groups = [list(blocks)]
    elif pattern == "balanced":
        groups = balanced(sizes, of_layers + len(sizes) - layers)
    else:
        groups = [[b for b in range(layers) if p == (b // fragment_layers if pattern == "sequential"
                                                     else b % of_layers)] for p in range(of_layers)]
        groups += [[b] for b in range(layers, len(sizes))]
    return [Fragment(p * inner_steps // len(groups), group) for p, group in enumerate(groups)]
