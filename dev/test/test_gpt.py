"""test_gpt_cpu: the model against PyTorch's numbers; and that it can fail."""

import subprocess

from conftest import ROOT

REFERENCE = ROOT / "dev" / "test" / "data" / "reference.bin"


def run(reference):
    return subprocess.run([ROOT / "test_gpt_cpu", reference], capture_output=True, text=True, timeout=300)


def test_model_agrees_with_pytorch():
    result = run(REFERENCE)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_changed_reference_is_noticed(tmp_path):
    data = bytearray(REFERENCE.read_bytes())
    at = len(data) // 2 // 4 * 4
    data[at:at + 4] = b"\x00\x00\x80\x3f"  # one gradient value becomes 1.0
    changed = tmp_path / "reference.bin"
    changed.write_bytes(data)
    result = run(changed)
    assert result.returncode == 1 and "FAILED" in result.stdout
