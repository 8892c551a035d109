"""Waits of workers for others: for whom, and whether they could have gone on at all.

A worker stands still before it merges a sync that is not decided. What it could do nothing about, since fewer
than --min-workers were well, the store was gone, or it was itself the one that was hit or came back, is left
out. The rest has one of these causes.
"""
import bisect
from collections import deque
from dataclasses import dataclass, field

HIT = "for who was hit, the first time"  # it has recovered then: that has a limit of its own
AGAIN = "for who was hit, again"
BACK = "for who has come back"
SLOWER = "for one that is well"
STORE = "for nobody: the store, deciding"
CAUSES = (HIT, AGAIN, BACK, SLOWER, STORE)


class History:
    """What was so, and from when on. Of a worker: "away" (dead, stopped, slowed down, cut off), "back" (and
    not counted yet), "well"; of the store: "away", "well"."""

    def __init__(self, state):
        self.times, self.states = [float("-inf")], [state]

    def note(self, state, when):
        """It may be told of late."""
        at = bisect.bisect_right(self.times, when)
        self.times.insert(at, when)
        self.states.insert(at, state)

    def at(self, when):
        return self.states[bisect.bisect_right(self.times, when) - 1]

    def changes(self, begin, end):
        return [when for when in self.times if begin < when < end]

    def was(self, state, begin, end):
        """At any time between the two."""
        return state in (self.at(begin), *(self.at(when) for when in self.changes(begin, end)))

    def last(self, state, when):
        """When it became so, the last time before."""
        return max((time for time, one in zip(self.times, self.states) if one == state and time <= when),
                   default=None)


class Progress:
    """When a worker had done which step, of late."""

    def __init__(self):
        self.steps = deque(maxlen=1000)

    def note(self, step, when):
        self.steps.append((step, when))

    def since(self, step, after):
        """When it was first seen there, or further; if that was behind `after`."""
        when = min((when for done, when in self.steps if done >= step), default=None)
        return when if when is not None and when > after else None


@dataclass
class Wait:
    """cause: None where it could do nothing about any of it   whom: workers that it was for"""
    cause: str
    seconds: float
    whom: list


@dataclass
class Costs:
    """Of one cause."""
    seconds: float = 0
    long: list = field(default_factory=list)  # each that is longer than a step

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
        self.known = set()  # blows that have been waited for

    def could_go_on(self, worker, when):
        well = sum(history.at(when) == "well" for history in self.histories)
        return (self.histories[worker].at(when) == "well" and well >= self.min_workers
                and self.store.at(when) == "well")

    def weigh(self, worker, begin, end, send_step, contributors, missing):
        """The wait of a worker for a sync.   missing: those that the decider has waited for in vain"""
        seconds = self.own_part(worker, begin, end)
        if seconds == 0:
            return Wait(None, 0, [])
        whom = (list(missing) or self.last_to_send(worker, begin, send_step, contributors)
                or self.given_up(worker, begin, end, contributors))
        return Wait(self.cause(worker, whom, begin, end), seconds, whom)

    def own_part(self, worker, begin, end):
        """Of its seconds those in which it could have gone on."""
        cuts = {begin, end}
        for history in (*self.histories, self.store):
            cuts.update(history.changes(begin, end))
        cuts = sorted(cuts)
        return sum(after - before for before, after in zip(cuts, cuts[1:])
                   if self.could_go_on(worker, (before + after) / 2))

    def last_to_send(self, worker, begin, send_step, contributors):
        """Who reached the send step last, if that was when this one waited already."""
        sent = [(self.progress[other].since(send_step, begin), other) for other in contributors
                if other != worker]
        sent = [one for one in sent if one[0] is not None]
        return [max(sent)[1]] if sent else []

    def given_up(self, worker, begin, end, contributors):
        """Who was waited for, and then seen to be gone, or to come back without what it had to send."""
        return [other for other in range(len(self.histories))
                if other not in contributors and self.blows(worker, [other], begin, end) - self.known]

    def blows(self, worker, whom, begin, end):
        """{(who waits, for whom, since when that one is away)}"""
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
