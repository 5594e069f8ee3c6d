"""Membership changes while logs are trimmed, disks fail, and members are killed, lose power or are cut off: no
acknowledged entry is lost, and all members agree on the group in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from node.dledger import DLedgerError, LedgerCorrupt

OPTIONS: dict[str, Any] = {
    "snapshot_threshold_entries": 40, "snapshot_removes_log": True, "max_pending_pushes": 10
}  # fmt: skip
ACTS = ("change", "change", "change by an isolated leader", "down", "up", "cut", "heal", "disk", "transfer")


class Driver:
    """Appends continuously to a group of five and performs randomly drawn acts on it."""

    def __init__(self, group: Any, seed: int) -> None:
        self.group = group
        self.draw = random.Random(seed)
        self.acked: dict[int, bytes] = {}
        self.appended = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def append_forever(self) -> None:
        while True:
            waiting = []
            for name in self.group.leaders():
                for _ in range(5):
                    body = b"key%d=%d" % (self.appended % 7, self.appended) + b"." * 120
                    self.appended += 1
                    try:
                        waiting.append((body, self.group.append(name, body)))
                    except DLedgerError:
                        break
            for body, future in waiting:
                try:
                    self.acked[(await asyncio.wait_for(future, 1)).index] = body
                except (DLedgerError, TimeoutError):
                    pass  # its process may have been killed
            await asyncio.sleep(0.01)

    def start_request(self, name: str, call: Coroutine[Any, Any, Any]) -> None:
        """Start a request to a member and ignore its outcome."""

        async def run() -> None:
            try:
                await call
            except DLedgerError:
                pass

        task = self.group.on(name, lambda: self.group.loop.create_task(run()))
        self.tasks.add(task)

    def change(self, leader: str) -> None:
        member, present = self.draw.choice(self.group.names), self.group[leader].member_state.member_ids
        if member not in present:
            self.start_request(leader, self.group[leader].add_member(member, self.group.addresses[member]))
        elif len(present) > 2:
            self.start_request(leader, self.group[leader].remove_member(member))

    async def start_all(self) -> None:
        """Start all members that are down. A failing disk may end a start; a corrupt log must not."""
        for name in self.group.names:
            while name not in self.group.members:
                assert not isinstance(self.group.ended.pop(name, None), LedgerCorrupt)
                self.group.kill(name)
                self.group.hosts[name].disk.heal()
                await self.group.start(name)

    async def act(self) -> None:
        group, draw = self.group, self.draw
        act, name, leaders = draw.choice(ACTS), draw.choice(group.names), group.leaders()
        rest = [other for other in group.names if other != name]
        if act.startswith("change") and leaders:
            leader = draw.choice(leaders)
            if act == "change by an isolated leader":
                await group.cut(" ".join(other for other in group.names if other != leader))
            self.change(leader)
            await asyncio.sleep(draw.uniform(0.1, 3))
        elif act == "down":
            draw.choice((group.kill, group.power_fail))(name)
        elif act == "up":
            await self.start_all()
        elif act == "cut":
            side = draw.sample(rest, draw.choice((0, 1)))
            await group.cut(" ".join([name, *side]), " ".join(other for other in rest if other not in side))
        elif act == "heal":
            await group.heal()
        elif act == "disk":
            group.hosts[name].disk.fail(draw.choice(("sync", "write")), draw.choice((0.05, 0.3, 1)))
        elif act == "transfer" and leaders:
            self.start_request(leaders[0], group[leaders[0]].transfer_leadership(name))


@pytest.mark.parametrize("seed", (3, 7, 19))
def test_no_acknowledged_entry_is_lost_while_members_change_and_logs_are_trimmed(
    simulate: Any, tallies: Any, tracing: Any, seed: int
) -> None:
    truth = tallies.Truth()

    async def scenario(group: Any) -> None:
        await group.start()
        await group.start("n4", "n5")
        group.names = tuple(group.hosts)
        driver = Driver(group, seed)
        producer = group.loop.create_task(driver.append_forever())
        for _ in range(25):
            await asyncio.sleep(driver.draw.uniform(0.05, 0.5))
            await driver.act()
        await group.heal()
        for host in group.hosts.values():
            host.disk.heal()
        await driver.start_all()
        acked = len(driver.acked)
        await group.until(lambda: len(driver.acked) > acked + 20)
        producer.cancel()
        leader = max(group.leaders(), key=lambda name: group[name].member_state.term)
        present = group[leader].member_state.member_ids
        await group.append_all(leader, b"end=1")
        await group.until(lambda: len({group[name].tally.state for name in present}) == 1)
        assert truth.violations == [] and set(driver.acked) <= set(truth.after)
        store = group[leader].store
        assert all(store.get(index).body == body for index, body in driver.acked.items() if store.get(index))
        assert all(group[name].member_state.member_ids == present for name in present)
        terms = [(term, name) for _, name, term, role in group.roles if role == "LEADER"]
        assert len(dict(terms)) == len(set(terms))
        result = tracing.judge(group)
        assert result.valid is True, result.reason

    server = tallies.server(truth, tracing.traced)
    simulate(scenario, seed=seed, server=server, members_may_change=True, joining=2, **OPTIONS)
