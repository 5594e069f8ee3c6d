"""The page about which faults reach which programs: what a cell shows, and what is kept of earlier runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._fault_reach_page import write_costs, write_page
from benchmarks.fault_cost import FRESH_AFTER, FsyncLoops, compare
from benchmarks.fault_reach import Cell


def cell(fault: str, *, sabotaged: bool = False, **given: Any) -> dict[str, Any]:
    fields = {
        "guest": "etcd", "cluster": "netns", "proven": not sabotaged, "exercised": True, "healed": True, "detail": "",
        **given,
    }  # fmt: skip
    found = Cell(fault=fault, sabotaged=sabotaged, **fields)
    return {**fields, "fault": fault, "sabotaged": sabotaged, "word": found.word}


def row(page: Path, fault: str) -> list[str]:
    """The cells of a fault in the last table."""
    lines = [line for line in page.read_text().splitlines() if line.startswith(f"| `{fault}` |")]
    return [word.strip() for word in lines[-1].strip("|").split("|")][1:]


def test_a_cell_shows_the_result_and_a_proven_control_is_marked_false(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_page(str(page), [
        cell("met"), cell("met", sabotaged=True),
        cell("unseen", exercised=None), cell("unseen", sabotaged=True, proven=True),
        cell("nobody", exercised=False), cell("nobody", sabotaged=True, proven=True, exercised=False),
        cell("stays", healed=False),
        cell("other", cluster="local", detail="process 7 (/somewhere/bin/etcd) is static"),
    ])  # fmt: skip
    assert row(page, "met") == ["met", "not proven"]
    assert row(page, "unseen") == ["in force", "**FALSE**"]
    assert row(page, "nobody") == ["not met", "not met"]
    assert row(page, "stays") == ["met, **not healed**", "not tried"]
    assert "## local" in page.read_text()


def test_new_cells_replace_earlier_ones_and_other_cells_are_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_page(str(page), [cell("one"), cell("two")])
    write_page(str(page), [cell("two", proven=False)])
    assert row(page, "one") == ["met", "not tried"] and row(page, "two") == ["not proven", "not tried"]


def test_costs_are_stored_next_to_the_page_and_shown_on_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    costs = [
        {"figure": "puts", "form": form, "rounds": 5, "median": 1200.5, "more": -3.0, "percent": -0.2,
         "middle_half": [-1.0, 0.4], "load": 2}
        for form in ("plain", "sync")
    ]  # fmt: skip
    write_costs(str(page), costs)
    write_page(str(page), [cell("one")])
    lines = page.read_text().splitlines()
    assert "| puts | as it is | 1,200.5 |  |  |  | 5 | 2 |" in lines
    assert "| puts | syncs reported from the start | 1,200.5 | -3.0 | -0.2 % | -1.0 to +0.4 % | 5 | 2 |" in lines
    write_costs(str(page), [{**costs[0], "figure": "reads"}])
    assert {cost["figure"] for cost in json.loads((tmp_path / "fault-cost.json").read_text())} == {"puts", "reads"}


def test_fsync_loops_measure_every_form_and_leave_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loops = FsyncLoops("fsync", str(tmp_path), 20, ["plain", "before"])
    try:
        costs = compare(["plain", "before"], loops.burst, FRESH_AFTER + 1)
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        loops.stop()
    assert list(tmp_path.iterdir()) == []
    assert [(cost["figure"], cost["form"]) for cost in costs] == [
        ("fsync, us", "plain"), ("fsync, us", "before"),
        ("fsync, syncs a second", "plain"), ("fsync, syncs a second", "before"),
    ]  # fmt: skip
    assert all(cost["median"] > 0 for cost in costs) and "fsync, us" in capsys.readouterr().out
