"""The GoogleTest binary, one row a test, so that one line counts everything."""

import json
import subprocess

import pytest

from conftest import ROOT

BINARY = ROOT / "build" / "unit_tests"


def names():
    listed = subprocess.run([BINARY, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    suite, found = "", []
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()
        if not line.startswith(" "):
            suite = name
        else:
            found.append(suite + name.strip())
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    report = tmp_path_factory.mktemp("unit") / "report.json"
    run = subprocess.run(
        [BINARY, f"--gtest_output=json:{report}"], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    if not report.exists():
        pytest.fail(
            f"unit_tests ended with status {run.returncode}\n{run.stdout[-4000:]}{run.stderr[-4000:]}"
        )
    tests = [test for suite in json.loads(report.read_text())["testsuites"] for test in suite["testsuite"]]
    return {f"{test['classname']}.{test['name']}": test for test in tests}


@pytest.mark.parametrize("name", names())
def test_unit(results, name):
    test = results[name]
    if test["result"] == "SKIPPED":
        pytest.skip("skipped by GoogleTest")
    assert test["result"] == "COMPLETED" and not test.get("failures"), test.get("failures")
