"""The program that flips a bit, run as a host would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemesis.mechanisms.bit_flip import FLIP_SCRIPT, flip_arguments, parse_flip, restore_arguments


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", "-", *arguments], input=FLIP_SCRIPT, capture_output=True, text=True, timeout=30
    )


def test_one_bit_of_the_largest_file_is_flipped_and_put_back(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    small, large = tmp_path / "log" / "00", tmp_path / "log" / "01"
    small.write_bytes(b"x" * 10 + bytes(5000))
    content = bytes(range(1, 201)) + bytes(3 << 20)  # the rest was only set aside
    large.write_bytes(content)
    flipped = parse_flip(run(*flip_arguments(str(tmp_path), "log/*", 0.25, 7)).stdout)
    assert (flipped.path, flipped.offset, flipped.before, flipped.after) == (str(large), 50, 51, 51 ^ 128)
    assert large.read_bytes() == content[:50] + bytes([51 ^ 128]) + content[51:]
    for _ in range(2):
        assert run(*restore_arguments(flipped)).returncode == 0
        assert large.read_bytes() == content


def test_nothing_to_flip(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(bytes(100))
    done = run(*flip_arguments(str(tmp_path), "empty", 0.5, 0))
    assert done.returncode == 1 and "there is no empty" in done.stderr
    with pytest.raises(ValueError, match="no word of a flipped bit"):
        parse_flip(done.stdout)
