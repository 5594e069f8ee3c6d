"""docs/your-own-system.md, word for word: its commands are run one after the other, and print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.commands.new import source_for

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "your-own-system.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

FILES = dict(zip(("wrong.py", "ends.py"), (block for kind, block in BLOCKS if kind == "py"), strict=True))
"""The plug-ins that are wrong, as the page shows them."""


def transcripts() -> list[tuple[str, str]]:
    """(command, what it prints) of the page's shell blocks."""
    found = [block.partition("\n") for kind, block in BLOCKS if kind == "" and block.startswith("$ harness ")]
    return [(command.removeprefix("$ "), printed) for command, _, printed in found]


def pattern_of(printed: str) -> re.Pattern[str]:
    """The pattern of a block: `...` matches any text, on a line of its own any lines; trailing spaces are ignored."""
    lines = [line.rstrip() for line in printed.strip().splitlines()]
    parts = ["(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + " *\n" for line in lines]
    return re.compile("".join(parts))


def test_the_page_has_commands_and_listings() -> None:
    assert len(transcripts()) == 6
    assert sum(kind == "python" for kind, _ in BLOCKS) == 3


@pytest.mark.parametrize("listing", [block for kind, block in BLOCKS if kind == "python"])
def test_listings_are_in_the_file_that_harness_new_writes(listing: str) -> None:
    assert listing in source_for("mine")


def test_a_pattern_matches_what_it_shows_and_nothing_else() -> None:
    pattern = pattern_of("one ...\n...\nlast line\n")
    assert pattern.fullmatch("one thing\nother\nlast line   \n")
    assert not pattern.fullmatch("one thing\nother\nlost line\n")
    assert not pattern.fullmatch("none thing\nlast line\n")


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    for command, printed in transcripts():
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        )  # fmt: skip
        assert pattern_of(printed).search(done.stdout), f"{command}\n{done.stdout}"
        expected = 1 if "INVALID" in printed else 254 if "harness: " in printed else 0
        assert done.returncode == expected, command
