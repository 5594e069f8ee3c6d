"""On an interpreter that compiles loops, nothing is handled column by column."""

from __future__ import annotations

import sys

import pytest

from node import interpreter
from node.interpreter import least_rows


@pytest.mark.parametrize(("compiles", "least"), [(False, 6), (True, sys.maxsize)])
def test_columns_are_for_interpreted_loops(monkeypatch: pytest.MonkeyPatch, compiles: bool, least: int) -> None:
    monkeypatch.setattr(interpreter, "IS_PYPY", compiles)
    assert least_rows(6) == least


def test_loops_are_compiled_by_pypy() -> None:
    assert (sys.implementation.name == "pypy") == interpreter.IS_PYPY
