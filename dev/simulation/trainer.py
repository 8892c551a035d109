"""The time that this trainer's steps take over a slow link, call by call.

The link joins two processes or more, carries as much in either direction at a time, and does one collective
call after the other, in the order in which they are issued (a queue: first in, first out). A call between
processes that are in step takes

    half a round trip   the data are sent without being asked for
    bytes / rate        IP's and TCP's headers included
    and at its start    TCP opens its window from ten segments anew where the connection has been idle for as
                        long as its retransmission timer: a round trip for 10 segments, for 20, 40, ... until
                        the window is what the link holds in a round trip. Not with BBR for congestion control

Compute takes the same time in every step, and all processes are in step: only jittery_utilization() knows
what workers wait for each other because their steps differ. The program's own work on what it sends and
receives is in the time of a step.
"""
from dataclasses import dataclass

from simulation.steady import steady_seconds

IP_AND_TCP_HEADERS = 52  # bytes: IPv4, TCP and its time stamps
SEGMENTS_AT_FIRST = 10   # RFC 6928
SHORTEST_TIMER = 0.2     # seconds: Linux's least retransmission timer, on top of the round trip


@dataclass(frozen=True)
class Link:
    """Of a worker: what it sends and what it receives pass it side by side."""
    bits_per_second: float
    rtt_seconds: float = 0.0
    mtu: int = 1500
    slow_start_after_idle: bool = True  # Linux's net.ipv4.tcp_slow_start_after_idle
    store_bits_per_second: float = 0    # of the store's own link; 0: as the worker's

    @property
    def bytes_per_second(self):
        return self.bits_per_second / 8 * (self.mtu - IP_AND_TCP_HEADERS) / self.mtu


class Window:
    """TCP's congestion window in one direction: how many bytes may be under way."""

    def __init__(self, link, connections=1):
        self.link = link
        self.at_first = connections * SEGMENTS_AT_FIRST * (link.mtu - IP_AND_TCP_HEADERS)
        self.bytes, self.used_until = self.at_first, 0.0

    def send_seconds(self, start, count, bytes_per_second=None):
        """From the first byte's departure, at `start`, to the last one's.
        bytes_per_second: where it is not the link's"""
        rate, rtt = bytes_per_second or self.link.bytes_per_second, self.link.rtt_seconds
        if self.link.slow_start_after_idle and start - self.used_until > rtt + SHORTEST_TIMER:
            self.bytes = self.at_first
        seconds = 0.0
        while self.bytes < rate * rtt and count > self.bytes:
            seconds += rtt
            count -= self.bytes
            self.bytes *= 2
        seconds += count / rate
        self.used_until = start + rtt + seconds
        return seconds


class Calls:
    """The link's queue. Times are in seconds."""

    def __init__(self, link, peers=1):
        self.link, self.free, self.window = link, 0.0, Window(link, peers)

    def call(self, ready, count):
        """When a call of `count` bytes, issued at `ready`, is complete."""
        start = max(ready, self.free)
        self.free = start + self.link.rtt_seconds / 2 + self.window.send_seconds(start, count)
        return self.free

    def exchange(self, ready, counts):
        """When all calls of an exchange are complete, of which the first is issued at `ready`."""
        for count in counts:
            arrived = self.call(ready, count)
        return arrived


def streaming_utilization(step_seconds, inner_steps, overlap, exchanges, calls):
    """Share of the time that a worker computes. A fragment is sent after its step, and merged after the step that is
    `overlap` (tau) later: by then its exchange must have ended.
    exchanges: (offset, [bytes of each call]) by fragment."""
    active = sorted({(offset + after) % inner_steps for offset, _ in exchanges for after in (0, overlap)})
    now, last, arrivals = 0.0, 0, {}

    def simulate_period():
        nonlocal now, last
        begin = last - last % inner_steps
        for step in (begin + inner_steps + one for one in active):  # nothing happens in the others
            now += (step - last) * step_seconds
            last = step
            for offset, counts in exchanges:
                if step % inner_steps == offset:
                    arrivals[step + overlap] = calls.exchange(now, counts)
            now = max(now, arrivals.pop(step, now))
        return now, [calls.free, *arrivals.values()]

    return inner_steps * step_seconds / steady_seconds(simulate_period)


def jittery_utilization(step_times, inner_steps, overlap, exchanges, calls):
    """Mean share of the time that a worker computes, where steps take as long as they did in a run. An
    exchange begins when the last worker has come to it, and each waits for it where it is due.
    step_times: of each worker, its seconds in each step, from the first to the last and again; the rest is
    streaming_utilization()'s"""
    now, arrivals, begin, computed = [0.0] * len(step_times), {}, None, 0.0
    steps = len(step_times[0])
    periods = 1 + -(-steps // inner_steps)  # the first one is not counted
    for step in range(1, periods * inner_steps + 1):
        times = [of_worker[step % steps] for of_worker in step_times]
        now = [time + seconds for time, seconds in zip(now, times, strict=True)]
        for offset, counts in exchanges:
            if step % inner_steps == offset:
                arrivals[step + overlap] = calls.exchange(max(now), counts)
        arrived = arrivals.pop(step, 0.0)
        now = [max(time, arrived) for time in now]
        if step == inner_steps:
            begin = sum(now)
        elif begin is not None:
            computed += sum(times)
    return computed / (sum(now) - begin)


def data_parallel_utilization(step_seconds, blocks, layers, ranks, parameter_bytes, micro_steps, calls):
    """Share of the time that a rank computes. Gradients of a block, fp32, are reduced and scattered as soon
    as its backward is done, in the last micro-step; three scalars follow, for the norm; then the parameters
    are gathered, the embedding first, and the next forward waits for each block where it needs it. blocks:
    sizes, layers first. A third of a micro-step is forward."""
    forward = step_seconds / micro_steps / 3 / layers
    to_others = [(ranks - 1) * size // ranks for size in blocks]
    embedding = range(layers, len(blocks))
    now, gathered = 0.0, [0.0] * len(blocks)

    def simulate_step():
        nonlocal now
        for block in [*embedding, *range(layers)]:
            now = max(now, gathered[block]) + (forward if block < layers else 0)
        now += step_seconds * (micro_steps - 1) / micro_steps
        for block in [*reversed(range(layers)), *embedding]:
            now += 2 * forward if block < layers else 0
            reduced = calls.call(now, 4 * to_others[block])
        now = calls.call(reduced, 12 * (ranks - 1))
        for block in [*embedding, *range(layers)]:
            gathered[block] = calls.call(now, parameter_bytes * to_others[block])
        return now, gathered

    return step_seconds / steady_seconds(simulate_step)
