"""The check `recovers`: a system that does not recover is invalid, unless something else may be the reason."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from harness import recovery, registry
from harness.clusters.base import Program
from harness.execution import Parts, perform, plan_faults
from harness.history_writer import read_history
from harness.recovery import MAX_STALL_S, Answers, judge_recovery, read_until_answered, wait_for_recovery
from harness.report import OutputConsole
from harness.store import Store
from harness.systems.base import CLIENTS_DECIDE, CheckOutcome
from harness.systems.broker import BrokerSystem
from harness.test import NemesisChoice, Test
from nemesis.process import KILL

LOST = CheckOutcome(False, "n1 ended with status 1", {"missing": ["n1"]})


def test_a_system_that_does_not_recover_is_invalid_and_its_last_log_line_is_shown(memory_run: Any) -> None:
    def lost(system: Any) -> None:
        system.recovery = LOST

    _, results, _ = memory_run(system=lost)
    assert results["valid"] is False
    assert results["reason"] == "recovers: n1 ended with status 1 (last log line of n1: panic: out of luck)"
    assert results["checks"]["recovers"]["last_words"] == {"n1": ["panic: out of luck"]}


def test_a_system_that_recovers_passes_the_check(memory_run: Any) -> None:
    _, results, _ = memory_run()
    assert results["checks"]["recovers"] == {"valid": True, "reason": "back at once"}


LATE = CheckOutcome(True, "5 replicas were back and equal after 61.3 s")


@pytest.mark.parametrize(
    ("second", "expected"), [(CheckOutcome(True, "5 replicas were back and equal after 0.0 s"), LATE), (LOST, LOST)]
)
def test_the_time_to_recover_is_that_of_the_wait_after_the_healing(
    memory_run: Any, second: CheckOutcome, expected: CheckOutcome
) -> None:
    """The wait that follows the final reads counts only if it finds that the system is no longer back."""

    def twice(system: Any) -> None:
        outcomes = iter([LATE, second])

        async def recover(*, timeout_s: float) -> CheckOutcome:
            return next(outcomes)

        system.recover = recover

    _, results, _ = memory_run(system=twice)
    found = results["checks"]["recovers"]
    assert found["valid"] is expected.valid and found["reason"].startswith(expected.reason), found


def test_recovery_is_unknown_if_a_fault_was_not_proven_healed(memory_run: Any) -> None:
    def lost_and_stuck(system: Any) -> None:
        system.recovery = LOST
        system.cluster.network.ignores_heals = True

    _, results, _ = memory_run(system=lost_and_stuck)
    assert results["valid"] == results["checks"]["recovers"]["valid"] == "unknown"
    assert "was not proven healed" in results["checks"]["recovers"]["reason"]


def test_recovery_is_unknown_if_the_run_itself_had_trouble() -> None:
    healed = [{"id": "f1", "nemesis": "kill", "variant": "sigkill@one", "healed": True}]
    assert judge_recovery(LOST, healed, []).valid is False
    assert judge_recovery(LOST, healed, ["healing: no route to n1"]).valid == "unknown"
    assert judge_recovery(CheckOutcome(True, "back"), [], ["final reads: gone"]).valid is True


def test_recovery_is_unknown_if_the_harness_was_stalled() -> None:
    class Starved:
        async def recover(self, *, timeout_s: float) -> CheckOutcome:
            await asyncio.sleep(0.3)
            time.sleep(MAX_STALL_S + 0.5)  # noqa: ASYNC251 (what a machine does that gives no processor time)
            await asyncio.sleep(0.3)
            return LOST

    outcome = asyncio.run(wait_for_recovery(Starved(), timeout_s=1.0))  # type: ignore[arg-type]
    assert outcome.valid == "unknown" and "the harness itself was stalled for" in outcome.reason


BACK = CheckOutcome(True, "5 hosts served after 0.0 s")


def silent_after_the_load(
    system: Any,
    *,
    also_before: bool = False,
    keys: Collection[int] = range(8),
    refusals: int = 1_000_000,
    outcome: CheckOutcome = BACK,
) -> None:
    """Let reads of these keys time out once the system has been asked whether it has recovered."""
    state = {"silent": also_before}

    class Silent(type(system.connection("queue", process=0, thread=0))):  # type: ignore[misc]
        async def latest(self, key: int) -> Any:
            nonlocal refusals
            if state["silent"] and key in keys and refusals:
                refusals -= 1
                raise TimeoutError
            return await super().latest(key)

    async def recover(*, timeout_s: float) -> CheckOutcome:
        state["silent"] = True
        return outcome

    system.connection = lambda kind, *, process, thread: Silent(system)
    system.recover = recover


def test_a_system_that_answers_no_final_operation_has_not_recovered(memory_run: Any) -> None:
    _, results, _ = memory_run(system=silent_after_the_load)
    told = r"recovers: 5 hosts served after 0\.0 s, but none of \d+ final operations "
    told += r"succeeded within \d+ s \(last error: \w+: timeout\)"
    assert results["valid"] is False and re.match(told, results["reason"]), results["reason"]


def test_reads_that_failed_under_load_as_well_do_not_count_against_recovery(memory_run: Any) -> None:
    """The client may be unable to read at all."""
    _, results, _ = memory_run(system=lambda system: silent_after_the_load(system, also_before=True))
    assert (
        results["valid"] == "unknown"
        and "read operations under load succeeded, so read was not tested" in results["reason"]
    )
    assert results["checks"]["recovers"]["valid"] is True


@pytest.mark.parametrize(("keys", "valid"), [(range(8), False), (range(0), "unknown")])
def test_final_operations_decide_if_a_status_request_hung(
    memory_run: Any, keys: Collection[int], valid: bool | str
) -> None:
    """A system that answers no client has not recovered; if it serves its clients, recovery is unknown."""
    hung = CheckOutcome("unknown", "not back after 5 s: status(n1) took more than 1 s", {CLIENTS_DECIDE: True})
    _, results, _ = memory_run(system=lambda system: silent_after_the_load(system, keys=keys, outcome=hung))
    assert results["valid"] == valid and "recovers: not back after 5 s: status(n1)" in results["reason"], results
    assert ("final operations succeeded" in results["reason"]) is (valid is False)


def test_a_key_that_stays_unreadable_has_not_recovered(memory_run: Any) -> None:
    _, results, _ = memory_run(system=lambda system: silent_after_the_load(system, keys=[1]))
    told = r"recovers: 5 hosts served after 0\.0 s, but none of the final operations on key 1 succeeded within \d+ s "
    assert results["valid"] is False and re.match(told + r"\(last error: read: timeout\)$", results["reason"])


def test_a_key_that_is_read_on_a_later_attempt_has_recovered(memory_run: Any) -> None:
    """Four threads read one of two keys twice each; the first 8 reads of key 1 time out, and all is read again."""

    def refusing(system: Any) -> None:
        silent_after_the_load(system, keys=[1], refusals=8)
        system.recovery_timeout_s = 60.0

    run_dir, results, _ = memory_run(system=refusing)
    assert results["valid"] is True, results["reason"]
    finals = [event for event in read_history(run_dir.history_path) if event["type"] in ("ok", "info")][-8:]
    assert any(event["type"] == "ok" and event["key"] == 1 for event in finals)


def test_recovery_is_unknown_if_clients_fail_with_a_bug_in_the_final_reads(memory_run: Any) -> None:
    def buggy(system: Any) -> None:
        silent_after_the_load(system)
        silent = system.connection

        def connection(kind: str, *, process: int, thread: int) -> Any:
            class Buggy(type(silent(kind, process=process, thread=thread))):  # type: ignore[misc]
                async def latest(self, key: int) -> Any:
                    try:
                        return await super().latest(key)
                    except TimeoutError:
                        raise KeyError("a bug") from None

            return Buggy(system)

        system.connection = connection

    _, results, _ = memory_run(system=buggy)
    assert results["checks"]["recovers"]["valid"] == results["valid"] == "unknown"
    assert " s (last error: read: unexpected KeyError: 'a bug')" in results["checks"]["recovers"]["reason"]
    assert results["checks"]["recovers"]["reason"].endswith("; the clients failed with unexpected errors")


def test_recovery_is_unknown_if_the_run_was_interrupted_too_early(memory_run: Any) -> None:
    def interrupted(system: Any) -> None:
        silent_after_the_load(system)
        silent = system.recover

        async def recover(*, timeout_s: float) -> CheckOutcome:
            os.kill(os.getpid(), signal.SIGTERM)
            outcome: CheckOutcome = await silent(timeout_s=timeout_s)
            return outcome

        system.recovery_timeout_s, system.recover = 600.0, recover

    _, results, _ = memory_run(system=interrupted)
    assert results["checks"]["recovers"]["valid"] == results["valid"] == "unknown"
    assert "the run was interrupted before the time for recovery" in results["checks"]["recovers"]["reason"]


def read_rounds(
    monkeypatch: pytest.MonkeyPatch, outcome: CheckOutcome, *rounds: dict[str, Any], timeout_s: float = 600.0
) -> tuple[CheckOutcome, int]:
    """The outcome after rounds of final reads with these answers (the last one repeats), and how many there were. In a
    round without answers, eight reads of operations that succeeded under load time out."""
    silent: dict[str, Any] = {
        "asked": 8, "succeeded": 0, "should_succeed": True, "is_last": False, "has_mistakes": False, "answered": (),
        "failures": {None: "read: timeout"},
    }  # fmt: skip
    done = 0

    async def read() -> Answers:
        nonlocal done
        done += 1
        assert done < 50, "the reads do not end"
        return Answers(**{**silent, **rounds[min(done, len(rounds)) - 1]})

    monkeypatch.setattr(recovery, "_AGAIN_S", 0.0)
    return asyncio.run(read_until_answered(read, outcome, timeout_s=timeout_s)), done


ANSWERED = {"succeeded": 8, "answered": (0, 1), "failures": {}}
ONLY_KEY_0 = {"succeeded": 4, "answered": (0,), "failures": {1: "read: timeout"}}
HUNG = CheckOutcome("unknown", "not back after 5 s: status(n1) hung", {CLIENTS_DECIDE: True})


@pytest.mark.parametrize("outcome", [BACK, HUNG])
@pytest.mark.parametrize("rounds", [(ANSWERED,), ({}, {}, ANSWERED), (ONLY_KEY_0, {}, ANSWERED)])
def test_a_system_that_answers_in_some_round_keeps_its_outcome(
    monkeypatch: pytest.MonkeyPatch, outcome: CheckOutcome, rounds: tuple[dict[str, Any], ...]
) -> None:
    found, done = read_rounds(monkeypatch, outcome, *rounds)
    assert (found.valid, found.details, done) == (outcome.valid, outcome.details, len(rounds))
    late = r"; the final operations succeeded after another \d+\.\d s" if done > 1 else ""
    assert re.fullmatch(re.escape(outcome.reason) + late, found.reason), found


@pytest.mark.parametrize("outcome", [BACK, HUNG])
def test_a_system_that_answers_in_no_round_has_not_recovered(
    monkeypatch: pytest.MonkeyPatch, outcome: CheckOutcome
) -> None:
    found, _ = read_rounds(monkeypatch, outcome, {}, timeout_s=0.0)
    assert found.valid is False and "final operations succeeded within" in found.reason


@pytest.mark.parametrize(
    ("outcome", "answers"),
    [
        (LOST, {}),
        (LOST, ONLY_KEY_0),
        (CheckOutcome("unknown", "nobody was asked"), {}),
        (BACK, {"should_succeed": False}),
        (HUNG, {"should_succeed": False}),
    ],
)
def test_final_reads_decide_nothing_if_the_system_is_down_or_did_not_serve_them_under_load(
    monkeypatch: pytest.MonkeyPatch, outcome: CheckOutcome, answers: dict[str, Any]
) -> None:
    assert read_rounds(monkeypatch, outcome, answers, timeout_s=0.0) == (outcome, 1)


def test_the_key_that_is_never_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"succeeded": 4, "answered": (0,), "failures": {1: "read: timeout", 2: "read: refused", 3: "read: late"}}
    second = {"succeeded": 4, "answered": (1,), "failures": {}}
    last = {"is_last": True}  # ends the rounds
    found, rounds = read_rounds(monkeypatch, BACK, first, second, last)
    assert rounds == 3 and found.valid == "unknown"
    assert "none of the final operations on key 2 (and 1 more) succeeded within " in found.reason
    assert " (last error: read: refused); the run was interrupted" in found.reason
    found, _ = read_rounds(monkeypatch, BACK, ONLY_KEY_0, {}, timeout_s=0.0)
    assert found.valid is False and "none of the final operations on key 1 succeeded" in found.reason


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"is_last": True}, "; the run was interrupted before the time for recovery was over"),
        ({"has_mistakes": True}, "; the clients failed with unexpected errors"),
        ({"is_last": True, "has_mistakes": True}, "; the clients failed with unexpected errors"),
    ],
)
@pytest.mark.parametrize("keys", [{}, ONLY_KEY_0])
def test_rounds_that_end_for_another_reason_leave_recovery_unknown(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], answers: dict[str, Any], why: str
) -> None:
    found, rounds = read_rounds(monkeypatch, BACK, {**keys, **answers})
    assert (found.valid, rounds) == ("unknown", 1) and found.reason.endswith(why)


def test_a_stall_of_the_harness_leaves_recovery_unknown_while_waiting_and_while_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lost:
        async def recover(self, *, timeout_s: float) -> CheckOutcome:
            return LOST

    monkeypatch.setattr(recovery, "MAX_STALL_S", -1.0)  # any time at all is a stall
    found = asyncio.run(wait_for_recovery(Lost(), timeout_s=1.0))  # type: ignore[arg-type]
    assert found.valid == "unknown" and "the harness itself was stalled" in found.reason
    found, _ = read_rounds(monkeypatch, BACK, {}, timeout_s=0.0)
    assert found.valid == "unknown" and "the harness itself was stalled" in found.reason


class OneStart(BrokerSystem):
    """Brokers of which n2 can be started once."""

    recovery_timeout_s = 3.0
    starts = 0

    async def restart(self, host: str) -> None:
        if host == "n2":
            self.starts += 1
            if self.starts > 1:
                argv = ["/bin/sh", "-c", "echo panic: the vote cannot be read >&2; exit 7"]
                self._programs[host] = Program(name="broker", argv=argv, log_name="broker.log")
        await super().restart(host)


@pytest.mark.serial
def test_a_broker_that_cannot_restart_is_found_invalid(tmp_path: Path) -> None:
    test = Test(
        system="broker", cluster="local", nodes=3, workload="register", nemesis=(NemesisChoice("kill", "sigkill@n2"),),
        nemesis_interval_s=1.0, time_limit_s=4.0, concurrency=3, rate=50.0, seed=3,
    )  # fmt: skip
    cluster_class = registry.load("clusters", "local")
    parts = Parts(
        test=test, cluster_class=cluster_class, cluster_reason="a test", system_class=OneStart,
        workload=registry.load("workloads", "register")(), nemeses={"kill": KILL},
        schedule=plan_faults(test, {"kill": KILL}, cluster_class, OneStart),
    )  # fmt: skip
    _, results = perform(parts, Store(tmp_path / "store"), OutputConsole(file=io.StringIO()))
    assert results["valid"] is False, results["reason"]
    recovers = results["checks"]["recovers"]
    assert recovers["missing"] == ["n2"] and "n2 ended with status 7" in recovers["reason"]
    assert recovers["last_words"]["n2"][-1] == "panic: the vote cannot be read"
    assert all(fault["healed"] for fault in results["faults"]), results["faults"]
