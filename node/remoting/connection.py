"""One connection of the remoting protocol, the same on the listening and the dialling side, and the state that all
connections of one side share.

Requests that arrive go to the endpoint's processors; replies that arrive go to whoever sent the request with
that opaque. A processor that answers at once or returns a DeferredReply costs no task; if it returns an awaitable, the
reply is sent when that is done, in any order. All frames that are queued within one turn of the loop leave in one
write.

What a peer can make the node hold is bounded (`limits.py`). Timers are armed lazily: one for idleness that
looks at the time of the last byte when it fires, one while a frame is incomplete, one while the peer does not
read.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

from node.interpreter import IS_PYPY
from node.remoting.accounting import ByteAccount
from node.remoting.codec import FrameParser, encode
from node.remoting.codes import ResponseCode
from node.remoting.command import FLAG_ONEWAY, FLAG_RESPONSE, Command, FrameError
from node.remoting.complaints import Complaints
from node.remoting.deferred_reply import DeferredReply
from node.remoting.errors import ConnectionLost, PeerOverloaded
from node.remoting.header_template import TemplateRequest, VariableFields
from node.remoting.limits import ConnectionLimits
from node.remoting.outstanding import OutcomeCallback, Outstanding, settle
from node.remoting.processing import Reply, failure_reply, size_of

__all__ = ["BatchProcessor", "Connection", "Endpoint", "Guard", "Processor", "peer_name", "tls_options"]

GONE = "a peer that is gone"
PYPY_RECEIVE_BYTES = 64 * 1024
"""Most bytes of one read on PyPy, which allocates as much for every read, whatever arrives; asyncio reads 256 KiB. On
CPython a quarter costs batches a tenth of their rate: fewer of their requests are handled together."""

_PAUSED_BY_REQUESTS, _PAUSED_BY_WRITES, _PAUSED_BY_TURN = 1, 2, 4

Processor = Callable[[Command, "Connection"], Reply | Awaitable[Reply]]
Guard = Callable[[Command, "Connection"], None]
"""Raises a RequestError if a request may not be processed."""
BatchProcessor = Callable[[Sequence[TemplateRequest], "Connection"], DeferredReply | None]
"""Processes the first few of some requests of one code together (the reply's `requests`); returns None if even the
first one is to be processed alone."""


class Connection(asyncio.Protocol):
    """A connection to a peer. Made by a `RemotingServer` or `RemotingClient`, used by processors.

    `state` is for the processors: whatever they want to remember about this peer. `address` is what was dialled, if
    this side dialled: it names a peer that is gone before its own address could be read.
    """

    def __init__(self, endpoint: Endpoint, address: str = GONE) -> None:
        self._endpoint = endpoint
        self._limits = endpoint.limits
        self._processors = endpoint.processors
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        limits = self._limits
        self._parser = FrameParser(limits.max_frame_bytes, limits.max_header_bytes, endpoint.variable_fields)
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._flush_scheduled = False
        self._in_turn = False
        self._backlog: deque[Command] = deque()
        self._running_requests = 0
        self._running_bytes = 0
        self._backlog_bytes = 0
        self._pause_reasons = 0
        self._writing_paused = False
        self._waiting = Outstanding(self.loop, lambda: self.remote_address, self._timed_out)
        self._silent_timeouts = 0
        self.last_activity_s = self.loop.time()
        """Loop time of the last byte received or handed to the transport."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._frames = _FrameWatch(self, endpoint)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._close_callbacks: list[Callable[[Connection], object]] = []
        self._close_reason = ""
        self.is_closing = False
        """True from the moment `close` or `abort` was called or the peer went away."""
        self.remote_address = address
        self.received_frames = 0
        self.state: dict[str, Any] = {}

    # What processors and clients call

    @property
    def outstanding_requests(self) -> int:
        """Requests sent over this connection and not answered yet."""
        return len(self._waiting.waiting)

    @property
    def pending_bytes(self) -> int:
        """Bytes held of a frame that is not complete yet."""
        return self._parser.pending_bytes

    @property
    def is_paused(self) -> bool:
        """Whether we do not read what the peer sends."""
        return self._pause_reasons != 0

    def send(self, command: Command) -> None:
        """Queue a command for the peer: a late reply, or a one-way request of our own. No error when the
        connection is closed (the peer will never know). Raises FrameError when the command is too large."""
        if not self.is_closing:
            self._write(encode(command))

    def invoke(self, command: Command, *, timeout_ms: float) -> asyncio.Future[Command]:
        """Send a request (its `opaque` is set here); the future gives the reply.

        The future fails with RequestTimeout or ConnectionLost (indefinite). Raises ConnectionLost,
        PeerOverloaded or FrameError at once when nothing was sent.
        """
        future: asyncio.Future[Command] = self.loop.create_future()
        self.ask(command, partial(settle, future), timeout_ms=timeout_ms)
        return future

    def ask(self, command: Command, on_done: OutcomeCallback, *, timeout_ms: float, at_once: bool = False) -> None:
        """Like `invoke`, without a future: `on_done` is called with the reply, in the turn of the loop in which it
        arrives, or with RequestTimeout or ConnectionLost. Errors raised here are not passed to `on_done`. `at_once`:
        write the frame now, because no other request follows in this turn that could share the write."""
        if self.is_closing:
            error = ConnectionLost(f"the connection to {self.remote_address} is closed")
            error.is_definite = True
            raise error
        waiting = self._waiting
        count = len(waiting.waiting)
        if count >= self._limits.max_outstanding_requests:
            raise PeerOverloaded(f"{count} requests to {self.remote_address} are unanswered")
        may_be_full = self._writing_paused or self._outgoing_bytes > self._limits.write_high_water_bytes
        if may_be_full and self._unsent_bytes() > self._limits.max_unsent_bytes:
            raise PeerOverloaded(f"{self._unsent_bytes()} bytes to {self.remote_address} are unsent")
        opaque = command.opaque = waiting.next_opaque()
        frame = encode(command)
        waiting.add(opaque, timeout_ms, on_done)
        self._write(frame, at_once or not count)

    def on_close(self, callback: Callable[[Connection], object]) -> None:
        """Call `callback(connection)` once when the connection is gone; in the next turn if it already is."""
        if self.is_closing and self._transport is None:
            self.loop.call_soon(callback, self)
        else:
            self._close_callbacks.append(callback)

    def close(self) -> None:
        """Close after what is queued has been sent. Idempotent."""
        if self.is_closing:
            return
        self.flush()
        self.is_closing = True
        if self._transport is not None:
            if self._idle_timer is not None:
                self._idle_timer.cancel()
            linger_s = self._limits.close_linger_s
            self._idle_timer = self.loop.call_later(linger_s, self.abort, "did not drain while closing")
            self._transport.close()

    def abort(self, reason: str = "") -> None:
        """Close at once; what is unsent is lost. Idempotent."""
        self._close_reason = self._close_reason or reason
        self.is_closing = True
        self._outgoing.clear()
        self._outgoing_bytes = 0
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.remote_address = peer_name(transport, self.remote_address)
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water_bytes)
        if IS_PYPY and hasattr(transport, "max_size"):  # asyncio's own transports have it
            transport.max_size = PYPY_RECEIVE_BYTES
        self._idle_timer = self.loop.call_later(self._limits.idle_timeout_s, self._check_idle)
        self._endpoint.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        if self.is_closing:
            return
        self.last_activity_s = self.loop.time()
        self._silent_timeouts = 0
        failure: FrameError | None = None
        try:
            commands = self._parser.feed(data)
        except FrameError as error:
            failure = error
            commands = error.commands
        if commands:
            if not self.received_frames:
                self._endpoint.first_frame(self)
            self.received_frames += len(commands)
            self._in_turn = True
            try:
                first = commands[0]
                if len(commands) > 1:
                    self._dispatch_all(commands)
                elif first.flag & FLAG_RESPONSE:
                    self._waiting.answered(first)
                elif first.__class__ is not Command or self._backlog or self._pause_reasons or self._running_requests:
                    self._dispatch_all(commands)
                else:
                    self._dispatch(first)
            finally:
                self._in_turn = False
            if self._outgoing:
                self.flush()
        if failure is not None:
            self._endpoint.complaints.warn("frame", f"closing {self.remote_address}: {failure}")
            self._close_reason = str(failure)
            self.close()
        elif self._parser.pending_bytes or self._frames.is_unfinished:
            self._frames.look(bool(commands))

    def eof_received(self) -> bool:
        """The peer sends no more: in this protocol it wants no answers either, so the transport may close."""
        self.flush()
        self.is_closing = True
        return False

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._endpoint.stops_reading_when_unread:
            self._pause(_PAUSED_BY_WRITES)
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(
                self._limits.write_stall_timeout_s,
                self.give_up,
                f"the peer has not read for {self._limits.write_stall_timeout_s:g} s",
            )
        self._check_unsent()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        self._writing_paused = False
        self._endpoint.unsent.set(self, 0)
        if self._pause_reasons & _PAUSED_BY_WRITES:
            self._resume(_PAUSED_BY_WRITES)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closing = True
        self._transport = None
        for timer in filter(None, (self._idle_timer, self._stall_timer)):
            timer.cancel()
        self._idle_timer = self._stall_timer = None
        self._frames.end()
        self._outgoing.clear()
        self._backlog.clear()
        self._account_requests(backlog_change=-self._backlog_bytes)
        self._endpoint.unsent.set(self, 0)
        reason = self._close_reason or (str(exc) if exc is not None else "closed by the peer")
        self._waiting.fail_all(lambda: ConnectionLost(f"connection to {self.remote_address} lost: {reason}"))
        self._endpoint.connection_closed(self)
        callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:
                self._endpoint.complaints.warn("callback", f"a close callback failed: {error}", error=error)

    # Requests and replies that arrive

    def _dispatch_all(self, commands: list[Command]) -> None:
        left = self._limits.max_turn_requests
        at = together_at = 0
        alone = 1
        while at < len(commands):
            command = commands[at]
            count = 1
            if self.is_closing:
                return
            if command.flag & FLAG_RESPONSE:
                self._waiting.answered(command)
            elif not left or self._backlog or self._pause_reasons or (self._running_requests and not self._has_room()):
                self._backlog.append(command)
                self._account_requests(backlog_change=size_of(command))
            else:
                if command.__class__ is not TemplateRequest or at < together_at:
                    self._dispatch(command)
                elif not (count := self._process_together(commands, at, left)):
                    together_at, alone, count = at + alone, 2 * alone, 1  # back off after a refusal
                    self._dispatch(command)
                left -= count
            at += count
        if self._backlog and not self._pause_reasons:
            self._pause_for_room(bool(left))

    def _has_room(self) -> bool:
        limits = self._limits
        return (
            self._running_requests < limits.max_running_requests
            and self._running_bytes < limits.max_running_bytes
            # Each connection may always run one, so that a few greedy peers cannot shut out the others.
            and (self._endpoint.running_bytes < limits.max_total_running_bytes or not self._running_requests)
        )

    def _process_together(self, commands: list[Command], at: int, left: int) -> int:
        """Offer requests of one code that came together, from `at` on and at most `left`, to their batch processor;
        returns how many it took."""
        endpoint, code = self._endpoint, commands[at].code
        batch_processor = endpoint.batch_processors.get(code)
        if batch_processor is None or endpoint.guard is not None:
            return 0
        room = max(self._limits.max_running_requests - self._running_requests, 1)
        requests: list[TemplateRequest] = []
        for command in commands[at : at + min(left, room)]:
            if not isinstance(command, TemplateRequest) or command.code != code:
                break
            requests.append(command)
        reply = batch_processor(requests, self)
        if reply is None:
            return 0
        count = len(reply.requests)
        size_bytes = sum([request.size_bytes for request in requests[:count]])
        if not reply.attach(self, size_bytes):
            self._running_requests += count
            self._account_requests(running_change=size_bytes)
        return count

    def _dispatch(self, command: Command) -> None:
        processor = self._processors.get(command.code) or self._endpoint.default_processor
        try:
            if self._endpoint.guard is not None:
                self._endpoint.guard(command, self)
            result = processor(command, self)
        except Exception as error:
            result = self._failure_reply(command, error)
        if result is None:
            return
        if isinstance(result, Command):
            self.write_reply((command,), result)
            if self._outgoing_bytes > self._limits.write_high_water_bytes:
                self.flush()  # pauses reading if the peer takes replies more slowly than we make them
            return
        size_bytes = size_of(command)
        if isinstance(result, DeferredReply):
            if result.attach(self, size_bytes):
                return  # sent already
        else:
            self._endpoint.run(result).add_done_callback(partial(self._finish, command, size_bytes))
        self._running_requests += 1
        self._account_requests(running_change=size_bytes)

    def _account_requests(self, *, running_change: int = 0, backlog_change: int = 0) -> None:
        """Count bytes of requests that are being processed or wait, here and over all connections."""
        endpoint = self._endpoint
        held = endpoint.held
        before_bytes = self._running_bytes + self._backlog_bytes
        self._running_bytes += running_change
        endpoint.running_bytes += running_change
        self._backlog_bytes += backlog_change
        held.change(self, before_bytes, before_bytes + running_change + backlog_change)
        if held.total_bytes > self._limits.max_total_held_bytes:
            greediest = held.greediest()
            if greediest is not None and not greediest.is_closing:
                greediest.give_up("too many bytes of unanswered requests, most of them here")

    def _finish(self, command: Command, size_bytes: int, future: asyncio.Future[Reply]) -> None:
        self._endpoint.finished(future)
        if future.cancelled():
            result: Reply = command.reply(ResponseCode.SYSTEM_ERROR, remark="the request was cancelled")
        else:
            error = future.exception()
            result = future.result() if error is None else self._failure_reply(command, error)
        if isinstance(result, DeferredReply):
            if not result.attach(self, size_bytes):
                return
            result = None
        self._end((command,), size_bytes, result)

    def end_deferred(self, deferred: DeferredReply, reply: Command | bytes) -> None:
        """Send a deferred reply; its requests are done."""
        self._end(deferred.requests, deferred.size_bytes, reply)

    def _end(self, requests: Sequence[Command], size_bytes: int, reply: Command | bytes | None) -> None:
        self._running_requests -= len(requests)
        self._account_requests(running_change=-size_bytes)
        if reply is not None:
            self.write_reply(requests, reply, not self._running_requests)
        self._has_ended()

    def _has_ended(self) -> None:
        if self._pause_reasons & _PAUSED_BY_REQUESTS:
            self.retry_backlog()
        if self._endpoint.waiting_for_room:
            self._endpoint.room_made()

    def write_reply(self, requests: Sequence[Command], reply: Command | bytes, is_alone: bool = False) -> None:
        """Send the reply to a single request, unless that is one-way, or the whole frames of the replies to several
        requests, none of which may be one-way. `is_alone`: see `_write`."""
        if self.is_closing or requests[0].flag & FLAG_ONEWAY:
            return
        try:
            frames = reply if isinstance(reply, bytes) else encode(reply)
        except FrameError as error:
            frames = encode(self._failure_reply(requests[0], error))
        self._write(frames, is_alone)

    def _failure_reply(self, command: Command, error: BaseException) -> Command:
        return failure_reply(command, error, self.remote_address, self._endpoint.complaints)

    def _timed_out(self, count: int) -> None:
        self._silent_timeouts += count
        if self._silent_timeouts >= self._limits.max_silent_timeouts:
            self.abort(f"silent through {self._silent_timeouts} timeouts")

    # Flow control

    def _pause(self, reason: int) -> None:
        if not self._pause_reasons and self._transport is not None and not self.is_closing:
            self._transport.pause_reading()
        self._pause_reasons |= reason

    def _pause_for_room(self, is_full: bool) -> None:
        """Start no more requests until there is room, if `is_full`; otherwise this turn is over: until the next one."""
        if not is_full:
            self._pause(_PAUSED_BY_TURN)
            self.loop.call_soon(self._resume, _PAUSED_BY_TURN)
            return
        self._pause(_PAUSED_BY_REQUESTS)
        if self._endpoint.running_bytes >= self._limits.max_total_running_bytes:
            self._endpoint.wait_for_room(self)

    def retry_backlog(self) -> None:
        """Resume requests that waited for room, if there is some now."""
        if not self._pause_reasons & _PAUSED_BY_REQUESTS:
            return
        if self._has_room():
            self._resume(_PAUSED_BY_REQUESTS)
        elif self._endpoint.running_bytes >= self._limits.max_total_running_bytes:
            self._endpoint.wait_for_room(self)

    def _resume(self, reason: int) -> None:
        """Withdraw one reason for not reading; if it was the last, work off the backlog and read again."""
        self._pause_reasons &= ~reason
        backlog = self._backlog
        left = self._limits.max_turn_requests
        while backlog and not self._pause_reasons and not self.is_closing:
            if not left or not self._has_room():
                self._pause_reasons = _PAUSED_BY_REQUESTS if left else _PAUSED_BY_TURN  # reading was not resumed yet
                self._pause_for_room(bool(left))
                return
            left -= 1
            command = backlog.popleft()
            self._account_requests(backlog_change=-size_of(command))
            self._dispatch(command)
        if not self._pause_reasons and self._transport is not None and not self.is_closing:
            self._transport.resume_reading()
            self.last_activity_s = self.loop.time()
            self._frames.begin_again()

    def _write(self, frame: bytes, is_alone: bool = False) -> None:
        """Queue a frame until the turn is over; write it at once if it `is_alone`, with no other frame to wait for."""
        transport = self._transport
        if self._in_turn or self._flush_scheduled or not is_alone or self._outgoing or transport is None:
            self._outgoing.append(frame)
            self._outgoing_bytes += len(frame)
            if not self._in_turn and not self._flush_scheduled:
                self._flush_scheduled = True
                self._endpoint.flush_soon(self)
        elif not self.is_closing:
            self.last_activity_s = self.loop.time()
            transport.write(frame)
            if self._writing_paused:
                self._check_unsent()

    def flush(self) -> None:
        """Pass queued frames to the transport."""
        self._flush_scheduled = False
        outgoing = self._outgoing
        if not outgoing or self._transport is None or self.is_closing:
            return
        data = outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)
        outgoing.clear()
        self._outgoing_bytes = 0
        self.last_activity_s = self.loop.time()
        self._transport.write(data)
        if self._writing_paused:
            self._check_unsent()

    def _unsent_bytes(self) -> int:
        buffered = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return buffered + self._outgoing_bytes

    def _check_unsent(self) -> None:
        unsent_bytes = self._unsent_bytes()
        if unsent_bytes > self._limits.max_unsent_bytes:
            self.give_up(f"{unsent_bytes} bytes are unsent and the peer does not read")
            return
        self._endpoint.unsent.set(self, unsent_bytes)
        is_too_much = self._endpoint.unsent.total_bytes > self._limits.max_total_unsent_bytes
        if is_too_much and (greediest := self._endpoint.unsent.greediest()) is not None:
            greediest.give_up("too many bytes are unsent over all connections, most of them here")

    def give_up(self, reason: str) -> None:
        """Close at once, and log why."""
        self._endpoint.complaints.warn("closed", f"closing {self.remote_address}: {reason}")
        self.abort(reason)

    # Timers

    def _check_idle(self) -> None:
        left_s = self.last_activity_s + self._limits.idle_timeout_s - self.loop.time()
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._check_idle)
            return
        self._close_reason = f"idle for {self._limits.idle_timeout_s:g} s"
        self.close()


class _FrameWatch:
    """The unfinished frame of one connection: its account and its timer. A frame that was begun must be complete in
    time: trickling bytes must not hold memory for ever."""

    __slots__ = ("_connection", "_endpoint", "_started_s", "_timer", "is_unfinished")

    def __init__(self, connection: Connection, endpoint: Endpoint) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._started_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_unfinished = False
        """Whether there was an unfinished frame when `look` was last called."""

    def look(self, frame_completed: bool) -> None:
        """Update the account and the timer of the unfinished frame after new bytes have come."""
        connection, endpoint = self._connection, self._endpoint
        pending_bytes = connection.pending_bytes
        if frame_completed or not self.is_unfinished:
            self._started_s = connection.last_activity_s
        self.is_unfinished = pending_bytes > 0
        endpoint.unfinished.set(connection, pending_bytes)
        if endpoint.unfinished.total_bytes > endpoint.limits.max_total_unfinished_bytes:
            greediest = endpoint.unfinished.greediest()
            if greediest is not None:
                greediest.give_up("too many bytes of unfinished frames, most of them here")
        if connection.is_closing:
            return
        if pending_bytes and self._timer is None:
            self._timer = connection.loop.call_later(endpoint.limits.frame_timeout_s, self._check)

    def begin_again(self) -> None:
        """Reading was resumed after a pause: the time counts from now."""
        self._started_s = self._connection.loop.time()

    def end(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._endpoint.unfinished.set(self._connection, 0)

    def _check(self) -> None:
        self._timer = None
        connection, limits = self._connection, self._endpoint.limits
        pending_bytes = connection.pending_bytes
        if not pending_bytes or connection.is_closing:
            return
        now_s = connection.loop.time()
        allowed_s = limits.frame_timeout_s + pending_bytes / limits.frame_min_bytes_per_s
        left_s = self._started_s + allowed_s - now_s
        if connection.is_paused:  # it is we who do not read
            left_s = limits.frame_timeout_s
        if left_s <= 0:
            connection.give_up(f"a frame was begun {now_s - self._started_s:.1f} s ago and is not complete")
            return
        self._timer = connection.loop.call_later(left_s, self._check)


def peer_name(transport: asyncio.BaseTransport, otherwise: str = GONE) -> str:
    """The address at the other end; `otherwise` if the peer has already reset the connection and it is unknown."""
    peer = transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else otherwise


def tls_options(context: ssl.SSLContext | None, limits: ConnectionLimits) -> dict[str, Any]:
    """TLS arguments for the loop's create_connection; empty without TLS."""
    if context is None:
        return {}
    return {
        "ssl": context,
        "ssl_handshake_timeout": limits.tls_handshake_timeout_s,
        "ssl_shutdown_timeout": limits.close_linger_s,
    }


def _not_supported(command: Command, connection: Connection) -> Command:
    return command.reply(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"request code {command.code} is not supported here"
    )


class Endpoint:
    """State that connections share. Connections report to it; subclasses decide what becomes of them."""

    stops_reading_when_unread = False
    """Whether to stop reading from a peer that does not take what is sent to it. A server must: each request it reads
    makes another reply. A client must not: two ends that each wait for the other to read wait for ever."""

    def __init__(self, limits: ConnectionLimits, name: str) -> None:
        self.limits = limits
        self.processors: dict[int, Processor] = {}
        self.default_processor: Processor = _not_supported
        self.batch_processors: dict[int, BatchProcessor] = {}
        self.variable_fields: dict[int, VariableFields] = {}
        self.guard: Guard | None = None
        self.complaints = Complaints(
            logging.getLogger(f"node.remoting.{name}"), lambda: asyncio.get_running_loop().time()
        )
        self.unfinished: ByteAccount[Connection] = ByteAccount()
        self.held: ByteAccount[Connection] = ByteAccount()
        self.unsent: ByteAccount[Connection] = ByteAccount()
        self.running_bytes = 0
        self._tasks: dict[asyncio.Future[Reply], None] = {}
        self.waiting_for_room: dict[Connection, None] = {}
        self._to_flush: list[Connection] = []

    def register(self, code: int, processor: Processor) -> None:
        """Answer requests of `code` with `processor`; a later registration replaces an earlier one."""
        self.processors[int(code)] = processor

    def register_default(self, processor: Processor) -> None:
        """Answer requests of every other code with `processor` instead of REQUEST_CODE_NOT_SUPPORTED."""
        self.default_processor = processor

    def register_template(
        self, code: int, variable: VariableFields, batch_processor: BatchProcessor | None = None
    ) -> None:
        """Read requests of `code` by a template of their headers, and offer those that come together to
        `batch_processor` before `processor` sees any of them; not if there is a guard, which checks each one."""
        self.variable_fields[int(code)] = variable
        if batch_processor is not None:
            self.batch_processors[int(code)] = batch_processor

    def register_guard(self, guard: Guard) -> None:
        """Let `guard` check every request before its processor runs; what it raises is the answer."""
        self.guard = guard

    # Called by connections

    def connection_opened(self, connection: Connection) -> None:
        """A connection is usable from now on."""

    def first_frame(self, connection: Connection) -> None:
        """A connection has sent its first whole frame."""

    def connection_closed(self, connection: Connection) -> None:
        """A connection is gone."""
        self.waiting_for_room.pop(connection, None)

    def flush_soon(self, connection: Connection) -> None:
        """Flush `connection` at the end of this turn of the loop, together with others: a message to all peers takes
        one callback."""
        if not self._to_flush:
            connection.loop.call_soon(self._flush)
        self._to_flush.append(connection)

    def _flush(self) -> None:
        connections, self._to_flush = self._to_flush, []
        for connection in connections:
            try:
                connection.flush()
            except Exception as error:
                self.complaints.warn("flush", f"cannot write to {connection.remote_address}: {error}", error=error)

    def run(self, result: Awaitable[Reply]) -> asyncio.Future[Reply]:
        """The future of what an asynchronous processor returned. A coroutine becomes a task that is kept until
        `finished` is called with it, and is cancelled when the endpoint stops; a future belongs to whoever made it."""
        future: asyncio.Future[Reply] = asyncio.ensure_future(result)
        if future is not result:
            self._tasks[future] = None
        return future

    def finished(self, future: asyncio.Future[Reply]) -> None:
        """The future that `run` returned is done."""
        self._tasks.pop(future, None)

    def wait_for_room(self, connection: Connection) -> None:
        """`connection` has requests to run once the bytes being worked on over all connections allow it."""
        self.waiting_for_room[connection] = None

    def room_made(self) -> None:
        """A request is done: let connections that wait for room go on, the longest waiting first."""
        waiting = self.waiting_for_room
        for _ in range(len(waiting)):
            if self.running_bytes >= self.limits.max_total_running_bytes:
                return
            connection = next(iter(waiting))
            del waiting[connection]
            connection.retry_backlog()

    async def cancel_tasks(self) -> None:
        """Cancel the requests being worked on and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
