"""Consistency from its definitions: a second opinion that shares no code with the checker.

Everything here works on plain events, as a line of a history holds them, and tries all orders.  It is slow, meant for
histories of up to seven operations, and imports nothing of the package beside it, so that a mistake in a model or an
engine cannot be made here as well.
"""
