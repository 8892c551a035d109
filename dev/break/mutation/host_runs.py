"""The trainer with all changes of its host side built in, run with one of them at a time."""
import sys
import tempfile
import threading

import numpy

from mutation.host import FILES, HEADER, read_sources, with_all_changes
from mutation.orders import CONFIGURATIONS, Seen, environment
from mutation.programs import ROOT, Failure, copy_sources, must, run
from mutation.report import Verdict

sys.path.insert(0, str(ROOT / "dev" / "test"))
from conftest import command, write_shard  # noqa: E402
from token_files import write_tokenizer  # noqa: E402

# (build, configuration, seed), in this order until a run notices the change.
RUNS = [("plain", name, 1) for name in CONFIGURATIONS] + [("thread", name, 1) for name in ("nccl", "tcp")]
# Thread sanitizer is slow, and one run is enough: unordered accesses are a race under every seed and in every process.
OPTIONS = {"plain": {},
           "thread": {"--workers": 1, "--outer-optimizer": "nesterov", "-x": 4, "-d": 32, "-m": 1, "-g": 1}}
# (CPU seconds of a process, clock seconds of a run). A process that waits that long for others hangs.
SECONDS = {"plain": (30, 100), "thread": (250, 600)}


class HostSide:
    """A private copy of the sources with all changes built in, compiled when it is first needed."""

    def __init__(self, folder, jobs, root=ROOT):
        self.folder, self.jobs = folder, jobs
        copy_sources(folder, root)
        files = sorted({path.relative_to(folder).as_posix() for pattern in FILES for path in folder.glob(pattern)})
        self.sources = read_sources(files, lambda file: (folder / file).read_text())
        self.changes = [change for source in self.sources for change in source.changes]
        self.tokens = folder / "tokens"
        self.calm, self.built, self.lock = {}, set(), threading.Lock()

    def some(self):
        return self.changes

    def number(self, change):
        return self.changes.index(change) + 1

    def try_change(self, change):
        for kind, name, seed in RUNS:
            self.need(kind)
            how = self.notices(kind, name, seed, self.number(change))
            if how:
                return Verdict(change, "killed", f"{kind}, {name}, seed {seed}: {how}")
        return Verdict(change, "survived")

    def need(self, kind):
        with self.lock:
            if not self.tokens.exists():
                self.write()
            if kind not in self.built:
                self.build(kind)
                self.built.add(kind)

    def write(self):
        for source in self.sources:
            (self.folder / source.file).write_text(with_all_changes(source, self.number))
        (self.folder / "mutated.h").write_text(HEADER)
        self.tokens.mkdir()
        stream = numpy.cumsum(numpy.random.default_rng(1).integers(1, 4, size=20000)) % 64
        write_shard(self.tokens / "x_train_000000.bin", stream[:18000])
        write_shard(self.tokens / "x_val_000000.bin", stream[18000:])
        write_tokenizer(self.tokens / "tokenizer.bin", 64)

    def build(self, kind):
        """Builds the program. Without a change it must give the same results in every order."""
        must(["make", f"-j{self.jobs}", f"build/{kind}/train_gpt", "OPTIMIZE=-O1",
              f"CXX=g++ -w -include {self.folder}/mutated.h"], self.folder)
        for name, seed in [(name, seed) for run_kind, name, seed in RUNS if run_kind == kind]:
            if (kind, name) not in self.calm:
                self.calm[kind, name] = self.run("plain", name, None, 0, OPTIONS[kind])[1]
            how = self.notices(kind, name, seed, 0)
            if how:
                raise Failure(f"build/{kind}/train_gpt, {name}, seed {seed}: {how} without a change")

    def notices(self, kind, name, seed, number):
        """How a run with change `number` (0: none) differs from the calm run; "" if it does not."""
        how, seen = self.run(kind, name, seed, number, OPTIONS[kind])
        return how or seen.difference(self.calm[kind, name])

    def run(self, kind, name, seed, number, options):
        """(how the run failed, what was seen of it).   seed None: every call is complete when it returns"""
        with tempfile.TemporaryDirectory(dir=self.folder) as output:
            cpu_seconds, clock_seconds = SECONDS[kind]
            words = {**CONFIGURATIONS[name], **options, "--timeout": clock_seconds}
            result = run(command(self.tokens, f"{output}/log", words, self.folder / f"build/{kind}/train_gpt"),
                         output, cpu_seconds, clock_seconds, self.environment(output, seed, number))
            if result.timed_out:
                return "no end", None
            for sign, how in (("ThreadSanitizer", "race"), ("emulator:", "emulator's report")):
                if sign in result.output:
                    return how, None
            return f"status {result.status}" if result.status else "", Seen.of(f"{output}/log", result.output)

    def environment(self, output, seed, number):
        known = self.folder / "dev/test/thread_sanitizer.supp"
        return {**environment(seed or 0, seed is not None), "MUTANT": str(number), "TMPDIR": output,
                "TSAN_OPTIONS": f"halt_on_error=1 suppressions={known}"}
