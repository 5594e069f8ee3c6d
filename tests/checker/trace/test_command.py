"""`harness check --trace-model`: traces and models from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checker.cli import main
from checker.testing.trace_oracle import explained_by_force
from checker.trace import Event, Trace, check_traces
from checker.trace.command import load_model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "traces"
LOCK = str(EXAMPLES / "lock.py")
FIRST, SECOND, STALE = (str(EXAMPLES / f"lock-{name}.jsonl") for name in ("n1", "n2", "n2-stale"))
PAGE = EXAMPLES.parents[1] / "docs" / "trace-validation.md"


def test_traces_that_a_model_explains_with_hidden_steps_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--trace-model={LOCK}", FIRST, SECOND]) == 0
    assert capsys.readouterr().out == "valid: 6 events of 2 replicas are explained\n"


def test_a_violation_is_shown_as_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace-model", LOCK, FIRST, STALE]) == 1
    shown = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines())
    assert "n2 gets the token 4 after token 4" in shown and shown in PAGE.read_text(encoding="utf-8")


def test_json_has_the_figures_and_the_events_that_nothing_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--trace-model", f"{LOCK}:Lock", FIRST, STALE]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["valid"] is False and found["exit_status"] == 1 and found["files"] == [FIRST, STALE]
    assert found["stats"]["explained"] == 5 and found["stats"]["then_impossible"][0]["line"] == 3


def test_limits_make_a_verdict_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace-model", LOCK, "--max-states", "1", FIRST, STALE]) == 2
    assert "1 states were not enough" in capsys.readouterr().out


def test_a_common_clock_decides_the_order_if_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for node, time, token in (("n1", 2, 1), ("n2", 1, 2)):
        path = tmp_path / f"{node}.jsonl"
        path.write_text(json.dumps({"node": node, "event": "acquired", "token": token, "time": time}))
        paths.append(str(path))
    assert main(["--trace-model", LOCK, *paths]) == 0
    assert main(["--trace-model", LOCK, "--by-time", *paths]) == 1
    assert "n1 gets the token 1 after token 2" in capsys.readouterr().out


BROKEN_MODEL = """
from checker.trace import TraceModel

class Broken(TraceModel):
    def init(self, nodes):
        return [0]

    def next(self, state, event):
        return [1 // state]
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace-model=", FIRST], "no trace model ''"),
        (["--trace-model", "raft"], "required: TRACE"),
        (["--trace-model", "rafd", FIRST], "no trace model 'rafd' (did you mean raft?)"),
        (["--trace-model", "paxos", FIRST], "no trace model 'paxos'; known: raft, and files that end in .py"),
        (["--trace-model", "nowhere.py", FIRST], "nowhere.py: there is no such file"),
        (["--trace-model", f"{LOCK}:Look", FIRST], "lock.py: has no class Look"),
        (["--trace-model", __file__, FIRST], "has no class that is a TraceModel"),
        (["--trace-model", LOCK, "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["--trace-model", LOCK, FIRST, FIRST], "there is another trace of n1"),
        (["--trace-model", LOCK, "--by-time", FIRST], "n1, line 1: the event has no time"),
        (["--trace-model", LOCK, "--timeout", "0", FIRST], "--timeout must be positive and finite, not 0.0"),
        (["--trace-model", LOCK, "--max-states", "x", FIRST], "--max-states: not a whole number: 'x'"),
        (["--trace-model", "raft", FIRST], "n1, line 1: 'acquired' is no event of model raft"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 254
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err and captured.err.count("\n") == 1


def test_a_file_without_any_event_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace-model", LOCK, LOCK]) == 2
    assert "the traces have no events; lock: line 1 is not a JSON object" in capsys.readouterr().out


def test_a_models_own_mistake_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN_MODEL)
    assert main(["--trace-model", str(path), FIRST]) == 254
    said = "broken.py:9: model model raised ZeroDivisionError: integer division or modulo by zero"
    assert said in capsys.readouterr().err
    path.write_text("import nonsense")
    assert main(["--trace-model", str(path), FIRST]) == 254
    assert "its import raised ModuleNotFoundError" in capsys.readouterr().err
    path.write_text(BROKEN_MODEL.replace("Broken", "One") + BROKEN_MODEL.replace("Broken", "Two"))
    assert main(["--trace-model", str(path), FIRST]) == 254
    assert f"choose one, as in {path}:Two" in capsys.readouterr().err


def test_the_help_of_check_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--trace-model" in capsys.readouterr().out
    assert main(["--trace-model=raft", "--help"]) == 0
    assert "--by-time" in capsys.readouterr().out


lines = st.lists(st.one_of(st.just(("released", 0)), st.tuples(st.just("acquired"), st.integers(1, 6))), max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(lines, min_size=1, max_size=3))
def test_the_model_of_the_documentation_gives_up_only_where_nothing_can_follow(
    words: list[list[tuple[str, int]]],
) -> None:
    model = load_model(LOCK)
    traces = [
        Trace(f"n{of}", [Event(f"n{of}", name, {"token": token}, line=at) for at, (name, token) in enumerate(each)])
        for of, each in enumerate(words)
    ]
    if any(words):
        assert check_traces(model, traces).valid is explained_by_force(model, traces)
