"""Pairs the nemesis's events of a history into faults, for verdicts, reports and Spark's tables alike.

A fault has up to four events with the same `id` in their value: `inject` and then `heal` (any function other than
inject counts as heal), each invoked and completed. The proof of a step is in the value of its completion; what the
system met while the fault lasted (`met`) is in the values of the healing. Histories of earlier versions have no `met`,
and no `exercised` in their proofs, so that it is not known there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["NEMESIS", "FaultPairing", "count_unmet", "exercised_by", "faults_of", "is_proven"]

NEMESIS = "nemesis"
"""The process that faults are recorded under."""


_FOUND: Mapping[str, Any] = {
    "start_ns": None,
    "end_ns": None,
    "proven": False,
    "exercised": None,
    "healed": False,
    "proof": None,
    "met": None,
    "heal_proof": None,
}
"""Initial values of the derived fields of a fault; all other fields come from its events."""


def is_proven(proof: Any) -> bool:
    """Whether a proof from a history has `proven` set; False if it is not a proof at all."""
    return isinstance(proof, Mapping) and proof.get("proven") is True


def exercised_by(proof: Any, met: Any = None) -> bool | None:
    """Whether the system under test met a fault, by its proof and by the final check `met`: True if either says so,
    otherwise what the later one says; None if that is not known."""
    words = [word.get("exercised") for word in (proof, met) if isinstance(word, Mapping)]
    known = [word for word in words if isinstance(word, bool)]
    if True in known:
        return True
    return False if words and words[-1] is False else None


def count_unmet(faults: Iterable[Any]) -> int:
    """How many of these faults were certainly not met by the system."""
    return sum(isinstance(fault, Mapping) and fault.get("exercised") is False for fault in faults)


class FaultPairing:
    """Takes the nemesis's events one by one, in order. Never raises, whatever a history holds: an event whose value
    names no fault is ignored."""

    __slots__ = ("_faults",)

    def __init__(self) -> None:
        self._faults: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, f: str, time_ns: int, value: Any) -> None:
        """Add the next event: its type, function, time and value."""
        if not isinstance(value, Mapping) or "id" not in value:
            return
        recorded = {name: item for name, item in value.items() if name not in _FOUND}
        fault = self._faults.setdefault(str(value["id"]), {**recorded, **_FOUND})
        fault.update(recorded)
        proof, met = value.get("proof"), value.get("met")
        if f == "inject" and kind == "invoke":
            fault["start_ns"] = time_ns
        elif f == "inject":
            fault["proof"], fault["proven"] = proof, is_proven(proof)
            fault["exercised"] = exercised_by(proof)
        elif kind != "invoke":
            fault["end_ns"], fault["heal_proof"], fault["healed"] = time_ns, proof, is_proven(proof)
        if f != "inject" and met is not None:
            fault["met"], fault["exercised"] = met, exercised_by(fault["proof"], met)
            fault["proven"] = is_proven(fault["proof"]) and is_proven(met)

    def faults(self) -> list[dict[str, Any]]:
        """The faults in order of their first events: the fields recorded for each (the last value counts), with
        `start_ns` and `end_ns` (None if it never began, or was never healed), `proof`, `met`, `proven` (by both of
        these if both exist), `exercised` (None if not known), `heal_proof`, `healed`."""
        return list(self._faults.values())


def faults_of(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The faults of a history; see `FaultPairing.faults`."""
    pairing = FaultPairing()
    for event in events:
        if event["process"] == NEMESIS:
            pairing.add(event["type"], event["f"], event["time"], event.get("value"))
    return pairing.faults()
