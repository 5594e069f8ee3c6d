"""The pages of docs/, to which messages refer for details.

In a checkout they are at its root, in an installation from a wheel they are data of this package.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness.pasteable import pasteable

__all__ = ["PACKAGED_PAGES", "page", "page_in_help"]

PACKAGED_PAGES = "docs"

_PACKAGE = Path(__file__).resolve().parent


def page(name: str) -> str:
    """A page such as "hosts.md", as a path for a command line in the current directory."""
    packaged = _PACKAGE / PACKAGED_PAGES
    return pasteable(os.path.join(packaged if packaged.is_dir() else _PACKAGE.parent / "docs", name))


def page_in_help(name: str) -> str:
    """Like `page`, for an argparse help text, in which % begins a placeholder."""
    return page(name).replace("%", "%%")
