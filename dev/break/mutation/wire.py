"""The host's side of the wire: how an exchange assembles payloads, headers, means, sums and residuals. Each change is
compiled into the CPU's tests of exchanges and of their statistics, which run the same code.

The changes are those of kernels (boundaries, indices, loops, sizes) and the removal of each call and each assignment.
Statements that order streams belong to the part "host": these tests' streams need few of them.
"""
import queue
import shlex
import subprocess
import threading

from mutation.host import KINDS
from mutation.kernel_tests import TEST_OPTIONS, how_it_ended
from mutation.kernels import KernelSource, selection
from mutation.programs import ROOT, Failure, copy_sources, must, run
from mutation.report import Verdict
from mutation.source import changed

FILES = ("streaming/error_feedback.h", "streaming/all_to_all_exchange.h", "streaming/all_gather_exchange.h")
TESTS = ("unit/streaming/test_exchange", "unit/streaming/test_statistics")  # in this order until one notices
SELECTED = 60  # changes in a run without options
ORDERS = {*KINDS, "order", "wait_for", "let_end"}
SECONDS = 20, 60  # CPU seconds and clock seconds of a run; a test takes two

# Unchanged headers that the tests include, compiled once.
PRELUDE = """#include <gtest/gtest.h>
#include <cmath>
#include <map>
#include <numeric>
#include "dev/test/unit/local_comm.h"
#include "dev/test/random_values.h"
"""


class WireSource(KernelSource):
    """A file, and changes to its arithmetic, conditions, calls and assignments."""

    def visit(self, i):
        super().visit(i)
        token = self.tokens[i]
        if token.statement == i and token.kind == "name":
            self.visit_statement(i)

    def visit_statement(self, i):
        """Removes the statement if it is a call or an assignment, but not if it is a declaration."""
        end = next((j for j in range(i, len(self.tokens)) if self.text(j) == ";" and
                    self.tokens[j].within == self.tokens[i].within), None)
        if end is None:
            return
        equals = next((j for j in range(i, end) if self.text(j) in ("=", "+=", "-=") and
                       self.tokens[j].within == self.tokens[i].within), None)
        if equals is not None:
            if self.operand_before(equals - 1) == i:
                self.add("assignment", i, end - 1, "")
        elif self.text(end - 1) == ")" and self.operand_before(end - 1) == i and not self.orders(i, end):
            self.add("call", i, end - 1, "")

    def orders(self, i, end):
        """Whether the called function orders streams or waits."""
        return self.text(self.tokens[end - 1].partner - 1) in ORDERS


class Wire:
    """A private copy of the sources, and the tests built in it, one change at a time."""

    def __init__(self, folder, jobs, root=ROOT):
        self.folder = folder
        copy_sources(folder, root)
        self.changes = [change for file in FILES for change in WireSource(file, self.read(file)).changes]
        self.slots = queue.Queue()
        for i in range(jobs):
            self.slots.put(self.make_slot(i))
        self.flags, self.link = self.commands()
        self.ready, self.lock = False, threading.Lock()

    def some(self):
        return selection(self.changes, SELECTED)

    def read(self, file):
        return (self.folder / file).read_text()

    def make_slot(self, number):
        """A folder that comes before the sources on the include path. It has all of streaming/, whose headers include
        each other from their own folder."""
        slot = self.folder / f"slot{number}"
        (slot / "streaming").mkdir(parents=True)
        for path in (self.folder / "streaming").iterdir():
            (slot / "streaming" / path.name).symlink_to(path)
        return slot

    def commands(self):
        """The words with which make compiles a test from standard input, without its name, and links the unit tests."""
        dry = subprocess.run(["make", "-n", "-B", "--no-print-directory", "build/unit_tests"], cwd=self.folder,
                             capture_output=True, text=True)
        lines = [shlex.split(line) for line in dry.stdout.splitlines() if "build/" in line and " -o " in line]
        compiled = next((words for words in lines if "build/unit/streaming.o" in words and "|" in words), None)
        linked = next((words for words in lines if "-lgtest" in words), None)
        if not compiled or not linked:
            raise Failure(f"make build/unit_tests: {dry.stderr.strip() or 'unexpected commands'}")
        flags = [*compiled[compiled.index("|") + 1:compiled.index("-x")], "-w"]
        return flags, [word for word in linked if not word.endswith(".o")]

    def prepare(self, slot):
        """Once: builds the prelude and the unchanged tests, which must pass."""
        with self.lock:
            if not self.ready:
                self.build(slot)
                self.ready = True

    def build(self, slot):
        header = self.folder / "prelude.h"
        header.write_text(PRELUDE)
        must([*self.flags, "-x", "c++-header", header, "-o", f"{header}.gch"], self.folder)
        self.flags[1:1] = ["-include", str(header)]
        for test in TESTS:
            how = self.kill(test, slot)
            if how:
                raise Failure(f"{test} fails without a change: {how}")

    def try_change(self, change):
        slot = self.slots.get()
        try:
            self.prepare(slot)
            mutant = slot / change.file
            mutant.unlink()
            mutant.write_text(changed(self.read(change.file), change))
            verdict = self.verdict(change, slot)
            mutant.unlink()
            mutant.symlink_to(self.folder / change.file)
            return verdict
        finally:
            self.slots.put(slot)

    def verdict(self, change, slot):
        for test in TESTS:
            how = self.kill(test, slot)
            if how:
                return Verdict(change, how) if how == "not compiled" else Verdict(change, "killed", f"{test}: {how}")
        return Verdict(change, "survived")

    def kill(self, test, slot):
        """How a test notices the change in the slot; "" if it does not."""
        words = [self.flags[0], f"-I{slot}", *self.flags[1:], "-c", f"dev/test/{test}.cpp", "-o", slot / "test.o"]
        made = subprocess.run(words, cwd=self.folder, capture_output=True, text=True)
        if made.returncode != 0:
            if "error:" not in made.stderr or "fatal error:" in made.stderr:
                raise Failure(f"{test} cannot be built with a change: {made.stderr[-500:]}")
            return "not compiled"
        link = [slot / "test" if word == "build/unit_tests" else word for word in self.link]
        at = link.index("-o")
        must([*link[:at], slot / "test.o", *link[at:]], self.folder)
        return how_it_ended(run([slot / "test", *TEST_OPTIONS], self.folder, *SECONDS))
