"""A deterministic event loop on virtual time.

    run what is ready: choose among the lanes that have something ready, run what is in that lane's queue
    when nothing is ready: jump to the next timer or event, however far away it is

Everything is decided by the seed. If several lanes are ready at one instant, their order comes from a hash of
seed, time and lane rather than from a stream of random numbers: how many callbacks an asyncio primitive takes
differs between versions of Python, and must not shift every later decision.

Two kinds of things are due at a time: timers, which belong to a lane and wait in its queue like everything
else; and *events* of the simulation itself (a segment arrives, a disk is done), which are outside every lane and
run directly.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import weakref
from asyncio import events
from collections.abc import AsyncGenerator, Callable
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import Any, NoReturn, Protocol, TypeVarTuple

from harness.clusters.sim.errors import Deadlock, NotSimulated, Runaway
from harness.clusters.sim.lane import LANE, Lane, SimHandle
from harness.clusters.sim.primitives import SimFuture, SimTask, SimTimerHandle
from harness.clusters.sim.refusals import RefusingLoop
from harness.clusters.sim.timetable import Timetable
from harness.seeded import Streams, seeded

__all__ = ["MAX_STEPS_AT_ONE_INSTANT", "START_S", "LoopNetwork", "SimLoop"]

START_S = 1_000.0
"""Loop time at the start. Not 0, to expose code that takes 0.0 for "never"."""

MAX_STEPS_AT_ONE_INSTANT = 1_000_000
"""Callbacks without progress of time before a run counts as spinning; real work takes some thousands."""

_MASK = (1 << 64) - 1
_new_handle = SimHandle.__new__
_Ts = TypeVarTuple("_Ts")

logger = logging.getLogger("asyncio")


class LoopNetwork(Protocol):
    """The part of the network that programs use through their loop."""

    def listen(
        self, factory: Callable[[], asyncio.BaseProtocol], address: Any, port: Any, **options: Any
    ) -> asyncio.AbstractServer:
        """Listen for the current process. Raises OSError: address in use or not this host's."""
        ...

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], address: Any, port: Any, **options: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect the current process. Raises OSError: refused, timed out, no such host."""
        ...


class SimLoop(Timetable, RefusingLoop):
    """See the module's docstring.

    `shuffle` makes the order within a lane a seeded choice too: callbacks of one object stay in order, those of
    different objects are interleaved at random. asyncio guarantees more than that, so what such a run finds hints
    at fragile code and need not be a bug.
    """

    def __init__(self, seed: int = 0, *, shuffle: bool = False) -> None:
        RefusingLoop.__init__(self)
        Timetable.__init__(self)
        self.streams = Streams(seed)
        """All randomness of the simulation, except the order of lanes."""
        self.shuffle = shuffle
        self.network: LoopNetwork | None = None
        self.steps = 0
        """Callbacks and events run so far."""
        self._salt = self._salt_of(seed)
        self.now = START_S
        """Loop time, in seconds: what `time()` returns, for the simulation's own parts."""
        self.task_count = 0
        self.future_count = 0
        # Counted separately, because how many futures an asyncio primitive makes differs between versions of Python.
        self._lane_numbers = 0
        self.root = Lane(self, "harness")
        self._runnable: list[Lane] = []
        self._running = False
        self._stopping = False
        self._closed = False
        self._debug = False
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._signals: dict[int, Any] = {}
        self._asyncgens: weakref.WeakKeyDictionary[AsyncGenerator[Any, Any], None] = weakref.WeakKeyDictionary()

    @staticmethod
    def _salt_of(seed: int) -> int:
        return seeded(f"{seed}/loop").getrandbits(64)

    def continue_forked(self, seed: int | None) -> None:
        """Continue in a process that was forked while the loop ran, with another seed from here on; None keeps the
        seed. What has happened or is under way already stays as it is. asyncio considers a loop running only in the
        process that started it, so the loop is registered again here."""
        events._set_running_loop(self)
        if seed is not None:
            self.streams.reseed(seed)
            self._salt = self._salt_of(seed)

    # Lanes

    def next_lane_number(self) -> int:
        """A number for a new lane, in the order of creation."""
        self._lane_numbers += 1
        return self._lane_numbers

    def current_lane(self) -> Lane:
        """The lane of the code that is running."""
        return LANE.get(None) or self.root

    def list_lane(self, lane: Lane) -> None:
        """Mark a lane as runnable: its queue is not empty."""
        lane.listed = True
        self._runnable.append(lane)

    def unlist(self, lane: Lane) -> None:
        """Mark a lane as not runnable."""
        if lane in self._runnable:
            self._runnable.remove(lane)

    def bury(self, lane: Lane) -> None:
        """Close the tasks of a dead lane.

        Left alone, they would end whenever the garbage collector finds them, and run their `finally` blocks in
        whatever context that happens in. So they are closed here, in order, and everything that they still
        schedule is dropped.
        """
        context = copy_context()
        context.run(LANE.set, lane)
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimTask) and task.lane is lane]
        for task in sorted(tasks, key=lambda task: task.number):
            _disown(task)
            coroutine = task.get_coro()
            try:
                if coroutine is not None:
                    context.run(coroutine.close)
            except (Exception, asyncio.CancelledError):
                continue  # a killed process cannot object, even if it has killed itself and is still running

    def kill_lanes(self) -> None:
        """Kill every lane but the harness's own."""
        lanes = {task.lane.number: task.lane for task in asyncio.all_tasks(self) if isinstance(task, SimTask)}
        for number in sorted(lanes):
            if lanes[number] is not self.root:
                lanes[number].kill()

    # Time and scheduling

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None) -> SimHandle:
        if context is None:
            context = copy_context()
        lane = context.get(LANE) or self.root
        handle = _new_handle(SimHandle)  # without `__init__`, which would cost a call: very many are made
        handle._callback = callback
        handle._args = args
        handle._context = context
        handle._cancelled = False
        lane.queue.append(handle)
        if not lane.listed:
            lane.listed = True
            self._runnable.append(lane)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> SimHandle:
        return self.call_soon(callback, *args, context=context)  # there is only one thread

    def call_later(
        self, delay_s: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> SimTimerHandle:
        return self.call_at(self.now + delay_s, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> SimTimerHandle:
        handle = SimTimerHandle(when, callback, args, self, copy_context() if context is None else context)
        due = self.due  # inlined from `event_at`, because a call for each timer would be noticeable
        if when in due:
            due[when] += (handle, None)
        else:
            due[when] = [handle, None]
            heappush(self.times, when)
        return handle

    # Signals of the harness's own process

    def add_signal_handler(self, sig: int, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        """Call back when the harness gets a signal (Ctrl-C). Programs in simulation get none from outside.

        Raises RuntimeError outside the main thread.
        """
        if self.current_lane() is not self.root:
            self.refuse("add_signal_handler", "a program learns from its incarnation that it should stop")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signal handlers can only be set in the main thread")
        context = copy_context()
        before = signal.signal(sig, lambda *_: self.call_soon(callback, *args, context=context))
        self._signals.setdefault(sig, before)

    def remove_signal_handler(self, sig: int) -> bool:
        """Undo `add_signal_handler`; returns whether there was one."""
        if sig not in self._signals:
            return False
        signal.signal(sig, self._signals.pop(sig))
        return True

    # Running

    def run_forever(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if self._running or events._get_running_loop() is not None:
            raise RuntimeError("a simulated loop cannot run inside a running event loop")
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._asyncgen_started, finalizer=self._asyncgen_collected)
        self._running = True
        events._set_running_loop(self)
        try:
            self._run()
        finally:
            self._running = self._stopping = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run(self) -> None:
        runnable = self._runnable
        times, due = self.times, self.due
        run_lane = self._run_shuffled if self.shuffle else self._run_lane
        steps_left = MAX_STEPS_AT_ONE_INSTANT
        while True:
            while runnable:
                lane = runnable.pop() if len(runnable) == 1 else self._choose()
                if len(lane.queue) == 1:  # the usual case
                    lane.listed = False
                    handle = lane.queue.popleft()
                    self.steps += 1
                    steps_left -= 1
                    if not handle._cancelled:
                        try:
                            handle._context.run(handle._callback, *handle._args)
                        except BaseException as error:
                            self._failed(handle, lane, error)
                else:
                    steps_left -= run_lane(lane)
                if self._stopping:
                    return
                if steps_left < 0:
                    self._raise_runaway(lane)
            if not times:
                self._raise_deadlock()
            when = times[0]
            items = due[when]
            if when > self.now:
                # Time does not advance for a cancelled timer alone.
                if items[1] is None and items[0]._cancelled:
                    self._drop_first(when, items)
                    continue
                self.now = when
                steps_left = MAX_STEPS_AT_ONE_INSTANT
            # First everything that is due at this instant becomes ready; then the seed decides the order.
            while True:
                heappop(times)
                del due[when]
                steps_left -= len(items) >> 1
                if len(items) == 2 and items[1] is not None:  # the usual case
                    self.steps += 1
                    items[0](*items[1])
                else:
                    self._run_due(when, items)
                if not times or times[0] > self.now:
                    break
                when = times[0]
                items = due[when]
            if self._stopping:
                return
            if steps_left < 0:
                self._raise_runaway(self.root)

    def _run_due(self, when: float, items: list[Any]) -> None:
        """Run the events that are due, and put the timers that are due into their lanes."""
        at = 0
        try:
            while at < len(items):
                what, args = items[at], items[at + 1]
                at += 2
                if args is not None:
                    self.steps += 1
                    what(*args)
                elif what._cancelled:
                    self._cancelled_timers -= 1
                else:
                    what._scheduled = False
                    lane = what._context.get(LANE) or self.root
                    lane.queue.append(what)
                    if not lane.listed:
                        lane.listed = True
                        self._runnable.append(lane)
        except BaseException:
            self._put_back(when, items[at:])
            raise

    def _choose(self) -> Lane:
        """Take one of several ready lanes, by a hash of the seed, the time and the lane."""
        runnable = self._runnable
        instant = self._salt ^ hash(self.now)
        best = 0
        lowest = _MASK + 1
        for position, lane in enumerate(runnable):
            rank = ((instant + lane.number * 0x9E3779B97F4A7C15) & _MASK) * 0xD6E8FEB86659FD93 & _MASK
            rank = (rank ^ (rank >> 32)) * 0xD6E8FEB86659FD93 & _MASK
            if rank < lowest:
                best, lowest = position, rank
        return runnable.pop(best)

    def _run_lane(self, lane: Lane) -> int:
        """Run what is in a lane's queue now; what is added meanwhile waits for the next turn."""
        lane.listed = False
        queue = lane.queue
        count = len(queue)
        try:
            for _ in range(count):
                if not queue:
                    break  # killed meanwhile
                handle = queue.popleft()
                if handle._cancelled:
                    continue
                try:
                    handle._context.run(handle._callback, *handle._args)
                except BaseException as error:
                    self._failed(handle, lane, error)
        finally:
            self.steps += count
            if queue and not lane.listed:
                self.list_lane(lane)
        return count

    def _run_shuffled(self, lane: Lane) -> int:
        """Like `_run_lane`, with the callbacks of different objects interleaved at random."""
        streams: dict[int, list[SimHandle]] = {}
        for handle in lane.queue:
            streams.setdefault(id(getattr(handle._callback, "__self__", handle)), []).append(handle)
        if len(streams) > 1:
            order = [position for position, stream in enumerate(streams.values()) for _ in stream]
            seeded(f"{self._salt}/{self.now!r}/{lane.number}/{self.steps}").shuffle(order)
            waiting = [iter(stream) for stream in streams.values()]
            shuffled = [next(waiting[position]) for position in order]
            lane.queue.clear()
            lane.queue.extend(shuffled)
        return self._run_lane(lane)

    def _failed(self, handle: SimHandle, lane: Lane, error: BaseException) -> None:
        if isinstance(error, SystemExit) and lane is not self.root:
            lane.exit(error.code)
            return
        if isinstance(error, SystemExit | KeyboardInterrupt | NotSimulated):
            raise error
        report = {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
        handle._context.run(self.call_exception_handler, report)

    def _raise_deadlock(self) -> NoReturn:
        waiting = sorted(
            (f"{task.lane.name}: {task.get_name()}" for task in asyncio.all_tasks(self) if isinstance(task, SimTask)),
        )
        shown = ", ".join(waiting[:20]) + (" ..." if len(waiting) > 20 else "")
        raise Deadlock(
            f"at {self.now - START_S:.6f} s nothing is ready and no timer is set; {len(waiting)} tasks are waiting: "
            f"{shown}"
        )

    def _raise_runaway(self, lane: Lane) -> NoReturn:
        upcoming = ", ".join(repr(handle) for handle in list(lane.queue)[:3])
        raise Runaway(
            f"{MAX_STEPS_AT_ONE_INSTANT} steps at {self.now - START_S:.6f} s without time advancing; "
            f"last in lane {lane.name}, next there: {upcoming or 'nothing'}"
        )

    def run_until_complete(self, future: Any) -> Any:
        is_new = not asyncio.isfuture(future)
        if asyncio.iscoroutine(future):
            task: asyncio.Future[Any] = self.create_task(future)
        else:
            task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._stop_when_done)
        try:
            self.run_forever()
        except BaseException:
            if is_new and task.done() and not task.cancelled():
                task.exception()  # retrieved: the error that is raised here is the one that counts
            raise
        finally:
            task.remove_done_callback(self._stop_when_done)
        if not task.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        return task.result()

    def _stop_when_done(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and isinstance(future.exception(), SystemExit | KeyboardInterrupt):
            return  # run_forever is raising it
        self.stop()

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Drop whatever is left. The harness's own tasks must have ended."""
        if self._running:
            raise RuntimeError("Cannot close a running event loop")
        if self._closed:
            return
        self.root.kill()
        self.kill_lanes()
        for sig in list(self._signals):
            self.remove_signal_handler(sig)
        self._closed = True
        self._runnable.clear()
        self.times.clear()
        self.due.clear()

    async def shutdown_asyncgens(self) -> None:
        generators = list(self._asyncgens)
        self._asyncgens.clear()
        await asyncio.gather(*(generator.aclose() for generator in generators), return_exceptions=True)

    async def shutdown_default_executor(self, timeout_s: float | None = None) -> None:
        """Nothing to do: there are no threads."""

    def _asyncgen_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens[generator] = None

    def _asyncgen_collected(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens.pop(generator, None)
        if not self._closed:
            self.create_task(generator.aclose())

    # Futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        if context is None:
            context = copy_context()
        lane = context.get(LANE)
        if lane is None or not lane.is_dead:
            return SimTask(coro, loop=self, name=name, context=context)
        coro.close()  # it will never run
        task = SimTask(coro, loop=self, name=name, context=context)
        _disown(task)
        return task

    # Errors

    def get_exception_handler(self) -> Any:
        return self._exception_handler

    def set_exception_handler(self, handler: Any) -> None:
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log the error in the log of the host whose code raised it."""
        task = context.get("task") or context.get("future")
        where = copy_context()
        if isinstance(task, SimTask):  # an error that no task awaited may be noticed in any lane
            where.run(LANE.set, task.lane)
        message = context.get("message") or "Unhandled exception in event loop"
        where.run(logger.error, "%s", message, exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._exception_handler is None:
            self.default_exception_handler(context)
        else:
            self._exception_handler(self, context)

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    # The network

    def _network(self) -> LoopNetwork:
        if self.network is None:
            raise NotSimulated("this simulated loop has no network: give it one (SimNetwork(loop))")
        return self.network

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Listen on `port` of the current lane's host. Raises OSError as a kernel would."""
        return self._network().listen(protocol_factory, host, port, **options)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Connect to `port` of the host with the IP address `host`. Raises OSError as a kernel would."""
        return await self._network().connect(protocol_factory, host, port, **options)


def _disown(task: SimTask) -> None:
    """Make asyncio forget a task that will never end, so that it neither waits for the task nor warns about it."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    asyncio.tasks._unregister_task(task)
