"""Configuration of a broker or a name server: TOML in, frozen dataclasses out, every problem in one list.

A file that is wrong in five places is reported in five lines at once, and an unknown key is named together
with the known one it resembles. Overrides (`--set key=value`) go through the same checks. Nothing here reads a
file or a clock: the text comes from the caller, so a simulated node is configured the same way.

Defaults are RocketMQ's own (R) where it has the setting, except that a flush is synchronous unless asked
otherwise: this node acknowledges what it has fsynced.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from node.config_reader import (
    ConfigError,
    ConfigReader,
    check_absolute_path,
    check_address,
    check_addresses,
    check_dialled_address,
    check_member_addresses,
    check_member_id,
    check_member_ids,
    check_name,
    check_table,
    check_text,
    integer_in,
    load_toml,
    one_of,
    split_address,
)
from node.ha.config import HaConfig, read_ha
from node.mutants.catalogue import NO_MUTANT, check_mutant
from node.retention import RetentionConfig, SnapshotConfig, read_retention, read_snapshots
from node.security import AclConfig, TlsConfig, read_acl, read_tls

__all__ = [
    "DEFAULT_PERM",
    "MAX_MESSAGE_SIZE_BYTES",
    "MAX_RECORD_OVERHEAD_BYTES",
    "PERM_READ",
    "PERM_WRITE",
    "BrokerConfig",
    "ClassicConfig",
    "ConfigError",
    "LimitsConfig",
    "NameServerConfig",
    "TopicConfig",
    "TransactionsConfig",
    "check_topic_name",
    "parse_broker_config",
    "parse_name_server_config",
    "split_address",
]

PERM_READ: Final = 4
PERM_WRITE: Final = 2
DEFAULT_PERM: Final = PERM_READ | PERM_WRITE

READ_MODES: Final = ("read_index", "lease", "log", "unsafe")
FLUSH_MODES: Final = ("sync", "async")
FLUSH_DISK_TYPES: Final = {"SYNC_FLUSH": "sync", "ASYNC_FLUSH": "async"}
TIMINGS: Final = ("default", "fast")
SWITCHES: Final = ("auto", "on", "off")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

MAX_TOPICS: Final = 10_000
"""Each topic is held in memory and sent whole with every registration."""
MAX_QUEUES: Final = 65_536
"""Queues of one topic; each that holds a message costs a directory, a file and a few hundred bytes of memory."""
MAX_DIAL_ENTRIES: Final = 1000
"""Other brokers' addresses, a few for each."""
MAX_TOPIC_LENGTH: Final = 127
"""A record stores the topic's length in a signed byte (R)."""
MAX_MESSAGE_SIZE_BYTES: Final = 8 << 20
"""Upper bound of the configurable size of a message's body."""
MAX_RECORD_OVERHEAD_BYTES: Final = 33_120
"""What a message can take up in the log besides its body: entry header, record, topic and properties, rounded up."""

_TOPIC_NAME = re.compile(r"[%a-zA-Z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """One topic: its queues are numbered from 0; `perm` is R4 + W2 (+ 1 inherit)."""

    name: str
    queues: int = 4
    """Queues that producers choose from (R: writeQueueNums)."""
    perm: int = DEFAULT_PERM
    read_queues: int = 0
    """Queues that consumers read; 0: the same ones (R: readQueueNums). More than `queues` while a topic shrinks: the
    last queues are still read, but nothing new is written to them."""
    order: bool = False
    """Given to clients that ask (R)."""
    sys_flag: int = 0
    """Given to clients that ask (R: topicSysFlag)."""
    message_type: str = ""
    """Given to clients that ask (R: attribute message.type of RocketMQ 5; its proxy accepts messages by it)."""

    def __post_init__(self) -> None:
        if self.read_queues == 0:
            object.__setattr__(self, "read_queues", self.queues)

    @property
    def all_queues(self) -> int:
        """Queues that may hold a message."""
        return max(self.queues, self.read_queues)

    @property
    def readable(self) -> bool:
        return bool(self.perm & PERM_READ)

    @property
    def writable(self) -> bool:
        return bool(self.perm & PERM_WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Bounds on what one broker takes on."""

    max_message_size_bytes: int = 4 * 1024 * 1024
    """Largest body of a message (R: 4 MB)."""
    max_connections: int = 2000
    """Client connections; further ones are closed at once. Each costs a few tens of kilobytes."""
    max_held_pulls: int = 10_000
    """Long polls held at once; further ones are answered at once, as if they had not asked to wait."""
    segment_size_bytes: int = 1 << 30
    """Size of one commit log file (R: 1 GB)."""
    queue_file_units: int = 300_000
    """Units of 20 bytes in one consume queue file (R: 300 000)."""
    index_slots: int = 5_000_000
    """Hash slots of 4 bytes in one index file (R: 5 000 000)."""
    index_entries: int = 20_000_000
    """Entries of 20 bytes in one index file (R: 20 000 000)."""
    disk_full_percent: int = 90
    """Disk usage, by anyone, from which on no messages are accepted (R: diskSpaceWarningLevelRatio)."""
    in_memory_percent: int = 40
    """Share of the machine's memory that is assumed to hold the newest part of the log (R:
    accessMessageInMemoryMaxRatio)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionsConfig:
    """How producers are asked about transactions that neither commit nor roll back."""

    reject: bool = False
    """Refuse transactional messages altogether (R: rejectTransactionMessage)."""
    timeout_s: int = 6
    """From a half message to its first check (R: transactionTimeOut)."""
    check_interval_s: int = 60
    """Between two checks (R: transactionCheckInterval)."""
    max_checks: int = 15
    """Checks after which a transaction is given up (R: transactionCheckMax)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicConfig(RetentionConfig):
    """A commit log of this node's own instead of DLedger."""

    transient_pool: bool = False
    """With asynchronous flush: acknowledge messages that are only in memory, and write them a moment later (R)."""
    ha: HaConfig | None = None
    """This broker's part in classic HA; None: it has no slaves and is not one itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """The whole configuration of one broker process. Addresses are "ip:port" ("[ip6]:port")."""

    self_id: str
    group: str
    broker_name: str
    cluster_name: str
    listen: str
    advertise: str
    data_dir: str
    name_servers: tuple[str, ...]
    read_mode: str
    flush_mode: str
    flush_interval_ms: int
    """Asynchronous flush: the shortest time between two syncs of the log (R: flushIntervalCommitLog, 500 ms; a DLedger
    log has its own, flushFileInterval, 10 ms)."""
    flush_least_pages: int
    """Asynchronous flush: unsynced pages of 4 KiB at which a sync is worth it (R: flushCommitLogLeastPages, 4;
    DLedger: 0)."""
    flush_thorough_interval_ms: int
    """Asynchronous flush: interval after which everything is synced (R: flushCommitLogThoroughInterval, 10 s)."""
    timing: str
    uvloop: str
    log_level: str
    dledger_listen: str
    dledger_peers: Mapping[str, str]
    """Member id -> address that this node dials for it; contains this node too."""
    client_addresses: Mapping[str, str]
    """Member id -> address at which clients reach it, for the hint "ask that one"; may be empty."""
    topics: tuple[TopicConfig, ...]
    members_may_change: bool = False
    """Whether members may be added to and removed from the group while it runs."""
    joins: bool = False
    """Whether this node belongs to the group only once its log says so."""
    trace_file: str = ""
    """Where this member writes what it does to its group's state (node.dledger.tracing); empty: nowhere."""
    preferred_leaders: tuple[str, ...] = ()
    """Members to which any other leader hands over the lead when they can take it, most preferred first (R)."""
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    """How long a DLedger log is kept."""
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    """Snapshots of the state built from a DLedger log."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    classic: ClassicConfig | None = None
    """A single master's log instead of DLedger; None means DLedger."""
    dial: Mapping[str, str] = field(default_factory=dict)
    """Where this node dials what others advertise, by advertised address; others are dialled as advertised."""
    transactions: TransactionsConfig = field(default_factory=TransactionsConfig)
    metrics_listen: str = ""
    """Where Prometheus scrapes the metrics; empty: nowhere."""
    auto_create_topics: bool = True
    """Whether a message to an unknown topic creates it, if its client names TBW102 as the template (R)."""
    auto_create_groups: bool = True
    """Whether a consumer group is created by its first heartbeat (R)."""
    fast_port: bool = False
    """Listen for everything but pulls on the port of `listen` minus 2 as well (R: the VIP channel of its clients)."""
    slave_read_enable: bool = False
    """Send consumers that lag far behind to a slave (R: slaveReadEnable)."""
    start_accept_send_timestamp_ms: int = 0
    """Milliseconds of the epoch before which sends are refused (R: startAcceptSendRequestTimeStamp)."""
    broker_permission: int = DEFAULT_PERM
    """R4 + W2: upper bound on what clients may do here. Topics are registered at name servers with no more than this;
    without R pulls are refused, without W sends to an ordered topic (R: brokerPermission)."""
    region_id: str = "DefaultRegion"
    """MSG_REGION in answers to sends (R: regionId)."""
    trace_on: bool = True
    """TRACE_ON in answers to sends (R: traceOn)."""
    acl: AclConfig | None = None
    """Who may do what; None lets everybody do everything."""
    tls: TlsConfig | None = None
    """TLS on the port that clients use; None means plain text."""
    mutant: str = NO_MUTANT
    """A known bug to inject (node.mutants), for tests of the tests."""

    @property
    def ha(self) -> HaConfig | None:
        """This broker's part in classic HA; None if it has none."""
        return self.classic.ha if self.classic is not None else None

    @property
    def slave_broker_id(self) -> int:
        """The broker id of this node while it is a slave: as configured, or the number in its id, plus 1 (R)."""
        if self.ha is not None and self.ha.is_slave:
            return self.ha.broker_id
        return int(self.self_id[1:]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NameServerConfig:
    """The whole configuration of one name server process."""

    listen: str
    uvloop: str
    log_level: str
    broker_expiry_s: int = 120
    """A broker not heard from for this long is removed (R)."""
    scan_interval_s: int = 10
    """Time between two scans for such brokers (R)."""
    kv_config_path: str | None = None
    """File of the key-value configuration; None keeps it in memory."""
    max_connections: int = 2000
    """Connections of brokers and clients; further ones are closed at once."""
    tls: TlsConfig | None = None
    """TLS on its port; None means plain text."""


def check_topic_name(name: str) -> str:
    """`name` itself if it is a valid topic name; raises ValueError (R: TopicValidator)."""
    if not name:
        raise ValueError("a topic name is empty")
    if len(name) > MAX_TOPIC_LENGTH:
        raise ValueError(f"topic name of {len(name)} characters, allowed are {MAX_TOPIC_LENGTH}")
    if not _TOPIC_NAME.fullmatch(name):
        raise ValueError(f"topic name {name!r} may hold letters, digits, %, _ and - only")
    return name


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def _dial(value: Any) -> dict[str, str]:
    pairs = check_table(value)
    if len(pairs) > MAX_DIAL_ENTRIES:
        raise ValueError(f"has {len(pairs)} entries, at most {MAX_DIAL_ENTRIES} are supported")
    return {check_dialled_address(known): check_dialled_address(dialled) for known, dialled in pairs.items()}


def _topic_name(value: Any) -> str:
    return check_topic_name(check_text(value))


def _topics(reader: ConfigReader) -> tuple[TopicConfig, ...]:
    topics: dict[str, TopicConfig] = {}
    for entry in reader.tables("topics"):
        name = entry.take("name", _topic_name)
        queues = entry.take("queues", integer_in(1, MAX_QUEUES), 4)
        read_queues = entry.take("read_queues", integer_in(0, MAX_QUEUES), 0)
        perm = entry.take("perm", integer_in(0, 7), DEFAULT_PERM)
        entry.finish()
        if name in topics:
            entry.problem("name", f"topic {name!r} is given twice")
        elif name is not None:
            topics[name] = TopicConfig(name=name, queues=queues, perm=perm, read_queues=read_queues)
    if len(topics) > MAX_TOPICS:
        reader.problem("topics", f"{len(topics)} topics, at most {MAX_TOPICS} are supported")
    return tuple(topics.values())


def _classic(reader: ConfigReader | None) -> ClassicConfig | None:
    if reader is None:
        return None
    defaults = ClassicConfig()
    classic = ClassicConfig(
        transient_pool=reader.take("transient_pool", _boolean, defaults.transient_pool),
        **read_retention(reader),
        ha=read_ha(reader),
    )
    return classic


def _no_ledger(value: Any) -> str:
    """Rejects the key that every DLedger log has, in a configuration that asks for a classic one."""
    raise ValueError("[dledger] and [classic] are two kinds of log and exclude each other: leave one table out")


def _flush_mode(reader: ConfigReader, classic: ConfigReader | None) -> str:
    """`flush_mode`, or RocketMQ's own name for it in [classic]."""
    mode: str = reader.take("flush_mode", one_of(("", *FLUSH_MODES)), "")
    kind = classic.take("flush_disk_type", one_of(("", *FLUSH_DISK_TYPES)), "") if classic is not None else ""
    meant = FLUSH_DISK_TYPES.get(kind, "")
    if mode and meant and mode != meant:
        reader.problem("flush_mode", f"is {mode!r} and classic.flush_disk_type {kind!r}: leave one out")
    return mode or meant or "sync"


def _transactions(reader: ConfigReader) -> TransactionsConfig:
    defaults = TransactionsConfig()
    transactions = TransactionsConfig(
        reject=reader.take("reject", _boolean, defaults.reject),
        timeout_s=reader.take("timeout_s", integer_in(1, 86_400), defaults.timeout_s),
        check_interval_s=reader.take("check_interval_s", integer_in(1, 86_400), defaults.check_interval_s),
        max_checks=reader.take("max_checks", integer_in(1, 1000), defaults.max_checks),
    )
    reader.finish()
    return transactions


def _limits(reader: ConfigReader) -> LimitsConfig:
    defaults = LimitsConfig()
    limits = LimitsConfig(
        max_message_size_bytes=reader.take(
            "max_message_size_bytes", integer_in(1, MAX_MESSAGE_SIZE_BYTES), defaults.max_message_size_bytes
        ),
        max_connections=reader.take("max_connections", integer_in(1, 100_000), defaults.max_connections),
        max_held_pulls=reader.take("max_held_pulls", integer_in(0, 1_000_000), defaults.max_held_pulls),
        segment_size_bytes=reader.take("segment_size_bytes", integer_in(1 << 16, 1 << 40), defaults.segment_size_bytes),
        queue_file_units=reader.take("queue_file_units", integer_in(1, 1 << 30), defaults.queue_file_units),
        index_slots=reader.take("index_slots", integer_in(16, 1 << 28), defaults.index_slots),
        index_entries=reader.take("index_entries", integer_in(2, 1 << 30), defaults.index_entries),
        disk_full_percent=reader.take("disk_full_percent", integer_in(1, 100), defaults.disk_full_percent),
        in_memory_percent=reader.take("in_memory_percent", integer_in(0, 100), defaults.in_memory_percent),
    )
    reader.finish()
    return limits


def parse_broker_config(text: str, overrides: Sequence[str] = ()) -> BrokerConfig:
    """The configuration in the TOML `text`, with `overrides` ("dotted.key=value") applied on top.

    Raises ConfigError with one problem per line; relations between keys are checked once every single
    key is well-formed.
    """
    problems: list[str] = []
    reader = ConfigReader(load_toml(text, overrides), problems)
    self_id = reader.take("self_id", check_member_id)
    broker_name = reader.take("broker_name", check_name, "broker-a")
    listen = reader.take("listen", check_address)
    classic_reader = reader.optional_table("classic")
    classic = _classic(classic_reader)
    flush_mode = _flush_mode(reader, classic_reader)
    if classic_reader is not None:
        classic_reader.finish()
    ledger = reader.table("dledger")
    ledger_listen = ledger.take("listen", check_address) if classic is None else ledger.take("listen", _no_ledger, "")
    own_peers = {self_id: ledger_listen} if self_id and ledger_listen else {}
    limits_reader = reader.table("limits")
    config = BrokerConfig(
        self_id=self_id,
        group=reader.take("group", check_name, broker_name),
        broker_name=broker_name,
        cluster_name=reader.take("cluster_name", check_name, "splitbrain"),
        listen=listen,
        advertise=reader.take("advertise", check_dialled_address, listen),
        data_dir=reader.take("data_dir", check_absolute_path),
        name_servers=reader.take("name_servers", check_addresses, ()),
        read_mode=reader.take("read_mode", one_of(READ_MODES), "read_index"),
        flush_mode=flush_mode,
        **_flush_policy(reader, is_dledger=classic is None),
        timing=reader.take("timing", one_of(TIMINGS), "default"),
        uvloop=reader.take("uvloop", one_of(SWITCHES), "auto"),
        log_level=reader.take("log_level", one_of(LOG_LEVELS), "info"),
        dledger_listen=ledger_listen,
        dledger_peers=ledger.take("peers", check_member_addresses, own_peers),
        client_addresses=ledger.take("clients", check_member_addresses, {}),
        members_may_change=ledger.take("members_may_change", _boolean, False),
        joins=ledger.take("joins", _boolean, False),
        preferred_leaders=ledger.take("preferred_leaders", check_member_ids, ()),
        trace_file=ledger.take("trace_file", check_absolute_path, ""),
        retention=RetentionConfig(**read_retention(ledger)),
        snapshots=read_snapshots(ledger),
        topics=_topics(reader),
        limits=_limits(limits_reader),
        classic=classic,
        dial=reader.take("dial", _dial, {}),
        transactions=_transactions(reader.table("transactions")),
        metrics_listen=reader.take("metrics_listen", check_address, ""),
        auto_create_topics=reader.take("auto_create_topics", _boolean, True),
        auto_create_groups=reader.take("auto_create_groups", _boolean, True),
        fast_port=reader.take("fast_port", _boolean, False),
        slave_read_enable=reader.take("slave_read_enable", _boolean, False),
        start_accept_send_timestamp_ms=reader.take("start_accept_send_timestamp_ms", integer_in(0, (1 << 63) - 1), 0),
        broker_permission=reader.take("broker_permission", integer_in(0, 7), DEFAULT_PERM),
        region_id=reader.take("region_id", check_name, "DefaultRegion"),
        trace_on=reader.take("trace_on", _boolean, True),
        acl=read_acl(reader.optional_table("acl")),
        tls=read_tls(reader.optional_table("tls"), dials=True),
        mutant=reader.take("mutant", check_mutant, NO_MUTANT),
    )
    ledger.finish()
    reader.finish()
    if not problems:
        problems.extend(_relations(config))
    if problems:
        raise ConfigError(problems)
    return config


def _flush_policy(reader: ConfigReader, *, is_dledger: bool) -> dict[str, int]:
    """When the asynchronous flush syncs; DLedger has its own defaults (R)."""
    return {
        "flush_interval_ms": reader.take("flush_interval_ms", integer_in(1, 3_600_000), 10 if is_dledger else 500),
        "flush_least_pages": reader.take("flush_least_pages", integer_in(0, 1 << 20), 0 if is_dledger else 4),
        "flush_thorough_interval_ms": reader.take("flush_thorough_interval_ms", integer_in(1, 3_600_000), 10_000),
    }


def _relations(config: BrokerConfig) -> list[str]:
    """Conflicts between keys that are each valid on their own."""
    problems = []
    if config.classic is None and config.self_id not in config.dledger_peers:
        problems.append(f"dledger.peers: has no entry for this node, {config.self_id}")
    dialled = list(config.dledger_peers.values())
    problems += [
        f"dledger.peers: {address} is given to more than one member"
        for address in sorted(set(dialled))
        if dialled.count(address) > 1
    ]
    problems += [
        f"dledger.clients: {member} is not in dledger.peers"
        for member in config.client_addresses
        if member not in config.dledger_peers
    ]
    if config.joins and not config.members_may_change:
        problems.append("dledger.joins: is for groups whose members_may_change")
    problems += [
        f"dledger.preferred_leaders: {member} is not in dledger.peers"
        for member in config.preferred_leaders
        if member not in config.dledger_peers
    ]
    if config.limits.segment_size_bytes < config.limits.max_message_size_bytes + MAX_RECORD_OVERHEAD_BYTES:
        problems.append(
            f"limits.segment_size_bytes: a file must hold the largest message, that is max_message_size_bytes"
            f" and {MAX_RECORD_OVERHEAD_BYTES}"
        )
    port = split_address(config.listen)[1]
    if config.fast_port and 0 < port < 3:
        problems.append(f"fast_port: there is no port {port - 2}; let listen have a higher one")
    if config.listen == config.dledger_listen and split_address(config.listen)[1] != 0:
        problems.append("dledger.listen: is the same address as listen")
    if config.ha is not None and config.ha.is_slave and not config.ha.master_address and not config.name_servers:
        problems.append("classic.ha_master_address: is required where no name_servers say where the master is")
    advertised_host, _ = split_address(config.advertise)
    if config.name_servers and ipaddress.ip_address(advertised_host).is_unspecified:
        problems.append("advertise: is required when listen is not a definite address")
    return problems


def parse_name_server_config(text: str, overrides: Sequence[str] = ()) -> NameServerConfig:
    """The name server's configuration in the TOML `text`. Raises ConfigError."""
    problems: list[str] = []
    reader = ConfigReader(load_toml(text, overrides), problems)
    config = NameServerConfig(
        listen=reader.take("listen", check_address),
        uvloop=reader.take("uvloop", one_of(SWITCHES), "auto"),
        log_level=reader.take("log_level", one_of(LOG_LEVELS), "info"),
        broker_expiry_s=reader.take("broker_expiry_s", integer_in(1, 86_400), 120),
        scan_interval_s=reader.take("scan_interval_s", integer_in(1, 86_400), 10),
        kv_config_path=reader.take("kv_config_path", check_absolute_path, None),
        max_connections=reader.take("max_connections", integer_in(1, 100_000), 2000),
        tls=read_tls(reader.optional_table("tls"), dials=False),
    )
    reader.finish()
    if problems:
        raise ConfigError(problems)
    return config
