"""Elastic workers under chaos (dev/break/chaos.py) end well. Chaos notices a difference between workers, a hang, and
the end of a worker that it did not kill. Its links (dev/break/chaos/link.py) hold back and pass on what they should."""
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT, TRAINER

import blows  # noqa: E402
import outcome  # noqa: E402
import places  # noqa: E402
import redis_server  # noqa: E402
from blows import BLOWS  # noqa: E402
from chaos import LIMIT, OVER, Chaos, Failure, steps_that_take  # noqa: E402
from link import Commands, Link  # noqa: E402
from redis_server import RedisServer, packed  # noqa: E402
from run_logs import Agreement, Divergence, StartLog  # noqa: E402
from waits import AGAIN, BACK, HIT, SLOWER, STORE, Waits  # noqa: E402
from worker import Worker  # noqa: E402


def run_tool(*words, seconds=580):
    return subprocess.run([sys.executable, ROOT / "dev/break/chaos.py", *map(str, words)], capture_output=True,
                          text=True, timeout=seconds)


def needs(store, links=False):
    if lack := places.missing(store, links):
        pytest.skip(lack)


# -----------------------------------------------------------------------------------------------------------
# Real runs

@pytest.mark.long
@pytest.mark.parametrize("words", [["--store", "redis"], ["--store", "file"], ["--store", "s3"],
                                   ["--ranks", 2, "--workers", 3], ["--workers", 2], ["--links"]],
                         ids=["redis", "file", "s3", "ranks", "two", "links"])
def test_a_run_through_chaos_ends_well(words):
    needs(words[1] if words[0] == "--store" else "redis", "--links" in words)
    result = run_tool("--minutes", 5, "--events", 8, "--seed", 7, *words, seconds=1500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no difference, no hang" in result.stdout
    (log,) = re.findall("^what happened, in order: (.*)$", result.stdout, re.M)
    text = Path(log).read_text()
    assert "decides sync" in text and "counts" in text and "killed" in text


# -----------------------------------------------------------------------------------------------------------
# What chaos notices

SYNC = {"type": "sync", "sync": 4, "send_step": 34, "global_hash": "00ff", "contributors": [0, 2],
        "decider": 2, "grace_seconds": 0.0, "waited_seconds": 0.0}


@pytest.mark.parametrize("difference", [{"global_hash": "00fe"}, {"contributors": [0, 1, 2]}, {"decider": 0}])
def test_a_difference_between_two_logs_is_found_and_both_are_named(difference):
    agreement = Agreement()
    agreement.add(0, SYNC, "start 1 of worker 0")
    agreement.add(0, SYNC, "start 2 of worker 0")
    agreement.add(1, {**SYNC, **difference}, "start 1 of worker 1")  # another shard
    agreement.add(0, {**SYNC, **difference, "sync": 5}, "start 1 of worker 1")
    assert agreement.compared == 1
    with pytest.raises(Divergence, match="sync 4 .*start 1 of worker 1.*start 1 of worker 0"):
        agreement.add(0, {**SYNC, **difference}, "start 1 of worker 1")


@pytest.fixture
def quiet(tmp_path):
    """A run over a folder whose workers are sleeping processes, to test what chaos watches without a trainer."""
    arguments = SimpleNamespace(trainer=TRAINER, workers=3, ranks=1, steps=100, store="file", links=False,
                                share=0, only=list(BLOWS))
    one = Chaos(arguments, 1, tmp_path / "run", tmp_path, outcome.Totals(), [])
    for worker in one.workers:
        worker.folder = one.base / f"worker{worker.number}"
        worker.folder.mkdir()
        worker.output = worker.folder / "output.txt"
        worker.output.write_text("")
        worker.process = subprocess.Popen(["sleep", "600"])
        worker.wanted, worker.started_at = True, time.monotonic()
    yield one
    one.close()


def test_a_worker_that_ends_without_being_killed_is_found(quiet):
    quiet.look()
    quiet.workers[1].process.terminate()
    quiet.workers[1].process.wait()
    with pytest.raises(Failure, match="worker 1 was not killed"):
        quiet.look()


def test_a_worker_that_starts_after_the_end_of_the_run_has_not_failed(quiet):
    first, late, other = quiet.workers
    for worker in (first, late):
        worker.kill()
        worker.process = subprocess.Popen(["true"])
        worker.process.wait()
    late.output.write_text(OVER + "\n")
    late.wanted = True
    with pytest.raises(Failure, match="worker 1 was told that the others had finished"):
        quiet.look()
    first.wanted = True
    with pytest.raises(Failure, match="worker 0 has ended without a model"):
        quiet.look()
    write_model(first, b"one")
    first.wanted = late.wanted = True
    quiet.look()
    assert first.ended and late.ended and not other.ended


def write_model(worker, data):
    folder = worker.folder / f"worker_{worker.number}"
    folder.mkdir(exist_ok=True)
    (folder / "model_00000100.bin").write_bytes(data)


def test_a_worker_that_stands_still_although_it_could_continue_is_found(quiet):
    quiet.look()
    late = quiet.workers[2]
    for worker in quiet.workers[:2]:
        worker.moved = time.monotonic()
    late.free_since = late.started_at = time.monotonic() - LIMIT - 1
    for hindrance in ("stopped", "cut off"):
        late.hindered = {hindrance}
        quiet.look()
        late.hindered, late.free_since = set(), late.started_at
    quiet.store_is_up = False
    quiet.look()
    quiet.store_is_up, late.free_since = True, late.started_at
    with pytest.raises(Failure, match="worker 2 has stood still"):
        quiet.look()


def test_a_loss_that_is_not_finite_and_one_that_does_not_fall_are_found(quiet):
    log = SimpleNamespace(name="start 1 of worker 0", at=lambda line: line["time"])
    step = {"type": "step", "step": 1, "time": 1.0, "seconds": 0.1}
    quiet.take(quiet.workers[0], 0, log, {**step, "loss": 1.0})
    with pytest.raises(Failure, match="not finite in step 1"):
        quiet.take(quiet.workers[0], 0, log, {**step, "loss": None})
    for worker in quiet.workers:
        worker.kill()
        worker.process, worker.ended, worker.losses = subprocess.Popen(["true"]), True, [1.0] * 50
        worker.process.wait()
        write_model(worker, b"one")
    with pytest.raises(Failure, match="worker 0 has learnt nothing"):
        quiet.end()
    write_model(quiet.workers[1], b"another")
    with pytest.raises(Failure, match="end with 2 models"):
        quiet.end()


def test_a_worker_that_already_has_all_it_needs_may_complete_the_run_when_the_store_is_lost(quiet):
    """A fast machine may have completed the run by then."""
    quiet.place.server = SimpleNamespace(kill=lambda: None, clear=lambda: None, start=lambda: None)

    def end(worker, status, text="", model=None):
        worker.kill()
        worker.process = subprocess.Popen(["sh", "-c", f"exit {status}"])
        worker.process.wait()
        worker.output.write_text(text)
        if model:
            write_model(worker, model)

    lost = "error: the store has lost the run: start anew\n"
    for worker in quiet.workers:
        end(worker, 75, lost)
    quiet.lose_store()
    for worker in quiet.workers[:2]:
        end(worker, 0, model=b"one")
    quiet.lose_store()
    end(quiet.workers[2], 0, model=b"one")
    quiet.lose_store()
    end(quiet.workers[2], 0, model=b"another")
    with pytest.raises(Failure, match="end with 2 models"):
        quiet.lose_store()
    for status, text in ((0, ""), (75, "error: something else\n"), (75, lost + lost), (1, lost)):
        quiet.workers[1].path_of_model().unlink(missing_ok=True)
        end(quiet.workers[1], status, text)
        with pytest.raises(Failure, match=f"worker 1 ends with status {status}"):
            quiet.lose_store()


def test_the_others_continue_with_the_first_sync_without_the_victim(quiet):
    log = SimpleNamespace(name="a start", at=lambda line: line["time"])
    blow, quiet.workers[1].started_at = blows.Blow("killed", [1], 5, [True]), 0
    quiet.awaited.append((blow, 100.0, {1}))
    rows = [(0, 99.5, [0, 2]), (0, 100.5, [0, 1, 2]), (1, 101.0, [0, 2]), (2, 103.0, [0, 2]),
            (0, 104.0, [0, 2])]
    for sync, (number, when, contributors) in enumerate(rows):
        line = {**SYNC, "sync": sync, "contributors": contributors, "time": when}
        quiet.take(quiet.workers[number], 0, log, line)
    assert quiet.totals.rows["killed"].others == [3.0] and quiet.awaited == []


def test_no_blow_falls_when_the_run_is_about_to_end_or_a_worker_has_ended(quiet):
    event = blows.Event([blows.Blow("stopped briefly", [1], 0, [True])], 0, 0)
    quiet.settle = lambda: None
    quiet.workers[2].step = 0.9 * quiet.options["-x"]
    quiet.strike(event)
    quiet.workers[2].step, quiet.workers[0].ended = 0, True
    quiet.strike(event)
    assert not quiet.totals.rows and quiet.workers[1].process.poll() is None
    quiet.workers[0].ended = False
    quiet.strike(event)
    assert quiet.totals.rows["stopped briefly"].blows == 1


@pytest.mark.parametrize("step", [0.002, 0.05])
def test_a_run_takes_as_long_on_a_fast_machine_as_on_a_slow_one(step):
    times = [5.0 + step * i for i in range(150)]  # the first step ends late
    assert steps_that_take(60, [0.0, *times]) == round(60 / step)


@pytest.fixture
def waits():
    """The waits of four workers that are well from second 0 on."""
    one = Waits(4, 2)
    for history in one.histories:
        history.note("well", 0)
    return one


def weigh(waits, begin, end, missing=(), worker=0):
    """Weighs a wait for a sync that is sent after step 40 and counts all workers but the missing ones."""
    counted = [other for other in range(4) if other not in missing]
    wait = waits.weigh(worker, begin, end, 40, counted, missing)
    return wait.cause, pytest.approx(wait.seconds), wait.whom


def test_the_causes_of_waits_for_one_worker_that_is_hit_and_comes_back(waits):
    waits.histories[3].note("away", 10)
    assert weigh(waits, 11, 13, [3]) == (HIT, 2, [3])
    assert weigh(waits, 11, 12.5, [3], worker=1) == (HIT, 1.5, [3])
    assert weigh(waits, 14, 14.5, [3]) == (AGAIN, 0.5, [3])
    waits.histories[3].note("back", 20)
    waits.progress[3].note(41, 21.5)
    waits.progress[2].note(40, 21.2)
    assert weigh(waits, 21, 21.6) == (BACK, 0.6, [3])
    waits.histories[3].note("well", 21.7)
    assert weigh(waits, 23, 24) == (STORE, 1, [])
    waits.progress[3].steps.clear()
    waits.progress[3].note(40, 23.5)
    assert weigh(waits, 23, 24) == (SLOWER, 1, [3])
    waits.histories[3].note("away", 30)
    assert weigh(waits, 29, 31, [3]) == (HIT, 2, [3])


def test_a_wait_in_which_the_worker_could_not_have_continued_does_not_count(waits):
    for number in (1, 2, 3):
        waits.histories[number].note("away", 10 + number)  # from second 13 on, worker 0 is alone
        waits.histories[number].note("well", 20)
    assert weigh(waits, 14, 18, [1, 2, 3]) == (None, 0, [])
    assert weigh(waits, 12.5, 18, [1]) == (HIT, 0.5, [1])
    waits.store.note("away", 30)
    waits.store.note("well", 31)
    assert weigh(waits, 30.2, 31.5) == (HIT, 0.5, [])
    waits.histories[0].note("back", 40)
    assert weigh(waits, 41, 42) == (None, 0, [])


def test_a_wait_until_a_worker_is_given_up_counts_as_a_wait_for_it(waits):
    waits.histories[3].note("away", 10)
    wait = waits.weigh(0, 10.5, 12, 40, [0, 1, 2], [])
    assert (wait.cause, wait.whom) == (HIT, [3])
    wait = waits.weigh(0, 13, 14, 40, [0, 1, 2], [])
    assert (wait.cause, wait.whom) == (STORE, [])


def test_a_worker_that_logs_syncs_from_before_its_absence_is_not_counted_again_yet(quiet):
    log = SimpleNamespace(name="a start", at=lambda line: line["time"])
    quiet.take(quiet.workers[0], 0, log, {**SYNC, "sync": 7, "time": 1.0})
    worker = quiet.workers[2]
    worker.note_back()
    back = worker.back_at
    for sync, counted_again in ((4, None), (7, None), (8, back + 8)):
        quiet.take(worker, 0, log, {**SYNC, "sync": sync, "time": back + sync})
        assert worker.counted_again == counted_again


def test_the_journal_says_which_worker_was_waited_for(quiet):
    log = SimpleNamespace(name="a start", at=lambda line: line["time"])
    for history in quiet.waits.histories:
        history.note("well", 0)
    quiet.waits.histories[1].note("away", 99)
    worker = quiet.workers[0]
    worker.took.append(0.1)
    quiet.take(worker, 0, log, {"type": "event", "kind": "applied", "sync": 4, "time": 103.0,
                                "text": "applies sync 4, it counts 0.1 (9 tokens) and 2.1 (9 tokens); "
                                        "worker 1 is missing after 2 s"})
    quiet.take(worker, 0, log, {**SYNC, "time": 103.0, "grace_seconds": 2.0, "waited_seconds": 2.5})
    assert (103.0, "worker 0", f"has waited 2.500 s for sync 4, {HIT}: worker 1") in quiet.journal
    assert quiet.totals.waits[HIT].long == [2.5]
    quiet.totals.living = 10
    assert "waits between events: 0.00% of the time in which workers could continue: met" in outcome.verdict(
        quiet.totals)
    quiet.totals.waits[BACK].add(0.6, True)
    assert "waits between events: 6.00% of the time in which workers could continue: NOT met" in outcome.verdict(
        quiet.totals)


def test_events_follow_from_the_seed_and_every_kind_is_drawn():
    kinds = blows.kinds_but_for(set())
    draws = [random.Random(3), random.Random(3), random.Random(4)]
    first, again, other = [[blows.draw_event(draw, kinds, 4) for _ in range(300)] for draw in draws]
    assert first == again != other
    seen = [blow for event in first for blow in event.blows]
    assert {blow.kind for blow in seen} == set(blows.BLOWS)
    assert any(len(event.blows) == 2 for event in first)
    assert {len(blow.victims) for blow in seen if blow.kind == "all but one killed"} == {3}
    few = blows.kinds_but_for(places.Folder.impossible)
    assert not any("link" in kind or "password" in kind for kind in few) and "killed" in few


def test_the_lines_of_a_resumed_run_are_told_apart_from_those_before_it(tmp_path):
    path, now = tmp_path / "metrics.jsonl", int(time.time())
    first = [{"type": "run", "version": 2, "unix_time": now - 50, "time": 0.0}, {**SYNC, "time": 1.0}]
    second = [{"type": "resume", "unix_time": now + 1, "time": 1.0}, {**SYNC, "sync": 5, "time": 2.0}]

    def write(rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write([*first, {**SYNC, "sync": 5, "time": 1.5}])
    log = StartLog(path, "start 2")
    assert log.read() == []
    write([*first, *second])
    assert log.read() == second
    assert log.at(second[1]) - log.at(second[0]) == 1.0


# -----------------------------------------------------------------------------------------------------------
# The link

def test_commands_are_recognized_however_the_stream_is_cut():
    words = [[b"GET", b"a"], [b"HSETNX", b"key\r\n$3\r\n", b"", b"\0\r\n" * 100], [b"PING"]]
    stream = b"".join(map(packed, words))
    for size in (1, 2, 7, 50, len(stream)):
        commands, found = Commands(), []
        for at in range(0, len(stream), size):
            found += commands.feed(stream[at:at + size])
        assert [one for one, _ in found] == words and b"".join(data for _, data in found) == stream


@pytest.fixture
def server(tmp_path):
    needs("redis")
    one = RedisServer(tmp_path / "redis")
    yield one
    one.stop()


def connect(link):
    connection = socket.create_connection(("127.0.0.1", link.port), timeout=10)
    stream = connection.makefile("rwb")

    def ask(*words):
        stream.write(packed(words))
        stream.flush()
        return stream.readline()

    assert ask("AUTH", redis_server.PASSWORD) == b"+OK\r\n"
    return connection, ask


def test_a_link_passes_commands_holds_them_back_and_traps_them(server):
    link = Link(server.port)
    connection, ask = connect(link)
    assert ask("HSETNX", "a/sent/1", "w", "x" * 300000) == b":1\r\n"
    caught = []
    trap = link.trap("HSETNX", "/sent/", lambda send, command: (caught.append(command), send(command)), "2")
    assert ask("HSETNX", "a/sent/1", "1", "x") == b":1\r\n" and not trap.sprung.is_set()
    assert ask("HSETNX", "a/sent/1", "2", "x") == b":1\r\n" and trap.sprung.wait(10)
    assert caught == [packed(["HSETNX", "a/sent/1", "2", "x"])]
    assert ask("HSETNX", "a/sent/1", "2", "x") == b":0\r\n"
    link.cut()
    begin = time.monotonic()
    threading.Timer(0.3, link.mend).start()
    assert ask("PING") == b"+PONG\r\n" and time.monotonic() - begin > 0.25
    link.trap("HSETNX", "/sent/", lambda send, command: (send(command[:20]), link.drop()))
    assert ask("HSETNX", "a/sent/3", "1", "x") == b""
    assert server.ask("EXISTS", "a/sent/3") == b":0"
    connection.close()
    link.close()


def test_a_held_command_waits_and_other_connections_pass(server):
    link, may_pass = Link(server.port), threading.Event()
    hold = link.hold(lambda words: words[0] == b"SET", lambda words: may_pass.is_set())
    (one, ask), (other, ask_too) = connect(link), connect(link)
    threading.Thread(target=ask, args=("SET", "a", "1")).start()
    assert hold.reached.wait(10) and ask_too("EXISTS", "a") == b":0\r\n"
    may_pass.set()
    end = time.monotonic() + 30
    while server.ask("GET", "a") != b"1":
        assert time.monotonic() < end
    server.ask("HSET", "h", "b", "2", "c", "\r\n")
    assert sorted(server.ask("HGETALL", "h")) == [b"\r\n", b"2", b"b", b"c"]
    one.close()
    other.close()
    link.close()


def test_a_killed_server_keeps_what_was_written_unless_it_is_cleared(server):
    assert server.ask("SET", "a", "1") == b"+OK"
    server.kill()
    server.start()
    assert server.ask("GET", "a") == b"1"
    server.kill()
    server.clear()
    server.start()
    assert server.ask("GET", "a") == b"$-1"


# -----------------------------------------------------------------------------------------------------------
# The tool

def test_a_failure_ends_with_status_1_and_says_how_to_reproduce_it(tmp_path):
    trainer = tmp_path / "trainer"
    trainer.write_text("#!/bin/sh\necho oh dear >&2\nexit 3\n")
    trainer.chmod(0o755)
    result = run_tool("--minutes", 1, "--seed", 5, "--steps", 2000, "--store", "file", "--trainer", trainer)
    assert result.returncode == 1 and "oh dear" in result.stdout, result.stderr
    # Which worker is noticed first depends on how fast the processes start.
    assert "--seed 5" in result.stdout
    assert re.search(r"worker [0-3] was not killed, and ends with status 3", result.stdout), result.stdout


@pytest.mark.parametrize("words, said", [(["--trainer", "/nowhere"], "run make"),
                                         (["--workers", 1], "less than 2"),
                                         (["--store", "file", "--only", "link cut"], "no such blow"),
                                         (["--links", "--store", "file"], "Redis server")])
def test_an_impossible_request_is_refused_with_one_line(words, said):
    result = run_tool("--trainer", "/bin/true", *words)
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and said in line
