"""The generated pages are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = [sys.executable, str(ROOT / "scripts" / "generate_docs.py")]


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run([*SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_of_mechanisms_and_their_tests_is_up_to_date() -> None:
    script = str(ROOT / "scripts" / "coverage_of_the_seeds.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_stale_and_orphaned_pages_are_reported_and_generated_anew(tmp_path: Path) -> None:
    place = ["--docs", str(tmp_path)]
    subprocess.run([*SCRIPT, *place], check=True)
    assert (tmp_path / "nemeses" / "kill.md").is_file()
    (tmp_path / "nemeses" / "kill.md").write_text("something else")
    (tmp_path / "nemeses" / "gone.md").write_text("a nemesis that there was")
    checked = subprocess.run([*SCRIPT, "--check", *place], capture_output=True, text=True)
    assert checked.returncode == 1
    assert "kill.md: out of date" in checked.stderr and "gone.md: out of date" in checked.stderr
    subprocess.run([*SCRIPT, *place], check=True)
    assert subprocess.run([*SCRIPT, "--check", *place]).returncode == 0
