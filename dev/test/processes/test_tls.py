"""Workers that meet through a Redis server over TLS (rediss://), and what they say where they may not."""

import shutil
import socket
import subprocess
import time

import pytest

WORKERS = {"--workers": 2, "-x": 12, "-H": 4, "--fragment-layers": 1}
NEW_KEY = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2".split()


def make_certificate(folder, name, *words):
    command = [*NEW_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def authority(tmp_path):
    """The folder of an authority's certificate and of a server's that it has signed, for 127.0.0.1."""
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl here: no certificates for tests of rediss://")
    make_certificate(tmp_path, "authority")
    signed = ["-CA", "authority.crt", "-CAkey", "authority.key"]
    make_certificate(tmp_path, "server", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    return tmp_path


@pytest.fixture
def rediss(authority):
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = f"--bind 127.0.0.1 --port 0 --tls-port {port} --tls-auth-clients no --requirepass secret"
    files = "--tls-cert-file server.crt --tls-key-file server.key --tls-ca-cert-file authority.crt"
    command = ["redis-server", *words.split(), *files.split(), "--save", ""]
    server = subprocess.Popen(command, cwd=authority, stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            if server.poll() is not None:
                pytest.skip("redis-server knows no TLS here")
            if answers(port):
                break
            time.sleep(0.02)
        assert answers(port), "the Redis server does not start"
        yield f"rediss://:secret@127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def test_workers_meet_through_redis_over_tls(rediss, authority, train, start_worker, monkeypatch):
    monkeypatch.setenv("DILOCO_CA", f"{authority}/authority.crt")
    together = train("together", WORKERS)
    apart = [start_worker(w, {**WORKERS, "--store": rediss}) for w in (0, 1)]
    assert [run.wait() for run in apart] == [0, 0], [run.output() for run in apart]
    assert apart[0].result().model() == together.model()


def test_a_server_of_an_unknown_authority_is_refused_before_anything_is_written(rediss, train):
    run = train("run", {**WORKERS, "--worker": 0, "--store": rediss}, status=2)
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: the certificate of the store at ") and "DILOCO_CA" in line
    assert "secret" not in run.stdout + run.stderr
    assert not run.folder.exists()
