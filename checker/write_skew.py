"""Write skew: two transactions that each found no row of a key, and both inserted one (G2 of Adya's thesis, 1999)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from checker.history import FAIL, INFO, NEVER, OK, History
from checker.tally import Events, Tally
from checker.values import exact
from checker.verdict import Edge, Result
from checker.words import named_row, short

__all__ = ["check_write_skew"]


def check_write_skew(events: Events) -> Result:
    """Check that no key got two rows, although each transaction inserts one only if it finds none.

    An ``insert`` is a transaction that reads by predicate whether any table has a row of its key, and inserts its own
    if there is none; its value is the row, or a list with the row in its table's position and ``None`` in the others,
    as ``[7, None]``.  An insert that found a row fails.  A ``read`` returns the list of all rows of its key.  In every
    serial order at most one insert of a key commits.

    An insert has committed if it was acknowledged, or if a read shows its row.  Two of one key are a ``write-skew`` if
    they were concurrent, and a ``late-insert`` if one began after the other was known to have committed.  A row that
    nobody inserted, or whose insert failed, is ``unexpected``, as is one that a read shows twice.  These are invalid.

    An insert of unknown outcome is no violation on its own.  If it may be the second of its key and no later read
    shows whether it is, the key is counted as ``undecided``.  The answer is unknown if no key had two concurrent
    inserts of which one committed, because nothing was tested then, and if a later read lacks a committed row
    (``missing``): the row was lost or the read was stale, which this checker does not decide.
    """
    history = History.of(events)
    tally = Tally(
        "write-skew", history, wrong=("write-skew", "late-insert", "unexpected"), noted=("missing", "undecided")
    )
    keys = contended = 0
    for rows in history.rows_by_key().values():
        found = _Key(history, tally)
        found.take(rows)
        keys += bool(found.inserts)
        contended += found.is_contended()
        found.judge()
    tally.extra = {"keys": keys, "contended": contended}
    return _with_edges(tally.result(fine=_fine(tally, keys, contended), unknown=_unknown(tally, contended)), tally)


def _with_edges(result: Result, tally: Tally) -> Result:
    """The result, with the edges that order each of the two inserts in its witness before the other."""
    blind = "found no row of the key, and so came before the insert that the other one did"
    if result.witness is None or not (tally.counts["write-skew"] or tally.counts["late-insert"]):
        return result
    first = (
        Edge(source=0, target=1, kind="rw", reason=blind)
        if tally.counts["write-skew"]
        else Edge(source=0, target=1, kind="realtime", reason="was known to have committed before the other one began")
    )
    edges = (first, Edge(source=1, target=0, kind="rw", reason=blind))
    return replace(result, witness=replace(result.witness, edges=edges))


def _fine(tally: Tally, keys: int, contended: int) -> str:
    text = f"{keys} keys, {contended} of them with concurrent inserts of which one committed; a second one never did"
    undecided = tally.counts["undecided"]
    return f"{text} (for {undecided} keys it is not known whether a second one did)" if undecided else text


def _unknown(tally: Tally, contended: int) -> str | None:
    if tally.counts["missing"]:
        return (
            f"{tally.examples['missing'][0]}: it was lost, or the read was stale (in total: {tally.counts['missing']} "
            "missing); such reads do not show what else committed"
        )
    if not contended:
        return "no key had concurrent inserts of which one committed: nothing was tested"
    return None


@dataclass(slots=True)
class _Key:
    """The inserts and reads of one key, as rows of the history."""

    history: History
    tally: Tally
    inserts: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    shown: dict[int, set[Any]] = field(default_factory=dict)
    """What each read shows."""
    known: dict[int, int] = field(default_factory=dict)
    """Insert -> position in the history from which on it is known to have committed."""
    shown_by: dict[int, int] = field(default_factory=dict)
    """Insert -> read that shows it."""

    def take(self, rows: Sequence[int]) -> None:
        history = self.history
        by_row: dict[Any, list[int]] = {}
        for row in rows:
            if history.f[row] == "insert":
                self.inserts.append(row)
                by_row.setdefault(_row_of(history.value[row]), []).append(row)
                if history.status[row] == OK:
                    self.known[row] = history.returned[row]
            elif history.f[row] == "read" and history.status[row] == OK:
                self.reads.append(row)
        for read in self.reads:
            self._take_read(read, by_row)

    def _take_read(self, read: int, by_row: dict[Any, list[int]]) -> None:
        history, result = self.history, self.history.result[read]
        if not isinstance(result, (list, tuple)):
            raise TypeError(f"a read of write-skew must return a list of rows, not {short(result)}")
        shown: set[Any] = set()
        for value in result:
            row = exact(value)
            tried = [
                insert
                for insert in by_row.get(row, ())
                if history.status[insert] != FAIL and history.invoked[insert] < history.returned[read]
            ]
            if not tried or row in shown:
                why = "twice" if row in shown else "which nobody inserted, or whose insert had failed"
                text = f"{named_row(history, read)} shows row {short(value)}, {why}"
                self.tally.add("unexpected", (read, *by_row.get(row, ())[:1]), text)
            else:
                insert = min(tried, key=lambda each: history.status[each] != OK)
                self.known[insert] = min(self.known.get(insert, NEVER), history.returned[read])
                self.shown_by.setdefault(insert, read)
            shown.add(row)
        self.shown[read] = shown

    def is_contended(self) -> bool:
        """Whether two inserts were concurrent, at least one of which has committed."""
        until = until_of_committed = -1
        for insert in self.inserts:
            is_committed = insert in self.known
            if self.history.invoked[insert] < (until if is_committed else until_of_committed):
                return True
            returned = self.history.returned[insert]
            until = max(until, returned)
            if is_committed:
                # If only a read shows that an insert committed, the insert had ended when that read returned.
                until_of_committed = max(until_of_committed, min(returned, self.known[insert]))
        return False

    def judge(self) -> None:
        """Count what is wrong with the key."""
        committed = [insert for insert in self.inserts if insert in self.known]
        for insert in committed:
            self._judge_later_reads(insert)
        if len(committed) > 1:
            self._add_second(committed)
            return
        unknown = [row for row in self.inserts if self.history.status[row] == INFO and row not in self.known]
        if len(committed) + len(unknown) > 1 and not any(self._tells(read, committed, unknown) for read in self.reads):
            first, second = [*committed, *unknown][:2]
            self.tally.add(
                "undecided", (first, second), f"{named_row(self.history, first)}, and {named_row(self.history, second)}"
            )

    def _add_second(self, committed: Sequence[int]) -> None:
        """Report two of several committed inserts, concurrent ones if possible."""
        first, kind, second = committed[0], "late-insert", committed[1]
        last = first
        for insert in committed[1:]:
            if self.history.invoked[insert] < self.known[last]:
                first, kind, second = last, "write-skew", insert
                break
            last = max(last, insert, key=self.known.__getitem__)
        reads = list(dict.fromkeys(self.shown_by[row] for row in (first, second) if self.history.status[row] != OK))
        when = (
            "at the same time, and each of them found no row of the key"
            if kind == "write-skew"
            else "although the second began when the row of the first was there"
        )
        seen = "".join(f", as {named_row(self.history, read)} shows" for read in reads)
        text = f"{named_row(self.history, first)} and {named_row(self.history, second)} both committed, {when}{seen}"
        self.tally.add(kind, (first, second, *reads), text)

    def _judge_later_reads(self, insert: int) -> None:
        history = self.history
        row = _row_of(history.value[insert])
        for read in self.reads:
            if history.invoked[read] > self.known[insert] and row not in self.shown[read]:
                text = f"{named_row(history, insert)} had committed, and {named_row(history, read)} lacks its row"
                self.tally.add("missing", (insert, read), text)
                return

    def _tells(self, read: int, committed: Sequence[int], unknown: Sequence[int]) -> bool:
        """Whether a read proves that inserts that it does not show had not committed: it began after all inserts of
        unknown outcome, and is recent enough to show the committed ones."""
        history = self.history
        return all(history.invoked[insert] < history.invoked[read] for insert in unknown) and all(
            _row_of(history.value[insert]) in self.shown[read] for insert in committed
        )


def _row_of(value: Any) -> Any:
    """The row of an insert, as `exact` makes it; from a list with one position per table, the only one that is set."""
    if isinstance(value, (list, tuple)):
        filled = [each for each in value if each is not None]
        if len(filled) == 1:
            return exact(filled[0])
    return exact(value)
