"""What can be wrong with one transaction or one read, and how it is written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checker.history import FAIL, INFO, OK, History, freeze
from checker.words import short

__all__ = ["Anomalies", "Step", "Transactions", "described"]

Step = tuple[str, Any, Any]

#: Examples kept of every kind of anomaly; counts are exact.
MAX_EXAMPLES = 5


class Anomalies:
    """Counts and first examples (rows and a sentence) by kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, list[tuple[tuple[int, ...], str]]] = {}

    def add(self, kind: str, rows: Sequence[int], text: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append((tuple(dict.fromkeys(rows)), text))


class Transactions:
    """The transactions of a history: committed ones first class, others for what they may have left behind.

    ``steps`` holds one list per row: ``(write | r, key, value)``, where ``write`` is ``append`` or ``w``.  Raises
    ValueError for other steps, and for reads of lists that show none.
    """

    def __init__(self, history: History, write: str) -> None:
        self.history = history
        self.steps: list[list[Step]] = []
        self.status = history.status
        for row in range(len(history)):
            done = history.result[row] if history.status[row] == OK else None
            steps = done if done is not None else history.value[row]
            self.steps.append([_step(step, write) for step in steps or ()])
        self.committed = [row for row, status in enumerate(history.status) if status == OK]
        self.failed = [row for row, status in enumerate(history.status) if status == FAIL]
        self.unknown = [row for row, status in enumerate(history.status) if status == INFO]


_NAMES = {"r": "r", "read": "r", "w": "w", "write": "w", "append": "append"}


def _step(step: Any, write: str) -> Step:
    f, key, value = step
    name = _NAMES.get(f)
    if name is None or (name != "r" and name != write):
        raise ValueError(f"a step of a transaction must be {write} or r here, not {f!r}")
    if name == "w" and value is None:
        raise ValueError(f"null is written to {short(key)}, which nobody could tell from finding nothing there")
    if name == "r" and write == "append" and value.__class__ is not list and value is not None:
        if not isinstance(value, tuple):
            raise ValueError(f"a read of a list must show a list, not {short(value)}")
        value = list(value)
    if key.__class__ is list:
        key = freeze(key)
    return name, key, value


def described(history: History, row: int, steps: Sequence[Step]) -> str:
    """A transaction in a few words."""
    shown = ", ".join(
        f"{'read' if f == 'r' else f} {short(key, 20)}{'' if f == 'append' else ' ='} {short(value, 40)}"
        for f, key, value in steps[:6]
    )
    more = f", and {len(steps) - 6} more" if len(steps) > 6 else ""
    return f"T{row} of process {history.process[row]} ({shown}{more})"
