"""CUDA kernels on the emulator: the same GoogleTest sources in several builds, one row a test and build. Long tests
run the builds with sanitizers instead of the plain ones."""

import functools

import pytest

from conftest import ROOT
from google_tests import names, outcomes

BUILDS = {"plain": "plain", "address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread",
          "fp32": "-DENABLE_FP32"}
EMULATOR = sorted(path.stem for path in (ROOT / "dev" / "emulator").glob("test_*.cpp"))
KERNELS = sorted(path.stem for path in (ROOT / "dev" / "test" / "kernels").glob("test_*.cpp"))
PROGRAMS = [(build, program) for build in BUILDS for program in (KERNELS if build == "fp32" else EMULATOR + KERNELS)]

names = functools.cache(names)


def binary(build, program):
    return ROOT / "build" / build / program


@functools.cache
def results(build, program):
    found = outcomes([binary(build, program)], seconds=300, OMP_NUM_THREADS="1")
    return f"{BUILDS[build]}: {found}" if isinstance(found, str) else found


def rows():
    """A program is run once; with pytest-xdist, programs run beside each other."""
    for build, program in PROGRAMS:
        built = [path for path in (binary(one, program) for one in BUILDS) if path.exists()]
        newest = max(built, key=lambda path: path.stat().st_mtime, default=binary(build, program))
        marks = [pytest.mark.xdist_group(f"{build} {program}"),
                 pytest.mark.short if build == "plain" else pytest.mark.long]
        yield from (pytest.param(build, program, name, marks=marks) for name in names(newest))


@pytest.mark.parametrize("build,program,name", list(rows()))
def test_emulator(build, program, name):
    tests = results(build, program)
    if isinstance(tests, str):
        pytest.fail(tests)
    test = tests[name]
    if test["result"] == "SKIPPED":
        pytest.skip("another build's")
    assert test["result"] == "COMPLETED" and not test.get("failures"), test.get("failures")
