"""System `broker`: the reference system, a replicated message broker with a name server.

Every replica host runs one broker: a member of a DLedger group or, with `replication=sync` or `async`, the master (the
first host) or one of its slaves. The host `ns1` runs the name server. Configuration files are written to the hosts and
programs are started through the cluster. The harness learns the system's state as any client would, over the network;
the final checks read the replicas' own files and logs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.clusters.abilities import LiveLogs
from harness.clusters.base import CLIENTS_HOST, Cluster, HostProcess, Program
from harness.errors import OperatorError, SystemUnderTestError
from harness.metrics.expression import Metric, Page, declared_metrics, declared_pages
from harness.runtime import harness_runtime
from harness.systems.base import CheckOutcome, LongRequest, Setting, ToldTime
from harness.systems.broker_checks import compare_copies, compare_replicas, one_leader_per_term
from harness.systems.broker_configuration import (
    BROKER_NAME,
    BROKER_PORT,
    DLEDGER,
    DLEDGER_PORT,
    HA_PORT,
    METRICS,
    METRICS_PORT,
    NAME_SERVER_HOST,
    NAME_SERVER_PORT,
    SETTINGS,
    TOPIC,
    TRACE_NAME,
    broker_configuration,
    resolve_settings,
)
from harness.systems.broker_connection import BrokerConnection
from harness.systems.broker_messaging import TIMINGS, BrokerMessaging
from harness.systems.broker_operator import BrokerOperator, operation_missing
from harness.systems.broker_trace import judge_traces
from harness.systems.broker_triggers import LOGGED_KINDS, LogTriggers
from harness.systems.node_program import OWN_PYTHON, local_python, node_program
from harness.systems.program_logs import last_lines
from nemesis.target import DOWN, PAUSED
from node.client import BrokerClient, Client, TransactionState
from node.mutants.client import mutate_client

__all__ = ["BROKER_PORT", "DLEDGER_PORT", "NAME_SERVER_PORT", "TOPIC", "BrokerSystem"]

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 120.0
"""From the start of the programs until a leader accepts writes: seconds on an ordinary machine, over a minute on an
emulated one. A program that exits meanwhile is noticed at once."""

STATUS_TIMEOUT_MS = 500
"""For one status request: an isolated host must not hold up finding the leader."""


RUNTIME_INFO_CODE = 28
"""Request code for a broker's runtime info."""

REFUSING_S = 15.0
"""A slave retries its master at least every five seconds. If it refused to follow for all this time, it will until
somebody decides which log to keep, so waiting longer is pointless."""

STATE_TIMEOUT_S = 10.0
"""For finding out whether a host's program runs, also over a slow SSH connection."""


@dataclass(frozen=True, slots=True)
class _Status:
    """The status that one broker reports."""

    host: str
    table: Mapping[str, str]

    def number(self, name: str) -> int:
        try:
            return int(self.table.get(name, "-1"))
        except ValueError:
            return -1

    @property
    def leads(self) -> bool:
        return self.table.get("role") == "LEADER"

    @property
    def takes_writes(self) -> bool:
        return self.leads and self.table.get("takesWrites") == "true"


def _are_equal(statuses: Collection[_Status]) -> bool:
    """Whether exactly one broker accepts writes and all have committed and dispatched its whole log."""
    writers = [status for status in statuses if status.takes_writes]
    if len(writers) != 1:
        return False
    end = writers[0].number("ledgerEndIndex")
    return all(
        status.number(name) == end
        for status in statuses
        for name in ("ledgerEndIndex", "committedIndex", "dispatchedIndex")
    )


class BrokerSystem:
    """See the module docstring. `keys` is the number of queues; `log_dir` has a log directory for each host."""

    name = "broker"
    description = "A replicated message broker modelled on RocketMQ with DLedger (Raft)."
    offers = frozenset({"queue", "messaging"})
    settings: Sequence[Setting] = SETTINGS
    trigger_kinds = LOGGED_KINDS
    """The triggers that the brokers' logs show, if the cluster can read logs during a run."""
    recovery_timeout_s = 60.0
    """An election takes up to 10 s with RocketMQ's timings and may have to be repeated; a start takes seconds."""
    extra_hosts: Sequence[str] = (NAME_SERVER_HOST,)
    never_meets: Mapping[str, str] = {"name-service": "the brokers are given addresses and look up no name"}
    ports: Sequence[int] = (BROKER_PORT, HA_PORT, DLEDGER_PORT, NAME_SERVER_PORT, METRICS_PORT)
    metric_pages: Sequence[Page] = declared_pages(METRICS)
    metrics: Sequence[Metric] = declared_metrics(METRICS)

    has_long_request = True

    @classmethod
    def program_commands(cls, settings: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
        """The node, run by the harness's own interpreter or the one that the settings name."""
        return {"broker": (local_python(settings.get("python", OWN_PYTHON)), "-m", "node")}

    def __init__(
        self, *, cluster: Cluster, settings: Mapping[str, str], keys: int, log_dir: str, operation_timeout_s: float
    ) -> None:
        self._cluster = cluster
        self.given_settings = dict(settings)
        self._settings = resolve_settings(settings, brokers=len(cluster.hosts))
        self._is_classic = self._settings["replication"] != DLEDGER
        self._master = cluster.hosts[0]
        """The host of the master in classic HA."""
        self._acknowledged: Counter[str] = Counter()
        self._keys = keys
        self._log_dir = Path(log_dir)
        self._operation_timeout_s = operation_timeout_s
        self._programs: dict[str, Program] = {}
        self._processes: dict[str, HostProcess] = {}
        self._control: BrokerClient | None = None
        self._final: dict[str, _Status] = {}
        self._recovered = False
        self._decisions: dict[bytes, TransactionState] = {}
        self.triggers: LogTriggers | None = None
        """Triggers read from the brokers' logs; None if logs are only available at the end of the run."""
        if isinstance(cluster, LiveLogs) and cluster.logs_are_live:
            self.triggers = LogTriggers(
                {host: self._log_path(host) for host in cluster.hosts}, now_s=asyncio.get_running_loop().time
            )
        self.operator = BrokerOperator(
            cluster.hosts,
            group=BROKER_NAME,
            is_classic=self._is_classic,
            status=lambda host, timeout_s: self.status(host, timeout_s=timeout_s),
            known_to=lambda host: f"{cluster.bind_address(host)}:{DLEDGER_PORT}",
            dialled=lambda host: cluster.address_from(CLIENTS_HOST, host, DLEDGER_PORT),
            promote=self.promote,
        )

    @staticmethod
    def operation_missing(ability: str, settings: Mapping[str, str]) -> str | None:
        """Why brokers with these settings lack an operator's ability; None if they have it."""
        return operation_missing(ability, is_classic=settings.get("replication", DLEDGER) != DLEDGER)

    @staticmethod
    def stored_files(settings: Mapping[str, str]) -> Mapping[str, str]:
        """Role -> pattern of a broker's files that may be corrupted at rest, below its data directory. Empty in classic
        HA: a master truncates its log at a damaged record and does not fetch the rest from a slave
        (docs/classic-ha.md), so corruption would only show a known loss."""
        if settings.get("replication", DLEDGER) != DLEDGER:
            return {}
        return {
            "log": "data/dledger/data/*",
            "vote": "data/dledger/member_state",
            "checkpoint": "data/dledger/checkpoint",
        }

    def prepare(self, capabilities: Collection[tuple[str, str]]) -> None:
        """Set what operator actions require, before `start`. Membership changes must be enabled from the beginning.
        With promotions, a former master may have to truncate what the new one lacks (ha_mismatch=heal), so only appends
        that are on a slave too may count as acknowledged (acknowledged=success)."""
        if ("operator", "members") in capabilities:
            self._settings["members_may_change"] = "on"
        if ("operator", "promote") in capabilities:
            for name, value in (("ha_mismatch", "heal"), ("acknowledged", "success")):
                self._settings[name] = self.given_settings.get(name, value)

    async def start(self) -> None:
        """Write configurations, start the name server and the brokers, wait for a leader that accepts writes."""
        cluster, python = self._cluster, self._settings["python"]
        self._processes[NAME_SERVER_HOST] = await cluster.spawn(
            NAME_SERVER_HOST,
            await node_program(
                cluster,
                NAME_SERVER_HOST,
                "nameserver",
                ["nameserver", "--listen", f"{cluster.bind_address(NAME_SERVER_HOST)}:{NAME_SERVER_PORT}"],
                python=python,
            ),
        )
        for host in cluster.hosts:
            path = os.path.join(cluster.data_dir(host), "broker.toml")
            await self._put_configuration(host)
            arguments = ["broker", "--config", path]
            self._programs[host] = await node_program(cluster, host, "broker", arguments, python=python)
            await self.restart(host)
        self._control = self._new_client("harness-control")
        await self._wait_until_ready()

    async def _put_configuration(self, host: str) -> None:
        text = broker_configuration(self._cluster, host, self._settings, keys=self._keys, master=self._master)
        await self._cluster.put_file(host, os.path.join(self._cluster.data_dir(host), "broker.toml"), text.encode())

    async def promote(self, host: str) -> None:
        """Make the slave on `host` the master, as an operator of classic HA does: stop the former master if it runs,
        write the new configuration to every host, restart this broker. The former master stays down; when it is started
        again it is a slave. Raises SystemUnderTestError with DLedger, which elects its leaders."""
        if not self._is_classic:
            raise SystemUnderTestError("DLedger elects its leaders; only classic HA has slaves to promote")
        former, self._master = self._master, host
        for ended in (former, host):
            process = self._processes.get(ended)
            if process is not None and process.exit_status() is None:
                await process.terminate()
        for other in self._cluster.hosts:
            await self._put_configuration(other)
        await self.restart(host)

    async def _wait_until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READY_TIMEOUT_S
        while True:
            self._raise_if_dead()
            statuses = await self.statuses()
            if len(statuses) == len(self._cluster.hosts) and any(status.takes_writes for status in statuses.values()):
                return
            if loop.time() > deadline:
                silent = sorted(set(self._cluster.hosts) - set(statuses))
                what = f"no answer from {', '.join(silent)}" if silent else "no leader was elected"
                raise SystemUnderTestError(f"the brokers were not ready within {READY_TIMEOUT_S:g} s: {what}")
            await asyncio.sleep(0.05)

    def _raise_if_dead(self) -> None:
        for host, process in self._processes.items():
            status = process.exit_status()
            if status is not None:
                raise SystemUnderTestError(f"{host} ended with status {status} while starting{self._last_words(host)}")

    def _last_words(self, host: str) -> str:
        words = self.last_words(host)
        return f": {words[-1]}" if words else ""

    def last_words(self, host: str) -> Sequence[str]:
        """The last lines of a host's log on this machine; empty if there is no log yet."""
        return last_lines(self._log_path(host))

    def _log_path(self, host: str) -> Path:
        name = "nameserver" if host == NAME_SERVER_HOST else "broker"
        return self._log_dir / host / f"{name}.log"

    async def stop(self) -> None:
        """SIGTERM to all in parallel; SIGKILL to those that do not exit."""
        if self._control is not None:
            await self._control.close()
            self._control = None
        processes, self._processes = self._processes, {}
        await asyncio.gather(*(process.terminate() for process in processes.values()), return_exceptions=True)

    def process(self, host: str) -> HostProcess | None:
        """The most recently started broker process of a host."""
        return self._processes.get(host)

    async def restart(self, host: str) -> None:
        """Start the broker of a host again; does nothing while it runs."""
        process = self._processes.get(host)
        if process is None or process.exit_status() is not None:
            self._processes[host] = await self._cluster.spawn(host, self._programs[host])

    async def status(self, host: str, *, timeout_s: float) -> Mapping[str, str] | None:
        """A broker's runtime info; None if it does not answer in time."""
        status = await self._ask(host, timeout_ms=max(1, int(timeout_s * 1000)))
        return None if status is None else status.table

    async def tell_time(self, host: str, *, timeout_s: float) -> ToldTime | None:
        """The clocks in a broker's runtime info."""
        table = await self.status(host, timeout_s=timeout_s)
        try:
            return None if table is None else ToldTime(int(table["wallClockMs"]), int(table["monotonicNs"]))
        except (KeyError, ValueError):
            return None

    def long_request(self, host: str) -> LongRequest:
        """A remoting frame (total length, header length, header) that asks for a broker's runtime info of some 3 KB."""
        header = json.dumps({"code": RUNTIME_INFO_CODE, "language": "PYTHON", "version": 0, "opaque": 1, "flag": 0})
        return LongRequest(BROKER_PORT, struct.pack(">II", 4 + len(header), len(header)) + header.encode())

    def metrics_url(self, host: str, port: str) -> str:
        """Where clients reach a broker's only page of metrics."""
        return f"http://{self._cluster.address_from(CLIENTS_HOST, host, METRICS_PORT)}"

    async def statuses(self) -> dict[str, _Status]:
        """The status of each broker; brokers that do not answer in time are absent."""
        answers = await asyncio.gather(*(self._ask(host, timeout_ms=STATUS_TIMEOUT_MS) for host in self._cluster.hosts))
        return {answer.host: answer for answer in answers if answer is not None}

    async def _ask(self, host: str, *, timeout_ms: int) -> _Status | None:
        if self._control is None:
            return None
        address = self._cluster.address_from(CLIENTS_HOST, host, BROKER_PORT)
        try:
            return _Status(host, await self._control.runtime_info(address, timeout_ms=timeout_ms))
        except Exception as error:
            logger.debug("status of %s: %s", host, error)
            return None

    async def leaders(self) -> Sequence[str]:
        """Hosts whose broker reports that it leads, newest term first."""
        leading = [status for status in (await self.statuses()).values() if status.leads]
        return [status.host for status in sorted(leading, key=lambda status: -status.number("term"))]

    async def recover(self, *, timeout_s: float) -> CheckOutcome:
        """Wait until one leader accepts writes and every replica has committed and dispatched the same index."""
        loop = asyncio.get_running_loop()
        began_s = not_refusing_s = loop.time()
        self._recovered = False
        while True:
            self._final = await self.statuses()
            now_s = loop.time()
            took_s = now_s - began_s
            if self._all_equal(self._final):
                self._recovered = True
                return CheckOutcome(True, f"{len(self._final)} replicas were back and equal after {took_s:.1f} s")
            if not self._is_up_to_an_operator(self._final):
                not_refusing_s = now_s
            if took_s > timeout_s or now_s - not_refusing_s > REFUSING_S:
                return await self._not_recovered(took_s)
            await asyncio.sleep(0.1)

    async def _not_recovered(self, took_s: float) -> CheckOutcome:
        """What is missing: False if the brokers are to blame, "unknown" if a host or an operator may be."""
        missing: dict[str, str] = {}
        open_questions: list[str] = []
        for host, process in self._processes.items():
            try:
                state = await asyncio.wait_for(process.state(), STATE_TIMEOUT_S)
            except Exception as error:
                open_questions.append(f"cannot ask {host} about its program: {type(error).__name__}: {error}")
                continue
            if state == DOWN:
                missing[host] = f"{host} ended with status {process.exit_status()}"
            elif state == PAUSED:
                open_questions.append(f"the program of {host} is stopped")
            elif host in self._cluster.hosts and host not in self._final:
                missing[host] = f"{host} runs and does not answer"
        troubles = {host: status.table.get("haTrouble", "") for host, status in self._final.items()}
        open_questions += [f"{host} waits for an operator: {said}" for host, said in troubles.items() if said]
        problems = [*missing.values(), *open_questions] or [self._inequality()]
        return CheckOutcome(
            "unknown" if open_questions and not missing else False,
            f"not recovered after {took_s:.0f} s: {'; '.join(problems)}",
            {"missing": list(missing)},
        )

    def _inequality(self) -> str:
        """Why brokers that all answer do not count as equal, as text."""
        writers = [status.host for status in self._final.values() if status.takes_writes]
        if len(writers) != 1:
            return f"{', '.join(writers)} accept writes at the same time" if writers else "no replica accepts writes"
        end = self._final[writers[0]].number("ledgerEndIndex")
        behind = [
            f"{status.host} has {status.number('ledgerEndIndex')}, committed {status.number('committedIndex')}, "
            f"dispatched {status.number('dispatchedIndex')}"
            for status in self._final.values()
            if any(status.number(name) != end for name in ("ledgerEndIndex", "committedIndex", "dispatchedIndex"))
        ]
        return f"{writers[0]} ends at {end}, and {'; '.join(behind)}"

    def _all_equal(self, statuses: Mapping[str, _Status]) -> bool:
        return len(statuses) == len(self._cluster.hosts) and _are_equal(statuses.values())

    def _is_up_to_an_operator(self, statuses: Mapping[str, _Status]) -> bool:
        """Whether all answer, some slaves refuse to follow, and all others are equal."""
        following = [status for status in statuses.values() if not status.table.get("haTrouble")]
        return len(following) < len(statuses) == len(self._cluster.hosts) and _are_equal(following)

    def connection(self, kind: str, *, process: int, thread: int) -> BrokerConnection | BrokerMessaging:
        """A connection of an offered kind. A queue connection has a home broker, chosen by thread."""
        if kind not in self.offers:
            raise OperatorError(f"system broker offers no {kind!r} connections")
        addresses = {host: self._cluster.address_from(CLIENTS_HOST, host, BROKER_PORT) for host in self._cluster.hosts}
        if kind == "messaging":
            return self._messaging(process, {address: host for host, address in addresses.items()})
        hosts = list(addresses)
        client = self._new_client(f"process-{process}")
        mutate_client(self._settings["mutant"], client)
        return BrokerConnection(
            client=client,
            topic=TOPIC,
            addresses=addresses,
            home=hosts[thread % len(hosts)],
            acknowledged=self._acknowledged,
            success_only=self._settings["acknowledged"] == "success",
            timeout_s=self._operation_timeout_s,
        )

    def _messaging(self, process: int, host_of: Mapping[str, str]) -> BrokerMessaging:
        client = Client(
            self._name_servers(),
            runtime=harness_runtime(self._cluster),
            translate=self._translator(),
            client_id=f"process-{process}",
            timings=TIMINGS,
            request_timeout_ms=max(1, int(self._operation_timeout_s * 500)),
        )
        mutate_client(self._settings["mutant"], client.requests)
        return BrokerMessaging(
            client=client,
            topic=TOPIC,
            broker_name=BROKER_NAME,
            keys=self._keys,
            host_of=host_of.get,
            decisions=self._decisions,
            timeout_s=self._operation_timeout_s,
            success_only=self._settings["acknowledged"] == "success",
            pops=self._settings["consume"] == "pop",
        )

    def _new_client(self, client_id: str) -> BrokerClient:
        return BrokerClient(
            name_servers=self._name_servers(),
            runtime=harness_runtime(self._cluster),
            translate=self._translator(),
            client_id=client_id,
        )

    def _name_servers(self) -> list[str]:
        return [self._cluster.address_from(CLIENTS_HOST, NAME_SERVER_HOST, NAME_SERVER_PORT)]

    def _translator(self) -> Callable[[str], str]:
        """Maps the address that a broker advertises to the one that clients dial."""
        cluster = self._cluster
        translations = {
            f"{cluster.bind_address(host)}:{BROKER_PORT}": cluster.address_from(CLIENTS_HOST, host, BROKER_PORT)
            for host in cluster.hosts
        }
        return lambda address: translations.get(address, address)

    async def check(self, *, started_wall_ms: int) -> Mapping[str, CheckOutcome]:
        """Byte-for-byte replica agreement and, with DLedger, at most one leader in every term, and the traces if there
        are any."""
        cluster = self._cluster
        words = ("data", "commitlog") if self._is_classic else ("data", "dledger", "data")
        data_dirs = {
            host: Path(cluster.local_path(host, os.path.join(cluster.data_dir(host), *words))) for host in cluster.hosts
        }
        unfetched = [
            host for host in cluster.hosts if not os.path.isdir(cluster.local_path(host, cluster.data_dir(host)))
        ]
        committed = {host: status.number("committedPos") for host, status in self._final.items()}
        how: dict[str, Any] = {"caught_up": self._recovered, "unfetched": unfetched}
        if self._is_classic:
            troubles = {host: status.table.get("haTrouble", "") for host, status in self._final.items()}
            return {"replicas": compare_copies(data_dirs, committed, troubles, **how)}
        logs = {host: self._log_path(host) for host in cluster.hosts}
        checks = {
            "replicas": compare_replicas(data_dirs, committed, **how),
            "leaders": one_leader_per_term(logs, started_wall_ms=started_wall_ms),
        }
        if self._settings["trace"] == "on":
            traces = {host: self._log_dir / host / TRACE_NAME for host in cluster.hosts}
            checks["trace"] = judge_traces(traces, logs)
        return checks

    def facts(self) -> dict[str, Any]:
        """Settings, final status of every broker, and acknowledged appends by status."""
        return {
            "settings": dict(self._settings),
            "final_status": {h: dict(s.table) for h, s in self._final.items()},
            "acknowledged": dict(sorted(self._acknowledged.items())),
        }
