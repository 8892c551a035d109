"""Downloads files, whole or not at all.

fetch() writes to NAME.partial, resumes a partial download (HTTP ranges), retries after temporary failures
(dropped and stalled connections, 429, 500 and above), checks the size and SHA-256 where the source publishes
them, and only then gives the file its name. hub_files() lists a folder of a data set on the Hugging Face hub,
pinned to a commit, with sizes and checksums.
"""
import contextlib
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

from corpus import UserError

HUB = "https://huggingface.co"
BLOCK = 1 << 18
LONGEST_PAUSE = 60  # seconds between two attempts
PASSING = (408, 425, 429)  # and 500 and above


class Remote(NamedTuple):
    """A file to download. size, sha256: None if its source does not publish them."""
    url: str
    size: int | None = None
    sha256: str | None = None


class Limits(NamedTuple):
    timeout: float  # seconds without a byte
    retries: int  # in a row without progress


class Passing(Exception):
    """A temporary failure. pause: seconds to wait, if the server named a time."""

    def __init__(self, reason, pause=0):
        super().__init__(reason)
        self.pause = pause


class Refused(Exception):
    """A failure that another attempt would only repeat."""


def hub_address():
    """The hub, or the mirror that HF_ENDPOINT names (the hub's own variable)."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def web_address(text):
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{text} is not an address: give one that begins with https:// or http://")
    return text.rstrip("/")


def fetch(remote, path, limits, received=lambda count: None):
    """Downloads `remote` to `path`, unless it exists. received(n): reports n more bytes, or -n fewer."""
    if path.is_file() and remote.size in (None, path.stat().st_size):
        return
    partial = partial_of(path)
    for again in (True, False):
        patiently(remote.url, limits, lambda: transfer(remote, partial, limits.timeout, received),
                  lambda: size_of(partial))
        if remote.sha256 in (None, sha256_of(partial)):
            os.replace(partial, path)
            return
        received(-size_of(partial))
        partial.unlink()  # perhaps it began as an older version: try once from the start
    raise UserError(f"{remote.url} came twice with a wrong checksum: try another network "
                    "or --url, or download it elsewhere and give --from DIR")


def partial_of(path):
    return path.with_name(path.name + ".partial")


def discard(folder, paths):
    """Removes downloads in `folder`, whole or partial, and their folders if these are empty then. All other
    files are the user's."""
    for path in paths:
        for each in (path, partial_of(path)):
            if each.is_file():
                each.unlink()
        for parent in path.parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
            if parent == folder:
                break


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def check(path, remote):
    """Throws a UserError unless `path` has the size and checksum of `remote`."""
    if remote.size not in (None, path.stat().st_size):
        raise UserError(f"{path} has {path.stat().st_size:,} bytes, not {remote.size:,}: download it again "
                        f"from {remote.url}")
    if remote.sha256 not in (None, sha256_of(path)):
        raise UserError(f"{path} has a wrong checksum: download it again from {remote.url}")


def patiently(url, limits, attempt, progress=lambda: 0):
    """Returns the result of attempt(). Throws a UserError after `retries` failures in a row without progress.
    """
    failures, reached = 0, progress()
    while True:
        try:
            return attempt()
        except Refused as error:
            reason, pause = error, None
        except Passing as error:
            failures = 0 if progress() > reached else failures + 1
            reached, reason = max(reached, progress()), error
            pause = max(error.pause, min(2**failures / 2, LONGEST_PAUSE))
            if failures > limits.retries:
                pause = None
        if pause is None:
            raise UserError(f"{url} cannot be downloaded ({reason}): check the connection and start again, "
                            "or download it elsewhere and give --from DIR (see --help)")
        time.sleep(pause)


def ask(url, timeout, begin=0):
    """Opens the URL, or throws Passing or Refused."""
    request = urllib.request.Request(url, headers={"User-Agent": "diloco.c"})
    if begin > 0:
        request.add_header("Range", f"bytes={begin}-")
    token = os.environ.get("HF_TOKEN")
    if token and url.startswith(hub_address() + "/"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # not after a redirect
    try:
        return urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"the server answers {error.code} {error.reason}".strip()
        if error.code in PASSING or error.code >= 500:
            raise Passing(reason, pause_of(error.headers.get("Retry-After"))) from error
        if error.code == 416:
            raise Passing("the file is shorter than the part that was downloaded before") from error
        raise Refused(reason) from error
    except urllib.error.URLError as error:
        raise Passing(f"no connection: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Passing(broken(error)) from error


def pause_of(retry_after):
    return min(int(retry_after), LONGEST_PAUSE) if retry_after and retry_after.isdecimal() else 0


def broken(error):
    if isinstance(error, TimeoutError):
        return "the server has gone silent"
    return f"the connection broke: {str(error) or type(error).__name__}"


def transfer(remote, partial, timeout, received):
    """Appends to `partial` until it has its full length."""
    begin = size_of(partial)
    if remote.size is not None and begin == remote.size:
        return
    try:
        response = ask(remote.url, timeout, begin)
    except Passing as error:
        if isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code == 416:
            received(-begin)
            partial.unlink()
        raise
    partial.parent.mkdir(parents=True, exist_ok=True)
    with response, open(partial, "ab") as file:
        if begin > 0 and not sends_rest(response, begin):
            received(-begin)
            file.truncate(0)
            begin = 0
        whole = whole_size(response, begin)
        if remote.size is not None and whole not in (None, remote.size):
            raise Refused(f"it has {whole:,} bytes there, not {remote.size:,}")
        copy(response, file, remote.size, received)
    check_length(size_of(partial), whole if remote.size is None else remote.size)


def sends_rest(response, begin):
    """Whether the response has the bytes from `begin` on; if not, it has all of them."""
    if response.status != 206:
        return False
    if not (response.headers.get("Content-Range") or "").startswith(f"bytes {begin}-"):
        raise Refused("the server sends a different part from the one requested")
    return True


def whole_size(response, begin):
    length = response.headers.get("Content-Length")
    return begin + int(length) if length and length.isdecimal() else None


def copy(response, file, most, received):
    while block := read_some(response):
        file.write(block)
        received(len(block))
        if most is not None and file.tell() > most:
            raise Refused(f"it has more than {most:,} bytes there")


def read_some(response):
    try:
        return response.read1(BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise Passing(broken(error)) from error


def check_length(size, whole):
    if whole is not None and size < whole:
        raise Passing(f"the connection broke after {size:,} of {whole:,} bytes")


# The hub


class HubFile(NamedTuple):
    path: str  # within the data set
    size: int
    sha256: str | None


def hub_files(hub, dataset, folder, limits):
    """The commit of the branch main, and the files of a folder at that commit, sorted by name."""
    commit = hub_answer(f"{hub}/api/datasets/{dataset}/revision/main", limits)[0]
    try:
        commit, files = commit["sha"], []
        page = f"{hub}/api/datasets/{dataset}/tree/{commit}/{folder}"
        while page:
            entries, page = hub_answer(page, limits)
            files += [HubFile(entry["path"], entry["size"], entry.get("lfs", {}).get("oid"))
                      for entry in entries if entry["type"] == "file"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{hub} does not answer as the Hugging Face hub does: check --url and HF_ENDPOINT, "
                        "or download elsewhere and give --from DIR") from error
    return commit, sorted(files)


def hub_answer(url, limits):
    """The hub's answer, and the address of the next page."""
    def attempt():
        with ask(url, limits.timeout) as response:
            try:
                text, link = response.read(), response.headers.get("Link") or ""
            except (OSError, http.client.HTTPException) as error:
                raise Passing(broken(error)) from error
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise Refused("it is not JSON") from error
        following = re.search(r'<([^>]+)>;\s*rel="next"', link)
        return answer, following and following[1]

    return patiently(url, limits, attempt)


def hub_file_address(hub, dataset, commit, path):
    return f"{hub}/datasets/{dataset}/resolve/{commit}/{urllib.parse.quote(path)}"


# Options


def add_source_options(parser, what, url, url_help):
    """what: the files that --from takes, by the names of their source."""
    parser.add_argument("--from", dest="source", type=existing_folder, metavar="DIR",
                        help=f"take {what} from this folder; no network is used for it")
    parser.add_argument("--url", type=web_address, default=url, metavar="URL", help=url_help)
    parser.add_argument("--timeout", type=positive_number, default=60, metavar="SECONDS",
                        help="a server that is silent for this long is tried again (60)")
    parser.add_argument("--retries", type=whole_number, default=8, metavar="N",
                        help="retries in a row without a byte before the run gives up (8: three minutes)")


def limits_of(options):
    return Limits(options.timeout, options.retries)


def existing_folder(text):
    if not Path(text).is_dir():
        raise UserError(f"there is no folder {text}: give --from the folder with the downloaded files")
    return Path(text)


def positive_number(text):
    try:
        if 0 < float(text) < 1e6:
            return float(text)
    except ValueError:
        pass
    raise UserError(f"{text} is not a time: give seconds")


def whole_number(text):
    if text.isdecimal():
        return int(text)
    raise UserError(f"{text} is not a count: give a whole number")


def obtain(options, remote, name, folder):
    """The path of a file: `name` in --from, else downloaded into `folder`. Checks its size and checksum."""
    if options.source is None:
        fetch(remote._replace(url=options.url), folder / name, limits_of(options))
        return folder / name
    path = options.source / name
    if not path.is_file():
        raise UserError(f"there is no {path}: download it from {remote.url}")
    check(path, remote)
    return path
