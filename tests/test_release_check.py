"""What the check on bare Debian takes over from this machine: its mirror, and pip's network settings."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECK: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "release_check.py"))


@pytest.mark.parametrize(
    ("name", "text", "mirror"),
    [
        ("sources.list", "# deb http://not.this/debian bookworm main\ndeb http://a.test/debian bookworm main\n",
         "http://a.test/debian"),
        ("sources.list", "deb [signed-by=/k arch=amd64] https://b.test/pub/debian/ trixie main\n",
         "https://b.test/pub/debian"),
        ("sources.list.d/debian.sources", "Types: deb\nURIs: http://c.test/debian\nSuites: trixie\n",
         "http://c.test/debian"),
        ("sources.list.d/other.list", "deb https://d.test/node_20.x nodistro main\n", None),
        ("sources.list.d/security.sources", "URIs: http://e.test/debian-security\n", None),
    ],
)  # fmt: skip
def test_the_mirror_is_read_from_the_configuration_of_apt(
    tmp_path: Path, name: str, text: str, mirror: str | None
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert CHECK["configured_mirror"](tmp_path) == mirror


def test_settings_of_pip_and_proxies_are_passed_on_with_the_files_that_they_name(tmp_path: Path) -> None:
    bundle = tmp_path / "authorities.crt"
    bundle.touch()
    environment = {
        "PIP_CERT": str(bundle), "PIP_INDEX_URL": "https://index.test/simple", "https_proxy": "http://proxy.test:3128",
        "NO_PROXY": "localhost", "PIP_FIND_LINKS": str(tmp_path / "not there"), "HOME": "/root", "SECRET_TOKEN": "s",
    }  # fmt: skip
    variables, paths = CHECK["passed_on"](environment)
    assert variables == {name: value for name, value in environment.items() if name not in ("HOME", "SECRET_TOKEN")}
    assert str(bundle) in paths and str(tmp_path / "not there") not in paths
