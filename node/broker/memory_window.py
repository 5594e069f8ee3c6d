"""Which messages count as being in memory: the newest part of the log, as large as a share of the machine's memory.

The kernel is not asked which pages it holds (nor in R): everything before that part is taken to come from the
disk. Three things depend on it: how much one pull gets, whether a consumer that lags is sent to a slave, and whether a
new group may begin at the very start of a queue.
"""

from __future__ import annotations

from node.broker.ledger import LedgerStore

__all__ = ["MemoryWindow"]


class MemoryWindow:
    """The newest `percent` of `memory_bytes` of `log` (R: accessMessageInMemoryMaxRatio, 40)."""

    def __init__(self, log: LedgerStore, *, memory_bytes: int, percent: int) -> None:
        self._log = log
        self._memory_bytes = memory_bytes
        self.set_percent(percent)

    def set_percent(self, percent: int) -> None:
        """Set another share of the memory."""
        self._size_bytes = self._memory_bytes * percent // 100

    def is_behind(self, physical_offset: int) -> bool:
        """Whether reading at this offset of the log is assumed to go to the disk."""
        return self._log.committed_pos - physical_offset > self._size_bytes
