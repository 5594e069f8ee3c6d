"""docs/what-went-wrong.md: what it quotes from a mutant's report is in the part that it names."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest

from harness.exploration.mutants import report_mutant
from harness.store import Store

PAGE = Path(__file__).resolve().parents[3] / "docs" / "what-went-wrong.md"
SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
ROW = re.compile(r"^\| (.+\?) \| `#(\S+)` \| (.+) \|$", re.MULTILINE)
SLOW = {"compare-index-only", "duplicate-apply", "ha-ack-when-sent", "truncate-committed"}
"""Mutants whose run with its explanation takes longest, up to ten seconds of processor time; four others are left."""
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Parts(html.parser.HTMLParser):
    """The text of every element that has an id."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self._open: list[str | None] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self._open.append(dict(attrs).get("id"))

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for part in filter(None, self._open):
            self.texts.setdefault(part, []).append(data)

    def text(self, part: str) -> str:
        return " ".join(" ".join(self.texts[part]).split())


def pattern_of(quoted: str) -> str:
    """The pattern of a quotation, in which `…` matches anything."""
    words = quoted.replace("\\|", "|").split("…")
    return ".*?".join(re.escape(part.strip()) for part in words)


def test_eight_mutants_have_their_questions_and_answers() -> None:
    assert len(SECTIONS) == 8
    for section in SECTIONS:
        rows = ROW.findall(section)
        assert len(rows) >= 4 and rows[0][1] == "verdict"
        assert section.count("\n| ") == len(rows) + 1, "every row but the head is a question, a part and an answer"


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(section, id=name, marks=[pytest.mark.long] if name in SLOW else [])
        for section in SECTIONS
        for name in [section.partition("\n")[0]]
    ],
)
def test_the_quoted_answers_are_in_the_parts_that_the_page_names(section: str, tmp_path: Path) -> None:
    run = report_mutant(section.partition("\n")[0], 1, Store(tmp_path))
    parts = Parts(run.report_path.read_text(encoding="utf-8"))
    for question, part, quoted in ROW.findall(section):
        assert part in parts.texts, question
        assert re.search(pattern_of(quoted), parts.text(part)), f"{question} {quoted}: {parts.text(part)}"
