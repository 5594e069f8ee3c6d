"""SQL92 filters over message properties (R: the filter module of RocketMQ, MessageFilter by SQL).

    a > 5 AND (b = 'x' OR NOT c IS NULL) AND d IN ('p', 'q') AND e BETWEEN -1 AND 10 AND f <> TRUE AND g LIKE 'ab%'

Property values are text. A property that is compared with a number is read as a number; a property that is
missing, or not a number where one is needed, makes the comparison unknown, and unknown is not a match (SQL's
three-valued logic). Names are letters, digits, _ and $; keywords are read in any case; strings are quoted with ',
doubled inside; comments begin with -- or stand between /* and */. A parsed expression is a tree of closures;
`parse_sql` caches them.

Everything that RocketMQ 4.9 parses completely is parsed here. The only arithmetic is signs before an operand: its
grammar has only comparisons between two operands, and its parser stops without an error where the grammar ends, taking
`a > 5 + 1` for `a > 5`. Such an expression is refused here. docs/node.md has the differences in what matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

__all__ = ["SqlError", "SqlFilter", "parse_sql"]

MAX_DEPTH = 64
"""Nesting of parentheses, NOT and signs; and of comparisons whose left side is a comparison."""
MAX_TOKENS = 2000
CACHE_ENTRIES = 256
"""Parsed expressions kept; consumers of one group share one."""

Value = str | int | float | bool | None
Properties = Mapping[str, str]
_Term = Callable[[Properties], Value]
_Comparison = Callable[[Value, Properties], bool | None]

_TOKEN = re.compile(
    r"(?P<number>\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|(?:0|[1-9]\d*)[lL]?(?![\w$.]))"
    r"|(?P<name>[A-Za-z_$][\w$.]*)|'(?P<text>(?:[^']|'')*)'|(?P<sign><>|!=|>=|<=|[=<>(),+\-*/%])",
    re.ASCII,
)
_BETWEEN_TOKENS = re.compile(r"(?:[ \t\n\r\f]|--[^\n\r]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"(?P<whole>[+-]?[0-9]+)|[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
MAX_DIGITS = 400
"""Digits of a number in an expression, and length of a property that is read as one; a double ends at 309, and a long
integer takes long to read."""
_KEYWORDS = frozenset(
    ["AND", "OR", "NOT", "IS", "NULL", "IN", "BETWEEN", "TRUE", "FALSE", "LIKE", "CONTAINS", "STARTSWITH", "ENDSWITH"]
)
_ARITHMETIC = "there is no arithmetic between operands (RocketMQ's filters have none, and ignore what follows)"


class _Operand(NamedTuple):
    """One side of a comparison."""

    term: _Term
    is_condition: bool
    """Whether it can stand alone: a property, a truth value, a comparison."""
    is_text: bool = False
    """Whether it is a string literal."""
    is_null: bool = False
    """Whether it is the keyword NULL."""


class SqlError(ValueError):
    """An expression that cannot be parsed; the text says where."""


class SqlFilter:
    """A parsed expression."""

    __slots__ = ("_test", "expression")

    def __init__(self, expression: str, test: _Term) -> None:
        self.expression = expression
        self._test = test

    def matches(self, properties: Properties) -> bool:
        """Whether the expression is true for these properties; unknown is not."""
        return self._test(properties) is True


@lru_cache(maxsize=CACHE_ENTRIES)
def parse_sql(expression: str) -> SqlFilter:
    """Parse an expression. Raises SqlError."""
    return SqlFilter(expression, _Parser(expression).parse())


class _Parser:
    """Recursive descent: OR over AND over NOT over comparisons."""

    def __init__(self, expression: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = _after_blanks(expression, 0)
        while at < len(expression):
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
            at = _after_blanks(expression, found.end())
        self._at = 0
        self._depth = 0
        self._chained = 0

    def parse(self) -> _Term:
        test = self._condition(self._or())
        if self._at < len(self._tokens):
            raise self._unexpected()
        return test

    def _unexpected(self) -> SqlError:
        if self._at >= len(self._tokens):
            return SqlError("something is missing at the end")
        if self._peek("+", "-", "*", "/", "%"):
            return SqlError(f"{self._tokens[self._at][1]!r} is not expected: {_ARITHMETIC}")
        return SqlError(f"{self._tokens[self._at][1]!r} is not expected")

    def _condition(self, operand: _Operand) -> _Term:
        if not operand.is_condition:
            raise self._unexpected() if self._at < len(self._tokens) else SqlError("a comparison is expected")
        term = operand.term
        return lambda properties: _truth(term(properties))

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SqlError(f"nested more than {MAX_DEPTH} deep")

    def _link(self, links: int) -> None:
        """Bound comparisons whose left side is a comparison: what follows has `links` of them on its left."""
        self._chained += links > 1
        if self._chained > MAX_DEPTH:
            raise SqlError(f"more than {MAX_DEPTH} comparisons of comparisons")

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

    def _or(self) -> _Operand:
        left = self._and()
        if not self._peek("OR"):
            return left
        terms = [self._condition(left)]
        while self._take("OR"):
            terms.append(self._condition(self._and()))
        return _Operand(lambda properties: _any(term(properties) for term in terms), True)

    def _and(self) -> _Operand:
        left = self._not()
        if not self._peek("AND"):
            return left
        terms = [self._condition(left)]
        while self._take("AND"):
            terms.append(self._condition(self._not()))
        return _Operand(lambda properties: _all(term(properties) for term in terms), True)

    def _not(self) -> _Operand:
        if not self._take("NOT"):
            return self._equality()
        self._deeper()
        inner = self._condition(self._not())
        self._depth -= 1
        return _Operand(lambda properties: _negate(inner(properties)), True)

    def _equality(self) -> _Operand:
        left = self._comparison()
        for links in count():
            self._link(links)
            if sign := self._take("=", "<>", "!="):
                left = _compared(sign, left, self._comparison())
            elif self._take("IS"):
                left = _is_null(left, wanted=self._take("NOT") is None)
                self._need("NULL")
            else:
                break
        return left

    def _comparison(self) -> _Operand:
        left = self._signed()
        for links in count():
            self._link(links)
            if sign := self._take(">", ">=", "<", "<="):
                left = _compared(sign, left, self._signed())
                continue
            negated = self._take("NOT") is not None
            test = self._membership(left)
            if test is None:
                if negated:
                    raise self._unexpected()
                break
            left = _Operand(_negated(test) if negated else test, True)
        return left

    def _membership(self, left: _Operand) -> _Term | None:
        if self._take("BETWEEN"):
            low = self._signed()
            self._need("AND")
            return _each(_all, left, [_comparing(">=", left, low), _comparing("<=", left, self._signed())])
        if self._take("IN"):
            self._need("(")
            members = [_comparing("=", left, self._signed())]
            while self._take(","):
                members.append(_comparing("=", left, self._signed()))
            self._need(")")
            return _each(_any, left, members)
        kind = self._take("LIKE", "CONTAINS", "STARTSWITH", "ENDSWITH")
        return None if kind is None else self._pattern(kind, left.term)

    def _pattern(self, kind: str, left: _Term) -> _Term:
        if self._at >= len(self._tokens) or self._tokens[self._at][0] != "text":
            raise SqlError(f"{kind} is followed by a string")
        wanted = self._tokens[self._at][1]
        self._at += 1
        is_like = _like(wanted) if kind == "LIKE" else None

        def test(properties: Properties) -> Value:
            value = left(properties)
            if not isinstance(value, str):
                return None
            if is_like is not None:
                return is_like(value)
            if kind == "CONTAINS":
                return wanted in value
            return value.startswith(wanted) if kind == "STARTSWITH" else value.endswith(wanted)

        return test

    def _signed(self) -> _Operand:
        sign = self._take("+", "-", "NOT")
        if sign is None:
            return self._operand()
        self._deeper()
        right = self._signed()
        self._depth -= 1
        if sign == "NOT":
            return _Operand(_negated(self._condition(right)), True)
        term = right.term
        return right if sign == "+" else _Operand(lambda properties: _minus(term(properties)), False)

    def _operand(self) -> _Operand:
        """A literal, a property, or an expression in parentheses."""
        if self._take("("):
            self._deeper()
            inner = self._or()
            self._need(")")
            self._depth -= 1
            return inner
        if self._at >= len(self._tokens):
            raise self._unexpected()
        kind, text = self._tokens[self._at]
        if kind not in ("number", "text", "name") and text not in ("TRUE", "FALSE", "NULL"):
            raise self._unexpected()
        self._at += 1
        if kind == "name":
            return _Operand(lambda properties: properties.get(text), True)
        value: Value = text
        if kind == "number":
            digits = text.rstrip("lL")
            if len(digits) > MAX_DIGITS:
                raise SqlError(f"a number of {len(digits)} digits, at most {MAX_DIGITS} are read")
            value = int(digits) if digits.isdigit() else float(text)
        elif kind == "keyword":
            value = {"TRUE": True, "FALSE": False}.get(text)
        is_word = kind == "keyword"
        return _Operand(lambda properties: value, is_word, kind == "text", is_word and text == "NULL")


def _after_blanks(expression: str, at: int) -> int:
    """Where the next token begins: comments count as blanks."""
    found = _BETWEEN_TOKENS.match(expression, at)
    assert found is not None
    return found.end()


def _comparing(sign: str, left: _Operand, right: _Operand) -> _Comparison:
    """A function that compares a value of `left` with `right`."""
    if left.is_null or right.is_null:
        raise SqlError("NULL is asked for by IS NULL")
    second = right.term
    if sign in ("=", "<>", "!=") or left.is_text or right.is_text:
        return lambda value, properties: _compare(sign, value, second(properties))
    return lambda value, properties: _compare(sign, _number(value), _number(second(properties)))


def _compared(sign: str, left: _Operand, right: _Operand) -> _Operand:
    first, comparison = left.term, _comparing(sign, left, right)
    return _Operand(lambda properties: comparison(first(properties), properties), True)


def _each(combine: Callable[[Iterable[Value]], Value], left: _Operand, comparisons: Sequence[_Comparison]) -> _Term:
    """Several comparisons of `left`, combined. It is evaluated once: it may be such a test itself, and so on."""
    first = left.term

    def test(properties: Properties) -> Value:
        value = first(properties)
        return combine(comparison(value, properties) for comparison in comparisons)

    return test


def _is_null(operand: _Operand, *, wanted: bool) -> _Operand:
    term = operand.term
    return _Operand(lambda properties: (term(properties) is None) is wanted, True)


def _negated(test: _Term) -> _Term:
    return lambda properties: _negate(test(properties))


def _minus(value: Value) -> int | float | None:
    number = _number(value)
    return None if number is None else -number


def _like(pattern: str) -> Callable[[str], bool]:
    """SQL's LIKE: % is any text, _ one character. The parts between two % are searched from left to right, each matched
    where it is first found, so that the time is at most the length of the pattern times that of the value."""
    parts = [re.compile(re.escape(part).replace("_", "."), re.DOTALL) for part in pattern.split("%")]
    first, *inner = parts
    tail_size = len(pattern) - pattern.rfind("%") - 1

    def test(value: str) -> bool:
        if not inner:
            return first.fullmatch(value) is not None
        *middle, last = inner
        end = len(value) - tail_size
        found = first.match(value, 0, max(end, 0))
        for part in middle:
            found = part.search(value, found.end(), end) if found is not None else None
        return found is not None and last.fullmatch(value, end) is not None

    return test


def _truth(value: Value) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return None


def _number(value: Value) -> int | float | None:
    """A number, or a property's text read as one; None if it is neither."""
    if isinstance(value, str):
        value = value.strip()
        found = _NUMBER.fullmatch(value) if len(value) <= MAX_DIGITS else None
        if found is None:
            return None
        return int(value) if found["whole"] else float(value)
    return None if isinstance(value, bool) else value


def _compare(sign: str, left: Value, right: Value) -> bool | None:
    """Compare by the type of the literal side; None (unknown) if that cannot be done."""
    if left is None or right is None:
        return None
    if isinstance(left, bool) or isinstance(right, bool):
        first, second = _truth(left), _truth(right)
        if first is None or second is None or sign not in ("=", "<>", "!="):
            return None
        return (first == second) is (sign == "=")
    if isinstance(left, int | float) or isinstance(right, int | float):
        low, high = _number(left), _number(right)
        return None if low is None or high is None else _ordered(sign, low, high)
    return _ordered(sign, left, right)


def _ordered(sign: str, left: str | int | float, right: str | int | float) -> bool:
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


def _all(values: Iterable[Value]) -> bool | None:
    result: bool | None = True
    for value in values:
        truth = _truth(value)
        if truth is False:
            return False
        if truth is None:
            result = None
    return result


def _any(values: Iterable[Value]) -> bool | None:
    result: bool | None = False
    for value in values:
        truth = _truth(value)
        if truth is True:
            return True
        if truth is None:
            result = None
    return result
