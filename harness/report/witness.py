"""The operations that contradict each other, prepared for display.

A checker returns a witness as a list of operations, or as a map with operations, edges (why one comes before
another) and a text. Both become a `Witness` whose operations have the same fields: process, f, key, value,
result, type, node, error, start_ns, end_ns. `Neighbours` picks the operations of the history close to them.
"""

from __future__ import annotations

__all__ = ["MAX_NEIGHBOURS", "MAX_OPERATIONS", "Edge", "Neighbours", "Witness", "fault_after", "witness_from"]

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.units import MAX_TIME_NS, clip

MAX_OPERATIONS = 24
"""Most operations shown of a witness. A minimal one has at most about a dozen; a longer one is cut and says so."""

MAX_NEIGHBOURS = 8
"""Operations around a witness, for context: more would hide what matters."""

Operation = dict[str, Any]


class Edge(NamedTuple):
    """Operation `source` comes before operation `target` (positions in the witness)."""

    source: int
    target: int
    kind: str
    reason: str


@dataclass(slots=True)
class Witness:
    """A contradiction: its operations in order of invocation, and why they are in conflict."""

    operations: list[Operation]
    edges: list[Edge] = field(default_factory=list)
    text: str = ""
    key: Any = None
    has_key: bool = False
    left_out: int = 0
    note: str = ""


def witness_from(check: Mapping[str, Any]) -> Witness | None:
    """The witness in one check's results; None if there is none or it holds no operations."""
    raw = check.get("witness")
    text, key, edges, note = check.get("explanation"), None, [], ""
    if isinstance(raw, Mapping):
        text = raw.get("text") or text
        key, note = raw.get("key"), str(raw.get("note") or "")
        given_edges = raw.get("edges")
        edges = [edge for edge in given_edges if isinstance(edge, Mapping)] if isinstance(given_edges, list) else []
        raw = raw.get("operations")
    if not isinstance(raw, list):
        return None
    given = [(place, op) for place, op in enumerate(raw) if isinstance(op, Mapping)]
    if not given:
        return None
    operations = [(place, _operation(op)) for place, op in given]
    operations.sort(key=lambda item: (item[1]["start_ns"], item[0]))
    shown = operations[:MAX_OPERATIONS]
    new_place: dict[int | None, int] = {old: new for new, (old, _) in enumerate(shown)}
    witness = Witness(
        operations=[op for _, op in shown],
        text=str(text or ""),
        key=key,
        left_out=len(operations) - len(shown),
        note=note,
    )
    if key is None:
        keys = [op["key"] for op in witness.operations]
        if keys[0] is not None and all(other == keys[0] for other in keys):
            witness.key = keys[0]
    witness.has_key = witness.key is not None
    for edge in edges:
        source, target = (new_place.get(_number(edge.get(end))) for end in ("source", "target"))
        if source is not None and target is not None and source != target:
            witness.edges.append(Edge(source, target, str(edge.get("kind", "")), str(edge.get("reason", ""))))
    if not edges:
        witness.edges = real_time_edges(witness.operations)
    return witness


def fault_after(witness: Witness, faults: Iterable[Mapping[str, Any]]) -> int | None:
    """When the first fault of a run began, if all operations of the witness had ended by then: no fault was needed.
    None if one may have had a part in it, or if there was none."""
    begun = [fault.get("start_ns") for fault in faults]
    times = [time_ns for time_ns in begun if isinstance(time_ns, int) and not isinstance(time_ns, bool)]
    ends = [op["end_ns"] for op in witness.operations]
    if not times or witness.left_out or not all(end is not None and end < min(times) for end in ends):
        return None
    return min(times)


_TIMES = (
    ("start_ns", "end_ns"),
    ("invoked_ns", "returned_ns"),
    ("invoke_time_ns", "complete_time_ns"),
    ("invoked", "returned"),  # positions in the order of events, for histories without times
)


def _operation(op: Mapping[str, Any]) -> Operation:
    start_ns, end_ns = next(
        ((_number(op.get(start)), _number(op.get(end))) for start, end in _TIMES if _number(op.get(start)) is not None),
        (0, None),
    )
    process = op.get("process")
    return {
        # It names a lane, so anything other than an integer or a string becomes text.
        "process": process if process is None or isinstance(process, (int, str)) else clip(process),
        "f": op.get("f", "?"),
        "key": op.get("key"),
        "value": op.get("value"),
        "result": op.get("result", op.get("output")),
        "type": str(op.get("type") or op.get("status") or "ok"),
        "node": op.get("node"),
        "error": op.get("error"),
        "start_ns": start_ns,
        "end_ns": end_ns,
    }


def _number(value: Any) -> int | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and abs(value) <= MAX_TIME_NS else None


def real_time_edges(operations: Sequence[Operation]) -> list[Edge]:
    """Real-time order: edges from an operation to those that began after it ended, without edges implied by others."""

    def before(one: Operation, other: Operation) -> bool:
        return one["type"] == "ok" and one["end_ns"] is not None and one["end_ns"] < other["start_ns"]

    count = len(operations)
    pairs = {(i, j) for i in range(count) for j in range(count) if before(operations[i], operations[j])}
    return [
        Edge(i, j, "realtime", "")
        for i, j in sorted(pairs)
        if not any((i, k) in pairs and (k, j) in pairs for k in range(count))
    ]


class Neighbours:
    """The operations of a history nearest in time to a witness, on its key; O(`MAX_NEIGHBOURS`) memory."""

    __slots__ = ("_found", "_intervals", "_key", "_seen", "_span_ns", "_taken")

    def __init__(self, witness: Witness) -> None:
        self._key = witness.key if witness.has_key else None
        self._taken = {(op["process"], op["start_ns"]) for op in witness.operations}
        self._intervals = [
            (op["start_ns"], op["start_ns"] if op["end_ns"] is None else op["end_ns"]) for op in witness.operations
        ]
        self._span_ns = (min(i[0] for i in self._intervals), max(i[1] for i in self._intervals))
        self._found: list[tuple[int, int, Operation]] = []
        self._seen = 0

    def consider(self, invocation: Mapping[str, Any], completion: Mapping[str, Any] | None) -> None:
        """Add one operation of the history if it is among the nearest."""
        start_ns: int = invocation["time"]
        end_ns: int = start_ns if completion is None else completion["time"]
        if start_ns > self._span_ns[1] or end_ns < self._span_ns[0]:
            return
        if self._key is not None and invocation.get("key") != self._key:
            return
        if (invocation["process"], start_ns) in self._taken:
            return
        distance_ns = min(max(low - end_ns, start_ns - high, 0) for low, high in self._intervals)
        self._seen += 1
        entry = (-distance_ns, -self._seen)
        if len(self._found) >= MAX_NEIGHBOURS and entry <= self._found[0][:2]:
            return
        kind = "info" if completion is None else completion["type"]
        operation = {
            "process": invocation["process"],
            "f": invocation["f"],
            "key": invocation.get("key"),
            "value": invocation.get("value"),
            "result": completion.get("value") if completion is not None and kind == "ok" else None,
            "type": kind,
            "node": completion.get("node") if completion is not None else None,
            "error": completion.get("error") if completion is not None else None,
            "start_ns": start_ns,
            "end_ns": None if completion is None else end_ns,
        }
        if len(self._found) < MAX_NEIGHBOURS:
            heapq.heappush(self._found, (*entry, operation))
        else:
            heapq.heapreplace(self._found, (*entry, operation))

    def chosen(self) -> list[Operation]:
        """The nearest operations, in order of invocation."""
        return sorted((operation for *_, operation in self._found), key=lambda op: int(op["start_ns"]))
