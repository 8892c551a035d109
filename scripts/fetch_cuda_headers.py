#!/usr/bin/env python3
"""Fetches CUDA libraries' headers where no CUDA toolkit is installed, so that the emulated build compiles.

    scripts/fetch_cuda_headers.py FOLDER

The headers come out of NVIDIA's wheels on PyPI (or the index that PIP_INDEX_URL or pip's configuration names). A
wheel is hundreds of megabytes of libraries that nothing here runs, so only its table of contents and the headers are
read, by ranges of bytes. Each header is checked against the wheel's own list of hashes. A folder that already holds
them is left alone.
"""
import base64
import csv
import hashlib
import http.client
import io
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

WHEELS = {"nvidia-cublas": "13.0.2.14", "nvidia-nccl-cu13": "2.28.9"}  # as in the CUDA 13.0 toolkit
PIECE = 1 << 20


class RemoteFile(io.RawIOBase):
    """A file on a web server that is read in pieces, as they are needed."""

    def __init__(self, url):
        self.url, self.position, self.pieces = url, 0, {}
        with self.request("bytes=0-0") as answer:
            if answer.status != 206:
                raise OSError(f"{url} does not answer requests for a part")
            self.size = int(answer.headers["Content-Range"].split("/")[1])

    def request(self, wanted):
        return urllib.request.urlopen(urllib.request.Request(self.url, headers={"Range": wanted}), timeout=60)

    def piece(self, number):
        if number not in self.pieces:
            begin = number * PIECE
            with self.request(f"bytes={begin}-{min(begin + PIECE, self.size) - 1}") as answer:
                self.pieces[number] = answer.read()
        return self.pieces[number]

    def seekable(self):
        return True

    def readable(self):
        return True

    def tell(self):
        return self.position

    def seek(self, offset, whence=io.SEEK_SET):
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = base + offset
        return self.position

    def readinto(self, buffer):
        data = self.piece(self.position // PIECE)[self.position % PIECE:][:len(buffer)] \
            if self.position < self.size else b""
        buffer[:len(data)] = data
        self.position += len(data)
        return len(data)


def index_url():
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"],
                           capture_output=True, text=True)  # fails where it is not set
    return os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or "https://pypi.org/simple"


def wheel_url(name, version):
    index = index_url().rstrip("/") + f"/{name}/"
    if "@" in urllib.parse.urlsplit(index).netloc:
        raise OSError("an index whose address holds a password is not read here")
    with urllib.request.urlopen(index, timeout=60) as answer:
        page = answer.read().decode()
    start = f"{name.replace('-', '_')}-{version}-"
    machine = os.uname().machine
    for link in re.findall(r'href="([^"#]+)', page):
        file = urllib.parse.unquote(link.rsplit("/", 1)[-1])
        if file.startswith(start) and file.endswith(f"{machine}.whl"):
            return urllib.parse.urljoin(index, link)
    raise OSError(f"{index} has no wheel {start}*{machine}.whl")


def fetch(name, version, folder):
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(wheel_url(name, version)), PIECE)) as wheel:
        record = next(entry for entry in wheel.namelist() if entry.endswith(".dist-info/RECORD"))
        hashes = {row[0]: row[1] for row in csv.reader(wheel.read(record).decode().splitlines())}
        for entry in wheel.namelist():
            if not re.search(r"/include/.*\.h(pp)?$", entry):
                continue
            data = wheel.read(entry)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            if hashes.get(entry) != f"sha256={digest}":
                raise OSError(f"{entry} of {name} {version} is not what its wheel's list says")
            target = folder / entry.split("/include/", 1)[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(target.name + ".part")
            beside.write_bytes(data)
            beside.rename(target)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    for name, version in WHEELS.items():
        done = folder / f".{name}-{version}"
        if done.exists():
            continue
        print(f"fetching the headers of {name} {version}")
        try:
            fetch(name, version, folder)
        except (OSError, ValueError, http.client.HTTPException, zipfile.BadZipFile) as error:
            sys.exit(f"error: no headers of {name} {version}: {error}: check the network, or install the CUDA "
                     "toolkit and set CUDA_HOME")
        done.touch()


if __name__ == "__main__":
    main()
