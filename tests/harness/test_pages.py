"""Messages name pages by a path that exists, in a checkout and (test_wheel.py) in an installation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.pages import page, page_in_help

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("checker", "harness", "nemesis", "node", "spark_analysis")


def texts_and_pages() -> Iterator[tuple[str, str, bool]]:
    """(where, text, whether it is an argument of `page`) of every string of the packages except docstrings."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if re.search(r"docs/|\bpage(_in_help)?\(", source) is None:
                continue
            tree = ast.parse(source)
            silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            named = {
                id(node.args[0])
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in (page.__name__, page_in_help.__name__)
                and node.args
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value, id(node) in named


def test_messages_name_existing_pages_and_never_by_a_literal_docs_path() -> None:
    """A wheel has no directory docs/ beside its packages."""
    found = list(texts_and_pages())
    of_our_own = re.compile(r"(?<![\w/])docs/[\w-]+\.md")
    assert [where for where, text, _ in found if of_our_own.search(text)] == []
    pages = [text for _, text, is_page in found if is_page]
    assert len(pages) >= 5
    assert [name for name in pages if not (ROOT / "docs" / name).is_file()] == []


def test_page_gives_a_path_that_works_from_the_current_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    assert page("hosts.md") == "docs/hosts.md"
    monkeypatch.chdir(tmp_path)
    assert page("hosts.md") == str(ROOT / "docs" / "hosts.md")
