"""What no operation has seen at the end could have been lost, so that it keeps a check from being valid."""

from __future__ import annotations

from typing import Any

import pytest

from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext
from harness.workloads.draining import unless_drained, unless_taken_unseen
from harness.workloads.final_reads import unless_left_unanswered
from harness.workloads.priority_queue import PriorityQueueWorkload
from harness.workloads.stack import StackWorkload

CONTEXT = CheckContext(timeout_s=10.0, memory_mb=512)


def history(*told: tuple[str, str, Any]) -> list[dict[str, Any]]:
    """Operations of one process each, one after the other: (f, type of the completion, value)."""
    return [
        {"index": 2 * at + step, "time": 2 * at + step, "process": at, "type": kind, "f": f, "value": value}
        for at, (f, completion, result) in enumerate(told)
        for step, (kind, value) in enumerate(
            (("invoke", None if result is None or f in ("pop", "extract", "take") else result), (completion, result))
        )
    ]


@pytest.mark.parametrize(
    ("workload", "put", "take"), [(StackWorkload(), "push", "pop"), (PriorityQueueWorkload(), "insert", "extract")]
)
@pytest.mark.parametrize(
    ("then", "valid"),
    [
        ([("take", "ok", 1), ("take", "ok", None)], True),
        ([("take", "ok", 1), ("take", "ok", None), ("take", "info", None)], True),
        ([], "unknown"),
        ([("take", "ok", 1)], "unknown"),  # another value may have been lost before
        ([("take", "fail", None)], "unknown"),
        ([("take", "info", None)], "unknown"),
        ([("take", "ok", 1), ("take", "ok", None), ("put", "ok", 2)], "unknown"),
        ([("take", "ok", None)], False),
        ([("take", "ok", None), ("put", "ok", 2)], False),  # the check has found a loss already
    ],
)
def test_what_is_left_inside_at_the_end_is_unknown(
    workload: Any, put: str, take: str, then: list[tuple[str, str, Any]], valid: bool | str
) -> None:
    names = {"put": put, "take": take}
    told = [("put", "ok", 1), *then]
    [found] = workload.check(history(*((names[f], kind, value) for f, kind, value in told)), CONTEXT).values()
    assert found.valid == valid, found.reason
    assert (f"no {take} after the last {put} found nothing left" in found.reason) is (valid == "unknown")


LOST = CheckOutcome(False, "2 were lost", {"stats": {"counts": {"lost": 2, "unexpected": 0}}})
INVENTED = CheckOutcome(False, "one was invented", {"stats": {"counts": {"lost": 2, "unexpected": 1}}})
DOUBLED = CheckOutcome(False, "one came twice", {"stats": {"counts": {"lost": 0, "unexpected": 0, "duplicated": 1}}})
FINE = CheckOutcome(True, "all came out", {"stats": {"counts": {"lost": 0, "unexpected": 0}}})
UNDECIDED = CheckOutcome("unknown", "out of time", {"stats": {}})


@pytest.mark.parametrize(
    ("reads", "valid"),
    [
        ([("a", True), ("b", True)], True),
        ([("a", True), ("a", False)], True),
        ([("a", False), ("a", True)], True),
        ([("a", True), ("b", False), ("b", False)], "unknown"),
        ([], True),
    ],
)
def test_a_key_is_read_if_one_of_its_reads_is_answered(reads: list[tuple[str, bool]], valid: bool | str) -> None:
    found = unless_left_unanswered(FINE, reads, "key")
    assert found.valid == valid
    assert ("but no read of key b was answered at the end" in found.reason) is (valid is not True)
    for outcome in (LOST, UNDECIDED):
        assert unless_left_unanswered(outcome, reads, "key") == outcome


@pytest.mark.parametrize(
    ("lags", "said"),
    [
        ([("lag", "ok", 5), ("lag", "ok", 0)], ""),
        ([("lag", "ok", 0), ("lag", "ok", 5)], "5 messages were still to be received at the end"),
        ([("lag", "ok", 5), ("lag", "fail", 0)], "5 messages were still to be received at the end"),
        ([("lag", "info", 0)], "no host could tell how many messages were still to be received at the end"),
        ([], "no host could tell how many messages were still to be received at the end"),
    ],
)
def test_a_group_is_drained_only_if_the_last_answer_was_that_nothing_is_left(
    lags: list[tuple[str, str, Any]], said: str
) -> None:
    for outcome in (FINE, LOST):
        found = unless_drained(outcome, history(*lags), certain=("unexpected",))
        assert found == outcome if not said else (found.valid, found.reason) == ("unknown", said)
    for outcome in (INVENTED, UNDECIDED):
        assert unless_drained(outcome, history(*lags), certain=("unexpected",)) == outcome
    assert unless_drained(DOUBLED, history(*lags), certain=("unexpected", "duplicated", "of later versions")) == DOUBLED


EMPTY, UNSEEN = ("take", "ok", None), ("take", "info", None)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ([EMPTY], None),
        ([EMPTY, UNSEEN], None),  # it can have taken one of the two
        ([EMPTY, UNSEEN, UNSEEN], "2 takes of unknown outcome may have taken them"),
        ([], "nobody found the queue empty after the last put"),
        ([("take", "fail", None)], "nobody found the queue empty after the last put"),
        ([EMPTY, ("put", "ok", 3)], "nobody found the queue empty after the last put"),
        ([EMPTY, ("put", "info", 3)], None),
        ([EMPTY, ("put", "info", 3), ("put", "info", 4)], None),  # only takes can have taken something
    ],
)
def test_a_value_is_lost_only_if_nothing_else_explains_that_it_never_came_out(
    then: list[tuple[str, str, Any]], why: str | None
) -> None:
    events = history(("put", "ok", 1), ("put", "ok", 2), *then)
    names: dict[str, Any] = {"put": "put", "taken": "take", "lost": "lost", "certain": ("unexpected",)}
    found = unless_taken_unseen(LOST, events, **names)
    assert found.valid == (False if why is None else "unknown") and (why or "2 were lost") in found.reason
    for outcome in (FINE, INVENTED, DOUBLED, UNDECIDED):
        assert unless_taken_unseen(outcome, events, **names) == outcome


def test_a_take_that_began_before_the_last_put_did_not_find_the_queue_empty() -> None:
    early = {"process": 8, "f": "take"}
    events = [{"type": "invoke", "value": None, **early}, *history(("put", "ok", 1), ("put", "ok", 2))]
    events += [{"type": "ok", "value": None, **early}]
    names: dict[str, Any] = {"put": "put", "taken": "take", "lost": "lost", "certain": ()}
    assert unless_taken_unseen(LOST, events, **names).valid == "unknown"


@pytest.mark.parametrize(("asked_ms", "valid"), [(4.0, "unknown"), (5.0, False)])
def test_a_delayed_value_may_come_out_until_its_delay_is_over(asked_ms: float, valid: bool | str) -> None:
    asked_ns = int(asked_ms * 1e6) + 1  # the put is acknowledged at 1 ns
    take = {"process": 8, "f": "take", "value": None}
    events = [*history(("put", "ok", 1)), {"type": "invoke", "time": asked_ns, **take},
              {"type": "ok", "time": asked_ns + 10**9, **take}]  # fmt: skip
    names: dict[str, Any] = {"put": "put", "taken": "take", "lost": "lost", "certain": ()}
    assert unless_taken_unseen(LOST, events, due_ms=5.0, **names).valid == valid
