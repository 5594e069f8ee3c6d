"""index.html of a store: every run writes it, it escapes the texts of runs, and its length is bounded."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import harness.report.store_page as module
from harness.report.store_page import render_store, update_store_page
from harness.run_index import read_index
from harness.store import Store

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def make(store: Store, minutes: int = 0, name: str = "t", *, has_report: bool = True, **results: Any) -> None:
    run = store.create(name, now=NOON + timedelta(minutes=minutes))
    run.write_test({"system": "broker", "workload": "register", "nemesis": ["kill"], "cluster": "sim", "seed": minutes})
    run.write_results({"valid": True, "reason": "fine", "ops": {"ok": 5}, "faults": [], **results})
    if has_report:
        run.report_path.write_text("a report")
    run.finish()


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def links(html: str) -> list[str]:
    return [str(attributes["href"]) for tag, attributes in Tags(html).found if tag == "a"]


def test_a_run_writes_the_page_of_its_store(memory_run: Any) -> None:
    run_dir, _, _ = memory_run()
    html = (run_dir.path.parents[1] / "index.html").read_text()
    assert links(html) == [f"{run_dir.name}/report.html".replace("+", "%2B")]
    assert "1 valid" in html


def test_runs_are_links_to_their_reports_newest_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    make(store, 0)
    make(store, 1, valid=False, reason="lost 7")
    make(store, 2, has_report=False, valid="unknown")
    update_store_page(store)
    html = (store.root / "index.html").read_text()
    assert links(html) == ["t/20260131T120200Z/", "t/20260131T120100Z/report.html", "t/20260131T120000Z/report.html"]
    assert re.findall(r'data-verdict="(\w+)"', html) == ["unknown", "invalid", "valid"]
    assert "lost 7" in html


def test_the_page_says_at_what_time_a_run_was_running(tmp_path: Path) -> None:
    """The run may have been killed since, without writing the page."""
    store = Store(tmp_path / "store")
    make(store)
    assert "when this page was written" not in render_store(store.root, read_index(store))
    at_work = store.create("t", now=NOON + timedelta(minutes=1))
    before = datetime.now(UTC).replace(microsecond=0)
    html = render_store(store.root, read_index(store))
    at_work.release()
    said = re.search(r"1 run was running when this page was written, ([-0-9: ]{19}) UTC", html)
    assert said is not None
    assert before <= datetime.fromisoformat(f"{said[1]}+00:00") <= datetime.now(UTC)


def test_the_page_is_bounded_and_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    for minutes in range(5):
        make(store, minutes)
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    html = render_store(store.root, read_index(store))
    assert len(links(html)) == 2
    assert "5 runs" in html and "3 older runs not shown" in html


def test_the_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    markup = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    store = Store(tmp_path / "store")
    make(store, valid=False, reason=markup)
    odd = store.root / "<img src=x onerror=alert(1)>" / '"&#39;?20260131'
    odd.mkdir(parents=True)
    (odd / "test.json").write_text(f'{{"system": "{markup.replace(chr(34), "")}", "settings": {{"<b>": "</style>"}}}}')
    html = render_store(store.root, read_index(store))
    found = Tags(html).found
    assert len(links(html)) == 2
    assert [tag for tag, _ in found if tag in ("img", "b")] == []
    assert sum(tag == "script" for tag, _ in found) == 1
    attributes = [(name, str(value)) for _, held in found for name, value in held.items()]
    assert not [name for name, value in attributes if name.startswith("on") or "javascript" in value]


def test_a_page_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "store")
    make(store)
    (store.root / "index.html").mkdir()
    update_store_page(store)
    assert "cannot update index.html of the store" in caplog.text
    assert not [path for path in store.root.iterdir() if path.name.startswith(".index.html")]
