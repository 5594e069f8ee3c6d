"""The comparison with Apache RocketMQ: what is counted, and that the page says what was recorded."""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.side_by_side import CELLS, PAGE, RESULTS, SYSTEMS, longest_away, name_of, render, words_of
from harness.cli_parser import build_parser
from harness.commands.run import prepare


def events(*times_s: tuple[str, float]) -> Any:
    return iter([{"f": "append", "type": kind, "time": int(at_s * 1e9)} for kind, at_s in times_s])


def test_away_is_the_longest_time_without_a_success() -> None:
    assert longest_away(events(("invoke", 0), ("ok", 1), ("invoke", 1), ("info", 4), ("ok", 5))) == (4, False)
    assert longest_away(events(("invoke", 0), ("ok", 1), ("invoke", 2), ("fail", 3), ("invoke", 9))) == (8, True)
    assert longest_away(events(("invoke", 2), ("fail", 3), ("invoke", 9), ("fail", 10))) == (7, True)
    assert longest_away(iter([{"f": "read", "type": "ok", "time": 5}])) == (0, False)


def test_both_systems_are_tested_with_the_same_options() -> None:
    for fault, replication in CELLS:
        tests = [
            prepare(build_parser().parse_args(["run", *words_of(name, fault, replication, 3), "--cluster", "local"]))
            for name in SYSTEMS
        ]
        apache, ours = [prepared.parts.test.to_json() for prepared in tests]
        assert apache.pop("system") == "rocketmq" and os.path.basename(ours.pop("system")) == "our_broker.py:OurBroker"
        assert apache == ours


def test_a_cell_counts_runs_messages_and_times() -> None:
    def run(valid: Any, lost: int, away_s: float) -> dict[str, Any]:
        counts = {"lost": lost} if lost else {}
        return {"seed": 1, "valid": valid, "reason": "why", "acknowledged": 1000, "counts": counts, "away_s": away_s,
                "until_end": away_s > 8, "machine_load": [1.0, 2.0]}  # fmt: skip

    runs = {
        name_of("apache", "kill", "async"): [run(False, 7, 3.5), run(True, 0, 1.5), run(True, 0, 9.0)],
        name_of("ours", "kill", "async"): [run("unknown", 0, 30.0)],
    }
    page = render(runs)
    assert "| kill | async | 1 of 3 (6% to 79%) | 7 of 3,000 | 3.5 s (1.5 to > 9) | no answer | | |" in page
    assert "| kill | sync | not run | | | not run | | |" in page
    assert "- ours/async/kill, seed 1: why" in page


def test_the_page_matches_the_recorded_runs() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(json.loads(RESULTS.read_text(encoding="utf-8")))
