"""The options of `harness report` and `harness compare`, and the Spark options for other commands.

Separate from the commands, because the parser is built for every command and must stay cheap.
"""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_spark_commands", "add_spark_options"]


def add_spark_commands(commands: Any) -> None:
    """Add `report` and `compare` to the command line's subparsers."""
    report = commands.add_parser("report", help="report anomaly rates, availability and latency over all runs (Spark)")
    report.add_argument("place", metavar="STORE", help="directory of a store, or any URI that Hadoop can read")
    report.add_argument(
        "--out", metavar="DIR", help="directory or URI for the tables and report.html (default: ./report)"
    )
    report.add_argument("--csv", action="store_true", help="also write the tables as CSV")
    report.add_argument("--json", action="store_true", help="print the tables as JSON on standard output")
    report.add_argument(
        "--compact", metavar="DIR", help="also copy the report's runs to this directory or URI, as a few large files"
    )
    report.add_argument("--check", action="store_true", help="check every history again in Spark, key by key")
    report.add_argument(
        "--model", metavar="MODEL",
        help="with --check: check against this model instead of the workload's (see harness check)",
    )  # fmt: skip
    report.add_argument(
        "--checker-timeout", type=float, default=60.0, metavar="SECONDS",
        help="time limit per key (default: 60)",
    )  # fmt: skip
    report.add_argument(
        "--checker-memory", type=int, default=1024, metavar="MB",
        help="memory limit per key (default: 1024)",
    )  # fmt: skip
    _add_common(report)

    compare = commands.add_parser(
        "compare", help="compare two sets of runs (Spark)",
        epilog="exit status: 0 nothing got worse, 1 something did, 2 too few runs to tell",
    )  # fmt: skip
    compare.add_argument("first", metavar="A", help="baseline runs: a store or URI")
    compare.add_argument("second", metavar="B", help="runs to compare with the baseline: a store or URI")
    compare.add_argument(
        "--by", default="system,configuration,workload,nemesis,cluster", metavar="COLUMNS",
        help="columns that must be equal for runs to be compared; omit one to compare across it (default: all five)",
    )  # fmt: skip
    compare.add_argument(
        "--alpha", type=float, default=0.05, help="largest adjusted p-value that counts as a difference (default: 0.05)"
    )
    compare.add_argument(
        "--min-effect", type=float, default=0.0, metavar="E",
        help="smallest effect that counts: a difference in shares, or Cliff's delta (default: 0)",
    )  # fmt: skip
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON on standard output")
    _add_common(compare)


def add_spark_options(parser: Any, *, without_master: str) -> None:
    """Add the options of the Spark session."""
    parser.add_argument("--master", metavar="URL", help=f"URL of the Spark master (default: {without_master})")
    parser.add_argument("--memory", metavar="SIZE", help="memory of the Spark driver (default: 2g)")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="KEY=VALUE",
        help="setting of Spark, or of a file system, such as spark.hadoop.fs.s3a.endpoint=...; repeatable",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show Spark's own logs")


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_spark_options(parser, without_master="run on this machine, with all cores")
    parser.add_argument(
        "--since", metavar="T", help="only runs started since a time (2026-01-31T12:00) or within an age (7d)"
    )
    parser.add_argument(
        "--where", metavar="SQL",
        help="only runs that match this condition, such as \"nemesis = 'partition' and seed < 100\"",
    )  # fmt: skip
    parser.add_argument(
        "--include", action="append", default=[], metavar="PATTERN",
        help="more files to read as histories of other tools, in addition to *.edn; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--unavailable-after", type=int, default=1000, metavar="MS",
        help="a system counts as unavailable after this long without a success while clients try (default: 1000)",
    )  # fmt: skip
