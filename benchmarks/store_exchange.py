"""Moving stores to Apache's broker and back: is everything preserved, and how long does it take?

    python -m benchmarks.store_exchange [--messages 1000000] [--cuts 20] [--json FILE] [--page FILE]

Our broker is filled with messages of every kind and stopped, its store is exported, and Apache RocketMQ 4.9.7 is
started on the export: every queue must return the same records, byte for byte. Then the same in the other direction:
Apache's broker is filled and stopped, its store imported, and ours started on it. Then power cuts: a simulated broker
loses power under load, and Apache's store opens its disk, padded with zeros and otherwise unchanged; everything
acknowledged must be present, and the log must end where our own recovery ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks._apache_broker import APACHE_VERSION, serve_apache
from benchmarks._store_power_cuts import power_cuts
from benchmarks.crash_loop import wait_ready
from node.remoting import Command, RemotingClient, RemotingError
from node.store.record import decode_record

__all__ = ["Census", "KeptOpen", "census", "differences", "fill", "main", "serve_ours"]

T = TypeVar("T")

TOPIC, GROUP = "exchanged", "readers"
QUEUES = 8
SENDERS = 16
BATCH = 32
IN_FLIGHT_LEVEL = 18
"""Delay level of two hours, so that none of these messages is delivered during the benchmark."""
RARE = ("compressed", "soon", "later", "commit", "roll back", "open", "retry", "dlq")
SPREAD = ("batch",) * 40 + ("plain",) * 14 + RARE
"""Kinds of sends from which a sender draws; a batch has BATCH messages."""
INTERNAL = ("RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC")
SEGMENT_BYTES = 64 << 20
CONFIG = """
self_id = "n1"
listen = "{address}"
data_dir = "{data_dir}"
flush_mode = "async"
[classic]
[limits]
segment_size_bytes = {segment_bytes}
[transactions]
check_interval_s = 3600
timeout_s = 3600
"""
APACHE_SETTINGS: dict[str, Any] = {
    **{"transactionCheckInterval": 3_600_000, "transactionTimeOut": 3_600_000, "flushDiskType": "ASYNC_FLUSH"},
    **{"sendMessageThreadPoolNums": 4, "waitTimeMillsInSendQueue": 10_000, "osPageCacheBusyTimeOutMills": 20_000},
}


class KeptOpen(NamedTuple):
    """A transaction that its producer has neither committed nor rolled back."""

    number: int
    position: int


class Census(NamedTuple):
    """A broker's contents: the number of messages and a hash of the records of each queue, and further figures."""

    queues: dict[str, tuple[int, str]]
    ends: dict[str, int]
    offsets: dict[str, int]
    found: dict[str, list[str]]


def differences(before: Census, after: Census, *, grown: tuple[str, ...] = ()) -> list[str]:
    """The differences of two censuses; the topics in `grown` may have more messages in the second."""
    problems = []
    for name, old, new in (
        ("queue", before.queues, after.queues), ("offset of", before.offsets, after.offsets),
        ("key", before.found, after.found),
    ):  # fmt: skip
        problems += [
            f"{name} {key}: {old.get(key)} before, {new.get(key)} now"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
    for key, end in before.ends.items():
        now = after.ends.get(key, 0)
        if now != end and not (key.startswith(grown) and now > end):
            problems.append(f"queue {key} ended at {end}, and ends at {now} now")
    return problems


class _Producer:
    """Sends messages of every kind to one broker."""

    def __init__(self, client: RemotingClient, address: str, rng: random.Random, prefix: str) -> None:
        self._client = client
        self._address = address
        self._rng = rng
        self._prefix = prefix
        self._number = 0
        self.sent = 0
        self.open: list[KeptOpen] = []

    async def ask(self, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        """Send one request, repeated while the broker is busy. Raises AssertionError if it refuses permanently."""
        for _ in range(200):
            reply = await self._client.invoke(self._address, Command.request(code, fields, body), timeout_ms=60_000)
            if reply.code in (0, 10):
                return reply
            assert reply.code in (2, 14), (code, reply.code, reply.remark)
            await asyncio.sleep(0.1)
        raise AssertionError(f"request {code}: {reply.code} {reply.remark}")

    async def send(self, kind: str) -> None:
        """Send one message of a kind, or a batch."""
        rng = self._rng
        bodies = [self._body() for _ in range(BATCH if kind == "batch" else 1)]
        queue_id = rng.randrange(QUEUES)
        texts = [self._properties(body) for body in bodies]
        self.sent += len(bodies)
        if kind == "batch":
            await self._put(queue_id, b"".join(map(_part, bodies, texts)), "", code=320)
        elif kind == "compressed":
            await self._put(queue_id, zlib.compress(bodies[0] * 20), texts[0], sys_flag=1)
        elif kind in ("soon", "later"):
            level = 1 if kind == "soon" else IN_FLIGHT_LEVEL
            await self._put(queue_id, bodies[0], f"{texts[0]}DELAY\x01{level}\x02")
        elif kind in ("commit", "roll back", "open"):
            await self._transaction(kind, queue_id, bodies[0], texts[0])
        elif kind in ("retry", "dlq"):
            reply = await self._put(queue_id, bodies[0], texts[0])
            position = int(reply.ext_fields["msgId"][16:], 16)
            level = 1 if kind == "retry" else -1
            fields = {"offset": position, "group": GROUP, "delayLevel": level, "originTopic": TOPIC}
            await self.ask(36, fields | {"originMsgId": reply.ext_fields["msgId"], "maxReconsumeTimes": 16})
            self.sent += 1
        else:
            await self._put(queue_id, bodies[0], texts[0])

    def _body(self) -> bytes:
        self._number += 1
        return f"{self._prefix}-{self._number} ".encode() + b"x" * self._rng.randrange(200)

    def _properties(self, body: bytes) -> str:
        unique = body.split(b" ")[0].decode()
        key = f"k{self._rng.randrange(100_000)}"
        return f"TAGS\x01tag-{self._rng.randrange(5)}\x02KEYS\x01{key} {self._prefix}\x02UNIQ_KEY\x01{unique}\x02"

    async def _put(self, queue_id: int, body: bytes, text: str, *, code: int = 310, sys_flag: int = 0) -> Command:
        fields = {"a": "producers", "b": TOPIC, "c": "TBW102", "d": 4, "e": queue_id, "f": sys_flag, "h": 0, "i": text}
        fields |= {"g": int(time.time() * 1000), "j": 0, "k": "false", "m": "true" if code == 320 else "false"}
        return await self.ask(code, fields, body)

    async def _transaction(self, kind: str, queue_id: int, body: bytes, text: str) -> None:
        half = f"{text}TRAN_MSG\x01true\x02PGROUP\x01producers\x02"
        reply = await self._put(queue_id, body, half, sys_flag=4)
        kept = KeptOpen(int(reply.ext_fields["queueOffset"]), int(reply.ext_fields["msgId"][16:], 16))
        if kind == "open":
            self.open.append(kept)
        else:
            await self.end(kept, commit=kind == "commit")

    async def end(self, kept: KeptOpen, *, commit: bool) -> None:
        """Commit or roll back a transaction."""
        fields = {"producerGroup": "producers", "tranStateTableOffset": kept.number, "commitLogOffset": kept.position}
        await self.ask(37, fields | {"commitOrRollback": 8 if commit else 12, "fromTransactionCheck": "false"})
        self.sent += 2 if commit else 1


def _part(body: bytes, text: str) -> bytes:
    properties = text.encode()
    total = 22 + len(body) + len(properties)
    head = total.to_bytes(4, "big") + bytes(12) + len(body).to_bytes(4, "big")
    return head + body + len(properties).to_bytes(2, "big") + properties


async def fill(address: str, messages: int, *, seed: int) -> list[KeptOpen]:
    """Send `messages` messages of all kinds, and commit offsets of a group; returns the transactions left open."""
    client = RemotingClient()
    try:
        clients = [_Producer(client, address, random.Random(f"{seed}/{at}"), f"{seed}-{at}") for at in range(SENDERS)]
        topic = {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": QUEUES, "writeQueueNums": QUEUES, "perm": 6}
        await clients[0].ask(17, topic | {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"})

        async def send(producer: _Producer) -> None:
            for kind in dict.fromkeys(SPREAD):
                await producer.send(kind)
            chooser = random.Random(f"{producer.sent}/{seed}")
            while sum(each.sent for each in clients) < messages:
                await producer.send(chooser.choice(SPREAD))

        await asyncio.gather(*map(send, clients))
        for queue_id in range(QUEUES):
            fields = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": queue_id, "commitOffset": 10 + queue_id}
            await clients[0].ask(15, fields)
        await asyncio.sleep(2)  # most messages with a delay of one second are delivered meanwhile
        return [kept for producer in clients for kept in producer.open]
    finally:
        await client.close()


async def census(address: str) -> Census:
    """Read every queue of every topic."""
    client = RemotingClient()
    try:
        queues: dict[str, tuple[int, str]] = {}
        ends: dict[str, int] = {}
        topics = {TOPIC: QUEUES, f"%RETRY%{GROUP}": 1, f"%DLQ%{GROUP}": 1, "SCHEDULE_TOPIC_XXXX": 18}
        places = [(topic, queue_id) for topic, count in topics.items() for queue_id in range(count)]
        for topic, queue_id in [*places, *((topic, 0) for topic in INTERNAL)]:
            ends[f"{topic}/{queue_id}"] = await _end(client, address, topic, queue_id)
        keys: dict[str, None] = {}
        for place, read in zip(
            places, await asyncio.gather(*(_read(client, address, *place, keys) for place in places)), strict=True
        ):
            if read[0]:
                queues["{}/{}".format(*place)] = read
        offsets = {}
        for queue_id in range(QUEUES):
            fields = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": queue_id}
            offsets[str(queue_id)] = (await _ask(client, address, 14, fields)).get_int("offset")
        found = {key: await _find(client, address, key) for key in sorted(keys)}
        return Census(queues, ends, offsets, found)
    finally:
        await client.close()


async def _ask(client: RemotingClient, address: str, code: int, fields: dict[str, Any]) -> Command:
    for _ in range(100):
        reply = await client.invoke(address, Command.request(code, fields), timeout_ms=60_000)
        if reply.code != 2:
            break
        await asyncio.sleep(0.05)
    return reply


async def _end(client: RemotingClient, address: str, topic: str, queue_id: int) -> int:
    return (await _ask(client, address, 30, {"topic": topic, "queueId": queue_id})).get_int("offset")


async def _read(
    client: RemotingClient, address: str, topic: str, queue_id: int, keys: dict[str, None]
) -> tuple[int, str]:
    """The number of a queue's messages and a hash of their records; some of its keys are added to `keys`."""
    hashed, offset, count = hashlib.sha256(), 0, 0
    while True:
        fields = {"consumerGroup": GROUP, "topic": topic, "queueId": queue_id, "queueOffset": offset, "maxMsgNums": 32}
        fields |= {"sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*", "subVersion": 0}
        reply = await _ask(client, address, 11, fields)
        if reply.code in (19, 17):
            return count, hashed.hexdigest()
        if reply.code in (20, 21) and reply.get_int("nextBeginOffset") > offset:
            offset = reply.get_int("nextBeginOffset")
            continue
        assert reply.code == 0, (topic, queue_id, offset, reply.code, reply.remark)
        hashed.update(reply.body)
        count += _count(reply.body)
        if offset % 25_600 == 0 and topic == TOPIC:
            keys[decode_record(reply.body)[0].properties["UNIQ_KEY"]] = None
        offset = reply.get_int("nextBeginOffset")


def _count(data: bytes) -> int:
    at = count = 0
    while at < len(data):
        at += int.from_bytes(data[at : at + 4], "big")
        count += 1
    return count


async def _find(client: RemotingClient, address: str, key: str) -> list[str]:
    """Hashes of the messages found by a key."""
    fields = {"topic": TOPIC, "key": key, "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 1 << 60}
    reply = await _ask(client, address, 12, fields)
    data, found = reply.body, []
    while data:
        size_bytes = int.from_bytes(data[:4], "big")
        found.append(hashlib.sha256(data[:size_bytes]).hexdigest()[:16])
        data = data[size_bytes:]
    return sorted(found)


def write_configuration(path: Path, data_dir: Path, address: str = "127.0.0.1:10911") -> Path:
    """Write the configuration of our broker; returns its path."""
    path.write_text(CONFIG.format(address=address, data_dir=data_dir, segment_bytes=SEGMENT_BYTES), encoding="utf-8")
    return path


@contextlib.contextmanager
def serve_ours(configuration: Path) -> Iterator[str]:
    """Run our broker as a process; yields its address. It is stopped in an orderly way at the end of the block."""
    log = configuration.with_suffix(".log")
    command = [sys.executable, "-m", "node", "broker", "--config", str(configuration), "--set", "listen=127.0.0.1:0"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield asyncio.run(_address_of(process, log))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text(encoding="utf-8")[-2000:]
    finally:
        process.kill()
        process.wait()


async def _address_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """The broker's address, once it is the master: then its queues and index cover the whole log."""
    address = wait_ready(log, process, 0)
    client = RemotingClient()
    try:
        while True:
            assert process.poll() is None, log.read_text(encoding="utf-8")[-2000:]
            with contextlib.suppress(RemotingError):
                reply = await client.invoke(address, Command.request(28), timeout_ms=5000)
                if reply.code == 0 and json.loads(reply.body)["table"]["brokerRole"] == "SYNC_MASTER":
                    return address
            await asyncio.sleep(0.05)
    finally:
        await client.close()


def _command(*words: str) -> list[str]:
    """The lines that a command of the node prints. Raises AssertionError if it fails."""
    done = subprocess.run([sys.executable, "-m", "node", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


async def _end_one(address: str, kept: KeptOpen) -> int:
    """Commit a transaction begun at the other broker; returns how many messages that adds."""
    client = RemotingClient()
    try:
        producer = _Producer(client, address, random.Random(0), "end")
        before = [await _end(client, address, TOPIC, queue_id) for queue_id in range(QUEUES)]
        await producer.end(kept, commit=True)
        await asyncio.sleep(1)
        after = [await _end(client, address, TOPIC, queue_id) for queue_id in range(QUEUES)]
        return sum(after) - sum(before)
    finally:
        await client.close()


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began_s = time.monotonic()
    result = work()
    return result, round(time.monotonic() - began_s, 1)


def to_apache(directory: Path, messages: int) -> dict[str, Any]:
    """Export our store and open it with Apache's broker. Raises AssertionError that names the differences."""
    configuration = write_configuration(directory / "ours.toml", directory / "ours")
    with serve_ours(configuration) as address:
        kept, filling_s = _timed(lambda: asyncio.run(fill(address, messages, seed=1)))
        before = asyncio.run(census(address))
    lines, export_s = _timed(
        lambda: _command("export-store", "--config", str(configuration), "--to", str(directory / "exported"))
    )
    began_s = time.monotonic()
    with serve_apache(
        directory / "exported", directory / "apache-work", mappedFileSizeCommitLog=SEGMENT_BYTES, **APACHE_SETTINGS
    ) as apache:
        opened_s = round(time.monotonic() - began_s, 1)
        problems = differences(before, asyncio.run(census(apache.address)), grown=INTERNAL)
        assert asyncio.run(_end_one(apache.address, kept[0])) == 1, "a transaction of ours was not ended by Apache's"
        apache.process.kill()  # the store is not needed any more, and an orderly stop takes six seconds
    return _figures("ours to Apache", before, problems, lines, filling_s, export_s, opened_s)


def from_apache(directory: Path, messages: int) -> dict[str, Any]:
    """Import Apache's store and open it with our broker. Raises AssertionError that names the differences."""
    with serve_apache(
        directory / "apache", directory / "apache-work", mappedFileSizeCommitLog=SEGMENT_BYTES, **APACHE_SETTINGS
    ) as apache:
        kept, filling_s = _timed(lambda: asyncio.run(fill(apache.address, messages, seed=2)))
        before = asyncio.run(census(apache.address))
    configuration = write_configuration(directory / "imported.toml", directory / "imported")
    lines, import_s = _timed(
        lambda: _command("import-store", "--config", str(configuration), "--from", str(directory / "apache"))
    )
    began_s = time.monotonic()
    with serve_ours(configuration) as address:
        opened_s = round(time.monotonic() - began_s, 1)
        problems = differences(before, asyncio.run(census(address)), grown=INTERNAL)
        assert asyncio.run(_end_one(address, kept[0])) == 1, "a transaction of Apache's was not ended by ours"
    return _figures("Apache to ours", before, problems, lines, filling_s, import_s, opened_s)


def _figures(
    way: str, before: Census, problems: list[str], lines: list[str], filling_s: float, moving_s: float, opened_s: float
) -> dict[str, Any]:
    assert not problems, f"{way}: {problems[:10]}"
    return {
        "way": way,
        "messages": sum(count for count, _ in before.queues.values()),
        "queues": len(before.queues),
        "filling_s": filling_s,
        "moving_s": moving_s,
        "opened_s": opened_s,
        "said": lines,
        "load": round(os.getloadavg()[0], 1),
    }


def page(results: dict[str, Any]) -> str:
    """The figures as text, for a section of docs/store-exchange.md."""
    lines = []
    for moved in results["moved"]:
        seconds = f"{moved['moving_s']} s, the other broker came up in {moved['opened_s']} s (load {moved['load']})"
        lines.append(f"- {moved['way']}: {moved['messages']} messages in {moved['queues']} queues; moved in {seconds}.")
        lines += [f"  `{line}`" for line in moved["said"]]
    for cuts in results["cuts"]:
        lines.append(
            f"- {cuts['cuts']} power cuts, {cuts['flush_mode']} flush: {cuts['lost_unsynced_bytes']} unsynced bytes"
            f" lost, {cuts['images']} images of up to {cuts['messages']} messages; all four agree on each."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="store_exchange", description="stores moved to Apache's broker and back")
    parser.add_argument("--messages", type=int, default=1_000_000, help="in each direction")
    parser.add_argument("--cuts", type=int, default=20, help="power cuts in each flush mode")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--page", type=Path, help="write a page of them there, too")
    options = parser.parse_args(sys.argv[1:])
    results: dict[str, Any] = {"apache": APACHE_VERSION, "moved": [], "cuts": []}
    for move in (to_apache, from_apache) if options.messages else ():
        with tempfile.TemporaryDirectory(prefix="splitbrain-exchange-") as directory:
            results["moved"].append(move(Path(directory), options.messages))
        print(json.dumps(results["moved"][-1], indent=1), flush=True)
    for flush_mode in ("sync", "async") if options.cuts else ():
        results["cuts"].append(power_cuts(options.cuts, flush_mode=flush_mode, seed=1))
        print(json.dumps(results["cuts"][-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        options.page.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
