"""Configuration of a broker or a name server: TOML in, frozen dataclasses out, every problem in one list.

A file that is wrong in five places is reported in five lines at once, and an unknown key is named together
with the known one it resembles. Overrides (`--set key=value`) go through the same checks. Nothing here reads a
file or a clock: the text comes from the caller, so a simulated node is configured the same way.

Defaults are RocketMQ's own (R) where it has the setting, except that a flush is synchronous unless asked
otherwise: this node acknowledges what it has fsynced.
"""

from __future__ import annotations

import difflib
import ipaddress
import posixpath
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "DEFAULT_PERM",
    "PERM_READ",
    "PERM_WRITE",
    "BrokerConfig",
    "ConfigError",
    "LimitsConfig",
    "NameServerConfig",
    "TopicConfig",
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
TIMINGS: Final = ("default", "fast")
SWITCHES: Final = ("auto", "on", "off")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

MAX_MEMBERS: Final = 7
"""Larger groups only add latency; elections and commits are tested up to this size."""
MAX_TOPICS: Final = 10_000
"""Each topic is held in memory and sent whole with every registration."""
MAX_QUEUES: Final = 65_536
"""Queues of one topic; each that holds a message costs a directory, a file and a few hundred bytes of memory."""
MAX_TOPIC_LENGTH: Final = 127
"""A record stores the topic's length in a signed byte (R)."""
MAX_RECORD_OVERHEAD_BYTES: Final = 33_120
"""What a message can cost in the log beside its body: entry header, record, topic and properties, rounded up."""

_TOPIC_NAME = re.compile(r"[%a-zA-Z0-9_-]+")
_SELF_ID = re.compile(r"n[0-9]{1,4}")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,100}")


class ConfigError(Exception):
    """The configuration cannot be used. `problems` holds one line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """One topic: its queues are numbered from 0; `perm` is R4 + W2 (+ 1 inherit)."""

    name: str
    queues: int = 4
    perm: int = DEFAULT_PERM

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Everything that one broker process is told. Addresses are "ip:port" ("[ip6]:port")."""

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
    timing: str
    uvloop: str
    log_level: str
    dledger_listen: str
    dledger_peers: Mapping[str, str]
    """Member id -> address that this node dials for it; contains this node too."""
    client_addresses: Mapping[str, str]
    """Member id -> address at which clients reach it, for the hint "ask that one"; may be empty."""
    topics: tuple[TopicConfig, ...]
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    @property
    def slave_broker_id(self) -> int:
        """The broker id of this node while it is a slave: the number in its id, plus 1 (R)."""
        return int(self.self_id[1:]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NameServerConfig:
    """Everything that one name server process is told."""

    listen: str
    uvloop: str
    log_level: str


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "ip:port" or "[ip6]:port". Raises ValueError, whose text says what is wrong."""
    host, colon, port_text = address.rpartition(":")
    if not colon or not port_text.isascii() or not port_text.isdigit():
        raise ValueError(f"{address!r} is not ip:port")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(f"{address!r} is not ip:port ({host!r} is no IP address)") from error
    if int(port_text) > 65535:
        raise ValueError(f"{address!r} has a port above 65535")
    return host, int(port_text)


def check_topic_name(name: str) -> str:
    """`name` itself when a topic may be called so; raises ValueError (R: TopicValidator)."""
    if not name:
        raise ValueError("a topic name is empty")
    if len(name) > MAX_TOPIC_LENGTH:
        raise ValueError(f"topic name of {len(name)} characters, allowed are {MAX_TOPIC_LENGTH}")
    if not _TOPIC_NAME.fullmatch(name):
        raise ValueError(f"topic name {name!r} may hold letters, digits, %, _ and - only")
    return name


class _Missing:
    """No default: the key is required."""


_REQUIRED: Final = _Missing()


class _Reader:
    """Takes keys out of one table, noting what is wrong; `finish` reports the keys nobody asked for."""

    def __init__(self, table: Mapping[str, Any], problems: list[str], prefix: str = "") -> None:
        self._table = table
        self._problems = problems
        self._prefix = prefix
        self._known: list[str] = []

    def problem(self, key: str, text: str) -> None:
        self._problems.append(f"{self._prefix}{key}: {text}")

    def take(self, key: str, check: Callable[[Any], Any], default: Any = _REQUIRED) -> Any:
        """The checked value of `key`; the default (None for a required key) when it is absent or wrong."""
        self._known.append(key)
        fallback = None if default is _REQUIRED else default
        if key not in self._table:
            if default is _REQUIRED:
                self.problem(key, "is required")
            return fallback
        try:
            return check(self._table[key])
        except ValueError as error:
            self.problem(key, str(error))
            return fallback

    def table(self, key: str) -> _Reader:
        """A reader of a sub-table; an empty one when it is absent or not a table."""
        value = self.take(key, _table, {})
        return _Reader(value, self._problems, f"{self._prefix}{key}.")

    def tables(self, key: str) -> list[_Reader]:
        """Readers of an array of tables."""
        values = self.take(key, _tables, [])
        return [
            _Reader(value, self._problems, f"{self._prefix}{key}[{number}].") for number, value in enumerate(values)
        ]

    def finish(self) -> None:
        for key in self._table:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self._known)}"
                self.problem(key, f"is no known key; {hint}")


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a table")
    return value


def _tables(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("must be an array of tables")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a non-empty string, not {value!r}")
    return value


def _name(value: Any) -> str:
    if not _NAME.fullmatch(_text(value)):
        raise ValueError(f"{value!r} may hold up to 100 letters, digits, '_', '.' and '-'")
    return str(value)


def _self_id(value: Any) -> str:
    if not _SELF_ID.fullmatch(_text(value)):
        raise ValueError(f"{value!r} must be n and a number, such as n1")
    return str(value)


def _address(value: Any) -> str:
    split_address(_text(value))
    return str(value)


def _dialled_address(value: Any) -> str:
    host, port = split_address(_text(value))
    if port == 0 or ipaddress.ip_address(host).is_unspecified:
        raise ValueError(f"{value!r} cannot be dialled: it needs a definite address and port")
    return str(value)


def _addresses(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("must be an array of ip:port")
    return tuple(_dialled_address(item) for item in value)


def _member_addresses(value: Any) -> dict[str, str]:
    members = {_self_id(key): _dialled_address(address) for key, address in _table(value).items()}
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"has {len(members)} members, at most {MAX_MEMBERS} are supported")
    return dict(sorted(members.items(), key=lambda item: int(item[0][1:])))


def _absolute_path(value: Any) -> str:
    path = _text(value)
    if not posixpath.isabs(path):
        raise ValueError(f"{path!r} must be an absolute path")
    return posixpath.normpath(path)


def _choice(choices: Sequence[str]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}{hint}")
        return str(value)

    return check


def _integer(lowest: int, highest: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise ValueError(f"must be a whole number from {lowest} to {highest}, not {value!r}")
        return value

    return check


def _topic_name(value: Any) -> str:
    return check_topic_name(_text(value))


def _topics(reader: _Reader) -> tuple[TopicConfig, ...]:
    topics: dict[str, TopicConfig] = {}
    for entry in reader.tables("topics"):
        name = entry.take("name", _topic_name)
        queues = entry.take("queues", _integer(1, MAX_QUEUES), 4)
        perm = entry.take("perm", _integer(0, 7), DEFAULT_PERM)
        entry.finish()
        if name in topics:
            entry.problem("name", f"topic {name!r} is given twice")
        elif name is not None:
            topics[name] = TopicConfig(name=name, queues=queues, perm=perm)
    if len(topics) > MAX_TOPICS:
        reader.problem("topics", f"{len(topics)} topics, at most {MAX_TOPICS} are supported")
    return tuple(topics.values())


def _limits(reader: _Reader) -> LimitsConfig:
    defaults = LimitsConfig()
    limits = LimitsConfig(
        max_message_size_bytes=reader.take(
            "max_message_size_bytes", _integer(1, 8 << 20), defaults.max_message_size_bytes
        ),
        max_connections=reader.take("max_connections", _integer(1, 100_000), defaults.max_connections),
        max_held_pulls=reader.take("max_held_pulls", _integer(0, 1_000_000), defaults.max_held_pulls),
        segment_size_bytes=reader.take("segment_size_bytes", _integer(1 << 16, 1 << 40), defaults.segment_size_bytes),
        queue_file_units=reader.take("queue_file_units", _integer(1, 1 << 30), defaults.queue_file_units),
    )
    reader.finish()
    return limits


def parse_broker_config(text: str, overrides: Sequence[str] = ()) -> BrokerConfig:
    """The configuration in the TOML `text`, with `overrides` ("dotted.key=value") applied on top.

    Raises ConfigError with one problem per line; relations between keys are checked once every single
    key is well-formed.
    """
    problems: list[str] = []
    reader = _Reader(_load(text, overrides), problems)
    self_id = reader.take("self_id", _self_id)
    broker_name = reader.take("broker_name", _name, "broker-a")
    listen = reader.take("listen", _address)
    ledger = reader.table("dledger")
    ledger_listen = ledger.take("listen", _address)
    own_peers = {self_id: ledger_listen} if self_id and ledger_listen else {}
    limits_reader = reader.table("limits")
    config = BrokerConfig(
        self_id=self_id,
        group=reader.take("group", _name, broker_name),
        broker_name=broker_name,
        cluster_name=reader.take("cluster_name", _name, "splitbrain"),
        listen=listen,
        advertise=reader.take("advertise", _dialled_address, listen),
        data_dir=reader.take("data_dir", _absolute_path),
        name_servers=reader.take("name_servers", _addresses, ()),
        read_mode=reader.take("read_mode", _choice(READ_MODES), "read_index"),
        flush_mode=reader.take("flush_mode", _choice(FLUSH_MODES), "sync"),
        timing=reader.take("timing", _choice(TIMINGS), "default"),
        uvloop=reader.take("uvloop", _choice(SWITCHES), "auto"),
        log_level=reader.take("log_level", _choice(LOG_LEVELS), "info"),
        dledger_listen=ledger_listen,
        dledger_peers=ledger.take("peers", _member_addresses, own_peers),
        client_addresses=ledger.take("clients", _member_addresses, {}),
        topics=_topics(reader),
        limits=_limits(limits_reader),
    )
    ledger.finish()
    reader.finish()
    if not problems:
        problems.extend(_relations(config))
    if problems:
        raise ConfigError(problems)
    return config


def _relations(config: BrokerConfig) -> list[str]:
    """What is wrong between keys that are fine each by itself."""
    problems = []
    if config.self_id not in config.dledger_peers:
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
    if config.limits.segment_size_bytes < config.limits.max_message_size_bytes + MAX_RECORD_OVERHEAD_BYTES:
        problems.append(
            f"limits.segment_size_bytes: a file must hold the largest message, that is max_message_size_bytes"
            f" and {MAX_RECORD_OVERHEAD_BYTES}"
        )
    if config.listen == config.dledger_listen and split_address(config.listen)[1] != 0:
        problems.append("dledger.listen: is the same address as listen")
    advertised_host, _ = split_address(config.advertise)
    if config.name_servers and ipaddress.ip_address(advertised_host).is_unspecified:
        problems.append("advertise: is required when listen is not a definite address")
    return problems


def parse_name_server_config(text: str, overrides: Sequence[str] = ()) -> NameServerConfig:
    """The name server's configuration in the TOML `text`. Raises ConfigError."""
    problems: list[str] = []
    reader = _Reader(_load(text, overrides), problems)
    config = NameServerConfig(
        listen=reader.take("listen", _address),
        uvloop=reader.take("uvloop", _choice(SWITCHES), "auto"),
        log_level=reader.take("log_level", _choice(LOG_LEVELS), "info"),
    )
    reader.finish()
    if problems:
        raise ConfigError(problems)
    return config


def _load(text: str, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"not TOML: {error}"]) from error
    problems = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            problems.append(f"--set {override}: must be key=value")
            continue
        problem = _override(table, key.strip().split("."), _value(value.strip()))
        if problem:
            problems.append(f"--set {override}: {problem}")
    if problems:
        raise ConfigError(problems)
    return table


def _value(text: str) -> Any:
    """`text` as a TOML value; anything that is none is a bare string (`--set read_mode=lease`)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _override(table: dict[str, Any], path: Sequence[str], value: Any) -> str:
    for step in path[:-1]:
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            return f"{step} is not a table"
    table[path[-1]] = value
    return ""
