"""The part of the command line for clusters: their options, and `harness cluster ...`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from harness.pages import page_in_help
from harness.registry import DEFAULT_SYSTEM
from nemesis.mechanisms.reach import MECHANISMS

__all__ = ["NO_CLUSTER_OPTIONS", "add_cluster_command", "add_cluster_options", "cluster_options_of"]

_OPTIONS = ("inventory", "image", "storage", "mechanism")
NO_CLUSTER_OPTIONS: Mapping[str, None] = dict.fromkeys(_OPTIONS)
"""The parsed arguments if none of these options was given."""


def add_cluster_options(parser: Any) -> None:
    """Add the options that only some kinds of clusters have."""
    parser.add_argument(
        "--inventory", default=None, metavar="FILE",
        help=f"the machines of an ssh cluster: TOML, or OpenSSH configuration ({page_in_help('hosts.md')})",
    )  # fmt: skip
    parser.add_argument(
        "--storage", default=None, metavar="WHERE",
        help="netns: where hosts keep their files: image (a file system each, default for root), memory, shared",
    )  # fmt: skip
    parser.add_argument(
        "--mechanism", default=None, choices=MECHANISMS,
        help="how replicas meet disk and clock faults: preload (a library), seccomp (any program), auto (the default)",
    )  # fmt: skip
    parser.add_argument("--image", default=None, metavar="NAME", help="the image of a docker cluster's hosts")


def cluster_options_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The cluster options that were given."""
    given = {name: getattr(arguments, name) for name in _OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def add_cluster_command(commands: Any) -> None:
    """Add `cluster up|status|down|logs|exec` to the commands."""
    cluster = commands.add_parser("cluster", help="hosts and a system that stay up: to look at, to try things on")
    actions = cluster.add_subparsers(dest="cluster_action", metavar="ACTION", required=True)

    up = actions.add_parser("up", help="make hosts, start the system on them, and leave them up")
    up.add_argument("--cluster", default="auto", help="auto (default), netns, local, docker, ssh, vagrant")
    up.add_argument("--nodes", type=int, default=5, metavar="N", help="replicas (default: 5)")
    up.add_argument(
        "--system", default=DEFAULT_SYSTEM, help=f"the system to start (default: {DEFAULT_SYSTEM}), or none"
    )
    add_cluster_options(up)

    actions.add_parser("status", help="which hosts there are and what they do")
    actions.add_parser("down", help="take everything down; data and logs stay in the cluster's directory")
    logs = actions.add_parser("logs", help="what the programs of a host have printed")
    logs.add_argument("host", metavar="HOST", help="a host's name, such as n1")
    execute = actions.add_parser("exec", help="run a command on a host; its exit status is this command's")
    execute.add_argument("host", metavar="HOST", help="a host's name, such as n1")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run, after --")
    for parser in actions.choices.values():
        parser.add_argument("--name", default="main", help="which of several clusters (default: main)")
        parser.add_argument(
            "--dir", default="clusters", metavar="DIR", help="where clusters' files are (default: ./clusters)"
        )
