"""Brokers as real processes: kill -9, garbage on the ports, damaged files, the single file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node.remoting import Command, RemotingClient, RemotingError
from node.store.record import decode_records
from tests.ports import free_ports

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[3]

IDLE_CONNECTIONS = 1000


class Broker:
    """One broker process that is a group of its own, with its files and ports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "broker.log"
        self.port, self.ledger_port = free_ports(2)
        self.address = f"127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.config = directory / "broker.toml"
        self.config.write_text(
            f"""
            self_id = "n1"
            listen = "{self.address}"
            data_dir = "{self.data}"
            timing = "fast"
            [dledger]
            listen = "127.0.0.1:{self.ledger_port}"
            [limits]
            queue_file_units = 64
            max_message_size_bytes = 10000
            segment_size_bytes = 65536
            [[topics]]
            name = "t"
            queues = 2
            """
        )

    def start(self, command: tuple[str, ...] = (sys.executable, "-m", "node")) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*command, "broker", "--config", str(self.config)], cwd=ROOT, stderr=log)
        return self.process

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def ask(self, client: RemotingClient, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        return await client.invoke(self.address, Command.request(code, fields, body), timeout_ms=5000)

    async def send(self, client: RemotingClient, body: bytes, *, queue_id: int = 0, timeout_s: float = 20) -> int:
        """Send until it is acknowledged; returns the queue offset. Only definite refusals are repeated."""
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(RemotingError):
                    reply = await self.ask(client, 310, {"b": "t", "e": queue_id}, body)
                    if reply.code == 0:
                        return int(reply.ext_fields["queueOffset"])
                    assert reply.code == 14, reply
                await asyncio.sleep(0.02)

    async def read_all(self, client: RemotingClient, *, queue_id: int = 0) -> list[bytes]:
        bodies: list[bytes] = []
        while True:
            fields = {"topic": "t", "queueId": queue_id, "queueOffset": len(bodies)}
            reply = await self.ask(client, 11, fields)
            if reply.code == 19:
                return bodies
            assert reply.code == 0, reply
            messages = decode_records(reply.body)
            assert [message.queue_offset for message in messages] == list(
                range(len(bodies), len(bodies) + len(messages))
            )
            bodies += [message.body for message in messages]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    result = Broker(tmp_path)
    yield result
    result.kill()


def run(scenario: Callable[[RemotingClient], Any]) -> None:
    async def main() -> None:
        client = RemotingClient()
        try:
            await asyncio.wait_for(scenario(client), 90)
        finally:
            await client.close()

    asyncio.run(main())


def queue_files(data: Path) -> dict[str, bytes]:
    root = data / "consumequeue"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("0*")) if path.is_file()}


def log_files(data: Path) -> list[Path]:
    return sorted((data / "dledger" / "data").iterdir())


def test_kill_9_under_load_loses_nothing_acknowledged(broker: Broker) -> None:
    acknowledged: dict[tuple[int, int], bytes] = {}

    async def scenario(client: RemotingClient) -> None:
        choice = random.Random(7)
        for turn in range(6):
            process = broker.start()
            await broker.send(client, b"first of %d" % turn)

            async def sender(sender_id: int, turn: int = turn) -> None:
                queue_id = sender_id % 2
                for number in range(100_000):
                    body = b"%d-%d-%d" % (turn, sender_id, number)
                    try:
                        reply = await broker.ask(client, 310, {"b": "t", "e": queue_id}, body)
                    except RemotingError:
                        return
                    if reply.code == 0:
                        place = (queue_id, int(reply.ext_fields["queueOffset"]))
                        assert place not in acknowledged
                        acknowledged[place] = body

            senders = [asyncio.ensure_future(sender(number)) for number in range(8)]
            await asyncio.sleep(choice.uniform(0.05, 0.4))
            process.kill()
            await asyncio.to_thread(process.wait)
            await asyncio.gather(*senders)
        broker.start()
        await broker.send(client, b"last")
        for queue_id in (0, 1):
            bodies = await broker.read_all(client, queue_id=queue_id)
            assert len(set(bodies)) == len(bodies)
            for (of_queue, offset), body in acknowledged.items():
                if of_queue == queue_id:
                    assert bodies[offset] == body

    run(scenario)
    assert len(acknowledged) > 100


def test_queues_after_kill_9_equal_rebuilt_ones(broker: Broker) -> None:
    async def fill(client: RemotingClient) -> None:
        for turn in range(3):
            process = broker.start()
            for number in range(150):
                await broker.send(client, b"%d-%d" % (turn, number), queue_id=number % 2)
            process.kill()
            await asyncio.to_thread(process.wait)

    async def settle(client: RemotingClient) -> None:
        process = broker.start()
        await broker.send(client, b"settled")
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0

    run(fill)
    run(settle)
    before = queue_files(broker.data)
    assert sum(map(len, before.values())) == (450 + 1) * 20
    shutil.rmtree(broker.data / "consumequeue")

    async def again(client: RemotingClient) -> None:
        process = broker.start()
        assert len(await broker_ready(broker, client)) == 226
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0

    run(again)
    assert queue_files(broker.data) == before


async def broker_ready(broker: Broker, client: RemotingClient) -> list[bytes]:
    """Everything in queue 0, once the broker answers reads."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(RemotingError):
                reply = await broker.ask(client, 30, {"topic": "t", "queueId": 0})
                if reply.code == 0:
                    return await broker.read_all(client)
            await asyncio.sleep(0.02)


def test_garbage_on_both_ports_disturbs_no_client(broker: Broker) -> None:
    allow_open_files(2 * IDLE_CONNECTIONS)

    async def scenario(client: RemotingClient) -> None:
        process = broker.start()
        await broker.send(client, b"first")
        resident_before = resident_bytes(process.pid)
        choice = random.Random(3)
        stop = asyncio.Event()
        sent = [b"first"]

        async def honest() -> None:
            number = 0
            while not stop.is_set():
                body = b"%d" % number
                assert await broker.send(client, body) == len(sent)
                sent.append(body)
                number += 1

        async def attack(port: int, payload: bytes) -> None:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(payload)
                await asyncio.wait_for(reader.read(), 0.2)
                writer.close()

        async def idle(port: int) -> asyncio.StreamWriter | None:
            with contextlib.suppress(OSError):
                return (await asyncio.open_connection("127.0.0.1", port))[1]
            return None

        load = asyncio.ensure_future(honest())
        idlers = [await idle(port) for port in (broker.port, broker.ledger_port) for _ in range(IDLE_CONNECTIONS // 2)]
        for _ in range(25):
            payloads = [
                choice.randbytes(choice.randrange(1, 3000)),
                b"\x7f\xff\xff\xff" + choice.randbytes(100),
                (100).to_bytes(4, "big") + b"\0\0\0\x10" + choice.randbytes(20),
                b"\0\0\0\x40\0\0\0\x3c" + b'{"code":310,"opaque":1,"extFields":{"b":"t","e":"x"}}'.ljust(60),
                b"GET / HTTP/1.1\r\n\r\n",
            ]
            await asyncio.gather(
                *(attack(port, payload) for payload in payloads for port in (broker.port, broker.ledger_port))
            )
        stop.set()
        await load
        assert None not in idlers
        for writer in idlers:
            if writer is not None:
                writer.close()
        assert len(sent) > 20
        assert await broker.read_all(client) == sent
        assert process.poll() is None
        assert resident_bytes(process.pid) - resident_before < 64 << 20

    run(scenario)
    assert b"Traceback" not in broker.log.read_bytes()


def allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= count, "this machine allows too few open files"
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_broker_refuses_to_start_on_a_flipped_bit_and_names_its_position(broker: Broker) -> None:
    async def fill(client: RemotingClient) -> None:
        process = broker.start()
        for number in range(300):
            await broker.send(client, b"%d" % number * 50)
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0

    run(fill)
    assert len(log_files(broker.data)) > 1
    first = log_files(broker.data)[0]
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    broker.log.write_bytes(b"")
    process = broker.start()
    assert process.wait(timeout=30) == 1
    complaints = [line for line in broker.log.read_text().splitlines() if line.startswith("node: ")]
    assert len(complaints) == 1
    assert f"{first} is damaged at byte " in complaints[0]
    assert "Traceback" not in broker.log.read_text()


def test_a_torn_tail_is_cut_and_the_rest_served(broker: Broker) -> None:
    async def fill(client: RemotingClient) -> None:
        process = broker.start()
        for number in range(20):
            await broker.send(client, b"%d" % number)
        process.kill()
        await asyncio.to_thread(process.wait)

    run(fill)
    with open(log_files(broker.data)[-1], "ab") as file:
        file.write(b"\0\0\0\1\0\0\1\0torn")

    async def read(client: RemotingClient) -> None:
        broker.start()
        assert await broker_ready(broker, client) == [b"%d" % number for number in range(20)]
        assert await broker.send(client, b"next") == 20

    run(read)


def test_the_single_file_runs_a_broker_on_a_bare_python(broker: Broker, tmp_path: Path) -> None:
    archive = tmp_path / "node.pyz"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "build_pyz.py"), str(archive)], check=True)

    async def scenario(client: RemotingClient) -> None:
        process = broker.start((sys.executable, "-I", "-S", str(archive)))
        assert await broker.send(client, b"from one file") == 0
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0

    run(scenario)
