"""The two acts of `make demo`: the broker in a safe setting, found valid, and in an unsafe one, found out.

Exit status: 0 when both verdicts are the ones announced, otherwise that of the act that was not.
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
    """A run and the verdict that it must come to."""

    announcement: str
    arguments: Sequence[str]
    status: int
    otherwise: str
    """What to say when the verdict is another and the run went well otherwise."""


ACTS = (
    Act(
        "First act, 30 seconds: five replicas of a broker replicated by Raft. Clients read and write while the network "
        "between the replicas is cut in every shape in turn. Reads ask a majority, so the history must be linearizable:"
        " the verdict is to be VALID.",
        ("run", "--nemesis", "partition", "--nemesis-interval", "2.5", "--time-limit", "30"),
        VALID,
        "The first act was to be VALID and is not. The report shows what happened; if it is INVALID, the broker has a "
        "bug that its tests do not know.",
    ),
    Act(
        "Second act, 15 seconds: the same, but a replica now answers reads from what it has (read_mode=unsafe) and "
        "asks nobody. The leader is cut off again and again; whoever reads from one that is behind gets old values. "
        "The verdict is to be INVALID.",
        ("run", "--nemesis", "partition=leader", "--nemesis-interval", "2", "--time-limit", "15", "--set",
         "read_mode=unsafe"),
        INVALID,
        "The second act was to be INVALID and is not: no client happened to read an old value in these 15 seconds. "
        "Unsafe reads are no safer for it; `make demo` again will show one.",
    ),
)  # fmt: skip

NEXT = (
    ("run --nemesis all --workload log", "kills, pauses, clocks, disks, power and links as well; a minute"),
    ("explore --budget 1m", "the same code on virtual time, one seed after the other"),
    ("doctor", "what every fault can do on this machine, and what it lacks"),
)
"""What to try then: arguments of the harness, and what they do."""


def main(run: Callable[[Sequence[str]], int], store: Path = Path("store")) -> int:
    """Perform both acts by `run`, which takes arguments of the harness and returns its exit status; the runs are found
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
    _say("Both verdicts are the right ones. The reports, to be opened in a browser:")
    for report, word in zip(reports, ("valid", "invalid, with a picture of the read that was wrong"), strict=True):
        print(f"  {report.as_uri()}   {word}")
    _say("What to try next (after `. .venv/bin/activate` it is called harness):")
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
