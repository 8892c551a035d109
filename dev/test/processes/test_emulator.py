"""CUDA kernels on the emulator: the same GoogleTest sources in several builds, one row a test and build."""

import functools
import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import ROOT

BUILDS = {"plain": "plain", "address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread",
          "fp32": "-DENABLE_FP32"}
EMULATOR = sorted(path.stem for path in (ROOT / "dev" / "emulator").glob("test_*.cpp"))
KERNELS = sorted(path.stem for path in (ROOT / "dev" / "test" / "kernels").glob("test_*.cpp"))
PROGRAMS = [(build, program) for build in BUILDS for program in (KERNELS if build == "fp32" else EMULATOR + KERNELS)]


def binary(build, program):
    return ROOT / "build" / build / program


@functools.cache
def names(program):
    listed = subprocess.run([binary("plain", program), "--gtest_list_tests"], capture_output=True, text=True, check=True)
    suite, found = "", []
    for line in listed.stdout.splitlines():
        if not line.startswith(" "):
            suite = line.split("#")[0].rstrip()
        else:
            found.append(suite + line.split("#")[0].strip())
    return found


def run(build, program):
    """Results by test name, or what the program said if it ended without: a sanitizer's report that no test expects."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            done = subprocess.run([binary(build, program), f"--gtest_output=json:{report}"], capture_output=True,
                                  text=True, timeout=300, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        except subprocess.TimeoutExpired:
            return f"{program}, {BUILDS[build]}: no end after 300 s"
        suites = json.loads(report.read_text())["testsuites"] if report.exists() else []
    tests = {f"{test['classname']}.{test['name']}": test for suite in suites for test in suite["testsuite"]}
    if not tests or (done.returncode != 0 and not any(test.get("failures") for test in tests.values())):
        return (f"{program}, {BUILDS[build]}: status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return tests


def is_long(build):
    return build != "plain"


@pytest.fixture(scope="module")
def results(request):
    """Of all programs, as many at a time as there are cores: the first row waits for what it needs alone."""
    wanted = [place for place in PROGRAMS if request.config.getoption("--long") or not is_long(place[0])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {place: pool.submit(run, *place) for place in wanted}


@pytest.mark.parametrize("build,program,name", [
    pytest.param(build, program, name, marks=pytest.mark.long if is_long(build) else [])
    for build, program in PROGRAMS for name in names(program)])
def test_emulator(results, build, program, name):
    tests = results[build, program].result()
    if isinstance(tests, str):
        pytest.fail(tests)
    test = tests[name]
    if test["result"] == "SKIPPED":
        pytest.skip("another build's")
    assert test["result"] == "COMPLETED" and not test.get("failures"), test.get("failures")
