"""``harness check FILE... --model M``: a checker of its own, for histories that never saw this harness."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from checker.codecs import FORMATS, is_parquet, read
from checker.codecs.jsonl import FormatError
from checker.delivery import check_consumer_progress, check_delay, check_transaction_visibility
from checker.drawing import html
from checker.history import History, HistoryError
from checker.linearizability.budget import resident_bytes
from checker.linearizability.check import check
from checker.log import check_log
from checker.models import MODELS, Model, ModelError, parse_model
from checker.queue import check_total_queue
from checker.sequential import check_sequential
from checker.sessions import check_sessions
from checker.sets import check_set, check_set_full
from checker.simple import check_bank, check_counter, check_exclusion, check_long_fork, check_unique_ids
from checker.transactions import check_transactions
from checker.verdict import Result, Verdict, worst
from checker.words import short
from checker.workers import map_in_processes

__all__ = ["PROPERTIES", "main"]

#: Exit status for arguments or files that make no sense.
BAD_ARGUMENTS = 254
#: Least memory, in MiB, that a check is given however much the history itself took.
LEAST_MEMORY_MB = 16

Check = Callable[[History, float | None, float | None], Result]
#: Reads the history in a file; raises FormatError naming the file.
Reader = Callable[[str], History]

#: Checkers beside linearizability, by the name ``--model`` takes.
PROPERTIES: dict[str, Check] = {
    "list-append": lambda h, t, m: check_transactions(h, "list-append", timeout_s=t, memory_mb=m),
    "rw-register": lambda h, t, m: check_transactions(h, "rw-register", timeout_s=t, memory_mb=m),
    "log-losses": lambda h, t, m: check_log(h, timeout_s=t, memory_mb=m),
    "total-queue": lambda h, t, m: check_total_queue(h),
    "simple-set": lambda h, t, m: check_set(h),
    "set-full": lambda h, t, m: check_set_full(h),
    "unique-ids": lambda h, t, m: check_unique_ids(h),
    "counter-bounds": lambda h, t, m: check_counter(h),
    "exclusion": lambda h, t, m: check_exclusion(h),
    "bank": lambda h, t, m: check_bank(h),
    "long-fork": lambda h, t, m: check_long_fork(h),
    "delay": lambda h, t, m: check_delay(h),
    "transaction-visibility": lambda h, t, m: check_transaction_visibility(h),
    "consumer-progress": lambda h, t, m: check_consumer_progress(h),
    "sessions": lambda h, t, m: check_sessions(h),
}


@dataclass(frozen=True, kw_only=True)
class _Job:
    path: str
    model: str
    format: str
    timeout_s: float | None
    memory_mb: float | None
    jobs: int = 1
    parquet: Reader | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _BadArguments(f"{self.prog}: {message}")


class _BadArguments(Exception):
    pass


def _parser() -> _Parser:
    parser = _Parser(prog="harness check", description="Check recorded histories.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="history files")
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="NAME or NAME:FIELD=JSON,... (cas-register:initial=0); sequential:NAME for sequential consistency; known: "
        + ", ".join([*MODELS, *PROPERTIES]),
    )
    parser.add_argument("--format", choices=FORMATS, default="auto", metavar="F", help="one of " + ", ".join(FORMATS))
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to use")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds per file; past them the verdict is unknown")
    parser.add_argument("--memory", type=float, metavar="MB", help="MiB per process; past them the verdict is unknown")
    parser.add_argument("--json", action="store_true", help="print one JSON object per file and nothing else")
    parser.add_argument("--html", metavar="PATH", help="write a page that shows the first invalid file's witness")
    return parser


def main(argv: Sequence[str] | None = None, *, parquet: Reader | None = None) -> int:
    """Run the command; returns the exit status: 0 valid, 1 invalid, 2 unknown, 254 for bad arguments or files.

    ``parquet`` reads Parquet files, which takes more than the standard library; without it they are refused.
    """
    try:
        options = _parser().parse_args(argv)
        for name in ("jobs", "timeout", "memory"):
            value = getattr(options, name)
            if value is not None and value <= 0:
                raise _BadArguments(f"harness check: --{name} must be positive, not {value}")
        _named_check(options.model)
        shared = len(options.files) == 1
        jobs = [
            _Job(
                path=path,
                model=options.model,
                format=options.format,
                timeout_s=options.timeout,
                memory_mb=options.memory,
                jobs=options.jobs if shared else 1,
                parquet=parquet,
            )
            for path in options.files
        ]
        results = _run(jobs, options.jobs)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except (_BadArguments, ModelError, HistoryError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return BAD_ARGUMENTS
    for job, result in zip(jobs, results, strict=True):
        try:
            text = json.dumps({"file": job.path, **result.to_json()}) if options.json else _in_words(job, result)
        except RecursionError:
            print(f"{job.path}: a value is nested too deeply", file=sys.stderr)
            return BAD_ARGUMENTS
        print(text)
    if options.html:
        bad = next((r for r in results if r.verdict is Verdict.INVALID), results[0])
        try:
            Path(options.html).write_text(html(bad), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            print(f"{options.html}: {error.strerror}", file=sys.stderr)
            return BAD_ARGUMENTS
    return worst(result.verdict for result in results).exit_status


def _named_check(name: str) -> Model | Check:
    """What ``--model`` names.  Raises :class:`ModelError`."""
    if name in PROPERTIES:
        return PROPERTIES[name]
    return parse_model(name.removeprefix("sequential:"))


def _run(jobs: list[_Job], processes: int) -> list[Result]:
    if processes > 1 and len(jobs) > 1:
        results = map_in_processes(_check_file, jobs, processes)
        return [result if result is not None else _KILLED for result in results]
    return [_check_file(job) for job in jobs]


_KILLED = Result(verdict=Verdict.UNKNOWN, stats={}, reason="undecided: the process that checked it was killed")


def _check_file(job: _Job) -> Result:
    """One file's result.  Raises :class:`HistoryError` naming the file for all that is wrong with it."""
    try:
        return _read_and_check(job)
    except FormatError:
        raise
    except (ModelError, HistoryError) as error:
        raise HistoryError(f"{job.path}: {error}") from None
    except OSError as error:
        raise HistoryError(f"{job.path}: {error.strerror or error}") from None
    except RecursionError:
        raise HistoryError(f"{job.path}: a value is nested too deeply") from None
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        if os.environ.get("SPLITBRAIN_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {short(str(error), 200)}"
        raise HistoryError(f"{job.path}: values that {job.model} cannot be used with ({what})") from None


def _read_and_check(job: _Job) -> Result:
    before = resident_bytes()
    if job.parquet is not None and job.format == "auto" and is_parquet(job.path):
        history = job.parquet(job.path)
    else:
        history = read(job.path, job.format)
    if not len(history):
        events = f": its {history.skipped_events} events are of others" if history.skipped_events else ""
        raise FormatError(job.path, None, f"no operation of a client (whose process is a number){events}")
    memory_mb = job.memory_mb
    if memory_mb is not None:
        memory_mb = max(LEAST_MEMORY_MB, memory_mb - (resident_bytes() - before) / (1 << 20))
    chosen = _named_check(job.model)
    if not isinstance(chosen, Model):
        return chosen(history, job.timeout_s, memory_mb)
    if job.model.startswith("sequential:"):
        return check_sequential(history, chosen, timeout_s=job.timeout_s, memory_mb=memory_mb)
    return check(history, chosen, timeout_s=job.timeout_s, memory_mb=memory_mb, jobs=job.jobs)


def _in_words(job: _Job, result: Result) -> str:
    stats: dict[str, Any] = dict(result.stats)
    engines = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in stats.get("engines", {}).items())
    lines = [f"{job.path}: {result.verdict}: {result.reason}", f"  decided by {engines or 'none'}"]
    for engine, reasons in stats.get("not_applicable", {}).items():
        lines.append(f"  {engine} did not apply: {'; '.join(reasons)}")
    lines += [f"  note: {problem}" for problem in stats.get("problems", ())]
    return "\n".join(lines)
