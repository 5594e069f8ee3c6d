"""The parser of the whole command line; the commands themselves are in `harness/commands`.

Separate from `harness.cli`, which calls the commands, so that a command that parses further command lines (a series of
runs) need not import its own caller.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from checker.number_options import NumberOptions
from harness import __version__
from harness.cli_cluster import add_cluster_command, add_cluster_options
from harness.cli_gallery import add_gallery_command
from harness.cli_options import (
    add_exploration_commands,
    add_export_command,
    add_plugin_argument,
    add_system_settings,
    add_test_options,
    add_trace_command,
    add_trace_option,
    given_options,
    positive_count,
)
from harness.cli_spark import add_spark_commands
from harness.cli_store import add_store_commands
from harness.errors import EXIT_OPERATOR, nearest, one_line
from harness.registry import DEFAULT_SYSTEM, is_file
from harness.standard_streams import say

__all__ = ["build_parser"]

MOVED = {"--replication": "replication", "--flush-mode": "flush_mode"}
"""Options of earlier versions -> the equivalent setting of the system under test."""


class _HelpFormatter(argparse.HelpFormatter):
    """Breaks lines only between words, so that names such as `multi-register` and paths can be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


class _Parser(NumberOptions):
    """An argument parser that reports errors in one line, with a hint for mistyped words, and exits with status 254.

    Options must not be abbreviated: `replay` depends on which ones were given, and a new option must not change the
    meaning of an old script.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, "formatter_class": _HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {one_line(message)}; see {self.prog} --help")
        raise SystemExit(EXIT_OPERATOR)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Like the base class, but unknown words are reported at once, by the parser to which they belong."""
        found, rest = super().parse_known_args(args, namespace)
        stray = vars(found).get("file")
        if stray is not None and not is_file(stray):  # it may be the value of an unknown option
            rest.append(stray)
        elif stray is not None and "system" in given_options(list(args or ())):
            self.error(f"{stray} and --system both name the system: leave one of them out")
        if rest:
            self._refuse(rest)
        return found, rest

    def _refuse(self, rest: Sequence[str]) -> NoReturn:
        option, separator, value = rest[0].partition("=")
        if not option.startswith("-") and is_file(option) and "--system" in self._option_string_actions:
            self.error(f"unexpected argument {option!r} (to use your own system: --system {option})")
        if not option.startswith("-"):
            takes_system = "--system" in self._option_string_actions
            hint = " (your own system must be in a file NAME.py)" if takes_system else ""
            self.error(f"unexpected argument {option!r}{hint}")
        if option in MOVED and "--set" in self._option_string_actions:
            value = value if separator else next(iter(rest[1:]), "HOW")
            self.error(f"{option} is a setting of the system: --set {MOVED[option]}={value}")
        self.error(f"unknown option {option}{nearest(option, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = (action.metavar if isinstance(action.metavar, str) else action.dest).lower()
            known = [str(choice) for choice in action.choices]
            hint = f"{nearest(str(value), known)}; known: {', '.join(known)}"
            raise argparse.ArgumentError(None, f"unknown {what} {value!r}{hint}")


def _add_run_command(commands: Any) -> None:
    run = commands.add_parser(
        "run", help="run a test: start a cluster, inject faults, check the history, write a report"
    )
    add_plugin_argument(run)
    add_test_options(run)
    series = run.add_argument_group("series of runs, and output")
    series.add_argument(
        "--test-count", type=positive_count, default=1, metavar="N",
        help="number of runs, each with its own seed (default: 1)",
    )  # fmt: skip
    series.add_argument(
        "--matrix", metavar="FILE", help="TOML file with lists of option values; every combination is run"
    )
    series.add_argument(
        "--json", action="store_true", help="print results.json on standard output, and the verdict on standard error"
    )
    series.add_argument(
        "--junit", metavar="FILE", help="write JUnit XML with one case per run: invalid is a failure, unknown an error"
    )
    series.add_argument(
        "--step-summary", metavar="FILE", help="append a Markdown table to FILE, such as $GITHUB_STEP_SUMMARY"
    )
    add_trace_option(series)


def _add_doctor_command(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor", help="show which faults can be injected on each kind of cluster on this machine"
    )
    add_plugin_argument(doctor)
    doctor.add_argument("--prove", action="store_true", help="inject, prove and heal each fault once")
    doctor.add_argument("--cluster", default="", metavar="NAME[,...]", help="kinds of clusters to check (default: all)")
    doctor.add_argument(
        "--nemesis", default="", metavar="NAME[=FORM[@TARGET]][,...]",
        help="faults to check (default: all forms of all nemeses)",
    )  # fmt: skip
    doctor.add_argument("--system", default=DEFAULT_SYSTEM, help=f"system on the hosts (default: {DEFAULT_SYSTEM})")
    add_system_settings(doctor)
    doctor.add_argument(
        "--nodes", type=positive_count, default=5, metavar="N",
        help="number of replicas (default: 5; some forms need that many)",
    )  # fmt: skip
    doctor.add_argument("--json", action="store_true", help="print the table as JSON on standard output")
    add_cluster_options(doctor)


def _add_clean_command(commands: Any) -> None:
    clean = commands.add_parser("clean", help="remove what killed runs left behind, here and on remote hosts")
    clean.add_argument(
        "--run", dest="run_ids", action="append", default=None, metavar="RUN_ID", help="clean only this run; repeatable"
    )
    clean.add_argument(
        "--forget-unreachable", dest="forgets_unreachable", action="store_true",
        help="with --run: consider machines and Docker engines of this run that do not answer gone; what may be left "
        "on them is listed, and will not be removed",
    )  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="harness",
        description="Break a replicated system on purpose and show, with proof, what it did wrong.",
        epilog="exit status: 0 valid, 1 invalid, 2 unknown, 254 bad arguments, 255 the harness failed",
    )
    parser.add_argument("--version", action="version", version=f"splitbrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    _add_run_command(commands)
    add_exploration_commands(commands)
    add_trace_command(commands)
    add_export_command(commands)

    analyze = commands.add_parser("analyze", help="check a stored run again and rewrite its report")
    analyze.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    analyze.add_argument("--store", default="store", metavar="DIR", help="store that RUN is in (default: ./store)")
    analyze.add_argument(
        "--checker-timeout", type=float, default=None, metavar="SECONDS",
        help="time limit of each check (default: the run's)",
    )  # fmt: skip
    analyze.add_argument(
        "--checker-memory", type=int, default=None, metavar="MB", help="memory limit of each check (default: the run's)"
    )
    analyze.add_argument("--json", action="store_true", help="print results.json on standard output")

    check = commands.add_parser(
        "check", add_help=False, help="check recorded histories, including those of other tools"
    )
    check.add_argument("rest", nargs=argparse.REMAINDER)
    add_spark_commands(commands)
    add_store_commands(commands)
    add_gallery_command(commands)

    _add_clean_command(commands)
    add_cluster_command(commands)

    _add_doctor_command(commands)
    listing = commands.add_parser("list", help="list workloads, nemeses, systems and clusters")
    listing.add_argument(
        "what", nargs="?", metavar="WHAT",
        help="list only one kind (workloads, nemeses, systems or clusters), one NAME, or the system in FILE.py",
    )  # fmt: skip
    new = commands.add_parser("new", help="create NAME.py, the start of your own system")
    new.add_argument("what", choices=["system"], metavar="WHAT", help="what to create: system")
    new.add_argument("name", metavar="NAME", help="name of the system; its file is NAME.py")
    return parser
