"""Open requests: each gets its outcome once, at its deadline or before, whatever the order of the deadlines."""

from __future__ import annotations

import asyncio
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from harness.clusters.sim.simulation import run_simulated
from node.remoting import Command, ConnectionLost, RequestTimeout
from node.remoting.outstanding import TIMER_SLACK_S, TIMER_STEP_S, Outcome, Outstanding

TIMES_MS = st.integers(1, 400)
REQUESTS = st.lists(st.tuples(TIMES_MS, TIMES_MS, st.none() | TIMES_MS), max_size=30)
"""(sent after the one before, timeout, answered after being sent), all in ms."""


@given(requests=REQUESTS)
def test_each_request_has_one_outcome_in_time(requests: list[tuple[int, int, int | None]]) -> None:
    outcomes: dict[int, list[tuple[float, Outcome]]] = {}
    sent_s: dict[int, float] = {}
    timeouts = 0

    def count(number: int) -> None:
        nonlocal timeouts
        timeouts += number

    async def main() -> None:
        loop = asyncio.get_running_loop()
        waiting = Outstanding(loop, lambda: "peer", count)

        def take(number: int, outcome: Outcome) -> None:
            outcomes.setdefault(number, []).append((loop.time(), outcome))

        for number, (pause_ms, timeout_ms, answer_ms) in enumerate(requests):
            await asyncio.sleep(pause_ms / 1000)
            opaque = waiting.next_opaque()
            sent_s[number] = loop.time()
            waiting.add(opaque, timeout_ms, partial(take, number))
            if answer_ms is not None:
                loop.call_later(answer_ms / 1000, waiting.answered, Command(0, opaque=opaque))
        await asyncio.sleep(1.0)
        assert not waiting.waiting

    run_simulated(main(), seed=0)
    expired = 0
    for number, (_, timeout_ms, answer_ms) in enumerate(requests):
        ((when_s, outcome),) = outcomes[number]
        took_s = when_s - sent_s[number]
        assert took_s <= timeout_ms / 1000 + TIMER_STEP_S + 1e-9
        if isinstance(outcome, RequestTimeout):
            expired += 1
            assert took_s >= timeout_ms / 1000 - TIMER_SLACK_S - 1e-9
            assert answer_ms is None or answer_ms / 1000 >= took_s - 1e-9
        else:
            assert answer_ms is not None and abs(took_s - answer_ms / 1000) < 1e-9
    assert expired == timeouts


def test_open_requests_fail_with_the_connection_and_get_no_later_outcome() -> None:
    seen: list[Outcome] = []

    async def main() -> None:
        waiting = Outstanding(asyncio.get_running_loop(), lambda: "peer", lambda count: None)
        for _ in range(3):
            waiting.add(waiting.next_opaque(), 50, seen.append)
        waiting.answered(Command(0, opaque=1))
        waiting.fail_all(lambda: ConnectionLost("gone"))
        await asyncio.sleep(1.0)
        waiting.answered(Command(0, opaque=2))

    run_simulated(main(), seed=0)
    assert [type(outcome) for outcome in seen] == [Command, ConnectionLost, ConnectionLost]
