"""Histories that do not fit into memory: detected before they are read, counted as a stream, and not judged.

A history is judged as a list of its events. If that list needed more memory than is free, the kernel would kill the
harness at the end of a run of hours, leaving neither results nor a report.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checker.faults import NEMESIS
from checker.free_memory import free_bytes
from harness.history_writer import HistoryReader

__all__ = ["TooLarge", "counts_by_f", "memory_for_a_check_mb", "too_large_to_judge"]

BYTES_PER_BYTE = 7
"""Bytes of memory for judging, per byte of the history file: measured were 4.8 for registers, 5.3 for log reads, 6.4
for transactions with short steps."""

SHARE_FOR_A_CHECK = 0.75
"""Fraction of the memory left beside the history that one check may use; results, witness and report come after it."""

LEAST_CHECK_MB = 16
"""Minimum memory of a check in MiB, however little is free: the minimum of --checker-memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """A history that does not fit into memory: the reason, and the counts."""

    reason: str
    ops: Mapping[str, int]
    """Client events by type."""
    ops_by_f: Mapping[str, Mapping[str, int]]
    """The result of `counts_by_f`."""


def too_large_to_judge(reader: HistoryReader) -> TooLarge | None:
    """The counts of a history that would need more memory than is free; None if it fits. Raises HistoryError."""
    free = free_bytes()
    try:
        needed = os.path.getsize(reader.path) * BYTES_PER_BYTE
    except OSError:  # reading it will report this
        return None
    if free is None or needed <= free:
        return None
    ops: Counter[str] = Counter()

    def clients() -> Iterator[Mapping[str, Any]]:
        for event in reader:
            if event["process"] != NEMESIS:
                ops[event["type"]] += 1
                yield event

    by_f = counts_by_f(clients())
    reason = (
        f"not judged: {sum(ops.values()):,} events take about {needed / 1e9:,.2f} GB of memory, but only "
        f"{free / 1e9:,.2f} GB are free: run harness analyze on a machine with more, or harness check --model, which "
        "needs less"
    )
    return TooLarge(reason=reason, ops=ops, ops_by_f=by_f)


def memory_for_a_check_mb(asked_mb: int) -> int:
    """MiB that a check may use, at most `asked_mb`, now that the history is in memory: no more than is free, so that
    the check ends as unknown instead of the kernel killing the harness before there are results."""
    free = free_bytes()
    if free is None:
        return asked_mb
    return min(asked_mb, max(LEAST_CHECK_MB, int(free * SHARE_FOR_A_CHECK) >> 20))


def counts_by_f(clients: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Completions of clients' operations, by function and type."""
    counts: dict[str, Counter[str]] = {}
    for event in clients:
        if event["type"] != "invoke":
            counts.setdefault(str(event["f"]), Counter())[event["type"]] += 1
    return {f: dict(sorted(counter.items())) for f, counter in sorted(counts.items())}
