"""The time that an exchange through a store takes (--outer-transport store; streaming/elastic/sync_log.h): a worker
writes its payload, settles with the others who is counted, and reads what the others have written. With P
bytes a payload and M workers:

    all_gather   everyone writes P and reads what all others wrote: M (M - 1) P over the store's link
    merged       everyone writes P; who decides reads what the others wrote and writes the mean, which they
                 read: 2 (M - 1) P. It takes more steps, one after the other: less time where the store's link
                 is what is slow, else more. Means are rounded once more

    bytes          workers that do the same at the same time have each its share of the store's own link
    round trips    ROUND_TRIPS for who is the last to send, and decides. The others look for what is decided
                   once in a round trip, at instants that have nothing to do with it: the unluckiest of M - 1
                   finds it (M - 1) / M of a round trip after it is there, and next time is the last to send.
                   Where means are merged it is the mean that they look for, and there are two more: who
                   decides writes it, and they read it
    TCP            opens its window in either direction, as in trainer.py
    one worker     does all this for one fragment after the other, in the order in which they are sent. Of ranks
                   that share a worker's link all decide, or none

Nobody is late. What the store itself takes for its work (a disk that is written to, a busy server) is not in
here, nor is a worker's own work on its requests; but the mean that all others wait for is, a thread's work.
"""
from dataclasses import replace

from metrics import UserError
from simulation.payloads import BITS, mean_bytes, payload_bytes, sums_of_products
from simulation.trainer import Window

# What waits for the answer to the one before: the payload, with its line and a look at the others' lines; the
# decision; the others' payloads.
ROUND_TRIPS = 3
# By --outer-exchange auto (streaming/elastic/merged_mean.h): the store sends 8 payloads in place of 20.
MERGED_FROM_WORKERS = 5
MERGED_FROM_BYTES = 2 << 20  # of a payload

# Of a thread's time for each value of a mean: to decode and add a payload's, to add a product of two of them
# (statistics), to encode. cpu::dequantize_mean, sum_rows and quantize in four bits, 524,288 values of 3 to 16
# workers on one core of an AMD EPYC virtual machine, November 2026: within 15% of these.
DECODE_SECONDS, PRODUCT_SECONDS, ENCODE_SECONDS = 0.25e-9, 0.45e-9, 0.7e-9


# ------------------------------------------------------------------------------------------------------ bytes

def choose_store_exchange(kind, format, values, workers, error_feedback=False):
    """Of a fragment. auto merges where that is far fewer bytes; never with error feedback, which the rounding
    of means has none of."""
    if kind == "all_to_all":
        raise UserError("--outer-exchange all_to_all is for workers in lock-step: with --outer-transport "
                        "store give auto, all_gather or merged")
    if kind != "auto":
        return kind
    is_large = workers >= MERGED_FROM_WORKERS and payload_bytes(format, values) >= MERGED_FROM_BYTES
    return "merged" if is_large and not error_feedback else "all_gather"


def store_bytes(kind, format, values, workers):
    """[bytes that a worker writes in a sync, bytes that it reads]; merged: [of a payload, of those that who
    decides reads, of the mean that it writes and each of the others reads]"""
    payload = payload_bytes(format, values)
    mean = [mean_bytes(format, values, workers)] if kind == "merged" else []
    return [payload, (workers - 1) * payload, *mean]


def worker_link_bytes(counts):
    """That pass a worker's link in a sync, in the direction that has more; merged: of who decides."""
    payload, read, *mean = counts
    return max(payload + sum(mean), read)


def store_link_bytes(counts, workers):
    """That pass the store's own link in a sync, in the direction that has more."""
    payload, read, *mean = counts
    if not mean:
        return workers * max(payload, read)
    return max(workers * payload + mean[0], read + (workers - 1) * mean[0])


# ------------------------------------------------------------------------------------------------------- time

def mean_seconds_a_byte(format, workers):
    """That the mean of so many workers takes a thread, by the bytes of its payload."""
    a_value = (DECODE_SECONDS * workers + PRODUCT_SECONDS * sums_of_products(workers) + ENCODE_SECONDS)
    return a_value * 8 / BITS[format]


class StoreCalls:
    """A worker's requests, a queue. Times are in seconds."""

    def __init__(self, link, workers, connections=1, seconds_a_byte=0.0):
        """connections: of a worker, one for each of its ranks that share its link
        seconds_a_byte: to compute a mean (mean_seconds_a_byte()), which the ranks do side by side"""
        self.link, self.workers, self.seconds_a_byte = link, workers, seconds_a_byte / connections
        self.found_after = (workers - 1) / workers  # round trips
        self.free = 0.0
        self.written, self.read = Window(link, connections), Window(link, connections)
        self.read_mean = Window(link, connections)  # by the others

    def rate(self, at_once):
        """Bytes a second of each of `at_once` workers that write, or read, at the same time."""
        store = (self.link.store_bits_per_second or self.link.bits_per_second) / at_once
        return replace(self.link, bits_per_second=min(self.link.bits_per_second, store)).bytes_per_second

    def exchange(self, ready, counts):
        """When a sync of these bytes (store_bytes()) is through that is sent at `ready`."""
        payload, *rest = counts
        start = max(ready, self.free)
        written = start + self.written.send_seconds(start, payload, self.rate(self.workers))
        self.free = self.gathered(written, *rest) if len(rest) == 1 else self.merged(written, *rest)
        return self.free

    def gathered(self, written, read):
        rtt, rate = self.link.rtt_seconds, self.rate(self.workers)
        reads_from = written + (ROUND_TRIPS + self.found_after) * rtt - rtt
        return reads_from + rtt + self.read.send_seconds(reads_from, read, rate)

    def merged(self, written, read, mean):
        """Who decides reads and writes alone; then all others read."""
        rtt, alone = self.link.rtt_seconds, self.rate(1)
        reads_from = written + (ROUND_TRIPS - 1) * rtt
        writes_from = (reads_from + rtt + self.read.send_seconds(reads_from, read, alone)
                       + mean * self.seconds_a_byte)
        stored = writes_from + rtt + self.written.send_seconds(writes_from, mean, alone)
        found = stored + self.found_after * rtt
        return found + rtt + self.read_mean.send_seconds(found, mean, self.rate(max(self.workers - 1, 1)))
