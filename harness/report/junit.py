"""Verdicts as JUnit XML, which CI systems read; each run is a test case.

    valid                 a case that passed
    invalid               <failure type="invalid">
    unknown               <error type="unknown">: nothing was shown to be wrong or right
    did not run           <error type="did-not-run">: the system did not come up, or the harness failed

The seed, the command that repeats the run, and the report's path are properties of the case.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.atomic_files import replace_file
from harness.errors import OperatorError
from harness.report.checks import verdict_word

if TYPE_CHECKING:
    from xml.etree import ElementTree

__all__ = ["Case", "case_of", "write_junit"]

MAX_TEXT_CHARS = 20_000
"""Longest text of a failed case. CI systems keep every file of every build."""

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `verdict` is valid, invalid, unknown or did-not-run; `reason` is one sentence, `text` the details."""

    name: str
    verdict: str
    reason: str
    text: str = ""
    duration_s: float = 0.0
    properties: Mapping[str, str] = field(default_factory=dict)


def case_of(results: Mapping[str, Any], test: Mapping[str, Any], *, name: str, report_path: str) -> Case:
    """The case of a run that was judged, from its results.json and test.json."""
    checks = results["checks"]
    lines = [f"{each}: {verdict_word(found['valid'])}: {found['reason']}" for each, found in checks.items()]
    lines += [f"doubt: {doubt}" for doubt in results.get("doubts", ())]
    return Case(
        name=name,
        verdict=verdict_word(results["valid"]),
        reason=str(results["reason"]),
        text="\n".join(lines),
        duration_s=float(results.get("duration_s", 0.0)),
        properties={
            "seed": str(results["seed"]),
            "repeat": str(results["replay"]),
            "report": report_path,
            "cluster": str(test["cluster"]),
        },
    )


def require_junit_path(path: str) -> None:
    """Create the directory that the file goes into. Raises OperatorError if the file cannot be created there."""
    if not path or os.path.isdir(path):
        raise OperatorError(f"--junit {path!r}: must name a file")
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    except OSError as error:
        raise OperatorError(f"--junit {path}: {error.strerror}") from None


def write_junit(path: str, cases: Sequence[Case]) -> None:
    """Write the file, whole or not at all. Raises OperatorError."""
    from xml.etree import ElementTree  # imported only by runs that write the file

    failed = sum(case.verdict == "invalid" for case in cases)
    errors = sum(case.verdict not in ("valid", "invalid") for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failed), "errors": str(errors), "skipped": "0"}
    total_s = f"{sum(case.duration_s for case in cases):.3f}"
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "splitbrain", **counts, "time": total_s})
    for case in cases:
        suite.append(_element(case))
    ElementTree.indent(root)
    data = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    require_junit_path(path)
    try:
        replace_file(Path(path), data + b"\n")
    except OSError as error:
        raise OperatorError(f"--junit {path}: {error.strerror}") from None


def _element(case: Case) -> ElementTree.Element:
    from xml.etree import ElementTree

    attributes = {"classname": "splitbrain", "name": _clean(case.name), "time": f"{case.duration_s:.3f}"}
    element = ElementTree.Element("testcase", attributes)
    properties = ElementTree.SubElement(element, "properties")
    for name, value in {"verdict": case.verdict, **case.properties}.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    if case.verdict != "valid":
        kind = "failure" if case.verdict == "invalid" else "error"
        problem = ElementTree.SubElement(element, kind, {"type": case.verdict, "message": _clean(case.reason)})
        listed = "\n".join(f"{name} {value}" for name, value in case.properties.items())
        problem.text = _clean(f"{listed}\n{case.text}"[:MAX_TEXT_CHARS])
    return element


def _clean(text: str) -> str:
    """Replace the characters that XML does not allow."""
    return _NOT_IN_XML.sub("\ufffd", text)
