"""Histories recorded by others: every verdict, and a small witness for every violation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from checker import (
    CASRegister,
    FIFOQueue,
    History,
    KeyValue,
    Model,
    MultiRegister,
    Register,
    Result,
    Verdict,
    check,
    check_bank,
    check_counter,
    check_long_fork,
    check_set_full,
    check_transactions,
)
from checker.codecs import read

pytestmark = pytest.mark.corpora


def model_of(name: str) -> Model:
    if name.startswith("cas-register"):
        return CASRegister(initial=0 if "init 0" in name else None)
    if name.startswith("multi-register"):
        return MultiRegister(initial={"x": 0, "y": 0})
    return KeyValue() if name.startswith("kv") else Register()


def agree(history: History, model: Model, linearizable: bool, name: str) -> None:
    result = check(history, model, timeout_s=60)
    assert result.verdict is (Verdict.VALID if linearizable else Verdict.INVALID), f"{name}: {result.reason}"
    if linearizable:
        assert result.witness is None
        return
    assert result.witness is not None
    assert 1 <= len(result.witness.operations) <= 12, name
    alone = History.from_operations(result.witness.operations)
    assert check(alone, model).verdict is Verdict.INVALID, f"{name}: the witness alone is valid"
    assert any(f"process {operation.process}'s" in result.reason for operation in result.witness.operations), name


@pytest.mark.parametrize("folder", ["porcupine", "knossos", "redis-sentinel-jepsen"])
def test_recorded_histories_have_their_expected_verdicts(corpora: Path, folder: str) -> None:
    expected = json.loads((corpora / folder / "expected.json").read_text())
    assert expected
    for name, about in expected.items():
        history = read(corpora / folder / name)
        assert len(history) == about.get("ops", len(history))
        agree(history, model_of(about["model"]), about["linearizable"], name)


def test_limo_queue_traces_have_their_expected_verdicts(corpora: Path) -> None:
    expected = json.loads((corpora / "limo" / "expected.json").read_text())
    assert expected
    for name, linearizable in expected.items():
        agree(read(corpora / "limo" / name), FIFOQueue(), linearizable, name)


def test_elle_histories_have_their_expected_verdicts(corpora: Path) -> None:
    folder = corpora / "elle-cli"
    expected = json.loads((folder / "expected.json").read_text())
    checks: dict[str, Callable[[History], Result]] = {
        "list-append": lambda h: check_transactions(h, "list-append"),
        "rw-register": lambda h: check_transactions(h, "rw-register"),
        "bank": check_bank,
        "counter": check_counter,
        "set-full": check_set_full,
        "long-fork": check_long_fork,
    }
    histories = {name: (checks[about["model"]], about["valid"]) for name, about in expected.items()}
    histories["histories/jepsen/long-fork.edn"] = check_long_fork, False
    # Elle only looks for cycles, and accepts the read of a 3 that was never written.
    histories["histories/elle/rw-register.edn"] = checks["rw-register"], False
    invalid = 0
    for name, (checked, is_valid) in histories.items():
        result = checked(read(folder / name))
        assert result.valid is is_valid, name
        if is_valid:
            assert result.witness is None
            continue
        invalid += 1
        assert result.witness is not None
        assert 1 <= len(result.witness.operations) <= 12, name
        assert checked(History.from_operations(result.witness.operations)).verdict is Verdict.INVALID, name
    assert invalid == 5
