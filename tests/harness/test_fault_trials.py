"""Which writes the trial of stalled syncs counts as acknowledged during the stall."""

from __future__ import annotations

from typing import Any

from benchmarks.fault_trials import acknowledged_meanwhile


def event(process: Any, kind: str, what: str) -> dict[str, Any]:
    return {"process": process, "type": kind, "f": what}


def test_only_writes_and_acknowledgements_during_the_fault_are_counted() -> None:
    history = [
        event(0, "invoke", "write"), event("nemesis", "invoke", "inject"), event(1, "invoke", "write"),
        event("nemesis", "info", "inject"),
        event(0, "ok", "write"), event(1, "ok", "write"),  # invoked before the fault
        *(event(process, "invoke", "write") for process in (0, 1, 3)), event(2, "invoke", "read"),
        event(0, "ok", "write"), event(1, "info", "write"), event(2, "ok", "read"),
        event("nemesis", "invoke", "heal"), event(3, "ok", "write"), event("nemesis", "info", "heal"),
        event(0, "invoke", "write"), event(0, "ok", "write"),
    ]  # fmt: skip
    assert acknowledged_meanwhile(history) == [(3, 1)]
    assert acknowledged_meanwhile([*history, *history]) == [(3, 1), (3, 1)]
