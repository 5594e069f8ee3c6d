"""Membership of an etcd cluster, changed by the requests that `etcdctl member` makes.

A removed member exits on its own, and its ID is never accepted again. A joining host is a new member: it is added
first, starts with an empty data directory, and is configured with all current members.
"""

import asyncio
from typing import Any

from harness.sdk import Host, HttpError, Refused, System, post

REQUEST_TIMEOUT_S = 2.0
"""For a request to one member: an isolated one must not hold up asking the next."""


class EtcdMembers(System):
    """The membership part of etcd's plug-in."""

    def __init__(self) -> None:
        self.outside = set[str]()
        self.newcomers = set[str]()

    def membership(self, host: Host) -> list[str]:
        """Command-line arguments with a member's initial cluster; etcd uses them only while it has no data."""
        members = ",".join(f"{each.name}={peer_url(each)}" for each in self.hosts if each.name not in self.outside)
        begins = "existing" if host.name in self.newcomers else "new"
        return ["--initial-cluster", members, "--initial-cluster-state", begins]

    async def members(self, host: Host) -> list[str]:
        """The members according to what this member has applied."""
        listed = identities(await post(f"{host.url('client')}/v3/cluster/member/list", {}))
        return [each.name for each in self.hosts if peer_url(each) in listed]

    async def leave(self, host: Host) -> None:
        self.outside.add(host.name)
        listed = identities(await self.ask("list", {}))
        if peer_url(host) in listed:
            await self.ask("remove", {"ID": listed[peer_url(host)]})

    async def join(self, host: Host) -> None:
        self.outside.add(host.name)
        await self.leave(host)  # even if it had been added before and may have started
        await self.ask("add", {"peerURLs": [peer_url(host)]})
        self.outside.discard(host.name)
        self.newcomers.add(host.name)
        await host.wipe()

    async def ask(self, request: str, body: Any) -> Any:
        """Send the request to one member after another until one succeeds; returns its answer."""
        problem: Exception = Refused("nobody is a member")
        for each in self.hosts:
            if each.name not in self.outside:
                try:
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        return await post(f"{each.url('client')}/v3/cluster/member/{request}", body)
                except (Refused, HttpError, OSError, ValueError) as error:
                    problem = error
        raise problem


def peer_url(host: Host) -> str:
    return f"http://{host.advertise('peer')}"


def identities(said: Any) -> dict[str, str]:
    """Peer URL -> member ID."""
    return {url: member["ID"] for member in said["members"] for url in member["peerURLs"]}
