"""What befalls the workers of a run, drawn from a seed: blows, of which an event has one or two."""
from dataclasses import dataclass

GRACE, EXPIRY = 2, 5  # seconds: --grace, and after which a beat that does not change is a dead worker's
TIMEOUT = 8           # seconds: --timeout; a worker whose store is away for so long ends
OUTAGE = TIMEOUT / 2  # seconds: two that overlap are shorter than TIMEOUT


@dataclass
class Blow:
    """kind: a name in BLOWS   victims: workers   seconds: until it is undone   resume: by victim, -y 1"""
    kind: str
    victims: list
    seconds: float
    resume: list
    again: float = 0  # newcomer killed: seconds that it lives


@dataclass
class Event:
    """One blow, or two at once; then, when all are well again, a pause."""
    blows: list
    apart: float  # seconds between the two
    pause: float


LONG = EXPIRY + GRACE + TIMEOUT  # seconds: more than every time-out

# kind: how often it is drawn, how many are hit (0: all, -1: all but one), and for how many seconds
BLOWS = {
    "killed": (12, 1, (0, 6)),
    "one rank killed": (4, 1, (0, 4)),
    "killed, comes new": (5, 1, (0, 6)),
    "two newcomers": (3, 2, (0, 4)),
    "newcomer killed": (4, 1, (0, 2)),
    "all but one killed": (2, -1, (0, 6)),
    "all killed": (2, 0, (0, 3)),
    "stopped, shortly": (8, 1, (0.05, GRACE)),
    "stopped, for long": (5, 1, (LONG, LONG + 4)),
    "half speed": (3, 1, (3, 10)),
    "tenth of the speed": (3, 1, (3, 10)),
    "link cut": (4, 1, (0.2, OUTAGE)),
    "link reset": (2, 1, (0, 0)),
    "store killed": (3, 0, (0, OUTAGE)),
    "same worker twice": (2, 1, (0, 0)),
    "other options": (1, 1, (0, 0)),
    "wrong password": (1, 1, (0, 0)),
}
PAIRED = {"killed", "killed, comes new", "stopped, shortly", "stopped, for long", "link cut", "store killed"}
# Behind these the others' next sync is one without the victims, and the victims come back.
MISSED = {"killed", "one rank killed", "killed, comes new", "two newcomers", "newcomer killed",
          "stopped, for long"}


def kinds_but_for(impossible):
    return [kind for kind in BLOWS if kind not in impossible]


def draw_blow(draw, kinds, workers, spared=()):
    """spared: workers that another blow hits"""
    kind = draw.choices(kinds, [BLOWS[kind][0] for kind in kinds])[0]
    _, count, span = BLOWS[kind]
    there = [w for w in range(workers) if w not in spared]
    victims = draw.sample(there, count if count > 0 else len(there) + count)
    comes_new = kind in ("killed, comes new", "two newcomers", "newcomer killed")
    resume = [not comes_new and (kind == "all killed" or draw.random() < 0.8) for _ in victims]
    return Blow(kind, victims, draw.uniform(*span), resume, draw.uniform(0.05, 1.5))


def draw_event(draw, kinds, workers):
    blows = [draw_blow(draw, kinds, workers)]
    # Of two workers one must keep the run's state.
    if workers > 2 and blows[0].kind in PAIRED and draw.random() < 0.25:
        paired = [kind for kind in kinds if kind in PAIRED and kind != blows[0].kind]
        spared = blows[0].victims if BLOWS[blows[0].kind][1] == 1 else ()
        blows += [draw_blow(draw, paired, workers, spared)] if paired else []
    return Event(blows, draw.uniform(0, 2), draw.choice([0, draw.uniform(0, 1), draw.uniform(1, 4)]))
