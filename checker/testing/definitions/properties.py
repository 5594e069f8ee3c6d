"""The checkers other than linearizability, from their documentation.

Each function takes the events of a history and returns the verdicts that are right: one, or several where the
documentation leaves a case open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from checker.testing.definitions.objects import PUTS, Object, make_object
from checker.testing.definitions.orders import Call, has_order, is_linearizable, pair
from checker.testing.definitions.values import canonical

__all__ = ["PROPERTIES"]

Event = dict[str, Any]
Verdicts = frozenset[str]

VALID: Verdicts = frozenset({"valid"})
INVALID: Verdicts = frozenset({"invalid"})
UNKNOWN: Verdicts = frozenset({"unknown"})


def _verdict(is_right: bool) -> Verdicts:
    return VALID if is_right else INVALID


def _done(calls: Sequence[Call], *names: str) -> list[Call]:
    return [call for call in calls if call.status == "ok" and call.f in names]


def _keys(calls: Sequence[Call]) -> list[list[Call]]:
    by_key: dict[Any, list[Call]] = {}
    for call in calls:
        by_key.setdefault(canonical(call.key), []).append(call)
    return list(by_key.values())


NOTHING: Verdicts = frozenset()
"""The verdict on a key that has nothing to judge."""


def _apart(events: Sequence[Event], judge: Callable[[list[Call]], Verdicts]) -> Verdicts:
    """Judge every key on its own; the worst verdict is the history's, unknown if no key has anything to judge."""
    said = [verdicts for verdicts in map(judge, _keys(pair(events))) if verdicts]
    if not said:
        return UNKNOWN
    return frozenset(max(each, key=("valid", "unknown", "invalid").index) for each in product(*said))


def unique_ids(events: Sequence[Event]) -> Verdicts:
    """No two completed operations of a key return the same id."""

    def judge(calls: list[Call]) -> Verdicts:
        ids = [canonical(call.result) for call in _done(calls, "generate")]
        return _verdict(len(ids) == len(set(ids))) if ids else NOTHING

    return _apart(events, judge)


def counter_bounds(events: Sequence[Event], initial: int = 0) -> Verdicts:
    """Each read is at least what had certainly been added, at most what had possibly been; every key is a counter."""
    calls = pair(events)
    right = all(_is_between(read, calls_of_key, initial) for calls_of_key in _keys(calls) for read in calls_of_key)
    return _verdict(right)


def _is_between(read: Call, calls: Sequence[Call], initial: int) -> bool:
    if read.f != "read" or read.status != "ok":
        return True
    low = high = initial
    for call in calls:
        if call.f == "read" or call.status == "fail" or call.invoked > read.returned:
            continue
        amount = 1 if call.value is None else call.value
        amount = -amount if call.f == "decrement" else amount
        is_certain = call.status == "ok" and call.returned < read.invoked
        low += amount if is_certain else min(amount, 0)
        high += amount if is_certain else max(amount, 0)
    shown = read.result
    return isinstance(shown, int | float) and not isinstance(shown, bool) and bool(low <= shown <= high)


def exclusion(events: Sequence[Event]) -> Verdicts:
    """No two processes certainly hold a lock at the same time."""
    calls = pair(events)
    if not _done(calls, "acquire"):
        return UNKNOWN
    held = [
        (canonical(call.key), call.process, call.returned, _release_of(call, calls)) for call in _done(calls, "acquire")
    ]
    return _verdict(
        not any(
            lock == other_lock and process != other and begin < other_end and other_begin < end
            for lock, process, begin, end in held
            for other_lock, other, other_begin, other_end in held
        )
    )


def _release_of(acquire: Call, calls: Sequence[Call]) -> float:
    """Since when the process may no longer hold the lock."""
    releases = [
        call.invoked
        for call in calls
        if call.f == "release"
        and call.status != "fail"
        and call.process == acquire.process
        and canonical(call.key) == canonical(acquire.key)
        and call.invoked > acquire.returned
    ]
    return min(releases, default=float("inf"))


def bank(events: Sequence[Event], total: int | None = None, allow_negative: bool = False) -> Verdicts:
    """Every read of all accounts of a key has the same sum, and no balance is negative."""

    def judge(calls: list[Call]) -> Verdicts:
        reads = _done(calls, "read")
        if not reads:
            return NOTHING
        balances = [
            list(read.result.values()) if isinstance(read.result, Mapping) else [balance for _, balance in read.result]
            for read in sorted(reads, key=lambda read: read.returned)
        ]
        # If reads overlap, which is first is not defined; it does not matter to whether all sums agree.
        return _verdict(_is_bank(balances, sum(balances[0]) if total is None else total, allow_negative))

    return _apart(events, judge)


def _is_bank(reads: list[list[int]], total: int, allow_negative: bool) -> bool:
    return all(sum(read) == total and (allow_negative or min(read, default=0) >= 0) for read in reads)


def long_fork(events: Sequence[Event]) -> Verdicts:
    """No two reads of the same keys each see a write that the other lacks."""
    return _apart(events, _long_fork_of_key)


def _long_fork_of_key(calls: Sequence[Call]) -> Verdicts:
    reads = [{canonical(key): value is not None for _, key, value in call.result} for call in _done(calls, "read")]
    if not reads:
        return NOTHING
    return _verdict(
        not any(
            any(one[key] and not other[key] for key in one) and any(other[key] and not one[key] for key in one)
            for one in reads
            for other in reads
            if one.keys() == other.keys()
        )
    )


class _OneRow(Object):
    """A key that gets a row only while it has none.  An insert's answer means only that it happened."""

    def start(self) -> Any:
        return ()

    def outcomes(self, state: Any, f: str, value: Any) -> list[tuple[Any, Any]]:
        if f == "read":
            return [(state, state)]
        return [] if state else [(None, (_filled(value),))]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        return f != "read" or tuple(map(canonical, result)) == answer


def _filled(value: Sequence[Any]) -> Any:
    """The row of an insert; its position says which table it goes to."""
    return canonical(next(row for row in value if row is not None))


def write_skew(events: Sequence[Event]) -> Verdicts:
    """Some order explains the transactions in which no read comes after an insert that was asked for only later."""
    calls = [call for call in pair(events) if call.status != "fail"]
    before = [
        [other.f == "read" and call.f == "insert" and other.returned < call.invoked for other in calls]
        for call in calls
    ]
    if not has_order(calls, before, _OneRow()):
        return INVALID
    groups = _keys(pair(events))
    return VALID if any(map(_has_contest, groups)) and not any(map(_lacks_a_row, groups)) else UNKNOWN


def _since(insert: Call, calls: Sequence[Call]) -> float:
    """Since when an insert is known to have committed."""
    shows = [read.returned for read in _done(calls, "read") if _filled(insert.value) in map(canonical, read.result)]
    return min([*shows, insert.returned if insert.status == "ok" else float("inf")])


def _has_contest(calls: Sequence[Call]) -> bool:
    """Whether two inserts of a key ran at the same time and at least one of them committed."""
    inserts = [call for call in calls if call.f == "insert"]
    since = [_since(insert, calls) for insert in inserts]
    return any(
        one is not other
        and one.invoked <= other.invoked < min(one.returned, known)
        and min(known, other_known) < float("inf")
        for one, known in zip(inserts, since, strict=True)
        for other, other_known in zip(inserts, since, strict=True)
    )


def _lacks_a_row(calls: Sequence[Call]) -> bool:
    """Whether a read lacks a row that was known to be there when the read began."""
    return any(
        read.invoked > _since(insert, calls) and _filled(insert.value) not in map(canonical, read.result)
        for insert in calls
        if insert.f == "insert"
        for read in _done(calls, "read")
    )


def simple_set(events: Sequence[Event]) -> Verdicts:
    """The last read of a key shows all that was acknowledged before it, and nothing that nobody tried to add."""
    return _apart(events, _set_of_key)


def _set_of_key(calls: Sequence[Call]) -> Verdicts:
    reads = _done(calls, "read")
    if not reads:
        return UNKNOWN if _done(calls, "add") else NOTHING
    last = max(reads, key=lambda read: read.invoked)
    if last.returned != max(read.returned for read in reads):
        return VALID | INVALID
    shown = set(map(canonical, last.result))
    adds = [call for call in calls if call.f == "add"]
    surely = {canonical(call.value) for call in adds if call.status == "ok" and call.returned < last.invoked}
    tried = {canonical(call.value) for call in adds if call.status != "fail" and call.invoked < last.returned}
    return _verdict(surely <= shown <= tried)


def set_full(events: Sequence[Event], linearizable: bool = False) -> Verdicts:
    """No known element goes missing permanently or, if ``linearizable``, in any later read; no duplicates; nothing in a
    read that nobody had tried to add."""
    return _apart(events, lambda calls: _set_full_of_key(calls, linearizable))


def _set_full_of_key(calls: Sequence[Call], linearizable: bool) -> Verdicts:
    reads = sorted(_done(calls, "read"), key=lambda read: read.invoked)
    if not reads:
        return VALID | UNKNOWN
    shown = [[canonical(element) for element in read.result] for read in reads]
    if any(len(elements) != len(set(elements)) for elements in shown):
        return INVALID
    adds = [call for call in calls if call.f == "add" and call.status != "fail"]
    asked = {canonical(call.value) for call in adds}
    for read, elements in zip(reads, shown, strict=True):
        if not set(elements) <= {canonical(call.value) for call in adds if call.invoked < read.returned}:
            return INVALID
    is_read_later = True
    for element in asked:
        known = min(
            [call.returned for call in calls if call.f == "add" and call.status == "ok" and _is(call, element)]
            + [read.returned for read, elements in zip(reads, shown, strict=True) if element in elements]
            + [float("inf")]
        )
        shown_until = max(
            (read.returned for read, elements in zip(reads, shown, strict=True) if element in elements), default=known
        )
        later = [element in elements for read, elements in zip(reads, shown, strict=True) if read.invoked > known]
        is_gone = any(
            element not in elements and read.invoked > max(known, shown_until)
            for read, elements in zip(reads, shown, strict=True)
        )
        if is_gone or (linearizable and not all(later)):
            return INVALID
        is_read_later &= bool(later) or known == float("inf")
    return VALID if is_read_later else VALID | UNKNOWN


def _is(call: Call, element: Any) -> bool:
    return bool(canonical(call.value) == element)


def total_queue(events: Sequence[Event], allow_duplicates: bool = True) -> Verdicts:
    """What was acknowledged before the queue was found empty came out, nothing else did, and nothing twice unless that
    is allowed."""
    return _apart(events, lambda calls: _queue_of_key(calls, allow_duplicates))


def _queue_of_key(calls: Sequence[Call], allow_duplicates: bool) -> Verdicts:
    puts = [call for call in calls if call.f in PUTS]
    tried = Counter(canonical(call.value) for call in puts)
    surely = Counter(canonical(call.value) for call in puts if call.status == "ok")
    out: Counter[Any] = Counter()
    for call in calls:
        if call.status == "ok" and call.f == "drain":
            out.update(map(canonical, call.result))
        elif call.status == "ok" and call.f not in PUTS and call.result is not None:
            out[canonical(call.result)] += 1
    failed = Counter(canonical(call.value) for call in puts if call.status == "fail")
    if any(_is_before_it_was_put_in(value, calls, allow_duplicates) for value in out):
        return INVALID
    if not allow_duplicates and any(out[value] > tried[value] for value in out):
        return INVALID
    missing = surely - out
    may_be_there = Counter(
        canonical(put.value) for put in puts if put.status == "ok" and not _is_empty_after(put, calls)
    )
    unseen = [call for call in calls if call.status == "info" and call.f not in PUTS]
    can_hold = float("inf") if any(call.f == "drain" for call in unseen) else len(unseen)
    if (missing - may_be_there).total() > can_hold:
        return INVALID
    if any(out[value] > tried[value] - failed[value] for value in out):
        return (UNKNOWN if missing else VALID) | INVALID
    return UNKNOWN if missing else VALID


def _is_before_it_was_put_in(value: Any, calls: Sequence[Call], allow_duplicates: bool) -> bool:
    """Whether a value had come out at some return before anyone asked to put it in; or, if duplicates are not allowed,
    more often than that."""
    puts = [call.invoked for call in calls if call.f in PUTS and call.status != "fail" and _is(call, value)]
    takes = [
        call.returned
        for call in calls
        if call.f not in PUTS and call.status == "ok"
        for item in (call.result if call.f == "drain" else [call.result])
        if item is not None and canonical(item) == value
    ]
    return any(
        sum(put < moment for put in puts)
        < (1 if allow_duplicates or len(takes) > len(puts) else sum(take <= moment for take in takes))
        for moment in takes
    )


def _is_empty_after(put: Call, calls: Sequence[Call]) -> bool:
    """Whether a take that began after the put was acknowledged found nothing, or took all there was."""
    return any(
        call.status == "ok"
        and call.f not in PUTS
        and (call.f == "drain" or call.result is None)
        and call.invoked > put.returned
        for call in calls
    )


def consumer_progress(events: Sequence[Event]) -> Verdicts:
    """No fetch is below what had been shown for its group and queue, and no process commits less than before."""
    return _apart(events, lambda calls: _progress_of_key(_done(calls, "commit", "fetch")))


def _progress_of_key(calls: Sequence[Call]) -> Verdicts:
    if not calls:
        return NOTHING
    for call in calls:
        shown = call.result or call.value
        same_place = [
            other
            for other in calls
            if other.returned < call.invoked and all(_shown(other)[part] == shown[part] for part in ("group", "queue"))
        ]
        if call.f == "fetch" and any(_shown(other)["offset"] > shown["offset"] for other in same_place):
            return INVALID
        own = [other for other in same_place if other.process == call.process and other.f == "commit"]
        if call.f == "commit" and any(_shown(other)["offset"] > shown["offset"] for other in own):
            return INVALID
    return VALID


def _shown(call: Call) -> dict[str, Any]:
    return dict(call.result or call.value)


def transaction_visibility(events: Sequence[Event]) -> Verdicts:
    """Messages are received if their commit was acknowledged, and only after a commit was requested."""
    return _apart(events, _visibility_of_key)


def _visibility_of_key(calls: Sequence[Call]) -> Verdicts:
    receives = _done(calls, "receive")
    seen = [
        (receive, canonical(message))
        for receive in receives
        for message in (receive.result if isinstance(receive.result, list | tuple) else [receive.result])
        if message is not None
    ]
    for receive, message in seen:
        about = [call for call in calls if call.f in ("commit", "rollback", "prepare") and _is(call, message)]
        commits = [call for call in about if call.f == "commit" and call.status != "fail"]
        if not any(call.invoked < receive.returned for call in commits):
            return INVALID
        if any(call.f == "rollback" and call.status == "ok" for call in about):
            return INVALID
    first_commits: dict[Any, float] = {}
    for commit in sorted(_done(calls, "commit"), key=lambda call: call.returned):
        first_commits.setdefault(canonical(commit.value), commit.returned)
    shown = [message for _, message in seen]
    later = [
        [receive for receive in receives if receive.invoked > since]
        for message, since in first_commits.items()
        if message not in shown
    ]
    return _missing(calls, later) or (VALID if receives else UNKNOWN if first_commits else NOTHING)


def _missing(calls: Sequence[Call], later: Sequence[Sequence[Call]]) -> Verdicts | None:
    """The verdict on messages that no receive showed, given the receives that came after each."""
    crashed = [call for call in calls if call.f == "receive" and call.status == "info"]
    takes_many = any(isinstance(receive.result, list) for receive in _done(calls, "receive"))
    looked = [any(receive.result is None or isinstance(receive.result, list) for receive in after) for after in later]
    if sum(looked) > (float("inf") if crashed and takes_many else len(crashed)):
        return INVALID
    return UNKNOWN if any(later) else None


def delay(events: Sequence[Event], tolerance_ms: float = 1000.0, resolution_ms: float = 0.0) -> Verdicts:
    """No message is received too early or too late, and none is missing that was due in time."""
    times = _times(events)
    return _apart(events, lambda calls: _delay_of_key(calls, times, tolerance_ms, resolution_ms))


def _delay_of_key(
    calls: Sequence[Call], times: Mapping[float, float], tolerance_ms: float, resolution_ms: float
) -> Verdicts:
    receives = _done(calls, "receive")
    sends = [call for call in calls if call.f == "send"]
    sent = [canonical(send.value["message"]) for send in sends if send.status != "fail"]
    for receive in receives:
        for message in receive.result if isinstance(receive.result, list | tuple) else [receive.result]:
            if message is not None and canonical(message) not in sent:
                return INVALID
    later: list[list[Call]] = []
    for send in sends:
        message, delay_ms = canonical(send.value["message"]), send.value["delay_ms"]
        deliveries = [
            times[receive.returned]
            for receive in receives
            if message
            in map(canonical, receive.result if isinstance(receive.result, list | tuple) else [receive.result])
        ]
        if any(at_ms < times[send.invoked] + delay_ms - resolution_ms for at_ms in deliveries):
            return INVALID
        if send.status != "ok":
            continue
        latest_ms = times[send.returned] + delay_ms + tolerance_ms
        if deliveries and min(deliveries) > latest_ms:
            return INVALID
        if not deliveries:
            later.append([receive for receive in receives if times[receive.invoked] > latest_ms])
    return _missing(calls, later) or (VALID if receives else UNKNOWN if _done(calls, "send") else NOTHING)


def _times(events: Sequence[Event]) -> dict[float, float]:
    """Milliseconds by position."""
    return {position: event["time"] / 1e6 for position, event in enumerate(events)}


def sessions(events: Sequence[Event]) -> Verdicts:
    """No process reads or writes an older version than it read or wrote before, by the versions in its answers."""
    calls = [call for call in pair(events) if call.status == "ok"]
    open_question = False
    for call in calls:
        version = _version(call)
        if version is None:
            continue
        for other in calls:
            is_before = other.returned < call.invoked and other.process == call.process
            earlier = _version(other)
            if not is_before or canonical(other.key) != canonical(call.key) or earlier is None:
                continue
            if version < earlier:
                return INVALID
            open_question |= version == earlier and call.f == "write"
    if all(_version(call) is None for call in calls):
        return UNKNOWN
    return VALID | INVALID if open_question else VALID


def _version(call: Call) -> float | None:
    """The version in an answer of a versioned register: a read returns version and value, a write the version."""
    if isinstance(call.result, list | tuple):
        return float(call.result[0])
    return None if call.result is None else float(call.result)


def log_losses(events: Sequence[Event]) -> Verdicts:
    """A linearizable log has no damage; two values at one offset, or a value that nobody appended, are damage.

    The verdict is unknown if nobody looked for some acknowledged message.
    """
    calls = pair(events)
    is_right = is_linearizable(calls, make_object("log"))
    asked = [(canonical(call.key), canonical(call.value)) for call in calls if call.f == "append"]
    has_gap = any(not read.result["messages"] and read.result["tail"] > read.result["offset"] for read in _reads(calls))
    if len(asked) != len(set(asked)):
        return VALID | UNKNOWN if is_right and not has_gap else VALID | INVALID | UNKNOWN
    if any(_is_harmed(calls_of_key) for calls_of_key in _keys(calls)):
        return INVALID
    if not is_right or has_gap:
        return VALID | INVALID | UNKNOWN
    return UNKNOWN if any(_has_unlooked(calls_of_key) for calls_of_key in _keys(calls)) else VALID


def _has_unlooked(calls: Sequence[Call]) -> bool:
    """Whether some acknowledged message of a log was neither shown, nor counted in a tail, nor looked for since."""
    shown = [canonical(message) for read in _reads(calls) for message in read.result["messages"]]
    tails = [(call.invoked, call.result) for call in _done(calls, "tail")]
    tails += [(read.invoked, read.result["tail"]) for read in _reads(calls)]
    return any(
        canonical(append.value) not in shown
        and not any(begun > append.returned or tail > _offset(append) for begun, tail in tails)
        for append in _done(calls, "append")
    )


def _offset(append: Call) -> float:
    """The offset of an append's message; past any tail if the answer does not say."""
    return float("inf") if append.result[0] is None else float(append.result[0])


def _reads(calls: Sequence[Call]) -> list[Call]:
    return _done(calls, "read")


def _is_harmed(calls: Sequence[Call]) -> bool:
    """Whether reads of one log show two values at one offset, one value at two, or a value that nobody appended.

    An offset or a tail below zero is damage as well.
    """
    places = [_offset(append) for append in _done(calls, "append")] + [tail.result for tail in _done(calls, "tail")]
    if min([0, *places]) < 0:
        return True
    at: dict[Any, set[Any]] = {}
    for read in _reads(calls):
        asked = {
            canonical(call.value)
            for call in calls
            if call.f == "append" and call.status != "fail" and call.invoked < read.returned
        }
        for place, message in enumerate(read.result["messages"]):
            at.setdefault(read.result["offset"] + place, set()).add(canonical(message))
            if canonical(message) not in asked:
                return True
    shown = [value for values in at.values() for value in values]
    return any(len(values) > 1 for values in at.values()) or len(shown) != len(set(shown))


PROPERTIES: dict[str, Callable[..., Verdicts]] = {
    "unique-ids": unique_ids,
    "counter-bounds": counter_bounds,
    "exclusion": exclusion,
    "bank": bank,
    "long-fork": long_fork,
    "write-skew": write_skew,
    "simple-set": simple_set,
    "set-full": set_full,
    "total-queue": total_queue,
    "consumer-progress": consumer_progress,
    "transaction-visibility": transaction_visibility,
    "delay": delay,
    "sessions": sessions,
    "log-losses": log_losses,
}
