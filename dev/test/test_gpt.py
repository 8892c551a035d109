"""test_gpt: the model against PyTorch's numbers, on the CPU and through emulated CUDA kernels; and that it can fail."""

import subprocess

import pytest

from conftest import ROOT

DATA = ROOT / "dev" / "test" / "data"
EMULATED = {"bf16": ROOT / "build" / "plain" / "test_gpt", "fp32": ROOT / "build" / "fp32" / "test_gpt"}


def run(program, reference):
    return subprocess.run([program, reference], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("reference", ["reference.bin", "reference_head64.bin"])
def test_model_agrees_with_pytorch(reference):
    result = run(ROOT / "test_gpt_cpu", DATA / reference)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("parameters", EMULATED)
def test_cuda_kernels_agree_with_pytorch(parameters):
    result = run(EMULATED[parameters], DATA / "reference_head64.bin")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("program", [ROOT / "test_gpt_cpu", *EMULATED.values()])
def test_a_changed_reference_is_noticed(tmp_path, program):
    data = bytearray((DATA / "reference_head64.bin").read_bytes())
    at = len(data) // 2 // 4 * 4
    data[at:at + 4] = b"\x00\x00\x80\x3f"  # one gradient value becomes 1.0
    changed = tmp_path / "reference.bin"
    changed.write_bytes(data)
    result = run(program, changed)
    assert result.returncode == 1 and "FAILED" in result.stdout
