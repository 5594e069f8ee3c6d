"""From a history to a verdict: the checks, the faults and their proofs, and the summary sentence.

invalid   some check found a violation; nothing else can excuse it
unknown   no violation was found, but something that a valid verdict requires is missing: a check ran out
          of its budget, a fault or its healing was not proven, the system met none of the faults, no operation
          succeeded or none of a kind (reads, for example), none was in progress during a fault, acknowledged
          messages were left unread, the final reads took too long, a phase failed, the run was interrupted early
valid     everything that was requested happened, was proven, was checked, and holds
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checker.faults import count_unmet, faults_of, is_proven
from checker.history import History
from checker.history import HistoryError as DisorderedHistory
from harness.errors import HarnessError, OperatorError, SystemUnderTestError, one_line
from harness.large_history import TooLarge, counts_by_f, memory_for_a_check_mb
from harness.recovery import RECOVERS, judge_recovery
from harness.runner import Observed
from harness.systems.base import CheckOutcome
from harness.test import Test
from harness.units import clip, plural
from harness.worker import TIMEOUT
from harness.workloads.base import CheckContext, TellsWrites, Workload
from harness.workloads.checks import OUT_OF_MEMORY

__all__ = ["faults_of", "judge"]

logger = logging.getLogger(__name__)

Event = Mapping[str, Any]

AFTERMATH_NS = 1_000_000_000
"""Time after the end of a fault that still counts as part of it: a leadership transfer is over at once, the election
that follows is not."""
MAX_NAMED_EXITS = 3
"""Limit of unexpected exits named in the summary sentence; results.json has all."""

OF_THE_RUN = " (of the run)"
"""Ends the name of a check of the system, the cluster or the run if a check of the workload has the same name: neither
may replace the other."""

MAX_ERROR_CHARS = 300
"""Limit of a client error that is counted and quoted: its end often tells what is wrong, and where."""


def judge(
    test: Test,
    workload: Workload,
    events: Sequence[Event],
    observed: Observed,
    *,
    history_note: str | None = None,
    missing: int = 0,
    too_large: TooLarge | None = None,
) -> dict[str, Any]:
    """Check a history and assemble the content of results.json.

    `events` is the whole history in order, or only its fault events if it is `too_large`; `history_note` is a problem
    of the history file itself, `missing` the number of its events that are missing although later ones exist.
    """
    clients = [event for event in events if event["process"] != "nemesis"]
    context = _limits(test)
    checks: dict[str, CheckOutcome]
    ops: Mapping[str, int]
    ops_by_f: Mapping[str, Mapping[str, int]]
    if too_large is None:
        checks = {name: _unless_gaps(check, missing) for name, check in _checked(workload, clients, context).items()}
        ops, ops_by_f = Counter(event["type"] for event in clients), counts_by_f(clients)
    else:
        checks = {name: CheckOutcome("unknown", too_large.reason) for name in _names_of(workload)}
        ops, ops_by_f = too_large.ops, too_large.ops_by_f
    faults = faults_of(events)
    names_of_the_run = _add_those_of_the_run(checks, observed, faults)
    errors = dict(Counter(_error_class(e["error"]) for e in clients if "error" in e).most_common(20))
    load = None
    if observed.final_reads_from is not None:
        load = sum(event["process"] != "nemesis" for event in events[: observed.final_reads_from])
    doubts = [*_doubts(test, ops, faults, observed, errors), *_untested(workload, clients, load, observed.timeouts)]
    doubts += [*_unread(checks), *_idle_during_faults(clients, faults)]
    if history_note is not None:
        doubts.append(history_note)
    stopped = observed.stopped_at_first_violation
    if stopped is not None and all(outcome.valid is not False for outcome in checks.values()):
        doubts.append(f"the load was stopped at an apparent violation that no check confirms: {stopped}")
    valid, reason = _verdict(checks, doubts, ops, faults)
    if observed.interrupted is not None and valid is False:
        reason += f" (interrupted: {observed.interrupted})"
    if stopped is not None and valid is False:
        reason += " (the load was stopped at the first violation)"
    if observed.unexpected_errors and valid is False:
        reason += f"; {_mistakes_text(observed.unexpected_errors)}"
    if observed.unexpected_exits:
        reason += f"; {_exits_text(observed.unexpected_exits)}"
    return {
        "valid": valid,
        "reason": reason,
        "ops": {kind: ops.get(kind, 0) for kind in ("invoke", "ok", "fail", "info")},
        "ops_by_f": ops_by_f,
        "errors": errors,
        "faults": faults,
        "checks": {name: outcome.to_json() for name, outcome in checks.items()},
        "checks_of_the_run": names_of_the_run,
        "doubts": doubts,
        **_as_observed(observed),
        "seed": test.seed,
        "replay": test.replay_line(),
    }


def _as_observed(observed: Observed) -> dict[str, Any]:
    """What the run observed besides its history, as JSON data; `harness analyze` reads it back."""
    return {
        "trouble": list(observed.trouble),
        "unexpected_errors": observed.unexpected_errors,
        "timeouts": observed.timeouts,
        "unexpected_exits": dict(observed.unexpected_exits),
        "interrupted": observed.interrupted,
        "stopped_at_first_violation": observed.stopped_at_first_violation,
        "load_began_wall_ms": observed.load_began_wall_ms,
        "final_reads_from": observed.final_reads_from,
        "final_reads_cut": observed.final_reads_cut,
        "system": dict(observed.system_facts),
    }


def _limits(test: Test) -> CheckContext:
    """The limits of each check: the memory asked for, or less if less is free."""
    memory_mb = memory_for_a_check_mb(test.checker_memory_mb)
    if memory_mb < test.checker_memory_mb:
        logger.warning("each check gets only %d MB of memory, because no more is free", memory_mb)
    return CheckContext(timeout_s=test.checker_timeout_s, memory_mb=memory_mb)


def _checked(
    workload: Workload, clients: Sequence[Mapping[str, Any]], context: CheckContext
) -> Mapping[str, CheckOutcome]:
    """The outcomes of the workload's checks. If they raise an exception (even SystemExit, as the workload may be
    third-party code and sys.exit(0) would be a verdict) or return nothing, that is unknown. So is a MemoryError: a
    limit of address space, such as `ulimit -v`, may be reached before a check's own memory limit."""

    def unknown(said: str) -> Mapping[str, CheckOutcome]:
        return {name: CheckOutcome("unknown", said) for name in _names_of(workload)}

    try:
        found: Any = workload.check(clients, context)
    except (OperatorError, HarnessError, SystemUnderTestError, KeyboardInterrupt):
        raise
    except MemoryError:
        return unknown(OUT_OF_MEMORY)
    except BaseException as error:
        if isinstance(error, DisorderedHistory):
            History.of(clients)  # raises it too if the run's own history is disordered, not one made by the check
        logger.info("the checks of workload %s failed", workload.name, exc_info=True)  # to the run's log
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        raised = f"{type(error).__name__}: {one_line(error)} ({place})"
        return unknown(f"the check of workload {workload.name} raised {raised}")
    if not isinstance(found, Mapping) or not found:
        said = f"returned {found!r:.60}, which says nothing about the history"
        return unknown(f"the check of workload {workload.name} {said}")
    return {
        name: outcome
        if isinstance(outcome, CheckOutcome)
        else CheckOutcome(
            "unknown", f"the check of workload {workload.name} returned {outcome!r:.60}, not a CheckOutcome"
        )
        for name, outcome in found.items()
    }


def _names_of(workload: Workload) -> Sequence[str]:
    """The names of a workload's checks; at least one, so that a check that was not made is seen."""
    return workload.check_names or ("check",)


def _add_those_of_the_run(
    checks: dict[str, CheckOutcome], observed: Observed, faults: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Add the checks of the system, the cluster and the run, under names that no other check has. Returns the names."""
    found = dict(observed.system_checks)
    if observed.recovery is not None:
        found[RECOVERS] = judge_recovery(observed.recovery, faults, observed.trouble)
    names = []
    for given, outcome in found.items():
        name = given
        while name in checks:
            name += OF_THE_RUN
        checks[name] = outcome
        names.append(name)
    return names


def _unless_gaps(outcome: CheckOutcome, missing: int) -> CheckOutcome:
    """A check's outcome, but "unknown" if it finds a violation in a history with missing events: a missing write makes
    a correct read look wrong. (A history that only ends early has no such gaps.)"""
    if outcome.valid is not False or not missing:
        return outcome
    found = outcome.reason.removesuffix(".")
    reason = f"{found}; but this may be due to {plural(missing, 'event')} missing from the history"
    return dataclasses.replace(outcome, valid="unknown", reason=reason)


def _verdict(
    checks: Mapping[str, CheckOutcome], doubts: Sequence[str], ops: Mapping[str, int], faults: Sequence[Any]
) -> tuple[bool | str, str]:
    violations = [f"{name}: {outcome.reason}" for name, outcome in checks.items() if outcome.valid is False]
    if violations:
        return False, "; ".join(violations)
    unsure = [f"{name}: {outcome.reason}" for name, outcome in checks.items() if outcome.valid is not True]
    if unsure or doubts:
        return "unknown", "; ".join([*unsure, *doubts])
    count = f"{ops['ok']} operations succeeded"
    if faults:
        unmet = count_unmet(faults)
        met = f", {unmet} of them not exercised" if unmet else ""
        return True, f"{count} under {len(faults)} proven fault{'s' if len(faults) > 1 else ''}{met}; every check holds"
    return True, f"{count} without faults; every check holds"


def _doubts(
    test: Test,
    ops: Mapping[str, int],
    faults: Sequence[Mapping[str, Any]],
    observed: Observed,
    errors: Mapping[str, int],
) -> Iterable[str]:
    if observed.interrupted is not None:
        yield f"interrupted: {observed.interrupted}; {ops.get('ok', 0)} operations had succeeded by then"
    if ops.get("ok", 0) == 0:
        yield f"no operation succeeded, so nothing was tested{_most_frequent(errors, observed.timeouts)}"
    if (test.nemesis or test.nemesis_schedule is not None or observed.faults_planned) and not faults:
        yield (
            "the history contains no faults"  # though the history may have lost some
            if observed.trouble
            else f"no fault was injected: the load ended before the first one was due "
            f"(--nemesis-interval {test.nemesis_interval_s:g}, --time-limit {test.time_limit_s:g})"
        )
    for fault in faults:
        title = f"fault {fault['id']} ({fault['nemesis']} {fault['variant']})"
        if not fault["proven"]:
            lapsed = is_proven(fault["proof"])
            yield f"{title} was not effective: {_detail(fault['met'] if lapsed else fault['proof'])}"
        if not fault["healed"]:
            yield f"{title} was not proven healed: {_detail(fault['heal_proof'])}"
    if faults and count_unmet(faults) == len(faults):
        yield (
            "the system under test exercised no fault, so nothing was tested under faults "
            f"({faults[0]['id']}: {_detail(faults[0]['met'] or faults[0]['proof'])}): raise the load (--rate), or "
            "choose other forms of the faults, or another cluster, which injects them by other means"
        )
    if observed.unexpected_errors:
        yield _mistakes_text(observed.unexpected_errors)
    yield from observed.trouble
    if observed.final_reads_cut is not None:
        yield observed.final_reads_cut


def _untested(
    workload: Workload, clients: Sequence[Event], load: int | None, timeouts: Mapping[str, int]
) -> Iterable[str]:
    """Doubts about kinds of operations of which none succeeded, while others did: a history without reads is
    linearizable whatever the system holds, and one without writes shows nothing either. Final reads do not make up for
    failed operations of the load, which is the first `load` events, if that is known."""
    if not any(event["type"] == "ok" for event in clients):
        return  # reported for the run as a whole
    said: set[str] = set()
    phases = {"": clients} if load is None else {" under load": clients[:load], " at the end": clients[load:]}
    for when, part in phases.items():
        for f, counts in counts_by_f(part).items():
            if not counts.get("ok") and f not in said:
                errors = Counter(_error_class(e["error"]) for e in part if e["f"] == f and "error" in e)
                why = _most_frequent(dict(errors.most_common(1)), timeouts)
                total = sum(counts.values())
                yield f"none of {total} {f} operations{when} succeeded, so {f} was not tested{why}"
                said.add(f)
    if said or not isinstance(workload, TellsWrites):
        return
    if not any(event["type"] == "ok" and workload.is_write(event["f"], event.get("value")) for event in clients):
        yield "no write operation succeeded, so there was nothing to lose or to read"


def _idle_during_faults(clients: Sequence[Event], faults: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """A doubt if no client had an operation open during any fault or its aftermath."""
    spans: list[tuple[int, int | None]] = [
        (fault["start_ns"], None if fault["end_ns"] is None else fault["end_ns"] + AFTERMATH_NS)
        for fault in faults
        if fault["start_ns"] is not None
    ]
    if not spans or not clients:
        return
    earliest = min(start for start, _ in spans)
    invoked: dict[Any, int] = {}
    for event in clients:
        time_ns = event["time"]
        if event["type"] == "invoke":
            invoked[event["process"]] = time_ns
            continue
        began_ns = invoked.pop(event["process"], time_ns)
        if time_ns >= earliest and _overlaps(began_ns, time_ns, spans):
            return
    if not any(_overlaps(time_ns, math.inf, spans) for time_ns in invoked.values()):
        yield "no operation was in progress during any fault, so nothing was tested under faults: raise --rate"


def _overlaps(began_ns: int, ended_ns: float, spans: Iterable[tuple[int, int | None]]) -> bool:
    return any(start <= ended_ns and (end is None or began_ns <= end) for start, end in spans)


def _unread(checks: Mapping[str, CheckOutcome]) -> Iterable[str]:
    """Doubts about acknowledged messages that were never read: nothing shows that they still exist."""
    for name, outcome in checks.items():
        stats = outcome.details.get("stats")
        if isinstance(stats, Mapping) and (unread := stats.get("unread")):
            yield f"{name}: {plural(unread, 'acknowledged message')} could not be read at the end"


def _mistakes_text(unexpected_errors: Mapping[str, int]) -> str:
    """The first kind of unexpected errors of clients, as text."""
    text, count = next(iter(unexpected_errors.items()))
    return f"clients failed with unexpected errors ({count} times: {text})"


def _exits_text(unexpected_exits: Mapping[str, int]) -> str:
    """The first few unexpected exits, as text."""
    said = [f"{text}{f' ({count} times)' if count > 1 else ''}" for text, count in unexpected_exits.items()]
    more = f", and {len(said) - MAX_NAMED_EXITS} more" if len(said) > MAX_NAMED_EXITS else ""
    return ", ".join(said[:MAX_NAMED_EXITS]) + more


def _most_frequent(errors: Mapping[str, int], timeouts: Mapping[str, int]) -> str:
    """The most frequent error, and of timeouts the line at which most clients waited."""
    for text, count in list(errors.items())[:1]:
        waits = (
            f", most of them waiting at {max(timeouts, key=timeouts.__getitem__)}"
            if text == TIMEOUT and timeouts
            else ""
        )
        return f" ({count} times: {text}{waits})"
    return ""


def _detail(proof: Any) -> str:
    if not isinstance(proof, Mapping):
        return "no proof recorded"
    return str(proof.get("detail") or "proof failed without details")


def _error_class(error: str) -> str:
    """An error without its variable parts, so that equal ones can be counted."""
    return clip(error.split(" addr=")[0], MAX_ERROR_CHARS)
