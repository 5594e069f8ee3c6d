"""The options of `harness gallery`."""

from __future__ import annotations

import argparse
from typing import Any

from harness.cli_options import positive_count, seed_number

__all__ = ["add_gallery_command"]


def add_gallery_command(commands: Any) -> None:
    """Add `gallery`, `gallery run` and `gallery page` to the commands."""
    gallery = commands.add_parser("gallery", help="list known bugs of real systems, and find them again")
    _add_places(gallery)
    gallery.set_defaults(gallery_command=None)
    inner = gallery.add_subparsers(dest="gallery_command", metavar="COMMAND")
    run = inner.add_parser("run", help="run findings and their controls, and count how often each is as expected")
    run.add_argument("findings", nargs="*", metavar="NAME", help="findings to run (harness gallery lists them)")
    run.add_argument("--all", action="store_true", help="run all findings")
    run.add_argument(
        "--times", type=positive_count, default=1, metavar="N",
        help="number of runs of each finding and of its control (default: 1)",
    )  # fmt: skip
    run.add_argument("--seed", type=seed_number, metavar="N", help="seed for everything random (default: random)")
    run.add_argument("--cluster", metavar="NAME", help="kind of hosts to run on (default: the best one available here)")
    _add_places(run, is_inner=True)
    page = inner.add_parser("page", help="write the page of findings next to the results file it is made from")
    _add_places(page, is_inner=True)


def _add_places(parser: Any, *, is_inner: bool = False) -> None:
    """Add `--store` and `--results`, which may precede or follow the inner command's name: the inner parser's defaults
    must not override values given before it."""
    parser.add_argument(
        "--store", default=argparse.SUPPRESS if is_inner else "store", metavar="DIR",
        help="directory for stored runs (default: ./store)",
    )  # fmt: skip
    parser.add_argument(
        "--results", default=argparse.SUPPRESS if is_inner else None, metavar="FILE",
        help="JSON file with the results (default: gallery.json in the store)",
    )  # fmt: skip
