"""The name server: brokers register with it, clients ask it for routes. Brokers repeat their registrations within
30 seconds, so any number of name servers run side by side without knowing of each other."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from node.listening import listening
from node.nameserver.kv_config import KvConfig, KvConfigFull
from node.nameserver.registration import parse_json_object, read_registration
from node.nameserver.routes import RouteTable, TableFull
from node.remoting import (
    Command,
    Connection,
    FieldValue,
    RemotingServer,
    RequestCode,
    RequestError,
    ResponseCode,
    ServerLimits,
)
from node.runtime import Runtime

__all__ = ["NameServer", "NameServerOptions"]

ORDER_TOPIC_NAMESPACE: Final = "ORDER_TOPIC_CONFIG"
"""Namespace whose entries go out with routes and registration replies (R)."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameServerOptions:
    """Settings of one name server. Defaults are RocketMQ's (R)."""

    broker_expiry_s: float = 120.0
    """A broker not heard of for this long is removed."""
    scan_interval_s: float = 10.0
    """Time between two scans for such brokers."""
    kv_config_path: str | None = None
    """File of the key-value configuration; None keeps it in memory."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    tls: ssl.SSLContext | None = None
    """Encrypts every connection; None means plain text."""


class NameServer:
    """One name server on one address. Port 0 lets the system choose; see `port`."""

    def __init__(self, host: str, port: int, runtime: Runtime, *, options: NameServerOptions | None = None) -> None:
        self._options = options or NameServerOptions()
        self.routes = RouteTable(runtime.clock.monotonic_ns, expiry_s=self._options.broker_expiry_s)
        self._kv = KvConfig(runtime.disk, self._options.kv_config_path)
        self._server = RemotingServer(host, port, limits=self._options.limits, name="nameserver", tls=self._options.tls)
        self._scan_timer: asyncio.TimerHandle | None = None
        for code, processor in (
            (RequestCode.REGISTER_BROKER, self._register),
            (RequestCode.UNREGISTER_BROKER, self._unregister),
            (RequestCode.GET_ROUTE_INFO_BY_TOPIC, self._route),
            (RequestCode.GET_BROKER_CLUSTER_INFO, self._cluster_info),
            (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAME_SERVER, self._topics),
            (RequestCode.GET_TOPICS_BY_CLUSTER, self._topics_by_cluster),
            (RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NAME_SERVER, self._own_topics),
            (RequestCode.GET_NAME_SERVER_CONFIG, self._configuration),
            (RequestCode.DELETE_TOPIC_IN_NAME_SERVER, self._delete_topic),
            (RequestCode.QUERY_DATA_VERSION, self._query_data_version),
            (RequestCode.WIPE_WRITE_PERM_OF_BROKER, self._wipe_write_permission),
            (RequestCode.ADD_WRITE_PERM_OF_BROKER, self._add_write_permission),
            (RequestCode.PUT_KV_CONFIG, self._put_kv),
            (RequestCode.GET_KV_CONFIG, self._get_kv),
            (RequestCode.DELETE_KV_CONFIG, self._delete_kv),
            (RequestCode.GET_KV_LIST_BY_NAMESPACE, self._list_kv),
        ):
            self._server.register(code, processor)

    @property
    def port(self) -> int:
        """The port listened on."""
        return self._server.port

    @property
    def connection_count(self) -> int:
        """Connections open now."""
        return self._server.connection_count

    async def start(self) -> None:
        """Listen. Raises OSError (address in use, unreadable file), ValueError (the file is no such configuration)."""
        await self._kv.load()
        with listening("listen"):
            await self._server.start()
        self._schedule_scan()

    async def stop(self) -> None:
        """Stop listening and close every connection. Idempotent."""
        if self._scan_timer is not None:
            self._scan_timer.cancel()
            self._scan_timer = None
        await self._server.stop()

    # Brokers

    def _register(self, command: Command, connection: Connection) -> Command:
        registration = read_registration(command)
        known = self.routes.addresses(registration.broker_name).get(registration.broker_id)
        try:
            result = self.routes.register(registration, connection)
        except TableFull as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from None
        if not connection.state.get("watched"):
            connection.state["watched"] = True
            connection.on_close(self._broker_connection_closed)
        place = f"{registration.broker_name} with id {registration.broker_id}"
        if not result.accepted:
            _logger.warning(
                "%s registers as %s with term %s, %s leads a newer one: not listed",
                registration.address,
                place,
                registration.dledger_term,
                result.master_address,
            )
        elif known != registration.address:
            _logger.info("%s is %s now (%s before)", registration.address, place, known or "nobody")
        fields = {
            name: value
            for name, value in (("haServerAddr", result.ha_address), ("masterAddr", result.master_address))
            if value
        }
        order = self._kv.namespace(ORDER_TOPIC_NAMESPACE)
        return command.reply(ResponseCode.SUCCESS, fields=fields, body=_json({"table": order}) if order else b"")

    def _broker_connection_closed(self, connection: Connection) -> None:
        for address in self.routes.owner_gone(connection):
            _logger.info("%s is removed, its connection is closed", address)

    def _unregister(self, command: Command, connection: Connection) -> Command:
        address = command.get_str("brokerAddr")
        if self.routes.unregister(command.get_str("brokerName"), command.get_int("brokerId"), address):
            _logger.info("%s has unregistered", address)
        return command.reply(ResponseCode.SUCCESS)

    def _query_data_version(self, command: Command, connection: Connection) -> Command:
        """Whether a broker must register again because its topics changed; if not, this is a sign of life (R)."""
        address = command.get_str("brokerAddr")
        theirs = json.dumps(parse_json_object(command.body, "the data version"), sort_keys=True)
        ours = self.routes.data_version(address)
        if ours == theirs:
            self.routes.touch(address)
        body = ours.encode() if ours else b""
        return command.reply(ResponseCode.SUCCESS, fields={"changed": ours != theirs}, body=body)

    def _wipe_write_permission(self, command: Command, connection: Connection) -> Command:
        count = self.routes.set_write_permission(command.get_str("brokerName"), allowed=False)
        return command.reply(ResponseCode.SUCCESS, fields={"wipeTopicCount": count})

    def _add_write_permission(self, command: Command, connection: Connection) -> Command:
        count = self.routes.set_write_permission(command.get_str("brokerName"), allowed=True)
        return command.reply(ResponseCode.SUCCESS, fields={"addTopicCount": count})

    def _schedule_scan(self) -> None:
        loop = asyncio.get_running_loop()
        self._scan_timer = loop.call_later(self._options.scan_interval_s, self._scan)

    def _scan(self) -> None:
        self._schedule_scan()
        for address, connection in self.routes.expire():
            _logger.warning("%s is removed, silent for %g s", address, self._options.broker_expiry_s)
            if isinstance(connection, Connection):
                connection.abort("the broker behind it is silent")

    # Clients

    def _route(self, command: Command, connection: Connection) -> Command:
        topic = command.get_str("topic")
        route = self.routes.route(topic)
        if route is None:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, remark=f"no broker has registered topic {topic[:127]}")
        order = self._kv.get(ORDER_TOPIC_NAMESPACE, topic)
        if order is not None:
            route["orderTopicConf"] = order
        return command.reply(ResponseCode.SUCCESS, body=_json(route))

    def _cluster_info(self, command: Command, connection: Connection) -> Command:
        return command.reply(ResponseCode.SUCCESS, body=_json(self.routes.cluster_info()))

    def _topics(self, command: Command, connection: Connection) -> Command:
        return command.reply(ResponseCode.SUCCESS, body=_json({"topicList": self.routes.topics()}))

    def _topics_by_cluster(self, command: Command, connection: Connection) -> Command:
        topics = self.routes.topics(command.get_str("cluster"))
        return command.reply(ResponseCode.SUCCESS, body=_json({"topicList": topics}))

    def _own_topics(self, command: Command, connection: Connection) -> Command:
        """Names of clusters and brokers, which no topic should have, and a broker that knows its own such names (R)."""
        info = self.routes.cluster_info()
        names = [name for cluster, brokers in info["clusterAddrTable"].items() for name in (cluster, *brokers)]
        addresses = [
            address for broker in info["brokerAddrTable"].values() for address in broker["brokerAddrs"].values()
        ]
        body = {"topicList": names, "brokerAddr": next(iter(addresses), None)}
        return command.reply(ResponseCode.SUCCESS, body=_json(body))

    def _configuration(self, command: Command, connection: Connection) -> Command:
        """The settings that RocketMQ's tools know, one NAME=VALUE per line."""
        settings = {"listenPort": self.port, "kvConfigPath": self._options.kv_config_path or ""}
        return command.reply(
            ResponseCode.SUCCESS, body="".join(f"{name}={value}\n" for name, value in settings.items()).encode()
        )

    def _delete_topic(self, command: Command, connection: Connection) -> Command:
        self.routes.delete_topic(command.get_str("topic"), command.get_str("clusterName", None))
        return command.reply(ResponseCode.SUCCESS)

    # Key-value configuration

    async def _put_kv(self, command: Command, connection: Connection) -> Command:
        namespace, key = command.get_str("namespace"), command.get_str("key")
        try:
            await self._kv.put(namespace, key, command.get_str("value"))
        except KvConfigFull as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from None
        return command.reply(ResponseCode.SUCCESS)

    def _get_kv(self, command: Command, connection: Connection) -> Command:
        namespace, key = command.get_str("namespace"), command.get_str("key")
        value = self._kv.get(namespace, key)
        if value is None:
            raise RequestError(ResponseCode.QUERY_NOT_FOUND, f"no value for {namespace[:80]} {key[:80]}")
        fields: Mapping[str, FieldValue] = {"value": value}
        return command.reply(ResponseCode.SUCCESS, fields=fields)

    async def _delete_kv(self, command: Command, connection: Connection) -> Command:
        await self._kv.delete(command.get_str("namespace"), command.get_str("key"))
        return command.reply(ResponseCode.SUCCESS)

    def _list_kv(self, command: Command, connection: Connection) -> Command:
        namespace = command.get_str("namespace")
        table = self._kv.namespace(namespace)
        if not table:
            raise RequestError(ResponseCode.QUERY_NOT_FOUND, f"no values in namespace {namespace[:80]}")
        return command.reply(ResponseCode.SUCCESS, body=_json({"table": table}))


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
