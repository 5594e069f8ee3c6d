"""Processes that clients start: marked in their environment, and ended when the clients are no longer needed.

A client program is killed with its process group. What it started in another session, such as a daemon, is not in its
group and is soon reparented, but still has the mark.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

from harness.clusters.host_agent import ancestors
from harness.process_table import ProcessId, find_processes, kill_until_gone, marked_with
from harness.run_state import KIND_PROCESS, RunState

__all__ = ["CLIENT_VARIABLE", "marked_clients"]

logger = logging.getLogger(__name__)

CLIENT_VARIABLE = "SPLITBRAIN_CLIENT"
"""Environment variable, set to the run's id, that marks processes started by clients. Programs on hosts do not have it,
as their agents end them."""

_KILL_TIMEOUT_S = 10.0
"""How long a killed process may take to exit; one that takes longer hangs in the kernel."""


@contextlib.contextmanager
def marked_clients(state: RunState) -> Iterator[Mapping[str, str]]:
    """Yields the environment variables for client programs. When the block is left, in whatever way, every process that
    has them is killed; survivors are claimed, so that `state` is kept for `harness clean`."""
    try:
        yield {**state.environment, CLIENT_VARIABLE: state.run_id}
    finally:
        _end(state)


def _end(state: RunState) -> None:
    spared = ancestors()
    is_marked = marked_with(CLIENT_VARIABLE, state.run_id)

    def find() -> list[ProcessId]:
        return [process for process in find_processes(is_marked) if process.pid not in spared]

    try:
        for process in (found := find()):
            logger.info("ending process %d (%s), which a client has left running", process.pid, process.command)
        if found:
            kill_until_gone(find, timeout_s=_KILL_TIMEOUT_S)
    except PermissionError as error:
        logger.warning("processes that clients have left running: %s", error)
    finally:  # even if the waiting was interrupted
        for process in find():
            state.claim(KIND_PROCESS, str(process.pid), start_ticks=process.start_ticks)
