"""The parts of the project's style that a machine can check."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("checker", "nemesis", "node", "spark_analysis", "harness")
MAX_FUNCTION_LINES = 70
"""A function fits a screen. Files have no limit: a file holds one thought, however long."""

LONGER_FUNCTIONS = {
    "checker/linearizability/general.py _run",
}
"""Exceptions: the checker's innermost loop, in which a call for each step costs (its look-up of states seen before, as
a method, took 11 % more: 1.87 s of processor in place of 1.68 for 325,000 steps, least of five alternated
times). The list only gets shorter: the test fails on names that need not be here."""

TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".cfg", ".yml", ".yaml", ".j2", ".css", ".js", ".html", ""}

UNIT_SUFFIXES = ("_s", "_ms", "_us", "_ns", "_hours", "_days", "_bytes", "_ratio", "_ppm", "_percent")
NEEDS_UNIT = re.compile(r"(^|_)(timeout|interval|delay|latency|duration|elapsed|lease|grace|age|backoff|jitter)$")
"""Parameter and field names that end in one of these words name a quantity and must carry its unit."""


def tracked_files() -> list[Path]:
    """Tracked and new files; without git or a checkout, all files that .gitignore does not name."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return files_without_git(ROOT)
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def files_without_git(root: Path) -> list[Path]:
    """The files of a directory but for those that its .gitignore names: by a name, or from the root by a path."""
    patterns = (root / ".gitignore").read_text(encoding="utf-8").split()
    found, above = list[Path](), [root]
    while above:
        for path in sorted(above.pop().iterdir()):
            names = (path.name, f"/{path.relative_to(root)}")
            if path.name == ".git" or any(fnmatch(name, each.rstrip("/")) for each in patterns for name in names):
                continue
            if path.is_dir() and not path.is_symlink():
                above.append(path)
            elif path.is_file():
                found.append(path)
    return found


def test_files_are_the_same_with_git_and_without() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout of git")
    assert set(files_without_git(ROOT)) == set(tracked_files())


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def text_files() -> Iterator[tuple[Path, str]]:
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES:
            yield path, path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Facts:
    """What the tests need to know of the packages' modules, which are parsed once."""

    longer_functions: set[str] = field(default_factory=set)
    modules_without_docstring: list[str] = field(default_factory=list)
    without_unit: list[str] = field(default_factory=list)


def facts() -> Facts:
    found = Facts()
    for path in python_files():
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in PACKAGES:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.stat().st_size > 0 and ast.get_docstring(tree) is None:
            found.modules_without_docstring.append(str(relative))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES:
                    found.longer_functions.add(f"{relative} {node.name}")
            elif isinstance(node, ast.arg):
                found.without_unit.extend(_without_unit(node.arg, node.annotation, f"{relative}:{node.lineno}"))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.without_unit.extend(_without_unit(node.target.id, node.annotation, f"{relative}:{node.lineno}"))
    return found


def _without_unit(name: str, annotation: ast.expr | None, place: str) -> list[str]:
    """The place and name of a number that names a quantity and not its unit."""
    lowered = name.lower().lstrip("_")
    if annotation is None or not NEEDS_UNIT.search(lowered) or lowered.endswith(UNIT_SUFFIXES):
        return []
    return [f"{place} {name}"] if re.search(r"\b(int|float)\b", ast.unparse(annotation)) else []


def test_functions_fit_a_screen_modules_have_docstrings_and_quantities_units() -> None:
    found = facts()
    assert found.longer_functions == LONGER_FUNCTIONS
    assert found.modules_without_docstring == []
    assert found.without_unit == []


@pytest.mark.parametrize(("name", "found"), [("timeout", ["here:1 timeout"]), ("timeout_s", []), ("name", [])])
def test_a_quantity_without_its_unit_is_found(name: str, found: list[str]) -> None:
    field_of_number = ast.parse("field: int | None").body[0]
    assert isinstance(field_of_number, ast.AnnAssign)
    assert _without_unit(name, field_of_number.annotation, "here:1") == found


def test_no_file_contains_a_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:work|farm|root|home/[a-z]\w*)/")
    wrong = [
        f"{path.relative_to(ROOT)}: {match.group(0)}"
        for path, text in text_files()
        if path != Path(__file__)
        for match in pattern.finditer(text)
    ]
    assert wrong == []


def test_nothing_is_left_unfinished() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")
    pattern = re.compile("|".join(rf"\b{word}\b" for word in words))
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert wrong == []


def test_every_test_asserts_something_and_none_is_skipped_unconditionally() -> None:
    """No test without an assertion or an expected error; no unconditional skip or expected failure."""
    dishonest = []
    for path in python_files():
        relative = path.relative_to(ROOT)
        if relative.parts[0] != "tests" or not path.name.startswith("test_"):
            continue
        text = path.read_text(encoding="utf-8")
        if re.search(r"pytest\.mark\.(skip|xfail)\b|assert True\b", text) and path != Path(__file__):
            dishonest.append(f"{relative}: unconditional skip, expected failure or empty assertion")
        tree = ast.parse(text)
        helpers = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _asserts(node, frozenset())
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name.startswith("test_")
                and not _asserts(node, frozenset(helpers))
            ):
                dishonest.append(f"{relative}:{node.lineno} {node.name} asserts nothing")
    assert dishonest == []


def _asserts(function: ast.AST, helpers: frozenset[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in {"raises", "fail"} or name.startswith(("assert_", "check_", "expect_")) or name in helpers:
                return True
    return False
