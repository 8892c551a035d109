"""The runs of uneven.py: their sizes, what happens to their workers, and the folders in which they are kept."""
import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/tools"), str(ROOT / "dev/bench"), str(ROOT / "dev/wan")]
from fleet import Fleet
from metrics import log_name, read_lines
from runs import made_by, making
from sites import Line

KINDS = ("bits", "costs", "far", "links", "uneven", "lost")

# Bytes as tokens. Two layers, for which a step takes a millisecond or two.
TINY = {"--layers": 2, "--heads": 2, "--channels": 32, "--vocab-size": 257, "-t": 16, "-b": 4, "-l": 0.01,
        "-v": 50, "-m": 2, "-H": 20, "--fragment-layers": 1, "--overlap": 3, "--outer-error-feedback": True,
        "--matmul-precision": "highest"}

# 2.8M parameters: a step takes a third of a second of a core, as long as one of a large model on large machines.
# H, fragments and tau are the program's defaults, which are the paper's values.
BUSY = {"--layers": 6, "--heads": 3, "--channels": 192, "--vocab-size": 257, "-t": 256, "-b": 8, "-l": 0.001,
        "-v": 0, "-H": 100, "--fragment-layers": 3, "--overlap": 1}
OFTEN = {"-H": 30, "--fragment-layers": 1}  # seven times as many syncs

# 3.2M parameters and few tokens: payloads of 0.4 MB in four bits, and little work between them.
CARRYING = {"--layers": 4, "--heads": 4, "--channels": 256, "--vocab-size": 257, "-t": 32, "-b": 1,
            "-l": 0.001, "-v": 0, "-H": 100, "--fragment-layers": 1, "--outer-weights": "tokens"}
FAR_WORKERS, FAR_OVERLAPS = (2, 4, 8), (1, 5)
NO_WAITS = 40      # tau of the runs right beside the store
FAR_SHARE = 0.15   # share of a core for each of two, four and eight workers
# As scripts/multi_node/README.md advises for long links. Reno exists in every namespace, and no packet is lost.
# (BBR paces its sending by what it has measured, here on short payloads, which dev/tools/simulate.py does not model.)
FAR_TCP = ("net/ipv4/tcp_congestion_control=reno", "net/ipv4/tcp_slow_start_after_idle=0")
FAR_LINE, NEAR_LINE = Line(megabits=1000, round_trip_ms=80, sysctls=FAR_TCP), Line(mtu=9000)
LINKS_OVERLAP, LINKS_SHARE = 45, 0.15
SLOW_LINE = Line(megabits=10, round_trip_ms=20, buffer_ms=50)
STORES_LINE = replace(SLOW_LINE, megabits=0)  # the store's line if the workers' are slow

# 0.86M parameters, for which a step takes about 50 ms of a core. Three fragments: one is sent every 16 steps.
LEARNING = {"--layers": 4, "--heads": 4, "--channels": 128, "--vocab-size": 257, "-t": 128, "-b": 8,
            "-l": 0.004, "-k": "cosine", "-q": 0.1, "-u": 40, "-c": 0.1, "-H": 48, "--fragment-layers": 2,
            "--overlap": 5, "--outer-weights": "tokens"}
TRAINING = ("--layers", "--heads", "--channels", "--vocab-size", "-t", "-b", "-l", "-i", "-s", "--seed")
STEP_TOKENS = LEARNING["-t"] * LEARNING["-b"]
VALIDATION_TOKENS = 40960
SHARE = 0.3        # share of a core for each of four workers
SLOWER = {"half": 2, "tenth": 10}
CHECKPOINTS = 12   # number of checkpoints in a run that loses a worker

STORE = {"--outer-transport": "store", "--timeout": 60}


@dataclass(frozen=True)
class Scale:
    learning_steps: int
    seeds: int
    costs_steps: int
    far_periods: int  # measured periods of H steps
    far_workers: tuple
    links_steps: int


SCALES = {"full": Scale(720, 3, 240, 3, FAR_WORKERS, 6600), "quick": Scale(96, 1, 105, 1, (2,), 300)}


@dataclass(frozen=True)
class Job:
    """A run, as its made_by.json records it."""
    name: str  # of its folder
    options: dict
    workers: int
    absent: tuple = ()  # workers that train alone on the same machine instead of taking part
    shares: tuple = ()  # share of a core for each worker; empty: no limits
    store: str = "redis"
    lines: tuple = ()   # each worker's line, and the store's; empty: all on one machine
    loses: int = -1     # the worker that is killed at a third of the steps and comes back at two thirds

    def record(self):
        return json.loads(json.dumps(asdict(self)))


def with_text(arguments, options, steps, seed=1):
    return {**options, "-x": steps, "--seed": seed, "-s": 0, "-i": f"{arguments.text}/*_train_*.bin",
            "-j": f"{arguments.text}/*_val_*.bin"}


# --------------------------------------------------------------------------------- two workers, on all cores

def bits_jobs(arguments):
    options = {**with_text(arguments, TINY, 200), "--workers": 2}
    nobody_late = {**options, **STORE, "--grace": 60, "--max-lag": 1000}
    return [Job("bits-tcp", {**options, "--outer-transport": "tcp"}, 2, store="file"),
            Job("bits-file", nobody_late, 2, store="file"), Job("bits-redis", nobody_late, 2)]


def costs_jobs(arguments):
    options = {**with_text(arguments, BUSY, arguments.scale.costs_steps), **STORE, "--workers": 2}
    return [*(Job(f"costs-{store}", options, 2, store=store) for store in ("redis", "file")),
            Job("costs-often", {**options, **OFTEN}, 2)]


# ----------------------------------------------------------------------------------------- far from the store

def far_job(arguments, workers, overlap, line, name):
    steps = CARRYING["-H"] * (1 + arguments.scale.far_periods)
    options = {**with_text(arguments, CARRYING, steps), **STORE, "--overlap": overlap, "--workers": workers}
    return Job(f"far-{workers}-{name}", options, workers, shares=(FAR_SHARE,) * workers,
               lines=(line,) * (workers + 1))


def near_job(arguments, workers):
    """The run that the distant ones are compared with."""
    return far_job(arguments, workers, NO_WAITS, NEAR_LINE, "near")


def distant_job(arguments, workers, overlap):
    return far_job(arguments, workers, overlap, FAR_LINE, f"tau{overlap}")


def far_jobs(arguments):
    return [one for workers in arguments.scale.far_workers
            for one in (near_job(arguments, workers),
                        *(distant_job(arguments, workers, overlap) for overlap in FAR_OVERLAPS))]


def links_jobs(arguments):
    options = {**with_text(arguments, CARRYING, arguments.scale.links_steps), **STORE,
               "--overlap": LINKS_OVERLAP, "--workers": 4}
    return [Job("links", options, 4, shares=(LINKS_SHARE,) * 4, lines=(SLOW_LINE,) * 4 + (STORES_LINE,))]


# -------------------------------------------------------------------------- four workers, and what they learn

def learning_job(arguments, name, seed, steps=None, **more):
    """A run of four workers, by default with equal shares."""
    steps = steps or arguments.scale.learning_steps
    options = {**with_text(arguments, LEARNING, steps, seed), **STORE, "--workers": 4, "-v": steps,
               "-m": VALIDATION_TOKENS // STEP_TOKENS}
    return Job(f"{name}-seed{seed}", options, 4, **{"shares": (SHARE,) * 4, **more})


def even_job(arguments, seed):
    return learning_job(arguments, "even", seed)


def without_job(arguments, name, seed):
    """The slower worker trains alone, so that the machine has as much to do."""
    return learning_job(arguments, f"without-{name}", seed, absent=(3,), shares=shares_with_slower(name))


def slower_job(arguments, name, seed):
    return learning_job(arguments, name, seed, shares=shares_with_slower(name))


def shares_with_slower(name):
    return (SHARE,) * 3 + (SHARE / SLOWER[name],)


def as_many_tokens(arguments, name, seed):
    """An even run with as many tokens as all workers of the uneven run trained on; None while that run is missing."""
    uneven = slower_job(arguments, name, seed)
    if made(arguments, uneven) is None:
        return None
    tokens = sum(log["step"][-1]["tokens"] for log in logs_of(arguments, uneven).values())
    return learning_job(arguments, f"even-as-{name}", seed, round(tokens / (4 * STEP_TOKENS)))


def lost_job(arguments, seed):
    """A run that loses a worker, which comes back from the newest of its own checkpoints."""
    job = learning_job(arguments, "lost", seed, loses=3)
    return replace(job, options={**job.options, "-n": job.options["-x"] // CHECKPOINTS, "-nk": 2})


def learning_jobs(arguments, kind, seed):
    """Runs whose speeds are compared follow each other directly, since the machine's speed changes."""
    if kind == "lost":
        return [even_job(arguments, seed), lost_job(arguments, seed)]
    jobs = [*(job(arguments, name, seed) for name in SLOWER for job in (without_job, slower_job)),
            *(as_many_tokens(arguments, name, seed) for name in SLOWER)]
    return [one for one in jobs if one is not None]


def jobs_of(arguments, kind):
    if kind in ("uneven", "lost"):
        return [one for seed in range(1, arguments.seeds + 1) for one in learning_jobs(arguments, kind, seed)]
    alone = {"bits": bits_jobs, "costs": costs_jobs, "far": far_jobs, "links": links_jobs}
    return alone[kind](arguments)


def all_jobs(arguments):
    """All runs that are known so far, seed by seed. The number of steps of some depends on others."""
    jobs = [one for kind in KINDS if kind in arguments.only for one in jobs_of(arguments, kind)]
    return sorted(jobs, key=lambda one: one.options["--seed"])


# --------------------------------------------------------------------------------------------------- the runs

def made(arguments, job):
    """The run's made_by.json; None if the run is missing."""
    return made_by(arguments.out / job.name, job.record())


def logs_of(arguments, job):
    """{worker: its lines by type} of a finished run, without absent workers."""
    folder = arguments.out / job.name
    return {worker: read_lines(folder / log_name(worker)) for worker in range(job.workers)
            if worker not in job.absent}


def play(fleet, job):
    """Runs the job from the start of all workers to their end."""
    for worker in range(job.workers):
        if worker in job.absent:
            fleet.start_alone(worker, {name: job.options[name] for name in TRAINING})
        else:
            fleet.start(worker)
    if job.loses >= 0:
        steps = job.options["-x"]
        fleet.wait_for_step(0, steps // 3)
        fleet.kill(job.loses)
        fleet.wait_for_step(0, 2 * steps // 3)
        fleet.start(job.loses, {"-y": 1})
    fleet.wait()


def train(arguments, job):
    """Makes the run in a folder that appears when it is complete. Returns its seconds."""
    with making(arguments.out / job.name, arguments.trainer, job.record()) as (part, made_of):
        with Fleet(arguments.trainer, job.options, part, job.workers, dict(enumerate(job.shares)), job.store,
                   job.lines, arguments.relay) as fleet:
            play(fleet, job)
        made_of.update(cores=fleet.cores, wall_seconds=fleet.wall,
                       devices=[asdict(one) for one in fleet.traffic], tcp=fleet.tcp)
        for models in part.glob("worker_*/"):
            shutil.rmtree(models)
    return made_of["seconds"]
