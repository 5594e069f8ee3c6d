"""Small plausible mistakes in a Python module, each a replacement of one piece of its text."""

from __future__ import annotations

import ast
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

__all__ = ["ONCE_ALIVE", "Mutation", "everything_of", "mutations_of", "once_alive", "sample"]

ONCE_ALIVE = (
    # A crashed write is ignored: its value counts as written from the start, or its interval ends too soon.
    ("checker/linearizability/register.py", "first_return:\n            written[value] = invoked",
     "first_return:\n            written[value] = BEFORE_ALL"),
    ("checker/linearizability/register.py", "if invoked > last_invoke[value]:", "if False:"),
    # Crashed operations are not followed from one to the next.
    ("checker/linearizability/cas.py", "if old in crashed:\n                w", "if False:\n                w"),
    # A dequeue that began after its deadline may take the value.
    ("checker/linearizability/fifo.py", "index >= len(spare) or spare[index] > deadline", "index >= len(spare)"),
    # A configuration is known whatever crashed operations it used.
    ("checker/linearizability/general.py", "if (guarded - before) & guards == guards:", "if True:"),
    ("checker/linearizability/general.py", "if (guarded - other) & guards == guards:", "if True:"),
    ("checker/models/registers.py", "is None else not self.none_is_any", "is None else self.none_is_any"),
    # Crashed operations take part, and what must be newer may be as new.
    ("checker/sessions.py", 'history.status[row] != OK or', 'history.status[row] == "fail" or'),
    ("checker/sessions.py", "at <= before[0] if strict", "at < before[0] if strict"),
    ("checker/sessions.py", "else at < before[0]", "else at <= before[0]"),
)  # fmt: skip
"""Mistakes that the tests once failed to notice: file, text that occurs once in it, and its replacement."""

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
NAMES = {"min": "max", "max": "min", "INFO": "FAIL", "any": "all", "all": "any", "bisect_left": "bisect_right",
         "bisect_right": "bisect_left"}  # fmt: skip
"""Names and their replacements. With `FAIL` for `INFO`, crashed operations count as failed and are left out."""

TYPING_ONLY = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
"""Nodes that are not mutated: assertions are no behaviour, and the parts of an f-string have no offsets."""


@dataclass(frozen=True)
class Mutation:
    """`before` at offsets `start` to `end` of `file` becomes `after`, on line `line` in `function`.

    `text` is the line without indentation, and `number` distinguishes otherwise equal mutations, so that a key survives
    changes elsewhere in the file.
    """

    file: str
    function: str
    line: int
    text: str
    before: str
    after: str
    start: int
    end: int
    number: int = 0

    @property
    def change(self) -> str:
        """The change as text."""
        return f"`{_short(self.before)}` → `{_short(self.after)}`"

    @property
    def key(self) -> str:
        """An identifier of the mutation that does not depend on the rest of the file."""
        number = f" ({self.number + 1})" if self.number else ""
        return f"{self.file}: {self.function}: {self.text}: {_short(self.before)} -> {_short(self.after)}{number}"

    def applied(self, source: str) -> str:
        """The source with the mistake; line numbers do not change."""
        after = self.after
        lost = self.before.count("\n") - after.count("\n")
        if lost > 0:
            after = f"({after}{chr(10) * lost})"
        return source[: self.start] + after + source[self.end :]

    def as_json(self) -> dict[str, Any]:
        """The mutation as data for another process, which restores it by `Mutation(**data)`."""
        return asdict(self)


def _short(text: str) -> str:
    return " ".join(text.split())


class _Finder(ast.NodeVisitor):
    """Finds every possible change, as (node that it belongs to, start, end, new text)."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines()
        self._functions: list[str] = []
        self.found: list[tuple[str, int, int, int, str]] = []

    def _at(self, line: int, column: int) -> int:
        """The offset (in characters) of a line and column (in bytes)."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _add(self, start: int, end: int, after: str) -> None:
        line = bisect_right(self._starts, start)
        self.found.append((".".join(self._functions) or "(module)", line, start, end, after))

    def _replace(self, node: ast.expr | ast.stmt, after: str) -> None:
        self._add(*self._span(node), after)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, TYPING_ONLY):
            return
        super().visit(node)

    def _visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._functions.append(node.name)
        for child in node.body:
            self.visit(child)
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)):
                self.visit(default)
        self._functions.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # zip's `strict` is a check like an assertion
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.expr = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            before, after = COMPARISONS[type(operator)]
            low, high = self._span(left)[1], self._span(right)[0]
            place = self.source[low:high].find(before)
            if place >= 0:
                self._add(low + place, low + place + len(before), after)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            low, high = self._span(left)[1], self._span(right)[0]
            between = self.source[low:high]
            if len(node.values) == 2 and before in between:
                place = low + between.index(before)
                self._add(place, place + len(before), after)
        neutral = "True" if isinstance(node.op, ast.And) else "False"
        for value in node.values:
            self._replace(value, neutral)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, f"bool({ast.get_source_segment(self.source, node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        signs = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
        if type(node.op) in signs and not _is_text(node):
            before, after = signs[type(node.op)]
            low, high = self._span(node.left)[1], self._span(node.right)[0]
            place = self.source[low:high].find(before)
            if place >= 0:
                self._add(low + place, low + place + 1, after)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._replace(node.test, "False")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in NAMES and isinstance(node.ctx, ast.Load):
            self._replace(node, NAMES[node.id])

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "pass")


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(s, (ast.JoinedStr, ast.List)) or isinstance(getattr(s, "value", None), str) for s in sides)


def _compiles(mutation: Mutation, source: str) -> bool:
    try:
        compile(mutation.applied(source), mutation.file, "exec")
    except SyntaxError:
        return False
    return True


def mutations_of(file: str, source: str) -> list[Mutation]:
    """Every mutation of a module, in the order of its text; `file` is only a name."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    lines = source.splitlines()
    counts: Counter[str] = Counter()
    out: list[Mutation] = []
    for function, line, start, end, after in sorted(set(finder.found), key=lambda each: each[2:]):
        found = Mutation(file, function, line, lines[line - 1].strip(), source[start:end], after, start, end)
        found = Mutation(**{**found.as_json(), "number": counts[found.key]})
        counts[Mutation(**{**found.as_json(), "number": 0}).key] += 1
        out.append(found)
    return out


def once_alive(sources: dict[str, str]) -> list[Mutation]:
    """The mutations of `ONCE_ALIVE`. Raises ValueError if the text of one does not occur exactly once."""
    out = []
    for file, before, after in ONCE_ALIVE:
        source = sources[file]
        if source.count(before) != 1:
            raise ValueError(f"{file} does not have once: {before!r}; correct ONCE_ALIVE")
        start = source.index(before)
        line = source.count("\n", 0, start) + 1
        text = source.splitlines()[line - 1].strip()
        out.append(Mutation(file, _function_at(source, line), line, text, before, after, start, start + len(before)))
    return out


def _function_at(source: str, line: int) -> str:
    """The names of the functions and classes around a line, joined by dots."""
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno)) or "(module)"


def everything_of(sources: dict[str, str]) -> list[Mutation]:
    """Every mutation of every file, each once, in the order of files and lines."""
    found = {each.key: each for file, source in sources.items() for each in mutations_of(file, source)}
    found |= {each.key: each for each in once_alive(sources)}
    return sorted(found.values(), key=lambda each: (each.file, each.start, each.key))


def _quotas(sizes: Sequence[int], wanted: int) -> list[int]:
    """How many mutations to take of each file: at least one if it has any, the rest in proportion to the square root of
    their number, so that long files do not dominate.
    """
    quotas = [min(1, size) for size in sizes]
    while sum(quotas) < min(wanted, sum(sizes)):
        open_files = [place for place, size in enumerate(sizes) if quotas[place] < size]
        place = max(open_files, key=lambda each: sizes[each] ** 0.5 / (quotas[each] + 1))
        quotas[place] += 1
    return quotas


def sample(sources: dict[str, str], wanted: int, seed: int) -> Iterator[Mutation]:
    """About `wanted` mutations over all `sources` (text by file), at least one of every file that has any.

    The order in which a file's mutations are chosen depends only on the seed and the file. Mutations that are no valid
    Python are left out.
    """
    everything = {file: mutations_of(file, source) for file, source in sorted(sources.items())}
    quotas = _quotas([len(each) for each in everything.values()], wanted)
    for (file, found), quota in zip(everything.items(), quotas, strict=True):
        random.Random(f"{seed} {file}").shuffle(found)
        yield from islice((each for each in found if _compiles(each, sources[file])), quota)
