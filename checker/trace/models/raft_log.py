"""Replicated logs as a tree of entries.

An entry is its index, its term and a checksum that covers everything before it, so it stands for the whole log up to
it; a log is its last entry.  Logs of several replicas share what they have in common, and no operation copies one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EMPTY", "Entry", "Group"]


@dataclass(frozen=True, slots=True)
class Group:
    """The members that the entry ``index`` made the group; -1: what a replica was configured with."""

    index: int
    members: frozenset[str]

    def __str__(self) -> str:
        members = ", ".join(sorted(self.members)) or "nobody"
        return f"{members} ({'as configured' if self.index < 0 else f'by entry {self.index}'})"

    @property
    def quorum_size(self) -> int:
        """How many members make a majority."""
        return len(self.members) // 2 + 1


class Entry:
    """An entry, and the log that it ends.  ``group`` is the newest one that this log defines, None if it defines none.

    Each entry has a second, longer link backwards, so that an entry is found in a number of steps that grows with the
    logarithm of the distance (Myers, "An applicative random-access stack", 1983).
    """

    __slots__ = ("crc", "group", "index", "jump", "parent", "term")

    def __init__(self, index: int, term: int, crc: int, parent: Entry | None, members: frozenset[str] | None = None):
        self.index = index
        self.term = term
        self.crc = crc
        self.parent: Entry = self if parent is None else parent
        before = self.parent
        self.jump: Entry = before
        if parent is not None and before.index - before.jump.index == before.jump.index - before.jump.jump.index:
            self.jump = before.jump.jump
        inherited = None if parent is None else parent.group
        self.group: Group | None = inherited if members is None else Group(index, members)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Entry) and (self.index, self.term, self.crc) == (other.index, other.term, other.crc)

    def __hash__(self) -> int:
        return hash((self.index, self.term, self.crc))

    def __str__(self) -> str:
        return "nothing" if self.index < 0 else f"entry {self.index} of term {self.term}"

    def at(self, index: int) -> Entry:
        """The entry at ``index``, which is at most this one's; -1 stands for the empty log."""
        entry = self
        while entry.index > index:
            entry = entry.jump if entry.jump.index >= index else entry.parent
        return entry

    def holds(self, entry: Entry) -> bool:
        """Whether the log that ends here has ``entry``."""
        return self.index >= entry.index and self.at(entry.index) == entry

    def is_at_least(self, other: Entry) -> bool:
        """Whether this log may win the vote of a member with the other one (Raft 5.4.1)."""
        return (self.term, self.index) >= (other.term, other.index)


EMPTY = Entry(-1, -1, 0, None)
"""The end of an empty log."""
