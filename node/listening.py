"""Which key of the configuration an address comes from, said with the error where one cannot listen there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["key_of", "listening"]

_NOTE = "the address is that of "


@contextmanager
def listening(key: str) -> Iterator[None]:
    """Note `key` with an OSError that opening a port raises: a broker opens up to five, and nothing else in the error
    says whose address it is."""
    try:
        yield
    except OSError as error:
        error.add_note(_NOTE + key)
        raise


def key_of(error: OSError) -> str:
    """The key that was noted; "" where it is no error of a port."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next(notes, "").removeprefix(_NOTE)
