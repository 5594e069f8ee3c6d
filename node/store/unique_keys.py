"""The unique keys of many messages at once.

RocketMQ's clients put a UNIQ_KEY into every message, so property texts that are otherwise equal differ in it. What
they have in common is then checked once, and the keys are a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from node.store.properties import KEYS, UNIQUE_KEY

__all__ = ["CommonText", "common_text", "unique_key", "unique_key_span"]

_KEYS = f"{KEYS}\x01".encode()
_UNIQUE = f"{UNIQUE_KEY}\x01".encode()
_END = b"\x02"


class CommonText(NamedTuple):
    """What property texts have in common, without their keys, and the key of each message; None if they have none."""

    text: bytes
    keys: Sequence[bytes] | None


def unique_key_span(text: bytes) -> tuple[int, int] | None:
    """Start and end of the value of UNIQ_KEY in a property text that has no other key; None if it has no UNIQ_KEY, or
    more than one key."""
    at = text.find(_UNIQUE)
    if at < 0 or (at and text[at - 1 : at] != _END) or _KEYS in text:
        return None
    start = at + len(_UNIQUE)
    end = text.find(_END, start)
    if end < 0:
        end = len(text)
    return None if end == start or text.find(_UNIQUE, start) >= 0 else (start, end)


def unique_key(text: bytes) -> bytes | None:
    """The value of UNIQ_KEY in a property text that has no other key; None if it has no UNIQ_KEY, or more keys."""
    if text.startswith(_UNIQUE) and _KEYS not in text:  # as clients write it
        key = text[len(_UNIQUE) :].partition(_END)[0]
        return key if key and text.count(_UNIQUE) == 1 else None
    span = unique_key_span(text)
    return None if span is None else text[span[0] : span[1]]


def common_text(texts: Sequence[bytes]) -> CommonText | None:
    """What the texts, which are of one size, have in common, if they are equal but for the value of UNIQ_KEY, which
    is ASCII, and hold no KEYS; otherwise None."""
    first, count = texts[0], len(texts)
    span = unique_key_span(first)
    if span is None:
        is_same = texts.count(first) == count and _UNIQUE not in first and _KEYS not in first
        return CommonText(first, None) if is_same else None
    start, end = span
    keys = tuple([text[start:end] for text in texts])
    before, after, together = first[:start], first[end:], b"".join(keys)
    if before + (after + before).join(keys) + after != b"".join(texts):
        return None
    return None if _END in together or not together.isascii() else CommonText(before + after, keys)
