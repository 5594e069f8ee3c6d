"""What the trial of power cuts reports about runs whose losses could not be counted."""

from __future__ import annotations

from benchmarks.power_cuts import summary


def test_a_run_with_uncounted_losses_does_not_count_as_lossless() -> None:
    run = {"cuts": 10, "proven": 9, "hosts": 3, "acked": 100, "lost": 2, "valid": False}
    assert "100 appends acknowledged, 2 of them lost; verdicts False" in summary([run])
    told = summary([run, run | {"lost": None, "valid": "unknown"}])
    assert told.startswith("20 cuts (18 proven and healed, 6 hosts), 100 appends acknowledged, 2 of them lost")
    assert "(1 runs could not count their losses)" in told and told.endswith("verdicts False, unknown")
