"""Build `node.pyz`: the whole node in one file for a bare Python 3.11 or newer.

    python scripts/build_pyz.py OUTPUT

The same source and Python give the same bytes (see harness.node_archive, which also ships the file to hosts).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

from harness.node_archive import node_archive  # noqa: E402

__all__ = ["build", "main"]


def build(root: Path, output: Path) -> int:
    """Write the archive of `root`/node to `output`, replacing it atomically; returns its size in bytes.

    Raises OSError.
    """
    temporary = output.with_name(f"{output.name}.tmp")
    temporary.write_bytes(node_archive(root))
    temporary.chmod(0o755)
    os.replace(temporary, output)
    return output.stat().st_size


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Build node.pyz from node/.")
    parser.add_argument("output", type=Path, help="file to write, such as node.pyz")
    options = parser.parse_args(arguments)
    try:
        size_bytes = build(ROOT, options.output)
    except OSError as error:
        print(f"build_pyz: {error}", file=sys.stderr)
        return 254
    print(f"{options.output}: {size_bytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
