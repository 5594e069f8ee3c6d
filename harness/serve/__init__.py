"""`harness serve`: serves the store as web pages on this machine. Needs the extra `serve` (Starlette, uvicorn).

guard.py       refuses requests before a page is made: by host, method, size, origin
files.py       opens files of a run; no path and no link leads out of the store
live.py        follows a running run by its history
launch.py      starts a run from a form, if the operator allows it
comparison.py  compares two runs side by side
pages.py       turns values into HTML; app.py: the routes
"""
