"""Workers that come and go (--outer-transport store): real processes over a real Redis server, killed at
chosen instants. Each worker has a link of its own (dev/chaos/link.py) that sees what it asks of the store, so
that it dies in mid-payload, before a line or behind a decision, and not just at some moment. Whatever has
happened, all who live end with the same model, and all logs agree on every sync."""
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import ROOT, command

sys.path[:0] = [str(ROOT / "dev/chaos")]
import redis_server  # noqa: E402
from link import Link  # noqa: E402
from redis_server import RedisServer  # noqa: E402
from run_logs import Agreement  # noqa: E402

# Three fragments: syncs 0, 1, 2 ... are sent after the steps 2, 5, 8, 10, 13, 16 ... Who waits for a sync
# looks ten times a second, so that a run of tiny steps takes about a tenth of a second for each sync.
RUN = {"--workers": 3, "--min-workers": 2, "--outer-transport": "store", "--grace": 1, "-H": 8,
       "--fragment-layers": 1, "--overlap": 1, "-x": 120, "-n": 10, "--timeout": 5}
pytestmark = pytest.mark.usefixtures("one_thread")


# Those that hang on no instant. The others catch a run of a few seconds at one, which a busy machine may miss.
STEADY = {"test_with_nobody_late_the_bits_are_those_of_gloo", "test_a_wrong_password_is_one_line",
          "test_who_has_other_options_is_refused_and_nobody_is_harmed"}


@pytest.fixture(autouse=True)
def instants(request):
    if request.node.originalname not in STEADY and not os.environ.get("CHAOS"):
        pytest.skip("catches a run at an instant: CHAOS=1 runs it, on a quiet machine")


def wait_until(condition, what, seconds=40):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"in vain: {what()}"
        time.sleep(0.02)


class Worker:
    """One worker, of one rank, and all of its starts."""

    def __init__(self, number, base, tokens, server, options):
        self.number, self.base, self.tokens, self.options = number, base, tokens, options
        self.link = Link(server.port)
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
            self.process = subprocess.Popen(command(self.tokens, self.folder, options), stdout=file,
                                            stderr=subprocess.STDOUT, cwd=self.base)
        self.starts.append((self.process, output, self.folder))
        return self

    def kill(self):
        """What it has logged by then is kept: a resumed run cuts its log."""
        self.process.kill()
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

    def happened(self, kind):
        return [row for row in self.lines("event") if row["kind"] == kind]

    def counted(self):
        return [row["sync"] for row in self.lines("sync") if row["counted"]]

    def wait_for(self, condition):
        """Until condition(self) holds, of one that is running."""
        wait_until(lambda: condition(self) or self.process.poll() is not None, self.output)
        assert condition(self), self.output()

    def status(self, seconds=90):
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


class Workers:
    """All of a run: its server, its workers, and what must be true of them in the end."""

    def __init__(self, base, tokens, options):
        self.server = RedisServer(base / "redis")
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

    def end_well(self):
        """All end with status 0 and one model, and their logs agree. Returns how many were compared."""
        statuses = [worker.status() for worker in self.all]
        assert statuses == [0] * len(self.all), [worker.output()[-1500:] for worker in self.all]
        agreement = Agreement()
        for number, path in self.logs():
            for text in path.read_text().split("\n")[:-1]:
                line = json.loads(text)
                if line["type"] == "sync":
                    agreement.add(0, line, f"worker {number} in {path.name}")
        assert agreement.compared > 20
        assert len({worker.model() for worker in self.all}) == 1
        return agreement

    def close(self):
        for worker in self.all:
            for process, _, _ in worker.starts:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            worker.link.close()
        self.server.stop()


@pytest.fixture
def workers(tmp_path, tokens):
    """workers(options) is a run that has not started; skipped without a Redis server."""
    if lack := redis_server.missing():
        pytest.skip(lack)
    made = []

    def make(**options):
        made.append(Workers(tmp_path, tokens, {**RUN, **options}))
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


INSTANTS = {"in_mid_payload": ("HSETNX", "/payload/9", part),
            "behind_a_payload_and_before_its_line": ("HSETNX", "/sent/9", nothing),
            "behind_its_line": ("HSETNX", "/sent/9", all_of),
            "behind_a_beat": ("HSET", "/beat", all_of),
            "while_it_reads_payloads": ("HGET", "/payload/9", all_of)}


@pytest.mark.parametrize("instant", INSTANTS)
@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "as_a_newcomer"])
def test_a_worker_that_is_killed_comes_back_and_all_end_equal(workers, instant, resume):
    run = workers().start()
    name, key, pass_on = INSTANTS[instant]
    if name == "HSET":
        run[2].wait_for(lambda worker: worker.step() >= 12)
    trap = run[2].link.trap(name, key, lambda send, command: (pass_on(send, command), run[2].process.kill()))
    assert trap.sprung.wait(40), run[2].output()
    run[2].kill()
    run[2].start(resume)
    run.end_well()
    syncs = run[2].counted()
    assert syncs and max(syncs) > 9, "it was never counted again"


def generation(run):
    return run.server.ask("HGET", "diloco/log/run", "generation").decode()


def entry(run, sync):
    """What the store says of who made up the sync: its hash, its decider, ..."""
    return run.server.ask("HGET", f"diloco/log/{generation(run)}/0/entry", sync)


def test_who_dies_behind_its_decision_has_decided(workers):
    """All are caught as they decide sync 9. The first entry counts, and who wrote it dies at once."""
    run, lock, deciders = workers(), threading.Lock(), []

    def decide(worker, send, command):
        with lock:
            send(command)
            if not deciders:
                wait_until(lambda: entry(run, 9) != b"$-1", worker.output)
                worker.process.kill()
            deciders.append(worker)

    for worker in run.all:
        worker.link.trap("HSETNX", "/entry", functools.partial(decide, worker), field="9")
    run.start()
    wait_until(lambda: deciders, lambda: [worker.output() for worker in run.all])
    decided = entry(run, 9)
    assert decided.split()[1].startswith(b"%d." % deciders[0].number)
    deciders[0].kill()
    deciders[0].start(True)
    run.end_well()
    assert entry(run, 9) == decided


def test_several_die_and_the_last_waits_for_enough_of_them(workers):
    run = workers().start()
    run[0].wait_for(lambda worker: worker.step() >= 20)
    run[1].kill()
    run[2].kill()
    run[0].wait_for(lambda worker: worker.happened("too_few"))
    before = run[0].step()
    time.sleep(0.5)
    assert run[0].step() == before < 120
    run[1].start(True)
    run[2].start(True)
    run.end_well()


def test_all_die_and_go_on_from_their_checkpoints(workers):
    run = workers().start()
    for worker in run.all:
        worker.wait_for(lambda worker: worker.lines("checkpoint") and worker.step() >= 35)
    for worker in run.all:
        worker.process.kill()
    steps = []
    for worker in run.all:
        worker.kill()
        steps.append(worker.step())
        worker.start(True)
    run.end_well()
    for worker, step in zip(run.all, steps):
        (line,) = worker.lines("resume")[-1:]
        assert 10 <= line["step"] <= step


def test_who_comes_back_when_all_others_have_sent_their_last_sync_ends_like_them(workers):
    # With nothing that the log begins with: it is at the last step as soon as it has a place in the run.
    run = workers(**{"--workers": 2}).start()
    for worker in run.all:
        worker.wait_for(lambda worker: worker.lines("checkpoint"))
    for worker in run.all:
        worker.kill()
    run.server.ask("FLUSHALL")
    for worker in run.all:
        worker.start(True)
    trap = run[1].link.trap("HSETNX", "/sent/44", lambda send, command: run[1].process.kill())
    assert trap.sprung.wait(60), run[1].output()
    run[1].kill()
    run[1].start()
    assert [worker.status() for worker in run.all] == [0, 0], [worker.output() for worker in run.all]
    assert run[1].step() == 0, "it has trained a step: worker 0 was not at its end"
    assert run[0].model() == run[1].model()


# -----------------------------------------------------------------------------------------------------------
# Newcomers

# The first payloads are gone soon, so that a newcomer cannot go through the log from its beginning; and the
# run is long enough for one that comes twice.
FEW_PAYLOADS = {"--retain": 1, "-n": 4, "-x": 800}


def test_a_worker_that_is_late_joins_by_a_snapshot(workers):
    run = workers(**FEW_PAYLOADS).start(0, 1)
    run[0].wait_for(lambda worker: worker.step() >= 40)
    run[2].start()
    run.end_well()
    assert run[2].happened("takes_snapshot") and not run[2].happened("too_few")
    steps = [line["step"] for line in run[2].lines("step")]
    assert run[2].counted() and all(step <= 3 or step >= 40 for step in steps)  # 3: where sync 0 is due
    assert run[0].happened("joined")


def test_a_worker_that_is_late_goes_through_the_log_where_all_of_it_is_there(workers):
    run = workers(**{"--retain": 100}).start(0, 1)
    run[0].wait_for(lambda worker: worker.step() >= 40)
    run[2].start()
    run.end_well()
    assert not run[2].happened("needs_snapshot") and run[2].counted()
    assert sorted(line["sync"] for line in run[2].lines("sync")) == list(range(45))


def test_two_join_at_once(workers):
    run = workers(**FEW_PAYLOADS, **{"--workers": 4}).start(0, 1)
    run[0].wait_for(lambda worker: worker.step() >= 40)
    run.start(2, 3)
    run.end_well()
    for newcomer in (run[2], run[3]):
        assert newcomer.happened("takes_snapshot") and newcomer.counted()


@pytest.mark.parametrize("pass_on", [nothing, all_of], ids=["before_it_reads", "while_it_reads"])
def test_a_newcomer_dies_over_its_snapshot_and_the_next_one_joins(workers, pass_on):
    run = workers(**FEW_PAYLOADS).start(0, 1)
    run[0].wait_for(lambda worker: worker.step() >= 40)
    newcomer = run[2]
    trap = newcomer.link.trap("HGET", "/snapshot/", lambda send, command: (pass_on(send, command),
                                                                          newcomer.process.kill()))
    newcomer.start()
    assert trap.sprung.wait(40), newcomer.output()
    newcomer.kill()
    newcomer.start()
    run.end_well()
    assert newcomer.counted()


def test_a_snapshot_whose_giver_dies_is_given_by_the_next(workers):
    run = workers(**FEW_PAYLOADS).start(0, 1)
    run[0].wait_for(lambda worker: worker.step() >= 40)
    trap = run[0].link.trap("HSETNX", "/snapshot/", lambda send, command: (part(send, command),
                                                                          run[0].process.kill()))
    run[2].start()
    assert trap.sprung.wait(40), run[2].output()
    run[0].kill()
    run[2].wait_for(lambda worker: worker.happened("takes_snapshot"))
    run[0].start(True)
    run.end_well()
    assert run[1].happened("gives_snapshot")


def test_who_has_other_options_is_refused_and_nobody_is_harmed(workers):
    run = workers().start()
    run[0].wait_for(lambda worker: worker.step() >= 10)
    stranger = Worker(2, run.base, run[2].tokens, run.server, {**run[2].options, "-H": 9})
    stranger.start(folder="stranger")
    assert stranger.status() == 2
    (line,) = [line for line in stranger.output().splitlines() if line.startswith("error: ")]
    assert "inner-steps" in line and "9" in line and "8" in line
    assert stranger.wrote_nothing()
    stranger.link.close()
    run.end_well()


def of_a_file(model):
    return {"-e": model, "--layers": None, "--heads": None, "--channels": None, "--vocab-size": None}


def test_who_begins_with_other_parameters_is_refused(workers):
    run = workers().start()
    model = run[0].folder / "worker_0/model_00000010.bin"
    run[0].wait_for(lambda worker: worker.lines("checkpoint") and model.exists())
    stranger = Worker(2, run.base, run[2].tokens, run.server, {**run[2].options, **of_a_file(model)})
    stranger.start(folder="stranger")
    assert stranger.status() == 2, stranger.output()
    (line,) = [line for line in stranger.output().splitlines() if line.startswith("error: ")]
    assert "initial parameters (-e, --seed)" in line
    assert stranger.wrote_nothing()
    stranger.link.close()
    run.end_well()


def test_a_wrong_password_is_one_line(workers):
    run = workers()
    run[0].url = run[0].url.replace(redis_server.PASSWORD, "wrong")
    run[0].start()
    assert run[0].status() == 2
    (line,) = [line for line in run[0].output().splitlines() if line.startswith("error: ")]
    assert "password" in line and "wrong@" not in line
    assert run[0].wrote_nothing()


def test_a_second_process_of_a_worker_takes_its_place(workers):
    run = workers().start()
    run[2].wait_for(lambda worker: worker.step() >= 10)
    first, output, _ = run[2].starts[-1]
    run[2].start()
    assert first.wait(40) not in (0, 2), output.read_text()
    assert "another process has started as this worker" in output.read_text().splitlines()[-1]
    run.end_well()
    assert run[2].counted()


def test_who_comes_when_all_have_ended_is_told_so(workers):
    run = workers(**FEW_PAYLOADS).start(0, 1)
    assert [run[0].status(), run[1].status()] == [0, 0], run[0].output()
    run[2].start()
    assert run[2].status() == 0 and "have come to the end" in run[2].output().splitlines()[-1]
    assert not run[2].lines("end") and not list(run[2].folder.glob("worker_2/model_*"))


# -----------------------------------------------------------------------------------------------------------
# Slow, or out of reach

def test_a_worker_that_stands_still_for_less_than_its_beat_may_is_not_gone(workers):
    run = workers(**{"--grace": 0.3}).start()
    run[2].wait_for(lambda worker: worker.step() >= 20)
    run[2].process.send_signal(signal.SIGSTOP)
    before = run[0].step()
    run[0].wait_for(lambda worker: worker.step() >= before + 8)
    run[2].process.send_signal(signal.SIGCONT)
    run.end_well()
    assert run[0].happened("late") and not run[0].happened("gone")
    assert max(run[2].counted()) > 10


@pytest.mark.long
def test_a_worker_that_stands_still_for_longer_than_every_limit_comes_back(workers):
    run = workers(**{"-x": 600, "-n": 100}).start()
    run[2].wait_for(lambda worker: worker.step() >= 20)
    run[2].process.send_signal(signal.SIGSTOP)
    before = run[2].step()
    run[0].wait_for(lambda worker: worker.happened("gone") and worker.step() >= before + 40)
    run[2].process.send_signal(signal.SIGCONT)
    run.end_well()
    assert run[0].happened("back") and run[2].happened("jumps")
    assert run[2].counted()[-1] > run[0].happened("gone")[0]["step"] / 8 * 3


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
    yield
    is_over.set()
    thread.join()


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, 0.1], ids=["half", "a_tenth"])
def test_a_slow_worker_is_counted_and_ends_with_the_others(workers, share):
    run = workers(**{"-b": 32, "-x": 400, "-n": 100, "--overlap": 4, "--outer-weights": "tokens"}).start()
    run[2].wait_for(lambda worker: worker.step() >= 10)
    with slowed(run[2].process, share):
        run[0].wait_for(lambda worker: worker.step() >= 300)
    run.end_well()
    assert run[2].happened("jumps") or len(run[2].lines("step")) == 400
    assert [sync for sync in run[2].counted() if sync > 20]


@pytest.mark.parametrize("silence", [True, False], ids=["silent", "reset"])
def test_a_link_that_is_cut_and_mended_costs_nothing_but_time(workers, silence):
    run = workers(**{"-x": 160}).start()
    run[2].wait_for(lambda worker: worker.step() >= 20)
    if silence:
        run[2].link.cut()
        before = run[0].step()
        run[0].wait_for(lambda worker: worker.step() >= before + 16)
        run[2].link.mend()
    else:
        run[2].link.drop()
    run.end_well()
    assert max(run[2].counted()) > 20


def test_a_server_that_is_killed_and_comes_back_with_its_data_is_waited_for(workers):
    run = workers().start()
    run[0].wait_for(lambda worker: worker.step() >= 30)
    run.server.kill()
    run[0].wait_for(lambda worker: worker.happened("store_lost"))
    before = run[0].step()
    time.sleep(1)
    assert run[0].step() <= before + 8  # to its next due step, at most
    run.server.start()
    run.end_well()
    assert run[0].happened("store_back")


def test_a_server_that_comes_back_empty_ends_the_run_with_a_clear_line(workers):
    run = workers().start()
    run[0].wait_for(lambda worker: worker.step() >= 30)
    run.server.kill()
    run.server.clear()
    run.server.start()
    for worker in run.all:
        assert worker.status() == 1, worker.output()
        errors = [line for line in worker.output().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "the store has lost the run" in errors[0], worker.output()


# -----------------------------------------------------------------------------------------------------------
# Nobody late

def test_a_worker_that_is_asked_to_stop_leaves_a_checkpoint_and_the_others_go_on(workers):
    run = workers().start()
    run[2].wait_for(lambda worker: worker.step() >= 20)
    run[2].process.send_signal(signal.SIGTERM)
    assert run[2].status() == 143, run[2].output()
    before = run[0].step()
    run[0].wait_for(lambda worker: worker.step() > before)
    run[2].start(True)
    run.end_well()


def test_a_worker_that_is_asked_to_stop_while_it_waits_loses_no_step(workers):
    run = workers(**{"-n": 1000}).start()
    run[2].wait_for(lambda worker: worker.step() >= 20)
    for other in run.all[:2]:
        other.process.send_signal(signal.SIGSTOP)
    run[2].wait_for(lambda worker: worker.happened("too_few"))
    run[2].process.send_signal(signal.SIGTERM)
    assert run[2].status() == 143, run[2].output()
    step = run[2].step()
    assert f"stopped by request after step {step} of 120" in run[2].output()
    for other in run.all[:2]:
        other.process.send_signal(signal.SIGCONT)
    run[2].start(True)
    run.end_well()
    (line,) = run[2].lines("resume")
    assert line["step"] == step >= 20


LOCK_STEP = {"--workers": 2, "-H": 20, "--fragment-layers": 1, "--overlap": 3, "-x": 200, "-v": 50, "-m": 2,
             "--outer-error-feedback": True}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["file", "redis"])
def test_with_nobody_late_the_bits_are_those_of_gloo(train, workers, tmp_path, ranks, kind):
    options = {**LOCK_STEP, "--ranks": ranks}
    gloo = train("gloo", options)
    url = workers().server.url() if kind == "redis" else f"file:{tmp_path}/store"
    store = train("store", {**options, "--outer-transport": "store", "--store": url, "--grace": 60,
                            "--max-lag": 1000})
    for process in range(2 * ranks):
        assert len(store.losses(process)) == 200
        assert store.losses(process) == gloo.losses(process)
        hashes = [[line["global_hash"] for line in run.lines("sync", process)] for run in (store, gloo)]
        assert hashes[0] == hashes[1] and len(hashes[0]) > 25
    assert [row["loss"] for row in store.lines("eval")] == [row["loss"] for row in gloo.lines("eval")]
    models = [path.read_bytes() for path in store.folder.glob("worker_*/model_*.bin")]
    assert len(models) == 2 and set(models) == {gloo.model()}
