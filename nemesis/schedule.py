"""Schedules of faults, as plain values.

A schedule is a list of timed events, each the injection or the healing of one fault. It can be made from a
seed (`periodic`), written by hand, saved and loaded as JSON, and reduced by dropping faults: the random choices
of a fault depend only on the run's seed and the fault's own id, never on the faults before it.

As JSON a schedule is a list of objects:

    [{"at_s": 5.0, "action": "inject", "id": "f1", "nemesis": "partition", "variant": "halves"},
     {"at_s": 10.0, "action": "heal", "id": "f1"}]

An event may also wait for something that the replicas do: "when": "elected@n2+0.1" (see nemesis.triggers).
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nemesis.triggers import trigger_problem

__all__ = [
    "HEAL",
    "INJECT",
    "FaultEvent",
    "Schedule",
    "ScheduleError",
    "load_schedule",
    "periodic",
    "save_schedule",
    "schedule_text",
]

INJECT = "inject"
HEAL = "heal"

MAX_EVENTS = 100_000
"""Events in one schedule: a fault per second for more than half a day; more means a broken file."""

MAX_FILE_BYTES = 32 << 20
"""Largest schedule file; MAX_EVENTS events fit several times over."""

MAX_REPORTED_PROBLEMS = 50
"""Problems listed for one broken schedule; the rest are counted."""

_Item = TypeVar("_Item")

_FIELDS = ("at_s", "action", "id", "nemesis", "variant", "when")


class ScheduleError(ValueError):
    """A schedule makes no sense. `problems` lists everything that is wrong with it, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems[:MAX_REPORTED_PROBLEMS])
        if len(problems) > len(self.problems):
            self.problems.append(f"and {len(problems) - len(self.problems)} more problems")
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent:
    """The injection or healing of one fault: `at_s` seconds after the schedule's zero, or at the next occurrence of its
    trigger `when` after that (see nemesis.triggers)."""

    at_s: float
    action: str
    fault_id: str
    nemesis: str
    variant: str
    when: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As an object of the list form."""
        data: dict[str, Any] = {
            "at_s": self.at_s,
            "action": self.action,
            "id": self.fault_id,
            "nemesis": self.nemesis,
            "variant": self.variant,
        }
        return data if self.when is None else {**data, "when": self.when}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Events in the order in which they happen; those of the same time in the order given."""

    events: tuple[FaultEvent, ...]

    def __iter__(self) -> Iterator[FaultEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def end_s(self) -> float:
        """Time of the last event; 0 when there is none."""
        return self.events[-1].at_s if self.events else 0.0

    def without(self, fault_ids: frozenset[str]) -> Schedule:
        """This schedule without some faults; the random choices of the others do not change."""
        return Schedule(tuple(event for event in self.events if event.fault_id not in fault_ids))

    def to_json(self) -> list[dict[str, Any]]:
        """The list form."""
        return [event.to_json() for event in self.events]

    @classmethod
    def from_json(cls, data: Any, *, known: Mapping[str, Collection[str]] | None = None) -> Schedule:
        """From the list form; events need not be in order. A fault that is never healed is healed at the end.

        `known` maps nemeses to their variants; without it any name goes. Raises ScheduleError.
        """
        if not isinstance(data, list):
            raise ScheduleError([f"a schedule must be a list of events, not {type(data).__name__}"])
        if len(data) > MAX_EVENTS:
            raise ScheduleError([f"a schedule has at most {MAX_EVENTS} events, not {len(data)}"])
        problems: list[str] = []
        usable: list[tuple[int, Mapping[str, Any]]] = []
        for number, entry in enumerate(data, start=1):
            found = _entry_problems(entry, known)
            problems.extend(f"event {number}: {problem}" for problem in found)
            if not found:
                usable.append((number, entry))
        usable.sort(key=lambda numbered: float(numbered[1]["at_s"]))
        events = _pair_up(usable, problems)
        if problems:
            raise ScheduleError(problems)
        return cls(tuple(events))


def _entry_problems(entry: Any, known: Mapping[str, Collection[str]] | None) -> list[str]:
    """What is wrong with one event on its own."""
    if not isinstance(entry, dict):
        return [f"an event must be an object, not {type(entry).__name__}"]
    problems = [f"unknown field {name!r}; known: {', '.join(_FIELDS)}" for name in entry if name not in _FIELDS]
    at_s = entry.get("at_s")
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not math.isfinite(at_s) or at_s < 0:
        problems.append(f"at_s must be a number of seconds, 0 or more, not {at_s!r}")
    action = entry.get("action")
    if action not in (INJECT, HEAL):
        problems.append(f"action must be {INJECT} or {HEAL}, not {action!r}")
    if not isinstance(entry.get("id"), str) or not entry["id"]:
        problems.append(f"id must be a name for the fault, not {entry.get('id')!r}")
    for name in ("nemesis", "variant"):
        value = entry.get(name)
        if not isinstance(value, str) and not (value is None and action == HEAL):
            problems.append(f"{name} must be a name, not {value!r}")
    unclear = trigger_problem(entry["when"]) if entry.get("when") is not None else None
    if unclear is not None:
        problems.append(unclear)
    nemesis, variant = entry.get("nemesis"), entry.get("variant")
    if known is not None and isinstance(nemesis, str):
        if nemesis not in known:
            problems.append(f"unknown nemesis {nemesis!r}; known: {', '.join(sorted(known))}")
        elif isinstance(variant, str) and variant not in known[nemesis]:
            problems.append(f"{nemesis} has no variant {variant!r}; it has: {', '.join(known[nemesis])}")
    return problems


def _pair_up(entries: Sequence[tuple[int, Mapping[str, Any]]], problems: list[str]) -> list[FaultEvent]:
    """Give each heal the nemesis and variant of its injection; add to `problems` what does not pair up."""
    events: list[FaultEvent] = []
    injected: dict[str, FaultEvent] = {}
    healed: set[str] = set()
    for number, entry in entries:
        fault_id, action = entry["id"], entry["action"]
        if action == INJECT:
            if fault_id in injected:
                problems.append(f"event {number}: fault {fault_id} is injected twice; give it another id")
                continue
            nemesis, variant = entry["nemesis"], entry["variant"]
        elif fault_id not in injected:
            problems.append(f"event {number}: fault {fault_id} is healed before it is injected")
            continue
        elif fault_id in healed:
            problems.append(f"event {number}: fault {fault_id} is healed twice")
            continue
        else:
            healed.add(fault_id)
            origin = injected[fault_id]
            nemesis, variant = origin.nemesis, origin.variant
            for name, own in (("nemesis", nemesis), ("variant", variant)):
                if entry.get(name) not in (None, own):
                    problems.append(
                        f"event {number}: fault {fault_id} was injected with {name} {own}, not {entry[name]}"
                    )
        event = FaultEvent(
            at_s=float(entry["at_s"]),
            action=action,
            fault_id=fault_id,
            nemesis=nemesis,
            variant=variant,
            when=entry.get("when"),
        )
        if action == INJECT:
            injected[fault_id] = event
        events.append(event)
    return events


def schedule_text(schedule: Schedule) -> str:
    """The list form as written to a file, one event per line."""
    lines = ",\n ".join(json.dumps(event) for event in schedule.to_json())
    return f"[{lines}]\n"


def save_schedule(schedule: Schedule, path: str) -> None:
    """Write the list form to a file. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(schedule_text(schedule))


def load_schedule(path: str, *, known: Mapping[str, Collection[str]] | None = None) -> Schedule:
    """Read the list form from a file, as `Schedule.from_json`. Raises ScheduleError, also if the file
    cannot be read or is not JSON."""
    try:
        size_bytes = os.stat(path).st_size
        if size_bytes > MAX_FILE_BYTES:
            raise ScheduleError([f"{path}: a schedule file has at most {MAX_FILE_BYTES} bytes, not {size_bytes}"])
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)  # a device or a pipe has no known size, and may never end
        if len(text) > MAX_FILE_BYTES:
            raise ScheduleError([f"{path}: a schedule file has at most {MAX_FILE_BYTES} characters"])
        data = json.loads(text)
    except OSError as error:
        raise ScheduleError([f"cannot read {path}: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError([f"{path} is not JSON: {error}"]) from None
    return Schedule.from_json(data, known=known)


def periodic(
    choices: Sequence[tuple[str, Sequence[str]]],
    rng: random.Random,
    *,
    time_limit_s: float,
    on_s: float = 5.0,
    off_s: float = 5.0,
    quiet_start_s: float | None = None,
) -> Schedule:
    """One fault at a time: a quiet start, then faults of `on_s` seconds with `off_s` between them.

    `choices` are pairs of a nemesis and the variants that may be used. Nemeses take turns in an order
    that `rng` reshuffles every round, and so do the variants of each, so that none repeats before all
    have had a turn. The quiet start lasts `quiet_start_s` seconds (default: `off_s`). The last fault is
    healed at `time_limit_s` at the latest, and none is cut short.

    Raises ScheduleError when not even one fault fits, or for times that make no sense.
    """
    start_s = off_s if quiet_start_s is None else quiet_start_s
    problems = [
        f"{name} must be {'above 0' if name == 'on_s' else '0 or more'} seconds, not {value:g}"
        for name, value in (("on_s", on_s), ("off_s", off_s), ("quiet_start_s", start_s))
        if not math.isfinite(value) or value < 0 or (name == "on_s" and value == 0)
    ]
    problems += [f"{nemesis} has no variant to choose from" for nemesis, variants in choices if not variants]
    if not choices:
        problems.append("no nemesis to choose from")
    if not problems:
        count = math.floor((time_limit_s - start_s + off_s) / (on_s + off_s) + 1e-9)
        if count < 1:
            problems.append(
                f"a time limit of {time_limit_s:g} s is too short for a fault: "
                f"{start_s:g} s of quiet and {on_s:g} s of fault need {start_s + on_s:g} s"
            )
        elif 2 * count > MAX_EVENTS:
            problems.append(f"a schedule has at most {MAX_EVENTS // 2} faults, not {count}")
    if problems:
        raise ScheduleError(problems)

    turns = _endless(choices, rng)
    variants_of = {nemesis: _endless(variants, rng) for nemesis, variants in choices}
    events: list[FaultEvent] = []
    for number in range(count):
        nemesis, _ = next(turns)
        variant = next(variants_of[nemesis])
        at_s = start_s + number * (on_s + off_s)
        for action, time_s in ((INJECT, at_s), (HEAL, at_s + on_s)):
            events.append(
                FaultEvent(
                    at_s=round(time_s, 6),
                    action=action,
                    fault_id=f"f{number + 1}",
                    nemesis=nemesis,
                    variant=variant,
                )
            )
    return Schedule(tuple(events))


def _endless(items: Sequence[_Item], rng: random.Random) -> Iterator[_Item]:
    """All items in random order, reshuffled every round, forever."""
    while True:
        yield from rng.sample(items, len(items))
