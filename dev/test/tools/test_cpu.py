"""The trainer on a CPU: its loops that matter are vectorized, and dev/bench/bench_cpu.py reads its runs right.

What g++ made of the loops is read with objdump. A loop that calls `exponential` for each value, since the compiler did
not inline it, takes several times as long, gives the same results, and nothing else notices. A trial of the benchmark:
test_commands.py."""
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "dev/bench"))
import bench_cpu

# Functions of the trainer that hold these loops. Those of softmax may be inlined into attention.
LOOPS = {"GELU": r"cpu::(gelu_forward|apply_gelu)\b", "GELU's derivative": r"cpu::gelu_backward<",
         "attention": r"cpu::(attention_forward|exponential_row)",
         "attention's derivative": r"cpu::attention_backward",
         "classifier": r"cpu::fused_classifier\(",
         "LayerNorm": r"cpu::(layernorm_row|layernorm_forward|fused_residual)",
         "LayerNorm's derivative": r"cpu::layernorm_backward", "AdamW": r"cpu::adamw_update\(",
         "E2M1": r"cpu::quantize_block<E2M1, true>\("}
# What such a loop must not call: arithmetic for one value.
SCALAR = re.compile(r"exponential|sigmoid|gelu(_derivative)?\(float|_rn\(|_to_float|_to_bits"
                    r"|\b(exp|tanh|fma|sqrt|pow)f\b")
# The loops whose values lie side by side: they need no instruction that loads each value from an address of its own.
SIDE_BY_SIDE = ("GELU", "GELU's derivative", "LayerNorm", "LayerNorm's derivative", "AdamW")


def functions(program):
    """{name: instructions} of an object file or program."""
    listing = subprocess.run(["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", "--reloc", program],
                             capture_output=True, text=True, check=True).stdout
    found, name = {}, None
    for line in listing.splitlines():
        begin = re.fullmatch(r"[0-9a-f]+ <(.*)>:", line)
        if begin:
            name = begin[1]
        elif name and "\t" in line:
            found.setdefault(name, []).append(line.split("\t", 1)[1])
    return found


def faults(program, loops, widths):
    """What is wrong with the loops of a program.   widths: of its vectors, as registers are named: x, y, z"""
    vector = re.compile(r"v?(add|sub|mul|div|fn?m(add|sub)\d*)ps\b.*%[" + widths + "]mm")
    found = functions(program)
    for name in loops:
        holders = [lines for function, lines in found.items() if re.search(LOOPS[name], function)]
        vectors = sum(bool(vector.match(line)) for lines in holders for line in lines)
        if vectors < 4:  # the shortest of these loops needs more
            yield f"{name}: {vectors} vector instructions in {len(holders)} functions"
        for lines in holders:
            # In an object file the callee stands in the next line, a relocation's.
            calls = [" ".join(lines[at:at + 2]) for at, line in enumerate(lines) if line.startswith("call")]
            yield from (f"{name}: {call}" for call in calls if SCALAR.search(call))
            if name in SIDE_BY_SIDE:
                yield from (f"{name}: {line}" for line in lines if "gather" in line)


def widths():
    cpu = Path("/proc/cpuinfo").read_text()
    return "z" if " avx512f " in cpu else "yz" if " avx2 " in cpu else "xyz"


needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64's instructions")


@needs_x86
def test_the_trainers_loops_are_vectors_without_calls():
    assert list(faults(ROOT / "train_gpt_cpu", LOOPS, widths())) == []


def compiled(folder, include):
    source, program = folder / "gelu.cpp", folder / "gelu.o"
    source.write_text('#include "llmc/layers.h"\nvolatile auto kept = &cpu::gelu_forward;\n')
    compiler, *options = (ROOT / "build/options_cpu").read_text().split()  # as make has built the trainer
    subprocess.run([compiler, f"-I{include}", *options, "-c", source, "-o", program], check=True, cwd=ROOT)
    return program


def faults_of_mutant(folder, header, before, after):
    """What is wrong with GELU's loops if `header` has `after` in place of `before`."""
    source = (ROOT / header).read_text()
    assert before in source
    (folder / header).parent.mkdir(parents=True)
    (folder / header).write_text(source.replace(before, after))
    return list(faults(compiled(folder, folder), ["GELU"], widths()))


@needs_x86
def test_a_function_that_is_not_inlined_is_found(tmp_path):
    assert list(faults(compiled(tmp_path, ROOT), ["GELU"], widths())) == []
    found = faults_of_mutant(tmp_path, "llmc/arithmetic.h", "HD_INLINE float exponential",
                             "__attribute__((noinline)) inline float exponential")
    assert any("exponential" in fault for fault in found) and "vector instructions" in found[0]


@needs_x86
@pytest.mark.skipif(widths() == "xyz", reason="this CPU loads no vectors from several addresses")
def test_a_loop_that_gathers_its_values_is_found(tmp_path):
    found = faults_of_mutant(tmp_path, "llmc/cpu/gelu.h", "gelu(widened(inp[i]))",
                             "gelu(widened(inp[int(widened(out[i]))]))")
    assert any("gather" in fault for fault in found)


def factors_that_are_read_again(folder, *includes):
    """The fused multiply-adds of attention's products that read a factor from memory, as compiled for Zen 3."""
    source, program = folder / "tile.cpp", folder / "tile.o"
    source.write_text('#include "llmc/cpu/tile_matmul.h"\nvolatile auto kept = &cpu::tile_matmul<false>;\n')
    subprocess.run(["g++", "-std=c++17", "-O3", "-march=znver3", *(f"-I{include}" for include in includes), "-c",
                    source, "-o", program], check=True)
    products = [line for lines in functions(program).values() for line in lines if line.startswith("vfmadd")]
    assert len(products) >= 8  # a tile's sums
    return [line for line in products if "(" in line]


@needs_x86
def test_attentions_products_read_their_factors_once(tmp_path):
    assert factors_that_are_read_again(tmp_path, ROOT) == []
    header = "llmc/cpu/vector.h"
    (tmp_path / header).parent.mkdir(parents=True)
    (tmp_path / header).write_text((ROOT / header).read_text().replace('asm("" : "+x"(v));', ""))
    assert factors_that_are_read_again(tmp_path, tmp_path, ROOT) != []


# --------------------------------------------------------------------------------------- the benchmark

BENCHMARK = ROOT / "dev/bench/bench_cpu.py"


@pytest.mark.parametrize("library, symbol, part", [
    ("[JIT] tid 7", "[.] 0x00007fc6cd90336a", "oneDNN's matmuls"),
    ("libdnnl.so.2.6", "[.] 0x00000000017c0417", "oneDNN's matmuls"),
    ("libgomp.so.1.0.0", "[.] 0x000000000001f7da", "waiting for the other thread"),
    ("[kernel.kallsyms]", "[k] exc_page_fault", "kernel, C library"),
    ("train_gpt_cpu", "[.] cpu::attention_backward_head", "attention"),
    ("train_gpt_cpu", "[.] cpu::tile_matmul<true>", "attention"),
    ("train_gpt_cpu", "[.] cpu::tile<false, 2>", "attention"),
    ("train_gpt_cpu", "[.] cpu::exponential_row", "attention"),
    ("train_gpt_cpu", "[.] cpu::transpose", "attention"),
    ("train_gpt_cpu", "[.] cpu::pack_rows<false, float>(cpu::AttentionHead<false>&", "attention"),
    ("train_gpt_cpu", "[.] cpu::fused_classifier", "embedding, classifier"),
    ("train_gpt_cpu", "[.] cpu::convert_to_bf16", "conversions"),
    ("train_gpt_cpu", "[.] main", "other")])
def test_a_symbol_belongs_to_a_part(library, symbol, part):
    assert bench_cpu.part_of(library, symbol) == part


def test_a_new_report_keeps_the_sections_of_the_old_one(tmp_path):
    report = tmp_path / "cpu.md"
    assert bench_cpu.other_sections(report) == ""
    report.write_text("# Speed on a CPU\n\nfigures\n")
    assert bench_cpu.other_sections(report) == ""
    report.write_text("# Speed on a CPU\n\nfigures\n\n## AMD\n\nothers\n")
    assert bench_cpu.other_sections(report) == "\n## AMD\n\nothers\n"


def test_bf16_is_left_out_where_the_cpu_does_not_multiply_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "build").mkdir()
    (tmp_path / "build/matmul_rate").touch()
    monkeypatch.setattr(bench_cpu, "ROOT", tmp_path)
    words = ["--trainer", str(tmp_path / "build/matmul_rate")]
    for multiplies, precisions in (True, ["fp32", "bf16"]), (False, ["fp32"]):
        monkeypatch.setattr(bench_cpu, "multiplies_bf16", lambda: multiplies)
        assert bench_cpu.parse_arguments(words).precisions == precisions
        assert ("bf16 is left out" in capsys.readouterr().err) == (not multiplies)
    with pytest.raises(bench_cpu.UserError, match="leave bf16 out"):
        bench_cpu.parse_arguments([*words, "--precisions", "fp32", "bf16"])


def test_where_perf_may_not_record_the_other_measurements_are_printed(tmp_path, monkeypatch, capsys):
    (tmp_path / "perf").write_text("#!/bin/sh\necho 'Access to performance monitoring is limited.' >&2; exit 255\n")
    (tmp_path / "perf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    model = bench_cpu.MODELS["3x128"]
    parts = bench_cpu.Trainer(Path("/nowhere/train_gpt_cpu"), model, "fp32", 1, tmp_path).parts(0.1)
    assert parts == {} and "Access to performance monitoring is limited" in capsys.readouterr().err
    found = {"ours": [{"parameters": 1000, "seconds": 0.5, "peak": 2**20}], "rate": 1e7, "theirs": {}, "parts": parts}
    words = bench_cpu.argparse.Namespace(pytorch=None, rounds=1, steps=1, models=["3x128"])
    text = bench_cpu.report(words, {("3x128", "fp32"): found})
    assert f"{model.tokens / 0.5:,.0f}" in text and "No table of the parts: perf" in text


def test_the_share_is_the_flops_of_a_step_over_onednn_s():
    model = bench_cpu.Model(2, 2, 64, 128, 32, 4)
    found = {"ours": [{"parameters": 1000, "seconds": 0.5, "peak": 2**20}], "rate": 1e7,
             "theirs": {"eager": [{"seconds": 1.0, "peak": 2**21}], "compiled": [{"seconds": 0.75, "peak": 2**22}]}}
    flops = 4 * 32 * (6 * 1000 + 6 * 2 * 64 * 32)  # of a step of half a second
    cells = bench_cpu.row("tiny", model, "fp32", found)
    assert cells[2:4] == ["256", "500.0"] and cells[6] == f"{2 * flops / 1e7:.2f}"
    assert cells[7:] == ["1", "128", "171", "1.50", "2"]


@pytest.mark.parametrize("words, message", [
    (["--models", "7x7"], "invalid choice: '7x7'"), (["--trainer", "/nowhere"], "/nowhere is not there"),
    (["--pytorch", "/nowhere"], "/nowhere is not there"), (["--report", "/nowhere/x.md"], "cannot be written")])
def test_wrong_input_is_one_line(words, message):
    result = subprocess.run([sys.executable, BENCHMARK, *words], capture_output=True, text=True)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1
