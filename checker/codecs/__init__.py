"""Readers for the history formats of other tools and for our own; see :func:`checker.codecs.detect.read`."""
