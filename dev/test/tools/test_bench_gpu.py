"""make bench-gpu's program and its table, on small shapes through emulated kernels: everything runs and every figure
is there. Times mean nothing here."""

import re
import subprocess
import sys

import pytest

from conftest import ROOT

BENCH, TRAINER = ROOT / "build" / "plain" / "bench_gpu", ROOT / "build" / "plain" / "train_gpt"
SCRIPT = ROOT / "dev" / "bench" / "bench_gpu.py"
NUMBER = r"\s+([\d.]+|inf)"
pytestmark = pytest.mark.long


def bench(*words):
    return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    if not BENCH.exists():
        pytest.skip("build/plain/bench_gpu is not built: make build/plain/bench_gpu")
    out = tmp_path_factory.mktemp("bench") / "table.txt"
    result = bench("--tiny", "--bench", BENCH, "--trainer", TRAINER, "--out", out)
    assert result.returncode == 0, result.stdout + result.stderr
    assert out.read_text() == result.stdout
    return result.stdout


def test_every_kernel_of_a_step_has_a_time_and_a_rate(table):
    kinds = re.findall(rf"^  (.+?){NUMBER}{NUMBER}{NUMBER}%{NUMBER} (TF/s|GB/s){NUMBER}%$", table, re.MULTILINE)
    names = [kind[0] for kind in kinds]
    assert len(names) == len(set(names)) == 26
    for name in ["matmul qkv: dweight", "attention forward", "LayerNorm backward", "AdamW"]:
        assert name in names
    assert all(float(kind[2]) > 0 for kind in kinds)


def test_the_phases_of_a_step_make_up_the_step(table):
    phases = ["zero gradients", "forward", "classifier", "backward", "gradient norm", "AdamW"]
    times = [float(re.search(rf"^  {name}{NUMBER}{NUMBER}%$", table, re.MULTILINE)[1]) for name in phases]
    whole = float(re.search(rf"^  step{NUMBER}$", table, re.MULTILINE)[1])
    assert min(times) > 0 and sum(times) == pytest.approx(whole, rel=0.01)


def test_each_way_to_make_products_has_a_time(table):
    for way in ["--fuse-gelu 0", "--fuse-gelu 1", "--fuse-gelu 2", "one SM left to NCCL"]:
        assert float(re.search(rf"^  {way}{NUMBER}$", table, re.MULTILINE)[1]) > 0


def test_every_streaming_kernel_stands_beside_a_copy(table):
    of_each = ["quantize {}", "sum_encoding {}", "sum_rows {}, M = 2"] + [
        f"dequantize_mean {{}}, M = {workers}" for workers in (2, 4, 8)]
    of_default = ["quantize fp4, stochastic", "quantize fp4, error feedback", "sum_encoding fp4, error feedback",
                  "sum_rows fp4, M = 8", "sum_rows fp4, M = 9"]
    names = ["add_hash", "outer_step", *of_default] + [
        row.format(name) for name in ("fp4", "fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "bf16", "fp32") for row in of_each]
    for name in names:
        row = re.search(rf"^  {re.escape(name)}{NUMBER * 5}%$", table, re.MULTILINE)
        assert row and float(row[2]) > 0, name


def test_bytes_of_a_streaming_kernel_are_those_of_its_bound(table):
    """MB of 2048 values, by hand: 16 blocks, a payload of fp4 is 64 + 32 + 1024 bytes."""
    payload, values = 1120, 2048
    for name, count in [("quantize fp4", 8 * values + payload), ("quantize fp4, error feedback", 16 * values + payload),
                        ("sum_encoding fp4", 8 * values + payload),
                        ("sum_encoding fp4, error feedback", 4 * values + payload), ("sum_rows fp4, M = 2", 4 * payload),
                        ("sum_rows fp4, M = 8", 64 * payload), ("sum_rows fp4, M = 9", 18 * payload + 40 * values)]:
        row = re.search(rf"^  {re.escape(name)}{NUMBER * 5}%$", table, re.MULTILINE)
        assert float(row[1]) == pytest.approx(count / 1e6, abs=0.0006), name


def test_mfu_of_an_unknown_gpu_is_not_invented(table):
    rows = re.findall(rf"^  tiny, recompute \d{NUMBER}{NUMBER}{NUMBER}%{NUMBER}{NUMBER}\s+(\S+)$", table, re.MULTILINE)
    assert [row[5] for row in rows] == ["-", "-"]
    assert table.count("PyTorch, attention") == 4


@pytest.mark.parametrize("who", ["1 worker:", "2 workers that share this GPU:"])
def test_the_cost_of_an_exchange_is_beside_its_noise(table, who):
    part = table[table.index(who):].split("\n\n")[0]
    assert re.search(rf"^  never{NUMBER}$", part, re.MULTILINE)
    for way in ["H = 4, tau = 1", "H = 3, tau = 2"]:
        assert re.search(rf"^  {way}{NUMBER}\s+[+-][\d.]+%.*{NUMBER}%{NUMBER} ms$", part, re.MULTILINE), part
    assert "noise: not known from one run" in part


@pytest.mark.parametrize("words,message", [
    (["speed"],
     "error: there is no part 'speed': give some of d12, d48, layers, matmuls, streaming, exchange1, exchange2"),
    (["--bench", "nowhere"], "error: nowhere is not built: make bench-gpu builds it")])
def test_a_user_s_mistake_is_one_line(words, message):
    result = bench(*words)
    assert (result.returncode, result.stderr, result.stdout) == (2, message + "\n", "")


def test_mfu_is_the_flops_of_a_token_over_the_promised_ones():
    sys.path.insert(0, str(SCRIPT.parent))
    import bench_gpu
    gpt2 = {"flops_per_token": 803478528, "peak_flops": 989.4e12}
    measured = {"batch": 64, "seq_len": 1024}
    row, rate = bench_gpu.speed(measured, [163.84], gpt2)
    assert rate == pytest.approx(400000)
    assert row.split()[-2:] == ["321.4", "32.5%"]
    row, _ = bench_gpu.speed(measured, [163.84], {**gpt2, "peak_flops": None})
    assert row.split()[-2:] == ["321.4", "-"]
