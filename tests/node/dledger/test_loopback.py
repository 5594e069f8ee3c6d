"""Groups on real sockets, real files and the real clock."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from node.dledger import (
    FAST_TIMING,
    DLedgerCode,
    DLedgerConfig,
    DLedgerError,
    DLedgerRequestCode,
    DLedgerServer,
    LedgerCorrupt,
    ReadMode,
)
from node.dledger.entry import parse_entries
from node.dledger.json_form import from_json, to_json
from node.dledger.messages import (
    AppendEntryRequest,
    AppendEntryResponse,
    GetEntriesRequest,
    GetEntriesResponse,
    HeartBeatRequest,
    HeartBeatResponse,
    InstallSnapshotRequest,
    InstallSnapshotResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    PushEntryRequest,
    Response,
    VoteRequest,
)
from node.dledger.rpc import PushType
from node.dledger.tools import GroupRefuses, change_members, give_lead
from node.real_runtime import RealDisk, real_runtime
from node.remoting import Command, RemotingClient
from tests.ports import free_ports

ResponseT = TypeVar("ResponseT", bound=Response)


class RealGroup:
    """Members in this process, each with a directory and ports of its own."""

    def __init__(
        self, directory: Path, size: int, *, server: type[DLedgerServer] = DLedgerServer, **options: Any
    ) -> None:
        self.server = server
        self.options = options
        names = [f"n{number}" for number in range(1, size + 1)]
        self.peers = dict(zip(names, (f"127.0.0.1:{port}" for port in free_ports(size)), strict=True))
        self.directory = directory
        self.members: dict[str, DLedgerServer] = {}
        self.disks: list[RealDisk] = []

    async def start(self, *names: str) -> None:
        for name in names or self.peers:
            data_dir = self.directory / name
            data_dir.mkdir(exist_ok=True)
            config = DLedgerConfig(
                group="g", self_id=name, peers=self.peers, listen=self.peers[name], data_dir=str(data_dir),
                timing=FAST_TIMING, data_segment_size_bytes=65536, **self.options,
            )  # fmt: skip
            runtime = real_runtime()
            assert isinstance(runtime.disk, RealDisk)
            self.disks.append(runtime.disk)
            member = self.server(config, runtime)
            await member.start()
            self.members[name] = member

    async def stop(self, *names: str) -> None:
        for name in names or list(self.members):
            await self.members.pop(name).stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = asyncio.get_running_loop().time() + 30
        while not condition():
            assert asyncio.get_running_loop().time() < deadline_s, "the condition never held"
            await asyncio.sleep(0.01)

    async def leader(self) -> str:
        def ready() -> list[str]:
            return [
                name
                for name, member in self.members.items()
                if member.member_state.is_leader
                and member.store.term_at(member.store.committed_index) == member.member_state.term
            ]

        await self.until(lambda: bool(ready()))
        return ready()[0]

    async def converged(self) -> None:
        def ends() -> set[int]:
            found: set[int] = set()
            for store in (member.store for member in self.members.values()):
                found |= {store.ledger_end_index, store.committed_index, store.durable_index}
            return found

        await self.until(lambda: len(ends()) == 1)

    def data(self, name: str) -> bytes:
        directory = self.directory / name / "dledger" / "data"
        content = b"".join((directory / each).read_bytes() for each in sorted(os.listdir(directory)))
        return content[: self.members[name].store.committed_pos]


@asynccontextmanager
async def group_of(directory: Path, size: int, **options: Any) -> AsyncIterator[RealGroup]:
    group = RealGroup(directory, size, **options)
    try:
        yield group
    finally:
        await group.stop()
        for disk in group.disks:
            disk.close()


@pytest.fixture
def real(tmp_path: Path) -> Callable[..., None]:
    """Run `scenario(group)` with a group of `size` members that are not started yet."""

    def run(scenario: Callable[[RealGroup], Awaitable[None]], size: int = 3, **options: Any) -> None:
        async def main() -> None:
            async with group_of(tmp_path, size, **options) as group:
                await scenario(group)

        asyncio.run(main())

    return run


def test_three_members_replicate_fail_over_and_hold_the_same_bytes(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        old = await group.leader()
        server = group.members[old]
        results = await asyncio.gather(*(server.append(100, lambda _: bytes(100)) for _ in range(500)))
        assert [result.index for result in results] == list(range(1, 501))
        assert await server.read_barrier(ReadMode.READ_INDEX) >= 500
        await group.stop(old)
        new = await group.leader()
        await group.members[new].append(5, lambda _: b"after")
        await group.start(old)
        await group.converged()
        assert len({group.data(name) for name in group.peers}) == 1
        assert group.members[old].store.get(501) is not None

    real(scenario)


def test_a_lone_member_serves_its_entries_again_after_a_restart(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        server = group.members[await group.leader()]
        result = await server.append(5, lambda _: b"alone")
        assert server.store.read_bytes(result.pos + 48, 5) == b"alone"
        await group.stop()
        await group.start()
        again = group.members[await group.leader()]
        assert again.store.read_bytes(result.pos + 48, 5) == b"alone"
        assert again.member_state.term == 2

    real(scenario, size=1)


def test_a_damaged_log_is_refused_and_its_file_named(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        server = group.members[await group.leader()]
        await asyncio.gather(*(server.append(100, lambda _: bytes(100)) for _ in range(50)))
        await group.stop()
        path = group.directory / "n1" / "dledger" / "data" / "00000000000000000000"
        content = bytearray(path.read_bytes())
        content[1000] ^= 4
        path.write_bytes(content)
        with pytest.raises(LedgerCorrupt) as caught:
            await group.start()
        assert caught.value.path == str(path) and caught.value.offset_bytes <= 1000
        with socket.socket() as free:  # the refused start has released its port
            free.bind(("127.0.0.1", int(group.peers["n1"].rpartition(":")[2])))

    real(scenario, size=1)


def test_a_start_on_a_port_in_use_fails_and_can_be_repeated(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", int(group.peers["n1"].rpartition(":")[2])))
            taken.listen()
            with pytest.raises(OSError, match="in use"):
                await group.start()
        await group.start()
        assert await group.leader() == "n1"

    real(scenario, size=1)


@pytest.mark.mechanism("Leader-only reads/writes")
def test_append_get_and_metadata_requests_over_the_wire(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        leader = await group.leader()
        follower = next(name for name in group.peers if name != leader)
        client = RemotingClient()

        async def ask(name: str, code: DLedgerRequestCode, request: Message, answer: type[ResponseT]) -> ResponseT:
            reply = await client.invoke(
                group.peers[name], Command.request(code, body=request.to_body()), timeout_ms=5000
            )
            return answer.from_body(reply.body)

        def base(name: str) -> dict[str, Any]:
            return {"group": "g", "remote_id": name, "local_id": "client"}

        append = AppendEntryRequest(**base(leader), body=b"over the wire")
        answer = await ask(leader, DLedgerRequestCode.APPEND, append, AppendEntryResponse)
        assert answer.code is DLedgerCode.SUCCESS
        get = GetEntriesRequest(**base(leader), begin_index=answer.index)
        (entry,) = parse_entries((await ask(leader, DLedgerRequestCode.GET, get, GetEntriesResponse)).entries)
        assert (entry.body, entry.pos) == (b"over the wire", answer.pos)
        beyond = await ask(
            leader, DLedgerRequestCode.GET, GetEntriesRequest(**base(leader), begin_index=10**9), GetEntriesResponse
        )
        assert beyond.code is DLedgerCode.INDEX_OUT_OF_RANGE
        to_follower = AppendEntryRequest(**base(follower), body=b"x")
        refused = await ask(follower, DLedgerRequestCode.APPEND, to_follower, AppendEntryResponse)
        assert (refused.code, refused.leader_id) == (DLedgerCode.NOT_LEADER, leader)
        metadata = await ask(leader, DLedgerRequestCode.METADATA, MetadataRequest(**base(leader)), MetadataResponse)
        assert (metadata.role, metadata.leader_id) == ("LEADER", leader)
        wrongs: list[tuple[Message, DLedgerCode]] = [
            (HeartBeatRequest(**(base(leader) | {"group": "h"}), term=1, leader_id="n2"), DLedgerCode.UNKNOWN_GROUP),
            (HeartBeatRequest(**base("n9"), term=1, leader_id="n2"), DLedgerCode.UNKNOWN_MEMBER),
            (GetEntriesRequest(**base(leader), begin_index=1), DLedgerCode.UNEXPECTED_ARGUMENT),
        ]
        for wrong, code in wrongs:
            refusal = await ask(leader, DLedgerRequestCode.HEART_BEAT, wrong, HeartBeatResponse)
            assert refusal.code is code
        await client.close()

    real(scenario)


def test_garbage_for_every_request_code_leaves_the_group_working(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        leader = await group.leader()
        client = RemotingClient()
        bodies = [b"", b"\1", b"\1\0\0", b"\xff" * 100, b'{"group":"g"}', os.urandom(1000)]
        good: dict[str, Any] = {
            "group": "g", "remote_id": leader, "local_id": "n2", "term": 1 << 62, "leader_id": "n2",
        }  # fmt: skip
        wrongs: list[Message] = [
            HeartBeatRequest(**good),
            HeartBeatRequest(**(good | {"leader_id": "nobody"})),
            PushEntryRequest(**good, type=PushType.APPEND, commit_index=1, entries=b"\0\0\0"),
            PushEntryRequest(**good, type=PushType.TRUNCATE, commit_index=-1),
            VoteRequest(**good, ledger_end_index=-1, ledger_end_term=1 << 62),
            InstallSnapshotRequest(
                **good, last_included_index=5, last_included_term=1, size_bytes=9, digest="0" * 64, offset=0, data_crc=0
            ),
        ]
        bodies += [wrong.to_body() for wrong in wrongs]
        for code in [*DLedgerRequestCode, 31003, 31005, 31006]:
            for body in bodies:
                request = Command.request(code, body=body)
                await client.invoke(group.peers[leader], request, timeout_ms=5000)
        await client.close()
        async with asyncio.timeout(30):
            while True:
                try:
                    server = group.members[await group.leader()]
                    await server.append(4, lambda _: b"fine")
                    break
                except DLedgerError:
                    continue
        await group.converged()
        assert all(member.store.get(0) is not None for member in group.members.values())

    real(scenario)


def test_a_member_that_fell_behind_gets_a_snapshot_over_the_wire(real: Any, tallies: Any) -> None:
    """On real disks, over real connections, in DLedger's JSON as well."""
    truth = tallies.Truth()

    async def scenario(group: RealGroup) -> None:
        await group.start()
        leader = await group.leader()
        behind = next(name for name in group.peers if name != leader)
        await group.stop(behind)
        server = group.members[leader]
        for number in range(600):
            body = (b"%d=%d" % (number % 7, number)).ljust(1000, b".")
            await server.append(1000, lambda _, body=body: body)  # type: ignore[misc]
        await group.until(lambda: server.store.ledger_begin_index > 100)
        await group.start(behind)
        follower = group.members[behind]
        await group.until(lambda: follower.tally.next_index == server.store.committed_index + 1)  # type: ignore[attr-defined]
        assert follower.snapshots.installed_total == 1 and follower.store.ledger_begin_index > 100
        assert follower.tally.values == server.tally.values and truth.violations == []  # type: ignore[attr-defined]
        request = InstallSnapshotRequest(
            group="g", remote_id=behind, local_id=leader, term=server.member_state.term, leader_id=leader,
            last_included_index=5, last_included_term=1, size_bytes=9, digest="0" * 64, offset=0, data_crc=0,
        )  # fmt: skip
        client = RemotingClient()
        command = Command.request(51006, body=to_json(request))
        reply = await client.invoke(group.peers[behind], command, timeout_ms=5000)
        await client.close()
        answer = from_json(InstallSnapshotResponse, reply.body)
        assert (answer.code, answer.offset) == (DLedgerCode.SUCCESS, 9), "the member has a newer snapshot"
        await group.stop(behind)
        await group.start(behind)
        await server.append(4, lambda _: b"a=99")
        await group.until(lambda: group.members[behind].tally.values.get("a") == "99")  # type: ignore[attr-defined]
        assert truth.violations == []

    real(scenario, server=tallies.server(truth), snapshot_threshold_entries=100, snapshot_removes_log=True)


def test_leadership_is_transferred_over_the_wire(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        with pytest.raises(GroupRefuses, match="nobody leads"):
            await give_lead("g", group.peers, "n1")
        await group.start()
        leader = await group.leader()
        follower = next(name for name in group.peers if name != leader)
        # The leader transfers only to a member whose watermark it knows.
        await group.until(lambda: group.members[leader].status()["watermarks"][follower] >= 0)
        term = await give_lead("g", group.peers, follower)
        assert await group.leader() == follower
        assert await give_lead("g", group.peers, follower) == term
        with pytest.raises(GroupRefuses, match="n9 is no member"):
            await give_lead("g", group.peers, "n9")
        with pytest.raises(GroupRefuses, match="is not member n1 of group h"):
            await give_lead("h", group.peers, "n1")

    real(scenario)


def test_dledgers_json_requests_are_served_under_dledgers_own_codes(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        leader = await group.leader()
        client = RemotingClient()

        async def ask(code: int, **fields: Any) -> dict[str, Any]:
            body = json.dumps({"group": "g", "remoteId": leader, "localId": "tool", **fields}).encode()
            reply = await client.invoke(group.peers[leader], Command.request(code, body=body), timeout_ms=5000)
            answer: dict[str, Any] = json.loads(reply.body)
            return answer

        metadata = await ask(50000)
        assert (metadata["code"], metadata["role"], metadata["leaderId"]) == (200, "LEADER", leader)
        appended = await ask(50001, body=base64.b64encode(b"in JSON").decode())
        read = await ask(50002, beginIndex=appended["index"])
        (entry,) = parse_entries(base64.b64decode(read["entries"]))
        assert (entry.body, entry.pos) == (b"in JSON", appended["pos"])
        vote = {"term": 99, "leaderId": "n9", "ledgerEndIndex": 9, "ledgerEndTerm": 9}
        assert (await ask(51001, **vote))["voteResult"] == "REJECT_UNKNOWN_LEADER"
        other = next(name for name in group.peers if name != leader)
        assert (await ask(51002, term=0, leaderId=other))["code"] == DLedgerCode.EXPIRED_TERM
        push = {"term": 0, "leaderId": other, "type": "COMMIT", "commitIndex": 1}
        assert (await ask(51004, **push))["code"] == DLedgerCode.EXPIRED_TERM
        assert (await ask(51004, **push | {"type": "NONE"}))["code"] == DLedgerCode.UNEXPECTED_ARGUMENT
        transfer = {"term": metadata["term"], "transferId": leader, "transfereeId": "n9"}
        assert (await ask(51005, **transfer))["code"] == DLedgerCode.UNKNOWN_MEMBER
        await client.close()

    real(scenario)


def test_members_are_added_and_removed_over_the_wire(real: Any, tmp_path: Path) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        await group.leader()
        joiner = RealGroup(tmp_path, 1, members_may_change=True, joins=True)
        joiner.peers = group.peers | {"n4": joiner.peers["n1"]}
        joiner.disks = group.disks
        await joiner.start("n4")
        index = await change_members("g", group.peers, "n4", joiner.peers["n4"])
        group.members["n4"] = joiner.members["n4"]
        await group.converged()
        assert group.members["n4"].store.committed_index >= index
        with pytest.raises(GroupRefuses, match="n4 belongs to the group already"):
            await change_members("g", group.peers, "n4", joiner.peers["n4"])
        leader = await group.leader()
        for other in (leader, "n4"):
            with pytest.raises(GroupRefuses, match=f"is the address of {other}, which belongs to the group") as refused:
                await change_members("g", group.peers, "n5", joiner.peers[other])
            assert refused.value.is_mistake and "n5" not in group.members[leader].status()["members"]
        gone = next(name for name in group.peers if name != leader)
        await change_members("g", group.peers, gone, None)
        await group.stop(gone)
        await group.converged()
        assert gone not in group.members[leader].status()["members"]

    real(scenario, members_may_change=True)


def test_tools_with_an_outdated_configuration_find_the_leader_and_the_members(real: Any, tmp_path: Path) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        await group.leader()
        joiner = RealGroup(tmp_path, 1, members_may_change=True, joins=True)
        joiner.peers = group.peers | {"n4": joiner.peers["n1"]}
        joiner.disks = group.disks
        await joiner.start("n4")
        await change_members("g", group.peers, "n4", joiner.peers["n4"])
        group.members["n4"] = joiner.members["n4"]
        await group.converged()
        leader = await group.leader()
        await group.until(lambda: group.members[leader].status()["watermarks"]["n4"] >= 0)
        term = await give_lead("g", group.peers, "n4")  # n4 is not in the configuration
        assert await group.leader() == "n4" and group.members["n4"].member_state.term == term
        with pytest.raises(GroupRefuses, match="n9 is no member of group g: n1, n2, n3, n4") as refused:
            await give_lead("g", group.peers, "n9")
        assert refused.value.is_mistake
        await change_members("g", {"n1": group.peers["n1"]}, "n2", None)  # the only configured member does not lead
        assert "n2" not in group.members["n4"].status()["members"]

    real(scenario, members_may_change=True)


def test_a_fixed_group_refuses_membership_changes_over_the_wire(real: Any) -> None:
    async def scenario(group: RealGroup) -> None:
        await group.start()
        await group.leader()
        with pytest.raises(GroupRefuses, match="does not let this group change"):
            await change_members("g", group.peers, "n4", "127.0.0.1:1")

    real(scenario)
