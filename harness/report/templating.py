"""Rendering of the harness's pages: all text is escaped, undefined names are errors, each page is one file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from harness.units import clip, count, duration, exact_instant, instant, operation_text, plural

__all__ = ["json_data", "report_template", "script", "style", "template_environment"]


def template_environment(package: str = "harness.report", **filters: Callable[..., Any]) -> jinja2.Environment:
    """The templates in a package's folder `templates`, with the filters of `harness.units` and these ones."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    units = {"clip": clip, "count": count, "duration": duration, "instant": instant, "plural": plural}
    units["exact"] = exact_instant
    environment.filters.update(units, operation=operation_text, **filters)
    return environment


@cache
def report_template(name: str) -> jinja2.Template:
    """A template of this package."""
    return template_environment().get_template(name)


@cache
def _static(name: str) -> str:
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


def style(*names: str) -> Markup:
    """The named style sheets, concatenated."""
    return Markup("".join(map(_static, names)))


def json_data(data: Any) -> Markup:
    """JSON for `<script type="application/json">`, escaped so that no text in it can close the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def script(name: str) -> Mapping[str, str]:
    """Template variables of a script: `script`, and `script_hash` for the page's Content-Security-Policy."""
    text = _static(name)
    digest = hashlib.sha256(text.encode()).digest()
    return {"script": Markup(text), "script_hash": base64.b64encode(digest).decode()}
