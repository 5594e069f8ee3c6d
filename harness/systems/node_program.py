"""How the node is run on a host: from the harness's own files if hosts share them, else from a copied archive."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from harness.clusters.base import Cluster, Program, RemoteHosts, RunsCommands
from harness.errors import OperatorError
from harness.node_archive import node_archive, node_source_root
from nemesis.mechanisms.shell import ShellError

__all__ = ["OWN_PYTHON", "local_python", "node_program"]

OWN_PYTHON = "own"
"""The interpreter that runs the harness, or, on a remote host, the one that runs its agent."""

_IS_NEW_ENOUGH = "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 3)"
_TOO_OLD = 3


def local_python(python: str) -> str:
    """The interpreter on this machine: its path, or the name itself if there is no such program."""
    return sys.executable if python == OWN_PYTHON else shutil.which(python) or python


async def node_program(
    cluster: Cluster, host: str, name: str, arguments: Sequence[str], *, python: str = OWN_PYTHON
) -> Program:
    """The node as a program that can be spawned on `host` any number of times. Raises OperatorError.

    A remote host gets a `node.pyz` that is built from the same source that the harness uses. `python` is OWN_PYTHON or
    the name or path of an interpreter on the host.
    """
    if python != OWN_PYTHON:
        await _check(cluster, host, python)
    root = node_source_root()
    if isinstance(cluster, RemoteHosts):
        path = os.path.join(cluster.data_dir(host), "node.pyz")
        await cluster.put_file(host, path, node_archive(root))
        return Program(
            name=name,
            argv=[cluster.python(host) if python == OWN_PYTHON else python, path, *arguments],
            log_name=f"{name}.log",
            environment={"PYTHONUNBUFFERED": "1"},
        )
    return Program(
        name=name,
        argv=[local_python(python), "-m", "node", *arguments],
        log_name=f"{name}.log",
        environment={"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"},
    )


async def _check(cluster: Cluster, host: str, python: str) -> None:
    """Raise OperatorError if an interpreter cannot run the node on a host."""
    if not isinstance(cluster, RunsCommands):
        raise OperatorError(
            f"--set python={python}: simulated nodes run inside the harness: run the harness itself with {python}"
        )
    if not isinstance(cluster, RemoteHosts) and shutil.which(python) is None:
        raise OperatorError(f"--set python={python}: there is no such program: install it, or give its path")
    try:
        status, _, said = await cluster.run(host, [python, "-c", _IS_NEW_ENOUGH])
    except ShellError as error:
        raise OperatorError(f"--set python={python}: it does not run on {host} ({error.said}): install it") from error
    if status == _TOO_OLD:
        raise OperatorError(f"--set python={python}: the node needs Python 3.11 or newer: give another interpreter")
    if status != 0:
        last = (said.strip().splitlines() or [f"status {status}"])[-1]
        raise OperatorError(f"--set python={python}: it does not run on {host} ({last}): install it")
