"""The last lines of a program: bounded, and without terminal escape sequences."""

from __future__ import annotations

from pathlib import Path

from harness.systems.program_logs import MAX_LINE_CHARS, MAX_LINES, last_lines


def test_the_last_lines_are_bounded_and_empty_ones_left_out(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n\n" for number in range(100)) + "x" * 1000)
    found = last_lines(log)
    assert len(found) == MAX_LINES and found[-2] == "line 99" and found[-1] == "x" * MAX_LINE_CHARS


def test_colours_and_lines_of_nothing_else_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"\x1b[38;5;160m[error] down\x1b[0m\n\x1b[0m\n[1] up \xff\n")
    assert last_lines(log) == ["[error] down", "[1] up \ufffd"]


def test_a_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none.log") == []


def test_a_java_stack_trace_is_reduced_to_its_exception(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    frames = "".join(f"\tat java.base/java.lang.Thread.run(Thread.java:{number})\n" for number in range(40))
    log.write_text(f"starting at 9876\njava.net.BindException: Address already in use\n{frames}\t... 7 more\n")
    assert last_lines(log) == ["starting at 9876", "java.net.BindException: Address already in use"]
