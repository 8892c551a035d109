"""Where the workers of a run and their store are: on this machine with a link for each worker, far apart, or sharing
a folder."""
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "dev/break/chaos"), str(ROOT / "dev/wan")]
import redis_server  # noqa: E402
import s3_server  # noqa: E402
import sites  # noqa: E402
from link import Link  # noqa: E402
from redis_server import NOT_LONGER_THAN_ITS_PARENT, RedisServer  # noqa: E402
from s3_server import S3Link, S3Server  # noqa: E402

LINE = sites.Line(megabits=50, round_trip_ms=40, loss=0.005, buffer_ms=100)


def missing(store, with_links):
    """What this machine lacks for such a store, or None."""
    lack = {"redis": redis_server.missing, "s3": s3_server.missing}.get(store, lambda: None)()
    if with_links:
        lack = lack or sites.missing()
        if not (ROOT / "build/relay").exists():
            lack = lack or "there is no build/relay, which emulates the lines: run make build/relay"
        lack = lack or (None if shutil.which("ip") else "there is no program ip: install iproute2")
    return lack


class Place:
    impossible = set()     # blows that cannot be dealt here
    options = {}           # further options of all workers
    refusal = "password"   # a word in the message to a worker with a wrong password

    def environment(self, worker, password=redis_server.PASSWORD):
        """The variables with which a worker finds the store."""
        return {"DILOCO_STORE": self.url(worker, password)}


class Here(Place):
    """All on this machine: a Redis server, and each worker's link to it."""

    def __init__(self, base, workers):
        self.server = RedisServer(base / "redis")
        self.links = [Link(self.server.port) for _ in range(workers)]

    def url(self, worker, password):
        return self.server.url(password, port=self.links[worker].port)

    def inside(self, worker):
        return NOT_LONGER_THAN_ITS_PARENT

    def cut(self, worker):
        self.links[worker].cut()

    def mend(self, worker):
        self.links[worker].mend()

    def close(self):
        for link in self.links:
            link.close()
        self.server.stop()


class Bucket(Here):
    """All on this machine: a server of S3's protocol, and each worker's link to it."""

    options = {"--timeout": 60}  # a server takes some seconds to start again
    refusal = "correct AWS_ACCESS_KEY_ID"

    def __init__(self, base, workers):
        self.server = S3Server(base / "s3")
        self.links = [S3Link(self.server.port) for _ in range(workers)]

    def environment(self, worker, password=s3_server.SECRET):
        return {"DILOCO_STORE": self.server.url(),
                **self.server.environment(self.links[worker].port, password)}


class Apart(Place):
    """Each worker in its own site, and the Redis server in one more."""

    impossible = {"link reset"}

    def __init__(self, base, workers):
        self.sites = sites.Sites(LINE, workers + 1)
        self.server = RedisServer(base / "redis", self.sites.addresses[workers], self.sites.inside(workers))

    def url(self, worker, password):
        return self.server.url(password)

    def inside(self, worker):
        return self.sites.inside(worker)

    def cut(self, worker):
        """As when a cable is pulled: the connections are not told."""
        self.ip(worker, "link", "set", self.sites.interface, "down")

    def mend(self, worker):
        self.ip(worker, "link", "set", self.sites.interface, "up")
        self.ip(worker, "route", "replace", "default", "dev", self.sites.interface)

    def ip(self, worker, *words):
        subprocess.run([*self.inside(worker), "ip", *words], check=True)

    def close(self):
        self.server.stop()
        self.sites.close()


class Folder(Place):
    """The store is a folder: there are no server and no links."""

    impossible = {"link cut", "link reset", "store killed", "wrong password"}
    server = None

    def __init__(self, base, workers):
        self.folder = base / "store"

    def url(self, worker, password):
        return f"file:{self.folder}"

    def inside(self, worker):
        return NOT_LONGER_THAN_ITS_PARENT

    def close(self):
        pass
