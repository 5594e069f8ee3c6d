"""The command line: `harness COMMAND ...`.

Exit status: 0 valid, 1 invalid, 2 unknown, 254 bad arguments or another problem that the operator can fix, 255 the
harness itself failed. Operator errors are one line on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from harness.cli_options import given_options
from harness.cli_parser import build_parser
from harness.errors import (
    EXIT_HARNESS_FAILED,
    EXIT_OPERATOR,
    NO_ROOM,
    HarnessError,
    OperatorError,
    SystemUnderTestError,
    one_line,
)
from harness.left_behind import end_without_threads
from harness.nursery import restart_with_nursery
from harness.standard_streams import complete_streams, discard_output, say

__all__ = ["main"]

SIMULATING = ("explore", "shrink", "explain")
"""Commands that always simulate."""

GC_THRESHOLDS = (20_000, 10, 10)
"""Thresholds of the cyclic garbage collector; Python's defaults are 700, 10 and 10 (up to 3.13). Repeated collections
during imports took a sixth of the time of a short command."""


def _perform(arguments: argparse.Namespace) -> int:
    """Perform the parsed command; returns the exit status.

    Each command is imported only when needed: several need packages, or time, that others do not.
    """
    match arguments.command:
        case "run" if arguments.matrix is None and arguments.test_count == 1:
            from harness.commands.run import run_command as perform
        case "run":
            from harness.commands.series import series_command as perform
        case "explore":
            from harness.commands.explore import explore_command as perform
        case "audit":
            from harness.commands.audit import audit_command as perform
        case "shrink":
            from harness.commands.shrink import shrink_command as perform
        case "explain":
            from harness.commands.explain import explain_command as perform
        case "replay":
            from harness.commands.replay import replay_command as perform
        case "trace":
            from harness.commands.trace import trace_command as perform
        case "export":
            from harness.commands.export import export_command as perform
        case "analyze":
            from harness.commands.analyze import analyze_command as perform
        case "check":
            return _check(arguments.rest)
        case "report":
            from harness.commands.report import report_command as perform
        case "compare":
            from harness.commands.compare import compare_command as perform
        case "runs":
            from harness.commands.runs import runs_command as perform
        case "serve":
            from harness.commands.serve import serve_command as perform
        case "gallery":
            from harness.commands.gallery import gallery_command as perform
        case "clean":
            from harness.commands.clean import clean_command as perform
        case "cluster":
            from harness.commands.cluster import cluster_command as perform
        case "doctor":
            from harness.commands.doctor import doctor_command as perform
        case "new":
            from harness.commands.new import new_command as perform
        case "list":
            from harness.commands.list import list_command as perform
        case unknown:
            raise HarnessError(f"command {unknown!r} is not implemented")
    return perform(arguments)


def _check(words: Sequence[str]) -> int:
    from checker.cli import main as checker_main
    from harness.atomic_files import write_output
    from harness.elapsed_line import elapsed_line
    from harness.parquet_reader import read_parquet

    return int(checker_main(list(words), parquet=read_parquet, write=write_output, progress=elapsed_line))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    if argv is None:
        complete_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and sys.implementation.name == "cpython":  # not called from another program
        gc.set_threshold(*GC_THRESHOLDS)
    if words[:1] == ["check"]:  # a separate tool with its own options and --help
        return _guarded(lambda: _check(words[1:]))
    status = _guarded(lambda: _parsed(words, is_program=argv is None))
    if argv is None:
        end_without_threads(status)
    return status


def _parsed(words: list[str], *, is_program: bool) -> int:
    """Parse a command line, which may import a plug-in, and perform the command; returns the exit status."""
    parser = build_parser()
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 0
    arguments.words = words
    arguments.given = given_options(words)
    if is_program and (arguments.command in SIMULATING or getattr(arguments, "cluster", None) == "sim"):
        restart_with_nursery([sys.executable, "-m", "harness", *words])
    return _perform(arguments)


def _guarded(action: Callable[[], int]) -> int:
    try:
        status = action()
        sys.stdout.flush()
        return status
    except (OperatorError, SystemUnderTestError, HarnessError) as error:
        say(f"harness: {one_line(error)}")
        return error.exit_status
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):  # a second one
            say("harness: interrupted")
        return EXIT_HARNESS_FAILED
    except BrokenPipeError:
        discard_output()
        return EXIT_HARNESS_FAILED
    except MemoryError:
        say("harness: out of memory: give it more, or raise a limit such as `ulimit -v`")
        return EXIT_OPERATOR
    except SystemExit:
        raise
    except BaseException as error:  # Python would exit with 1, the status of a verdict, for any other BaseException
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            discard_output()
            what = one_line(error.filename or "the store or the output")
            say(f"harness: cannot write {what}: {error.strerror}; free some space")
            return EXIT_OPERATOR
        if os.environ.get("SPLITBRAIN_TRACEBACK"):
            traceback.print_exc()
        what = f"{type(error).__name__}: {one_line(error)}"
        say(f"harness: internal error: {what} (set SPLITBRAIN_TRACEBACK=1 for a traceback)")
        return EXIT_HARNESS_FAILED
