#!/usr/bin/env python3
"""Breaks the CUDA trainer on purpose, one change at a time, and lists what the tests do not notice.

    dev/break/mutate.py                     host, wire, and some of the kernels' changes: each kind in each function
    dev/break/mutate.py --all               every change
    dev/break/mutate.py --part host         one part alone: host, wire or kernels
    dev/break/mutate.py --only FILE         changes of one file; with --all all of them
    dev/break/mutate.py --id ID             one change: FILE:LINE:KIND:N
    dev/break/mutate.py --list, --show ID   what would be changed, without a run

Changes are made in a private copy of the sources. A kernel is changed and compiled into the test programs of its file;
it is killed if a test fails, if the emulator or a sanitizer reports an error, or if the program crashes or exceeds its
time. Changes that do not compile are not counted. Survivors of the plain build are tried in the builds of `make test`
that may notice more: fp32, thread sanitizer, address sanitizer.

The host side's changes each remove an event's record, a wait or a poll. All are built into one emulated trainer, and
one is chosen when it runs. It is killed if a run hangs, or ends with another status, model, loss or hash than without
the change. Survivors are tried in the build for thread sanitizer, which knows only the orders that CUDA guarantees.

The wire's changes are to the host's code of exchanges and error feedback. Each is compiled into the CPU's tests of
exchanges.

dev/break/mutants.md explains why known survivors change nothing; they still count as survivors. The status is 1 if
less than 97% are killed, if a survivor is not explained there, or if an explanation there is out of date.
"""
import argparse
import concurrent.futures
import pathlib
import sys
import tempfile
import time

from mutation.host_runs import HostSide
from mutation.kernel_tests import Mutator, Tree
from mutation.kernels import KernelSource, selection
from mutation.programs import Failure
from mutation.report import SURVIVORS, difference, read_explanations, report
from mutation.wire import Wire

SELECTED = 320  # kernels' changes in a run without options; more if each kind in each function needs more


class Kernels:
    """The kernels' changes, and how to try one."""

    def __init__(self, folder, jobs):
        tree = Tree(folder)
        self.changes = [change for file in tree.files() for change in KernelSource(file, tree.read(file)).changes]
        self.try_change = Mutator(tree, jobs).try_change

    def some(self):
        return selection(self.changes, SELECTED)


PARTS = {"host": HostSide, "wire": Wire, "kernels": Kernels}


def mutate(part, changes, jobs, verbose):
    """Returns verdicts in the order of the changes. Prints each survivor's at once."""
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        verdicts = []
        try:
            for i, verdict in enumerate(pool.map(part.try_change, changes), 1):
                verdicts.append(verdict)
                if verbose or verdict.outcome == "survived":
                    print(f"[{i}/{len(changes)}, {time.monotonic() - began:.0f} s] {verdict.change.id}: "
                          f"{verdict.outcome} {verdict.by}\n{difference(verdict.change)}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print(f"\n{len(changes)} changes in {time.monotonic() - began:.0f} s, {jobs} at a time", flush=True)
    return verdicts


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--all", action="store_true", help="every change")
    parser.add_argument("--part", choices=PARTS, help="changes of this part alone")
    parser.add_argument("--only", metavar="FILE", action="append", help="changes of this file alone")
    parser.add_argument("--id", metavar="ID", action="append", help="this change alone")
    parser.add_argument("--list", action="store_true", help="list the changes, without a run")
    parser.add_argument("--show", metavar="ID", help="show one change, without a run")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time (default 2)")
    parser.add_argument("--verbose", action="store_true", help="print each verdict")
    return parser.parse_args()


def chosen(arguments, parts):
    """The requested changes of each part."""
    changes = [change for part in parts for change in part.changes]
    named = set(arguments.id or []) | {arguments.show} - {None}
    unknown = named - {change.id for change in changes}
    if unknown:
        raise Failure(f"there is no change {', '.join(sorted(unknown))}: --list shows them")
    files = set(arguments.only or [])
    unknown = files - {change.file for change in changes}
    if unknown:
        raise Failure(f"nothing is changed in {', '.join(sorted(unknown))}")

    def of(part):
        if named:
            return [change for change in part.changes if change.id in named]
        some = part.changes if arguments.all else part.some()
        return [change for change in some if not files or change.file in files]
    return [of(part) for part in parts]


def work(arguments, folder):
    """Returns the program's exit status."""
    parts = []
    for name in [arguments.part] if arguments.part else PARTS:
        (folder / name).mkdir()
        parts.append(PARTS[name](folder / name, arguments.jobs))
    some = chosen(arguments, parts)
    if arguments.list or arguments.show:
        for change in sum(some, []):
            print(f"{change.id} in {change.function}\n{difference(change)}")
        return 0
    verdicts = []
    for part, changes in zip(parts, some):
        if changes:
            verdicts += mutate(part, changes, arguments.jobs, arguments.verbose)
    all_changes = [change for part in parts for change in part.changes]
    explanations = read_explanations(SURVIVORS.read_text())
    if arguments.part:  # the other parts' changes were not read
        explanations = [entry for entry in explanations if any(entry.is_of(change) for change in all_changes)]
    return 0 if report(verdicts, explanations, all_changes) else 1


def main():
    arguments = options()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        try:
            return work(arguments, pathlib.Path(folder))
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
