"""One run as columns: its operations, its faults, its identity.

Runs are read inside executors, many millions of operations in all, so an operation is a row of NumPy arrays, never an
object. Every source (the store's Parquet, JSONL, a foreign history) becomes a `RunData`.
"""

from __future__ import annotations

__all__ = [
    "FAIL",
    "INFO",
    "NEVER",
    "OK",
    "STATUS_NAMES",
    "Fault",
    "Identity",
    "Names",
    "RunData",
    "UnreadableRunError",
    "in_utf8",
    "pair",
]

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

OK, FAIL, INFO = 0, 1, 2
STATUS_NAMES = ("ok", "fail", "info")

NEVER = -1
"""`completed_ns` and `completed` of an operation without a completion."""

Ints: TypeAlias = Any
"""A NumPy array of int64. NumPy is installed only with the extra, so annotations cannot use its types."""


class UnreadableRunError(Exception):
    """A run whose history cannot be used; the message is the reason in one line."""


def in_utf8(text: str) -> str:
    """A text that Arrow accepts: lone surrogates, which JSON can express but UTF-8 cannot, become escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


@dataclass(slots=True)
class Names:
    """A dictionary-encoded column of strings: codes are positions in `names`; code -1 is null."""

    codes: Any
    names: list[str]

    def take(self, rows: Any) -> Names:
        """The column restricted to some rows."""
        return Names(self.codes[rows], self.names)

    def at(self, row: int) -> str | None:
        """The string of one row."""
        code = int(self.codes[row])
        return None if code < 0 else self.names[code]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: from the call that injects it to the end of the call that heals it (`end_ns` None: never).
    `exercised` is None if it is unknown whether the system met it, as in histories that do not record that."""

    fault_id: str
    nemesis: str
    variant: str
    start_ns: int
    end_ns: int | None
    proven: bool
    healed: bool
    exercised: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which run this is; fields that the source does not state are empty."""

    run_id: str = ""
    test_name: str = ""
    system: str = ""
    workload: str = ""
    nemesis: str = ""
    cluster: str = ""
    seed: int | None = None
    configuration: str = ""
    started_at: str = ""


@dataclass(slots=True, kw_only=True)
class RunData:
    """A run's client operations in order of invocation, and its faults in order of injection.

    `invoked` and `completed` are positions among the client events; `end_ns` is the time of the last client event.
    `values` and `results` are Arrow arrays of JSON text, or for a foreign history lists of values from the checker's
    codec; `errors` is an Arrow array of text. They are present only on request. A key is the text of a number, a
    string as it is, or JSON of anything else, as in the store's Parquet.
    """

    identity: Identity
    process: Ints
    f: Names
    key: Names
    node: Names
    status: Any
    invoked_ns: Ints
    completed_ns: Ints
    invoked: Ints
    completed: Ints
    end_ns: int
    faults: Sequence[Fault] = ()
    problems: list[str] = field(default_factory=list)
    values: Any = None
    results: Any = None
    errors: Any = None
    key_objects: list[Any] | None = None
    """The original keys by code, if the source is foreign and their text says less."""
    processes: list[Any] | None = None
    """The original processes of a foreign source."""
    history: Any = None
    """The `History` from the checker's codec of a foreign file, if values were requested."""
    timed: bool = True
    """Whether the source had times; without them there is no latency and no availability."""

    def __len__(self) -> int:
        """The number of operations."""
        return len(self.process)


def pair(process: Ints, is_invoke: Any) -> tuple[Ints, Ints]:
    """Rows of the invocations in order, and for each the row of its completion (`NEVER` if there is none).

    Takes the client events of a run in order. A process has at most one open operation, so in a stable sort by
    process every completion follows its invocation directly. Raises UnreadableRunError if that is violated.
    """
    if not len(process):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(process, kind="stable")
    sorted_process, sorted_invoke = process[order], is_invoke[order]
    same_as_next = sorted_process[:-1] == sorted_process[1:]
    same_as_previous = np.concatenate(([False], same_as_next))
    after_invoke = np.concatenate(([False], sorted_invoke[:-1]))
    orphan = ~sorted_invoke & ~(same_as_previous & after_invoke)
    if orphan.any():
        row = int(order[orphan].min())
        raise UnreadableRunError(f"process {process[row]} completes an operation that it has not invoked (event {row})")
    doubled = sorted_invoke & same_as_previous & after_invoke
    if doubled.any():
        row = int(order[doubled].min())
        raise UnreadableRunError(f"process {process[row]} invokes an operation while another is open (event {row})")
    completion: Ints = np.full(len(process), NEVER, np.int64)
    has_completion = np.concatenate((sorted_invoke[:-1] & same_as_next, [False]))[: len(process)]
    places = np.flatnonzero(has_completion)
    completion[order[places]] = order[places + 1]
    invocations = np.flatnonzero(is_invoke)
    return invocations, completion[invocations]
