"""Adds the configuration key of an address to the error raised when a node cannot listen on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["key_of", "listening"]

_NOTE = "the address is that of "


@contextmanager
def listening(key: str) -> Iterator[None]:
    """Add `key` as a note to an OSError raised on opening a port: a broker opens up to five, and nothing else in the
    error tells which key the address came from."""
    try:
        yield
    except OSError as error:
        error.add_note(_NOTE + key)
        raise


def key_of(error: OSError) -> str:
    """The key that was noted; "" if the error is not about a port."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next(notes, "").removeprefix(_NOTE)
