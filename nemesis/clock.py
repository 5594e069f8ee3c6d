"""The nemesis `clock`: replicas whose clocks are wrong.

Wall clocks jump, swing, drift, fall back by decades, or are corrected as by NTP, each victim's by its own amount.
Monotonic clocks are left alone, as they are when a host's clock is set, unless one of the forms for them is asked for.
The proof reads the clocks where the replica runs, through the mechanism that skews them: the victims' clocks are wrong
as planned, all other clocks are right, and no monotonic clock has changed. It also checks that the mechanism reaches
the replica and every process that it has started. Replicas that can be asked for the time must report the same. Healing
sets the clocks right in one step.

A skew that changes with time has to be watched: a drift for a second, a slew for four or more, a stepped clock for two
steps of 0.6 to 2.6 s each. A fault may thus last longer than `--nemesis-interval`, and a run longer than
`--time-limit`.
"""

from __future__ import annotations

import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from nemesis.forms import Form, FormNemesis
from nemesis.impairments import Activity, hosts_kept_from
from nemesis.process import why_unreached
from nemesis.protocol import Injection, Proof
from nemesis.target import DOWN, ClockReading, Clocks, ClockSkew, Target
from nemesis.words import offset, plural, plural_with

__all__ = ["CLOCK", "ClockFault"]

MIN_BUMP_MS, MAX_BUMP_MS = 2_000, 2 * 3_600_000
"""Size of a bump in either direction, log-uniform: from longer than any lease to two hours."""

HOUR_MS = 3_600_000

MIN_STROBE_MS, MAX_STROBE_MS = 1_000, 262_000
MIN_PERIOD_MS, MAX_PERIOD_MS = 8, 1_000

MIN_DRIFT_PPM, MAX_DRIFT_PPM = 50_000, 500_000
"""5 to 50 %: enough to gain or lose seconds within the few seconds that a fault lasts."""

MIN_SLEW_PPM, MAX_SLEW_PPM = 250, 500
"""500 ppm is the limit of adjtimex(2) and ntpd."""

MIN_STEPPED_PPM, MAX_STEPPED_PPM = 50_000, 200_000
STEP_MS = 128
"""ntpd's threshold: a clock that is off by more is stepped instead of slewed."""

RESET_MS = -26 * 365 * 86_400_000
"""How far a clock falls back when it has lost its battery."""

TOLERANCE_MS = 250.0
"""Allowed difference from the plan, beyond the uncertainty of the reading itself: machines are busy."""

WATCH_S = 1.0
"""How long a drift is watched."""

SLEW_WATCH_S = 4.0
"""How long a slew is watched: it amounts to a millisecond or two in that time."""
SLEW_TRIES = 3
"""Attempts to measure a slew; another one follows if the readings were too uncertain because the machine was busy."""

STEP_READINGS = 17
"""Readings of a clock that is stepped: eight between one step and the next."""

STROBE_READINGS = 60
READ_TIMEOUT_S = 3.0
IN_PLACE_TIMEOUT_S = 10.0
"""For the process that reads a clock to start on a busy machine; the pauses between its readings come on top."""
READ_TRIES = 5


class ClockFault(FormNemesis):
    """Skews clocks. See the module's text."""

    name = "clock"
    description = "skews the clocks of replicas: jumps, strobes, drifts, slews, steps, falls back by decades"
    forms: Mapping[str, Form] = {
        form.name: form
        for form in (
            Form(
                name="bump",
                description="each victim's wall clock jumps by 2 s to 2 h, forward or back",
                needs=(("clocks", "wall"),),
                targets=("one", "minority", "leader", "all"),
            ),
            Form(
                name="hour",
                description="each victim's wall clock is an hour ahead or behind, as after a time zone mistake",
                needs=(("clocks", "wall"),),
                targets=("minority",),
            ),
            Form(
                name="strobe",
                description="each victim's wall clock jumps back and forth, at an interval between a few "
                "milliseconds and a second",
                needs=(("clocks", "wall"),),
                targets=("one", "minority", "leader"),
            ),
            Form(
                name="drift",
                description="each victim's wall clock runs 5 to 50 % too fast or too slow",
                needs=(("clocks", "wall"),),
                targets=("one", "minority", "leader"),
            ),
            Form(
                name="slew",
                description="each victim's wall clock runs 250 to 500 ppm too fast or too slow: NTP slews a clock by "
                "at most 500 ppm",
                needs=(("clocks", "wall"),),
                targets=("minority", "all"),
            ),
            Form(
                name="step",
                description="each victim's wall clock runs 5 to 20 % too fast or too slow, and is stepped right "
                "whenever it is 128 ms off: NTP steps a clock that is off by more",
                needs=(("clocks", "wall"),),
                targets=("one", "leader"),
            ),
            Form(
                name="reset",
                description="each victim's wall clock falls back by 26 years, as when its battery dies",
                needs=(("clocks", "wall"),),
                targets=("one", "leader"),
            ),
            Form(
                name="slow-monotonic",
                description="each victim's monotonic clock runs too slow, at 25 to 40 % of its rate",
                needs=(("clocks", "monotonic"),),
                targets=("leader", "one"),
                is_cycled=False,
            ),
            Form(
                name="fast-monotonic",
                description="each victim's monotonic clock runs 50 to 200 % too fast",
                needs=(("clocks", "monotonic"),),
                targets=("leader", "one"),
                is_cycled=False,
            ),
        )
    }

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        return {"skews": {host: _skew(form.name, rng) for host in hosts}}

    async def inject(self, target: Target, injection: Injection) -> None:
        """Skew the victims' clocks."""
        if injection.problem is None:
            await _clocks(target).skew(injection.fault_id, _skews_of(injection))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Every victim's clock is wrong as planned and all others are right; the mechanism reaches the victims'
        replicas, which report the same time if they can be asked."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        held = hosts_kept_from(Activity.ANSWER, in_force)
        running = [host for host in target.hosts if host not in held and await _runs(target, host)]
        victims = [host for host in injection.value["hosts"] if host in running]
        if not victims:
            return Proof(
                proven=False, detail="every victim is down or disturbed by another fault, so no clock can be read there"
            )
        others = [host for host in running if host not in injection.value["hosts"]]
        skews = _skews_of(injection)
        in_place, reported = _InPlace(target), _Reported(target)
        found, said, unreached = await asyncio.gather(
            _problems(in_place, victims, others, skews, in_force),
            _problems(reported, victims, others, skews, in_force),
            asyncio.gather(*(_unreached(target, host, skews[host]) for host in victims)),
        )
        failed = [problem for problem in (*unreached, *found, *said) if problem is not None]
        detail = "; ".join(f"{host} {_in_words(skews[host])}" for host in victims[:4])
        by = " and ".join(sorted({_clocks(target).mechanism(host) for host in victims}))
        exercised, words = await _met(target, injection)
        if reported.heard & {*victims}:
            exercised, words = True, f"{words}; reported by {', '.join(sorted(reported.heard & {*victims}))}"
        return Proof(
            proven=not failed,
            exercised=exercised or None,  # a replica may look at its clock yet
            detail="; ".join(failed[:3]) if failed else f"{detail} via {by}{words if exercised else ''}",
            checked=len(found),
            failed=failed,
        )

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The victims' replicas are still reached, and a clock that was set once is still wrong: NTP may have corrected
        it. Whether replicas have read their clocks, if reads are counted."""
        held = hosts_kept_from(Activity.ANSWER, in_force)
        victims = [host for host in injection.value["hosts"] if host not in held]
        skews, in_place = _skews_of(injection), _InPlace(target)
        set_once = [host for host in victims if skews[host].is_constant and await _runs(target, host)]
        found = await asyncio.gather(
            *(_unreached(target, host, skews[host]) for host in victims),
            *(_offset_problem(in_place, host, in_force, skews[host]) for host in set_once),
        )
        failed = [problem for problem in found if problem is not None]
        exercised, words = await _met(target, injection)
        detail = "; ".join(failed[:3]) if failed else words.removeprefix("; ")
        return Proof(proven=not failed, exercised=exercised, detail=detail, checked=len(victims), failed=failed)

    async def heal(self, target: Target, injection: Injection) -> None:
        """Set the clocks right. Idempotent."""
        await _clocks(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The victims' clocks show the right time again and run at the right rate."""
        held = hosts_kept_from(Activity.ANSWER, in_force)
        victims = [host for host in injection.value["hosts"] if host not in held]
        skews = _skews_of(injection)
        in_place, reported = _InPlace(target), _Reported(target)
        running = [host for host in victims if await _runs(target, host)]
        found = await asyncio.gather(
            *(_healed_problem(in_place, host, skews[host], in_force) for host in running),
            *(_healed_problem(reported, host, skews[host], in_force) for host in victims),
        )
        failed = [problem for problem in found if problem is not None]
        detail = "; ".join(failed[:3]) if failed else plural_with(len(victims), "clock", ("is right", "are right"))
        return Proof(proven=not failed, detail=detail, checked=len(found), failed=failed)


def _skew(form: str, rng: random.Random) -> dict[str, int]:
    """One victim's skew as recorded in the history."""
    sign = rng.choice((-1, 1))
    if form == "bump":
        return {"offset_ms": sign * _magnitude(rng, MIN_BUMP_MS, MAX_BUMP_MS)}
    if form == "hour":
        return {"offset_ms": sign * HOUR_MS}
    if form == "reset":
        return {"offset_ms": RESET_MS}
    if form == "strobe":
        return {
            "strobe_ms": sign * _magnitude(rng, MIN_STROBE_MS, MAX_STROBE_MS),
            "strobe_period_ms": _magnitude(rng, MIN_PERIOD_MS, MAX_PERIOD_MS),
        }
    if form == "slew":
        return {"rate_ppm": sign * rng.randint(MIN_SLEW_PPM, MAX_SLEW_PPM)}
    if form == "step":
        return {"rate_ppm": sign * rng.randint(MIN_STEPPED_PPM, MAX_STEPPED_PPM), "step_ms": STEP_MS}
    if form == "slow-monotonic":
        # Any slower, and a leader would be deposed for late heartbeats before its lease could last too long.
        return {"rate_ppm": -rng.randint(600_000, 750_000), "affects_monotonic": 1}
    if form == "fast-monotonic":
        return {"rate_ppm": rng.randint(500_000, 2_000_000), "affects_monotonic": 1}
    return {"rate_ppm": sign * _magnitude(rng, MIN_DRIFT_PPM, MAX_DRIFT_PPM)}


def _magnitude(rng: random.Random, low: int, high: int) -> int:
    """Log-uniform between the two: every order of magnitude is equally likely."""
    ratio = float(high / low)
    return round(low * math.pow(ratio, rng.random()))


def _skews_of(injection: Injection) -> dict[str, ClockSkew]:
    return {
        host: ClockSkew(
            offset_ms=skew.get("offset_ms", 0),
            rate_ppm=skew.get("rate_ppm", 0),
            strobe_ms=skew.get("strobe_ms", 0),
            strobe_period_ms=skew.get("strobe_period_ms", 0),
            affects_monotonic=bool(skew.get("affects_monotonic", 0)),
            step_ms=skew.get("step_ms", 0),
        )
        for host, skew in injection.value.get("skews", {}).items()
    }


def _clocks(target: Target) -> Clocks:
    if target.clocks is None:
        raise ValueError("this cluster has no clocks to act on")
    return target.clocks


def _others_on(host: str, in_force: Sequence[Injection]) -> list[ClockSkew]:
    """The skews that other clock faults give a host."""
    return [skews[host] for fault in in_force if fault.nemesis == "clock" and host in (skews := _skews_of(fault))]


class _Reader(ABC):
    """A way to read the clocks of hosts. `must_see`: a reading that is too uncertain to judge is a problem."""

    must_see: bool

    @abstractmethod
    async def read(self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0) -> Sequence[ClockReading]:
        """As nemesis.target.Clocks.read; empty if the clocks cannot be read."""

    @abstractmethod
    def silence(self, host: str) -> str | None:
        """The problem to report if a host's clocks could not be read; None if that is no problem."""


class _InPlace(_Reader):
    """Reads the clocks where the replica runs."""

    must_see = True

    def __init__(self, target: Target) -> None:
        self._target = target
        self._silences: dict[str, str] = {}

    async def read(self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0) -> Sequence[ClockReading]:
        timeout_s = IN_PLACE_TIMEOUT_S + sum(pauses_s)
        try:
            return await _clocks(self._target).read(host, pauses_s=pauses_s, apart_ms=apart_ms, timeout_s=timeout_s)
        except RuntimeError as error:
            self._silences[host] = str(error)
            return ()

    def silence(self, host: str) -> str | None:
        """Why the clocks of a host could not be read."""
        return self._silences.get(host, f"the clock of {host} could not be read twice")


class _Reported(_Reader):
    """The time that replicas report when asked. A replica that does not answer is no problem: `_InPlace` decides."""

    must_see = False

    def __init__(self, target: Target) -> None:
        self._target = target
        self.heard: set[str] = set()
        """Hosts whose replicas have answered."""

    async def read(self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0) -> Sequence[ClockReading]:
        """In a series (`apart_ms` given) every reading counts as it comes; otherwise each reading is the best of a few
        tries if the first ones are too uncertain or not answered."""
        readings: list[ClockReading] = []
        for pause_s in (None, *pauses_s) if self._target.tells_time else ():
            offsets_ms = [reading.offset_ms for reading in readings]
            if offsets_ms and 0 < apart_ms <= max(offsets_ms) - min(offsets_ms):
                break
            if pause_s is not None:
                await asyncio.sleep(pause_s)
            found = await self._read_once(host) if apart_ms else await self._read_well(host)
            if found is not None:
                readings.append(found)
        if readings:
            self.heard.add(host)
        return readings

    def silence(self, host: str) -> str | None:
        """Never a problem."""
        return None

    async def _read_once(self, host: str) -> ClockReading | None:
        return await self._target.read_clock(host, timeout_s=READ_TIMEOUT_S)

    async def _read_well(self, host: str) -> ClockReading | None:
        best: ClockReading | None = None
        for _ in range(READ_TRIES):
            reading = await self._read_once(host)
            if reading is not None and (best is None or reading.uncertainty_ms < best.uncertainty_ms):
                best = reading
            if best is not None and best.uncertainty_ms <= TOLERANCE_MS:
                return best
            await asyncio.sleep(0.1)
        return best


async def _runs(target: Target, host: str) -> bool:
    """Whether a host's replica is running, as far as is known. A target without processes has them all running."""
    return target.processes is None or (await target.processes.look(host)).state != DOWN


async def _unreached(target: Target, host: str, skew: ClockSkew) -> str | None:
    """Why the replica of a host would not feel a skew. A replica that is down feels it once it is back."""
    return await why_unreached(target, host, partial(_clocks(target).reaches, monotonic=skew.affects_monotonic))


async def _met(target: Target, injection: Injection) -> tuple[bool | None, str]:
    """(whether some victim's replica has read its clock since the fault began, None if reads are not counted; the same
    as text)."""
    met = await _clocks(target).met(injection.fault_id)
    counted = {host: seen.met for host, seen in met.items() if seen.met is not None}
    if not counted or len(counted) < len(met):
        return None, ""
    words = ", ".join(f"{host} {plural(count, 'time')}" for host, count in sorted(counted.items()) if count)
    if words:
        return True, f"; read by {words}"
    if any(skew.affects_monotonic for skew in _skews_of(injection).values()):
        return False, "; no replica has read its monotonic clock"
    return False, "; no replica has read its wall clock (slow-monotonic and fast-monotonic skew the other clock)"


async def _problems(
    reader: _Reader,
    victims: Sequence[str],
    others: Sequence[str],
    skews: Mapping[str, ClockSkew],
    in_force: Sequence[Injection],
) -> list[str | None]:
    return await asyncio.gather(
        *(_victim_problem(reader, host, skews[host], in_force) for host in victims),
        *(_offset_problem(reader, host, in_force) for host in others),
    )


async def _offset_problem(
    reader: _Reader, host: str, in_force: Sequence[Injection], skew: ClockSkew | None = None
) -> str | None:
    """None if a wall clock is off by as much as the faults in force and `skew` make it; otherwise the problem."""
    readings = await reader.read(host)
    if not readings:
        return reader.silence(host)
    [reading] = readings
    others = [other for other in _others_on(host, in_force) if not other.affects_monotonic]
    expected_ms = sum(other.offset_ms for other in others) + (skew.offset_ms if skew is not None else 0)
    # A clock that another fault lets swing or drift is known less well; an hour is longer than any fault lasts.
    slack_ms = sum(abs(other.strobe_ms) + abs(other.rate_ppm) * 3.6 for other in others)
    if abs(reading.offset_ms - expected_ms) <= TOLERANCE_MS + reading.uncertainty_ms + slack_ms:
        return None
    return f"the clock of {host} is off by {reading.offset_ms:.0f} ms, not {expected_ms} ms"


async def _victim_problem(reader: _Reader, host: str, skew: ClockSkew, in_force: Sequence[Injection]) -> str | None:
    if skew.affects_monotonic:
        beside_ppm = sum(other.rate_ppm for other in _others_on(host, in_force) if other.affects_monotonic)
        return await _rate_problem(reader, host, 1 + (skew.rate_ppm + beside_ppm) / 1e6)
    if skew.strobe_ms:
        return await _strobe_problem(reader, host, skew)
    if skew.step_ms:
        return await _step_problem(reader, host, skew)
    if skew.rate_ppm:
        return await _drift_problem(reader, host, skew, in_force)
    problem = await _offset_problem(reader, host, in_force, skew)
    if problem is None and not any(other.affects_monotonic for other in _others_on(host, in_force)):
        problem = await _rate_problem(reader, host, 1.0)
    return problem


async def _healed_problem(reader: _Reader, host: str, skew: ClockSkew, in_force: Sequence[Injection]) -> str | None:
    """None if a clock is right, and stays right for as long as it took to see the fault; otherwise the problem."""
    others = _others_on(host, in_force)
    if skew.affects_monotonic:
        return None if any(other.affects_monotonic for other in others) else await _rate_problem(reader, host, 1.0)
    problem = await _offset_problem(reader, host, in_force)
    if problem is None and skew.rate_ppm:
        problem = await _drift_problem(reader, host, ClockSkew(), in_force, healed=skew)
    if problem is None and skew.strobe_ms and not any(other.strobe_ms for other in others):
        swing = await _swing_ms(reader, host, skew, readings=STROBE_READINGS // 4)
        if swing is None:
            return reader.silence(host)
        if swing >= abs(skew.strobe_ms) / 2:
            return f"the clock of {host} still swings"
    return problem


async def _pair(reader: _Reader, host: str, watch_s: float = WATCH_S) -> tuple[ClockReading, ClockReading] | None:
    """Two readings, `watch_s` seconds apart."""
    readings = await reader.read(host, pauses_s=(watch_s,))
    return (readings[0], readings[-1]) if len(readings) == 2 else None


async def _rate_problem(reader: _Reader, host: str, rate: float) -> str | None:
    """None if a monotonic clock runs at `rate`; otherwise the problem."""
    pair = await _pair(reader, host)
    if pair is None:
        return reader.silence(host)
    first, second = pair
    true_s = second.at_s - first.at_s
    seen_s = second.monotonic_s - first.monotonic_s
    # Far less than the smallest drift, far more than a slew of the machine's own clock.
    allowed_s = 0.02 * true_s + (first.uncertainty_ms + second.uncertainty_ms) / 1000
    if abs(seen_s - rate * true_s) <= allowed_s:
        return None
    return f"the monotonic clock of {host} advanced {seen_s:.3f} s in {true_s:.3f} s, not {rate * true_s:.3f} s"


async def _drift_problem(
    reader: _Reader,
    host: str,
    skew: ClockSkew,
    in_force: Sequence[Injection],
    *,
    healed: ClockSkew | None = None,
) -> str | None:
    """None if a wall clock drifts as `skew` says; otherwise the problem. `healed` is a skew that must have stopped."""
    looked_for = healed or skew
    problem = None
    for _ in range(SLEW_TRIES):
        pair = await _pair(reader, host, _watch_s(looked_for))
        if pair is None:
            return reader.silence(host)
        first, second = pair
        seconds = second.at_s - first.at_s
        beside_ppm = sum(o.rate_ppm for o in _others_on(host, in_force) if not o.affects_monotonic)
        expected_ms = seconds * (skew.rate_ppm + beside_ppm) / 1000
        seen_ms = second.offset_ms - first.offset_ms
        # No reading is more certain than the time it takes, no drift is known better than the other drifts in force.
        unsure_ms = first.uncertainty_ms + second.uncertainty_ms + 0.02 * abs(beside_ppm) * seconds / 1000
        share = 0.5 if healed is not None else 0.2
        allowed_ms = share * min(abs(looked_for.rate_ppm), MIN_DRIFT_PPM if healed else math.inf) * seconds / 1000
        if abs(seen_ms - expected_ms) > allowed_ms + unsure_ms:
            return f"the clock of {host} drifted by {seen_ms:.1f} ms while watched, not {expected_ms:.1f} ms"
        if unsure_ms > abs(looked_for.rate_ppm) * seconds / 4000:
            problem = (
                f"the clock of {host} could be read only to within {unsure_ms:.1f} ms: too coarse to see the drift"
            )
            continue
        is_moved = any(other.affects_monotonic for other in _others_on(host, in_force))
        is_compared = _is_slew(looked_for) and not is_moved
        problem = _monotonic_problem(host, first, second, looked_for) if is_compared else None
        if problem is None:
            return None
    return problem if reader.must_see else None


def _is_slew(skew: ClockSkew) -> bool:
    return 0 < abs(skew.rate_ppm) <= MAX_SLEW_PPM


def _watch_s(skew: ClockSkew) -> float:
    """How long a drift has to be watched; for a stepped clock, half the time between two steps."""
    if skew.step_ms:
        return skew.step_ms * 1000 / abs(skew.rate_ppm) / 2
    return SLEW_WATCH_S if _is_slew(skew) else WATCH_S


def _monotonic_problem(host: str, first: ClockReading, second: ClockReading, slew: ClockSkew) -> str | None:
    """The problem if a monotonic clock follows the slewed wall clock by more than half of the slew; otherwise None."""
    true_s, seen_s = second.at_s - first.at_s, second.monotonic_s - first.monotonic_s
    allowed_s = abs(slew.rate_ppm) * true_s / 2e6 + (first.uncertainty_ms + second.uncertainty_ms) / 1000
    if abs(seen_s - true_s) <= allowed_s:
        return None
    return f"the monotonic clock of {host} advanced {seen_s:.5f} s in {true_s:.5f} s: it is slewed too"


async def _step_problem(reader: _Reader, host: str, skew: ClockSkew) -> str | None:
    """Readings must show that the clock drifts and is set right at least once."""
    pause_s = 2 * _watch_s(skew) * 2 / (STEP_READINGS - 1)
    readings = await reader.read(host, pauses_s=[pause_s] * (STEP_READINGS - 1))
    if len(readings) < STEP_READINGS:
        return reader.silence(host)
    unsure_ms = 2 * max(reading.uncertainty_ms for reading in readings)
    offsets_ms = [reading.offset_ms for reading in readings]
    swing_ms = max(offsets_ms) - min(offsets_ms)
    steps = 0
    for one, next_one in pairwise(readings):
        gained_ms = (next_one.at_s - one.at_s) * skew.rate_ppm / 1000
        taken_back = (gained_ms - (next_one.offset_ms - one.offset_ms)) / math.copysign(skew.step_ms, skew.rate_ppm)
        steps += round(taken_back)
        if abs(taken_back - round(taken_back)) > 0.25 + unsure_ms / skew.step_ms:
            moved_ms = next_one.offset_ms - one.offset_ms
            return f"the clock of {host} moved by {moved_ms:.1f} ms where it should have drifted by {gained_ms:.1f} ms"
    if steps < 1 or swing_ms < skew.step_ms / 2:
        return f"the clock of {host} was not stepped: it moved by {swing_ms:.1f} ms in total"
    return None


async def _strobe_problem(reader: _Reader, host: str, skew: ClockSkew) -> str | None:
    """Readings must show the clock at both ends of its swing."""
    swing_ms = await _swing_ms(reader, host, skew, readings=STROBE_READINGS)
    if swing_ms is None:
        return reader.silence(host)
    if swing_ms >= abs(skew.strobe_ms) / 2:
        return None
    return f"the clock of {host} swings by {swing_ms:.0f} ms, not {abs(skew.strobe_ms)} ms"


async def _swing_ms(reader: _Reader, host: str, skew: ClockSkew, *, readings: int) -> float | None:
    """The spread of readings of a clock; reading stops once they are half a strobe apart."""
    # Pauses of several lengths, so that they do not coincide with a period.
    pauses_s = [skew.strobe_period_ms / 1000 * (0.1 + number % 7 / 7) for number in range(readings - 1)]
    found = await reader.read(host, pauses_s=pauses_s, apart_ms=abs(skew.strobe_ms) / 2)
    seen = [reading.offset_ms for reading in found]
    return max(seen) - min(seen) if seen else None


def _in_words(skew: ClockSkew) -> str:
    if skew.strobe_ms:
        return f"swings by {skew.strobe_ms} ms every {skew.strobe_period_ms} ms"
    if skew.step_ms:
        return f"drifts by {skew.rate_ppm / 10_000:.1f} % and is stepped right whenever it is {skew.step_ms} ms off"
    if _is_slew(skew):
        return f"is slewed by {skew.rate_ppm} ppm"
    if skew.rate_ppm:
        return f"{'monotonic clock ' if skew.affects_monotonic else ''}drifts by {skew.rate_ppm / 10_000:.1f} %"
    return f"off by {offset(skew.offset_ms)}"


CLOCK = ClockFault()
"""The instance that the registry returns; it is stateless."""
