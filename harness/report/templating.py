"""How the pages of the harness are made from templates: everything escaped, nothing undefined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2

__all__ = ["template_environment"]


def template_environment(package: str = "harness.report", **filters: Callable[..., Any]) -> jinja2.Environment:
    """The templates of a package, in its folder `templates`, with these filters."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment
