#!/usr/bin/env python3
"""Measures how much of its speed a run keeps over a slow line: two trainer processes, each in its own network
namespace, real TCP between them, and dev/wan/relay.cpp for the distance.

    dev/bench/wan.py            makes the runs that are missing, and prints the tables (root; `make bench-wan`)
    dev/bench/wan.py --quick    only the unlimited and the slowest line, without the variants with tau = 1
    dev/bench/wan.py --only fp4-tau5 diloco --minutes 10

Utilization is tokens/s relative to the same method through the same relay without a limit or a delay. With fragments
it is measured over periods of H steps, each of which sends and merges every fragment once, without the first period;
for data-parallel it is measured over the median step, without the first step. The tables also have the prediction of
dev/tools/simulate.py from the unlimited run's log. To find the cause of a difference, a second prediction uses the
rate that a plain TCP connection reached on the line, and the duration of a step in this run.

A finished run is a folder in --out and is not repeated, so this program can be stopped at any time. No run starts that
may end after --minutes.
"""
import contextlib
import datetime
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/tools"), str(ROOT / "dev/bench"), str(ROOT / "dev/wan")]
from compare import read_run, size_text
from metrics import Parser, UserError, exit_status
from runs import (Budget, above_zero, check_report, machine, made_by, making, markdown,
                  time_and_waits)
from simulate import predict, read_measured
from simulation.trainer import IP_AND_TCP_HEADERS
from probe import both_ways
from sites import Line, Sites, missing, slow_start_after_idle

PROCESSES = 2

# 2.8M parameters, and bytes as tokens: in fp32 a step takes a third of a second on a core, as long as one of a large
# model on large machines, and data-parallel sends 11 MB in each step.
COMMON = {"--layers": 6, "--heads": 3, "--channels": 192, "--vocab-size": 257, "-t": 256, "-b": 8,
          "-l": 0.001, "-s": 0, "-v": 0, "--timeout": 120, "--matmul-precision": "highest"}
MEGABITS_A_STEP = 90  # sent by data-parallel
INNER_STEPS, PERIODS = 20, 2  # H, and the number of measured periods (twice as many in the unlimited runs)


@dataclass(frozen=True)
class Method:
    name: str
    title: str
    ranks: int      # ranks that share gradients in every step
    options: tuple  # pairs (name, value)

    @property
    def workers(self):
        return PROCESSES // self.ranks


def streams(name, title, layers, overlap, dtype):
    """A streaming method. Alpha is 0 without overlap: then there is no progress during the exchange to keep."""
    return Method(name, title, 1, (("-H", INNER_STEPS), ("--fragment-layers", layers), ("--overlap", overlap),
                                   ("--outer-dtype", dtype), ("--local-weight", 0.5 if overlap else 0)))


METHODS = [Method("data-parallel", "data-parallel", 2, ()),
           streams("diloco", "DiLoCo", 0, 0, "fp32"),
           streams("streaming", "streaming", 1, 0, "fp32"),
           streams("overlap-tau1", "+ overlap, tau 1", 1, 1, "fp32"),
           streams("overlap-tau5", "+ overlap, tau 5", 1, 5, "fp32"),
           streams("fp4-tau1", "+ fp4, tau 1", 1, 1, "fp4_e2m1"),
           streams("fp4-tau5", "+ fp4, tau 5", 1, 5, "fp4_e2m1")]

RATES, ROUND_TRIPS, LOSS = (0, 200, 40, 10), (0, 80), 0.001  # Mbit/s (0: unlimited), ms, and the last line's loss
QUEUE_MS = 50  # a queue holds what the line sends in this time or more, as in routers
PROBE_BYTES, PROBES = 5_000_000, 5


def make_line(megabits, round_trip_ms, loss, sysctls):
    """An unlimited line has jumbo frames and no queue, as between neighbours."""
    queue_ms, mtu = (max(round_trip_ms, QUEUE_MS), 1500) if megabits else (0, 9000)
    return Line(megabits, round_trip_ms, loss, queue_ms, mtu, sysctls=tuple(sysctls))


def make_lines(sysctls=()):
    """All lines. The first is the one that the others are compared with."""
    lines = [make_line(rate, trip, 0, sysctls) for trip in ROUND_TRIPS for rate in RATES]
    return [*lines, make_line(RATES[-1], ROUND_TRIPS[-1], LOSS, sysctls)]


def base_of(line):
    return make_line(0, 0, 0, line.sysctls)


def name_of(line):
    rate = f"{line.megabits:g}mbit" if line.megabits else "unlimited"
    return f"{rate}-{line.round_trip_ms:g}ms" + (f"-loss{line.loss:g}" if line.loss else "")


# --------------------------------------------------------------------------------------------------- running

def steps_of(method, line):
    """The number of steps of a run. For data-parallel as many as fit into half a minute, by a guess: it makes a call
    for each block's gradients and one for its parameters."""
    if method.ranks == 1:
        return INNER_STEPS * (1 + PERIODS * (2 if line == base_of(line) else 1))
    guess = 0.4 + (MEGABITS_A_STEP / line.megabits if line.megabits else 0) + 0.017 * line.round_trip_ms
    return min(60, max(5, math.ceil(30 / guess)))


def options_of(method, line, text):
    return {**COMMON, **dict(method.options), "--workers": method.workers, "--ranks": method.ranks,
            "-x": steps_of(method, line), "-i": f"{text}/*_train_*.bin"}


def start(trainer, options, sites, folder):
    """Starts a trainer in each site, as torchrun would, with one thread each, since there are few cores."""
    folder.mkdir(parents=True)
    words = [str(word) for option in options.items() for word in option]
    command = [str(Path(trainer).resolve()), *words, "-o", str(folder), "--store", f"file:{folder / 'store'}",
               "--interface", sites.interface]
    processes = []
    for site in range(PROCESSES):
        place = {"RANK": str(site), "WORLD_SIZE": str(PROCESSES), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        with open(folder / f"process{site}.log", "w") as output:
            processes.append(subprocess.Popen([*sites.inside(site), *command], env={**os.environ, **place},
                                              stdout=output, stderr=subprocess.STDOUT))
    return processes


@contextlib.contextmanager
def ended(processes):
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_for(processes, folder):
    for site, process in enumerate(processes):
        if process.wait() != 0:
            lines = (folder / f"process{site}.log").read_text().strip().splitlines() or ["no message"]
            raise UserError(f"the run of {folder.name} failed ({lines[-1]}): see {folder}/process*.log")


def train(trainer, relay, options, line, folder):
    """Trains into `folder` and returns what the devices and the relay counted."""
    with Sites(line, PROCESSES, relay) as sites:
        tcp = sites.tcp()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        processes = start(trainer, options, sites, folder)
        with ended(processes):
            wait_for(processes, folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        devices = [asdict(sites.counters(site)) for site in range(PROCESSES)]
    shutil.rmtree(folder / "store")
    for model in folder.glob("model_*.bin"):
        model.unlink()
    return {"devices": devices, "relay": sites.statistics, "tcp": tcp,
            "system_seconds": after.ru_stime - before.ru_stime}


def record_of(arguments, method, line):
    """The record that identifies a run."""
    options = options_of(method, line, arguments.text)
    return json.loads(json.dumps({**options, "line": asdict(line)}))


def folder_of(arguments, method, line):
    return arguments.out / f"{method.name}_{name_of(line)}"


def made(arguments, method, line):
    return made_by(folder_of(arguments, method, line), record_of(arguments, method, line))


def run(arguments, method, line):
    """Trains into a folder that appears when the run is complete. Returns its seconds."""
    record = record_of(arguments, method, line)
    with making(folder_of(arguments, method, line), arguments.trainer, record) as (part, kept):
        options = options_of(method, line, arguments.text)
        kept.update(train(arguments.trainer, arguments.relay, options, line, part))
    return kept["seconds"]


def probed(arguments):
    """{name of a line: Mbit/s of one TCP connection over it, both ways at once}"""
    path = arguments.out / "lines.json"
    return json.loads(path.read_text()) if path.exists() else {}


def probe_name(line):
    return "; ".join([name_of(line), *line.sysctls])


def probe_all(arguments, lines):
    for line in lines:
        known = probed(arguments)
        if probe_name(line) not in known:
            known[probe_name(line)] = both_ways(line, PROBE_BYTES, PROBES, arguments.relay)
            (arguments.out / "lines.json").write_text(json.dumps(known, indent=1) + "\n")


def run_all(arguments, methods, lines):
    """Line by line, the unlimited one first, so that finished runs can be compared whenever this is stopped."""
    budget = Budget(arguments.minutes)
    todo = [(method, line) for line in lines for method in methods]
    for number, (method, line) in enumerate(todo, 1):
        if made(arguments, method, line):
            continue
        if budget.is_spent():
            print(f"{arguments.minutes:g} minutes leave no time for another run: run this again", flush=True)
            return
        seconds = run(arguments, method, line)
        budget.spend(seconds)
        row = row_of(arguments, method, line)
        result = f"{percent(row.measured)}, predicted {percent(row.predicted)}" if row else "-"
        print(f"{number:3} of {len(todo)}  {method.name:14} {name_of(line):18} {result:24} {seconds:.0f} s",
              flush=True)


# ------------------------------------------------------------------------------------------------------ rows

def tokens_per_second(method, run):
    """Tokens/s of all processes together, by the slowest process, for which the others wait."""
    length = INNER_STEPS if method.ranks == 1 else 1
    slowest = 0.0
    for process in run.processes:
        seconds = [line["seconds"] for line in process.steps][length:]
        periods = [sum(seconds[i:i + length]) for i in range(0, len(seconds) - length + 1, length)]
        slowest = max(slowest, statistics.median(periods))
    tokens = sum(run.of_worker(worker)[0].steps[0]["tokens"] for worker in range(run.workers))
    return length * tokens / slowest


def busy_share(method, run):
    """The share of the measured time in which a process did not wait for an exchange, as the mean over processes; None
    if waits are not logged. Unlike tokens/s it does not change when the machine is slower for a while."""
    if method.ranks > 1:
        return None
    spent = (time_and_waits(process.steps, process.syncs, INNER_STEPS) for process in run.processes)
    return statistics.mean(1 - waited / seconds for _, seconds, waited in spent)


def step_seconds(method, run):
    """The duration of a step of each process, without waits if they are logged."""
    length = INNER_STEPS if method.ranks == 1 else 1
    spent = (time_and_waits(process.steps, process.syncs, length) for process in run.processes)
    return [(seconds - waited) / steps for steps, seconds, waited in spent]


def program_bytes(process):
    """The bytes that a process sent, by its log, plus the exchange before step 1, which the log leaves out and which is
    as large as the largest."""
    rehearsal = max((line["bytes_sent"] for line in process.syncs), default=0)
    return process.end["inner_bytes_sent"] + process.end["outer_bytes_sent"] + rehearsal


@dataclass
class Row:
    method: Method
    line: Line
    tokens_per_second: float
    measured: float   # utilization
    busy: object      # utilization by the time without waits; None: unknown
    predicted: float
    explained: float  # prediction for the rate that TCP reached on the line and the duration of a step in this run
    sent: int         # bytes that process 0 sent, by its log
    overhead: float   # bytes that the device sent, relative to the log's; the larger of both processes'
    waited: float     # seconds that process 0 waited
    lost: int         # packets, of all processes, lost in full queues and by the line
    network_share: float  # the trainers' system time and the relay's time, as a share of all cores
    step_seconds: list    # of each process; meaningless for data-parallel

    @property
    def best(self):
        """The measurement that is independent of the machine's speed, if there is one."""
        return self.measured if self.busy is None else self.busy


def row_of(arguments, method, line):
    """None if the run or its unlimited one is missing."""
    own, base = made(arguments, method, line), made(arguments, method, base_of(line))
    if not own or not base:
        return None
    base_folder = folder_of(arguments, method, base_of(line))
    run, relay = read_run(folder_of(arguments, method, line)), own["relay"]
    speed = tokens_per_second(method, run)
    overhead = max(device["bytes_sent"] / program_bytes(process)
                   for device, process in zip(own["devices"], run.processes))
    lost = sum(site["lost"] + site["up"]["dropped"] + site["down"]["dropped"] for site in relay["sites"])
    base_run = read_run(base_folder)
    busy, own_steps = busy_share(method, run), step_seconds(method, run)
    return Row(method, line, speed, speed / tokens_per_second(method, base_run),
               None if busy is None else busy / busy_share(method, base_run),
               prediction(base_folder, line, own["tcp"]),
               prediction(base_folder, line, own["tcp"], probed(arguments).get(probe_name(line)),
                          None if busy is None else statistics.mean(own_steps)),
               program_bytes(run.processes[0]), overhead,
               run.processes[0].end["waited_seconds"], lost,
               (own["system_seconds"] + relay["cpu_seconds"]) / relay["seconds"] / os.cpu_count(),
               own_steps)


def prediction(base_folder, line, tcp, probed_megabits=None, own_step_seconds=None):
    """probed_megabits: of payload, replaces the line's rate   own_step_seconds: replaces the unlimited run's"""
    if line == base_of(line):
        return 1.0
    rate = line.megabits * 1e6 if line.megabits else 1e11
    if probed_megabits:
        rate = probed_megabits * 1e6 * line.mtu / (line.mtu - IP_AND_TCP_HEADERS)
    measured = read_measured(base_folder)
    if own_step_seconds:
        measured = replace(measured, step_seconds=own_step_seconds)
    return predict(measured, rate, line.round_trip_ms / 1000, mtu=line.mtu,
                   slow_start_after_idle=slow_start_after_idle(tcp))


def percent(share):
    return f"{100 * share:.{1 if share < 0.1 else 0}f}%"


def line_text(line):
    rate = f"{line.megabits:g} Mbit/s" if line.megabits else "unlimited"
    return rate + (f", {100 * line.loss:g}% lost" if line.loss else "")


def overview(methods, lines, rows):
    """A table of each method's utilization on each line: measured, and predicted in brackets."""
    table = []
    for line in lines:
        cells = [rows.get((method, line)) for method in methods]
        if any(cells):
            table.append([f"{line.round_trip_ms:g} ms", line_text(line),
                          *(f"{percent(row.measured)} ({percent(row.predicted)})" if row else "-"
                            for row in cells)])
    return markdown(["round trip", "line", *(method.title for method in methods)], table)


def details(methods, lines, rows):
    table = [[f"{line.round_trip_ms:g} ms", line_text(line), method.title, f"{row.tokens_per_second:,.0f}",
              percent(row.measured), "-" if row.busy is None else percent(row.busy), percent(row.predicted),
              percent(row.explained), size_text(row.sent), f"{row.overhead:.3f}", f"{row.waited:.1f} s",
              str(row.lost), percent(row.network_share)]
             for line in lines for method in methods if (row := rows.get((method, line)))]
    return markdown(["round trip", "line", "method", "tokens/s", "by tokens/s", "by waits", "predicted",
                     "for TCP's rate, own steps", "sent by a process", "device / program", "waited",
                     "packets lost", "cores for packets"], table)


# --------------------------------------------------------------------------------------------------- verdicts

def bar_text(rows):
    """The claim: where data-parallel keeps at most 5%, Streaming DiLoCo in four bits keeps at least 95%."""
    data_parallel, fp4 = METHODS[0], METHODS[-1]
    slow = [row for (method, _), row in rows.items() if method == data_parallel and row.measured <= 0.05]
    if not slow:
        return "On none of these lines does data-parallel keep at most 5% of its speed."
    texts = []
    for row in slow:
        other = rows.get((fp4, row.line))
        if other:
            kept = [f"{percent(share)} by {what} ({'at least' if share >= 0.95 else 'NOT'} 95%)"
                    for what, share in (("waits", other.busy), ("tokens/s", other.measured)) if share is not None]
            texts.append(f"{line_text(row.line)} at {row.line.round_trip_ms:g} ms: data-parallel keeps "
                         f"{percent(row.measured)}, streaming with four bits and tau 5 keeps {', '.join(kept)}.")
    return "\n".join(texts)


def prediction_text(rows):
    """How many predictions hold. The others are repeated with the rate that TCP reached and the run's own duration of
    a step: if they then hold, those are the cause."""
    others = [row for row in rows.values() if row.line != base_of(row.line)]
    text = (f"{sum(abs(points(row)) <= 5 for row in others)} of {len(others)} predictions are within 5 points "
            "of the measured tokens/s")
    close = [row for row in others if abs(points(row, row.predicted)) <= 5]
    text += f", {len(close)} by waits (data-parallel: by tokens/s)."
    far = [row for row in others if row not in close]
    for row in far:
        text += (f"\n- {row.method.title} over {line_text(row.line)} at {row.line.round_trip_ms:g} ms: "
                 f"{points(row, row.predicted):+.1f}; with TCP's rate and the steps of this run "
                 f"{points(row, row.explained):+.1f}")
        if abs(points(row, row.explained)) <= 5:
            text += ", so these are the cause"
        elif row.busy is not None:
            text += (f"; a step took {min(row.step_seconds):.2f} s in one process, which waited for the other, where "
                     f"it took {max(row.step_seconds):.2f} s")
        text += "."
    return text


def points(row, predicted=None):
    """Points from the prediction to the measurement: by tokens/s, or, if `predicted` is given, by waits if known."""
    return 100 * (row.measured - row.predicted if predicted is None else row.best - predicted)


def setting_text(arguments, rows):
    runs = [made(arguments, *cell) for cell in rows]
    parameters = read_run(folder_of(arguments, *next(iter(rows)))).parameters
    text = (f"`make bench-wan`, {machine()}, {datetime.date.today()}: {parameters / 1e6:.2f}M parameters, "
            f"{COMMON['-b'] * COMMON['-t']:,} tokens per step and process, H = {INNER_STEPS}, two workers of "
            f"one process (data-parallel: one worker of two), one thread each; TCP with "
            f"{', '.join(sorted({one['tcp'][0] for one in runs}))}. {len(rows)} runs, "
            f"{sum(one['seconds'] for one in runs) / 60:.0f} minutes.")
    late = max(one["relay"]["late_ms_mean"] for one in runs)
    text += f" On average over a run, the relay delivered packets at most {late:.1f} ms late."
    programs = len({one["program"] for one in runs})
    return text + (f" The runs were made by {programs} different builds of the trainer." if programs > 1 else "")


def probe_text(arguments, lines):
    known = probed(arguments)
    found = [f"{known[probe_name(line)]:.{1 if line.megabits else 0}f} Mbit/s of {line_text(line)} at "
             f"{line.round_trip_ms:g} ms" for line in lines if probe_name(line) in known]
    return "What one plain TCP connection reaches on a line when it carries as much both ways (median of "\
           f"{PROBES} times {size_text(PROBE_BYTES)}): {', '.join(found)}." if found else ""


EXPLANATION = """\
A line limits what each worker sends and, separately, what it receives. Its queue holds what the line sends in 50 ms
or in a round trip, and at least 32 packets. The columns:

- device / program: the bytes that the namespace's device has sent, as the kernel counts them, over those that the
  program counts. The difference is headers, acknowledgements and retransmissions.
- packets lost: in full queues, and on lines that lose packets.
- waited: the seconds that process 0 waited for exchanges.
- cores for packets: the share of this machine's processor time that its kernel and the relay took. Training keeps
  every core busy except while it waits, so this share slows it down here. On a machine with an idle core it would
  not.
- by tokens/s: tokens/s, relative to the same method over the unlimited line.
- by waits: the share of time in which a process did not wait for an exchange, relative to the same method over the
  unlimited line, as the mean of both processes. Unlike tokens/s it does not follow the changing speed of a virtual
  machine. Data-parallel's waits are not logged.
- predicted: from the unlimited run's log and the line's rate; in the next column from the rate that TCP reached and
  from the duration of a step without waits in this run (data-parallel: in the unlimited run).

An exchange takes half a round trip plus the time to transfer the data. Data-parallel makes two such calls for each
block and one more per step, one after the other.

The nearest published measurement, for scale (github.com/Adnan082/diloco-measured, 2026-08): four L40S over
shaped Ethernet, 30.8M parameters; DiLoCo with H = 128 keeps 11.6% of its speed at 50 Mbit/s, 36% at 200, 72%
at 1,000 and 87% at 5,000; data-parallel keeps 0.04% at 50."""


def report(arguments, methods, lines):
    """(text, rows)"""
    cells = [(method, line) for line in lines for method in methods]
    rows = {cell: row for cell in cells if (row := row_of(arguments, *cell))}
    if not rows:
        raise UserError("no run over an unlimited line has finished: give it more --minutes")
    text = [setting_text(arguments, rows), "",
            "Tokens/s, relative to the same method over the unlimited line without a delay, measured "
            "(predicted):", "", overview(methods, lines, rows), "", bar_text(rows), "",
            prediction_text(rows), "", probe_text(arguments, lines), "", details(methods, lines, rows), "",
            EXPLANATION]
    if len(rows) < len(cells):
        text.append(f"{len(cells) - len(rows)} of {len(cells)} runs are missing: run it again.")
    return "\n".join(text) + "\n", rows


def draw(rows, path):
    """Draws the figure, if there are rows of limited lines."""
    from wan_figure import draw as draw_rows  # matplotlib takes a second to load

    shown = [row for row in rows.values() if row.line.megabits and not row.line.loss]
    if shown:
        draw_rows(path, [method.title for method in METHODS], shown)


def parse_arguments(words):
    names = [method.name for method in METHODS]
    parser = Parser(description="Training over slow lines.")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt_cpu")
    parser.add_argument("--relay", type=Path, default=ROOT / "build/relay")
    parser.add_argument("--text", type=Path, default=ROOT / "build/wan/text", help="token shards, bytes")
    parser.add_argument("--out", type=Path, default=ROOT / "build/wan", help="folder of the runs")
    parser.add_argument("--report", type=Path, help="write the tables here too, and the figure beside it")
    parser.add_argument("--minutes", type=above_zero(float, or_zero=True), default=40,
                        help="start no run that may end later (40; 0: only the tables of the finished runs)")
    parser.add_argument("--quick", action="store_true", help="only the slowest line: a quarter of the time")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=" ".join(names))
    parser.add_argument("--sysctl", action="append", default=[], metavar="NAME=VALUE",
                        help="set in the namespaces, such as net/ipv4/tcp_congestion_control=reno")
    return parser.parse_args(words)


def chosen(arguments):
    """(methods, lines)"""
    methods = [one for one in METHODS if not arguments.only or one.name in arguments.only]
    lines = make_lines(arguments.sysctl)
    if arguments.quick:
        methods = [one for one in methods if not one.name.endswith("tau1")]
        lines = [line for line in lines
                 if line == base_of(line) or (line.megabits == RATES[-1] and not line.loss)]
    return methods, lines


def check(arguments):
    if lack := missing():
        raise UserError(lack)
    if not arguments.trainer.exists():
        raise UserError(f"there is no {arguments.trainer}: run make train_gpt_cpu")
    if not list(arguments.text.glob("*_train_*.bin")):
        raise UserError(f"{arguments.text} holds no tokens: run make bench-wan, or give --text")
    check_report(arguments.report)
    arguments.out.mkdir(parents=True, exist_ok=True)


def main(words):
    arguments = parse_arguments(words)
    methods, lines = chosen(arguments)
    check(arguments)
    probe_all(arguments, lines)
    run_all(arguments, methods, lines)
    text, rows = report(arguments, methods, lines)
    print("\n" + text, end="")
    if arguments.report:
        figure = arguments.report.with_suffix(".png")
        draw(rows, figure)
        arguments.report.write_text(f"# Training over slow lines\n\n{text}\n![utilization]({figure.name})\n")


if __name__ == "__main__":
    sys.exit(exit_status(main))
