"""Groups that change while their logs lose their beginning, disks refuse, members are killed, lose power and are cut
off: nothing that was acknowledged is lost, and all know the same group in the end."""

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
ACTS = ("change", "change", "change in vain", "down", "up", "cut", "heal", "disk", "transfer")


class Driver:
    """Appends all the time, and does to a group of five whatever is drawn."""

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

    def begin(self, name: str, call: Coroutine[Any, Any, Any]) -> None:
        """Ask a member for something, whatever becomes of it."""

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
            self.begin(leader, self.group[leader].add_member(member, self.group.addresses[member]))
        elif len(present) > 2:
            self.begin(leader, self.group[leader].remove_member(member))

    async def start_all(self) -> None:
        """Start who is down. A disk that refuses may end a start; nothing else does."""
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
            if act == "change in vain":
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
            self.begin(leaders[0], group[leaders[0]].transfer_leadership(name))


@pytest.mark.parametrize("seed", (3, 7, 19))
def test_nothing_is_lost_while_groups_change_and_logs_begin_later(simulate: Any, tallies: Any, seed: int) -> None:
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

    simulate(scenario, seed=seed, server=tallies.server(truth), members_may_change=True, joining=2, **OPTIONS)
