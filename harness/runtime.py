"""Clock, disk and randomness of the harness and its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node.real_runtime import real_runtime
from node.runtime import Runtime

__all__ = ["harness_runtime"]


def harness_runtime(cluster: Any) -> Runtime:
    """This machine's, unless the cluster brings a world of its own (a method `runtime`), as simulation does."""
    bring: Callable[[], Runtime] | None = getattr(cluster, "runtime", None)
    return real_runtime() if bring is None else bring()
