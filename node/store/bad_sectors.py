"""Bytes that a disk does not give back any more, told from errors that pass."""

from __future__ import annotations

import errno
from typing import Final

__all__ = ["is_of_a_bad_sector"]

_ERRNOS: Final = frozenset((errno.EIO, errno.EBADMSG, errno.EUCLEAN))
"""What the kernel says of a sector that cannot be read, and file systems of a block whose checksum is another."""


def is_of_a_bad_sector(error: OSError) -> bool:
    """Whether a read failed because what was written is not there any more: as good as bytes that are damaged, of a
    file that has a predecessor or can be made anew."""
    return error.errno in _ERRNOS
