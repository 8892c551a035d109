"""dev/bench/bench_cpu.py: which part of a step a symbol belongs to, and wrong inputs. A trial of it: test_commands."""
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "dev/bench"))
import bench_cpu

PROGRAM = ROOT / "dev/bench/bench_cpu.py"


@pytest.mark.parametrize("library, symbol, part", [
    ("[JIT] tid 7", "[.] 0x00007fc6cd90336a", "oneDNN's matmuls"),
    ("libdnnl.so.2.6", "[.] 0x00000000017c0417", "oneDNN's matmuls"),
    ("libgomp.so.1.0.0", "[.] 0x000000000001f7da", "waiting for the other thread"),
    ("[kernel.kallsyms]", "[k] exc_page_fault", "kernel, C library"),
    ("train_gpt_cpu", "[.] cpu::attention_backward_head", "attention"),
    ("train_gpt_cpu", "[.] cpu::convert_to_bf16", "conversions"),
    ("train_gpt_cpu", "[.] main", "other")])
def test_a_symbol_belongs_to_a_part(library, symbol, part):
    assert bench_cpu.part_of(library, symbol) == part


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
    result = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1
