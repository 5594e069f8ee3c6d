"""The API for plug-ins, which test any system with a single file.

    from harness.sdk import Client, Refused, System, pip

Everything that a plug-in may use is here; `VERSION` changes when plug-ins have to. docs/your-own-system.md shows how to
write one, `harness new system NAME` creates a first version.
"""

from __future__ import annotations

from harness.sdk.client import Client, Refused, Streams, connection
from harness.sdk.host import CommandFailed, Host, Output
from harness.sdk.http import HttpError, JsonHttp, get, post
from harness.sdk.install import BySetting, Recipe, apt, by_setting, go, maven, npm, path, pip
from harness.sdk.system import Status, System

__all__ = [
    "VERSION",
    "BySetting",
    "Client",
    "CommandFailed",
    "Host",
    "HttpError",
    "JsonHttp",
    "Output",
    "Recipe",
    "Refused",
    "Status",
    "Streams",
    "System",
    "apt",
    "by_setting",
    "connection",
    "get",
    "go",
    "maven",
    "npm",
    "path",
    "pip",
    "post",
]

VERSION = 1
"""Version of this API. A plug-in that works with a version works with every release that has it."""
