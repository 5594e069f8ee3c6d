"""Jepsen's EDN histories, old and new.

One map an event, bare or all inside one vector or list; records (``#jepsen.history.Op{...}``) count as maps, vectors
``[process type f value]`` as events of the oldest form; comments and ``#_`` are skipped.  Keywords, symbols and
strings all become ``str``.  Porcupine's key-value logs are of the same form.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator
from operator import call
from typing import Any

from checker.codecs.jsonl import FormatError
from checker.history import History, HistoryBuilder, HistoryError, freeze
from checker.words import short

__all__ = ["parse_edn", "read_edn_text"]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|;[^\n]*|#_|#\{|##-?\w+|#\^?[\w.$/-]+|\\\S[\w]*|[\[\](){}]|[^\s,\[\](){}";]+')
_STRING_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "b": "\b", "f": "\f"}
_CLOSERS = {"]": "[", ")": "(", "}": "{"}
_CONSTANTS: dict[str, Any] = {"nil": None, "true": True, "false": False}
#: What is no number stays a word, which is equal to itself.
_SYMBOLIC: dict[str, Any] = {"##Inf": math.inf, "##-Inf": -math.inf}
_CODE_POINT = re.compile(r"u[0-9a-fA-F]{4}")
_NAMED_CHARS = {"newline": "\n", "space": " ", "tab": "\t", "return": "\r"}
#: Atoms remembered while parsing: histories repeat few keywords and small numbers; times never repeat.
_MAX_REMEMBERED = 1 << 16
#: Digits of numbers worth remembering: longer ones are times, which never repeat.
_SHORT_NUMBER = 4
#: Shapes of lines that are looked for: most histories have two to four, and each one more is tried on every line.
_MAX_SHAPES = 8


class EdnError(ValueError):
    """Text that is not EDN; ``line`` counts from 1."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(f"line {line}: {reason}")
        self.reason = reason
        self.line = line


class _Atoms(dict[str, Any]):
    """Token to value, remembered."""

    def __missing__(self, token: str) -> Any:
        if token.isdecimal():
            value: Any = int(token)
            if len(token) <= _SHORT_NUMBER:
                self[token] = value
            return value
        value = _atom(token)
        if len(self) < _MAX_REMEMBERED:
            self[token] = value
        return value


def _atom(token: str) -> Any:
    first = token[0]
    if first == ":":
        return token[1:]
    if first == '"':
        return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", lambda m: _escaped(m[1], _STRING_ESCAPES), token[1:-1], flags=re.S)
    if first == "[":
        return [_atom(part) for part in token[1:-1].replace(",", " ").split()]
    if first == "\\":
        return _escaped(token[1:], _NAMED_CHARS)
    if first == "#":
        return _SYMBOLIC.get(token, token)
    if (first.isdigit() or first in "+-") and "_" not in token:
        try:
            return int(token[:-1] if token[-1] == "N" else token)
        except ValueError:
            try:
                return float(token[:-1] if token[-1] == "M" else token)
            except ValueError:
                return token
    return _CONSTANTS.get(token, token)


def _escaped(name: str, names: dict[str, str]) -> str:
    """The character of that name, or with that code point."""
    return chr(int(name[1:], 16)) if _CODE_POINT.fullmatch(name) else names.get(name, name)


def parse_edn(text: str) -> list[Any]:
    """All top-level forms of ``text``.  Raises :class:`EdnError` with the line at fault."""
    return [form for form, _ in _forms(text, _Atoms())]


def _forms(text: str, atoms: _Atoms, first_line: int = 1) -> list[tuple[Any, int]]:
    """Top-level forms, each with the offset at which it ends."""
    out: list[tuple[Any, int]] = []
    stack: list[tuple[str, list[Any], int]] = []
    items: list[Any] | None = None
    discard: list[int] = []
    end = 0
    for match in _TOKEN.finditer(text):
        if not text[end : match.start()].strip(" \t\r\n,\f") == "" and text[end : match.start()]:
            raise EdnError(f"unexpected {text[end:match.start()].strip()[:20]!r}", _line(text, end, first_line))
        end = match.end()
        token = match.group()
        if token in "[({" or token == "#{":
            stack.append((token, [], match.start()))
            items = stack[-1][1]
            continue
        if token in "])}":
            if not stack or stack[-1][0][-1] != _CLOSERS[token]:
                raise EdnError(f"{token!r} closes nothing", _line(text, match.start(), first_line))
            opener, inner, _ = stack.pop()
            items = stack[-1][1] if stack else None
            value = _collection(opener, inner, text, match.start(), first_line)
        elif token[0] == ";":
            continue
        elif token == "#_":
            discard.append(len(stack))
            continue
        elif token[0] == "#" and token[:2] != "##":
            continue
        else:
            value = atoms[token]
        if discard and discard[-1] == len(stack):
            discard.pop()
        elif items is None:
            out.append((value, end))
        else:
            items.append(value)
    if text[end:].strip(" \t\r\n,\f"):
        raise EdnError(f"unexpected {text[end:].strip()[:20]!r}", _line(text, end, first_line))
    if stack:
        opener, _, start = stack[0]
        raise EdnError(f"{opener!r} is never closed", _line(text, start, first_line))
    return out


def _collection(opener: str, items: list[Any], text: str, at: int, first_line: int) -> Any:
    if opener in "[(":
        return items
    if opener == "#{":
        return frozenset(freeze(item) for item in items)
    if len(items) % 2:
        raise EdnError("a map has a key without a value", _line(text, at, first_line))
    keys = items[::2]
    try:
        return dict(zip(keys, items[1::2], strict=True))
    except TypeError:
        return dict(zip(map(freeze, keys), items[1::2], strict=True))


def _line(text: str, at: int, first_line: int) -> int:
    return first_line + text.count("\n", 0, at)


def read_edn_text(text: str, *, source: str = "<edn>", keyed: bool | None = None) -> History:
    """A history from Jepsen EDN.

    ``keyed`` says that every value is an independent ``[key value]`` pair; by default that is recognised by reads
    invoked with ``[key nil]``.  Raises :class:`FormatError` naming the line at fault.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        try:
            events, lines = _events(text)
        except EdnError as error:
            raise FormatError(source, error.line, error.reason) from error
        if keyed or (keyed is None and _looks_keyed(events)):
            events = [_split_key(event) for event in events]
        builder = HistoryBuilder()
        try:
            builder.feed(events)
        except HistoryError as error:
            raise FormatError(source, lines[error.event or 0], error.reason) from error
        return builder.finish()
    finally:
        if collecting:
            gc.enable()


class _Shape:
    """Lines that name the same things in the same order, with the same type, and differ in other values only.

    A history has few: matching a whole line at once is several times faster than taking it apart.
    """

    def __init__(self, body: str, atoms: _Atoms) -> None:
        names, constants, readers = [], {}, []
        pattern, end = [r"\s*\{"], 0
        for pair in _PAIR.finditer(body):
            name, token = pair.groups()
            pattern.append(re.escape(body[end : pair.start(2)]))
            end = pair.end()
            if name == "type":
                pattern.append(re.escape(token))
                constants[name] = atoms[token]
                continue
            names.append(name)
            is_number = name in ("index", "time") and token.isdecimal()
            pattern.append(r"(\d+)" if is_number else f"({_VALUE})")
            readers.append(int if is_number else atoms.__getitem__)
        pattern += [re.escape(body[end:]), r"\}\s*"]
        if "process" not in names:
            constants.setdefault("process", 0)
        self.match = re.compile("".join(pattern)).fullmatch
        self.constants = constants
        self._names = tuple(names)
        self._readers = tuple(readers)

    def event(self, match: re.Match[str]) -> dict[str, Any]:
        """The event of a line that matches."""
        return dict(zip(self._names, map(call, self._readers, match.groups()), strict=True), **self.constants)


def _events(text: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Events and the line each ends on.  Lines like one before, and flat one-line maps, take shorter ways."""
    atoms = _Atoms()
    text = _without_outer(text)
    events: list[dict[str, Any]] = []
    lines: list[int] = []
    shapes: list[_Shape] = []
    add, add_line = events.append, lines.append
    pending: list[str] = []
    pending_line = 1

    def add_forms(of: str, first_line: int) -> None:
        for form, end in _forms(of, atoms, first_line):
            line = _line(of, end, first_line)
            for event in _event(form, line):
                add(event)
                add_line(line)

    for number, raw in enumerate(text.split("\n"), 1):
        if not pending:
            for shape in shapes:
                match = shape.match(raw)
                if match is not None:
                    break
            else:
                match = None
            if match is not None:
                add(shape.event(match))
                add_line(number)
                continue
        line = raw.strip()
        if not pending and line[:1] == "{" and line[-1:] == "}":
            body = line[1:-1]
            event = _flat_event(body, atoms)
            if event is not None:
                add(event)
                add_line(number)
                if len(shapes) < _MAX_SHAPES and _FLAT.fullmatch(body):
                    shapes.append(_Shape(body, atoms))
                continue
            try:
                forms = _forms(line, atoms, number)
            except EdnError:
                forms = []
            if forms:
                for form, _ in forms:
                    for event in _event(form, number):
                        add(event)
                        add_line(number)
                continue
        if not pending:
            if not line or line[0] == ";":
                continue
            pending_line = number
        pending.append(raw)
        if line[:1] == "}" or line[-1:] == "}":
            whole = "\n".join(pending)
            if _balanced(whole):
                add_forms(whole, pending_line)
                pending = []
    if pending:
        add_forms("\n".join(pending), pending_line)
    return events, lines


def _flat_event(body: str, atoms: _Atoms) -> dict[str, Any] | None:
    """The event between the braces of a line, if its values are atoms, plain strings or vectors of atoms."""
    event: dict[str, Any] | None = None
    if not _NESTED.search(body):
        tokens = body.replace(",", " ").split()
        if len(tokens) % 2 == 0 and ('"' not in body or _whole_strings(tokens, body)):
            event = {key[1:]: atoms[token] for key, token in zip(tokens[::2], tokens[1::2], strict=True)}
    if event is None and _FLAT.fullmatch(body):
        event = {name: atoms[token] for name, token in _PAIR.findall(body)}
    if event is not None:
        event.setdefault("process", 0)
    return event


def _whole_strings(tokens: list[str], body: str) -> bool:
    """Whether every string in a line split at spaces and commas is still whole."""
    strings = [token for token in tokens if token[0] == '"']
    return 2 * len(strings) == body.count('"') and all(len(token) > 1 and token[-1] == '"' for token in strings)


def _without_outer(text: str) -> str:
    """The text without the one vector or list around all events, every line where it was."""
    opening = _OUTER.match(text)
    closed = text.rstrip()
    if opening is None or closed[-1:] != {"[": "]", "(": ")"}[opening[1]]:
        return text
    at = opening.start(1)
    return f"{text[:at]} {closed[at + 1 : -1]}"


#: A vector or list that opens before the first event, behind comments.
_OUTER = re.compile(r"(?:\s|;[^\n]*\n)*([\[(])(?=(?:\s|;[^\n]*\n)*[{#\[(])")
#: Names with atoms, plain strings or vectors of atoms: most lines of most histories.
_VALUE = r'"[^"\\]*"|\[[^\[\]{}()"#\\;]*\]|[^\s,{}\[\]()"#\\;]+'
_FLAT = re.compile(rf"(?::[\w*+!?<>=/.-]+\s+(?:{_VALUE})[\s,]*)+")
_PAIR = re.compile(rf":([\w*+!?<>=/.-]+)\s+({_VALUE})")
_NESTED = re.compile(r"[\[\](){};#\\]")
#: Most text that is looked at again and again for the end of a form that spans lines.
_MAX_REBALANCED_CHARS = 1 << 14


def _balanced(text: str) -> bool:
    if len(text) > _MAX_REBALANCED_CHARS:
        return False
    depth = 0
    for token in _TOKEN.findall(text):
        if token in "[({" or token == "#{":
            depth += 1
        elif token in "])}":
            depth -= 1
    return depth == 0


def _event(form: Any, line: int) -> Iterator[dict[str, Any]]:
    if isinstance(form, dict):
        form.setdefault("process", 0)
        yield form
    elif isinstance(form, list) and len(form) >= 3 and form[1] in ("invoke", "ok", "fail", "info"):
        process, kind, f = form[:3]
        yield {"process": process, "type": kind, "f": f, "value": form[3] if len(form) > 3 else None}
    elif isinstance(form, list):
        for inner in form:
            yield from _event(inner, line)
    else:
        raise EdnError(f"an event must be a map, not {short(form, 60)}", line)


def _looks_keyed(events: list[dict[str, Any]]) -> bool:
    found = False
    for event in events:
        if event["process"].__class__ is not int:
            continue
        value = event.get("value")
        if not isinstance(value, list) or len(value) != 2 or isinstance(value[0], (list, dict)):
            return False
        if event.get("type") == "invoke" and value[1] is None:
            found = True
    return found


def _split_key(event: dict[str, Any]) -> dict[str, Any]:
    value = event.get("value")
    if event["process"].__class__ is not int or not isinstance(value, list) or len(value) != 2:
        return event
    return {**event, "key": freeze(value[0]), "value": value[1]}
