"""Log lines: one per event, not forgeable, not floodable."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from node.logs import MAX_LINE_CHARACTERS, LogLimiter, configure_logging


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


def test_limiter_lets_one_line_through_and_counts_the_rest(stream: io.StringIO) -> None:
    now = 0.0
    limiter = LogLimiter(lambda: now, interval_s=10)
    logger = logging.getLogger("node.x")
    for _ in range(5):
        limiter.warning(logger, "a", "peer %s", "p")
    limiter.warning(logger, "b", "other")
    now = 10.0
    limiter.warning(logger, "a", "peer %s", "p")
    messages = [line.split(" ", 3)[3] for line in stream.getvalue().splitlines()]
    assert messages == ["peer p", "other", "peer p (4 like this since the last line)"]


def test_limiter_forgets_keys_beyond_its_bound(stream: io.StringIO) -> None:
    limiter = LogLimiter(lambda: 0.0)
    for number in range(3000):
        limiter.warning(logging.getLogger("node.x"), str(number), "line")
    assert stream.getvalue().count("\n") == 3000
    assert len(limiter._next_at) <= 1024
