"""Is the simulation deterministic? Each seed runs twice, in processes that differ in what must not matter.

The two processes have different hash seeds, and may be different interpreters. Each writes its network events and its
history; the first event at which they differ is shown with the stack that led to it. The child process is this module
itself: `python -m harness.exploration.audit`, with its parameters on standard input.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from checker.workers import end_with_parent
from harness.clusters.sim.cluster import SimCluster
from harness.clusters.sim.network import TraceEvent
from harness.errors import EXIT_OPERATOR, HarnessError, OperatorError
from harness.execution import rehearse
from harness.exploration.rehearsal import parts_of, usable_choices
from harness.exploration.search import mix_for
from harness.report import OutputConsole
from harness.scratch import scratch_directory
from harness.test import Test, test_from_json

__all__ = ["HASH_SEEDS", "Parting", "audit_seed", "first_difference", "require_interpreter"]

HASH_SEEDS = ("1", "4711")
"""PYTHONHASHSEED of the two runs, so that sets of strings iterate in different orders."""

MAX_EVENTS = 5_000_000
"""Most network events compared: some minutes of the default load, half a gigabyte of temporary files."""

MAX_LINE_CHARS = 400
"""Events are cut to this length when shown; the rest of a long operation adds nothing."""

MAX_STACK_FRAMES = 12
"""Innermost calls of a stack that are shown; the outer ones belong to the loop and to the start of the harness."""

PROBE = "import harness.exploration.audit, sys; sys.stdout.write('ready')"
"""Checks that a command is an interpreter that has everything a run needs."""

PROBE_TIMEOUT_S = 60.0

TIMEOUT_S = 3600.0
"""Timeout of one run; a stuck run reports that itself long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where two runs of one seed differ: the `number`th (from 1) event of `what` in each ("(ended)" if a run has no
    further one), and for the network the stack of each."""

    seed: int
    what: str
    number: int
    events: tuple[str, str]
    stacks: tuple[str, str] = ("", "")
    """Empty if the runs made again to get the stacks differ elsewhere: then the difference is due to chance or the
    machine's clock, and not to what the two processes differ in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """The result for one seed."""

    seed: int
    events: int
    parting: Parting | None


def require_interpreter(python: str) -> None:
    """Raise OperatorError if `python` is no interpreter with everything that a run needs."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=PROBE_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"--python {python}: {error}") from None
    if done.stdout != "ready":
        last = done.stderr.strip().splitlines()[-1:]
        why = f" ({last[0]})" if last else ""
        raise OperatorError(
            f"--python {python} cannot run the harness{why}: name an interpreter that has splitbrain installed"
        )


def audit_seed(test: Test, seed: int, pythons: tuple[str, str]) -> Audited:
    """Run one seed twice and compare. Raises HarnessError if a run cannot be performed, OperatorError if the operator
    can fix that."""
    with scratch_directory("audit") as directory:
        places = [Path(directory, name) for name in ("first", "second")]
        _run_both(test, seed, pythons, places, stack_of=0)
        for what in ("network", "history"):
            with open(places[0] / what, encoding="utf-8") as one, open(places[1] / what, encoding="utf-8") as other:
                found = first_difference(one, other)
            if found is None:
                continue
            number, events = found
            stacks = ("", "")
            if what == "network":
                _run_both(test, seed, pythons, places, stack_of=number)
                with open(places[0] / what, encoding="utf-8") as one, open(places[1] / what, encoding="utf-8") as other:
                    again = first_difference(one, other)
                if again == found:  # else the stacks belong to other events
                    stacks = (_stack(places[0]), _stack(places[1]))
            return Audited(
                seed=seed,
                events=number,
                parting=Parting(seed=seed, what=what, number=number, events=events, stacks=stacks),
            )
        with open(places[0] / "network", "rb") as file:
            return Audited(seed=seed, events=sum(1 for _ in file), parting=None)


def first_difference(one: Iterable[str], other: Iterable[str]) -> tuple[int, tuple[str, str]] | None:
    """The number (from 1) of the first line in which two files differ, and both lines; None if they are equal."""
    for number, (left, right) in enumerate(zip_longest(one, other), 1):
        if left != right:
            return number, (_shown(left), _shown(right))
    return None


def _shown(line: str | None) -> str:
    return "(ended)" if line is None else line.rstrip("\n")[:MAX_LINE_CHARS]


def _stack(place: Path) -> str:
    path = place / "stack"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _run_both(test: Test, seed: int, pythons: Sequence[str], places: Sequence[Path], *, stack_of: int) -> None:
    for python, hash_seed, place in zip(pythons, HASH_SEEDS, places, strict=True):
        asked = {
            "test": test.to_json(), "seed": seed, "place": str(place), "stack_of": stack_of, "parent": os.getpid(),
        }  # fmt: skip
        try:
            done = subprocess.run(
                [python, "-m", __name__],
                input=json.dumps(asked),
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HarnessError(f"cannot run seed {seed} with {python}: {error}") from None
        if done.returncode == EXIT_OPERATOR:
            raise OperatorError(f"seed {seed}: {done.stderr.strip()}")
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            raise HarnessError(f"cannot run seed {seed} with {python}: {last[0]}")


# The child


class _Journal:
    """Writes a line for each network event, and the stack at event number `stack_of`."""

    def __init__(self, place: Path, stack_of: int) -> None:
        self._file = open(place / "network", "w", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        self._stack_path = place / "stack"
        self._stack_of = stack_of
        self._count = 0

    def note(self, event: TraceEvent) -> None:
        """Write one event."""
        self._count += 1
        if self._count == self._stack_of:
            frames = traceback.format_stack()[:-1][-MAX_STACK_FRAMES:]
            self._stack_path.write_text("".join(frames), encoding="utf-8")
        if self._count > MAX_EVENTS:
            return
        content = f" {hashlib.blake2b(event.content, digest_size=8).hexdigest()}" if event.content else ""
        self._file.write(
            f"{event.time_s!r} {event.kind} {event.source}->{event.destination} connection {event.connection} "
            f"number {event.number} {event.size_bytes} bytes{content}\n"
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _child(asked: dict[str, Any]) -> None:
    end_with_parent(asked["parent"])  # else the simulation would outlive the caller
    test, seed, place = test_from_json(asked["test"]), asked["seed"], Path(asked["place"])
    seeded, schedule = mix_for(test, seed, usable_choices(test))
    parts = parts_of(seeded, schedule)
    place.mkdir(exist_ok=True)
    journal = _Journal(place, asked["stack_of"])

    class Audited(SimCluster):
        """A cluster whose network events go to the journal."""

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.network.trace = journal.note

    try:
        with tempfile.TemporaryDirectory(dir=place) as directory:
            results = rehearse(
                dataclasses.replace(parts, cluster_class=Audited),
                directory,
                OutputConsole(file=io.StringIO(), quiet=True),
            )
            if results.get("interrupted") is not None:  # then it is shorter only because of the interrupt
                raise HarnessError(f"interrupted by {results['interrupted']}")
            (history,) = Path(directory).glob("*/2*/history.jsonl")
            history.rename(place / "history")
    finally:
        journal.close()


if __name__ == "__main__":
    try:
        _child(json.load(sys.stdin))
    except OperatorError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_OPERATOR)
