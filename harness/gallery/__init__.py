"""Known bugs and documented weaknesses of real systems, found again by this harness: `harness gallery`.

finding.py     what a finding is, and how a run is classified
findings.py    the findings, as data
performing.py  performing the runs of findings
recording.py   the outcomes of runs, as JSON
page.py        the page and its pictures, made from the outcomes
"""
