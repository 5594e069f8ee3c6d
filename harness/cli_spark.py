"""The options of `harness report` and `harness compare`, and the Spark options for other commands.

Separate from the commands, because the parser is built for every command and must stay cheap.
"""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_spark_commands", "add_spark_options"]


def add_spark_commands(commands: Any) -> None:
    """Add `report` and `compare` to the command line's subparsers."""
    report = commands.add_parser("report", help="anomaly rates, availability and latency over every run (Spark)")
    report.add_argument("place", metavar="STORE", help="a store's directory or any URI that Hadoop knows")
    report.add_argument(
        "--out", metavar="DIR", help="where tables and report.html go, a path or URI (default: ./report)"
    )
    report.add_argument("--csv", action="store_true", help="write the tables as CSV too")
    report.add_argument("--json", action="store_true", help="print the tables as JSON on standard output")
    report.add_argument(
        "--compact", metavar="DIR", help="also copy the runs of the report there as few large files (path or URI)"
    )
    report.add_argument("--check", action="store_true", help="check every history again inside Spark, key by key")
    report.add_argument(
        "--model", metavar="MODEL", help="check against this model whatever the workload (harness check)"
    )
    report.add_argument("--checker-timeout", type=float, default=60.0, metavar="SECONDS", help="per key (default: 60)")
    report.add_argument("--checker-memory", type=int, default=1024, metavar="MB", help="per key (default: 1024)")
    _add_common(report)

    compare = commands.add_parser(
        "compare", help="two sets of runs against each other (Spark)",
        epilog="exit status: 0 nothing got worse, 1 something did, 2 too few runs to say",
    )  # fmt: skip
    compare.add_argument("first", metavar="A", help="the runs to compare with: a store or URI")
    compare.add_argument("second", metavar="B", help="the runs in question")
    compare.add_argument(
        "--by", default="system,configuration,workload,nemesis,cluster", metavar="COLUMNS",
        help="what must be equal for runs to be compared; leave one out to compare across it (default: all five)",
    )  # fmt: skip
    compare.add_argument(
        "--alpha", type=float, default=0.05, help="adjusted p that counts as a difference (default: 0.05)"
    )
    compare.add_argument(
        "--min-effect", type=float, default=0.0, metavar="E",
        help="smallest effect that counts: a difference of shares, or Cliff's delta (default: 0)",
    )  # fmt: skip
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON on standard output")
    _add_common(compare)


def add_spark_options(parser: Any, *, without_master: str) -> None:
    """Add the options of the Spark session."""
    parser.add_argument("--master", metavar="URL", help=f"Spark's master (default: {without_master})")
    parser.add_argument("--memory", metavar="SIZE", help="of Spark's driver, as 2g (default)")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of Spark, or of a file system as spark.hadoop.fs.s3a.endpoint=...; repeatable",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show Spark's own logs")


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_spark_options(parser, without_master="this machine, all cores")
    parser.add_argument("--since", metavar="T", help="only runs started since a time (2026-01-31T12:00) or age (7d)")
    parser.add_argument(
        "--where", metavar="SQL", help="only runs that meet this, as \"nemesis = 'partition' and seed < 100\""
    )
    parser.add_argument(
        "--include", action="append", default=[], metavar="PATTERN",
        help="further files to take as foreign histories beside *.edn; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--unavailable-after", type=int, default=1000, metavar="MS",
        help="without a success for this long while clients try, a system is unavailable (default: 1000)",
    )  # fmt: skip
