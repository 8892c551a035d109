#!/usr/bin/env python3
"""Shows all processes of a run in progress, from the logs that they write.

    dev/tools/watch.py RUN...         live, until q or Ctrl-C; RUN: a run's folder (its -o), or its sites' folders
    dev/tools/watch.py --once RUN...  one picture, for pipes

Each line is of one process: "1.0" is worker 1's rank 0. Its columns:

    loss, tokens/s    of its worker; the loss of its last step, the rate over the last minute
    in flight         fragments that were sent and are not merged yet: 2:3/5 is fragment 2, sent three steps
                      ago and due five after its send. It follows from the schedule and the step in the log
    sent, received    in all by this process, to its worker's ranks and to other workers
    wait              how much of the last minute (of its log) training stood still before merges
    ckpt              step of the last checkpoint that it has copied; the top says which is whole
    state             "!-7 40 s": 7 steps behind the foremost process, and no line written for 40 s, if that is
                      longer than ten steps take (and than five seconds). If one process hangs, all others end
                      up waiting for it, and it is among those that are behind

In an elastic run (--outer-transport store) the state is what the workers' logs say of each other: "late"
(others continued without it), "gone" (no sign of life), "catch-up" (it waits for a snapshot), "too few" (it
waits for --min-workers), "no store", "stopped". The last of such changes are listed below the table.

Logs that do not exist yet are waited for, and a log that a resumed run cuts is read again.
"""
import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

from metrics import GrowingLog, Parser, UserError, exit_status, log_name, tokens_of_step

MINUTE = 60           # seconds of log over which rates and waits are taken
KEPT_STEPS = 5000     # steps kept of each process, for rates and the line of losses
TAIL = 4 << 20        # bytes at a log's end whose steps are read when watching begins
READ_AT_ONCE = 16 << 20  # bytes of one log in one picture
STEP_FIELDS = ("step", "time", "seconds", "tokens", "tokens_per_second", "inner_bytes_sent",
               "inner_bytes_received")  # that every step has; its loss may be null
EVENT_FIELDS = ("unix_time", "kind", "sync", "worker", "text")
BEHIND_STEPS, BEHIND_SECONDS = 2, 1  # behind: by at least so many steps, and by more seconds
SILENT_STEPS, SILENT_SECONDS = 10, 5
LATER_SECONDS = 30    # within which several workers report the same event
CHANGES = 20          # that are kept
# The state that an event gives to its worker, until a later event changes it.
STANDINGS = {"late": "late", "gone": "gone", "needs_snapshot": "catch-up", "snapshot_gone": "catch-up",
             "too_few": "too few", "store_lost": "no store", "stops": "stopped", "starts": "", "jumps": "",
             "takes_snapshot": "", "store_back": "", "joined": "", "back": "", "done": ""}
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


# -----------------------------------------------------------------------------------------------------------
# One process and its log

class Schedule:
    """When fragments are sent and due (streaming/schedule.h), from a run or resume line."""

    def __init__(self, line):
        options = line.get("options", {})
        self.period = int(options.get("inner-steps", 0))
        self.overlap = int(options.get("overlap", 0))
        self.exchanges = options.get("outer-optimizer") not in (None, "none") and self.period > 0
        self.offsets = dict(enumerate(map(int, line.get("fragment_offsets") or [])))

    def learn(self, sync):
        """Logs of version 1 lack the offsets, which are known once each fragment has been merged."""
        if self.period:
            self.offsets.setdefault(sync["fragment"], sync["send_step"] % self.period)

    def is_as(self, other):
        return (self.period, self.offsets) == (other.period, other.offsets)

    def last_sends(self, step):
        """[(fragment, step of its last send)], of those that have been sent in the steps 1..step."""
        sends = [(fragment, step - (step - offset) % self.period)
                 for fragment, offset in sorted(self.offsets.items())]
        return [(fragment, send) for fragment, send in sends if send >= 1]


class ProcessView:
    """One process, as far as its log has been read."""

    def __init__(self, path):
        self.log = GrowingLog(path, TAIL)
        self.grown_at = None  # time.time() when the log was last seen to have grown
        self._begin()

    def _begin(self):
        self.beginning = self.log.beginnings
        self.place = None     # the newest run or resume line
        self.schedule = None
        self.resumed_at = 0
        self.steps = deque(maxlen=KEPT_STEPS)
        self.syncs = deque(maxlen=KEPT_STEPS)  # (time, seconds waited)
        self.events = deque(maxlen=KEPT_STEPS)
        self.counted_at = 0   # unix time of the last sync that this worker was counted in
        self.merged = {}      # fragment: send step of the last that was merged
        self.outer_sent = self.outer_received = 0
        self.eval = self.hellaswag = self.checkpoint = self.end = None

    def read(self):
        before = self.log.offset
        lines = self.log.read(READ_AT_ONCE)
        if self.log.beginnings != self.beginning:
            self._begin()
        if self.log.offset != before:
            self.grown_at = time.time() if self.grown_at is not None else self.log.written_at
        for line in lines:
            try:
                self._take(line)
            except (KeyError, TypeError, ValueError):
                self.log.unreadable += 1

    def _take(self, line):
        kind = line["type"]
        if kind in ("run", "resume"):
            self._take_place(line)
        elif kind == "step":
            self.steps.append({"skipped": line.get("skipped"), "loss": line.get("loss"),
                               **{field: line[field] for field in STEP_FIELDS}})
        elif kind == "sync":
            self.syncs.append((line["time"], line["waited_seconds"]))
            self.merged[line["fragment"]] = line["send_step"]
            self.outer_sent += line["bytes_sent"]
            self.outer_received += line["bytes_received"]
            if self.schedule:
                self.schedule.learn(line)
            if line.get("counted"):
                self.counted_at = self.place["unix_time"] + line["time"] - self.place["time"]
        elif kind == "event":
            if line["kind"] in STANDINGS:
                self.events.append({field: line[field] for field in EVENT_FIELDS})
        elif kind == "eval":
            self.eval = line
        elif kind == "hellaswag":
            self.hellaswag = line
        elif kind == "checkpoint":
            self.checkpoint = line["step"]
        self.end = line if kind == "end" else None

    def _take_place(self, line):
        before, self.place, self.schedule = self.schedule, line, Schedule(line)
        if before and not self.schedule.offsets and self.schedule.period == before.period:
            self.schedule.offsets = before.offsets  # of version 1: as far as they are known
        if before and not self.schedule.is_as(before):  # what was in flight then was merged at once
            self.merged, self.resumed_at = {}, line.get("step", 0)

    @property
    def step(self):
        if self.steps:
            return self.steps[-1]["step"]
        return self.place.get("step", 0) if self.place else 0

    @property
    def loss(self):
        return self.steps[-1]["loss"] if self.steps else None

    @property
    def tokens(self):
        return self.steps[-1]["tokens"] if self.steps else 0

    def last_minute(self):
        """The steps of the last minute, by the log's own time."""
        if not self.steps:
            return []
        recent, now = [], self.steps[-1]["time"]
        for line in reversed(self.steps):
            if now - line["time"] > MINUTE:
                break
            recent.append(line)
        return recent[::-1]

    def tokens_per_second(self):
        """By the log's times if there are two steps, so that evaluations and checkpoints are included."""
        recent = self.last_minute()
        if len(recent) > 1 and recent[-1]["time"] > recent[0]["time"]:
            return sum(map(tokens_of_step, recent[1:])) / (recent[-1]["time"] - recent[0]["time"])
        return self.steps[-1]["tokens_per_second"] if self.steps else None

    def step_seconds(self):
        recent = self.last_minute()
        if len(recent) > 1:
            return (recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1)
        return self.steps[-1]["seconds"] if self.steps else None

    def bytes(self, direction):
        outer = self.outer_sent if direction == "sent" else self.outer_received
        return outer + (self.steps[-1][f"inner_bytes_{direction}"] if self.steps else 0)

    def wait_share(self):
        """Of the last minute; None if nothing is exchanged."""
        if not self.steps or not self.schedule or not self.schedule.exchanges:
            return None
        recent = self.last_minute()
        now, begin = recent[-1]["time"], recent[0]["time"] - recent[0]["seconds"]
        waited = sum(seconds for at, seconds in self.syncs if at > begin)
        return min(1.0, waited / max(now - begin, 1e-9))

    def in_flight(self):
        """[(fragment, steps since it was sent)]; None if the log does not contain it."""
        if not self.schedule or not self.schedule.exchanges or self.end:
            return []
        if not self.schedule.offsets:
            return None
        return [(fragment, self.step - send) for fragment, send in self.schedule.last_sends(self.step)
                if send > max(self.merged.get(fragment, 0), self.resumed_at)]


# -----------------------------------------------------------------------------------------------------------
# A run: its processes, wherever their logs are

class RunView:
    def __init__(self, folders):
        self.folders = folders
        self.processes = {}  # by number, for processes whose log has been seen

    def read(self):
        self._find()
        for view in self.processes.values():
            view.read()

    def is_read(self):
        return all(view.log.is_read for view in self.processes.values())

    def _find(self):
        """Logs may appear late, since sites start at different times."""
        for folder in self.folders:
            for path in folder.glob("metrics*.jsonl"):
                number = path.stem.removeprefix("metrics").removeprefix("_") or "0"
                if not number.isdigit() or path.name != log_name(int(number)):
                    continue
                known = self.processes.setdefault(int(number), ProcessView(path))
                if known.log.path != path:
                    raise UserError(f"{known.log.path} and {path} are of the same process: give the "
                                    "folders of one run, in which each process has one log")

    def shape(self):
        """(M, R) of the process that was started or resumed last; (0, 0) if no log has it."""
        places = [view.place for view in self.processes.values() if view.place]
        if not places:
            return 0, 0
        newest = max(places, key=lambda place: (place.get("unix_time", 0), place.get("step", 0)))
        return newest["workers"], newest["ranks"]

    def rows(self):
        """[(name, view or None)] of all processes that the run has."""
        workers, ranks = self.shape()
        return [(f"{number // ranks}.{number % ranks}", self.processes.get(number))
                for number in range(workers * ranks)]

    def leaders(self):
        """One process of each worker that has trained; its numbers are the worker's."""
        workers, ranks = self.shape()
        views = [[self.processes.get(worker * ranks + rank) for rank in range(ranks)]
                 for worker in range(workers)]
        trained = [[view for view in of_worker if view and view.steps] for of_worker in views]
        return [max(of_worker, key=lambda view: view.step) for of_worker in trained if of_worker]

    def steps(self):
        """The number of steps of the run; None if no log has it."""
        for _, view in self.rows():
            if view and view.place:
                asked = int(view.place.get("options", {}).get("max-steps", -1))
                return view.place.get("steps") or (asked if asked > 0 else None)
        return None

    def whole_checkpoint(self):
        """Step of the newest DONE_STEP in any of the folders; of elastic workers, which have their own, the oldest of
        these."""
        def newest(folders):
            names = [path.name[5:] for folder in folders for path in folder.glob("DONE_*")]
            return max((int(name) for name in names if name.isdigit()), default=None)

        own = [newest([path]) for folder in self.folders for path in folder.glob("worker_*")]
        if not own:
            return newest(self.folders)
        return None if None in own else min(own)

    def seconds_left(self):
        """By the slowest worker; in an elastic run by the foremost, which all others follow."""
        steps, leaders = self.steps(), self.leaders()
        if not steps or not leaders:
            return None
        last = min if self.is_elastic() else max
        return last((steps - view.step) * view.step_seconds() for view in leaders)

    def is_elastic(self):
        """Whether this is an elastic run."""
        return any(view.place and view.place.get("options", {}).get("outer-transport") == "store"
                   for view in self.processes.values())

    def events(self):
        """[(number of the process that reports it, event)] in order of time."""
        told = [(number, event) for number, view in self.processes.items() for event in view.events]
        return sorted(told, key=lambda one: (one[1]["unix_time"], one[0]))

    def standings(self):
        """{worker: its last event}, except for events from before it was counted again."""
        last = {event["worker"]: event for _, event in self.events()}
        ranks, counted_at = max(1, self.shape()[1]), defaultdict(float)
        for number, view in self.processes.items():
            counted_at[number // ranks] = max(counted_at[number // ranks], view.counted_at)
        return {worker: STANDINGS[event["kind"]] for worker, event in last.items()
                if event["unix_time"] >= counted_at[worker] - 1}

    def changes(self):
        """[(worker that reports it, event)], the newest last, each event once."""
        kept = []
        for number, event in self.events()[-10 * CHANGES:]:
            is_known = any(other_number != number and event["unix_time"] - other["unix_time"] < LATER_SECONDS
                           and all(event[field] == other[field] for field in ("kind", "sync", "worker"))
                           for other_number, other in kept[-CHANGES:])
            if not is_known:
                kept.append((number, event))
        ranks = max(1, self.shape()[1])
        return [(number // ranks, event) for number, event in kept[-CHANGES:]]

    def state(self, view, now, standing=""):
        """(text, whether it is late)"""
        if view.end:
            return "done", False
        if standing:
            return "!" + standing, True
        if not view.steps:
            return "starts", False
        silent, seconds = now - view.grown_at, view.step_seconds()
        is_silent = silent > max(SILENT_STEPS * seconds, SILENT_SECONDS)
        behind = max(leader.step for leader in self.leaders()) - view.step
        is_behind = behind >= BEHIND_STEPS and (is_silent or behind * seconds > BEHIND_SECONDS)
        parts = [f"-{behind}"] * is_behind + [duration(silent)] * is_silent
        return ("!" + " ".join(parts), True) if parts else ("ok", False)


# -----------------------------------------------------------------------------------------------------------
# Text

def duration(seconds):
    """Two units at most: 45 s, 3:20 (minutes), 5:03:20, 20 d 3 h"""
    if seconds is None:
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 2 * 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def short(count):
    """Three digits and a unit: 999, 1.23k, 65.6M"""
    if count is None:
        return "-"
    for unit, size in (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15)):
        if count < 999.5 * size:
            break
    scaled = count / size
    digits = 0 if size == 1 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f}{unit}"


def sparkline(values, width, bars):
    """The values as a line of bars, each the mean of equally many values."""
    values = [value for value in values if value is not None]
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low, high = min(means), max(means)
    if high == low:
        return bars[0] * width
    return "".join(bars[min(len(bars) - 1, int((mean - low) / (high - low) * len(bars)))] for mean in means)


def in_flight_text(view, width):
    """As many words as there is room for."""
    flying = view.in_flight()
    if flying is None:
        return "?"
    texts = [f"{fragment}:{age}/{view.schedule.overlap}" for fragment, age in flying]
    for shown in range(len(texts), 0, -1):
        text = " ".join(texts[:shown]) + (f" +{len(texts) - shown}" if shown < len(texts) else "")
        if len(text) <= width:
            return text
    return f"{len(texts)}" if texts else "-"


HEADINGS = ["proc", "step", "loss", "tokens/s", "in flight", "sent", "received", "wait", "ckpt", "state"]
WIDTHS = [5, 8, 7, 8, 9, 6, 8, 5, 6, 9]  # with a space between them 80
IN_FLIGHT = HEADINGS.index("in flight")
NARROWER = ["received", "ckpt", "tokens/s", "sent", "wait", "in flight", "loss"]  # dropped first to last


def columns_for(width):
    """{column: its width}; extra room goes to the column of fragments in flight."""
    columns = dict(enumerate(WIDTHS))
    for heading in NARROWER:
        if sum(columns.values()) + len(columns) - 1 <= width:
            break
        del columns[HEADINGS.index(heading)]
    if IN_FLIGHT in columns:
        columns[IN_FLIGHT] += max(0, min(width - (sum(columns.values()) + len(columns) - 1), 40))
    return columns


def table_line(cells, columns):
    return " ".join(cells[at].rjust(wide) if at else cells[at].ljust(wide) for at, wide in columns.items())


def process_cells(name, view, state, columns):
    if view is None or not view.place:
        return [name, *["-"] * 8, "no log" if view is None else "starts"]
    rate, wait = view.tokens_per_second(), view.wait_share()
    return [name, str(view.step), "-" if view.loss is None else f"{view.loss:.4f}",
            "-" if rate is None else f"{rate:.0f}" if rate < 1e7 else short(rate),
            in_flight_text(view, columns.get(IN_FLIGHT, 0)), short(view.bytes("sent")),
            short(view.bytes("received")), "-" if wait is None else f"{100 * wait:.1f}%",
            "-" if view.checkpoint is None else str(view.checkpoint), state]


def progress_line(run):
    leaders, workers = run.leaders(), run.shape()[0]
    foremost = max if run.is_elastic() else min
    step, steps = foremost(view.step for view in leaders), run.steps()
    of_all = "" if len(leaders) == workers else f" of {len(leaders)} of {workers} workers"
    rate, tokens = sum(view.tokens_per_second() for view in leaders), sum(view.tokens for view in leaders)
    ended = all(view.end for view in leaders)
    return (f"step {step:,}" + (f" of {steps:,} ({100 * step / steps:.1f}%)" if steps else "") + "   " +
            ("ended" if ended else f"{duration(run.seconds_left())} left") +
            f"   {rate:,.0f} tokens/s   {f'{tokens:,}' if tokens < 1e7 else short(tokens)} tokens{of_all}")


def measured_line(run):
    """Evaluations; worker 0's, if its log is here."""
    views, parts = [view for _, view in run.rows() if view], []
    evals = [view.eval for view in views if view.eval]
    if evals and evals[0].get("loss") is not None:
        parts.append(f"validation {evals[0]['loss']:.4f} at {evals[0]['step']}")
    hellaswags = [view.hellaswag for view in views if view.hellaswag]
    if hellaswags:
        parts.append(f"HellaSwag {hellaswags[0]['accuracy']:.4f} at {hellaswags[0]['step']}")
    skipped = sum(line.get("skipped") is True for view in run.leaders() for line in view.steps)
    if skipped:
        parts.append(f"{skipped} updates skipped lately")
    whole = run.whole_checkpoint()
    if whole is not None:
        parts.append(f"whole checkpoint {whole}")
    unreadable = sum(view.log.unreadable for view in views)
    if unreadable:
        parts.append(f"{unreadable} unreadable lines")
    return "   ".join(parts)


def loss_line(run, width, bars):
    view = run.leaders()[0]
    losses = [line["loss"] for line in view.steps if line["loss"] is not None]
    if not losses:
        return "loss: none is finite"
    text = f" {losses[0]:.3f} to {losses[-1]:.3f} in {len(view.steps)} steps"
    return "loss " + sparkline(losses, min(width - len(text) - 5, 60), bars) + text


def picture(run, width, height, bars=BARS, now=None):
    """[(line, style)], no longer and no more than there is room for.   style: "", "bold" or "late" """
    now = time.time() if now is None else now
    names = ", ".join(map(str, run.folders))
    if not run.shape()[0]:
        missing = [str(folder) for folder in run.folders if not folder.is_dir()]
        why = (f"no such folder yet: {', '.join(missing)}" if missing else
               "no run has begun to write metrics.jsonl there")
        return [(f"waiting for {names}"[:width], "bold"), (why[:width], "")][:height]
    lines = [(names, "bold")]
    reading = [view.log for view in run.processes.values() if not view.log.is_read]
    if reading:
        share = sum(log.offset for log in reading) / sum(log.size for log in reading)
        lines.append((f"reading the logs: {100 * share:.0f}%", ""))
    if run.leaders():
        lines.append((progress_line(run), ""))
        lines.append((loss_line(run, width, bars), ""))
    if measured := measured_line(run):
        lines.append((measured, ""))
    lines.append(("", ""))
    lines += process_lines(run, width, height - len(lines), now)
    lines += change_lines(run, height - len(lines))
    return [(line[:width], style) for line, style in lines[:height]]


def process_lines(run, width, height, now):
    """The table. If there is not room for all processes, late ones come first."""
    columns, rows, standings = columns_for(width), [], run.standings()
    for name, view in run.rows():
        standing = standings.get(int(name.split(".")[0]), "")
        state, late = run.state(view, now, standing) if view else ("no log", False)
        rows.append((table_line(process_cells(name, view, state, columns), columns), "late" if late else ""))
    room = max(1, height - 1)
    if len(rows) > room:
        rows.sort(key=lambda row: row[1] != "late")
        left_out = len(rows) - room + 1
        rows = rows[:room - 1] + [(f"{left_out} more processes", "")]
    return [(table_line(HEADINGS, columns), "bold"), *rows]


def change_lines(run, height):
    """The newest events for which there is room, below an empty line."""
    changes = run.changes()[-max(0, height - 1):] if height > 1 else []
    lines = [(f"{time.strftime('%H:%M:%S', time.localtime(event['unix_time']))}  worker {worker}: "
              f"{event['text']}", "") for worker, event in changes]
    return [("", ""), *lines] if lines else []


# -----------------------------------------------------------------------------------------------------------
# The terminal

SCREEN_TAKEN, SCREEN_LEFT = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
STYLES = {"": "", "bold": "\x1b[1m", "late": "\x1b[1;33m"}


def can_show(bars):
    try:
        bars.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


@contextlib.contextmanager
def screen():
    """A screen of its own, without a cursor and with keys read at once. The terminal is restored, however
    this ends."""
    import termios
    import tty

    def leave(*_):
        raise SystemExit(143)

    def write(text):  # not by sys.stdout, which a signal may have interrupted
        os.write(sys.stdout.fileno(), text.encode())

    def restore():
        with contextlib.suppress(OSError):  # the terminal may be gone
            write(SCREEN_LEFT)
            if keys:
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

    def take():
        if keys:
            tty.setcbreak(sys.stdin)
        write(SCREEN_TAKEN)

    def suspend(*_):  # Ctrl-Z; after the second line the program has been continued
        restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        take()

    keys = sys.stdin.isatty()
    before = termios.tcgetattr(sys.stdin) if keys else None
    wake, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGWINCH, lambda *_: None)  # the signal's arrival is enough: select() sees the pipe
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    signal.signal(signal.SIGTSTP, suspend)
    try:
        take()
        yield ([sys.stdin] if keys else []), wake
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        restore()


def is_quit(keys, wake, seconds):
    """Waits for a key, for another size of the terminal, or for so many seconds."""
    ready = select.select([*keys, wake], [], [], seconds)[0]
    if wake in ready:
        os.read(wake, 4096)
    if sys.stdin in ready:
        pressed = os.read(sys.stdin.fileno(), 64)
        return not pressed or b"q" in pressed
    return False


def watch(run, interval, bars):
    with screen() as (keys, wake):
        while True:
            run.read()
            size = shutil.get_terminal_size()
            lines = picture(run, size.columns, size.lines, bars)
            styled = [STYLES[style] + line + ("\x1b[0m" if style else "") for line, style in lines]
            sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(styled) + "\x1b[J")
            sys.stdout.flush()
            if is_quit(keys, wake, interval if run.is_read() else 0):
                return


def main(words):
    parser = Parser(description="Shows all processes of a run while it trains; q or Ctrl-C quits.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN",
                        help="a run's folder (its -o); of a run of several sites, the folders of all")
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    parser.add_argument("--interval", type=float, default=1, metavar="SECONDS", help="between pictures (1)")
    arguments = parser.parse_args(words)
    if not 0.05 <= arguments.interval <= 3600:
        raise UserError(f"--interval {arguments.interval:g}: give 0.05 to 3600 seconds")
    for folder in arguments.folders:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give a run's folder (its -o)")
    if not arguments.once and not sys.stdout.isatty():
        raise UserError("the output is not a terminal: add --once for one picture")
    run = RunView(list({folder.resolve(): folder for folder in arguments.folders}.values()))
    bars = BARS if can_show(BARS) else ASCII_BARS
    if not arguments.once:
        watch(run, arguments.interval, bars)
        return
    run.read()
    while not run.is_read():
        run.read()
    size = shutil.get_terminal_size()
    for line, _ in picture(run, size.columns, 10**6, bars):
        print(line.rstrip())


if __name__ == "__main__":
    sys.exit(exit_status(main))
