"""Forged and damaged records in the log of an elastic run, and other things under its keys."""
import os
import re
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "dev/break/attack"), str(ROOT / "dev/break/chaos")]
import redis_server  # noqa: E402
from ends import HANG, ends  # noqa: E402

ELASTIC = {"--workers": 2, "--min-workers": 2, "--outer-transport": "store", "--grace": 1, "--timeout": 4, "-H": 8,
           "--fragment-layers": 1, "--overlap": 1, "-x": 400, "-n": 20, "-nk": 3, "--run-name": "run"}


class Log:
    """The records of an elastic run, in a folder or in Redis: (folder, name), value."""

    def __init__(self, base, server):
        self.folder, self.server = base / "store/log/run", server

    def records(self):
        if self.server:
            keys = [key.decode() for key in self.server.ask("KEYS", "run/log/*")]
            return [(key, name) for key in keys for name in self.server.ask("HKEYS", key)]
        # os.walk ignores folders that a worker removes meanwhile.
        return [(Path(folder), name) for folder, _, names in os.walk(self.folder) for name in names
                if ".new" not in Path(folder, name).parts]

    def get(self, folder, name):
        return self.server.ask("HGET", folder, name) if self.server else (folder / name).read_bytes()

    def put(self, folder, name, value):
        if self.server:
            self.server.ask("HSET", folder, name, value)
        else:
            (folder / name).write_bytes(value)


FORGERIES = {
    "empty": lambda value, draw: b"",
    "cut": lambda value, draw: value[:len(value) // 2],
    "noise": lambda value, draw: draw.randbytes(len(value)),
    "longer": lambda value, draw: value * 50,
    "all numbers 2^64": lambda value, draw: re.sub(rb"\d+", str(2**64).encode(), value),
    "all numbers -1": lambda value, draw: re.sub(rb"\d+", b"-1", value),
    "another digit": lambda value, draw: re.sub(rb"\d", str(draw.randrange(10)).encode(), value, count=1),
}


def with_a_log(runs, draw, store, blow):
    """Two elastic workers, of whom one may be killed and come back. blow: what befalls their log"""
    server = redis_server.RedisServer(runs.base / "redis") if store == "redis" else None
    url = server.url() if server else f"file:{runs.base}/store"
    try:
        both = [runs.start(f"worker{w}", {**ELASTIC, "--worker": w, "--store": url}) for w in range(2)]
        log, until = Log(runs.base, server), time.monotonic() + HANG
        while not any("/entry" in str(folder) for folder, _ in log.records()) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.3))
        comes_back = draw.random() < 0.5
        if comes_back:
            os.killpg(both[1].pid, signal.SIGKILL)
            both[1].wait()
        what = blow(log, server)
        if comes_back:
            both[1] = runs.start("worker1", {**ELASTIC, "--worker": 1, "--store": url, "-y": draw.choice([0, 1])})
        return f"{store}: {what}{', and worker 1 comes back' * comes_back}", *ends(both)
    finally:
        if server:
            server.stop()


def record(runs, draw, store):
    def forge(log, _):
        kinds = {}
        for folder, name in log.records():
            kind = re.sub(r"[0-9a-f]{16,}", "G", "/".join(str(folder).split("log/run/")[-1].split("/")[-3:]))
            kinds.setdefault(re.sub(r"\d+", "N", kind), []).append((folder, name))
        kind, how = draw.choice(sorted(kinds)), draw.choice(list(FORGERIES))
        by_age = sorted(kinds[kind], key=lambda one: [int(n) for n in re.findall(r"\d+", f"{one[0]} {one[1]}")])
        folder, name = draw.choice(by_age[-4:])
        # An entry may also be there before its sync.
        to = str(int(name) + draw.randrange(4)) if kind.endswith("/entry") else name
        try:
            value = log.get(folder, name)
            if value is not None:
                log.put(folder, to, FORGERIES[how](value, draw))
        except OSError:
            value = None
        if value is None:  # a worker has removed it meanwhile
            return f"{kind} is gone"
        return f"{kind} {how}"
    return with_a_log(runs, draw, store, forge)


def wrong_type(runs, draw):
    def replace(_, server):
        key = draw.choice(sorted(server.ask("KEYS", "run/log/*")))
        server.ask("DEL", key)
        server.ask(*draw.choice([("SET", key, "text"), ("LPUSH", key, "1"), ("SADD", key, "1")]))
        return re.sub("[0-9a-f]{16,}", "G", key.decode())
    return with_a_log(runs, draw, "redis", replace)
