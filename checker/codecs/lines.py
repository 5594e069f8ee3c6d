"""Line formats of other tools: Jepsen's log lines and LiMo's call/return traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from checker.codecs.edn import EdnError, parse_edn
from checker.codecs.jsonl import FormatError
from checker.history import History, HistoryBuilder, HistoryError

__all__ = ["read_jepsen_log_text", "read_limo_text"]

_LOG_LINE = re.compile(r"(?:^|\s)(-?\d+|:?[a-z][\w-]*)\s+:(invoke|ok|fail|info)\s+:([\w-]+)\s+(.*?)\s*$")
#: What stands before every event in the logs of Porcupine's etcd tests.
_ETCD_LOG = re.compile(r"INFO\s+jepsen\.util\s+-\s")
_LIMO_CALL = re.compile(r"\[(\d+)\]\s+call\s+(\w+)(?:\((.*)\))?$")
_LIMO_RETURN = re.compile(r"\[(\d+)\]\s+return(?:\s+(.+))?$")

Parse = Callable[[str], "dict[str, Any] | None"]


def _read(text: str, source: str, parse: Parse) -> History:
    events: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        try:
            event = parse(line)
        except ValueError as error:
            reason = error.reason if isinstance(error, EdnError) else str(error)
            raise FormatError(source, number, reason) from error
        if event is not None:
            events.append(event)
            numbers.append(number)
    builder = HistoryBuilder()
    try:
        builder.feed(events)
    except HistoryError as error:
        raise FormatError(source, numbers[error.event or 0], error.reason) from error
    return builder.finish()


def read_jepsen_log_text(text: str, *, source: str = "<log>") -> History:
    """Lines ``process :type :f value`` behind any log prefix; other lines of a log are skipped.

    In the logs of Porcupine's etcd tests a compare-and-set that failed made its comparison and found another value: it
    is read as one that completed with the result ``False``.  Anywhere else a failure says that nothing happened.

    Raises :class:`FormatError` for a line whose value is not EDN or that does not pair.
    """
    memory: dict[str, Any] = {}

    def parse(line: str) -> dict[str, Any] | None:
        match = _LOG_LINE.search(line)
        if match is None:
            return None
        process, kind, f, value = match.groups()
        if value not in memory:
            forms = parse_edn(value)
            first = forms[0] if forms else None
            memory[value] = first
        found = memory[value]
        if kind == "fail" and f == "cas" and isinstance(found, (list, tuple)) and _ETCD_LOG.match(line):
            kind, found = "ok", False
        number: Any = int(process) if process.lstrip("-").isdigit() else process
        return {"process": number, "type": kind, "f": f, "value": found}

    history = _read(text, source, parse)
    if not len(history):
        raise FormatError(source, None, "no line of the form 'process :type :f value'")
    return history


def read_limo_text(text: str, *, source: str = "<limo>") -> History:
    """LiMo traces: ``[thread] call add(1)``, ``[thread] return``, ``[thread] return empty``."""

    def parse(line: str) -> dict[str, Any]:
        match = _LIMO_CALL.match(line)
        if match is not None:
            arguments = [_limo_value(part.strip()) for part in (match[3] or "").split(",") if part.strip()]
            value = arguments[0] if len(arguments) == 1 else arguments or None
            return {"process": int(match[1]), "type": "invoke", "f": match[2], "value": value}
        match = _LIMO_RETURN.match(line)
        if match is None:
            raise ValueError("neither '[thread] call method(value)' nor '[thread] return'")
        result = None if match[2] is None else _limo_value(match[2].strip())
        return {"process": int(match[1]), "type": "ok", "value": result}

    return _read(text, source, parse)


def _limo_value(text: str) -> Any:
    if text in ("empty", "null", "nil"):
        return None
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return text
