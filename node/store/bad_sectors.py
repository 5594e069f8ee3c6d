"""Tells data that a disk has lost from read errors that pass."""

from __future__ import annotations

import errno
from typing import Final

__all__ = ["is_of_a_bad_sector"]

_ERRNOS: Final = frozenset((errno.EIO, errno.EBADMSG, errno.EUCLEAN))
"""Reported by the kernel for an unreadable sector, and by file systems for a block with a wrong checksum."""


def is_of_a_bad_sector(error: OSError) -> bool:
    """Whether a read failed because the stored bytes are lost. That is the same as damaged bytes for a file that has a
    predecessor or can be rebuilt."""
    return error.errno in _ERRNOS
