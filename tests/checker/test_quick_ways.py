"""The fast paths of the near-linear engines, for histories without failures and crashes, against the slow paths."""

from __future__ import annotations

import random

import pytest

from checker import CASRegister, FIFOQueue, History, Log, Verdict, check
from checker.history import INFO, NEVER
from checker.linearizability import fifo, log, problem
from checker.linearizability.general import Search
from checker.testing import random_history
from checker.testing.large import large_history

HISTORIES = 1_500


def longer(name: str, rng: random.Random, crash: float = 0) -> History:
    return random_history(
        name,
        rng,
        operations=rng.randrange(2, 40),
        processes=rng.randrange(1, 6),
        spread=rng.choice([0, 0, 0, 4]),
        crash=crash,
        lie=rng.choice([0, 0, 0.05, 0.3]),
    )


def fast_path_accepts(quick, history: History) -> bool:
    try:
        return quick(history, range(len(history)))
    except (TypeError, KeyError):
        return False


def test_the_fast_path_of_queues_agrees_with_the_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    seen: dict[bool, int] = {True: 0, False: 0}
    for number in range(HISTORIES):
        history = longer("fifo-queue", rng)
        fine = fast_path_accepts(fifo._surely_fine, history)
        with monkeypatch.context() as patch:
            patch.setattr(fifo, "_surely_fine", lambda *_: False)
            verdict = check(history, FIFOQueue(), timeout_s=0.5).verdict
        whole = "fail" not in history.status and INFO not in history.status
        put = [value for value in history.value if value is not None]
        distinct = len(set(put)) == len(put)
        if whole and distinct and verdict is not Verdict.UNKNOWN:
            assert fine == (verdict is Verdict.VALID), number
            seen[fine] += 1
        assert not fine or verdict is Verdict.VALID, number
    assert min(seen.values()) > 200


def test_a_value_that_stays_long_in_a_queue_is_left_to_the_slow_path() -> None:
    history = large_history("fifo-queue", 4_000, 5)
    assert fifo._surely_fine(history, range(4_000))
    starts, returns = list(range(0, 4_000, 2)), list(range(1, 4_000, 2))
    gone = [position + 5_000 for position in starts]
    late = [10_000, *gone[1:]]
    # The first put never ends before another begins, so nothing overtook it; seeing that takes too many comparisons.
    assert not fifo._in_order(starts, [9_999, *returns[1:]], late, late)


def test_the_fast_path_of_logs_accepts_only_valid_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    fine_ones = refused = 0
    for number in range(HISTORIES):
        history = longer("log", rng, crash=rng.choice([0, 0, 0.1]))
        if rng.random() < 0.1:
            row = rng.randrange(len(history))
            if isinstance(history.result[row], int):
                history.result[row] -= 3
        fine = fast_path_accepts(log._surely_fine, history)
        with monkeypatch.context() as patch:
            patch.setattr(log, "_surely_fine", lambda *_: False)
            verdict = check(history, Log(), timeout_s=0.5).verdict
        assert not fine or verdict is Verdict.VALID, number
        fine_ones += fine
        refused += verdict is Verdict.INVALID
    assert fine_ones > 300 and refused > 100


def test_offsets_below_zero_are_invalid(done) -> None:
    for history in (
        done((0, "append", 1, [-1, 1])),
        done((0, "append", 1, [-3, 1])),
        done((0, "append", 1, [0, 1]), (0, "tail", None, -2)),
        done((0, "append", 1, [0, 1]), (0, "read", None, {"offset": 0, "messages": [], "tail": -1})),
    ):
        result = check(history, Log())
        assert result.verdict is Verdict.INVALID and result.witness is not None
        assert "below zero" in result.reason


@pytest.mark.parametrize("chunk", [1, 3, 1_000])
def test_a_history_compiled_in_chunks_is_the_same_problem(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    for seed in range(30):
        history = large_history("cas-register", 80, 2 + seed % 9, seed=seed, crash=0.1 * (seed % 2))
        if seed % 3 == 0:
            reads = [row for row in range(80) if history.f[row] == "read" and history.status[row] == "ok"]
            history.result[reads[seed % len(reads)]] = 9
        rows = range(len(history))
        plain = problem.Problem(history, rows, CASRegister())
        plain.complete()
        with monkeypatch.context() as patch:
            patch.setattr(problem, "CHUNK_RETURNS", chunk)
            pieces = problem.Problem(history, rows, CASRegister())
            steps = 0
            while pieces.ready < pieces.more():
                steps += 1
            assert steps <= len(plain.return_row) // chunk + 1
            assert pieces.return_bit == plain.return_bit and pieces.available == plain.available
            bits = [[entry[:-1] for entry in entries] for entries in pieces.open_mutators]
            assert bits == [[entry[:-1] for entry in entries] for entries in plain.open_mutators]
            answer = Search(history, rows, CASRegister()).run(20_000)
        assert answer == Search(history, rows, CASRegister()).run(20_000)


@pytest.mark.parametrize("crash", [0, 0.2])
def test_operations_open_at_returns_are_counted(crash: float) -> None:
    for seed in range(20):
        history = large_history("cas-register", 40, 1 + seed % 7, seed=seed, crash=crash)
        for rows in (range(40), range(0, 40, 3)):
            spans = [(history.invoked[row], history.returned[row]) for row in rows]
            counted = sum(begun < end < done for _, end in spans if end != NEVER for begun, done in spans)
            assert problem._open_at_returns(history, rows) == counted
