"""The options of the commands that show a store: `harness runs` and `harness serve`."""

from __future__ import annotations

from typing import Any

from harness.cli_options import positive_count, whole_number

__all__ = ["add_store_commands"]

DEFAULT_LIMIT = 30
"""Default of --limit: the runs that fit into a tall terminal."""

DEFAULT_PORT = 8137


def _port(text: str) -> int:
    return whole_number(text, 0, 65535, "must be 0 (any free one) to 65535")


def add_store_commands(commands: Any) -> None:
    """Add `runs` and `serve` to the commands."""
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

    serve = commands.add_parser("serve", help="the store as pages for a browser on this machine")
    serve.add_argument("--store", default="store", metavar="DIR")
    serve.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, metavar="N",
        help=f"of 127.0.0.1, 0 for any free one (default: {DEFAULT_PORT})",
    )  # fmt: skip
    serve.add_argument("--allow-run", action="store_true", help="let the pages start runs (otherwise they only read)")
