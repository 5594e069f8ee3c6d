"""The name server: gives hosts' programs the addresses of other hosts, by DNS, and wrong answers under a fault.

It is a process of its own on a host with an agent, and serves each host on an address that only that host's programs
use. Answers have a TTL of zero, so resolvers ask again each time. It takes requests on the Unix socket that its
argument names, in the format of control_server:

    open      {"hosts": {host: {"listen": ip, "names": {name: ip}, "wrong": {name: ip}, "unused": ip}}}    for each host
              where its service listens, the right answers, and two kinds of wrong ones
    disturb   {"fault": id, "hosts": {host: {"kind", "delay_ms"}}}    in force when answered; several faults add up
    release   {"fault": id};  release_all {}
    look_up   {"host", "wait_s"} -> {"lookups": [[name, address or "gone" or "silent", seconds], ...]}
    sees      {"pids": [...], "path", "file", "text"} -> {"astray": [pid, ...], "is_changed"}    processes that see
              another file than `file` at `path`, and whether the content of `file` is not `text` any more
    met       {"fault": id} -> {"hosts": {host: [asked, met]}}
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from harness.clusters.control_server import Operation, run_helper

__all__ = ["GONE", "PORT", "SILENT", "NameServer", "Question", "answer_to", "main", "parse_question", "question_for"]

PORT = 53
"""The port that resolvers use: resolv.conf cannot name another."""

GONE, SILENT = "gone", "silent"
_KINDS = (SILENT, GONE, "wrong", "unused")
"""All kinds of faults except delays; the first one in force on a host decides."""

MAX_WAITING = 1000
"""Delayed answers per host; further questions are not answered, as by any server that is flooded."""

_HEADER = struct.Struct("!6H")
_ADDRESS, _ADDRESS_6, _INTERNET = 1, 28, 1
_IS_ANSWER, _IS_AUTHORITATIVE, _WANTS_RECURSION, _HAS_RECURSION = 0x8000, 0x0400, 0x0100, 0x0080
_NO_SUCH_NAME = 3
_MAX_LABEL_BYTES = 63
_NAME_POINTER = 0xC000 | _HEADER.size
"""Compressed name in an answer: a pointer to the name in the question."""


@dataclass(frozen=True, slots=True)
class Question:
    """A resolver's question; `raw` is the question section of the message."""

    ident: int
    flags: int
    name: str
    kind: int
    raw: bytes


def parse_question(message: bytes) -> Question:
    """Parse a message with exactly one question. Raises ValueError for any other."""
    if len(message) < _HEADER.size:
        raise ValueError("a message without a header")
    ident, flags, count, *_ = _HEADER.unpack_from(message)
    if flags & _IS_ANSWER or count != 1:
        raise ValueError("no message with one question")
    labels, at = [], _HEADER.size
    while at < len(message) and (length := message[at]):
        if length > _MAX_LABEL_BYTES:
            raise ValueError("a question whose name points elsewhere")
        labels.append(message[at + 1 : at + 1 + length].decode("ascii", "replace").lower())
        at += 1 + length
    end = at + 5
    if end > len(message):
        raise ValueError("a question that ends early")
    kind, space = struct.unpack_from("!2H", message, at + 1)
    if space != _INTERNET:
        raise ValueError("a question about another network")
    return Question(ident, flags, ".".join(labels), kind, message[_HEADER.size : end])


def question_for(name: str, ident: int) -> bytes:
    """A message that asks for the IPv4 address of a name."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    header = _HEADER.pack(ident, _WANTS_RECURSION, 1, 0, 0, 0)
    return header + labels + b"\0" + struct.pack("!2H", _ADDRESS, _INTERNET)


def answer_to(question: Question, address: str | None) -> bytes:
    """The answer with an IPv4 address, without a record for other kinds of questions; None: there is no such name."""
    flags = _IS_ANSWER | _IS_AUTHORITATIVE | _HAS_RECURSION | question.flags & _WANTS_RECURSION
    has_record = address is not None and question.kind == _ADDRESS
    header = _HEADER.pack(question.ident, flags | (_NO_SUCH_NAME if address is None else 0), 1, int(has_record), 0, 0)
    if not has_record or address is None:
        return header + question.raw
    record = struct.pack("!3HIH", _NAME_POINTER, _ADDRESS, _INTERNET, 0, 4) + socket.inet_aton(address)
    return header + question.raw + record


def _address_in(answer: bytes) -> str:
    """The address in an answer to `question_for`, or GONE."""
    _, flags, _, records, _, _ = _HEADER.unpack_from(answer)
    return GONE if flags & 0xF or not records else socket.inet_ntoa(answer[-4:])


@dataclass(slots=True)
class _Served:
    """A host: where its programs send questions, and the answers they get."""

    listen: str
    names: dict[str, str]
    wrong: dict[str, str]
    unused: str
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    waiting: int = 0

    def answer_for(self, name: str) -> tuple[str | None, float, dict[str, bool]]:
        """(address, or None for no such name, or "silent"; delay (s); the faults that apply to the answer, by id, and
        whether each has changed it)."""
        right = self.names.get(name)
        found: str | None = right
        deciding = [fault for kind in _KINDS for fault, each in self.faults.items() if each["kind"] == kind][:1]
        late = [fault for fault, each in self.faults.items() if each["kind"] == "slow"]
        delay_s = max((self.faults[fault]["delay_ms"] / 1000 for fault in late), default=0.0)
        if deciding and right is not None:
            kind = self.faults[deciding[0]]["kind"]
            found = {GONE: None, SILENT: SILENT, "wrong": self.wrong[name], "unused": self.unused}[kind]
        met = dict.fromkeys(deciding, found != right)
        if found != SILENT:  # an answer that never comes is not late
            met |= dict.fromkeys(late, delay_s > 0)
        return found, delay_s, met


class NameServer:
    """The hosts that are served, and the faults in force. `port` is for tests."""

    def __init__(self, *, port: int = PORT) -> None:
        self.port = port
        self._served: dict[str, _Served] = {}
        self._counts: dict[str, dict[str, list[int]]] = {}
        """fault -> host -> [asked, met]; kept after the fault is released"""
        self._own: set[tuple[str, int]] = set()
        """Source addresses of the harness's own questions."""

    async def open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Serve hosts. Raises OSError, for instance when something else listens there."""
        loop = asyncio.get_running_loop()
        for host, given in message["hosts"].items():
            served = self._served[host] = _Served(given["listen"], given["names"], given["wrong"], given["unused"])

            def made(host: str = host, served: _Served = served) -> _Listener:
                return _Listener(self, host, served)

            await loop.create_datagram_endpoint(made, local_addr=(served.listen, self.port))
        return {}

    async def disturb(self, message: dict[str, Any]) -> dict[str, Any]:
        """Apply one fault."""
        for host, fault in message["hosts"].items():
            self._served[host].faults[message["fault"]] = dict(fault)
            self._counts.setdefault(message["fault"], {})[host] = [0, 0]
        return {}

    async def release(self, message: dict[str, Any]) -> dict[str, Any]:
        """Undo one fault."""
        for served in self._served.values():
            served.faults.pop(message["fault"], None)
        return {}

    async def release_all(self, message: dict[str, Any]) -> dict[str, Any]:
        """Undo every fault."""
        for served in self._served.values():
            served.faults.clear()
        return {}

    async def met(self, message: dict[str, Any]) -> dict[str, Any]:
        """How many lookups each host's programs have made since a fault began, and how many met it."""
        return {"hosts": self._counts.get(message["fault"], {})}

    async def sees(self, message: dict[str, Any]) -> dict[str, Any]:
        """Find processes that see another file at a path than this one, and whether this one was changed. Processes
        that have ended are left out."""
        wanted, astray = os.stat(message["file"]), []
        with open(message["file"], encoding="utf-8", errors="replace") as file:
            is_changed = file.read() != message["text"]
        for pid in message["pids"]:
            try:
                found = os.stat(f"/proc/{pid}/root{message['path']}")
            except (FileNotFoundError, ProcessLookupError):
                # The kernel removes a process's root before the process: one that is ending has a pid but no root.
                if os.path.exists(f"/proc/{pid}/root"):
                    astray.append(pid)
                continue
            if (found.st_dev, found.st_ino) != (wanted.st_dev, wanted.st_ino):
                astray.append(pid)
        return {"astray": astray, "is_changed": is_changed}

    async def look_up(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask a host's own service for every other host, over the network, as a resolver would."""
        served = self._served[message["host"]]
        found = await asyncio.gather(
            *(self._look_up(served.listen, name, float(message["wait_s"])) for name in served.names)
        )
        return {"lookups": [list(each) for each in found]}

    async def _look_up(self, server: str, name: str, timeout_s: float) -> tuple[str, str, float]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            asking.connect((server, self.port))
            own = asking.getsockname()
            self._own.add(own)
            try:
                await loop.sock_sendall(asking, question_for(name, 1))
                answer = await asyncio.wait_for(loop.sock_recv(asking, 512), timeout_s)
                return name, _address_in(answer), loop.time() - began_s
            except TimeoutError:
                return name, SILENT, loop.time() - began_s
            finally:
                self._own.discard(own)

    def take(self, host: str, served: _Served, data: bytes, asker: tuple[str, int]) -> tuple[bytes | None, float]:
        """Answer a message: (answer or None, delay in seconds). Counts programs' lookups for each fault. Raises
        ValueError."""
        question = parse_question(data)
        name = question.name.partition(".")[0]
        found, delay_s, faults = served.answer_for(name)
        if name in served.names and question.kind == _ADDRESS and asker not in self._own:
            for fault, is_met in faults.items():
                count = self._counts[fault][host]
                count[0] += 1
                count[1] += is_met
        return (None if found == SILENT else answer_to(question, found)), delay_s


class _Listener(asyncio.DatagramProtocol):
    """The socket of one host."""

    def __init__(self, server: NameServer, host: str, served: _Served) -> None:
        self._server = server
        self._host = host
        self._served = served
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        try:
            answer, delay_s = self._server.take(self._host, self._served, data, addr)
        except ValueError:
            return
        if answer is None or self._served.waiting >= MAX_WAITING:
            return
        if delay_s:
            self._served.waiting += 1
            asyncio.get_running_loop().call_later(delay_s, self._send_late, answer, addr)
        elif self._transport is not None:
            self._transport.sendto(answer, addr)

    def _send_late(self, answer: bytes, asker: Any) -> None:
        self._served.waiting -= 1
        if self._transport is not None:
            self._transport.sendto(answer, asker)


def main() -> None:
    """Run the server on the path that is the first argument."""
    server = NameServer()
    operations: list[Operation] = [
        *(server.open, server.disturb, server.release, server.release_all),
        *(server.look_up, server.sees, server.met),
    ]
    run_helper({operation.__name__: operation for operation in operations})


if __name__ == "__main__":
    main()
