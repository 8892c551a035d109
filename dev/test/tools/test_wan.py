"""dev/wan: sites on this machine and the lines between them; dev/bench/wan.py: training over such lines.
Needs root and TUN devices, and is skipped where they are missing. What a line must not exceed is held to;
what it should reach is an order of magnitude, for the machine may be busy."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest


import probe
import sites
import wan
from conftest import ROOT, TINY, TRAINER, is_running
from sites import Line, Sites


@pytest.fixture(scope="session")
def relay(tmp_path_factory):
    program = tmp_path_factory.mktemp("wan") / "relay"
    source = ROOT / "dev/wan/relay.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    return program


@pytest.fixture
def far(relay):
    """far(line, count) opens sites; skips where this machine can have none."""
    if lack := sites.missing():
        pytest.skip(lack)
    opened = []

    def open_sites(line, count=2):
        opened.append(Sites(line, count, relay))
        return opened[-1]

    yield open_sites
    for one in opened:
        one.close()


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def python_in(one, site, code, *words):
    return subprocess.run([*one.inside(site), sys.executable, "-c", code, *words], capture_output=True,
                          text=True, check=True, timeout=60).stdout


# Sends so many packets of 1000 bytes at once.
BURST = """
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    out.sendto(bytes(1000), (sys.argv[1], 9))
"""


# -------------------------------------------------------------------------------------------------- the relay

def test_a_line_has_its_rate_its_delay_and_its_losses(far, relay):
    far(Line())  # skips
    found = probe.measure(Line(megabits=20, round_trip_ms=40, loss=0.05), 300, 1.5, relay)
    assert found["megabits"] > 2  # more than 20 where the receiver is held up
    assert 8 * 1.5 / found["stream_seconds"] <= 20
    assert 40 <= found["round_trip_ms"] < 400
    assert 0.02 < found["lost"] < 0.3  # 0.0975: it may be lost on its way and on its way back
    up = found["relay"]["sites"][0]["up"]
    assert 1.5e6 < up["bytes"] <= 20e6 / 8 * found["relay"]["seconds"]


def test_an_unlimited_line_waits_for_nothing(far, relay):
    far(Line())
    found = probe.measure(Line(mtu=9000), 50, 20, relay)
    assert found["megabits"] > 100 and found["round_trip_ms"] < 40 and found["lost"] == 0


def test_what_finds_a_queue_full_is_dropped_and_everything_is_counted(far):
    one = far(Line(megabits=1, buffer_ms=50))
    python_in(one, 0, BURST, one.addresses[1], "200")
    wait_until(lambda: one.counters(0).packets_sent >= 200)
    time.sleep(1)  # what is in the queue leaves
    sent, received = one.counters(0), one.counters(1)
    one.close()
    up, down = one.statistics["sites"][0]["up"], one.statistics["sites"][1]["down"]
    assert sent.bytes_sent == 200 * 1028 and sent.dropped == 0
    assert up["packets"] + up["dropped"] == 200 and up["dropped"] > 100  # 32 of 1500 bytes have room
    assert received.packets_received == down["packets"] == up["packets"]


def test_losses_are_the_same_for_the_same_seed(far):
    lost = []
    for seed in (1, 1, 2):
        one = far(Line(megabits=100, loss=0.2, buffer_ms=1000, seed=seed))
        python_in(one, 0, BURST, one.addresses[1], "400")
        wait_until(lambda: one.counters(0).packets_sent >= 400)
        one.close()
        site = one.statistics["sites"][0]
        assert site["up"]["packets"] == 400
        lost.append(site["lost"])
    assert lost[0] == lost[1] != lost[2]
    assert all(40 < count < 160 for count in lost)


def test_streams_to_several_sites_share_the_senders_uplink(far):
    one = far(Line(megabits=2, buffer_ms=10000), 3)
    begin = time.monotonic()
    senders = [subprocess.Popen([*one.inside(0), sys.executable, "-c", BURST, address, "250"])
               for address in one.addresses[1:]]
    assert [sender.wait() for sender in senders] == [0, 0]
    wait_until(lambda: sum(one.counters(site).packets_received for site in (1, 2)) == 500)
    assert time.monotonic() - begin > 500 * 1028 * 8 / 2e6 * 0.9


def test_what_tcp_does_after_an_idle_second_is_read_in_the_sites(far, relay):
    with Sites(Line(), 2, relay) as found:
        assert len(found.tcp()) == 2 and found.tcp()[1] in ("0", "1")
    said = {("cubic", "1"): True, ("cubic", "0"): False, ("bbr", "1"): False, ("bbr", "0"): False}
    assert {tcp: sites.slow_start_after_idle(tcp) for tcp in said} == said


def test_sites_see_each_other_and_nothing_else(far):
    one = far(Line())
    code = "import os, socket; print(socket.gethostname(), *sorted(os.listdir('/proc/sys/net/ipv4/conf')))"
    assert python_in(one, 0, code).split() == ["site0", "all", "default", "lo", "wan0"]
    assert python_in(one, 1, code).split()[0] == "site1"
    assert Path("/proc/sys/kernel/hostname").read_text().strip() != "site0"
    assert "wan0" not in os.listdir("/sys/class/net")


def test_nothing_is_left_behind_by_a_program_that_was_killed(far, relay, tmp_path):
    far(Line()).close()
    code = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from sites import Line, Sites
with Sites(Line(), 2, sys.argv[2]) as sites:
    inside = subprocess.Popen([*sites.inside(0), "sleep", "600"])
    while "sleep" not in open(f"/proc/{inside.pid}/comm").read(): time.sleep(0.01)
    print(sites.process.pid, inside.pid, flush=True)
    time.sleep(600)
"""
    program = subprocess.Popen([sys.executable, "-c", code, str(ROOT / "dev/wan"), str(relay)],
                               stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2 and all(is_running(pid) for pid in pids)
    program.kill()
    program.communicate()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def one_line(result):
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("words, message", [
    (["--sites", "1"], "--sites is none of 2 to 64"), (["--mtu", "100"], "--mtu is none of"),
    (["--up", "1,2,3"], "neither one value nor one for each site"), (["--loss", "1"], "give less than 1"),
    (["--delay", "-1"], "--delay has '-1'"), (["--rate", "1"], "--rate 1 is unknown"),
    (["--up"], "lacks its value"),
    (["--sysctl", "kernel/pid_max=32768"], "none of a site's network"),
    (["--sysctl", "net/../kernel/pid_max=32768"], "none of a site's network"),
    (["--sysctl", "net/ipv4/tcp_congestion_control=none"], "cannot set net/ipv4/tcp_congestion_control")])
def test_a_mistake_is_one_line(relay, far, words, message):
    far(Line()).close()
    assert message in one_line(subprocess.run([str(relay), *words], capture_output=True, text=True))


@pytest.mark.parametrize("program", ["dev/wan/sites.py", "dev/wan/probe.py", "dev/bench/wan.py"])
def test_without_root_it_says_so(program):
    nobody = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    result = subprocess.run([*nobody, sys.executable, str(ROOT / program)], capture_output=True, text=True)
    assert "run it as root" in one_line(result)


# ---------------------------------------------------------------------------------------------- the benchmark

def test_a_wait_in_one_step_of_a_period_slows_the_period_down():
    def process(waits):
        steps = [{"seconds": 1.0 + waits.get(step, 0), "tokens": 100 * step} for step in range(1, 61)]
        return SimpleNamespace(steps=steps)

    def speed(method, *waits):
        processes = [process(one) for one in waits]
        run = SimpleNamespace(workers=2, processes=processes, of_worker=lambda worker: [processes[worker]])
        return wan.tokens_per_second(method, run)

    streaming, data_parallel = wan.METHODS[-1], wan.METHODS[0]
    assert speed(streaming, {}, {}) == pytest.approx(200)
    assert speed(streaming, {5: 100}, {}) == pytest.approx(200)  # in the first period
    assert speed(streaming, {30: 20, 50: 20}, {}) == pytest.approx(100)
    assert speed(streaming, {}, {30: 20, 50: 20}) == pytest.approx(100)
    assert speed(data_parallel, {1: 100, 30: 20}, {}) == pytest.approx(200)  # one step late of sixty


@pytest.fixture
def bench(far, relay, tokens, tmp_path, monkeypatch):
    """bench(words) runs the benchmark with a tiny model over a few lines."""
    far(Line()).close()
    common = {**TINY, "--channels": 64, "-b": 1}
    monkeypatch.setattr(wan, "COMMON", common)
    monkeypatch.setattr(wan, "MEGABITS_A_STEP", 60)  # five steps of data-parallel are enough
    monkeypatch.setattr(wan, "RATES", (0, 4))
    monkeypatch.setattr(wan, "ROUND_TRIPS", (0, 20))
    monkeypatch.setattr(wan, "PROBE_BYTES", 100_000)

    def run(*words):
        program = ["wan.py", "--text", str(tokens), "--out", str(tmp_path / "wan"), "--relay", str(relay),
                   "--trainer", str(TRAINER), "--report", str(tmp_path / "wan.md"), *words]
        monkeypatch.setattr(sys, "argv", program)
        if status := wan.exit_status(wan.main):
            sys.exit(status)
        return (tmp_path / "wan.md").read_text()

    return run


def test_training_over_a_slow_line_sends_the_bytes_that_it_counts(bench, tmp_path, monkeypatch, capsys):
    text = bench("--quick", "--only", "data-parallel", "fp4-tau5")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    rows = {(line[0], line[1], line[2]): line for line in lines if len(line) == 13}
    for trip in ("0 ms", "20 ms"):
        for method in ("data-parallel", "+ fp4, tau 5"):
            row = rows[trip, "4 Mbit/s", method]
            assert row[4].endswith("%") and row[6].endswith("%")
            assert row[5].endswith("%") if method != "data-parallel" else row[5] == "-"
            assert 1.0 < float(row[9])
            assert 1.0 < float(rows["0 ms", "unlimited", method][9]) < 1.1
            assert row[7].endswith("%")
    assert (tmp_path / "wan.png").stat().st_size > 10000
    known = wan.probed(SimpleNamespace(out=tmp_path / "wan"))
    assert 1 < known["4mbit-0ms"] < 4 and "of 4 Mbit/s at 20 ms" in text

    # What is sent travels: no line was passed by. Beside what the program counts there are headers, small
    # messages, and what TCP sends again: more where the machine is busy.
    for method in ("data-parallel", "fp4-tau5"):
        folder = tmp_path / f"wan/{method}_4mbit-20ms"
        made = json.loads((folder / "made_by.json").read_text())
        for device, process in zip(made["devices"], wan.read_run(folder).processes):
            once = device["bytes_sent"] - 1500 * device["segments_sent_again"]
            assert once < 1.2 * wan.program_bytes(process)
        for device, site in zip(made["devices"], made["relay"]["sites"]):
            assert device["bytes_sent"] <= site["up"]["bytes"] + 1500 * site["up"]["dropped"]
            assert site["up"]["bytes"] <= 4e6 / 8 * made["relay"]["seconds"]

    # And a finished run is kept.
    monkeypatch.setattr(wan, "run", lambda *_: pytest.fail("a finished run was run again"))
    assert bench("--quick", "--only", "data-parallel", "fp4-tau5") == text
    monkeypatch.setattr(wan, "INNER_STEPS", 10)
    with pytest.raises(SystemExit) as left:
        bench("--quick", "--only", "fp4-tau5")
    assert left.value.code == 2 and "was run with other options" in capsys.readouterr().err


@pytest.mark.parametrize("program, words, what", [
    ("dev/bench/wan.py", ["--only", "x"], "invalid choice"),
    ("dev/bench/wan.py", ["--minutes", "x"], "float"),
    ("dev/wan/probe.py", ["--mbit", "x"], "float"),
    ("dev/wan/probe.py", ["--packets", "0"], "--packets 0"),
    ("dev/wan/probe.py", ["--megabytes", "-1"], "--megabytes -1")])
def test_a_mistake_is_one_line_and_status_2(program, words, what):
    result = subprocess.run([sys.executable, ROOT / program, *words], capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and what in result.stderr and result.stderr.count("\n") == 1


def test_a_trainer_that_fails_ends_the_benchmark_with_its_line(bench, monkeypatch, capsys):
    monkeypatch.setattr(wan, "COMMON", {**TINY, "--heads": 5})
    with pytest.raises(SystemExit) as left:
        bench("--quick", "--only", "data-parallel")
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "are not divisible by 5 heads" in error and error.count("\n") == 1
