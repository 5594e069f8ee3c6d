"""What a client knows about topics and brokers, and how it notices changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from node.client.broker_client import BrokerClient
from node.client.errors import ClientError, NoRoute, NotLeader
from node.client.messages import MessageQueue
from node.client.requests import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES
from node.client.results import BrokerGroup, Route
from node.config import PERM_READ, PERM_WRITE

__all__ = ["RouteBook"]

MAX_ROUTES: Final = 1024
"""Limit on cached routes; above it the oldest is dropped."""
RETRY_PAUSE_S: Final = 1.0
"""How long an old route is used without asking again after no name server has answered."""


class RouteBook:
    """Routes by topic and addresses by broker name, as reported by name servers and leader hints.

    `on_new_address` is called when a broker is new or its addresses have changed: it then needs a heartbeat.
    """

    def __init__(
        self, requests: BrokerClient, *, max_age_s: float, on_new_address: Callable[[], None] = lambda: None
    ) -> None:
        self._requests = requests
        self._max_age_s = max_age_s
        self._on_new_address = on_new_address
        self._routes: dict[str, tuple[float, Route]] = {}
        self._asking: dict[str, asyncio.Task[Route | ClientError]] = {}
        self._groups: dict[str, BrokerGroup] = {}
        self._leaders: dict[str, str] = {}

    async def get(self, topic: str) -> Route:
        """The route. One that is merely old is returned while it is refreshed in the background; one that `failed` has
        put in doubt is refreshed first, and still used if no name server answers. Raises NoRoute if there is none."""
        known = self._routes.get(topic)
        if known is None:
            return await self.refresh(topic)
        age_s = asyncio.get_running_loop().time() - known[0]
        if age_s <= self._max_age_s:
            return known[1]
        if age_s < float("inf"):
            self._ask_in_background(topic)
            return known[1]
        try:
            return await self.refresh(topic)
        except ClientError as error:
            if error.code is not None:
                raise
            return known[1]

    async def for_new_topic(self, topic: str) -> Route:
        """Where a message of an unknown topic creates the topic: on the brokers that have the template topic, with as
        many queues as that has, but at most four (R: tryToFindTopicPublishInfo). Raises NoRoute."""
        example = await self.get(DEFAULT_TOPIC)
        groups = tuple(
            replace(group, write_queues=min(group.write_queues, DEFAULT_TOPIC_QUEUES)) for group in example.groups
        )
        return Route(topic=topic, groups=groups)

    async def refresh(self, topic: str) -> Route:
        """Ask the name servers now; concurrent calls share one request. Raises NoRoute."""
        task = self._ask_in_background(topic)
        await asyncio.wait((task,))
        result = NoRoute("this client is closed") if task.cancelled() else task.result()
        if isinstance(result, ClientError):
            raise NoRoute(result.remark, address=result.address, code=result.code)
        return result

    def _ask_in_background(self, topic: str) -> asyncio.Task[Route | ClientError]:
        task = self._asking.get(topic)
        if task is None:
            task = self._asking[topic] = asyncio.get_running_loop().create_task(self._ask(topic))
            task.add_done_callback(lambda _: self._asking.pop(topic, None))
        return task

    async def _ask(self, topic: str) -> Route | ClientError:
        try:
            route = await self._requests.route(topic)
        except ClientError as error:
            known = self._routes.pop(topic, None)
            if known is not None and error.code is None:
                retry_at_s = asyncio.get_running_loop().time() + RETRY_PAUSE_S
                self._routes[topic] = (retry_at_s - self._max_age_s, known[1])
            return error
        self._routes.pop(topic, None)
        if len(self._routes) >= MAX_ROUTES:
            self._routes.pop(next(iter(self._routes)))
        self._routes[topic] = (asyncio.get_running_loop().time(), route)
        is_news = False
        for group in route.groups:
            before = self._groups.get(group.name)
            is_news |= before is None or before.addresses != group.addresses
            if before is None or before.master_address != group.master_address:
                self._leaders.pop(group.name, None)
            self._groups[group.name] = group
        if is_news:
            self._on_new_address()
        return route

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def master(self, broker_name: str) -> str | None:
        """Where the master of a broker name is dialled, by the newest report; None while it has none."""
        hint = self._leaders.get(broker_name)
        if hint is not None:
            return hint
        group = self._groups.get(broker_name)
        return group.master_address if group is not None else None

    def require_master(self, broker_name: str) -> str:
        """The same; raises NoRoute while it has none."""
        address = self.master(broker_name)
        if address is None:
            raise NoRoute(f"broker {broker_name} has no master now")
        return address

    def slaves(self, broker_name: str) -> list[str]:
        """Where the other brokers of a name are dialled, by the newest route, lowest broker id first."""
        group = self._groups.get(broker_name)
        if group is None:
            return []
        master = self.master(broker_name)
        return [address for _, address in sorted(group.addresses.items()) if address != master]

    def reader(self, broker_name: str, broker_id: int | None) -> str:
        """The address to read from: the broker with this id if it is known, any slave for None, else the master (R:
        findBrokerAddressInSubscribe). Raises NoRoute if none is known."""
        group = self._groups.get(broker_name)
        slaves = self.slaves(broker_name)
        if broker_id and group is not None and broker_id in group.addresses:
            return group.addresses[broker_id]
        if slaves and (broker_id is None or self.master(broker_name) is None):
            return slaves[0]
        return self.require_master(broker_name)

    def failed(self, broker_name: str, topic: str, error: ClientError) -> None:
        """A request to the master of `broker_name` ended in `error`: follow its hint, or ask anew next time."""
        hint = error.leader_address if isinstance(error, NotLeader) else None
        if hint is not None and hint != error.address:
            if self._leaders.get(broker_name) != hint:
                self._leaders[broker_name] = hint
                self._on_new_address()
        else:
            self._leaders.pop(broker_name, None)
            known = self._routes.get(topic)
            if known is not None:
                self._routes[topic] = (float("-inf"), known[1])

    def addresses(self) -> list[str]:
        """Every broker address that is known, masters and slaves."""
        found = dict.fromkeys(self._leaders.values())
        for group in self._groups.values():
            found |= dict.fromkeys(group.addresses.values())
        return list(found)

    @staticmethod
    def write_queues(route: Route) -> list[MessageQueue]:
        """The queues that may be written, in the order in which every client sees them."""
        return sorted(
            MessageQueue(route.topic, group.name, number)
            for group in route.groups
            if group.perm & PERM_WRITE
            for number in range(group.write_queues)
        )

    @staticmethod
    def read_queues(route: Route) -> list[MessageQueue]:
        """The queues that may be read, in the order in which every client sees them."""
        return sorted(
            MessageQueue(route.topic, group.name, number)
            for group in route.groups
            if group.perm & PERM_READ
            for number in range(group.read_queues)
        )
