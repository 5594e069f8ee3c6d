"""Three simulated brokers that keep removing old log files, while members crash, are partitioned and return.

The critical case is a queue that rarely gets a message: once the log has none left, only snapshots know its offsets.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from node.broker.controller import BrokerController
from node.config import parse_broker_config
from node.remoting import Command, RemotingClient, RemotingError
from node.serving import serve_broker
from node.store.record import decode_records

NODES = ("n1", "n2", "n3")
ADDRESS = {node: f"10.0.0.{number}" for number, node in enumerate(NODES, 1)}
CONFIG = """
self_id = "{node}"
listen = "{address}:10911"
data_dir = "/data"
timing = "fast"
[limits]
segment_size_bytes = 65536
max_message_size_bytes = 4000
index_slots = 64
index_entries = 1000
queue_file_units = 16
[dledger]
listen = "{address}:10912"
disk_capacity_bytes = 240000
disk_max_ratio_percent = 50
snapshot_threshold = 50
snapshots_kept = 2
peers = {{ n1 = "10.0.0.1:10912", n2 = "10.0.0.2:10912", n3 = "10.0.0.3:10912" }}
[[topics]]
name = "t"
queues = 3
"""
IDLE = 2
"""The queue that gets a message once in a while."""


class Stage:
    """Brokers on hosts of their own, and a client on another."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.network = SimNetwork(loop)
        self.hosts = {node: SimHost(loop, self.network, node, ADDRESS[node]) for node in NODES}
        self.user = SimHost(loop, self.network, "user", "10.0.0.9")
        self.brokers: dict[str, BrokerController] = {}
        self.acked: dict[tuple[int, int], bytes] = {}
        self.problems: list[str] = []

    def start(self, node: str) -> None:
        config = parse_broker_config(CONFIG.format(node=node, address=ADDRESS[node]))

        async def program(process: Incarnation) -> None:
            try:
                failure = await serve_broker(
                    config, process.runtime, process.stop_requested,
                    on_made=lambda broker: self.brokers.__setitem__(node, broker),
                )  # fmt: skip
            except (OSError, ValueError) as error:
                failure = f"does not start: {error}"
            if failure:
                self.problems.append(f"{node} {failure}")

        self.hosts[node].boot()
        self.hosts[node].start(program)

    async def strike(self, kind: str, node: str, rng: random.Random) -> None:
        """One fault, and its end."""
        if kind == "cut":
            others = frozenset(other for other in NODES if other != node)
            await self.network.cut("test", {node: others} | dict.fromkeys(others, frozenset((node,))))
            await asyncio.sleep(rng.uniform(2, 8))
            await self.network.heal("test")
            return
        self.brokers.pop(node, None)
        host = self.hosts[node]
        if kind == "kill":
            host.kill()
        else:
            host.power_fail()
        await asyncio.sleep(rng.uniform(0.5, 8))
        if kind == "lose queues":  # which are rebuilt from the rest of the log
            for path in host.disk.paths():
                if "consumequeue" in path:
                    host.disk.unlink(path)
        self.start(node)

    async def send(self, client: RemotingClient, queue_id: int, body: bytes) -> None:
        """Send to the first node that accepts it; record an acknowledged message, whose offset must be new."""
        for node in NODES:
            request = Command.request(310, {"b": "t", "e": queue_id}, body)
            try:
                reply = await client.invoke(f"{ADDRESS[node]}:10911", request, timeout_ms=1500)
            except RemotingError:
                continue
            if reply.code == 0:
                place = (queue_id, int(reply.ext_fields["queueOffset"]))
                if place in self.acked:
                    self.problems.append(f"{body!r} and {self.acked[place]!r} are both at {place}")
                self.acked[place] = body
                return
        await asyncio.sleep(0.05)

    async def read(self, client: RemotingClient) -> int:
        """Read every queue of the leader; returns the number of messages. Acknowledged ones must be unchanged."""
        leader = next(node for node, broker in self.brokers.items() if broker.store.is_master)
        count = 0
        for queue_id in range(3):
            queue = self.brokers[leader].queues.find("t", queue_id)
            assert queue is not None
            offset = queue.min_offset
            last = max(place[1] for place in self.acked if place[0] == queue_id)
            if queue.max_offset <= last:
                self.problems.append(f"queue {queue_id} ends at {queue.max_offset}, {last} was acknowledged")
            while offset < queue.max_offset:
                fields = {"topic": "t", "queueId": queue_id, "queueOffset": offset}
                reply = await client.invoke(f"{ADDRESS[leader]}:10911", Command.request(11, fields), timeout_ms=5000)
                assert reply.code == 0, reply
                for message in decode_records(reply.body):
                    expected = self.acked.get((queue_id, message.queue_offset), message.body)
                    if message.body != expected or message.queue_offset != offset:
                        self.problems.append(f"{offset} of queue {queue_id} is {message.body!r}, not {expected!r}")
                    offset += 1
                    count += 1
        return count

    def queue_ends(self, node: str) -> dict[Any, int]:
        return {key: queue.max_offset for key, queue in self.brokers[node].queues.items()}


@pytest.fixture
def frequent_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove old files and save queues more than once a second."""
    monkeypatch.setattr("node.broker.log_expiry.EXPIRY_CHECK_S", 0.7)
    monkeypatch.setattr("node.broker.dispatcher.CHECKPOINT_INTERVAL_S", 0.5)


@pytest.mark.usefixtures("frequent_expiry")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] if seed > 0 else []) for seed in range(4)]
)
def test_no_queue_offset_is_reused_and_no_acknowledged_message_is_replaced(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        stage = Stage()
        for node in NODES:
            stage.start(node)
        ends = asyncio.Event()

        async def use(process: Incarnation) -> None:
            client = RemotingClient()
            number = 0
            while not ends.is_set():
                number += 1
                queue_id = IDLE if number % 300 == 5 else rng.randrange(2)
                await stage.send(client, queue_id, b"%d" % number + b"." * rng.randrange(500, 3000))
                await asyncio.sleep(0.01)
            await client.close()

        user = stage.user.start(use)
        for _ in range(6):
            await asyncio.sleep(rng.uniform(1, 3))
            await stage.strike(rng.choice(("kill", "power", "cut", "cut", "lose queues")), rng.choice(NODES), rng)
        await asyncio.sleep(3)
        ends.set()
        await user.wait()
        deadline_s = stage.loop.time() + 60
        while len({str(sorted(stage.queue_ends(node).items())) for node in stage.brokers}) > 1 and not stage.problems:
            assert stage.loop.time() < deadline_s, [stage.queue_ends(node) for node in stage.brokers]
            await asyncio.sleep(0.1)
        counts = []

        async def look(process: Incarnation) -> None:
            client = RemotingClient()
            counts.append(await stage.read(client))
            await client.close()

        assert stage.problems == []
        await stage.user.start(look).wait()
        assert stage.problems == []
        assert len(stage.acked) > 300 and 0 < counts[0] < len(stage.acked)
        assert all(broker.ledger.store.ledger_begin_index > 100 for broker in stage.brokers.values())
        assert all(broker.dispatcher.failure is None for broker in stage.brokers.values())
        for node in NODES:
            stage.hosts[node].terminate()
            process = stage.hosts[node].process
            if process is not None:
                await process.wait()

    run_simulated(main(), seed=seed)
