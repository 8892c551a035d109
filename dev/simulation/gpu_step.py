"""The time of a training step on a GPU, computed kernel by kernel: nothing here is a measurement.

    matmul      flops / MATMUL + bytes / COPY, the flops of whole TILEs. Nothing overlaps, so the sum is an upper bound
                of what the two cost: sums over 768 values, as in d12, are short, and a tile's loads and stores take a
                third to a half as long as its products. No constant is fitted; test_predict.py compares the whole
                with llm.c's published speeds
    streaming   the longest of: bytes / COPY; instructions issued at one a clock and scheduler; bytes read at LATENCY
                with as many in flight as the resident threads request
    attention   blocks go to the places that SMs have, in the order of their launch. A block takes the clocks of its
                loop (dev/bench/issue_model.py), its instructions outside the loop, and two loads from memory; nothing
                hides the latter two
    launches    SECONDS_A_LAUNCH each

Left out: the host, NCCL, a clock below the data sheet's (except in MATMUL, which was measured), and the L2 cache, which
would help. Bytes are those that the equations need. For the rates see gpus.py.
"""
import heapq
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from simulation.gpus import LLMC_SHARES, SECONDS_A_LAUNCH, TILE

FIGURES = json.loads((Path(__file__).parent / "kernel_figures.json").read_text())
VOCABULARY, PADDED = 50257, 50304
MODELS = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}
SCHEDULERS, REGISTERS, THREADS, BLOCKS = 4, 65536, 2048, 32  # of an SM: CUDA C++ Programming Guide
RESERVED = 1024  # bytes of shared memory of a block that CUDA takes: the same


@dataclass
class Step:
    """What is computed. recompute: 1: GELU again in the backward, 2: LayerNorm, too."""
    model: str
    B: int
    T: int
    recompute: int
    micro_steps: int
    ranks: int

    def __post_init__(self):
        self.L, self.heads, self.C = MODELS[self.model]
        self.N = self.B * self.T

    @property
    def parameters(self):
        C = self.C
        return (PADDED + self.T) * C + self.L * (12 * C * C + 13 * C) + 2 * C

    @property
    def flops_a_token(self):
        """As llm.c and llmc/mfu.h count."""
        return 6 * self.parameters + 6 * self.L * self.C * self.T


@dataclass(frozen=True)
class Compiled:
    """What nvcc made of a kernel, and how many of its warps share an SM. slots: instructions a value of a streaming
    kernel; clocks: of a scheduler, in which attention's warps do a turn of their loop each; else None"""
    kernel: str
    registers: int
    warps: int
    slots: float = None
    clocks: int = None


@dataclass
class Row:
    """A group of kernels. limit: seconds that its bytes or flops need at the measured rates; by: what limits it"""
    name: str
    seconds: float
    limit: float
    by: str
    launches: int
    compiled: tuple = ()


def together(name, rows):
    """One row of several, named after the limit of the longest."""
    longest = max(rows, key=lambda row: row.seconds)
    return Row(name, sum(row.seconds for row in rows), sum(row.limit for row in rows), longest.by,
               sum(row.launches for row in rows), sum((row.compiled for row in rows), ()))


def times(row, count):
    return replace(row, seconds=count * row.seconds, limit=count * row.limit, launches=count * row.launches)


# ---- matmuls

def in_tiles(rows, columns):
    """Values that whole tiles compute for an output, with the tiles turned whichever way computes fewer."""
    def padded(tile):
        return math.ceil(rows / tile[0]) * tile[0] * math.ceil(columns / tile[1]) * tile[1]
    return min(padded(TILE), padded(TILE[::-1]))


def matmul(gpu, rows, inner, columns, more_bytes=0):
    """(rows,inner) by (inner,columns), in bf16."""
    moved = 2 * (rows * inner + rows * columns + inner * columns) + more_bytes
    return Row("", 2 * in_tiles(rows, columns) * inner / gpu.matmul + moved / gpu.copy,
               2 * rows * inner * columns / gpu.matmul, "tensor cores, memory", 1)


def products(C):
    """(inputs, outputs) of a layer's four matrices: qkv, attproj, fc, fcproj."""
    return [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)]


def matmuls_forward(gpu, s, fused):
    pre_gelu = 8 * s.N * s.C if fused else 0  # GELU's argument, which the epilogue writes beside its value
    layer = [matmul(gpu, s.N, k, m, pre_gelu if m == 4 * s.C else 0) for k, m in products(s.C)]
    return together("matmuls forward", [times(row, s.L) for row in layer] + [matmul(gpu, s.N, s.C, PADDED)])


def matmuls_backward(gpu, s, gradient_bytes):
    """gradient_bytes: of a weight's gradient, read and written, on average over micro-steps"""
    rows, more = [], gradient_bytes - 2
    for k, m in products(s.C):
        rows += [matmul(gpu, m, s.N, k, more * k * m), matmul(gpu, s.N, m, k)]
    head = [matmul(gpu, PADDED, s.N, s.C, more * s.C * PADDED), matmul(gpu, s.N, PADDED, s.C)]
    return together("matmuls backward", [times(row, s.L) for row in rows] + head)


# ---- streaming kernels

def resident_blocks(gpu, threads, registers, shared):
    of_registers = REGISTERS // (math.ceil(registers / 8) * 8 * threads)
    return max(1, min(BLOCKS, THREADS // threads, of_registers, gpu.shared // (shared + RESERVED)))


def streaming(gpu, kernel, values, read, written, threads, dynamic=0, launches=1):
    """values: that its threads go through; read, written: bytes; dynamic: bytes of shared memory, filled at once"""
    figures = FIGURES[gpu.architecture][kernel]
    blocks = resident_blocks(gpu, threads, figures["registers"], figures["shared"] + dynamic)
    in_flight = blocks * (dynamic or threads * figures["in_flight"])
    seconds = {"memory": (read + written) / gpu.copy,
               "instructions": values * figures["slots"] / 32 / (SCHEDULERS * gpu.sms * gpu.clock),
               "latency": read * gpu.latency / gpu.clock / (in_flight * gpu.sms)}
    by = max(seconds, key=seconds.get)
    made = Compiled(kernel, figures["registers"], blocks * threads // 32, slots=figures["slots"])
    return Row("", seconds[by], seconds["memory"], by, launches, (made,))


def at_copy_speed(gpu, moved, launches=1, share=1.0):
    """A library's kernel, or one of llm.c's at a share of a copy's speed."""
    return Row("", moved / gpu.copy / share, moved / gpu.copy, "memory", launches)


def row_warps(bytes_of_row):
    """llmc/cuda/layernorm.cuh: layernorm_warps"""
    return min(max(48 * 1024 // bytes_of_row, 1), 4)


def layernorm(gpu, s, kernel, inputs, outputs):
    row = 2 * s.C * inputs
    warps, values = row_warps(row), s.N * s.C
    return streaming(gpu, kernel, values, 2 * inputs * values, 2 * outputs * values, 32 * warps, warps * row)


def residual_layernorm(gpu, s):
    fused = times(layernorm(gpu, s, "layernorm_forward_kernel<true>", 2, 2), 2 * s.L)
    again = 2 * s.L if s.recompute >= 2 else 0
    alone = times(layernorm(gpu, s, "layernorm_forward_kernel<false>", 1, 1), 1 + again)
    return together("residual + LayerNorm", [fused, alone])


def layernorm_blocks(s):
    """llmc/cuda/layernorm.cuh: layernorm_backward_blocks"""
    return min(s.N, min(max(1024 * 768 // s.C, 256), 1024))


def layernorm_backward(gpu, s):
    values = s.N * s.C
    rows = streaming(gpu, "layernorm_backward_kernel<768>", values, 6 * values, 2 * values,
                     math.ceil(s.C / 8 / 32) * 32)
    return times(rows, 2 * s.L + 1)


def gelu(gpu, s, fused):
    """The part of GELU that no product computes. fused: fc's product computes the forward"""
    values = 4 * s.N * s.C
    forward = streaming(gpu, "gelu_forward_kernel", values, 2 * values, 2 * values, 256)
    backward = streaming(gpu, "multiply_by_gelu_derivative_kernel", values, 4 * values, 2 * values, 256)
    forwards = (0 if fused else s.L) + (s.L if s.recompute >= 1 else 0)
    return together("GELU", [times(forward, forwards), times(backward, s.L)])


def gradient_sums(gpu, s):
    """Partial sums over rows, which kernels write and one launch a layer reads: llmc/cuda/gradient_sums.cuh."""
    tiles = FIGURES["tiles"]["64"]
    of_layernorm = 3 * s.C * layernorm_blocks(s)
    of_qkv = s.C * math.ceil(s.N / tiles["dq_queries"]) + 2 * s.C * math.ceil(s.N / tiles["dkv_keys"])
    of_fc = 4 * s.C * math.ceil(s.N / 256)
    values = (2 * s.L + 1) * of_layernorm + s.L * (of_qkv + of_fc)
    return at_copy_speed(gpu, 8 * values, s.L)


def classifier(gpu, s):
    logits = s.N * PADDED
    rows = streaming(gpu, "fused_classifier_kernel<true>", logits, 2 * logits, 2 * logits, 1024, 2 * PADDED)
    return together("classifier", [rows, at_copy_speed(gpu, 4 * s.N)])


def encoder(gpu, s):
    values, rows = s.N * s.C, min(s.N, VOCABULARY) * s.C
    sort = s.N / 65536 * 0.1e-3  # llmc/cuda/encoder.cuh, sort_tokens_kernel: 50 us a pass, two passes
    return together("encoder", [
        streaming(gpu, "encoder_forward_kernel", values, 2 * values, 2 * values, min(256, math.ceil(s.C / 256) * 32)),
        streaming(gpu, "encoder_backward_chunk_kernel", values, 2 * values + 4 * rows, 4 * rows, 256),
        streaming(gpu, "encoder_backward_position_kernel", values, 2 * values, 0, 256),
        Row("", sort, 0, "latency", 2)])


def optimizer(gpu, s):
    count = s.parameters / s.ranks
    adamw = streaming(gpu, "adamw_update_kernel", count, 16 * count, 14 * count, 256, launches=s.L + 4)
    norm = streaming(gpu, "global_norm_partial_kernel<float>", count, 4 * count, 0, 512, launches=2)
    return together("AdamW, norm", [adamw, norm])


# ---- attention

def loop_seconds(gpu, kernel, steps, blocks_of_steps, threads, dynamic):
    """Of a launch. steps: turns of the loop of each of a head's blocks, in the order of launch"""
    figures = FIGURES[gpu.architecture][kernel]
    resident = resident_blocks(gpu, threads, figures["registers"], figures["shared"] + dynamic)
    outside = figures["outside"] * threads // 32 / SCHEDULERS + 2 * gpu.latency
    # figures["clocks"] are those in which two blocks do a turn each
    cost = {turns: turns * figures["clocks"] * resident / 2 + outside for turns in set(steps)}
    places = [0.0] * (gpu.sms * resident)
    for _ in range(blocks_of_steps):
        for turns in steps:
            heapq.heapreplace(places, places[0] + cost[turns])
    return max(places) / gpu.clock


def attention_kernel(gpu, s, kind):
    tiles, hs = FIGURES["tiles"]["64"], s.C // s.heads
    own, others = {"forward": ("forward_queries", "forward_keys"), "backward_dq": ("dq_queries", "dq_keys"),
                   "backward_dkv": ("dkv_keys", "dkv_queries")}[kind]
    rows, turn = tiles[own], tiles[others]
    firsts = range(0, s.T, rows)
    if kind == "backward_dkv":  # keys, and the queries from them on
        steps = [math.ceil((s.T - first) / turn) for first in firsts]
        dynamic = (2 * rows + 4 * turn) * hs * 2 + 16 * turn
    else:  # queries, and the keys up to them, the longest first
        steps = [math.ceil(min(first + rows, s.T) / turn) for first in reversed(firsts)]
        dynamic = ((1 if kind == "forward" else 2) * rows + 4 * turn) * hs * 2
    threads = 32 * FIGURES["warps"]
    kernel = f"attention::{kind}_kernel<{hs}>"
    seconds = loop_seconds(gpu, kernel, steps, s.B * s.heads, threads, dynamic)
    figures = FIGURES[gpu.architecture][kernel]
    resident = resident_blocks(gpu, threads, figures["registers"], figures["shared"] + dynamic)
    made = Compiled(kernel, figures["registers"], resident * threads // 32, clocks=figures["clocks"])
    turns = figures["turn"]
    busiest = max(turns, key=turns.get)
    blocks_a_place = sum(steps) * s.B * s.heads / gpu.sms
    limit = blocks_a_place * turns[busiest] * threads / 32 / SCHEDULERS / gpu.clock
    by = {"shared": "shared memory", "tensor": "tensor cores", "issue": "instructions"}.get(busiest, busiest)
    return Row("", seconds, limit, by, 1, (made,))


def attention(gpu, s):
    forward = times(attention_kernel(gpu, s, "forward"), s.L)
    backward = [times(attention_kernel(gpu, s, kind), s.L) for kind in ("backward_dq", "backward_dkv")]
    return together("attention forward", [forward]), together("attention backward", backward)


def attention_at(s, rates):
    """The same at published rates, of flops that count half of the scores."""
    product = s.L * s.B * s.T * s.T * s.C
    return tuple(Row(f"attention {name}", count * product / rate, count * product / rate, "as published", kernels * s.L)
                 for name, count, rate, kernels in zip(("forward", "backward"), (2, 5), rates, (1, 2)))


# ---- the step

def launches(rows):
    count = sum(row.launches for row in rows)
    return Row("launches", count * SECONDS_A_LAUNCH, 0, "latency", count)


def whole(s, of_micro_step, of_step):
    rows = [times(row, s.micro_steps) for row in of_micro_step] + of_step
    return [row for row in rows if row.seconds > 0] + [launches(rows)]


def ours(gpu, s, flash2=False):
    """flash2: attention at FlashAttention-2's rates instead of those computed from what nvcc made"""
    fused = gpu.fuses_gelu
    zero = at_copy_speed(gpu, 2 * s.N * s.C)  # dresidual
    forward, backward = attention_at(s, gpu.flash2) if flash2 else attention(gpu, s)
    gradient_bytes = 8 - 4 / s.micro_steps  # the first micro-step only writes
    return whole(s, [matmuls_forward(gpu, s, fused), matmuls_backward(gpu, s, gradient_bytes), forward,
                     backward, classifier(gpu, s), residual_layernorm(gpu, s),
                     together("LayerNorm backward", [layernorm_backward(gpu, s), zero]), gelu(gpu, s, fused),
                     together("gradients' last sums", [gradient_sums(gpu, s)]), encoder(gpu, s)],
                 [optimizer(gpu, s)])


@dataclass
class Checkpoint:
    """What a rank that writes the model copies to the host, and how long training waits for it."""
    bytes: float
    seconds: float
    pause: float


def checkpoint(gpu, s, rows):
    """rows: of the step. While the copies run, so does the next step: its backward waits for the model's, which lies in
    the gradients' memory, and its update for all others (train_gpt.cu, take_snapshot)."""
    model = 4 * s.parameters
    state = (4 + 4 + 4 + 2 + 8) * s.parameters / s.ranks  # master, m, v; bf16; global parameters and outer momentum
    before = {row.name: row.seconds for row in rows}
    forward = (before["matmuls forward"] + before["attention forward"]) / s.micro_steps
    until_update = sum(before.values()) - before["AdamW, norm"]
    gather = at_copy_speed(gpu, 2 * model / s.ranks).seconds  # reads and writes this rank's part
    of_model = max(0, model / gpu.host - forward)
    of_state = max(0, (model + state) / gpu.host - until_update - of_model)
    return Checkpoint(model + state, (model + state) / gpu.host, gather + of_model + of_state)


def llmc(gpu, s, fused_forward):
    """llm.c's step with its kernels' rates (gpus.py), weights' gradients in bf16. fused_forward: -ge 1"""
    L, values = s.L, s.N * s.C

    def kernel(name, moved, count):
        return Row(name, moved / gpu.copy / LLMC_SHARES[name], moved / gpu.copy, "memory", count)

    matmuls = [matmuls_forward(gpu, s, fused_forward), matmuls_backward(gpu, s, 4)]
    gelus = (10 if not fused_forward else 6) * 4 * values * L
    small = together("encoder", [at_copy_speed(gpu, 6 * values, 2), at_copy_speed(gpu, 2 * values)])
    of_micro_step = [
        *matmuls, *attention_at(s, gpu.sdpa), kernel("classifier", 4 * s.N * PADDED, 1),
        kernel("residual + LayerNorm", 16 * values * L, 2 * L + 1),
        kernel("LayerNorm backward", 16 * values * L, 2 * L + 1), kernel("GELU", gelus, 2 * L),
        kernel("bias gradients", 18 * values * L, 4 * L), small]
    optimizer_rows = [at_copy_speed(gpu, 28 * s.parameters / s.ranks, 16), at_copy_speed(gpu, 2 * s.parameters)]
    return whole(s, of_micro_step, [together("AdamW, norm, zeroing", optimizer_rows)])
