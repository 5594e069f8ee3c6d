"""Clock faults on machines with clocks of their own: who skews which clock, how it is read, and that all are healed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.clusters import agent_clocks
from harness.clusters.agent_clocks import AgentClocks
from harness.clusters.base import ClusterUnavailable
from harness.clusters.clock_helper import RESTORE_SCRIPT
from nemesis.mechanisms.shell import ShellError
from nemesis.target import ClockReading, ClockSkew, FaultMet


class FakeShim:
    """The skews that the shim was asked for."""

    reading = ClockReading(offset_ms=7.0, uncertainty_ms=0.5, monotonic_s=33.0, at_s=44.0)

    def __init__(self) -> None:
        self.skewed: dict[str, Mapping[str, ClockSkew]] = {}

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        self.skewed[fault_id] = skews

    async def release(self, fault_id: str) -> None:
        self.skewed.pop(fault_id, None)

    async def release_all(self) -> None:
        self.skewed.clear()

    async def read(self, host: str, **_: Any) -> Sequence[ClockReading]:
        return [self.reading]

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        return {host: FaultMet(4, 4) for host in self.skewed.get(fault_id, ())}

    def mechanism(self, host: str) -> str:
        return "shim"

    async def reaches(self, host: str, pid: int | None, *, monotonic: bool = False) -> str | None:
        return f"{'monotonic' if monotonic else 'wall'} of {host} is out of reach"


class FakeHelper:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def request(self, op: str, **fields: Any) -> dict[str, Any]:
        self.asked.append(f"{op} {fields.get('fault', '')}".strip())
        return {}


def test_the_shim_skews_monotonic_clocks_and_hosts_without_their_own_clock() -> None:
    async def body() -> None:
        shim, helpers = FakeShim(), {"n1": FakeHelper(), "n2": FakeHelper()}
        clocks = AgentClocks(helpers, {}, shim)  # type: ignore[arg-type]
        wall, monotonic = ClockSkew(offset_ms=5), ClockSkew(rate_ppm=5, affects_monotonic=True)
        await clocks.skew("f", {"n1": wall, "n2": monotonic, "n3": wall})
        assert shim.skewed == {"f": {"n2": monotonic, "n3": wall}}
        await clocks.release("f")
        await clocks.release("f")
        await clocks.release_all()
        assert helpers["n1"].asked == ["skew f", "release f", "release_all"]
        assert helpers["n2"].asked == ["release_all"] and shim.skewed == {}
        assert await clocks.reaches("n1", 7) is None
        assert await clocks.reaches("n1", 7, monotonic=True) == "monotonic of n1 is out of reach"
        assert await clocks.reaches("n3", 7) == "wall of n3 is out of reach"

    asyncio.run(body())


class Link:
    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id

    async def run(self, argv: list[str]) -> tuple[int, str, str]:
        return 0, f"{self._boot_id}\n", ""


def test_hosts_that_share_a_clock_are_refused() -> None:
    own = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for links, other in (
        ({"n1": Link(own)}, "this machine"),
        ({"n1": Link("a"), "n2": Link("b"), "n3": Link("a")}, "n1"),
    ):
        with pytest.raises(ClusterUnavailable, match=f"shares its clock with {other}: set clock = "):
            asyncio.run(
                AgentClocks.prepared(links, shim=FakeShim())  # type: ignore[arg-type]
            )


class Agent:
    """An agent that notes what it is asked for, in order, and whose machine's wall clock is ahead of this one's."""

    def __init__(self, *, ahead_ms: Sequence[float] = (0.0,), slow_s: Sequence[float] = (0.0,)) -> None:
        self.host, self.python, self.directory = "n1", "python3", "/run/agent"
        self.asked: list[tuple[str, Any]] = []
        self._ahead_ms, self._slow_s = list(ahead_ms), list(slow_s)

    async def run(self, argv: list[str]) -> tuple[int, str, str]:
        return 0, "another boot\n", ""

    async def request(self, op: str, arguments: Mapping[str, Any] | None = None, **_: Any) -> Mapping[str, Any]:
        if op == "hello":
            [ahead_ms, *rest], [slow_s, *slower] = self._ahead_ms, self._slow_s
            self._ahead_ms, self._slow_s = rest or [ahead_ms], slower or [slow_s]
            wall_ns = CLOCK.wall_ns + int(ahead_ms * 1e6)
            CLOCK.pass_time(slow_s)
            return {"wall_ns": wall_ns, "monotonic_ns": 5_000_000_000}
        arguments = arguments or {}
        self.asked.append((op, json.loads(arguments["line"]) if op == "ask" else arguments))
        return {"pid": 7, "answer": '{"ok": true}'}

    request_to_its_end = request


class FakeTime:
    """This machine's clocks, which only a slow answer moves: the answer's way back takes no time, or all of it."""

    def __init__(self) -> None:
        self.wall_ns, self.monotonic_s = 1_700_000_000 * 10**9, 100.0

    def pass_time(self, seconds: float) -> None:
        self.wall_ns += int(seconds * 1e9)
        self.monotonic_s += seconds


CLOCK = FakeTime()


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = SimpleNamespace(time_ns=lambda: CLOCK.wall_ns, monotonic=lambda: CLOCK.monotonic_s)
    monkeypatch.setattr(agent_clocks, "time", clocks)


async def prepared(agent: Agent, shim: FakeShim | None = None) -> AgentClocks:
    return await AgentClocks.prepared({"n1": agent}, shim=shim or FakeShim())  # type: ignore[arg-type, dict-item]


def test_the_command_that_restores_a_clock_is_stored_before_a_helper_can_touch_it() -> None:
    agent = Agent()
    asyncio.run(prepared(agent))
    assert [op for op, _ in agent.asked if op != "write"] == ["undo", "spawn", "ask"] and agent.asked[0][0] == "undo"
    base = "/run/agent/clock.base"
    assert agent.asked[0][1] == {"key": "clock", "argv": ["python3", "-I", "-S", "-c", RESTORE_SCRIPT, base]}
    opened = agent.asked[-1][1]
    assert (opened["op"], opened["base"]) == ("open", base), "the helper records the true time where the command looks"


def test_a_clock_is_compared_with_how_far_it_was_off_before_any_fault(fake_time: None) -> None:
    async def body() -> None:
        # The second of the first three readings has the shortest round trip, and so the least uncertainty.
        clocks = await prepared(Agent(ahead_ms=(60, 40, 90, 1040), slow_s=(0.02, 0.0, 0.04, 0.01)))
        [reading] = await clocks.read("n1", timeout_s=1.0)
        # Half of the round trip of 10 ms belongs to the way there.
        assert reading.offset_ms == pytest.approx(1040 - 40 - 5, abs=1e-3)
        assert reading.uncertainty_ms == pytest.approx(5, abs=1e-3)
        assert reading.monotonic_s == FakeShim.reading.monotonic_s, "the shim's, which may skew it"

    asyncio.run(body())


def test_a_clock_is_read_until_two_readings_are_far_enough_apart(fake_time: None) -> None:
    async def read(ahead_ms: Sequence[float], apart_ms: float) -> list[float]:
        clocks = await prepared(Agent(ahead_ms=(0, 0, 0, *ahead_ms)))
        found = await clocks.read("n1", pauses_s=[0.0] * 3, apart_ms=apart_ms, timeout_s=1.0)
        return [round(reading.offset_ms) for reading in found]

    assert asyncio.run(read((0, 10, 700, 0), 500)) == [0, 10, 700]
    assert asyncio.run(read((0, 0, 0, 0), 0)) == [0, 0, 0, 0], "without a distance every reading is taken"


def test_every_part_of_a_skew_reaches_the_helper() -> None:
    async def body() -> list[dict[str, Any]]:
        agent = Agent()
        clocks = await prepared(agent)
        skew = ClockSkew(offset_ms=1, rate_ppm=2, strobe_ms=3, strobe_period_ms=4, step_ms=5)
        await clocks.skew("f", {"n1": skew})
        return [asked for op, asked in agent.asked if op == "ask"]

    skew = {"offset_ms": 1, "rate_ppm": 2, "strobe_ms": 3, "strobe_period_ms": 4, "step_ms": 5}
    assert asyncio.run(body())[-1] == {"id": 0, "op": "skew", "fault": "f", "skew": skew}


def test_reads_of_a_machine_s_own_clock_are_not_counted() -> None:
    async def body() -> None:
        clocks = AgentClocks({"n1": FakeHelper()}, {}, FakeShim())  # type: ignore[arg-type, dict-item]
        await clocks.skew("f", {"n1": ClockSkew(offset_ms=5), "n3": ClockSkew(offset_ms=5)})
        assert await clocks.met("f") == {"n1": FaultMet(None, None), "n3": FaultMet(4, 4)}
        assert clocks.mechanism("n1") == "the machine's own clock" and clocks.mechanism("n3") == "shim"
        assert await clocks.read("n3", timeout_s=1.0) == [FakeShim.reading]
        await clocks.release("f")
        assert await clocks.met("f") == {}

    asyncio.run(body())


class Broken:
    """A shim or helper whose host does not answer."""

    async def release(self, fault_id: str) -> None:
        raise ShellError("n9", ["release"], 1, "no answer")

    async def release_all(self) -> None:
        raise ShellError("n9", ["release"], 1, "no answer")

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        return None

    async def request(self, op: str, **fields: Any) -> dict[str, Any]:
        if op == "skew":
            return {}
        raise ShellError("n9", [op], 1, "no answer")


def test_a_clock_is_corrected_even_if_another_one_cannot_be() -> None:
    async def body(shim: Any, other: Any) -> None:
        helper = FakeHelper()
        clocks = AgentClocks({"n9": other, "n1": helper}, {}, shim)  # type: ignore[dict-item]
        await clocks.skew("f", {"n1": ClockSkew(offset_ms=5), "n9": ClockSkew(offset_ms=5)})
        for _ in range(2):
            with pytest.raises(ShellError, match="no answer"):
                await clocks.release("f")
        with pytest.raises(ShellError, match="no answer"):
            await clocks.release_all()
        assert helper.asked == ["skew f", "release f", "release f", "release_all"], "until it succeeds, it is repeated"

    asyncio.run(body(Broken(), FakeHelper()))
    asyncio.run(body(FakeShim(), Broken()))
