"""Chosen series of a page in Prometheus' text format 0.0.4 or in OpenMetrics.

A page has thousands of lines, of which a run wants a few: lines of other series are skipped by their first characters,
so that reading a page does not delay the clients, which share the event loop. Format: the "Exposition formats" page of
Prometheus' documentation, and the OpenMetrics specification 1.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["MAX_SAMPLES", "ExpositionError", "Series", "labels_of", "sums"]

MAX_SAMPLES = 10_000
"""Limit of the samples of a page that belong to chosen series: a name with a label of its own for each client must not
hold up the event loop, which reads about 300,000 a second."""

MAX_LINE = 1 << 16
"""Limit of the characters of such a sample: its labels are read one by one."""

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_LABEL = re.compile(rf'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*|{_QUOTED})[ \t]*=[ \t]*("(?:[^"\\]|\\.)*")[ \t]*(,|$)')
_SAMPLE = re.compile(
    rf'({NAME})[ \t]*(?:\{{((?:[^"}}]|{_QUOTED})*)\}}|(?=[ \t]))[ \t]*'
    r"([^ \t#]+)"  # the value
    r"(?:[ \t]+[-+0-9.eE]+)?"  # a time, in ms or, in OpenMetrics, in s
    r"[ \t]*(?:#.*)?"  # an exemplar of OpenMetrics
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


class ExpositionError(ValueError):
    """A page breaks the format in a line of a chosen series, or has too many samples."""


@dataclass(frozen=True, slots=True)
class Series:
    """A metric's name, and the labels that a sample must have; it may have others besides."""

    name: str
    labels: frozenset[tuple[str, str]] = frozenset()


def labels_of(text: str) -> Mapping[str, str]:
    """The labels between the braces of a sample. Raises ExpositionError."""
    found: dict[str, str] = {}
    text, at = text.strip(" \t"), 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            raise ExpositionError(f'labels {{{text[:80]}}} are not name="value", separated by commas')
        name, value, _ = match.groups()
        found[_unquoted(name) if name.startswith('"') else name] = _unquoted(value)
        at = match.end()
    return found


def _unquoted(text: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text[1:-1])


def sums(page: str, wanted: Sequence[Series]) -> list[float | None]:
    """For each wanted series the sum of the samples that belong to it, None if there is none, or no finite one. What
    follows the page's last line feed is an incomplete line, and skipped. Raises ExpositionError."""
    places: dict[str, list[int]] = {}
    for place, series in enumerate(wanted):
        places.setdefault(series.name, []).append(place)
    heads = tuple(places)
    found: list[float | None] = [None] * len(wanted)
    samples = 0
    for line in page.split("\n")[:-1]:
        if line[:1] in (" ", "\t"):
            line = line.lstrip(" \t")
        if not line.startswith(heads):
            continue
        name, braces, value = _parts(line, places)
        if name not in places:
            continue
        samples += 1
        if samples > MAX_SAMPLES:
            raise ExpositionError(f"more than {MAX_SAMPLES:,} samples of the chosen series")
        if value is None:
            continue
        labels = labels_of(braces).items() if braces else ()
        for place in places[name]:
            if all(label in labels for label in wanted[place].labels):
                found[place] = value + (found[place] or 0.0)
    return [each if each is not None and math.isfinite(each) else None for each in found]


def _parts(line: str, names: Mapping[str, object]) -> tuple[str, str, float | None]:
    """Name, text between the braces and value of a sample; the value is None unless it is finite."""
    head = re.match(NAME, line)
    name = head[0] if head is not None else ""
    if name not in names:
        return name, "", None
    match = _SAMPLE.fullmatch(line.rstrip(" \t\r")) if len(line) <= MAX_LINE else None
    if match is None:
        raise ExpositionError(f"not a sample: {line[:80]!r}")
    try:
        value = float(match[3]) if "_" not in match[3] else None
    except ValueError:
        value = None
    if value is None:
        raise ExpositionError(f"not a number: {match[3][:40]!r} in {line[:80]!r}")
    return name, match[2] or "", value if math.isfinite(value) else None
