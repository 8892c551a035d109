"""Changes to kernels, one at a time, each compiled into the test programs of its file."""
import dataclasses
import pathlib
import queue
import re
import resource
import shlex
import subprocess
import threading

from mutation.programs import ROOT, Failure, copy_sources, must, run
from mutation.report import Verdict
from mutation.source import changed

# The changed files: all CUDA sources that have kernels or call libraries' kernels, but not the owners of streams,
# events and memory, and not communication between processes.
PATTERNS = ("llmc/cuda/*.cuh", "streaming/*.cuh")
UNCHANGED = {f"llmc/cuda/{name}.cuh" for name in ("buffer", "host_buffer", "stream", "gpu")}

# Kinds of changes that thread sanitizer may notice although the results are right.
ORDERED = {"barrier", "wait", "shuffle", "index", "boundary", "loop"}

# Headers that most tests include, compiled once. None of them is changed.
PRELUDE = """#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>
#include "dev/emulator/emulator.h"
"""


@dataclasses.dataclass
class Program:
    """One unchanged test program in one build: how it is built, and how long it runs."""
    compile: list
    link: list
    seconds: float      # CPU seconds of a run
    passed: bool


class Tree:
    """A private copy of the sources, and the unchanged programs built in it."""

    def __init__(self, folder, root=ROOT):
        self.folder = pathlib.Path(folder)
        copy_sources(self.folder, root)
        self.programs, self.built, self.lock = {}, set(), threading.Lock()

    def files(self):
        found = [path.relative_to(self.folder).as_posix() for pattern in PATTERNS for path in self.folder.glob(pattern)]
        return sorted(set(found) - UNCHANGED)

    def read(self, file):
        return (self.folder / file).read_text()

    def covering(self, file):
        """The test programs of a file: those named after it, test_NAME or test_NAME_*; if there are none, those that
        include it; if there are none, those of the files that include it."""
        tests = sorted((self.folder / "dev/test/kernels").glob("test_*.cpp"))
        stem = pathlib.Path(file).stem
        named = [test.stem for test in tests if re.fullmatch(rf"test_{stem}(_\w+)?", test.stem)]
        including = [test.stem for test in tests if f'#include "{file}"' in test.read_text()]
        if named or including:
            return named or including
        users = [user for user in self.files() if f'#include "{file}"' in self.read(user)]
        if not users:
            raise Failure(f"no test in dev/test/kernels is named after {file} or includes it")
        return sorted({test for user in users for test in self.covering(user)})

    def program(self, build, name):
        """The program, built and run once without a change; at most one at a time."""
        with self.lock:
            if (build, name) not in self.programs:
                self.programs[build, name] = self.make_program(build, name)
            return self.programs[build, name]

    def make_program(self, build, name):
        goal = f"build/{build}/{name}"
        dry = subprocess.run(["make", "-n", "-B", "--no-print-directory", "OPTIMIZE=-O1", goal], cwd=self.folder,
                             capture_output=True, text=True)
        if dry.returncode != 0:
            raise Failure(f"make {goal}: {dry.stderr.strip()}")
        own_compile = link = None
        for line in dry.stdout.splitlines():
            words = shlex.split(line)
            if f"{goal}.o" in words and "-c" in words:
                own_compile = words
            elif goal in words:
                link = words
            elif line not in self.built:
                must(words, self.folder)
                self.built.add(line)
        prelude = self.prelude(build, own_compile)
        own_compile = own_compile[:1] + ["-w", "-include", prelude] + own_compile[1:]
        must(own_compile, self.folder)
        must(link, self.folder)
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = run([self.folder / goal, *TEST_OPTIONS], self.folder, 300)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        return Program(own_compile, link, max(seconds, 0.1), result.status == 0)

    def prelude(self, build, compile_command):
        header = self.folder / "build" / build / "prelude.h"
        if not header.exists():
            header.write_text(PRELUDE)
            flags = compile_command[:compile_command.index("-c")]
            must(flags + ["-w", "-x", "c++-header", str(header), "-o", f"{header}.gch"], self.folder)
        return str(header)


# The first failure ends the program.
TEST_OPTIONS = ["--gtest_break_on_failure", "--gtest_fail_fast", "--gtest_brief=1"]


class Mutator:
    """Makes changes, each in a folder that comes before the sources on the include path."""

    def __init__(self, tree, jobs):
        self.tree, self.slots = tree, queue.Queue()
        for i in range(jobs):
            slot = tree.folder / f"slot{i}"
            slot.mkdir()
            self.slots.put(slot)

    def try_change(self, change):
        slot = self.slots.get()
        mutant = slot / change.file
        try:
            mutant.parent.mkdir(parents=True, exist_ok=True)
            mutant.write_text(changed(self.tree.read(change.file), change))
            return self.verdict(change, slot)
        finally:
            mutant.unlink()
            self.slots.put(slot)

    def verdict(self, change, slot):
        builds = ["plain", "fp32"] + (["thread"] if change.kind in ORDERED else []) + ["address"]
        for build in builds:
            for name in self.tree.covering(change.file):
                how = self.kill(build, name, slot)
                if how == "not compiled" and build == "plain":
                    return Verdict(change, how)
                if how and how != "not compiled":  # that only another build does not compile proves nothing
                    return Verdict(change, "killed", f"{build} {name}: {how}")
        return Verdict(change, "survived")

    def kill(self, build, name, slot):
        """How one program notices the change in the slot; "" if it does not."""
        program = self.tree.program(build, name)
        if not program.passed:
            raise Failure(f"build/{build}/{name} fails without a change")
        goal = f"build/{build}/{name}"
        moved = {f"{goal}.o": str(slot / "test.o"), goal: str(slot / "test")}
        for command in (program.compile[:1] + [f"-I{slot}"] + program.compile[1:], program.link):
            command = [moved.get(word, word) for word in command]
            made = subprocess.run(command, cwd=self.tree.folder, capture_output=True, text=True)
            if made.returncode == 0:
                continue
            if "-c" in command and "error:" in made.stderr and "fatal error:" not in made.stderr:
                return "not compiled"
            raise Failure(f"build/{build}/{name} cannot be built with a change: {made.stderr[-500:]}")
        result = run([slot / "test", *TEST_OPTIONS], self.tree.folder, 5 * program.seconds + 2)
        return how_it_ended(result)


def how_it_ended(result):
    if result.status == 0:
        return ""
    if result.timed_out:
        return "time"
    for sign, how in (("Sanitizer", "sanitizer"), ("runtime error:", "sanitizer"), ("in kernel", "emulator's report"),
                      ("Failure", "test")):
        if sign in result.output:
            return how
    return "crash"
