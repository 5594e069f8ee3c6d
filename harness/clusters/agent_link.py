"""The harness's end of an agent: requests, answers and events over a connection that may break.

A link connects when it is opened and again whenever the connection breaks, with a growing pause. Pending requests are
then sent again under the same ids, and the agent performs each of them once (see host_agent). So a lost connection
costs only time, until a request times out.

Connections are blocking byte streams, because that is what the libraries for Docker and SSH provide; each is read by a
thread of its own, which passes complete lines to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from harness.clusters.host_agent import MAX_LINE_BYTES
from harness.clusters.threads import begin_in_thread, to_its_end
from nemesis.mechanisms.shell import ShellError

__all__ = ["DEFAULT_TIMEOUT_S", "FIRST_WORD_TIMEOUT_S", "AgentGone", "AgentLink", "ByteStream", "ConnectFailure"]

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 20.0
MAX_PENDING = 1000
"""Requests pending at a time on one link; the harness has a handful, so more are a bug in the harness."""
_GRACE_S = 5.0
"""Added to a command's own timeout, for the round trip and one reconnection."""
_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_PING_S = 3.0
"""Interval between pings of the agent: TCP alone does not notice a path that went silent."""
_SILENCE_S = 12.0
"""After this long without a byte, a connection is dropped and made anew."""
FIRST_WORD_TIMEOUT_S = 90.0
"""Time for the first answer on a new connection: even an emulated or overloaded machine starts its end within this."""
_UNREACHABLE = 255

Message = dict[str, Any]


class ByteStream(Protocol):
    """A connection to an agent's relay; every method may block and is called from a thread."""

    def receive(self) -> bytes:
        """Receive some bytes; empty at the end."""
        ...

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError."""
        ...

    def close(self) -> None:
        """Close the connection; a `receive` that is under way returns. Idempotent."""
        ...


class ConnectFailure(Exception):
    """No connection could be made; the message is one line. A retry may succeed unless the host is `gone`."""

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class AgentGone(ShellError):
    """The agent itself has ended, and its programs with it: its host was restarted or taken down."""


class AgentLink:
    """Requests to one host's agent.

    `connect` makes a connection; it is called in a thread and raises ConnectFailure. `on_event` is called on the
    loop for each event, and with {"event": "connected"} after each new connection: events may have been missed before
    it. {"event": "gone"} means that the agent has ended.
    """

    def __init__(self, host: str, connect: Callable[[], ByteStream], on_event: Callable[[Message], None]) -> None:
        self.host = host
        self._connect = connect
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._pending: dict[str, tuple[bytes, asyncio.Future[Message]]] = {}
        self._stream: ByteStream | None = None
        self._connector: asyncio.Task[None] | None = None
        self._send_lock = asyncio.Lock()
        self._trouble = "not connected yet"
        self._gone = False
        self._session = ""
        self._connection_count = 0
        self._heard_s = 0.0
        self.directory = ""
        """The agent's own directory on the host, as the host resolves it; set by `greet`."""
        self.python = ""
        """The Python interpreter there; set by `greet`."""

    @property
    def connection_count(self) -> int:
        """How many connections were made so far. If this has changed, events may have been lost in between."""
        return self._connection_count

    def open(self, session: str) -> None:
        """Begin to connect. `session` prefixes every request id and is unique among harnesses that use the agent."""
        self._session = session
        self._connector = asyncio.ensure_future(self._keep_connected())

    async def greet(self) -> Message:
        """Exchange the first message: learn the agent's directory and interpreter. Raises ShellError."""
        hello = await self.request("hello", timeout_s=FIRST_WORD_TIMEOUT_S)
        self.directory, self.python = str(hello["directory"]), str(hello["interpreter"])
        return hello

    async def close(self) -> None:
        """End the connection; open requests fail. Idempotent."""
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.cancel()
            if self._stream is not None:
                await begin_in_thread(self._stream.close)
            await asyncio.gather(connector, return_exceptions=True)
        self._fail_pending("the link was closed")

    async def request(
        self, op: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Message:
        """Request an operation of the agent (see host_agent.Agent) and return its answer.

        Raises AgentGone when the agent has ended; ShellError when it refuses or no answer comes in time (the operation
        may have been done even so).
        """
        if self._gone:
            raise AgentGone(self.host, [op], _UNREACHABLE, "the agent on this host has ended")
        if self._connector is None or len(self._pending) >= MAX_PENDING:
            why = "the link to the agent on this host is not open, or has too many pending requests"
            raise ShellError(self.host, [op], _UNREACHABLE, why)
        ident = f"{self._session}-{next(self._numbers)}"
        message = {"id": ident, "op": op, "arguments": dict(arguments or {})}
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[ident] = (line, answer)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(line)
                reply = await answer
        except TimeoutError:
            why = f"no answer within {timeout_s:g} s"
            if self._stream is None:
                why += f" ({self._trouble})"
            raise ShellError(self.host, [op], _UNREACHABLE, why) from None
        finally:
            self._pending.pop(ident, None)
        if "error" in reply:
            raise ShellError(self.host, [op], 1, str(reply["error"]))
        return reply

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, str, str]:
        """Run a command on the host as root: (status, standard output, standard error). Status -9: it timed out.

        `environment` is added to the agent's own. Raises ShellError.
        """
        arguments = {"argv": list(argv), "stdin": stdin, "timeout_s": timeout_s}
        if environment:
            arguments["environment"] = dict(environment)
        answer = await self.request_to_its_end("run", arguments, timeout_s=timeout_s + _GRACE_S)
        return int(answer["status"]), str(answer["stdout"]), str(answer["stderr"])

    async def request_to_its_end(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Message:
        """Like `request`, but a cancelled caller still waits for the answer, so that the outcome is known."""
        return await to_its_end(self.request(op, arguments, timeout_s=timeout_s))

    async def _send(self, line: bytes) -> None:
        """Send now if there is a connection; otherwise the next connection sends everything that is pending."""
        stream = self._stream
        if stream is None:
            return
        async with self._send_lock:
            with contextlib.suppress(OSError):  # the reader of this stream notices too, and connects again
                await begin_in_thread(stream.send, line)

    async def _keep_connected(self) -> None:
        pause_s = _MIN_PAUSE_S
        while not self._gone:
            try:
                stream = await self._connected()
            except ConnectFailure as error:
                self._trouble = str(error)
                logger.info("%s: %s", self.host, error)
                if error.gone:
                    self._take_gone()
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(_MAX_PAUSE_S, pause_s * 2)
                continue
            pause_s = _MIN_PAUSE_S
            ended = self._read_in_thread(stream)
            self._stream = stream
            self._connection_count += 1
            try:
                self._on_event({"event": "connected"})
                for line, _ in list(self._pending.values()):
                    await self._send(line)
                await self._until_silent(ended)
            finally:
                self._stream = None
                self._trouble = "the connection was lost"
                await asyncio.shield(begin_in_thread(stream.close))
        self._fail_pending("the agent on this host has ended")

    async def _until_silent(self, ended: asyncio.Future[None]) -> None:
        """Ping the agent; return when the connection has ended or nothing arrives on it any more."""
        loop = asyncio.get_running_loop()
        begin_s = self._heard_s = loop.time()
        ping = b'{"id":"ping","op":"hello"}\n'
        while not ended.done():
            silence_s = _SILENCE_S if self._heard_s > begin_s else FIRST_WORD_TIMEOUT_S
            if loop.time() - self._heard_s > silence_s:
                return
            await asyncio.wait([ended], timeout=_PING_S)
            pings = asyncio.ensure_future(self._send(ping))
            await asyncio.wait([pings, ended], timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)

    async def _connected(self) -> ByteStream:
        """Make a new connection; it is closed again if we are cancelled meanwhile."""
        making = begin_in_thread(self._connect)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectFailure):
                (await making).close()
            raise

    def _read_in_thread(self, stream: ByteStream) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not ended.done():
                ended.set_result(None)

        def read() -> None:
            buffer = bytearray()
            try:
                while data := stream.receive():
                    buffer += data
                    *lines, rest = buffer.split(b"\n")
                    buffer = bytearray(rest)
                    for line in lines:
                        loop.call_soon_threadsafe(self._take, bytes(line))
                    if len(buffer) > 2 * MAX_LINE_BYTES:
                        break
            except OSError:
                pass
            with contextlib.suppress(RuntimeError):  # the loop has ended before us
                loop.call_soon_threadsafe(finish)

        threading.Thread(target=read, name=f"agent-{self.host}", daemon=True).start()
        return ended

    def _take(self, line: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        try:
            message = json.loads(line)
        except ValueError:
            logger.warning("%s: the agent sent a line that is not JSON: %.200r", self.host, line)
            return
        if message.get("event") == "gone":
            self._take_gone()
        elif "event" in message:
            self._on_event(message)
        elif (pending := self._pending.get(message.get("id"))) is not None and not pending[1].done():
            pending[1].set_result(message)

    def _take_gone(self) -> None:
        self._gone = True
        self._on_event({"event": "gone"})

    def _fail_pending(self, why: str) -> None:
        for line, answer in self._pending.values():
            if not answer.done():
                answer.set_exception(AgentGone(self.host, [str(json.loads(line)["op"])], _UNREACHABLE, why))
