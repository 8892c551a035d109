#!/usr/bin/env python3
"""What a line between two sites is, measured in the way of ping and iperf3, with sockets:

    dev/wan/probe.py --mbit 100 --rtt 80 [--loss 0.01] [--mtu 9000]

prints one line: the round trip of small packets, the rate of one TCP stream, the losses of a slow stream of
packets, and what the relay took of a core while the stream ran.
"""
import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sites import ROOT, Line, Sites, UserError, missing

PORT = 5001


def echo(count):
    """Sends back packets until `count` have come or none has for three seconds."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("", PORT))
        print("ready", flush=True)
        receiver.settimeout(3)
        try:
            for _ in range(count):
                data, sender = receiver.recvfrom(2048)
                receiver.sendto(data, sender)
        except socket.timeout:
            pass


def ping(address, count):
    """(milliseconds of the median round trip, share of packets that did not come back)"""
    trips, pause = {}, 0.005
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((address, PORT))
        sent = {}
        begin = time.monotonic()
        for number in range(count):
            sent[number] = time.monotonic()
            sender.send(number.to_bytes(4, "big") + bytes(60))
            while (left := begin + (number + 1) * pause - time.monotonic()) > 0 or number == count - 1:
                sender.settimeout(max(left, 1.0 if number == count - 1 else 0.0001))
                try:
                    answer = int.from_bytes(sender.recv(2048)[:4], "big")
                except socket.timeout:
                    break
                trips[answer] = time.monotonic() - sent[answer]
                if len(trips) == count:
                    break
    return 1000 * statistics.median(trips.values()), 1 - len(trips) / count


def receive():
    """Takes one stream and says when each 64 KiB came."""
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        arrivals = []
        with connection:
            while data := connection.recv(65536):
                arrivals.append((time.monotonic(), len(data)))
        print(json.dumps(arrivals))


def stream(address, count):
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(bytes(count))


def rate_of(arrivals):
    """Mbit/s of the second half of the bytes: slow start is over then."""
    total, before = sum(count for _, count in arrivals), 0
    for begin, count in arrivals:
        before += count
        if before >= total / 2:
            break
    seconds = arrivals[-1][0] - begin
    return 8e-6 * (total - before) / seconds


def run_pair(sites, server, client):
    """Runs this program in site 1 as `server` and then in site 0 as `client`; what both said."""
    program = [sys.executable, __file__]
    listener = subprocess.Popen([*sites.inside(1), *program, *server], stdout=subprocess.PIPE, text=True)
    try:
        listener.stdout.readline()
        said = subprocess.run([*sites.inside(0), *program, *client, sites.addresses[1]], check=True,
                              capture_output=True, text=True).stdout
        return listener.communicate(timeout=60)[0], said
    finally:
        listener.kill()


def measure(line, packets, megabytes, relay=ROOT / "build/relay"):
    """The round trip and losses, then the stream, over lines of their own."""
    with Sites(line, relay=relay) as sites:
        _, said = run_pair(sites, ["--as", "echo", "--packets", str(packets)],
                           ["--as", "ping", "--packets", str(packets)])
        round_trip, lost = json.loads(said)
    with Sites(line, relay=relay) as sites:
        arrivals, _ = run_pair(sites, ["--as", "receive"],
                               ["--as", "stream", "--bytes", str(int(megabytes * 1e6))])
    relay_share = sites.statistics["cpu_seconds"] / sites.statistics["seconds"]
    return {"round_trip_ms": round_trip, "lost": lost, "megabits": rate_of(json.loads(arrivals)),
            "relay_share": relay_share, "relay": sites.statistics}


def main():
    parser = argparse.ArgumentParser(description="Measures a line between two sites.")
    parser.add_argument("--mbit", type=float, default=0, help="Mbit/s (0: unlimited)")
    parser.add_argument("--rtt", type=float, default=0, help="round trip in ms")
    parser.add_argument("--loss", type=float, default=0, help="probability")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--packets", type=int, default=400)
    parser.add_argument("--megabytes", type=float, help="of the stream (default: about four seconds)")
    parser.add_argument("--as", dest="part", choices=["echo", "ping", "receive", "stream"],
                        help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("address", nargs="?", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.part == "echo":
        echo(a.packets)
    elif a.part == "ping":
        print(json.dumps(ping(a.address, a.packets)))
    elif a.part == "receive":
        receive()
    elif a.part == "stream":
        stream(a.address, a.bytes)
    else:
        try:
            if lack := missing():
                raise UserError(lack)
            line = Line(a.mbit, a.rtt, a.loss, mtu=a.mtu)
            found = measure(line, a.packets, a.megabytes or (a.mbit or 2000) / 2)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        print(f"round trip {found['round_trip_ms']:.2f} ms, lost {100 * found['lost']:.2f}%, "
              f"one stream {found['megabits']:.1f} Mbit/s, relay {100 * found['relay_share']:.1f}% of a core")


if __name__ == "__main__":
    main()
