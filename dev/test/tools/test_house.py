"""The sizes of the house, and its walls: which rooms may include which.

A bar that is not met yet stands beside a ratchet, which is no more than what there was when it was last turned: it goes
down, until the bar is met and the ratchet is removed. It was raised only seven times: when workers could meet in a
bucket of S3 (1,000 lines) and one round trip decided a sync (160), when matmuls' algorithms could be timed (116), when
elastic workers' snapshots went from memory into a file (85), when the CPU's attention multiplied in AMX and matmuls'
inputs became bf16 (206: a step in bf16 takes a fifth less time), when most activations there became bf16 and gradients
were overwritten (111: again a sixth), for what weeks bring: logs of gigabytes, a disk that is full at a restart, a kill
between a model and its state, a /tmp that is swept (47), and once more: a store that is away when a job starts again, a
second start while the first runs, other programs on a GPU (50).
"""
import re
import subprocess

import pytest

from conftest import ROOT

CODE = {".h", ".cu", ".cuh", ".cpp"}


def files(folder, deep=True, kinds=CODE):
    """The files of a folder and, unless told otherwise, of its folders."""
    found = (ROOT / folder).glob("**/*" if deep else "*")
    return sorted(path for path in found if path.is_file() and path.suffix in kinds)


def lines(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


# -----------------------------------------------------------------------------------------------------------
# Sizes

STREAMING = {path for path in files("streaming") if "elastic" not in path.relative_to(ROOT).parts}
SIZES = {
    # what: (the bar, the ratchet or None, how much there is)
    "lines of train_gpt.cu": (1000, None, lambda: lines([ROOT / "train_gpt.cu"])),
    "files directly in llmc/": (25, None, lambda: len(files("llmc", deep=False))),
    "lines of streaming/ without elastic/": (3500, 3715, lambda: lines(STREAMING)),
    "lines of streaming/elastic/": (4000, None, lambda: lines(files("streaming/elastic"))),
    "lines of the product": (21000, 26511, lambda: lines(
        [ROOT / "train_gpt.cu", *files("llmc"), *files("streaming")])),
    "lines of README.md": (300, None, lambda: lines([ROOT / "README.md"])),
    "lines of the Makefile": (120, None, lambda: lines([ROOT / "Makefile"])),
}


@pytest.mark.parametrize("what", SIZES)
def test_the_house_is_no_larger_than_planned(what):
    bar, ratchet, measure = SIZES[what]
    assert measure() <= (ratchet or bar), f"{what}: the bar is {bar}"


def test_no_folder_of_tests_has_more_than_30_files():
    folders = [ROOT / "dev/test", *(path for path in (ROOT / "dev/test").glob("**/*") if path.is_dir())]
    counts = {str(folder.relative_to(ROOT)): sum(path.is_file() and path.suffix != ".pyc" for path in folder.iterdir())
              for folder in folders if "__pycache__" not in folder.parts}
    assert len(counts) > 8 and {name: count for name, count in counts.items() if count > 30} == {}


def functions(text):
    """{name: lines} of functions and of the methods of structs, by their indentation."""
    rows, found = text.splitlines(), {}
    for i, row in enumerate(rows):
        begins = re.match(r"((?:    )?)(?!if|for|while|switch|else|return|namespace|#|//)(?=[\w~])[^;=(]*?\b([\w~:]+)\(", row)
        if not begins:
            continue
        at = i
        while at + 1 < len(rows) and not rows[at].endswith(("{", "}", ";")):
            at += 1
        if rows[at].endswith("{"):
            end = next(j for j in range(at + 1, len(rows)) if rows[j].startswith(begins[1] + "}"))
            found[f"{begins[2]}, line {i + 1}"] = end - i + 1
    return found


def test_no_function_of_the_trainer_is_longer_than_60_lines():
    found = functions((ROOT / "train_gpt.cu").read_text())
    assert len(found) > 30
    assert {name: count for name, count in found.items() if count > 60} == {}


def test_a_long_function_is_found():
    body = "    x();\n" * 60
    assert functions(f"inline void f(int a,\n              int b) {{\n{body}}}\n") == {"f, line 1": 63}
    assert functions("struct S {\n    void f() {\n        x();\n    }\n};\n") == {"f, line 2": 3}


# -----------------------------------------------------------------------------------------------------------
# Walls

def included(path):
    """The project's files that a file includes, as paths from the root."""
    for name in re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.M):
        for found in (path.parent / name, ROOT / name):
            if found.exists():
                yield str(found.resolve().relative_to(ROOT.resolve()))
                break


ROOMS = {
    # room: (its files, what it may not include, but for these)
    "llmc": (lambda: [*files("llmc", deep=False), *files("llmc/cpu"), *files("llmc/cuda"), *files("llmc/text")],
             ("llmc/run/", "llmc/checkpoint/", "streaming/", "train_gpt.cu"), ()),
    "streaming": (lambda: sorted(STREAMING),
                  ("llmc/run/", "llmc/checkpoint/", "streaming/elastic/", "train_gpt.cu"), ()),
    "elastic": (lambda: files("streaming/elastic"), ("llmc/checkpoint/", "train_gpt.cu"), ()),
    "run and checkpoint": (lambda: [*files("llmc/run"), *files("llmc/checkpoint")],
                           ("streaming/", "train_gpt.cu"), ("llmc/run/options.h", "llmc/run/report.h")),
}
# To be mended.
HOLES = set()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_includes_nothing_beyond_its_walls(room):
    members, beyond, doors = ROOMS[room]
    holes = {(str(path.relative_to(ROOT)), name) for path in members() for name in included(path)
             if name.startswith(beyond) and str(path.relative_to(ROOT)) not in doors}
    assert len(members()) > 3
    assert holes <= HOLES, f"{room} may not include {', '.join(beyond)}"


def test_includes_are_read():
    diloco = set(included(ROOT / "streaming/diloco.h"))
    assert {"streaming/exchange.h", "streaming/schedule.h"} & diloco
    listed = subprocess.run(["git", "ls-files", "llmc", "streaming"], cwd=ROOT, capture_output=True, text=True).stdout
    code = [name for name in listed.split() if name.endswith(tuple(CODE))]
    in_rooms = {str(path.relative_to(ROOT)) for members, *_ in ROOMS.values() for path in members()}
    assert set(code) <= in_rooms, "a file lies in no room"


# -----------------------------------------------------------------------------------------------------------
# Threads

# An exception that leaves a thread's function ends the process without a message. Each thread has a test that throws
# one in it.
THREADS = {
    "llmc/cpu/stream.h": ("llmc/test_stream.cpp", "an_error_stops_the_stream_and_every_later_event_carries_it"),
    "llmc/checkpoint/checkpointer.h": ("checkpoint/test_checkpointer.cpp", "what_its_thread_throws"),
    "llmc/run/watchdog.h": ("run/test_watchdog.cpp", "WhatItsThreadThrowsEndsTheProcessWithALine"),
    "llmc/run/meeting.h": ("run/test_watchdog.cpp", "PlaceKeeper, WhatItsThreadThrows"),
    "streaming/elastic/sync_log_threads.h": ("elastic/test_sync_log_threads.cpp", "what_a_thread_throws"),
}


def test_every_thread_has_a_test_that_throws_in_it():
    code = [ROOT / "train_gpt.cu", *files("llmc"), *files("streaming")]
    found = {str(path.relative_to(ROOT)) for path in code
             if re.search(r"std::(thread\b(?!::)|async|jthread)|pthread_create", path.read_text())}
    assert found == {*THREADS, "llmc/run/stop.h"}  # that thread only waits
    for test, words in THREADS.values():
        assert words in (ROOT / "dev/test/unit" / test).read_text(), test
