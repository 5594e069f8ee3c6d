"""Bodies of replies in JSON, as RocketMQ's own brokers and name servers write them.

They write numeric keys of maps without quotes, `{0:"10.0.0.1:10911"}`, which is not JSON (R: RemotingSerializable, by
fastjson).
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["read_body"]

_STRING_OR_KEY = re.compile(rb'"(?:[^"\\]|\\.)*"|([{,]\s*)(-?\d+)(\s*:)')
"""A whole string, so that nothing within one is taken for a key; or a key without quotes, with what surrounds it."""


def read_body(body: bytes) -> Any:
    """Decode a body. Raises ValueError if it is not valid, RecursionError if it is nested too deeply."""
    try:
        return json.loads(body)
    except ValueError:
        return json.loads(_STRING_OR_KEY.sub(_quoted, body))


def _quoted(match: re.Match[bytes]) -> bytes:
    before, key, colon = match.groups()
    return match[0] if key is None else b'%s"%s"%s' % (before, key, colon)
