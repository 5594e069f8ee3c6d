"""The program `harness`: its console script, and `python -m harness`.

Separate from `harness.cli`, whose imports take a noticeable part of a second: Ctrl-C is answered during these too.
"""

from __future__ import annotations

import contextlib
import os
import sys

EXIT_HARNESS_FAILED = 255  # of harness.errors, which is not imported yet

__all__ = ["main"]


def main() -> int:
    """Entry point of the console script. Returns the exit status."""
    try:
        from harness.cli import main as perform
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            os.write(2, b"harness: interrupted\n")
        # Not by returning it: if the signal came while a dataclass was made, CPython ends by SIGINT all the same.
        os._exit(EXIT_HARNESS_FAILED)
    return perform()


if __name__ == "__main__":
    sys.exit(main())
