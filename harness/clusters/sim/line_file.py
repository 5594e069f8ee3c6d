"""A file of lines as one process uses it: `node.runtime.LineFile`. Once the process is dead, nothing is added."""

from __future__ import annotations

from harness.clusters.sim.lane import Lane

__all__ = ["SimLineFile"]


class SimLineFile:
    """Adds to `lines`, the file's content, which outlives the process."""

    def __init__(self, lines: list[str], lane: Lane) -> None:
        self._lines = lines
        self._lane = lane
        self._size_bytes = sum(len(line) + 1 for line in lines)

    def append(self, line: str) -> None:
        if not self._lane.is_dead:
            self._lines.append(line)
            self._size_bytes += len(line) + 1

    def size_bytes(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        """Nothing is open."""
