"""Random faults, one machine at a time: messages that a SYNC_MASTER acknowledged survive them, and its loss."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from node.remoting import RemotingError


class Senders:
    """Sends to the master continuously, and records which messages were acknowledged, and how."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.master = "n1"
        self.acked: set[bytes] = set()
        self.local: set[bytes] = set()
        self._tasks = [asyncio.ensure_future(self._send(number)) for number in range(3)]
        self._running = True

    async def _send(self, number: int) -> None:
        group, count = self._group, 0
        while self._running:
            count += 1
            body = b"%d/%d " % (number, count) + b"x" * (count * 97 % 600)
            try:
                reply = await group.send(body, at=self.master, queue_id=number % 2)
            except RemotingError:
                await asyncio.sleep(0.1)
                continue
            if reply.code == 0:
                self.acked.add(body)
            elif reply.code in (10, 11, 12):
                self.local.add(body)
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._running = False
        await asyncio.gather(*self._tasks)


async def everything(group: Any, name: str) -> set[bytes]:
    return {body for queue_id in (0, 1) for body in await group.bodies(name, queue_id)}


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] if seed > 1 else []) for seed in range(1, 5)]
)
def test_no_message_acknowledged_by_a_sync_master_is_lost_in_single_failures(ha: Any, seed: int, flush: str) -> None:
    async def scenario(group: Any) -> None:
        rng = random.Random(f"ha-faults/{seed}/{flush}")
        senders = Senders(group)
        for _ in range(6):
            await asyncio.sleep(rng.uniform(0.2, 3))
            host = rng.choice(group.names)
            role = "SYNC_MASTER" if host == senders.master else "SLAVE"
            # With an asynchronous flush, a master that restarts after a power cut may have lost messages.
            ends = ["kill", "stop", "cut", "pause", *(["power_fail"] if flush == "sync" or role == "SLAVE" else [])]
            end = rng.choice(ends)
            if end == "pause":
                group.hosts[host].pause()
                await asyncio.sleep(rng.uniform(0.1, 25))
                group.hosts[host].resume()
            elif end == "cut":
                await group.cut(host)
                await asyncio.sleep(rng.uniform(0.1, 25))
                await group.heal()
            else:
                if end == "stop":
                    await group.stop(host)
                else:
                    getattr(group, end)(host)
                await asyncio.sleep(rng.uniform(0.1, 10))
                await group.start(host, role)
        await asyncio.sleep(1)
        await group.until(lambda: all(group.ledger(name).client.state == "FOLLOWING" for name in ("n2", "n3")))
        await asyncio.sleep(1)
        group.power_fail("n1")  # and never restarts
        await senders.stop()
        best = max(("n2", "n3"), key=lambda name: group.ledger(name).log.committed_position)
        await group.stop(best)
        await group.start(best, "SYNC_MASTER")
        found = await everything(group, best)
        assert len(senders.acked) > 50
        assert senders.acked <= found, "a message acknowledged by two machines must survive the loss of one"
        other = "n3" if best == "n2" else "n2"
        await group.until(lambda: group.ledger(other).client.master_address.startswith(group.hosts[best].address))
        await group.following(other)
        assert group.content(other) == group.content(best)
        assert all(group[name].dispatcher.failure is None for name in (best, other))

    ha(scenario, f"flush_mode={flush}", roles=("SYNC_MASTER", "SLAVE", "SLAVE"), seed=seed)


@pytest.mark.parametrize("role", ["ASYNC_MASTER", "DLEDGER"])
def test_an_unsynced_topic_table_is_durable_before_the_topic_accepts_messages(ha: Any, role: str) -> None:
    """Lost in the next power cut, it would leave acknowledged messages that cannot be read."""
    fields = {"topic": "new", "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}

    async def scenario(group: Any) -> None:
        assert await group.master() == "n1"
        assert (await group.send()).code == 0
        await asyncio.sleep(15)  # a checkpoint: without one, the next start itself writes into the directory
        disk = group.hosts["n1"].disk
        before = disk.get("/data/topics.json")
        asked = asyncio.ensure_future(group.ask("n1", 17, fields))
        await group.until(lambda: disk.get("/data/topics.json") is not before, every_s=10e-6)  # a sync takes 200 us
        disk.fail("sync")
        assert (await asked).code == 1
        disk.heal()
        group.kill("n1")
        await group.start("n1", role)
        await group.master()
        assert (await group.ask("n1", 310, {"b": "new", "e": 0}, b"kept")).code == 0
        group.power_fail("n1")
        await group.start("n1", role)
        await group.master()
        await group.until(lambda: group["n1"].dispatcher.dispatched_index >= 1)
        assert await group.bodies("n1", topic="new") == [b"kept"]

    for seed in range(10):
        ha(scenario, roles=(role,), size=1, seed=seed)
