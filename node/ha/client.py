"""The slave's side: dials the master, reports what it has, appends what arrives (S4; R: HAClient).

It reports at once when it has more than it last reported, and once per heartbeat interval in any case. What it reports
is as safe as its own flush mode promises. If its log turns out not to be a copy of the master's, it logs that and shows
it in its status, and by default does nothing more: the bytes that the master lacks may be the last copy of acknowledged
messages. If configured to heal, it gives up what the master lacks and follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from node.config_reader import split_address
from node.ha.config import HaTimings
from node.ha.frames import FrameError, FrameReader, encode_report
from node.ha.replica import FIRST_COMPARED_BYTES, BeginsWithin, Diverged, Mismatch, Replica, StartsAt, StreamError
from node.logs import LogLimiter
from node.store.commit_log import CommitLog, LogRefuses

__all__ = ["HAClient"]

logger = logging.getLogger("node.ha")

TIMER_GRAIN_S = 0.001
"""A timer may fire this much early; its event counts as due then."""
PAUSE_AT_BYTES = 8 << 20
"""Bytes received and not yet written: from here on, reading from the connection pauses until they are below half."""


class _Link(asyncio.Protocol):
    """One connection to the master. `ended` gets the error that ended it, or None if it was closed or lost. `on_equal`
    is called when the slave's log was found to be a copy of the master's."""

    def __init__(self, log: CommitLog, replica: Replica, timings: HaTimings, on_equal: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._replica = replica
        self._timings = timings
        self._on_equal = on_equal
        self._was_equal = False
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reported = -1
        self._last_read_s = self._last_write_s = 0.0
        self._is_reading = True
        self.ended: asyncio.Future[Exception | None] = self._loop.create_future()

    @property
    def is_following(self) -> bool:
        return self._replica.is_compared

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._last_read_s = self._loop.time()
        self._report(self._replica.request_position)
        self._arm()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(None)

    def data_received(self, data: bytes) -> None:
        self._last_read_s = self._loop.time()
        if self.ended.done():
            return
        try:
            for frame in self._frames.feed(data):
                self._replica.receive(frame)
        except (FrameError, StreamError, LogRefuses, OSError) as error:
            self._end(error)
            return
        if self._replica.is_compared and not self._was_equal:
            self._was_equal = True
            self._on_equal()
        if self._is_reading and self._log.pending_bytes >= PAUSE_AT_BYTES:
            assert self._transport is not None
            self._is_reading = False
            self._transport.pause_reading()
        self.progressed()

    def progressed(self) -> None:
        """The log has grown, or more of it is safe: report its committed position if that has advanced."""
        if self._transport is None or self._transport.is_closing():
            return
        if not self._is_reading and self._log.pending_bytes < PAUSE_AT_BYTES // 2:
            self._is_reading = True
            self._transport.resume_reading()
        if self._replica.is_compared and self._log.committed_position > self._reported:
            self._report(self._log.committed_position)

    def _report(self, position: int) -> None:
        assert self._transport is not None
        self._reported = position
        self._last_write_s = self._loop.time()
        self._transport.write(encode_report(position))

    def _arm(self) -> None:
        self._timer = self._loop.call_at(min(self._silent_at_s(), self._heartbeat_at_s()), self._tick)

    def _silent_at_s(self) -> float:
        return self._last_read_s + self._timings.housekeeping_s

    def _heartbeat_at_s(self) -> float:
        return self._last_write_s + self._timings.heartbeat_s

    def _tick(self) -> None:
        now_s = self._loop.time() + TIMER_GRAIN_S
        if now_s >= self._silent_at_s():
            self._end(StreamError(f"the master was silent for {self._timings.housekeeping_s:g} s"))
            return
        if now_s >= self._heartbeat_at_s():
            # No report before the logs are compared: the master would take it for an acknowledgement.
            if self._replica.is_compared:
                self._report(self._log.committed_position)
            else:
                self._last_write_s = self._loop.time()
        self._arm()

    def _end(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.ended.done():
            self.ended.set_result(error)
        if self._transport is not None:
            self._transport.abort()

    def abort(self) -> None:
        """Close at once."""
        self._end(None)


class HAClient:
    """Keeps `log` a copy of the master's. `cut(position)` cuts the log and what was derived from it. `settle()` makes
    the derived data follow a cut that it has not followed yet; nothing is added to the log before it has succeeded."""

    def __init__(
        self,
        *,
        log: CommitLog,
        timings: HaTimings,
        cut: Callable[[int], Awaitable[None]],
        settle: Callable[[], Awaitable[None]],
        heals: bool,
    ) -> None:
        self._log = log
        self._timings = timings
        self._cut = cut
        self._settle = settle
        self._heals = heals
        self._address = ""
        self._changed = asyncio.Event()
        self._link: _Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self._master_begin = 0
        """Where the master's log begins, if a request for an earlier position has shown it; else 0."""
        self.trouble = ""
        """Why this log is not being kept a copy; "" while it is, or if nothing is known."""
        self.cut_bytes_total = 0
        """Bytes that were given up because the master lacks them."""

    @property
    def state(self) -> str:
        """One word for the status table."""
        if self.trouble:
            return "REFUSING"
        if self._link is None:
            return "CONNECTING" if self._address else "NO_MASTER"
        return "FOLLOWING" if self._link.is_following else "COMPARING"

    @property
    def master_address(self) -> str:
        return self._address

    def set_master(self, address: str) -> None:
        """Copy the log of the master at `address`; "" if there is none."""
        if address != self._address:
            logger.info("the master's log is at %s", address or "no known place")
            self._address = address
            self._master_begin = 0
            self.trouble = ""
            self._changed.set()
            if self._link is not None:
                self._link.abort()

    def progressed(self) -> None:
        """The log has grown, or more of it is safe."""
        if self._link is not None:
            self._link.progressed()

    def start(self) -> None:
        """Start following."""
        self._task = asyncio.get_running_loop().create_task(self._follow_forever())

    async def stop(self) -> None:
        """Stop following."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow_forever(self) -> None:
        compare_bytes = FIRST_COMPARED_BYTES
        while True:
            self._changed.clear()
            error: Exception | None = None
            if self._address:
                try:
                    await self._settle()
                    error = await self._follow(compare_bytes)
                except OSError as failure:
                    error = failure
                except Exception as failure:  # if this task ended, nothing would be copied any more
                    logger.exception("following the master at %s met an error of its own", self._address)
                    error = failure
                if isinstance(error, StartsAt):
                    error = await self._try_cut(error.position)
                    if error is None:
                        continue
                if isinstance(error, BeginsWithin):
                    continue
                self._master_begin = 0
                if isinstance(error, Diverged) and not error.is_certain:
                    compare_bytes *= 2
                    continue
                compare_bytes = FIRST_COMPARED_BYTES
                if isinstance(error, Mismatch) and await self._mismatched(error):
                    continue
            if error is not None and not isinstance(error, Mismatch):
                self._complaints.warning(logger, "link", "master at %s: %s", self._address, error)
            try:
                async with asyncio.timeout(self._timings.retry_s if self._address else None):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _follow(self, compare_bytes: int) -> Exception | None:
        """Follow over one connection until it ends; returns why it ended. Raises OSError."""
        address = self._address
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        replica = Replica(self._log, compare_bytes=compare_bytes, master_begin=self._master_begin)
        link = _Link(self._log, replica, self._timings, self._found_equal)
        try:
            async with asyncio.timeout(self._timings.retry_s):
                await loop.create_connection(lambda: link, host, port)
        except TimeoutError:
            link.abort()
            return StreamError(f"no connection within {self._timings.retry_s:g} s")
        self._link = link
        if self._address != address:  # while dialling, there was no link to abort
            link.abort()
        try:
            error = await link.ended
            if isinstance(error, BeginsWithin) and self._address == address:
                self._master_begin = error.position
            return error
        finally:
            self._link = None
            link.abort()

    def _found_equal(self) -> None:
        if self.trouble:
            logger.info("this log is a copy of the master's again")
        self.trouble = ""

    async def _mismatched(self, error: Mismatch) -> bool:
        """Heal, if this slave may; returns whether it did."""
        if not self._heals:
            self.trouble = str(error)
            self._complaints.warning(
                logger, "mismatch", "this slave does not follow: %s; give it another master, set ha_mismatch = \"heal\""
                " to give up what the master lacks, or empty its data directory", error,
            )  # fmt: skip
            return False
        keep = error.keep_position if error.keep_position is not None else 0
        given_up = self._log.end_position - max(keep, self._log.begin_position)
        logger.warning("%s; giving up %d bytes from %d on", error, given_up, max(keep, self._log.begin_position))
        failure = await self._try_cut(keep)
        if failure is not None:
            self._complaints.warning(logger, "cut", "the log could not be cut: %s", failure)
            return False
        self.cut_bytes_total += given_up
        return True

    async def _try_cut(self, position: int) -> Exception | None:
        try:
            await self._cut(position)
        except OSError as error:
            return error
        except Exception as error:  # if this task ended, nothing would be copied any more
            logger.exception("cutting the log at %d met an error of its own", position)
            return error
        return None
