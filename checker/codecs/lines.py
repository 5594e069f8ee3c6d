"""Line formats of other tools: Jepsen's log lines and LiMo's call/return traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from checker.codecs.edn import EdnError, parse_edn
from checker.codecs.source import BATCH_LINES, EVENT_IN_COMMENT, FileEvents, FormatError
from checker.history import History

__all__ = ["read_jepsen_log_text", "read_limo_text"]

_LOG_LINE = re.compile(r"(?:^|\s)(-?\d+|:?[a-z][\w-]*)\s+:(invoke|ok|fail|info)\s+:([\w-]+)\s+(.*?)\s*$")
#: In a comment of such a log: an event without a process before it, or one of another format.
_LOG_EVENT = re.compile(r":(invoke|ok|fail|info)\s+:[\w-]|:type\s+:(invoke|ok|fail|info)\b|\"type\"\s*:")
#: The error after the value of a fail or info event.  Jepsen prints tabs between columns, and none within a value.
_LOG_ERROR = re.compile(r":(?:fail|info)\t:[\w-]+\t[^\t]*\t(.*?)\s*$")
#: Prefix of every event in the logs of Porcupine's etcd tests.
_ETCD_LOG = re.compile(r"INFO\s+jepsen\.util\s+-\s")
_LIMO_VALUE = r"(?:\?<[^<>\s]*>|[^\s,<>\[\]()]+)"
_LIMO_VALUES = rf"{_LIMO_VALUE}(?:\s*,\s*{_LIMO_VALUE})*"
_LIMO_OBJECT = re.compile(r"#\s*@object\s+(?:atomic-)?([\w-]+)\s*$")
_LIMO_CALL = re.compile(rf"\[(\d+)\]\s+call\s+(\w+)(?:\s*\(\s*({_LIMO_VALUES})?\s*\)|\s+({_LIMO_VALUES}))?$")
_LIMO_RETURN = re.compile(rf"\[(\d+)\]\s+return(?:\s+({_LIMO_VALUES}))?$")
#: In a comment of such a trace: an event, or one of another format whose lines also begin with `#`.
_LIMO_EVENT = re.compile(r"\[\d+\]\s+(call|return)|:type\s+:(invoke|ok|fail|info)\b|\"type\"\s*:")
#: Method name in these traces -> name in the models.
_LIMO_METHODS = {"enq": "enqueue", "deq": "dequeue", "rem": "remove"}
#: The same for containers only; for a map or a register these names mean something else.
_LIMO_CONTAINER_METHODS = {"put": "add", "get": "remove"}
_LIMO_CONTAINERS = frozenset({"queue", "stack", "bag", "pool", "priority-queue", "priorityqueue", "deque"})
_LIMO_TAKES = frozenset({"dequeue", "remove", "pop", "poll", "extract"})

Parse = Callable[[str], "dict[str, Any] | None"]


def _read(text: str, file: FileEvents, parse: Parse) -> History:
    lines = text.split("\n")
    for start in range(0, len(lines), BATCH_LINES):
        events: list[dict[str, Any]] = []
        numbers: list[int] = []
        for number, line in enumerate(lines[start : start + BATCH_LINES], start + 1):
            line = line.strip()
            if not line:
                continue
            try:
                event = parse(line)
            except ValueError as error:
                file.refuse(number, error.reason if isinstance(error, EdnError) else str(error), error)
                continue
            if event is not None:
                events.append(event)
                numbers.append(number)
        file.feed(events, numbers)
    if text and not text.endswith("\n"):
        # Only in these formats can a truncated line still parse; and many files have no line end at the end.
        file.note("the last line does not end in a newline: it may be cut short, and further lines may be missing")
    return file.finish()


def read_jepsen_log_text(text: str, file: FileEvents) -> History:
    """Lines ``process :type :f value`` after any log prefix, or ``process :type :f value error`` separated by tabs, as
    in Jepsen's ``history.txt``.

    In the logs of Porcupine's etcd tests, a compare-and-set that failed has found another value: it is read as
    completed with the result ``False``.  Anywhere else a failure means that nothing happened.

    Raises :class:`FormatError` for a line that is not an event, whose value is not EDN, or that does not pair; a
    lenient reader leaves out other lines of a log.
    """
    memory: dict[str, Any] = {}

    def parse(line: str) -> dict[str, Any] | None:
        match = _LOG_LINE.search(line)
        if line[0] in "#;":
            if match is not None or _LOG_EVENT.search(line):
                raise ValueError(EVENT_IN_COMMENT)
            return None
        if match is None:
            raise ValueError("not a line of the form 'process :type :f value'")
        process, kind, f, value = match.groups()
        failure = _LOG_ERROR.match(line, match.start(2) - 1)
        if failure is not None:
            if _LOG_EVENT.search(failure[1]):
                raise ValueError("two events on one line")
            value = value[: value.index("\t")]
        if value not in memory:
            forms = parse_edn(value)
            if len(forms) > 1:
                raise ValueError(f"one value must follow {kind} {f}, not {len(forms)}")
            first = forms[0] if forms else None
            memory[value] = first
        found = memory[value]
        number: Any = int(process) if process.lstrip("-").isdigit() else process
        event = {"process": number, "type": kind, "f": f, "value": found}
        if failure is not None:
            return {**event, "error": failure[1]}
        if kind == "fail" and f == "cas" and isinstance(found, (list, tuple)) and _ETCD_LOG.match(line):
            return {**event, "type": "ok", "value": False}
        return event

    history = _read(text, file, parse)
    if not len(history):
        raise FormatError(file.source, None, "no line of the form 'process :type :f value'")
    return history


def read_limo_text(text: str, file: FileEvents) -> History:
    """Call and return traces of LiMo and of the tools it descends from.

    Lines are ``[thread] call add(1)``, ``[thread] call push 1``, ``[thread] return``, ``[thread] return 1`` or
    ``[thread] return empty``; a first line ``# @object atomic-stack`` names the object.  If that is a container, a take
    may name the value that it took in its call, ``[thread] call pop(1)``, and return nothing; a take without a value in
    call and return found nothing.  Sources: the descriptions of the format in the repositories of LiMo (PLDI 2025) and
    of "Monitoring Refinement via Symbolic Reasoning" (PLDI 2015).
    """
    return _read(text, file, _LimoTrace().parse)


class _LimoTrace:
    """Parser of a trace, with the state that later lines depend on."""

    def __init__(self) -> None:
        self._object: str | None = None
        self._taken: dict[int, Any] = {}

    def parse(self, line: str) -> dict[str, Any] | None:
        """The event on a line, if it holds one.  Raises ``ValueError``."""
        if line[0] in "#;":
            if _LIMO_EVENT.search(line):
                raise ValueError(EVENT_IN_COMMENT)
            header = _LIMO_OBJECT.match(line)
            if header is not None:
                self._object = header[1]
            return None
        match = _LIMO_CALL.match(line)
        if match is not None:
            return self._call(int(match[1]), match[2], match[3] or match[4])
        match = _LIMO_RETURN.match(line)
        if match is not None:
            return self._return(int(match[1]), match[2])
        if line == "crash":
            raise ValueError("a crash of the whole object: durable linearizability is not checked")
        raise ValueError("neither '[thread] call method(value)' nor '[thread] return'")

    def _call(self, thread: int, method: str, argument: str | None) -> dict[str, Any]:
        names = _LIMO_METHODS
        if self._object is None or self._object in _LIMO_CONTAINERS:
            names = names | _LIMO_CONTAINER_METHODS
        f = names.get(method, method)
        value = _limo_values(argument)
        self._taken.pop(thread, None)
        if f in _LIMO_TAKES and value is not None and self._object in _LIMO_CONTAINERS:
            self._taken[thread], value = value, None
        return {"process": thread, "type": "invoke", "f": f, "value": value}

    def _return(self, thread: int, argument: str | None) -> dict[str, Any]:
        result = _limo_values(argument)
        if thread in self._taken:
            taken = self._taken.pop(thread)
            if argument is not None and result != taken:
                raise ValueError(f"the call took {taken!r}, and the return says {result!r}")
            result = taken
        return {"process": thread, "type": "ok", "value": result}


def _limo_values(text: str | None) -> Any:
    """A single value as it is, several as a list, none as ``None``."""
    values = [_limo_value(part) for part in re.findall(_LIMO_VALUE, text or "")]
    return values[0] if len(values) == 1 else values or None


def _limo_value(text: str) -> Any:
    if text in ("empty", "null", "nil"):
        return None
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return text
