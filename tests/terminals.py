"""Terminals for tests, where the machine has any."""

from __future__ import annotations

import os

import pytest

__all__ = ["open_terminal"]


def open_terminal() -> tuple[int, int]:
    """Both ends of a new pseudo-terminal, ours first; the test is skipped if there are none, as in a bare chroot."""
    try:
        return os.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminals here: {error} (mount -t devpts devpts /dev/pts)")
