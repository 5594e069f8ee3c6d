"""The gallery as a page: a table of all findings, and for each a section with a picture and its commands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.atomic_files import write_output
from harness.errors import OperatorError
from harness.gallery.finding import FOUND, Finding
from harness.gallery.recording import is_of, outcomes_of, statistics_of
from harness.report.picture import witness_picture
from harness.report.witness import witness_from
from harness.units import clip, count, plural

__all__ = ["PICTURES", "pages", "write_pages"]

PICTURES = "gallery"
"""The directory of pictures, beside the page."""

MAX_SENTENCE_CHARS = 700

_HEAD = """# Gallery

<!-- Written by `harness gallery page` from gallery.json; the findings are harness/gallery/findings.py. -->

Known bugs and documented weaknesses of third-party systems, reproduced by this harness. Each comes with a control: a
setting in which the same run, with the same faults from the same seeds, must be valid.

    harness gallery                                        # this list
    harness gallery run nats-power-loss --times 5          # run one finding, with its control
    harness gallery run --all                              # run all
    harness gallery page                                   # the same page for your own runs: store/gallery.md

The outcomes of runs are kept in `gallery.json` in the store, or in `--results FILE`.
"""

_CAPTION = "The operations in conflict"
_PICTURE = re.compile(rf"^!\[{_CAPTION}\]\(({PICTURES}/[\w.-]+\.svg)\)$", re.M)

Records = Mapping[str, Any]


def pages(findings: Mapping[str, Finding], records: Records) -> dict[str, str]:
    """The page and its pictures, by path below the page's directory; "gallery.md" is the page."""
    lines = [_HEAD, "| finding | system | found | control valid | day |", "|---|---|---|---|---|"]
    for finding in findings.values():
        lines.append(_line(finding, records.get(finding.name)))
    drawn: dict[str, str] = {}
    for finding in findings.values():
        record = records.get(finding.name)
        picture = None if record is None else _picture(finding, record)
        if picture is not None:
            drawn[f"{PICTURES}/{finding.name}.svg"] = picture
        lines += ["", *_section(finding, record, has_picture=picture is not None)]
    return {"gallery.md": "\n".join(lines) + "\n", **drawn}


def write_pages(directory: str, found: Mapping[str, str]) -> None:
    """Write the page and its pictures into a directory, and remove pictures that only the previous page had. Raises
    OperatorError."""
    root = Path(directory)
    try:
        (root / PICTURES).mkdir(parents=True, exist_ok=True)
        before = _pictures_of(root / "gallery.md")
        for path, text in found.items():
            write_output(root / path, text)
        for picture in before - set(found):
            (root / picture).unlink(missing_ok=True)
    except OSError as error:
        raise OperatorError(f"cannot write {error.filename}: {os.strerror(error.errno or 0)}") from None


def _pictures_of(page: Path) -> set[str]:
    """The pictures of a previously written page; their directory may hold other files, not ours. Raises OSError."""
    return set(_PICTURE.findall(page.read_text("utf-8", "replace"))) if page.is_file() else set()


def _line(finding: Finding, record: Mapping[str, Any] | None) -> str:
    found, clean, day = "not run yet", "", ""
    if record is not None:
        found, clean, is_expected = statistics_of(record)
        found = found if is_expected else f"{found} (not as expected)"
        day = record["day"] if is_of(record, finding) else f"{record['day']}, changed since"
    return f"| [{finding.name}](#{finding.name}) | {finding.version} | {found} | {clean} | {day} |"


def _section(finding: Finding, record: Mapping[str, Any] | None, *, has_picture: bool) -> Iterator[str]:
    yield from (f"## {finding.name}", "", f"{finding.title} ({finding.version}).", "")
    yield f"- Documented: {finding.promised}"
    yield f"- First reported: [{finding.reported}]({finding.link})"
    yield f"- Control: {finding.control_says}."
    if record is not None:
        yield from _what_was_seen(record)
    yield ""
    if record is not None and record["witness"] is not None:
        yield from (f"> {clip(record['witness']['check']['reason'], MAX_SENTENCE_CHARS)}", "")
    if has_picture:
        yield from (f"![{_CAPTION}]({PICTURES}/{finding.name}.svg)", "")
    yield from (f"    {finding.line('finding')}", f"    {finding.line('control')}")


def _what_was_seen(record: Mapping[str, Any]) -> Iterator[str]:
    found, clean, _ = statistics_of(record)
    lost = _span([run["counts"] for run in record["runs"]["finding"] if run["outcome"] == FOUND])
    yield f"- Seen on cluster {record['cluster']}: found in {found} runs{lost}; the control was valid in {clean}."
    faults = [run for side in record["runs"].values() for run in side if "faults" in run]
    total, proven = sum(run["faults"] for run in faults), sum(run["proven"] for run in faults)
    done = sum(run["ok"] for run in faults)
    yield f"- {count(done)} operations succeeded, under {plural(total, 'fault')}, {proven} of them proven and healed."
    for side, runs in record["runs"].items():
        others = outcomes_of(record, side)
        for run in runs:
            if run["outcome"] not in (FOUND, "valid") and others[run["outcome"]]:
                yield f"- {side.capitalize()}, seed {run['seed']}: {run['outcome']}: {clip(run['reason'], 300)}"


def _span(counts: list[Mapping[str, int]]) -> str:
    """The range over all runs of the number of anomalies of each kind."""
    kinds = sorted({kind for each in counts for kind in each})
    words = []
    for kind in kinds:
        numbers = [each.get(kind, 0) for each in counts]
        low, high = count(min(numbers)), count(max(numbers))
        words.append(f"{low if low == high else f'{low} to {high}'} {kind}")
    return f" ({', '.join(words)})" if words else ""


def _picture(finding: Finding, record: Mapping[str, Any]) -> str | None:
    if record["witness"] is None:
        return None
    witness = witness_from(record["witness"]["check"])
    if witness is None:
        return None
    return f"{witness_picture(witness, record['witness']['faults'], title=finding.title)}\n"
