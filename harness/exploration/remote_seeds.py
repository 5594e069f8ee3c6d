"""A process that runs simulated seeds on a machine of a Spark cluster: one request per line, one response per line.

    {"test": {...}, "seed": 7}    ->    {"rehearsal": {...}} or {"refused": "why"}

It is started as `python -m harness.exploration.remote_seeds PARENT`, with the process id of the caller. The first line
that it writes names its interpreter. It ends with its input, and at once at SIGHUP, which it gets when its parent dies.
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
    """The request for one seed of a test."""
    return {"test": test.to_json(), "seed": seed}


def rehearsal_of(answer: Mapping[str, Any]) -> Rehearsal:
    """The rehearsal in a response. Raises OperatorError if the request was refused."""
    if "refused" in answer:
        raise OperatorError(str(answer["refused"]))
    fields = dict(answer["rehearsal"])
    return Rehearsal(
        **{**fields, "failed_checks": tuple(fields["failed_checks"]), "failures": tuple(fields["failures"])}
    )


class _Seeds:
    """Answers requests; the usable faults of a test are determined once."""

    def __init__(self) -> None:
        self._asked: Any = None
        self._test: Test
        self._choices: Sequence[tuple[str, Sequence[str]]] = ()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The response for one seed."""
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
    raise KeyboardInterrupt  # ends a simulation in order, removing its temporary files


def main(words: Sequence[str]) -> int:
    """Answer until the input ends. Returns the exit status."""
    signal.signal(signal.SIGHUP, _end)
    try:
        end_with_parent(int(words[0]), signal.SIGHUP)
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # anything else that is printed goes to standard error
        seeds = _Seeds()

        def tell(answer: Any) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        tell(f"{platform.python_implementation()} {platform.python_version()}")
        for line in sys.stdin:
            tell(seeds.answer(json.loads(line)))
    except (KeyboardInterrupt, BrokenPipeError):
        return 1  # the caller is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
