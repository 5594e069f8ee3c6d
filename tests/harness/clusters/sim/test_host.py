"""Hosts: processes start, pause, die and restart; disk, clock and log persist."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from harness.clusters.sim.errors import SimulationError
from harness.clusters.sim.host import Incarnation

Simulate = Callable[..., Any]
logger = logging.getLogger("node.test")


async def counter(process: Incarnation) -> int:
    """Counts its starts in a file, then waits to be stopped."""
    disk = process.runtime.disk
    disk.make_dirs("/d")
    count = int(disk.read_file("/d/count")) if disk.exists("/d/count") else 0
    await disk.write_file_atomic("/d/count", b"%d" % (count + 1))
    logger.info("started, count %d", count + 1)
    await process.stop_requested.wait()
    logger.info("stopped")
    return 7


def test_a_process_can_be_terminated_killed_powered_off_and_restarted(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        host = world["a"]
        process = host.start(counter)
        with pytest.raises(SimulationError, match="already"):
            host.start(counter)
        await asyncio.sleep(1)
        assert process.exit_status() is None and host.is_running
        host.terminate()
        assert await process.wait() == 7 and not host.is_running
        host.terminate()
        again = host.restart()
        await asyncio.sleep(1)
        host.kill()
        host.kill()
        assert again.exit_status() == -9 and await again.wait() == -9
        host.power_fail()
        host.power_fail()
        with pytest.raises(SimulationError, match="no power"):
            host.start(counter)
        host.restart()
        await asyncio.sleep(1)
        assert host.disk.inode("/d/count").cache == b"3"
        assert [re.sub(r"\.\d{3}Z", "Z", line) for line in host.log.lines()] == [
            "2026-01-01T00:00:00Z INFO node.test started, count 1",
            "2026-01-01T00:00:01Z INFO node.test stopped",
            "2026-01-01T00:00:01Z INFO node.test started, count 2",
            "2026-01-01T00:00:02Z INFO node.test started, count 3",
        ]
        with pytest.raises(SimulationError, match="never run"):
            world["b"].restart()

    simulate(scenario, seed=4)


def test_the_exit_status_of_a_process_follows_from_how_it_ended(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        async def fail(process: Incarnation) -> None:
            raise ValueError("broken")

        async def leave(process: Incarnation) -> None:
            raise SystemExit(3)

        async def leave_from_a_callback(process: Incarnation) -> None:
            asyncio.get_running_loop().call_soon(lambda: (_ for _ in ()).throw(SystemExit("words")))
            await asyncio.Event().wait()

        async def go_on(process: Incarnation) -> str:
            process_tasks.append(asyncio.create_task(asyncio.sleep(10)))
            return "no status"

        process_tasks: list[asyncio.Task[None]] = []
        statuses = [await world.on("a", program).wait() for program in (fail, leave, leave_from_a_callback, go_on)]
        assert statuses == [1, 3, 1, 0]
        assert "CRITICAL node the process failed: ValueError: broken" in world["a"].log.text()
        await asyncio.sleep(100)
        assert not process_tasks[0].done()  # the task died with its process

    simulate(scenario)


def test_a_paused_process_handles_timers_and_signals_once_resumed(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        ticks: list[float] = []

        async def tick(process: Incarnation) -> None:
            while not process.stop_requested.is_set():
                await asyncio.sleep(1)
                ticks.append(world.loop.time())

        host = world["a"]
        host.pause()
        process = host.start(tick)
        await asyncio.sleep(3.5)
        host.pause()
        host.terminate()
        await asyncio.sleep(10)
        assert len(ticks) == 3 and process.exit_status() is None
        host.resume()
        assert await process.wait() == 0
        assert len(ticks) == 4

    simulate(scenario)


def test_every_start_of_a_process_has_its_own_random_numbers(simulate: Simulate) -> None:
    async def scenario(world: Any) -> list[float]:
        drawn: list[float] = []

        async def draw(process: Incarnation) -> None:
            drawn.append(process.runtime.random.random())

        await world.on("a", draw).wait()
        await world.on("b", draw).wait()
        await world["a"].restart().wait()
        return drawn

    first, again, other = simulate(scenario, seed=1), simulate(scenario, seed=1), simulate(scenario, seed=2)
    assert first == again
    assert len({*first, *other}) == 6


def test_cleanup_code_of_a_killed_process_has_no_effect(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        async def stubborn(process: Incarnation) -> None:
            disk = process.runtime.disk
            disk.make_dirs("/d")
            file = await disk.create("/d/f")
            try:
                await asyncio.Event().wait()
            finally:
                logger.info("last words")
                for attempt in (lambda: disk.open("/d/g"), lambda: disk.make_dirs("/e")):
                    with pytest.raises(OSError, match="Input/output"):
                        attempt()
                file_write = file.write(0, b"late", sync=True)
                await file_write

        world.on("a", stubborn)
        await asyncio.sleep(1)
        world["a"].kill()
        await asyncio.sleep(1)
        assert world["a"].disk.paths() == ["/d/f"] and not world["a"].disk.inode("/d/f").cache
        assert world["a"].log.lines() == []

    simulate(scenario)
