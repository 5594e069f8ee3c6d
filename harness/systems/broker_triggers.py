"""Triggers (nemesis.target.Triggers) found in the brokers' logs.

On clusters whose logs the harness can read during a run, a schedule may wait for an event that a broker logs as it
happens. The harness sees the line about POLL_S after it was written, and injecting a fault takes a few milliseconds
more, so events that are over within one disk sync (`voting`, `storing`) are not among the kinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemesis.triggers import Occurrence, Trigger

__all__ = ["LOGGED_KINDS", "LogTriggers", "occurrence_of"]

POLL_S = 0.002
"""Polling interval of the logs. A poll is one system call per host."""

MAX_REMEMBERED = 500
"""Past occurrences that a schedule can still match: those of its previous step, which takes seconds at most."""

MAX_READ_BYTES = 1 << 20
"""Read from one log per poll; the rest follows at the next poll."""

_LINES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r" node\.dledger\.role role_change self=\S+ role=LEADER "), "elected"),
    (re.compile(r" node\.dledger\.role vote self="), "voted"),
    (re.compile(r" node\.broker master in term "), "promoted"),
    (re.compile(r" node READY broker "), "recovered"),
    (re.compile(r" node\.dledger\.pusher push to (n\d+): COMPARE -> TRUNCATE at "), "truncating"),
    (re.compile(r" node\.dledger\.pusher push to (n\d+): (?:COMPARE|TRUNCATE) -> APPEND at (?!-1$)"), "matched"),
)
"""Pattern of a log line, and its trigger. The trigger occurs on the host that logs the line, unless the line names
another one: the leader logs what it tells a follower to do."""

LOGGED_KINDS = frozenset(kind for _, kind in _LINES)
"""The triggers of nemesis.triggers.KINDS that a broker's log shows."""


def occurrence_of(host: str, line: str) -> tuple[str, str] | None:
    """(kind, host) of the trigger in a line that the broker of `host` logged; None if it has none."""
    for pattern, kind in _LINES:
        if found := pattern.search(line):
            return kind, (found.group(1) if pattern.groups else host)
    return None


@dataclass(slots=True)
class _Log:
    path: Path
    position: int = 0
    rest: bytes = b""


class LogTriggers:
    """See nemesis.target.Triggers; `logs` maps hosts to their brokers' log files."""

    def __init__(self, logs: Mapping[str, Path], *, now_s: Callable[[], float]) -> None:
        self._logs = {host: _Log(path) for host, path in logs.items()}
        self._now_s = now_s
        self._past: deque[Occurrence] = deque(maxlen=MAX_REMEMBERED)
        self._news = asyncio.Event()

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Follow the logs while the block runs; earlier lines are ignored."""
        for log in self._logs.values():
            log.position, log.rest = _size_bytes(log.path), b""
        follower = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def wait(self, trigger: Trigger, *, since_s: float, timeout_s: float) -> Occurrence | None:
        """The trigger's first occurrence since `since_s` (event loop time); None if there is none within `timeout_s`
        seconds, and immediately for a kind that is not logged."""
        if trigger.kind not in LOGGED_KINDS:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    for occurrence in self._past:
                        if occurrence.at_s >= since_s and trigger.matches(occurrence):
                            return occurrence
                    self._news.clear()
                    await self._news.wait()
        return None

    async def _follow(self) -> None:
        while True:
            for host, log in self._logs.items():
                for line in _new_lines(log):
                    found = occurrence_of(host, line)
                    if found is not None:
                        self._past.append(Occurrence(kind=found[0], host=found[1], at_s=self._now_s()))
                        self._news.set()
            await asyncio.sleep(POLL_S)


def _size_bytes(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _new_lines(log: _Log) -> list[str]:
    """The lines that were completed since the last poll."""
    if _size_bytes(log.path) <= log.position:
        return []
    try:
        with log.path.open("rb") as file:
            file.seek(log.position)
            data = file.read(MAX_READ_BYTES)
    except OSError:
        return []
    log.position += len(data)
    *lines, log.rest = (log.rest + data).split(b"\n")
    return [line.decode(errors="replace") for line in lines]
