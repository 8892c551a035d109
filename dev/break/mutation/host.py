"""The trainer's host side: changes that each remove one statement that records an event, waits for one, orders two
streams, synchronizes or checks NCCL.

A build of the trainer takes minutes, so all changes are built into one program: each statement becomes
`if (mutated(7)) { the changed statement; } else { the statement; }`, and an environment variable chooses the number.
"""
from mutation.source import Source

FILES = ("train_gpt.cu", "streaming/**/*.h", "llmc/arithmetic.h", "llmc/rounding.h",
         "llmc/stream.h", "llmc/upload.h", "llmc/state.h", "llmc/checkpoint/training_state.h", "llmc/cuda/*.cuh",
         "llmc/run/*.cuh")

# Calls, by their kind. Functions that consist of nothing but such calls are found and added.
KINDS = {
    "record": "record", "stamp": "record", "cudaEventRecord": "record",
    "wait": "event-wait", "cudaStreamWaitEvent": "event-wait",
    "synchronize": "synchronize", "cudaStreamSynchronize": "synchronize", "cudaEventSynchronize": "synchronize",
    "cudaDeviceSynchronize": "synchronize", "wait_until_complete": "synchronize",
    "query": "poll", "cudaEventQuery": "poll", "cudaStreamQuery": "poll", "settle": "poll",
    "check": "check", "check_calls": "check",
}
# What these calls return when there is nothing to wait for.
DONE = {"query": "true", "cudaEventQuery": "cudaSuccess", "cudaStreamQuery": "cudaSuccess"}
NO_CALLS = {"if", "for", "while", "switch", "return", "catch"}
WRAPPER = "cudaCheck"
OPPOSITE = {"hand_over": "hand_back", "hand_back": "hand_over"}


class HostSource(Source):
    """A file, and changes to its statements that order work."""

    def __init__(self, file, source, orders=()):
        self.orders = set(orders)
        super().__init__(file, source)

    def may_change(self, i):
        token = self.tokens[i]
        return token.kind == "name" and token.function is not None and i > token.function.body and \
            self.text(i + 1) == "(" and not self.is_refusal(i)

    def is_refusal(self, i):
        """Whether token i stands in the condition of a throw: that checks for a mistake in the program."""
        for opener in self.enclosing(i):
            close = self.tokens[opener].partner
            if self.text(opener - 1) == "if" and "throw" in (self.text(close + 1), self.text(close + 2)):
                return True
        return False

    def visit(self, i):
        word = self.text(i)
        if word == "check" and self.text(i + 2) != ")" or word == "query" and self.text(i - 1) not in (".", "->"):
            return  # not the method of a communicator or of an event
        if "wait_until_complete" in [self.text(opener - 1) for opener in self.enclosing(i)]:
            return  # the query inside a wait: the wait itself is removed
        if word in KINDS:
            self.visit_call(KINDS[word], i)
        elif word in self.orders:
            self.visit_call("order", i)

    def visit_call(self, kind, i):
        first, last = self.operand_before(i), self.tokens[i + 1].partner
        if not self.is_statement(first, last) and self.text(first - 2) == WRAPPER and self.text(last + 1) == ")":
            first, last = first - 2, last + 1
        if self.is_statement(first, last):
            self.visit_statement(kind, i, first, last)
        elif self.text(i) in DONE:
            self.add(kind, first, last, DONE[self.text(i)])

    def is_statement(self, first, last):
        return self.text(first - 1) in ("{", "}", ";", ")", "else") and self.text(last + 1) == ";"

    def visit_statement(self, kind, i, first, last):
        word = self.text(i)
        if word == "settle":  # keeps the call whose end it waits for
            self.add(kind, first, last, self.arguments(i + 1)[0])
            return
        self.add(kind, first, last, "")
        if word in OPPOSITE:
            self.add(kind, i, i, OPPOSITE[word])
        elif word == "order":
            (before, after), rest = self.arguments(i + 1)[:2], self.arguments(i + 1)[2:]
            self.add(kind, first, last, f"order({', '.join([after, before, *rest])})")

    def calls(self):
        """The names of the functions that each function calls."""
        found = {}
        for i, token in enumerate(self.tokens):
            if token.function and i > token.function.body and token.kind == "name" and self.text(i + 1) == "(":
                found.setdefault(token.function.name, set()).add(token.text)
        return {name: words - NO_CALLS for name, words in found.items()}


def read_sources(files, read):
    """The sources of the files that have changes."""
    orders = set()
    while True:
        sources = [HostSource(file, read(file), orders) for file in files]
        found = {name for source in sources for name, words in source.calls().items()
                 if words and words <= KINDS.keys() | orders | {WRAPPER} and name not in KINDS}
        if found == orders:
            return [source for source in sources if source.changes]
        orders = found


def with_all_changes(source, number):
    """The text of a source with all changes built in. number(change): the number, from 1, that chooses it"""
    text, at = [], 0
    for begin, end, changes in by_place(source):
        was = source.source[begin:end]
        text.append(source.source[at:begin])
        if changes[0].text not in DONE.values():
            for change in changes:
                text.append(f"if (mutated({number(change)})) {{ {replaced(change, begin, was)}; }} else ")
            text.append(f"{{ {was}; }}")
        else:
            text.append(f"(mutated({number(changes[0])}) ? {changes[0].text} : {was})")
        at = end
    return "".join(text) + source.source[at:]


def by_place(source):
    """[(begin, end, changes within)], where nested changes share the outermost place."""
    places = []
    for change in sorted(source.changes, key=lambda change: (change.begin, -change.end)):
        if places and change.begin < places[-1][1]:
            places[-1][2].append(change)
        else:
            places.append((change.begin, change.end, [change]))
    return places


def replaced(change, begin, was):
    return was[:change.begin - begin] + change.text + was[change.end - begin:]


# A header that all sources of the changed program include.
HEADER = """#pragma once
#include <cstdlib>
inline const int chosen_mutant = getenv("MUTANT") ? atoi(getenv("MUTANT")) : 0;
inline bool mutated(int number) { return number == chosen_mutant; }
"""
