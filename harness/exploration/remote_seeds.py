"""A process that runs simulated seeds on a machine of a cluster: a question a line, what came of it a line.

    {"test": {...}, "seed": 7}    ->    {"rehearsal": {...}} or {"refused": "why"}

It is `python -m harness.exploration.remote_seeds PARENT`, with the process id of whoever asks. The first line that it
writes says what interpreter it is. It ends with its input, and at once at SIGHUP, which it gets when its parent dies.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from checker.workers import end_with_parent
from harness.errors import OperatorError
from harness.exploration.rehearsal import Rehearsal, rehearse_test, usable_choices
from harness.exploration.search import mix_for
from harness.test import Test, test_from_json

__all__ = ["MODULE", "question_for", "rehearsal_of"]

MODULE = "harness.exploration.remote_seeds"


def question_for(test: Test, seed: int) -> dict[str, Any]:
    """What to ask for one seed of a test."""
    return {"test": test.to_json(), "seed": seed}


def rehearsal_of(answer: Mapping[str, Any]) -> Rehearsal:
    """What came of it. Raises OperatorError where it was refused."""
    if "refused" in answer:
        raise OperatorError(str(answer["refused"]))
    fields = dict(answer["rehearsal"])
    return Rehearsal(
        **{**fields, "failed_checks": tuple(fields["failed_checks"]), "failures": tuple(fields["failures"])}
    )


class _Seeds:
    """Answers questions; what a test may use is found out once."""

    def __init__(self) -> None:
        self._asked: Any = None
        self._test: Test
        self._choices: Sequence[tuple[str, Sequence[str]]] = ()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What came of one seed."""
        try:
            if question["test"] != self._asked:
                self._test = test_from_json(question["test"])
                self._choices = usable_choices(self._test)
                self._asked = question["test"]
            rehearsal = rehearse_test(*mix_for(self._test, question["seed"], self._choices))
        except OperatorError as error:
            return {"refused": str(error)}
        return {"rehearsal": dataclasses.asdict(rehearsal)}


def _end(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt  # which ends a simulation in order: what a run keeps for its time is removed


def main(words: Sequence[str]) -> int:
    """Answer until the input ends. Returns the exit status."""
    signal.signal(signal.SIGHUP, _end)
    try:
        end_with_parent(int(words[0]), signal.SIGHUP)
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # whatever else is printed is no answer
        seeds = _Seeds()

        def tell(answer: Any) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        tell(f"{platform.python_implementation()} {platform.python_version()}")
        for line in sys.stdin:
            tell(seeds.answer(json.loads(line)))
    except (KeyboardInterrupt, BrokenPipeError):
        return 1  # nobody is there any more who would want an answer
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
