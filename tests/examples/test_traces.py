"""The example of docs/trace-validation.md: a bug that the clients' history cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.embedding import judged_run

pytestmark = pytest.mark.cluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "traces" / "primary_backup.py"


@pytest.mark.parametrize(("send", "valid"), [("in-order", True), ("together", False)])
def test_writes_that_overtake_each_other_are_seen_in_the_trace_alone(send: str, valid: bool, tmp_path: Path) -> None:
    result = judged_run(
        str(EXAMPLE),
        cluster="local",
        nodes=3,
        nemesis="none",
        time_limit=4.0,
        store=str(tmp_path),
        settings={"send": send},
    )
    checks = result.results["checks"]
    assert checks["linearizable"]["valid"] is True
    assert checks["trace"]["valid"] is valid, checks["trace"]["reason"]
    if not valid:
        assert " applies write " in checks["trace"]["reason"]
