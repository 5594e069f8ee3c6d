"""Rates at which groups get messages, by the loop's time."""

from __future__ import annotations

import pytest

from node.broker import group_rates
from node.broker.group_rates import GroupRates


def test_an_idle_group_is_dropped_to_make_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_rates, "MAX_GROUPS", 2)
    now_s = 100.0
    rates = GroupRates(lambda: now_s)
    rates.given("gone", 10)
    rates.given("stays", 10)
    for _ in range(60):
        now_s += 1
        rates.given("stays", 10)
        rates.given("new", 10)
    assert rates.per_second("gone") == 0
    assert 9 <= rates.per_second("stays") <= 11 and 9 <= rates.per_second("new") <= 11
