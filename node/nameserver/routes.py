"""Which broker serves which topic, and which brokers live: the name server's tables, without the network.

Modelled on RocketMQ's RouteInfoManager (R), with three differences that role switches need:
an address is listed in one place only, whatever it registered as before; a registration as master with a lower
DLedger term than the known master's leaves the table alone; and a new master's topics count at once, even if
their version equals its predecessor's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from node.nameserver.registration import MASTER_ID, QueueData, Registration

__all__ = ["MAX_BROKERS", "MAX_TOPICS", "RegisterResult", "RouteTable", "TableFull"]

MAX_BROKERS: Final = 4096
"""Broker addresses known at once; a cluster has tens."""
MAX_TOPICS: Final = 100_000
"""Topics known at once: about 50 MB."""

_WRITE: Final = 2
_READ_WRITE: Final = 6


class TableFull(Exception):
    """Another broker or topic would exceed what the table may hold."""


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """What a slave learns by registering; empty for a master (R). `accepted` is False for a deposed master."""

    ha_address: str = ""
    master_address: str = ""
    accepted: bool = True


@dataclass(slots=True)
class _Live:
    """A listed address: where it is listed and when it was last heard of."""

    broker_name: str
    broker_id: int
    owner: Hashable
    updated_ns: int
    ha_address: str
    data_version: str
    filter_servers: tuple[str, ...]


@dataclass(slots=True)
class _Broker:
    """A broker name: a master and its slaves."""

    cluster: str
    addresses: dict[int, str] = field(default_factory=dict)
    master_term: int | None = None
    topics_of: tuple[str, str] | None = None  # master address and data version of the topics in the table


class RouteTable:
    """Brokers and topics. `now_ns` is a monotonic clock; an address not heard of for `expiry_s` is removed."""

    def __init__(self, now_ns: Callable[[], int], *, expiry_s: float) -> None:
        self._now_ns = now_ns
        self._expiry_ns = int(expiry_s * 1e9)
        self._brokers: dict[str, _Broker] = {}
        self._live: dict[str, _Live] = {}
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._owned: dict[Hashable, dict[str, None]] = {}

    # Changes

    def register(self, registration: Registration, owner: Hashable) -> RegisterResult:
        """List a broker. `owner` is the connection that it registered over. Raises TableFull (nothing changed)."""
        name, broker_id, address = registration.broker_name, registration.broker_id, registration.address
        self._check_room(registration)
        broker = self._brokers.get(name)
        if broker is not None and broker_id == MASTER_ID:
            known = broker.addresses.get(MASTER_ID)
            term = registration.dledger_term
            if (
                known is not None
                and known != address
                and term is not None
                and broker.master_term is not None
                and term < broker.master_term
            ):
                return RegisterResult(self._live[known].ha_address, known, accepted=False)
        before = self._live.get(address)
        if before is not None and (before.broker_name, before.broker_id) != (name, broker_id):
            self._unlist(address, keep_name=name)
        if broker is None:
            broker = self._brokers[name] = _Broker(registration.cluster)
        broker.cluster = registration.cluster
        displaced = broker.addresses.get(broker_id)
        if displaced is not None and displaced != address:
            self._unlist(displaced, keep_name=name)
        broker.addresses[broker_id] = address
        self._set_owner(address, owner)
        self._live[address] = _Live(
            name,
            broker_id,
            owner,
            self._now_ns(),
            registration.ha_address,
            registration.data_version,
            registration.filter_servers,
        )
        if broker_id == MASTER_ID:
            broker.master_term = registration.dledger_term
            self._take_topics(broker, registration)
            return RegisterResult()
        master = broker.addresses.get(MASTER_ID)
        return RegisterResult(self._live[master].ha_address, master) if master is not None else RegisterResult()

    def unregister(self, broker_name: str, broker_id: int, address: str) -> bool:
        """Remove an address that unregisters; False if it is not listed under this name and id (any more)."""
        live = self._live.get(address)
        if live is None or (live.broker_name, live.broker_id) != (broker_name, broker_id):
            return False
        self._unlist(address)
        return True

    def owner_gone(self, owner: Hashable) -> list[str]:
        """Remove the addresses whose last registration came over a connection that is now closed; returns them."""
        addresses = list(self._owned.get(owner, ()))
        for address in addresses:
            self._unlist(address)
        return addresses

    def expire(self) -> list[tuple[str, Hashable]]:
        """Remove addresses not heard of for too long; returns each with its connection."""
        before_ns = self._now_ns() - self._expiry_ns
        expired = [(address, live.owner) for address, live in self._live.items() if live.updated_ns < before_ns]
        for address, _ in expired:
            self._unlist(address)
        return expired

    def touch(self, address: str) -> None:
        """`address` was heard of."""
        live = self._live.get(address)
        if live is not None:
            live.updated_ns = self._now_ns()

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget a topic, everywhere or on the brokers of one cluster, until a broker registers it again."""
        queues = self._topics.get(topic, {})
        for name in list(queues):
            if cluster is None or self._brokers[name].cluster == cluster:
                del queues[name]
        if not queues:
            self._topics.pop(topic, None)

    def set_write_permission(self, broker_name: str, *, allowed: bool) -> int:
        """Allow or forbid writing to every topic of a broker, until its topics change; returns how many it has."""
        count = 0
        for queues in self._topics.values():
            data = queues.get(broker_name)
            if data is not None:
                # R sets read and write when it gives the permission back.
                queues[broker_name] = replace(data, perm=_READ_WRITE if allowed else data.perm & ~_WRITE)
                count += 1
        return count

    # Questions

    def route(self, topic: str) -> dict[str, Any] | None:
        """The body of a route reply; None when no listed broker has the topic."""
        queues = self._topics.get(topic)
        if not queues:
            return None
        filter_servers = {
            address: list(self._live[address].filter_servers)
            for name in queues
            for address in self._brokers[name].addresses.values()
            if self._live[address].filter_servers
        }
        return {
            "queueDatas": [_queue_data(name, data) for name, data in queues.items()],
            "brokerDatas": [self._broker_data(name) for name in queues],
            "filterServerTable": filter_servers,
        }

    def cluster_info(self) -> dict[str, Any]:
        """The body of a cluster info reply: brokers by name, names by cluster."""
        clusters: dict[str, list[str]] = {}
        for name, broker in self._brokers.items():
            clusters.setdefault(broker.cluster, []).append(name)
        return {
            "brokerAddrTable": {name: self._broker_data(name) for name in self._brokers},
            "clusterAddrTable": clusters,
        }

    def topics(self, cluster: str | None = None) -> list[str]:
        """Names of all topics, or of those with a broker in one cluster."""
        return [
            topic
            for topic, queues in self._topics.items()
            if cluster is None or any(self._brokers[name].cluster == cluster for name in queues)
        ]

    def data_version(self, address: str) -> str | None:
        """The data version that `address` registered last, as JSON text; None when it is not listed."""
        live = self._live.get(address)
        return None if live is None else live.data_version

    def addresses(self, broker_name: str) -> Mapping[int, str]:
        """Addresses by broker id; empty for an unknown name."""
        broker = self._brokers.get(broker_name)
        return dict(broker.addresses) if broker is not None else {}

    # Inside

    def _check_room(self, registration: Registration) -> None:
        if registration.address not in self._live and len(self._live) >= MAX_BROKERS:
            raise TableFull(f"{len(self._live)} brokers are registered, no more are possible")
        if registration.topics is not None and registration.broker_id == MASTER_ID:
            new = sum(topic not in self._topics for topic in registration.topics)
            if len(self._topics) + new > MAX_TOPICS:
                raise TableFull(f"{len(self._topics)} topics are known, {new} more are not possible")

    def _take_topics(self, broker: _Broker, registration: Registration) -> None:
        version = (registration.address, registration.data_version)
        if registration.topics is None or (registration.data_version and broker.topics_of == version):
            return
        broker.topics_of = version
        for topic, data in registration.topics.items():
            self._topics.setdefault(topic, {})[registration.broker_name] = data

    def _set_owner(self, address: str, owner: Hashable) -> None:
        live = self._live.get(address)
        if live is not None and live.owner != owner:
            self._disown(address, live.owner)
        self._owned.setdefault(owner, {})[address] = None

    def _disown(self, address: str, owner: Hashable) -> None:
        owned = self._owned.get(owner)
        if owned is not None:
            owned.pop(address, None)
            if not owned:
                del self._owned[owner]

    def _unlist(self, address: str, keep_name: str | None = None) -> None:
        """Remove an address; with its last address, a broker name other than `keep_name` goes, and its topics."""
        live = self._live.pop(address)
        self._disown(address, live.owner)
        broker = self._brokers[live.broker_name]
        del broker.addresses[live.broker_id]
        if live.broker_id == MASTER_ID:
            broker.topics_of = None  # the next process may have other topics under the same version (R: registerFirst)
        if not broker.addresses and live.broker_name != keep_name:
            del self._brokers[live.broker_name]
            for topic in [topic for topic, queues in self._topics.items() if live.broker_name in queues]:
                del self._topics[topic][live.broker_name]
                if not self._topics[topic]:
                    del self._topics[topic]

    def _broker_data(self, name: str) -> dict[str, Any]:
        broker = self._brokers[name]
        return {
            "cluster": broker.cluster,
            "brokerName": name,
            "brokerAddrs": {str(broker_id): address for broker_id, address in sorted(broker.addresses.items())},
        }


def _queue_data(broker_name: str, data: QueueData) -> dict[str, Any]:
    return {
        "brokerName": broker_name,
        "readQueueNums": data.read_queues,
        "writeQueueNums": data.write_queues,
        "perm": data.perm,
        "topicSysFlag": data.topic_sys_flag,
        "topicSynFlag": data.topic_sys_flag,  # the spelling of clients before 4.9.3 (R)
    }
