"""The event loop: the guarantees of asyncio on virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from harness.clusters.sim import loop as loop_module
from harness.clusters.sim.errors import Deadlock, NotSimulated, Runaway
from harness.clusters.sim.lane import LANE, Lane
from harness.clusters.sim.loop import START_S, SimLoop
from harness.clusters.sim.simulation import run_simulated


def run(main: Any, **options: Any) -> Any:
    return run_simulated(main, seed=options.pop("seed", 1), **options)


def test_sleeping_takes_virtual_time_only() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began_s = time.monotonic()
    assert run(main()) == START_S + 3600
    assert time.monotonic() - began_s < 60  # a wide bound, far below a real hour


def test_asyncio_primitives_work_on_virtual_time() -> None:
    async def main() -> list[Any]:
        seen: list[Any] = []
        queue: asyncio.Queue[int] = asyncio.Queue(2)

        async def produce() -> None:
            for number in range(5):
                await queue.put(number)

        async def consume() -> None:
            for _ in range(5):
                seen.append(await queue.get())

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
        try:
            async with asyncio.timeout(2):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("timeout")
        try:
            await asyncio.wait_for(asyncio.sleep(10), 1)
        except TimeoutError:
            seen.append("wait_for")
        seen.append(await asyncio.gather(asyncio.sleep(2, "x"), asyncio.sleep(1, "y")))
        lock = asyncio.Lock()
        async with lock:
            seen.append(lock.locked())
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(1)), asyncio.create_task(asyncio.sleep(9))], timeout=5
        )
        seen.append((len(done), len(pending)))
        seen.append(await asyncio.shield(asyncio.sleep(1, "shielded")))
        seen.append(asyncio.get_running_loop().time() - START_S)
        return seen

    assert run(main()) == [0, 1, 2, 3, 4, "timeout", "wait_for", ["x", "y"], True, (1, 1), "shielded", 11.0]


def test_wait_for_returns_a_finished_result_even_with_a_zero_timeout() -> None:
    async def main() -> tuple[Any, str]:
        done = asyncio.get_running_loop().create_future()
        done.set_result("there")
        got = await asyncio.wait_for(done, 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(1), 0)
        with pytest.raises(ValueError, match="its own"):
            await asyncio.wait_for(_raise(ValueError("its own")), 5)
        return got, "ok"

    assert run(main()) == ("there", "ok")


async def _raise(error: Exception) -> None:
    raise error


def test_timers_fire_in_order_and_cancelled_ones_do_not() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        fired: list[str] = []
        loop.call_later(3, fired.append, "c")
        loop.call_later(1, fired.append, "a")
        cancelled = loop.call_later(2, fired.append, "b")
        for _ in range(5_000):  # enough for the heap to be cleaned
            loop.call_later(2.5, fired.append, "never").cancel()
        loop.call_at(loop.time() + 1, fired.append, "a2")
        cancelled.cancel()
        assert cancelled.cancelled()
        await asyncio.sleep(4)
        return fired

    assert run(main()) == ["a", "a2", "c"]


def test_call_soon_is_first_in_first_out_within_a_lane() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        for number in range(20):
            loop.call_soon(order.append, number)
        loop.call_soon(order.append, -1).cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return order

    assert run(main()) == list(range(20))


def _interleaving(seed: int, *, shuffle: bool = False) -> list[str]:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        order: list[str] = []
        contexts = []
        for name in ("x", "y", "z"):
            context = contextvars.copy_context()
            context.run(LANE.set, Lane(loop, name))
            contexts.append((name, context))
        for instant in (1.0, 2.0, 3.0, 4.0):
            for name, context in contexts:
                for step in (1, 2):
                    note: Callable[[str], None] = order.append
                    loop.call_at(START_S + instant, note, f"{name}{step}", context=context)
        await asyncio.sleep(10)
        return order

    return run(main(), seed=seed, shuffle=shuffle)  # type: ignore[no-any-return]


def test_the_seed_decides_the_order_of_lanes_at_one_instant() -> None:
    orders = {tuple(_interleaving(seed)) for seed in range(20)}
    assert len(orders) > 5
    assert _interleaving(3) == _interleaving(3)
    for order in orders:
        for name in "xyz":
            assert [event[1] for event in order if event[0] == name] == ["1", "2"] * 4  # each lane's own order


def test_shuffling_interleaves_objects_and_keeps_the_order_of_each() -> None:
    class Noter:
        def __init__(self, name: str, into: list[str]) -> None:
            self.name, self.into = name, into

        def note(self, number: int) -> None:
            self.into.append(f"{self.name}{number}")

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        order: list[str] = []
        noters = [Noter("p", order), Noter("q", order)]
        await asyncio.sleep(1)
        for number in range(6):
            for noter in noters:
                loop.call_soon(noter.note, number)
        await asyncio.sleep(1)
        return order

    orders = {tuple(run(main(), seed=seed, shuffle=True)) for seed in range(10)}
    assert len(orders) > 5
    for order in orders:
        for name in "pq":
            assert [event[1] for event in order if event[0] == name] == list("012345")


def test_waiting_for_an_event_that_cannot_come_is_a_deadlock() -> None:
    async def main() -> None:
        lonely = asyncio.create_task(asyncio.Event().wait(), name="lonely")
        await asyncio.sleep(1)
        await lonely

    with pytest.raises(Deadlock, match=r"at 1\.000000 s .*2 tasks are waiting: .*lonely"):
        run(main())


def test_spinning_at_one_instant_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "MAX_STEPS_AT_ONE_INSTANT", 1_000)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(again)
        await asyncio.sleep(1)

    def again() -> None:
        asyncio.get_running_loop().call_soon(again)

    with pytest.raises(Runaway, match=r"1000 steps at 0\.000000 s"):
        run(main())


@pytest.mark.parametrize(
    "misuse",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.create_datagram_endpoint(asyncio.DatagramProtocol),
        lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
        lambda loop: asyncio.to_thread(print),
        lambda loop: loop.create_connection(asyncio.Protocol, "10.0.0.1", 1),
    ],
)
def test_loop_methods_that_need_the_real_world_are_refused(misuse: Callable[[Any], Any]) -> None:
    async def main() -> None:
        result = misuse(asyncio.get_running_loop())
        if asyncio.iscoroutine(result):
            await result

    with pytest.raises(NotSimulated, match="simulat"):
        run(main())


def test_host_names_are_not_resolved() -> None:
    async def main() -> Any:
        loop = asyncio.get_running_loop()
        with pytest.raises(OSError, match="no name service"):
            await loop.getaddrinfo("example.org", 80)
        return (await loop.getaddrinfo("10.1.2.3", 80))[0][4]

    assert run(main()) == ("10.1.2.3", 80)


def test_a_failing_callback_reaches_the_handler_and_later_callbacks_run() -> None:
    async def main() -> tuple[list[str], list[int]]:
        loop = asyncio.get_running_loop()
        reported: list[str] = []
        ran: list[int] = []
        loop.set_exception_handler(lambda _, context: reported.append(repr(context["exception"])))
        loop.call_soon(lambda: 1 / 0)
        loop.call_soon(ran.append, 1)
        await asyncio.sleep(1)
        return reported, ran

    assert run(main()) == (["ZeroDivisionError('division by zero')"], [1])


def test_errors_without_a_handler_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "ZeroDivisionError" in caplog.text


def test_async_generators_are_closed_at_the_end_of_a_run() -> None:
    closed: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append("closed")

    kept = numbers()

    async def main() -> int:
        return await anext(kept)

    assert run(main()) == 1
    assert closed == ["closed"]


def test_a_paused_lane_waits_and_its_timers_fire_at_resume() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        lane = Lane(loop, "process")
        context = contextvars.copy_context()
        context.run(LANE.set, lane)
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                ticks.append(loop.time() - START_S)

        task = loop.create_task(tick(), context=context)
        await asyncio.sleep(2.5)
        lane.pause()
        lane.pause()
        await asyncio.sleep(5)
        lane.resume()
        await asyncio.sleep(2.25)
        task.cancel()
        return ticks

    assert run(main()) == [1.0, 2.0, 7.5, 8.5, 9.5]


def test_events_received_during_a_pause_run_before_timers_that_fell_due() -> None:
    """As in asyncio, which polls before it checks timers; callbacks ready before the pause stay first."""
    log: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        lane = Lane(loop, "process")
        context = contextvars.copy_context()
        context.run(LANE.set, lane)
        loop.call_later(1, log.append, "timer", context=context)
        loop.call_soon(log.append, "ready", context=context)
        lane.pause()
        await asyncio.sleep(2)
        loop.call_soon(log.append, "data", context=context)
        loop.call_soon(log.append, "more data", context=context)
        await asyncio.sleep(1)
        lane.resume()
        await asyncio.sleep(1)

    run(main())
    assert log == ["ready", "data", "more data", "timer"]


def test_a_dead_lane_never_runs_again() -> None:
    log: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        lane = Lane(loop, "process")
        context = contextvars.copy_context()
        context.run(LANE.set, lane)

        async def live() -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    log.append("tick")
            finally:
                log.append("finally")  # what a killed task still does must have no effect
                loop.call_soon(log.append, "after death")
                loop.create_task(live()).add_done_callback(print)
                await asyncio.sleep(0)
                log.append("unreachable")

        task = loop.create_task(live(), context=context)
        loop.call_at(START_S + 5, log.append, "timer of the dead", context=context)
        await asyncio.sleep(2.5)
        lane.kill()
        lane.kill()
        lane.resume()
        await asyncio.sleep(10)
        late = loop.create_task(asyncio.sleep(1), context=context)
        await asyncio.sleep(10)
        assert not task.done() and not late.done()

    run(main())
    assert log == ["tick", "tick", "finally"]


def test_hashes_of_tasks_and_futures_are_the_same_small_numbers_in_every_run() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        futures = {loop.create_future() for _ in range(5)}
        tasks = {asyncio.create_task(asyncio.sleep(1)) for _ in range(5)}
        numbers = [hash(future) for future in futures] + [hash(task) for task in tasks]
        await asyncio.wait(tasks)
        return numbers

    assert run(main()) == run(main())
    assert all(number < 100 for number in run(main()))


def test_signal_handlers_of_the_harness_work_during_a_simulation() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        got: asyncio.Future[str] = loop.create_future()
        loop.add_signal_handler(signal.SIGUSR1, got.set_result, "signalled")
        os.kill(os.getpid(), signal.SIGUSR1)
        return await asyncio.wait_for(got, 5)

    before = signal.getsignal(signal.SIGUSR1)
    assert run(main()) == "signalled"
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_loop_ends_like_any_other() -> None:
    loop = SimLoop(1)
    loop.call_later(1, loop.stop)
    loop.run_forever()
    assert not loop.is_running()
    with pytest.raises(RuntimeError, match="stopped before Future completed"):
        loop.call_later(1, loop.stop)
        loop.run_until_complete(asyncio.sleep(5))
    loop.close()
    loop.close()
    assert loop.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_forever()
