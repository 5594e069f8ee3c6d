"""The node as a single file, `node.pyz`, for hosts that share no files with the harness.

The build is reproducible: the same source and Python give the same bytes, as entries are sorted and have a fixed time
and fixed permissions. It contains only `node/**/*.py`, which needs only the standard library, and the compiled code.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from harness.errors import OperatorError
from nemesis.mechanisms.archives import add_module

__all__ = ["node_archive", "node_source_root"]

INTERPRETER = b"#!/usr/bin/env python3\n"

LAUNCHER = '''\
"""Runs the node from its archive."""

import sys

if sys.version_info < (3, 11):
    sys.exit("node: needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2])

from node.command_line import main

sys.exit(main(sys.argv[1:]))
'''


def node_source_root() -> Path:
    """The directory that contains the package `node`. Raises OperatorError if it is not installed."""
    found = importlib.util.find_spec("node")
    if found is None or found.origin is None:
        raise OperatorError("the package `node` is not installed beside the harness: install splitbrain again")
    return Path(found.origin).resolve().parent.parent


def _sources(root: Path) -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", LAUNCHER.encode()
    for path in sorted((root / "node").rglob("*.py")):
        yield path.relative_to(root).as_posix(), path.read_bytes()


def node_archive(root: Path) -> bytes:
    """The archive of `root`/node, executable by Python. Raises OSError."""
    buffer = io.BytesIO()
    buffer.write(INTERPRETER)
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in _sources(root):
            add_module(archive, name, content)
    return buffer.getvalue()
