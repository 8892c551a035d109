"""The time that an exchange through a store takes (--outer-transport store; streaming/elastic/sync_log.h): a worker
writes its payload, agrees with the others on the workers that count, and reads their payloads. With P bytes per payload
and M workers that is M (M - 1) P over the store's link.

    bytes          workers that do the same at the same time have each its share of the store's own link
    round trips    ROUND_TRIPS: Redis decides when the last payload arrives, and sends it to all waiting workers
    TCP            opens its window in either direction, as in trainer.py
    one worker     does all this for one fragment after the other, in the order in which they are sent

Nobody is late. Neither the store's own work (a disk that is written to, a busy server) nor a worker's work on its
requests is in here.
"""
from dataclasses import replace

from metrics import UserError
from simulation.payloads import payload_bytes
from simulation.trainer import Window

# The payload, with its line and the question to decide; the others' payloads (streaming/elastic/README.md).
ROUND_TRIPS = 1


# ------------------------------------------------------------------------------------------------------ bytes

def check_store_exchange(kind):
    if kind == "all_to_all":
        raise UserError("--outer-exchange all_to_all is for workers in lock-step: with --outer-transport "
                        "store give auto or all_gather")


def store_bytes(format, values, workers):
    """[bytes that a worker writes in a sync, bytes that it reads]"""
    payload = payload_bytes(format, values)
    return [payload, (workers - 1) * payload]


def worker_link_bytes(counts):
    """Bytes that pass a worker's link in a sync, in the direction that has more."""
    return max(counts)


def store_link_bytes(counts, workers):
    """Bytes that pass the store's own link in a sync, in the direction that has more."""
    return workers * max(counts)


# ------------------------------------------------------------------------------------------------------- time

class StoreCalls:
    """A worker's requests, a queue. Times are in seconds."""

    def __init__(self, link, workers, connections=1):
        """connections: of a worker, one for each of its ranks that share its link"""
        self.link, self.workers = link, workers
        self.free = 0.0
        self.written, self.read = Window(link, connections), Window(link, connections)

    def rate(self, at_once):
        """Bytes a second of each of `at_once` workers that write, or read, at the same time."""
        store = (self.link.store_bits_per_second or self.link.bits_per_second) / at_once
        return replace(self.link, bits_per_second=min(self.link.bits_per_second, store)).bytes_per_second

    def exchange(self, ready, counts):
        """When a sync of these bytes (store_bytes()), sent at `ready`, is complete."""
        payload, read = counts
        start = max(ready, self.free)
        rtt, rate = self.link.rtt_seconds, self.rate(self.workers)
        written = start + self.written.send_seconds(start, payload, rate)
        reads_from = written + (ROUND_TRIPS - 1) * rtt
        self.free = reads_from + rtt + self.read.send_seconds(reads_from, read, rate)
        return self.free
