"""Jepsen's EDN histories, old and new.

One map per event, bare or all inside one vector or list; records (``#jepsen.history.Op{...}``) count as maps, vectors
``[process type f value]`` as events of the oldest form; comments and ``#_`` are skipped.  Keywords, symbols and
strings all become ``str``.  Porcupine's key-value logs have the same form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from operator import call
from typing import Any

from checker.codecs.pairs import looks_keyed, split_keys
from checker.codecs.source import BATCH_LINES, EVENT_IN_COMMENT, FileEvents
from checker.history import History, freeze
from checker.linearizability.budget import no_collection
from checker.values import MAX_DECIMAL_PLACES, ExactDecimal
from checker.words import short

__all__ = ["parse_edn", "read_edn_text"]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|;[^\n]*|#_|#\{|##-?\w+|#\^?[\w.$/-]+|\\\S[\w]*|[\[\](){}]|[^\s,\[\](){}";]+')
_STRING_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "b": "\b", "f": "\f"}
_CLOSERS = {"]": "[", ")": "(", "}": "{"}
_CONSTANTS: dict[str, Any] = {"nil": None, "true": True, "false": False}
#: Symbolic values that are not numbers (NaN) stay strings, which equal themselves.
_SYMBOLIC: dict[str, Any] = {"##Inf": math.inf, "##-Inf": -math.inf}
_EVENT_IN_COMMENT = re.compile(r":(invoke|ok|fail|info)\b")
#: What must follow a tag: a form, on the same line.
_TAGGED = re.compile(r"[ \t,]*(?:[^\s,#\])};]|#\{|##)")
_CODE_POINT = re.compile(r"u[0-9a-fA-F]{4}")
_NAMED_CHARS = {"newline": "\n", "space": " ", "tab": "\t", "return": "\r"}
#: Maximum number of atoms cached while parsing: histories repeat few keywords and small numbers; times never repeat.
_MAX_REMEMBERED = 1 << 16
#: Maximum digits of numbers worth caching: longer ones are times, which never repeat.
_SHORT_NUMBER = 4
#: Deepest nesting that is read: code that inspects values recurses no deeper, and a file of braces would fill memory.
_MAX_DEPTH = 1_000
#: Tokens between two checks of memory: a single form may be large, and is held as a whole.
_TOKENS_PER_LOOK = 1 << 16
#: Maximum number of line shapes: most histories have two to four, and every additional one is tried on each line.
_MAX_SHAPES = 8


class EdnError(ValueError):
    """Text that is not EDN; ``line`` counts from 1."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(f"line {line}: {reason}")
        self.reason = reason
        self.line = line


class _Atoms(dict[str, Any]):
    """Token -> value, cached."""

    def __missing__(self, token: str) -> Any:
        if token.isdecimal():
            value: Any = _whole(token)
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
        if len(token) == 1:
            raise EdnError("a keyword without a name", 1)
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
        return _number(token)
    if first == "^":
        raise EdnError("metadata (^) is not EDN", 1)
    return _CONSTANTS.get(token, token)


def _number(token: str) -> Any:
    """The number that a token denotes, or the token itself if it is not a number.  Raises :class:`EdnError` for a
    number so large that it could not be distinguished from others."""
    digits = token[:-1] if token[-1] == "N" else token
    if digits.lstrip("+-").isdecimal():
        return _whole(digits)
    try:
        found = float(token[:-1] if token[-1] == "M" else token)
    except ValueError:
        return token
    if math.isfinite(found):
        return _decimal(token) if token[-1] == "M" else found
    if any(map(str.isdigit, token)):
        raise EdnError(f"{short(token)} is too large: it would be read as infinity", 1)
    return token  # a symbol, as +inf


def _decimal(token: str) -> Any:
    """A decimal (``0.1M``), exactly as written; a whole number becomes an int, since ``1`` is ``1.0``."""
    found = ExactDecimal(token[:-1])
    places = max(abs(found.adjusted()), len(found.as_tuple().digits))
    if places > MAX_DECIMAL_PLACES:
        raise EdnError(f"a decimal of {places:,} places is too long to be read", 1)
    return int(found) if found == found.to_integral_value() else found


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise EdnError(f"a number of {len(digits)} digits is too long to be read", 1) from None


def _escaped(name: str, names: dict[str, str]) -> str:
    """The character with this name or code point."""
    return chr(int(name[1:], 16)) if _CODE_POINT.fullmatch(name) else names.get(name, name)


def parse_edn(text: str) -> list[Any]:
    """All top-level forms of ``text``.  Raises :class:`EdnError` with the line at fault."""
    return [form for form, _ in _forms(text, _Atoms())]


def _forms(
    text: str, atoms: _Atoms, first_line: int = 1, look: Callable[[str], None] = lambda reached: None
) -> list[tuple[Any, int]]:
    """Top-level forms, each with its end offset; ``look`` is called from time to time with the line reached."""
    out: list[tuple[Any, int]] = []
    stack: list[tuple[str, list[Any], int]] = []
    items: list[Any] | None = None
    discard: list[int] = []
    end = 0
    for count, match in enumerate(_TOKEN.finditer(text), 1):
        if count % _TOKENS_PER_LOOK == 0:
            look(f"line {_line(text, end, first_line):,}")
        if not text[end : match.start()].strip(" \t\r\n,\f") == "" and text[end : match.start()]:
            raise EdnError(f"unexpected {text[end : match.start()].strip()[:20]!r}", _line(text, end, first_line))
        end = match.end()
        token = match.group()
        if token in "[({" or token == "#{":
            if len(stack) == _MAX_DEPTH:
                raise EdnError("nested too deeply", _line(text, match.start(), first_line))
            stack.append((token, [], match.start()))
            items = stack[-1][1]
            continue
        if token in "])}":
            if not stack or stack[-1][0][-1] != _CLOSERS[token]:
                raise EdnError(f"unmatched {token!r}", _line(text, match.start(), first_line))
            opener, inner, _ = stack.pop()
            items = stack[-1][1] if stack else None
            value = _collection(opener, inner, text, match.start(), first_line)
        elif token[0] == ";":
            if _EVENT_IN_COMMENT.search(token):
                raise EdnError(EVENT_IN_COMMENT, _line(text, match.start(), first_line))
            continue
        elif token == "#_":
            discard.append(len(stack))
            continue
        elif token[0] == "#" and token[:2] != "##":
            if not _TAGGED.match(text, end):
                raise EdnError(f"nothing follows {token[:40]!r}", _line(text, match.start(), first_line))
            continue
        else:
            try:
                value = atoms[token]
            except EdnError as error:
                raise EdnError(error.reason, _line(text, match.start(), first_line)) from None
        if discard and discard[-1] == len(stack):
            discard.pop()
            if isinstance(value, dict) and "type" in value and len(stack) < 2:
                raise EdnError(EVENT_IN_COMMENT, _line(text, match.start(), first_line))
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
        found = dict(zip(keys, items[1::2], strict=True))
    except TypeError:
        found = dict(zip(map(freeze, keys), items[1::2], strict=True))
    if len(found) < len(keys):
        raise EdnError("a map has a key twice", _line(text, at, first_line))
    return found


def _line(text: str, at: int, first_line: int) -> int:
    return first_line + text.count("\n", 0, at)


@no_collection()
def read_edn_text(text: str, file: FileEvents, *, keyed: bool | None = None) -> History:
    """A history from Jepsen EDN.

    ``keyed`` means that every value is an independent ``[key value]`` pair; by default that is recognised by reads
    invoked with ``[key nil]``.  Raises :class:`FormatError`, which names the line at fault.
    """
    _Reader(file).read(text)
    history = file.finish()
    unfinished = file.never_completed()
    if keyed or (keyed is None and looks_keyed(history, unfinished)):
        split_keys(history, file.source, lenient=file.lenient)
    return history


class _Shape:
    """Lines with the same names in the same order and the same type, which differ only in other values.

    A history has few shapes, and matching a whole line at once is several times faster than splitting it into tokens.
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
        self.match = re.compile("".join(pattern)).fullmatch
        self.constants = constants
        self._names = tuple(names)
        self._readers = tuple(readers)

    def event(self, match: re.Match[str]) -> dict[str, Any]:
        """The event of a line that matches."""
        return dict(zip(self._names, map(call, self._readers, match.groups()), strict=True), **self.constants)


class _Reader:
    """Passes the events of a text to a :class:`FileEvents`, one batch of lines at a time.

    Lines with a known shape, and flat one-line maps, take fast paths; forms that span lines are collected until they
    are complete.
    """

    def __init__(self, file: FileEvents) -> None:
        self._file = file
        self._atoms = _Atoms()
        self._shapes: list[_Shape] = []
        self._events: list[dict[str, Any]] = []
        self._lines: list[int] = []
        self._pending: list[str] = []
        self._pending_line = 1

    def read(self, text: str) -> None:
        """Pass on all events.  Raises :class:`FormatError`."""
        lines = _without_outer(text).split("\n")
        for start in range(0, len(lines), BATCH_LINES):
            self._read_lines(lines[start : start + BATCH_LINES], start + 1)
            self._hand_over()
        if self._pending:
            self._take_pending()
            self._hand_over()

    def _read_lines(self, lines: list[str], first_line: int) -> None:
        shapes, pending = self._shapes, self._pending
        add, add_line = self._events.append, self._lines.append
        for number, raw in enumerate(lines, first_line):
            if not pending:
                for shape in shapes:
                    match = shape.match(raw)
                    if match is not None:
                        break
                else:
                    match = None
                if match is not None:
                    try:
                        add(shape.event(match))
                    except ValueError:
                        self._read_line(raw, number)
                        continue
                    add_line(number)
                    continue
            self._read_line(raw, number)

    def _read_line(self, raw: str, number: int) -> None:
        line = raw.strip()
        if self._pending and self._file.lenient and self._is_whole_event(line):
            self._file.refuse(self._pending_line, "a form that is never closed")
            self._pending.clear()
        if not self._pending:
            if not line:
                return
            if line[0] == ";":
                if _EVENT_IN_COMMENT.search(line):
                    self._file.refuse(number, EVENT_IN_COMMENT)
                return
            is_map = line[0] == "{" and line[-1] == "}"
            if is_map and (self._read_flat(line[1:-1], number) or self._read_whole(line, number)):
                return
            self._pending_line = number
        self._pending.append(raw)
        if (line[:1] == "}" or line[-1:] in ("}", "]", ")")) and _balanced("\n".join(self._pending)):
            self._take_pending()

    def _read_flat(self, body: str, number: int) -> bool:
        """Take the event between the braces of a line, if it is flat."""
        event = _flat_event(body, self._atoms)
        if event is None:
            return False
        self._events.append(event)
        self._lines.append(number)
        if len(self._shapes) < _MAX_SHAPES and _FLAT.fullmatch(body):
            self._shapes.append(_Shape(body, self._atoms))
        return True

    def _read_whole(self, line: str, number: int) -> bool:
        """Take the forms on a line, if they also end there."""
        try:
            forms = _forms(line, self._atoms, number, self._file.check_memory)
        except EdnError:
            return False
        for form, _ in forms:
            self._take_form(form, number)
        return bool(forms)

    def _take_pending(self) -> None:
        text, first_line = "\n".join(self._pending), self._pending_line
        self._pending.clear()
        try:
            forms = _forms(text, self._atoms, first_line, self._file.check_memory)
        except EdnError as error:
            self._file.refuse(error.line, error.reason, error)
            return
        line, counted = first_line, 0
        for form, end in forms:
            line += text.count("\n", counted, end)
            counted = end
            self._take_form(form, line)

    def _take_form(self, form: Any, line: int) -> None:
        try:
            for event in _event(form):
                self._events.append(event)
                self._lines.append(line)
        except ValueError as error:
            self._file.refuse(line, str(error), error)

    def _is_whole_event(self, line: str) -> bool:
        """Whether a line is an event on its own, so that it cannot be the continuation of a form before it."""
        if line[:1] not in ("{", "[", "#"):
            return False
        try:
            events = [event for form, _ in _forms(line, self._atoms) for event in _event(form)]
        except ValueError:
            return False
        return any("type" in event for event in events)

    def _hand_over(self) -> None:
        self._file.feed_alone(self._events, self._lines)
        self._events.clear()
        self._lines.clear()


def _flat_event(body: str, atoms: _Atoms) -> dict[str, Any] | None:
    """The event between the braces of a line, if its values are atoms, plain strings or vectors of atoms."""
    pairs: list[tuple[str, Any]] | None = None
    try:
        if not _NESTED.search(body):
            tokens = body.replace(",", " ").split()
            names = tokens[::2]
            if (
                len(tokens) % 2 == 0
                and all(name[0] == ":" for name in names)
                and ('"' not in body or _whole_strings(tokens, body))
            ):
                pairs = [(name[1:], atoms[token]) for name, token in zip(names, tokens[1::2], strict=True)]
        if pairs is None and _FLAT.fullmatch(body):
            pairs = [(name, atoms[token]) for name, token in _PAIR.findall(body)]
    except EdnError:
        return None  # the slow path reports the line
    if pairs is None:
        return None
    event = dict(pairs)
    return event if len(event) == len(pairs) else None


def _whole_strings(tokens: list[str], body: str) -> bool:
    """Whether every string in a line split at spaces and commas is still whole."""
    strings = [token for token in tokens if token[0] == '"']
    return 2 * len(strings) == body.count('"') and all(len(token) > 1 and token[-1] == '"' for token in strings)


def _without_outer(text: str) -> str:
    """The text without the vector or list around all events, with unchanged line numbers."""
    opening = _OUTER.match(text)
    closed = text.rstrip()
    if opening is None or closed[-1:] != {"[": "]", "(": ")"}[opening[1]]:
        return text
    at = opening.start(1)
    return f"{text[:at]} {closed[at + 1 : -1]}"


#: A vector or list that opens before the first event, possibly after comments.
_OUTER = re.compile(r"(?:\s|;[^\n]*\n)*([\[(])(?=(?:\s|;[^\n]*\n)*[{#\[(])")
#: Names with atoms, plain strings or vectors of atoms: most lines of most histories.
_VALUE = r'"[^"\\]*"|\[[^\[\]{}()"#\\;]*\]|[^\s,{}\[\]()"#\\;]+'
_FLAT = re.compile(rf"(?::[\w*+!?<>=/.-]+\s+(?:{_VALUE})[\s,]*)+")
_PAIR = re.compile(rf":([\w*+!?<>=/.-]+)\s+({_VALUE})")
_NESTED = re.compile(r"[\[\](){};#\\]")
#: Longest pending text that is rescanned at each line for the end of a form that spans lines.
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


def _event(form: Any, *, is_outer: bool = True) -> Iterator[dict[str, Any]]:
    """The events of a form: a map, a vector of the oldest kind, or one list around all.

    Raises :class:`ValueError` for anything else.
    """
    if isinstance(form, dict):
        yield form
    elif isinstance(form, list) and len(form) in (3, 4) and form[1] in ("invoke", "ok", "fail", "info"):
        process, kind, f = form[:3]
        yield {"process": process, "type": kind, "f": f, "value": form[3] if len(form) > 3 else None}
    elif isinstance(form, list) and form and is_outer and all(isinstance(inner, (dict, list)) for inner in form):
        for inner in form:
            yield from _event(inner, is_outer=False)
    else:
        raise ValueError(f"an event must be a map, not {short(form, 60)}")
