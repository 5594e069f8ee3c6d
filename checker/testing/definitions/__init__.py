"""Consistency from its definitions: a second opinion that shares no code with the checker.

Everything here works on plain events, as in the lines of a history, and tries all orders.  It is slow, meant for
histories of up to seven operations, and imports nothing from the rest of the package, so that it cannot share a mistake
with a model or an engine.
"""
