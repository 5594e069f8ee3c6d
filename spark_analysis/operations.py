"""One run as columns: its operations, its faults, its identity.

Runs are read inside executors, many millions of operations in all, so an operation is a row over NumPy arrays
and never an object. Whatever the source (the store's Parquet, JSONL, a foreign history), it ends as a `RunData`.
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
"""`completed_ns` and `completed` of an operation that nobody saw the end of."""

Ints: TypeAlias = Any
"""A NumPy array of int64. NumPy comes with the extra, so that types cannot speak of it."""


class UnreadableRunError(Exception):
    """A run whose history cannot be used; the message is the reason in one line."""


def in_utf8(text: str) -> str:
    """A text that Arrow takes: JSON can spell half a surrogate pair, which UTF-8 cannot hold, and it is spelt out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


@dataclass(slots=True)
class Names:
    """A column of repeated strings: codes into a list; code -1 is null."""

    codes: Any
    names: list[str]

    def take(self, rows: Any) -> Names:
        """The same names for some rows."""
        return Names(self.codes[rows], self.names)

    def at(self, row: int) -> str | None:
        """The string of one row."""
        code = int(self.codes[row])
        return None if code < 0 else self.names[code]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: from the call that injects it to the end of the call that heals it (`end_ns` None: never).
    `exercised` is None where it cannot be known whether the system met it, as in histories that do not say."""

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
    """Which run this is; the empty string where the source does not say."""

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

    `invoked` and `completed` are positions among the client events; `end_ns` is the time of the last event of a
    client. `values` and `results` are Arrow arrays of JSON text, or lists of what a codec of the checker made of
    a foreign history; `errors` is an Arrow array of text. They are present only when asked for. A key is the text
    of a number, a string as it is, or JSON of anything else, as in the store's Parquet.
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
    """The keys themselves by code, where the source is foreign and their text says less."""
    processes: list[Any] | None = None
    """The processes themselves, likewise."""
    history: Any = None
    """The `History` that a codec of the checker made of a foreign file, when values were asked for."""
    timed: bool = True
    """Whether the source had times; without them there is no latency and no availability."""

    def __len__(self) -> int:
        """Operations."""
        return len(self.process)


def pair(process: Ints, is_invoke: Any) -> tuple[Ints, Ints]:
    """Rows of the invocations in order, and for each the row of its completion (`NEVER` where there is none).

    Takes the client events of a run in order. A process has one operation open at most, so in a stable sort by
    process every completion stands right after its invocation. Raises UnreadableRunError where that is broken.
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
