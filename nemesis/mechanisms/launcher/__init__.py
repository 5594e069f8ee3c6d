"""Runs on a host: starts a program under faults that need no library in it. See __main__.py."""
