"""Clients that others wrote, fetched where the machine can fetch them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ALI_ONS_VERSION = "3.12.0"


@pytest.fixture(scope="session")
def ali_ons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The peer's script beside an installed, unmodified ali-ons."""
    directory = tmp_path_factory.mktemp("ali-ons")
    (directory / "package.json").write_text('{"name": "peer", "version": "1.0.0", "private": true}')
    npm = shutil.which("npm")
    assert npm is not None, "the mark lets no test get here without npm"
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", f"ali-ons@{ALI_ONS_VERSION}"]
    installed = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=150, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot fetch ali-ons: {installed.stderr.strip()[-200:]}")
    shutil.copy(Path(__file__).with_name("ali_ons_peer.js"), directory)
    return directory / "ali_ons_peer.js"
