#!/usr/bin/env python3
"""Chaos: an elastic run (--outer-transport store) whose workers are killed, stopped, slowed and cut off.

    dev/break/chaos.py --minutes 10 [--seed S] [--workers M] [--ranks R] [--store redis|file|s3] [--links]
                 [--share CORES] [--only KIND ...] [--trainer ./train_gpt_cpu]

M workers are started one by one, as they would be at M places. What then happens to them is drawn from the
seed: they are killed, stopped for less and for more than every time-out, slowed down, restarted, cut off; their
store is killed; processes that may not join try to. Each blow is undone after a random time, and some blows
overlap. After most of its steps a run is left alone; the next run uses other formats. A trial run of one worker
measures how many steps take a minute on this machine, and a run has that many: so a run takes as long on a fast
machine as on a slow one, and no blow falls when the run is about to end.

At all times: all workers that merge a sync, in any of their starts, hold the same global parameters and count the
same workers; no worker that could continue stands still; no worker ends that was not killed or refused; losses
are finite and fall. At the end all workers have the same model, bit for bit.

By default each worker reaches the store, a Redis server (or a server of S3's protocol), over its own link, which
can be cut (dev/break/chaos/link.py). With --links each worker is a site with its own network, connected by a line
with delay and loss (dev/wan/sites.py; root). chaos.log lists everything that happened: which workers each sync
counted, why it did not count the others, and each wait that was longer than a step, with the worker it was for.

Where possible (control groups; root), each rank gets a share of a core that it cannot exceed (dev/bench/quota.py),
so that no worker waits for a core that another worker is using.
"""
import argparse
import json
import os
import random
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/tools"), str(ROOT / "dev/break/chaos"), str(ROOT / "dev/bench"), str(ROOT / "dev/test")]
import places  # noqa: E402
import quota  # noqa: E402
from blows import BLOWS, GRACE, MISSED, TIMEOUT, draw_event, kinds_but_for  # noqa: E402
from conftest import children, command  # noqa: E402
from metrics import UserError, log_name  # noqa: E402
from outcome import Totals, table, verdict, write_journal  # noqa: E402
from run_logs import Agreement, Divergence  # noqa: E402
from torture import write_tokens  # noqa: E402
from waits import Waits  # noqa: E402
from worker import Worker  # noqa: E402

LIMIT = 120  # seconds within which a worker that can continue must do so, even on a slow machine
SHARE = 0.3  # of a core for each rank
RUN_SECONDS = 60  # the length of an undisturbed run
TRIAL_STEPS, WARM = 150, 30  # steps of the trial run, and how many of the first ones are not timed

# Shares of a run's steps. Events begin before LAST_EVENT, or before LAST_BEFORE_LOSS if the run ends with the
# loss of its store. Blows fall before LAST_BLOW, so that their effects come before the end of the run.
LAST_BEFORE_LOSS, LAST_EVENT, LAST_BLOW = 0.5, 0.75, 0.85

# Three fragments. A step takes about ten milliseconds. So, as in real runs, the time between a send and its merge is
# longer than the interval between two reads of the store, and longer than about ten round trips.
COMMON = {"--outer-transport": "store", "--grace": GRACE, "--timeout": TIMEOUT,
          "--channels": 64, "-t": 64, "-b": 8, "-H": 24, "--fragment-layers": 1, "-n": 50, "-nk": 3,
          "-l": 0.003, "-j": None}

OVER = "the other workers have reached the end of this run"  # the message to a worker that starts too late


class Failure(Exception):
    """Something forbidden: different bits, a worker that hangs or ends by itself, an unclear error."""


def place_of(arguments):
    """The class in places.py for these arguments."""
    return (places.Folder if arguments.store == "file" else places.Bucket if arguments.store == "s3"
            else places.Apart if arguments.links else places.Here)


def kinds_of(arguments):
    """The names of the blows that are possible with these arguments."""
    impossible = {"one rank killed"} if arguments.ranks == 1 else set()
    impossible |= {"two newcomers"} if arguments.workers == 2 else set()  # no worker would hold the run's state
    return kinds_but_for(place_of(arguments).impossible | impossible | set(BLOWS) - set(arguments.only))


# -----------------------------------------------------------------------------------------------------------
# One run

class Chaos:
    """One run, from its first start to its end."""

    def __init__(self, arguments, seed, base, tokens, totals, journal):
        self.draw = random.Random(seed)
        self.trainer, self.tokens, self.base = arguments.trainer, tokens, base
        self.totals, self.journal = totals, journal
        self.options = {**COMMON, "--workers": arguments.workers, "--ranks": arguments.ranks,
                        "--min-workers": 1 if arguments.workers == 2 else 2,
                        "--overlap": 20 if arguments.links else 10, "-x": arguments.steps,
                        **self.draw_options()}
        base.mkdir(parents=True)
        self.place = place_of(arguments)(base, arguments.workers)
        self.options.update(self.place.options)
        self.share, self.quotas = arguments.share, quota.Quotas() if arguments.share else None
        self.waits = Waits(arguments.workers, self.options["--min-workers"])
        self.workers = [Worker(w, self) for w in range(arguments.workers)]
        self.kinds = kinds_of(arguments)
        self.store_is_up = True
        self.agreement = Agreement()
        self.awaited = []     # (blow, its time, its victims), until the others' next sync
        self.applied = {}     # (worker, sync): the text of the worker's event "applied", until it logs the sync
        self.looked_at, self.newest = None, -1  # newest: sync that anyone has merged

    def draw_options(self):
        return {"--outer-dtype": self.draw.choice(["fp4_e2m1", "fp4_e2m1", "fp8_e4m3", "fp32"]),
                "--outer-error-feedback": self.draw.choice([None, True]),
                "--outer-weights": self.draw.choice(["equal", "tokens"]),
                "--join-moments": self.draw.choice([None, True]),
                "--optimizer": self.draw.choice(["adamw", "muon"])}

    def tell(self, who, text, when=None):
        self.journal.append((time.monotonic() if when is None else when, who, text))

    def share_of(self, worker):
        """The words before a worker's command that limit its share of the cores."""
        share = self.share * self.options["--ranks"]
        return self.quotas.inside(f"worker{worker}", share) if self.quotas else []

    # ---- a run from start to end

    def run(self, events, until):
        """Causes at most `events` events, none of them after the time `until`. Returns their number."""
        self.tell("chaos", f"a run of {self.options['-x']} steps: " + ", ".join(
            f"{name} {value}" for name, value in self.options.items() if name.startswith(("--outer", "--optimizer"))))
        late = self.draw.choice([None, self.workers[-1]])
        for worker in self.workers:
            if worker is not late:
                worker.start(False)
        if late:
            self.rest(self.draw.uniform(0, 6))
            late.start(False)
        done = 0
        loses_store = self.place.server and self.draw.random() < 0.3
        last = LAST_BEFORE_LOSS if loses_store else LAST_EVENT
        self.settle()
        while done < events and time.monotonic() < until and self.progress() < last:
            self.strike(draw_event(self.draw, self.kinds, len(self.workers)))
            done += 1
        if loses_store and done < events and self.can_strike():
            self.lose_store()
            done += 1
        else:
            self.end()
        self.totals.runs += 1
        self.totals.events += done
        self.totals.compared += self.agreement.compared
        return done

    def progress(self):
        """The share of the run's steps that the fastest worker has completed."""
        return max(worker.step for worker in self.workers) / self.options["-x"]

    def can_strike(self):
        """Whether every worker is in the run, and the run is not about to end."""
        self.look()
        return self.progress() < LAST_BLOW and not any(worker.ended for worker in self.workers)

    def end(self):
        """All workers must end by themselves, with the same model, and their loss must have fallen."""
        self.tell("chaos", "leaves the run alone")
        while not all(worker.ended for worker in self.workers):
            self.look()
            time.sleep(0.05)
        through = self.compare_models()
        if not through:
            raise Failure("no worker has completed the run")
        for worker in through:
            first, last = worker.losses[:20], worker.losses[-20:]
            if not statistics.fmean(last) < 0.9 * statistics.fmean(first):
                raise Failure(f"worker {worker.number} has learnt nothing: its loss was "
                              f"{statistics.fmean(first):.3f} at first, and {statistics.fmean(last):.3f} at the end")
        self.tell("chaos", f"{len(through)} workers have ended with one model")

    def compare_models(self):
        """Returns the workers that have completed the run. They must have the same model."""
        through = [worker for worker in self.workers if worker.is_through()]
        models = {worker.path_of_model().read_bytes() for worker in through}
        if len(models) > 1:
            raise Failure(f"workers {[worker.number for worker in through]} end with {len(models)} models")
        return through

    def lose_store(self):
        """Kills the store and restarts it empty. Each worker must end with one clear line and status 75, unless it
        already has all that it needs from the store; then it may complete the run."""
        self.tell("chaos", "kills the store and restarts it empty")
        for worker in self.workers:
            worker.wanted = False
        self.place.server.kill()
        self.place.server.clear()
        self.place.server.start()
        for worker in self.workers:
            try:
                status = worker.process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                raise Failure(f"the store has lost the run, and worker {worker.number} does not end") from None
            lines = [line for line in worker.text().splitlines() if line.startswith("error: ")]
            if worker.is_through():
                self.tell(f"worker {worker.number}", "has completed the run nevertheless")
            elif status != 75 or not any("the store has lost the run" in line for line in lines) or (
                    len(lines) > 1 and self.options["--ranks"] == 1):  # else its launcher and other ranks say more
                raise Failure(f"the store was restarted empty, and worker {worker.number} ends with status "
                              f"{status}:\n{worker.text()[-1000:]}")
        self.totals.rows["store emptied"].blows += 1
        self.read()
        self.compare_models()

    def close(self):
        for worker in self.workers:
            if worker.process:
                worker.kill()
        self.place.close()
        if self.quotas:
            self.quotas.close()

    # ---- events

    def strike(self, event):
        struck = []
        for number, blow in enumerate(event.blows):
            if number > 0:
                self.rest(event.apart)
            if not self.can_strike():
                break
            struck.append(blow)
            self.totals.rows[blow.kind].blows += 1
            self.hit(blow, is_alone=len(event.blows) == 1)
        for blow in sorted(struck, key=lambda blow: blow.seconds):
            self.rest(blow.seconds)
            self.undo(blow)
        self.settle()
        for blow in struck:
            if blow.kind in MISSED:
                self.note_return(blow)
        self.rest(event.pause)

    def note_return(self, blow):
        """Records the time from each victim's return until it was counted."""
        for worker in (self.workers[w] for w in blow.victims):
            if worker.counted_again:
                self.totals.rows[blow.kind].victims.append(worker.counted_again - worker.back_at)

    def hit(self, blow, is_alone):
        victims = [self.workers[w] for w in blow.victims if not self.workers[w].ended]
        words = " and ".join(str(worker.number) for worker in victims)
        self.tell("chaos", f"{blow.kind}: worker{'s' * (len(victims) > 1)} {words}, {blow.seconds:.2f} s")
        others = sum(worker.wanted for worker in self.workers if worker not in victims)
        if blow.kind in MISSED and is_alone and victims and others >= self.options["--min-workers"]:
            self.awaited.append((blow, time.monotonic(), {worker.number for worker in victims}))
        if blow.kind == "store killed":
            self.store_is_up = False
            self.waits.store.note("away", time.monotonic())
            self.place.server.kill()
            return
        for worker in victims:
            self.hit_worker(blow, worker)

    def hit_worker(self, blow, worker):
        if "killed" in blow.kind and blow.kind != "one rank killed" or blow.kind == "two newcomers":
            worker.kill()
        elif blow.kind == "one rank killed":
            self.kill_rank(worker)
        elif blow.kind.startswith("stopped"):
            worker.stop()
        elif blow.kind == "half speed":
            worker.slow_down(0.5)
        elif blow.kind == "tenth of the speed":
            worker.slow_down(0.1)
        elif blow.kind == "link cut":
            worker.hinder("cut off")
            self.place.cut(worker.number)
        elif blow.kind == "link reset":
            self.place.links[worker.number].drop()
        elif blow.kind == "same worker twice":
            self.start_twice(worker)
        else:
            self.refuse(blow, worker)

    def undo(self, blow):
        if blow.kind == "store killed":
            self.place.server.start()
            self.store_is_up = True
            self.waits.store.note("well", time.monotonic())
            self.tell("chaos", "the store is back")
            return
        for worker, resume in zip((self.workers[w] for w in blow.victims), blow.resume):
            if worker.ended:
                continue
            if blow.kind.startswith("stopped"):
                worker.resume()
                self.tell(f"worker {worker.number}", "is resumed")
            elif blow.kind in ("half speed", "tenth of the speed"):
                worker.speed_up()
                self.tell(f"worker {worker.number}", "runs at full speed again")
            elif blow.kind == "link cut":
                self.place.mend(worker.number)
                worker.free("cut off")
                self.tell(f"worker {worker.number}", "is connected again")
            elif not worker.wanted:
                self.bring_back(blow, worker, resume)

    def bring_back(self, blow, worker, resume):
        if blow.kind == "newcomer killed":
            worker.start(False)
            self.rest(blow.again)
            if not worker.ended:
                worker.kill()
                self.tell("chaos", f"kills the newcomer, worker {worker.number}")
        if not worker.ended:
            worker.start(resume)

    def kill_rank(self, worker):
        """Kills one rank of a worker. Its launcher must end the other ranks, with a status other than 0."""
        worker.wanted = False
        worker.note("away")
        ranks = children(worker.process.pid)
        os.kill(self.draw.choice(ranks) if ranks else worker.process.pid, signal.SIGKILL)
        try:
            status = worker.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Failure(f"one rank of worker {worker.number} was killed, and its other ranks do not end") from None
        if status == 0:
            raise Failure(f"one rank of worker {worker.number} was killed, and the worker's status is 0")

    def start_twice(self, worker):
        """Starts a second process as this worker. The older process must end with a message that says so."""
        first, output, logs = worker.process, worker.output, worker.logs
        worker.start(False)
        worker.logs = worker.logs + logs
        end = time.monotonic() + LIMIT
        while first.poll() is None and time.monotonic() < end:
            self.rest(0.1)
        worker.logs = worker.logs[:len(logs)]
        text = output.read_text(errors="replace")
        if first.poll() in (None, 0, 2) or "another process has started as this worker" not in text:
            first.kill()
            raise Failure(f"worker {worker.number} was started twice, and the older process has status "
                          f"{first.poll()}:\n{text[-1000:]}")

    def refuse(self, blow, worker):
        """Starts a process that must be refused: it must end with status 2 and one line."""
        number = self.totals.rows[blow.kind].blows
        folder = self.base / f"{blow.kind.replace(' ', '_')}{number}"
        folder.mkdir()
        options, password, word = {"-H": 23}, {}, "inner-steps"
        if blow.kind == "wrong password":
            options, password, word = {}, {"password": "wrong"}, self.place.refusal
        stranger = worker.launch(folder, folder / "output.txt", options, **password)
        end = time.monotonic() + LIMIT
        while stranger.poll() is None and time.monotonic() < end:
            self.rest(0.1)
        text = (folder / "output.txt").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        if stranger.poll() != 2 or len(lines) != 1 or word not in lines[0]:
            stranger.kill()
            raise Failure(f"{blow.kind}: status {stranger.poll()} instead of 2 and one line about {word}:\n"
                          f"{text}")

    # ---- watching the workers

    def rest(self, seconds):
        end = time.monotonic() + seconds
        self.look()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
            self.look()

    def settle(self):
        """Waits until every worker has been counted in a sync after this call, or has ended."""
        begin = time.monotonic()
        self.look()
        while not all(worker.ended or worker.counted_at > begin for worker in self.workers):
            if time.monotonic() > begin + 2 * LIMIT:
                missing = [worker.number for worker in self.workers
                           if not worker.ended and worker.counted_at <= begin]
                raise Failure(f"workers {missing} were not counted in any sync for {2 * LIMIT} s")
            time.sleep(0.05)
            self.look()

    def look(self):
        self.read()
        self.count_living()
        for worker in self.workers:
            if worker.wanted and worker.process.poll() is not None:
                self.note_end(worker)
        self.find_hangs()

    def count_living(self):
        """Adds the time since the last look for each worker that could continue."""
        now = time.monotonic()
        able = sum(self.waits.could_continue(worker.number, now) for worker in self.workers)
        self.totals.living += able * (now - (self.looked_at or now))
        self.looked_at = now

    def note_end(self, worker):
        """Checks the end of a worker that was not killed."""
        worker.wanted, worker.ended = False, True
        worker.note("away")
        self.read()
        status, text = worker.process.returncode, worker.text()
        self.tell(f"worker {worker.number}", f"has ended with status {status}")
        if status != 0:
            raise Failure(f"worker {worker.number} was not killed, and ends with status {status}:\n"
                          f"{text[-2000:]}")
        if OVER in text and not any(other.is_through() for other in self.workers):
            raise Failure(f"worker {worker.number} was told that the others had finished, and none had")
        if OVER not in text and not worker.is_through():
            raise Failure(f"worker {worker.number} has ended without a model:\n{text[-2000:]}")

    def find_hangs(self):
        now = time.monotonic()
        free = [worker for worker in self.workers
                if (worker.wanted and not worker.hindered) or worker.ended]
        can_continue = self.store_is_up and len(free) >= self.options["--min-workers"]
        for worker in self.workers:
            if not (can_continue and worker in free):
                worker.free_since = None
                continue
            worker.free_since = worker.free_since or now
            still = now - max(worker.free_since, worker.moved, worker.started_at)
            if not worker.ended and still > LIMIT:
                raise Failure(f"worker {worker.number} has stood still for {still:.0f} s:\n"
                              f"{worker.text()[-1000:]}")

    # ---- reading the logs

    def read(self):
        for worker in self.workers:
            for rank, log in worker.logs:
                for line in log.read():
                    self.take(worker, rank, log, line)

    def take(self, worker, rank, log, line):
        if line["type"] == "step":
            worker.step, worker.moved = line["step"], log.at(line)
            worker.took.append(line["seconds"])
            self.waits.progress[worker.number].note(line["step"], log.at(line))
            if line["loss"] is None:
                raise Failure(f"worker {worker.number}: the loss is not finite in step {line['step']}")
            worker.losses += [line["loss"]] * (rank == 0)
        elif line["type"] == "sync":
            self.agreement.add(rank, line, log.name)
            self.take_sync(worker, rank, log, line)
        elif line["type"] == "event" and line["kind"] == "applied":
            self.applied[worker.number, line["sync"]] = line["text"]
        elif line["type"] == "event":
            if jump := re.fullmatch(r"jumps from step \d+ to (\d+)", line["text"]):
                self.waits.progress[worker.number].note(int(jump[1]), log.at(line))
            self.tell(f"worker {worker.number}{f'.{rank}' * (self.options['--ranks'] > 1)}", line["text"],
                      log.at(line))

    def take_sync(self, worker, rank, log, line):
        when, contributors = log.at(line), line["contributors"] or []
        if rank == 0:
            self.take_wait(worker, when, line)
        if worker.number in contributors:
            worker.note_counted(line["sync"], when)
        else:
            self.tell(f"worker {worker.number}", f"merges sync {line['sync']}, which counts only workers "
                                                 f"{contributors}", when)
        self.newest = max(self.newest, line["sync"])
        for one in list(self.awaited):
            blow, struck, victims = one
            is_back = any(self.workers[w].started_at > struck for w in victims)
            if worker.number in victims or when < struck or not contributors:
                continue
            if is_back or not victims & set(contributors):
                self.totals.rows[blow.kind].others.append(when - struck)
                self.awaited.remove(one)

    def take_wait(self, worker, when, line):
        """Records how long a worker waited for a sync, and for which workers."""
        text, waited = self.applied.pop((worker.number, line["sync"]), ""), line["waited_seconds"]
        absent = re.search("workers? ([0-9, and]+) (?:is|are) missing", text)
        if absent and line["grace_seconds"] > waited / 2:
            missing = [int(number) for number in re.findall(r"\d+", absent[1])]
        else:
            missing = []
        wait = self.waits.weigh(worker.number, when - waited, when, line["send_step"],
                                line["contributors"] or [], missing)
        self.totals.purpose += waited - wait.seconds
        if wait.cause is None:
            return
        is_long = wait.seconds > worker.step_seconds()
        self.totals.waits[wait.cause].add(wait.seconds, is_long)
        if is_long:
            names = " and ".join(str(number) for number in wait.whom)
            self.tell(f"worker {worker.number}", f"has waited {wait.seconds:.3f} s for sync {line['sync']}, "
                                                 f"{wait.cause}{': worker ' * bool(names)}{names}", when)


# -----------------------------------------------------------------------------------------------------------
# The program

def check(arguments):
    """Raises a UserError if the requested run is impossible on this machine."""
    if not arguments.trainer.exists():
        raise UserError(f"there is no {arguments.trainer}: run make")
    if arguments.workers < 2:
        raise UserError("--workers is less than 2: no worker would be left when one is killed")
    if arguments.links and arguments.store != "redis":
        raise UserError(f"--links are to a Redis server: leave out --store {arguments.store}")
    if not kinds_of(arguments):
        raise UserError(f"no such blow is possible with these options: {', '.join(arguments.only)}")
    if lack := places.missing(arguments.store, arguments.links):
        raise UserError(lack)
    if arguments.share is not None and not 0 <= arguments.share <= 1:
        raise UserError(f"--share {arguments.share:g} is not a share of a core: give 0 to 1")
    if arguments.share and (lack := quota.missing()):
        raise UserError(f"--share {arguments.share:g} is not available: {lack}")


def available_share():
    """The default of --share on this machine."""
    lack = quota.missing()
    if not lack:
        return SHARE
    print(f"note: workers compete for this machine's cores, which lengthens waits: {lack}")
    return 0


def steps_of_a_run(arguments, folder, tokens):
    """The number of steps that take RUN_SECONDS, by a trial run of one worker with its share of a core, without a
    store."""
    options = {name: value for name, value in COMMON.items()
               if name not in ("--outer-transport", "--grace", "--timeout")}
    options.update({"--ranks": arguments.ranks, "-x": TRIAL_STEPS, "-n": 0})
    quotas = quota.Quotas() if arguments.share else None
    before = quotas.inside("trial", arguments.share * arguments.ranks) if quotas else []
    try:
        result = subprocess.run([*before, *command(tokens, folder, options, arguments.trainer)], text=True,
                                capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    finally:
        if quotas:
            quotas.close()
    if result.returncode != 0:
        raise UserError(f"the trial run ends with status {result.returncode}: {result.stderr[-300:]}")
    rows = [json.loads(line) for line in (folder / log_name(0)).read_text().splitlines()]
    return steps_that_take(RUN_SECONDS, [row["time"] for row in rows if row["type"] == "step"])


def steps_that_take(seconds, times):
    """times: when the trial run's steps ended. Waits for the share of a core are included, as in later runs."""
    return round(seconds / ((times[-1] - times[WARM]) / (len(times) - 1 - WARM)))


def chaos(arguments, seed, base, totals, journal):
    """One run after another, until the time is over or there have been enough events."""
    tokens = write_tokens(base / "tokens")
    if arguments.steps is None:
        arguments.steps = steps_of_a_run(arguments, base / "trial", tokens)
        print(f"each run has {arguments.steps} steps: {RUN_SECONDS} s on this machine", flush=True)
    begin, done, number = time.monotonic(), 0, 0
    until = begin + 60 * arguments.minutes
    while time.monotonic() < until and done < arguments.events:
        one = None
        try:
            one = Chaos(arguments, seed + number, base / f"run{number}", tokens, totals, journal)
            done += one.run(arguments.events - done, until)
        except (Failure, Divergence) as failure:
            failure.seed = seed + number
            raise
        finally:
            if one:
                one.close()
        print(f"{time.monotonic() - begin:6.0f} s   run {number}, seed {seed + number}: {done} events so far",
              flush=True)
        shutil.rmtree(base / f"run{number}")
        number += 1


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--events", type=int, default=10**6, help="end after this many events")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int,
                        help=f"steps of a run (default: as many as take {RUN_SECONDS} s on this machine)")
    parser.add_argument("--store", choices=["redis", "file", "s3"], default="redis")
    parser.add_argument("--links", action="store_true", help="each worker is a site behind a slow line; root")
    parser.add_argument("--share", type=float, metavar="CORES",
                        help=f"share of a core for each rank (default: {SHARE} for root with control groups, "
                             "else 0: no limit)")
    parser.add_argument("--only", nargs="+", metavar="KIND", choices=list(BLOWS), default=list(BLOWS),
                        help="only these kinds of blows: " + ", ".join(f'"{kind}"' for kind in BLOWS))
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    return parser.parse_args(words)


def main(words):
    arguments = parse(words)
    check(arguments)
    arguments.trainer = arguments.trainer.resolve()
    if arguments.share is None:
        arguments.share = available_share()
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.workers} workers, {arguments.minutes:g} minutes", flush=True)
    base, totals, journal = Path(tempfile.mkdtemp(prefix="chaos-")), Totals(), []
    status = 0
    try:
        chaos(arguments, seed, base, totals, journal)
    except (Failure, Divergence) as failure:
        names = ("workers", "ranks", "steps", "store", "share", "trainer")
        options = " ".join(f"--{name} {getattr(arguments, name)}" for name in names)
        options += " --links" * arguments.links
        if arguments.only != list(BLOWS):
            options += " --only" + "".join(f' "{kind}"' for kind in arguments.only)
        journal.append((time.monotonic(), "chaos", f"FAILURE: {failure}"))
        print(f"{failure}\nits files are in {base}; to reproduce it:\n    dev/break/chaos.py "
              f"--minutes {arguments.minutes:g} --seed {failure.seed} {options}")
        status = 1
    finally:
        write_journal(journal, base / "chaos.log")
        print(table(totals))
        print(f"what happened, in order: {base}/chaos.log")
    print(verdict(totals) if status == 0 else "FAILED")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that finally clauses end the processes it started
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
