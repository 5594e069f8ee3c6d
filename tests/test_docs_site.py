"""The site that `make docs` builds: its navigation names every page, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAMED = re.findall(r"^ +- (?:[^:\n]+: )?(\S+(?:\.md|/))$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
LOADED = re.compile(r"""<(?:script|img|iframe|link(?=[^>]*stylesheet))[^>]*(?:src|href)=["']?https?:""")

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None,
    reason="mkdocs-material is not installed (make docs)",
)


def build(directory: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=directory, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, directory)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return directory


def test_the_navigation_names_every_page_once() -> None:
    pages = [page for page in NAMED if not page.startswith("repository/") and page != "index.md"]
    folders = tuple(page for page in pages if page.endswith("/"))
    here = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(page for page in here if not page.startswith(folders)) == sorted(set(pages) - set(folders))
    assert len(pages) == len(set(pages))
    assert all((DOCS / folder / "README.md").is_file() for folder in folders)


def test_the_navigation_begins_with_the_readme_and_has_the_pages_from_outside_docs() -> None:
    assert NAMED[0] == "index.md"
    outside = [page.removeprefix("repository/") for page in NAMED if page.startswith("repository/")]
    assert outside and all((ROOT / page).is_file() for page in outside)


@needs_mkdocs
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    assert [str(page) for page in pages if LOADED.search(page.read_text(encoding="utf-8"))] == []
    assert "Splitbrain breaks replicated systems on purpose" in (site / "index.html").read_text(encoding="utf-8")


@needs_mkdocs
def test_links_to_folders_and_out_of_docs_resolve(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    linked = re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', start)
    assert {"nemeses/index.html", "repository/LICENSE.txt", "tutorial.html"} <= set(linked)
    assert [link for link in linked if not (site / link).exists()] == []
    assert (site / "repository/examples/clients/toy_client.go").is_file()


@needs_mkdocs
def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    for name in ("docs", "scripts", "examples", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    with (tmp_path / "docs" / "replay.md").open("a", encoding="utf-8") as page:
        page.write("\nSee [one](no-page.md), [another](../no_file.py), [a third](gallery.md#no-part).\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if "replay.md" in line]
    assert [any(link in line for line in warnings) for link in ("no-page.md", "no_file.py", "no-part")] == [True] * 3
