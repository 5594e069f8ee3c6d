"""Many runs: how often a configuration misbehaves, how long it is away, what it loses, how slow it is.

analysis.py     the whole of it: a place with runs in, tables out
ingest.py       finding and reading runs, one row each; files.py: opening files in tasks; reading.py: file formats;
                outcomes.py: verdicts
operations.py   one run as columns; digest.py: what it contributes; cutting.py: its keys as histories for the checkers
rates.py availability.py latency.py checking.py comparison.py      the five tables
statistics.py   intervals, quantiles, tests
compaction.py   many small files as few large ones
session.py      Spark itself; java.py: the Java under it
programs.py     another program on the executors, asked line by line
"""
