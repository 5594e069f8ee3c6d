"""The nemesis `clock`: replicas whose clocks are wrong.

Wall clocks jump, swing, drift or fall back by decades, each victim's by its own amount; monotonic clocks are left
alone, as they are on hosts whose clock is set, unless a form for them is asked for. What is proved is what
the replica itself says of its clocks when it is asked: that those of the victims are wrong as planned, that everybody
else's are right, and that no monotonic clock noticed. Healing sets the clocks right in one step.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemesis.forms import Form, FormNemesis
from nemesis.impairments import Activity, hosts_kept_from
from nemesis.protocol import Injection, Proof
from nemesis.target import ClockReading, Clocks, ClockSkew, Target

__all__ = ["CLOCK", "ClockFault"]

MIN_BUMP_MS, MAX_BUMP_MS = 2_000, 2 * 3_600_000
"""A bump is between these, either way, by orders of magnitude: from beyond every lease to two hours."""

HOUR_MS = 3_600_000

MIN_STROBE_MS, MAX_STROBE_MS = 1_000, 262_000
MIN_PERIOD_MS, MAX_PERIOD_MS = 8, 1_000

MIN_DRIFT_PPM, MAX_DRIFT_PPM = 50_000, 500_000
"""From one second in twenty to half a second a second: seconds within the few that a fault lasts."""

RESET_MS = -26 * 365 * 86_400_000
"""How far a clock goes back that has lost its battery."""

TOLERANCE_MS = 250.0
"""How far from the plan a clock may read, beyond what the reading itself leaves open: machines are busy."""

WATCH_S = 1.0
"""How long a drift is watched."""

STROBE_READINGS = 60
READ_TIMEOUT_S = 3.0
READ_TRIES = 5


class ClockFault(FormNemesis):
    """Skews clocks. See the module's text."""

    name = "clock"
    description = "sets the clocks of replicas wrong: jumps, swings, drifts, falls back by decades"
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
                description="each victim's wall clock is an hour wrong, either way, as after a mistake with a zone",
                needs=(("clocks", "wall"),),
                targets=("minority",),
            ),
            Form(
                name="strobe",
                description="each victim's wall clock jumps there and back many times a second",
                needs=(("clocks", "wall"),),
                targets=("one", "minority", "leader"),
            ),
            Form(
                name="drift",
                description="each victim's wall clock goes too fast or too slow, by 5 to 50 %",
                needs=(("clocks", "wall"),),
                targets=("one", "minority", "leader"),
            ),
            Form(
                name="reset",
                description="the wall clock falls back by 26 years, as after losing its battery",
                needs=(("clocks", "wall"),),
                targets=("one", "leader"),
            ),
            Form(
                name="slow-monotonic",
                description="each victim's monotonic clock goes too slow, at 25 to 40 % of its rate",
                needs=(("clocks", "monotonic"),),
                targets=("leader", "one"),
                is_cycled=False,
            ),
            Form(
                name="fast-monotonic",
                description="each victim's monotonic clock goes too fast, by half to twice its rate",
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
        """Every victim says itself that its clock is wrong as planned, everybody else that theirs is right."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        held = hosts_kept_from(Activity.ANSWER, in_force)
        victims = [host for host in injection.value["hosts"] if host not in held]
        if not victims:
            return Proof(proven=False, detail="every victim is held by another fault and cannot be asked")
        others = [host for host in target.hosts if host not in injection.value["hosts"] and host not in held]
        skews = _skews_of(injection)
        found = await asyncio.gather(
            *(_victim_problem(target, host, skews[host], in_force) for host in victims),
            *(_offset_problem(target, host, in_force) for host in others),
        )
        failed = [problem for problem in found if problem is not None]
        detail = "; ".join(f"{host} {_in_words(skews[host])}" for host in victims[:4])
        return Proof(
            proven=not failed,
            detail="; ".join(failed[:3]) if failed else detail,
            checked=len(found),
            failed=failed,
        )

    async def heal(self, target: Target, injection: Injection) -> None:
        """Set the clocks right. Idempotent."""
        await _clocks(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The victims' clocks say the time, and go at its rate, again."""
        held = hosts_kept_from(Activity.ANSWER, in_force)
        victims = [host for host in injection.value["hosts"] if host not in held]
        skews = _skews_of(injection)
        found = await asyncio.gather(*(_healed_problem(target, host, skews[host], in_force) for host in victims))
        failed = [problem for problem in found if problem is not None]
        detail = "; ".join(failed[:3]) if failed else f"{len(victims)} clocks are right"
        return Proof(proven=not failed, detail=detail, checked=len(found), failed=failed)


def _skew(form: str, rng: random.Random) -> dict[str, int]:
    """One victim's skew as the history has it."""
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
    if form == "slow-monotonic":
        # Not slower: a leader whose heartbeats come too late is deposed before its lease could last too long.
        return {"rate_ppm": -rng.randint(600_000, 750_000), "affects_monotonic": 1}
    if form == "fast-monotonic":
        return {"rate_ppm": rng.randint(500_000, 2_000_000), "affects_monotonic": 1}
    return {"rate_ppm": sign * _magnitude(rng, MIN_DRIFT_PPM, MAX_DRIFT_PPM)}


def _magnitude(rng: random.Random, low: int, high: int) -> int:
    """Between the two, every order of magnitude as likely as any other."""
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


async def _read(target: Target, host: str) -> ClockReading | None:
    """A reading; the best of a few where the first ones leave much open or are not answered."""
    best: ClockReading | None = None
    for _ in range(READ_TRIES):
        reading = await target.read_clock(host, timeout_s=READ_TIMEOUT_S)
        if reading is not None and (best is None or reading.uncertainty_ms < best.uncertainty_ms):
            best = reading
        if best is not None and best.uncertainty_ms <= TOLERANCE_MS:
            return best
        await asyncio.sleep(0.1)
    return best


async def _offset_problem(
    target: Target, host: str, in_force: Sequence[Injection], skew: ClockSkew | None = None
) -> str | None:
    """Whether a wall clock reads what the faults in force and `skew` make of it."""
    reading = await _read(target, host)
    if reading is None:
        return f"{host} does not tell its clock"
    others = [other for other in _others_on(host, in_force) if not other.affects_monotonic]
    expected_ms = sum(other.offset_ms for other in others) + (skew.offset_ms if skew is not None else 0)
    # A clock that another fault lets swing or drift is known less well; an hour is longer than any fault lasts.
    slack_ms = sum(abs(other.strobe_ms) + abs(other.rate_ppm) * 3.6 for other in others)
    if abs(reading.offset_ms - expected_ms) <= TOLERANCE_MS + reading.uncertainty_ms + slack_ms:
        return None
    return f"the clock of {host} is off by {reading.offset_ms:.0f} ms, not {expected_ms} ms"


async def _victim_problem(target: Target, host: str, skew: ClockSkew, in_force: Sequence[Injection]) -> str | None:
    if skew.affects_monotonic:
        return await _rate_problem(target, host, 1 + skew.rate_ppm / 1e6)
    if skew.strobe_ms:
        return await _strobe_problem(target, host, skew)
    if skew.rate_ppm:
        return await _drift_problem(target, host, skew, in_force)
    problem = await _offset_problem(target, host, in_force, skew)
    if problem is None and not any(other.affects_monotonic for other in _others_on(host, in_force)):
        problem = await _rate_problem(target, host, 1.0)
    return problem


async def _healed_problem(target: Target, host: str, skew: ClockSkew, in_force: Sequence[Injection]) -> str | None:
    """Whether a clock is right, and stays right for as long as what was wrong with it needs to show."""
    others = _others_on(host, in_force)
    if skew.affects_monotonic:
        return None if any(other.affects_monotonic for other in others) else await _rate_problem(target, host, 1.0)
    problem = await _offset_problem(target, host, in_force)
    if problem is None and skew.rate_ppm:
        problem = await _drift_problem(target, host, ClockSkew(), in_force)
    if problem is None and skew.strobe_ms and not any(other.strobe_ms for other in others):
        swing = await _swing_ms(target, host, skew, readings=STROBE_READINGS // 4)
        if swing is None or swing >= abs(skew.strobe_ms) / 2:
            return f"the clock of {host} still swings" if swing else f"{host} does not tell its clock"
    return problem


async def _pair(target: Target, host: str) -> tuple[ClockReading, ClockReading] | None:
    """Two readings WATCH_S apart."""
    first = await _read(target, host)
    await asyncio.sleep(WATCH_S)
    second = await _read(target, host)
    return None if first is None or second is None else (first, second)


async def _rate_problem(target: Target, host: str, rate: float) -> str | None:
    """Whether a monotonic clock goes at `rate`."""
    pair = await _pair(target, host)
    if pair is None:
        return f"{host} does not tell its clock"
    first, second = pair
    true_s = second.at_s - first.at_s
    seen_s = second.monotonic_s - first.monotonic_s
    # Far below the least drift, far above what a slew of the machine's own clock does.
    allowed_s = 0.02 * true_s + (first.uncertainty_ms + second.uncertainty_ms) / 1000
    if abs(seen_s - rate * true_s) <= allowed_s:
        return None
    return f"the monotonic clock of {host} went {seen_s:.3f} s in {true_s:.3f} s, not {rate * true_s:.3f} s"


async def _drift_problem(target: Target, host: str, skew: ClockSkew, in_force: Sequence[Injection]) -> str | None:
    pair = await _pair(target, host)
    if pair is None:
        return f"{host} does not tell its clock"
    first, second = pair
    rate_ppm = skew.rate_ppm + sum(o.rate_ppm for o in _others_on(host, in_force) if not o.affects_monotonic)
    expected_ms = (second.at_s - first.at_s) * rate_ppm / 1000
    seen_ms = second.offset_ms - first.offset_ms
    # Half of what the least drift makes; a reading cannot be more certain than the round trip it takes.
    slack_ms = MIN_DRIFT_PPM / 2000 * (second.at_s - first.at_s) if not expected_ms else 0.2 * abs(expected_ms)
    allowed_ms = slack_ms + first.uncertainty_ms + second.uncertainty_ms
    if abs(seen_ms - expected_ms) <= allowed_ms:
        return None
    return f"the clock of {host} drifted by {seen_ms:.1f} ms while watched, not {expected_ms:.1f} ms"


async def _strobe_problem(target: Target, host: str, skew: ClockSkew) -> str | None:
    """Readings must show the clock in both places."""
    swing_ms = await _swing_ms(target, host, skew, readings=STROBE_READINGS)
    if swing_ms is None:
        return f"{host} does not tell its clock"
    if swing_ms >= abs(skew.strobe_ms) / 2:
        return None
    return f"the clock of {host} swings by {swing_ms:.0f} ms, not {abs(skew.strobe_ms)} ms"


async def _swing_ms(target: Target, host: str, skew: ClockSkew, *, readings: int) -> float | None:
    """How far apart readings of a clock are; as soon as they are half a strobe apart, no more are taken."""
    seen: list[float] = []
    for number in range(readings):
        reading = await target.read_clock(host, timeout_s=READ_TIMEOUT_S)
        if reading is not None:
            seen.append(reading.offset_ms)
            if max(seen) - min(seen) >= abs(skew.strobe_ms) / 2:
                break
        # Pauses of many lengths, so that they fall in with no period.
        await asyncio.sleep(skew.strobe_period_ms / 1000 * (0.1 + number % 7 / 7))
    return max(seen) - min(seen) if seen else None


def _in_words(skew: ClockSkew) -> str:
    if skew.strobe_ms:
        return f"swings by {skew.strobe_ms} ms every {skew.strobe_period_ms} ms"
    if skew.rate_ppm:
        return f"{'monotonic clock ' if skew.affects_monotonic else ''}drifts by {skew.rate_ppm / 10_000:.1f} %"
    return f"off by {skew.offset_ms} ms"


CLOCK = ClockFault()
"""The one instance that the registry hands out; it holds no state."""
