"""A broker process under generated and mutated requests: does it stay up, answer correctly, stay small, serve others?

    python -m benchmarks.fuzz_broker [--frames 200000] [--seconds 280] [--state FILE] [--seed N] [--dledger]

Two sources alternate. Hypothesis generates complete requests: any code, fields of any type under the protocol's names,
bodies of bytes, JSON and batches, in both serializers. A mutating fuzzer takes a valid frame of each kind and flips
bits, truncates, repeats, splices, and writes extreme lengths. Verified throughout:

    the process stays up, and logs neither a traceback nor an error
    every complete request that wants an answer gets exactly one, with its opaque and a code of the protocol
    a bystander on its own connection sends and pulls; in the end all its messages exist, in order and intact
    memory does not grow once the tables, which are all bounded, contain every name that the fuzzer uses
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from benchmarks._bystander import PAUSE_S, Bystander
from node.broker.ports import PULL_CODES
from node.remoting import Command, FrameError, FrameParser, RemotingClient, RequestCode, ResponseCode, encode
from node.store.record import Message, decode_records

__all__ = ["MEMORY_SLACK_BYTES", "Subject", "free_port", "free_ports", "fuzz", "main", "mutate"]

ANSWER_TIMEOUT_S = 10.0
FRAMES_PER_CONNECTION = 40
MEMORY_SLACK_BYTES = 24 << 20
"""By how much the memory of a Python process may vary without a leak."""
QUIET_CODES = (RequestCode.END_TRANSACTION,)
"""Requests that may remain without an answer."""
CONFIG = """
self_id = "{self_id}"
listen = "127.0.0.1:0"
data_dir = "{data_dir}"
flush_mode = "async"
uvloop = "off"
{ledger}
[limits]
segment_size_bytes = 8388608
max_message_size_bytes = 1000000
index_slots = 4096
index_entries = 20000
[[topics]]
name = "bystander"
queues = 1
[[topics]]
name = "t"
queues = 4
"""
TOPICS = (
    "t", "t", "t", "fuzz-1", "fuzz-2", "%RETRY%g1", "%DLQ%g1", "TBW102", "SCHEDULE_TOPIC_XXXX", "nowhere", "", "ü" * 90,
)  # fmt: skip
GROUPS = ("g1", "g2", "g3", "", "G" * 300)
Fields = dict[str, str | int]
HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01u\x02"


def _batch(*bodies: bytes) -> bytes:
    parts = []
    for body in bodies:
        total = 22 + len(body)
        parts.append(total.to_bytes(4, "big") + bytes(12) + len(body).to_bytes(4, "big") + body + bytes(2))
    return b"".join(parts)


def corpus() -> list[Command]:
    """One valid request of every kind, and a few variants."""

    def body(value: object) -> bytes:
        return json.dumps(value).encode()

    properties = "TAGS\x01x\x02KEYS\x01k\x02"
    send: Fields = {"a": "p", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": properties}
    long_send: Fields = {
        "producerGroup": "p", "topic": "t", "queueId": 1, "sysFlag": 0, "bornTimestamp": 1, "properties": "",
    }  # fmt: skip
    pull: Fields = {"consumerGroup": "g1", "topic": "t", "queueId": 0, "queueOffset": 0, "maxMsgNums": 32, "sysFlag": 4}
    subscription = {"topic": "t", "subString": "a || b", "tagsSet": ["a", "b"], "subVersion": 1}
    consumer = {"groupName": "g1", "consumeType": "CONSUME_PASSIVELY", "subscriptionDataSet": [subscription]}
    beat = {"clientID": "c", "producerDataSet": [{"groupName": "p"}], "consumerDataSet": [consumer]}
    locks = {"consumerGroup": "g1", "clientId": "c", "mqSet": [{"topic": "t", "brokerName": "b", "queueId": 0}]}
    end: Fields = {"producerGroup": "p", "tranStateTableOffset": 0, "commitLogOffset": 0, "commitOrRollback": 8}
    queue: Fields = {"topic": "t", "queueId": 0}
    group: Fields = {"groupName": "g2", "retryQueueNums": 2, "retryMaxTimes": 3}
    topic: Fields = {"topic": "fuzz-1", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    request = Command.request
    return [
        request(310, send, b"hello"),
        request(310, {**send, "i": "DELAY\x011\x02"}, b"late"),
        request(310, {**send, "i": HALF, "f": 4}, b"half"),
        request(310, {**send, "b": "%RETRY%g1", "j": 3, "l": 16}, b"again"),
        request(310, {**send, "b": "fuzz-2"}, b"made"),
        request(10, long_send, b"hello"),
        request(320, {**send, "m": True}, _batch(b"a", b"bb")),
        request(11, pull),
        request(11, {**pull, "subscription": "a > 1 AND b IN ('x')", "expressionType": "SQL92"}),
        request(11, {**pull, "sysFlag": 3, "commitOffset": 5, "suspendTimeoutMillis": 20, "queueOffset": 1 << 40}),
        request(12, {"topic": "t", "key": "k", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 1 << 50}),
        request(14, {**queue, "consumerGroup": "g1"}),
        request(15, {**queue, "consumerGroup": "g1", "commitOffset": 3}),
        request(17, topic),
        request(21), request(28), request(43), request(45), request(201),
        request(29, {**queue, "timestamp": 1 << 40}),
        request(30, queue), request(31, queue),
        request(33, {"offset": 0}),
        request(34, body=body(beat)),
        request(35, {"clientID": "c", "producerGroup": "p", "consumerGroup": "g1"}),
        request(36, {"offset": 0, "group": "g1", "delayLevel": 0, "originMsgId": "x", "maxReconsumeTimes": 16}),
        request(37, end),
        request(38, {"consumerGroup": "g1"}),
        request(41, body=body(locks)), request(42, body=body(locks)),
        request(200, body=body(group)),
        request(202, {"topic": "t"}),
        request(207, {"groupName": "g2", "removeOffset": True}),
        request(215, {"topic": "fuzz-1"}),
        request(999, {"what": "ever"}),
    ]  # fmt: skip


# Hypothesis

_NUMBERS = st.one_of(
    st.integers(-2, 5), st.sampled_from([1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 63, -(1 << 63), 10**40])
)
_ODD = ("", "1", "-1", "true", "NaN", "1e9", "\x01\x02", "a\x01b\x02")
_TEXT = st.one_of(st.text(max_size=20), st.sampled_from(_ODD))
_VALUES = st.one_of(_NUMBERS, st.booleans(), _TEXT, st.sampled_from(TOPICS), st.sampled_from(GROUPS))
_FIELD_NAMES = sorted({name for command in corpus() for name in command.ext_fields})
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["clientID", "clientId", "groupName", "consumerDataSet", "producerDataSet", "mqSet", "topic",
                         "subscriptionDataSet", "subString", "subVersion", "queueId", "retryQueueNums", "x"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
_BODIES = st.one_of(
    st.binary(max_size=200),
    _JSON.map(lambda value: json.dumps(value).encode()),
    st.lists(st.binary(max_size=20), max_size=4).map(lambda bodies: _batch(*bodies)),
)


@st.composite
def _requests(draw: st.DrawFn) -> Command:
    """A complete request: in half of the cases a known one with some fields changed."""
    if draw(st.booleans()):
        known = draw(st.sampled_from(corpus()))
        code, fields = known.code, dict(known.ext_fields)
        body = known.body if draw(st.booleans()) else draw(_BODIES)
        for name in draw(st.lists(st.sampled_from(sorted(fields) or ["x"]), max_size=3)):
            if draw(st.integers(0, 3)) == 0:
                fields.pop(name, None)
            else:
                fields[name] = str(draw(_VALUES))
    else:
        code = draw(st.sampled_from(list(RequestCode)) | st.integers(-32768, 32767))
        fields = {name: str(value) for name, value in draw(
            st.dictionaries(st.sampled_from(_FIELD_NAMES), _VALUES, max_size=8)).items()}  # fmt: skip
        body = draw(_BODIES)
    command = Command.request(code, fields, body, oneway=draw(st.integers(0, 9)) == 0)
    return replace(command, serializer=draw(st.sampled_from(["json", "binary"])))


# Mutation


EXTREME_LENGTHS = tuple(number.to_bytes(4, "big") for number in (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0, 1))


def mutate(frame: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A copy of the frame with one or more mutations."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data = data[:at]
        elif kind == 2 and len(data) >= at + 4:
            data[at : at + 4] = rng.choice(EXTREME_LENGTHS)
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
        elif kind == 4:
            data[at:at] = data[at : at + rng.randrange(32)]
        elif kind == 5:
            other = rng.choice(others)
            data = data[:at] + other[rng.randrange(len(other)) :]
        elif data:
            data[at] = rng.randrange(256)
        if rng.random() < 0.5 and len(data) > 4:  # a correct length, so that the content is parsed
            data[:4] = (len(data) - 4).to_bytes(4, "big")
    return bytes(data)


# The broker under test


def free_port() -> int:
    """A port on which nobody listens."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """`count` different free ports; requested one after the other, the kernel might assign one twice."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class Subject:
    """A broker process, with the requests sent to it and its answers."""

    def __init__(self, directory: Path, ledger: str, *, self_id: str = "n1") -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / "log"
        config = directory / "broker.toml"
        config.write_text(CONFIG.format(self_id=self_id, data_dir=directory / "data", ledger=ledger), encoding="utf-8")
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "node", "broker", "--config", str(config)], stdout=output, stderr=output
            )
        self.port = self._wait_ready()
        self.counts: Counter[str] = Counter()
        self.answers: Counter[int] = Counter()
        self._opaque = 0

    def _wait_ready(self) -> int:
        while self.process.poll() is None:
            for line in self.log.read_text(encoding="utf-8").splitlines():
                if "READY" in line:
                    return int(line.split("listen=")[1].split()[0].rsplit(":", 1)[1])
            time.sleep(0.02)
        raise AssertionError(f"the broker ended: {self.log.read_text(encoding='utf-8')}")

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the broker is gone")

    def check(self, expected: str = "$^") -> None:
        """Raise AssertionError if the process is gone, or has logged an error that does not match `expected` (a regular
        expression)."""
        assert self.process.poll() is None, f"the broker ended with status {self.process.returncode}: {self._tail()}"
        text = self.log.read_text(encoding="utf-8", errors="replace")
        alarms = [
            line for line in text.splitlines() if "Traceback" in line or " ERROR " in line or " CRITICAL " in line
        ]
        wrong = [line for line in alarms if not re.search(expected, line)]
        assert not wrong, f"the broker logs {wrong[0][:3000]}"

    def _tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]

    async def ask(self, commands: list[Command]) -> None:
        """Send complete requests over one connection; every one that wants an answer must get one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        waiting: dict[int, Command] = {}
        unsure: dict[int, Command] = {}
        data = bytearray()
        for command in commands:
            self._opaque += 1
            command = replace(command, opaque=self._opaque)
            try:
                data += encode(command)
            except FrameError:
                continue  # it does not fit into a frame, so it is no request
            self.counts["generated"] += 1
            if not command.is_oneway:
                (unsure if command.code in QUIET_CODES else waiting)[self._opaque] = command
        writer.write(bytes(data))
        parser = FrameParser()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while waiting:
                    chunk = await reader.read(1 << 16)
                    assert chunk, f"the connection was closed, no answer to {list(waiting.values())[:2]}"
                    for reply in parser.feed(chunk):
                        if not reply.is_response:
                            continue  # a notice to a consumer
                        asked = waiting.pop(reply.opaque, None) or unsure.pop(reply.opaque, None)
                        assert asked is not None, f"an answer that nobody asked for: {reply}"
                        assert reply.serializer == asked.serializer, f"{asked} was answered in {reply.serializer}"
                        assert reply.code in set(ResponseCode), f"{asked} was answered {reply}"
                        self.answers[reply.code] += 1
        except TimeoutError:
            held = [c for c in waiting.values() if not (c.code in PULL_CODES and _may_be_held(c))]
            assert not held, f"no answer to {held[:3]}"
        finally:
            writer.close()

    async def throw(self, frames: list[bytes]) -> None:
        """Send any bytes over one connection, and read whatever comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.counts["mutated"] += len(frames)
        try:
            writer.write(b"".join(frames))
            writer.write_eof()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while await reader.read(1 << 16):
                    pass
        except (ConnectionError, TimeoutError):
            pass  # bytes that are no frame close their connection; a pull may be held
        finally:
            writer.close()


def _may_be_held(command: Command) -> bool:
    try:
        return bool(command.get_int("sysFlag", 0) & 2)
    except Exception:
        return False


class _Neighbour(Bystander):
    """Sends and reads back one message after the other."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._address = f"127.0.0.1:{port}"
        self.slowest_s = 0.0

    async def begin(self, client: RemotingClient) -> None:
        """Wait until the broker is master: a member of a group answers clients even before its first election."""
        request = Command.request(RequestCode.GET_BROKER_RUNTIME_INFO)
        while True:
            reply = await client.invoke(self._address, request, timeout_ms=10_000)
            if json.loads(reply.body)["table"]["takesWrites"] == "true":
                return
            await asyncio.sleep(PAUSE_S)

    async def step(self, client: RemotingClient) -> None:
        began_s = time.monotonic()
        body = self.body(self.sent)
        fields: Fields = {"b": "bystander", "e": 0, "i": f"KEYS\x01b{self.sent}\x02"}
        reply = await client.invoke(self._address, Command.request(310, fields, body), timeout_ms=10_000)
        assert (reply.code, reply.ext_fields.get("queueOffset")) == (0, str(self.sent)), reply
        assert [message.body for message in await self._pull(client, self.sent)] == [body], body
        self.sent += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    async def look_again(self, client: RemotingClient) -> None:
        offset = 0
        while offset < self.sent:
            for message in await self._pull(client, offset):
                assert message.body == self.body(offset) and message.queue_offset == offset
                offset += 1

    async def _pull(self, client: RemotingClient, offset: int) -> list[Message]:
        pull: Fields = {"topic": "bystander", "queueId": 0, "queueOffset": offset}
        reply = await client.invoke(self._address, Command.request(11, pull), timeout_ms=10_000)
        return decode_records(reply.body)


@contextmanager
def _subject(dledger: bool) -> Iterator[Subject]:
    with tempfile.TemporaryDirectory(prefix="splitbrain-fuzz-") as directory:
        ledger = f'[dledger]\nlisten = "127.0.0.1:{free_port()}"' if dledger else "[classic]"
        subject = Subject(Path(directory), ledger)
        try:
            yield subject
        finally:
            subject.process.terminate()
            subject.process.wait()


def fuzz(frames: int, *, seconds: float = 1e9, seed: int = 1, dledger: bool = False) -> dict[str, Any]:
    """Send `frames` frames to a broker. Returns figures; raises AssertionError that names what is wrong."""
    rng = random.Random(seed)
    valid = [encode(command) for command in corpus()]
    valid += [encode(replace(command, serializer="binary")) for command in corpus()]
    began_s = time.monotonic()
    memory: list[int] = []
    runner = asyncio.Runner()
    with _subject(dledger) as subject, _Neighbour(subject.port) as bystander, runner:

        def is_over() -> bool:
            return sum(subject.counts.values()) >= frames or time.monotonic() - began_s > seconds

        def generate(examples: int, turn: int) -> Callable[[], None]:
            @hypothesis_seed(seed * 1_000_003 + turn)
            @settings(
                max_examples=examples, deadline=None, database=None, phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(st.lists(_requests(), min_size=10, max_size=FRAMES_PER_CONNECTION))
            def ask(commands: list[Command]) -> None:
                runner.run(subject.ask(commands))

            return ask

        turn = 0
        while not is_over():
            generate(20, turn)()
            for _ in range(40):
                count = rng.choice((1, 1, 8, FRAMES_PER_CONNECTION))
                runner.run(subject.throw([mutate(rng.choice(valid), valid, rng) for _ in range(count)]))
            turn += 1
            memory.append(subject.memory_bytes())
            subject.check()
            assert bystander.failure is None, f"the bystander noticed: {bystander.failure!r}"
    assert bystander.failure is None, f"the bystander noticed: {bystander.failure!r}"
    half = memory[len(memory) // 2 :]
    grown_bytes = max(half[-max(1, len(half) // 4) :]) - half[0] if len(memory) >= 8 else 0
    assert grown_bytes <= MEMORY_SLACK_BYTES, f"memory grew by {grown_bytes} bytes in the second half"
    return {
        "frames": sum(subject.counts.values()),
        "generated": subject.counts["generated"],
        "mutated": subject.counts["mutated"],
        "answers": sum(subject.answers.values()),
        "bystander_messages": bystander.sent,
        "bystander_slowest_ms": round(bystander.slowest_s * 1000),
        "memory_mb": round(memory[-1] / 1e6),
        "grown_mb": round(grown_bytes / 1e6, 1),
        "codes": dict(sorted(subject.answers.items())),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dledger", action="store_true", help="a broker whose log is DLedger's, a group of one")
    parser.add_argument("--state", type=Path, help="file that adds up several calls")
    options = parser.parse_args()
    done: Counter[str] = Counter()
    if options.state is not None and options.state.exists():
        done.update(json.loads(options.state.read_text(encoding="utf-8")))
    if done["frames"] >= options.frames:
        parser.exit(message=f"{done['frames']} frames are in {options.state} already\n")
    seed = options.seed + done["calls"]
    figures = fuzz(options.frames - done["frames"], seconds=options.seconds, seed=seed, dledger=options.dledger)
    print(json.dumps(figures))
    done.update({name: figures[name] for name in ("frames", "generated", "mutated", "answers", "bystander_messages")})
    done["calls"] += 1
    if options.state is not None:
        options.state.write_text(json.dumps(done), encoding="utf-8")
    sources = f"{done['generated']} generated, {done['mutated']} mutated"
    print(f"{done['frames']} frames ({sources}), {done['answers']} answers;")
    print("no crash, no wrong answer, nothing in the log, the bystander served throughout")


if __name__ == "__main__":
    main()
