"""Workloads by capability, against in-memory clients: correct ones pass, each incorrect one is found."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import registry
from harness.errors import OperatorError
from harness.generator import Generator, Op
from harness.in_process import InProcessRun, run_in_process
from harness.systems.broker import BrokerSystem
from harness.unawaited import telling_unawaited
from harness.workloads import capability
from harness.workloads.base import CLIENT, ByCapability, CheckContext, Workload
from harness.workloads.capability import CapabilityClient, ClientMistake, _is_mistake, missing_capabilities
from harness.workloads.cas_register import CasRegisterWorkload
from harness.workloads.choice import make_workload, require_capabilities
from harness.workloads.client_delay import ClientDelayWorkload
from harness.workloads.client_register import ClientRegisterWorkload
from harness.workloads.queues import MAX_FINAL_ATTEMPTS
from harness.workloads.versioned_register import VersionedRegisterWorkload
from tests.harness.workloads.toys import AcknowledgingClient, LostAnswer, Refused, Store, ToyClient

NAMES = (
    "register", "cas-register", "set", "counter", "log", "queue", "mutex", "list-append", "rw-register",
    "mini-txn", "bank", "long-fork", "unique-ids", "stack", "priority-queue", "fetch-and-add", "multi-register",
    "versioned-register", "key-value", "topic", "consumer-progress", "delay", "transactions", "write-skew",
)  # fmt: skip

SEARCHED = ("stack", "priority-queue", "multi-register")
"""One object whose operations of unknown outcome leave so many orders that a search may end undecided."""


class Toys:
    """A system that offers clients and nothing else."""

    offers = frozenset({CLIENT})


def made(name: str, **given_settings: str) -> Workload:
    quick = {
        "queue": {"drain_s": "1"}, "mutex": {"hold_ms": "1"}, "delay": {"longest_ms": "200", "drain_s": "1"},
    }.get(name, {})  # fmt: skip
    with_prefix = {f"workload.{key}": value for key, value in {**quick, **given_settings}.items()}
    return make_workload(name, system_class=Toys, system="toys", settings=with_prefix)


def run(
    workload: Workload, store: Store, *, operations: int = 400, seed: int = 1, client: type[ToyClient] = ToyClient
) -> InProcessRun:
    return run_in_process(workload, lambda: client(store), operations=operations, seed=seed)


def reasons(done: InProcessRun) -> dict[str, str]:
    return {name: outcome.reason for name, outcome in done.outcomes.items() if outcome.valid is not True}


@pytest.mark.parametrize("name", NAMES)
def test_a_correct_client_passes_with_lost_answers_and_refused_calls(name: str) -> None:
    def fault(method: str, number: int) -> str | None:
        if method in ("dequeue", "pop", "extract"):  # without acknowledgements a lost answer loses the value
            return None
        return {0: "lose", 7: "refuse"}.get(number % 23)

    store = Store(fault)
    done = run(made(name), store)
    assert reasons(done) == {} and done.unexpected_errors == {}
    kinds = {event["type"] for event in done.events}
    assert kinds == {"invoke", "ok", "fail", "info"} or name in ("queue", "unique-ids", "counter", "register", "bank")
    assert {"invoke", "ok", "fail"} <= kinds
    assert store.open_now == 0 and store.opened > 5  # a client whose answer got lost was replaced


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("set", {"reads": "linearizable"}), ("counter", {"check": "linearizable"}), ("log", {"polls": "eventual"}),
        ("queue", {"order": "fifo", "delivery": "exactly-once"}), ("queue", {"order": "any"}),
        ("mutex", {"check": "linearizable"}), ("list-append", {"isolation": "serializable", "keys": "2"}),
        ("set", {"check": "simple-set"}), ("set", {"check": "grow-only-set"}), ("topic", {"fetches": "eventual"}),
        ("versioned-register", {"check": "sessions"}), ("multi-register", {"registers": "1"}),
    ],
)  # fmt: skip
def test_a_correct_client_passes_the_stricter_and_the_weaker_checks(name: str, options: dict[str, str]) -> None:
    done = run(made(name, **options), Store())
    assert reasons(done) == {}
    assert set(done.outcomes) <= set(made(name).check_names)


def every(method: str, count: int, fault: str = "drop") -> Callable[[str, int], str | None]:
    return lambda name, number: fault if name == method and number % count == 0 else None


@pytest.mark.parametrize(
    ("name", "fault", "check", "said"),
    [
        ("register", every("read", 9), "linearizable", ""),
        ("cas-register", every("cas", 9), "linearizable", ""),
        ("set", every("add", 40), "set-full", "was known"),
        ("counter", every("increment", 20), "counter-bounds", "is not within"),
        ("log", every("append", 30), "log", ""),
        ("queue", every("enqueue", 40), "total-queue", "never came out"),
        ("mutex", every("lock", 10), "exclusion", "still held it"),
        ("list-append", every("transact", 25), "isolation", "not strict-serializable"),
        ("unique-ids", every("generate", 40), "unique-ids", "was given to"),
        ("stack", every("push", 40), "linearizable", ""),
        ("priority-queue", every("insert", 40), "linearizable", ""),
        ("fetch-and-add", every("fetch_add", 40), "linearizable", ""),
        ("multi-register", every("transact", 40), "linearizable", ""),
        ("versioned-register", every("read_version", 40), "linearizable", ""),
        ("key-value", every("concat", 40), "linearizable", ""),
        ("topic", every("publish", 40), "log", ""),
        ("topic", every("fetch", 40), "linearizable", ""),
        ("delay", every("schedule", 40), "delay", "never arrived"),
        ("transactions", every("commit", 20), "transaction-visibility", "was never received"),
        ("consumer-progress", every("commit_offset", 20), "consumer-progress", "went back to offset"),
        ("write-skew", every("insert_if_absent", 20), "write-skew", "both committed"),
    ],
)
def test_an_incorrect_client_is_found(
    name: str, fault: Callable[[str, int], str | None], check: str, said: str
) -> None:
    done = run(made(name), Store(fault))
    assert done.outcomes[check].valid is False and said in done.outcomes[check].reason
    assert not done.valid


@pytest.mark.parametrize(
    ("name", "method", "option", "check"),
    [
        ("versioned-register", "read_version", {"check": "sessions"}, "sessions"),
        ("set", "add", {"check": "simple-set"}, "simple-set"),
        ("set", "add", {"check": "grow-only-set"}, "linearizable"),
        ("topic", "publish", {"fetches": "eventual"}, "log"),
    ],
)
def test_the_optional_checks_find_an_incorrect_client_too(
    name: str, method: str, option: dict[str, str], check: str
) -> None:
    done = run(made(name, **option), Store(every(method, 20)))
    assert done.outcomes[check].valid is False and set(done.outcomes) == {check}


class SilentLog(ToyClient):
    """Refuses to read log 0 once it holds ten messages."""

    async def poll(self, key: Any, offset: int, max_messages: int) -> Any:
        if key == 0 and len(self.store.logs.get(0, ())) >= 10:
            raise Refused
        return await super().poll(key, offset, max_messages)


def as_events(lines: Sequence[tuple[int, str, str, Any]]) -> list[dict[str, Any]]:
    """Events of one log."""
    return [
        {"index": index, "time": index, "process": process, "type": kind, "f": f, "key": 0, "value": value}
        for index, (process, kind, f, value) in enumerate(lines)
    ]


@pytest.mark.parametrize("polls", ["linearizable", "eventual"])
def test_a_message_that_a_full_poll_has_shown_may_not_vanish(polls: str) -> None:
    """A full poll reports no end, and the append was never acknowledged."""
    lines = [
        (0, "invoke", "append", 7), (0, "info", "append", None),
        (1, "invoke", "read", {"offset": 0, "max": 1}),
        (1, "ok", "read", {"offset": 0, "messages": [7], "tail": None}),
        (2, "invoke", "read", {"offset": 0, "max": 1, "final": True}),
        (2, "ok", "read", {"offset": 0, "messages": [], "tail": 0, "final": True}),
    ]  # fmt: skip
    found = made("log", polls=polls).check(as_events(lines), CheckContext(timeout_s=None, memory_mb=None))["log"]
    assert found.valid is False and found.details["stats"]["counts"]["stale"] == 1


class BehindForAWhile(ToyClient):
    """Answers the first three polls of old offsets, as final reads make them, from old state: a leader that was
    replaced and does not know it yet."""

    async def poll(self, key: Any, offset: int, max_messages: int) -> Any:
        return self.behind(key, offset, await super().poll(key, offset, max_messages), len(self.store.logs[key]))

    async def fetch(self, partition: int, offset: int, max_messages: int) -> Any:
        found = await super().fetch(partition, offset, max_messages)
        return self.behind(partition, offset, found, len(self.store.partitions[partition]))

    def behind(self, key: Any, offset: int, found: list[Any], end: int) -> list[Any]:
        is_late = offset <= 3 and end > 20
        return found[: 3 - offset] if is_late and self.store.fault(f"poll {key}") == "old" else found


@pytest.mark.parametrize(("name", "settings"), [("log", {"polls": "eventual"}), ("topic", {"fetches": "eventual"})])
def test_a_final_read_that_is_stale_is_repeated(name: str, settings: dict[str, str]) -> None:
    def fault(method: str, number: int) -> str | None:
        return "old" if method.startswith("poll ") and number <= 3 else None

    done = run(made(name, **settings), Store(fault), client=BehindForAWhile)
    assert reasons(done) == {}
    ends = [e["value"]["tail"] for e in done.events if e["type"] == "ok" and e["f"] == "read" and "final" in e["value"]]
    assert ends.count(3) == 4 * 3


class BehindAndThenSilent(BehindForAWhile):
    """Answers the first poll of old offsets from old state, and refuses to read what came after it."""

    def behind(self, key: Any, offset: int, found: list[Any], end: int) -> list[Any]:
        if key == 0 and offset == 3 and end > 20:
            raise Refused
        return super().behind(key, offset, found, end)


@pytest.mark.parametrize(("name", "settings"), [("log", {"polls": "eventual"}), ("topic", {"fetches": "eventual"})])
def test_a_stale_final_read_that_could_not_be_completed_makes_the_verdict_unknown(
    name: str, settings: dict[str, str]
) -> None:
    def fault(method: str, number: int) -> str | None:
        return "old" if method.startswith("poll ") and number <= 1 else None

    done = run(made(name, **settings), Store(fault), client=BehindAndThenSilent)
    assert done.outcomes["log"].valid == "unknown" and "not covered by any read" in done.outcomes["log"].reason


@pytest.mark.parametrize("polls", ["linearizable", "eventual"])
def test_a_value_missing_from_final_reads_is_a_violation_only_if_none_may_be_stale(polls: str) -> None:
    """The second append was never acknowledged, so the contents of the log alone are correct."""
    last = {"offset": 1, "max": 1, "final": True}
    lines = [
        (0, "invoke", "append", 7), (0, "ok", "append", [0, 7]), (0, "invoke", "append", 8), (0, "info", "append", 8),
        (1, "invoke", "read", {"offset": 0, "max": 2}),
        (1, "ok", "read", {"offset": 0, "messages": [7, 8], "tail": None}),
        (2, "invoke", "read", {"offset": 0, "max": 2, "final": True}),
        (2, "ok", "read", {"offset": 0, "messages": [7], "tail": 1, "final": True}),
        (2, "invoke", "read", last), (2, "fail", "read", last),
    ]  # fmt: skip
    found = made("log", polls=polls).check(as_events(lines), CheckContext(timeout_s=None, memory_mb=None))["log"]
    assert found.valid == (False if polls == "linearizable" else "unknown")


class SilentKeys(ToyClient):
    """Refuses to read the first keys together, as only the final reads do."""

    async def transact(self, steps: Any) -> Any:
        if [step[:2] for step in steps] == [["r", key] for key in range(8)]:
            raise Refused
        return await super().transact(steps)


@pytest.mark.parametrize("name", ["list-append", "rw-register", "mini-txn"])
def test_keys_that_cannot_be_read_at_the_end_make_the_verdict_unknown(name: str) -> None:
    done = run(made(name), Store(), client=SilentKeys)
    assert done.outcomes["isolation"].valid == "unknown"
    said = "but 8 written keys (0, 1, 2, 3, 4, ...) could not be read at the end of the run"
    assert said in reasons(done)["isolation"]
    steps = [["r", key, None] for key in range(8)]
    assert sum(e["type"] == "fail" and e["value"] == steps for e in done.events) == MAX_FINAL_ATTEMPTS


@pytest.mark.parametrize("polls", ["linearizable", "eventual"])
def test_a_log_that_cannot_be_read_at_the_end_makes_the_verdict_unknown(polls: str) -> None:
    done = run(made("log", polls=polls), Store(), client=SilentLog)
    assert done.outcomes["log"].valid == "unknown" and not done.valid
    assert "not covered by any read since they were acknowledged (of key 0)" in done.outcomes["log"].reason


class Hasty(ToyClient):
    """Ignores delays, and commits what is rolled back."""

    async def schedule(self, value: Any, delay_ms: int) -> None:
        await super().schedule(value, 0)

    async def rollback(self, value: Any) -> None:
        await super().commit(value)


def test_values_received_too_early_or_despite_a_rollback_are_found() -> None:
    early = run(made("delay"), Store(), client=Hasty).outcomes["delay"]
    assert early.valid is False and "ms early for" in early.reason
    seen = run(made("transactions"), Store(), client=Hasty).outcomes["transaction-visibility"]
    assert seen.valid is False and "rollback" in seen.reason


def test_a_refused_commit_leaves_the_transaction_open() -> None:
    def fault(method: str, number: int) -> str | None:
        return "refuse" if method == "commit" and number % 10 == 0 else None

    done = run(made("transactions"), Store(fault))
    assert done.valid
    errors = {event["error"] for event in done.events if event["f"] == "transact" and event["type"] == "info"}
    assert errors and all("prepared, then not now" in error for error in errors)


class Impatient(ToyClient):
    """Commits some values while preparing them, and then raises an error or does not answer in time."""

    timeout_s = 0.05

    async def prepare(self, value: Any) -> None:
        await super().prepare(value)
        fault = self.store.fault("answer")
        if fault is not None:
            await super().commit(value)
            if fault == "hang":
                await asyncio.sleep(60)
            raise ConnectionResetError("the answer got lost")


@pytest.mark.parametrize("fault", ["lose", "hang"])
def test_a_value_whose_commit_was_never_requested_must_not_be_received(fault: str) -> None:
    done = run(made("transactions"), Store(every("answer", 40, fault)), client=Impatient)
    found = done.outcomes["transaction-visibility"]
    assert found.valid is False and "prepared but not committed by then" in found.reason
    open_ones = [event["value"] for event in done.events if event["f"] == "transact" and event["type"] == "info"]
    assert open_ones and all(value["ended"] is False for value in open_ones)


class HalfTransfers(ToyClient):
    """Performs only the first step of some transactions."""

    async def transact(self, steps: list[list[Any]]) -> Any:
        if self.store.fault("half") and len(steps) > 1 and steps[1][0] != "r":
            await super().transact(steps[:1])
            return steps
        return await super().transact(steps)


class TornReads(ToyClient):
    """Reads of several keys are not atomic."""

    async def transact(self, steps: list[list[Any]]) -> Any:
        if all(step[0] == "r" for step in steps):
            return [(await ToyClient.transact(self, [step]))[0] for step in steps]
        return await super().transact(steps)


def test_a_bank_that_performs_half_of_a_transfer_is_found() -> None:
    done = run(made("bank"), Store(every("half", 30)), client=HalfTransfers)
    assert done.outcomes["bank"].valid is False and "sums to" in done.outcomes["bank"].reason


def test_torn_reads_are_found_by_bank_and_by_transactions_on_registers() -> None:
    for name, check in (("bank", "bank"), ("rw-register", "isolation"), ("mini-txn", "isolation")):
        done = run(made(name), Store(), client=TornReads, operations=1000)
        assert done.outcomes[check].valid is False, name


class Forked(ToyClient):
    """Two views of one store: each shows its own writes at once and the other's only once all of a group is written."""

    views = 0

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        Forked.views += 1
        self.view = Forked.views % 2

    async def transact(self, steps: list[list[Any]]) -> Any:
        done = await super().transact(steps)
        for step in done:
            if step[0] == "w":
                self.store.before[step[1]] = self.view
        group = [step[1] for step in done]
        if done[0][0] == "r" and any(step[2] is None for step in done):
            return [[f, key, value if self.store.before.get(key) == self.view else None] for f, key, value in done]
        assert group
        return done


def test_a_long_fork_is_found() -> None:
    done = run(made("long-fork"), Store(), client=Forked, operations=2000)
    assert done.outcomes["long-fork"].valid is False and "sees the opposite" in done.outcomes["long-fork"].reason


class Skewed(ToyClient):
    """Snapshot isolation: a transaction sees what had been committed when it began."""

    async def insert_if_absent(self, key: Any, table: int, row: Any) -> Any:
        if await self.rows(key):
            return False
        self.store.rows.setdefault(key, []).append(row)
        return True


@pytest.mark.parametrize("attempts", ["2", "5"])
def test_write_skew_is_found(attempts: str) -> None:
    done = run(made("write-skew", attempts=attempts), Store(), client=Skewed)
    found = done.outcomes["write-skew"]
    assert found.valid is False and "both committed, at the same time" in found.reason
    counts = found.details["stats"]["counts"]
    assert counts["write-skew"] > 40 and counts["unexpected"] == counts["missing"] == 0


def test_write_skew_is_found_in_reads_if_no_insert_was_answered() -> None:
    def fault(method: str, number: int) -> str | None:
        return "lose" if method == "insert_if_absent" else {0: "refuse"}.get(number % 3)

    right = run(made("write-skew"), Store(fault)).outcomes["write-skew"]
    assert right.valid is True and "keys it is not known" not in right.reason

    class SkewedAndLost(Skewed):
        async def insert_if_absent(self, key: Any, table: int, row: Any) -> Any:
            await super().insert_if_absent(key, table, row)
            raise LostAnswer("the answer got lost")

    wrong = run(made("write-skew"), Store(), client=SkewedAndLost)
    assert {event["type"] for event in wrong.events if event["f"] == "insert"} == {"invoke", "info"}
    reason = wrong.outcomes["write-skew"].reason
    assert wrong.outcomes["write-skew"].valid is False and "both committed" in reason and "shows" in reason


def test_keys_of_unknown_outcome_are_reread_until_answered_or_attempts_run_out() -> None:
    def fault(method: str, number: int) -> str | None:
        return "lose" if method == "insert_if_absent" else {0: None}.get(number % 3, "refuse")

    done = run(made("write-skew"), Store(fault), operations=40)
    answered = [event["key"] for event in done.events if event["f"] == "read" and event["type"] == "ok"]
    assert sorted(answered) == list(range(20)) and done.valid

    def never(method: str, number: int) -> str | None:
        return "refuse" if method == "rows" else fault(method, number)

    done = run(made("write-skew"), Store(never), operations=2)
    tries = [event for event in done.events if event["f"] == "read" and event["type"] == "fail"]
    assert len(tries) == MAX_FINAL_ATTEMPTS
    assert done.outcomes["write-skew"].valid == "unknown"


def test_write_skew_without_concurrent_inserts_is_unknown() -> None:
    store = Store()
    done = run_in_process(made("write-skew"), lambda: ToyClient(store), operations=100, concurrency=1)
    assert done.outcomes["write-skew"].valid == "unknown"
    assert "nothing was tested" in done.outcomes["write-skew"].reason


@pytest.mark.parametrize(
    ("answer", "said"),
    [({"insert_if_absent": None}, "insert_if_absent returned None"), ({"rows": 7}, "rows returned 7"),
     ({"rows": ["x"]}, "rows returned ['x']")],
)  # fmt: skip
def test_answers_of_the_wrong_type_to_write_skew_are_a_client_mistake(answer: dict[str, Any], said: str) -> None:
    class Odd(ToyClient):
        async def insert_if_absent(self, key: Any, table: int, row: Any) -> Any:
            return answer.get("insert_if_absent", True)

        async def rows(self, key: Any) -> Any:
            return answer.get("rows", [])

    done = run(made("write-skew"), Store(), client=Odd, operations=20)
    assert not done.valid and any(said in text for text in done.unexpected_errors)


def test_losses_that_unanswered_dequeues_may_explain_are_unknown_and_others_invalid() -> None:
    unseen = run(made("queue"), Store(every("dequeue", 40, "lose")))
    assert unseen.outcomes["total-queue"].valid == "unknown"
    assert "takes of unknown outcome may have taken them" in unseen.outcomes["total-queue"].reason

    def loses_more(method: str, number: int) -> str | None:
        if method == "enqueue" and number % 10 == 0:
            return "drop"
        return "lose" if method == "dequeue" and number % 60 == 0 else None

    assert run(made("queue"), Store(loses_more)).outcomes["total-queue"].valid is False


def test_acknowledgements_make_a_lost_answer_harmless() -> None:
    for name in ("dequeue", "ack"):
        done = run(made("queue"), Store(every(name, 20, "lose")), client=AcknowledgingClient)
        assert done.valid, name
        assert all(event["type"] != "info" for event in done.events if event["f"] == "dequeue")


def test_a_dequeued_value_counts_even_if_its_acknowledgement_is_never_answered() -> None:
    """The queue has removed the value: no other client receives it, and it is not lost."""

    class Unanswered(AcknowledgingClient):
        timeout_s = 1.0

        async def ack(self, value: Any) -> None:
            await super().ack(value)
            if value % 10 == 0:
                await asyncio.sleep(60)

    store = Store()
    done = run_in_process(made("queue"), lambda: Unanswered(store), operations=150, operation_timeout_s=1.0)
    assert done.valid, reasons(done)
    taken = [event for event in done.events if event["f"] == "dequeue" and event["type"] != "invoke"]
    assert {event["type"] for event in taken} == {"ok"} and any(event["value"] == 10 for event in taken)
    assert store.opened > 10 and store.open_now == 0, "an answer that comes late must not be taken for another's"


@pytest.mark.parametrize(("lag_s", "valid"), [(0.3, True), (math.inf, False)])
def test_elements_that_never_reach_a_host_are_lost_and_late_ones_are_not(
    lag_s: float, valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.workloads.final_reads.EQUAL_WITHIN_S", 3.0)
    made_by: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
    hosts = iter(range(10_000))

    class OfAHost(ToyClient):
        async def open(self) -> None:
            self.own = next(hosts) % 2

        async def close(self) -> None:
            pass

        async def add(self, value: Any) -> None:
            made_by[self.own].append((value, asyncio.get_running_loop().time()))

        async def members(self) -> list[int]:
            now_s = asyncio.get_running_loop().time()
            theirs = [value for value, at_s in made_by[1 - self.own] if now_s - at_s > lag_s]
            return [*(value for value, _ in made_by[self.own]), *theirs]

    found = run(made("set"), Store(), client=OfAHost, operations=100).outcomes["set-full"]
    assert found.valid is valid, found
    assert valid or "every later read lacks it" in found.reason


def test_a_queue_that_was_never_found_empty_is_unknown() -> None:
    def fault(method: str, number: int) -> str | None:
        return "refuse" if method == "dequeue" and number > 150 else None

    done = run(made("queue"), Store(fault))
    assert done.outcomes["total-queue"].valid == "unknown" and "no take found" in done.outcomes["total-queue"].reason


@pytest.mark.parametrize(
    ("after", "valid"),
    [
        ([], True),  # the first holder's client is closed when the load is over, and its session's lock is free
        ([(2, "invoke", "acquire"), (2, "fail", "acquire")], False),  # the load was not over
        ([(1, "invoke", "release"), (1, "ok", "release")], False),
    ],
)
@pytest.mark.parametrize("release", [[], [(0, "fail", "release")]])
def test_a_lock_freed_with_its_client_at_the_end_of_the_load_may_be_acquired(
    release: list[Any], after: list[Any], valid: bool
) -> None:
    asked = [(0, "invoke", "release")] if release else []
    steps = [
        *((0, "invoke", "acquire"), (0, "ok", "acquire"), *asked, (1, "invoke", "acquire"), *release),
        *((1, "ok", "acquire"), *after),
    ]
    history = [{"process": p, "type": kind, "f": f, "value": None, "key": "lock0"} for p, kind, f in steps]
    for check in ("exclusion", "linearizable"):
        found = made("mutex", check=check).check(history, CheckContext(timeout_s=5, memory_mb=256))[check]
        assert found.valid is valid, found


@pytest.mark.parametrize("name", ["topic", "log"])
@pytest.mark.parametrize("answered", [0, 1])
def test_a_log_whose_final_reads_are_refused_is_unknown(
    name: str, answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last values, which the load had read, are gone, but final reads of them are refused."""
    monkeypatch.setattr("harness.workloads.queues.RETRY_NS", 1_000_000)
    workload, store = made(name), Store()
    logs: Any = store.partitions if name == "topic" else store.logs
    reads = {"final": math.inf}

    class Refusing(ToyClient):
        async def poll(self, key: Any, offset: int, max_messages: int) -> Any:
            return await self.unless_over(key, super().poll, key, offset, max_messages)

        async def fetch(self, partition: int, offset: int, max_messages: int) -> Any:
            return await self.unless_over(partition, super().fetch, partition, offset, max_messages)

        async def unless_over(self, log: Any, read: Any, *words: Any) -> Any:
            if log == 0:
                reads["final"] -= 1
                if reads["final"] < 0:
                    raise Refused("not now")
            return await read(*words)

    def at_the_end() -> Generator:
        reads["final"] = answered
        del logs[0][-5:]
        return type(workload).final_generator(workload)  # type: ignore[arg-type]

    workload.final_generator = at_the_end  # type: ignore[method-assign]
    found = run(workload, store, operations=600, seed=2, client=Refusing).outcomes["log"]
    assert found.valid == "unknown", found
    assert f"{'queue' if name == 'topic' else 'key'} 0 could not be read completely" in found.reason


def test_a_lost_value_is_found_even_if_its_final_read_was_refused_at_first() -> None:
    """What a crash at the end of the load has lost shows in the final reads alone."""
    store, operations = Store(), 200
    refused: list[int] = []

    class Crashed(ToyClient):
        async def transact(self, steps: list[list[Any]]) -> Any:
            is_final = all(step[0] == "r" for step in steps) and len({step[1] for step in steps}) > 4
            if is_final and not refused:
                key = max(key for _, key, _ in steps if self.store.registers.get(key))
                refused.append(self.store.registers[key].pop())
                raise Refused("not now")
            return await super().transact(steps)

    done = run(made("list-append"), store, operations=operations, client=Crashed)
    assert refused and done.outcomes["isolation"].valid is False, done.outcomes


@pytest.mark.parametrize(("empty_at_s", "valid"), [(0.5, "unknown"), (5.5, "unknown"), (6.5, False)])
def test_a_delayed_value_is_lost_only_if_the_queue_was_empty_after_it_was_due(empty_at_s: float, valid: object) -> None:
    """An empty receive before the value was due, or shortly after, proves no loss."""
    history: list[dict[str, Any]] = []

    def operation(f: str, at_s: float, value: Any, found: Any) -> None:
        time_ns, end_ns = int(at_s * 1e9), int((at_s + 0.1) * 1e9)
        history.append({"process": 0, "type": "invoke", "f": f, "value": value, "time": time_ns})
        history.append({"process": 0, "type": "ok", "f": f, "value": found, "time": end_ns})

    for number in range(2):
        sent = {"message": number, "delay_ms": 5000}
        operation("send", number * 0.2, sent, sent)
    for at_s, found in sorted([(empty_at_s, None), (7.0, 1)]):
        operation("receive", at_s, None, found)
    outcome = ClientDelayWorkload().check(history, CheckContext(timeout_s=5, memory_mb=256))["delay"]
    assert outcome.valid == valid, outcome.reason
    assert "no receive found the queue empty" in outcome.reason or valid is False


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(NAMES), lost=st.integers(5, 60))
def test_a_correct_client_passes_with_every_seed(seed: int, name: str, lost: int) -> None:
    def fault(method: str, number: int) -> str | None:
        return "lose" if number % lost == 0 and method not in ("dequeue", "lock", "unlock") else None

    found = run(made(name), Store(fault), operations=150, seed=seed).outcomes
    undecided = {"unknown"} if name in SEARCHED else set()
    assert {outcome.valid for outcome in found.values()} <= {True} | undecided


# Mistakes of clients


class Broken(ToyClient):
    answer: Any = None

    async def read(self, key: Any) -> Any:
        return self.answer

    async def cas(self, key: Any, old: Any, new: Any) -> Any:
        return self.answer

    async def write(self, key: Any, value: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        (b"1", "b'1'"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (10**5000, "a number with too many digits"),
        ({1}, "{1}"),
    ],
    ids=["bytes", "nan", "infinity", "huge", "set"],
)
def test_a_value_that_json_cannot_represent_is_a_client_mistake(answered: Any, said: str) -> None:
    class Odd(Broken):
        answer = answered

    done = run(made("register"), Store(), client=Odd, operations=40)
    assert not done.valid
    assert any(f"read returned {said}, which JSON cannot represent" in text for text in done.unexpected_errors)


@pytest.mark.parametrize("answered", [1.5, 10**300, -(1 << 64), None, "x"])
def test_a_value_that_json_can_represent_is_no_client_mistake(answered: Any) -> None:
    class Plain(Broken):
        answer = answered

    assert not run(made("register"), Store(), client=Plain, operations=40).unexpected_errors


def each_read(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change applied to all values that a transaction has read."""
    return lambda steps: [[f, key, change(found) if f == "r" else found] for f, key, found in steps]


def each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda found: found and [change(one) for one in found]


def alone(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda found: None if found is None else change(found)


def in_pair(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda found: found and [found[0], change(found[1])]


TYPED = [
    ("register", "read", alone), ("cas-register", "read", alone), ("versioned-register", "read_version", in_pair),
    ("set", "members", each), ("log", "poll", each), ("topic", "fetch", each), ("queue", "dequeue", alone),
    ("delay", "dequeue", alone), ("transactions", "dequeue", alone), ("stack", "pop", alone),
    ("priority-queue", "extract", alone), ("rw-register", "transact", lambda change: each_read(alone(change))),
    ("mini-txn", "transact", lambda change: each_read(alone(change))),
    ("multi-register", "transact", lambda change: each_read(alone(change))),
    ("long-fork", "transact", lambda change: each_read(alone(change))),
    ("list-append", "transact", lambda change: each_read(each(change))),
]  # fmt: skip
"""Workload, method whose answers contain numbers that the workload has written, and how to change those numbers."""


def changing(method: str, change: Callable[[Any], Any], client: type[ToyClient] = ToyClient) -> type[ToyClient]:
    async def call(self: ToyClient, *values: Any) -> Any:
        return change(await getattr(client, method)(self, *values))

    return type("Changing", (client,), {method: call})


@pytest.mark.parametrize(
    "odd",
    [str, lambda found: f'"{found}"\n', lambda found: True, lambda found: {"value": found}, lambda found: [found]],
    ids=["text", "JSON text", "truth", "map", "list"],
)
@pytest.mark.parametrize(("name", "method", "within"), TYPED, ids=[name for name, _, _ in TYPED])
def test_a_number_of_another_type_is_a_client_mistake(
    name: str, method: str, within: Callable[[Any], Callable[[Any], Any]], odd: Callable[[Any], Any]
) -> None:
    done = run(made(name), Store(), client=changing(method, within(odd)), operations=100)
    assert any(f"{method} returned" in text and "whole number" in text for text in done.unexpected_errors), (
        reasons(done), done.unexpected_errors,
    )  # fmt: skip
    assert not any(outcome.valid is False for outcome in done.outcomes.values()), reasons(done)


@pytest.mark.parametrize(
    "odd", [lambda found: found + 10**12, lambda found: found + 0.5, lambda found: "x"], ids=["number", "half", "text"]
)
@pytest.mark.parametrize(("name", "method", "within"), TYPED, ids=[name for name, _, _ in TYPED])
def test_a_value_that_was_never_written_is_a_violation_and_no_client_mistake(
    name: str, method: str, within: Callable[[Any], Callable[[Any], Any]], odd: Callable[[Any], Any]
) -> None:
    done = run(made(name), Store(), client=changing(method, within(odd)), operations=100)
    assert done.unexpected_errors == {}
    assert any(outcome.valid is False for outcome in done.outcomes.values()) or name == "long-fork"


@pytest.mark.parametrize(("name", "method", "within"), TYPED, ids=[name for name, _, _ in TYPED])
def test_a_whole_number_as_a_float_is_the_same_number(
    name: str, method: str, within: Callable[[Any], Callable[[Any], Any]]
) -> None:
    done = run(made(name), Store(), client=changing(method, within(float)), operations=100)
    assert done.valid, (reasons(done), done.unexpected_errors)


@pytest.mark.parametrize("odd", ["[1]", {"1": 2}, True, 1])
def test_an_answer_that_should_be_a_list_and_is_not_is_a_client_mistake(odd: Any) -> None:
    client = changing("transact", each_read(alone(lambda found: odd)))
    done = run(made("list-append"), Store(), client=client, operations=100)
    assert any("must be the list that" in text for text in done.unexpected_errors), reasons(done)
    assert not any(outcome.valid is False for outcome in done.outcomes.values()), reasons(done)


@pytest.mark.parametrize(("name", "method"), [("register", "read"), ("queue", "dequeue"), ("stack", "pop")])
@pytest.mark.parametrize("word", [str, lambda found: "null" if found is None else found], ids=["str", "null"])
def test_a_text_in_place_of_none_is_a_client_mistake(name: str, method: str, word: Callable[[Any], Any]) -> None:
    done = run(made(name), Store(), client=changing(method, word), operations=100)
    said = {"str": "'None'", "<lambda>": "'null'"}[word.__name__]
    assert any(f"{method} returned {said} of type str" in text for text in done.unexpected_errors)
    assert not any(outcome.valid is False for outcome in done.outcomes.values()), reasons(done)


def test_a_dequeued_value_of_another_type_is_not_acknowledged() -> None:
    acknowledged = []

    class Acknowledging(changing("dequeue", alone(str), AcknowledgingClient)):  # type: ignore[misc]
        async def ack(self, value: Any) -> None:
            acknowledged.append(value)

    done = run(made("queue"), Store(), client=Acknowledging, operations=100)
    assert any("dequeue returned '0'" in text for text in done.unexpected_errors)
    assert acknowledged == []


@pytest.mark.parametrize("answer", [0, "", "false", " False\n", "0", {}])
def test_an_ambiguous_answer_of_lock_is_a_client_mistake(answer: Any) -> None:
    done = run(made("mutex"), Store(), client=changing("lock", lambda got: got or answer), operations=100)
    assert any(f"lock returned {answer!r}: " in text for text in done.unexpected_errors), reasons(done)
    assert done.outcomes["exclusion"].valid is True


@pytest.mark.parametrize("answer", [None, True, 17, "lease-5", {"lease": 5}])
def test_any_other_answer_of_lock_means_that_it_was_acquired(answer: Any) -> None:
    done = run(made("mutex"), Store(), client=changing("lock", lambda got: got and answer), operations=100)
    assert done.valid, (reasons(done), done.unexpected_errors)


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


class OnHosts(ToyClient):
    """Knows the hosts of its system, and names the one that answered."""

    answers: Any = "n2"
    raises: Exception | None = None

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.hosts, self.others = [Named("n1"), Named("n2")], {"proxy": Named("proxy")}
        self.node: Any = None

    async def read(self, key: Any) -> Any:
        self.node = self.answers
        if self.raises is not None:
            raise self.raises
        return await super().read(key)


@pytest.mark.parametrize("answers", ["n2", "proxy", None])
def test_the_host_that_a_client_names_is_recorded_with_successful_operations(answers: str | None) -> None:
    done = run(made("register"), Store(), client=type("Right", (OnHosts,), {"answers": answers}), operations=40)
    assert done.valid
    assert {event.get("node") for event in done.events if (event["f"], event["type"]) == ("read", "ok")} == {answers}


@pytest.mark.parametrize("answers", ["n9", "10.77.0.1", 2, ["n1"], Named("n1")])
def test_an_unknown_host_is_a_client_mistake_reported_with_its_line(answers: Any) -> None:
    class Wrong(OnHosts):
        async def read(self, key: Any) -> Any:
            found, self.node = await super().read(key), answers
            return found

    done = run(made("register"), Store(), client=Wrong, operations=40)
    [text] = done.unexpected_errors
    assert f"read left self.node = {answers!r:.40}: it must be the name of the host that answered, of n1, n2, " in text
    assert "(test_by_capability.py:" in text
    assert all(outcome.valid == "unknown" for outcome in done.outcomes.values()), "no read was answered"


@pytest.mark.parametrize(("node", "told"), [("n1", "n1"), ("shard-7", None), (7, None), (Named("n1"), None)])
def test_the_node_of_a_driver_exception_is_recorded_if_it_is_a_host(node: Any, told: str | None) -> None:
    error = ConnectionResetError("cut off")
    error.node = node  # type: ignore[attr-defined]
    done = run(made("register"), Store(), client=type("Cut", (OnHosts,), {"raises": error}), operations=40)
    assert done.unexpected_errors == {}
    assert {event.get("node") for event in done.events if event["type"] == "fail"} == {told}


@pytest.mark.parametrize("node", ["shard-7", 7, Named("n1")])
def test_a_client_that_knows_no_hosts_names_none(node: Any) -> None:
    """Neither with an answer nor with an exception: nothing tells a host's name from another use of `node`."""

    class Unplaced(ToyClient):
        def __init__(self, store: Store) -> None:
            super().__init__(store)
            self.node = node

        async def write(self, key: Any, value: Any) -> None:
            error = ConnectionResetError("cut off")
            error.node = node  # type: ignore[attr-defined]
            raise error

    done = run(made("register"), Store(), client=Unplaced, operations=40)
    assert done.unexpected_errors == {}
    assert {(event["f"], event["type"]) for event in done.events} >= {("read", "ok"), ("write", "info")}
    assert {event.get("node") for event in done.events} == {None}


def test_a_call_that_is_closed_is_no_mistake_of_the_client() -> None:
    """As the event loop closes coroutines that are suspended when it ends."""

    class Waiting(ToyClient):
        async def read(self, key: Any) -> Any:
            await Suspended()

    client = CapabilityClient(Waiting(Store()), ClientRegisterWorkload.calls)
    call = client.invoke(Op("read", 1))
    call.send(None)
    call.close()  # would raise what the call raises instead of GeneratorExit
    assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED


@pytest.mark.parametrize(
    ("error", "is_mistake"),
    [
        (TypeError(), True), (NameError(), True), (ValueError(), False), (ConnectionResetError(), False),
        (SystemExit(3), True), (GeneratorExit(), False), (asyncio.CancelledError(), True),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_exceptions_that_only_a_bug_raises_are_mistakes(error: BaseException, is_mistake: bool) -> None:
    async def here() -> bool:
        return _is_mistake(error)

    assert asyncio.run(here()) is is_mistake


def test_what_ends_a_call_from_outside_is_no_mistake_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async def being_cancelled() -> bool:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        found = _is_mistake(asyncio.CancelledError())
        task.uncancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return found

    assert asyncio.run(being_cancelled()) is False
    for is_from_the_keyboard in (True, False):
        monkeypatch.setattr(capability, "is_ctrl_c", lambda _, answer=is_from_the_keyboard: answer)
        assert _is_mistake(KeyboardInterrupt()) is not is_from_the_keyboard


class Suspended:
    """Awaiting this suspends a coroutine."""

    def __await__(self) -> Any:
        yield


def test_a_cas_that_returns_none_is_a_client_mistake() -> None:
    class Silent(Broken):
        answer = 3

        async def cas(self, key: Any, old: Any, new: Any) -> Any:
            return None

    done = run(made("cas-register"), Store(), client=Silent, operations=60)
    assert any("cas returned None: it must return True" in text for text in done.unexpected_errors)


def test_a_bug_of_the_client_is_reported_with_its_line() -> None:
    class Bug(ToyClient):
        async def write(self, key: Any, value: Any) -> None:
            return key.nothing_of_the_kind  # type: ignore[no-any-return]

    done = run(made("register"), Store(), client=Bug, operations=20)
    text = next(iter(done.unexpected_errors))
    assert "write: AttributeError" in text and "(test_by_capability.py:" in text
    assert {event["type"] for event in done.events if event["f"] == "write"} == {"invoke", "info"}


def test_an_exception_fails_a_read_and_leaves_a_write_indeterminate() -> None:
    class Cut(ToyClient):
        async def read(self, key: Any) -> Any:
            raise ConnectionResetError("cut off")

        async def write(self, key: Any, value: Any) -> None:
            raise ConnectionResetError("cut off")

    store = Store()
    done = run(made("register"), store, client=Cut, operations=20)
    by_f = {(event["f"], event["type"]) for event in done.events if event["type"] != "invoke"}
    assert by_f == {("read", "fail"), ("write", "info")} and done.unexpected_errors == {}
    assert store.opened == sum(event["type"] in ("fail", "info") for event in done.events)
    first = next(event for event in done.events if event["type"] == "info")
    assert first["error"].startswith("write: ConnectionResetError: cut off (test_by_capability.py:")


def test_operations_of_a_client_that_cannot_open_fail_with_the_reason() -> None:
    class Closed(ToyClient):
        async def open(self) -> None:
            raise LostAnswer("nobody there")

    done = run(made("register"), Store(), client=Closed, operations=5)
    errors = [event["error"] for event in done.events if "error" in event]
    assert all("open: LostAnswer: nobody there (test_by_capability.py:" in error for error in errors)
    assert {event["type"] for event in done.events} == {"invoke", "fail"}


async def wrong_code() -> None:
    len(None)  # type: ignore[arg-type]


async def wrong_answer() -> None:
    raise ClientMistake("program 'client' answered open with type 'ready'")


async def wrong_end() -> None:
    raise SystemExit(1)


async def wrong_call() -> None:
    asyncio.sleep(0)  # type: ignore[unused-coroutine]


@pytest.mark.parametrize(
    ("mistaken", "said"),
    [
        (wrong_code, "open: TypeError: object of type 'NoneType' has no len()"),
        (wrong_answer, "open: program 'client' answered open with type 'ready'"),
        (wrong_end, "open: SystemExit: 1"),
        (wrong_call, "open: sleep() was called but not awaited"),
    ],
)
def test_a_mistake_in_open_is_reported_even_if_other_clients_can_open(
    mistaken: Callable[[], Awaitable[None]], said: str
) -> None:
    class OnOneHost(ToyClient):
        async def open(self) -> None:
            if self.store.opened % 2:
                await super().open()
                await mistaken()
            await super().open()

    with telling_unawaited([__file__]):
        done = run(made("register"), Store(), client=OnOneHost, operations=40)
    assert any(event["type"] == "ok" for event in done.events)
    assert done.unexpected_errors and all(said in text for text in done.unexpected_errors)


def test_a_topic_with_more_partitions_than_the_setting_says_is_reported() -> None:
    many = run(made("topic", partitions="3"), Store())  # the toy has four
    (said,) = many.unexpected_errors
    assert "publish returned partition 3: it must be 0 to 2, or --set workload.partitions=N say how many there" in said
    assert all(outcome.valid is not False for outcome in many.outcomes.values()), reasons(many)
    assert run(made("topic", partitions="4"), Store()).valid


def test_a_client_mistake_in_an_acknowledgement_is_reported() -> None:
    class Mistaken(AcknowledgingClient):
        async def ack(self, value: Any) -> None:
            raise ClientMistake("program 'client' answered ack with id 7: it must be 8, as in the request")

    done = run(made("queue"), Store(), client=Mistaken, operations=40)
    assert any("answered ack with id 7" in text for text in done.unexpected_errors)


def test_a_refused_operation_keeps_its_client() -> None:
    class No(ToyClient):
        async def write(self, key: Any, value: Any) -> None:
            raise Refused("read only")

    store = Store()
    done = run(made("register"), store, client=No, operations=60)
    assert store.opened <= 10 and {e["error"] for e in done.events if "error" in e} == {"Refused: read only"}


def test_a_refusal_that_ends_the_connection_opens_another_client() -> None:
    class Gone(Refused):
        reopen = True

    class No(ToyClient):
        async def write(self, key: Any, value: Any) -> None:
            raise Gone("never committed")

    store = Store()
    done = run(made("register"), store, client=No, operations=60)
    refused = [event for event in done.events if event["f"] == "write" and event["type"] == "fail"]
    assert len(refused) > 10 and store.opened > len(refused), "each opened one"
    assert not [event for event in done.events if event["type"] == "info"]


# Before the start


def test_the_methods_that_a_client_lacks_are_named() -> None:
    class ReadsOnly:
        async def read(self, key: Any) -> Any:
            return None

        async def compare_and_set(self) -> None:
            pass

        async def writes(self) -> None:
            pass

    said = missing_capabilities(CasRegisterWorkload, ReadsOnly)
    assert said == (
        "workload cas-register needs the methods write, cas, which client ReadsOnly lacks (did you mean writes?)"
    )
    assert missing_capabilities(ClientRegisterWorkload, ToyClient) is None
    # A method that another workload needs is no misspelling.
    said = missing_capabilities(VersionedRegisterWorkload, type("Plain", (), {"read": print, "write": print}))
    assert said is not None and said.endswith("read_version, write_version, which client Plain lacks"), said
    # Neither what is no method nor what is private is one, or is a misspelling of one.
    odd = type("Odd", (), {"read": "a text", "write": print, "_red": print, "close": print, "rea_d": 7})
    said = missing_capabilities(ClientRegisterWorkload, odd)
    assert said == "workload register needs the method read, which client Odd lacks"
    with pytest.raises(OperatorError, match="needs the methods write, cas, which client ReadsOnly lacks"):
        run_in_process("cas-register", ReadsOnly, operations=1)


def test_a_workload_can_be_run_by_its_name() -> None:
    done = run_in_process("register", functools.partial(ToyClient, Store()), operations=40)
    assert done.valid and len(done.events) >= 80
    with pytest.raises(OperatorError, match=r"unknown workload 'registr' \(did you mean register\?\)"):
        run_in_process("registr", Store, operations=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_declares_its_capabilities_and_settings(name: str) -> None:
    found = registry.load("workloads", name)
    form = found if issubclass(found, object) and found.requires == CLIENT else found.by_capability
    assert isinstance(form, ByCapability) and form.name == name
    assert all(hasattr(ToyClient, method) for method in form.capabilities)
    for setting in form.settings:
        assert setting.problem(setting.default) is None and setting.description


@pytest.mark.parametrize(
    ("name", "given_settings", "said"),
    [
        ("register", {"workload.kees": "3"}, "unknown setting 'kees' (did you mean keys?); known: keys"),
        ("register", {"workload.keys": "0"}, "keys must be a whole number from 1 to 1000, not '0'"),
        ("list-append", {"workload.isolation": "total"}, "isolation must be one of read-uncommitted"),
        ("unique-ids", {"workload.keys": "3"}, "unknown setting 'keys'"),
    ],
)
def test_settings_of_a_workload_are_checked(name: str, given_settings: dict[str, str], said: str) -> None:
    with pytest.raises(OperatorError, match="--set workload") as caught:
        make_workload(name, system_class=Toys, system="toys", settings=given_settings)
    assert said in str(caught.value)


def test_a_topic_workload_has_as_many_keys_as_partitions() -> None:
    made = make_workload("topic", system_class=Toys, system="toys", settings={"workload.partitions": "7"})
    assert made.keys == 7


def test_the_broker_keeps_its_own_forms_of_workloads() -> None:
    for name in ("register", "log", "queue"):
        own = make_workload(name, system_class=BrokerSystem, system="broker", settings={"replication": "sync"})
        assert own.requires in BrokerSystem.offers
    with pytest.raises(OperatorError, match=r"set needs a client of harness\.sdk, which system broker does not"):
        make_workload("set", system_class=BrokerSystem, system="broker", settings={})
    with pytest.raises(OperatorError, match=r"workload\.keys: workload register has no settings with system broker"):
        make_workload("register", system_class=BrokerSystem, system="broker", settings={"workload.keys": "3"})


def test_methods_that_the_clients_of_a_system_lack_are_reported_before_the_start() -> None:
    class ReadsOnly:
        async def read(self, key: Any) -> Any:
            return None

    class ReadOnlySystem:
        offers = frozenset({CLIENT})
        client_class = ReadsOnly

    workload = make_workload("register", system_class=ReadOnlySystem, system="mine", settings={})
    with pytest.raises(OperatorError, match="workload register needs the method write, which client ReadsOnly lacks"):
        require_capabilities(workload, ReadOnlySystem)
