"""A time window of a network trace: its messages, each with the times at which it was sent and arrived."""

from __future__ import annotations

__all__ = ["RANKS", "LogState", "Message", "NothingSentError", "TraceError", "Window", "choose", "read_window"]

import stat
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from checker.codecs.jsonl import DamagedLine, read_batches
from harness.errors import OperatorError
from harness.units import clip, instant

RANKS: Sequence[tuple[str, frozenset[str]]] = (
    ("votes", frozenset(("vote",))),
    ("lost or late", frozenset()),
    ("comparing and truncating", frozenset(("compare", "truncate"))),
    ("replication", frozenset(("append", "commit"))),
    ("heartbeats", frozenset(("heartbeat",))),
    ("clients' sends and reads", frozenset(("send", "send batch", "pull", "max offset", "min offset"))),
    ("other kinds", frozenset()),
)
"""Kinds of messages, the most informative first, each with its RPCs."""

LATE_RANK = 1

_TYPES: dict[str, type] = {
    "kind": str, "from": str, "to": str, "connection": int, "number": int, "size": int, "rpcs": list,
}  # fmt: skip


class TraceError(OperatorError):
    """A trace that cannot be read or drawn. The message is one line and names the remedy."""


class NothingSentError(TraceError):
    """The window has no messages. The text says when there were some; `window` holds whatever else is known of it."""

    def __init__(self, message: str, window: Window) -> None:
        super().__init__(message)
        self.window = window


@dataclass(slots=True)
class Message:
    """A segment in flight. Times are in ns; `arrived_ns` is None if it had not arrived by the window's end.

    `losses` counts how often it was lost or was held up behind a lost one; `rpcs` are the messages that end in it.
    """

    source: str
    destination: str
    connection: int
    sent_ns: int
    size_bytes: int
    rpcs: list[dict[str, Any]]
    losses: int = 0
    arrived_ns: int | None = None

    @property
    def kind(self) -> str:
        """The RPC of its first message; empty for a segment in which no message ends."""
        return str(self.rpcs[0].get("rpc", "")) if self.rpcs else ""

    @property
    def rank(self) -> int:
        """Its place in RANKS."""
        kinds = {rpc.get("rpc") for rpc in self.rpcs}
        found = next((rank for rank, (_, names) in enumerate(RANKS) if kinds & names), len(RANKS) - 1)
        return min(found, LATE_RANK) if self.losses else found

    @property
    def label(self) -> str:
        """A text that names at most two of its messages."""
        words = [_words(rpc) for rpc in self.rpcs[:2]]
        return ", ".join(words) + (f" +{len(self.rpcs) - 2}" if len(self.rpcs) > 2 else "")


def _words(rpc: dict[str, Any]) -> str:
    name, detail = clip(str(rpc.get("rpc", "")), 30), clip(str(rpc.get("detail", "")), 40)
    return f"{name}: {detail or 'answered'}" if rpc.get("reply") else f"{name} {detail}".strip()


class LogState(NamedTuple):
    """A replica's committed index and the end of its log, from `time_ns` on."""

    time_ns: int
    host: str
    committed: int
    end: int


@dataclass(slots=True)
class Window:
    """The messages in flight between two moments (ns), in order of sending."""

    from_ns: int
    to_ns: int
    messages: list[Message] = field(default_factory=list)
    spoke: frozenset[str] = frozenset()
    """Every host that sent or received anything in the whole trace."""
    logs: list[LogState] = field(default_factory=list)
    """Changes of the replicas' logs within the window, preceded by each replica's last change before it."""
    stopped_ns: int | None = None
    """When the trace reached its bound, if by the window's end; later events were not kept."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many messages of each kind (named as in RANKS) were left out of `messages`."""


def read_window(path: Path, *, from_ns: int, to_ns: int, hosts: Collection[str] = ()) -> Window:
    """Read a window of trace.jsonl; with `hosts`, only messages among these.

    Raises NothingSentError if the window holds no message, and TraceError if there is no trace, if it is damaged, or
    if one of `hosts` never sent or received anything.
    """
    window = Window(from_ns, to_ns)
    under_way: dict[tuple[Any, Any, Any, Any], Message] = {}
    ended: list[Message] = []
    spoke: set[str] = set()
    first_ns: int | None = None
    last_ns = 0
    limit_ns: int | None = None
    logs: list[LogState] = []
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block until somebody writes
            raise TraceError(f"{path} is not a regular file: repeat the run")
        with path.open("rb") as file:
            for number, event in chain.from_iterable(batch.whole() for batch in read_batches(file)):
                try:
                    _require_types(event)
                    time_ns, kind = event["time"], event["kind"]
                    if kind == "limit":
                        limit_ns = time_ns
                        continue
                    if kind == "log":
                        logs.append(LogState(time_ns, str(event["host"]), int(event["committed"]), int(event["end"])))
                        continue
                    source, destination = event["from"], event["to"]
                except (KeyError, TypeError, ValueError):
                    raise TraceError(f"{path}:{number}: not a line of a trace; repeat the run") from None
                first_ns = time_ns if first_ns is None else first_ns
                last_ns = time_ns
                spoke |= {source, destination}
                if time_ns > to_ns or (hosts and not (source in hosts and destination in hosts)):
                    continue
                key = (event.get("connection"), source, destination, event.get("number"))
                if kind == "send":
                    under_way[key] = Message(
                        source, destination, key[0], time_ns, event.get("size", 0), event.get("rpcs", [])
                    )
                elif kind == "lost" and key in under_way:
                    under_way[key].losses += 1
                elif kind == "arrive" and key in under_way:
                    message = under_way.pop(key)
                    message.arrived_ns = time_ns
                    if time_ns >= from_ns:
                        ended.append(message)
    except FileNotFoundError:
        raise TraceError(f"{path.parent} has no trace: run with --cluster sim --trace") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except DamagedLine as line:
        raise TraceError(f"{path}:{line.number}: {line.reason}; repeat the run") from None
    window.spoke = frozenset(spoke)
    window.logs = _logs_of_window(logs, window)
    window.stopped_ns = limit_ns if limit_ns is not None and limit_ns <= to_ns else None
    if unknown := sorted(set(hosts) - spoke):
        raise TraceError(f"--hosts: {', '.join(unknown)} sent and received nothing; known: {', '.join(sorted(spoke))}")
    # Drop messages sent before the window that never arrived; pending ones sent within it stay.
    waiting = [message for message in under_way.values() if message.sent_ns >= from_ns]
    window.messages = sorted([*ended, *waiting], key=lambda message: message.sent_ns)
    if not window.messages:
        raise _nothing_sent(path, window, first_ns, last_ns, reached_its_bound=limit_ns is not None)
    return window


def _nothing_sent(
    path: Path, window: Window, first_ns: int | None, last_ns: int, *, reached_its_bound: bool
) -> TraceError:
    """The error for a window without messages, in a trace that begins at `first_ns` (None: the trace is empty)."""
    if first_ns is None:
        return TraceError(f"{path} is empty: nothing was sent in that run")
    cut = ", where it reached its limit of events; shorten the run or lower its rate" if reached_its_bound else ""
    asked = f"--from {window.from_ns / 1e9:g} and --to {window.to_ns / 1e9:g}"
    where = f"the trace covers {instant(first_ns)} to {instant(last_ns)}{cut}"
    return NothingSentError(f"nothing was sent between {asked}: {where}", window)


def _require_types(event: dict[str, Any]) -> None:
    """Raise TypeError if a field has the wrong type: the line is damaged, or another program wrote it."""
    if type(event["time"]) is not int:
        raise TypeError
    for name, value in event.items():
        wanted = _TYPES.get(name)
        if wanted is not None and not isinstance(value, wanted):
            raise TypeError
    for rpc in event.get("rpcs", ()):
        if not isinstance(rpc, dict) or not isinstance(rpc.get("rpc", ""), str):
            raise TypeError


def _logs_of_window(logs: Sequence[LogState], window: Window) -> list[LogState]:
    earlier = {state.host: state for state in logs if state.time_ns < window.from_ns}
    return [*earlier.values(), *(state for state in logs if window.from_ns <= state.time_ns <= window.to_ns)]


def choose(window: Window, most: int) -> Window:
    """The same window with at most `most` messages.

    Kinds are kept whole in the order of RANKS while they fit. Of the first kind that does not fit, the earliest
    messages are kept; all later kinds are dropped.
    """
    by_rank = sorted(range(len(window.messages)), key=lambda place: (window.messages[place].rank, place))
    kept = set(by_rank[:most])
    chosen = Window(window.from_ns, window.to_ns, spoke=window.spoke, logs=window.logs, stopped_ns=window.stopped_ns)
    for place, message in enumerate(window.messages):
        if place in kept:
            chosen.messages.append(message)
        else:
            chosen.left_out[RANKS[message.rank][0]] += 1
    return chosen
