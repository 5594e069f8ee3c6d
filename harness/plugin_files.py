"""How a system is named that is in a file of its own: FILE.py, or FILE.py:CLASS."""

from __future__ import annotations

import os

__all__ = ["is_file", "split_file"]


def is_file(name: str) -> bool:
    """Whether the name of a system is that of a plug-in's file, FILE.py or FILE.py:CLASS."""
    return split_file(name)[0].endswith(".py")


def split_file(name: str) -> tuple[str, str]:
    """(FILE.py, CLASS) of FILE.py:CLASS; no class where none is named. Directories may have colons."""
    directory, base = os.path.split(name)
    path, _, class_name = base.partition(":")
    return os.path.join(directory, path), class_name
