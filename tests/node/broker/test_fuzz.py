"""A broker under generated and mutated frames, in small numbers; `benchmarks/fuzz_broker.py` has the large ones."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import fuzz_broker, fuzz_dledger

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("dledger", [False, True])
def test_a_broker_survives_fuzzed_frames(dledger: bool) -> None:
    figures = fuzz_broker.fuzz(800, seed=7, dledger=dledger)
    assert figures["frames"] >= 800 and figures["bystander_messages"] > 10
    assert {0, 1, 3} <= figures["codes"].keys()


def test_a_dledger_group_survives_fuzzed_frames_on_its_internal_ports() -> None:
    figures = fuzz_dledger.fuzz(1500, seed=7)
    assert figures["strangers"] >= 700 and figures["forgers"] >= 700
    assert figures["undisturbed"] > 0 and figures["acknowledged"] > figures["undisturbed"]


def test_the_fuzzer_detects_a_missing_reply(monkeypatch: Any) -> None:
    """The fuzzer is made to expect a reply to an END of unknown outcome, which never gets one."""
    monkeypatch.setattr(fuzz_broker, "QUIET_CODES", ())
    monkeypatch.setattr(fuzz_broker, "ANSWER_TIMEOUT_S", 1.0)
    ends = [command for command in fuzz_broker.corpus() if command.code == 37]
    ends[0].ext_fields["commitOrRollback"] = "0"
    monkeypatch.setattr(fuzz_broker, "_requests", lambda: fuzz_broker.st.just(ends[0]))
    with pytest.raises(AssertionError, match="no answer to"):
        fuzz_broker.fuzz(100, seed=1)
