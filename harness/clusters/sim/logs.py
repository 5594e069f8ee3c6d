"""What simulated programs log, kept by host and stamped with the host's own clock.

The node logs through the standard library's loggers, which belong to the process, not to a host. While a simulation
runs, one handler takes all records under `node` and `asyncio`, and gives each to the host whose code is running.
Records of the harness's own client go where the harness's other records go.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator

from harness.clusters.sim.lane import LANE
from node.logs import LineFormatter

__all__ = ["MAX_LOG_LINES", "HostLog", "route_logs"]

MAX_LOG_LINES = 200_000
"""Newest lines kept per host; a host that logs more is in an endless loop."""

ROUTED = ("node", "asyncio")


class HostLog:
    """The log lines of one host, across its processes."""

    def __init__(self) -> None:
        self._formatter = LineFormatter()
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)

    def add(self, record: logging.LogRecord, wall_ms: int) -> None:
        """Keep a record as one line."""
        record.created = wall_ms / 1000
        record.msecs = float(wall_ms % 1000)
        self._lines.append(self._formatter.format(record))

    def write_line(self, line: str) -> None:
        """Keep a line of output as it is."""
        self._lines.append(line)

    def lines(self) -> list[str]:
        """Every line kept, oldest first."""
        return list(self._lines)

    def text(self) -> str:
        """The log as a file would have it."""
        return "".join(f"{line}\n" for line in self._lines)


class _Router(logging.Handler):
    """Gives each record to the lane it comes from; lanes without a log pass it on to the root logger's handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        lane = LANE.get(None)
        take = getattr(lane, "log_record", None)
        if take is not None:
            take(record)
            return
        root = logging.getLogger()
        if record.levelno >= root.getEffectiveLevel():
            for handler in root.handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)


@contextlib.contextmanager
def route_logs(level: int = logging.INFO) -> Iterator[None]:
    """Route records of simulated programs to their hosts while the block runs."""
    router = _Router()
    before = [(logger, logger.level, logger.propagate) for logger in map(logging.getLogger, ROUTED)]
    for logger, _, _ in before:
        logger.addHandler(router)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, old_level, propagate in before:
            logger.removeHandler(router)
            logger.setLevel(old_level)
            logger.propagate = propagate
