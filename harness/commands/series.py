"""A series of runs from one command: repetitions, and all combinations of a matrix of options.

    harness run --matrix modes.toml --test-count 10 --time-limit 20

    # modes.toml
    nemesis = ["partition", "kill"]
    [set]
    read_mode = ["read_index", "unsafe"]

makes 2 x 2 configurations, ten runs each. Repetitions are the outer loop, so that a series stopped half-way has about
as many runs of each configuration. The runs of one repetition share a seed, derived from --seed: every configuration
has the same faults at the same times, which makes them comparable.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.table import Table

from harness.cli_parser import build_parser
from harness.commands.run import Cases, Prepared, announce, enter_namespace, prepare, require_rereadable
from harness.errors import (
    EXIT_HARNESS_FAILED,
    EXIT_INVALID,
    HarnessError,
    InterruptedStartError,
    OperatorError,
    SystemUnderTestError,
    nearest,
)
from harness.execution import exit_status_of, perform
from harness.report import OutputConsole
from harness.seeded import random_seed
from harness.standard_streams import output_of_results
from harness.store import Store
from harness.units import plural

__all__ = ["MAX_RUNS", "combinations", "derived_seed", "series_command"]

MAX_RUNS = 10_000
"""Limit of runs in one series: days of work, so more is a mistake in the matrix."""

MAX_MATRIX_BYTES = 1 << 20
"""Limit of a matrix file, so that one without an end (a device) is refused."""

MAX_FAILED_STARTS = 3
"""Consecutive runs whose system did not start, after which the series is given up."""

OPTIONS = (
    "cluster", "inventory", "image", "system", "nodes", "workload", "nemesis", "nemesis-interval",
    "nemesis-schedule", "time-limit", "concurrency", "rate", "operation-timeout", "checker-timeout",
    "checker-memory",
)  # fmt: skip
"""Options of `harness run` that a matrix may list; the others apply to the whole series."""

_VERDICTS = {True: "valid", False: "invalid"}


@dataclass(slots=True)
class _Tally:
    """The results of a series so far."""

    by_label: dict[str, Counter[str]] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(self, label: str, verdict: str, status: int) -> None:
        self.by_label.setdefault(label, Counter())[verdict] += 1
        self.statuses.append(status)

    @property
    def worst(self) -> int:
        """Exit status: 1 if any run was invalid, else 255 if any did not start, else 2 if any was unknown, else 0."""
        return next((status for status in (EXIT_INVALID, EXIT_HARNESS_FAILED, 2) if status in self.statuses), 0)


def series_command(arguments: argparse.Namespace) -> int:
    """Perform every run of the series and print a summary. Returns the worst verdict's exit status.

    Everything is checked before the first run starts. An OperatorError in a run ends the series with a line that names
    the run; its exit status is still 1 if an earlier run was invalid. A system that does not start is counted, and
    after MAX_FAILED_STARTS in a row ends the series.
    """
    tally = _Tally()
    try:
        with output_of_results(is_json=arguments.json) as output, Cases(arguments) as cases:
            _series(arguments, tally, cases, output)
    except (OperatorError, HarnessError) as error:
        if tally.worst == EXIT_INVALID:
            error.exit_status = EXIT_INVALID
        raise
    return tally.worst


def _series(arguments: argparse.Namespace, tally: _Tally, cases: Cases, output: TextIO) -> None:
    base_seed = random_seed() if arguments.seed is None else arguments.seed
    options = [[]] if arguments.matrix is None else combinations(arguments.matrix)
    total = len(options) * arguments.test_count
    if total > MAX_RUNS:
        raise OperatorError(f"{total:,} runs requested, but a series has at most {MAX_RUNS:,}")
    console = OutputConsole(stderr=True)
    parser = build_parser()
    plan: list[tuple[str, Prepared]] = []
    for repetition, words in itertools.product(range(arguments.test_count), options):
        seed = str(derived_seed(base_seed, repetition))
        one = parser.parse_args([*arguments.words, *words, "--seed", seed, "--test-count", "1"])
        label = _label(words)
        require_rereadable(one.nemesis_schedule, total)
        try:
            plan.append((label, prepare(one)))
        except OperatorError as error:
            raise OperatorError(f"{label}: {error}") from None
    enter_namespace(plan[0][1], arguments)
    announce(plan[0][1], console)
    console.print(f"{plural(total, 'run')} of {plural(len(options), 'configuration')}, base seed {base_seed}")
    try:
        _perform_all(plan, Store(arguments.store), console, tally, cases)
    finally:  # the finished runs are summarised, whatever ends the series
        _print_summary(tally, console if arguments.json else OutputConsole())
        if arguments.json:
            print(json.dumps(tally.results, indent=2, sort_keys=True), file=output)
    if console.reader_is_gone:
        raise BrokenPipeError


def _perform_all(
    plan: Sequence[tuple[str, Prepared]], store: Store, console: OutputConsole, tally: _Tally, cases: Cases
) -> None:
    failed_starts = 0
    for number, (label, prepared) in enumerate(plan, 1):
        head = f"run {number} of {len(plan)}, {label}, seed {prepared.parts.test.seed}"
        try:
            run_dir, results = perform(prepared.parts, store, console)
        except OperatorError as error:
            raise OperatorError(f"{head}: {error} ({plural(number - 1, 'earlier run')} kept)") from None
        except SystemUnderTestError as error:
            console.print(f"{head}: [red]did not start[/]: {error}", highlight=False, soft_wrap=True)
            tally.add(label, "not started", EXIT_HARNESS_FAILED)
            cases.did_not_run(prepared.parts.test, error, label=label)
            if isinstance(error, InterruptedStartError):
                console.print_line(f"stopped; {plural(len(plan) - number, 'run')} left")
                return
            failed_starts += 1
            if failed_starts == MAX_FAILED_STARTS:  # the status is still that of a violation if there was one
                left = plural(len(plan) - number, "run")
                console.print_line(f"stopped: {failed_starts} runs in a row did not start; {left} left")
                return
            continue
        failed_starts = 0
        verdict = _VERDICTS.get(results["valid"], "unknown")
        tally.add(label, verdict, exit_status_of(results))
        cases.judged(prepared.parts.test, run_dir, results, label=f"{label} seed {prepared.parts.test.seed}")
        tally.results.append({"run": run_dir.name, **results})
        style = {"valid": "green", "invalid": "red", "unknown": "magenta"}[verdict]
        console.print(f"{head}: [{style}]{verdict}[/]  {run_dir.name}", highlight=False, soft_wrap=True)
        if results.get("interrupted") is not None:
            left = plural(len(plan) - number, "run")
            console.print_line(f"stopped by {results['interrupted']}; {left} left")
            return


def _print_summary(tally: _Tally, console: OutputConsole) -> None:
    if not tally.by_label:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("configuration", overflow="fold")
    names = [name for name in ("valid", "invalid", "unknown", "not started")
             if name != "not started" or any(name in counts for counts in tally.by_label.values())]  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for label, counts in tally.by_label.items():
        table.add_row(label, *(str(counts[name]) for name in names))
    console.print(table)


def derived_seed(base_seed: int, repetition: int) -> int:
    """The seed of a repetition; the first has the base seed, so that a series of one equals a single run."""
    if repetition == 0:
        return base_seed
    digest = hashlib.sha256(f"{base_seed}/run/{repetition}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def combinations(path: str) -> list[list[str]]:
    """Every combination of a matrix file's lists, as command-line words.

    Keys are options of `harness run` without their dashes; the table `set` holds options of the system. A single
    value stands for a list of one. Raises OperatorError naming the file and what is wrong with it.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_MATRIX_BYTES + 1)
        if len(text) > MAX_MATRIX_BYTES:
            raise OperatorError(f"--matrix {path}: more than {MAX_MATRIX_BYTES:,} bytes are too large for a matrix")
        data = tomllib.loads(text.decode())
    except OSError as error:
        raise OperatorError(f"--matrix {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise OperatorError(f"--matrix {path}: not TOML: {error}") from None
    axes: list[list[list[str]]] = []
    spelled: dict[str, str] = {}
    for key, value in data.items():
        name = key.replace("_", "-")
        if spelled.setdefault(name, key) != key:
            raise OperatorError(f"--matrix {path}: {spelled[name]} and {key} are the same option: omit one of them")
        if name == "set" and not isinstance(value, dict):
            raise OperatorError(
                f"--matrix {path}: set must be a table: [set], followed by lines such as read_mode = [...]"
            )
        if name == "set":
            for setting, listed in _settings(value):
                words = [_word(path, setting, item) for item in _values(path, setting, listed, canonical=str)]
                axes.append([["--set", f"{setting}={word}"] for word in words])
        elif name in OPTIONS:
            axes.append(
                [[f"--{name}", _word(path, key, item)] for item in _values(path, key, value, canonical=_canonical)]
            )
        else:
            raise OperatorError(
                f"--matrix {path}: {key!r} is not one of {', '.join((*OPTIONS, 'set'))}{nearest(name, OPTIONS)}"
            )
    if not axes:
        raise OperatorError(f"--matrix {path}: it lists no options")
    if (number := math.prod(map(len, axes))) > MAX_RUNS:  # counted first, as building them could exhaust memory
        raise OperatorError(f"--matrix {path}: {number:,} combinations, but a series has at most {MAX_RUNS:,} runs")
    return [list(itertools.chain.from_iterable(choice)) for choice in itertools.product(*axes)]


def _settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a table and their values. In TOML `workload.keys = [20]` is a nested table."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _values(path: str, key: str, value: Any, *, canonical: Callable[[str], Any]) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise OperatorError(f"--matrix {path}: {key} is an empty list")
    if len({canonical(_word(path, key, item)) for item in values}) != len(values):
        raise OperatorError(f"--matrix {path}: {key} has a value twice")
    return values


def _canonical(word: str) -> str | float:
    """The meaning of an option's value: 10, "10" and 10.0 are the same configuration. Settings are compared as text
    instead: "3.1" and "3.10" are two versions."""
    try:
        return float(word)
    except ValueError:
        return word


def _word(path: str, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, str)):
        return str(value)
    raise OperatorError(f"--matrix {path}: {key} must list words or numbers, not {value!r}")


def _label(words: Sequence[str]) -> str:
    """The name of a configuration: its own options, without dashes."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return ", ".join(text if option == "--set" else f"{option[2:]}={text}" for option, text in pairs) or "as given"
