"""The `hooks` of `mkdocs.yml`: add pages and files from outside docs/, and expand folders in the navigation.

The pages below docs/ are also read in the repository, so their links are relative to it. These hooks make the README
the start page, and include whatever pages link to outside docs/: other pages as pages, files as files.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
START_PAGE = "README.md"
LINK = re.compile(
    r"^```.*?^```|^ {4}[^\n]*$|`[^`\n]+`"  # code contains no links
    r"|(?P<before>\]\()(?P<path>[^)\s#]+)(?P<after>(?:#[^)\s]*)?\))",
    re.MULTILINE | re.DOTALL,
)

log = logging.getLogger("mkdocs.hooks.splitbrain")


def on_config(config: Any) -> Any:
    """Replace each folder (`nemeses/`) in the navigation with its pages, its README first."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def _expanded(items: list[Any], docs: Path) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if isinstance(item, dict):
            found += [{title: _expanded(inside, docs) if isinstance(inside, list) else inside}
                      for title, inside in item.items()]  # fmt: skip
        elif item.endswith("/"):
            names = (path.name for path in (docs / item).glob("*.md"))
            found += [f"{item}{name}" for name in sorted(names, key=lambda name: (name != START_PAGE, name))]
        else:
            found.append(item)
    return found


def on_files(files: Files, *, config: Any) -> Files:
    """Add the start page, and what pages link to outside docs/, transitively."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = {START_PAGE}
    waiting = [START_PAGE]
    for page in pages:
        waiting += _outside(page, seen)
    while waiting:
        path = waiting.pop()
        files.append(_file(path, config))
        if path.endswith(".md"):
            waiting += _outside(path, seen)
    return files


def _outside(page: str, seen: set[str]) -> Iterator[str]:
    """The repository's files outside docs/ that a page links to and that are not in `seen`; adds them to it."""
    for target in _targets(page):
        if not target.startswith("docs/") and target not in seen and (ROOT / target).is_file():
            seen.add(target)
            yield target


def _targets(page: str) -> Iterator[str]:
    for link in LINK.finditer((ROOT / page).read_text(encoding="utf-8")):
        if _is_ours(link):
            yield _resolved(page, link["path"])


def _is_ours(link: re.Match[str]) -> bool:
    return bool(link["path"]) and not re.match(r"\w+:", link["path"])


def _resolved(page: str, link: str) -> str:
    """The repository path that a link of a page refers to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _file(path: str, config: Any) -> File:
    if path.endswith(".md"):
        return File.generated(config, _place(path), content=_rewritten(path, (ROOT / path).read_text(encoding="utf-8")))
    return File.generated(config, _place(path), abs_src_path=str(ROOT / path))


def _place(path: str) -> str:
    """The path on the site of a file of the repository; docs/ becomes the site's root."""
    if path == START_PAGE:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    # Below a separate folder: tests/README.md would become a folder's page, and LICENSE would have no type.
    return f"repository/{path}" + ("" if posixpath.splitext(path)[1] else ".txt")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite a docs/ page's links to folders and to files outside docs/; `_file` has rewritten other pages' links."""
    if page.file.generated_by:
        return markdown
    return _rewritten(f"docs/{page.file.src_uri}", markdown)


def _rewritten(page: str, markdown: str) -> str:
    here = posixpath.dirname(_place(page))

    def rewritten(link: re.Match[str]) -> str:
        if not _is_ours(link):
            return link[0]
        target = _resolved(page, link["path"])
        if (ROOT / target).is_dir():
            target = posixpath.join(target, "README.md")
        if not (ROOT / target).is_file():
            log.warning("%s links to %s, which is not in the repository", page, link["path"])
            return link[0]
        return f"{link['before']}{posixpath.relpath(_place(target), here or '.')}{link['after']}"

    return LINK.sub(rewritten, markdown)
