"""Crashes under load, in small numbers; `benchmarks/crash_loop.py` has the large ones."""

from __future__ import annotations

import pytest

from benchmarks import crash_loop


@pytest.mark.mechanism("Reput dispatch (confirmOffset if duplication)")
@pytest.mark.parametrize("dledger", [False, True])
def test_nothing_is_lost_when_power_is_cut(dledger: bool) -> None:
    figures = crash_loop.power_cut_rounds(15, seconds=600, seed=4711, dledger=dledger)
    assert figures["rounds"] == 15 and figures["acknowledged"] > 500 and figures["lost_unsynced_bytes"] > 0


def test_the_crash_loop_detects_messages_lost_by_an_asynchronous_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_loop, "CONFIG", crash_loop.CONFIG.replace('"sync"', '"async"'))
    with pytest.raises(AssertionError, match="lost"):
        crash_loop.power_cut_rounds(30, seconds=600, seed=1)


@pytest.mark.cluster
@pytest.mark.parametrize("dledger", [False, True])
def test_nothing_is_lost_when_a_process_is_killed(dledger: bool) -> None:
    figures = crash_loop.kill_rounds(3, seconds=600, seed=4711, dledger=dledger)
    assert figures["rounds"] == 3 and figures["acknowledged"] > 0
