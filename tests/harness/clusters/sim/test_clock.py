"""Simulated clocks: offsets, rates, strobes, and counted readings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.clusters.sim.clock import EPOCH_MS, SimClock
from harness.clusters.sim.faults import SimClocks
from nemesis.target import ClockSkew, FaultMet

Simulate = Callable[..., Any]


def test_a_clock_follows_the_loop_and_its_offsets_add_up(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clock: SimClock = world["a"].clock
        assert clock.wall_ms() == EPOCH_MS
        before_ns = clock.monotonic_ns()
        await asyncio.sleep(1.5)
        assert clock.wall_ms() == EPOCH_MS + 1500
        assert clock.monotonic_ns() - before_ns == pytest.approx(1.5e9, abs=1000)
        clock.skew("f1", ClockSkew(offset_ms=60_000))
        clock.skew("f2", ClockSkew(offset_ms=-10_000))
        assert clock.wall_ms() == EPOCH_MS + 51_500
        assert world["b"].clock.wall_ms() == EPOCH_MS + 1500
        clock.skew("f1", ClockSkew(offset_ms=-5))
        assert clock.wall_ms() == EPOCH_MS - 10_005 + 1500
        clock.release("f2")
        clock.release("f2")
        assert clock.wall_ms() == EPOCH_MS + 1495
        clock.release_all()
        assert clock.wall_ms() == EPOCH_MS + 1500

    simulate(scenario)


def test_a_rate_accumulates_from_the_moment_it_is_set(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clock: SimClock = world["a"].clock
        await asyncio.sleep(100)
        clock.skew("f1", ClockSkew(rate_ppm=1000))
        assert clock.offset_ms == 0
        await asyncio.sleep(100)
        assert clock.offset_ms == pytest.approx(100)
        clock.skew("f2", ClockSkew(rate_ppm=-3000))
        await asyncio.sleep(50)
        assert clock.offset_ms == pytest.approx(150 - 150)
        clock.release("f2")
        assert clock.offset_ms == pytest.approx(150)
        with pytest.raises(ValueError, match="wall clock"):
            clock.skew("f3", ClockSkew(rate_ppm=2_000_000))
        with pytest.raises(ValueError, match="wall clock"):
            clock.skew("f3", ClockSkew(rate_ppm=499_500))

    simulate(scenario)


def test_the_monotonic_clock_follows_its_rate_and_never_goes_back(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clock: SimClock = world["a"].clock
        last_ns = clock.monotonic_ns()
        for ppm in (100_000, -100_000, -500_000, -750_000, 2_000_000, 0):
            before_ns = clock.monotonic_ns()
            clock.skew("f1", ClockSkew(rate_ppm=ppm, affects_monotonic=True))
            for _ in range(10):
                await asyncio.sleep(1)
                assert clock.monotonic_ns() > last_ns
                last_ns = clock.monotonic_ns()
            assert last_ns - before_ns == pytest.approx(10e9 * (1 + ppm / 1e6), rel=1e-6)
        clock.skew("f1", ClockSkew(rate_ppm=-600_000, affects_monotonic=True))
        with pytest.raises(ValueError, match="monotonic clock"):
            clock.skew("f2", ClockSkew(rate_ppm=-600_000, affects_monotonic=True))
        clock.skew("f2", ClockSkew(rate_ppm=-500_000))  # the wall clock has its own bound
        clock.release("f2")
        before_ns = clock.monotonic_ns()
        clock.release("f1")
        assert clock.monotonic_ns() == pytest.approx(before_ns, abs=1000)
        await asyncio.sleep(1)
        assert clock.monotonic_ns() - before_ns == pytest.approx(1e9, rel=1e-6)
        assert clock.wall_ms() == EPOCH_MS + 61_000  # the wall clock is unaffected

    simulate(scenario)


def test_a_strobe_alternates_between_its_offset_and_zero(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clock: SimClock = world["a"].clock
        clock.skew("f1", ClockSkew(strobe_ms=500, strobe_period_ms=100))
        seen = []
        for _ in range(20):
            seen.append(clock.offset_ms)
            await asyncio.sleep(0.0501)
        assert seen == [500.0, 500.0, 0.0, 0.0] * 5
        clock.release("f1")
        assert clock.offset_ms == 0

    simulate(scenario)


def test_readings_of_a_skewed_clock_are_counted_and_those_of_the_harness_are_not(simulate: Simulate) -> None:
    async def scenario(world: Any) -> None:
        clocks = SimClocks({"a": world["a"], "b": world["b"]})
        world["a"].clock.wall_ms()
        await clocks.skew("f1", {"a": ClockSkew(offset_ms=60_000), "b": ClockSkew(rate_ppm=9, affects_monotonic=True)})
        await clocks.read("a", timeout_s=1)
        world["a"].clock.shown_ms()
        await clocks.read("b", timeout_s=1)
        world["a"].clock.monotonic_ns(), world["b"].clock.wall_ms(), world["b"].clock.shown_monotonic_ns()
        assert await clocks.met("f1") == {"a": FaultMet(None, 0), "b": FaultMet(None, 0)}
        world["a"].clock.wall_ms()
        world["b"].clock.monotonic_ns()
        assert await clocks.met("f1") == {"a": FaultMet(None, 1), "b": FaultMet(None, 1)}
        await clocks.skew("f2", {"a": ClockSkew(offset_ms=1)})
        assert await clocks.met("f2") == {"a": FaultMet(None, 0)}, "the reading was before this fault"
        await clocks.release("f1")
        assert await clocks.met("f1") == {}

    simulate(scenario)
