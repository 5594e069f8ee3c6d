"""Runs a workload against clients in this process: no cluster, no faults, no files.

For trying out a client before there is a system to run it against, and for tests of workloads: the generator, the
workers, the final reads and the checks are those of a run.

    run = run_in_process("register", MyClient, operations=1000)
    assert run.valid
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import OperatorError
from harness.generator import Generator, Limit
from harness.outcome import CheckOutcome
from harness.sdk.client import Client as SdkClient
from harness.seeded import seeded
from harness.unawaited import telling_unawaited
from harness.worker import Client, Workers
from harness.workloads.base import ByCapability, CheckContext, Workload
from harness.workloads.capability import missing_capabilities
from harness.workloads.choice import client_workload

__all__ = ["InProcessRun", "drive", "run_in_process"]


@dataclass(slots=True)
class InProcessRun:
    """The result: the history, the checks by name, and unexpected errors of the client."""

    events: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Mapping[str, CheckOutcome] = field(default_factory=dict)
    unexpected_errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether every check holds and there were no unexpected errors."""
        return not self.unexpected_errors and all(outcome.valid is True for outcome in self.outcomes.values())


class _Memory:
    """Records events in memory, as harness.history_writer does on disk."""

    def __init__(self, events: list[dict[str, Any]], now_ns: Callable[[], int]) -> None:
        self._events = events
        self._now_ns = now_ns

    def append(self, event: dict[str, Any]) -> dict[str, Any]:
        """Add an event; returns it with its index and time."""
        recorded = {"index": len(self._events), "time": self._now_ns(), **event}
        self._events.append(recorded)
        return recorded


def run_in_process(
    workload: Workload | str,
    new_connection: Callable[[], Any],
    *,
    operations: int,
    concurrency: int = 5,
    seed: int = 1,
    operation_timeout_s: float = 3.0,
    check_timeout_s: float = 30.0,
) -> InProcessRun:
    """Run `operations` operations of a workload, its final reads, and its checks.

    `workload` is an object, or the name of one for clients of `harness.sdk`, with default settings. `new_connection()`
    returns a connection of the kind that the workload requires, one for each logical client. Raises OperatorError for
    an unknown name, and for a client class that lacks methods.
    """
    made = client_workload(workload) if isinstance(workload, str) else workload
    if isinstance(made, ByCapability) and isinstance(new_connection, type):
        lacking = missing_capabilities(made, new_connection)
        if lacking is not None:
            raise OperatorError(lacking)

    async def both() -> InProcessRun:
        return await drive(
            made,
            new_connection,
            operations=operations,
            concurrency=concurrency,
            seed=seed,
            operation_timeout_s=operation_timeout_s,
        )

    run = asyncio.run(both())
    run.outcomes = made.check(run.events, CheckContext(timeout_s=check_timeout_s, memory_mb=512))
    return run


async def drive(
    workload: Workload,
    new_connection: Callable[[], Any],
    *,
    operations: int,
    concurrency: int,
    seed: int,
    operation_timeout_s: float,
) -> InProcessRun:
    """Run the operations and the final reads, without the checks, on the running event loop."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    run = InProcessRun()

    def now_ns() -> int:
        return int((loop.time() - began_s) * 1e9)

    def make_client(process: int, thread: int) -> Client:
        return workload.client(new_connection())

    async def phase(generator: Generator, first_process: int) -> Workers:
        workers = Workers(
            generator=generator,
            threads=concurrency,
            make_client=make_client,
            recorder=_Memory(run.events, now_ns),
            now_ns=now_ns,
            random=seeded(f"{seed}/clients/{first_process}"),
            operation_timeout_s=operation_timeout_s,
            first_process=first_process,
        )
        await workers.run()
        return workers

    with telling_unawaited(_files_of(new_connection)):
        load = await phase(Limit(operations, workload.generator()), 0)
        final = await phase(workload.final_generator(), load.next_process)
    run.unexpected_errors = {**load.unexpected_errors, **final.unexpected_errors}
    return run


def _files_of(new_connection: Callable[[], Any]) -> set[str]:
    """The source files of clients: of their classes, or of the function that creates them."""
    classes = new_connection.__mro__ if isinstance(new_connection, type) else (new_connection,)
    found = set[str]()
    for each in classes:
        with contextlib.suppress(TypeError, OSError):  # without a file: a builtin, or typed in (-c, a notebook)
            found.add(inspect.getsourcefile(each) or "")
    return found - {"", inspect.getsourcefile(SdkClient)}
