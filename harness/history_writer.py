"""The history of a run on disk: appended during the run, read back as a stream.

One JSON object per line, in order of occurrence. The writer adds `index` and `time` (nanoseconds since the test began)
and enforces that a process has at most one operation open. Lines are buffered and written together, so that recording
costs microseconds; a killed harness loses at most `FLUSH_EVENTS` events or `FLUSH_INTERVAL_S` seconds, and leaves a
file that is readable up to its last complete line.
"""

from __future__ import annotations

__all__ = [
    "FLUSH_EVENTS",
    "FLUSH_INTERVAL_S",
    "HistoryError",
    "HistoryReader",
    "HistoryWriteError",
    "HistoryWriter",
    "event_problem",
    "read_history",
]

import asyncio
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, BinaryIO

from checker.codecs.jsonl import DamagedLine, read_batches
from checker.faults import NEMESIS
from harness.atomic_files import write_all
from harness.errors import HarnessError, OperatorError
from harness.live_stats import COMPLETIONS, LiveStats, OpenOperation

FLUSH_EVENTS = 512
"""Events buffered before they are written: about 64 KB, at which the system call's cost is negligible."""

FLUSH_INTERVAL_S = 0.5
"""How long an event may stay buffered: the loss at a kill -9, with only two writes per second."""

MAX_LINE_BYTES = 64 * 1024 * 1024
"""The longest line read. A log read returns a few kilobytes; a file without newlines must not fill memory."""

MAX_SHARED_WORDS = 4_096
"""Limit of interned strings (types, functions, nodes) of a history that is read; without sharing they take a third of
its memory."""

MAX_CACHED_HEADS = 1_024
"""Limit of cached line heads by (type, f), and of cached node fields; both come from small fixed sets."""

MAX_TIME_NS = (1 << 63) - 1
"""Nearly three hundred years, the maximum of the Parquet column."""

_TYPES = frozenset(("invoke", *COMPLETIONS))
_WORDS = ("type", "f", "node")
_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode


class HistoryError(OperatorError):
    """A history file cannot be read; the message names the file, the line and the reason."""


class HistoryWriteError(OperatorError):
    """The history can no longer be written (disk full, I/O error). Complete lines written so far are readable."""


class HistoryWriter:
    """Appends events to a new history file.

    `clock_ns` returns nanoseconds since the test began and never goes back. Raises HistoryWriteError if the file exists
    or cannot be created. Use as a context manager, or call `close`.
    """

    def __init__(self, path: str | os.PathLike[str], clock_ns: Callable[[], int]) -> None:
        self.path = os.fspath(path)
        self.stats = LiveStats()
        self._clock_ns = clock_ns
        self._pending: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._heads: dict[tuple[str, str], str] = {}
        self._nodes: dict[str, str] = {}
        self._error: HistoryWriteError | None = None
        self._unreported = False
        try:
            self._fd: int | None = self._open()
        except OSError as error:
            raise HistoryWriteError(f"cannot create {self.path}: {error.strerror}") from error

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def append(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Record one event: process, type, f, value and optionally key, error, node and durability.

        Returns a copy of the event with `index` and `time`. Raises HarnessError if the event breaks the rules of a
        history, HistoryWriteError if it cannot be written. Nemesis events are exempt from the rule of one open
        operation: faults overlap, and a heal must never be refused.
        """
        if self._fd is None:
            self._unreported = False
            raise self._error or HarnessError(f"an event after {self.path} was closed")
        stats = self.stats
        kind, f, process = event["type"], event["f"], event["process"]
        index, now_ns = stats.events, self._clock_ns()
        invoked: OpenOperation | None = None
        if process != NEMESIS:
            invoked = self._check(kind, f, process)
        try:
            line = self._line(event, kind, f, process, index, now_ns)
        except (TypeError, ValueError, RecursionError) as error:
            raise HarnessError(f"process {process}'s {f} holds what JSON cannot: {error}") from None

        # Below only the disk can fail, so an event is either both recorded and counted, or neither.
        stats.events = index + 1
        if process == NEMESIS:
            stats.nemesis(kind, f, event.get("value"), now_ns)
        else:
            counts = stats.counts.get(f)
            if counts is None:
                counts = stats.counts[f] = dict.fromkeys(("invoke", *COMPLETIONS), 0)
            counts[kind] += 1
            if invoked is None:
                stats.open[process] = OpenOperation(f, now_ns, index)
            else:
                del stats.open[process]
                stats.completion(kind, invoked.time_ns, now_ns)
        pending = self._pending
        pending.append(line)
        if len(pending) >= FLUSH_EVENTS:
            self.flush()
        elif len(pending) == 1:
            self._start_timer()
        return {"index": index, "time": now_ns, **event}

    def _check(self, kind: str, f: str, process: Any) -> OpenOperation | None:
        """The operation that this client event completes; None for an invocation."""
        invoked = self.stats.open.get(process)
        if kind == "invoke":
            if invoked is not None:
                raise HarnessError(
                    f"process {process} invoked {f} while its {invoked.f} (event {invoked.event}) is still open"
                )
            if type(process) is not int or process < 0:
                raise HarnessError(f"a process is a number from 0 or {NEMESIS!r}, not {process!r}")
            return None
        if kind not in _TYPES:
            raise HarnessError(f"an event's type is one of invoke, ok, fail, info, not {kind!r}")
        if invoked is None:
            raise HarnessError(f"process {process} completed {f} as {kind} without having invoked it")
        if invoked.f != f:
            raise HarnessError(f"process {process} completed {f} as {kind}, but it had invoked {invoked.f}")
        return invoked

    def _line(self, event: Mapping[str, Any], kind: str, f: str, process: Any, index: int, now_ns: int) -> str:
        # Built by hand: the general encoder takes three times as long, and this is on every operation's path.
        head = self._heads.get((kind, f))
        if head is None:
            head = f',"type":{_text(kind)},"f":{_text(f)}'
            if len(self._heads) < MAX_CACHED_HEADS:
                self._heads[kind, f] = head
        who = process if process != NEMESIS else '"nemesis"'
        line = f'{{"index":{index},"time":{now_ns},"process":{who}{head}'
        key = event.get("key")
        if key is not None:
            line += f',"key":{key}' if type(key) is int else f',"key":{_encode_json(key)}'
        value = event.get("value")
        if type(value) is int:
            line += f',"value":{value}'
        elif value is None:
            line += ',"value":null'
        else:
            line += f',"value":{_encode_json(value)}'
        error = event.get("error")
        if error is not None:
            line += f',"error":{_text(str(error))}'
        node = event.get("node")
        if node is not None:
            tail = self._nodes.get(node)
            if tail is None:
                tail = f',"node":{_text(str(node))}'
                if len(self._nodes) < MAX_CACHED_HEADS:
                    self._nodes[node] = tail
            line += tail
        durability = event.get("durability")
        if durability is not None:
            line += f',"durability":{_text(str(durability))}'
        return line + "}\n"

    def _start_timer(self) -> None:
        if self._timer is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # without a loop only flush() and the size limit apply
            return
        self._timer = loop.call_later(FLUSH_INTERVAL_S, self._flush_by_timer)

    def _flush_by_timer(self) -> None:
        self._timer = None
        try:
            self.flush()
        except HistoryWriteError:
            self._unreported = True  # raised by the next append, flush or close

    def flush(self) -> None:
        """Write all buffered events to the file. Raises HistoryWriteError."""
        if self._error is not None:
            self._unreported = False
            raise self._error
        if not self._pending or self._fd is None:
            return
        data = "".join(self._pending).encode("ascii")
        try:
            self._write(self._fd, data)
        except OSError as error:
            self._fail(error)
        self._pending.clear()

    def _write(self, fd: int, data: bytes) -> None:
        write_all(fd, data)

    def _fail(self, error: OSError) -> None:
        assert self._fd is not None
        lost = len(self._pending)
        self._pending.clear()
        self._error = HistoryWriteError(
            f"cannot write {self.path}: {error.strerror}; what it holds is readable, up to {lost} events are lost"
        )
        os.close(self._fd)
        self._fd = None
        raise self._error from error

    def close(self) -> None:
        """Write the rest and sync it to disk. Idempotent. Raises HistoryWriteError unless it was raised before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd is None:
            if self._unreported:
                self.flush()
            return
        self.flush()
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._fail(error)
        os.close(self._fd)
        self._fd = None

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _text(text: str) -> str:
    return encode_basestring_ascii(text)


class HistoryReader:
    """A stream over the events of one history file; each iteration starts from the beginning.

    After an iteration `events` is their number, `truncated` tells whether the last line was cut short (as by a killed
    writer) and `dropped` is the beginning of that line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.events = 0
        self.truncated = False
        self.dropped = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.events, self.truncated, self.dropped = 0, False, ""
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # opening a pipe would block until somebody writes
                raise HistoryError(f"cannot read {self.path}: it is not a file")
            file = open(self.path, "rb")  # noqa: SIM115 (closed below; opening has its own errors)
        except OSError as error:
            raise HistoryError(f"cannot read {self.path}: {error.strerror}") from error
        with file:
            yield from self._events(file)

    def _events(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        shared: dict[str, str] = {}
        try:
            for batch in read_batches(file, max_line_bytes=MAX_LINE_BYTES):
                for number, event in batch.whole():
                    if problem := event_problem(event):
                        raise HistoryError(f"{self.path}:{number}: {problem}")
                    for name in _WORDS:
                        word = event.get(name)
                        if type(word) is str and (len(shared) < MAX_SHARED_WORDS or word in shared):
                            event[name] = shared.setdefault(word, word)
                    self.events += 1
                    yield event
        except OSError as error:
            raise HistoryError(f"cannot read {self.path}: {error.strerror}") from error
        except DamagedLine as line:
            if not line.is_cut:
                raise HistoryError(f"{self.path}:{line.number}: {line.reason}") from None
            self.truncated, self.dropped = True, line.text.decode(errors="replace")


def event_problem(event: Any) -> str | None:
    """Why something read from a history is not a valid event; None if it is."""
    if type(event) is not dict:
        return "not a JSON object"
    try:
        process, kind, time_ns = event["process"], event["type"], event["time"]
        f = event["f"]
    except KeyError as error:
        return f"an event without {error.args[0]!r}"
    if type(kind) is not str or kind not in _TYPES:
        return f"an event's type is one of invoke, ok, fail, info, not {kind!r}"
    if type(f) is not str:
        return f"an event's f is a word, not {f!r}"
    if type(time_ns) is not int:
        return f"an event's time is a number of nanoseconds, not {time_ns!r}"
    if not -MAX_TIME_NS <= time_ns <= MAX_TIME_NS:
        return f"an event's time is at most {MAX_TIME_NS} nanoseconds, and one of {len(str(time_ns))} digits is none"
    if type(process) is not int and process != NEMESIS:
        return f"a process is a number or {NEMESIS!r}, not {process!r}"
    if "error" in event and type(event["error"]) is not str:
        return f"an event's error is words, not {event['error']!r}"
    return None


def read_history(path: str | os.PathLike[str]) -> HistoryReader:
    """A history file as a stream of events.

    A truncated last line is dropped and reported by the reader. Iterating raises HistoryError, naming file and line,
    for anything else that is not an event.
    """
    return HistoryReader(path)
