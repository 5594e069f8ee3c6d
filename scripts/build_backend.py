"""The build backend: setuptools, plus files that a checkout has outside its packages.

The wheel also contains the clock and disk shim, built here from source for x86-64 and aarch64 (scripts/build_shims.py),
the files from which hosts are made (harness/host_files.py) and the pages of docs/ (harness/pages.py). pyproject.toml
names this module as the build backend, and `BuildPackages` as setuptools' `build_py`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from build_shims import BUILT_DIRECTORY, COMPILER_PACKAGE, build_all  # noqa: E402 (beside this file)

from harness.host_files import HOST_FILES, PACKAGED_DIRECTORY  # noqa: E402 (found through build_shims)
from harness.pages import PACKAGED_PAGES  # noqa: E402

__all__ = [
    "BuildPackages",
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """A wheel, unlike an editable installation, needs the compiler of the shim."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), COMPILER_PACKAGE]


class BuildPackages(build_py):
    """setuptools' step that collects the packages' files, extended by ours."""

    def run(self) -> None:
        """Collect all files in `build_lib`; for an editable installation only setuptools' own step runs."""
        if self.editable_mode:
            super().run()
            return
        library = Path(self.build_lib)
        shutil.rmtree(library, ignore_errors=True)  # files that the checkout no longer has must not come back
        super().run()
        build_all(library / BUILT_DIRECTORY)
        for name in HOST_FILES:
            target = library / "harness" / PACKAGED_DIRECTORY / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        for page in (ROOT / "docs").rglob("*.md"):
            target = library / "harness" / PACKAGED_PAGES / page.relative_to(ROOT / "docs")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(page, target)
