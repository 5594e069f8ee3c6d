"""What a listening and a dialling side have in common: processors, limits, and the sums over connections."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable
from typing import Any

from node.remoting.accounting import ByteAccount
from node.remoting.codes import ResponseCode
from node.remoting.command import Command
from node.remoting.complaints import Complaints
from node.remoting.connection import Connection
from node.remoting.header_template import VariableFields
from node.remoting.limits import ConnectionLimits
from node.remoting.processing import BatchProcessor, Guard, Processor, Reply

__all__ = ["Endpoint", "tls_options"]


def tls_options(context: ssl.SSLContext | None, limits: ConnectionLimits) -> dict[str, Any]:
    """What the loop's create_server and create_connection are told of TLS: nothing at all where there is none."""
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
    """Holds what connections share. Connections report to it; subclasses decide what becomes of them."""

    stops_reading_when_unread = False
    """Whether a peer that does not take what is sent to it is not read either. A server must: each request read
    makes another reply. A client must not: two ends that both wait for the other to read wait for ever."""

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
        """Read requests of `code` by a template of their headers, and let `batch_processor` have those that come
        together before `processor` sees one of them; not where there is a guard, which looks at each."""
        self.variable_fields[int(code)] = variable
        if batch_processor is not None:
            self.batch_processors[int(code)] = batch_processor

    def register_guard(self, guard: Guard) -> None:
        """Let `guard` look at every request before its processor does; what it raises is the answer."""
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
        """Hand what `connection` has queued to its transport at the end of this turn of the loop, together with what
        others have: a message to all peers takes one callback."""
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
        `finished` is called with it, and is cancelled when the endpoint stops; a future belongs to who made it."""
        future: asyncio.Future[Reply] = asyncio.ensure_future(result)
        if future is not result:
            self._tasks[future] = None
        return future

    def finished(self, future: asyncio.Future[Reply]) -> None:
        """What `run` returned is done."""
        self._tasks.pop(future, None)

    def wait_for_room(self, connection: Connection) -> None:
        """`connection` has requests to run when the bytes being worked on over all connections allow it."""
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
