"""Workers that meet in a bucket of S3: what a user can do wrong, links that fail, signatures, and where keys may not
be seen. dev/test/unit/elastic/test_log_store.cpp has the store's own claims, test_elastic.py those of a run."""
import hashlib
import http.client
import http.server
import os
import random
import re
import statistics
import subprocess
import threading
import time
import urllib.parse

import pytest

from conftest import ROOT, command
from test_elastic import LOCK_STEP, assert_bits_of_tcp

import s3_server  # noqa: E402
from redis_server import free_port  # noqa: E402

ELASTIC = {"--outer-transport": "store", "--workers": 2, "--worker": 0, "-H": 8, "--fragment-layers": 1, "-x": 64,
           "--timeout": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if lack := s3_server.missing():
        pytest.skip(lack)
    one = s3_server.S3Server(tmp_path_factory.mktemp("s3"))
    yield one
    one.stop()


class Front:
    """A server that answers as answer(handler, body) says, and keeps what it was asked."""

    def __init__(self, answer):
        self.asked, front = [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                front.asked.append((self.command, self.path, list(self.headers.items()), body))
                answer(self, body)

            do_GET = do_PUT = do_DELETE = handle_one

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def front():
    made = []

    def make(answer):
        made.append(Front(answer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def says(handler, status, body=b"", headers=()):
    handler.send_response(status)
    for name, value in headers:
        if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
            handler.send_header(name, value)
    if status != 204:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def error(status, code="", more=""):
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>No &amp; never</Message>{more}</Error>".encode()
    return lambda handler, body: says(handler, status, text if code else b"")


def environment(port, **more):
    known = {"AWS_ACCESS_KEY_ID": "worker", "AWS_SECRET_ACCESS_KEY": s3_server.SECRET, "AWS_REGION": "us-east-1",
             "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_CONFIG_FILE": "/nowhere",
             "AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "HOME": "/nowhere"}
    return {**{name: value for name, value in os.environ.items() if not name.startswith("AWS_")}, **known, **more}


def refused(tokens, folder, environment, store="s3://runs/ours", **more):
    """The one line that a worker ends with, and its status."""
    words = command(tokens, folder / "out", {**ELASTIC, "--store": store, **more})
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=folder, timeout=60)
    (line,) = done.stderr.splitlines()
    assert not (folder / "out").exists() and s3_server.SECRET not in done.stderr + done.stdout
    return done.returncode, line


# -----------------------------------------------------------------------------------------------------------
# What is refused

REFUSED = {
    "no_bucket": (error(404, "NoSuchBucket"), 2, "create the bucket"),
    "unknown_key": (error(403, "InvalidAccessKeyId"), 2, "correct AWS_ACCESS_KEY_ID"),
    "wrong_secret": (error(403, "SignatureDoesNotMatch"), 2, "AWS_SECRET_ACCESS_KEY"),
    "forbidden": (error(403, "AccessDenied"), 2, "allow this key to get, put, delete and list below s3://runs/ours"),
    "bare_403": (error(403), 2, "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or check the proxies"),
    "old_token": (error(400, "ExpiredToken"), 75, "400 ExpiredToken: renew the keys, or try again later"),
    "wrong_token": (error(400, "InvalidToken"), 2, "correct AWS_SESSION_TOKEN"),
    "other_region": (error(400, "AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>"), 2,
                     "set AWS_REGION to the bucket's region, eu-west-3"),
    "moved": (error(301, "PermanentRedirect"), 2, "set AWS_REGION"),
    "clock": (error(403, "RequestTimeTooSkewed"), 75, "set this machine's clock"),
    "no_s3": (error(404, "NotFound"), 75, "404 NotFound: correct AWS_ENDPOINT_URL"),
    "no_xml": (lambda handler, body: says(handler, 404, b"404 page not found"), 75, "correct AWS_ENDPOINT_URL"),
    "no_conditions": (lambda handler, body: says(handler, 200), 2, "ignores If-None-Match"),
    "overloaded": (error(503, "SlowDown"), 75, "try again later"),
    "full": (error(507), 75, "has no room"),
    "drops": (lambda handler, body: setattr(handler, "close_connection", True), 75, "cannot reach s3://runs"),
    "hangs": (lambda handler, body: time.sleep(20), 75, "silent for 3 s"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_store_that_cannot_be_used_is_one_line_within_the_time_limit(tokens, tmp_path, front, kind):
    answer, status, words = REFUSED[kind]
    begin = time.monotonic()
    found, line = refused(tokens, tmp_path, environment(front(answer).port))
    assert (found, line[:7]) == (status, "error: ") and words in line, line
    assert time.monotonic() - begin < 15


MISTAKES = {
    "alone": ("s3://", {}, "s3://BUCKET/PREFIX"),
    "no_name": ("s3://Bucket!/x", {}, "s3://BUCKET/PREFIX"),
    "key_in_the_url": ("s3://key:hidden@runs/x", {}, "keys come from the environment"),
    "no_keys": ("s3://runs", {"AWS_ACCESS_KEY_ID": ""}, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "public_http": ("s3://runs", {"AWS_ENDPOINT_URL": "http://93.184.216.34:80"}, "give https:// in AWS_ENDPOINT_URL"),
    "no_endpoint": ("s3://runs", {"AWS_ENDPOINT_URL": "127.0.0.1:9000"}, "is not of the form https://HOST"),
    "path_in_endpoint": ("s3://runs", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9/runs"}, "without the bucket"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line(tokens, tmp_path, kind):
    store, more, words = MISTAKES[kind]
    status, line = refused(tokens, tmp_path, environment(free_port(), **more), store)
    assert status == 2 and words in line and "hidden" not in line, line


def test_an_authority_that_is_no_file_is_one_line(tokens, tmp_path, front):
    port = front(error(403)).port
    status, line = refused(tokens, tmp_path, environment(port, AWS_ENDPOINT_URL=f"https://127.0.0.1:{port}",
                                                         DILOCO_CA="/nowhere"))
    assert status == 2 and "set DILOCO_CA to the certificate of the authority that signed it" in line


def test_a_real_server_refuses_a_wrong_key(tokens, tmp_path, server):
    status, line = refused(tokens, tmp_path, {**os.environ, **server.environment(secret="guess")}, server.url())
    assert status == 2 and "403 SignatureDoesNotMatch" in line and "guess" not in line


# -----------------------------------------------------------------------------------------------------------
# Where a worker finds its keys, and that no one else sees them

def test_keys_come_from_a_profile(tokens, tmp_path, front):
    one = front(error(403, "InvalidAccessKeyId"))
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = other\n\n[site b]\n"
                                          "aws_access_key_id=of-site-b\naws_secret_access_key = se=cret\n"
                                          "aws_session_token = token/b\n")
    (tmp_path / "config").write_text("[profile site b]\nregion = eu-north-1\ns3 =\n  addressing_style = path\n"
                                     f"endpoint_url = http://localhost:{one.port}\n")
    empty = {name: "" for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL")}
    refused(tokens, tmp_path, environment(0, **empty, AWS_PROFILE="site b", AWS_CONFIG_FILE=f"{tmp_path}/config",
                                          AWS_SHARED_CREDENTIALS_FILE=f"{tmp_path}/credentials"))
    method, path, headers, _ = one.asked[0]
    headers = {name.lower(): value for name, value in headers}
    assert (method, path) == ("PUT", "/runs/ours/.check")
    assert "Credential=of-site-b/" in headers["authorization"] and "/eu-north-1/s3/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "token/b"
    assert expected_signature(*one.asked[0], "se=cret", "eu-north-1") == signature_in(headers)


def test_keys_are_in_no_file_and_no_list_of_processes(tokens, tmp_path, server):
    words = command(tokens, tmp_path / "out", {**ELASTIC, "--worker": None, "--store": server.url(), "--timeout": 60,
                                               "-x": 10**6, "--run-name": "quiet"})
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path, text=True,
                               env={**os.environ, **server.environment()})
    lines = [process.stdout.readline()]
    while lines[-1] and not lines[-1].startswith("step"):  # before that a request to stop leaves no checkpoint
        lines.append(process.stdout.readline())
    listed = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout
    process.terminate()
    said = "".join(lines) + process.communicate(timeout=60)[0]
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert server.url() in listed and len(written) > 3
    for text in [listed, said, *(path.read_bytes().decode("latin-1") for path in written)]:
        assert s3_server.SECRET not in text


# -----------------------------------------------------------------------------------------------------------
# Signatures

def canonical(text):
    return urllib.parse.quote(text, safe=s3_server.UNRESERVED)


def expected_signature(method, target, headers, body, secret=s3_server.SECRET, region=s3_server.REGION):
    """By AWS's documents, of the request as it came."""
    sent = {name.lower(): " ".join(value.split()) for name, value in headers}
    names = re.search(r"SignedHeaders=([^,]+)", sent["authorization"])[1].split(";")
    assert {"host", "x-amz-date", "x-amz-content-sha256"} <= set(names) and names == sorted(names)
    path, _, query = target.partition("?")
    pairs = sorted((canonical(name), canonical(value)) for name, value in urllib.parse.parse_qsl(query, True))
    digest = sent["x-amz-content-sha256"]
    assert digest in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest())
    request = "\n".join([method, path, "&".join(f"{name}={value}" for name, value in pairs),
                         *(f"{name}:{sent[name]}" for name in names), "", ";".join(names), digest])
    return s3_server.signature(secret, region, sent["x-amz-date"], hashlib.sha256(request.encode()).hexdigest())


def signature_in(headers):
    return re.search(r"Signature=([0-9a-f]{64})", dict(headers)["authorization"])[1]


def test_the_vector_of_aws_documents():
    # "GET Bucket (List Objects)" of https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    headers = s3_server.signed("GET", "examplebucket.s3.amazonaws.com", "/", "max-keys=2&prefix=J",
                               hashlib.sha256(b"").hexdigest(), "20130524T000000Z", "AKIAIOSFODNN7EXAMPLE",
                               "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1")
    wanted = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    assert headers["Authorization"].endswith(wanted)
    assert expected_signature("GET", "/?prefix=J&max-keys=2", list(headers.items()), b"",
                              "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1") == wanted


def passed_on(server, handler, body):
    """(status, body, headers) of the server's answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
    for name, value in handler.headers.items():
        if name.lower() != "expect":
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    result = answer.status, answer.read(), answer.getheaders()
    connection.close()
    return result


def run_of_two(tokens, tmp_path, server, port, name, variables=None, **more):
    """What a short run over a front prints."""
    words = command(tokens, tmp_path / name, {**ELASTIC, "--worker": None, "--store": server.url(), "--timeout": 60,
                                              "--run-name": name, "--grace": 60, "-n": 20, **more})
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path,
                          env={**os.environ, **server.environment(port), **(variables or {})})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_requests_are_signed_as_aws_documents_and_botocore_sign_them(tokens, tmp_path, server, front):
    def answer(handler, body):
        status, text, headers = passed_on(server, handler, body)
        says(handler, status, text, headers)

    one = front(answer)
    for resumes in (0, 1):  # a worker that resumes removes its note that it has ended
        run_of_two(tokens, tmp_path, server, one.port, "signed * run", **{"-y": resumes})
    kinds = {(method, "?" in path, "If-None-Match" in dict(headers)) for method, path, headers, _ in one.asked}
    assert len(kinds) >= 5 and len(one.asked) > 60
    for request in one.asked:
        lower = {name.lower(): value for name, value in request[2]}
        assert signature_in(lower) == expected_signature(*request), request
    auth = pytest.importorskip("botocore.auth", reason="botocore is not installed: pip install botocore")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials
    signer = auth.S3SigV4Auth(Credentials(s3_server.KEY, s3_server.SECRET), "s3", s3_server.REGION)
    for method, path, headers, _ in one.asked:
        lower = {name.lower(): value for name, value in headers}
        names = re.search(r"SignedHeaders=([^,]+)", lower["authorization"])[1].split(";")
        request = AWSRequest(method, f"http://{lower['host']}{path}", {name: lower[name] for name in names})
        request.context["timestamp"] = lower["x-amz-date"]
        canonical_request = signer.canonical_request(request)
        assert signer.signature(signer.string_to_sign(request, canonical_request), request) == signature_in(lower)


@pytest.mark.parametrize("late", [0, 8])
def test_keys_that_expire_in_mid_run_are_replaced(tokens, tmp_path, server, front, late):
    """The file has new ones as soon as the store refuses the old ones, or seconds later: then workers wait. In between
    a secret there is wrong, as in a file of which a half is written."""
    file, lock, first_refusal, renewed = tmp_path / "credentials", threading.Lock(), [], []

    def write_keys(key, secret):
        file.with_suffix(".new").write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")
        file.with_suffix(".new").rename(file)

    def renew():
        for secret in ("hal", s3_server.OTHER_SECRET):
            time.sleep(late / 2)
            write_keys(s3_server.OTHER_KEY, secret)

    def answer(handler, body):
        is_old = f"Credential={s3_server.KEY}/" in handler.headers["Authorization"]
        with lock:
            has_expired = len(one.asked) > 60
            if is_old and has_expired and not first_refusal:
                first_refusal.append(time.monotonic())
                threading.Thread(target=renew).start()
        if is_old and has_expired:
            return error(400, "ExpiredToken")(handler, body)
        status, text, headers = passed_on(server, handler, body)
        if not is_old and status < 300:
            renewed.append(time.monotonic())
        return says(handler, status, text, headers)

    one = front(answer)
    write_keys(s3_server.KEY, s3_server.SECRET)
    said = run_of_two(tokens, tmp_path, server, one.port, f"renewed {late}",
                      {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": str(file)},
                      **{"-x": 200})
    assert len(renewed) > 60 and min(renewed) >= first_refusal[0] + late
    assert ("renew the keys, or try again later" in said) == (late > 0), said


def test_the_script_writes_the_keys_that_aws_has(tmp_path):
    script, aws, file = ROOT / "scripts/multi_node/s3_keys.sh", tmp_path / "aws", tmp_path / "keys"
    aws.write_text('#!/bin/sh\n[ "$1" != --version ] || exec echo aws-cli/2.31.0 Python/3.13.7\n'
                   '[ "$*" = "configure export-credentials --format env-no-export" ] || exit 3\n'
                   '[ -z "$AWS_SHARED_CREDENTIALS_FILE" ] || exit 4\n'
                   "printf 'AWS_ACCESS_KEY_ID=AKIA\\nAWS_SECRET_ACCESS_KEY=a/B+c=\\nAWS_SESSION_TOKEN=Tok/en==\\n'\n"
                   "printf 'AWS_CREDENTIAL_EXPIRATION=2026-11-28T20:00:00+00:00\\n'\n")
    aws.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "AWS_PROFILE": "site b",
                 "AWS_SHARED_CREDENTIALS_FILE": str(file)}
    subprocess.run([script, file, "0"], env=variables, check=True, timeout=30)
    assert file.read_text() == ("[site b]\naws_access_key_id=AKIA\naws_secret_access_key=a/B+c=\n"
                                "aws_session_token=Tok/en==\naws_credential_expiration=2026-11-28T20:00:00+00:00\n")
    assert file.stat().st_mode & 0o077 == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["aws", "keys"]
    aws.write_text('#!/bin/sh\n[ "$1" != --version ] || exec echo aws-cli/2.31.0\nexit 255\n')
    assert subprocess.run([script, file, "0"], env=variables, timeout=30).returncode == 1 and "AKIA" in file.read_text()
    process = subprocess.Popen([script, file, "1"], env=variables, stderr=subprocess.PIPE, text=True)
    assert "no new keys" in process.stderr.readline() and "no new keys" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=30)
    aws.write_text("#!/bin/sh\necho aws-cli/1.46.3\n")
    old = subprocess.run([script, file], env=variables, timeout=30, capture_output=True, text=True)
    assert (old.returncode, old.stderr) == (2, "error: this needs version 2 of the AWS command line (aws)\n")


def test_lines_lose_their_payloads_at_the_same_time(tokens, tmp_path, server, front):
    """One after the other, each would take a round trip, for which syncs would have to wait."""
    lock, now, most = threading.Lock(), {0: 0, 1: 0}, {0: 0, 1: 0}

    def answer(handler, body):
        line = re.search(r"/sent/\d+/([01])$", handler.path)
        is_trim = line and handler.command == "PUT" and "If-None-Match" not in handler.headers
        if is_trim:
            worker = int(line[1])
            with lock:
                now[worker] += 1
                most[worker] = max(most[worker], now[worker])
            time.sleep(0.2)
            with lock:
                now[worker] -= 1
        says(handler, *passed_on(server, handler, body))

    run_of_two(tokens, tmp_path, server, front(answer).port, "trims", **{"-n": None, "--retain": 1, "-x": 96})
    assert min(most.values()) > 1, most


def test_what_is_read_beside_a_payload_is_asked_for_when_that_arrives(tokens, tmp_path, server, front):
    """Of two fragments one takes 0.4 s longer. Each waits as long as its own payloads do."""
    sent, gaps = {}, {"slow": [], "fast": []}

    def answer(handler, body):
        line = re.search(r"/sent/(\d+)/([01])$", handler.path)
        sync, worker = (int(line[1]), int(line[2])) if line else (None, None)
        if line and handler.command == "PUT" and len(body) > 4096:
            kind = "slow" if len(body) > 16_000 else "fast"
            sent[sync, worker] = time.monotonic(), kind
            time.sleep(0.4 if kind == "slow" else 0)
        if line and handler.command == "GET" and (own := sent.pop((sync, 1 - worker), None)):
            gaps[own[1]].append(time.monotonic() - own[0])
        says(handler, *passed_on(server, handler, body))

    run_of_two(tokens, tmp_path, server, front(answer).port, "beside",
               **{"-n": None, "-x": 96, "--layers": 5, "--fragment-layers": 3})
    assert min(len(values) for values in gaps.values()) > 8, gaps
    assert statistics.median(gaps["slow"]) > statistics.median(gaps["fast"]) + 0.2, gaps


# -----------------------------------------------------------------------------------------------------------
# Links that fail

def faulty(server, seed):
    """An answer that now and then fails: before it is done, after it was done, or in the middle of its body."""
    draw, lock = random.Random(seed), threading.Lock()
    done = {}

    def answer(handler, body):
        with lock:
            fault = draw.choice([None] * 12 + ["503", "500", "429", "409", "404", "drop", "done", "cut", "delay"])
            if fault:
                done[fault] = done.get(fault, 0) + 1
        if fault in ("503", "500", "429", "409"):
            return error(int(fault), {"503": "SlowDown", "409": "ConditionalRequestConflict"}.get(fault, "Other"))(
                handler, body)
        if fault == "404":  # of a proxy that has not found the store yet
            return says(handler, 404, b"404 page not found")
        if fault == "drop":
            handler.close_connection = True
            return None
        status, text, headers = passed_on(server, handler, body)
        if fault == "done":  # and nobody hears of it
            handler.close_connection = True
        elif fault == "cut" and len(text) > 1:
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text[:len(text) // 2])
            handler.close_connection = True
        else:
            if fault == "delay":
                time.sleep(0.2)
            says(handler, status, text, headers)
        return None

    answer.done = done
    return answer


def test_over_links_that_fail_the_bits_are_those_of_tcp(train, server, front, monkeypatch):
    answer = faulty(server, 1)
    for name, value in server.environment(front(answer).port).items():
        monkeypatch.setenv(name, value)
    assert_bits_of_tcp(train, server.url(), {**LOCK_STEP, "--ranks": 1, "-x": 120, "-v": 0, "--run-name": "faulty"})
    assert len(answer.done) == 9, answer.done


def test_workers_in_lock_step_meet_in_a_bucket(train, server, monkeypatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    options = {"--workers": 2, "-H": 8, "--fragment-layers": 1, "-x": 32}
    folder = train("folder", options)
    bucket = train("bucket", {**options, "--store": server.url(), "--run-name": "lock-step"})
    assert bucket.model() == folder.model()
    assert server.keys(f"{s3_server.PREFIX}/meet/") == []
