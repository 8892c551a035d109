#!/usr/bin/env python3
"""Machines far apart, on this one: sites that are joined by relay.cpp's lines, and programs in them.

    with Sites(Line(megabits=10, round_trip_ms=80), count=2) as sites:
        process = subprocess.Popen([*sites.inside(0), "some", "program"])
        print(sites.counters(0).bytes_sent)
    print(sites.statistics)

    dev/wan/sites.py    says in one line what this machine lacks for them, if anything

A site is a network namespace and a host name. Nothing of it has a name or a file outside, and programs that
were started inside end with the process that started them: nothing is left behind, even by a run that was
killed.
"""
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/tools"))
from metrics import UserError

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Line:
    """What joins a site with the others, both ways alike."""
    megabits: float = 0      # Mbit/s; 0: unlimited
    round_trip_ms: float = 0
    loss: float = 0          # probability, of a packet
    buffer_ms: float = 0     # what a full queue takes to leave, of 32 packets at least; 0: the round trip
    mtu: int = 1500
    seed: int = 1            # of the losses
    sysctls: tuple = ()      # NAME=VALUE, in every site


def relay_options(lines):
    """Of one line for all sites, or of one for each. MTU, seed and sysctls are the first one's."""
    def of_all(value):
        return ",".join(str(value(line)) for line in lines)

    rate = of_all(lambda line: line.megabits)
    options = ["--up", rate, "--down", rate, "--delay", of_all(lambda line: line.round_trip_ms / 4),
               "--loss", of_all(lambda line: line.loss),
               "--buffer", of_all(lambda line: line.buffer_ms or line.round_trip_ms),
               "--mtu", str(lines[0].mtu), "--seed", str(lines[0].seed)]
    for sysctl in lines[0].sysctls:
        options += ["--sysctl", sysctl]
    return options


@dataclass
class Counters:
    """Of a site's device since it is there: whole packets, headers and all; and of its TCP."""
    bytes_received: int
    packets_received: int
    bytes_sent: int
    packets_sent: int
    dropped: int
    segments_sent_again: int


def missing():
    """What this machine lacks for sites, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "sites take root on Linux: run it as root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun here: run it where the kernel (or the container) has TUN devices"
    for program in ("nsenter", "setpriv"):
        if not shutil.which(program):
            return f"{program} is not there: install util-linux"
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(CLONE_NEWNET) == 0 else 1)
    if os.waitpid(child, 0)[1] != 0:
        return "this container may not make network namespaces: run it where root may (CAP_SYS_ADMIN)"
    return None


def slow_start_after_idle(tcp):
    """Of what Sites.tcp() says. BBR has none, whatever the option says."""
    control, option = tcp
    return control != "bbr" and option == "1"


class Sites:
    """lines: one for all of `count` sites, or a list of one for each
    `statistics`: what the relay counted, when the sites are closed."""

    def __init__(self, lines, count=2, relay=ROOT / "build/relay"):
        self.statistics = None
        if isinstance(lines, Line):
            lines = [lines]
        else:
            count = len(lines)
        if not Path(relay).exists():
            raise UserError(f"{relay} is not there: run make build/relay")
        # Its own session: a Ctrl-C is for the program that started it, which then ends it.
        self.process = subprocess.Popen([str(relay), "--sites", str(count), *relay_options(lines)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True)
        text = self.process.stdout.readline()
        if not text:
            message = self.process.communicate()[1].strip()
            raise UserError(message.removeprefix("error: ") or f"{relay} ended: start it by hand")
        ready = json.loads(text)
        self.interface = ready["interface"]
        self.addresses = [site["address"] for site in ready["sites"]]
        self.places = [(site["network"], site["host_name"]) for site in ready["sites"]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def inside(self, site):
        """The words that go before a command that is to run in a site."""
        network, host_name = self.places[site]
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={network}", f"--uts={host_name}"]

    def tcp(self):
        """[tcp_congestion_control, tcp_slow_start_after_idle], the same in all sites: they decide how a connection that
        was idle continues."""
        names = [f"/proc/sys/net/ipv4/tcp_{name}" for name in ("congestion_control", "slow_start_after_idle")]
        return subprocess.run([*self.inside(0), "cat", *names], capture_output=True, text=True,
                              check=True).stdout.split()

    def counters(self, site):
        """The kernel's counters of the site's device, those that /sys/class/net has in it, and of its TCP."""
        lines = subprocess.run([*self.inside(site), "cat", "/proc/net/dev", "/proc/net/snmp"],
                               capture_output=True, text=True, check=True).stdout.splitlines()
        fields = next(line.split(":")[1].split() for line in lines
                      if line.strip().startswith(self.interface + ":"))
        numbers = [int(field) for field in fields]
        names, values = (line.split()[1:] for line in lines if line.startswith("Tcp:"))
        return Counters(numbers[0], numbers[1], numbers[8], numbers[9], numbers[3] + numbers[11],
                        int(dict(zip(names, values))["RetransSegs"]))

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        text = self.process.communicate()[0]
        if text and self.statistics is None:
            self.statistics = json.loads(text)


if __name__ == "__main__":
    if lack := missing():
        print(f"error: {lack}", file=sys.stderr)
        sys.exit(2)
