"""The directory of the recorded histories, and shorthands for writing one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CORPORA = Path(os.environ.get("SPLITBRAIN_CORPORA", Path(__file__).resolve().parents[2].parent / "shared" / "corpora"))

Events = list[dict[str, Any]]


def _events(*rows: tuple[Any, ...]) -> Events:
    """Events from ``(process, type, f, value[, key])``, one millisecond apart."""
    out: Events = []
    for index, (process, kind, f, value, *key) in enumerate(rows):
        event = {"index": index, "time": index * 1_000_000, "process": process, "type": kind, "f": f, "value": value}
        if key:
            event["key"] = key[0]
        out.append(event)
    return out


@pytest.fixture
def events() -> Callable[..., Events]:
    return _events


@pytest.fixture
def done() -> Callable[..., Events]:
    """Events of consecutive operations, each ``(process, f, value, result)``."""

    def build(*operations: tuple[Any, ...]) -> Events:
        rows = []
        for process, f, value, result in operations:
            rows += [(process, "invoke", f, value), (process, "ok", f, result)]
        return _events(*rows)

    return build


@pytest.fixture(scope="session")
def corpora() -> Path:
    return CORPORA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not CORPORA.is_dir():
        missing = pytest.mark.skip(reason=f"no recorded histories at {CORPORA}; set SPLITBRAIN_CORPORA")
        for item in items:
            if item.get_closest_marker("corpora"):
                item.add_marker(missing)
