#!/usr/bin/env python3
"""Registers, spills and static shared memory of every CUDA kernel, as ptxas reports them: dev/results/registers.md.

    dev/bench/registers.py [--nvcc NVCC] [-o FILE]

The status is 1 if an attention kernel spills on sm_90, 2 if a kernel is not compiled at all.
"""
import argparse
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
WITHOUT_SPILLS = "sm_90"  # the attention kernels

# A kernel is compiled with its launcher. Launchers that are templates must be instantiated.
TEMPLATES = """
void templates(cuda::Stream& stream) {
    cuda::cast<floatX, float>(nullptr, nullptr, 8, stream);
    cuda::cast<float, floatX>(nullptr, nullptr, 8, stream);
    cuda::global_norm_squared<float>(nullptr, nullptr, 8, stream);
}
"""


def default_nvcc():
    return shutil.which("nvcc") or f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc"


def kernel_files():
    paths = sorted([*(ROOT / "llmc/cuda").glob("*.cuh"), *(ROOT / "streaming").glob("*.cuh")])
    return [path for path in paths if "__global__" in path.read_text()]


def kernel_names(source):
    """Names of the kernels that a source defines."""
    return re.findall(r"__global__\s+(?:inline\s+)?void\s+(?:__launch_bounds__\([^()]*\)\s+)?(\w+)\(", source)


def report_of(nvcc, source, architecture):
    number = architecture[3:]
    command = [nvcc, "-x", "cu", "-std=c++17", "-O3", "-I.", "-DUSE_CUDA", "-gencode",
               f"arch=compute_{number},code={architecture}", "-Xptxas", "-v", "-c", str(source), "-o", "/dev/null"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"error: {' '.join(command)}\n{result.stderr[-4000:]}")
    return command, demangled(result.stderr)


def demangled(text):
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout


def short_name(signature):
    """`void cuda::f<(bool)1, __nv_bfloat16>(float*)` as `f<true, bf16>`."""
    text = signature.replace("(anonymous namespace)::", "")
    for long, short in (("(bool)1", "true"), ("(bool)0", "false"), ("__nv_bfloat16", "bf16"), ("cuda::", "")):
        text = text.replace(long, short)
    text = re.sub(r"\((?:[A-Za-z_]\w*|unsigned int)\)(-?\d+)", r"\1", text)
    depth, end = 0, len(text)
    for i, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = i
            break
    return text[:end].removeprefix("void ")


def parse(text):
    """{kernel: (registers, bytes of spill stores, of spill loads, of static shared memory)} from ptxas's words."""
    kernels, name, spills = {}, None, (0, 0)
    for line in text.splitlines():
        entry = re.search(r"Compiling entry function '(.*)' for", line)
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        used = re.search(r"Used (\d+) registers", line)
        if entry:
            name, spills = short_name(entry[1]), (0, 0)
        elif spilled:
            spills = int(spilled[1]), int(spilled[2])
        elif used and name:
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name], name = (int(used[1]), *spills, int(shared[1]) if shared else 0), None
    return kernels


def table(reports):
    """Markdown: a row a kernel, three columns an architecture."""
    lines = ["| kernel | " + " | ".join(f"{a}: registers | spills, bytes | shared, bytes" for a in reports) + " |",
             "|---|" + "---:|---:|---:|" * len(reports)]
    for name in sorted({name for kernels in reports.values() for name in kernels}):
        cells = []
        for kernels in reports.values():
            registers, stores, loads, shared = kernels.get(name, ("", "", "", ""))
            cells += [str(registers), f"{stores} / {loads}" if stores or loads else str(stores), str(shared)]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(reports, command, nvcc):
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release [\d.]+, (V[\d.]+)", version)[1]
    shown = " ".join(["nvcc", *command[1:]]).replace(ARCHITECTURES[-1][3:], "XX").replace(command[-3], "KERNELS.cu")
    return f"""# Registers and spills of the kernels

`make registers` with nvcc {release}, {datetime.date.today()}; for each architecture, over one source that includes every
file of kernels:

    {shown}

Spills are bytes of stores / loads. Shared memory is what a kernel declares; attention and others take more at launch.
A thread has at most 255 registers, a block of 1024 threads 64 for each.

{table(reports)}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nvcc", default=default_nvcc())
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "dev/results/registers.md")
    arguments = parser.parse_args()
    if not shutil.which(arguments.nvcc):
        sys.exit(f"error: {arguments.nvcc} is missing: set --nvcc to the CUDA toolkit's compiler")

    reports = {}
    with tempfile.TemporaryDirectory(prefix="registers-") as folder:
        source = pathlib.Path(folder) / "kernels.cu"
        includes = [f'#include "{path.relative_to(ROOT)}"\n' for path in kernel_files()]
        source.write_text("".join(includes) + TEMPLATES)
        for architecture in ARCHITECTURES:
            command, text = report_of(arguments.nvcc, source, architecture)
            reports[architecture] = parse(text)
    arguments.output.write_text(document(reports, command, arguments.nvcc))

    compiled = {re.sub(r"<.*", "", name).rsplit("::", 1)[-1] for name in reports[WITHOUT_SPILLS]}
    missing = {name for path in kernel_files() for name in kernel_names(path.read_text())} - compiled
    spilling = [name for name, (_, stores, loads, _) in reports[WITHOUT_SPILLS].items()
                if "attention" in name and stores + loads > 0]
    if missing:
        print(f"error: not compiled: {', '.join(sorted(missing))}: no launcher that is no template", file=sys.stderr)
    if spilling:
        print(f"error: spills on {WITHOUT_SPILLS}: {', '.join(spilling)}", file=sys.stderr)
    return 2 if missing else 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
