"""Tokenizes documents in several processes, in order, and reports progress.

Processes are spawned, since a process that is forked beside threads may hang. They leave when the process
that started them is gone, however it ended.
"""
import collections
import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool

from corpus import UserError, np


class Process:
    """State of one process between calls."""
    tokenizer = None


def start_process(tokenizer):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends the others
    threading.Thread(target=leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer.threads = 1
    Process.tokenizer = tokenizer


def leave_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def tokenize(texts):
    """The tokens of documents, each after an end-of-text token, and the number of tokens of each."""
    tokenizer = Process.tokenizer
    encoded = tokenizer.encode([whole_characters(text or "") for text in texts])
    lengths = np.array([1 + len(tokens) for tokens in encoded], np.int64)
    tokens = np.empty(lengths.sum(), np.uint16)
    at = 0
    for document, length in zip(encoded, lengths):
        tokens[at] = tokenizer.end_of_text
        tokens[at + 1:at + length] = document
        at += length
    return tokens, lengths


def whole_characters(text):
    """The text with U+FFFD in place of lone surrogates, which UTF-8 cannot represent."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Processes:
    """A context in which in_order() spreads its work over `count` processes that have the tokenizer."""

    def __init__(self, count, tokenizer):
        self.count, self.tokenizer = count, tokenizer

    def __enter__(self):
        self.pool = concurrent.futures.ProcessPoolExecutor(self.count, multiprocessing.get_context("spawn"),
                                                           start_process, (self.tokenizer,))
        return self

    def __exit__(self, *_):
        self.pool.shutdown(wait=True, cancel_futures=True)

    def in_order(self, function, items):
        """(label, function(argument)) for all (label, argument) of `items`, in order. Takes as many items in
        advance as keep the processes busy. A None item means that the next one will take a while.
        """
        ahead = collections.deque()
        try:
            for item in items:
                if item is not None:
                    ahead.append((item[0], self.pool.submit(function, item[1])))
                if len(ahead) > (2 * self.count if item is not None else 0):
                    yield first_of(ahead)
            while ahead:
                yield first_of(ahead)
        except BrokenProcessPool as error:
            raise UserError("a tokenizing process could not start or was killed, perhaps for lack of "
                            "memory: start again, with fewer --processes") from error


def first_of(ahead):
    label, future = ahead.popleft()
    return label, future.result()


class Progress:
    """One line of progress: live on a terminal, from time to time in a file."""

    def __init__(self, stream=None, clock=time.monotonic):
        self.stream, self.clock = stream or sys.stderr, clock
        self.live = self.stream.isatty()
        self.every = 0.2 if self.live else 30
        self.shown = clock()
        self.fractions = collections.deque(maxlen=600)  # (time, share of the work), the most recent ones

    def show(self, share, *parts):
        """share: the part of the work that is done, 0 to 1."""
        now = self.clock()
        if self.fractions and now - self.shown < self.every:
            return
        self.fractions.append((now, share))
        if len(self.fractions) == 1 and not self.live:
            return  # the remaining time is known from the second call on
        self.shown = now
        line = ", ".join([f"{100 * share:.1f}%", *parts, self.left()])
        print(f"\r\033[K{line}" if self.live else line, end="" if self.live else "\n", file=self.stream,
              flush=True)

    def left(self):
        """The remaining time, at the recent speed."""
        (begin, first), (end, last) = self.fractions[0], self.fractions[-1]
        if last <= first:
            return "time left: not known yet"
        return duration((1 - last) * (end - begin) / (last - first)) + " left"

    def clear(self):
        if self.live:
            print(end="\r\033[K", file=self.stream, flush=True)


def duration(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def size(count):
    """A number of bytes in words."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.{1 if count < 100 and units[0] != 'B' else 0}f} {units[0]}"


def add_process_options(parser):
    parser.add_argument("--processes", type=process_count, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="tokenizing processes (one for each CPU)")


def process_count(text):
    if text.isdecimal() and 1 <= int(text) <= 1024:
        return int(text)
    raise UserError(f"{text} is not a number of processes: give 1 to 1024")
