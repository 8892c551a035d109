"""CUDA kernels on the emulator: the same GoogleTest sources in three builds, one row a test and build."""

import json
import subprocess

import pytest

from conftest import ROOT

BUILDS = {"plain": "plain", "address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
PROGRAMS = sorted(path.stem for path in (ROOT / "dev" / "emulator").glob("test_*.cpp"))


def binary(build, program):
    return ROOT / "build" / build / program


def names(program):
    listed = subprocess.run([binary("plain", program), "--gtest_list_tests"], capture_output=True, text=True, check=True)
    suite, found = "", []
    for line in listed.stdout.splitlines():
        if not line.startswith(" "):
            suite = line.split("#")[0].rstrip()
        else:
            found.append(suite + line.split("#")[0].strip())
    return found


@pytest.fixture(scope="module", params=BUILDS)
def results(request, tmp_path_factory):
    """By program and test. A sanitizer's report that no test expects ends the program and fails all its rows."""
    found = {}
    for program in PROGRAMS:
        report = tmp_path_factory.mktemp(program) / "report.json"
        run = subprocess.run([binary(request.param, program), f"--gtest_output=json:{report}"], capture_output=True,
                             text=True, timeout=300, cwd=ROOT)
        suites = json.loads(report.read_text())["testsuites"] if report.exists() else []
        tests = [test for suite in suites for test in suite["testsuite"]]
        if not tests or (run.returncode != 0 and not any(test.get("failures") for test in tests)):
            pytest.fail(f"{program}, {BUILDS[request.param]}: status {run.returncode}\n"
                        f"{run.stdout[-4000:]}{run.stderr[-4000:]}")
        found.update({(program, f"{test['classname']}.{test['name']}"): test for test in tests})
    return found


@pytest.mark.parametrize("program,name", [(program, name) for program in PROGRAMS for name in names(program)])
def test_emulator(results, program, name):
    test = results[program, name]
    if test["result"] == "SKIPPED":
        pytest.skip("another build's")
    assert test["result"] == "COMPLETED" and not test.get("failures"), test.get("failures")
