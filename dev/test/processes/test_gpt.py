"""test_gpt: the model against PyTorch's numbers, on the CPU and through emulated CUDA kernels; and that it can fail."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT

import reference

DATA = ROOT / "dev" / "test" / "data"
EMULATED = {"bf16": ROOT / "build" / "plain" / "test_gpt", "fp32": ROOT / "build" / "fp32" / "test_gpt"}


def run(program, reference):
    return subprocess.run([program, reference], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("reference", ["reference.bin", "reference_head64.bin"])
def test_model_agrees_with_pytorch(reference):
    result = run(ROOT / "test_gpt_cpu", DATA / reference)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("parameters", ["bf16", pytest.param("fp32", marks=pytest.mark.long)])
def test_cuda_kernels_agree_with_pytorch(parameters):
    result = run(EMULATED[parameters], DATA / "reference_head64.bin")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("program,by", [(ROOT / "test_gpt_cpu", 1e-4), (EMULATED["bf16"], 0.1),
                                        pytest.param(EMULATED["fp32"], 1e-4, marks=pytest.mark.long)])
def test_a_changed_reference_is_noticed(tmp_path, program, by):
    _, arrays = reference.read(DATA / "reference_head64.bin")
    changed = ["logits", "losses", "gradient.h.1.qkvw", "norms", "muon.losses", "muon.h.1.fcw"]
    arrays = {name: (values * np.float32(1 + by) if name in changed else values) for name, values in arrays.items()}
    reference.write(tmp_path / "changed.bin", reference.SHAPES["reference_head64.bin"], arrays)
    result = run(program, tmp_path / "changed.bin")
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert result.returncode == 1
    for what in ["logits", "loss of step 1 ", "gradient of h.1.qkvw", "norm at the end of wte", "muon.loss of step 1 ",
                 "muon.h.1.fcw"]:
        assert any(what in line for line in failed), result.stdout
    assert not any("gradient of h.0.qkvw" in line for line in failed)
