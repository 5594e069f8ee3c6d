"""What a run contributes to the tables, against a recount, for runs made up at random. No Spark."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("pandas", reason="the spark extra is not installed")

from harness.history_parquet import RunIdentity, write_parquet

AWAY_MS = 10
PROCESSES = 3

BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)
IDENTITY = RunIdentity(
    run_id="r1", test_name="t", system="s", workload="register", nemesis="kill", cluster="sim", seed=7, started_at=BEGAN
)

Step = tuple[int, int, str]
"""Milliseconds since the previous event, process, and how its operation ends if one is open."""

steps = st.lists(
    st.tuples(st.sampled_from((0, 1, 4, 9, 10, 11, 30)), st.integers(0, PROCESSES - 1),
              st.sampled_from(("ok", "ok", "fail", "info"))),
    min_size=1, max_size=24,
)  # fmt: skip
faults = st.lists(
    st.tuples(st.integers(0, 120), st.one_of(st.none(), st.integers(0, 60)), st.sampled_from((None, True, False))),
    max_size=3,
)


def events_of(taken: list[Step], struck: list[tuple[int, int | None, bool | None]]) -> list[dict[str, Any]]:
    """The events in order. A fault is (start in ms, length in ms or None if never healed, whether it was met)."""
    clients: list[tuple[int, dict[str, Any]]] = []
    open_now: dict[int, int] = {}
    time_ms = fresh = 0
    numbers = list(range(PROCESSES))
    for gap_ms, slot, kind in taken:
        time_ms += gap_ms
        process = numbers[slot]
        told: dict[str, Any] = {"process": process, "f": "write" if process % 2 else "read", "value": 1}
        if process not in open_now:
            open_now[process] = time_ms
            clients.append((time_ms, {**told, "type": "invoke"}))
            continue
        del open_now[process]
        answered = {"node": f"n{slot % 2}"} if kind == "ok" else {}
        clients.append((time_ms, {**told, **answered, "type": kind}))
        if kind == "info":
            fresh += 1
            numbers[slot] = PROCESSES + fresh
    found = clients
    for number, (start_ms, length_ms, met) in enumerate(struck):
        value = {"id": f"f{number}", "nemesis": "kill", "variant": "one"}
        said = {} if met is None else {"met": {"exercised": met}}
        calls = [(start_ms, "inject", "invoke", value), (start_ms + 1, "inject", "info", value)]
        if length_ms is not None:
            calls += [(start_ms + length_ms, "heal", "invoke", value),
                      (start_ms + length_ms + 2, "heal", "info", {**value, **said})]  # fmt: skip
        nemesis = [(ms, {"process": "nemesis", "type": kind, "f": f, "value": v}) for ms, f, kind, v in calls]
        found = found + nemesis
    found = sorted(found, key=lambda each: each[0])
    return [{"index": at, "time": ms * 1_000_000, **event} for at, (ms, event) in enumerate(found)]


@given(steps, faults)
@example([(0, 0, "ok"), (0, 0, "ok")], [])  # all at once
@example([(0, 0, "ok"), (10, 0, "ok"), (10, 0, "ok"), (1, 0, "ok")], [(0, 10, None), (10, 5, None)])
@example(
    [(0, 0, "ok"), (5, 0, "ok"), (0, 1, "ok"), (30, 1, "fail")], [(5, 10, True), (20, None, None), (100, 5, False)]
)
def test_the_digest_of_a_run_agrees_with_a_recount(
    recounting: ModuleType, taken: list[Step], struck: list[tuple[int, int | None, bool | None]]
) -> None:
    from spark_analysis.digest import digest
    from spark_analysis.reading import read_runs

    text = "".join(json.dumps(event) + "\n" for event in events_of(taken, struck))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test.json").write_text("{}")
        (Path(folder) / "history.jsonl").write_text(text)
        wanted = recounting.RecountedRun(Path(folder), AWAY_MS * 1_000_000)
        write_parquet(Path(folder) / "history.jsonl", Path(folder) / "history.parquet", IDENTITY)
        content = (Path(folder) / "history.parquet").read_bytes()
    (run,) = read_runs("history.jsonl", text.encode())
    found = digest(run, unavailable_after_ns=AWAY_MS * 1_000_000)
    (again,) = read_runs("history.parquet", content)
    assert digest(again, unavailable_after_ns=AWAY_MS * 1_000_000) == found, "whichever file it is read from"
    assert (again.identity.run_id, again.identity.seed, again.identity.started_at) == ("r1", 7, BEGAN.isoformat())

    assert (found["operations"], found["events"]) == (len(wanted.operations), len(wanted.clients))
    assert (found["end_ns"], found["during_ns"], found["timed"]) == (wanted.end_ns, wanted.during_ns(), True)
    assert [(s["start_ns"], s["end_ns"], s["recovered"]) for s in found["spans"]] == wanted.spans

    counts: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(("ok", "fail", "info"), 0))
    latencies: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for op in wanted.operations:
        counts[op["f"], op["phase"]][op["outcome"]] += 1
        if op["end"] is not None:
            latencies[op["f"], op["outcome"], op["node"], op["phase"]].append(op["end"] - op["start"])
    assert {(c["f"], c["phase"]): {kind: c[kind] for kind in ("ok", "fail", "info")} for c in found["counts"]} == counts
    pieces = {(p["f"], p["outcome"], p["node"], p["phase"]): p for p in found["latencies"]}
    assert len(pieces) == len(found["latencies"])
    assert {key: numbers(piece["latencies_ns"]) for key, piece in pieces.items()} == latencies
    assert {key: piece["operations"] for key, piece in pieces.items()} == {k: len(v) for k, v in latencies.items()}

    after_start, after_heal = wanted.recoveries()
    assert [f["recovery_after_start_ns"] for f in found["faults"]] == after_start
    assert [f["recovery_after_heal_ns"] for f in found["faults"]] == after_heal
    for row, fault in zip(found["faults"], wanted.faults, strict=True):
        assert (row["start_ns"], row["end_ns"]) == (fault["start"], fault["end"])
        assert (row["exercised"] is False) is fault["unmet"]
        away = [s for s in wanted.spans if s[1] > fault["start"] and (fault["end"] is None or s[0] < fault["end"])]
        assert row["away_after_start"] is bool(away)
        assert row["away_after_heal"] is (fault["end"] and any(s[0] <= fault["end"] < s[1] for s in wanted.spans))
        assert row["in_force_ns"] == max(0, wanted._end_of(fault) - fault["start"])
        met = [op["outcome"] for op in wanted.operations if wanted.affects(fault, op)]
        assert [row[kind] for kind in ("ok", "fail", "info")] == [met.count(kind) for kind in ("ok", "fail", "info")]


def numbers(packed: bytes) -> list[int]:
    import numpy as np

    return [int(each) for each in np.frombuffer(packed, "<i8")]
