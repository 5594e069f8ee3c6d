"""Configuration of a run's brokers: the system's settings, and a configuration file for each host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from harness.clusters.base import Cluster, KeepsLogs, SeesReplicas
from harness.errors import OperatorError
from harness.systems.base import Setting, setting_problems
from harness.systems.node_program import OWN_PYTHON
from node.mutants.catalogue import CLIENT_MUTANTS, MUTANTS, NO_MUTANT

__all__ = [
    "BROKER_NAME",
    "BROKER_PORT",
    "DLEDGER",
    "DLEDGER_PORT",
    "HA_PORT",
    "METRICS",
    "METRICS_PAGE",
    "METRICS_PORT",
    "NAME_SERVER_HOST",
    "NAME_SERVER_PORT",
    "SETTINGS",
    "TOPIC",
    "TRACE_NAME",
    "broker_configuration",
    "resolve_settings",
]

BROKER_PORT = 10911  # R
HA_PORT = 10912  # R: haListenPort
DLEDGER_PORT = 40911  # R
NAME_SERVER_PORT = 9876  # R
METRICS_PORT = 5557  # R: metricsPromExporterPort
METRICS_PAGE = "metrics/metrics"
METRICS = {
    METRICS_PAGE: {
        "splitbrain_takes_writes": "Takes writes",
        "splitbrain_term": "Term",
        "rate(splitbrain_committed_index)": "Entries committed per second",
        "splitbrain_flush_behind": "Entries not on disk yet",
        "splitbrain_dispatch_behind": "Entries not dispatched yet",
        "mean(splitbrain_put_seconds)": "Put, mean",
    }
}
"""The metrics that a run draws: page -> series -> title."""
NAME_SERVER_HOST = "ns1"
"""The host of the name server, in addition to the replicas' hosts."""

TOPIC = "splitbrain"
BROKER_NAME = "broker-a"

DLEDGER = "dledger"
"""The `replication` setting under which the group elects its master."""
_ROLES = {"sync": "SYNC_MASTER", "async": "ASYNC_MASTER"}

TRANSACTION_TIMEOUT_S = 2
TRANSACTION_CHECK_INTERVAL_S = 2
"""A one-minute run must exercise transaction checks; RocketMQ waits 6 s and then checks every 60 s."""

SETTINGS = (
    Setting("replication", DLEDGER, "DLedger, or classic HA with a SYNC_MASTER or an ASYNC_MASTER", (DLEDGER, *_ROLES)),
    Setting(
        "read_mode", "read_index", "how a read ensures that it is current", ("read_index", "lease", "log", "unsafe")
    ),
    Setting("flush_mode", "sync", "acknowledge after fsync, or before (flushDiskType)", ("sync", "async")),
    Setting(
        "flush_interval_ms",
        "10",
        "async: minimum milliseconds between syncs (flushIntervalCommitLog, 500 in classic HA; DLedger's own is 10)",
        bounds=(1, 3_600_000),
    ),
    Setting(
        "flush_least_pages",
        "0",
        "async: minimum number of unsynced 4 KiB pages for a sync (flushCommitLogLeastPages, 4 in classic HA)",
        bounds=(0, 1 << 20),
    ),
    Setting(
        "flush_thorough_interval_ms",
        "10000",
        "async: interval after which everything is synced, in milliseconds (flushCommitLogThoroughInterval)",
        bounds=(1, 3_600_000),
    ),
    Setting(
        "slave_reads", "off", "classic HA: slaves answer reads, which may be stale (slaveReadEnable)", ("off", "on")
    ),
    Setting(
        "ha_mismatch",
        "refuse",
        "classic HA: what a slave does if it has data that the master lacks",
        ("refuse", "heal"),
    ),
    Setting(
        "members_may_change",
        "off",
        "DLedger: the group's members may change; always on in runs that change them",
        ("off", "on"),
    ),
    Setting(
        "acknowledged",
        "stored",
        "what counts as acknowledged: whatever a broker has stored, or only SUCCESS (classic HA: also on a slave)",
        ("stored", "success"),
    ),
    Setting(
        "consume",
        "pull",
        "how groups consume: each member its share of the queues, or by POP, where some forget what they received",
        ("pull", "pop"),
    ),
    Setting(
        "python",
        OWN_PYTHON,
        "interpreter of the nodes: the harness's (on remote hosts the host's), or a program there, such as pypy3",
    ),
    Setting("timing", "fast", "election timings: fast (100 ms heartbeats) or RocketMQ's own", ("fast", "default")),
    Setting(
        "trace", "off", "DLedger: nodes write what they do, which is checked against a model of Raft", ("off", "on")
    ),
    Setting("mutant", NO_MUTANT, "known bug to build into the nodes or clients", (NO_MUTANT, *MUTANTS)),
)
_CLASSIC_DEFAULTS = {"flush_interval_ms": "500", "flush_least_pages": "4"}
"""RocketMQ's defaults for its own commit log (classic HA)."""
_CLASSIC_ONLY = ("slave_reads", "ha_mismatch")

TRACE_NAME = "protocol.jsonl"
"""The log of a host that its broker writes its trace to."""


MAX_MEMBERS = 7
"""Maximum brokers of a DLedger group; a broker refuses to start in a larger one."""


def resolve_settings(given: Mapping[str, str], *, brokers: int = 1) -> dict[str, str]:
    """The given settings over the defaults, for this number of brokers. Raises OperatorError naming every problem."""
    problems = setting_problems(SETTINGS, given)
    is_classic = given.get("replication", DLEDGER) != DLEDGER
    if not is_classic:
        problems += [
            f"{name} is of classic HA: give replication=sync or async" for name in _CLASSIC_ONLY if name in given
        ]
    elif given.get("trace", "off") != "off":
        problems.append("trace is of DLedger: leave it out, or replication")
    if problems:
        raise OperatorError("--set: " + "; ".join(problems))
    if not is_classic and brokers > MAX_MEMBERS:
        raise OperatorError(f"--nodes must be 1 to {MAX_MEMBERS} for brokers in a DLedger group, not {brokers}")
    defaults = {setting.name: setting.default for setting in SETTINGS} | (_CLASSIC_DEFAULTS if is_classic else {})
    return {**defaults, **given}


def broker_configuration(cluster: Cluster, host: str, settings: Mapping[str, str], *, keys: int, master: str) -> str:
    """The configuration file of the broker on `host`, as TOML. `master` is the master's host in classic HA."""
    own_address = cluster.bind_address(host)
    lines = [
        f'self_id = "{host}"',
        f'group = "{BROKER_NAME}"',
        f'broker_name = "{BROKER_NAME}"',
        'cluster_name = "splitbrain"',
        f'listen = "{own_address}:{BROKER_PORT}"',
        f'data_dir = "{os.path.join(cluster.data_dir(host), "data")}"',
        f'name_servers = ["{cluster.address_from(host, NAME_SERVER_HOST, NAME_SERVER_PORT)}"]',
        *_node_settings(settings),
    ]
    if not isinstance(cluster, SeesReplicas):  # in simulation the cluster knows more than the replicas could say
        lines.append(f'metrics_listen = "{own_address}:{METRICS_PORT}"')
    if settings["replication"] == DLEDGER:
        lines += _dledger(cluster, host, settings)
    else:
        lines += _classic(cluster, host, settings, master)
    dialled = _dialled(cluster, host)
    if dialled:
        lines += ["[dial]", *(f'"{known}" = "{address}"' for known, address in dialled.items())]
    lines += [
        "[transactions]",
        f"timeout_s = {TRANSACTION_TIMEOUT_S}",
        f"check_interval_s = {TRANSACTION_CHECK_INTERVAL_S}",
        "[[topics]]",
        f'name = "{TOPIC}"',
        f"queues = {keys}",
    ]
    return "\n".join(lines) + "\n"


def _node_settings(settings: Mapping[str, str]) -> list[str]:
    """The settings of every node, as lines of TOML. Mutants of clients are left out."""
    elsewhere = ("python", "replication", "members_may_change", "acknowledged", "consume", "trace", *_CLASSIC_ONLY)
    common = {name: value for name, value in settings.items() if name not in elsewhere}
    if common["mutant"] == NO_MUTANT or common["mutant"] in CLIENT_MUTANTS:
        del common["mutant"]
    numbers = {setting.name for setting in SETTINGS if setting.bounds is not None}
    lines = [f"{name} = {value}" if name in numbers else f'{name} = "{value}"' for name, value in common.items()]
    if settings["slave_reads"] == "on":
        lines.append("slave_read_enable = true")
    return lines


def _dledger(cluster: Cluster, host: str, settings: Mapping[str, str]) -> Sequence[str]:
    own = f"{cluster.bind_address(host)}:{DLEDGER_PORT}"
    trace = []
    if settings["trace"] == "on" and isinstance(cluster, KeepsLogs):
        trace = [f'trace_file = "{cluster.log_path(host, TRACE_NAME)}"']
    return [
        "[dledger]",
        f'listen = "{own}"',
        *trace,
        f"members_may_change = {'true' if settings['members_may_change'] == 'on' else 'false'}",
        "[dledger.peers]",
        *(
            f'{other} = "{own if other == host else cluster.address_from(host, other, DLEDGER_PORT)}"'
            for other in cluster.hosts
        ),
    ]


def _classic(cluster: Cluster, host: str, settings: Mapping[str, str], master: str) -> Sequence[str]:
    slaves = [other for other in cluster.hosts if other != master]
    return [
        "[classic]",
        f'broker_role = "{_ROLES[settings["replication"]] if host == master else "SLAVE"}"',
        f"broker_id = {0 if host == master else slaves.index(host) + 1}",
        f"ha_listen_port = {HA_PORT}",
        f'ha_mismatch = "{settings["ha_mismatch"]}"',
    ]


def _dialled(cluster: Cluster, host: str) -> dict[str, str]:
    """Advertised address -> the address that this host dials instead, if they differ (links through proxies)."""
    pairs = {
        f"{cluster.bind_address(other)}:{port}": cluster.address_from(host, other, port)
        for other in cluster.hosts
        if other != host
        for port in (BROKER_PORT, HA_PORT)
    }
    return {known: address for known, address in pairs.items() if known != address}
