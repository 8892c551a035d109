"""The tests of build/unit_tests (GoogleTest), one row each, so that pytest's last line counts them too."""

import functools

import pytest

from conftest import ROOT
from google_tests import names, outcomes

BINARY = ROOT / "build" / "unit_tests"


@functools.cache
def results(suite, seeds):
    return outcomes([BINARY, f"--gtest_filter={suite}*"], seconds=600, SEEDS=str(seeds))


def rows():
    """A suite is one run of the program; with pytest-xdist, suites run beside each other."""
    found = [(name[: name.index(".") + 1], name) for name in names(BINARY)]
    return [pytest.param(suite, name, id=name, marks=pytest.mark.xdist_group(f"unit {suite}"))
            for suite, name in found]


@pytest.mark.parametrize("suite, name", list(rows()))
def test_unit(suite, name, request):
    tests = results(suite, seeds=10000 if request.config.getoption("--long") else 2000)
    if isinstance(tests, str):
        pytest.fail(tests)
    if tests[name]["result"] == "SKIPPED":
        pytest.skip("skipped by GoogleTest")
    assert tests[name]["result"] == "COMPLETED" and not tests[name].get("failures"), tests[name].get("failures")
