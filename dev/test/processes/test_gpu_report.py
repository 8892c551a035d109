"""make gpu-report's program: every GPU test is in a part, verdicts are what happened, and in a dry run all parts run in
the emulator and end in one page."""

import re
import subprocess
import sys
import time

import pytest

import gpu_report
from conftest import ROOT, is_running
from gpu_report import Part, Programs, Result

SCRIPT = ROOT / "dev/bench/gpu_report.py"
BUILT = [ROOT / "build/plain" / name for name in ("train_gpt", "bench_gpu", "test_gpt", "test_elementwise")]
ORDER = ["versions", "memory", "kernels", "model", "communicators", "streaming", "speed", "sanitizer"]


def report(*words, seconds=900):
    return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=seconds)


def needs(*names):
    missing = [path.name for path in BUILT if path.name in names and not path.exists()]
    if missing:
        pytest.skip(f"build/plain/{missing[0]} is not built: make gpu-report DRY_RUN=1 builds it")


# ---- what the parts are

def test_every_test_on_a_gpu_is_in_one_part():
    tests = re.findall(r"^def (test_\w+)", (ROOT / gpu_report.TESTS).read_text(), re.M)
    assert sorted(name for names in gpu_report.OF_PART.values() for name in names) == sorted(tests)


def test_parts_are_in_the_order_that_finds_trouble_early(tmp_path):
    programs = Programs(ROOT / "train_gpt", ROOT / "build/gpu/bench_gpu", sys.executable, sys.executable)
    for is_dry in (False, True):
        parts = gpu_report.parts_of(programs, tmp_path, is_dry)
        assert [part.name for part in parts] == ORDER
        assert all(part.commands for part in parts)
    assert (tmp_path / "random_train_000000.bin").exists()


@pytest.mark.parametrize("name, words", [("NVIDIA H100 80GB HBM3", "--gpu h100"), ("NVIDIA H200", "--gpu h200"),
                                         ("NVIDIA A100-SXM4-80GB", "--gpu a100 "), ("NVIDIA A100-SXM4-40GB", "a100-40"),
                                         ("NVIDIA GeForce RTX 4090", "--check")])
def test_the_prediction_is_of_this_gpu(name, words):
    [command] = gpu_report.predictions(f"{name}, 580.95.05, 40960 MiB")
    assert words in " ".join(map(str, command)) + " "


# ---- verdicts

@pytest.mark.parametrize("code, seconds, verdict", [
    ("print('well')", 60, "passed"), ("raise SystemExit(3)", 60, "failed"),
    ("import time; time.sleep(60)", 1, "took too long")])
def test_a_command_s_verdict_is_what_happened(code, seconds, verdict):
    assert gpu_report.run([sys.executable, "-c", code], seconds).verdict == verdict


def test_a_program_that_is_not_there_has_failed():
    result = gpu_report.run(["/nowhere/program"], 5)
    assert (result.verdict, result.output) == ("failed", "/nowhere/program: No such file or directory")


def test_tests_that_are_all_skipped_have_not_passed():
    words = [sys.executable, "-m", "pytest", "x.py"]
    assert gpu_report.verdict_of(words, 0, "3 skipped in 0.1s") == "nothing ran"
    assert gpu_report.verdict_of(words, 0, "2 passed, 3 skipped in 0.1s") == "passed"
    assert gpu_report.verdict_of(words, 1, "1 failed, 2 passed in 0.1s") == "failed"


def test_nothing_follows_where_there_is_no_gpu(capsys):
    python = [sys.executable, "-c"]
    parts = [Part("versions", [[*python, "raise SystemExit('no driver')"]]), Part("kernels", [[*python, "pass"]])]
    gpu_report.run_all(parts, 60)
    assert [part.verdict for part in parts] == ["failed", "not tried"]
    assert "versions is needed by what follows: no driver" in capsys.readouterr().out


def test_a_part_that_fails_does_not_keep_the_next_from_running():
    python = [sys.executable, "-c"]
    parts = [Part("kernels", [[*python, "raise SystemExit(1)"]]), Part("model", [[*python, "pass"]])]
    gpu_report.run_all(parts, 60)
    assert [part.verdict for part in parts] == ["failed", "passed"]


def test_commands_of_a_part_share_its_time():
    sleep = [sys.executable, "-c", "import time; time.sleep(30)"]
    part = Part("speed", [sleep, sleep])
    gpu_report.run_part(part, 1)
    assert [one.verdict for one in part.results] == ["took too long"]


def test_what_a_late_command_has_started_is_killed_with_it(tmp_path):
    assert gpu_report.run(["sh", "-c", f"sleep 60 & echo $! >{tmp_path}/pid; wait"], 1).verdict == "took too long"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


# ---- the page

def test_the_page_has_a_row_a_part_and_the_ends_of_long_output():
    part = Part("kernels", [["test_kernels"]], [Result("failed", 2.4, "\n".join(f"line {i}." for i in range(200)))])
    text = gpu_report.page([part, Part("model", [["x"]])], is_dry=False)
    assert text.startswith("# The CUDA build on a GPU\n")
    assert "| kernels | failed | 2 |\n| model | not tried | 0 |" in text
    assert "line 0." in text and "line 199." in text and "line 100." not in text and "140 lines left out" in text


def test_a_user_s_mistake_is_one_line():
    needs("train_gpt", "bench_gpu")
    result = report("--dry-run", "--only", "speed", "coffee")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: there is no part coffee: give some of versions")


def test_what_is_not_built_is_said(tmp_path):
    if (ROOT / "train_gpt").exists():
        pytest.skip("train_gpt is built here")
    result = report("--out", tmp_path / "page.md")
    assert (result.returncode, result.stderr) == (2, "error: train_gpt is not built: make gpu-report builds it\n")


def test_a_short_dry_run_ends_in_a_page(tmp_path):
    needs("train_gpt", "bench_gpu")
    page = tmp_path / "page.md"
    result = report("--dry-run", "--only", "versions", "memory", "communicators", "--out", page)
    assert result.returncode == 0, result.stdout + (page.read_text() if page.exists() else result.stderr)
    text = page.read_text()
    assert text.startswith("# The CUDA build in the emulator: a dry run")
    assert len(re.findall(r"^\| (versions|memory|communicators) \| passed \| \d+ \|$", text, re.M)) == 3
    assert "--outer-transport nccl" in text and "--outer-transport tcp" in text


@pytest.mark.long
def test_a_dry_run_of_all_parts_ends_in_a_page(tmp_path):
    needs(*[path.name for path in BUILT])
    page = tmp_path / "page.md"
    result = report("--dry-run", "--out", page, seconds=3000)
    text = page.read_text() if page.exists() else result.stderr
    assert result.returncode == 0, result.stdout + text
    assert re.findall(r"^\| (\w+) \| passed \| \d+ \|$", text, re.M) == ORDER
    assert "PREDICTED" not in text and "published" in text  # of no GPU: llm.c's speeds
    assert len(text) < 65536  # what an issue takes
