"""The network's trace as a file: one JSON object per line, in the order of the events.

    {"time":12345678,"kind":"send","from":"n1","to":"n2","connection":3,"number":17,"size":312,
     "rpcs":[{"rpc":"append","detail":"40–42"}]}
    {"time":12345999,"kind":"log","host":"n2","committed":39,"end":42}

`time` is in nanoseconds on the history's clock, negative before the load began. `kind` is as in TraceEvent; a segment
is identified by connection, direction and number, and may be lost and retransmitted several times before it arrives.
Answers have `"reply":true`. A line of kind `log` has the last committed and the last index of a replica's DLedger log
(-1: none), whenever either changes. What a host sends to itself does not touch the network and is left out. A trace
that reached its limit ends with a line of kind `limit`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import IO, Any

from harness.clusters.sim.dissector import Dissector
from harness.clusters.sim.network import TraceEvent

__all__ = ["MAX_TRACE_EVENTS", "TraceWriter"]

MAX_TRACE_EVENTS = 1_000_000
"""Lines of a trace: more than a minute of the default load, and some 120 MB. Nobody would read a longer one."""


class TraceWriter:
    """Give `note` to SimNetwork.trace and `close` it at the end.

    `zero_s()` is the loop's time at which the history's clock is 0, None before that. Events until then are held back,
    within the same limit; if the clock never starts, times count from the first event. The constructor raises OSError;
    later errors are raised by `close`.
    """

    def __init__(self, path: str, zero_s: Callable[[], float | None], *, max_events: int = MAX_TRACE_EVENTS) -> None:
        self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        self._zero_s = zero_s
        self._origin_s: float | None = None
        self._held: list[tuple[float, dict[str, Any]]] = []
        self._room = max_events
        self._max_events = max_events
        self._dissector = Dissector()
        self._problem: OSError | None = None
        self._logs: dict[str, tuple[int, int]] = {}

    def note(self, event: TraceEvent) -> None:
        """Write one event, or hold it back until the clock has started."""
        if event.source != event.destination:
            self._note(event.time_s, lambda: self._line(event))

    def note_log(self, time_s: float, host: str, committed_index: int, end_index: int) -> None:
        """Write the last committed and the last index of a replica's log, unless neither has changed."""
        if self._logs.get(host) != (committed_index, end_index):
            self._logs[host] = committed_index, end_index
            self._note(time_s, lambda: {"kind": "log", "host": host, "committed": committed_index, "end": end_index})

    def _note(self, time_s: float, line: Callable[[], dict[str, Any]]) -> None:
        if self._room < 0:
            return
        content = line() if self._room else {"kind": "limit", "events": self._max_events}
        self._room -= 1
        try:
            self._put(time_s, content)
        except OSError as error:  # called while a host is doing something, which a full disk here must not disturb
            self._problem = error
            self._room = -1

    def _line(self, event: TraceEvent) -> dict[str, Any]:
        line: dict[str, Any] = {"kind": event.kind, "from": event.source, "to": event.destination}
        if event.connection:
            line["connection"] = event.connection
            line["number"] = event.number
        if event.size_bytes:
            line["size"] = event.size_bytes
        if event.kind == "send":
            rpcs = self._dissector.feed(event.connection, event.source, event.destination, event.content)
            if rpcs:
                line["rpcs"] = [
                    {"rpc": rpc.name, **({"reply": True} if rpc.is_reply else {}), "detail": rpc.detail} for rpc in rpcs
                ]
        elif event.kind == "fin":
            self._dissector.forget(event.connection, event.source, event.destination)
        return line

    def _put(self, time_s: float, line: dict[str, Any]) -> None:
        if self._origin_s is None:
            self._origin_s = self._zero_s()
            if self._origin_s is None:
                self._held.append((time_s, line))
                return
            self._release()
        self._write(time_s, line)

    def _release(self) -> None:
        for time_s, line in self._held:
            self._write(time_s, line)
        self._held.clear()

    def _write(self, time_s: float, line: dict[str, Any]) -> None:
        assert self._origin_s is not None
        content = {"time": round((time_s - self._origin_s) * 1e9), **line}
        self._file.write(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Write what is held back and close the file. Idempotent. Raises OSError when anything could not be written."""
        if self._file.closed:
            return
        self._room = -1
        with self._file:
            if self._held:
                self._origin_s = self._zero_s() or self._held[0][0]
                self._release()
        if self._problem is not None:
            raise self._problem
