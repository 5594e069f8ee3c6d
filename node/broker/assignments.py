"""Which queues a consumer of RocketMQ 5 reads, when the broker decides that: codes 400 and 401 (R:
QueryAssignmentProcessor).

A group pulls a topic, and its queues are shared out evenly, unless 401 has switched it to POP. Then each client pops
from all queues of every broker together, or from its own share and those of the next `popShareQueueNum` clients. The
modes that 401 has set are kept in `messageRequestMode.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.broker.client_manager import ClientManager
from node.broker.heartbeat import MAX_NAME_CHARACTERS
from node.broker.internal_topics import RETRY_PREFIX
from node.broker.lazy_file import LazyFile
from node.broker.topics import TopicTable
from node.config import PERM_READ, check_topic_name
from node.remoting import Command, Connection, RemotingClient, RemotingError, RequestCode, RequestError, ResponseCode
from node.runtime import Disk

__all__ = ["MAX_MODES", "Assignments"]

MAX_MODES = 10_000
"""Pairs of topic and group whose mode is kept; each costs up to a kilobyte."""
PERSIST_INTERVAL_S = 1.0
ROUTE_TIMEOUT_MS = 3000
_MODES = ("PULL", "POP")
_BROADCASTING = "BROADCASTING"

_Place = tuple[str, int]
"""Broker name and queue id."""


class Assignments:
    """Answers codes 400 and 401."""

    def __init__(
        self,
        *,
        disk: Disk,
        path: str,
        broker_name: str,
        name_servers: Sequence[str],
        client: RemotingClient,
        topics: TopicTable,
        clients: ClientManager,
    ) -> None:
        self._broker_name = broker_name
        self._name_servers = name_servers
        self._client = client
        self._topics = topics
        self._clients = clients
        self._modes: dict[str, dict[str, dict[str, Any]]] = {}
        self._file = LazyFile(disk, path, delay_s=PERSIST_INTERVAL_S, render=lambda: self._modes)

    def load(self) -> None:
        """Read the file. Raises OSError, ValueError when it is damaged."""
        self._file.load(self._adopt)

    def _adopt(self, content: Mapping[str, Any]) -> None:
        self._modes = {
            str(topic): {str(group): _mode_of(mode) for group, mode in groups.items()}
            for topic, groups in content.items()
        }

    async def stop(self) -> None:
        """Write what is pending."""
        await self._file.stop()

    def processors(self) -> dict[int, Callable[[Command, Connection], Any]]:
        """The processors, by request code."""
        return {RequestCode.QUERY_ASSIGNMENT: self.query, RequestCode.SET_MESSAGE_REQUEST_MODE: self.set_mode}

    def set_mode(self, command: Command, connection: Connection) -> Command:
        """Code 401: set how a group receives the messages of a topic."""
        try:
            content = json.loads(command.body)
            topic, group, mode = str(content["topic"]), str(content["consumerGroup"]), _mode_of(content)
            check_topic_name(topic)
            if not 0 < len(group) <= MAX_NAME_CHARACTERS:
                raise ValueError(f"a group name of {len(group)} characters")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"this is no request mode: {error!r}") from error
        if topic.startswith(RETRY_PREFIX):
            raise RequestError(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        groups = self._modes.get(topic, {})
        if group not in groups and sum(map(len, self._modes.values())) >= MAX_MODES:
            raise RequestError(ResponseCode.SYSTEM_BUSY, f"{MAX_MODES} request modes are kept, no more are possible")
        self._modes[topic] = {**groups, group: mode}
        self._file.touch()
        return command.reply(ResponseCode.SUCCESS)

    async def query(self, command: Command, connection: Connection) -> Command:
        """Code 400: the queues assigned to a client."""
        try:
            content = json.loads(command.body)
            topic, group, client = (str(content[name]) for name in ("topic", "consumerGroup", "clientId"))
            is_for_all = content.get("messageModel") == _BROADCASTING
            by_circle = content.get("strategyName") == "AVG_BY_CIRCLE"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"this is not a valid query: {error!r}") from error
        places = await self._places(topic)
        mode = self._modes.get(topic, {}).get(group, {"mode": "PULL", "popShareQueueNum": 0})
        members = sorted(self._clients.consumer_ids(group))
        if is_for_all:
            own = places
        elif client not in members:
            own = []
        elif mode["mode"] == "POP":
            own = _popped(places, members, client, mode["popShareQueueNum"], by_circle)
        else:
            own = _shared(places, members, client, by_circle)
        answer = [
            {"messageQueue": {"topic": topic, "brokerName": name, "queueId": queue_id}, "mode": mode["mode"]}
            for name, queue_id in dict.fromkeys(own)
        ]
        body = json.dumps({"messageQueueAssignments": answer}, separators=(",", ":")).encode()
        return command.reply(ResponseCode.SUCCESS, body=body)

    async def _places(self, topic: str) -> list[_Place]:
        """Every queue of a topic, on all brokers, as the first name server that answers knows them; if none does, those
        of this broker."""
        for address in self._name_servers:
            try:
                request = Command.request(RequestCode.GET_ROUTE_INFO_BY_TOPIC, {"topic": topic})
                reply = await self._client.invoke(address, request, timeout_ms=ROUTE_TIMEOUT_MS)
                if reply.code == ResponseCode.SUCCESS:
                    queues = json.loads(reply.body)["queueDatas"]
                    return sorted(
                        (str(each["brokerName"]), queue_id)
                        for each in queues
                        if int(each["perm"]) & PERM_READ
                        for queue_id in range(int(each["readQueueNums"]))
                    )
            except (RemotingError, ValueError, KeyError, TypeError, RecursionError):
                continue
        known = self._topics.get(topic)
        return [(self._broker_name, queue_id) for queue_id in range(known.read_queues if known is not None else 0)]


def _mode_of(content: dict[str, Any]) -> dict[str, Any]:
    mode, share = str(content["mode"]), int(content.get("popShareQueueNum") or 0)
    if mode not in _MODES:
        raise ValueError(f"{mode[:40]!r} is none of {' '.join(_MODES)}")
    if not -1 << 31 <= share < 1 << 31:
        raise ValueError("popShareQueueNum is no 32-bit number")
    return {"mode": mode, "popShareQueueNum": share}


def _shared(places: Sequence[_Place], members: Sequence[str], client: str, by_circle: bool) -> list[_Place]:
    """A client's even share (R: AllocateMessageQueueAveragely, and ByCircle)."""
    index, count = members.index(client), len(members)
    if by_circle:
        return list(places[index::count])
    size, more = divmod(len(places), count)
    begin = index * size + min(index, more)
    return list(places[begin : begin + size + (index < more)])


def _popped(places: Sequence[_Place], members: Sequence[str], client: str, share: int, by_circle: bool) -> list[_Place]:
    """Each broker's queues as one with the number -1; or a client's share and those of the next `share` clients."""
    if share <= 0:
        return [(name, -1) for name, _ in places]
    index = members.index(client)
    if len(members) > len(places):
        return [places[index % len(places)]] if places else []
    chosen = (members[(index + step) % len(members)] for step in range(min(share, len(members) - 1) + 1))
    return [place for each in chosen for place in _shared(places, members, each, by_circle)]
