"""Workloads by capability: each runs with any client that has the methods it needs.

The methods of a client of `harness.sdk` are its capabilities. A workload here names the methods that it needs
(`capabilities`) and maps each of its operations to a call of one. The result of the call decides how the operation
ends:

    it returned                    ok, with what it returned
    an error with `is_definite`    fail if that is true (`Refused`), info if it is false
    any other exception            fail for a read, info for a write
    a mistake of the client        as before, and the verdict is unknown: a client with a bug tests nothing

A mistake is a result that the workload cannot use (`cas` returned None, bytes instead of JSON, "7" although numbers
were written), or an exception that only a bug raises (TypeError, NameError). It is reported with the file and line in
the client, or with the command if the client is a program.

After an exception that is not `is_definite`, the client is closed and the next operation opens a new one: its
connection may still deliver a late answer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from harness.errors import OperatorError, nearest
from harness.generator import Generator, Nothing
from harness.sdk.client import CAPABILITIES
from harness.systems.base import CheckOutcome, Setting, setting_problems
from harness.unawaited import take_unawaited
from harness.worker import Client, NamesNode, Outcome, TellsOutcome, TellsUse, is_ctrl_c, times_cancelled
from harness.workloads.base import CLIENT, ByCapability, CheckContext, OnlineChecker

__all__ = [
    "Call",
    "CapabilityClient",
    "CapabilityWorkload",
    "ClientMistake",
    "Happened",
    "Unfinished",
    "gives",
    "is_whole_number",
    "json_problem",
    "missing_capabilities",
    "number_from",
    "numbers_from",
    "takes",
]

MISTAKES = (AttributeError, ImportError, NameError, RecursionError, TypeError)
"""Exceptions that mean that the client's own code is wrong, whatever the system did."""

MAX_REASON_CHARS = 300
"""Limit of the exception text kept with an operation: some drivers put whole replies into theirs."""

_PLAIN = frozenset((str, bool, type(None)))
"""Types whose every value is valid JSON."""

_LARGEST_PLAIN = 1 << 64
"""Smaller integers skip the JSON check. JSON may hold larger ones, up to a few thousand digits."""

_SPELT = re.compile(r'\s*"?([+-]?[0-9]+(\.0*)?|None|null|nil|undefined)"?\s*')
"""A string that spells a decimal integer, perhaps quoted or with whitespace around it, or a language's null value."""

_EVERY_CLIENT = frozenset(("address", "close", "connect", "dialled", "open", "url"))
"""Methods of every client, which are never suggested as misspelt capabilities."""


class ClientMistake(Exception):
    """The client's code is wrong; the message names the method, and the file and line where they are known."""

    is_mistake = True


class Happened(Exception):
    """Raised by a call's `perform`: the operation happened, with this result, but the client must be reopened."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


class Unfinished(Exception):
    """Raised by a call's `perform`: the operation ended with this error, and only the part in `value` was requested."""

    def __init__(self, value: Any, error: Exception) -> None:
        super().__init__(value, error)
        self.value = value
        self.error = error


@dataclass(frozen=True, slots=True)
class Call:
    """How an operation is performed: `perform(client, value, key)` returns its result.

    `method` is the client's method, for messages. `is_read` (for all values, or by value) means that it changes
    nothing, so that any exception means that nothing happened.
    """

    method: str
    perform: Callable[[Any, Any, Any], Awaitable[Any]]
    is_read: bool | Callable[[Any], bool] = False

    def only_reads(self, value: Any) -> bool:
        """Whether the call with this value changes nothing."""
        return self.is_read if isinstance(self.is_read, bool) else self.is_read(value)


def gives(method: str, *, keyed: bool = False) -> Call:
    """A call of `method(value)`, or `method(key, value)`, whose result is `value` itself."""

    async def perform(client: Any, value: Any, key: Any) -> Any:
        await getattr(client, method)(*((key, value) if keyed else (value,)))
        return value

    return Call(method, perform)


def takes(method: str, *, numbers: bool = False) -> Call:
    """A call of `method()`, whose result is its return value; with `numbers` checked by `number_from`."""

    async def perform(client: Any, value: Any, key: Any) -> Any:
        found = await getattr(client, method)()
        return number_from(method, found) if numbers else found

    return Call(method, perform)


class CapabilityWorkload(ABC):
    """Base class: settings, the client, empty final reads. Created for one test.

    `settings` are those of `--set workload.NAME=VALUE`. Raises OperatorError for invalid ones.
    """

    requires = CLIENT
    name: ClassVar[str]
    description: ClassVar[str]
    capabilities: ClassVar[tuple[str, ...]]
    """The methods that a client must have."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    calls: ClassVar[Mapping[str, Call]]
    """Operation -> how it is performed."""
    check_names: ClassVar[Sequence[str]]

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        given = settings or {}
        problems = setting_problems(self.settings, given) if self.settings or given else []
        if problems:
            raise OperatorError(f"--set workload.NAME (workload {self.name}): {'; '.join(problems)}")
        self._values = {setting.name: setting.default for setting in self.settings} | dict(given)

    def text(self, setting: str) -> str:
        """The value of a setting."""
        return self._values[setting]

    def number(self, setting: str) -> int:
        """The value of an integer setting."""
        return int(self._values[setting])

    @property
    def keys(self) -> int:
        """Independent keys in use at a time."""
        return self.number("keys") if "keys" in self._values else 1

    @abstractmethod
    def generator(self) -> Generator:
        """The clients' operations during the fault phase."""

    def final_generator(self) -> Generator:
        """Nothing, unless a workload has final reads."""
        return Nothing()

    def client(self, connection: Any) -> Client:
        """The worker's client over a client of the SDK."""
        return CapabilityClient(connection, self.calls)

    def is_write(self, f: str, value: Any) -> bool:
        """Whether an operation may change something: its call is not declared as a read."""
        return f in self.calls and not self.calls[f].only_reads(value)

    def online(self) -> OnlineChecker | None:
        """None, unless a workload can be checked while it runs."""
        return None

    @abstractmethod
    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        """Every check by name."""


@runtime_checkable
class KnowsHosts(Protocol):
    """A client that knows its system's hosts, which the system sets when it creates the client."""

    hosts: Sequence[Any]


@runtime_checkable
class KnowsOthers(Protocol):
    """A client that knows its system's extra hosts, by name."""

    others: Mapping[str, Any]


@runtime_checkable
class StandsForProgram(Protocol):
    """A class of clients that run an external program: errors are not in its own lines."""

    title: str
    """What messages call the program."""


class CapabilityClient:
    """Performs a workload's operations with the methods of an SDK client. See harness.worker.Client."""

    __slots__ = ("_calls", "_client", "_names")

    def __init__(self, client: Any, calls: Mapping[str, Call]) -> None:
        self._client = client
        self._calls = calls
        hosts = [host.name for host in client.hosts] if isinstance(client, KnowsHosts) else []
        self._names = dict.fromkeys((*hosts, *client.others) if isinstance(client, KnowsOthers) else hosts)

    async def open(self) -> None:
        """Raises ClientMistake if the client's code is wrong, and ConnectionError, with the line in its code, for any
        other exception, since the hosts that the client cannot reach would be missing from the load."""
        try:
            await self._client.open()
        except ClientMistake as mistake:
            raise ClientMistake(f"open: {mistake}") from mistake
        except BaseException as error:
            if _is_mistake(error):
                raise ClientMistake(described(error, self._client, "open")) from error
            if isinstance(error, Exception):
                raise ConnectionError(described(error, self._client, "open")) from error
            raise
        if (what := take_unawaited()) is not None:
            raise ClientMistake(f"open: {what}")

    async def invoke(self, op: Any) -> Outcome:
        """See the module docstring. Raises ClientMistake."""
        call = self._calls[op.f]
        is_broken = False
        try:
            value = await call.perform(self._client, op.value, op.key)
        except ClientMistake as mistake:  # the method returned something that its operation cannot use
            place = _place_of(self._client, call.method)
            raise ClientMistake(str(mistake) if place.strip(" ()") in str(mistake) else f"{mistake}{place}") from None
        except Happened as happened:
            value, is_broken = happened.value, True
        except Unfinished as unfinished:
            failed = self._failed(unfinished.error, call.method, call.only_reads(op.value))
            return replace(failed, value=unfinished.value)
        except BaseException as error:
            if _is_mistake(error):
                raise ClientMistake(described(error, self._client, call.method)) from error
            if isinstance(error, Exception):
                return self._failed(error, call.method, call.only_reads(op.value))
            raise
        if (what := take_unawaited()) is not None:
            raise ClientMistake(f"{call.method}: {what}")
        is_plain = -_LARGEST_PLAIN < value < _LARGEST_PLAIN if type(value) is int else type(value) in _PLAIN
        if not is_plain and (problem := json_problem(value)) is not None:
            raise ClientMistake(f"{call.method} returned {problem}{_place_of(self._client, call.method)}")
        return Outcome("ok", value, node=self._node(call.method), is_broken=is_broken)

    def _node(self, method: str) -> str | None:
        """The host that answered, if the client names one. Raises ClientMistake for an unknown host."""
        node: Any = self._client.node if isinstance(self._client, NamesNode) else None
        if node is None or not self._names:
            return None
        if not isinstance(node, str) or node not in self._names:
            due = f"it must be the name of the host that answered, of {', '.join(self._names)}, or None"
            raise ClientMistake(f"{method} left self.node = {node!r:.40}: {due}{_place_of(self._client, method)}")
        return node

    def _failed(self, error: Exception, method: str, is_read: bool) -> Outcome:
        """The outcome of an operation whose call raised."""
        node: Any = error.node if isinstance(error, NamesNode) else None
        if not (isinstance(node, str) and node in self._names):
            node = None  # a driver's exceptions may use `node` for something else
        if isinstance(error, TellsOutcome):
            text = _named(error)
            if error.is_definite:
                return Outcome("fail", error=text, node=node, is_broken=isinstance(error, TellsUse) and error.reopen)
        else:
            text = described(error, self._client, method)
        return Outcome("fail" if is_read else "info", error=text, node=node, is_broken=True)

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()


def _is_mistake(error: BaseException) -> bool:
    """Whether an error means that the client's code is wrong: one of MISTAKES, or a BaseException such as SystemExit,
    unless it came from outside to end the call."""
    if isinstance(error, Exception):
        return isinstance(error, MISTAKES)
    if isinstance(error, asyncio.CancelledError):  # perhaps raised within the client, by a driver
        return not times_cancelled()
    return not isinstance(error, GeneratorExit) and not is_ctrl_c(error)


def missing_capabilities(workload: ByCapability, client_class: type) -> str | None:
    """Which methods a client lacks for a workload, as one line; None if it has all."""
    needed = workload.capabilities
    has = [name for name in dir(client_class) if not name.startswith("_") and callable(getattr(client_class, name))]
    lacking = [name for name in needed if name not in has]
    if not lacking:
        return None
    own = [name for name in has if name not in CAPABILITIES and name not in _EVERY_CLIENT]
    hints = "".join(nearest(name, own) for name in lacking[:1])
    methods = f"method{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}"
    return f"workload {workload.name} needs the {methods}, which client {client_class.__name__} lacks{hints}"


def described(error: BaseException, client: Any, method: str) -> str:
    """An exception of a client in one line: its type, its text, and the line in the client's own file."""
    own_file = _file_of(type(client))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == own_file]
    if not own:
        return f"{method}: {_named(error)}"
    return f"{method}: {_named(error)} ({os.path.basename(own[-1].filename)}:{own[-1].lineno})"


def _place_of(client: Any, method: str) -> str:
    """Where a method starts, as " (file.py:12)", if the client's own file defines it; " (title)" for a program; else
    empty."""
    if isinstance(type(client), StandsForProgram):
        return f" ({type(client).title})"
    function = next((vars(base)[method] for base in type(client).__mro__ if method in vars(base)), None)
    if not inspect.isfunction(function) or function.__code__.co_filename != _file_of(type(client)):
        return ""
    return f" ({os.path.basename(function.__code__.co_filename)}:{function.__code__.co_firstlineno})"


def _file_of(cls: type) -> str | None:
    """The file that defines a class, as its code objects name it; None for a class that stands for a program."""
    if isinstance(cls, StandsForProgram):
        return None
    for member in vars(cls).values():
        if inspect.isfunction(member):
            return member.__code__.co_filename
    return None


def _named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if len(text) > MAX_REASON_CHARS:
        text = f"{text[:MAX_REASON_CHARS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_whole_number(found: Any, *, least: float = -math.inf) -> bool:
    """Whether a value is an integer of at least `least`."""
    return isinstance(found, int) and not isinstance(found, bool) and found >= least


def number_from(method: str, found: Any) -> Any:
    """The return value of a method, in a workload that writes only integers.

    Raises ClientMistake for an integer that the client failed to decode or unwrap (a string that spells one, a boolean,
    a list, a map) and for null as a string, as from `str(None)`. None, another number and any other string may be what
    the system holds, which the checks decide.
    """
    if type(found) is int or found is None:
        return found
    is_spelt = isinstance(found, str) and _SPELT.fullmatch(found) is not None
    if is_spelt or isinstance(found, (bool, list, tuple, Mapping)):
        due = "it must be a whole number, like the values put in, or None"
        raise ClientMistake(f"{method} returned {found!r:.80} of type {type(found).__name__}: {due}")
    return found


def numbers_from(method: str, found: Iterable[Any]) -> list[Any]:
    """`number_from` for each of several values."""
    return [number_from(method, each) for each in found]


def json_problem(value: Any) -> str | None:
    """Why JSON cannot represent a value, as text; None if it can."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"{_short(value)}, which JSON cannot represent ({error})"
    return None


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # more digits than Python's limit for integer strings
        return "a number with too many digits"
    return text if len(text) <= 80 else f"{text[:80]}..."
