"""SQL92 filters over message properties (R: the filter module of RocketMQ, MessageFilter by SQL).

    a > 5 AND (b = 'x' OR NOT c IS NULL) AND d IN ('p', 'q') AND e BETWEEN 1 AND 10 AND f <> TRUE AND g LIKE 'ab%'

Property values are text. A number in the expression makes the property be read as a number; a property that is
missing, or is no number where one is asked for, makes the comparison unknown, and unknown is not a match (SQL's
three-valued logic). Names are letters, digits, _ and $; keywords are read in any case; strings are quoted with ',
doubled inside. A parsed expression is a tree of closures; parsing is cached by whoever holds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

__all__ = ["SqlError", "SqlFilter", "parse_sql"]

MAX_DEPTH = 64
"""Nesting of parentheses and NOT."""
MAX_TOKENS = 2000
CACHE_ENTRIES = 256
"""Parsed expressions kept; consumers of one group share one."""

Value = str | float | bool | None
Properties = Mapping[str, str]
_Term = Callable[[Properties], Value]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+|\d+(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_$][\w$.]*)"
    r"|'(?P<text>(?:[^']|'')*)'|(?P<sign><>|!=|>=|<=|[=<>(),+\-]))"
)
_KEYWORDS = frozenset(
    ["AND", "OR", "NOT", "IS", "NULL", "IN", "BETWEEN", "TRUE", "FALSE", "LIKE", "CONTAINS", "STARTSWITH", "ENDSWITH"]
)


class SqlError(ValueError):
    """An expression that cannot be read; the text says where."""


class SqlFilter:
    """A parsed expression."""

    __slots__ = ("_test", "expression")

    def __init__(self, expression: str, test: _Term) -> None:
        self.expression = expression
        self._test = test

    def matches(self, properties: Properties) -> bool:
        """Whether the expression is true of these properties; unknown is not."""
        return self._test(properties) is True


@lru_cache(maxsize=CACHE_ENTRIES)
def parse_sql(expression: str) -> SqlFilter:
    """Parse an expression. Raises SqlError."""
    return SqlFilter(expression, _Parser(expression).parse())


class _Parser:
    """Recursive descent: OR over AND over NOT over comparisons."""

    def __init__(self, expression: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while expression[at:].strip():
            found = _TOKEN.match(expression, at)
            if found is None:
                raise SqlError(f"cannot be read from character {at}: {expression[at : at + 20]!r}")
            kind = found.lastgroup or ""
            text = found[kind]
            if kind == "name" and text.upper() in _KEYWORDS:
                kind, text = "keyword", text.upper()
            self._tokens.append((kind, text.replace("''", "'") if kind == "text" else text))
            if len(self._tokens) > MAX_TOKENS:
                raise SqlError(f"more than {MAX_TOKENS} parts")
            at = found.end()
        self._at = 0
        self._depth = 0

    def parse(self) -> _Term:
        test = self._or()
        if self._at < len(self._tokens):
            raise SqlError(f"{self._tokens[self._at][1]!r} is not expected")
        return test

    def _peek(self, *texts: str, ahead: int = 0) -> bool:
        at = self._at + ahead
        return at < len(self._tokens) and self._tokens[at][0] in ("keyword", "sign") and self._tokens[at][1] in texts

    def _take(self, *texts: str) -> str | None:
        if self._peek(*texts):
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    def _need(self, text: str) -> None:
        if self._take(text) is None:
            found = self._tokens[self._at][1] if self._at < len(self._tokens) else "the end"
            raise SqlError(f"{text} is expected before {found!r}")

    def _or(self) -> _Term:
        terms = [self._and()]
        while self._take("OR"):
            terms.append(self._and())
        return terms[0] if len(terms) == 1 else lambda properties: _any(terms, properties)

    def _and(self) -> _Term:
        terms = [self._not()]
        while self._take("AND"):
            terms.append(self._not())
        return terms[0] if len(terms) == 1 else lambda properties: _all(terms, properties)

    def _not(self) -> _Term:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SqlError(f"nested more than {MAX_DEPTH} deep")
        try:
            if self._take("NOT"):
                inner = self._not()
                return lambda properties: _negate(inner(properties))
            if self._take("("):
                inner = self._or()
                self._need(")")
                return inner
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> _Term:
        left, is_name = self._operand()
        sign = self._take("=", "<>", "!=", ">", ">=", "<", "<=")
        if sign is not None:
            right, _ = self._operand()
            return lambda properties: _compare(sign, left(properties), right(properties))
        if self._take("IS"):
            wanted = self._take("NOT") is None
            self._need("NULL")
            return lambda properties: (left(properties) is None) is wanted
        negated = self._take("NOT") is not None
        test = self._membership(left)
        if test is None:
            if negated or not is_name:
                raise SqlError("a comparison is expected")
            return lambda properties: _truth(left(properties))
        found: _Term = test
        return (lambda properties: _negate(found(properties))) if negated else found

    def _membership(self, left: _Term) -> _Term | None:
        if self._take("BETWEEN"):
            low, _ = self._operand()
            self._need("AND")
            high, _ = self._operand()
            return lambda properties: _both(
                _compare(">=", left(properties), low(properties)), _compare("<=", left(properties), high(properties))
            )
        if self._take("IN"):
            self._need("(")
            members = [self._operand()[0]]
            while self._take(","):
                members.append(self._operand()[0])
            self._need(")")
            return lambda properties: _is_member(left(properties), members, properties)
        kind = self._take("LIKE", "CONTAINS", "STARTSWITH", "ENDSWITH")
        return None if kind is None else self._pattern(kind, left)

    def _pattern(self, kind: str, left: _Term) -> _Term:
        if self._at >= len(self._tokens) or self._tokens[self._at][0] != "text":
            raise SqlError(f"{kind} is followed by a string")
        wanted = self._tokens[self._at][1]
        self._at += 1

        def test(properties: Properties) -> Value:
            value = left(properties)
            if not isinstance(value, str):
                return None
            if kind == "LIKE":
                return _like(value, wanted)
            if kind == "CONTAINS":
                return wanted in value
            return value.startswith(wanted) if kind == "STARTSWITH" else value.endswith(wanted)

        return test

    def _operand(self) -> tuple[_Term, bool]:
        """A literal or a property; whether it is a property or a truth value."""
        sign = self._take("+", "-")
        if self._at >= len(self._tokens):
            raise SqlError("something is missing at the end")
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "number":
            number = -float(text) if sign == "-" else float(text)
            return (lambda properties: number), False
        if sign is not None:
            raise SqlError(f"a number is expected after {sign}")
        if kind == "text":
            return (lambda properties: text), False
        if kind == "name":
            return (lambda properties: properties.get(text)), True
        if text in ("TRUE", "FALSE"):
            truth = text == "TRUE"
            return (lambda properties: truth), True
        raise SqlError(f"{text!r} is not expected")


def _like(value: str, pattern: str) -> bool:
    """SQL's LIKE, without regular expressions: their time could explode. % is any text, _ one character."""
    at = pattern_at = 0
    star, resume = -1, 0
    while at < len(value):
        if pattern_at < len(pattern) and pattern[pattern_at] == "%":
            star, resume = pattern_at, at
            pattern_at += 1
        elif pattern_at < len(pattern) and pattern[pattern_at] in ("_", value[at]):
            at, pattern_at = at + 1, pattern_at + 1
        elif star >= 0:
            resume += 1
            at, pattern_at = resume, star + 1
        else:
            return False
    return all(character == "%" for character in pattern[pattern_at:])


def _truth(value: Value) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return None


def _number(value: Value) -> float | None:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, float) else None


def _compare(sign: str, left: Value, right: Value) -> bool | None:
    """Compare as what the literal side is; unknown when that cannot be done."""
    if left is None or right is None:
        return None
    if isinstance(left, bool) or isinstance(right, bool):
        first, second = _truth(left), _truth(right)
        if first is None or second is None or sign not in ("=", "<>", "!="):
            return None
        return (first == second) is (sign == "=")
    if isinstance(left, float) or isinstance(right, float):
        low, high = _number(left), _number(right)
        return None if low is None or high is None else _ordered(sign, low, high)
    return _ordered(sign, left, right)


def _ordered(sign: str, left: str | float, right: str | float) -> bool:
    if sign == "=":
        return left == right
    if sign in ("<>", "!="):
        return left != right
    if sign == ">":
        return left > right  # type: ignore[operator]
    if sign == ">=":
        return left >= right  # type: ignore[operator]
    if sign == "<":
        return left < right  # type: ignore[operator]
    return left <= right  # type: ignore[operator]


def _negate(value: Value) -> bool | None:
    truth = _truth(value)
    return None if truth is None else not truth


def _both(first: Value, second: Value) -> bool | None:
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def _is_member(value: Value, members: list[_Term], properties: Properties) -> bool | None:
    result: bool | None = False
    for member in members:
        same = _compare("=", value, member(properties))
        if same:
            return True
        if same is None:
            result = None
    return result


def _all(terms: list[_Term], properties: Properties) -> bool | None:
    result: bool | None = True
    for term in terms:
        truth = _truth(term(properties))
        if truth is False:
            return False
        if truth is None:
            result = None
    return result


def _any(terms: list[_Term], properties: Properties) -> bool | None:
    result: bool | None = False
    for term in terms:
        truth = _truth(term(properties))
        if truth is True:
            return True
        if truth is None:
            result = None
    return result
