"""Logical clients: each asks the generator for an operation, performs it, and records the outcome.

As in Jepsen, a *thread* is a slot of concurrency and a *process* the logical client in that slot. A process has one
operation open at a time. If an operation ends with `info` (it is unknown whether it happened) the process ends: the
operation might take effect at any later time, so no later operation may count as "after it" in the same process. The
thread continues as a new process with a new connection and the next unused number.

Meaning of a client's exceptions:

    asyncio.TimeoutError          the operation's own deadline: info
    an error with `is_definite`   True: fail (it certainly did not happen); False: info
    anything else                 info, and recorded as an unexpected error, because the client has a bug

A client that cannot be opened sent nothing (fail); there an error with `is_mistake` is recorded as unexpected.

A client may raise asyncio.CancelledError without having been cancelled, by awaiting its own cancelled task. That must
not end its thread, as the load would silently continue without it. Nor must a client that calls sys.exit end the
harness, whose exit status is a verdict; the same holds for a client's own KeyboardInterrupt and any other
BaseException, such as a panic in a Rust driver. A client that ignores its cancellation is abandoned after a while and
replaced: drivers then wait for a rollback, or for the server to confirm that it cancelled a statement, which a paused
or isolated server does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import signal
import sysconfig
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from types import CoroutineType, FrameType
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from harness.generator import Context, Generator, Op, Wait
from harness.left_behind import leave_task
from harness.tracing import Operation, operation_under_way

__all__ = [
    "CLOSE_TIMEOUT_S",
    "MAX_TIMEOUTS",
    "MAX_UNEXPECTED_ERRORS",
    "TIMEOUT",
    "Client",
    "NamesNode",
    "Outcome",
    "Recorder",
    "TellsOutcome",
    "TellsUse",
    "Workers",
    "is_ctrl_c",
    "is_its_own",
    "raising_exceptions",
    "times_cancelled",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_UNEXPECTED_ERRORS = 20
"""Limit of distinct unexpected client errors recorded: enough to see a pattern, few enough to read."""

TIMEOUT = "timeout"
"""The error of an operation that was not answered in time."""

MAX_TIMEOUTS = 20
"""How many distinct lines at which clients waited in vain a run keeps, as with unexpected errors."""

CLOSE_TIMEOUT_S = 5.0
"""For a client to close. One that never does must not block its thread, and with it the run."""

LEAVE_AFTER_S = 5.0
"""Time from cancelling a call until its client is abandoned. Cleanup during cancellation, such as a rollback, takes
less if the system answers."""

MAX_LEFT_BEHIND = 200
"""Limit of abandoned clients of a phase that are still running, each holding a connection and memory. Beyond it the
load ends, and the run is unknown."""

REOPEN_PAUSE_S = 0.05
"""Pause between a failed `open` and the next attempt, so that an unreachable system is not hammered."""

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation ended. A value of an unsuccessful operation is the part that was actually requested, instead of
    the invocation's value. `node` is the host that answered, if known; `durability` is set if the system acknowledged a
    write with less durability than configured. With `is_broken` the client is closed, and the process continues with a
    new one, whatever the type."""

    type: Literal["ok", "fail", "info"]
    value: Any = None
    error: str | None = None
    node: str | None = None
    durability: str | None = None
    is_broken: bool = False


class Client(Protocol):
    """One process's client of the system under test."""

    async def open(self) -> None:
        """Connect; raises if the system cannot be reached."""
        ...

    async def invoke(self, op: Op) -> Outcome:
        """Perform one operation. May raise: see the module docstring."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class TellsOutcome(Protocol):
    """An error of a client that tells whether its operation may have happened."""

    is_definite: bool
    """True: it certainly did not happen, nor will it; False: unknown."""


@runtime_checkable
class TellsUse(Protocol):
    """An error of a client that tells whether the client can still be used."""

    reopen: bool
    """True: it must be closed, and the next operation opens a new one."""


@runtime_checkable
class TellsMistake(Protocol):
    """An error of a client that tells whether the client's own code is wrong."""

    is_mistake: bool
    """True: such a client tests nothing, whatever its operation did."""


@runtime_checkable
class NamesNode(Protocol):
    """An error of a client that tells which host it comes from."""

    node: str | None


class Recorder(Protocol):
    """Records events; adds index and time and returns the event with them."""

    def append(self, event: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(slots=True, eq=False)
class _Thread:
    """A thread: a sequence of processes, each of which performs operations one by one."""

    number: int
    process: int
    client: Client | None = None
    invocation: dict[str, Any] | None = None
    """The invocation of the open operation."""
    is_sent: bool = False
    """Whether the operation was passed to the client."""
    is_left_behind: bool = False
    """Whether it was abandoned, and another thread has its number now."""


@dataclass(slots=True, eq=False)
class _Limit:
    """The deadline of the operation of a thread's task; `cancelling` is the task's cancellation count before it."""

    thread: _Thread
    task: asyncio.Task[Any]
    cancelling: int
    due_s: float
    is_done: bool = False
    is_over: bool = False


@dataclass(slots=True)
class Workers:
    """The threads of one phase of a run.

    `make_client(process, thread)` returns an unopened client; `now_ns` is the history's clock; `operation_timeout_s`
    limits each operation from the outside (clients have their own, shorter timeouts).
    """

    generator: Generator
    threads: int
    make_client: Callable[[int, int], Client]
    recorder: Recorder
    now_ns: Callable[[], int]
    random: random.Random
    operation_timeout_s: float
    first_process: int = 0
    run_id: str = ""
    """For the traceparent of each operation; without it there is none"""
    unexpected_errors: dict[str, int] = field(default_factory=dict)
    timeouts: dict[str, int] = field(default_factory=dict)
    """Lines of clients at which operations still waited when their time was over -> how often; MAX_TIMEOUTS lines."""
    completed: int = 0
    asked: set[str] = field(default_factory=set)
    """The names of the operations performed."""
    succeeded: Counter[str] = field(default_factory=Counter)
    """Name -> number of operations that ended with `ok`."""
    answered: set[int | str] = field(default_factory=set)
    """Keys (integers and strings only) with an operation that ended with `ok`."""
    last_failures: dict[int | str | None, str] = field(default_factory=dict)
    """For each such key, and for all together (None): the last unsuccessful operation and how it ended."""
    _stopping: bool = False
    _context: Context = field(init=False)
    _next_process: int = field(init=False)
    _sleepers: dict[asyncio.Future[None], None] = field(default_factory=dict)
    """Threads that wait for their own time."""
    _wake_queue: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Threads that wait for a common time. Then the first is woken, and wakes the next after it has asked the
    generator. With a hundred threads and an operation every few milliseconds, waking all threads for each operation
    would cost more than the operations."""
    _wake_timer: asyncio.TimerHandle | None = None
    _limits: deque[_Limit] = field(default_factory=deque)
    """Deadlines of operations, oldest first; a finished one stays in the queue behind an older unfinished one."""
    _limit_timer: asyncio.TimerHandle | None = None
    _running: dict[asyncio.Task[None], _Thread] = field(default_factory=dict)
    """The tasks that `run` waits for."""
    _left_behind: int = 0
    """Number of abandoned threads that are still running."""
    _errors: list[BaseException] = field(default_factory=list)
    """Exceptions of threads that were not abandoned."""
    _ended: asyncio.Future[None] | None = None
    """Done when all threads have ended or been abandoned, or one has failed."""

    def __post_init__(self) -> None:
        self._context = Context(random=self.random, threads=self.threads)
        self._next_process = self.first_process + self.threads

    @property
    def next_process(self) -> int:
        """The first process number not used by this phase."""
        return self._next_process

    def stop(self) -> None:
        """Start no further operations; open ones are waited for."""
        self._stopping = True
        for waiter in (*self._sleepers, *self._wake_queue):
            _wake(waiter)
        self._wake_queue.clear()
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None

    async def run(self) -> None:
        """Run every thread until the generator is exhausted for it or `stop` is called. An exception in a thread ends
        the others and is raised in an exception group. A thread whose client ignores its cancellation is abandoned and
        replaced by a new one."""
        self._ended = asyncio.get_running_loop().create_future()
        for number in range(self.threads):
            self._start(_Thread(number, self.first_process + number))
        try:
            if self._running:
                await self._ended
        finally:
            self._stopping = True
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(list(self._running), timeout=LEAVE_AFTER_S + CLOSE_TIMEOUT_S)
            for task in list(self._running):
                self._leave_behind(task)
            if self._limit_timer is not None:
                self._limit_timer.cancel()
        if self._errors:
            raise BaseExceptionGroup("threads of the load failed", self._errors)

    def _start(self, thread: _Thread) -> None:
        work = raising_exceptions(self._run_thread(thread))
        task = asyncio.get_running_loop().create_task(work, name=f"worker-{thread.number}")
        self._running[task] = thread
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._running.pop(task, None) is None:
            self._left_behind -= 1
            return
        if error is not None:
            self._errors.append(error)
        if self._ended is not None and (error is not None or not self._running):
            _wake(self._ended)

    def _leave_behind(self, task: asyncio.Task[None]) -> None:
        """Stop waiting for a thread, also in the event loop's shutdown."""
        self._running.pop(task).is_left_behind = True
        self._left_behind += 1
        leave_task(task)

    def _leave(self, thread: _Thread, task: asyncio.Task[None], *, after: str) -> None:
        """Abandon a thread whose client was cancelled and does not end. An operation that was passed to the client may
        still happen (info); one that was not never does (fail)."""
        if task not in self._running:
            return
        text = f"{after}: did not end when it was cancelled ({_place_of(task)})"
        logger.warning("a client is left behind: %s", text)
        self._leave_behind(task)
        try:
            if thread.invocation is not None:
                self._end_operation(thread, Outcome("info" if thread.is_sent else "fail", error=text))
            if self._left_behind > MAX_LEFT_BEHIND:
                self._note_unexpected(
                    RuntimeError(f"{self._left_behind} clients are still running after being cancelled")
                )
                self.stop()
        finally:
            self._start(_Thread(thread.number, self._take_process()))

    def _take_process(self) -> int:
        self._next_process += 1
        return self._next_process - 1

    async def _run_thread(self, thread: _Thread) -> None:
        try:
            while not self._stopping:
                step = self._next_step(thread.number, thread.process)
                if isinstance(step, Wait) and step.everyone:
                    await self._wait_in_queue(step.until_ns)
                    continue
                if not isinstance(step, Op) and self._wake_queue and self._wake_timer is None:
                    self._wake_next()
                if step is None:
                    return
                if isinstance(step, Wait):
                    await self._sleep_until(step.until_ns)
                    continue
                self._begin_operation(thread, step)
                if self._wake_queue and self._wake_timer is None:
                    self._wake_next()
                outcome = await self._open(thread) if thread.client is None else None
                if outcome is None and not thread.is_left_behind:
                    outcome = await self._invoke(thread, step)
                if outcome is None or thread.is_left_behind:
                    return
                self._end_operation(thread, outcome)
                if outcome.type == "info" or outcome.is_broken:
                    await self._close(thread)
                if outcome.type == "info":
                    thread.process = self._take_process()
        finally:
            await self._close(thread)

    def _begin_operation(self, thread: _Thread, op: Op) -> None:
        invocation = {"process": thread.process, "type": "invoke", "f": op.f, "value": op.value}
        if op.key is not None:
            invocation["key"] = op.key
        thread.invocation, thread.is_sent = invocation, False
        event = self.recorder.append(invocation)
        if self.run_id:
            operation_under_way.set(Operation(self.run_id, event["index"]))
        self._update_generator(thread.number, thread.process, event)

    def _end_operation(self, thread: _Thread, outcome: Outcome) -> None:
        invocation, thread.invocation = thread.invocation, None
        assert invocation is not None
        self._count(invocation["f"], invocation.get("key"), outcome)
        self._update_generator(thread.number, thread.process, self.recorder.append(_completion(invocation, outcome)))

    def _count(self, f: str, key: Any, outcome: Outcome) -> None:
        self.completed += 1
        self.asked.add(f)
        has_key = type(key) in (int, str)
        if outcome.type == "ok":
            self.succeeded[f] += 1
            if has_key:
                self.answered.add(key)
            return
        failure = self.last_failures[None] = f"{f}: {outcome.error}"
        if has_key:
            self.last_failures[key] = failure

    def _next_step(self, thread: int, process: int) -> Op | Wait | None:
        context = self._context
        context.thread, context.process, context.time_ns = thread, process, self.now_ns()
        step, self.generator = self.generator.next(context)
        return step

    def _update_generator(self, thread: int, process: int, event: dict[str, Any]) -> None:
        context = self._context
        time_ns = event.get("time")
        context.thread, context.process = thread, process
        context.time_ns = time_ns if time_ns is not None else self.now_ns()
        self.generator = self.generator.update(context, event)

    async def _sleep_until(self, until_ns: int) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(max(0.0, (until_ns - self.now_ns()) / 1e9), _wake, waiter)
        self._sleepers[waiter] = None
        try:
            await waiter
        finally:
            timer.cancel()
            del self._sleepers[waiter]

    async def _wait_in_queue(self, until_ns: int) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._wake_queue.append(waiter)
        if self._wake_timer is None:
            self._wake_timer = loop.call_later(max(0.0, (until_ns - self.now_ns()) / 1e9), self._wake_next)
        await waiter  # if cancelled here, it is skipped when its turn comes

    def _wake_next(self) -> None:
        self._wake_timer = None
        now_ns = self.now_ns()
        until_ns = self.generator.idle_until_ns(now_ns)
        if until_ns is not None:  # a woken thread would only wait again
            self._wake_timer = asyncio.get_running_loop().call_later((until_ns - now_ns) / 1e9, self._wake_next)
            return
        while self._wake_queue:
            waiter = self._wake_queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _open(self, thread: _Thread) -> Outcome | None:
        """Give a thread an open client. If that fails, returns the outcome of the operation, which was not sent.

        A client that could not be opened is closed and dropped, so that the next operation tries a new one.
        """
        client = self.make_client(thread.process, thread.number)
        asked = times_cancelled()
        try:
            with self._unless_left_behind(thread, self.operation_timeout_s, "open"):
                async with asyncio.timeout(self.operation_timeout_s):
                    await client.open()
        except BaseException as error:
            thread.client = client
            await self._close(thread)
            if not isinstance(error, Exception) and not is_its_own(error, asked):
                raise
            if isinstance(error, TellsMistake) and error.is_mistake and not thread.is_left_behind:
                self._note_unexpected(error)
            await asyncio.sleep(REOPEN_PAUSE_S)
            return Outcome("fail", error=f"open: {_describe(error)}")
        thread.client = client
        return None

    async def _close(self, thread: _Thread) -> None:
        """Close the client of a thread, if it has one, ignoring its errors."""
        client, thread.client = thread.client, None
        if client is None:
            return
        closing: Awaitable[None] = client.close()
        asked = times_cancelled()
        try:
            with self._unless_left_behind(thread, CLOSE_TIMEOUT_S, "close"):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await closing
        except BaseException as error:
            if not isinstance(error, Exception) and not is_its_own(error, asked):
                raise
            logger.debug("closing a client: %s", _describe(error))

    @contextlib.contextmanager
    def _unless_left_behind(self, thread: _Thread, timeout_s: float, what: str) -> Iterator[None]:
        """Abandon the current thread if its call is still running LEAVE_AFTER_S after its timeout."""
        task = asyncio.current_task()
        assert task is not None
        leave = functools.partial(self._leave, thread, task, after=what)
        timer = asyncio.get_running_loop().call_later(timeout_s + LEAVE_AFTER_S, leave)
        try:
            yield
        finally:
            timer.cancel()

    async def _invoke(self, thread: _Thread, op: Op) -> Outcome:
        client = thread.client
        assert client is not None
        limit = self._begin_limit(thread)
        thread.is_sent = True
        try:
            return await client.invoke(op)
        except asyncio.CancelledError as error:
            if not limit.is_over and is_its_own(error, limit.cancelling):
                self._note_unexpected(error)
                return Outcome("info", error=f"unexpected {_describe(error)}")
            # As in asyncio.timeout: the thread may have been cancelled from elsewhere too.
            if not limit.is_over or limit.task.uncancel() > limit.cancelling:
                raise
            return Outcome("info", error=TIMEOUT)
        except TimeoutError:
            return Outcome("info", error=TIMEOUT)
        except Exception as error:
            if not isinstance(error, TellsOutcome):
                if not thread.is_left_behind:
                    self._note_unexpected(error)
                return Outcome("info", error=f"unexpected {_describe(error)}")
            node = error.node if isinstance(error, NamesNode) else None
            return Outcome("fail" if error.is_definite else "info", error=_describe(error), node=node)
        except BaseException as error:
            if not is_its_own(error, limit.cancelling):
                raise
            self._note_unexpected(error)
            return Outcome("info", error=f"unexpected {_describe(error)}")
        finally:
            limit.is_done = True

    def _begin_limit(self, thread: _Thread) -> _Limit:
        """Cancel the current thread's task when its operation's time is over.

        Like asyncio.timeout, but with one timer for all threads, which rarely fires: all operations have the same
        timeout, so the oldest is due first.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        limit = _Limit(thread, task, task.cancelling(), loop.time() + self.operation_timeout_s)
        limits = self._limits
        while limits and limits[0].is_done:
            limits.popleft()
        limits.append(limit)
        if self._limit_timer is None:
            self._limit_timer = loop.call_at(limit.due_s, self._end_limits)
        return limit

    def _leave_unless_done(self, limit: _Limit) -> None:
        if not limit.is_done:
            self._leave(limit.thread, limit.task, after="timeout")

    def _end_limits(self) -> None:
        """Cancel operations that are due, and set the timer for the next open one."""
        self._limit_timer = None
        loop = asyncio.get_running_loop()
        limits = self._limits
        while limits and (limits[0].is_done or limits[0].due_s <= loop.time()):
            limit = limits.popleft()
            if not limit.is_done:
                limit.is_over = True
                self._note_timeout(limit.task)
                limit.task.cancel()
                loop.call_later(LEAVE_AFTER_S, self._leave_unless_done, limit)
        if limits:
            self._limit_timer = loop.call_at(limits[0].due_s, self._end_limits)

    def _note_timeout(self, task: asyncio.Task[None]) -> None:
        place = _place_of(task)
        if place in self.timeouts or len(self.timeouts) < MAX_TIMEOUTS:
            self.timeouts[place] = self.timeouts.get(place, 0) + 1

    def _note_unexpected(self, error: BaseException) -> None:
        text = _describe(error)
        if text not in self.unexpected_errors:
            if len(self.unexpected_errors) >= MAX_UNEXPECTED_ERRORS:
                return
            logger.error("unexpected error of a client", exc_info=error)
        self.unexpected_errors[text] = self.unexpected_errors.get(text, 0) + 1


def _completion(invocation: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """The event that ends an operation; without a value in the outcome it keeps the invocation's value."""
    completion = {**invocation, "type": outcome.type}
    if outcome.type == "ok" or outcome.value is not None:
        completion["value"] = outcome.value
    for name in ("error", "node", "durability"):
        said = getattr(outcome, name)
        if said is not None:
            completion[name] = said
    return completion


def _place_of(task: asyncio.Task[Any]) -> str:
    """The line at which a task waits, in the innermost frame outside the standard library and installed packages."""
    found = list[FrameType]()
    awaited: Any = task.get_coro()
    while isinstance(awaited, CoroutineType):
        if awaited.cr_frame is not None:
            found.append(awaited.cr_frame)
        awaited = awaited.cr_await
    own = [frame for frame in found if not frame.f_code.co_filename.startswith(_INSTALLED)] or found
    return f"{os.path.basename(own[-1].f_code.co_filename)}:{own[-1].f_lineno}" if own else task.get_name()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def times_cancelled() -> int:
    """The number of pending cancellation requests of the current task."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def raising_exceptions(work: Awaitable[T]) -> T:
    """Await code that calls a workload's own methods, and raise a BaseException of theirs as RuntimeError: it would end
    the harness with a status that may be a verdict, or silently end a task."""
    asked = times_cancelled()
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        if not is_its_own(error, asked):
            raise
        raise RuntimeError(f"raised {_describe(error)}") from error


def is_its_own(error: BaseException, asked: int) -> bool:
    """Whether a client itself raised an exception that would end its task or the harness: CancelledError without a new
    cancellation request since there were `asked`; SystemExit, whose status is not our verdict; KeyboardInterrupt,
    unless it comes from Ctrl-C; and any other BaseException except GeneratorExit, which discards a task."""
    if isinstance(error, asyncio.CancelledError):
        return times_cancelled() <= asked
    return not isinstance(error, GeneratorExit) and not is_ctrl_c(error)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an exception may come from Ctrl-C: a KeyboardInterrupt while SIGINT has its default handler."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
