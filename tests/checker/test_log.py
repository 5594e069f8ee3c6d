"""The log checker: each kind of anomaly, planted in a history that is otherwise fine."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from checker import History, HistoryError, Log, OnlineLog, Verdict, VersionedRegister, check, check_log, log
from checker.linearizability import budget
from checker.linearizability.budget import LimitReached
from checker.testing.large import large_history


def read(process: int, offset: int, messages: list[int], tail: int) -> tuple:
    return process, "read", {"offset": offset, "max": 10}, {"offset": offset, "messages": messages, "tail": tail}


def append(process: int, offset: int, value: int) -> tuple:
    return process, "append", value, [offset, value]


FINE = [append(0, 0, 10), append(1, 1, 11), read(2, 0, [10, 11], 2)]


def test_a_correct_log_is_valid(done) -> None:
    result = check_log(done(*FINE))
    assert result.verdict is Verdict.VALID
    assert (result.stats["acknowledged"], result.stats["observed"], result.stats["unread"]) == (2, 2, 0)


ANOMALIES = {
    "lost": [append(0, 0, 10), append(1, 1, 11), read(2, 0, [10], 1)],
    "divergent": [*FINE, append(0, 2, 12), read(2, 2, [13], 3), read(3, 2, [12], 3)],
    "duplicated": [append(0, 0, 10), read(2, 0, [10, 10], 2)],
    "phantom": [*FINE, read(2, 0, [10, 11, 99], 3)],
    "reordered": [append(0, 1, 10), append(1, 0, 11), read(2, 0, [11, 10], 2)],
    "stale": [*FINE, read(3, 0, [10], 1), read(2, 0, [10, 11], 2)],
    "gap": [*FINE, read(3, 1, [], 2)],
}


@pytest.mark.parametrize("kind", ANOMALIES)
def test_each_kind_of_anomaly_is_counted_and_shown(done, kind: str) -> None:
    result = check_log(done(*ANOMALIES[kind]))
    assert result.verdict is Verdict.INVALID
    assert result.stats["counts"][kind] >= 1
    assert result.stats["examples"][kind][0]["text"]
    assert result.witness is not None and result.witness.operations
    assert check(done(*ANOMALIES[kind]), Log()).verdict is (Verdict.VALID if kind == "gap" else Verdict.INVALID)


@pytest.mark.parametrize(
    "wrong",
    [append(0, -1, 12), read(2, -3, [10, 11], 2), read(2, -1, [99, 10, 11], 2), (2, "tail", None, -1)],
    ids=["append", "read", "read that goes on", "tail"],
)
def test_an_offset_below_zero_is_a_phantom(done, wrong: tuple) -> None:
    history = done(*FINE, wrong, read(3, 0, [10, 11], 2))
    result = check_log(history)
    assert result.verdict is Verdict.INVALID and result.stats["counts"]["phantom"] >= 1
    assert "below zero" in result.stats["examples"]["phantom"][0]["text"]
    assert check(history, Log()).verdict is Verdict.INVALID


def test_a_failed_append_that_is_read_is_a_phantom(events) -> None:
    history = events(
        (0, "invoke", "append", 1),
        (0, "fail", "append", 1),
        (1, "invoke", "read", {"offset": 0, "max": 5}),
        (1, "ok", "read", {"offset": 0, "messages": [1], "tail": 1}),
    )
    assert check_log(history).stats["counts"]["phantom"] == 1


def test_an_append_of_unknown_outcome_may_be_read_or_absent(events) -> None:
    begin = [(0, "invoke", "append", 1), (0, "info", "append", None), (1, "invoke", "read", {"offset": 0, "max": 5})]
    there = events(*begin, (1, "ok", "read", {"offset": 0, "messages": [1], "tail": 1}))
    absent = events(*begin, (1, "ok", "read", {"offset": 0, "messages": [], "tail": 0}))
    assert check_log(there).stats["recovered"] == 1
    assert check_log(there).verdict is check_log(absent).verdict is Verdict.VALID


#: Events of one queue, and how many of its acknowledged messages no read covers.
UNLOOKED = {
    "nothing but appends": ([("ok", append(0, 0, 1))], 1),
    "last read before the appends": (
        [
            ("ok", append(0, 0, 1)), ("ok", read(1, 0, [1], 1)),
            ("ok", append(0, 1, 2)), ("ok", append(0, 2, 3)), ("fail", read(1, 0, [], 0)),
        ], 2,
    ),
    "reads that do not tell where the queue ends": (
        [
            ("ok", append(0, 0, 1)), ("ok", append(0, 1, 2)),
            ("ok", (1, "read", {"offset": 0}, {"offset": 0, "messages": [1]})),
        ], 1,
    ),
    "a place that was not told": ([("ok", read(1, 0, [], 0)), ("ok", (0, "append", 1, [None, 1]))], 1),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLOOKED)
def test_an_acknowledged_message_not_covered_by_any_read_makes_the_verdict_unknown(events, case: str) -> None:
    operations, unlooked = UNLOOKED[case]
    rows = []
    for kind, (process, f, value, result) in operations:
        rows += [(process, "invoke", f, value, "b"), (process, kind, f, result, "b")]
    other = [
        (0, "invoke", "append", 9, "a"), (0, "ok", "append", [0, 9], "a"),
        (1, "invoke", "read", {"offset": 0}, "a"), (1, "ok", "read", {"offset": 0, "messages": [9], "tail": 1}, "a"),
    ]  # fmt: skip
    result = check_log(events(*rows, *other))
    assert result.verdict is Verdict.UNKNOWN and "of key 'b'" in result.reason
    assert result.stats["unlooked"] == result.stats["unread"] == unlooked
    assert f"{unlooked} of them not covered by any read" in result.reason
    tail = sum(kind == "ok" and f == "append" for kind, (_, f, *_) in operations)
    looked = [(1, "invoke", "tail", None, "b"), (1, "ok", "tail", tail, "b")]
    assert check_log(events(*rows, *other, *looked)).verdict is Verdict.VALID


def test_a_tail_that_counts_a_message_covers_it(events) -> None:
    history = events(
        (0, "invoke", "append", 1),
        (1, "invoke", "tail", None),
        (2, "invoke", "tail", None),
        (1, "ok", "tail", 1),
        (2, "ok", "tail", 0),
        (0, "ok", "append", [0, 1]),
    )
    # The tail that began last does not count it, the other does; both began before the append had returned.
    result = check_log(history)
    assert result.verdict is Verdict.VALID and "1 were never read" in result.reason
    assert (result.stats["unread"], result.stats["unlooked"]) == (1, 0)


def test_each_key_is_a_queue_of_its_own(events) -> None:
    rows = []
    for key in (0, 1):
        rows += [(key, "invoke", "append", key, key), (key, "ok", "append", [0, key], key)]
        rows += [(key, "invoke", "read", {"offset": 0, "max": 9}, key)]
        rows += [(key, "ok", "read", {"offset": 0, "messages": [key] if key else [], "tail": key}, key)]
    result = check_log(events(*rows))
    assert result.stats["counts"]["lost"] == 1
    assert result.witness is not None and result.witness.key == 0


def test_a_large_correct_log_is_valid() -> None:
    history = large_history("log", 3000, 5, seed=3)
    assert check(history, Log()).verdict is Verdict.VALID
    assert check_log(history).stats["unlooked"] > 0, "it ends without a read"
    count = sum(f == "append" for f in history.f)
    operations = history.operations(range(len(history)))
    end = operations[-1].returned or 0
    look = replace(operations[0], f="tail", value=None, result=count, status="ok", invoked=end + 1, returned=end + 2)
    assert check_log([*operations, look]).verdict is Verdict.VALID


@pytest.mark.parametrize("kind", ["divergent", "duplicated", "phantom", "reordered", "stale"])
def test_the_online_log_reports_an_anomaly_while_it_is_fed(done, kind: str) -> None:
    online = OnlineLog()
    found = [problem for event in done(*ANOMALIES[kind]) if (problem := online.feed(event))]
    assert found and "process" in found[0]


def test_the_online_log_reports_nothing_on_a_correct_log(done) -> None:
    online = OnlineLog()
    assert [online.feed(event) for event in done(*FINE)] == [None] * (2 * len(FINE))


class Counted(list):
    """A column that counts how often its rows are accessed."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows)
        self.accesses = 0

    def __getitem__(self, row: Any) -> Any:
        self.accesses += 1
        return super().__getitem__(row)


def test_a_replaced_message_is_found_in_one_pass_over_the_reads(done) -> None:
    unseen = [append(0, offset, offset) for offset in range(300)]
    reads = [read(1, 0, [0], 300), read(1, 299, [-1], 300), *[read(1, 0, [0], 300)] * 300]
    history = History.of(done(*unseen, *reads))
    history.invoked, history.returned = Counted(history.invoked), Counted(history.returned)
    result = check_log(history)
    assert (result.stats["counts"]["divergent"], result.stats["counts"]["lost"], result.stats["unread"]) == (1, 1, 298)
    assert result.witness is not None and [operation.f for operation in result.witness.operations] == ["append", "read"]
    assert history.invoked.accesses + history.returned.accesses < 20 * len(history)


@pytest.mark.parametrize("offset", [2_000_000, 1 << 60])
def test_a_huge_offset_takes_no_memory(done, offset: int) -> None:
    history = done(append(0, offset, 1), (0, "tail", None, offset + 2), read(1, offset, [1, 2], offset + 2))
    tracemalloc.start()
    try:
        contents = check_log(history).stats["counts"]
        far, versions = check(history, Log()), done((0, "write", 1, offset))
        version = check(versions, VersionedRegister())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert contents["phantom"] == 1 and far.verdict is version.verdict is Verdict.INVALID
    assert peak_bytes < 1 << 20


def test_messages_at_huge_offsets_are_compared(done) -> None:
    far = 1 << 60
    history = done(
        append(0, far, 1), append(0, far + 1, 2), read(1, far, [1, 3], far + 2), read(2, far + 1, [1], far + 2)
    )
    counts = check_log(history).stats["counts"]
    assert (counts["divergent"], counts["duplicated"], counts["phantom"], counts["lost"]) == (2, 1, 1, 1)
    with pytest.raises(HistoryError):
        check_log(done((0, "append", 1, [1e300, 1]), (0, "append", 2, [1e9 + 0.5, 2])))


def test_float_offsets_map_messages_and_appends_without_an_offset_are_accepted() -> None:
    def events(read: list[Any]) -> list[dict[str, Any]]:
        said = [
            ("append", {"a": [1]}, [0.0, {"a": [1]}]),
            ("append", "b", [None, "b"]),
            ("read", {"offset": 0}, {"offset": 0.0, "messages": read, "tail": 2.0}),
        ]
        return [
            {"process": 0, "type": kind, "f": f, "value": value if kind == "invoke" else result}
            for f, value, result in said
            for kind in ("invoke", "ok")
        ]

    assert check_log(events([{"a": [1]}, "b"])).verdict is Verdict.VALID
    wrong = check_log(events([{"a": [2]}, "b"]))
    assert wrong.verdict is Verdict.INVALID and wrong.stats["counts"]["divergent"] == 1


def whole(process: int, messages: list[Any]) -> tuple:
    return read(process, 0, messages, len(messages))


WITHOUT_OFFSET = (1, "append", 11, [None, 11])


def test_a_message_shown_by_a_read_without_a_tail_may_not_vanish(events) -> None:
    """A read that is answered with as many messages as it asked for may have no tail."""
    shown = [
        (0, "invoke", "append", 11),
        (0, "info", "append", 11),
        (1, "invoke", "read", {"offset": 0, "max": 2}),
        (1, "ok", "read", {"offset": 0, "messages": [10, 11], "tail": None}),
    ]
    first = [(2, "invoke", "append", 10), (2, "ok", "append", [0, 10])]
    last = [(2, "invoke", "read", {"offset": 0}), (2, "ok", "read", {"offset": 0, "messages": [10], "tail": 1})]
    result = check_log(events(*first, *shown, *last))
    assert result.verdict is Verdict.INVALID and result.stats["counts"]["stale"] == 1
    # A read concurrent with the last one may have taken effect after it.
    beside = check_log(events(*first, *shown[:3], *last, shown[3]))
    assert beside.verdict is Verdict.VALID


@pytest.mark.parametrize("answer", [[None, 11], None])
def test_an_append_without_an_offset_is_lost_if_every_offset_holds_another_message(done, answer: Any) -> None:
    mute = (1, "append", 11, answer)
    lost = check_log(done(append(0, 0, 10), mute, whole(2, [10])))
    assert lost.verdict is Verdict.INVALID and lost.stats["counts"]["lost"] == 1
    assert "11 was acknowledged without an offset to" in lost.reason
    assert check_log(done(mute, read(2, 0, [], 0))).verdict is Verdict.INVALID
    # Shown; perhaps at the offset that was not read; acknowledged after the last read.
    assert check_log(done(append(0, 0, 10), mute, whole(2, [10, 11]))).verdict is Verdict.VALID
    unread = check_log(done(append(0, 0, 10), mute, read(2, 0, [10], 2)))
    assert unread.verdict is not Verdict.INVALID and unread.stats["unread"] == 1
    assert check_log(done(append(0, 0, 10), whole(2, [10]), mute)).verdict is Verdict.UNKNOWN
    assert check(done(append(0, 0, 10), mute, whole(2, [10])), Log()).verdict is Verdict.INVALID


def test_a_value_may_be_read_once_for_each_append_that_may_have_taken_effect(events) -> None:
    def tried(process: int, *outcomes: tuple[str, Any]) -> list[tuple]:
        asked = (process, "invoke", "append", 1)
        return [line for kind, value in outcomes for line in (asked, (process, kind, "append", value))]

    def told(*messages: int) -> list[tuple]:
        answer = {"offset": 0, "messages": list(messages), "tail": len(messages)}
        return [(9, "invoke", "read", {"offset": 0, "max": 9}), (9, "ok", "read", answer)]

    acked, failed, crashed = ("ok", [0, 1]), ("fail", 1), ("info", 1)
    for history in (
        [*tried(0, acked, failed), *told(1)],
        [*tried(0, failed, acked), *told(1)],
        [*tried(0, acked), *tried(1, ("ok", [1, 1])), *told(1, 1)],
        [*tried(0, crashed), *told(1), *tried(1, failed), *told(1)],
        [*tried(0, crashed), *tried(1, ("ok", [1, 1])), *told(1, 1)],
    ):
        assert check_log(events(*history)).verdict is Verdict.VALID, history
        assert check(events(*history), Log()).verdict is Verdict.VALID, history
    for history, kind in (
        ([*tried(0, acked, failed), *told(1, 1)], "duplicated"),
        ([*tried(0, acked), *tried(1, crashed), *told(1, 1, 1)], "duplicated"),
        ([*tried(0, failed, failed), *told(1)], "phantom"),
        ([*told(1), *tried(0, acked, failed)], "phantom"),
    ):
        result = check_log(events(*history))
        assert result.verdict is Verdict.INVALID and result.stats["counts"][kind] >= 1, history
    recovered = [*tried(0, crashed), *tried(1, failed), *told(1)]
    assert check_log(events(*recovered)).stats["recovered"] == 1


def test_a_message_that_is_a_map_differs_from_the_list_of_its_pairs(done) -> None:
    held, pairs = {"a": 1}, [["a", 1]]
    other = check_log(done((0, "append", held, [0, held]), whole(1, [pairs])))
    assert other.verdict is Verdict.INVALID and other.stats["counts"]["lost"] == 1
    assert other.witness is not None and other.witness.operations[0].value == held
    assert "'messages': [[['a', 1]]]" in other.reason
    both = done((0, "append", held, [0, held]), (0, "append", pairs, [1, pairs]), whole(1, [held, pairs]))
    assert check_log(both).verdict is Verdict.VALID


def test_an_estimate_above_the_memory_limit_does_not_end_a_check(done) -> None:
    """These operations are estimated to take 48 MiB, and take 10 to 15."""
    appends = [append(0, offset, offset) for offset in range(100_000)]
    result = check_log(done(*appends, (0, "tail", None, len(appends))), memory_mb=40)
    assert result.verdict is Verdict.VALID, result.reason


def test_a_queue_that_reaches_a_limit_adds_no_counts(done, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = log._Queue.check

    def ends_at_its_limit(queue: Any) -> Any:
        counts = whole(queue)
        if queue._key == "second":
            raise LimitReached("the memory limit of 7 MiB was reached")
        return counts

    def on(key: str, *operations: tuple) -> list[dict[str, Any]]:
        return [{**event, "key": key, "index": None} for event in done(*operations)]

    monkeypatch.setattr(log._Queue, "check", ends_at_its_limit)
    lost = [append(0, 0, 10), (0, "tail", None, 0)]
    result = check_log([*on("first", *FINE), *on("second", *lost)])
    assert result.verdict is Verdict.UNKNOWN
    assert result.reason == "the memory limit of 7 MiB was reached; 1 of 2 queues checked"
    assert not any(result.stats["counts"].values())
    assert check_log([*on("first", *lost), *on("second", *lost)]).stats["counts"]["lost"] == 1


@pytest.mark.parametrize("looks", range(1, 8))
def test_the_time_limit_ends_the_check_of_a_single_queue(done, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """Time passes only when somebody looks at the clock: one second for each look."""
    clock = itertools.count()
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(log, "STEPS_PER_LOOK", 100)
    lost = done(*(append(0, offset, offset) for offset in range(500)), (0, "tail", None, 0))
    result = check_log(lost, timeout_s=looks)
    assert result.verdict is Verdict.UNKNOWN
    assert result.reason == f"the time limit of {looks} s was reached; 0 of 1 queues checked"
    assert not any(result.stats["counts"].values())
    assert check_log(lost, timeout_s=1000).verdict is Verdict.INVALID


def test_messages_of_reads_count_as_work_before_the_time_limit(done, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(log, "STEPS_PER_LOOK", 100)
    reads = done(*(whole(0, list(range(90))) for _ in range(20)))
    assert check_log(reads, timeout_s=5).verdict is Verdict.UNKNOWN
