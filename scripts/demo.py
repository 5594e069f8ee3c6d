"""The two acts of `make demo`: the broker in a safe setting, which is valid, and in an unsafe one, which is invalid.

Exit status: 0 when both verdicts are the ones announced, otherwise that of the first act that differs.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.pasteable import harness_command

__all__ = ["ACTS", "NEXT", "Act", "main"]

VALID, INVALID, UNKNOWN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Act:
    """A run and its expected verdict."""

    announcement: str
    arguments: Sequence[str]
    status: int
    otherwise: str
    """Printed when the run completes with another verdict."""


ACTS = (
    Act(
        "First act, 30 seconds: five replicas of a broker replicated by Raft. Clients read and write while the network "
        "between the replicas is cut in every shape in turn. Reads ask a majority, so the history must be linearizable:"
        " the expected verdict is VALID.",
        ("run", "--nemesis", "partition", "--nemesis-interval", "2.5", "--time-limit", "30"),
        VALID,
        "The first act was to be VALID but is not. The report shows what happened; if it is INVALID, the broker has a "
        "bug that its tests do not cover.",
    ),
    Act(
        "Second act, 15 seconds: the same, but now each replica answers reads from its own state (read_mode=unsafe), "
        "without asking a majority. The leader is cut off again and again; clients that read from a replica that is "
        "behind get old values. The expected verdict is INVALID.",
        ("run", "--nemesis", "partition=leader", "--nemesis-interval", "2", "--time-limit", "15", "--set",
         "read_mode=unsafe"),
        INVALID,
        "The second act was to be INVALID but is not: no client happened to read an old value in these 15 seconds. "
        "That does not make unsafe reads safe; run `make demo` again to see one.",
    ),
)  # fmt: skip

NEXT = (
    ("run --nemesis all --workload log", "kills, pauses, clocks, disks, power and links as well; a minute"),
    ("explore --budget 1m", "the same code on virtual time, one seed after another"),
    ("doctor", "which faults this machine supports, and what it lacks"),
)
"""What to try next: arguments of the harness, and what they do."""


def main(run: Callable[[Sequence[str]], int], store: Path = Path("store")) -> int:
    """Perform both acts with `run`, which takes arguments of the harness and returns its exit status and keeps its runs
    in `store`. Returns the exit status of the demonstration."""
    reports = []
    for act in ACTS:
        _say(act.announcement)
        _say(f"$ {harness_command()} {' '.join(act.arguments)}", wrap=False)
        status = run(act.arguments)
        reports.append((store / "latest").resolve() / "report.html")
        if status != act.status:
            _say(act.otherwise if status in (VALID, INVALID, UNKNOWN) else "The run could not be made; see above.")
            return status or UNKNOWN
    _say("Both verdicts are as expected. Open the reports in a browser:")
    for report, word in zip(reports, ("valid", "invalid, with a picture of the wrong read"), strict=True):
        print(f"  {report.as_uri()}   {word}")
    _say("What to try next (after `. .venv/bin/activate` the command is harness):")
    for arguments, what in NEXT:
        print(f"  {harness_command()} {arguments}   # {what}", flush=True)
    return 0


def _say(text: str, *, wrap: bool = True) -> None:
    print("\n" + (textwrap.fill(text, 100) if wrap else text), flush=True)


def _run(arguments: Sequence[str]) -> int:
    import subprocess

    return subprocess.run([sys.executable, "-m", "harness", *arguments], check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(_run))
    except KeyboardInterrupt:
        sys.exit(130)
