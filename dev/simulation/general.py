"""Utilization of the five methods for a model, a step time and links of any size."""
from dataclasses import dataclass, replace

import numpy as np

from simulation import graph
from simulation.payloads import BITS, Shape, choose_exchange, exchange_bytes, make_fragments
from simulation.store import (StoreCalls, check_store_exchange, store_bytes, store_link_bytes,
                              worker_link_bytes)
from simulation.trainer import Calls, Link, data_parallel_utilization, streaming_utilization


@dataclass(frozen=True)
class Setting:
    shape: Shape
    step_seconds: float
    workers: int
    inner_steps: int
    fragment_layers: int
    fragment_pattern: str
    overlap: int
    outer_dtype: str   # of what is quantized
    plain_dtype: str   # of what is not, and of what data-parallel gathers
    outer_exchange: str
    timing: str        # trainer: this one's, call by call; paper: its graph of layers
    outer_transport: str = "tcp"  # or store


@dataclass(frozen=True)
class Method:
    name: str
    setting: Setting
    # (offset, [bytes of each call; through a store, store_bytes()], layers from 1) by fragment; none:
    # data-parallel
    exchanges: list


def exchanges_of(setting):
    blocks = setting.shape.blocks(1, setting.fragment_layers)
    layers = setting.shape.layers
    fragments = make_fragments(blocks, layers, setting.fragment_layers, setting.fragment_pattern,
                               setting.inner_steps)
    values = [sum(blocks[b] for b in fragment.blocks) for fragment in fragments]
    wished, format, workers = setting.outer_exchange, setting.outer_dtype, setting.workers

    def counts(n):
        if setting.outer_transport == "store":
            check_store_exchange(wished)
            return store_bytes(format, n, workers)
        return exchange_bytes(choose_exchange(wished, format, values, workers), format, n, workers)

    return [(fragment.offset, counts(n), [b + 1 for b in fragment.blocks if b < layers])
            for fragment, n in zip(fragments, values)]


def methods(setting):
    """Each has what the one before has, and one thing more."""
    plain = replace(setting, outer_dtype=setting.plain_dtype)
    of = {"DiLoCo": replace(plain, fragment_layers=0, overlap=0), "streaming": replace(plain, overlap=0),
          "+ overlap": plain, f"+ {setting.outer_dtype}": setting}
    return [Method("data-parallel", plain, [])] + [Method(name, one, exchanges_of(one))
                                                  for name, one in of.items()]


def bytes_a_step(method):
    """That a worker sends, on average; through a store: that it reads."""
    setting = method.setting
    if method.exchanges:
        of_sync = worker_link_bytes if setting.outer_transport == "store" else sum
        return sum(of_sync(counts) for _, counts, _ in method.exchanges) / setting.inner_steps
    gradients = BITS[setting.plain_dtype] / 8 if setting.timing == "paper" else 4
    a_value = gradients + BITS[setting.plain_dtype] / 8
    return setting.shape.values * a_value * (setting.workers - 1) / setting.workers


def store_bytes_a_step(method):
    """Over the store's own link, on average; None: this method has no store."""
    setting = method.setting
    if not method.exchanges or setting.outer_transport != "store":
        return None
    return sum(store_link_bytes(counts, setting.workers)
               for _, counts, _ in method.exchanges) / setting.inner_steps


def utilizations(method, bits_per_second, rtt_seconds, **of_link):
    """At each rate of the link."""
    if method.setting.timing == "paper":
        return by_graph(method, np.asarray(bits_per_second, float), rtt_seconds)
    return [by_calls(method, Link(rate, rtt_seconds, **of_link)) for rate in bits_per_second]


def by_calls(method, link):
    setting, calls = method.setting, Calls(link, method.setting.workers - 1)
    if method.exchanges:
        exchanges = [(offset, counts) for offset, counts, _ in method.exchanges]
        if setting.outer_transport == "store":
            calls = StoreCalls(link, setting.workers)
        return streaming_utilization(setting.step_seconds, setting.inner_steps, setting.overlap, exchanges,
                                     calls)
    blocks = setting.shape.blocks(setting.workers, 0)
    return data_parallel_utilization(setting.step_seconds, blocks, setting.shape.layers, setting.workers,
                                     BITS[setting.plain_dtype] // 8, 1, calls)


def by_graph(method, bits_per_second, rtt_seconds):
    """A layer is what is reduced; the embedding is left out, and so are headers of packets."""
    setting = method.setting
    layers, workers = setting.shape.layers, setting.workers
    if method.exchanges:
        sends = [[] for _ in range(setting.inner_steps)]
        for offset, _, sent in method.exchanges:
            sends[offset] = [*sends[offset], *sent]
        values = setting.shape.blocks(1, setting.fragment_layers)[0]
        kind = choose_exchange(setting.outer_exchange, setting.outer_dtype, [values], workers)
        counts = exchange_bytes(kind, setting.outer_dtype, values, workers)
        overlap = setting.overlap
    else:
        share = (workers - 1) / workers  # reduce-scatter, then all-gather
        counts = [share * setting.shape.layer_values * BITS[setting.plain_dtype] / 8] * 2
        sends, overlap = [range(1, layers + 1)], 0
    seconds = len(counts) * rtt_seconds + 8 * sum(counts) / bits_per_second
    return graph.utilization(layers, setting.step_seconds / (3 * layers), sends, overlap, seconds)
