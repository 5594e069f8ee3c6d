"""The read gate, in both its forms: as a coroutine (`enter`) and with a callback (`ask`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from node.broker.ledger import DLedgerCode, DLedgerError, ReadMode, Role
from node.broker.reads import ReadGate
from node.remoting import RequestError

WAYS = ("enter", "ask")


async def pass_through(gate: ReadGate, way: str) -> RequestError | None:
    """None once the gate has admitted a read, or its refusal."""
    if way == "enter":
        try:
            await gate.enter()
        except RequestError as error:
            return error
        return None
    passed: asyncio.Future[RequestError | None] = asyncio.get_running_loop().create_future()
    try:
        assert gate.ask(passed.set_result)  # a second call would raise
    except RequestError as error:
        return error
    return await asyncio.wait_for(passed, 5)


@pytest.fixture(params=WAYS)
def run(make_parts: Any, request: pytest.FixtureRequest) -> Callable[..., None]:
    def runner(scenario: Callable[[Any, str], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            parts = make_parts(**options)
            await parts.start()
            try:
                await scenario(parts, request.param)
            finally:
                await parts.stop()

        asyncio.run(main())

    return runner


def commit_without_notice(parts: Any) -> None:
    """Commit an entry without notifying the dispatcher."""
    parts.ledger.store.add(1, b"", is_message=False)
    parts.ledger.store.committed_index += 1


async def held_back(parts: Any, way: str) -> asyncio.Future[RequestError | None]:
    """A read that waits for a dispatcher that is behind."""
    commit_without_notice(parts)
    reading = asyncio.ensure_future(pass_through(parts.gate, way))
    await asyncio.sleep(0.02)
    assert not reading.done()
    return reading


def test_a_read_passes_once_the_barrier_confirms_it(run: Any) -> None:
    async def scenario(parts: Any, way: str) -> None:
        assert await pass_through(parts.gate, way) is None
        assert parts.ledger.barriers == [ReadMode.READ_INDEX]

    run(scenario)


def test_a_follower_refuses_reads(run: Any) -> None:
    async def scenario(parts: Any, way: str) -> None:
        parts.ledger.become(Role.FOLLOWER, 2)
        refusal = await pass_through(parts.gate, way)
        assert refusal is not None and refusal.remark.startswith("NOT_LEADER")

    run(scenario)


def test_a_read_is_refused_if_its_barrier_fails(run: Any) -> None:
    async def scenario(parts: Any, way: str) -> None:
        parts.ledger.barrier_error = DLedgerError(DLedgerCode.TIMEOUT, "no quorum")
        refusal = await pass_through(parts.gate, way)
        assert refusal is not None and "could not be made safe" in refusal.remark

    run(scenario)


def test_a_read_waits_for_dispatch(run: Any) -> None:
    async def scenario(parts: Any, way: str) -> None:
        reading = await held_back(parts, way)
        parts.dispatcher.notify()
        assert await reading is None

    run(scenario)


def test_a_read_is_refused_if_dispatch_stays_behind(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(parts: Any, way: str) -> None:
        monkeypatch.setattr("node.broker.reads.DISPATCH_TIMEOUT_S", 0.01)
        commit_without_notice(parts)
        refusal = await pass_through(parts.gate, way)
        assert refusal is not None and "dispatch is behind" in refusal.remark

    run(scenario)


def test_reads_are_refused_once_dispatch_has_stopped(run: Any) -> None:
    async def scenario(parts: Any, way: str) -> None:
        reading = await held_back(parts, way)
        await parts.dispatcher.stop()
        early, late = await reading, await pass_through(parts.gate, way)
        assert early is not None and late is not None
        assert early.remark.startswith("the queues are not served") and early.remark == late.remark

    run(scenario)
