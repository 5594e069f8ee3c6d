"""The verdict: what makes a run invalid, what keeps it from being valid, and which of them takes precedence."""

from __future__ import annotations

import dataclasses
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from checker.history import HistoryError
from harness.execution import exit_status_of
from harness.generator import Generator, Nothing
from harness.judge import MAX_ERROR_CHARS, faults_of, judge
from harness.runner import Observed
from harness.systems.base import CheckOutcome
from harness.test import NemesisChoice, Test
from harness.worker import Client
from harness.workloads.base import CheckContext
from harness.workloads.list_append import ListAppendWorkload
from harness.workloads.log import LogWorkload
from harness.workloads.queue import QueueWorkload
from harness.workloads.register import RegisterWorkload

PROVEN = {"proven": True, "links": 4, "failed": [], "detail": ""}
UNMET = {"proven": True, "exercised": False, "detail": "no packet ran into the cut"}
UNPROVEN = {"proven": False, "links": 4, "failed": ["n1->n2"], "detail": "n1->n2 still passes"}


class FixedWorkload:
    name = "fixed"
    description = "finds what it is told to find"
    requires = "queue"
    keys = 1
    check_names = ("linearizable",)

    def __init__(self, outcome: CheckOutcome) -> None:
        self.outcome = outcome

    def generator(self) -> Generator:
        return Nothing()

    def final_generator(self) -> Generator:
        return Nothing()

    def client(self, connection: Any) -> Client:
        raise AssertionError("no client is needed to judge")

    def online(self) -> None:
        return None

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        assert all(event["process"] != "nemesis" for event in history)
        return {"linearizable": self.outcome}


VALID = FixedWorkload(CheckOutcome(True, "holds"))
INVALID = FixedWorkload(CheckOutcome(False, "read of 3 was stale"))
UNKNOWN = FixedWorkload(CheckOutcome("unknown", "out of time"))


def make_test(nemesis: str = "partition") -> Test:
    return Test(
        system="broker", cluster="local", nodes=3, workload="register",
        nemesis=(NemesisChoice(nemesis),) if nemesis else (), nemesis_interval_s=5, time_limit_s=10,
        concurrency=1, rate=10, seed=1,
    )  # fmt: skip


def operations(completion: str = "ok") -> list[dict[str, Any]]:
    base = {"process": 0, "f": "write", "key": 0, "value": 1}
    return [
        {"index": 0, "time": 1, "type": "invoke", **base},
        {"index": 1, "time": 200, "type": completion, **base},
    ]


def fault(
    inject_proof: Any = PROVEN, heal_proof: Any = PROVEN, fault_id: str = "f1", met: Any = None
) -> list[dict[str, Any]]:
    value = {"id": fault_id, "nemesis": "partition", "variant": "one", "grudge": {"n1": ["n2"]}}

    def event(index: int, kind: str, f: str, **extra: Any) -> dict[str, Any]:
        return {
            "index": index, "time": index * 10, "process": "nemesis", "type": kind, "f": f, "value": {**value, **extra}
        }  # fmt: skip

    events = [event(10, "invoke", "inject"), event(11, "info", "inject", proof=inject_proof)]
    if heal_proof is not None:
        seen = {} if met is None else {"met": met}
        events += [event(12, "invoke", "heal", **seen), event(13, "info", "heal", proof=heal_proof, **seen)]
    return events


def test_a_run_without_doubts_is_valid() -> None:
    results = judge(make_test(), VALID, [*operations(), *fault()], Observed())
    assert results["valid"] is True
    assert results["ops"] == {"invoke": 1, "ok": 1, "fail": 0, "info": 0}
    assert results["faults"][0]["proven"] is True
    assert "1 proven fault" in results["reason"]


@pytest.mark.parametrize(
    ("events", "observed", "word"),
    [
        ([*operations(), *fault(inject_proof=UNPROVEN)], Observed(), "not effective: n1->n2 still passes"),
        ([*operations(), *fault(heal_proof=UNPROVEN)], Observed(), "not proven healed"),
        ([*operations(), *fault(heal_proof=None)], Observed(), "not proven healed"),
        ([*operations(), *fault(inject_proof=None)], Observed(), "no proof recorded"),
        (
            [*operations(), *fault(met={"proven": False, "detail": "n1->n2 carried 40 bytes"})],
            Observed(),
            "not effective: n1->n2 carried 40 bytes",
        ),
        ([*operations(), *fault(met=UNMET)], Observed(), "exercised no fault"),
        ([*operations(), *fault(met=UNMET)], Observed(), "f1: no packet ran into the cut): raise the load (--rate)"),
        (operations(), Observed(), "no fault was injected"),
        (operations(), Observed(trouble=["the history has lost its end"]), "the history contains no faults"),
        ([*operations("info"), *fault()], Observed(), "no operation succeeded"),
        ([*operations(), *fault()], Observed(trouble=["final reads: gone"]), "final reads: gone"),
        ([*operations(), *fault()], Observed(final_reads_cut="ended after 150 s"), "ended after 150 s"),
        ([*operations(), *fault()], Observed(unexpected_errors={"KeyError: x": 2}), "KeyError: x"),
        (
            [*operations(), *fault()],
            Observed(system_checks={"replicas": CheckOutcome("unknown", "n3 silent")}),
            "replicas: n3 silent",
        ),
    ],
)
def test_an_unknown_verdict_gives_its_reason(events: list[dict[str, Any]], observed: Observed, word: str) -> None:
    results = judge(make_test(), VALID, events, observed)
    assert results["valid"] == "unknown"
    assert word in results["reason"]


def test_an_operation_kind_that_never_succeeded_leaves_the_verdict_unknown() -> None:
    """Writes alone are linearizable whatever the system answers to reads."""
    base = {"process": 1, "f": "read", "key": 0, "value": None}
    reads = [
        {"index": 2, "time": 3, "type": "invoke", **base},
        {"index": 3, "time": 4, "type": "fail", **base, "error": "read: ValueError: no JSON (kv.py:12)"},
    ]
    results = judge(make_test(), VALID, [*operations(), *reads, *fault()], Observed())
    assert results["valid"] == "unknown"
    told = "none of 1 read operations succeeded, so read was not tested (1 times: read: ValueError: no JSON"
    assert told in results["reason"]
    assert judge(make_test(), INVALID, [*operations(), *reads, *fault()], Observed())["valid"] is False


def client_events(*told: tuple[int, str, str, Any]) -> list[dict[str, Any]]:
    """Operations of one process, each given as (index of its invocation, f, type of its completion, value).
    Transactions have their keys in their steps."""
    return [
        {"index": at + step, "time": at + step, "process": 0, "type": kind, "f": f, "value": value}
        | ({} if f == "txn" else {"key": 0})
        for at, f, completion, value in told
        for step, kind in enumerate(("invoke", completion))
    ]


def test_successful_final_reads_do_not_replace_reads_under_load() -> None:
    events = client_events((0, "write", "ok", 1), (2, "read", "fail", None), (4, "read", "ok", 1))
    assert judge(make_test(""), VALID, events, Observed())["valid"] is True, "the end of the load is not known"
    results = judge(make_test(""), VALID, events, Observed(final_reads_from=4))
    assert results["valid"] == "unknown"
    assert results["reason"] == "none of 1 read operations under load succeeded, so read was not tested"
    results = judge(make_test(""), VALID, events[:2] + events[4:] + events[2:4], Observed(final_reads_from=4))
    assert results["reason"] == "none of 1 read operations at the end succeeded, so read was not tested"


@pytest.mark.parametrize("workload", [RegisterWorkload(), LogWorkload(), QueueWorkload(), ListAppendWorkload()])
def test_a_run_without_a_successful_write_is_unknown(workload: Any) -> None:
    read, write = {
        "register": (("read", None), ("write", 1)),
        "log": (("tail", 0), ("append", [0, 1])),
        "queue": (("dequeue", None), ("enqueue", 1)),
        "list-append": (("txn", [["r", 0, []]]), ("txn", [["append", 0, 1]])),
    }[workload.name]
    doubt = "no write operation succeeded, so there was nothing to lose or to read"
    events = client_events((0, read[0], "ok", read[1]))
    events += client_events((2, write[0], "fail", write[1])) if workload.name == "list-append" else []
    results = judge(make_test(""), workload, events, Observed())
    assert results["valid"] == "unknown" and doubt in results["doubts"]
    with_write = [*events, *client_events((4, write[0], "ok", write[1]))]
    if workload.name == "log":
        with_write[-2]["value"] = 1
    assert doubt not in judge(make_test(""), workload, with_write, Observed())["doubts"]


def test_a_fault_with_no_operation_in_progress_leaves_the_verdict_unknown() -> None:
    for began, ended, overlaps in (
        (1, 99, False),
        (1, 100, True),
        (130 + 10**9, 131 + 10**9, True),
        (131 + 10**9, 132 + 10**9, False),
        (1, None, True),
    ):
        events = operations()
        events[0]["time"], events[1]["time"] = began, ended
        if ended is None:
            events = [*operations(), {**events[0], "process": 1}]
            events[1]["time"] = 2
        results = judge(make_test(), VALID, [*events, *fault()], Observed())
        assert results["valid"] == (True if overlaps else "unknown"), (began, ended)
        assert ("no operation was in progress during any fault" in results["reason"]) is not overlaps


def test_an_operation_between_two_faults_or_open_after_the_last_is_in_progress_during_none() -> None:
    second = [{**event, "time": event["time"] + 5 * 10**9} for event in fault(fault_id="f2")]
    base = {"process": 0, "f": "write", "key": 0, "value": 1}
    between = [
        {"index": 0, "time": 2 * 10**9, "type": "invoke", **base},
        {"index": 1, "time": 3 * 10**9, "type": "ok", **base},
    ]
    left_open = {**between[0], "time": 9 * 10**9}
    results = judge(make_test(), VALID, [*between, *fault(), *second, left_open], Observed())
    assert results["reason"].startswith("no operation was in progress during any fault")
    left_open["time"] = 5 * 10**9 + 110
    assert judge(make_test(), VALID, [*between, *fault(), *second, left_open], Observed())["valid"] is True


def test_acknowledged_but_unread_messages_leave_the_verdict_unknown() -> None:
    for unread, valid in ((0, True), (2, "unknown")):
        found = FixedWorkload(CheckOutcome(True, "none lost", {"stats": {"unread": unread}}))
        results = judge(make_test(), found, [*operations(), *fault()], Observed())
        assert results["valid"] == valid
    assert results["reason"] == "linearizable: 2 acknowledged messages could not be read at the end"


def test_one_unexercised_fault_among_others_is_reported_and_the_run_stays_valid() -> None:
    faults = [*fault(met=UNMET), *fault(fault_id="f2")]
    results = judge(make_test(), VALID, [*operations(), *faults], Observed())
    assert results["valid"] is True
    assert "2 proven faults, 1 of them not exercised" in results["reason"]
    assert [known["exercised"] for known in results["faults"]] == [False, None]


def test_unexpected_exits_are_reported_whatever_the_verdict() -> None:
    ends = {"n1 exited unexpectedly, with status 7": 2, "n2 exited unexpectedly, with status 7": 1}
    results = judge(make_test(), VALID, [*operations(), *fault()], Observed(unexpected_exits=ends))
    assert results["valid"] is True and results["unexpected_exits"] == ends
    told = "; n1 exited unexpectedly, with status 7 (2 times), n2 exited unexpectedly, with status 7"
    assert results["reason"].endswith(told)
    many = {f"n1 exited unexpectedly, with status {status}": 1 for status in range(5)}
    results = judge(make_test(), VALID, operations("info"), Observed(unexpected_exits=many))
    assert results["valid"] == "unknown" and results["reason"].endswith("with status 2, and 2 more")


def test_a_violation_is_reported_together_with_the_mistakes_of_the_clients() -> None:
    """Else an author sees them only in the report, and takes the violation for all that is wrong."""
    observed = Observed(unexpected_errors={"KeyError: x": 2}, unexpected_exits={"n1 exited unexpectedly": 1})
    results = judge(make_test(), INVALID, [*operations(), *fault()], observed)
    assert results["valid"] is False
    told = "; clients failed with unexpected errors (2 times: KeyError: x); n1 exited unexpectedly"
    assert results["reason"].endswith(told)


def test_a_violation_outweighs_every_doubt() -> None:
    observed = Observed(trouble=["something"])
    results = judge(make_test(), INVALID, [*operations(), *fault(inject_proof=UNPROVEN)], observed)
    assert results["valid"] is False
    assert results["reason"].startswith("linearizable: read of 3 was stale")
    assert results["doubts"], "the doubts are kept as well"


def test_a_failed_system_check_makes_the_run_invalid() -> None:
    observed = Observed(system_checks={"leaders": CheckOutcome(False, "term 4 had 2 leaders")})
    assert judge(make_test(), VALID, [*operations(), *fault()], observed)["valid"] is False


@pytest.mark.parametrize("name", ["linearizable", "recovers"])
def test_a_check_of_the_run_does_not_replace_one_of_the_workload_with_the_same_name(name: str) -> None:
    class Named(FixedWorkload):
        check_names = (name,)

        def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
            return {name: self.outcome}

    fine = CheckOutcome(True, "fine")
    observed = Observed(recovery=fine) if name == "recovers" else Observed(system_checks={name: fine})
    results = judge(make_test(), Named(CheckOutcome(False, "read of 3 was stale")), operations(), observed)
    assert results["valid"] is False and results["reason"].startswith(f"{name}: read of 3 was stale")
    assert results["checks"][f"{name} (of the run)"]["valid"] is True
    assert results["checks_of_the_run"] == [f"{name} (of the run)"]
    names = {name: fine, f"{name} (of the run)": CheckOutcome(False, "n2 differs")}  # as a system may have named them
    results = judge(make_test(), Named(fine), operations(), Observed(system_checks=names))
    assert results["reason"] == f"{name} (of the run) (of the run): n2 differs"


def test_recovery_is_judged_by_the_faults_and_the_trouble_of_the_run() -> None:
    lost = CheckOutcome(False, "n1 ended with status 1")
    for events, observed, why in (
        ([*operations(), *fault(heal_proof=UNPROVEN)], Observed(recovery=lost), "fault f1 (partition one) was not"),
        ([*operations(), *fault()], Observed(recovery=lost, trouble=["healing: lost"]), "part of the run itself"),
    ):
        results = judge(make_test(), VALID, events, observed)
        assert results["valid"] == results["checks"]["recovers"]["valid"] == "unknown"
        assert f"n1 ended with status 1; the cause is unclear: {why}" in results["checks"]["recovers"]["reason"]
    assert judge(make_test(), VALID, [*operations(), *fault()], Observed(recovery=lost))["valid"] is False


def test_only_clients_events_count_as_the_load() -> None:
    """`final_reads_from` is an index among all events, those of the faults included."""
    under_load, at_the_end = (
        client_events((0, "write", "ok", 1), (2, "read", "fail", None)),
        client_events((4, "read", "ok", 1)),
    )
    events = [*fault(), *under_load, *at_the_end]
    results = judge(make_test(), VALID, events, Observed(final_reads_from=len(fault()) + len(under_load)))
    assert "none of 1 read operations under load succeeded" in results["reason"]


def test_an_unknown_check_makes_the_run_unknown() -> None:
    assert judge(make_test(), UNKNOWN, [*operations(), *fault()], Observed())["valid"] == "unknown"


def test_a_run_without_a_nemesis_needs_no_fault() -> None:
    assert judge(make_test(nemesis=""), VALID, operations(), Observed())["valid"] is True


def test_a_schedule_whose_faults_were_never_injected_is_unknown() -> None:
    of_a_file = dataclasses.replace(make_test(nemesis=""), nemesis_schedule="faults.json")  # as analyze judges it
    for test, observed in ((make_test(nemesis=""), Observed(faults_planned=1)), (of_a_file, Observed())):
        results = judge(test, VALID, operations(), observed)
        assert results["valid"] == "unknown" and "no fault was injected" in results["reason"]


@pytest.mark.parametrize("odd", [None, 1, "valid", "true"])
def test_a_check_that_is_neither_true_nor_false_is_unknown(odd: Any) -> None:
    results = judge(make_test(), FixedWorkload(CheckOutcome(odd, "odd")), [*operations(), *fault()], Observed())
    assert results["valid"] == "unknown" and results["reason"] == "linearizable: odd"


def test_all_reasons_are_given_together() -> None:
    observed = Observed(
        stopped_at_first_violation="a stale read", system_checks={"replicas": CheckOutcome(False, "n2 differs")}
    )
    results = judge(make_test(), INVALID, [*operations(), *fault()], observed)
    assert results["reason"] == (
        "linearizable: read of 3 was stale; replicas: n2 differs (the load was stopped at the first violation)"
    )
    results = judge(make_test(), UNKNOWN, [*operations(), *fault()], dataclasses.replace(observed, system_checks={}))
    assert results["reason"] == (
        "linearizable: out of time; the load was stopped at an apparent violation that no check confirms: a stale read"
    )


def test_ctrl_c_during_a_check_is_no_verdict() -> None:
    class Interrupted(FixedWorkload):
        def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(make_test(), Interrupted(CheckOutcome(True, "")), operations(), Observed())


def test_an_interrupted_run_is_unknown_and_says_so() -> None:
    observed = Observed(interrupted="SIGINT after 3.0 s")
    results = judge(make_test(), VALID, [*operations(), *fault()], observed)
    assert results["valid"] == "unknown" and exit_status_of(results) == 2
    assert results["interrupted"] == "SIGINT after 3.0 s"
    assert results["reason"] == "interrupted: SIGINT after 3.0 s; 1 operations had succeeded by then"


def test_a_violation_counts_even_if_the_run_was_interrupted() -> None:
    results = judge(make_test(), INVALID, [*operations(), *fault()], Observed(interrupted="SIGINT after 3.0 s"))
    assert results["valid"] is False and exit_status_of(results) == 1
    assert results["reason"].endswith("(interrupted: SIGINT after 3.0 s)")


def test_a_truncated_history_is_unknown() -> None:
    events = [*operations(), *fault()]
    results = judge(make_test(), VALID, events, Observed(), history_note="the history ends in the middle of a line")
    assert results["valid"] == "unknown"


def test_faults_keep_their_times_and_proofs() -> None:
    faults = faults_of([*fault(fault_id="f1"), *fault(inject_proof=UNPROVEN, heal_proof=None, fault_id="f2")])
    assert [(f["id"], f["start_ns"], f["end_ns"], f["proven"], f["healed"]) for f in faults] == [
        ("f1", 100, 130, True, True),
        ("f2", 100, None, False, False),
    ]
    assert faults[0]["proof"] == PROVEN and faults[0]["heal_proof"] == PROVEN


def test_errors_are_counted_without_their_addresses() -> None:
    events = operations("fail")
    events[1]["error"] = "RequestRefused: NOT_LEADER leader=n2 addr=1.2.3.4:5"
    results = judge(make_test(nemesis=""), VALID, events, Observed())
    assert results["errors"] == {"RequestRefused: NOT_LEADER leader=n2": 1}


def test_errors_are_reported_in_full_up_to_a_limit() -> None:
    """The end of an error often says where in a plug-in it was raised, and who answered; a page of HTML is cut."""
    for error in ("KeyError: " + "x" * 200 + " at kv.py:12", "Refused: " + "<p>" * 1000):
        events = operations("fail")
        events[1]["error"] = error
        [told] = judge(make_test(nemesis=""), VALID, events, Observed())["errors"]
        assert told == error if len(error) < MAX_ERROR_CHARS else error.startswith(told[:-1]) and told[-1] == "…"


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (SystemExit(0), "the check of workload fixed raised SystemExit: 0 (test_judge.py:"),
        (CancelledError("mine"), "the check of workload fixed raised CancelledError: mine (test_judge.py:"),
        (ValueError("no such key"), "the check of workload fixed raised ValueError: no such key (test_judge.py:"),
        (HistoryError("no index"), "the check of workload fixed raised HistoryError: no index (test_judge.py:"),
        (None, "returned None, which says nothing about the history"),
        ({}, "returned {}, which says nothing about the history"),
        ({"linearizable": True}, "returned True, not a CheckOutcome"),
    ],
)
def test_a_check_that_raises_or_returns_no_outcome_is_unknown(answer: Any, word: str) -> None:
    class Broken(FixedWorkload):
        def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
            if isinstance(answer, BaseException):
                raise answer
            return answer  # type: ignore[no-any-return]

    results = judge(make_test(), Broken(CheckOutcome(True, "")), [*operations(), *fault()], Observed())
    assert results["valid"] == "unknown"
    assert word in results["reason"]
    assert results["checks"]["linearizable"]["valid"] == "unknown"
