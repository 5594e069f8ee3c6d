"""Logical clients: each asks the generator what to do, does it, and records what came of it.

A *thread* is a slot of concurrency, a *process* the logical client in that slot. A process has one operation
open at a time. When an operation ends `info` (nobody knows whether it happened) the process is over: it might
still take effect at any later time, so nothing that comes after may count as "after it" in the same process.
The thread then goes on as a new process with a fresh connection, which has the next number that nobody has had.

What an exception of a client means:

    asyncio.TimeoutError          the operation's own deadline: info
    an error with `is_definite`   True: fail (it certainly did not happen); False: info
    anything else                 info, and it is kept as an unexpected error, because the client has a bug

One that cannot be opened sent nothing (fail); an error with `is_mistake` is kept as an unexpected one there.

A client may raise asyncio.CancelledError though nobody cancelled it: it awaited a task of its own that it had
cancelled. That must not end its thread, without which the load would go on as if nothing were missing. Nor must a
client that calls sys.exit end the harness, whose exit status is a verdict; the same goes for a KeyboardInterrupt of its
own, and for what else is no Exception, such as the panic of a driver in Rust. One that goes on though it was cancelled
is left behind after a while, and another one takes its place: drivers wait for a rollback then, or for the server to
say that it has cancelled a statement, which one that is paused or cut off does not.
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
"""How many distinct unexpected client errors a run keeps: enough to see a pattern, few enough to read."""

TIMEOUT = "timeout"
"""The error of an operation that was not answered in time."""

MAX_TIMEOUTS = 20
"""How many distinct lines at which clients waited in vain a run keeps, as with unexpected errors."""

CLOSE_TIMEOUT_S = 5.0
"""For a client to close. One that never does must not hold up its thread, and the run with it."""

LEAVE_AFTER_S = 5.0
"""From the cancelling of a call until its client is left where it is: one that awaits while it is cancelled, such as a
rollback, takes less where the system answers."""

MAX_LEFT_BEHIND = 200
"""Clients of a phase that go on though they were left behind. Each holds a connection and what it was about; where
there are more the load ends, and nothing can be said of the run."""

REOPEN_PAUSE_S = 0.05
"""Between a failed `open` and the next try, so that an unreachable system is not hammered."""

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation ended. Where one that did not succeed has a value, no more was asked for of it than that says,
    whatever the invocation does. `node` is the host that answered, where known; `durability` what the system said of an
    acknowledged write that is less safe than it should be. With `is_broken` the client is closed, and the process goes
    on with a new one, whatever the type."""

    type: Literal["ok", "fail", "info"]
    value: Any = None
    error: str | None = None
    node: str | None = None
    durability: str | None = None
    is_broken: bool = False


class Client(Protocol):
    """One process's connection to the system under test."""

    async def open(self) -> None:
        """Get ready; raises when the system cannot be reached."""
        ...

    async def invoke(self, op: Op) -> Outcome:
        """Do one operation. May raise: see the module's table."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class TellsOutcome(Protocol):
    """An error of a client that knows whether its operation may still have happened."""

    is_definite: bool
    """True: it certainly did not happen, nor will it; False: nobody knows."""


@runtime_checkable
class TellsUse(Protocol):
    """An error of a client that knows whether the client is of any more use."""

    reopen: bool
    """True: it is to be closed, and the next operation opens a new one."""


@runtime_checkable
class TellsMistake(Protocol):
    """An error of a client that knows whether the client's own code is wrong."""

    is_mistake: bool
    """True: with such a client nothing is tested, whatever its operation did."""


@runtime_checkable
class NamesNode(Protocol):
    """An error of a client that knows which host it comes from."""

    node: str | None


class Recorder(Protocol):
    """Where events go; adds index and time and returns the completed event."""

    def append(self, event: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(slots=True, eq=False)
class _Thread:
    """A thread: one process after the other, each of which performs its operations one by one."""

    number: int
    process: int
    client: Client | None = None
    invocation: dict[str, Any] | None = None
    """Of the operation that is open."""
    is_sent: bool = False
    """Whether a client was asked for it."""
    is_left_behind: bool = False
    """Whether another one has its number now, and nobody waits for it."""


@dataclass(slots=True, eq=False)
class _Limit:
    """When the operation that a thread's task performs is to be over; `cancelling` is what the task was asked before it
    began."""

    thread: _Thread
    task: asyncio.Task[Any]
    cancelling: int
    due_s: float
    is_done: bool = False
    is_over: bool = False


@dataclass(slots=True)
class Workers:
    """The threads of one phase of a run.

    `make_client(process, thread)` gives an unopened client; `now_ns` is the history's clock;
    `operation_timeout_s` bounds each operation from the outside (clients have their own, shorter ones).
    """

    generator: Generator
    threads: int
    make_client: Callable[[int, int], Client]
    recorder: Recorder
    now_ns: Callable[[], int]
    random: random.Random
    operation_timeout_s: float
    first_process: int = 0
    unexpected_errors: dict[str, int] = field(default_factory=dict)
    timeouts: dict[str, int] = field(default_factory=dict)
    """Lines of clients at which operations still waited when their time was over -> how often; MAX_TIMEOUTS lines."""
    completed: int = 0
    asked: set[str] = field(default_factory=set)
    """The names of the operations that were asked for."""
    succeeded: Counter[str] = field(default_factory=Counter)
    """How many of each name were answered `ok`."""
    answered: set[int | str] = field(default_factory=set)
    """Keys (those that are numbers or words) of which an operation was answered `ok`."""
    last_failures: dict[int | str | None, str] = field(default_factory=dict)
    """Of each such key, and of all (None): the last operation that did not succeed, and how it ended."""
    _stopping: bool = False
    _context: Context = field(init=False)
    _next_process: int = field(init=False)
    _sleepers: dict[asyncio.Future[None], None] = field(default_factory=dict)
    """Threads that wait for a time of their own."""
    _line: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Threads that wait for a time that is the same for everyone; the first is called then, and calls the next
    when it has asked. With a hundred threads and one operation every few milliseconds, waking all for each of
    them would cost more than the operations."""
    _line_timer: asyncio.TimerHandle | None = None
    _limits: deque[_Limit] = field(default_factory=deque)
    """Of operations, the oldest first; one that is done stays behind an older one that is not."""
    _limit_timer: asyncio.TimerHandle | None = None
    _running: dict[asyncio.Task[None], _Thread] = field(default_factory=dict)
    """The threads that are waited for."""
    _left_behind: int = 0
    """How many are not, and go on."""
    _errors: list[BaseException] = field(default_factory=list)
    """What threads have raised that were waited for."""
    _ended: asyncio.Future[None] | None = None
    """Done once no thread is waited for any more, or one has failed."""

    def __post_init__(self) -> None:
        self._context = Context(random=self.random, threads=self.threads)
        self._next_process = self.first_process + self.threads

    @property
    def next_process(self) -> int:
        """The first process number that no thread of this phase has used."""
        return self._next_process

    def stop(self) -> None:
        """Ask for no further operations; those open are waited for."""
        self._stopping = True
        for waiter in (*self._sleepers, *self._line):
            _wake(waiter)
        self._line.clear()
        if self._line_timer is not None:
            self._line_timer.cancel()
            self._line_timer = None

    async def run(self) -> None:
        """Run every thread until the generator is exhausted for it or `stop` was called. What a thread raises ends the
        others, and is raised in a group of exceptions. A thread whose client cannot be cancelled is left behind, and
        another one begins in its place."""
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
        """Wait no more for a thread, nor have the event loop do so when it is closed."""
        self._running.pop(task).is_left_behind = True
        self._left_behind += 1
        leave_task(task)

    def _leave(self, thread: _Thread, task: asyncio.Task[None], *, after: str) -> None:
        """Go on without a thread whose client was cancelled and does not end. What it was asked for may still happen;
        what it was not, never does."""
        if task not in self._running:
            return
        text = f"{after}: did not end when it was cancelled ({_place_of(task)})"
        logger.warning("a client is left behind: %s", text)
        self._leave_behind(task)
        try:
            if thread.invocation is not None:
                self._end_operation(thread, Outcome("info" if thread.is_sent else "fail", error=text))
            if self._left_behind > MAX_LEFT_BEHIND:
                self._note_unexpected(RuntimeError(f"{self._left_behind} clients go on though they were cancelled"))
                self.stop()
        finally:
            self._start(_Thread(thread.number, self._take_process()))

    def _take_process(self) -> int:
        self._next_process += 1
        return self._next_process - 1

    async def _run_thread(self, thread: _Thread) -> None:
        try:
            while not self._stopping:
                step = self._ask(thread.number, thread.process)
                if isinstance(step, Wait) and step.everyone:
                    await self._stand_in_line(step.until_ns)
                    continue
                if not isinstance(step, Op) and self._line and self._line_timer is None:
                    self._call_next()
                if step is None:
                    return
                if isinstance(step, Wait):
                    await self._sleep_until(step.until_ns)
                    continue
                self._begin_operation(thread, step)
                if self._line and self._line_timer is None:
                    self._call_next()
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
        self._tell(thread.number, thread.process, self.recorder.append(invocation))

    def _end_operation(self, thread: _Thread, outcome: Outcome) -> None:
        invocation, thread.invocation = thread.invocation, None
        assert invocation is not None
        self._count(invocation["f"], invocation.get("key"), outcome)
        self._tell(thread.number, thread.process, self.recorder.append(_completion(invocation, outcome)))

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

    def _ask(self, thread: int, process: int) -> Op | Wait | None:
        context = self._context
        context.thread, context.process, context.time_ns = thread, process, self.now_ns()
        step, self.generator = self.generator.next(context)
        return step

    def _tell(self, thread: int, process: int, event: dict[str, Any]) -> None:
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

    async def _stand_in_line(self, until_ns: int) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._line.append(waiter)
        if self._line_timer is None:
            self._line_timer = loop.call_later(max(0.0, (until_ns - self.now_ns()) / 1e9), self._call_next)
        await waiter  # one that is cancelled here is passed over when it would be called

    def _call_next(self) -> None:
        self._line_timer = None
        now_ns = self.now_ns()
        until_ns = self.generator.idle_until_ns(now_ns)
        if until_ns is not None:  # the one that would be called would only say so
            self._line_timer = asyncio.get_running_loop().call_later((until_ns - now_ns) / 1e9, self._call_next)
            return
        while self._line:
            waiter = self._line.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _open(self, thread: _Thread) -> Outcome | None:
        """Give a thread an open client; or say how the operation ended that needed it: whatever the reason, it was not
        sent.

        A client that could not be opened is closed and forgotten, so that the next operation tries with another one.
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
        """Close the client of a thread, if it has one, whatever it says to that."""
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
        """Leave the current thread behind where a call that is cancelled after `timeout_s` goes on."""
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
            # As asyncio.timeout does: somebody else may have cancelled the thread as well.
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
        """Have the current thread's task cancelled when its operation's time is over.

        What asyncio.timeout does, but for all threads with one timer that is nearly never reached: the time is the
        same for all operations, so the oldest is due first.
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
        """Cancel what is due, and come back for the next one that is still open."""
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
    """The event that ends an operation; what was not answered keeps the value that was asked for."""
    completion = {**invocation, "type": outcome.type}
    if outcome.type == "ok" or outcome.value is not None:
        completion["value"] = outcome.value
    for name in ("error", "node", "durability"):
        said = getattr(outcome, name)
        if said is not None:
            completion[name] = said
    return completion


def _place_of(task: asyncio.Task[Any]) -> str:
    """The line at which a task waits, in the innermost code that is neither Python's own nor installed."""
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
    """How often somebody has asked the current task to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def raising_exceptions(work: Awaitable[T]) -> T:
    """Await what calls a workload's own methods. What those raise of their own accord and is no Exception is raised as
    one: it would end the harness, with a status that may be a verdict, or a task that nobody misses then."""
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
    """Whether a client raised of its own accord what would end its task, or the harness: CancelledError though nobody
    has asked its task to end since that was done `asked` times; SystemExit, whose status is no verdict of ours;
    KeyboardInterrupt, unless it is Ctrl-C's; and whatever else is no Exception, but GeneratorExit, with which a task is
    thrown away."""
    if isinstance(error, asyncio.CancelledError):
        return times_cancelled() <= asked
    return not isinstance(error, GeneratorExit) and not is_ctrl_c(error)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an exception may be Ctrl-C: a KeyboardInterrupt, where nothing else is done about that signal."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
