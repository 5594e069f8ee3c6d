"""Readers for the history formats of other tools and for our own."""

from __future__ import annotations

from checker.codecs.detect import FORMATS, detect_format, is_parquet, read, read_bytes, read_rows
from checker.codecs.jsonl import read_jsonl
from checker.codecs.pairs import with_keys
from checker.codecs.source import FormatError, MemoryLimitError

__all__ = [
    "FORMATS",
    "FormatError",
    "MemoryLimitError",
    "detect_format",
    "is_parquet",
    "read",
    "read_bytes",
    "read_jsonl",
    "read_rows",
    "with_keys",
]
