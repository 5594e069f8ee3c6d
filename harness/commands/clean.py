"""`harness clean`: removes what killed runs left behind on this machine and on their other hosts, and nothing else."""

from __future__ import annotations

import argparse

from harness.cleanup import clean
from harness.errors import OperatorError

__all__ = ["clean_command"]


def clean_command(arguments: argparse.Namespace) -> int:
    """Clean up after dead runs and, unless runs are named, after other dead processes of ours.

    Returns 0 if nothing of ours is left, 255 if something could not be removed. Raises OperatorError for
    --forget-unreachable without a named run.
    """
    if arguments.forgets_unreachable and not arguments.run_ids:
        raise OperatorError("--forget-unreachable: give the run with --run RUN_ID")
    report = clean(run_ids=arguments.run_ids, forgets_unreachable=arguments.forgets_unreachable, report=print)
    if not (report.removed or report.left or report.live):
        named = ", ".join(arguments.run_ids or ())
        print(f"nothing of run {named} is on this machine" if named else "nothing to clean")
    return report.exit_status
