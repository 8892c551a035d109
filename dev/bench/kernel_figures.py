#!/usr/bin/env python3
"""What nvcc made of the kernels of a training step, for dev/tools/predict.py: dev/simulation/kernel_figures.json.

    dev/bench/kernel_figures.py [--nvcc NVCC] [--nvdisasm NVDISASM] [-o FILE]
    dev/bench/kernel_figures.py --check          whether the file is still true, where nvcc and nvdisasm are installed

Of each kernel: registers a thread, bytes of static shared memory, and

    slots       instructions that a thread issues for a value, at most: all loops are counted, also both of those that
                nvcc made of one
    in_flight   bytes that a thread has requested before it uses the first
    turn        of attention's main loop: clocks of each pipe for a warp's turn (issue_model.py), and `clocks`, in which
                a scheduler does a turn of all its warps: those of two blocks on an SM; the same with three quarters of
                the model's latencies
    outside     of attention: instructions outside this turn, all branches counted

Attention's tiles are read from llmc/cuda/attention.cuh.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import issue_model
from check_kernels import compiled, find_nvdisasm, kernels_of_sass, loads_in_flight
from registers import ROOT, TEMPLATES, default_nvcc, kernel_files, parse, report_of

ARCHITECTURES = ("sm_80", "sm_90")
FILE = ROOT / "dev/simulation/kernel_figures.json"
# Values that a thread handles in one turn of each of the kernel's loops, or in a whole kernel that has no loop.
VALUES = {"adamw_update_kernel": 4, "encoder_backward_chunk_kernel": 4,
          "encoder_backward_position_kernel": 4, "encoder_forward_kernel": 8, "fused_classifier_kernel<true>": 8,
          "layernorm_forward_kernel<true>": 8, "gelu_forward_kernel": 8, "global_norm_partial_kernel<float>": 4,
          "layernorm_backward_kernel<768>": 8, "layernorm_forward_kernel<false>": 8,
          "multiply_by_gelu_derivative_kernel": 8}
ATTENTION = {f"attention::{name}_kernel<{size}>": (name, size)
             for name in ("forward", "backward_dq", "backward_dkv") for size in (64, 128)}
BLOCKS_ON_SM = 2  # __launch_bounds__ of attention's kernels


def tiles(source):
    """{head size: {name: number}} of struct Tiles."""
    body = re.search(r"struct Tiles \{(.*?)\n\};", source, re.S)[1]
    found = re.findall(r"(\w+) = (?:hs == 64 \? (\d+) : )?(\d+)\b(?=[,;])", body)
    return {size: {name: int(small if small and size == 64 else large) for name, small, large in found}
            for size in (64, 128)}


def unrolled(bodies):
    """How many turns each loop does at once, in kernels that hold a row in shared memory: nvcc makes two of a loop."""
    copies = [issue_model.count(body, "LDGSTS") for body in bodies]
    least = min((count for count in copies if count), default=0)
    return [issue_model.count(body, "STG.E.128") or (count // least if count else 0)
            or issue_model.count(body, "LDS.128") or 1 if least else 1 for body, count in zip(bodies, copies)]


def slots(lines, values):
    bodies = list(issue_model.loops(lines))
    counts = [sum(not isinstance(entry, str) for entry in body) / turns
              for body, turns in zip(bodies, unrolled(bodies))]
    whole = sum(not isinstance(entry, str) for entry in issue_model.listing(lines))
    return round((sum(counts) or whole) / values, 2)


def warps_of_block(source):
    """Warps of a block of attention's kernels."""
    return int(re.search(r"constexpr int warps = (\d+),", source)[1])


def attention_figures(lines, architecture, warps):
    """warps: of a block"""
    turn = issue_model.tensor_loop(lines)
    on_scheduler = warps // 4
    whole = sum(not isinstance(entry, str) for entry in issue_model.listing(lines))
    busy = issue_model.busy_clocks(turn, architecture)
    shorter = {pipe: 0.75 * clocks for pipe, clocks in issue_model.LATENCIES.items()}
    clocks, of_shorter = (
        round(issue_model.clocks_of_turn(turn, architecture, BLOCKS_ON_SM * on_scheduler, on_scheduler, latencies=one))
        for one in (issue_model.LATENCIES, shorter))
    return {"turn": {pipe: round(value, 1) for pipe, value in sorted(busy.items())}, "clocks": clocks,
            "clocks_with_shorter_latencies": of_shorter, "outside": whole - len(turn)}


def figures_of(nvcc, nvdisasm, source, architecture, warps):
    reported = parse(report_of(nvcc, source, architecture)[1])
    cubin = compiled(nvcc, source, f"-arch={architecture}", "-cubin", suffix=".cubin")
    sass = kernels_of_sass(subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True,
                                          check=True).stdout)
    found = {}
    for name in sorted([*VALUES, *ATTENTION]):
        registers, _, _, shared = reported[name]
        found[name] = {"registers": registers, "shared": shared}
        if name in VALUES:
            found[name].update(slots=slots(sass[name], VALUES[name]), in_flight=loads_in_flight(sass[name])[1])
        else:
            found[name].update(attention_figures(sass[name], architecture, warps))
    return found


def figures(nvcc, nvdisasm):
    attention = (ROOT / "llmc/cuda/attention.cuh").read_text()
    warps = warps_of_block(attention)
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        source = pathlib.Path(folder) / "kernels.cu"
        source.write_text("".join(f'#include "{path.relative_to(ROOT)}"\n' for path in kernel_files()) + TEMPLATES)
        made = {name: figures_of(nvcc, nvdisasm, source, name, warps) for name in ARCHITECTURES}
    return {"made by": "dev/bench/kernel_figures.py", "nvcc": version(nvcc),
            "tiles": tiles(attention), "warps": warps, **made}


def version(nvcc):
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release [\d.]+, (V[\d.]+)", said)[1]


def differences(old, new, path=""):
    """Figures that are not within 2%: another nvcc orders instructions a little differently."""
    if isinstance(new, dict):
        return [line for key in new for line in differences(old.get(key), new[key], f"{path}/{key}")] \
            if isinstance(old, dict) else [f"{path} is missing"]
    if isinstance(new, str):
        return []
    return [] if old is not None and abs(old - new) <= 0.02 * abs(new) else [f"{path} is {new}, not {old}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nvcc", default=default_nvcc())
    parser.add_argument("--nvdisasm")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=FILE)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    arguments = parser.parse_args()
    nvdisasm = find_nvdisasm(arguments.nvdisasm, arguments.nvcc)
    if not nvdisasm:
        print("error: there is no nvdisasm: pip install nvidia-cuda-nvdisasm, or give --nvdisasm", file=sys.stderr)
        return 2
    made = json.loads(json.dumps(figures(arguments.nvcc, nvdisasm)))
    if not arguments.check:
        arguments.output.write_text(json.dumps(made, indent=1) + "\n")
        return 0
    wrong = differences(json.loads(arguments.output.read_text()), made)
    for line in wrong:
        print(f"error: {line}: run dev/bench/kernel_figures.py", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
