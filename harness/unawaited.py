"""Detects calls in a plug-in that were not awaited: `self.http.post(path, body)` without `await` sends nothing and
raises nothing, so the system would seem to have acknowledged a request that it never got.

Python warns when such a coroutine is discarded, usually by the statement that created it. So the warning names that
line, and the current task is the one that made the call.
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
"""Task -> the first call that it did not await since the last `take_unawaited`."""


@contextlib.contextmanager
def telling_unawaited(files: Collection[str]) -> Iterator[None]:
    """During the block, record by task the calls that code of these files, or of others in their directories, does not
    await. Coroutines that a method returns to the harness unawaited are recorded too."""
    folders = {os.path.dirname(name) for name in files}
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _MESSAGE, RuntimeWarning)  # every time, not once per line
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
            _found.setdefault(task, f"{matched[1]}() was called but not awaited{where}")

        warnings.showwarning = show
        yield


def take_unawaited() -> str | None:
    """A message about the first call that the current task did not await since this was last called, or None."""
    task = _current_task() if _found else None
    return None if task is None else _found.pop(task, None)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None
