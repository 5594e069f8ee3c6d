"""The check of the brokers' traces: whether a model of Raft explains what the replicas wrote down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checker.limits import within_limits
from checker.models.base import ModelError
from checker.trace import TraceError, check_traces, read_trace
from checker.trace.models.raft import Raft
from harness.systems.base import CheckOutcome

__all__ = ["TIMEOUT_S", "judge_traces"]

INCOMPLETE = "the trace is incomplete"
"""How a replica's log tells so (node.dledger.tracing)."""

TIMEOUT_S = 300.0
MEMORY_MB = 4096.0
"""Limits of the check. A run of a minute takes seconds; the largest traces that are read, several minutes."""


def judge_traces(traces: Mapping[str, Path], logs: Mapping[str, Path]) -> CheckOutcome:
    """Whether the traces of all replicas, by host, have one order that the model explains. A trace that is missing, or
    that is incomplete by its own lines or by the replica's log, makes the outcome "unknown"."""
    problems, read = [], []
    for host, path in sorted(traces.items()):
        try:
            trace = read_trace(path)
        except OSError as error:
            problems.append(f"{host} left no trace ({error.strerror})")
            continue
        except TraceError as error:
            problems.append(str(error))
            continue
        if not trace.events:
            problems.append(f"the trace of {host} is empty")
        elif trace.node != host:
            problems.append(f"the trace of {host} is of {trace.node}")
        if _complains(logs[host]):
            problems.append(f"{host} says in its log that {INCOMPLETE}")
        read.append(trace)
    if problems:
        return CheckOutcome("unknown", "; ".join(problems))
    try:
        result = within_limits(lambda: check_traces(Raft(), read, timeout_s=None), TIMEOUT_S, MEMORY_MB)
    except (TraceError, ModelError) as error:
        return CheckOutcome("unknown", str(error))
    return CheckOutcome(result.valid, result.reason, dict(result.stats))


def _complains(log: Path) -> bool:
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            return any(f" node.dledger.trace {INCOMPLETE}" in line for line in lines)
    except OSError:
        return False
