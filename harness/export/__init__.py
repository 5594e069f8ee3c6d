"""Runs in the files of other tools: a Jepsen store, and a trace for Perfetto's viewer."""
