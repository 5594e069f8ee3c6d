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
    "add_export_command",
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


_JOBS_HELP = "number of parallel processes (default: one per core)"


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
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 5m or 1h")
    return float(match[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]


def positive_count(text: str) -> int:
    """A positive integer. Raises ArgumentTypeError."""
    return whole_number(text, 1, math.inf, "must be at least 1")


def job_count(text: str) -> int:
    """A number of parallel processes. Raises ArgumentTypeError."""
    return whole_number(text, 1, MAX_JOBS, f"must be 1 to {MAX_JOBS}: each job is a separate process")


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
    words = [
        f"--set {each.name}={'|'.join(each.choices) or each.default}{each.description and f' ({each.description})'}"
        for each in settings
    ]
    return f"settings of {name}, defaults first: {', '.join(words)}" if words else None


def add_plugin_argument(parser: argparse.ArgumentParser) -> None:
    """Add FILE.py, an alternative to --system."""
    parser.add_argument(
        "file", nargs="?", action=_NamesSystem, metavar="FILE.py",
        help=f"file that defines your own system under test ({page_in_help('your-own-system.md')}); "
        "FILE.py:CLASS if it defines several",
    )  # fmt: skip


def add_system_settings(parser: Any) -> None:
    """Add `--set`, parsed as `settings`."""
    parser.add_argument(
        "--set", dest="settings", action="append", type=_setting, default=[], metavar="KEY=VALUE",
        help="setting of the system, such as replication=sync or read_mode=unsafe, or of the workload, such as "
        "workload.keys=20; repeatable (harness list shows all settings)",
    )  # fmt: skip


def add_test_options(parser: argparse.ArgumentParser, *, has_faults: bool = True) -> None:
    """Add the options that determine a test, in groups, with names from the registry. Without `has_faults` there are no
    fault options: those of a replay are in its schedule."""
    _add_what_runs(parser.add_argument_group("system and hosts"))
    if has_faults:
        _add_faults(parser.add_argument_group("faults"))
    else:
        parser.set_defaults(nemesis="none", nemesis_interval=DEFAULT_INTERVAL_S, nemesis_schedule=None)
    _add_load(parser.add_argument_group("load"))
    _add_judging(parser.add_argument_group("checks and storage"))
    _add_metrics(parser.add_argument_group("metrics of the system"))


def _add_metrics(group: Any) -> None:
    group.add_argument(
        "--metrics", action="append", default=[], metavar="SERIES",
        help="draw another series of the hosts' metrics in the report, besides those that the system declares, such as "
        "go_goroutines, rate(http_requests_total{code=\"500\"}) or mean(http_request_seconds); repeatable; none: read "
        "no metrics",
    )  # fmt: skip


def _known(kind: str) -> str:
    return ", ".join(registry.names(kind))


def _add_what_runs(group: Any, *, is_simulated: bool = False) -> None:
    group.add_argument(
        "--system", default=registry.DEFAULT_SYSTEM,
        help=f"system under test: {_known('systems')} or a FILE.py (default: {registry.DEFAULT_SYSTEM})",
    )  # fmt: skip
    add_system_settings(group)
    group.add_argument(
        "--client", metavar="COMMAND",
        help="client program in any language that speaks JSON lines, used instead of the system's own client, "
        "such as \"java -jar mine.jar\"",
    )  # fmt: skip
    group.add_argument("--nodes", type=int, default=5, metavar="N", help="number of replicas (default: 5)")
    if is_simulated:
        group.add_argument("--cluster", default=SIMULATED, choices=[SIMULATED], help="always sim")
        return
    group.add_argument(
        "--cluster", default="auto",
        help=f"kind of hosts to run on: auto (the best one available here, default), {_known('clusters')}",
    )  # fmt: skip
    add_cluster_options(group)


def _add_faults(group: Any, *, is_simulated: bool = False) -> None:
    words = "all (default) or a list of" if is_simulated else "none (default), all or a list of"
    group.add_argument(
        "--nemesis", default="all" if is_simulated else "none", metavar="NAME[=VARIANT][,...]",
        help=f"faults to inject: {words}: {_known('nemeses')}; limit one to a variant as in kill=sigkill, kill@leader "
        "or kill=sigkill@n1+n2; all,promote adds a nemesis that all does not include",
    )  # fmt: skip
    if is_simulated:
        return
    group.add_argument(
        "--nemesis-interval", type=float, default=DEFAULT_INTERVAL_S, metavar="SECONDS",
        help="duration of each fault, and of the pause after it (default: 5)",
    )  # fmt: skip
    group.add_argument(
        "--nemesis-schedule", metavar="FILE",
        help="JSON file with a list of timed faults, such as the schedule.json that every run writes",
    )  # fmt: skip


def _add_load(group: Any) -> None:
    group.add_argument(
        "--workload", default="register", help=f"what the clients do: {_known('workloads')} (default: register)"
    )
    group.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS",
        help="how long clients put load on the system (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=int, default=10, metavar="N", help="number of logical clients (default: %(default)d)"
    )
    group.add_argument(
        "--rate", type=float, default=200.0, metavar="OPS",
        help="operations per second of all clients together, 0 for no limit (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--operation-timeout", type=float, default=3.0, metavar="SECONDS",
        help="timeout of each operation (default: %(default)g)",
    )  # fmt: skip
    group.add_argument("--seed", type=seed_number, metavar="N", help="seed for everything random (default: random)")


def add_simulated_test_options(parser: argparse.ArgumentParser) -> None:
    """Add the test options for simulated seeds with random mixes of faults. Hosts need no options, the seed determines
    when faults occur, and the default load is SEARCHED_LOAD."""
    _add_what_runs(parser.add_argument_group("system"), is_simulated=True)
    _add_faults(parser.add_argument_group("faults"), is_simulated=True)
    _add_load(parser.add_argument_group("load"))
    _add_judging(parser.add_argument_group("checks and storage"))
    parser.set_defaults(
        nemesis_interval=DEFAULT_INTERVAL_S, nemesis_schedule=None, **NO_CLUSTER_OPTIONS, **SEARCHED_LOAD
    )


def _add_judging(group: Any) -> None:
    group.add_argument("--fail-fast", action="store_true", help="stop the load as soon as a violation is detected")
    group.add_argument(
        "--checker-timeout", type=float, default=60.0, metavar="SECONDS", help="time limit of each check (default: 60)"
    )
    group.add_argument(
        "--checker-memory", type=int, default=2048, metavar="MB", help="memory limit of each check (default: 2048)"
    )
    group.add_argument("--store", default="store", metavar="DIR", help="directory for stored runs (default: ./store)")


def add_trace_option(parser: Any) -> None:
    """Add `--trace`, for the commands that store their runs."""
    parser.add_argument(
        "--trace", action="store_true", help="record all messages in trace.jsonl, for harness trace (sim only)"
    )


def add_trace_command(commands: Any) -> None:
    """Add `trace` to the commands."""
    trace = commands.add_parser("trace", help="draw the messages between hosts in part of a run made with --trace")
    trace.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    trace.add_argument("--store", default="store", metavar="DIR", help="store that RUN is in (default: ./store)")
    trace.add_argument(
        "--from", dest="from_s", type=float, metavar="SECONDS",
        help="start of the part to draw, in seconds since the load began; negative for before the load",
    )  # fmt: skip
    trace.add_argument("--to", dest="to_s", type=float, metavar="SECONDS", help="end of the part to draw")
    trace.add_argument(
        "--replay", action="store_true",
        help="write a page that plays the messages step by step, of the whole run unless --from or --to is given",
    )  # fmt: skip
    trace.add_argument(
        "--hosts", default="", metavar="NAME[,...]", help="hosts to draw (default: all that sent or received messages)"
    )
    trace.add_argument(
        "--out", metavar="FILE",
        help="output file, .html or .svg (default: trace.html or replay.html in the run's directory)",
    )  # fmt: skip


def add_export_command(commands: Any) -> None:
    """Add `export` to the commands."""
    export = commands.add_parser(
        "export", help="write a run in the files of other tools: Jepsen, Perfetto, OpenTelemetry"
    )
    export.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    export.add_argument("--store", default="store", metavar="DIR", help="store that RUN is in (default: ./store)")
    export.add_argument(
        "--format", required=True, choices=("jepsen", "perfetto", "otlp"),
        help="jepsen: history.edn and results.edn, for elle-cli, Knossos and jepsen serve; "
        "perfetto: operations, faults and traced messages on a timeline, for ui.perfetto.dev; "
        "otlp: operations and faults as OpenTelemetry's spans, for a collector",
    )  # fmt: skip
    export.add_argument(
        "--out", metavar="PATH",
        help="jepsen: the store to write TEST/TIME into; perfetto and otlp: the file "
        "(default: jepsen-store here; perfetto.json or otlp.jsonl in the run's directory)",
    )  # fmt: skip


def given_options(words: list[str]) -> frozenset[str]:
    """The options given on a command line, by their names in the parsed arguments."""
    names = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return frozenset("settings" if name == "set" else name for name in names)


def add_exploration_commands(commands: Any) -> None:
    """Add `explore`, `audit`, `shrink`, `explain` and `replay` to the commands."""
    _add_explore(commands)
    _add_audit(commands)
    _add_shrink(commands)
    _add_explain(commands)
    _add_replay(commands)


def _add_explore(commands: Any) -> None:
    explore = commands.add_parser("explore", help="run many simulated seeds with random mixes of faults")
    add_simulated_test_options(explore)
    explore.add_argument(
        "--budget", type=duration_s, default="5m", metavar="TIME",
        help="how long to search, such as 90s, 5m or 1h (default: 5m)",
    )  # fmt: skip
    explore.add_argument(
        "--seeds", type=positive_count, metavar="N", help="maximum number of seeds, counting up from --seed"
    )
    explore.add_argument("--jobs", type=job_count, metavar="N", help=_JOBS_HELP)
    explore.add_argument("--guide", action="store_true", help="vary earlier runs that showed new behaviour")
    explore.add_argument("--stop-at-first", action="store_true", help="stop at the first run that is not valid")
    explore.add_argument("--json", action="store_true", help="print the tally as JSON on standard output")
    spark = explore.add_argument_group(f"on a Spark cluster ({page_in_help('spark.md')})")
    add_spark_options(spark, without_master="none, run on this machine")
    spark.add_argument(
        "--executor-python", metavar="PATH",
        help="Python 3.11 or newer to simulate with (default: pypy3 if the executor has it, else Spark's own Python)",
    )  # fmt: skip


def _add_audit(commands: Any) -> None:
    audit = commands.add_parser(
        "audit", help="run each simulated seed twice and show where the two runs diverge, if they do"
    )
    add_simulated_test_options(audit)
    audit.add_argument(
        "--seeds", type=positive_count, default=4, metavar="N",
        help="number of seeds, counting up from --seed (default: 4)",
    )  # fmt: skip
    audit.add_argument("--jobs", type=job_count, metavar="N", help=_JOBS_HELP)
    audit.add_argument("--python", metavar="PATH", help="Python interpreter of the second run (default: this one)")
    audit.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def _add_shrink(commands: Any) -> None:
    shrink = commands.add_parser("shrink", help="reduce a failing run to the faults and load that it takes to fail")
    shrink.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    shrink.add_argument("--store", default="store", metavar="DIR", help="store that RUN is in (default: ./store)")
    shrink.add_argument(
        "--budget", type=duration_s, default="2m", metavar="TIME",
        help="how long to search, such as 90s, 5m or 1h (default: 2m)",
    )  # fmt: skip
    shrink.add_argument("--jobs", type=job_count, metavar="N", help=_JOBS_HELP)
    shrink.add_argument(
        "--out", metavar="DIR",
        help="directory for the reduced schedule and test (default: shrunk in the run's directory)",
    )  # fmt: skip


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser("explain", help="find the moment at which a simulated run's violation was decided")
    explain.add_argument("run", metavar="RUN", help="a run's directory, TEST/TIME in the store, or latest")
    explain.add_argument("--store", default="store", metavar="DIR", help="store that RUN is in (default: ./store)")
    explain.add_argument(
        "--points", type=positive_count, default=40, metavar="N",
        help="maximum number of moments to examine (default: 40)",
    )  # fmt: skip
    explain.add_argument(
        "--runs", type=positive_count, default=30, metavar="N",
        help="number of continuations from each moment, each with a different seed (default: 30)",
    )  # fmt: skip
    explain.add_argument(
        "--seed", type=seed_number, metavar="N", help="seed for the continuations (default: the run's)"
    )
    explain.add_argument(
        "--check", default="", metavar="NAME",
        help="check whose violation to explain, which may be invariants or online (default: the first to appear)",
    )  # fmt: skip
    explain.add_argument("--jobs", type=job_count, metavar="N", help=_JOBS_HELP)
    explain.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser("replay", help="repeat a run's schedule, on any cluster, and count how often it fails")
    replay.add_argument(
        "schedule", metavar="SCHEDULE",
        help="a schedule.json, or a run whose schedule to repeat; options that are not given come from the test.json "
        "beside it, if there is one: give --cluster to use another kind of cluster",
    )  # fmt: skip
    add_test_options(replay, has_faults=False)
    replay.add_argument("--times", type=positive_count, default=1, metavar="N", help="number of runs (default: 1)")
    add_trace_option(replay)
