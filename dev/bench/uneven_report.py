"""The report on the runs of uneven.py: measures from their logs, bars and whether each is met, and tables."""
import datetime
import math
import statistics
from dataclasses import dataclass

from uneven_jobs import (BUSY, CARRYING, FAR_LINE, FAR_OVERLAPS, FAR_WORKERS, KINDS, LEARNING, LINKS_OVERLAP,
                         NO_WAITS, SLOW_LINE, SLOWER, all_jobs, as_many_tokens, bits_jobs, costs_jobs,
                         distant_job, even_job, links_jobs, logs_of, lost_job, made, near_job, slower_job,
                         without_job)  # finds dev/, too
from compare import read_run, size_text, validation_loss
from runs import difference_text, machine, markdown, paired, time_and_waits
from simulate import predict, read_measured
from sites import slow_start_after_idle

KEPT_SPEED, COUNTED = 0.97, 0.90  # bars with one slower worker: the others' speed, its share of syncs
UNEVEN_LOSS, LOST_LOSS = 1.0, 0.5  # percent
COST = 0.001                       # share of a step
APART = 5                          # percentage points
LINKS_MINUTES = 10
ABSENCE = ("late", "gone")


# --------------------------------------------------------------------------------------------------- measures

def steps_per_second(logs, workers, length):
    """After the first `length` steps, with waits: (the workers' mean over all steps, the median over windows of
    `length` steps)."""
    rates, windows = [], []
    for worker in workers:
        seconds = [line["seconds"] for line in logs[worker]["step"]][length:]
        rates.append(len(seconds) / sum(seconds))
        windows += [length / sum(seconds[i:i + length]) for i in range(0, len(seconds) - length + 1, length)]
    return statistics.mean(rates), statistics.median(windows)


def counted_share(logs, worker, seen_by=0):
    """The share of the syncs that `seen_by` has merged in which `worker` was counted."""
    syncs = logs[seen_by]["sync"]
    return sum(worker in line["contributors"] for line in syncs) / len(syncs)


def share_of_tokens(logs, worker, other=0):
    return logs[worker]["step"][-1]["tokens"] / logs[other]["step"][-1]["tokens"]


def busy_share(log, length):
    """The share of a worker's time, after its first `length` steps, in which it did not wait for a sync."""
    _, seconds, waited = time_and_waits(log["step"], log["sync"], length)
    return 1 - waited / seconds


def happened(logs, kinds):
    """[(worker whose log has the event, line)] of events of these kinds."""
    return [(worker, line) for worker, log in logs.items() for line in log.get("event", [])
            if line["kind"] in kinds]


# ------------------------------------------------------------------------------------------------------- bars

@dataclass
class Bar:
    claim: str
    found: object  # text; None: a run is missing
    is_met: bool

    def text(self):
        if self.found is None:
            return f"- **not measured**: {self.claim}"
        return f"- **{'met' if self.is_met else 'MISSED'}**: {self.claim}: {self.found}"


@dataclass
class Section:
    title: str
    bars: list
    text: str = ""  # its table, with notes


def percent(share, digits=1):
    return f"{100 * share:.{digits}f}%"


# --------------------------------------------------------------------------------- two workers, on all cores

def trace(logs):
    """All losses, and the hashes of the global parameters at each sync."""
    fields = {"step": ("step", "loss"), "eval": ("step", "loss"), "sync": ("sync", "global_hash")}
    return {kind: [[line[name] for name in names] for _, log in sorted(logs.items()) for line in log[kind]]
            for kind, names in fields.items()}


def bits_section(arguments):
    title, claim = "The same bits", "if no worker is late, elastic and lock-step give the same bits for 200 steps"
    jobs = bits_jobs(arguments)
    if any(made(arguments, job) is None for job in jobs):
        return Section(title, [Bar(claim, None, False)])
    lock_step, *others = (trace(logs_of(arguments, job)) for job in jobs)
    other = [job.store for job, one in zip(jobs[1:], others) if one != lock_step]
    found = (f"{len(lock_step['step'])} losses and {len(lock_step['sync'])} hashes of two workers' global parameters, "
             + (f"different over {' and '.join(other)}" if other else "over TCP, a folder and Redis"))
    return Section(title, [Bar(claim, found, not other and len(lock_step["step"]) == 400)])


def costs_of(log):
    """(share of time for decisions, share of time for the threads, seconds of a step, share of time for waits)"""
    (end,) = log["end"]
    seconds = end["train_seconds"]
    return (end["log_turn_seconds"] / seconds, end["log_thread_seconds"] / seconds,
            seconds / len(log["step"]), end["waited_seconds"] / seconds)


def costs_section(arguments):
    bars, table = [], []
    for job in costs_jobs(arguments):
        claim = f"heartbeats, decisions and the store ({job.store}) take at most {percent(COST)} of a step"
        has_bar = job.options["-H"] == BUSY["-H"]
        if made(arguments, job) is None:
            bars += [Bar(claim, None, False)] * has_bar
            continue
        logs = logs_of(arguments, job)
        turns, threads, step, waits = max(map(costs_of, logs.values()), key=lambda one: one[0] + one[1])
        found = f"{percent(turns + threads, 3)} of {1000 * step:.0f} ms"
        bars += [Bar(claim, found, turns + threads <= COST)] * has_bar
        table.append([job.store, str(job.options["-H"]), str(len(logs[0]["sync"])), f"{1000 * step:.0f} ms",
                      percent(turns, 3), percent(threads, 3), percent(turns + threads, 3), percent(waits, 2)])
    header = ["store", "H", "syncs", "step", "training stood still", "processor time of threads", "both",
              "waits"]
    text = markdown(header, table) + f"""

Two workers keep two cores busy, tau = {BUSY['--overlap']}; the figures are of the worker that spent more. The bar
is for H = 100, as in long runs; fragments of one layer and H = 30 cost more. "Training stood still" counts
decisions only. Waits for others have their own column, and encoding and merging, which every transport has, are
left out."""
    return Section("What it costs", bars, text if table else "")


# ----------------------------------------------------------------------------------------- far from the store

def utilization(arguments, job, base):
    """[by steps/s, by the share of time in which workers did not wait], relative to the run `base`."""
    found = []
    for one in (job, base):
        logs, period = logs_of(arguments, one), CARRYING["-H"]
        _, speed = steps_per_second(logs, logs, period)
        found.append((speed, statistics.mean(busy_share(log, period) for log in logs.values())))
    return [measured / of_base for measured, of_base in zip(*found)]


@dataclass
class Distance:
    workers: int
    overlap: int
    step_seconds: float
    payload: int
    speed: float
    busy: float
    even: float  # predicted for workers whose steps all take the same time
    predicted: float
    cores: float

    @property
    def apart(self):
        return 100 * (self.busy - self.predicted)


def distance(arguments, workers, overlap):
    """None if one of the two runs is missing."""
    near, far = near_job(arguments, workers), distant_job(arguments, workers, overlap)
    if made(arguments, near) is None or made(arguments, far) is None:
        return None
    run = read_measured(arguments.out / near.name)
    how = made(arguments, far)
    payload = min(line["bytes_sent"] for line in logs_of(arguments, far)[0]["sync"])
    even, predicted = (
        predict(run, FAR_LINE.megabits * 1e6, FAR_LINE.round_trip_ms / 1000, jitter, overlap=overlap,
                mtu=FAR_LINE.mtu, slow_start_after_idle=slow_start_after_idle(how["tcp"]))
        / predict(run, math.inf, 0, jitter, overlap=NO_WAITS) for jitter in (False, True))
    speed, busy = utilization(arguments, far, near)
    return Distance(workers, overlap, run.step_seconds, payload, speed, busy, even, predicted, how["cores"])


def far_section(arguments):
    rows = [distance(arguments, workers, overlap) for workers in FAR_WORKERS for overlap in FAR_OVERLAPS]
    claim = (f"utilization over a line of 1 Gbit/s and 80 ms to the store, with "
             f"{', '.join(map(str, FAR_WORKERS))} workers, is within {APART} points of what dev/tools/simulate.py "
             "predicts")
    there = [row for row in rows if row is not None]
    most = max((abs(row.apart) for row in there), default=0)
    found = f"at most {most:.1f} points apart" if None not in rows else None
    table = [[str(row.workers), str(row.overlap), f"{1000 * row.step_seconds:.0f} ms", size_text(row.payload),
              percent(row.busy), percent(row.predicted), f"{row.apart:+.1f}", percent(row.even),
              percent(row.speed), f"{row.cores:.2f}"] for row in there]
    header = ["workers", "tau", "step", "payload", "utilization", "predicted", "points apart", "even steps",
              "steps/s", "cores in use"]
    text = markdown(header, table) + f"""

Each worker and the Redis server is a site behind such a line, and the server's line carries what all workers
write and read. TCP uses Reno, without slow start after idle. H = {CARRYING['-H']}, five fragments.
Utilization is the share of time in which workers do not wait, relative to the same workers right beside the
store with tau = {NO_WAITS}. Steps/s are the median over periods of H steps, relative to the same workers; they
also vary with the machine's speed from run to run. Predictions are made from the log of the workers beside the
store, whose steps differ in length from worker to worker and from step to step; "even steps" is the prediction
for steps of equal length."""
    return Section("Far from the store", [Bar(claim, found, most <= APART)], text if table else "")


def links_section(arguments):
    title, (job,) = "Slow lines", links_jobs(arguments)
    claim = ("over lines of 10 Mbit/s that carry payloads all the time, no worker is mistaken for late or gone "
             f"in {LINKS_MINUTES} minutes")
    how = made(arguments, job)
    if how is None:
        return Section(title, [Bar(claim, None, False)])
    logs = logs_of(arguments, job)
    absences, syncs = happened(logs, ABSENCE), logs[0]["sync"]
    minutes = min(log["end"][0]["time"] for log in logs.values()) / 60
    lacking = sum(len(line["contributors"]) < job.workers for line in syncs)
    found = (f"{len(absences)} such events in {minutes:.1f} minutes, and {lacking} of {len(syncs)} syncs "
             "without a worker")
    busy = [8e-6 * device["bytes_received"] / how["wall_seconds"] / SLOW_LINE.megabits
            for device in how["devices"][:job.workers]]
    row = [f"{minutes:.1f}", str(len(syncs)), size_text(max(line["bytes_sent"] for line in syncs)),
           f"{percent(min(busy), 0)} to {percent(max(busy), 0)}",
           percent(1 - statistics.mean(busy_share(log, CARRYING["-H"]) for log in logs.values())),
           *(str(sum(line["kind"] == kind for _, line in absences)) for kind in ABSENCE), str(lacking)]
    said = [f"\n- worker {worker} at step {line['step']}: {line['text']}" for worker, line in absences]
    text = markdown(["minutes", "syncs", "payload", "workers' lines in use", "waits", *ABSENCE,
                     "syncs without a worker"], [row]) + f"""

Four workers, each behind a line of 10 Mbit/s and 20 ms, and a store with a wide line. A fragment is sent every
{CARRYING['-H'] // 5} steps and merged {LINKS_OVERLAP} steps later, so two or three are in flight at any time.
Heartbeats go through the same queues. "Lines in use" is the share of what each line could have carried to its
worker.""" + "".join(said[:20])
    is_absent = bool(absences) or lacking > 0
    is_long = minutes >= LINKS_MINUTES
    return Section(title, [Bar(claim, found if is_absent or is_long else None, not is_absent)], text)


# -------------------------------------------------------------------------- four workers, and what they learn

def by_seed(arguments, job_of):
    """{seed: job} of the finished jobs."""
    jobs = {seed: job_of(seed) for seed in range(1, arguments.seeds + 1)}
    return {seed: job for seed, job in jobs.items() if job is not None and made(arguments, job) is not None}


@dataclass
class Losses:
    """Losses of runs and of the runs that they are compared with, for the seeds that both have."""
    runs: list
    base: list
    differences: list  # percent

    def text(self):
        return difference_text(self.differences, 2)

    def cells(self):
        """Cells of a table: both mean losses, and their difference."""
        means = [f"{statistics.mean(losses):.4f}" if losses else "-" for losses in (self.runs, self.base)]
        return [*means, self.text()]

    def bar(self, claim, limit, seeds):
        """Counts as measured only with all seeds, since a few of them might be lucky."""
        if len(self.differences) < seeds:
            return Bar(claim, None, False)
        found = f"{self.text()}, {seeds} seed{'s' * (seeds > 1)}"
        return Bar(claim, found, statistics.mean(self.differences) <= limit)


def losses_of(arguments, runs, base):
    """runs, base: {seed: job}"""
    both = [{seed: read_run(arguments.out / jobs[seed].name) for seed in sorted(runs.keys() & base.keys())}
            for jobs in (runs, base)]
    return Losses(*([validation_loss(run) for run in read.values()] for read in both), paired(*both))


@dataclass
class Slower:
    """Measures of runs in which one of four workers is slower, by seed."""
    kept: list     # time in which the other three do not wait, relative to a run without the slower one
    speed: list    # the others' steps/s, relative to the same run; they also vary with the machine's speed
    counted: list  # the share of the syncs that count it
    tokens: list   # its tokens, relative to another worker's


def read_slower(arguments, name):
    without = by_seed(arguments, lambda seed: without_job(arguments, name, seed))
    found = Slower([], [], [], [])
    for seed, job in by_seed(arguments, lambda seed: slower_job(arguments, name, seed)).items():
        if seed in without:
            logs, length = logs_of(arguments, job), LEARNING["-H"]
            both = [[(busy_share(one[worker], length), steps_per_second(one, (worker,), length)[0])
                     for worker in (0, 1, 2)] for one in (logs, logs_of(arguments, without[seed]))]
            (busy, speed), (own_busy, own_speed) = ([statistics.mean(values) for values in zip(*one)]
                                                    for one in both)
            found.kept.append(busy / own_busy)
            found.speed.append(speed / own_speed)
            found.counted.append(counted_share(logs, 3))
            found.tokens.append(share_of_tokens(logs, 3))
    return found


def slower_bars(arguments, name, slower, losses):
    which = "one of four workers at " + ("half the speed" if name == "half" else f"a {name} of the speed")
    is_whole = len(slower.kept) == arguments.seeds
    kept, counted = (statistics.median(values or [0]) for values in (slower.kept, slower.counted))
    bars = [Bar(f"{which}: the others keep {percent(KEPT_SPEED, 0)} of the speed that they have without it",
                percent(kept) if is_whole else None, kept >= KEPT_SPEED)]
    if name == "half":
        bars.append(Bar(f"{which}: it is counted in {percent(COUNTED, 0)} of the syncs",
                        percent(counted) if is_whole else None, counted >= COUNTED))
    claim = (f"{which}: validation loss at most {UNEVEN_LOSS:g}% above that of an even run with as many "
             "tokens")
    return [*bars, losses.bar(claim, UNEVEN_LOSS, arguments.seeds)]


def uneven_section(arguments):
    bars, table = [], []
    for name, times in SLOWER.items():
        slower = read_slower(arguments, name)
        losses = losses_of(arguments, by_seed(arguments, lambda seed: slower_job(arguments, name, seed)),
                           by_seed(arguments, lambda seed: as_many_tokens(arguments, name, seed)))
        bars += slower_bars(arguments, name, slower, losses)
        if slower.kept:
            medians = [statistics.median(values) for values in (slower.kept, slower.speed, slower.counted,
                                                                slower.tokens)]
            table.append([f"1/{times}", *map(percent, medians), *losses.cells(), str(len(slower.kept))])
    text = markdown(["its speed", "the others keep", "steps/s", "it is counted in",
                     "tokens, of another's", "loss", "even run's", "difference", "seeds"], table) + f"""

"The others keep" compares the share of time in which the three others do not wait, after the first
{LEARNING['-H']} steps, with that of a run of these three beside which the fourth trains alone. "Steps/s" makes
the same comparison, and also varies with the machine's speed from run to run. Medians over seeds;
H = {LEARNING['-H']}, tau = {LEARNING['--overlap']}, means weighted by tokens. The four workers of the even run
train on as many tokens together, in fewer steps."""
    return Section("One of four workers is slower", bars, text if table else "")


def lost_section(arguments):
    runs = by_seed(arguments, lambda seed: lost_job(arguments, seed))
    losses = losses_of(arguments, runs, by_seed(arguments, lambda seed: even_job(arguments, seed)))
    claim = (f"a run that loses one of four workers at a third and gets it back at two thirds ends at most "
             f"{LOST_LOSS}% above the undisturbed run's validation loss")
    section = Section("One of four workers is lost and comes back",
                      [losses.bar(claim, LOST_LOSS, arguments.seeds)])
    if runs:
        logs = [logs_of(arguments, job) for job in runs.values()]
        counted = statistics.median(counted_share(one, 3) for one in logs)
        tokens = statistics.median(share_of_tokens(one, 3) for one in logs)
        section.text = markdown(
            ["it is counted in", "tokens, of another's", "loss", "undisturbed", "difference", "seeds"],
            [[percent(counted), percent(tokens), *losses.cells(), str(len(runs))]])
    return section


# ----------------------------------------------------------------------------------------------------- report

SECTIONS = {"bits": bits_section, "costs": costs_section, "far": far_section, "links": links_section,
            "uneven": uneven_section, "lost": lost_section}


def setting_text(arguments, runs):
    seeds = "" if arguments.seeds == arguments.scale.seeds else f' ARGUMENTS="--seeds {arguments.seeds}"'
    text = (f"`make bench-uneven{seeds}`, {machine()}, {datetime.date.today()}: {len(runs)} runs, "
            f"{sum(one['seconds'] for one in runs) / 60:.0f} minutes.")
    cores = [one["cores"] for one in runs if one["options"]["shares"]]
    if cores:
        text += f" In runs with quotas, at most {max(cores):.2f} cores were in use."
    if arguments.quick:
        text += " With --quick, the runs are too short for these figures to mean anything."
    programs = len({one["program"] for one in runs})
    return text + (f" The runs were made by {programs} different builds of the trainer." if programs > 1 else "")


def report(arguments):
    jobs = all_jobs(arguments)
    runs = [how for how in (made(arguments, job) for job in jobs) if how is not None]
    sections = [SECTIONS[kind](arguments) for kind in KINDS if kind in arguments.only]
    lines = [setting_text(arguments, runs), "", *(bar.text() for one in sections for bar in one.bars)]
    for one in sections:
        lines += ["", f"## {one.title}", "", one.text] if one.text else []
    if len(runs) < len(jobs):
        lines += ["", f"{len(jobs) - len(runs)} of {len(jobs)} runs are missing: run it again."]
    return "\n".join(lines) + "\n"
