"""From the nemesis's events of a history to its faults: the one pairing that verdicts, reports and Spark's tables use.

A fault has up to four events with the same `id` in their value: `inject` and then `heal` (any other function than
inject counts as that), each invoked and completed. The proof of a step lies in the value of its completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["NEMESIS", "FaultPairing", "faults_of", "is_proven"]

NEMESIS = "nemesis"
"""The process that faults are recorded under."""


_FOUND: Mapping[str, Any] = {
    "start_ns": None,
    "end_ns": None,
    "proven": False,
    "healed": False,
    "proof": None,
    "heal_proof": None,
}
"""What is found out about a fault, before anything is; the rest is recorded in its events."""


def is_proven(proof: Any) -> bool:
    """Whether a proof, as a history has it, proves anything; what is no proof does not."""
    return isinstance(proof, Mapping) and proof.get("proven") is True


class FaultPairing:
    """Takes the nemesis's events one by one, in order. Raises for nothing that a history may hold: an event whose value
    names no fault belongs to none."""

    __slots__ = ("_faults",)

    def __init__(self) -> None:
        self._faults: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, f: str, time_ns: int, value: Any) -> None:
        """The next event: its type, function, time and value."""
        if not isinstance(value, Mapping) or "id" not in value:
            return
        recorded = {name: item for name, item in value.items() if name not in _FOUND}
        fault = self._faults.setdefault(str(value["id"]), {**recorded, **_FOUND})
        fault.update(recorded)
        proof = value.get("proof")
        if f == "inject" and kind == "invoke":
            fault["start_ns"] = time_ns
        elif f == "inject":
            fault["proof"], fault["proven"] = proof, is_proven(proof)
        elif kind != "invoke":
            fault["end_ns"], fault["heal_proof"], fault["healed"] = time_ns, proof, is_proven(proof)

    def faults(self) -> list[dict[str, Any]]:
        """The faults in order of their first events: what was recorded of each (the last value counts), with `start_ns`
        and `end_ns` (None where it never began, or was never healed), `proof`, `proven`, `heal_proof`, `healed`."""
        return list(self._faults.values())


def faults_of(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The faults of a history; see `FaultPairing.faults`."""
    pairing = FaultPairing()
    for event in events:
        if event["process"] == NEMESIS:
            pairing.add(event["type"], event["f"], event["time"], event.get("value"))
    return pairing.faults()
