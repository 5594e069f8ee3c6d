"""What people see of a run: the live console, the summary, the report.

collect.py    one pass over the history that gathers what the report shows, in bounded memory
grid.py       latency over time as cells instead of points; lanes.py: what each client did
deciding.py   the curves of harness explain
witness.py    the conflicting operations and their neighbours
charts.py     the run over time; timeline.py: a contradiction in real time; svg.py: how they are drawn
faults.py     the table of faults; checks.py: the sections of the checkers
page.py       the report as one self-contained file
console.py    progress during the run, and its summary
"""

from __future__ import annotations

from harness.report.console import LiveProgress, OutputConsole, print_summary

__all__ = ["LiveProgress", "OutputConsole", "print_summary"]
