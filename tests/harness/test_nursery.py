"""PyPy starts again with a larger nursery, once, if simulations are to run."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from harness import cli, registry
from harness.nursery import VARIABLE, restart_with_nursery


class Restarted(BaseException):
    """What exec would have done."""


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """As on PyPy; what the process was replaced by."""
    made: list[tuple[list[str], str]] = []

    def execve(path: str, argv: list[str], environment: dict[str, str]) -> None:
        assert path == argv[0]
        made.append((argv, environment[VARIABLE]))
        raise Restarted

    for kind in registry.KINDS:  # asyncio, and who knows who else, asks for the interpreter while it is imported
        registry.load_all(kind)
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="pypy", cache_tag=sys.implementation.cache_tag))
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv(VARIABLE, raising=False)
    return made


@pytest.mark.parametrize("words", [["explore", "--seeds", "1"], ["run", "--cluster", "sim"]])
def test_a_program_that_simulates_begins_anew(
    restarts: list[Any], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", *words])
    with pytest.raises(Restarted):
        cli.main()
    assert restarts == [([sys.executable, "-m", "harness", *words], "64M")]


def test_others_do_not(restarts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what does not simulate, nor what another program calls, nor where the size is set."""
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
