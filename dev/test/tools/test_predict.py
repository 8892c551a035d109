"""dev/tools/predict.py: llm.c's published speeds, parts of the model by hand, and whether the figures of the kernels
are those of today's kernels."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

import check_kernels
import issue_model
import kernel_figures
import predict
from conftest import ROOT
from registers import default_nvcc
from simulation import gpu_step
from simulation.gpus import GPUS, LLMC_PUBLISHED, TILE
from simulation.gpu_step import FIGURES, Row, Step

SCRIPT = ROOT / "dev/tools/predict.py"
D12 = Step("d12", 64, 1024, 0, 1, 1)


def said(*words):
    return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=120)


# ---- the whole

@pytest.mark.parametrize("gpu, model", LLMC_PUBLISHED)
def test_llmc_s_step_is_as_fast_as_llmc_publishes(gpu, model):
    tokens, _ = predict.speed(GPUS[gpu], *predict.llmc_step(gpu, model))
    assert tokens == pytest.approx(LLMC_PUBLISHED[gpu, model], rel=0.08)


def test_mfu_of_llmc_s_d48_is_what_it_publishes():
    _, mfu = predict.speed(GPUS["h100"], *predict.llmc_step("h100", "d48"))
    assert mfu == pytest.approx(0.464, rel=0.08)


def test_flops_of_a_token_are_those_of_the_trainer():
    assert D12.flops_a_token == 803478528  # test_bench_gpu.py: bench_gpu says so
    assert D12.parameters == 124475904


def test_the_rows_make_up_the_step_and_every_row_is_within_its_limit():
    for name, gpu in GPUS.items():
        rows = gpu_step.ours(gpu, D12)
        assert len({row.name for row in rows}) == len(rows) >= 11
        assert all(row.seconds >= row.limit * 0.999 for row in rows), name
        tokens, mfu = predict.speed(gpu, D12, rows)
        assert tokens == pytest.approx(65536 / sum(row.seconds for row in rows))
        assert mfu == pytest.approx(tokens * 803478528 / gpu.peak)


def test_micro_steps_share_the_optimizer_and_the_last_three_read_gradients():
    gpu = GPUS["h100"]
    once, four = (gpu_step.ours(gpu, Step("d12", 64, 1024, 0, count, 1)) for count in (1, 4))
    of = {row.name: row.seconds for row in once}
    matrices = 50304 * 768 + 12 * 12 * 768 * 768
    assert {row.name: row.seconds for row in four}["matmuls backward"] == pytest.approx(
        4 * of["matmuls backward"] + 3 * 4 * matrices / gpu.copy)
    for row in four:
        factor = 1 if row.name.startswith("AdamW") else 4
        if row.name not in ("launches", "matmuls backward"):
            assert row.seconds == pytest.approx(factor * of[row.name]), row.name


def test_gelu_is_a_kernel_where_it_is_not_fused_or_computed_again_and_its_derivative_always():
    def launches(gpu, recompute):
        rows = gpu_step.ours(GPUS[gpu], Step("d12", 64, 1024, recompute, 1, 1))
        return next(row.launches for row in rows if row.name == "GELU")
    assert [launches("h100", 0), launches("h100", 1), launches("a100", 0), launches("a100", 1)] == [12, 24, 24, 36]


def test_a_checkpoint_s_copies_are_hidden_behind_the_next_step():
    h100, d48 = GPUS["h100"], Step("d48", 16, 1024, 0, 8, 1)
    rows = {row.name: row.seconds for row in gpu_step.ours(h100, d48)}
    one = gpu_step.checkpoint(h100, d48, gpu_step.ours(h100, d48))
    assert one.bytes == pytest.approx(26 * d48.parameters)
    forward = (rows["matmuls forward"] + rows["attention forward"]) / 8
    assert one.pause == pytest.approx(8 * d48.parameters / h100.copy + 4 * d48.parameters / h100.host - forward)
    assert one.pause < 0.050


def test_a_checkpoint_s_copies_that_a_step_does_not_hide_are_a_pause():
    slow, d48 = replace(GPUS["h100"], host=5e9), Step("d48", 16, 1024, 0, 8, 1)
    rows = gpu_step.ours(slow, d48)
    of_step = sum(row.seconds for row in rows if row.name != "AdamW, norm")
    one = gpu_step.checkpoint(slow, d48, rows)
    assert one.pause == pytest.approx(one.bytes / 5e9 - of_step + 8 * d48.parameters / slow.copy)


def test_what_is_printed_says_that_it_is_predicted():
    result = said("--gpu", "h100", "--model", "d12", "-b", "64")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("PREDICTED, not measured: d12, B = 64, T = 1024, ours on one H100")
    assert re.search(r"^  predicted: [\d,]+ tokens/s, [\d.]+% MFU, \d+ launches$", result.stdout, re.M)
    shares = [float(share) for share in re.findall(r" ([\d.]+)% ", result.stdout.split("step")[0])]
    assert sum(shares) == pytest.approx(100, abs=0.6)


def test_what_nvcc_made_of_each_kernel_is_printed():
    text = said("--gpu", "a100", "--compiled").stdout
    for kernel, registers, warps in (("attention::forward_kernel<64>", 237, 8), ("gelu_forward_kernel", 25, 64),
                                     ("layernorm_backward_kernel<768>", 78, 24)):
        row = re.search(rf"^  {re.escape(kernel)} +(\d+) +(\d+) ", text, re.M)
        assert (int(row[1]), int(row[2])) == (registers, warps), kernel
    assert len(re.findall(r"_kernel", text)) == 14


def test_llmc_is_printed_beside_what_it_publishes():
    result = said("--check")
    assert result.returncode == 0 and result.stdout.count("%") == 3


@pytest.mark.parametrize("words, message", [
    (["--gpu", "v100"], "argument --gpu: invalid choice: 'v100'"), (["-b", "0"], "'0' is not a batch"),
    (["-r", "3"], "there is no recomputation 3")])
def test_a_user_s_mistake_is_one_line(words, message):
    result = said(*words)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"error: {message}")


def test_what_the_document_shows_is_what_is_printed():
    text = (ROOT / "dev/results/h200.md").read_text()
    shown = re.findall(r"^    (dev/tools/predict.py .*?)(?: +#.*)?$", text, re.M)
    assert len(shown) >= 4
    for command in shown:
        printed = said(*command.split()[1:]).stdout
        if numbers := re.search(r"predicted: ([\d,]+ tokens/s, [\d.]+%) MFU", printed):
            assert re.search(rf"{re.escape(command)} +# {numbers[1]}$", text, re.M), f"{command}: {numbers[1]}"
        else:
            for tokens, difference in re.findall(r" ([\d,]+)   ([+-][\d.]+%)$", printed, re.M):
                assert f"| {tokens} | {difference} |" in text, printed
    table = said("--gpu", "h100", "--model", "d12", "-b", "64").stdout.split("\n\n")[1]
    assert table.replace("\n  ", "\n      ").strip() in text, "copy what predict.py prints into dev/results/h200.md"


# ---- parts of the step

def test_whole_tiles_are_computed():
    assert TILE == (128, 256)
    assert gpu_step.in_tiles(65536, 768) == 65536 * 768
    assert gpu_step.in_tiles(16384, 1600) == 16384 * 1664
    assert gpu_step.in_tiles(100, 100) == 128 * 256


def test_a_matmul_takes_its_flops_and_then_its_bytes():
    gpu = GPUS["a100"]
    row = gpu_step.matmul(gpu, 65536, 768, 768)
    flops, moved = 2 * 65536 * 768 * 768, 2 * (2 * 65536 * 768 + 768 * 768)
    assert row.seconds == pytest.approx(flops / 271.2e12 + moved / 1.732e12)
    assert row.limit == pytest.approx(flops / 271.2e12)


def test_a_streaming_kernel_takes_the_longest_of_memory_instructions_and_latency(monkeypatch):
    gpu = GPUS["h100"]
    figures = {"registers": 32, "shared": 0, "slots": 1.0, "in_flight": 64}
    monkeypatch.setitem(FIGURES["sm_90"], "a kernel", figures)

    def row(threads=256, **changes):
        figures.update(changes)
        return gpu_step.streaming(gpu, "a kernel", 1e9, 2e9, 2e9, threads)
    assert (row().by, row().seconds) == ("memory", pytest.approx(4e9 / 3.01e12))
    many = row(slots=100.0)
    assert (many.by, many.seconds) == ("instructions", pytest.approx(1e11 / 32 / (4 * 132 * gpu.clock)))
    few = row(slots=1.0, in_flight=1)
    assert (few.by, few.seconds) == ("latency", pytest.approx(2e9 * 655 / gpu.clock / (2048 * 132)))


def test_blocks_share_an_sm_as_far_as_registers_threads_and_shared_memory_go():
    gpu = GPUS["h100"]
    assert gpu_step.resident_blocks(gpu, 256, 32, 0) == 8
    assert gpu_step.resident_blocks(gpu, 256, 128, 0) == 2
    assert gpu_step.resident_blocks(gpu, 256, 32, 100 << 10) == 2
    assert gpu_step.resident_blocks(gpu, 32, 16, 0) == 32


def test_attention_s_blocks_go_to_the_first_free_place(monkeypatch):
    gpu = GPUS["h100"]
    monkeypatch.setitem(FIGURES["sm_90"], "attention",
                        {"registers": 128, "shared": 0, "clocks": 1000, "outside": 0})
    blocks = 2 * gpu.sms  # all at once
    outside = 2 * gpu.latency
    assert gpu_step.loop_seconds(gpu, "attention", [3], blocks, 256, 0) == pytest.approx(
        (3000 + outside) / gpu.clock)
    assert gpu_step.loop_seconds(gpu, "attention", [3], blocks + 1, 256, 0) == pytest.approx(
        2 * (3000 + outside) / gpu.clock)


def test_rows_are_put_together_under_the_longest_s_limit():
    row = gpu_step.together("both", [Row("", 1, 1, "memory", 2), Row("", 3, 2, "latency", 1)])
    assert row == Row("both", 4, 3, "latency", 3)


# ---- the scheduler

def instructions(*lines):
    return [issue_model.Instruction(words[0], words[1:]) for words in (line.replace(",", "").split() for line in lines)]


def test_registers_of_an_instruction():
    [mma] = instructions("HMMA.16816.F32.BF16 R80, R16, R12, RZ")
    assert mma.writes == {"R80", "R81", "R82", "R83"}
    assert mma.registers == mma.writes | {"R16", "R17", "R18", "R19", "R12", "R13"}
    [load] = instructions("LDSM.16.M88.4 R88, [R76+0x4800]")
    assert (load.writes, load.pipe, load.clocks("sm_90")) == ({"R88", "R89", "R90", "R91"}, "shared", 16)


def independent_products(count):
    return instructions(*[f"HMMA.16816.F32.BF16 R{40 + 4 * i}, R0, R4, R{40 + 4 * i}" for i in range(count)])


def test_products_of_many_warps_keep_the_tensor_cores_busy():
    assert issue_model.clocks_of_turn(independent_products(8), "sm_80", 4, 1) == pytest.approx(4 * 8 * 8, rel=0.02)
    assert issue_model.clocks_of_turn(independent_products(8), "sm_90", 4, 1) == pytest.approx(
        4 * 8 * 4096 / (0.629 * 1024), rel=0.1)


def test_a_chain_of_products_waits_for_each():
    chain = instructions(*["HMMA.16816.F32.BF16 R40, R0, R4, R40"] * 4)
    assert issue_model.clocks_of_turn(chain, "sm_80", 1, 1) == pytest.approx(4 * 33, rel=0.02)


def test_a_barrier_holds_the_warps_of_a_block_together():
    apart = instructions("FFMA R1, R2, R3, R4", "BAR.SYNC 0x0")
    alone = issue_model.clocks_of_turn(apart, "sm_90", 1, 1)
    assert issue_model.clocks_of_turn(apart, "sm_90", 4, 4) >= alone


LOOP = """.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R80, R16, R12, RZ ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   FSEL R80, R80, -INF, P1 ;
.L_x_2:
        /*0040*/               @P0 BRA `(.L_x_3) ;
        /*0050*/                   HMMA.16816.F32.BF16 R84, R16, R12, RZ ;
.L_x_3:
        /*0060*/               @P2 BRA `(.L_x_1) ;
"""


def test_a_turn_leaves_out_what_is_masked_and_keeps_all_products():
    turn = issue_model.tensor_loop(LOOP.splitlines())
    assert [one.opcode.split(".")[0] for one in turn] == ["HMMA", "BRA", "BRA", "HMMA", "BRA"]


# ---- the figures

def test_tiles_are_read_from_the_source():
    found = kernel_figures.tiles((ROOT / "llmc/cuda/attention.cuh").read_text())
    assert {str(size): of for size, of in found.items()} == FIGURES["tiles"], "run dev/bench/kernel_figures.py"
    assert found[64]["forward_keys"] == 64 and found[128]["forward_keys"] == 32


def test_registers_are_those_of_the_table():
    """dev/results/registers.md, which another command writes."""
    text = (ROOT / "dev/results/registers.md").read_text()
    for name in FIGURES["sm_90"]:
        row = re.search(rf"^\| `{re.escape(name)}` \|(.*)\|$", text, re.M)[1].split("|")
        assert [FIGURES["sm_80"][name]["registers"], FIGURES["sm_90"][name]["registers"]] == [int(row[0]), int(row[3])]


def test_the_latencies_that_the_model_assumes_do_not_decide():
    for architecture in kernel_figures.ARCHITECTURES:
        for name in kernel_figures.ATTENTION:
            figures, rel = FIGURES[architecture][name], 0.1 if name == "attention::forward_kernel<64>" else 0.05
            assert figures["clocks_with_shorter_latencies"] == pytest.approx(figures["clocks"], rel=rel), name


def test_differences_are_told_with_their_place():
    old = {"sm_90": {"k": {"registers": 100, "slots": 10.0}}}
    assert kernel_figures.differences(old, {"sm_90": {"k": {"registers": 101, "slots": 10.1}}}) == []
    assert kernel_figures.differences(old, {"sm_90": {"k": {"registers": 110}, "other": {}}}) == [
        "/sm_90/k/registers is 110, not 100", "/sm_90/other is missing"]


def nvdisasm():
    nvcc = default_nvcc()
    return check_kernels.find_nvdisasm(None, nvcc) if shutil.which(nvcc) else None


@pytest.mark.long
@pytest.mark.skipif(nvdisasm() is None, reason="no nvcc and nvdisasm here: whether the figures are stale is not known")
def test_the_figures_are_those_of_today_s_kernels():
    result = subprocess.run([sys.executable, ROOT / "dev/bench/kernel_figures.py", "--check"], capture_output=True,
                            text=True, timeout=900)
    assert result.returncode == 0, result.stderr
