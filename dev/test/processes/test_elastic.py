"""Elastic workers (--outer-transport store): real processes over a real server of Redis or S3, killed at
chosen instants. Each worker has its own link (dev/break/chaos/link.py), which sees the worker's requests to the
store. So a worker dies in the middle of a payload, before a line or after a decision, and not just at some moment.
Whatever happens, all surviving workers end with the same model, and all logs agree on every sync.

No test depends on the machine's speed: a run waits at a sync for the worker that the test is about, or has no last
step and is asked to stop when the test has seen enough. Limits in seconds are only for hangs."""
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import ROOT, command, peak_memory

import redis_server  # noqa: E402
import s3_server  # noqa: E402
from link import Link  # noqa: E402
from redis_server import NOT_LONGER_THAN_ITS_PARENT, RedisServer  # noqa: E402
from run_logs import Agreement  # noqa: E402
from s3_server import S3Link, S3Server  # noqa: E402

# Three fragments: syncs 0, 1, 2 ... are sent after the steps 2, 5, 8, 10, 13, 16 ...; the last one is 23.
RUN = {"--workers": 3, "--min-workers": 2, "--outer-transport": "store", "--grace": 0.5, "-H": 8,
       "--fragment-layers": 1, "--overlap": 1, "-x": 64, "-n": 10}
LAST_SYNC = 23
# For runs that are asked to stop, without checkpoints, which they do not need.
ENDLESS = {"-x": 10**6, "-n": 100}
HANG = 90  # seconds


def wait_until(condition, what, seconds=HANG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"in vain: {what()}"
        time.sleep(0.02)


def sync_sent(words):
    """The sync that a command writes a line for, or -1."""
    folder, _, sync = words[1].decode().rpartition("/") if len(words) > 1 else ("", "", "")
    return int(sync) if words[0] == b"HSETNX" and folder.endswith("/sent") else -1


class Worker:
    """One worker, of one rank, and all of its starts."""

    def __init__(self, number, base, tokens, server, options):
        self.number, self.base, self.tokens, self.options = number, base, tokens, options
        self.link = (Link if isinstance(server, RedisServer) else S3Link)(server.port)
        self.environment = server.environment(port=self.link.port)
        self.url = server.url(port=self.link.port)
        self.process, self.folder, self.starts = None, None, []

    def start(self, resume=False, folder=None, **more):
        """Without resume: a new folder, and nothing of what it was."""
        if not resume:
            self.folder = self.base / (folder or f"worker{self.number}.{len(self.starts)}")
            self.folder.mkdir()
        options = {**self.options, **more, "--worker": self.number, "--store": self.url, "-y": int(resume)}
        output = self.folder / f"output{len(self.starts)}.txt"
        with output.open("w") as file:
            self.process = subprocess.Popen([*NOT_LONGER_THAN_ITS_PARENT,
                                             *command(self.tokens, self.folder, options)],
                                            stdout=file, stderr=subprocess.STDOUT, cwd=self.base,
                                            env={**os.environ, **self.environment})
        self.starts.append((self.process, output, self.folder))
        return self

    def die(self):
        """At once: what it has asked for later does not reach the store any more."""
        self.process.kill()
        self.link.drop()

    def kill(self):
        """What it has logged by then is kept: a resumed run cuts its log."""
        self.die()
        self.process.wait()
        if self.log().exists():
            kept = self.base / f"killed{self.number}.{len(self.starts)}.jsonl"
            kept.write_bytes(self.log().read_bytes())

    def log(self):
        return self.folder / ("metrics.jsonl" if self.number == 0 else f"metrics_{self.number:05d}.jsonl")

    def output(self):
        return self.starts[-1][1].read_text()

    def lines(self, kind):
        if not self.log().exists():
            return []
        rows = [json.loads(line) for line in self.log().read_text().split("\n")[:-1]]
        return [row for row in rows if row["type"] == kind]

    def step(self):
        steps = self.lines("step")
        return steps[-1]["step"] if steps else 0

    def stopped_after(self):
        """Its last step, when it was asked to stop; it may have jumped there without training."""
        assert self.status() == 143, self.output()
        (step,) = re.findall(r"stopped by request after step (\d+) of ", self.output())
        return int(step)

    def happened(self, kind, of=None):
        """of: the worker that it is about, or any"""
        return [row for row in self.lines("event") if row["kind"] == kind and of in (None, row["worker"])]

    def merged(self):
        return [row["sync"] for row in self.lines("sync")]

    def counted(self):
        return [row["sync"] for row in self.lines("sync") if row["counted"]]

    def wait_for(self, condition):
        """Until condition(self) holds, of one that is running."""
        wait_until(lambda: condition(self) or self.process.poll() is not None, self.output)
        assert condition(self), self.output()

    def wait_for_whole_checkpoint(self):
        """Returns its model."""
        folder = self.folder / f"worker_{self.number}"
        self.wait_for(lambda _: any(folder.glob("DONE_*")))
        step = min(folder.glob("DONE_*")).name.removeprefix("DONE_")
        return folder / f"model_{step}.bin"

    def status(self, seconds=HANG):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"worker {self.number} hangs: {self.output()[-2000:]}")

    def wrote_nothing(self):
        """Into its folder, but for what it said."""
        return list(self.folder.iterdir()) == [self.starts[-1][1]]

    def model(self):
        (path,) = (self.folder / f"worker_{self.number}").glob(f"model_{self.options['-x']:08d}.bin")
        return path.read_bytes()


class Held:
    """Workers that are held back."""

    def __init__(self, holds, release):
        self.holds, self.release = holds, release

    def wait(self):
        """Until all of them have come so far."""
        wait_until(lambda: all(hold.reached.is_set() for hold in self.holds), lambda: "all to be held back")


class Workers:
    """All of a run: its server, its workers, and what must be true of them in the end."""

    def __init__(self, base, tokens, options, kind):
        self.server = RedisServer(base / "redis") if kind == "redis" else S3Server(base / "s3")
        self.base, self.all = base, [Worker(w, base, tokens, self.server, options)
                                     for w in range(options["--workers"])]

    def __getitem__(self, number):
        return self.all[number]

    def start(self, *numbers):
        for number in numbers or range(len(self.all)):
            self.all[number].start()
        return self

    def logs(self):
        """(number, path) of every log of every start."""
        for worker in self.all:
            folders = {folder for _, _, folder in worker.starts}
            for path in [*self.base.glob(f"killed{worker.number}.*"), *(folder / worker.log().name
                                                                        for folder in folders)]:
                if path.exists():
                    yield worker.number, path

    # ---- so that it is not over before the test is

    def hold_back(self, sync, *numbers):
        """None of these workers (all, if none is named) sends a line for `sync` or a later one: the others go
        no further than that without them. Returns what ends it."""
        release = threading.Event()
        holds = [self.all[number].link.hold(lambda words: sync_sent(words) >= sync,
                                            lambda words: release.is_set())
                 for number in numbers or range(len(self.all))]
        return Held(holds, release)

    def go_second(self, number, first, sync):
        """From `sync` on, worker `number` sends its line after worker `first`. If enough of the others are missing,
        nothing is decided without `first`, so it is counted if it has trained."""
        self.all[number].link.hold(lambda words: sync_sent(words) >= sync,
                                   lambda words: self.has_sent(first, words[1]))

    def has_sent(self, number, key):
        """Whether this worker has a line under that key. Over a bucket, where it lies under the worker's number, the
        line says whose it is."""
        if isinstance(self.server, S3Server):
            return self.server.ask("HGET", key, number).startswith(b"%d." % number)
        return any(name.startswith(b"%d." % number) for name in self.server.ask("HKEYS", key))

    def wait_until_counted(self, number, after=None):
        """Waits until a sync later than `after` counts the worker and all running workers have merged it; merges in
        earlier starts count, too. after: by default the latest sync that has been merged by now"""
        there = [worker for worker in self.all if worker.process.poll() is None]
        if after is None:
            after = max(sync for worker in there for sync in [-1, *worker.merged()])

        def is_counted(_):
            counted = {sync for sync in self.all[number].counted() if sync > after}
            return counted.intersection(*(worker.merged() for worker in there))

        self.all[number].wait_for(is_counted)

    # ---- its end

    def end_well(self):
        """All end with status 0 and one model, and their logs agree."""
        statuses = [worker.status() for worker in self.all]
        assert statuses == [0] * len(self.all), [worker.output()[-1500:] for worker in self.all]
        assert self.compared() > 20
        assert len({worker.model() for worker in self.all}) == 1

    def stop_well(self):
        """All are asked to stop, and do, and their logs agree."""
        for worker in self.all:
            worker.process.send_signal(signal.SIGTERM)
        statuses = [worker.status() for worker in self.all]
        assert statuses == [143] * len(self.all), [worker.output()[-1500:] for worker in self.all]
        assert self.compared() > 2

    def compared(self):
        """How many merged syncs of all logs were compared with what another one says."""
        agreement = Agreement()
        for number, path in self.logs():
            for text in path.read_text().split("\n")[:-1]:
                line = json.loads(text)
                if line["type"] == "sync":
                    agreement.add(0, line, f"worker {number} in {path.name}")
        return agreement.compared

    def close(self):
        for worker in self.all:
            for process, _, _ in worker.starts:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            worker.link.close()
        self.server.stop()


MISSING = {"redis": redis_server.missing, "s3": s3_server.missing}


@pytest.fixture(params=["redis", pytest.param("s3", marks=pytest.mark.long)])
def workers(request, tmp_path, tokens):
    """workers(options) is a run that has not started; skipped where there is no such server."""
    if lack := MISSING[request.param]():
        pytest.skip(lack)
    made = []

    def make(**options):
        made.append(Workers(tmp_path, tokens, {**RUN, **options}, request.param))
        return made[-1]

    yield make
    for one in made:
        one.close()


# -----------------------------------------------------------------------------------------------------------
# Killed at an instant

def part(send, command):
    send(command[:len(command) // 2])


def all_of(send, command):
    send(command)


def nothing(send, command):
    pass


def dying(worker, pass_on):
    """What a trap does: the worker dies over a command, and over the transaction that it is part of."""
    def act(send, command):
        pass_on(send, command)
        worker.die()
    return act


def die_once(worker, is_there):
    """As soon as that is in the store."""
    def wait():
        wait_until(is_there, worker.output)
        worker.die()
    threading.Thread(target=wait, daemon=True).start()


def is_late_beat(value):
    """One that was sent when sync 9 had been."""
    return int(value.split()[3]) >= 9


def has_scripts(run):
    """Over a bucket requests do only what their names say."""
    return isinstance(run.server, RedisServer)


def of_payloads(run, key):
    """Over a bucket a payload is a part of its line."""
    return key if has_scripts(run) else key.replace("/payload/", "/sent/")


INSTANTS = {"in_mid_payload": ("HSETNX", "/payload/9", None, part),
            "after_a_payload_and_before_its_line": ("HSETNX", "/sent/9", None, nothing),
            "after_a_beat": ("HSET", "/beat", is_late_beat, all_of),
            "while_it_waits_for_what_others_sent": ("EVAL", "/payload/9", None, all_of)}


@pytest.mark.parametrize("instant", INSTANTS)
@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "as_a_newcomer"])
def test_a_worker_that_is_killed_comes_back_and_all_end_equal(workers, instant, resume):
    run = workers()
    name, key, value, pass_on = INSTANTS[instant]
    name = "HGET" if name == "EVAL" and not has_scripts(run) else name
    trap = run[2].link.trap(name, of_payloads(run, key), dying(run[2], pass_on), value=value)
    run[1].link.hold(lambda words: 0 <= sync_sent(words) <= 9,  # else the others may pass sync 9 without it
                     lambda words: trap.sprung.is_set() or run.has_sent(2, words[1]))
    run.go_second(1, first=2, sync=15)
    run.start()
    wait_until(trap.sprung.is_set, run[2].output)
    run[2].kill()
    run[2].start(resume)
    run.end_well()
    assert max(run[2].counted()) >= 15, "it was never counted again"


def generation(run):
    return run.server.ask("HGET", "diloco/log/run", "generation").decode()


def entry(run, sync):
    """The store's entry on the contributors of the sync, its hash, its decider, ..."""
    return run.server.ask("HGET", f"diloco/log/{generation(run)}/0/entry", sync)


def senders(entry):
    """Workers that it counts, and those that abstain."""
    words = entry.decode().split()
    names = words[3:3 + 4 * int(words[2]):4]
    rest = words[3 + 4 * int(words[2]):]
    return [int(name.split(".")[0]) for name in names] + [int(word) for word in rest[1:1 + int(rest[0])]]


def lines(run, sync):
    return f"diloco/log/{generation(run)}/0/sent/{sync}"


def is_decided(run, sync):
    """Over a bucket: if each worker has a line, of its own or another's."""
    if has_scripts(run):
        return entry(run, sync) != b"$-1"
    return len(run.server.ask("HKEYS", lines(run, sync))) == len(run.all)


def known(run, sync):
    """Workers that the sync counts, and those that abstain."""
    if has_scripts(run):
        return senders(entry(run, sync))
    return [worker.number for worker in run.all if run.has_sent(worker.number, lines(run, sync))]


@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "as_a_newcomer"])
def test_a_worker_that_dies_after_its_line_is_counted(workers, resume):
    run = workers()
    for other in (0, 1):
        run.go_second(other, first=2, sync=9)
    held = run.hold_back(12, 2)
    run.start()
    wait_until(lambda: run.has_sent(2, lines(run, 9)), run[2].output)
    run[2].kill()
    held.release.set()
    run[2].start(resume)
    run.end_well()
    assert 2 in known(run, 9) and max(run[2].counted()) >= 12


def test_a_worker_that_dies_after_its_decision_has_decided(workers):
    """All are caught as they send for sync 9. The last one decides, and dies at once."""
    run, lock, deciders = workers(**{"--grace": 30}), threading.Lock(), []
    if not has_scripts(run):
        pytest.skip("over a bucket the lines decide; see below")

    def decide(worker, send, command):
        with lock:
            deciders.append(worker)
            is_last = len(deciders) == len(run.all)
        if is_last:
            wait_until(lambda: len(run.server.ask("HKEYS", f"diloco/log/{generation(run)}/0/sent/9")) == 2,
                       worker.output)
            run.go_second((worker.number + 1) % 3, first=worker.number, sync=12)
            die_once(worker, lambda: entry(run, 9) != b"$-1")
        send(command)

    for worker in run.all:
        worker.link.trap("EVAL", "/entry", functools.partial(decide, worker), field="9",
                         value=lambda question: b";" in question)
    run.start()
    wait_until(lambda: len(deciders) == 3, lambda: [worker.output() for worker in run.all])
    decider = deciders[-1]
    decider.status()
    decided = entry(run, 9)
    assert decided.split()[1].startswith(b"%d." % decider.number)
    decider.kill()
    decider.start(True)
    run.end_well()
    assert entry(run, 9) == decided


def test_a_worker_that_dies_after_the_last_line_has_decided(workers):
    """All are caught as they send for sync 9. The last one dies as soon as its line is there."""
    run, lock, order = workers(**{"--grace": 30}), threading.Lock(), []
    if has_scripts(run):
        pytest.skip("where there are scripts the store writes the entry; see above")

    def has_sent(worker):
        return run.has_sent(worker.number, lines(run, 9))

    def send_last(worker, send, command):
        with lock:
            order.append(worker)
            is_last = len(order) == len(run.all)
        if is_last:
            wait_until(lambda: all(map(has_sent, order[:2])), worker.output)
            run.go_second((worker.number + 1) % 3, first=worker.number, sync=12)
            die_once(worker, lambda: has_sent(worker))
        send(command)

    for worker in run.all:
        worker.link.trap("HSETNX", "/sent/9", functools.partial(send_last, worker))
    run.start()
    wait_until(lambda: len(order) == 3, lambda: [worker.output() for worker in run.all])
    order[2].status()
    order[0].wait_for(lambda worker: 9 in worker.merged())
    (row,) = [row for row in order[0].lines("sync") if row["sync"] == 9]
    assert sorted(row["contributors"]) == [0, 1, 2]
    order[2].kill()
    order[2].start(True)
    run.end_well()


@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "as_a_newcomer"])
def test_of_two_workers_one_goes_on_alone_and_says_so_and_the_other_joins_again(workers, resume):
    run = workers(**{**ENDLESS, "--workers": 2, "--min-workers": 0}).start()
    run.wait_until_counted(1)
    run[1].kill()

    def is_alone(worker):
        """For seven syncs, since it said so last: on a busy machine worker 1 may have been late before, too."""
        said = [row["sync"] for row in worker.happened("too_few") if "continues with 1 of 2 workers" in row["text"]]
        since = [row["contributors"] for row in worker.lines("sync") if said and row["sync"] >= said[-1]]
        return len(since) > 6 and all(contributors == [0] for contributors in since)

    run[0].wait_for(is_alone)
    run[1].start(resume)
    run.wait_until_counted(1)
    run.stop_well()


def test_several_die_and_the_last_waits_for_enough_of_them(workers):
    run = workers()
    held = run.hold_back(12, 1, 2)
    run.start()
    held.wait()
    run[1].kill()
    run[2].kill()
    run[0].wait_for(lambda worker: [row for row in worker.happened("too_few") if row["sync"] == 12])
    held.release.set()
    run.go_second(1, first=2, sync=15)
    run[1].start(True)
    run[2].start(True)
    run.end_well()
    assert len(known(run, 12)) > 1


def test_all_die_and_go_on_from_their_checkpoints(workers):
    run = workers(**{"--grace": 5})  # none jumps over the checkpoint
    held = run.hold_back(12)
    run.start()
    held.wait()
    for worker in run.all:
        worker.wait_for_whole_checkpoint()
    for worker in run.all:
        worker.die()
    steps = []
    for worker in run.all:
        worker.kill()
        steps.append(worker.step())
    held.release.set()
    held = run.hold_back(15)
    for worker in run.all:
        worker.start(True)
    held.wait()
    held.release.set()
    run.end_well()
    for worker, step in zip(run.all, steps):
        (line,) = worker.lines("resume")
        assert 10 <= line["step"] <= step <= 35


def test_a_worker_that_comes_back_when_the_others_have_sent_their_last_sync_ends_like_them(workers):
    # With nothing that the log begins with: it is at the last step as soon as it has a place in the run.
    run = workers(**{"--workers": 2})
    held = run.hold_back(12)
    run.start()
    held.wait()
    for worker in run.all:
        worker.wait_for_whole_checkpoint()
    for worker in run.all:
        worker.kill()
    run.server.ask("FLUSHALL")
    held.release.set()
    trap = run[1].link.trap("HSETNX", f"/sent/{LAST_SYNC}", dying(run[1], nothing))
    for worker in run.all:
        worker.start(True)
    wait_until(trap.sprung.is_set, run[1].output)
    run[1].kill()
    run[1].start()
    assert [worker.status() for worker in run.all] == [0, 0], [worker.output() for worker in run.all]
    assert run[1].step() == 0, "it has trained a step: worker 0 was not at its end"
    assert run[0].model() == run[1].model()


# -----------------------------------------------------------------------------------------------------------
# Newcomers

def remove_payloads(run):
    """Over a bucket the lines stay that they were behind."""
    for key in run.server.ask("KEYS", of_payloads(run, "*/0/payload/*")):
        if has_scripts(run):
            run.server.ask("DEL", key)
            continue
        folder = key.decode()
        for name in run.server.ask("HKEYS", folder):
            line, _, _ = run.server.ask("HGET", folder, name.decode()).partition(b"\n")
            run.server.ask("HSET", folder, name.decode(), line)


# The first payloads are gone soon, so that a newcomer cannot go through the log from its beginning.
FEW_PAYLOADS = {"--retain": 1, "-n": 4}


def wait_until_payloads_are_gone(run):
    """Those of the first sync."""
    wait_until(lambda: is_decided(run, 9), run[0].output)
    first = of_payloads(run, f"diloco/log/{generation(run)}/0/payload/0")

    def are_gone():
        if has_scripts(run):
            return run.server.ask("EXISTS", first) == b":0"
        return all(b"\n" not in run.server.ask("HGET", first, worker.number) for worker in run.all)

    wait_until(are_gone, run[0].output)


def test_a_worker_that_is_late_joins_by_a_snapshot(workers):
    run = workers(**FEW_PAYLOADS)
    run.go_second(1, first=2, sync=15)
    run.start(0, 1)
    wait_until_payloads_are_gone(run)
    run[0].wait_for(lambda worker: worker.step() >= 40)
    run[2].start()
    run.end_well()
    assert run[2].happened("takes_snapshot")
    assert all(row["sync"] is not None for row in run[2].happened("too_few"))  # somebody could give it
    steps = [line["step"] for line in run[2].lines("step")]
    assert run[2].counted() and all(step <= 3 or step >= 40 for step in steps)  # 3: where sync 0 is due
    assert run[0].happened("joined", of=2)
    # It reads on where it would be if it had trained all along; on a busy machine it may jump later, too.
    rows, updates = data_position(run[0]) // len(run[0].lines("step")), [step for step in steps if step >= 40]
    assert (updates[0] - 1 + len(updates)) * rows <= data_position(run[2]) <= 64 * rows


def data_position(worker):
    """Where a worker continues in its part of the data, by its last checkpoint."""
    state = (worker.folder / f"worker_{worker.number}" / "state_00000064_00000.bin").read_bytes()
    assert int(re.search(rb"data\.epoch[= ]+(\d+)", state)[1]) == 0
    return int(re.search(rb"data\.row[= ]+(\d+)", state)[1])


def test_a_worker_that_is_late_goes_through_the_log_where_all_of_it_is_there(workers):
    run = workers(**{"--retain": 100})
    run.go_second(1, first=2, sync=15)
    run.start(0, 1)
    run[0].wait_for(lambda worker: worker.step() >= 40)
    run[2].start()
    run.end_well()
    assert not run[2].happened("needs_snapshot") and run[2].counted()
    assert sorted(run[2].merged()) == list(range(LAST_SYNC + 1))
    late = [line["lr"] for line in run[2].lines("step") if line["step"] > 3]  # of 0.01: it warms up, perhaps twice
    assert all(rate < 0.001 * (update + 1.5) for update, rate in enumerate(late[:10])), late


def test_two_join_at_once(workers):
    run = workers(**{**ENDLESS, **FEW_PAYLOADS, "--workers": 4}).start(0, 1)
    wait_until_payloads_are_gone(run)
    run.start(2, 3)
    for newcomer in (2, 3):
        run.wait_until_counted(newcomer)
        assert run[newcomer].happened("takes_snapshot")
    run.stop_well()


@pytest.mark.parametrize("pass_on", [nothing, all_of], ids=["before_it_reads", "while_it_reads"])
def test_a_newcomer_dies_over_its_snapshot_and_the_next_one_joins(workers, pass_on):
    run = workers(**FEW_PAYLOADS)
    run.go_second(1, first=2, sync=15)
    run.start(0, 1)
    wait_until_payloads_are_gone(run)
    newcomer = run[2]
    trap = newcomer.link.trap("HGET", "/snapshot/", dying(newcomer, pass_on))
    newcomer.start()
    wait_until(trap.sprung.is_set, newcomer.output)
    newcomer.kill()
    newcomer.start()
    run.end_well()
    assert newcomer.counted()


def test_a_snapshot_whose_giver_dies_is_given_by_the_next(workers):
    run = workers(**{**ENDLESS, **FEW_PAYLOADS, "--grace": 5}).start(0, 1)  # worker 1 leaves it to worker 0
    wait_until_payloads_are_gone(run)
    trap = run[0].link.trap("HSETNX", "/snapshot/", dying(run[0], part))
    run[2].start()
    wait_until(trap.sprung.is_set, run[2].output)
    run[0].kill()
    run[2].wait_for(lambda worker: worker.happened("takes_snapshot"))
    run[1].wait_for(lambda worker: worker.happened("gives_snapshot"))
    run[0].start(True)
    for number in (0, 2):
        run.wait_until_counted(number)
    run.stop_well()


def test_a_snapshot_needs_no_folder_of_the_run(workers):
    """Without -o a worker writes nothing but temporary files."""
    run = workers(**{**ENDLESS, **FEW_PAYLOADS, "-n": 0, "-o": None}).start(0, 1)
    wait_until_payloads_are_gone(run)
    run[2].start()
    run[2].wait_for(lambda worker: "continues from a snapshot" in worker.output())
    assert all(worker.wrote_nothing() for worker in run.all)


def test_a_snapshot_is_not_held_in_memory(workers):
    """With this model it has 118 MB."""
    run = workers(**{**ENDLESS, **FEW_PAYLOADS, "-nk": 1, "--layers": 12, "--channels": 320,
                     "--heads": 5})
    run.start(0, 1)
    wait_until_payloads_are_gone(run)
    before = peak_memory(run[0].process.pid)
    run[2].start()
    run[2].wait_for(lambda worker: worker.happened("takes_snapshot"))
    run[0].wait_for(lambda _: run[0].happened("gives_snapshot") or run[1].happened("gives_snapshot"))
    most = max(peak_memory(worker.process.pid) for worker in run.all)
    assert before > 300e6 and most < before + 64e6
    run.wait_until_counted(2)
    run.stop_well()


def refused(run, options):
    """What one line says to worker 2 with these options, which writes nothing."""
    stranger = Worker(2, run.base, run[2].tokens, run.server, {**run[2].options, **options})
    stranger.start(folder="stranger")
    assert stranger.status() == 2, stranger.output()
    stranger.link.close()
    (line,) = [line for line in stranger.output().splitlines() if line.startswith("error: ")]
    assert stranger.wrote_nothing()
    return line


def test_a_worker_with_other_options_is_refused_and_no_other_worker_is_harmed(workers):
    run = workers()
    held = run.hold_back(6)
    run.start()
    held.wait()
    line = refused(run, {"-H": 9})
    assert "inner-steps" in line and "9" in line and "8" in line
    held.release.set()
    run.end_well()


def of_a_file(model):
    return {"-e": model, "--layers": None, "--heads": None, "--channels": None, "--vocab-size": None}


def test_a_worker_that_begins_with_other_parameters_is_refused(workers):
    run = workers(**{"--grace": 5})  # none jumps over the checkpoint
    held = run.hold_back(6)
    run.start()
    held.wait()
    model = run[0].wait_for_whole_checkpoint()
    assert "initial parameters (-e, --seed)" in refused(run, of_a_file(model))
    held.release.set()
    run.end_well()


def only_of_redis(run):
    if not isinstance(run.server, RedisServer):
        pytest.skip("only Redis has types of values")


def test_a_wrong_password_is_one_line(workers):
    run = workers()
    run[0].url = run[0].url.replace(redis_server.PASSWORD, "wrong")
    if run[0].environment:
        run[0].environment = run.server.environment(run[0].link.port, secret="wrong@")
    run[0].start()
    assert run[0].status() == 2
    (line,) = [line for line in run[0].output().splitlines() if line.startswith("error: ")]
    assert ("password" in line or "correct AWS_ACCESS_KEY_ID" in line) and "wrong@" not in line
    assert run[0].wrote_nothing()


def test_a_second_process_of_a_worker_takes_its_place(workers):
    run = workers(**ENDLESS).start()
    run.wait_until_counted(2)
    first, output, _ = run[2].starts[-1]
    run[2].start()
    assert first.wait(HANG) not in (0, 2), output.read_text()
    assert "another process has started as this worker" in output.read_text().splitlines()[-1]
    run.wait_until_counted(2)
    run.stop_well()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_starts_when_all_have_ended_is_told_so(workers, ranks):
    """One of two ranks learns it from the other, and the launcher of two has a last line of its own."""
    run = workers(**FEW_PAYLOADS, **{"--ranks": ranks}).start(0, 1)
    assert [run[0].status(), run[1].status()] == [0, 0], run[0].output()
    run[2].link.hold(lambda words: words[0] == b"HGETALL" and words[1].endswith(b"/1/done"), lambda words: False)
    run[2].start()
    assert run[2].status() == 0 and "have reached the end" in run[2].output().splitlines()[-ranks]
    assert not run[2].lines("end") and not list(run[2].folder.glob("worker_2/model_*"))


def test_workers_that_all_start_afresh_in_a_run_that_has_ended_are_told_so(workers):
    """None of them forgets that it has ended before it takes part again."""
    run = workers(**FEW_PAYLOADS).start(0, 1)
    assert [run[0].status(), run[1].status()] == [0, 0], run[0].output()
    for worker in run.all:
        shutil.rmtree(worker.folder, ignore_errors=True)
        worker.start()
    for worker in run.all:
        assert worker.status() == 0 and "have reached the end" in worker.output(), worker.output()
        assert not worker.lines("end")


# -----------------------------------------------------------------------------------------------------------
# Slow, or out of reach

def test_a_worker_that_stands_still_for_less_than_its_beat_may_is_not_gone(workers):
    run = workers(**ENDLESS).start()
    run.wait_until_counted(2)
    longest, end = 0, time.monotonic() + HANG
    while longest == 0 or not run[0].happened("late", of=2):  # a worker that is not waited for is not called late
        assert time.monotonic() < end, run[0].output()
        begin, before = time.monotonic(), run[0].step()
        run[2].process.send_signal(signal.SIGSTOP)
        run[0].wait_for(lambda worker: worker.step() >= before + 8)
        run[2].process.send_signal(signal.SIGCONT)
        longest = max(longest, time.monotonic() - begin)
        run.wait_until_counted(2)
    run.stop_well()
    assert longest > 2 or not run[0].happened("gone")  # a worker is gone after five seconds without a beat


@pytest.mark.long
def test_a_worker_that_stands_still_for_longer_than_every_limit_comes_back(workers):
    run = workers(**ENDLESS).start()
    run.wait_until_counted(2)
    run[0].wait_for(lambda worker: worker.happened("joined", of=2))  # else it is not called gone
    run[2].process.send_signal(signal.SIGSTOP)
    before = run[2].step()
    run[0].wait_for(lambda worker: worker.happened("gone", of=2) and worker.step() >= before + 40)
    run[2].process.send_signal(signal.SIGCONT)
    run.wait_until_counted(2)
    run[0].wait_for(lambda worker: worker.happened("back", of=2))
    run.stop_well()


@contextlib.contextmanager
def slowed(process, share):
    """It runs for this share of the time."""
    is_over = threading.Event()

    def alternate():
        while not is_over.wait(0.1 * share) and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            is_over.wait(0.1 * (1 - share))
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, 0.1], ids=["half", "a_tenth"])
def test_a_slow_worker_does_not_hold_the_others_up_forever_and_is_counted_again(workers, share):
    run = workers(**{**ENDLESS, "-b": 32, "--overlap": 4, "--outer-weights": "tokens"}).start()
    run.wait_until_counted(2)
    with slowed(run[2].process, share):
        before = run[0].step()
        run[0].wait_for(lambda worker: worker.step() >= before + 150)
    run.wait_until_counted(2)
    run.stop_well()


@pytest.mark.parametrize("silence", [True, False], ids=["silent", "reset"])
def test_a_link_that_is_cut_and_mended_costs_nothing_but_time(workers, silence):
    run = workers(**ENDLESS).start()
    run.wait_until_counted(2)
    if silence:
        run[2].link.cut()
    else:
        run[2].link.drop()
    before = run[0].step()
    run[0].wait_for(lambda worker: worker.step() >= before + 16)
    if silence:
        run[2].link.mend()
    run.wait_until_counted(2)
    run.stop_well()


def test_a_server_that_is_killed_and_comes_back_with_its_data_is_waited_for(workers):
    run = workers(**ENDLESS).start()
    run.wait_until_counted(0)
    run.server.kill()
    run[0].wait_for(lambda worker: worker.happened("store_lost"))
    before = run[0].step()
    time.sleep(0.5)
    assert run[0].step() <= before + 8  # to its next due step, at most
    run.server.start()
    for number in range(3):
        run.wait_until_counted(number)
    run.stop_well()
    assert run[0].happened("store_back")


def test_a_server_that_comes_back_empty_ends_the_run_and_no_step_is_lost(workers):
    run = workers(**{**ENDLESS, "-n": 10**5}).start()
    run.wait_until_counted(0)
    run.server.kill()
    run.server.clear()
    run.server.start()
    for worker in run.all:
        assert worker.status() == 75, worker.output()
        errors = [line for line in worker.output().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "the store has lost the run" in errors[0], worker.output()
    steps = [worker.step() for worker in run.all]
    for worker in run.all:  # if one was ahead, the new log begins with what it has, and without it something else is
        worker.start(True, **{"--grace": 5})  # decided: all are waited for
    run.wait_until_counted(0)
    run.stop_well()
    assert [worker.lines("resume")[0]["step"] for worker in run.all] == steps


# -----------------------------------------------------------------------------------------------------------
# Waits that might never end

def gave_up(worker, *words):
    """It has said what it waits for, and has ended with status 75."""
    assert worker.status() == 75, worker.output()
    (error,) = [line for line in worker.output().splitlines() if line.startswith("error: ")]
    said = [row["text"] for row in worker.happened("too_few")]
    for word in words:
        assert word in error and any(word in text for text in said), (error, said)
    return True


@pytest.mark.parametrize("blow", ["gone", "another_type"])
def test_a_store_that_serves_no_more_is_waited_for_until_timeout_and_no_step_is_lost(workers, blow):
    run = workers(**ENDLESS, **{"--timeout": 4})
    if blow == "another_type":
        only_of_redis(run)
    run.start()
    run.wait_until_counted(0)
    (beats,) = run.server.ask("KEYS", "*/0/beat")
    if blow == "gone":
        run.server.kill()
    else:
        run.server.ask("SET", beats, "not a hash")
    lost = "onnection" if isinstance(run.server, RedisServer) else "cannot reach"
    for worker in run.all:
        why = lost if blow == "gone" else "WRONGTYPE"
        assert gave_up(worker, "the store does not answer", why, "4 s (--timeout)")
        assert (worker.folder / f"worker_{worker.number}" / f"DONE_{worker.step():08d}").exists()
    steps = [worker.step() for worker in run.all]
    if blow == "another_type":
        run.server.ask("DEL", beats)
    for worker in run.all:
        worker.start(True, **{"--timeout": HANG})
    if blow == "gone":  # a start that resumes waits for it
        for worker in run.all:
            worker.wait_for(lambda worker: "waiting for the store (" in worker.output())
        run.server.start()
    run.wait_until_counted(0)
    run.stop_well()
    assert [worker.lines("resume")[0]["step"] for worker in run.all] == steps


def test_a_start_gives_up_a_store_that_holds_something_else_under_its_key(workers):
    run = workers(**{"--timeout": 4, "--run-name": "taken"})
    only_of_redis(run)
    run.server.ask("SET", "taken/log/run", "not a hash")
    run.start(0)
    assert run[0].status() in (2, 75) and "WRONGTYPE" in run[0].output(), run[0].output()


def test_a_newcomer_that_finds_no_worker_to_give_it_a_snapshot_gives_up(workers):
    run = workers(**ENDLESS, **{"--timeout": 4}).start()
    run.wait_until_counted(0)
    for worker in run.all:
        worker.kill()
    remove_payloads(run)
    run[0].start()
    assert gave_up(run[0], "no live worker can give the snapshot")


# -----------------------------------------------------------------------------------------------------------
# Asked to stop

def test_a_worker_that_is_asked_to_stop_leaves_a_checkpoint_and_the_others_go_on(workers):
    run = workers(**ENDLESS).start()
    run.wait_until_counted(2)
    run[2].process.send_signal(signal.SIGTERM)
    step, before = run[2].stopped_after(), run[0].step()
    run[0].wait_for(lambda worker: worker.step() > before)
    run[2].start(True)
    run.wait_until_counted(2)
    run.stop_well()
    assert [line["step"] for line in run[2].lines("resume")] == [step]
    assert len(run[2].happened("starts")) == 2, "it has lost its first events"


def test_a_worker_that_is_asked_to_stop_while_it_waits_loses_no_step(workers):
    run = workers(**{**ENDLESS, "-n": 10**5}).start()
    run.wait_until_counted(2)
    before = len(run[2].happened("too_few"))
    for other in run.all[:2]:
        other.process.send_signal(signal.SIGSTOP)
    run[2].wait_for(lambda worker: len(worker.happened("too_few")) > before)
    run[2].process.send_signal(signal.SIGTERM)
    step = run[2].stopped_after()
    assert step == run[2].step()
    for other in run.all[:2]:
        other.process.send_signal(signal.SIGCONT)
    run[2].start(True)
    run.wait_until_counted(2)
    run.stop_well()
    assert [line["step"] for line in run[2].lines("resume")] == [step]


# -----------------------------------------------------------------------------------------------------------
# What it costs

WRITES = ("HSET", "HSETNX", "HGETALL", "SCAN")  # and listings: a bucket's owner pays for these
AT_THE_START = re.compile(r"/(registered|incarnation/\d+|run|done)$|^$|^\.check$")


@pytest.mark.long
def test_a_sync_costs_few_requests(workers, request):
    if "s3" not in request.node.name:
        pytest.skip("only a bucket's requests cost money")
    run = workers(**{"--workers": 2, "-H": 45, "--overlap": 12, "-x": 450, "-n": 100, "--grace": 10, "--channels": 64,
                     "-t": 64, "-b": 8, "--timeout": 60}).start()
    begin = time.monotonic()
    assert [worker.status(500) for worker in run.all] == [0, 0], [worker.output() for worker in run.all]
    seconds, syncs = time.monotonic() - begin, len(run[0].lines("sync"))
    assert "\nbucket     about 7 requests a sync and 4 a second from each process" in run[0].output()
    for worker in run.all:
        seen = worker.link.seen
        beats = sum(count for (command, key), count in seen.items() if command == "HSET" and key.endswith("/beat"))
        checks = sum(count for (command, key), count in seen.items() if command == "HGET" and key.endswith("/run"))
        alive = {key: count for key, count in seen.items() if key[1].endswith("/beat")}
        of_syncs = {key: count for key, count in seen.items() if key not in alive and not AT_THE_START.search(key[1])}

        def of(table, *commands):
            return sum(count for (command, _), count in table.items() if command in commands)

        reads = of(of_syncs, "HGET") + checks - beats  # a beat is followed by a look at the run's generation
        per_sync = [of(of_syncs, *WRITES) / syncs, reads / syncs, of(of_syncs, "HDEL") / syncs]
        per_second = [of(alive, *WRITES) / seconds, (of(alive, "HGET") + beats) / seconds]
        print(f"worker {worker.number}: a sync takes {per_sync[0]:.1f} writes and lists, {per_sync[1]:.1f} reads, "
              f"{per_sync[2]:.1f} removals; its signs of life {per_second[0]:.1f} and {per_second[1]:.1f} in a second")
        assert syncs == 30 and 3 < sum(per_sync) <= 12
        assert sum(alive.values()) + beats < 8 * seconds + 10 * syncs  # each sync looks at them, too


# -----------------------------------------------------------------------------------------------------------
# Nobody late

LOCK_STEP = {"--workers": 2, "-H": 20, "--fragment-layers": 1, "--overlap": 3, "-x": 200, "-v": 50, "-m": 2,
             "--outer-error-feedback": True}


def assert_bits_of_tcp(train, url, options, **of_store):
    """Returns both runs."""
    tcp = train("tcp", options)
    store = train("store", {**options, "--outer-transport": "store", "--store": url, "--grace": 60, **of_store})
    for process in range(options["--workers"] * options["--ranks"]):
        assert len(store.losses(process)) == options["-x"]
        assert store.losses(process) == tcp.losses(process)
        hashes = [[line["global_hash"] for line in run.lines("sync", process)] for run in (store, tcp)]
        assert hashes[0] == hashes[1] and len(hashes[0]) > 12
    assert [row["loss"] for row in store.lines("eval")] == [row["loss"] for row in tcp.lines("eval")]
    models = [path.read_bytes() for path in store.folder.glob("worker_*/model_*.bin")]
    assert len(models) == options["--workers"] and set(models) == {tcp.model()}
    return tcp, store


@pytest.mark.parametrize("ranks", [1, 2])
def test_if_no_worker_is_late_the_bits_over_a_folder_are_those_of_tcp(train, tmp_path, ranks):
    assert_bits_of_tcp(train, f"file:{tmp_path}/store", {**LOCK_STEP, "--ranks": ranks})


@pytest.mark.parametrize("ranks", [1, 2])
def test_if_no_worker_is_late_the_bits_are_those_of_tcp(train, workers, monkeypatch, ranks):
    server = workers().server
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    assert_bits_of_tcp(train, server.url(), {**LOCK_STEP, "--ranks": ranks})
