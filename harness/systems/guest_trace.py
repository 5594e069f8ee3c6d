"""The check of a plug-in's traces: whether its model explains the events in what its programs have printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from checker.limits import within_limits
from checker.trace import Event, Trace, TraceError, check_traces
from checker.trace.events import event_of
from harness.sdk.plugin import blamed
from harness.sdk.system import System
from harness.systems.base import CheckOutcome

__all__ = ["MAX_EVENTS", "MEMORY_MB", "TIMEOUT_S", "judge_logs"]

MAX_EVENTS = 600_000
"""Events that are read, of all replicas: half a kilobyte of memory each."""

TIMEOUT_S = 300.0
MEMORY_MB = 2048.0
"""Limits of the search, which may have to try many orders."""


class _TooMany(Exception):
    pass


def judge_logs(system: System, logs: Mapping[str, Sequence[Path]], file: str) -> CheckOutcome:
    """Whether the model of `system` explains the events in the logs of every host. Each program's log is in its own
    order. A log that cannot be read, a host without events, and whatever the plug-in, which is in `file`, raises make
    the outcome "unknown"."""
    assert system.trace_model is not None
    problems: list[str] = []
    traces: list[Trace] = []
    try:
        for host, paths in logs.items():
            of_host = []
            for path in paths:
                try:
                    of_host.append(Trace(host, _events(system, host, path, sum(len(each.events) for each in traces))))
                except OSError as error:
                    problems.append(f"the log {path.name} of {host} cannot be read ({error.strerror})")
            if not any(trace.events for trace in of_host):
                problems.append(f"{host} has logged no event")
            traces += of_host
        if problems:
            return CheckOutcome("unknown", "; ".join(problems))
        model = system.trace_model()
        result = within_limits(lambda: check_traces(model, traces, timeout_s=None), TIMEOUT_S, MEMORY_MB)
    except _TooMany:
        return CheckOutcome("unknown", f"the replicas have logged more than {MAX_EVENTS:,} events")
    except TraceError as error:
        return CheckOutcome("unknown", str(error))
    except Exception as error:
        return CheckOutcome("unknown", str(blamed(error, file, "the validation of traces")))
    return CheckOutcome(result.valid, result.reason, dict(result.stats))


def _events(system: System, host: str, path: Path, before: int) -> list[Event]:
    """The events in one log. Raises OSError, TraceError, _TooMany, and what the plug-in raises."""
    found: list[Event] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            values = system.trace_event(line.rstrip("\n"))
            if values is not None:
                found.append(event_of({**values, "node": host}, number))
                if before + len(found) > MAX_EVENTS:
                    raise _TooMany
    return found
