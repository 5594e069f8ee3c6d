"""PyPy restarts once with a larger nursery before it runs simulations."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from harness import cli, registry
from harness.nursery import VARIABLE, restart_with_nursery


class Restarted(SystemExit):
    """Raised where exec would have replaced the process."""


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Make Python look like PyPy; returns the list of what the process was replaced by."""
    made: list[tuple[list[str], str]] = []

    def execve(path: str, argv: list[str], environment: dict[str, str]) -> None:
        assert path == argv[0]
        made.append((argv, environment[VARIABLE]))
        raise Restarted

    for kind in registry.KINDS:  # asyncio and others check the interpreter when they are imported
        registry.load_all(kind)
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="pypy", cache_tag=sys.implementation.cache_tag))
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv(VARIABLE, raising=False)
    return made


@pytest.mark.parametrize("words", [["explore", "--seeds", "1"], ["run", "--cluster", "sim"]])
def test_commands_that_simulate_restart_pypy_with_a_larger_nursery(
    restarts: list[Any], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", *words])
    with pytest.raises(Restarted):
        cli.main()
    assert restarts == [([sys.executable, "-m", "harness", *words], "64M")]


def test_other_commands_callers_and_interpreters_do_not_restart(
    restarts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", "list"])
    monkeypatch.setattr(cli, "end_without_threads", lambda status: None)  # it would end these tests
    assert cli.main() == 0
    with pytest.raises(SystemExit):
        cli.main(["explore", "--help"])
    monkeypatch.setenv(VARIABLE, "32M")
    restart_with_nursery(["python"])
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="cpython"))
    restart_with_nursery(["python"])
    assert restarts == []
