"""Which H, fragment size, tau and format let a measured run keep its speed on a slow link.

Candidates are the run's own values and those that the paper tried, and H beyond them. Of all that reach the
target the best has, in this order: H and tau that the paper tried (100 and 5 at most); the smallest tau, for
a mean that arrives later is of an older model; the fewest options changed; the smallest H; the paper's 3
layers. Four bits are fp4_e2m1, this trainer's default.
"""
import itertools
from dataclasses import dataclass, replace

from simulation.measured import Measured, utilization

TARGET = 0.99
INNER_STEPS = (30, 100, 200, 300, 500, 1000)
OVERLAPS = (1, 2, 3, 4, 5, 7, 10)
FRAGMENT_LAYERS = (3, 1)
FOUR_BITS = "fp4_e2m1"
PAPERS_INNER_STEPS, PAPERS_OVERLAP, PAPERS_FRAGMENT_LAYERS = 100, 5, 3


@dataclass(frozen=True)
class Candidate:
    run: Measured
    utilization: float
    changes: int  # of options, from the run's

    @property
    def options(self):
        return (f"-H {self.run.inner_steps} --fragment-layers {self.run.fragment_layers} "
                f"--overlap {self.run.overlap} --outer-dtype {self.run.outer_dtype}"
                + self.store_options)

    @property
    def store_options(self):
        if self.run.outer_transport != "store":
            return ""
        kind = self.run.outer_exchange
        return " --outer-transport store" + f" --outer-exchange {kind}" * (kind != "auto")

    @property
    def is_beyond_paper(self):
        return self.run.inner_steps > PAPERS_INNER_STEPS or self.run.overlap > PAPERS_OVERLAP

    def preference(self):
        """The least is the best."""
        return (self.is_beyond_paper, self.run.overlap, self.changes, self.run.inner_steps,
                self.run.fragment_layers != PAPERS_FRAGMENT_LAYERS)

    def bytes_by_step(self):
        """{step of a period: bytes that a worker's link carries}"""
        sent = {}
        for offset, counts in self.run.exchanges():
            sent[offset] = sent.get(offset, 0) + self.run.carried(counts)
        return sent

    def store_bytes(self):
        """That the store's own link carries in H steps."""
        return sum(self.run.carried_by_store(counts) for _, counts in self.run.exchanges())

    def bits_per_second(self):
        """(on average, in the step that sends most)"""
        sent = self.bytes_by_step().values()
        seconds = self.run.step_seconds
        return 8 * sum(sent) / (self.run.inner_steps * seconds), 8 * max(sent) / seconds

    def in_flight(self):
        offsets = [offset for offset, _ in self.run.exchanges()]
        return max(sum((last - one) % self.run.inner_steps <= self.run.overlap for one in offsets)
                   for last in offsets)


def with_own(own, others):
    return sorted({own, *others})


def candidates(run, link):
    """The run as it is, and everything that it may be changed to."""
    tried = itertools.product(with_own(run.inner_steps, INNER_STEPS), with_own(run.overlap, OVERLAPS),
                              with_own(run.fragment_layers, FRAGMENT_LAYERS),
                              sorted({run.outer_dtype, FOUR_BITS}))
    for inner_steps, overlap, fragment_layers, dtype in tried:
        own = (run.inner_steps, run.overlap, run.fragment_layers, run.outer_dtype)
        changes = sum(a != b for a, b in zip(own, (inner_steps, overlap, fragment_layers, dtype)))
        changed = replace(run, inner_steps=inner_steps, overlap=overlap, fragment_layers=fragment_layers,
                          outer_dtype=dtype)
        is_possible = overlap < inner_steps and fragment_layers <= run.shape.layers
        if is_possible or changes == 0:
            yield Candidate(changed, utilization(changed, link), changes)


@dataclass
class Plan:
    own: Candidate
    best: Candidate      # of those that reach the target; if none does, the one that comes nearest
    others: list         # the best that reach it with each other tau
    reaches: bool


def make_plan(run, link):
    tried = sorted(candidates(run, link), key=Candidate.preference)
    own = next(one for one in tried if one.changes == 0)
    reaching = [one for one in tried if one.utilization >= TARGET]
    if not reaching:
        nearest = max(tried, key=lambda one: round(one.utilization, 3))
        return Plan(own, nearest, [], False)
    best = own if own.utilization >= TARGET else reaching[0]
    others, seen = [], {best.run.overlap}
    for one in reaching:  # the best with each other tau
        if one.run.overlap not in seen:
            others.append(one)
            seen.add(one.run.overlap)
    return Plan(own, best, others[:3], True)
