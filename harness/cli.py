"""The command line: `harness COMMAND ...`.

Exit status: 0 valid, 1 invalid, 2 unknown, 254 bad arguments or something else the operator can mend, 255 the
harness itself failed. Operator errors are one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from harness import __version__
from harness.cli_cluster import add_cluster_command, add_cluster_options
from harness.commands.spark_options import add_spark_commands
from harness.errors import HarnessError, OperatorError, SystemUnderTestError

__all__ = ["EXIT_HARNESS_FAILED", "EXIT_OPERATOR", "main"]

EXIT_OPERATOR = 254
EXIT_HARNESS_FAILED = 255
MAX_SEED = 2**63 - 1


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit status 254."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(EXIT_OPERATOR)


def _positive_seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if not 0 <= seed <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be 0 to {MAX_SEED}")
    return seed


def _positive_count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="harness",
        description="Break a replicated system on purpose and say, with proof, what it did wrong.",
        epilog="exit status: 0 valid, 1 invalid, 2 unknown, 254 bad arguments, 255 the harness failed",
    )
    parser.add_argument("--version", action="version", version=f"splitbrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    run = commands.add_parser("run", help="one test: cluster, faults, verdict, report")
    run.add_argument("--cluster", default="auto", help="how hosts are made: auto (default), netns, local, ...")
    run.add_argument("--system", default="broker", help="the system under test (default: broker)")
    run.add_argument("--nodes", type=int, default=5, metavar="N", help="replicas (default: 5)")
    run.add_argument("--workload", default="register", help="what clients do: register (default), log")
    run.add_argument(
        "--nemesis", default="none", metavar="NAME[=VARIANT][,...]",
        help="faults: all, or names as kill, kill=sigkill, kill@leader, kill=sigkill@n1+n2; none (default)",
    )  # fmt: skip
    run.add_argument(
        "--nemesis-interval", type=float, default=5.0, metavar="SECONDS",
        help="how long a fault lasts, and the calm after it (default: 5)",
    )  # fmt: skip
    run.add_argument(
        "--nemesis-schedule", metavar="FILE",
        help="timed faults from a JSON list, such as the schedule.json that every run leaves",
    )  # fmt: skip
    run.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="of load (default: 60)")
    run.add_argument("--concurrency", type=int, default=10, metavar="N", help="logical clients (default: 10)")
    run.add_argument(
        "--rate", type=float, default=200.0, metavar="OPS", help="operations per second, 0 for no limit (default: 200)"
    )
    run.add_argument("--seed", type=_positive_seed, metavar="N", help="decides everything random (default: random)")
    run.add_argument("--store", default="store", metavar="DIR", help="where runs are kept (default: ./store)")
    run.add_argument(
        "--set", dest="settings", action="append", type=_setting, default=[], metavar="KEY=VALUE",
        help="an option of the system under test, such as read_mode=unsafe; repeatable",
    )  # fmt: skip
    run.add_argument(
        "--test-count", type=_positive_count, default=1, metavar="N", help="runs, each with its own seed (default: 1)"
    )
    run.add_argument("--matrix", metavar="FILE", help="TOML with lists of options, all combinations of which are run")
    run.add_argument("--operation-timeout", type=float, default=3.0, metavar="SECONDS", help="(default: 3)")
    run.add_argument("--checker-timeout", type=float, default=60.0, metavar="SECONDS", help="(default: 60)")
    run.add_argument("--checker-memory", type=int, default=2048, metavar="MB", help="(default: 2048)")
    run.add_argument("--json", action="store_true", help="print results.json on standard output and nothing else there")
    add_cluster_options(run)
    run.set_defaults(action=_run)

    analyze = commands.add_parser("analyze", help="check a stored run again and rewrite its report")
    analyze.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    analyze.add_argument("--store", default="store", metavar="DIR")
    analyze.add_argument("--checker-timeout", type=float, default=None, metavar="SECONDS")
    analyze.add_argument("--checker-memory", type=int, default=None, metavar="MB")
    analyze.add_argument("--json", action="store_true", help="print results.json on standard output")
    analyze.set_defaults(action=_analyze)

    check = commands.add_parser("check", add_help=False, help="check any recorded history, also of other tools")
    check.add_argument("rest", nargs=argparse.REMAINDER)
    check.set_defaults(action=_check)

    add_spark_commands(commands)

    clean = commands.add_parser("clean", help="remove what killed runs left on this machine")
    clean.add_argument("--run", dest="run_ids", action="append", default=None, metavar="RUN_ID", help="only this run")
    clean.set_defaults(action=_clean)

    add_cluster_command(commands)

    doctor = commands.add_parser("doctor", help="what every nemesis can do on every cluster of this machine")
    doctor.add_argument("--prove", action="store_true", help="inject, prove and heal each of them once")
    doctor.add_argument("--cluster", default="", metavar="NAME[,...]", help="only these clusters (default: all)")
    doctor.add_argument("--nemesis", default="", metavar="NAME[,...]", help="only these nemeses (default: all)")
    doctor.add_argument("--system", default="broker", help="what runs on the hosts meanwhile (default: broker)")
    doctor.add_argument("--json", action="store_true", help="print the cells as JSON on standard output")
    add_cluster_options(doctor)
    doctor.set_defaults(action=_doctor)

    listing = commands.add_parser("list", help="workloads, nemeses, systems and clusters by name")
    listing.set_defaults(action=_list)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from harness.commands.run import run_command

    return run_command(arguments)


def _analyze(arguments: argparse.Namespace) -> int:
    from harness.commands.analyze import analyze_command

    return analyze_command(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from checker.cli import main as checker_main

    return int(checker_main(arguments.rest))


def _clean(arguments: argparse.Namespace) -> int:
    from harness.commands.clean import clean_command

    return clean_command(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from harness.commands.doctor import doctor_command

    return doctor_command(arguments)


def _list(arguments: argparse.Namespace) -> int:
    from harness.commands.list import list_command

    return list_command(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["check"]:  # a tool of its own with its own options and its own --help
        return _guarded(lambda: _check(argparse.Namespace(rest=words[1:])))
    arguments = build_parser().parse_args(words)
    arguments.words = words
    return _guarded(lambda: int(arguments.action(arguments)))


def _guarded(action: Callable[[], int]) -> int:
    try:
        return action()
    except OperatorError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_OPERATOR
    except (SystemUnderTestError, HarnessError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_HARNESS_FAILED
    except KeyboardInterrupt:
        print("harness: interrupted", file=sys.stderr)
        return EXIT_HARNESS_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output is gone
        return EXIT_HARNESS_FAILED
    except Exception as error:
        if os.environ.get("SPLITBRAIN_TRACEBACK"):
            traceback.print_exc()
        print(
            f"harness: internal error: {type(error).__name__}: {error} (SPLITBRAIN_TRACEBACK=1 shows where)",
            file=sys.stderr,
        )
        return EXIT_HARNESS_FAILED


def random_seed() -> int:
    """A seed for a run that was given none; short enough to be typed again."""
    return secrets.randbelow(2**32)
