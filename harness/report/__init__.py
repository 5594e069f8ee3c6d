"""What people see of a run: the live console, the summary, the report.

collect.py    one pass over the history: everything the report shows of it, in bounded memory
grid.py       latency over time as cells instead of points; lanes.py: what each client did
deciding.py   the curve of harness explain
witness.py    the operations in conflict and their neighbours
charts.py     the run over time; timeline.py: a contradiction in real time; svg.py: how they are drawn
faults.py     the table of faults; checks.py: the sections of the checkers
page.py       all of it as one self-contained file
console.py    progress while the run goes on, and its summary
"""

from __future__ import annotations

from harness.report.console import LiveProgress, OutputConsole, print_summary

__all__ = ["LiveProgress", "OutputConsole", "print_summary"]
