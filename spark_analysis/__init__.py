"""Many runs: how often a configuration misbehaves, how long it is unavailable, what it loses, how slow it is.

analysis.py     the whole analysis: from a place with runs to tables
ingest.py       finding and reading runs, one row each; files.py: opening files in tasks; reading.py: file formats;
                outcomes.py: verdicts
operations.py   one run as columns; digest.py: what it contributes; cutting.py: its keys as histories for the checkers
rates.py availability.py latency.py checking.py comparison.py      the five tables
statistics.py   intervals, quantiles, tests
compaction.py   many small files as few large ones
session.py      the Spark session; java.py: the Java that it runs on
programs.py     another program on the executors, with one request per line
"""
