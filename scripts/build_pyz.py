"""Build `node.pyz`: the whole node in one file for a bare Python 3.11 or newer.

    python scripts/build_pyz.py OUTPUT

The same source gives the same bytes: entries are sorted, carry one fixed time and fixed permissions, and no
compiled files go in. Only `node/**/*.py` goes in, which needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["build", "main"]

INTERPRETER = b"#!/usr/bin/env python3\n"
FIXED_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can say."""
FILE_MODE = 0o644

LAUNCHER = '''\
"""Runs the node from its archive."""

import sys

if sys.version_info < (3, 11):
    sys.exit("node: needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2])

from node.command_line import main

sys.exit(main(sys.argv[1:]))
'''


def _sources(root: Path) -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", LAUNCHER.encode()
    for path in sorted((root / "node").rglob("*.py")):
        yield path.relative_to(root).as_posix(), path.read_bytes()


def build(root: Path, output: Path) -> int:
    """Write the archive of `root`/node to `output`, replacing it as a whole; returns its size in bytes.

    Raises OSError.
    """
    temporary = output.with_name(f"{output.name}.tmp")
    with temporary.open("wb") as file:
        file.write(INTERPRETER)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, content in _sources(root):
                info = zipfile.ZipInfo(name, FIXED_TIME)
                info.external_attr = FILE_MODE << 16
                info.create_system = 3  # Unix, also when built elsewhere
                info.compress_type = zipfile.ZIP_STORED
                archive.writestr(info, content)
    temporary.chmod(0o755)
    os.replace(temporary, output)
    return output.stat().st_size


def main(arguments: list[str]) -> int:
    """Build as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build node.pyz from node/.")
    parser.add_argument("output", type=Path, help="file to write, such as node.pyz")
    options = parser.parse_args(arguments)
    try:
        size_bytes = build(Path(__file__).resolve().parent.parent, options.output)
    except OSError as error:
        print(f"build_pyz: {error}", file=sys.stderr)
        return 254
    print(f"{options.output}: {size_bytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
