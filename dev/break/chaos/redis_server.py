"""A private Redis server, which can be killed and restarted, with or without its data."""
import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

PASSWORD = "secret"
NOT_LONGER_THAN_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")  # the command after these words ends with its parent


def missing():
    """What this machine lacks for a server, or None."""
    found = shutil.which("redis-server") and shutil.which("redis-cli")
    return None if found else "there is no Redis server here: apt-get install redis-server"


def free_port(address="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


class RedisServer:
    """A write that was answered survives SIGKILL: appendfsync always."""

    def __init__(self, folder, address="127.0.0.1", inside=()):
        """inside: the words before its command, if it runs in its own site"""
        self.folder, self.address, self.inside = Path(folder), address, list(inside)
        self.port, self.process = 16379 if inside else free_port(), None
        self.start()

    def url(self, password=PASSWORD, address=None, port=None):
        return f"redis://:{password}@{address or self.address}:{port or self.port}"

    def environment(self, port=None):
        """Variables that a worker needs besides the url."""
        return {}

    def start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        words = ["redis-server", "--port", self.port, "--bind", self.address, "--requirepass", PASSWORD,
                 "--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", self.folder]
        self.process = subprocess.Popen([*(self.inside or NOT_LONGER_THAN_ITS_PARENT), *map(str, words)],
                                        stdout=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while not self.is_ready():
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError("the Redis server does not start")
            time.sleep(0.02)

    def is_ready(self):
        """A starting server refuses connections, then answers LOADING until its data are loaded."""
        if self.inside:  # out of reach from here: a client in its site asks
            words = ["redis-cli", "-h", self.address, "-p", self.port, "-a", PASSWORD, "PING"]
            result = subprocess.run([*self.inside, *map(str, words)], capture_output=True, text=True)
            return result.stdout.strip() == "PONG"
        with contextlib.suppress(OSError):
            return self.ask("PING") == b"+PONG"
        return False

    def ask(self, *words):
        """The first line of the answer, or the value that follows it; for a list, its values."""
        with socket.create_connection((self.address, self.port), timeout=60) as connection:
            with connection.makefile("rwb") as stream:
                for command in (("AUTH", PASSWORD), words):
                    stream.write(packed(command))
                    stream.flush()
                    answer = answer_from(stream)
                return answer

    def kill(self):
        """SIGKILL, as when a machine loses power."""
        self.process.kill()
        self.process.wait()

    def clear(self):
        """Removes the data. The server must not be running."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def stop(self):
        if self.process.poll() is None:
            self.kill()


def answer_from(stream):
    line = stream.readline().rstrip(b"\r\n")
    if line[:1] == b"*":
        return [answer_from(stream) for _ in range(int(line[1:]))]
    if line[:1] == b"$" and line != b"$-1":
        return stream.read(int(line[1:]) + 2)[:-2]
    return line


def packed(words):
    """A command as it is sent."""
    texts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts)
