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
        help=f"machines of an ssh cluster, as TOML or OpenSSH configuration ({page_in_help('hosts.md')})",
    )  # fmt: skip
    parser.add_argument(
        "--storage", default=None, metavar="WHERE",
        help="netns only: where hosts keep their files: image (a file system each, default for root), memory, shared",
    )  # fmt: skip
    parser.add_argument(
        "--mechanism", default=None, choices=MECHANISMS,
        help="how disk and clock faults are injected: preload (a library), seccomp (any program), auto (default)",
    )  # fmt: skip
    parser.add_argument("--image", default=None, metavar="NAME", help="image for the hosts of a docker cluster")


def cluster_options_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The cluster options that were given."""
    given = {name: getattr(arguments, name) for name in _OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def add_cluster_command(commands: Any) -> None:
    """Add `cluster up|status|down|logs|exec` to the commands."""
    cluster = commands.add_parser("cluster", help="start hosts and a system that stay up, to inspect and try things on")
    actions = cluster.add_subparsers(dest="cluster_action", metavar="ACTION", required=True)

    up = actions.add_parser("up", help="create hosts, start the system on them, and leave them running")
    up.add_argument(
        "--cluster", default="auto", help="kind of hosts: auto (default), netns, local, docker, ssh, vagrant"
    )
    up.add_argument("--nodes", type=int, default=5, metavar="N", help="number of replicas (default: 5)")
    up.add_argument("--system", default=DEFAULT_SYSTEM, help=f"system to start, or none (default: {DEFAULT_SYSTEM})")
    add_cluster_options(up)

    actions.add_parser("status", help="show the hosts and the state of each")
    actions.add_parser("down", help="take the cluster down; data and logs stay in its directory")
    logs = actions.add_parser("logs", help="print the output of a host's programs")
    logs.add_argument("host", metavar="HOST", help="a host's name, such as n1")
    execute = actions.add_parser("exec", help="run a command on a host and exit with its status")
    execute.add_argument("host", metavar="HOST", help="a host's name, such as n1")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="command to run, after --")
    for parser in actions.choices.values():
        parser.add_argument("--name", default="main", help="name of the cluster (default: main)")
        parser.add_argument(
            "--dir", default="clusters", metavar="DIR", help="directory for the files of clusters (default: ./clusters)"
        )
