"""Waits of workers for other workers: for which one, and whether the waiting worker could have continued.

A worker stands still when it has to merge a sync that is not decided yet. Time in which it could not have continued
anyway is left out: fewer than --min-workers were well, the store was gone, or the worker itself was hit or had just
come back. The rest has one of these causes.
"""
import bisect
from collections import deque
from dataclasses import dataclass, field

HIT = "for a worker hit, the first wait"  # this is the others' recovery, which has its own limit
AGAIN = "for a worker hit, later waits"
BACK = "for a worker that has come back"
SLOWER = "for a worker that is well"
STORE = "for no worker: store or decision"
CAUSES = (HIT, AGAIN, BACK, SLOWER, STORE)


class History:
    """States and the times when they began. Of a worker: "away" (dead, stopped, slowed down, cut off), "back" (but not
    counted yet), "well"; of the store: "away", "well"."""

    def __init__(self, state):
        self.times, self.states = [float("-inf")], [state]

    def note(self, state, when):
        """The state began at `when`, which may be before states that were noted earlier."""
        at = bisect.bisect_right(self.times, when)
        self.times.insert(at, when)
        self.states.insert(at, state)

    def at(self, when):
        return self.states[bisect.bisect_right(self.times, when) - 1]

    def changes(self, begin, end):
        return [when for when in self.times if begin < when < end]

    def was(self, state, begin, end):
        """Whether this was the state at any time between the two."""
        return state in (self.at(begin), *(self.at(when) for when in self.changes(begin, end)))

    def last(self, state, when):
        """When this state last began, up to `when`; or None."""
        return max((time for time, one in zip(self.times, self.states) if one == state and time <= when),
                   default=None)


class Progress:
    """When a worker completed its most recent steps."""

    def __init__(self):
        self.steps = deque(maxlen=1000)

    def note(self, step, when):
        self.steps.append((step, when))

    def since(self, step, after):
        """When the worker was first seen at this step or a later one; None if that was not after `after`."""
        when = min((when for done, when in self.steps if done >= step), default=None)
        return when if when is not None and when > after else None


@dataclass
class Wait:
    """cause: None if the worker could not have continued at any time   whom: the workers that it waited for"""
    cause: str
    seconds: float
    whom: list


@dataclass
class Costs:
    """The waits of one cause."""
    seconds: float = 0
    long: list = field(default_factory=list)  # each wait that is longer than a step

    def add(self, seconds, is_long):
        self.seconds += seconds
        self.long += [seconds] * is_long


class Waits:
    """histories, progress: by worker"""

    def __init__(self, workers, min_workers):
        self.min_workers = min_workers
        self.histories = [History("away") for _ in range(workers)]
        self.progress = [Progress() for _ in range(workers)]
        self.store = History("well")
        self.known = set()  # blows that have already made a worker wait

    def could_continue(self, worker, when):
        well = sum(history.at(when) == "well" for history in self.histories)
        return (self.histories[worker].at(when) == "well" and well >= self.min_workers
                and self.store.at(when) == "well")

    def weigh(self, worker, begin, end, send_step, contributors, missing):
        """The wait of a worker for a sync.   missing: the workers that the decider gave up on"""
        seconds = self.own_part(worker, begin, end)
        if seconds == 0:
            return Wait(None, 0, [])
        whom = (list(missing) or self.last_to_send(worker, begin, send_step, contributors)
                or self.given_up(worker, begin, end, contributors))
        return Wait(self.cause(worker, whom, begin, end), seconds, whom)

    def own_part(self, worker, begin, end):
        """The seconds of the wait in which the worker could have continued."""
        cuts = {begin, end}
        for history in (*self.histories, self.store):
            cuts.update(history.changes(begin, end))
        cuts = sorted(cuts)
        return sum(after - before for before, after in zip(cuts, cuts[1:])
                   if self.could_continue(worker, (before + after) / 2))

    def last_to_send(self, worker, begin, send_step, contributors):
        """The worker that reached the send step last, if this one was already waiting then."""
        sent = [(self.progress[other].since(send_step, begin), other) for other in contributors
                if other != worker]
        sent = [one for one in sent if one[0] is not None]
        return [max(sent)[1]] if sent else []

    def given_up(self, worker, begin, end, contributors):
        """Workers that were waited for until they were seen to be gone, or came back without a payload to send."""
        return [other for other in range(len(self.histories))
                if other not in contributors and self.blows(worker, [other], begin, end) - self.known]

    def blows(self, worker, whom, begin, end):
        """{(waiting worker, worker that it waits for, since when that worker has been away)}"""
        return {(worker, other, self.histories[other].last("away", end)) for other in whom
                if self.histories[other].was("away", begin, end)}

    def cause(self, worker, whom, begin, end):
        if blows := self.blows(worker, whom, begin, end):
            is_known = blows <= self.known
            self.known |= blows
            return AGAIN if is_known else HIT
        if self.store.was("away", begin, end):
            return HIT
        if any(self.histories[other].was("back", begin, end) for other in whom):
            return BACK
        return SLOWER if whom else STORE
