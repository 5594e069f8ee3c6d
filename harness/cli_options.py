"""The options that describe a test, shared by the commands that run tests, and the exploration commands."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from typing import Any

from harness import registry
from harness.cli_cluster import NO_CLUSTER_OPTIONS, add_cluster_options
from harness.cli_spark import add_spark_options
from harness.errors import OperatorError
from harness.pages import page_in_help
from harness.seeded import MAX_SEED

__all__ = [
    "add_exploration_commands",
    "add_plugin_argument",
    "add_simulated_test_options",
    "add_system_settings",
    "add_test_options",
    "add_trace_command",
    "add_trace_option",
    "duration_s",
    "given_options",
    "job_count",
    "positive_count",
    "seed_number",
    "whole_number",
]

MAX_JOBS = 1024
"""Limit of parallel simulations: each takes at least 60 MB."""

SIMULATED = "sim"
DEFAULT_INTERVAL_S = 5.0
"""Duration of each fault, and of the pause after it."""

SEARCHED_LOAD: Mapping[str, Any] = {"time_limit": 10.0, "rate": 25.0, "concurrency": 20, "operation_timeout": 1.0}
"""Default load of an explored seed. A lost leader blocks every operation sent to it until that times out, while another
one is elected within 0.7 s. Of six clients with a timeout of 3 s, none was free after 0.1 s, and none saw the new
leader before the old one was back; of 20 with one second, some always make progress. With 100 operations per second for
15 s a seed takes three times the processor time and finds hardly more (`python -m benchmarks search_seeds`)."""


def whole_number(text: str, least: int, most: float, must_be: str) -> int:
    """An integer within bounds. Raises ArgumentTypeError, with `must_be` if it is out of bounds."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(must_be)
    return number


def seed_number(text: str) -> int:
    """A seed. Raises ArgumentTypeError."""
    return whole_number(text, 0, MAX_SEED, f"must be 0 to {MAX_SEED}")


def duration_s(text: str) -> float:
    """Seconds from "90", "90s", "5m" or "1h". Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 90s, 5m or 1h")
    return float(match[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]


def positive_count(text: str) -> int:
    """A positive integer. Raises ArgumentTypeError."""
    return whole_number(text, 1, math.inf, "must be at least 1")


def job_count(text: str) -> int:
    """A number of parallel processes. Raises ArgumentTypeError."""
    return whole_number(text, 1, MAX_JOBS, f"must be 1 to {MAX_JOBS}: each is a process of its own")


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


class _NamesSystem(argparse.Action):
    """A positional argument that stands for --system."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        if values is not None:
            namespace.file = values
            if registry.is_file(values):
                namespace.system = values
                parser.epilog = _settings_in(values)


def _settings_in(name: str) -> str | None:
    """Help text on the settings of a system in a file; None if it has none, or cannot be loaded, which is reported when
    the command is performed."""
    try:
        settings = registry.load("systems", name).settings
    except OperatorError:
        return None
    words = [f"--set {each.name}={'|'.join(each.choices) or each.default}" for each in settings]
    return f"settings of {name}, the default first: {', '.join(words)}" if words else None


def add_plugin_argument(parser: argparse.ArgumentParser) -> None:
    """Add FILE.py, an alternative to --system."""
    parser.add_argument(
        "file", nargs="?", action=_NamesSystem, metavar="FILE.py",
        help=f"the system under test, where it is one of your own ({page_in_help('your-own-system.md')}); "
        "FILE.py:CLASS, where there are several in it",
    )  # fmt: skip


def add_system_settings(parser: Any) -> None:
    """Add `--set`, parsed as `settings`."""
    parser.add_argument(
        "--set", dest="settings", action="append", type=_setting, default=[], metavar="KEY=VALUE",
        help="a setting of the system, such as replication=sync or read_mode=unsafe, or of the workload, such as "
        "workload.keys=20; repeatable (harness list has all)",
    )  # fmt: skip


def add_test_options(parser: argparse.ArgumentParser, *, has_faults: bool = True) -> None:
    """Add the options that determine a test, in groups, with names from the registry. Without `has_faults` there are no
    fault options: those of a replay are in its schedule."""
    _add_what_runs(parser.add_argument_group("what is tested, and where"))
    if has_faults:
        _add_faults(parser.add_argument_group("faults"))
    else:
        parser.set_defaults(nemesis="none", nemesis_interval=DEFAULT_INTERVAL_S, nemesis_schedule=None)
    _add_load(parser.add_argument_group("load"))
    _add_judging(parser.add_argument_group("judging and keeping"))


def _known(kind: str) -> str:
    return ", ".join(registry.names(kind))


def _add_what_runs(group: Any, *, is_simulated: bool = False) -> None:
    group.add_argument(
        "--system",
        default=registry.DEFAULT_SYSTEM,
        help=f"the system under test: {_known('systems')} or a FILE.py (default: {registry.DEFAULT_SYSTEM})",
    )
    add_system_settings(group)
    group.add_argument(
        "--client", metavar="COMMAND",
        help="a program in any language that speaks JSON lines, in the place of the system's own client, "
        "such as \"java -jar mine.jar\"",
    )  # fmt: skip
    group.add_argument("--nodes", type=int, default=5, metavar="N", help="replicas (default: 5)")
    if is_simulated:
        group.add_argument("--cluster", default=SIMULATED, choices=[SIMULATED], help="always sim")
        return
    group.add_argument(
        "--cluster", default="auto", help=f"how hosts are made: auto (the best one here, default), {_known('clusters')}"
    )
    add_cluster_options(group)


def _add_faults(group: Any, *, is_simulated: bool = False) -> None:
    words = "all (default), or some of" if is_simulated else "none (default), all, or some of"
    group.add_argument(
        "--nemesis", default="all" if is_simulated else "none", metavar="NAME[=VARIANT][,...]",
        help=f"{words}: {_known('nemeses')}; a part of one as kill=sigkill, kill@leader, kill=sigkill@n1+n2; "
        "all,promote: all and one that it leaves out",
    )  # fmt: skip
    if is_simulated:
        return
    group.add_argument(
        "--nemesis-interval", type=float, default=DEFAULT_INTERVAL_S, metavar="SECONDS",
        help="how long a fault lasts, and the calm after it (default: 5)",
    )  # fmt: skip
    group.add_argument(
        "--nemesis-schedule", metavar="FILE",
        help="timed faults from a JSON list, such as the schedule.json that every run leaves",
    )  # fmt: skip


def _add_load(group: Any) -> None:
    group.add_argument(
        "--workload", default="register", help=f"what clients do: {_known('workloads')} (default: register)"
    )
    group.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="of load (default: %(default)g)"
    )
    group.add_argument(
        "--concurrency", type=int, default=10, metavar="N", help="logical clients (default: %(default)d)"
    )
    group.add_argument(
        "--rate", type=float, default=200.0, metavar="OPS",
        help="operations per second, 0 for no limit (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--operation-timeout", type=float, default=3.0, metavar="SECONDS",
        help="of one operation (default: %(default)g)",
    )  # fmt: skip
    group.add_argument("--seed", type=seed_number, metavar="N", help="decides everything random (default: random)")


def add_simulated_test_options(parser: argparse.ArgumentParser) -> None:
    """Add the test options for simulated seeds with random mixes of faults. Hosts need no options, the seed determines
    when faults occur, and the default load is SEARCHED_LOAD."""
    _add_what_runs(parser.add_argument_group("what is tested"), is_simulated=True)
    _add_faults(parser.add_argument_group("faults"), is_simulated=True)
    _add_load(parser.add_argument_group("load"))
    _add_judging(parser.add_argument_group("judging and keeping"))
    parser.set_defaults(
        nemesis_interval=DEFAULT_INTERVAL_S, nemesis_schedule=None, **NO_CLUSTER_OPTIONS, **SEARCHED_LOAD
    )


def _add_judging(group: Any) -> None:
    group.add_argument("--fail-fast", action="store_true", help="end the load at the first violation seen on the way")
    group.add_argument(
        "--checker-timeout", type=float, default=60.0, metavar="SECONDS", help="of each check (default: 60)"
    )
    group.add_argument("--checker-memory", type=int, default=2048, metavar="MB", help="for each check (default: 2048)")
    group.add_argument("--store", default="store", metavar="DIR", help="where runs are kept (default: ./store)")


def add_trace_option(parser: Any) -> None:
    """Add `--trace`, for the commands that store their runs."""
    parser.add_argument(
        "--trace", action="store_true", help="keep what the network did in trace.jsonl, for harness trace (sim only)"
    )


def add_trace_command(commands: Any) -> None:
    """Add `trace` to the commands."""
    trace = commands.add_parser("trace", help="draw who sent what to whom in a window of a run made with --trace")
    trace.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    trace.add_argument("--store", default="store", metavar="DIR")
    trace.add_argument(
        "--from", dest="from_s", type=float, metavar="SECONDS",
        help="since the load began; negative for what was before",
    )  # fmt: skip
    trace.add_argument("--to", dest="to_s", type=float, metavar="SECONDS")
    trace.add_argument(
        "--replay", action="store_true", help="a page to play and step through; without --from and --to the whole run"
    )
    trace.add_argument("--hosts", default="", metavar="NAME[,...]", help="only these (default: all that spoke)")
    trace.add_argument(
        "--out", metavar="FILE", help="an .html or .svg file (default: trace.html or replay.html of the run)"
    )


def given_options(words: list[str]) -> frozenset[str]:
    """The options given on a command line, by their names in the parsed arguments."""
    names = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return frozenset("settings" if name == "set" else name for name in names)


def add_exploration_commands(commands: Any) -> None:
    """Add `explore`, `audit`, `shrink`, `explain` and `replay` to the commands."""
    explore = commands.add_parser("explore", help="many simulated seeds with random mixes of faults")
    add_simulated_test_options(explore)
    explore.add_argument(
        "--budget", type=duration_s, default="5m", metavar="TIME", help="such as 90s, 5m, 1h (default: 5m)"
    )
    explore.add_argument("--seeds", type=positive_count, metavar="N", help="at most so many, from --seed on")
    explore.add_argument("--jobs", type=job_count, metavar="N", help="at a time (default: one per core)")
    explore.add_argument("--guide", action="store_true", help="make runs of earlier ones that did something new")
    explore.add_argument("--stop-at-first", action="store_true", help="end with the first run that is not valid")
    explore.add_argument("--json", action="store_true", help="print the tally on standard output")
    spark = explore.add_argument_group(f"on a Spark cluster ({page_in_help('spark.md')})")
    add_spark_options(spark, without_master="none: processes of this machine")
    spark.add_argument(
        "--executor-python", metavar="PATH",
        help="what simulates there, 3.11 or newer (default: pypy3 where an executor has it, else Spark's own Python)",
    )  # fmt: skip

    audit = commands.add_parser("audit", help="run each simulated seed twice and show where the two part, if they do")
    add_simulated_test_options(audit)
    audit.add_argument("--seeds", type=positive_count, default=4, metavar="N", help="from --seed on (default: 4)")
    audit.add_argument("--jobs", type=job_count, metavar="N", help="at a time (default: one per core)")
    audit.add_argument("--python", metavar="PATH", help="the interpreter of the second run (default: this one)")
    audit.add_argument("--json", action="store_true", help="print what was found on standard output as JSON")

    shrink = commands.add_parser("shrink", help="cut a failing run down to what it takes to fail")
    shrink.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    shrink.add_argument("--store", default="store", metavar="DIR")
    shrink.add_argument("--budget", type=duration_s, default="2m", metavar="TIME", help="(default: 2m)")
    shrink.add_argument("--jobs", type=job_count, metavar="N", help="at a time (default: one per core)")
    shrink.add_argument("--out", metavar="DIR", help="for schedule and test (default: shrunk in the run's directory)")

    explain = commands.add_parser("explain", help="where the violation of a simulated run was decided")
    explain.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    explain.add_argument("--store", default="store", metavar="DIR")
    explain.add_argument(
        "--points", type=positive_count, default=40, metavar="N",
        help="moments at most that are looked at (default: 40)",
    )  # fmt: skip
    explain.add_argument(
        "--runs", type=positive_count, default=30, metavar="N",
        help="runs by other randomness from each moment (default: 30)",
    )  # fmt: skip
    explain.add_argument("--seed", type=seed_number, metavar="N", help="of that randomness (default: the run's)")
    explain.add_argument(
        "--check", default="", metavar="NAME",
        help="the check whose violation is explained, invariants and online among them (default: the first that shows)",
    )  # fmt: skip
    explain.add_argument("--jobs", type=job_count, metavar="N", help="at a time (default: one per core)")
    explain.add_argument("--json", action="store_true", help="print what was found on standard output as JSON")

    replay = commands.add_parser("replay", help="run a schedule again, on any cluster, and count how often it fails")
    replay.add_argument(
        "schedule", metavar="SCHEDULE",
        help="a schedule.json, or a run, whose schedule it is; the test.json beside it, where there is one, says what "
        "options do not: give --cluster to have it on another one",
    )  # fmt: skip
    add_test_options(replay, has_faults=False)
    replay.add_argument("--times", type=positive_count, default=1, metavar="N", help="runs (default: 1)")
    add_trace_option(replay)
