"""Clients in any language: a program for each logical client, which speaks JSON lines over its standard streams.

The harness writes one JSON object per line and waits for a one-line answer with the same `id`, always in turn:

    {"id": 1, "type": "hello", "version": 1}
        -> {"id": 1, "type": "hello", "capabilities": ["read", "write"]}
    {"id": 2, "type": "open", "process": 3, "host": "n1", "addresses": {"client": {"n1": "10.77.0.1:7000"}}, ...}
        -> {"id": 2, "type": "ok"}
    {"id": 3, "type": "invoke", "f": "write", "key": 5, "value": 17}
        -> {"id": 3, "type": "ok"}, or "fail", or "info"; with an "error", or the "value" if there is one; an "ok"
           may name its "node"
           (an invoke also has the "traceparent" of its operation)
    {"id": 4, "type": "close"}
        -> {"id": 4, "type": "ok"}, and the program ends

`client_program` turns a command into a subclass of `harness.sdk.Client`, with a method for each capability that the
program named. docs/clients-in-any-language.md is the page for authors of such programs.

A program that exits, does not answer in time, or gives an invalid answer is killed with its process group; the next
operation starts another one. Processes that it started in other sessions are ended with the run. Its output is bounded:
a line by `MAX_LINE_BYTES`, the kept standard error by `MAX_STDERR_BYTES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from harness.client_processes import marked_clients
from harness.clusters.host_agent import death_signal_setter
from harness.errors import OperatorError
from harness.run_state import RunState
from harness.sdk import Client, Refused
from harness.sdk.client import CAPABILITIES
from harness.workloads.capability import ClientMistake

__all__ = ["VERSION", "WITH_VALUE", "ProgramClient", "ProgramError", "client_program"]

logger = logging.getLogger(__name__)

VERSION = 1
"""Protocol version: a program that needs another one reports that and exits."""

WITH_VALUE = frozenset(CAPABILITIES) - {
    "write", "add", "increment", "put", "concat", "enqueue", "ack", "schedule", "prepare", "commit", "rollback",
    "commit_offset", "push", "insert", "unlock",
    "write_version", "lock",
}  # fmt: skip
"""Methods whose `ok` must have a `value`, which may be null. Most others return nothing; `write_version` may not know
the version, and `lock` succeeded unless the value is false."""

MAX_LINE_BYTES = 16 << 20
"""Limit of one answer: a set of a million numbers. A runaway program must not fill the harness's memory."""

MAX_STDERR_BYTES = 4096
"""The end of a program's standard error that is kept for messages."""

MAX_LOGGED_LINES = 200
"""Lines of a program's standard error that are copied to the run's log."""

START_TIMEOUT_S = 60.0
"""For a program's `hello` when it is tried before a run: a JVM on a busy machine takes seconds to start."""

END_TIMEOUT_S = 2.0
"""For a program to exit on its own after `close`."""

SHARE_OF_TIME = 0.95
"""Fraction of an operation's timeout that a program has; the rest is for reporting the outcome."""


class ProgramError(Exception):
    """A client program exited or did not answer; the message names it."""


class _Program(asyncio.SubprocessProtocol):
    """One running program: one line is written, then one line is read."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport | None = None
        self._input: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._searched = 0
        self._answer: asyncio.Future[bytes] | None = None
        self._asked = 0
        self._problem: Exception | None = None
        self._last_words = b""
        self._logged_lines = 0
        self._is_closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()

    # Callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        pipe = transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        self._input = pipe

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._keep_words(data)
            return
        if self._problem is not None:
            return
        buffer = self._buffer
        buffer += data
        end = buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(buffer)
            if len(buffer) > MAX_LINE_BYTES:
                self._fail(ClientMistake(f"{self._title} wrote {len(buffer)} bytes without a newline"))
            return
        if self._answer is None or self._answer.done() or len(buffer) > end + 1:
            self._fail(ClientMistake(f"{self._title} wrote a line that is not an answer: {_quoted(bytes(buffer))}"))
            return
        self._searched = 0
        line = bytes(buffer[:end])
        buffer.clear()
        self._answer.set_result(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1 and not self._is_closing:
            # Its exit status and last output arrive a little later, if it has exited.
            self._loop.call_later(0.2, self._fail_as_ended)

    def process_exited(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        # Its last output may still be in the pipes.
        self._loop.call_later(0.05, self._fail_as_ended)

    def _keep_words(self, data: bytes) -> None:
        if self._logged_lines < MAX_LOGGED_LINES:
            for line in data.decode("utf-8", "replace").splitlines()[: MAX_LOGGED_LINES - self._logged_lines]:
                self._logged_lines += 1
                logger.info("%s: %s", self._title, line[:500])
        self._last_words = (self._last_words + data)[-MAX_STDERR_BYTES:]

    def _fail_as_ended(self) -> None:
        if self._problem is None and not self._is_closing:
            status = None if self._transport is None else self._transport.get_returncode()
            how = "closed its standard output" if status is None else f"ended with status {status}"
            self._fail(ProgramError(f"{self._title} {how}{self._quoted_words()}"))

    def _quoted_words(self) -> str:
        lines = self._last_words.decode("utf-8", "replace").strip().splitlines()
        return f"; its last output: {lines[-1].strip()[:200]}" if lines else ""

    def _fail(self, problem: Exception) -> None:
        """Record the problem, fail the pending request, and kill the program; further requests fail too."""
        self._problem = problem
        self._buffer.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(problem)
        self.kill()

    # Calls of the harness

    async def ask(self, message: Mapping[str, Any], *, what: str, timeout_s: float) -> dict[str, Any]:
        """Write a message and return the answer. Raises ProgramError, ClientMistake."""
        if self._problem is not None:
            raise self._problem
        assert self._input is not None
        answer = self._answer = self._loop.create_future()
        self._asked += 1
        self._input.write(_encode({"id": self._asked, **message}))
        timer = self._loop.call_later(timeout_s, self._time_is_up, answer, what, timeout_s)
        try:
            line = await answer
        finally:
            timer.cancel()
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("type"), str):
            problem = ClientMistake(
                f"{self._title} answered {what} with {_quoted(line)}, which is not a JSON object with a type"
            )
            self._fail(problem)
            raise problem
        if found.get("id") != self._asked:
            # An answer to another request would make a correct system look wrong.
            identity = f"with id {found['id']!r:.40}" if "id" in found else "without an id"
            due = f"it must be {self._asked}, as in the request"
            problem = ClientMistake(f"{self._title} answered {what} {identity}: {due}")
            self._fail(problem)
            raise problem
        return found

    def _time_is_up(self, answer: asyncio.Future[bytes], what: str, timeout_s: float) -> None:
        if not answer.done():
            late = f"{self._title} did not answer {what} within {timeout_s:.1f} s"
            self._fail(ProgramError(f"{late}{self._quoted_words()}"))

    def kill(self) -> None:
        """End the program and its process group, at once. Idempotent."""
        if self._transport is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    async def end(self) -> None:
        """Let the program exit on its own after its `close`, then kill it and what it left running."""
        self._is_closing = True
        try:
            if self._problem is None and self._input is not None:
                with contextlib.suppress(ProgramError, ClientMistake):
                    await self.ask({"type": "close"}, what="close", timeout_s=END_TIMEOUT_S)
                self._input.close()
                await asyncio.wait([self._ended], timeout=END_TIMEOUT_S)
        finally:
            self.kill()
            await asyncio.wait([self._ended], timeout=END_TIMEOUT_S)
            if self._transport is not None:
                self._transport.close()


class ProgramClient(Client):
    """One logical client that is a program. `client_program` makes subclasses with the methods."""

    title: ClassVar[str]
    program_words: ClassVar[Sequence[str]]
    _program: _Program | None = None

    async def open(self) -> None:
        """Start the program and have it connect. Raises ProgramError, ClientMistake, Refused."""
        timeout_s = self.timeout_s * SHARE_OF_TIME
        self._program = await _start(self.program_words, self.title, self.environment)
        await _greet(self._program, timeout_s)
        addresses = {name: {host.name: host.address(name) for host in self.hosts} for name in self.host.port_names}
        message = {
            "type": "open",
            "process": self.process,
            "host": self.host.name,
            "addresses": addresses,
            "timeout_ms": int(timeout_s * 1000),
            "settings": dict(self.settings),
        }
        self._outcome("open", await self._program.ask(message, what="open", timeout_s=timeout_s))

    async def invoke(self, f: str, values: tuple[Any, ...]) -> Any:
        """Have the program perform an operation. Raises Refused, ProgramError, ClientMistake."""
        if self._program is None:
            raise Refused("the client was not opened")
        message = {"type": "invoke", "f": f, **dict(zip(CAPABILITIES[f], values, strict=True))}
        if (parent := self.traceparent) is not None:
            message["traceparent"] = parent
        answer = await self._program.ask(message, what=f, timeout_s=self.timeout_s * SHARE_OF_TIME)
        return self._outcome(f, answer)

    def _outcome(self, what: str, answer: Mapping[str, Any]) -> Any:
        kind, self.node = answer["type"], answer.get("node")
        if self.node is not None and self.node not in (names := [host.name for host in self.hosts]):
            raise ClientMistake(
                f"{self.title} answered {what} with node {self.node!r:.40}: it must be the host that answered, one of "
                f"{', '.join(names)}, or omitted"
            )
        if kind == "ok":
            if what in WITH_VALUE and "value" not in answer:
                # Taken for null, it would make a correct system look as if it had lost data.
                due = "it must have one, null if there is nothing"
                raise ClientMistake(f'{self.title} answered {what} with ok and no "value": {due}')
            return answer.get("value")
        error = str(answer.get("error", "no error given"))
        if kind == "fail":
            raise Refused(error)
        if kind == "info":
            raise ProgramError(error)
        raise ClientMistake(f"{self.title} answered {what} with type {kind[:40]!r}: it must be ok, fail or info")

    async def close(self) -> None:
        """End the program."""
        program, self._program = self._program, None
        if program is not None:
            await program.end()


def client_program(command: str) -> type[ProgramClient]:
    """The client class for a command, after trying it: the program must start and name its capabilities.

    Must not be called inside an event loop. Raises OperatorError, in one line that names the command.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise OperatorError(f"--client {command!r}: {error}") from None
    if not words:
        raise OperatorError("--client: give the command that starts a client")
    state = RunState.create(f"client-{secrets.token_hex(6)}")
    try:
        with marked_clients(state) as environment:
            capabilities = asyncio.run(_try_out(words, command, environment))
    except (ProgramError, ClientMistake, OSError) as error:
        raise OperatorError(f"--client: {error}") from None
    finally:
        state.close()
    return program_class(command, words, capabilities)


def program_class(command: str, words: Sequence[str], capabilities: Sequence[str]) -> type[ProgramClient]:
    """A client class with these capabilities, without trying the command."""
    members: dict[str, Any] = {name: _method(name) for name in capabilities}
    members |= {"title": f"client program {command!r}", "program_words": tuple(words)}
    return type(f"{os.path.basename(words[0])!r}", (ProgramClient,), members)


def _method(f: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: ProgramClient, *values: Any) -> Any:
        return await self.invoke(f, values)

    call.__name__ = f
    return call


async def _try_out(words: Sequence[str], command: str, environment: Mapping[str, str]) -> list[str]:
    program = await _start(words, repr(command), environment)
    try:
        return await _greet(program, START_TIMEOUT_S)
    finally:
        await program.end()


async def _start(words: Sequence[str], title: str, environment: Mapping[str, str]) -> _Program:
    """Raises ProgramError if the command cannot be run."""
    try:
        _, program = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Program(title),
            *words,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=death_signal_setter(),
        )
    except OSError as error:
        raise ProgramError(f"{title} cannot be run: {error.strerror}") from None
    return program


async def _greet(program: _Program, timeout_s: float) -> list[str]:
    answer = await program.ask({"type": "hello", "version": VERSION}, what="hello", timeout_s=timeout_s)
    capabilities = answer.get("capabilities")
    if answer["type"] != "hello" or not isinstance(capabilities, list):
        raise ClientMistake(
            f"{program._title} answered hello with {json.dumps(answer)[:200]}: it must be "
            '{"id": 1, "type": "hello", "capabilities": ["read", "write"]} with what it can do'
        )
    unknown = [name for name in capabilities if not isinstance(name, str) or name not in CAPABILITIES]
    if unknown:
        raise ClientMistake(
            f"{program._title} has unknown capabilities {', '.join(map(str, unknown))}; "
            f"known: {', '.join(CAPABILITIES)}"
        )
    return capabilities


_encoder = json.JSONEncoder(separators=(",", ":"))


def _encode(message: Mapping[str, Any]) -> bytes:
    return _encoder.encode(message).encode() + b"\n"


def _quoted(line: bytes) -> str:
    text = line[:120].decode("utf-8", "replace").strip()
    return repr(text if len(line) <= 120 else f"{text}...")
