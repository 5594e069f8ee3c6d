"""Known bugs and documented weaknesses of real systems, found again by this harness: `harness gallery`.

finding.py     what a finding is, and how a run is held against it
findings.py    the findings, as data
recording.py   what runs came to, as JSON, and which findings it is of
page.py        the page and its pictures, made of that
"""
