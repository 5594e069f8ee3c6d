"""A run's test.json and results.json as one flat value: which run it is and how it was judged.

Runs inside executors. Only what the tables need is taken from both files. Fields that an older or newer harness does
not write are null, and a file that is not JSON is a problem of that run alone.
"""

from __future__ import annotations

__all__ = ["OUTCOME_TYPE", "outcome_of_results", "outcome_of_test"]

import json
import posixpath
from collections.abc import Mapping
from typing import Any, TypeGuard

import pyarrow as pa

from spark_analysis.operations import UnreadableRunError, in_utf8

MAX_COUNT = 2**53
"""Upper bound of every count in a run; sums of such numbers fit into 64 bits for every store that could be read."""

MAX_REASON = 1_000
"""A verdict's reason is cut to this many characters; the run's own report has all of it."""

OUTCOME_TYPE = pa.struct(
    [
        ("run_id", pa.string()),
        ("test_name", pa.string()),
        ("system", pa.string()),
        ("workload", pa.string()),
        ("nemesis", pa.string()),
        ("cluster", pa.string()),
        ("seed", pa.int64()),
        ("configuration", pa.string()),
        ("started_at", pa.string()),
        ("verdict", pa.string()),
        ("reason", pa.string()),
        ("version", pa.string()),
        ("anomalies", pa.list_(pa.struct([("check", pa.string()), ("kind", pa.string()), ("count", pa.int64())]))),
        ("earliest_witness_ns", pa.int64()),
        ("earliest_witness_operations", pa.int64()),
        ("acknowledged", pa.int64()),
        ("lost", pa.int64()),
        ("duplicated", pa.int64()),
        ("events", pa.int64()),  # client events in the history that was judged
    ]
)


def _empty() -> dict[str, Any]:
    return {field.name: None for field in OUTCOME_TYPE}


def outcome_of_test(content: bytes) -> dict[str, Any]:
    """The identity of a run from its test.json. Raises UnreadableRunError."""
    test = _json(content, "test.json")
    nemeses = test.get("nemesis")
    settings = test.get("settings")
    configuration = {"nodes": str(test.get("nodes", "")), **(settings if isinstance(settings, dict) else {})}
    nemesis = "+".join(map(str, nemeses)) if isinstance(nemeses, list) else ""
    system, workload = str(test.get("system") or ""), str(test.get("workload") or "")
    bases = "+".join(str(text).partition("=")[0] for text in nemeses) if isinstance(nemeses, list) else ""
    if isinstance(test.get("nemesis_schedule"), str):
        nemesis, bases = f"schedule={posixpath.basename(test['nemesis_schedule'])}", "schedule"
    seed = test.get("seed")
    return {
        **_empty(),
        "test_name": in_utf8(f"{system}-{workload}-{bases or 'none'}"),
        "system": in_utf8(system),
        "workload": in_utf8(workload),
        "nemesis": in_utf8(nemesis or "none"),
        "cluster": in_utf8(str(test.get("cluster") or "")),
        "seed": seed if type(seed) is int and -(2**63) <= seed < 2**63 else None,
        "configuration": json.dumps(configuration, sort_keys=True),
    }


def outcome_of_results(content: bytes) -> dict[str, Any]:
    """The verdict in results.json, its anomalies by kind, and when the earliest witness was complete.

    A check that counts kinds of anomalies (the log checker, those of queues and sets) contributes each kind; any other
    invalid check contributes its name, counted by invalid keys if it has keys. What the workload allows is no anomaly:
    see `_anomaly_counts`. Raises UnreadableRunError.
    """
    results = _json(content, "results.json")
    valid = results.get("valid")
    if valid is not True and valid is not False and valid != "unknown":
        raise UnreadableRunError("results.json has no verdict")
    checks = results.get("checks")
    checks = checks if isinstance(checks, dict) else {}
    anomalies: list[dict[str, Any]] = []
    witnesses: list[tuple[int, int]] = []
    outcome = _empty()
    for name, check in checks.items():
        if not isinstance(check, dict):
            continue
        stats = check.get("stats")
        stats = stats if isinstance(stats, dict) else {}
        is_invalid = check.get("valid") is False
        if isinstance(stats.get("counts"), dict):
            counts = _anomaly_counts(stats, is_invalid=is_invalid)
            anomalies += [
                {"check": in_utf8(name), "kind": in_utf8(kind), "count": count}
                for kind, count in counts.items()
                if count > 0
            ]
            for kind, value in (("acknowledged", stats), ("lost", counts), ("duplicated", counts)):
                if _is_count(value.get(kind)):
                    outcome[kind] = (outcome[kind] or 0) + value[kind]
        elif is_invalid:
            keys = stats.get("invalid_keys")
            number = keys if _is_count(keys) and keys > 0 else 1
            anomalies.append({"check": in_utf8(name), "kind": in_utf8(name), "count": number})
        if is_invalid:
            completed = _completed_by(check.get("witness"))
            if completed is not None:
                witnesses.append(completed)
    reason = in_utf8(str(results.get("reason") or ""))
    ops = results.get("ops")
    counted = [number for number in ops.values() if _is_count(number)] if isinstance(ops, dict) else []
    verdict = "valid" if valid is True else "invalid" if valid is False else "unknown"
    outcome.update(
        run_id=_text(results.get("run_id")),
        started_at=_text(results.get("started_at")),
        verdict=verdict,
        reason=reason[:MAX_REASON],
        version=_text(results.get("version")),
        anomalies=anomalies,
        events=sum(counted) if counted else None,
    )
    if witnesses:
        outcome["earliest_witness_ns"], outcome["earliest_witness_operations"] = min(witnesses)
    return outcome


def _anomaly_counts(stats: Mapping[str, Any], *, is_invalid: bool) -> dict[str, int]:
    """The counts of a check by kind, without what the workload allows (an at-least-once queue may deliver a message
    twice) and what is uncertain.

    A check lists the kinds that it only notes under `noted`. Results of an older harness do not; but whatever a check
    that is not invalid has counted was allowed, or is not known to be an anomaly.
    """
    noted = stats.get("noted")
    noted = noted if isinstance(noted, list) else []
    return {
        kind: count
        for kind, count in stats["counts"].items()
        if _is_count(count) and kind not in noted and (is_invalid or count == 0)
    }


def _completed_by(witness: Any) -> tuple[int, int] | None:
    """When the last operation of a witness ended (ns), and how many operations of the run had been invoked up to its
    last one."""
    operations = witness.get("operations") if isinstance(witness, Mapping) else None
    if not operations:
        return None
    try:
        ended_ns = int(max(op.get("returned_ns") or op.get("invoked_ns") or 0 for op in operations))
        invoked = max(int(op["index"]) + 1 for op in operations)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return (ended_ns, invoked) if 0 <= ended_ns < 2**63 and _is_count(invoked) else None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < MAX_COUNT


def _text(value: Any) -> str | None:
    return None if value is None else in_utf8(str(value))


def _json(content: bytes, name: str) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableRunError(f"{name} is damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UnreadableRunError(f"{name} is damaged: not a JSON object")
    return data
