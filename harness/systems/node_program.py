"""How the node is run on a host: from the harness's own files if hosts share them, else from a copied archive."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from harness.clusters.base import Cluster, Program, RemoteHosts
from harness.node_archive import node_archive, node_source_root

__all__ = ["node_program"]


async def node_program(cluster: Cluster, host: str, name: str, arguments: Sequence[str]) -> Program:
    """The node as a program that can be spawned on `host` any number of times. Raises OperatorError.

    A remote host gets a `node.pyz` that is built from the same source that the harness uses.
    """
    root = node_source_root()
    if isinstance(cluster, RemoteHosts):
        path = os.path.join(cluster.data_dir(host), "node.pyz")
        await cluster.put_file(host, path, node_archive(root))
        return Program(
            name=name,
            argv=[cluster.python(host), path, *arguments],
            log_name=f"{name}.log",
            environment={"PYTHONUNBUFFERED": "1"},
        )
    return Program(
        name=name,
        argv=[sys.executable, "-m", "node", *arguments],
        log_name=f"{name}.log",
        environment={"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"},
    )
