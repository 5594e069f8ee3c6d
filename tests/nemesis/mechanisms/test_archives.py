"""Modules in archives: compiled for this Python, with the source for every other."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from nemesis.mechanisms.archives import add_module

SOURCE = b'''"""A module."""


def fail():
    raise ValueError("as asked")
'''
HEAD_BYTES = 16
"""Of a compiled module: magic number, flags, hash of the source (PEP 552)."""


def archive_of(path: Path, *, magic: bytes = importlib.util.MAGIC_NUMBER, source: bytes = SOURCE) -> Path:
    """An archive of the module `told`, compiled by a Python with that magic number; `source` is stored beside it."""
    made = path.with_suffix(".made")
    with zipfile.ZipFile(made, "w") as archive:
        add_module(archive, "told.py", SOURCE)
    with zipfile.ZipFile(made) as archive, zipfile.ZipFile(path, "w") as other:
        compiled = archive.read("told.pyc")
        assert archive.read("told.py") == SOURCE and len(compiled) > HEAD_BYTES
        other.writestr("told.py", source)
        other.writestr("told.pyc", magic + compiled[len(magic) :])
    return path


def run_with_archive(archive: Path, statement: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(archive)!r}); import told; {statement}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)


def test_this_python_imports_the_compiled_module(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive.zip", source=b"this is no Python")
    assert run_with_archive(archive, "print(told.__doc__)").stdout == "A module.\n"


def test_another_python_imports_the_source(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive.zip", magic=b"\0\0\r\n", source=SOURCE.replace(b"A module", b"The source"))
    assert run_with_archive(archive, "print(told.__doc__)").stdout == "The source.\n"


def test_a_traceback_names_file_and_line(tmp_path: Path) -> None:
    failed = run_with_archive(archive_of(tmp_path / "archive.zip"), "told.fail()")
    assert failed.returncode == 1 and 'File "told.py", line 5, in fail' in failed.stderr


def test_archives_of_the_same_module_are_identical(tmp_path: Path) -> None:
    module = Path(importlib.util.__file__)
    for name in ("one.zip", "other.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            add_module(archive, "util.py", module.read_bytes())
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "other.zip").read_bytes()
