"""Write docs/coverage-of-the-seeds.md: each mechanism of the inventory, with the tests that would fail without it.

    python scripts/coverage_of_the_seeds.py [--check]

The mechanisms are the lines of docs/mechanisms.txt, in sections that begin with "# ". A test names its mechanisms with
`@pytest.mark.mechanism("...")`; the argument is a mechanism's line, as a literal or a constant of the module, or the
beginning of the line followed by "...", which must match exactly one line.
With --check nothing is written: the exit status is 0 if the document is up to date and every mechanism is known.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MECHANISMS = ROOT / "docs" / "mechanisms.txt"
DOCUMENT = ROOT / "docs" / "coverage-of-the-seeds.md"


def tests_by_mechanism() -> dict[str, list[str]]:
    """Mechanism, as a test names it -> the tests that name it."""
    mechanisms: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for mechanism in _mechanisms(node.decorator_list, constants):
                    mechanisms.setdefault(mechanism, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return mechanisms


def _mechanisms(decorators: list[ast.expr], constants: dict[str, ast.expr]) -> Iterator[str]:
    for decorator in decorators:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.mechanism":
            for argument in decorator.args:
                value = constants.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
                yield str(ast.literal_eval(value))


def resolved(mechanisms: dict[str, list[str]], known: set[str]) -> dict[str, list[str]]:
    """Expand abbreviated mechanisms to whole lines; one that matches no line, or several, stays as it is."""
    found: dict[str, list[str]] = {}
    for mechanism, tests in mechanisms.items():
        fitting = [line for line in known if mechanism.endswith("...") and line.startswith(mechanism[:-3])]
        found.setdefault(fitting[0] if len(fitting) == 1 else mechanism, []).extend(tests)
    return {mechanism: sorted(set(tests)) for mechanism, tests in found.items()}


def document(mechanisms: dict[str, list[str]]) -> str:
    """The document's text."""
    lines = [
        "# Which test covers which mechanism",
        "",
        "Made by `scripts/coverage_of_the_seeds.py` from the `mechanism` markers of the tests. A test is listed where",
        "it would fail if the mechanism were missing.",
    ]
    for line in MECHANISMS.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            lines += ["", f"## {line[2:]}", "", "| Mechanism | Tests |", "|---|---|"]
        elif line:
            tests = "<br>".join(f"`{test}`" for test in mechanisms.get(line, [])) or "no test names it yet"
            lines.append(f"| {line.replace('|', chr(92) + '|')} | {tests} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the document; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/coverage-of-the-seeds.md from the markers of the tests.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the document is out of date")
    options = parser.parse_args()
    known = set(MECHANISMS.read_text(encoding="utf-8").splitlines())
    mechanisms = resolved(tests_by_mechanism(), known)
    unknown = [mechanism for mechanism in mechanisms if mechanism not in known]
    for mechanism in unknown:
        print(f"no mechanism is called {mechanism!r}, which {mechanisms[mechanism][0]} names", file=sys.stderr)
    text = document(mechanisms)
    if options.check:
        is_current = DOCUMENT.exists() and DOCUMENT.read_text(encoding="utf-8") == text
        if not is_current:
            print(f"{DOCUMENT} is out of date; run this script without --check", file=sys.stderr)
        return 0 if is_current and not unknown else 1
    DOCUMENT.write_text(text, encoding="utf-8")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
