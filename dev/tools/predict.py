#!/usr/bin/env python3
"""Predicts how fast the CUDA trainer is on a GPU, from what nvcc made of its kernels and from published rates.

    dev/tools/predict.py --gpu h100 --model d12 -b 64                  a step, kernel by kernel: tokens/s and MFU
    dev/tools/predict.py --gpu h100 --model d48 -b 16 --micro-steps 8
    dev/tools/predict.py --gpu a100 --model d12 -b 64 --kernels llm.c  the same model of llm.c's step
    dev/tools/predict.py --gpu h100 --model d12 -b 64 --compiled       also registers, warps on an SM, instructions
    dev/tools/predict.py --check                                       and beside the speeds that llm.c publishes

None of this is a measurement. dev/simulation/gpus.py has the GPUs' rates with their sources, gpu_step.py beside it has
the model, and dev/bench/kernel_figures.py makes the figures of the kernels anew.
"""
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # simulation/
from metrics import Parser, UserError, exit_status
from simulation import gpu_step
from simulation.gpus import GPUS, LLMC_PUBLISHED
from simulation.gpu_step import MODELS, Step

# llm.c's runs that LLMC_PUBLISHED has: batch, micro-steps, whether GELU is fused into the forward's product (-ge 1).
LLMC_RUNS = {"d12": (64, 1, False), "d48": (16, 8, True)}


def seconds_of(rows):
    return sum(row.seconds for row in rows)


def speed(gpu, step, rows):
    """(tokens/s, MFU)"""
    tokens = step.N * step.micro_steps / seconds_of(rows)
    return tokens, tokens * step.flops_a_token / gpu.peak


def table(rows):
    total = seconds_of(rows)
    lines = [f"  {'predicted':24} {'ms':>9} {'share':>7} {'limit, ms':>10}   limited by"]
    for row in sorted(rows, key=lambda row: -row.seconds):
        lines.append(f"  {row.name:24} {1e3 * row.seconds:9.2f} {100 * row.seconds / total:6.1f}% "
                     f"{1e3 * row.limit:10.2f}   {row.by}")
    lines.append(f"  {'step':24} {1e3 * total:9.2f} {'':7} {1e3 * sum(row.limit for row in rows):10.2f}")
    return "\n".join(lines)


def compiled_table(rows):
    """What nvcc made of each kernel."""
    lines = [f"  {'kernel':40} {'registers':>9} {'warps/SM':>9} {'slots a value':>14} {'clocks a turn':>14}"]
    for made in dict.fromkeys(made for row in rows for made in row.compiled):
        lines.append(f"  {made.kernel:40} {made.registers:9} {made.warps:9} {made.slots or '-':>14} "
                     f"{made.clocks or '-':>14}")
    return "\n".join(lines)


def report(gpu, step, rows, kernels):
    tokens, mfu = speed(gpu, step, rows)
    micro = f", {step.micro_steps} micro-steps" if step.micro_steps > 1 else ""
    again = f", recompute {step.recompute}" if step.recompute else ""
    launches = rows[-1].launches  # the row of all launches
    checkpoint_text = ""
    if kernels == "ours":
        one = gpu_step.checkpoint(gpu, step, rows)
        checkpoint_text = (f"\n  predicted: a checkpoint copies {one.bytes / 1e9:.1f} GB to the host in "
                           f"{one.seconds:.2f} s, and training pauses for {1e3 * one.pause:.0f} ms")
    return (f"PREDICTED, not measured: {step.model}, B = {step.B}, T = {step.T}{micro}{again}, {kernels} on one "
            f"{gpu.name}\n\n{table(rows)}\n\n"
            f"  predicted: {tokens:,.0f} tokens/s, {100 * mfu:.1f}% MFU, {launches:,} launches{checkpoint_text}")


def llmc_step(gpu_name, model):
    """(step, rows) of a run that llm.c publishes."""
    batch, micro_steps, fused = LLMC_RUNS[model]
    step = Step(model, batch, 1024, 0, micro_steps, 8)
    return step, gpu_step.llmc(GPUS[gpu_name], step, fused)


def check():
    lines = [f"  {'llm.c':12} {'published':>12} {'predicted':>12}   difference"]
    for (name, model), published in LLMC_PUBLISHED.items():
        tokens, _ = speed(GPUS[name], *llmc_step(name, model))
        lines.append(f"  {model + ', ' + name:12} {published:12,.0f} {tokens:12,.0f}   "
                     f"{100 * (tokens / published - 1):+.1f}%")
    return "tokens/s of each of 8 GPUs\n" + "\n".join(lines)


def number(name, least):
    def parse(text):
        if not text.isdigit() or int(text) < least:
            raise UserError(f"'{text}' is not a {name}: give a whole number, at least {least}")
        return int(text)
    return parse


def main(words):
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--model", choices=MODELS, default="d12")
    parser.add_argument("-b", type=number("batch", 1), default=64, metavar="B", help="sequences of a micro-step")
    parser.add_argument("-t", type=number("sequence length", 1), default=1024, metavar="T")
    parser.add_argument("-r", type=number("recomputation", 0), default=0, metavar="0|1|2",
                        help="1: recompute GELU, 2: LayerNorm, too")
    parser.add_argument("--micro-steps", type=number("number of micro-steps", 1), default=1)
    parser.add_argument("--ranks", type=number("number of ranks", 1), default=1,
                        help="GPUs of the worker, which share the optimizer; their communication is left out")
    parser.add_argument("--kernels", choices=("ours", "llm.c"), default="ours")
    parser.add_argument("--flash2", action="store_true", help="attention at FlashAttention-2's published rates")
    parser.add_argument("--compiled", action="store_true", help="also what nvcc made of each kernel")
    parser.add_argument("--check", action="store_true", help="compare with what llm.c publishes")
    arguments = parser.parse_args(words)
    if arguments.check:
        print(check())
        return
    if arguments.r > 2:
        raise UserError(f"there is no recomputation {arguments.r}: give 0, 1 or 2")
    gpu = GPUS[arguments.gpu]
    step = Step(arguments.model, arguments.b, arguments.t, arguments.r, arguments.micro_steps, arguments.ranks)
    if arguments.kernels == "ours":
        rows = gpu_step.ours(gpu, step, arguments.flash2)
    else:
        rows = gpu_step.llmc(gpu, step, False)
    print(report(gpu, step, rows, arguments.kernels))
    if arguments.compiled:
        print(f"\n{compiled_table(rows)}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
