"""Small files with a CRC: the member's state and the checkpoint. Two lines: the CRC of the second line, and JSON."""

from __future__ import annotations

import json
import zlib
from typing import Any

__all__ = ["DamagedDocument", "decode_document", "encode_document"]


class DamagedDocument(Exception):
    """The bytes are not a document as `encode_document` makes them."""


def encode_document(content: dict[str, Any]) -> bytes:
    """The file content for a JSON object."""
    text = json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x\n%s\n" % (zlib.crc32(text), text)


def decode_document(data: bytes) -> dict[str, Any]:
    """The JSON object in a file's content. Raises DamagedDocument."""
    crc, _, text = data.partition(b"\n")
    text = text.removesuffix(b"\n")
    if crc != b"%08x" % zlib.crc32(text):
        raise DamagedDocument("its CRC does not match")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DamagedDocument(f"it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise DamagedDocument("it holds no JSON object")
    return content
