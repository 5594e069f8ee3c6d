"""Log lines: one per event, not forgeable."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from node.logs import MAX_LINE_CHARACTERS, configure_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    text = io.StringIO()
    configure_logging("info", text)
    yield text
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_has_time_level_logger_and_message(stream: io.StringIO) -> None:
    logging.getLogger("node.x").info("ready on %s", "127.0.0.1:1")
    logging.getLogger("node.x").debug("not shown")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO node\.x ready on 127\.0\.0\.1:1\n", stream.getvalue()
    )


def test_control_characters_cannot_forge_a_line(stream: io.StringIO) -> None:
    logging.getLogger("node.x").warning("remark %s", "a\nERROR forged\x1b[31m\u2028")
    assert stream.getvalue().count("\n") == 1
    assert r"a\nERROR forged\x1b[31m\u2028" in stream.getvalue()


def test_an_exception_and_a_huge_message_stay_one_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("x" * 2 * MAX_LINE_CHARACTERS)
    except ValueError:
        logging.getLogger("node.x").exception("failed")
    assert stream.getvalue().count("\n") == 1
    assert "failed: Traceback" in stream.getvalue()
    assert len(stream.getvalue()) < MAX_LINE_CHARACTERS + 100
