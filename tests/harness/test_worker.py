"""Workers: processes, outcomes, and what an exception of a client means."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from harness import worker
from harness.clusters.sim.simulation import run_simulated
from harness.generator import Calls, Context, Generator, Limit, Op, Stagger, TimeLimit, Unpaced
from harness.tracing import current_traceparent, ids_of
from harness.worker import CLOSE_TIMEOUT_S, Client, Outcome, Workers, is_ctrl_c


class Definite(Exception):
    is_definite = True


class Indefinite(Exception):
    is_definite = False


class Recorder:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def append(self, event: dict[str, Any]) -> dict[str, Any]:
        recorded = {"index": len(self.events), "time": len(self.events), **event}
        self.events.append(recorded)
        return recorded


class ScriptedClient:
    """Does what the script says for each operation in turn; counts its opens and closes."""

    opened = 0
    closed = 0

    def __init__(self, script: Callable[[Op], Outcome | Exception | None]) -> None:
        self.script = script

    async def open(self) -> None:
        ScriptedClient.opened += 1

    async def invoke(self, op: Op) -> Outcome:
        result = self.script(op)
        if result is None:
            await asyncio.sleep(3600)
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return result

    async def close(self) -> None:
        ScriptedClient.closed += 1


WRITES = Calls(lambda context: Op("write", 3, 7))


def workers_of(
    recorder: Recorder, generator: Generator, script: Callable[[Op], Outcome | Exception | None], *, threads: int = 1,
    timeout_s: float = 1.0, make: type[ScriptedClient] = ScriptedClient,
) -> Workers:  # fmt: skip
    """Threads with such clients, on the clock of the running loop."""
    loop = asyncio.get_running_loop()

    def make_client(process: int, thread: int) -> Client:
        return make(script)

    return Workers(
        generator=generator,
        threads=threads,
        make_client=make_client,
        recorder=recorder,
        now_ns=lambda: int(loop.time() * 1e9),
        random=random.Random(0),
        operation_timeout_s=timeout_s,
    )


def run(
    script: Callable[[Op], Outcome | Exception | None], count: int = 1, threads: int = 1, timeout_s: float = 5.0,
    generator: Generator | None = None, make: type[ScriptedClient] = ScriptedClient,
) -> tuple[list[dict[str, Any]], Workers]:  # fmt: skip
    ScriptedClient.opened = ScriptedClient.closed = 0
    recorder = Recorder()

    async def main() -> Workers:
        workers = workers_of(
            recorder, generator or Limit(count, WRITES), script, threads=threads, timeout_s=timeout_s, make=make
        )
        await workers.run()
        return workers

    return recorder.events, asyncio.run(main())


def test_ok_carries_the_value_and_the_node() -> None:
    events, _ = run(lambda op: Outcome("ok", 9, node="n2"))
    assert [event["type"] for event in events] == ["invoke", "ok"]
    assert events[0] == {"index": 0, "time": 0, "process": 0, "type": "invoke", "f": "write", "key": 3, "value": 7}
    assert events[1]["value"] == 9 and events[1]["node"] == "n2" and events[1]["process"] == 0


def test_each_operation_of_a_run_has_a_traceparent_of_its_own_index() -> None:
    seen: list[str | None] = []

    def script(op: Op) -> Outcome:
        seen.append(current_traceparent())
        return Outcome("ok")

    run(script)
    assert seen == [None]
    recorder = Recorder()

    async def main() -> None:
        workers = workers_of(recorder, Limit(6, WRITES), script, threads=2)
        workers.run_id = "r1"
        await workers.run()
        assert current_traceparent() is None

    asyncio.run(main())
    invoked = [ids_of("r1", event["index"]) for event in recorder.events if event["type"] == "invoke"]
    assert sorted(seen[1:], key=str) == sorted(f"00-{ids.trace}-{ids.span}-01" for ids in invoked)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Definite("refused"), "fail"),
        (Indefinite("closed"), "info"),
        (ValueError("a bug in the client"), "info"),
        (TimeoutError("the driver's own"), "info"),
        (None, "info"),
    ],
)
def test_an_exception_is_a_fail_only_if_it_is_definite(result: Exception | None, expected: str) -> None:
    events, workers = run(lambda op: result, timeout_s=0.05)
    assert events[1]["type"] == expected
    assert events[1]["value"] == 7, "an operation without an answer keeps its value"
    assert bool(workers.unexpected_errors) == isinstance(result, ValueError)


def test_a_timeout_is_indeterminate() -> None:
    events, _ = run(lambda op: None, timeout_s=0.02, count=3)
    assert [event["type"] for event in events if event["type"] != "invoke"] == ["info"] * 3


def test_after_info_a_thread_continues_as_a_new_process_with_a_new_client() -> None:
    outcomes = iter([Outcome("ok", 1), Indefinite(), Outcome("ok", 1), Definite(), Outcome("ok", 1)])
    events, workers = run(lambda op: next(outcomes), count=5, threads=1)
    processes = [event["process"] for event in events if event["type"] == "invoke"]
    assert processes == [0, 0, 1, 1, 1]
    assert workers.next_process == 2
    assert ScriptedClient.opened == ScriptedClient.closed == 2


def test_only_answers_count_as_successes_and_an_answer_of_none_is_recorded_as_none() -> None:
    outcomes = iter([Outcome("ok", None), Indefinite(), Definite()])
    events, workers = run(lambda op: next(outcomes), count=3, threads=1)
    assert [event["value"] for event in events if event["type"] != "invoke"] == [None, 7, 7]
    assert workers.succeeded.total() == 1 and workers.completed == 3


def test_process_numbers_are_never_shared() -> None:
    events, _ = run(lambda op: Indefinite(), count=40, threads=4)
    processes = [event["process"] for event in events if event["type"] == "invoke"]
    assert len(set(processes)) == 40


def test_an_operation_fails_if_its_client_cannot_open() -> None:
    class Unreachable(ScriptedClient):
        async def open(self) -> None:
            raise OSError("no route")

    events, _ = run(lambda op: None, make=Unreachable)
    assert events[1]["type"] == "fail"
    assert "no route" in events[1]["error"]


def test_a_client_that_failed_to_open_is_never_invoked_and_is_replaced() -> None:
    opens = iter([OSError("no route"), OSError("no route"), None])
    invoked: list[bool] = []

    class LateComer(ScriptedClient):
        is_open = False

        async def open(self) -> None:
            await super().open()
            failure = next(opens)
            if failure is not None:
                raise failure
            self.is_open = True

        async def invoke(self, op: Op) -> Outcome:
            invoked.append(self.is_open)
            return await super().invoke(op)

    events, _ = run(lambda op: Outcome("ok", 1), count=4, make=LateComer)
    assert [event["type"] for event in events if event["type"] != "invoke"] == ["fail", "fail", "ok", "ok"]
    assert invoked == [True, True]
    assert {event["process"] for event in events} == {0}, "a failed operation keeps the process"
    assert ScriptedClient.opened == ScriptedClient.closed == 3


async def _cancel_own_task() -> None:
    """As a client does that cancels its reader task: awaiting the task raises CancelledError."""
    reader = asyncio.ensure_future(asyncio.sleep(3600))
    await asyncio.sleep(0)
    reader.cancel()
    await reader


@pytest.mark.parametrize("method", ["open", "invoke", "close"])
def test_a_cancelled_error_raised_by_a_client_does_not_end_its_thread(method: str) -> None:
    class Cancels(ScriptedClient):
        async def open(self) -> None:
            await super().open()
            if method == "open" and ScriptedClient.opened == 1:
                await _cancel_own_task()

        async def invoke(self, op: Op) -> Outcome:
            if method == "invoke" and ScriptedClient.opened == 1:
                await _cancel_own_task()
            return await super().invoke(op)

        async def close(self) -> None:
            await super().close()
            if method == "close":
                await _cancel_own_task()

    outcomes = iter([Indefinite(), *[Outcome("ok", 1)] * 4])
    events, workers = run(lambda op: next(outcomes), count=5, make=Cancels)
    ended = [event["type"] for event in events if event["type"] != "invoke"]
    expected = {"open": ["fail", "info", "ok"], "invoke": ["info", "info", "ok"], "close": ["info", "ok", "ok"]}
    assert ended[:3] == expected[method]
    assert len(ended) == 5, "every operation ends, and the thread continues"
    assert bool(workers.unexpected_errors) == (method == "invoke")


class Panic(BaseException):
    """What PyO3 makes of a panic in Rust is no Exception either."""


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, Panic])
@pytest.mark.parametrize("method", ["open", "invoke", "close"])
def test_a_base_exception_of_a_client_does_not_end_the_harness(method: str, kind: type[BaseException]) -> None:
    """The exit status of a run is its verdict: 0 would mean a valid run."""

    class Exits(ScriptedClient):
        async def open(self) -> None:
            await super().open()
            if method == "open":
                raise kind(0)

        async def invoke(self, op: Op) -> Outcome:
            if method == "invoke":
                raise kind(0)
            return await super().invoke(op)

        async def close(self) -> None:
            await super().close()
            if method == "close":
                raise kind(0)

    events, workers = run(lambda op: Outcome("ok", 1), count=2, make=Exits)
    ended = [event["type"] for event in events if event["type"] != "invoke"]
    assert ended == {"open": ["fail"] * 2, "invoke": ["info"] * 2, "close": ["ok"] * 2}[method]
    assert bool(workers.unexpected_errors) == (method == "invoke")


class Stubborn(ScriptedClient):
    """The first clients of a class ignore cancellation in one of their methods until `until` is set."""

    method = "invoke"
    first = 1
    until: asyncio.Event
    made = 0
    went_on = 0

    def __init__(self, script: Callable[[Op], Outcome | Exception | None]) -> None:
        super().__init__(script)
        type(self).made += 1
        self.number = type(self).made

    async def _go_on(self, method: str) -> None:
        while method == self.method and self.number <= self.first and not self.until.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.until.wait()
                type(self).went_on += 1

    async def open(self) -> None:
        await self._go_on("open")
        await super().open()

    async def invoke(self, op: Op) -> Outcome:
        await self._go_on("invoke")
        return await super().invoke(op)

    async def close(self) -> None:
        await self._go_on("close")
        await super().close()


def run_stubborn(
    method: str, *, count: int = 4, first: int = 1, threads: int = 1, ends_s: float = 1e9, outcome: str = "ok"
) -> tuple[list[dict[str, Any]], Workers, type[Stubborn]]:
    """Run operations of a second at most, whose first clients ignore cancellation, on simulated time; these clients
    are released after `ends_s`, and 100 s more pass."""

    class Client(Stubborn):
        pass

    Client.method, Client.first = method, first
    recorder = Recorder()

    async def main() -> Workers:
        Client.until = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.call_later(ends_s, Client.until.set)
        script = lambda op: Outcome("ok", 7) if outcome == "ok" else Indefinite()  # noqa: E731
        workers = workers_of(recorder, Limit(count, WRITES), script, threads=threads, make=Client)
        await workers.run()
        await asyncio.sleep(100)
        return workers

    before = ScriptedClient.closed
    workers = run_simulated(main(), seed=1)
    Client.closed = ScriptedClient.closed - before
    return recorder.events, workers, Client


@pytest.mark.parametrize(("method", "ended"), [("open", "fail"), ("invoke", "info"), ("close", "info")])
def test_a_client_that_ignores_cancellation_is_left_behind_and_replaced(method: str, ended: str) -> None:
    """An operation that was invoked may still happen, one that was not fails. The event loop does not wait for it."""
    events, workers, client = run_stubborn(method, outcome="info" if method == "close" else "ok")
    assert [event["type"] for event in events] == [
        "invoke",
        ended,
        *["invoke", "info" if method == "close" else "ok"] * 3,
    ]
    assert len({event["process"] for event in events[2:]}.union({0})) == (4 if method == "close" else 2)
    assert not workers.unexpected_errors and client.went_on == 0
    if method != "close":
        said = {"open": "open", "invoke": "timeout"}[method]
        assert re.fullmatch(rf"{said}: did not end when it was cancelled \(test_worker\.py:\d+\)", events[1]["error"])


@pytest.mark.parametrize("method", ["open", "invoke", "close"])
def test_a_client_left_behind_records_nothing_more_and_is_closed_when_it_ends(method: str) -> None:
    events, workers, client = run_stubborn(method, ends_s=30.0, count=40, outcome="info" if method == "close" else "ok")
    assert client.went_on == 1
    assert len(events) == 80 and sum(event["type"] == "invoke" for event in events) == workers.completed == 40
    by_process: dict[int, list[str]] = {}
    for event in events:
        by_process.setdefault(event["process"], []).append(event["type"])
    assert all(types[::2] == ["invoke"] * (len(types) // 2) for types in by_process.values())
    assert client.closed == client.made, "the client is closed after all"


def test_too_many_clients_left_behind_end_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_LEFT_BEHIND", 5)
    events, workers, client = run_stubborn("invoke", count=100, first=100, threads=2)
    assert [event["type"] for event in events].count("info") == client.made == 6
    assert list(workers.unexpected_errors) == ["RuntimeError: 6 clients are still running after being cancelled"]


def test_a_keyboard_interrupt_is_ctrl_c_only_under_the_default_handler() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert is_ctrl_c(KeyboardInterrupt()) and not is_ctrl_c(SystemExit())
        signal.signal(signal.SIGINT, lambda number, frame: None)
        assert not is_ctrl_c(KeyboardInterrupt())
    finally:
        signal.signal(signal.SIGINT, before)


def test_cancelling_the_workers_ends_them_and_leaves_the_operation_open() -> None:
    has_begun = asyncio.Event()

    class Watched(Recorder):
        def append(self, event: dict[str, Any]) -> dict[str, Any]:
            has_begun.set()
            return super().append(event)

    recorder = Watched()

    async def main() -> None:
        workers = workers_of(recorder, WRITES, lambda op: None, timeout_s=60.0)
        task = asyncio.ensure_future(workers.run())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [event["type"] for event in recorder.events] == ["invoke"], (
        "the operation stays open: its outcome is unknown"
    )


def test_a_client_that_never_closes_delays_its_thread_only_by_a_timeout() -> None:
    class NeverCloses(ScriptedClient):
        async def close(self) -> None:
            await super().close()
            await asyncio.sleep(1e6)

    outcomes = iter([Indefinite(), Outcome("ok", 1)])
    recorder = Recorder()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        workers = workers_of(recorder, Limit(2, WRITES), lambda op: next(outcomes), make=NeverCloses)
        began_s = loop.time()
        await workers.run()
        return loop.time() - began_s

    took_s = run_simulated(main(), seed=1)
    assert [event["type"] for event in recorder.events] == ["invoke", "info", "invoke", "ok"]
    assert took_s == pytest.approx(2 * CLOSE_TIMEOUT_S, rel=0.01)


def test_stop_ends_workers_that_are_waiting() -> None:
    recorder = Recorder()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        much_later = Stagger(0.001, WRITES, due_ns=int(loop.time() * 1e9) + 10**15)
        workers = workers_of(recorder, much_later, lambda op: Outcome("ok"), threads=3)
        task = asyncio.ensure_future(workers.run())
        await asyncio.sleep(0.01)
        workers.stop()
        began = loop.time()
        await asyncio.wait_for(task, 5)
        return loop.time() - began

    assert asyncio.run(main()) < 5
    assert recorder.events == []


def test_many_idle_threads_do_not_all_ask_for_each_operation() -> None:
    """Fifty threads share a slow stream: each operation takes about three calls of `next`, and all get some."""
    recorder = Recorder()
    asked = 0

    class Counting(Unpaced):
        def __init__(self, inner: Generator) -> None:
            self.inner = inner

        def next(self, context: Context) -> Any:
            nonlocal asked
            asked += 1
            step, inner = self.inner.next(context)
            return step, Counting(inner)

        def update(self, context: Context, event: Any) -> Any:
            return Counting(self.inner.update(context, event))

    async def main() -> None:
        load = TimeLimit(20.0, Counting(Stagger(100.0, WRITES)))
        await workers_of(recorder, load, lambda op: Outcome("ok"), threads=50).run()

    run_simulated(main(), seed=1)
    operations = [event["process"] for event in recorder.events if event["type"] == "invoke"]
    assert 1800 < len(operations) < 2200
    assert len(set(operations)) == 50
    assert asked < 3.2 * len(operations) + 100  # by the thread that does it, the one behind it, and the first again
