"""Tries faults on a cluster without load: each is injected, proved, healed, and proved healed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.errors import OperatorError
from harness.faults.target import RunTarget, prepare
from harness.judge import faults_of
from harness.run_state import KIND_DIRECTORY, RunState
from nemesis.driver import run_schedule
from nemesis.forms import needs_of
from nemesis.protocol import Nemesis
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule

__all__ = ["Trial", "prove_variants"]

QUEUES = 4
OPERATION_TIMEOUT_S = 3.0
RECOVER_TIMEOUT_S = 20.0
MESSAGES = 10
"""Messages written to each queue before the first trial, so that there is something to damage."""
SETTLE_S = 5.0
"""Pause after that: some seconds later a replica records its progress in a file, which is to be damaged as well."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one variant. `detail` is the detail of its proof, or why it failed."""

    nemesis: str
    variant: str
    is_good: bool
    detail: str
    seconds: float


async def prove_variants(
    *,
    cluster_class: Any,
    cluster_options: Mapping[str, str],
    system_class: Any,
    nemeses: Mapping[str, Nemesis],
    variants: Sequence[tuple[str, str]],
    node_count: int,
    settings: Mapping[str, str],
    tell: Callable[[Trial], None],
    run_id: str | None = None,
) -> list[Trial]:
    """Try (nemesis, variant) pairs one after the other on one cluster; `tell` is called with each result.

    Everything that was created is removed again. Raises OperatorError or SystemUnderTestError when the cluster or the
    system cannot be started.
    """
    state = RunState.create(run_id or f"doctor-{cluster_class.name}-{os.getpid()}")
    try:
        work_dir = state.make_temp_dir("doctor")
        try:
            cluster = cluster_class(
                node_count=node_count,
                run=state,
                work_dir=work_dir,
                ports=system_class.ports,
                extra_hosts=system_class.extra_hosts,
                **cluster_options,
            )
            capabilities = frozenset().union(*(needs_of(nemeses[name], [variant]) for name, variant in variants))
            prepare(cluster, capabilities)
            system = system_class(
                cluster=cluster,
                settings=dict(settings),
                keys=QUEUES,
                log_dir=work_dir,
                operation_timeout_s=OPERATION_TIMEOUT_S,
            )
            prepare(system, capabilities)
            await cluster.start()
            try:
                try:
                    await system.start()
                    return await _try_all(RunTarget(cluster, system), system, nemeses, variants, tell)
                finally:
                    await system.stop()
            finally:
                await cluster.stop()
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)
            if not os.path.lexists(work_dir):  # else it stays in the run's state
                state.release(KIND_DIRECTORY, work_dir)
    finally:
        if not state.close():
            raise OperatorError(f"run {state.run_id} left something behind: run `harness clean`")


async def _try_all(
    target: RunTarget,
    system: Any,
    nemeses: Mapping[str, Nemesis],
    variants: Sequence[tuple[str, str]],
    tell: Callable[[Trial], None],
) -> list[Trial]:
    await _write_some(system)
    await target.learn_baseline_skew()
    loop = asyncio.get_running_loop()
    trials = []
    try:
        for number, (name, variant) in enumerate(variants, 1):
            begin_s = loop.time()
            events: list[dict[str, Any]] = []
            fault = FaultEvent(at_s=0, action=INJECT, fault_id=f"f{number}", nemesis=name, variant=variant)
            heal = FaultEvent(at_s=0, action=HEAL, fault_id=f"f{number}", nemesis=name, variant=variant)
            await run_schedule(
                Schedule((fault, heal)),
                target=target,
                nemeses=nemeses,
                rng=random.Random(f"doctor/{name}={variant}"),
                record=lambda event, events=events: events.append({**event, "time": 0}),  # type: ignore[misc]
            )
            trial = _judge(name, variant, events, loop.time() - begin_s)
            # The next fault may ask for the leader, and should find a healthy cluster.
            recovery = await system.recover(timeout_s=RECOVER_TIMEOUT_S)
            if trial.is_good and recovery.valid is False:
                trial = replace(trial, is_good=False, detail=recovery.reason)
            trials.append(trial)
            tell(trial)
    finally:
        await target.heal_all()
    return trials


async def _write_some(system: Any) -> None:
    """Give the replicas something to store."""
    if "queue" not in system.offers:
        return
    connection = system.connection("queue", process=0, thread=0)
    await connection.open()
    try:
        for number in range(MESSAGES):
            for key in range(QUEUES):
                await connection.append(key, number)
    finally:
        await connection.close()
    await system.recover(timeout_s=RECOVER_TIMEOUT_S)
    await asyncio.sleep(SETTLE_S)


def _judge(name: str, variant: str, events: Sequence[Mapping[str, Any]], seconds: float) -> Trial:
    [fault] = faults_of(events)
    is_good = fault["proven"] and fault["healed"]
    proof = fault["proof"] if not fault["proven"] or is_good else fault["heal_proof"]
    return Trial(name, variant, is_good, str((proof or {}).get("detail") or "there is no proof"), seconds)
