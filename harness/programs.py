"""Finds programs of the operating system that the harness calls."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from harness.clusters.base import ClusterUnavailable

__all__ = ["SYSTEM_PATH", "find_program", "require_programs"]

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Directories of system programs; an ordinary user's PATH often lacks the sbin directories."""


def find_program(name: str) -> str | None:
    """Absolute path of a program in the user's PATH, then in SYSTEM_PATH; None if it is not installed."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), SYSTEM_PATH)))


def require_programs(packages: Mapping[str, str]) -> dict[str, str]:
    """The absolute path of each program in `packages` (program -> the package that contains it).

    Raises ClusterUnavailable naming every missing package.
    """
    found = {name: find_program(name) for name in packages}
    missing = sorted({packages[name] for name, path in found.items() if path is None})
    if missing:
        raise ClusterUnavailable(f"missing packages: {' '.join(missing)} (apt-get install {' '.join(missing)})")
    return {name: path for name, path in found.items() if path is not None}
