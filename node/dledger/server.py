"""One member of a DLedger group: a log that a quorum of members agrees on.

A member is composed of parts, each made by a `make_...` method that may be overridden, and is served on its own
address. Each part's module describes it; the contract of the whole:

- An append is acknowledged once a quorum has it on disk (flush mode `sync`), and then it is never lost while
  a majority's disks keep what they synced.
- The committed prefix of all members is the same, byte for byte.
- In a term at most one member leads.
- An append that ends in an indefinite error may have happened or may still happen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from node.config_reader import split_address
from node.dledger.config import DLedgerConfig
from node.dledger.elector import LeaderElector
from node.dledger.json_form import from_json, to_json
from node.dledger.member_change import MemberChange
from node.dledger.member_state import MemberState, RoleListener
from node.dledger.membership import encode_members
from node.dledger.messages import (
    AppendEntryRequest,
    AppendEntryResponse,
    ChangeMembersRequest,
    ChangeMembersResponse,
    GetEntriesRequest,
    GetEntriesResponse,
    HeartBeatRequest,
    HeartBeatResponse,
    InstallSnapshotRequest,
    InstallSnapshotResponse,
    LeadershipTransferRequest,
    LeadershipTransferResponse,
    MalformedMessage,
    MembersRequest,
    MembersResponse,
    MetadataRequest,
    MetadataResponse,
    PushEntryRequest,
    PushEntryResponse,
    Request,
    Response,
    VoteRequest,
    VoteResponse,
)
from node.dledger.peers import LEASE_FIELD, PeerClient, RemotingPeerClient, settle
from node.dledger.pusher import DLedgerEntryPusher
from node.dledger.quorum import AppendResult
from node.dledger.reads import IndexCallback, ReadBarrier
from node.dledger.rpc import JSON_CODES, DLedgerCode, DLedgerError, DLedgerRequestCode, ReadMode
from node.dledger.snapshot_manager import SnapshotManager
from node.dledger.snapshot_transfer import SnapshotReceiver
from node.dledger.state_machine import StateMachine, StateMachineCaller
from node.dledger.store import DLedgerStore
from node.dledger.transfer import LeadershipTransfer
from node.listening import listening
from node.logs import LogLimiter
from node.remoting import Command, Connection, DeferredReply, Processor, RemotingServer, ResponseCode
from node.runtime import Runtime

__all__ = ["DLedgerServer"]

logger = logging.getLogger("node.dledger.elector")

RequestT = TypeVar("RequestT", bound=Request)

_Later = Callable[[Callable[[Response], None]], None]
"""Continues a request, and calls its argument with the answer when there is one."""

_FIRST_JSON_CODE = int(DLedgerRequestCode.METADATA) + JSON_CODES

MAX_GET_ENTRIES = 1000
MAX_GET_BYTES = 1024 * 1024
"""Limits of one answer to GET."""


class DLedgerServer:
    """One member. Listeners may be added before `start`, which loads `store` and `member_state`."""

    def __init__(self, config: DLedgerConfig, runtime: Runtime) -> None:
        self.config = config
        self.runtime = runtime
        self.member_state = self.make_state()
        self.store = self.make_store()
        self.peers = self.make_peers()
        self.snapshots = self.make_snapshots()
        self.snapshot_receiver = self.make_snapshot_receiver()
        self.machine: StateMachineCaller | None = None
        """Applies the log to a state machine; None if nothing does, or something attached to `snapshots` directly."""
        self.pusher = self.make_pusher()
        self.elector = self.make_elector()
        self.reads = self.make_reads()
        self.transfer = self.make_transfer()
        self.members = MemberChange(
            self.config, self.member_state, self.store, self.pusher, self.elector, self.snapshots
        )
        self._leases_ms: dict[str, str] = {}
        self._complaints = LogLimiter(lambda: asyncio.get_running_loop().time())
        self.remoting = RemotingServer(*split_address(config.listen), name="dledger")
        for code, processor in self._processors().items():
            self.remoting.register(code, processor)
            self.remoting.register(code + JSON_CODES, processor)

    def make_state(self) -> MemberState:
        return MemberState(self.config, self.runtime)

    def make_store(self) -> DLedgerStore:
        return DLedgerStore(self.config, self.runtime, self.member_state.members)

    def make_peers(self) -> PeerClient:
        return RemotingPeerClient(self.config, self.member_state.members)

    def make_pusher(self) -> DLedgerEntryPusher:
        return DLedgerEntryPusher(
            self.config,
            self.runtime,
            self.member_state,
            self.store,
            self.peers,
            snapshots=self.snapshots,
            on_higher_term=lambda term: self.elector.note_higher_term(term),
        )

    def make_snapshots(self) -> SnapshotManager:
        return SnapshotManager(self.config, self.runtime.disk, self.store, self.member_state.members)

    def make_snapshot_receiver(self) -> SnapshotReceiver:
        return SnapshotReceiver(self.config, self.runtime.disk, self.member_state, self.snapshots)

    def apply_to(self, machine: StateMachine) -> StateMachineCaller:
        """Apply committed entries to `machine`, from `start` on, and take snapshots of it."""
        self.machine = StateMachineCaller(machine, self.store, self.snapshots)
        self.snapshots.attach(self.machine)
        return self.machine

    def make_elector(self) -> LeaderElector:
        return LeaderElector(
            self.config,
            self.runtime,
            self.member_state,
            self.store,
            self.peers,
            on_elected=self.pusher.elected,
        )

    def make_reads(self) -> ReadBarrier:
        return ReadBarrier(self.config, self.member_state, self.store, self.elector, self.pusher)

    def make_transfer(self) -> LeadershipTransfer:
        return LeadershipTransfer(
            self.config, self.runtime, self.member_state, self.store, self.peers, self.pusher, self.elector
        )

    async def start(self) -> None:
        """Recover the log, listen, and take part in the group.

        Raises LedgerCorrupt when the log or the member's state is damaged (names file and byte), SegmentError when
        it was written with another segment size, OSError when the disk or the address does not work.
        """
        self.member_state.load()
        await self.member_state.confirm()
        await self.store.open()
        try:
            self.member_state.check_against_log(self.store.ledger_end_term)
            if self.machine is not None:
                self.machine.start()
            await self.snapshots.open()
            with listening("dledger.listen"):
                await self.remoting.start()
        except OSError:
            if self.machine is not None:
                self.machine.stop()
            await self.store.close()
            raise
        self.pusher.start()
        self.elector.start()
        self.transfer.start()

    async def stop(self) -> None:
        """Give up leadership, answer open requests, write what is pending, close everything."""
        await self.transfer.stop()
        await self.elector.stop()
        await self.pusher.stop()
        await self.remoting.stop()
        await self.peers.close()
        if self.machine is not None:
            self.machine.stop()
        await self.snapshots.close()
        await self.store.close()

    @property
    def port(self) -> int:
        """The port on which peers reach this member, once it has started."""
        return self.remoting.port

    def append(self, body_size_bytes: int, encode_body: Callable[[int], bytes]) -> asyncio.Future[AppendResult]:
        """Append an entry to the log of the group; see `DLedgerEntryPusher.append`.

        The future is done when the entry is committed. It fails with an indefinite DLedgerError:
        WAIT_QUORUM_ACK_TIMEOUT or TERM_CHANGED. What this method itself raises is definite.
        """
        return self.pusher.append(body_size_bytes, encode_body)

    def append_batch(
        self,
        sizes: Sequence[int],
        encode: Callable[[Sequence[int]], Sequence[bytes]],
        on_done: Callable[[DLedgerError | None], object],
    ) -> tuple[int, int, int]:
        """Append consecutive entries; see `DLedgerEntryPusher.append_batch`. `on_done` gets None when all are
        committed, or the error that the future of `append` would fail with."""
        return self.pusher.append_batch(
            sizes, encode, lambda outcome: on_done(outcome if isinstance(outcome, DLedgerError) else None)
        )

    def takes_together(self, count: int, size_bytes: int) -> bool:
        """Always: the entries of a batch are committed in order, and by the same quorum."""
        return True

    async def read_barrier(self, mode: ReadMode) -> int:
        """The index up to which the log must be applied before a read may be served; see `node.dledger.reads`."""
        return await self.reads.barrier(mode)

    def ask_barrier(self, mode: ReadMode, on_done: IndexCallback) -> bool:
        """The same without a task, if possible; see `ReadBarrier.ask`."""
        return self.reads.ask(mode, on_done)

    async def transfer_leadership(self, member: str) -> None:
        """Transfer leadership to `member`; see `LeadershipTransfer.give`. Raises DLedgerError."""
        await self.transfer.give(member)

    async def add_member(self, member: str, address: str) -> int:
        """Add `member`, which others dial at `address`, to the group; see `MemberChange.change`."""
        return await self.members.change(member, address)

    async def remove_member(self, member: str) -> int:
        """Remove `member` from the group; see `MemberChange.change`. A leader may remove itself."""
        return await self.members.change(member, None)

    def add_commit_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener()` whenever the committed index has advanced."""
        self.store.add_commit_listener(listener)

    def add_role_listener(self, listener: RoleListener) -> None:
        """Call `listener(term, role)` after each change of role or term; a new leader has its no-op by then."""
        self.member_state.add_role_listener(listener)

    def status(self) -> dict[str, Any]:
        """This member's view of its own state, for operators and for checks."""
        state, store, writer = self.member_state, self.store, self.store.writer
        return {
            "selfId": state.self_id,
            "group": state.group,
            "role": state.role.name,
            "term": state.term,
            "votedFor": state.voted_for,
            "leaderId": state.leader_id,
            "members": dict(state.members.peers),
            "ledgerBeginIndex": store.ledger_begin_index,
            "ledgerEndIndex": store.ledger_end_index,
            "ledgerEndTerm": store.ledger_end_term,
            "committedIndex": store.committed_index,
            "committedPos": store.committed_pos,
            "writtenIndex": store.written_index,
            "flushedIndex": store.durable_index,
            "verifiedIndex": self.pusher.handler.verified_index(state.term),
            "watermarks": self.pusher.checker.watermarks(),
            "pending": self.pusher.checker.pending_count,
            "pendingBytes": writer.pending_bytes,
            "pushes": {peer: each.pending_count for peer, each in self.pusher.dispatchers.items()},
            "diskStalledMs": round(writer.stalled_ms),
            "diskFailure": str(writer.failure) if writer.failure is not None else None,
            "corruptReads": store.corrupt_reads,
            "flushes": writer.group_total,
            "flushedEntries": writer.entry_total,
            "snapshotIndex": self.snapshots.newest_index,
            "appliedIndex": self.snapshots.applied_index,
            "snapshotsTaken": self.snapshots.saved_total,
            "snapshotsInstalled": self.snapshots.installed_total,
        }

    # Requests of other members

    def _processors(self) -> dict[int, Processor]:
        return {
            DLedgerRequestCode.VOTE: self._processor(VoteRequest, VoteResponse, self.elector.handle_vote),
            DLedgerRequestCode.HEART_BEAT: self._processor(HeartBeatRequest, HeartBeatResponse, self._handle_heartbeat),
            DLedgerRequestCode.PUSH: self._processor(PushEntryRequest, PushEntryResponse, self._handle_push),
            DLedgerRequestCode.LEADERSHIP_TRANSFER: self._processor(
                LeadershipTransferRequest, LeadershipTransferResponse, self._handle_transfer
            ),
            DLedgerRequestCode.INSTALL_SNAPSHOT: self._processor(
                InstallSnapshotRequest, InstallSnapshotResponse, self._handle_install_snapshot
            ),
            DLedgerRequestCode.CHANGE_MEMBERS: self._processor(
                ChangeMembersRequest, ChangeMembersResponse, self._handle_change_members
            ),
            DLedgerRequestCode.MEMBERS: self._processor(MembersRequest, MembersResponse, self._handle_members),
            DLedgerRequestCode.METADATA: self._processor(MetadataRequest, MetadataResponse, self._handle_metadata),
            DLedgerRequestCode.GET: self._processor(GetEntriesRequest, GetEntriesResponse, self._handle_get),
            DLedgerRequestCode.APPEND: self._processor(AppendEntryRequest, AppendEntryResponse, self._handle_append),
        }

    def _processor(
        self,
        kind: type[RequestT],
        answer_kind: type[Response],
        handle: Callable[[RequestT], Response | Awaitable[Response] | _Later],
    ) -> Processor:
        """Decode a request, check that it is for this member, handle it, and answer with a code in any case."""

        async def when_done(command: Command, answer: Awaitable[Response]) -> Command:
            try:
                return _reply(command, await answer)
            except DLedgerError as error:
                return self._refusal(command, answer_kind, error.code, str(error))
            except OSError as error:
                return self._refusal(command, answer_kind, DLedgerCode.DISK_ERROR, str(error))

        def process(command: Command, connection: Connection) -> Command | Awaitable[Command] | DeferredReply:
            try:
                request = from_json(kind, command.body) if _takes_json(command) else kind.from_body(command.body)
            except MalformedMessage as error:
                return self._refusal(command, answer_kind, DLedgerCode.UNEXPECTED_ARGUMENT, str(error))
            if request.group != self.config.group:
                remark = f"this is group {self.config.group}"
                return self._refusal(command, answer_kind, DLedgerCode.UNKNOWN_GROUP, remark)
            if request.remote_id != self.config.self_id:
                remark = f"this is {self.config.self_id}"
                return self._refusal(command, answer_kind, DLedgerCode.UNKNOWN_MEMBER, remark)
            if LEASE_FIELD in command.ext_fields:
                self._compare_leases(request.local_id, command.ext_fields[LEASE_FIELD])
            answer = handle(request)
            if isinstance(answer, Response):
                return _reply(command, answer)
            if callable(answer):
                deferred = DeferredReply((command,))
                answer(lambda given: deferred.send(_reply(command, given)))
                return deferred
            return when_done(command, answer)

        return process

    def _compare_leases(self, member: str, lease_ms: str) -> None:
        """Warn if a leader has another lease than this member. Lease reads of this leader, or of the next one, may then
        be stale, and nothing else reveals it."""
        own_ms = self.config.timing.lease_ms
        if self._leases_ms.get(member, str(own_ms)) != lease_ms and self.member_state.is_member(member):
            self._leases_ms[member] = lease_ms
            if lease_ms != str(own_ms):
                self._complaints.warning(
                    logger, "lease", "%s has another timing, a lease of %.20s ms where this member has %d: reads by a"
                    " lease are not safe until all have the same", member, lease_ms, own_ms,
                )  # fmt: skip

    def _refusal(self, command: Command, kind: type[Response], code: DLedgerCode, remark: str) -> Command:
        answer = kind(**self._answer_fields(""), code=code)
        return _reply(command, answer, remark[:256])

    def _answer_fields(self, remote_id: str) -> dict[str, Any]:
        return {
            "group": self.config.group,
            "remote_id": remote_id,
            "local_id": self.config.self_id,
            "term": self.member_state.term,
            "leader_id": self.member_state.leader_id or "",
        }

    def _handle_heartbeat(self, request: HeartBeatRequest) -> HeartBeatResponse | Awaitable[HeartBeatResponse]:
        return self.elector.answer_heartbeat(request) or self.elector.handle_heartbeat(request)

    def _handle_push(self, request: PushEntryRequest) -> _Later | Awaitable[PushEntryResponse]:
        if self.member_state.follows(request.term, request.leader_id):
            return partial(self.pusher.handle_push, request)
        return self._meet_and_handle_push(request)

    async def _meet_and_handle_push(self, request: PushEntryRequest) -> PushEntryResponse:
        if self.member_state.is_settling:
            await self.member_state.settled()
        code = await self.elector.meet_leader(request.term, request.leader_id)
        if code is not DLedgerCode.SUCCESS:
            return PushEntryResponse(**self._answer_fields(request.local_id), code=code)
        answer: asyncio.Future[PushEntryResponse] = asyncio.get_running_loop().create_future()
        self.pusher.handle_push(request, partial(settle, answer))
        return await answer

    async def _handle_install_snapshot(self, request: InstallSnapshotRequest) -> InstallSnapshotResponse:
        if self.member_state.is_settling:
            await self.member_state.settled()
        code, offset = await self.elector.meet_leader(request.term, request.leader_id), -1
        if code is DLedgerCode.SUCCESS:
            code, offset = await self.snapshot_receiver.handle(request)
        return InstallSnapshotResponse(**self._answer_fields(request.local_id), code=code, offset=offset)

    async def _handle_transfer(self, request: LeadershipTransferRequest) -> LeadershipTransferResponse:
        await self.transfer.handle(request)
        return LeadershipTransferResponse(**self._answer_fields(request.local_id), code=DLedgerCode.SUCCESS)

    async def _handle_change_members(self, request: ChangeMembersRequest) -> ChangeMembersResponse:
        index = await self.members.change(request.member, request.address or None)
        return ChangeMembersResponse(**self._answer_fields(request.local_id), code=DLedgerCode.SUCCESS, index=index)

    async def _handle_members(self, request: MembersRequest) -> MembersResponse:
        members = self.member_state.members
        return MembersResponse(
            **self._answer_fields(request.local_id),
            code=DLedgerCode.SUCCESS,
            index=members.index,
            peers=encode_members(members.peers),
        )

    async def _handle_metadata(self, request: MetadataRequest) -> MetadataResponse:
        return MetadataResponse(
            **self._answer_fields(request.local_id),
            code=DLedgerCode.SUCCESS,
            role=self.member_state.role.name,
            ledger_begin_index=self.store.ledger_begin_index,
            ledger_end_index=self.store.ledger_end_index,
            committed_index=self.store.committed_index,
        )

    async def _handle_get(self, request: GetEntriesRequest) -> GetEntriesResponse:
        committed_index = await self.read_barrier(ReadMode.READ_INDEX)
        first_index = request.begin_index
        if not self.store.ledger_begin_index <= first_index <= committed_index:
            raise DLedgerError(DLedgerCode.INDEX_OUT_OF_RANGE, f"{first_index} is not committed here")
        entries = self.store.read_entries(
            first_index,
            max_entries=min(MAX_GET_ENTRIES, committed_index - first_index + 1),
            max_bytes=MAX_GET_BYTES,
        )
        return GetEntriesResponse(
            **self._answer_fields(request.local_id),
            code=DLedgerCode.SUCCESS,
            entries=b"".join(entry.raw for entry in entries),
        )

    async def _handle_append(self, request: AppendEntryRequest) -> AppendEntryResponse:
        result = await self.append(len(request.body), lambda position: request.body)
        return AppendEntryResponse(
            **self._answer_fields(request.local_id), code=DLedgerCode.SUCCESS, index=result.index, pos=result.pos
        )


def _takes_json(command: Command) -> bool:
    return command.code >= _FIRST_JSON_CODE


def _reply(command: Command, answer: Response, remark: str | None = None) -> Command:
    body = to_json(answer) if _takes_json(command) else answer.to_body()
    return command.reply(ResponseCode.SUCCESS, remark=remark, body=body)
