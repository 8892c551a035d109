"""A worker's link to its Redis server, under a test's control: it can be cut, and it reads the commands that pass.

    link = Link(server.port)               the worker connects to link.port
    link.cut(); link.mend()                in between, nothing passes, and neither end is told
    link.drop()                            ends every connection
    link.trap("HSETNX", "/sent/", action)  holds the next such command on such a key, and calls
                                           action(send, command), whose send(bytes) passes on all of the command's
                                           bytes, a part of them or nothing
    link.hold(is_for, may_pass)            a command with is_for(words) waits, as do all later commands on its
                                           connection, until may_pass(words)
"""
import collections
import contextlib
import socket
import threading
import time

BUFFER = 1 << 16


class Commands:
    """Cuts a client's stream into commands: "*2", "$3", "GET", "$1", "k", each with its line's end."""

    def __init__(self):
        self.data = b""

    def feed(self, data):
        """[(words, bytes)] of the commands that are now complete."""
        self.data += data
        whole = []
        while (one := self._first()) is not None:
            whole.append(one)
            self.data = self.data[len(one[1]):]
        return whole

    def _first(self):
        head, words = self._line(0), []
        if head is None:
            return None
        number, at = head
        for _ in range(number):
            if (length := self._line(at)) is None:
                return None
            begin, at = length[1], length[1] + length[0] + 2
            if at > len(self.data):
                return None
            words.append(self.data[begin:at - 2])
        return words, self.data[:at]

    def _line(self, at):
        """(the number after a line's first letter, where the next line begins)"""
        end = self.data.find(b"\r\n", at)
        return None if end < 0 else (int(self.data[at + 1:end]), end + 2)


class Trap:
    """`sprung` is set once action() has returned."""

    def __init__(self, command, key, action, field, value):
        self.command, self.key, self.action, self.field, self.value = command, key, action, field, value
        self.sprung = threading.Event()

    def is_for(self, words):
        is_script = words[0].upper() == b"EVAL"  # EVAL script count key key ... argument
        names = [word.decode(errors="replace") for word in [words[0], *words[3 if is_script else 1:]]]
        keys, fields = names[1:3 if is_script else 2], names[2:3] if not is_script else names[2:]
        return (names[0].upper() == self.command and any(self.key in key for key in keys)
                and self.field in (None, *fields) and (self.value is None or self.value(words[-1])))


class Hold:
    """`reached` is set once a command waits."""

    def __init__(self, is_for, may_pass):
        self.is_for, self.may_pass = is_for, may_pass
        self.reached = threading.Event()


class Link:
    def __init__(self, port, address="127.0.0.1", commands=Commands):
        """commands: the class that cuts a client's stream into commands"""
        self.to, self.open, self.commands = (address, port), threading.Event(), commands
        self.open.set()
        self.seen = collections.Counter()  # commands, by (command, key)
        self.traps, self.holds, self.pairs, self.lock = [], [], set(), threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def trap(self, command, key, action, field=None, value=None):
        """key: a part of the key   field: the whole field; None: any   value: a test of the last word; None: any
        For a script (EVAL): a part of one of its first two keys, and one of its arguments."""
        self.traps.append(Trap(command, key, action, field, value))
        return self.traps[-1]

    def hold(self, is_for, may_pass):
        self.holds.append(Hold(is_for, may_pass))
        return self.holds[-1]

    def cut(self):
        self.open.clear()

    def mend(self):
        self.open.set()

    def drop(self):
        with self.lock:
            pairs = list(self.pairs)
        for pair in pairs:
            self._end(pair)

    def close(self):
        self.is_closed = True
        self.listener.close()
        self.drop()
        self.mend()

    def _accept(self):
        while not self.is_closed:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client):
        self.open.wait()
        try:
            server = socket.create_connection(self.to)
        except OSError:
            client.close()
            return
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = (client, server)
        with self.lock:
            self.pairs.add(pair)
        threading.Thread(target=self._pump, args=(pair, server, client, self._answer), daemon=True).start()
        commands = self.commands()
        self._pump(pair, client, server, lambda send, data: self._ask(commands, send, data))

    def _pump(self, pair, source, sink, pass_on):
        with contextlib.suppress(OSError):
            while data := source.recv(BUFFER):
                self.open.wait()
                pass_on(sink.sendall, data)
        self._end(pair)

    @staticmethod
    def _answer(send, data):
        send(data)

    def _ask(self, commands, send, data):
        for words, command in commands.feed(data):
            self.seen[words[0].decode(), words[1].decode(errors="replace") if len(words) > 1 else ""] += 1
            for hold in self.holds:
                self._keep_back(hold, words)
            trap = next((one for one in self.traps if one.is_for(words)), None)
            if trap is None:
                send(command)
                continue
            self.traps.remove(trap)
            trap.action(send, command)
            trap.sprung.set()

    def _keep_back(self, hold, words):
        while hold.is_for(words) and not self.is_closed and not hold.may_pass(words):
            hold.reached.set()
            time.sleep(0.02)

    def _end(self, pair):
        with self.lock:
            self.pairs.discard(pair)
        for one in pair:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
