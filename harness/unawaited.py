"""Tells of calls in a plug-in that were not awaited: `self.http.post(path, body)` without `await` sends nothing, raises
nothing, and would look like a system that has acknowledged what it never got.

Python warns when such a coroutine is thrown away, which is mostly by the statement that made it; so the warning names
that line, and the task that was at it is the one whose call went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import warnings
from collections.abc import Collection, Iterator
from typing import Any, TextIO
from weakref import WeakKeyDictionary

__all__ = ["take_unawaited", "telling_unawaited"]

_MESSAGE = r"coroutine '(.+)' was never awaited"
_HARNESS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")

_found: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
"""Task -> what it did not await first, since it was last asked."""


@contextlib.contextmanager
def telling_unawaited(files: Collection[str]) -> Iterator[None]:
    """While the block lasts, note by task what code of these files, or of others beside them, does not await. What a
    method hands back to the harness without awaiting it is noted as well."""
    folders = {os.path.dirname(name) for name in files}
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _MESSAGE, RuntimeWarning)  # each time, and not once for each line
        shown = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int,
            file: TextIO | None = None, line: str | None = None,
        ) -> None:  # fmt: skip
            of_plugin = os.path.dirname(filename) in folders
            matched = re.match(_MESSAGE, str(message)) if of_plugin or filename.startswith(_HARNESS) else None
            task = _current_task()
            if matched is None or task is None:
                shown(message, category, filename, lineno, file, line)
                return
            where = f" ({os.path.basename(filename)}:{lineno})" if of_plugin else ""
            _found.setdefault(task, f"{matched[1]}() was called and not awaited{where}")

        warnings.showwarning = show
        yield


def take_unawaited() -> str | None:
    """What the current task has not awaited since this was last called, in words; None where there is nothing."""
    task = _current_task() if _found else None
    return None if task is None else _found.pop(task, None)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None
