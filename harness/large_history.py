"""Histories that do not fit into memory: known before they are read, counted as they go by, and not judged.

A history is judged as a list of its events. Where that list would take more than is free, the kernel would kill the
harness at the end of a run of hours, which then had neither results nor a report.
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
"""Memory that a history takes while it is judged, for each byte of its file: 4.8 were measured with operations on
registers, 5.3 with reads of logs, 6.4 with transactions of short steps."""

SHARE_FOR_A_CHECK = 0.75
"""Of the memory that is free beside the history, what one check may take: results, witness and report come after it."""

LEAST_CHECK_MB = 16
"""Memory that a check is given however little is free, in MiB: the least that --checker-memory takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """A history that does not fit into memory: why, and what was counted as it went by."""

    reason: str
    ops: Mapping[str, int]
    """Events of clients by type."""
    ops_by_f: Mapping[str, Mapping[str, int]]
    """As `counts_by_f` gives them."""


def too_large_to_judge(reader: HistoryReader) -> TooLarge | None:
    """What is left of a history that would take more memory than is free; None where it fits. Raises HistoryError."""
    free = free_bytes()
    try:
        needed = os.path.getsize(reader.path) * BYTES_PER_BYTE
    except OSError:  # which reading it will say
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
        f"not judged: {sum(ops.values()):,} events take some {needed / 1e9:,.2f} GB of memory, of which "
        f"{free / 1e9:,.2f} GB are free; harness analyze judges them where there is more, and harness check --model "
        "takes less"
    )
    return TooLarge(reason=reason, ops=ops, ops_by_f=by_f)


def memory_for_a_check_mb(asked_mb: int) -> int:
    """MiB that a check may take of the `asked_mb` now that the history is in memory: no more than is free, so that it
    ends in unknown, and not in a harness that the kernel kills before there are results."""
    free = free_bytes()
    if free is None:
        return asked_mb
    return min(asked_mb, max(LEAST_CHECK_MB, int(free * SHARE_FOR_A_CHECK) >> 20))


def counts_by_f(clients: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """How the operations of clients ended, by function and type of event."""
    counts: dict[str, Counter[str]] = {}
    for event in clients:
        if event["type"] != "invoke":
            counts.setdefault(str(event["f"]), Counter())[event["type"]] += 1
    return {f: dict(sorted(counter.items())) for f, counter in sorted(counts.items())}
