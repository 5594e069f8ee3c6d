"""`harness serve`: the store as pages for a browser on this machine. Needs the extra `serve` (Starlette, uvicorn).

guard.py       what is refused before any page is made: other hosts, methods, sizes, sites
files.py       files of a run, opened so that no path and no link leads out of the store
live.py        a run at work, followed by its history
launch.py      starting a run from a form, where the operator allows it
comparison.py  two runs side by side
pages.py       values into HTML; app.py: the addresses
"""
