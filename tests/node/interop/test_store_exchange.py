"""Stores that we have written, opened by Apache's own broker and store, and the other way round, with few messages:
`python -m benchmarks.store_exchange` does it with a million."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _store_power_cuts, store_exchange
from benchmarks._apache_broker import apache_classpath
from harness.errors import OperatorError

pytestmark = [
    pytest.mark.java,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("javac") is None or shutil.which("mvn") is None, reason="needs a Java compiler and Maven"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def apache() -> str:
    try:
        return apache_classpath()
    except OperatorError as error:
        pytest.skip(f"Maven cannot fetch Apache's broker: {error}")


@pytest.mark.parametrize("move", [store_exchange.to_apache, store_exchange.from_apache])
def test_messages_of_every_kind_are_the_same_after_a_move_between_stores(move: Any, tmp_path: Path) -> None:
    """Every queue has the same records, every key finds the same messages, an open transaction can still be ended."""
    figures = move(tmp_path, 2000)
    assert figures["messages"] > 1900 and figures["queues"] == store_exchange.QUEUES + 4
    assert any("16 transactions are open" in line for line in figures["said"])


def test_every_kind_of_difference_between_two_stores_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = store_exchange.Census({"t/0": (1, "a")}, {"t/0": 1, "h/0": 2}, {"0": 5}, {"key": ["x"]})
    assert store_exchange.differences(seen, seen) == []
    for changed in (
        seen._replace(queues={"t/0": (1, "b")}), seen._replace(queues={}), seen._replace(offsets={"0": 4}),
        seen._replace(ends={"t/0": 2, "h/0": 2}), seen._replace(ends={"t/0": 1, "h/0": 1}), seen._replace(found={}),
    ):  # fmt: skip
        assert len(store_exchange.differences(seen, changed, grown=("h",))) == 1
    assert store_exchange.differences(seen, seen._replace(ends={"t/0": 1, "h/0": 3}), grown=("h",)) == []


@pytest.mark.parametrize("flush_mode", [pytest.param("sync", marks=pytest.mark.long), "async"])
def test_apaches_store_finds_what_ours_finds_after_power_cuts(flush_mode: str) -> None:
    figures = _store_power_cuts.power_cuts(4, flush_mode=flush_mode, seed=4711)
    assert figures["images"] == 4 and figures["messages"] > 100
    assert figures["acknowledged"] > 100 if flush_mode == "sync" else figures["lost_unsynced_bytes"] > 0


def test_the_power_cut_check_fails_when_apaches_store_lacks_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its image lacks the last 200 bytes."""
    real_pad = _store_power_cuts.pad

    def cut(files: Mapping[str, bytes], target: Path, *, segment_size_bytes: int, durable_ms: int) -> None:
        last = max(files)
        real_pad({**files, last: files[last][:-200]}, target, segment_size_bytes=segment_size_bytes, durable_ms=0)

    monkeypatch.setattr(_store_power_cuts, "pad", cut)
    with pytest.raises(AssertionError, match="cut0: Apache finds"):
        _store_power_cuts.power_cuts(1, flush_mode="sync", seed=4711)
