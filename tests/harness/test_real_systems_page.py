"""The record of real systems: what it says about runs, and that the page is made from it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks._system_clusters import CLUSTERS, _last_line
from benchmarks.real_systems import FAULTS, ON_CLUSTERS, PAGE, RESULTS, SAFE, name_of, render, words_of
from harness.cli_parser import build_parser


def kept(valid: Any, **more: Any) -> dict[str, Any]:
    return {
        "seed": 2, "valid": valid, "reason": "why", "ops": {"ok": 1234}, "faults": 4, "proven": 3,
        "machine_load": [0.5, 2.0], "day": "2026-11-24", **more,
    }  # fmt: skip


def test_runs_that_are_not_valid_are_listed_with_their_reason() -> None:
    page = render({"etcd": [kept(True), kept(True, proven=4)], "nats": [kept("unknown"), kept(False)]}, {})
    assert "| etcd | `--workload cas-register` | 2 of 2 | 1,234, 1,234 | 7 of 8 | 2026-11-24 |" in page
    assert "| 0 of 2 | 1,234, 1,234 | 6 of 8 |" in page
    assert "- nats, seed 2: unknown: why\n- nats, seed 2: **invalid**: why" in page
    assert "| redis | `--workload set --nodes 3 --set quorum=9` | not run |" in page
    assert "Runs that were not valid" not in render({"etcd": [kept(True)]}, {})


@pytest.mark.parametrize("system", SAFE)
def test_every_system_runs_under_partitions_kills_and_pauses_for_a_minute(system: str) -> None:
    arguments = build_parser().parse_args(["run", *words_of(system, 3)])
    assert arguments.system == name_of(system)
    assert [re.split("[=@]", each)[0] for each in arguments.nemesis.split(",")] == FAULTS.split(",")
    assert arguments.time_limit == 60


def test_the_page_matches_the_recorded_runs() -> None:
    kept_runs, kept_cells = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, ON_CLUSTERS))
    assert PAGE.read_text(encoding="utf-8") == render(kept_runs, kept_cells)


def test_a_cell_shows_its_verdict_or_why_there_is_none() -> None:
    cells = {"etcd": {"local": kept(True), "ssh": kept(False), "docker": {"cannot": "no engine"}}}
    page = render({}, cells)
    assert [*CLUSTERS] == ["local", "local, ordinary user", "ssh", "docker"]
    assert "| etcd | valid, 1,234, 3 of 4 | not run | **invalid**, 1,234, 3 of 4 | cannot |" in page
    assert "- etcd on ssh: why\n- etcd on docker: cannot: no engine\n" in page and "etcd on local:" not in page


def test_a_refusal_is_the_last_line_of_the_harness() -> None:
    assert _last_line("status 254: starting\nharness: ssh: no such machine\n") == "ssh: no such machine"
    assert _last_line("") == "it said nothing"
