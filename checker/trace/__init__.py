"""Trace validation: a model of a protocol against what its replicas logged.

from checker.trace import check_traces, read_trace
from checker.trace.models.raft import Raft

result = check_traces(Raft(), [read_trace(path) for path in paths])
print(result.verdict, result.reason)

A history of the clients may look right although the replicas broke their protocol; a trace shows it where it happens.
"""

from __future__ import annotations

from checker.trace.events import Event, Trace, TraceError, merge_by_time, parse_trace, read_trace
from checker.trace.model import TraceModel
from checker.trace.search import check_traces

__all__ = [
    "Event",
    "Trace",
    "TraceError",
    "TraceModel",
    "check_traces",
    "merge_by_time",
    "parse_trace",
    "read_trace",
]
