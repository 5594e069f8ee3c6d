"""How the benchmarks of searches evaluate their results."""

from __future__ import annotations

from benchmarks.search_seeds import MUTANTS, WAYS, Trial, table, trial
from benchmarks.seeds import MAX_KEPT_FAILURES, kept, render, without_what_varies
from node.mutants.catalogue import MUTANTS as KNOWN


def test_findings_are_counted_by_processor_time() -> None:
    heavy, light = list(WAYS)[:2]
    trials = [
        *(Trial("accept-gap", heavy, seed, seed == 0, 2.0) for seed in range(4)),
        *(Trial("accept-gap", light, seed, seed == 1, 0.5) for seed in range(4)),
        *(Trial("no-step-down", light, seed, is_found=False, core_s=0.5) for seed in range(4)),
    ]
    assert table(trials) == [
        f"| mutant | {heavy} | {light} |",
        "|---|---|---|",
        "| accept-gap | 1 of 4, 2.00 s | 1 of 4, 0.50 s |",
        "| no-step-down | - | 0 of 4, 0.50 s |",
        "| all | 1 of 4, 2.00 s | 1 of 8, 0.50 s |",
        "| findings in 1,000 core s | 125 | 250 |",
    ]


def test_every_mutant_of_the_comparison_exists() -> None:
    assert {name for name, _ in MUTANTS} <= set(KNOWN)


def test_trials_find_a_mutant_and_find_nothing_without_one() -> None:
    found = [trial("ack-before-quorum", "log", "25/s, 20, 7 s", seed) for seed in (870_000, 870_001)]
    assert any(each.is_found for each in found)
    assert not trial("none", "log", "25/s, 20, 7 s", 870_000).is_found


def test_reasons_that_differ_only_in_varying_parts_are_counted_as_one() -> None:
    one, two = (f"f{n}: n{n} met no call in {n}.5 s" for n in (1, 3))
    assert without_what_varies(one) == without_what_varies(two) == "f#: n# met no call in #.# s"


def test_the_page_lists_every_reason_with_its_count() -> None:
    known = dict.fromkeys(("seeds", "valid", "invalid", "unknown", "operations", "faults", "took_s"), 0)
    seen = {"commit": "c" * 40, "failures": [], **known, "seeds": 30, "valid": 27, "unknown": 3}
    page = render(
        {"every-fault-log": {**seen, "reasons": {"unknown: no call": 1, "unknown: no fault": 2}, "explained": ["Why."]}}
    )
    lines = page.splitlines()
    at = lines.index("every-fault-log, all seeds that were not valid, by reason (# stands for varying parts):")
    assert lines[at + 2 : at + 6] == ["- 2 unknown: no fault", "- 1 unknown: no call", "", "Why."]


def test_the_page_says_which_seeds_ran_on_which_commit_and_why() -> None:
    known = dict.fromkeys(("seeds", "valid", "invalid", "unknown", "operations", "faults", "took_s"), 0)
    began_on = [
        {"commit": "b" * 40, "seeds": 24000, "why": "a rule was mended."},
        {"commit": "d" * 40, "seeds": 30000, "why": "a fault was mended."},
    ]
    again = {**known, "commit": "c" * 40, "first": 24000, "seeds": 6000, "valid": 5998, "unknown": 2, "stuck": 0}
    again["reasons"] = {"unknown: nobody led": 2}
    lines = render(
        {"every-fault-log": {"commit": "c" * 40, "failures": [], **known, "began_on": began_on, "again": [again]}}
    ).splitlines()
    assert "Seeds 0 to 23,999 of every-fault-log were run on commit bbbbbbbbbbbb: a rule was mended." in lines
    assert "Seeds 24,000 to 29,999 of every-fault-log were run on commit dddddddddddd: a fault was mended." in lines
    said = "Seeds 24,000 to 29,999 of every-fault-log were run again on commit cccccccccccc: 5,998 valid, 0 invalid, "
    [at] = [at for at, line in enumerate(lines) if line.startswith(said + "0 stuck, 2 unknown")]
    assert lines[at + 1 : at + 3] == ["", "- 2 unknown: nobody led"]


def test_invalid_runs_are_kept_first_if_there_are_many_failures() -> None:
    unknown = [{"seed": seed, "valid": "unknown", "reason": "no fault"} for seed in range(MAX_KEPT_FAILURES + 5)]
    invalid = {"seed": 1000, "valid": False, "reason": "lost"}
    assert kept([*unknown, invalid]) == [invalid, *unknown[: MAX_KEPT_FAILURES - 1]]
