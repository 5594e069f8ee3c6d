"""Append-only logs with offsets: linear time.

An append at offset o has rank 2o+1, a read or tail that saw t messages rank 2t: that is the order, if there is one.
It remains to check that ranks agree with real time and that every offset holds the same value wherever it is seen.
An append that crashed counts only if it was seen, or if it must fill an offset that nobody saw.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any

from checker.history import INFO, NEVER, OK, History, columns
from checker.linearizability.outcome import NotApplicable, Violation
from checker.linearizability.ranks import rank_conflict
from checker.models.logs import Log
from checker.verdict import Edge
from checker.words import named_row, short

__all__ = ["check_log_order"]


def check_log_order(history: History, rows: Sequence[int], model: Log) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`Log` whose appends write different values.

    Raises :class:`NotApplicable` for equal values, appends without an offset, reads without a tail, or values that are
    not hashable.
    """
    try:
        if _surely_fine(history, rows):
            return None
        return _check(history, rows)
    except (TypeError, KeyError, IndexError) as error:
        if any(_is_without_offset(history, row) for row in rows):
            raise NotApplicable("an append got no offset") from None
        raise NotApplicable(f"results are not [offset, value] or offset, messages, tail ({error})") from error


def _is_without_offset(history: History, row: int) -> bool:
    if history.f[row] != "append" or history.status[row] != OK:
        return False
    result = history.result[row]
    return result is None or result[0] is None


_ABSENT = object()


def _surely_fine(history: History, rows: Sequence[int]) -> bool:
    """The fast path for logs whose every message was acknowledged: ranks are dense, so lists suffice without sorting.

    ``False`` only means that the slow path has to decide.
    """
    done = columns(history, rows, "f", "value", "result", "status", "invoked", "returned")
    fs, values, _, statuses, _, _ = done
    crashed: list[Any] = []
    if statuses.count(OK) != len(statuses):
        pairs = zip(fs, values, statuses, strict=True)
        crashed = [value for f, value, status in pairs if f == "append" and status == INFO]
        is_ok = list(map(OK.__eq__, statuses))
        done = [list(compress(column, is_ok)) for column in done]
    acked = done[0].count("append")
    view = _DenseLog(len(done[0]) + 2)
    if not view.take(*done):
        return False
    # Every offset below ``acked`` must be taken: then none was assigned twice, and none is larger.
    log = view.log
    del log[acked:]
    shown = set(log)
    if len(shown) != acked or _ABSENT in shown or not shown.isdisjoint(crashed):
        return False
    if max(view.seen_begun[acked + 1 :]) >= 0:
        return False
    return all(log[start:end] == messages for start, end, messages in view.reads) and view.is_in_order(acked)


class _DenseLog:
    """The value at each offset, and when it was appended and seen; ``room`` exceeds all possible offsets and tails."""

    __slots__ = ("append_begun", "append_done", "log", "reads", "seen_begun", "seen_done")

    def __init__(self, room: int) -> None:
        self.log: list[Any] = [_ABSENT] * room
        #: Last invocation and first return of the append at each offset, and of reads and tails by how many they saw.
        self.append_begun, self.append_done = [-1] * room, [NEVER] * room
        self.seen_begun, self.seen_done = [-1] * room, [NEVER] * room
        #: (start, end, messages) of reads that showed messages whose appends had not been processed by then.
        self.reads: list[tuple[int, int, Any]] = []

    def take(
        self,
        fs: Sequence[str],
        values: Sequence[Any],
        results: Sequence[Any],
        statuses: Sequence[str],
        invoked: Sequence[int],
        returned: Sequence[int],
    ) -> bool:
        """Take completed operations, in order of invocation; ``False`` if an offset is out of all bounds."""
        log, append_begun, append_done, reads = self.log, self.append_begun, self.append_done, self.reads
        seen_begun, seen_done = self.seen_begun, self.seen_done
        try:
            for f, value, result, begun, done in zip(fs, values, results, invoked, returned, strict=True):
                if f == "append":
                    offset = result[0]
                    if offset < 0:
                        return False
                    log[offset] = value
                    append_begun[offset] = begun
                    append_done[offset] = done
                    continue
                if f == "read":
                    tail = result["tail"]
                    messages = result["messages"]
                    if messages:
                        start = result["offset"]
                        end = start + len(messages)
                        # A read mostly shows messages whose appends were invoked before it; others are compared later.
                        if log[start:end] != messages:
                            reads.append((start, end, messages))
                        if start < 0 or end > tail:
                            return False
                else:
                    tail = result
                if tail < 0:
                    return False
                seen_begun[tail] = begun
                if done < seen_done[tail]:
                    seen_done[tail] = done
        except IndexError:
            return False
        return True

    def is_in_order(self, acked: int) -> bool:
        """Whether no operation returned before one of a lower rank was invoked (see ``ranks``)."""
        last = -1
        for seen_last, seen_first, last_begun, first_done in zip(
            self.seen_begun[: acked + 1], self.seen_done, self.append_begun, self.append_done, strict=False
        ):
            if seen_first < last:
                return False
            if seen_last > last:
                last = seen_last
            if first_done < last:
                return False
            if last_begun > last:
                last = last_begun
        return True


def _check(history: History, rows: Sequence[int]) -> Violation | None:
    last_invoke: dict[int, int] = {}
    first_return: dict[int, int] = {}
    content: dict[int, Any] = {}
    acked = 0
    crashed: dict[Any, int] = {}
    reads: list[Any] = []
    get = first_return.get
    tails = 0
    for f, value, result, status, invoked, returned in zip(
        *columns(history, rows, "f", "value", "result", "status", "invoked", "returned"), strict=True
    ):
        if f == "append":
            if status is OK or status == OK:
                offset = result[0]
                rank = 2 * offset + 1
                content[offset] = value
                acked += 1
            else:
                if status == INFO:
                    crashed[value] = invoked
                    tails += 1
                continue
        elif status is not OK and status != OK:
            continue
        elif f == "read":
            if result["messages"]:
                reads.append((result["offset"], result["messages"], result["tail"]))
            rank = 2 * result["tail"]
        else:
            rank = 2 * result
        last_invoke[rank] = invoked
        if returned < get(rank, NEVER):
            first_return[rank] = returned

    if min(last_invoke, default=0) < 0:
        return _below_zero(history, rows)
    values = set(content.values())
    if len(values) != len(content) or len(crashed) != tails or not values.isdisjoint(crashed):
        raise NotApplicable("two appends append the same value")
    if len(content) != acked:
        return _two_acks(history, rows)
    if not _reads_agree(content, reads):
        violation = _settle_reads(history, rows, content, crashed, last_invoke, first_return)
        if violation is not None:
            return violation
    highest = max(last_invoke, default=0)
    if len(content) < (highest + 1) // 2:
        violation = _fill_holes(history, rows, content, crashed, last_invoke, first_return, highest)
        if violation is not None:
            return violation
    conflict = rank_conflict(first_return, last_invoke)
    return None if conflict is None else _out_of_order(history, rows, content, *conflict)


def _reads_agree(content: dict[int, Any], reads: list[Any]) -> bool:
    """Whether every message read agrees with the acknowledged appends.  Fast, but requires all offsets to be known."""
    if not reads:
        return True
    try:
        log = [content[offset] for offset in range(len(content))]
    except KeyError:
        return False
    for offset, messages, tail in reads:
        end = offset + len(messages)
        if offset < 0 or end > tail or log[offset:end] != messages:
            return False
    return True


def _settle_reads(
    history: History,
    rows: Sequence[int],
    content: dict[int, Any],
    crashed: dict[Any, int],
    last_invoke: dict[int, int],
    first_return: dict[int, int],
) -> Violation | None:
    """Compare reads message by message; a crashed append that was seen counts as an append that never returned."""
    place = {value: offset for offset, value in content.items()}
    shown_by: dict[int, int] = {}
    for row in rows:
        if history.f[row] != "read" or history.status[row] != OK:
            continue
        result = history.result[row]
        start, messages = result["offset"], result["messages"]
        if messages and (start < 0 or start + len(messages) > result["tail"]):
            text = f"{named_row(history, row)} returned messages beyond the tail {result['tail']} it reports."
            return Violation(rows=(row,), text=text)
        for offset, value in enumerate(messages, start):
            known = content.get(offset, content)
            if known is not content:
                if known == value:
                    continue
                return _two_values(history, rows, shown_by, row, offset, value, known)
            if value in place:
                return _two_places(history, rows, shown_by, row, offset, value, place[value])
            if value not in crashed:
                text = f"{named_row(history, row)} shows {short(value)} at offset {offset}, which no append put there."
                return Violation(rows=(*_appends(history, rows, value), row), text=text)
            content[offset] = value
            place[value] = offset
            shown_by[offset] = row
            rank = 2 * offset + 1
            last_invoke[rank] = crashed.pop(value)
            first_return[rank] = NEVER
    return None


def _fill_holes(
    history: History,
    rows: Sequence[int],
    content: dict[int, Any],
    crashed: dict[Any, int],
    last_invoke: dict[int, int],
    first_return: dict[int, int],
    highest: int,
) -> Violation | None:
    """Unseen offsets below a tail must hold crashed appends, each invoked in time."""
    # The loop ends at one more hole than there are such appends, however large a number in a result is.
    holes = (offset for offset in range((highest + 1) // 2) if offset not in content)
    ranks = sorted(first_return)
    deadlines = list(accumulate((first_return[rank] for rank in reversed(ranks)), min))[::-1]
    spare = sorted(crashed.values())
    for index, hole in enumerate(holes):
        above = bisect_right(ranks, 2 * hole + 1)
        deadline = deadlines[above] if above < len(deadlines) else NEVER
        if index < len(spare) and spare[index] < deadline:
            continue
        shower = next(row for row in rows if history.returned[row] == deadline)
        text = (
            f"{named_row(history, shower)} implies a message at offset {hole}, but no append can have put one there by "
            f"then: {index} append(s) of unknown outcome are needed for earlier offsets."
        )
        return Violation(rows=(shower,), text=text, minimal=False)
    return None


def _appends(history: History, rows: Sequence[int], *values: Any) -> list[int]:
    """The rows that append one of these values."""
    return [row for row in rows if history.f[row] == "append" and history.value[row] in values]


def _below_zero(history: History, rows: Sequence[int]) -> Violation:
    for row in rows:
        if history.status[row] == OK:
            f, result = history.f[row], history.result[row]
            if (result[0] if f == "append" else result["tail"] if f == "read" else result) < 0:
                text = f"{named_row(history, row)} reports an offset or a tail below zero."
                return Violation(rows=(row,), text=text)
    raise AssertionError("found a rank below zero, then none")


def _two_acks(history: History, rows: Sequence[int]) -> Violation:
    first: dict[int, int] = {}
    for row in rows:
        if history.f[row] == "append" and history.status[row] == OK:
            offset = history.result[row][0]
            if offset in first:
                text = (
                    f"Offset {offset} was given to two appends: {named_row(history, first[offset])} and "
                    f"{named_row(history, row)}."
                )
                return Violation(rows=(first[offset], row), text=text)
            first[offset] = row
    raise AssertionError("counted two acknowledgements of one offset, found none")


def _holder(history: History, rows: Sequence[int], shown_by: dict[int, int], offset: int) -> int:
    """The row that determines what an offset holds: a read that showed it, or the append that got the offset."""
    if offset in shown_by:
        return shown_by[offset]
    return next(
        row
        for row in rows
        if history.f[row] == "append" and history.status[row] == OK and history.result[row][0] == offset
    )


def _two_values(
    history: History, rows: Sequence[int], shown_by: dict[int, int], row: int, offset: int, value: Any, known: Any
) -> Violation:
    holder = _holder(history, rows, shown_by, offset)
    text = (
        f"Offset {offset} holds {short(known)} according to {named_row(history, holder)}, but {short(value)} "
        "according to "
        f"{named_row(history, row)}."
    )
    chosen = tuple(sorted({*_appends(history, rows, value, known), holder, row}))
    return Violation(rows=chosen, text=text, minimal=len(chosen) <= 2, named=(holder, row))


def _two_places(
    history: History, rows: Sequence[int], shown_by: dict[int, int], row: int, offset: int, value: Any, other: int
) -> Violation:
    holder = _holder(history, rows, shown_by, other)
    text = (
        f"{short(value)}, appended once, is at offset {other} according to {named_row(history, holder)} and at offset "
        f"{offset} according to {named_row(history, row)}."
    )
    return Violation(rows=tuple(sorted({*_appends(history, rows, value), holder, row})), text=text)


def _out_of_order(history: History, rows: Sequence[int], content: dict[int, Any], low: int, high: int) -> Violation:
    def of_rank(rank: int) -> list[int]:
        out = []
        for row in rows:
            f, result = history.f[row], history.result[row]
            if f == "append":
                if history.status[row] != "fail" and rank % 2 and content.get(rank // 2) == history.value[row]:
                    out.append(row)
            elif history.status[row] == OK and rank == 2 * (result["tail"] if f == "read" else result):
                out.append(row)
        return out

    late = max(of_rank(low), key=history.invoked.__getitem__)
    early = min(of_rank(high), key=history.returned.__getitem__)
    reason = f"{named_row(history, early)} returned before {named_row(history, late)} was invoked"
    text = f"{reason}, but {_place(low)} comes before {_place(high)} in the log."
    edges = (
        Edge(source=0, target=1, kind="realtime", reason=reason),
        Edge(source=1, target=0, kind="value", reason=f"{_place(low)} comes before {_place(high)}"),
    )
    return Violation(rows=(early, late), text=text, edges=edges)


def _place(rank: int) -> str:
    return f"an append at offset {rank // 2}" if rank % 2 else f"a view of {rank // 2} messages"
