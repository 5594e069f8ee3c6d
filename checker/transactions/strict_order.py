"""An order of transactions on registers that respects real time, for any number of them.

Whether some order explains what transactions read is NP-complete to decide, because the values of registers do not
show in which order they were written (``transactions.orders`` searches, up to a limit).  With real time the question is
one of linearizability, and only transactions that run at the same time can change places: so they are executed one
after the other (the search of Wing & Gong, "Testing and verifying concurrent objects", JPDC 1993).  Every value is
written once, so a version must not be replaced before all that read it had their turn, which leaves few choices.  The
search is depth first and limited; what it finds is a proof, and if it finds nothing, nothing follows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from checker.history import NEVER, OK
from checker.transactions.anomalies import Transactions
from checker.transactions.rw_register import Versions

__all__ = ["has_strict_order"]

#: Transactions executed for each in the history, again and again after steps back, before the search gives up.
MAX_EXECUTED = 20
#: Transactions executed between two looks at the clock.
WATCH_EVERY = 1_024

#: The value of a key, and which transaction wrote it.
Written = tuple[Any, int]
NOTHING: Written = (None, -1)
#: Transactions that wait for one another that are followed to the reason.
MAX_REASONS = 20


def has_strict_order(transactions: Transactions, versions: Versions, is_over: Callable[[], Any] = lambda: None) -> bool:
    """Whether an order of the transactions that took effect was found that respects real time and explains every read.

    No read may be of a value that nobody, or a failed transaction, wrote, or of one that its writer replaced itself.
    """
    search = _Search(transactions, versions)
    limit = MAX_EXECUTED * (len(search.left) + 1)
    for executed, is_done in enumerate(search.run()):
        if is_done:
            return True
        if executed > limit or (not executed % WATCH_EVERY and is_over()):
            return False
    return False


class _Possible(NamedTuple):
    """A transaction that can be next, the most urgent first if sorted."""

    should_wait: bool
    """Whether it probably comes after another that is left."""
    latest: int
    row: int


@dataclass(slots=True)
class _Executed:
    """A transaction that was executed, the values it replaced, and those that could have been in its place."""

    row: int
    before: list[tuple[Any, Written]]
    others: list[_Possible]


class _Chain:
    """Some rows in a fixed order, of which each can be taken out, and put back if the last one out is the first one
    back (Knuth, "Dancing links", 2000)."""

    __slots__ = ("after", "before", "end")

    def __init__(self, rows: Sequence[int], size: int) -> None:
        self.end = size
        self.after = [size] * (size + 1)
        self.before = [size] * (size + 1)
        last = size
        for row in (*rows, size):
            self.after[last], self.before[row] = row, last
            last = row

    @property
    def first(self) -> int:
        return self.after[self.end]

    def take(self, row: int) -> None:
        before, after = self.before[row], self.after[row]
        self.after[before], self.before[after] = after, before

    def put_back(self, row: int) -> None:
        self.after[self.before[row]] = self.before[self.after[row]] = row


class _Search:
    def __init__(self, transactions: Transactions, versions: Versions) -> None:
        history = transactions.history
        size = len(history)
        self._invoked, self._returned = history.invoked, history.returned
        self._is_certain = [status == OK for status in history.status]
        self.left = sorted({*transactions.committed, *versions.happened}, key=lambda row: (history.invoked[row], row))
        self._by_return = _Chain(sorted(transactions.committed, key=history.returned.__getitem__), size)
        self._by_invocation = _Chain(self.left, size)
        self._writes: list[dict[Any, Any]] = [{} for _ in range(size)]
        self._reads: list[dict[Any, Any]] = [{} for _ in range(size)]
        for row in self.left:
            for f, key, value in transactions.steps[row]:
                if f != "r":
                    self._writes[row][key] = value
                elif self._is_certain[row] and key not in self._writes[row]:
                    self._reads[row][key] = value
        self._unread = Counter(version for row in self.left for version in self._reads[row].items())
        """Transactions left that read a version before they write the key."""
        self._latest = self._deadlines(versions)
        self._state: dict[Any, Written] = {}
        self._place = [-1] * size
        """Of each transaction in the order, -1 for those left."""
        self._versions = versions
        self._after: defaultdict[int, set[int]] = defaultdict(set)
        """For some transactions, others after which they probably come."""

    def _deadlines(self, versions: Versions) -> list[int]:
        """By when each transaction has taken effect: its return, or the first of those that read what it wrote."""
        latest = [
            position if is_certain else NEVER
            for position, is_certain in zip(self._returned, self._is_certain, strict=True)
        ]
        returns = latest.copy()
        for version, readers in versions.readers.items():
            row = versions.writer.get(version)
            if row is not None:
                latest[row] = min(latest[row], *(returns[reader] for reader in readers))
        return latest

    def run(self) -> Iterator[bool]:
        """Execute transactions; yields after each whether none is left, and ends where there is no way on."""
        done: list[_Executed] = []
        while self._by_invocation.first != self._by_invocation.end:
            possible = self._possible()
            if not possible:
                keep = self._learned(self._by_return.first)
                if keep is not None:
                    while len(done) > keep:
                        self._undo(done.pop())
                    continue
            while not possible:
                if not done:
                    return
                last = done.pop()
                self._undo(last)
                possible = last.others
            done.append(_Executed(possible[0].row, self._execute(possible[0].row, len(done)), possible[1:]))
            yield False
        yield True

    def _learned(self, row: int) -> int | None:
        """Learn why the one that must be executed next cannot be: some writer should have waited for another.

        Returns how many of those executed to keep, without that writer, or ``None`` if there is nothing new to learn.
        """
        writer = self._versions.writer
        for _ in range(MAX_REASONS):
            if row == self._by_return.end:
                return None
            wrong = next((v for v in self._reads[row].items() if self._state.get(v[0], NOTHING)[0] != v[1]), None)
            if wrong is not None:
                first = reason = writer.get(wrong, -1)
                if first < 0 or self._place[first] >= 0:
                    return None
                key = wrong[0]
            else:
                blocked = self._blocked(row)
                if blocked is None:
                    return None
                key, reader = blocked
                if self._invoked[reader] <= self._latest[row]:
                    row = reader
                    continue
                first, reason = row, self._by_return.end
            keep = self._put_before(first, key)
            if keep is not None:
                return keep
            row = reason
        return None

    def _put_before(self, first: int, key: Any) -> int | None:
        """Learn that a transaction comes before the writer of the present value of a key.  If that one read what it
        replaced, nobody comes between it and the writer before it: then before that one, and so on."""
        second = self._state.get(key, NOTHING)[1]
        while second >= 0 and key in self._reads[second]:
            second = self._versions.writer.get((key, self._reads[second][key]), -1)
        return self._learn(first, second)

    def _learn(self, first: int, second: int) -> int | None:
        if second < 0 or first in self._after[second]:
            return None
        self._after[second].add(first)
        return self._place[second]

    def _blocked(self, row: int) -> tuple[Any, int] | None:
        """A key that the transaction writes, and one left that reads its present value."""
        for key in self._writes[row]:
            version = (key, self._state.get(key, NOTHING)[0])
            if self._unread[version] > (key in self._reads[row]):
                for reader in self._versions.readers[version]:
                    if reader != row and self._place[reader] < 0 and key in self._reads[reader]:
                        return key, reader
        return None

    def _possible(self) -> list[_Possible]:
        """The transactions that can be next, the most urgent first.

        One whose writes nobody reads, such as one that only reads, need not wait for others: an order in which it comes
        later stays one if it comes now.
        """
        chain = self._by_invocation
        earliest = self._by_return.first
        horizon = NEVER if earliest == self._by_return.end else self._returned[earliest]
        after, row, end = chain.after, chain.first, chain.end
        possible = []
        while row != end and self._invoked[row] <= horizon:
            if self._is_possible(row):
                if not any(map(self._unread.__getitem__, self._writes[row].items())):
                    return [_Possible(False, 0, row)]
                should_wait = row in self._after and any(self._place[each] < 0 for each in self._after[row])
                possible.append(_Possible(should_wait, self._latest[row], row))
            row = after[row]
        return sorted(possible)

    def _is_possible(self, row: int) -> bool:
        """Whether it would read what it read, and no other transaction still has to read what it replaces."""
        state, reads = self._state, self._reads[row]
        for key, value in reads.items():
            if state.get(key, NOTHING)[0] != value:
                return False
        return all(self._unread[key, state.get(key, NOTHING)[0]] <= (key in reads) for key in self._writes[row])

    def _execute(self, row: int, place: int) -> list[tuple[Any, Written]]:
        self._place[row] = place
        self._by_invocation.take(row)
        if self._is_certain[row]:
            self._by_return.take(row)
        for version in self._reads[row].items():
            self._unread[version] -= 1
        state, writes = self._state, self._writes[row]
        before = [(key, state.get(key, NOTHING)) for key in writes]
        for key, value in writes.items():
            state[key] = (value, row)
        return before

    def _undo(self, executed: _Executed) -> None:
        row = executed.row
        self._place[row] = -1
        self._state.update(executed.before)
        for version in self._reads[row].items():
            self._unread[version] += 1
        if self._is_certain[row]:
            self._by_return.put_back(row)
        self._by_invocation.put_back(row)
