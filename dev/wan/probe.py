#!/usr/bin/env python3
"""What a line between two sites is, measured in the way of ping and iperf3, with sockets:

    dev/wan/probe.py --mbit 100 --rtt 80 [--loss 0.01] [--mtu 9000]

prints one line: the round trip of small packets, the rate of one TCP stream, that of one connection which
carries as much both ways at once, the losses of a slow stream of packets, and what the relay took of a core
while the stream ran.
"""
import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sites import ROOT, Line, Sites, UserError, missing  # finds dev/, too
from metrics import Parser, exit_status

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
    """Takes one stream and says when it could begin, and when each 64 KiB came."""
    with socket.create_server(("", PORT)) as server:
        arrivals = [(time.monotonic(), 0)]
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(65536):
                arrivals.append((time.monotonic(), len(data)))
        print(json.dumps(arrivals))


def stream(address, count):
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(bytes(count))


def take(connection, count):
    while count > 0:
        data = connection.recv(min(count, 1 << 20))
        if not data:
            raise ConnectionError("the other side has left")
        count -= len(data)


def swap(connection, count, times):
    """Seconds of each exchange: `count` bytes one way and `count` the other, at once."""
    seconds = []
    for _ in range(times):
        begin = time.monotonic()
        sender = threading.Thread(target=connection.sendall, args=(bytes(count),))
        sender.start()
        take(connection, count)
        sender.join()
        seconds.append(time.monotonic() - begin)
    return seconds


def swap_with(address, count, times):
    with socket.create_connection((address, PORT)) as connection:
        return swap(connection, count, times)


def swap_with_whoever_comes(count, times):
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        with server.accept()[0] as connection:
            return swap(connection, count, times)


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
    arrivals = json.loads(arrivals)
    return {"round_trip_ms": round_trip, "lost": lost, "megabits": rate_of(arrivals),
            "stream_seconds": arrivals[-1][0] - arrivals[0][0], "relay_share": relay_share,
            "relay": sites.statistics}


def both_ways(line, count, times, relay=ROOT / "build/relay"):
    """Mbit/s each way, of one connection: the median of `times` exchanges of `count` bytes after a first
    one. Of an exchange's two durations, one for each side, the longer counts."""
    how = ["--bytes", str(count), "--times", str(times + 1)]
    with Sites(line, relay=relay) as sites:
        said = run_pair(sites, ["--as", "swapped", *how], ["--as", "swap", *how])
    slower = [max(pair) for pair in zip(*map(json.loads, said))]
    return 8e-6 * count / statistics.median(slower[1:])


def parse_arguments(words):
    parser = Parser(description="Measures a line between two sites.")
    parser.add_argument("--mbit", type=float, default=0, help="Mbit/s (0: unlimited)")
    parser.add_argument("--rtt", type=float, default=0, help="round trip in ms")
    parser.add_argument("--loss", type=float, default=0, help="probability")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--packets", type=int, default=400)
    parser.add_argument("--megabytes", type=float, help="of the stream (default: about four seconds)")
    parser.add_argument("--as", dest="part", help=argparse.SUPPRESS,
                        choices=["echo", "ping", "receive", "stream", "swap", "swapped"])
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, help=argparse.SUPPRESS)
    parser.add_argument("address", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.packets < 1:
        raise UserError(f"--packets {arguments.packets}: give one or more")
    if arguments.megabytes is not None and not 0.1 <= arguments.megabytes <= 1e6:
        raise UserError(f"--megabytes {arguments.megabytes:g}: give 0.1 to 1000000")
    return arguments


def print_measured(arguments):
    if lack := missing():
        raise UserError(lack)
    line = Line(arguments.mbit, arguments.rtt, arguments.loss, mtu=arguments.mtu)
    megabytes = arguments.megabytes or (arguments.mbit or 2000) / 2
    found = measure(line, arguments.packets, megabytes)
    both = both_ways(line, int(megabytes * 1e6 / 4), 3)
    print(f"round trip {found['round_trip_ms']:.2f} ms, lost {100 * found['lost']:.2f}%, "
          f"one stream {found['megabits']:.1f} Mbit/s, both ways at once {both:.1f} Mbit/s, "
          f"relay {100 * found['relay_share']:.1f}% of a core")


def main(words):
    arguments = parse_arguments(words)
    if arguments.part == "echo":
        echo(arguments.packets)
    elif arguments.part == "ping":
        print(json.dumps(ping(arguments.address, arguments.packets)))
    elif arguments.part == "receive":
        receive()
    elif arguments.part == "stream":
        stream(arguments.address, arguments.bytes)
    elif arguments.part == "swap":
        print(json.dumps(swap_with(arguments.address, arguments.bytes, arguments.times)))
    elif arguments.part == "swapped":
        print(json.dumps(swap_with_whoever_comes(arguments.bytes, arguments.times)))
    else:
        print_measured(arguments)


if __name__ == "__main__":
    sys.exit(exit_status(main))
