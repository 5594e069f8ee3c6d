"""Who belongs to a cluster of etcd, and how that is changed: by the requests that `etcdctl member` makes.

A member that was removed ends by itself, and its identity is never taken again. Who joins is a new member: it is
announced first, begins with nothing, and must be told of everybody who belongs to the cluster by then.
"""

import asyncio
from typing import Any

from harness.sdk import Host, HttpError, Refused, System, post

REQUEST_TIMEOUT_S = 2.0
"""For one member to do it. One that is cut off must not hold up the question to the next."""


class EtcdMembers(System):
    """The part of etcd's plug-in that is about members."""

    def __init__(self) -> None:
        self.outside = set[str]()
        self.newcomers = set[str]()

    def membership(self, host: Host) -> list[str]:
        """The words of a member's command that say with whom it begins; etcd heeds them while it has no data."""
        members = ",".join(f"{each.name}={peer_url(each)}" for each in self.hosts if each.name not in self.outside)
        begins = "existing" if host.name in self.newcomers else "new"
        return ["--initial-cluster", members, "--initial-cluster-state", begins]

    async def members(self, host: Host) -> list[str]:
        """As this member has applied it."""
        listed = identities(await post(f"{host.url('client')}/v3/cluster/member/list", {}))
        return [each.name for each in self.hosts if peer_url(each) in listed]

    async def leave(self, host: Host) -> None:
        self.outside.add(host.name)
        listed = identities(await self.ask("list", {}))
        if peer_url(host) in listed:
            await self.ask("remove", {"ID": listed[peer_url(host)]})

    async def join(self, host: Host) -> None:
        self.outside.add(host.name)
        await self.leave(host)  # also where it had been announced before, and may have begun
        await self.ask("add", {"peerURLs": [peer_url(host)]})
        self.outside.discard(host.name)
        self.newcomers.add(host.name)
        await host.wipe()

    async def ask(self, request: str, body: Any) -> Any:
        """Have the first member that does it do it."""
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
    """Peer URL -> the member's identity."""
    return {url: member["ID"] for member in said["members"] for url in member["peerURLs"]}
