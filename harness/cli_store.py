"""The options of the commands that show a store: `harness runs` and `harness serve`."""

from __future__ import annotations

from typing import Any

from harness.cli_options import positive_count, whole_number

__all__ = ["add_store_commands"]

DEFAULT_LIMIT = 30
"""Default of --limit: the runs that fit into a tall terminal."""

DEFAULT_PORT = 8137


def _port(text: str) -> int:
    return whole_number(text, 0, 65535, "must be 0 (any free port) to 65535")


def add_store_commands(commands: Any) -> None:
    """Add `runs` and `serve` to the commands."""
    runs = commands.add_parser("runs", help="list the runs in the store, newest first")
    runs.add_argument("--store", default="store", metavar="DIR", help="store to list (default: ./store)")
    runs.add_argument(
        "--verdict", default="", metavar="WORD[,...]",
        help="only runs that are valid, invalid, unknown, running or unfinished",
    )  # fmt: skip
    runs.add_argument("--workload", default="", metavar="NAME", help="only runs of this workload")
    runs.add_argument("--nemesis", default="", metavar="NAME[=VARIANT]", help="only runs whose faults include this one")
    runs.add_argument("--system", default="", metavar="NAME", help="only runs of this system")
    runs.add_argument("--cluster", default="", metavar="NAME", help="only runs on this kind of cluster")
    runs.add_argument("--test", default="", metavar="NAME", help="only runs of this test, a directory in the store")
    runs.add_argument(
        "--limit", type=positive_count, default=DEFAULT_LIMIT, metavar="N",
        help=f"maximum number of runs to list (default: {DEFAULT_LIMIT})",
    )  # fmt: skip
    runs.add_argument("--json", action="store_true", help="print the runs as JSON on standard output")

    serve = commands.add_parser("serve", help="serve the store as web pages to browsers on this machine")
    serve.add_argument("--store", default="store", metavar="DIR", help="store to serve (default: ./store)")
    serve.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, metavar="N",
        help=f"port on 127.0.0.1, 0 for any free one (default: {DEFAULT_PORT})",
    )  # fmt: skip
    serve.add_argument(
        "--allow-run", action="store_true", help="allow the pages to start runs (otherwise they are read-only)"
    )
