"""A lean load generator in a process of its own, with many senders or readers over few connections, so that the broker
is the bottleneck.

    python -m benchmarks._load MODE ADDRESS [--senders 64] [--connections 4] [--batch 1] [--seconds 5] ...

Every sender has one request in flight and sends the next when it gets the answer. Frames are built once, and only what
a client would vary is changed in them: the born timestamp, and the UNIQ_KEY that RocketMQ's clients put into every
message. Only length, code and opaque of an answer are read. The result is one line of JSON. MODE is send, pull or wake.

With `--rate` the senders send at fixed times instead, at that total rate in messages per second. A latency then counts
from the moment at which a message was due, even if its sender was still waiting for the previous answer.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import re
import selectors
import socket
import struct
import sys
import time
from array import array
from collections.abc import Callable, Sequence

from node.remoting import Command, RequestCode
from node.remoting.codec import encode

__all__ = ["main"]

_HEAD = struct.Struct(">iI")
_BINARY_REPLY = struct.Struct(">hbhi")  # code, language, version, opaque
_JSON_CODE = re.compile(rb'"code":(\d+)')
_JSON_OPAQUE = re.compile(rb'"opaque":(\d+)')
_STAMP = b"1000000000000"
_KEY_BEGIN = "7F00000100014E25A3B1"
"""Prefix of all keys of one client: address, process and class loader, as in RocketMQ. Twelve digits follow."""
_KEY_DIGITS = 8
"""Digits of a key that number the requests of the load; four more number the messages of a request."""
RECEIVE_BYTES = 1 << 18
PULL_SYS_FLAG_SUSPEND = 2

Answered = Callable[[int, int, bytes], bool]
"""Called with the opaque, the code and the whole reply frame; returns whether that opaque sends again."""


class _Wire:
    """One connection, with its partly received frame and the data to send."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest = b""

    def send(self, data: bytes | bytearray) -> None:
        self.socket.sendall(data)

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Opaque, code and frame of each complete reply."""
        fresh = self.socket.recv(RECEIVE_BYTES)
        if not fresh:
            raise ConnectionError("the broker has closed the connection")
        data = self.rest + fresh if self.rest else fresh
        replies = []
        at, size = 0, len(data)
        while size - at >= 8:
            length, word = _HEAD.unpack_from(data, at)
            end = at + 4 + length
            if end > size:
                break
            if word >> 24:
                code, _, _, opaque = _BINARY_REPLY.unpack_from(data, at + 8)
            else:
                header = data[at + 8 : at + 8 + (word & 0xFFFFFF)]
                found_code, found_opaque = _JSON_CODE.search(header), _JSON_OPAQUE.search(header)
                assert found_code is not None and found_opaque is not None, header
                code, opaque = int(found_code[1]), int(found_opaque[1])
            replies.append((opaque, code, data[at:end]))
            at = end
        self.rest = data[at:]
        return replies


def _frame(code: int, fields: dict[str, str | int | bool], body: bytes, opaque: int, serializer: str) -> bytes:
    command = Command.request(code, fields, body)
    command.opaque = opaque
    command.serializer = "binary" if serializer == "binary" else "json"
    return encode(command)


class _Request:
    """The send request of one sender, with the fields and properties that RocketMQ's clients write."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        body = b"x" * options.body
        if options.batch > 1:
            body = b"".join([_batch_message(body, _properties(options, at + 1)) for at in range(options.batch)])
        fields: dict[str, str | int | bool] = {
            "a": "bench", "b": options.topic, "c": "TBW102", "d": 4,
            "e": options.first_queue + number % options.queues, "f": 0,
            "g": _STAMP.decode(), "h": 0, "i": _properties(options, 0), "j": 0, "k": False, "m": options.batch > 1,
        }  # fmt: skip
        code = RequestCode.SEND_BATCH_MESSAGE if options.batch > 1 else RequestCode.SEND_MESSAGE_V2
        self._frame = bytearray(_frame(code, fields, body, number, options.serializer))
        self._stamp_at = self._frame.index(_STAMP)
        self._keys_at = [found.end() for found in re.finditer(_KEY_BEGIN.encode(), self._frame)]

    def stamped(self, stamp: bytes, count: int) -> bytearray:
        """The frame with born timestamp `stamp`, as request number `count` of the load; valid until the next call."""
        frame = self._frame
        frame[self._stamp_at : self._stamp_at + len(_STAMP)] = stamp
        digits = b"%0*X" % (_KEY_DIGITS, count)
        for at in self._keys_at:
            frame[at : at + _KEY_DIGITS] = digits
        return frame


def _properties(options: argparse.Namespace, message: int) -> str:
    """The properties of a message in a batch request (numbered from 1), or of the request itself (0)."""
    if options.properties == "none":
        return ""
    key = f"UNIQ_KEY\x01{_KEY_BEGIN}{0:0{_KEY_DIGITS}X}{message:04X}\x02" if options.properties == "keys" else ""
    return f"{key}WAIT\x01true\x02"


def _batch_message(body: bytes, properties: str) -> bytes:
    text = properties.encode()
    head = struct.pack(">iiiii", 22 + len(body) + len(text), 0, 0, 0, len(body))
    return head + body + struct.pack(">h", len(text)) + text


def _now_stamp() -> bytes:
    return b"%013d" % (time.time_ns() // 1_000_000)


class _Timer:
    """Rates and latencies between the end of the warm-up and the end of the load."""

    def __init__(self, warm_up_s: float, seconds: float) -> None:
        self.begin_s = time.perf_counter() + warm_up_s
        self.end_s = self.begin_s + seconds
        self.latencies_ms = array("d")
        self.errors = 0
        self.answers = 0
        """Including those of the warm-up."""

    def result(self, per_request: float, took_s: float) -> dict[str, float]:
        ordered = sorted(self.latencies_ms)
        if not ordered:
            return {"per_s": 0.0, "errors": self.errors, "answers": self.answers, "seconds": took_s}
        return {
            "answers": self.answers,
            "seconds": took_s,
            "per_s": len(ordered) * per_request / took_s,
            "p50_ms": ordered[len(ordered) // 2],
            "p90_ms": ordered[len(ordered) * 90 // 100],
            "p99_ms": ordered[len(ordered) * 99 // 100],
            "p999_ms": ordered[len(ordered) * 999 // 1000],
            "max_ms": ordered[-1],
            "errors": self.errors,
        }


def _send(options: argparse.Namespace) -> dict[str, float]:
    requests = [_Request(options, number) for number in range(options.senders)]
    count = itertools.count()
    wires = [_Wire(options.address) for _ in range(min(options.connections, options.senders))]
    selector = selectors.DefaultSelector()
    for wire in wires:
        selector.register(wire.socket, selectors.EVENT_READ, wire)
    began_s = [0.0] * options.senders
    timer = _Timer(options.warm_up, options.seconds)

    stamp = _now_stamp()
    for at, wire in enumerate(wires):
        mine = range(at, options.senders, len(wires))
        for number in mine:
            began_s[number] = time.perf_counter()
        wire.send(b"".join([requests[number].stamped(stamp, next(count)) for number in mine]))
    now_s = time.perf_counter()
    begin_s, end_s, latencies = timer.begin_s, timer.end_s, timer.latencies_ms
    while now_s < end_s:
        for key, _ in selector.select(1.0):
            wire = key.data
            replies = wire.receive()
            now_s = time.perf_counter()
            stamp = _now_stamp()
            is_counted = now_s >= begin_s
            timer.answers += len(replies)
            again = []
            for number, code, _ in replies:
                if code == 0:
                    if is_counted:
                        latencies.append((now_s - began_s[number]) * 1000)
                elif is_counted:
                    timer.errors += 1
                began_s[number] = now_s
                again.append(requests[number].stamped(stamp, next(count)))
            wire.send(b"".join(again))
        now_s = time.perf_counter()
    return timer.result(options.batch, now_s - begin_s)


def _send_paced(options: argparse.Namespace) -> dict[str, float]:
    """Like `_send`, but each sender's messages are due at fixed intervals."""
    requests = [_Request(options, number) for number in range(options.senders)]
    count = itertools.count()
    wires = [_Wire(options.address) for _ in range(min(options.connections, options.senders))]
    selector = selectors.DefaultSelector()
    for wire in wires:
        selector.register(wire.socket, selectors.EVENT_READ, wire)
    interval_s = options.senders * options.batch / options.rate
    start_s = time.perf_counter()
    timer = _Timer(options.warm_up, options.seconds)
    waiting = [(start_s + number * interval_s / options.senders, number) for number in range(options.senders)]
    due_s = [0.0] * options.senders
    now_s = start_s
    while now_s < timer.end_s:
        while waiting and waiting[0][0] <= now_s:
            at_s, number = heapq.heappop(waiting)
            due_s[number] = at_s
            wires[number % len(wires)].send(requests[number].stamped(_now_stamp(), next(count)))
        for key, _ in selector.select(max(0.0, waiting[0][0] - now_s) if waiting else 1.0):
            for number, code, _ in key.data.receive():
                now_s = time.perf_counter()
                if now_s >= timer.begin_s:
                    if code == 0:
                        timer.latencies_ms.append((now_s - due_s[number]) * 1000)
                    else:
                        timer.errors += 1
                heapq.heappush(waiting, (due_s[number] + interval_s, number))
        now_s = time.perf_counter()
    return timer.result(options.batch, now_s - timer.begin_s)


_NEXT_JSON = re.compile(rb'"nextBeginOffset":"(\d+)"')
_NEXT_BINARY = b"\0\x0fnextBeginOffset"


def _next_offset(frame: bytes, serializer: str) -> int:
    if serializer == "json":
        found = _NEXT_JSON.search(frame, 0, 600)
        assert found is not None
        return int(found[1])
    at = frame.index(_NEXT_BINARY) + len(_NEXT_BINARY)
    size = int.from_bytes(frame[at : at + 4], "big")
    return int(frame[at + 4 : at + 4 + size])


def _pull_frame(options: argparse.Namespace, queue_id: int, offset: int, opaque: int, suspend_ms: int = 0) -> bytes:
    fields: dict[str, str | int | bool] = {
        "consumerGroup": "bench", "topic": options.topic, "queueId": queue_id, "queueOffset": offset, "maxMsgNums": 32,
        "sysFlag": 4 | (PULL_SYS_FLAG_SUSPEND if suspend_ms else 0), "commitOffset": 0,
        "suspendTimeoutMillis": suspend_ms, "subscription": "*", "subVersion": 0, "expressionType": "TAG",
    }  # fmt: skip
    return _frame(RequestCode.PULL_MESSAGE, fields, b"", opaque, options.serializer)


def _count(frame: bytes) -> int:
    """The number of messages in a pull reply: consecutive records, each of which begins with its size."""
    length, word = _HEAD.unpack_from(frame)
    at, count = 8 + (word & 0xFFFFFF), 0
    while at < 4 + length:
        at += int.from_bytes(frame[at : at + 4], "big")
        count += 1
    return count


def _pull(options: argparse.Namespace) -> dict[str, float]:
    """Each reader reads its queue from the beginning, 32 messages per request, and starts over at the end."""
    wires = [_Wire(options.address) for _ in range(min(options.connections, options.senders))]
    selector = selectors.DefaultSelector()
    for wire in wires:
        selector.register(wire.socket, selectors.EVENT_READ, wire)
    timer = _Timer(options.warm_up, options.seconds)
    began_s = [0.0] * options.senders
    for number in range(options.senders):
        wires[number % len(wires)].send(_pull_frame(options, number % options.queues, 0, number))
    messages = 0
    now_s = time.perf_counter()
    while now_s < timer.end_s:
        for key, _ in selector.select(1.0):
            wire = key.data
            for number, code, frame in wire.receive():
                now_s = time.perf_counter()
                offset = 0
                if code == 0:
                    if now_s >= timer.begin_s:
                        timer.latencies_ms.append((now_s - began_s[number]) * 1000)
                        messages += _count(frame)
                    offset = _next_offset(frame, options.serializer)
                elif code != 19:  # not the end of the queue, after which the reader starts over
                    timer.errors += 1
                began_s[number] = now_s
                wire.send(_pull_frame(options, number % options.queues, offset, number))
        now_s = time.perf_counter()
    result = timer.result(1.0, now_s - timer.begin_s)
    return result | {"per_s": messages / (now_s - timer.begin_s), "pulls_per_s": result["per_s"]}


def _wake(options: argparse.Namespace) -> dict[str, float]:
    """Measure the time from sending a message until a reader that waits at the end of the queue has it."""
    reader, sender = _Wire(options.address), _Wire(options.address)
    reader.send(_pull_frame(options, 0, 1 << 40, 0))
    offset = _next_offset(_one(reader)[2], options.serializer)
    request, count = _Request(options, 0), itertools.count()
    timer = _Timer(0.0, options.seconds)
    while time.perf_counter() < timer.end_s:
        reader.send(_pull_frame(options, 0, offset, 0, suspend_ms=15_000))
        time.sleep(0.005)  # the pull is held by now
        began_s = time.perf_counter()
        sender.send(request.stamped(_now_stamp(), next(count)))
        _, code, reply = _one(reader)
        timer.latencies_ms.append((time.perf_counter() - began_s) * 1000)
        assert code == 0 and _one(sender)[1] == 0
        offset = _next_offset(reply, options.serializer)
    return timer.result(1.0, options.seconds)


def _one(wire: _Wire) -> tuple[int, int, bytes]:
    while True:
        replies = wire.receive()
        if replies:
            return replies[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load and print its figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("mode", choices=("send", "pull", "wake"))
    parser.add_argument("address")
    parser.add_argument("--senders", type=int, default=64)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--body", type=int, default=128, help="bytes of a message's body")
    parser.add_argument("--topic", default="bench")
    parser.add_argument("--queues", type=int, default=8)
    parser.add_argument("--first-queue", type=int, default=0, help="of the queues; unknown ones are refused")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--serializer", choices=("json", "binary"), default="json")
    parser.add_argument("--properties", choices=("none", "wait", "keys"), default="keys")
    parser.add_argument("--rate", type=float, help="messages per second in all, instead of as many as get an answer")
    options = parser.parse_args(arguments)
    if options.rate is not None and (options.mode != "send" or options.rate <= 0):
        parser.error("--rate is a positive number, and for send only")
    host, _, port = options.address.rpartition(":")
    options.address = (host, int(port))
    send = _send if options.rate is None else _send_paced
    run = {"send": send, "pull": _pull, "wake": _wake}[options.mode]
    print(json.dumps(run(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
