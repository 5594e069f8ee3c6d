"""What `harness report` and `compare` print about runs that they leave out, on a terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

from harness.commands import compare, report
from harness.report import OutputConsole

RUN, PROBLEM = "file:/store/\x1b]0;title\x07/run", "line 1: not UTF-8 text: \x1b[31m\x00"
SAID = r"left out: file:/store/\x1b]0;title\x07/run: line 1: not UTF-8 text: \x1b[31m\x00"


def test_escape_sequences_of_left_out_runs_are_printed_escaped() -> None:
    rows = {"rates": [], "availability": [], "problems": [{"run": RUN, "problem": PROBLEM, "left_out": True}]}
    tables = {name: SimpleNamespace(name=name, rows=found) for name, found in rows.items()}
    analysis = SimpleNamespace(runs=0, operations=0, tables=list(tables.values()), table=tables.__getitem__)
    comparison = SimpleNamespace(
        table=SimpleNamespace(rows=[]), only_in_first=["sy\x1b[31m"], only_in_second=[], left_out=[(RUN, PROBLEM)],
        groups=0, worse=0, better=0, compared=0,
    )  # fmt: skip
    for say in (
        lambda console: report._summary(cast(Any, analysis), console),
        lambda console: compare._print(cast(Any, comparison), ("system",), console),
    ):
        say(OutputConsole(file=(said := io.StringIO()), width=200))
        assert SAID in said.getvalue().splitlines()
        assert said.getvalue().replace("\n", "").isprintable()
