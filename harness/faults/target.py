"""The nemesis's view of a run, and of a run that is only planned.

A cluster reports what it cannot do by its class method `missing(interface, ability)`. The interfaces that it has in a
run are attributes of the cluster itself (harness.clusters.abilities).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from harness.clusters.abilities import (
    BendsClocks,
    DamagesDisks,
    LimitsResources,
    SeesSendQueues,
    SeesStrays,
    ServesNames,
    ShapesLinks,
    TakesOptions,
)
from harness.clusters.base import CLIENTS_HOST, Cluster
from harness.clusters.options import MECHANISM_OPTION
from harness.errors import HarnessError
from harness.faults.processes import ReplicaProcesses
from harness.faults.slow_clients import SlowClients
from harness.faults.triggers import HasTriggers
from harness.runtime import harness_runtime
from harness.systems.base import (
    AnswersAtLength,
    JudgesOperations,
    NamesPrograms,
    Operated,
    RefusesFaults,
    StoresFiles,
    System,
    TellsTime,
    UsesCapabilities,
)
from nemesis.forms import expand_variant, split_variant
from nemesis.mechanisms.launcher.programs import judge
from nemesis.mechanisms.reach import AUTO, PRELOAD, kind_in_words, mechanism_for
from nemesis.protocol import AsksForLeader, Nemesis
from nemesis.target import (
    ABILITIES,
    Clients,
    ClockReading,
    Clocks,
    Disks,
    Links,
    Names,
    Network,
    Operator,
    Processes,
    Resources,
    Triggers,
)

__all__ = ["PlannedTarget", "RunTarget", "cluster_lacks", "prepare", "system_lacks"]

OPERATOR = "operator"
"""The interface that the system provides, not the cluster."""

CLIENTS = "clients"
"""The interface that needs a request from the system and the send queues from the cluster."""

logger = logging.getLogger(__name__)

BASELINE_TIMEOUT_S = 2.0
"""Timeout of the one reading of each clock before the load begins."""


def cluster_lacks(cluster: Any, interface: str, ability: str) -> str | None:
    """Why a cluster, or a cluster class, lacks an ability; None when it has it."""
    if ability not in ABILITIES[interface]:
        raise ValueError(f"{interface} have no ability {ability!r}")
    missing: str | None = cluster.missing(interface, ability)
    return missing


def system_lacks(system_class: Any, settings: Mapping[str, str], ability: str) -> str | None:
    """Why a system with these settings lacks an operation of its operator; None when it has it."""
    if not isinstance(system_class, JudgesOperations):
        return f"the system has no operation {ability}"
    return system_class.operation_missing(ability, settings)


def clients_lack(cluster: Any, system: Any, ability: str) -> str | None:
    """Why a system on a cluster (objects or classes) cannot have such clients; None when it can."""
    if not isinstance(system, AnswersAtLength) or not system.has_long_request:
        return "the system declares no request with a long response (in a plug-in: long_request)"
    return cluster_lacks(cluster, CLIENTS, ability)


def stored_files(system_class: Any, settings: Mapping[str, str], role: str) -> str | None:
    """Where a system with these settings keeps its files with a role; None if it declares none."""
    return system_class.stored_files(settings).get(role) if isinstance(system_class, StoresFiles) else None


def monotonic_clocks_lack(system_class: Any, settings: Mapping[str, str], mechanism: str) -> str | None:
    """Why the monotonic clocks of a system's programs cannot be skewed, as far as is known before they run; None when
    they can. `mechanism` is the one that was asked for (nemesis.mechanisms.reach)."""
    if mechanism == PRELOAD or not isinstance(system_class, NamesPrograms):
        return None
    try:
        kinds = [judge(argv).get("kind") for argv in system_class.program_commands(settings).values()]
    except HarnessError:
        return None
    if all(kind is None or (mechanism == AUTO and mechanism_for(kind) == PRELOAD) for kind in kinds):
        return None
    unsure = [kind_in_words(kind) for kind in kinds if kind is not None and mechanism_for(kind) != PRELOAD]
    mend = f"--mechanism preload may not reach them: one is {unsure[0]}" if unsure else "use --mechanism preload"
    return f"its programs' clocks are changed in the vDSO, which covers only the wall clock: {mend}"


def prepare(part: Any, capabilities: Collection[tuple[str, str]]) -> None:
    """Tell a cluster or system that was not started yet which capabilities the run will use."""
    if isinstance(part, UsesCapabilities):
        part.prepare(frozenset(capabilities))


class PlannedTarget:
    """A run's target before there are any hosts: enough to ask a nemesis what it can do there."""

    def __init__(
        self,
        cluster_class: Any,
        hosts: Sequence[str],
        *,
        system_class: Any,
        settings: Mapping[str, str],
        mechanism: str = AUTO,
    ) -> None:
        self._cluster_class = cluster_class
        self._system_class = system_class
        self._settings = settings
        self._mechanism = mechanism
        self.hosts = tuple(hosts)
        self.network: Any = object()
        self.processes: Processes | None = None
        self.clocks: Clocks | None = None
        self.disks: Disks | None = None
        self.links: Links | None = None
        self.resources: Resources | None = None
        self.triggers: Triggers | None = None
        self.operator: Operator | None = None
        self.clients: Clients | None = None
        self.names: Names | None = None

    def missing(self, interface: str, ability: str) -> str | None:
        """Why an ability is missing, as the class of the cluster or of the system reports it."""
        if interface == OPERATOR:
            return system_lacks(self._system_class, self._settings, ability)
        if interface == CLIENTS:
            return clients_lack(self._cluster_class, self._system_class, ability)
        problem = cluster_lacks(self._cluster_class, interface, ability)
        options = self._cluster_class.options if isinstance(self._cluster_class, TakesOptions) else ()
        if problem is None and (interface, ability) == ("clocks", "monotonic") and MECHANISM_OPTION in options:
            return monotonic_clocks_lack(self._system_class, self._settings, self._mechanism)
        return problem

    def stored_files(self, role: str) -> str | None:
        """See `stored_files`, for the class of the system."""
        return stored_files(self._system_class, self._settings, role)

    async def leaders(self) -> Sequence[str]:
        """None yet."""
        return ()

    async def answers(self, host: str, *, timeout_s: float) -> bool:
        """Not yet."""
        return False

    @property
    def tells_time(self) -> bool:
        """Not yet."""
        return False

    async def read_clock(self, host: str, *, timeout_s: float) -> ClockReading | None:
        """Not yet."""
        return None

    def problems(self, nemesis: Nemesis, variant: str) -> list[str]:
        """Everything that makes a variant impossible here, on the cluster's side and on the system's."""
        found = nemesis.requires(self, variant)
        system = self._system_class
        if isinstance(system, RefusesFaults):
            form, hit = split_variant(variant)
            for what in ("", f"={form}", f"=@{hit}" if hit else "", f"={variant}" if hit else ""):
                reason = system.cannot.get(f"{nemesis.name}{what}")
                if reason is not None:
                    found.append(f"{nemesis.name}: {reason}")
            if not system.tells_leader and isinstance(nemesis, AsksForLeader) and nemesis.needs_leader(variant):
                found.append(f"{nemesis.name}: the system cannot tell which host leads (in a plug-in: status(host))")
        return found

    def usable(self, nemesis: Nemesis, asked: str | None) -> tuple[list[str], list[str]]:
        """(variants of a choice that are possible here, why the others are not).

        Raises ValueError for a choice without variants.
        """
        wanted = expand_variant(nemesis, asked)
        problems = {variant: self.problems(nemesis, variant) for variant in wanted}
        reasons = dict.fromkeys(problem for found in problems.values() for problem in found)
        return [variant for variant, found in problems.items() if not found], list(reasons)


class RunTarget:
    """The nemesis's view of a run: the cluster's hosts and interfaces, the system's processes and what it reports."""

    def __init__(self, cluster: Cluster, system: System) -> None:
        self._cluster = cluster
        self._system = system
        self.processes = ReplicaProcesses(
            cluster.hosts,
            process=system.process,
            restart=system.restart,
            strays=cluster if isinstance(cluster, SeesStrays) else None,
        )
        self._clock = harness_runtime(cluster).clock
        self._baseline_skew_ms: dict[str, float] = {}
        self.clients: SlowClients | None = None
        if isinstance(cluster, SeesSendQueues) and isinstance(system, AnswersAtLength) and system.has_long_request:
            self.clients = SlowClients(request=system.long_request, address=self._dialled, queues=cluster.send_queues)

    def _dialled(self, host: str, port: int) -> tuple[str, int]:
        """Where clients reach a port of a host."""
        ip, _, number = self._cluster.address_from(CLIENTS_HOST, host, port).rpartition(":")
        return ip, int(number)

    @property
    def hosts(self) -> Sequence[str]:
        return self._cluster.hosts

    @property
    def network(self) -> Network:
        return self._cluster.network

    @property
    def clocks(self) -> Clocks | None:
        return self._cluster.clocks if isinstance(self._cluster, BendsClocks) else None

    @property
    def disks(self) -> Disks | None:
        return self._cluster.disks if isinstance(self._cluster, DamagesDisks) else None

    @property
    def links(self) -> Links | None:
        return self._cluster.links if isinstance(self._cluster, ShapesLinks) else None

    @property
    def resources(self) -> Resources | None:
        return self._cluster.resources if isinstance(self._cluster, LimitsResources) else None

    @property
    def triggers(self) -> Triggers | None:
        """What the cluster itself observes of the replicas, or else what the system reports of them."""
        for part in (self._cluster, self._system):
            if isinstance(part, HasTriggers) and part.triggers is not None:
                return part.triggers
        return None

    @property
    def names(self) -> Names | None:
        return self._cluster.names if isinstance(self._cluster, ServesNames) else None

    @property
    def operator(self) -> Operator | None:
        return self._system.operator if isinstance(self._system, Operated) else None

    @property
    def _given_settings(self) -> Mapping[str, str]:
        return self._system.given_settings if isinstance(self._system, Operated) else {}

    def missing(self, interface: str, ability: str) -> str | None:
        """Why an ability is missing, as the cluster or the system reports it."""
        if interface == OPERATOR:
            return system_lacks(self._system, self._given_settings, ability)
        if interface == CLIENTS:
            return clients_lack(self._cluster, self._system, ability)
        return cluster_lacks(self._cluster, interface, ability)

    def stored_files(self, role: str) -> str | None:
        """See `stored_files`, for the system of the run."""
        return stored_files(self._system, self._given_settings, role)

    async def leaders(self) -> Sequence[str]:
        """The leaders as the system reports them."""
        return await self._system.leaders()

    async def answers(self, host: str, *, timeout_s: float) -> bool:
        """Whether the replica's status request is answered."""
        return await self._system.status(host, timeout_s=timeout_s) is not None

    @property
    def tells_time(self) -> bool:
        """Whether the system's replicas report their clocks."""
        return isinstance(self._system, TellsTime)

    async def read_clock(self, host: str, *, timeout_s: float) -> ClockReading | None:
        """The replica's clocks as it reports them, minus the difference that they had before any fault."""
        if not isinstance(self._system, TellsTime):
            return None
        before_s, before_wall_ms = self._clock.monotonic_ns() / 1e9, self._clock.wall_ms()
        reported = await self._system.tell_time(host, timeout_s=timeout_s)
        after_s = self._clock.monotonic_ns() / 1e9
        if reported is None:
            return None
        half_s = (after_s - before_s) / 2
        return ClockReading(
            offset_ms=reported.wall_ms - (before_wall_ms + half_s * 1000) - self._baseline_skew_ms.get(host, 0.0),
            uncertainty_ms=half_s * 1000 + 2,  # both clocks are read in whole milliseconds
            monotonic_s=reported.monotonic_ns / 1e9,
            at_s=before_s + half_s,
        )

    async def learn_baseline_skew(self) -> None:
        """Read every clock once while nothing is skewed, so that clocks that differ anyway count as right.

        For hosts that share the harness's clock the difference is close to zero.
        """
        self._baseline_skew_ms.clear()
        readings = await asyncio.gather(*(self.read_clock(host, timeout_s=BASELINE_TIMEOUT_S) for host in self.hosts))
        for host, reading in zip(self.hosts, readings, strict=True):
            if reading is not None:
                self._baseline_skew_ms[host] = reading.offset_ms

    async def heal_all(self) -> None:
        """Undo every fault of every kind. Idempotent. Everything is tried before the first error is raised.

        Disks come first: a replica on a frozen one can be neither ended nor started. Replicas that were removed from
        the group come last, because only a healthy group lets them in again.
        """
        held = (self.disks, self.resources, self.clocks, self.links, self.clients, self.names)
        steps: list[Callable[[], Awaitable[None]]] = [
            interface.release_all for interface in held if interface is not None
        ]
        steps += [self.network.heal_all, self.processes.release_all]
        if self.operator is not None:
            steps.append(self.operator.release_all)
        failure: Exception | None = None
        for step in steps:
            try:
                await step()
            except Exception as error:
                logger.warning("healing: %s", error)
                failure = failure or error
        if failure is not None:
            raise failure
