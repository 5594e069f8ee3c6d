"""RocketMQ's tools and clients on Apache's broker and on ours: every difference has a reason, and the page gives it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks._compatibility_calls import NOT_RUN
from benchmarks.node_compatibility import GUESTS, PAGE, Row, compare, render
from harness.errors import OperatorError


@pytest.mark.systems
@pytest.mark.serial
@pytest.mark.java
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.skipif(shutil.which("javac") is None or shutil.which("mvn") is None, reason="needs Java and Maven")
def test_every_difference_has_a_reason_and_is_on_the_page(tmp_path: Path, guest: str) -> None:
    try:
        rows = compare(guest, tmp_path)
    except OperatorError as error:
        pytest.skip(str(error))
    unexplained = {row.call: {"apache": row.apache, "ours": row.ours} for row in rows if row.unexplained()}
    assert not unexplained, json.dumps(unexplained, indent=1)
    section = PAGE.read_text(encoding="utf-8").partition(f"## {guest}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    listed = [(call.strip("| `"), ours == "the same") for call, _, ours, *_ in cells]
    assert listed == [(row.call, not (row.apache or row.ours)) for row in rows]


def test_unexplained_lists_only_the_differences_without_a_reason() -> None:
    row = Row("mqadmin 4.9.8", "getConsumerConfig -g readers", (), ("retryMaxTimes = 3",), ("retryMaxTimes = 16",))
    assert row.unexplained() == ["retryMaxTimes = 3", "retryMaxTimes = 16"]
    half = Row("mqadmin 4.9.8", "topicRoute -t x", (), ("CODE: 17 DESC: No topic route",), ("CODE: 1 DESC: no",))
    assert half.unexplained() == ["CODE: 1 DESC: no"]


def test_the_page_names_every_command_that_is_not_run() -> None:
    assert all(f"`{name}` ({reason})" in PAGE.read_text(encoding="utf-8") for name, reason in NOT_RUN.items())


def test_guests_that_are_not_run_keep_their_section_of_the_page() -> None:
    first = Row("mqadmin 4.9.8", "topicList", ("tooled",), (), ())
    second = Row("Go client 2.1.2", "send", (), ("sync: true",), ("sync: false",))
    page = render([second], old=render([first]))
    assert page == render([first, second])
    assert "1 of 2 are the same." in page and "| `topicList` | `tooled` | the same | |" in page
