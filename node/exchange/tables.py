"""Apache's tables (R: ConfigManager): JSON in which integers may be keys without quotes, as fastjson writes it.

A table is replaced by renaming, and its predecessor stays beside it as `.bak`, which is read if the table cannot be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.exchange.staging import ExchangeError, sync_file

__all__ = ["decode_apache_table", "encode_apache_table", "read_apache_table", "write_apache_table"]

_STRING_OR_BARE_KEY = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?[0-9]+)(?=\s*:)')
_QUOTED_INTEGER_KEY = re.compile(r'("(?:[^"\\]|\\.)*")(:?)')
_INTEGER = re.compile(r'"-?[0-9]+"')


def decode_apache_table(text: str) -> dict[str, Any]:
    """Decode a table; keys are strings. Raises ValueError if the text is no table."""
    table = json.loads(_STRING_OR_BARE_KEY.sub(lambda match: match[1] or f'{match[2]}"{match[3]}"', text))
    if not isinstance(table, dict):
        raise ValueError("it is no JSON object")
    return table


def encode_apache_table(table: Mapping[str, Any]) -> str:
    """Encode a table. In a table of offsets, integer keys have no quotes: these are queues and levels, never topics."""
    if "offsetTable" not in table:
        return json.dumps(table, separators=(",", ":"))

    def bare(match: re.Match[str]) -> str:
        is_key = match[2] and _INTEGER.fullmatch(match[1])
        return f"{match[1][1:-1]}:" if is_key else match[0]

    return _QUOTED_INTEGER_KEY.sub(bare, json.dumps(table, separators=(",", ":")))


def read_apache_table(path: Path) -> dict[str, Any] | None:
    """The table at `path`, or its predecessor; None if neither exists. Raises ExchangeError, OSError."""
    problem = ""
    for each in (path, path.with_name(path.name + ".bak")):
        try:
            text = each.read_text(encoding="utf-8")
            if text.strip():
                return decode_apache_table(text)
            problem = problem or f"{each} is empty"
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError) as error:
            problem = problem or f"{each} is damaged: {error}"
    if problem:
        raise ExchangeError(problem)
    return None


def write_apache_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write a new table, durable but for its name. Raises OSError."""
    path.write_text(encode_apache_table(table), encoding="utf-8")
    sync_file(path)
