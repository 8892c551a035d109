#!/usr/bin/env python3
"""Whether nvcc made of the kernels what they were written for. Part of `make check-cuda`.

    dev/bench/check_kernels.py [--nvcc NVCC] [--nvdisasm NVDISASM]

- No kernel spills registers on sm_80 and sm_90, and none takes more of them than its occupancy allows.
- What is stored in packs of 16 bytes is stored by one instruction: nvcc splits some packs of bf16 into words.
- No multiplication and addition of the wire's arithmetic are fused unless the source says so: PTX has as many fused
  ones as when it is compiled with -fmad=false. CPUs and GPUs would differ in their bits.
- Streaming kernels load all of an iteration before they use the first value (SASS, where there is an nvdisasm:
  pip install nvidia-cuda-nvdisasm).

The status is 1 if one of these does not hold.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from registers import ROOT, TEMPLATES, default_nvcc, demangled, kernel_files, parse, report_of, short_name

# Registers a thread for which enough of a kernel's blocks share an SM.
MOST_REGISTERS = {r"dequantize_mean_kernel": 64, r"(row|encoding)_sums_kernel": 80}
WIRE = r"(quantize|dequantize_mean|outer_step|token_weights|cast|row_sums|encoding_sums)_kernel"
STREAMING = r"(dequantize_mean|row_sums|encoding_sums)_kernel"
# These store structs, single numbers, or four codes of a byte.
WITHOUT_PACKS = r"header|sort_tokens|skip_outliers|^quantize|attention_fp32|muon|sums|partial|total"
LOADS_AT_ONCE = 4


def by_kernel(text, begin):
    """{kernel: its lines}; `begin` finds a kernel's mangled name in the line that it begins with."""
    kernels, lines = {}, []
    for line in text.splitlines():
        if found := re.search(begin, line):
            kernels[found[1]] = lines = []
        lines.append(line)
    names = demangled("\n".join(kernels)).splitlines()
    return {short_name(name): lines for name, lines in zip(names, kernels.values())}


def kernels_of_ptx(text):
    return by_kernel(text, r"\.entry (\w+)")


def kernels_of_sass(text):
    return by_kernel(text, r"\.section\s+\.text\.(\w+)")


def count(lines, instruction):
    return sum(bool(re.match(rf"\s+(@!?%p\d+\s+)?{instruction}\b", line)) for line in lines)


def narrow_stores(kernels):
    """Kernels that store words of two bf16 where they have packs."""
    return [f"{name} stores words of 4 bytes" for name, lines in kernels.items()
            if not re.search(WITHOUT_PACKS, name) and count(lines, r"st\.global(\.cg)?\.[bus]32")]


def contractions(kernels, without):
    """Kernels of the wire in which nvcc has fused operations that `without`, compiled with -fmad=false, does not."""
    return [f"{name} has fused a multiplication and an addition" for name, lines in kernels.items()
            if re.match(WIRE, name) and count(lines, r"fma\.rn\.f32") != count(without[name], r"fma\.rn\.f32")]


def loads_in_flight(lines):
    """(loads, their bytes a thread): the most that are issued before one of their values is used."""
    most, waiting = (0, 0), {}
    for line in lines:
        text = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line)
        if not text:
            continue
        registers = [int(r) for r in re.findall(r"\bR(\d+)\b", text[2])]
        if text[1].startswith("LDG.") or text[1] == "LDG":
            width = 4 if ".128" in text[1] else 2 if ".64" in text[1] else 1
            waiting.update((registers[0] + i, line) for i in range(width))
            most = max(most, (len(set(waiting.values())), 4 * len(waiting)))
        elif any(r in waiting for r in registers):
            waiting = {}
    return most


def late_loads(kernels):
    """Streaming kernels whose loop uses a value before it has issued the loads of four workers or packs."""
    counts = {name: loads_in_flight(lines)[0] for name, lines in kernels.items() if re.match(STREAMING, name)}
    return [f"{name} has {most} loads in flight, not {LOADS_AT_ONCE}"
            for name, most in counts.items() if most < LOADS_AT_ONCE]


def too_many_registers(kernels, architecture):
    """kernels: as registers.py's parse() has them."""
    found = [f"{name} spills on {architecture}" for name, (_, stores, loads, _) in kernels.items() if stores + loads]
    for pattern, most in MOST_REGISTERS.items():
        matching = {name: values[0] for name, values in kernels.items() if re.match(pattern, name)}
        if not matching:
            found.append(f"there is no kernel {pattern}")
        found += [f"{name} has {used} registers on {architecture}, more than {most}"
                  for name, used in matching.items() if used > most]
    return found


def compiled(nvcc, source, *options, suffix):
    output = source.with_suffix(suffix)
    command = [nvcc, "-x", "cu", "-std=c++17", "-O3", "-I.", "-DUSE_CUDA", *options, str(source), "-o", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"error: {' '.join(command)}\n{result.stderr[-4000:]}")
    return output


def find_nvdisasm(given, nvcc):
    beside = pathlib.Path(shutil.which(nvcc) or nvcc).resolve().parent / "nvdisasm"
    wheels = sorted(ROOT.glob(".venv/lib/python3.*/site-packages/nvidia/*/bin/nvdisasm"))
    return next((str(p) for p in (given, shutil.which("nvdisasm"), beside, *wheels) if p and shutil.which(p)), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nvcc", default=default_nvcc())
    parser.add_argument("--nvdisasm")
    arguments = parser.parse_args()
    nvdisasm = find_nvdisasm(arguments.nvdisasm, arguments.nvcc)
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        source = pathlib.Path(folder) / "kernels.cu"
        source.write_text("".join(f'#include "{path.relative_to(ROOT)}"\n' for path in kernel_files()) + TEMPLATES)
        wrong = []
        for architecture in ("sm_80", "sm_90"):
            wrong += too_many_registers(parse(report_of(arguments.nvcc, source, architecture)[1]), architecture)
        def ptx(*options):
            path = compiled(arguments.nvcc, source, "-arch=compute_90", "-ptx", *options, suffix=".ptx")
            return kernels_of_ptx(path.read_text())
        kernels = ptx()
        wrong += narrow_stores(kernels) + contractions(kernels, ptx("-fmad=false"))
        if nvdisasm:
            cubin = compiled(arguments.nvcc, source, "-arch=sm_90", "-cubin", suffix=".cubin")
            sass = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
            wrong += late_loads(kernels_of_sass(sass))
        else:
            print("not checked: whether loads come before their first use, for there is no nvdisasm")
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
