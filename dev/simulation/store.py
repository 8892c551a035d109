"""The time that an exchange through a store takes (--outer-transport store; streaming/sync_log.h): a worker
writes its payload, settles with the others who is counted, and reads what the others have written.

    bytes          all workers do the same at the same time, so each has its share of the store's own link
    round trips    ROUND_TRIPS for who is the last to send, and decides. The others look for what is decided
                   once in a round trip, at instants that have nothing to do with it: the unluckiest of M - 1
                   finds it (M - 1) / M of a round trip after it is there, and next time is the last to send
    TCP            opens its window in either direction, as in trainer.py
    one worker     does all this for one fragment after the other, in the order in which they are sent

Nobody is late. What the store itself takes for its work (a disk that is written to, a busy server) is not in
here, nor is a worker's own work on its requests.
"""
from dataclasses import replace

from simulation.payloads import payload_bytes
from simulation.trainer import Window

# What waits for the answer to the one before: the payload, with its line and a look at the others' lines; the
# decision; the others' payloads.
ROUND_TRIPS = 3


def store_bytes(format, values, workers):
    """[bytes that a worker writes in a sync, bytes that it reads]"""
    payload = payload_bytes(format, values)
    return [payload, (workers - 1) * payload]


class StoreCalls:
    """A worker's requests, a queue. Times are in seconds."""

    def __init__(self, link, workers, connections=1):
        """connections: of a worker, one for each of its ranks that share its link"""
        store = (link.store_bits_per_second or link.bits_per_second) / workers
        self.link = replace(link, bits_per_second=min(link.bits_per_second, store))
        self.trips_seconds = (ROUND_TRIPS + (workers - 1) / workers) * link.rtt_seconds
        self.free = 0.0
        self.written, self.read = Window(self.link, connections), Window(self.link, connections)

    def exchange(self, ready, counts):
        """When a sync of [bytes written, bytes read] is through that is sent at `ready`."""
        written, read = counts
        start = max(ready, self.free)
        last_trip = self.link.rtt_seconds
        reads_from = start + self.written.send_seconds(start, written) + self.trips_seconds - last_trip
        self.free = reads_from + last_trip + self.read.send_seconds(reads_from, read)
        return self.free
