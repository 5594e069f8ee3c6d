"""A broker under generated and mutated frames, in small numbers; `benchmarks/fuzz_broker.py` has the large ones."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import fuzz_broker, fuzz_dledger

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("dledger", [False, True])
def test_a_broker_stands_whatever_comes(dledger: bool) -> None:
    figures = fuzz_broker.fuzz(800, seed=7, dledger=dledger)
    assert figures["frames"] >= 800 and figures["bystander_messages"] > 10
    assert {0, 1, 3} <= figures["codes"].keys()


def test_a_group_stands_what_comes_to_its_own_ports() -> None:
    figures = fuzz_dledger.fuzz(1500, seed=7)
    assert figures["strangers"] >= 700 and figures["forgers"] >= 700
    assert figures["undisturbed"] > 0 and figures["acknowledged"] > figures["undisturbed"]


def test_the_fuzzer_notices_an_answer_that_is_missing(monkeypatch: Any) -> None:
    """A request that is never answered is found out: here one that the fuzzer only believes to want an answer."""
    monkeypatch.setattr(fuzz_broker, "QUIET_CODES", ())
    monkeypatch.setattr(fuzz_broker, "ANSWER_TIMEOUT_S", 1.0)
    end = [command for command in fuzz_broker.corpus() if command.code == 37]
    end[0].ext_fields["commitOrRollback"] = "0"
    monkeypatch.setattr(fuzz_broker, "_requests", lambda: fuzz_broker.st.just(end[0]))
    with pytest.raises(AssertionError, match="no answer to"):
        fuzz_broker.fuzz(100, seed=1)
