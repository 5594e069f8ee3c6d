"""Clocks that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.clusters.sim.clock import EPOCH_MS, SimClock

Simulate = Callable[..., Any]


def test_clocks_follow_the_loop_until_somebody_skews_them(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clock: SimClock = world["a"].clock
        assert clock.wall_ms() == EPOCH_MS
        before_ns = clock.monotonic_ns()
        await asyncio.sleep(1.5)
        assert clock.wall_ms() == EPOCH_MS + 1500
        assert clock.monotonic_ns() - before_ns == pytest.approx(1.5e9, abs=10)
        clock.bump(60_000)
        clock.bump(-10_000)
        assert clock.wall_ms() == EPOCH_MS + 51_500
        assert world["b"].clock.wall_ms() == EPOCH_MS + 1500
        clock.set_offset(-5)
        assert clock.wall_ms() == EPOCH_MS + 1495
        clock.reset()
        assert clock.wall_ms() == EPOCH_MS + 1500

    simulate(scenario)


def test_drift_adds_up_from_where_it_began(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clock: SimClock = world["a"].clock
        await asyncio.sleep(100)
        clock.drift(1000)
        assert clock.offset_ms == 0
        await asyncio.sleep(100)
        assert clock.offset_ms == pytest.approx(100)
        clock.drift(-1000)
        await asyncio.sleep(50)
        assert clock.offset_ms == pytest.approx(50)
        clock.reset()
        assert clock.offset_ms == 0
        with pytest.raises(ValueError, match="ppm"):
            clock.drift(2e6)

    simulate(scenario)


def test_the_monotonic_clock_drifts_and_never_goes_back(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clock: SimClock = world["a"].clock
        last_ns = clock.monotonic_ns()
        for ppm in (100_000, -100_000, -500_000, 0):
            before_ns = clock.monotonic_ns()
            clock.drift_monotonic(ppm)
            for _ in range(10):
                await asyncio.sleep(1)
                assert clock.monotonic_ns() > last_ns
                last_ns = clock.monotonic_ns()
            assert last_ns - before_ns == pytest.approx(10e9 * (1 + ppm / 1e6), rel=1e-6)
        clock.drift_monotonic(1000)
        clock.reset()
        before_ns = clock.monotonic_ns()
        await asyncio.sleep(1)
        assert clock.monotonic_ns() - before_ns == pytest.approx(1e9, rel=1e-6)
        assert clock.wall_ms() == EPOCH_MS + 41_000  # the wall clock has nothing to do with it

    simulate(scenario)


def test_a_strobe_comes_and_goes_and_leaves_the_clock_as_it_was(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clock: SimClock = world["a"].clock
        clock.strobe(500, period_s=0.1, duration_s=1.0)
        seen = []
        for _ in range(20):
            await asyncio.sleep(0.05)
            seen.append(clock.offset_ms)
        assert {0.0, 500.0} == set(seen)
        await asyncio.sleep(1)
        assert clock.offset_ms == 0
        clock.strobe(500, period_s=0.1, duration_s=100)
        await asyncio.sleep(1)
        clock.reset()
        await asyncio.sleep(1)
        assert clock.offset_ms == 0
        with pytest.raises(ValueError, match="period_s"):
            clock.strobe(1, period_s=0, duration_s=1)

    simulate(scenario)
