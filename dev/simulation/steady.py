"""Runs a simulation until it repeats itself."""
import numpy as np

MOST_PERIODS = 100


def is_same(state, before):
    return len(state) == len(before) and np.allclose(state, before, rtol=1e-9, atol=1e-12)


def steady_seconds(simulate_period):
    """Seconds of a period once it repeats itself; the mean of the second half of 100 periods where none is
    like the one before. simulate_period() returns the time at its end and, as a list, when all that is then
    under way will be through."""
    ends, before = [], None
    while len(ends) < MOST_PERIODS:
        end, under_way = simulate_period()
        ends.append(end)
        state = [np.maximum(time - end, 0) for time in under_way]  # what is through does not matter
        if before is not None and is_same(state, before):
            return ends[-1] - ends[-2]
        before = state
    return (ends[-1] - ends[MOST_PERIODS // 2 - 1]) / (MOST_PERIODS // 2)
