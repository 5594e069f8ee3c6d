"""The launcher as one file: what is copied to a host to run programs there under faults without a library.

See nemesis/mechanisms/launcher/__main__.py for what it does.
"""

from __future__ import annotations

import functools
import io
import os
import zipfile
from collections.abc import Collection, Sequence

__all__ = ["launcher_archive", "launcher_command"]

_PACKAGE = "splitbrain_launcher"
_START = f"import sys\nfrom {_PACKAGE}.__main__ import main\nmain(sys.argv[1:])\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@functools.cache
def launcher_archive() -> bytes:
    """A zip file that Python runs. The same sources give the same bytes."""
    directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(os.listdir(directory)):
            if name.endswith(".py"):
                with open(os.path.join(directory, name), "rb") as file:
                    archive.writestr(zipfile.ZipInfo(f"{_PACKAGE}/{name}", _EPOCH), file.read())
        archive.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), _START)
    return content.getvalue()


def launcher_command(
    python: str,
    archive_path: str,
    control_path: str,
    program: Sequence[str],
    *,
    root: str | None = None,
    traps: Collection[str] = (),
    undo_path: str | None = None,
    moves_clock: bool = False,
) -> list[str]:
    """The command that runs `program` under the faults of a control file. `traps` are groups of system calls (see
    launcher/filter.py) on files below `root` that can be held, delayed and refused; `undo_path` is the directory of
    an undo log; `moves_clock`: its wall clock can be moved."""
    command = [python, "-I", "-S", archive_path, "--control", control_path]
    if traps:
        if root is None:
            raise ValueError("traps are about files below a root")
        command += ["--root", root, *(word for group in sorted(traps) for word in ("--trap", group))]
    if undo_path is not None:
        command += ["--undo", undo_path]
    if moves_clock:
        command.append("--clock")
    return [*command, "--", *program]
