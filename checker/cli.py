"""``harness check FILE... --model M``: a standalone checker, also for histories recorded without this harness."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import math
import os
import sys
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from checker.codecs import FORMATS, FormatError, MemoryLimitError, is_parquet, read
from checker.delivery import check_consumer_progress, check_delay, check_transaction_visibility
from checker.drawing import html
from checker.history import History, HistoryError
from checker.limits import within_limits
from checker.linearizability.budget import Budget
from checker.linearizability.check import check
from checker.log import check_log
from checker.models import MODELS, Counter, FIFOQueue, GrowOnlySet, Log, Model, ModelError, Mutex, parse_model
from checker.models.registry import parse_fields
from checker.nearest import nearest
from checker.number_options import NumberOptions
from checker.oddities import oddities
from checker.queue import check_total_queue
from checker.sequential import check_sequential
from checker.sessions import check_sessions
from checker.sets import check_set, check_set_full
from checker.simple import check_bank, check_counter, check_exclusion, check_long_fork, check_unique_ids
from checker.trace.command import OPTION
from checker.trace.command import main as check_traces
from checker.transactions import ISOLATION_LEVELS, check_transactions
from checker.verdict import Result, Verdict
from checker.words import named_row, short
from checker.workers import map_in_processes
from checker.write_skew import check_write_skew

__all__ = ["PROPERTIES", "UNLIMITED", "main", "named_property", "property_options"]

#: Exit status for invalid arguments or files.
BAD_ARGUMENTS = 254
#: Minimum memory of a check, in MiB, however much the history itself takes.
LEAST_MEMORY_MB = 16
#: Recursion limit for printing and sending results: a witness's values are as deep as any that could be read, and
#: printing them takes two frames per level.  Below what PyPy's stack holds.
_DEPTH_OF_RESULTS = 5_000
_USUAL_DEPTH = sys.getrecursionlimit()

Check = Callable[[History, float | None, float | None], Result]
#: Reads the history in a file; raises FormatError, which names the file.
Reader = Callable[..., History]

#: Checkers, by their ``--model`` name, that need little more time than reading, and so take no limits.  Their callers
#: here enforce the limits of the command.
UNLIMITED: dict[str, Callable[..., Result]] = {
    "total-queue": check_total_queue,
    "simple-set": check_set,
    "set-full": check_set_full,
    "unique-ids": check_unique_ids,
    "counter-bounds": check_counter,
    "exclusion": check_exclusion,
    "bank": check_bank,
    "long-fork": check_long_fork,
    "write-skew": check_write_skew,
    "delay": check_delay,
    "transaction-visibility": check_transaction_visibility,
    "consumer-progress": check_consumer_progress,
    "sessions": check_sessions,
}


def _ended_at_limits(checker: Callable[..., Result]) -> Check:
    """A check that ends at its limits although its checker takes none."""

    return lambda history, timeout_s, memory_mb: within_limits(lambda: checker(history), timeout_s, memory_mb)


#: Checkers that take limits.
_LIMITED: dict[str, Callable[..., Result]] = {
    "list-append": functools.partial(check_transactions, workload="list-append"),
    "rw-register": functools.partial(check_transactions, workload="rw-register"),
    "log-losses": check_log,
}


def _given_limits(checker: Callable[..., Result]) -> Check:
    return lambda history, timeout_s, memory_mb: checker(history, timeout_s=timeout_s, memory_mb=memory_mb)


#: All checkers other than linearizability.
PROPERTIES: dict[str, Check] = {
    **{name: _given_limits(checker) for name, checker in _LIMITED.items()},
    **{name: _ended_at_limits(checker) for name, checker in UNLIMITED.items()},
}

#: Parameters of checkers that are not options: limits, and what cannot be given as JSON.
_NO_OPTIONS = frozenset({"timeout_s", "memory_mb", "workload", "version"})


def property_options(name: str) -> dict[str, Any]:
    """The options of a checker other than linearizability, with their defaults."""
    checker = _LIMITED[name] if name in _LIMITED else UNLIMITED[name]
    return {
        each.name: each.default
        for each in inspect.signature(checker).parameters.values()
        if each.kind is each.KEYWORD_ONLY and each.name not in _NO_OPTIONS
    }


def named_property(text: str) -> Check | None:
    """The checker, other than linearizability, that ``NAME`` or ``NAME:FIELD=VALUE,...`` names; None if it names none.

    Raises :class:`ModelError`, which names the fix, for options that the checker does not take.
    """
    name, _, rest = text.partition(":")
    if name not in PROPERTIES:
        return None
    options = property_options(name)
    given = parse_fields(f"checker {name}", list(options), rest)
    for field, value in given.items():
        if (wanted := _not_an_option(field, value, options[field])) is not None:
            raise ModelError(f"checker {name}: {field} must be {wanted}, not {value!r}")
    if not given:
        return PROPERTIES[name]
    if name in _LIMITED:
        return _given_limits(functools.partial(_LIMITED[name], **given))
    return _ended_at_limits(functools.partial(UNLIMITED[name], **given))


def _not_an_option(field: str, value: Any, default: Any) -> str | None:
    """What an option's value must be, if this one is not; None if it is valid."""
    if field == "level":
        return None if value in ISOLATION_LEVELS else f"one of {', '.join(ISOLATION_LEVELS)}"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, tuple):
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return None if is_list else 'a list of names such as ["read"]'
    return None if isinstance(value, int | float) and not isinstance(value, bool) else "a number"


#: The operations that each of these checkers judges.  For the others (transactions, ids) every operation matters,
#: whatever its name; sessions has options that name its operations.
_FUNCTIONS: dict[str, frozenset[str]] = {
    "log-losses": Log.functions,
    "total-queue": FIFOQueue.functions | {"drain"},
    "simple-set": GrowOnlySet.functions,
    "set-full": GrowOnlySet.functions,
    "counter-bounds": Counter.functions,
    "exclusion": Mutex.functions,
    "bank": frozenset({"read", "transfer"}),
    "write-skew": frozenset({"insert", "read"}),
    "delay": frozenset({"receive", "send"}),
    "transaction-visibility": frozenset({"commit", "prepare", "receive", "rollback"}),
    "consumer-progress": frozenset({"commit", "fetch"}),
}


@dataclass(frozen=True, kw_only=True)
class _Job:
    path: str
    model: str
    format: str
    timeout_s: float | None
    memory_mb: float | None
    lenient: bool = False
    first: bool = False
    jobs: int = 1
    parquet: Reader | None = None


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The outcome for one file: a result, or why there is none, or why it cannot be printed in full."""

    result: Result | None = None
    error: str = ""

    @property
    def exit_status(self) -> int:
        return BAD_ARGUMENTS if self.result is None else self.result.verdict.exit_status


#: With several files, the command's status is the first of these that occurs: a violation is certain whatever the
#: outcome of other files, and a file that could not be read must not pass for one that took too long.
_WORST_FIRST = (Verdict.INVALID.exit_status, BAD_ARGUMENTS, Verdict.UNKNOWN.exit_status, Verdict.VALID.exit_status)


class _Parser(NumberOptions):
    def error(self, message: str) -> NoReturn:
        raise _BadArguments(f"{self.prog}: {message}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class, but reports a mistyped option first, not the argument that is missing because of it."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for word in sys.argv[1:] if args is None else args:
            if word == "--":
                break
            option = word.partition("=")[0]
            if option.startswith("--") and not any(each.startswith(option) for each in known):
                self.error(f"unknown option {option}{nearest(option, known)}")
        return super().parse_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            self.error(f"unknown {action.dest} {value!r}{nearest(str(value), known)}; known: {', '.join(known)}")


class _BadArguments(Exception):
    pass


def _parser() -> _Parser:
    parser = _Parser(
        prog="harness check",
        description="Check recorded histories: valid, invalid or unknown for each file.",
        epilog="What replicas logged is checked with --trace-model M TRACE...; see --trace-model=M --help.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="history file to check")
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="what to check for: NAME or NAME:FIELD=JSON,... (such as cas-register:initial=0 or "
        "list-append:level=serializable); sequential:NAME checks a model for sequential consistency; known names: "
        + ", ".join([*MODELS, *PROPERTIES]),
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        metavar="F",
        help="format of the files: " + ", ".join(FORMATS) + " (default: auto)",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of processes to use (default: 1)")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="time limit per file, in seconds; if it is exceeded, the verdict is unknown (default: none)",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="MB",
        help="memory limit per process, in MiB; if it is exceeded, the verdict is unknown (default: half of the "
        "free memory)",
    )
    parser.add_argument(
        "--lenient",
        action="store_true",
        help="leave out and count events that cannot be read or do not fit, instead of rejecting the file",
    )
    parser.add_argument("--first", action="store_true", help="stop at the first invalid key")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per file, and nothing else, to stdout"
    )
    parser.add_argument(
        "--html", metavar="PATH", help="write an HTML page that shows the witness of the first invalid file"
    )
    return parser


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _silently(_: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def main(
    argv: Sequence[str] | None = None,
    *,
    parquet: Reader | None = None,
    write: Callable[[Path, str], None] = _write,
    progress: Callable[[str], contextlib.AbstractContextManager[None]] = _silently,
) -> int:
    """Run the command; returns the exit status: 0 valid, 1 invalid, 2 unknown, 254 for bad arguments or files.

    For several files: 1 if any is invalid, else 254 if any cannot be read, else 2 if any is undecided, else 0.
    ``parquet`` reads Parquet files, which takes more than the standard library; without it they are refused.
    ``write`` writes the page; ``progress`` shows a step's description while the step runs.
    """
    words = sys.argv[1:] if argv is None else argv
    if any(word.partition("=")[0] == OPTION for word in words):
        return check_traces(words, say=_say, complain=_complain)
    try:
        options = _parser().parse_args(argv)
        for name in ("jobs", "timeout", "memory"):
            value = getattr(options, name)
            if value is not None and not 0 < value < math.inf:
                raise _BadArguments(f"harness check: --{name} must be positive and finite, not {value}")
        if options.html == "":
            raise _BadArguments("harness check: --html: the path is empty")
        _named_check(options.model)
        shared = len(options.files) == 1
        jobs = [
            _Job(
                path=path,
                model=options.model,
                format=options.format,
                timeout_s=options.timeout,
                memory_mb=options.memory,
                lenient=options.lenient,
                first=options.first,
                jobs=options.jobs if shared else 1,
                parquet=parquet,
            )
            for path in options.files
        ]
        with progress(f"checking {jobs[0].path}" if shared else f"checking {len(jobs)} files"):
            outcomes = _run(jobs, options.jobs)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except (_BadArguments, ModelError) as error:
        _complain(str(error))
        return BAD_ARGUMENTS
    with _deep_results():
        outcomes = [_print(job, outcome, options.json) for job, outcome in zip(jobs, outcomes, strict=True)]
        statuses = {outcome.exit_status for outcome in outcomes}
        results = [
            (job.path, outcome.result)
            for job, outcome in zip(jobs, outcomes, strict=True)
            if outcome.result is not None
        ]
        if options.html and results and not _write_page(Path(options.html), results, write):
            statuses.add(BAD_ARGUMENTS)
    return next(status for status in _WORST_FIRST if status in statuses)


@contextlib.contextmanager
def _deep_results() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEPTH_OF_RESULTS))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _write_page(path: Path, results: Sequence[tuple[str, Result]], write: Callable[[Path, str], None]) -> bool:
    """Write the page of the first invalid result, else of the first one; on failure, print why in one line."""
    file, shown = next((each for each in results if each[1].verdict is Verdict.INVALID), results[0])
    try:
        write(path, html(shown, title=_harmless(file)))
    except OSError as error:
        _complain(f"{path}: {error.strerror}")
        return False
    except RecursionError:
        _complain(f"{path}: a value is nested too deeply for a page")
        return False
    return True


def _print(job: _Job, outcome: _Outcome, as_json: bool) -> _Outcome:
    """Print the outcome for a file, errors as one line on stderr.  Returns what was printed."""
    result = outcome.result
    if result is not None:
        try:
            fields = result.to_json() if as_json else {}
            text = json.dumps({"file": job.path, "exit_status": outcome.exit_status, **fields})
            _say(text if as_json else _in_words(job, result))
            return outcome
        except RecursionError:
            # A violation is certain even if its witness cannot be printed.
            result = result if result.verdict is Verdict.INVALID else None
            outcome = _Outcome(result=result, error=f"{job.path}: a value is nested too deeply")
    error = " ".join(outcome.error.split())
    _complain(error)
    if as_json:
        fields = {} if result is None else {"valid": result.valid, "reason": result.reason}
        print(json.dumps({"file": job.path, "exit_status": outcome.exit_status, **fields, "error": error}))
    return outcome


def _say(text: str) -> None:
    """Print a text, with escapes for characters that the encoding of stdout lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print("\n".join(map(_harmless, text.split("\n"))).encode(encoding, "backslashreplace").decode(encoding))


def _complain(text: str) -> None:
    """Print an error on stderr, in one line."""
    print(_harmless(" ".join(text.split())), file=sys.stderr)


def _harmless(line: str) -> str:
    """A line with its control characters escaped: names in a history may contain terminal sequences."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def _named_check(name: str) -> Model | Check:
    """What ``--model`` names.  Raises :class:`ModelError`."""
    found = named_property(name)
    if found is not None:
        return found
    model = name.removeprefix("sequential:")
    try:
        return parse_model(model)
    except ModelError:
        word = model.partition(":")[0]
        if word in MODELS:
            raise
        known = [*MODELS, *PROPERTIES] if model == name else [*MODELS]  # parse_model knows only the models
        problem = f"{name}: {word} is not a model" if word in PROPERTIES else f"no model {word!r}"
        raise ModelError(f"{problem}{nearest(word, known) or '; known: ' + ', '.join(known)}") from None


def _run(jobs: list[_Job], processes: int) -> list[_Outcome]:
    if processes > 1 and len(jobs) > 1:
        outcomes = map_in_processes(_check_in_a_worker, jobs, processes)
        return [outcome if outcome is not None else _KILLED for outcome in outcomes]
    return [_check_file(job) for job in jobs]


_OUT_OF_MEMORY = _Outcome(
    result=Result(
        verdict=Verdict.UNKNOWN,
        reason="undecided: this process could not allocate more memory (ulimit -v limits it, or the machine has none "
        "left)",
    )
)
_KILLED = _Outcome(
    result=Result(verdict=Verdict.UNKNOWN, stats={}, reason="undecided: the process that checked it was killed")
)


def _check_file(job: _Job) -> _Outcome:
    """The outcome for one file.  No error in it affects the verdicts of other files."""
    try:
        return _Outcome(result=_read_and_check(job))
    except FormatError as error:
        mend = "; use --lenient to check the rest" if error.can_be_left_out and not job.lenient else ""
        if error.can_be_left_out and error.line is not None and job.format != "auto":
            mend += f"; omit --format if the file is not {job.format}"
        return _Outcome(error=f"{error}{mend}")
    except (ModelError, HistoryError) as error:
        return _Outcome(error=f"{job.path}: {error}")
    except OSError as error:
        return _Outcome(error=f"{job.path or repr('')}: {error.strerror or error}{_instead_of(job.path)}")
    except RecursionError:
        return _Outcome(error=f"{job.path}: a value is nested too deeply")
    except MemoryError:
        return _OUT_OF_MEMORY
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        if os.environ.get("SPLITBRAIN_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {short(str(error), 200)}"
        return _Outcome(error=f"{job.path}: {job.model} cannot be used with these values ({what})")


def _instead_of(path: str) -> str:
    """What to give instead of a path that is not a file: the history in a run's directory, or standard input."""
    if path == "-":
        return "; give /dev/stdin to read standard input"
    found = (os.path.join(path, name) for name in ("history.jsonl", "history.edn") if path)
    return next((f"; give {file}" for file in found if os.path.isfile(file)), "")


def _check_in_a_worker(job: _Job) -> _Outcome:
    """As `_check_file`; afterwards the recursion limit lets the worker send an outcome with deeply nested values."""
    sys.setrecursionlimit(_USUAL_DEPTH)
    outcome = _check_file(job)
    sys.setrecursionlimit(max(_USUAL_DEPTH, _DEPTH_OF_RESULTS))
    return outcome


def _read_and_check(job: _Job) -> Result:
    budget = Budget(memory_mb=job.memory_mb)
    try:
        if job.parquet is not None and job.format == "auto" and is_parquet(job.path):
            history = job.parquet(job.path, lenient=job.lenient, budget=budget)
        else:
            history = read(job.path, job.format, lenient=job.lenient, budget=budget)
    except MemoryLimitError as error:
        mend = "" if job.memory_mb else "; without --memory, the limit is half of the free memory"
        return Result(verdict=Verdict.UNKNOWN, reason=f"undecided: {error}{mend}")
    if not len(history):
        events = f": all of its {history.nemesis_events} events are from the nemesis" if history.nemesis_events else ""
        raise FormatError(job.path, None, f"no client operations{events}")
    _require_functions(job, history)
    memory_mb = job.memory_mb
    if memory_mb is not None:
        memory_mb = max(LEAST_MEMORY_MB, memory_mb - budget.used_bytes() / (1 << 20))
    return _with_what_was_read(_check_history(job, history, memory_mb), history)


def _check_history(job: _Job, history: History, memory_mb: float | None) -> Result:
    chosen = _named_check(job.model)
    if not isinstance(chosen, Model):
        return chosen(history, job.timeout_s, memory_mb)
    if job.model.startswith("sequential:"):
        return check_sequential(history, chosen, timeout_s=job.timeout_s, memory_mb=memory_mb)
    return check(history, chosen, timeout_s=job.timeout_s, memory_mb=memory_mb, jobs=job.jobs, first=job.first)


def _require_functions(job: _Job, history: History) -> None:
    """Refuse, or leave out and count, operations that the checker would ignore; models check their own.

    A history without any operation that the checker judges is refused even if lenient: a valid verdict would mean
    nothing.
    """
    name = job.model.partition(":")[0]
    if (functions := _FUNCTIONS.get(name)) is None:
        return
    counts = Counts(history.f)
    unknown = {f: count for f, count in counts.items() if f not in functions}
    if not unknown:
        return
    knows = f"checker {name} accepts {', '.join(sorted(functions))}; the history has "
    first = f": first {named_row(history, next(row for row, f in enumerate(history.f) if f in unknown))}"
    if len(unknown) == len(counts):
        raise ModelError(knows + ", ".join(map(short, unknown)) + first)
    what = knows + ", ".join(f"{short(f)} ({count})" for f, count in unknown.items()) + first
    if not job.lenient:
        raise FormatError(job.path, None, what, can_be_left_out=True)
    history.skipped_events += 2 * sum(unknown.values())
    history.note(what)


def _with_what_was_read(result: Result, history: History) -> Result:
    """The result, with facts about the file that the reader of the verdict should know."""
    stats = dict(result.stats)
    stats.setdefault("operations", len(history))
    stats["nemesis_events"] = history.nemesis_events
    stats["events_left_out"] = history.skipped_events
    stats["events_missing"] = history.missing_events
    stats["problems"] = [*history.problems, *oddities(history)]
    return replace(result, stats=stats)


def _in_words(job: _Job, result: Result) -> str:
    stats: dict[str, Any] = dict(result.stats)
    engines = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in stats.get("engines", {}).items())
    lines = [f"{job.path}: {result.verdict}: {result.reason}", f"  decided by {engines or 'none'}"]
    for engine, reasons in stats.get("not_applicable", {}).items():
        lines.append(f"  {engine} did not apply: {'; '.join(reasons)}")
    if stats.get("events_left_out") or stats.get("events_missing"):
        read, left_out = f"{stats['operations']} operations were read", stats["events_left_out"]
        events = "1 event" if left_out == 1 else f"{left_out} events"
        lines.append(f"  {read}, {events} left out, {stats['events_missing']} missing")
    lines += [f"  note: {problem}" for problem in stats.get("problems", ())]
    if stats.get("nemesis_events"):
        lines.append(f"  note: nemesis events: {stats['nemesis_events']}")
    return "\n".join(lines)
