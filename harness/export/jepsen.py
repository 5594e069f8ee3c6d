"""A run as Jepsen stores one: history.edn and results.edn, which elle-cli, Knossos and `jepsen serve` read.

An event becomes a map with `:process`, `:type`, `:f`, `:value`, `:time` (ns) and `:index`. What differs from Jepsen's
conventions is converted: the value of an operation with a key of its own becomes `[key value]`, as of
`jepsen.independent`; a successful write or compare-and-set keeps its argument as its value; a compare-and-set that did
not set is `:fail`; steps of a transaction are named by keywords; all events of the nemesis are `:info`. A run is in
TEST/TIME/, as `jepsen serve` expects it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from checker.faults import NEMESIS

__all__ = ["edn", "events_as_edn", "results_as_edn", "time_name"]

_KEYWORD = re.compile(r"[A-Za-z][\w*!?<>=+-]*\Z")
"""Names that are keywords without quoting, also to the strictest readers."""

_STEP_NAMES = {"append": "append", "r": "r", "w": "w", "read": "r", "write": "w"}

_CHANGES = ("write", "cas")
"""Functions whose successful completion has their argument as its value in Jepsen's histories."""


class _Keyword(str):
    """A name that is written as a keyword."""

    __slots__ = ()


def edn(value: Any) -> str:
    """A value of JSON as EDN; numbers that JSON does not have are written as symbolic values."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, _Keyword):
        return f":{value}"
    if isinstance(value, float) and not math.isfinite(value):
        return "##NaN" if math.isnan(value) else "##Inf" if value > 0 else "##-Inf"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # EDN has the escapes of JSON
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{edn(key)} {edn(each)}" for key, each in value.items()) + "}"
    return "[" + " ".join(map(edn, value)) + "]"


def events_as_edn(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A history's events, each as a line of history.edn."""
    asked: dict[Any, Any] = {}
    for event in events:
        process, kind, f = event["process"], event["type"], event["f"]
        if process == NEMESIS:
            yield _line(event, "info", event.get("value"), _Keyword(NEMESIS))
            continue
        value = event.get("value")
        if kind == "invoke":
            asked[process] = value
        else:
            argument = asked.pop(process, None)
            if kind == "ok" and f == "cas" and value is False:
                kind = "fail"
            if kind != "ok" or f in _CHANGES:
                value = argument
        if f == "txn" and isinstance(value, list):
            value = [_step(step) for step in value]
        yield _line(event, kind, value if event.get("key") is None else [event["key"], value], process)


def _line(event: Mapping[str, Any], kind: str, value: Any, process: Any) -> str:
    words = {
        "process": process,
        "type": _Keyword(kind),
        "f": _named(event["f"]),
        "value": value,
        "time": event.get("time"),
        "index": event.get("index"),
        "node": event.get("node"),
        "error": event.get("error"),
    }
    needed = ("process", "type", "f", "value")
    return edn({_Keyword(name): word for name, word in words.items() if word is not None or name in needed})


def _named(name: Any) -> Any:
    return _Keyword(name) if isinstance(name, str) and _KEYWORD.match(name) else name


def _step(step: Any) -> Any:
    if isinstance(step, list) and len(step) == 3 and step[0] in _STEP_NAMES:
        return [_Keyword(_STEP_NAMES[step[0]]), *step[1:]]
    return step


def results_as_edn(results: Mapping[str, Any]) -> str:
    """results.edn: `:valid?` of the run and of each check, with their reasons."""
    checks = results.get("checks")
    found = {
        _named(name): {
            _Keyword("valid?"): _validity(outcome.get("valid")), _Keyword("reason"): outcome.get("reason"),
        }
        for name, outcome in (checks.items() if isinstance(checks, Mapping) else ())
        if isinstance(outcome, Mapping)
    }  # fmt: skip
    top = {
        _Keyword("valid?"): _validity(results.get("valid")),
        _Keyword("reason"): results.get("reason"),
        _Keyword("replay"): results.get("replay"),
        **found,
    }
    return edn(top)


def _validity(valid: Any) -> Any:
    return valid if isinstance(valid, bool) else _Keyword("unknown")


def time_name(started_at: str) -> str:
    """The name of a run's directory in Jepsen's store: `20261130T114032.110Z`."""
    moment = datetime.fromisoformat(started_at)
    return f"{moment:%Y%m%dT%H%M%S}.{moment.microsecond // 1000:03d}Z"
