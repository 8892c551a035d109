#!/usr/bin/env python3
"""Measures how little elastic workers wait (--outer-transport store): with workers of different speed, with a worker
that is lost and comes back, and over slow and long lines; and what the mode costs in an undisturbed run.

    dev/bench/uneven.py          makes the runs that are missing, and prints the tables (root; `make bench-uneven`)
    dev/bench/uneven.py --quick  a trial: every kind of run once, within minutes
    dev/bench/uneven.py --only links far --minutes 30

    bits     if no worker is late, runs through a folder, through Redis and in lock-step give the same bits
    costs    two busy workers: how much of their time heartbeats, decisions and the store take
    far      utilization over a line of 1 Gbit/s and 80 ms to the store, beside what dev/tools/simulate.py predicts
    links    lines of 10 Mbit/s that carry payloads all the time: is a worker mistaken for late or gone?
    uneven   one of four workers at half the speed, at a tenth, or absent: the speed of the others, in how many
             syncs it is counted, and the run's loss compared with that of an even run with as many tokens
    lost     one of four workers is killed at a third of the run and comes back at two thirds

Workers with speeds of their own have quotas of a core (quota.py), so small that all quotas and the store together
leave a part of the machine idle: the workers do not compete for it. Steps take as long as on a machine that is
several times slower than this one, and a worker with half the quota has exactly half the speed.

A finished run is a folder in --out and is not repeated, so this program can be stopped at any time; when --minutes
are over, no other run starts. Whether a bar is met is computed from the runs' logs.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/tools"), str(ROOT / "dev/bench"), str(ROOT / "dev/break/chaos"), str(ROOT / "dev/wan")]
import quota
import redis_server
import sites
from metrics import Parser, UserError, exit_status
from runs import above_zero, check_report, first_missing, run_missing
from uneven_jobs import KINDS, SCALES, all_jobs, made, train
from uneven_report import report


def run_job(arguments, number, job):
    seconds = train(arguments, job)
    print(f"{number:3}  {job.name:24} {seconds:.0f} s", flush=True)
    return seconds


def run_all(arguments):
    """Makes the missing runs. The number of steps of some depends on others."""
    run_missing(arguments.minutes,
                lambda: first_missing(all_jobs(arguments), lambda job: made(arguments, job)),
                lambda number, job: run_job(arguments, number, job))


def parse_arguments(words):
    parser = Parser(description="Elastic workers that are slow, far away, or lost.")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    parser.add_argument("--relay", type=Path, default=ROOT / "build/relay")
    parser.add_argument("--text", type=Path, default=ROOT / "build/uneven/text", help="token shards, bytes")
    parser.add_argument("--out", type=Path, help="folder of the runs (build/uneven, or build/uneven/quick)")
    parser.add_argument("--report", type=Path, help="write the tables here too")
    parser.add_argument("--seeds", type=above_zero(int), help="number of seeds, where losses are compared (3)")
    parser.add_argument("--minutes", type=above_zero(float, or_zero=True), default=120,
                        help="start no run that may end later (120; 0: only the tables of the finished runs)")
    parser.add_argument("--quick", action="store_true", help="every kind of run once, and short")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND",
                        help=" ".join(KINDS))
    arguments = parser.parse_args(words)
    arguments.scale = SCALES["quick" if arguments.quick else "full"]
    arguments.seeds = arguments.seeds or arguments.scale.seeds
    arguments.out = arguments.out or ROOT / "build/uneven" / ("quick" if arguments.quick else "")
    return arguments


def lacks(kinds):
    """What this machine lacks for runs of these kinds."""
    found = [redis_server.missing()]
    if {"far", "links"} & kinds:
        found.append(sites.missing())
    if {"far", "links", "uneven", "lost"} & kinds:
        found.append(quota.missing())
    return [lack for lack in found if lack is not None]


def check(arguments):
    if not arguments.trainer.exists():
        raise UserError(f"there is no {arguments.trainer}: run make train_gpt_cpu")
    for split in ("train", "val"):
        if not list(arguments.text.glob(f"*_{split}_*.bin")):
            raise UserError(f"{arguments.text} holds no tokens (*_{split}_*.bin): run make bench-uneven, "
                            "or give another --text")
    check_report(arguments.report)
    if lack := lacks(set(arguments.only)):
        raise UserError(lack[0])
    arguments.out.mkdir(parents=True, exist_ok=True)


def main(words):
    arguments = parse_arguments(words)
    check(arguments)
    run_all(arguments)
    text = report(arguments)
    print("\n" + text, end="")
    if arguments.report:
        arguments.report.write_text("# Elastic workers\n\n" + text)


if __name__ == "__main__":
    sys.exit(exit_status(main))
