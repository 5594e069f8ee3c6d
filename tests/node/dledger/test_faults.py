"""Random faults in simulation, and the properties that none of them may break.

Safety, checked while faults go on: at most one leader in a term; a committed entry is the same on all members and
never changes; an acknowledged append is committed, and stays; no safe read misses a write that was acknowledged
before it. Liveness, checked after the last fault: appends succeed again, and all members end with the same bytes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nemesis.target import Link, LinkShape
from node.dledger import DLedgerError, LedgerCorrupt, ReadMode

FAULTY_S = 12.0
SAFE_MODES = (ReadMode.READ_INDEX, ReadMode.READ_INDEX, ReadMode.LEASE, ReadMode.LOG)
BODY_SIZES = (0, 10, 200, 3000)
DURATIONS_S = (0.05, 0.3, 1.0, 3.0)


class Watch:
    """Observations of the group so far, and the violations among them."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.committed: dict[int, bytes] = {}
        self.acknowledged: dict[int, bytes] = {}
        self.violations: list[str] = []
        self.appends = self.reads = 0

    def check(self) -> None:
        assert self.violations == []
        leaders: dict[int, str] = {}
        for _, name, term, role in self.group.roles:
            if role == "LEADER":
                assert leaders.setdefault(term, name) == name, f"two leaders in term {term}"

    def follow(self, name: str) -> None:
        """Check every entry that a newly started member has committed and will commit."""
        store = self.group[name].store
        seen = -1

        def look() -> None:
            nonlocal seen
            try:
                entries = [store.get(index) for index in range(seen + 1, store.committed_index + 1)]
            except OSError:
                return  # the disk refuses reads; the next call checks the same entries
            for entry in entries:
                if entry is None or self.committed.setdefault(entry.index, entry.raw) != entry.raw:
                    self.violations.append(f"{name} has committed a different entry than other members after {seen}")
                    return
            seen = store.committed_index

        store.add_commit_listener(look)
        look()


async def client(watch: Watch, draw: random.Random, stop: asyncio.Event) -> None:
    """Append and read until `stop`, mostly at members that believe they lead."""
    group = watch.group
    number = 0
    while not stop.is_set():
        await asyncio.sleep(draw.expovariate(15))
        candidates = group.leaders() if draw.random() < 0.8 else list(group.members)
        if not candidates:
            continue
        name = draw.choice(candidates)
        if draw.random() < 0.6:
            number += 1
            body = b"%d/" % number + draw.randbytes(8) + bytes(draw.choice(BODY_SIZES))
            await append(watch, name, body)
        else:
            await read(watch, name, draw.choice(SAFE_MODES))


async def append(watch: Watch, name: str, body: bytes) -> None:
    try:
        result = await asyncio.wait_for(watch.group.append(name, body), 5)
    except (DLedgerError, TimeoutError):
        return
    watch.appends += 1
    watch.acknowledged[result.index] = body
    if not watch.committed.get(result.index, b"").endswith(body):
        watch.violations.append(f"entry {result.index} was acknowledged but is not committed")


async def read(watch: Watch, name: str, mode: ReadMode) -> None:
    known = max(watch.acknowledged, default=-1)
    try:
        index = await asyncio.wait_for(watch.group.barrier(name, mode), 5)
    except (DLedgerError, TimeoutError):
        return
    watch.reads += 1
    if index < known:
        watch.violations.append(f"a read ({mode.value}) at {name} sees {index}, but {known} was acknowledged before it")


class Nemesis:
    """One fault at a time, for a while."""

    def __init__(self, watch: Watch, draw: random.Random) -> None:
        self.watch = watch
        self.group = watch.group
        self.draw = draw

    async def strike(self) -> None:
        faults: list[Callable[[str, float], Awaitable[None]]] = [
            self.cut, self.one_way, self.isolate, self.lossy, self.kill, self.kill_some, self.pause,
            self.power, self.all_power, self.stall, self.slow, self.full, self.refuse,
        ]  # fmt: skip
        leaders = self.group.leaders()
        name = self.draw.choice(leaders if leaders and self.draw.random() < 0.5 else list(self.group.names))
        await self.draw.choice(faults)(name, self.draw.choice(DURATIONS_S))
        await self.restart(*(name for name in self.group.names if not self.group.hosts[name].is_running))

    async def restart(self, *names: str) -> None:
        for name in names:
            self.group.kill(name)
            await self.group.start(name)
            while name not in self.group.members:  # a disk error at the start ends the process
                assert not isinstance(self.group.ended[name], LedgerCorrupt), self.group.ended[name]
                self.group.hosts[name].disk.heal()
                del self.group.ended[name]
                await self.group.start(name)
            self.watch.follow(name)

    async def grudge(self, grudge: dict[str, frozenset[str]], duration_s: float) -> None:
        await self.group.network.cut("fault", grudge)
        await asyncio.sleep(duration_s)
        await self.group.network.heal("fault")

    async def cut(self, name: str, duration_s: float) -> None:
        names = self.group.names
        side = set(self.draw.sample(names, self.draw.randint(1, len(names) - 1)))
        await self.grudge(
            {one: frozenset(two for two in names if (one in side) != (two in side)) for one in names}, duration_s
        )

    async def one_way(self, name: str, duration_s: float) -> None:
        names = self.group.names
        await self.grudge(
            {one: frozenset(two for two in names if one != two and self.draw.random() < 0.4) for one in names},
            duration_s,
        )

    async def isolate(self, name: str, duration_s: float) -> None:
        rest = frozenset(self.group.names) - {name}
        await self.grudge({name: rest, **{other: frozenset((name,)) for other in sorted(rest)}}, duration_s)

    async def lossy(self, name: str, duration_s: float) -> None:
        shape = LinkShape(loss_percent=self.draw.choice((5, 30)), delay_ms=self.draw.choice((0, 20, 100)), jitter_ms=10)
        names = self.group.names
        self.group.network.shape("fault", {Link(one, two): shape for one in names for two in names if one != two})
        await asyncio.sleep(duration_s)
        self.group.network.unshape("fault")

    async def kill(self, name: str, duration_s: float) -> None:
        self.group.kill(name)
        await asyncio.sleep(duration_s)

    async def kill_some(self, name: str, duration_s: float) -> None:
        self.group.kill(*self.draw.sample(self.group.names, len(self.group.names) // 2))
        await asyncio.sleep(duration_s)

    async def pause(self, name: str, duration_s: float) -> None:
        self.group.hosts[name].pause()
        await asyncio.sleep(duration_s)
        self.group.hosts[name].resume()

    async def power(self, name: str, duration_s: float) -> None:
        self.group.power_fail(name)
        await asyncio.sleep(duration_s)

    async def all_power(self, name: str, duration_s: float) -> None:
        self.group.power_fail(*self.group.names)
        await asyncio.sleep(0.1)

    async def stall(self, name: str, duration_s: float) -> None:
        await self.disk(name, duration_s, self.group.hosts[name].disk.stall)

    async def slow(self, name: str, duration_s: float) -> None:
        disk, delay_s = self.group.hosts[name].disk, self.draw.choice((0.01, 0.1))
        await self.disk(name, duration_s, lambda: setattr(disk, "delay_s", delay_s))

    async def full(self, name: str, duration_s: float) -> None:
        await self.disk(name, duration_s, self.group.hosts[name].disk.fill_up)

    async def refuse(self, name: str, duration_s: float) -> None:
        disk, kind, ratio = self.group.hosts[name].disk, self.draw.choice(("write", "sync")), self.draw.choice((0.3, 1))
        await self.disk(name, duration_s, lambda: disk.fail(kind, ratio))

    async def disk(self, name: str, duration_s: float, begin: Callable[[], None]) -> None:
        """A fault of the disk, after which the power may fail or the process die."""
        begin()
        await asyncio.sleep(duration_s)
        end = self.draw.random()
        if end < 0.3:
            self.group.power_fail(name)
        elif end < 0.5:
            self.group.kill(name)
        self.group.hosts[name].disk.heal()


async def run_with_faults(group: Any, seed: int) -> Watch:
    """The whole scenario; fails if a property does not hold."""
    draw = random.Random(seed)
    watch = Watch(group)
    await group.start()
    for name in group.names:
        watch.follow(name)
    stop = asyncio.Event()
    clients = [group.loop.create_task(client(watch, random.Random(f"{seed}/{number}"), stop)) for number in range(5)]
    nemesis = Nemesis(watch, draw)
    end_s = group.loop.time() + FAULTY_S
    while group.loop.time() < end_s:
        await asyncio.sleep(draw.uniform(0.05, 1.0))
        await nemesis.strike()
        watch.check()
    appended = watch.appends
    await group.until(lambda: watch.appends >= appended + 5, within_s=20)
    stop.set()
    await asyncio.gather(*clients)
    await group.converged()
    watch.check()
    for name in group.names:
        log = group.log(name)
        assert all(log[index][1] == body for index, body in watch.acknowledged.items())
    return watch


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_safety_under_faults_and_recovery_after_them(simulate: Any, size: int, seed: int) -> None:
    watch = simulate(
        lambda group: run_with_faults(group, seed),
        size=size,
        seed=seed,
        data_segment_size_bytes=16384,
        max_cached_bytes=20_000,
    )
    assert watch.appends > 100 and watch.reads > 50


def test_the_same_seed_repeats_the_same_run(simulate: Any) -> None:
    runs = [simulate(lambda group: run_with_faults(group, 77), size=3, seed=77) for _ in range(2)]
    assert runs[0].committed == runs[1].committed
    assert runs[0].group.roles == runs[1].group.roles
