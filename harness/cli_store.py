"""The options of the commands that show a store: `harness runs`."""

from __future__ import annotations

from typing import Any

from harness.cli_options import positive_count

__all__ = ["add_store_commands"]

DEFAULT_LIMIT = 30
"""Runs shown unless --limit says otherwise: what fits a tall terminal."""


def add_store_commands(commands: Any) -> None:
    """`runs`."""
    runs = commands.add_parser("runs", help="the runs of the store, newest first")
    runs.add_argument("--store", default="store", metavar="DIR")
    runs.add_argument(
        "--verdict", default="", metavar="WORD[,...]", help="only valid, invalid, unknown, running, unfinished"
    )
    runs.add_argument("--workload", default="", metavar="NAME")
    runs.add_argument("--nemesis", default="", metavar="NAME[=VARIANT]", help="runs whose faults include this one")
    runs.add_argument("--system", default="", metavar="NAME")
    runs.add_argument("--cluster", default="", metavar="NAME")
    runs.add_argument("--test", default="", metavar="NAME", help="the folder of the store")
    runs.add_argument(
        "--limit", type=positive_count, default=DEFAULT_LIMIT, metavar="N",
        help=f"at most so many (default: {DEFAULT_LIMIT})",
    )  # fmt: skip
    runs.add_argument("--json", action="store_true", help="print them as JSON on standard output")
