"""Replication of one member, both sides (DLedgerEntryPusher, S0, S2): dispatchers, quorum checker and entry handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from node.dledger.config import DLedgerConfig
from node.dledger.dispatcher import EntryDispatcher
from node.dledger.entry import CONFIG_MAGIC, NOOP_MAGIC, Entry
from node.dledger.handler import EntryHandler
from node.dledger.member_state import MemberState
from node.dledger.membership import encode_members
from node.dledger.messages import PushEntryRequest, PushEntryResponse
from node.dledger.peers import PeerClient
from node.dledger.quorum import AppendCallback, AppendResult, QuorumAckChecker
from node.dledger.rpc import DLedgerCode, DLedgerError, Role
from node.dledger.snapshot_manager import SnapshotManager
from node.dledger.snapshot_transfer import SnapshotSender
from node.dledger.store import DLedgerStore
from node.runtime import Runtime

__all__ = ["DLedgerEntryPusher"]


class DLedgerEntryPusher:
    """Pushes the log to the peers while this member leads, takes pushes while it follows.

    The `make_...` methods are meant to be overridden: a test can inject a part with a known bug.
    """

    def __init__(
        self,
        config: DLedgerConfig,
        runtime: Runtime,
        state: MemberState,
        store: DLedgerStore,
        peers: PeerClient,
        *,
        snapshots: SnapshotManager | None = None,
        on_higher_term: Callable[[int], None],
    ) -> None:
        self._config = config
        self._snapshots = snapshots
        self._runtime = runtime
        self._state = state
        self._store = store
        self._peers = peers
        self._on_higher_term = on_higher_term
        self.snapshot_sender = self.make_snapshot_sender()
        self.checker = self.make_checker()
        self.handler = self.make_handler()
        self.dispatchers = {peer: self.make_dispatcher(peer) for peer in state.peer_ids}
        self._is_running = False
        self._ending: set[asyncio.Task[None]] = set()
        state.members.add_listener(self._members_changed)
        self._lead_term = -1
        self.transferee: str | None = None
        """The member that leadership is being transferred to: nothing more is appended meanwhile."""
        state.add_role_listener(self._role_changed)
        store.add_progress_listener(self._progressed)
        self._wakes = False
        store.add_commit_listener(self._committed)

    def make_checker(self) -> QuorumAckChecker:
        return QuorumAckChecker(self._config, self._state, self._store)

    def make_handler(self) -> EntryHandler:
        return EntryHandler(self._config, self._state, self._store, self._snapshots)

    def make_snapshot_sender(self) -> SnapshotSender | None:
        if self._snapshots is None:
            return None
        return SnapshotSender(
            self._config, self._state, self._peers, self._snapshots, on_higher_term=self._on_higher_term
        )

    def make_dispatcher(self, peer_id: str) -> EntryDispatcher:
        return EntryDispatcher(
            peer_id,
            self._config,
            self._runtime.clock,
            self._state,
            self._store,
            self._peers,
            self.checker,
            snapshots=self.snapshot_sender,
            on_higher_term=self._on_higher_term,
        )

    def start(self) -> None:
        """Push from now on, whenever this member leads."""
        self._is_running = True
        for dispatcher in self.dispatchers.values():
            dispatcher.start()

    async def stop(self) -> None:
        """Stop; appends that wait for a quorum are in doubt (TERM_CHANGED)."""
        self._is_running = False
        self.checker.end_term()
        for dispatcher in self.dispatchers.values():
            await dispatcher.stop()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.handler.stop()

    def _members_changed(self) -> None:
        """The group has changed: start pushing to new members, and stop pushing to former ones."""
        peers = self._state.peer_ids
        for peer in [each for each in self.dispatchers if each not in peers]:
            dispatcher = self.dispatchers.pop(peer)
            if self._is_running:
                task = asyncio.get_running_loop().create_task(dispatcher.stop())
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        for peer in peers:
            if peer not in self.dispatchers:
                self.dispatchers[peer] = self.make_dispatcher(peer)
                if self._is_running:
                    self.dispatchers[peer].start()
        self.checker.members_changed()

    def elected(self, term: int) -> None:
        """This member has just become leader of `term`: start to count acknowledgements, and append the term's no-op,
        which commits all earlier entries with it. Raises DLedgerError DISK_ERROR or DISK_FULL."""
        self.check_disk()
        self._lead_term = term
        self.checker.begin_term(term)
        self.append_noop()

    def append_noop(self) -> Entry:
        """Append an entry without a body in the current term. Nobody waits for it."""
        return self._appended(self._store.append_as_leader(self._lead_term, 0, lambda _: b"", magic=NOOP_MAGIC))

    def append(self, body_size_bytes: int, encode_body: Callable[[int], bytes]) -> asyncio.Future[AppendResult]:
        """Append an entry in the current term; the future is done when it is committed.

        Synchronous: no other entry can be appended between the call of `encode_body`, which gets the position, and the
        append. Raises DLedgerError NOT_LEADER, LEADER_TRANSFERRING, LEADER_PENDING_FULL, DISK_ERROR, DISK_FULL,
        UNEXPECTED_ARGUMENT; nothing was appended then.
        """
        self.check_room()
        self.check_disk()
        entry = self._store.append_as_leader(self._lead_term, body_size_bytes, encode_body)
        return self.checker.register(self._appended(entry))

    def append_batch(
        self, sizes: Sequence[int], encode: Callable[[Sequence[int]], Sequence[bytes]], on_done: AppendCallback
    ) -> tuple[int, int, int]:
        """As `append` for consecutive entries with bodies of these sizes, all or none; `encode` gets their positions,
        `on_done` the outcome of the last. Returns the first index, the last index and the term. Raises as `append`."""
        self.check_room(len(sizes))
        self.check_disk()
        self._wake_dispatchers()  # before the writer: followers get the entries while this disk writes them
        batches = self._store.append_batch_as_leader(self._lead_term, sizes, encode)
        last = AppendResult(batches[-1].last_index, batches[-1].last_pos, self._lead_term)
        self.checker.register_batch(last, len(sizes), on_done)
        self._has_appended()
        return batches[0].first_index, last.index, self._lead_term

    def append_members(self, peers: Mapping[str, str]) -> asyncio.Future[AppendResult]:
        """Append an entry that makes `peers` the group, which takes effect at once. Errors as for `append`."""
        self.check_room()
        self.check_disk()
        body = encode_members(peers)
        entry = self._store.append_as_leader(self._lead_term, len(body), lambda _: body, magic=CONFIG_MAGIC)
        return self.checker.register(self._appended(entry))

    def append_noop_and_wait(self) -> asyncio.Future[AppendResult]:
        """As `append`, for an entry without a body."""
        self.check_room()
        self.check_disk()
        return self.checker.register(self.append_noop())

    def check_room(self, count: int = 1) -> None:
        """Raises DLedgerError if `count` more appends are not possible: NOT_LEADER; LEADER_TRANSFERRING during a
        transfer of leadership; LEADER_PENDING_FULL if too much waits for the quorum or the disk."""
        if not self._state.is_leader or self._state.term != self._lead_term:
            raise DLedgerError(
                DLedgerCode.NOT_LEADER, f"{self._state.self_id} does not lead", leader_id=self._state.leader_id
            )
        if self.transferee is not None:
            raise DLedgerError(
                DLedgerCode.LEADER_TRANSFERRING, f"{self.transferee} takes over", leader_id=self.transferee
            )
        if self.checker.pending_count + count > self._config.max_pending_appends:
            raise DLedgerError(
                DLedgerCode.LEADER_PENDING_FULL, f"{self.checker.pending_count} appends wait for a quorum"
            )
        if self._store.writer.pending_bytes > self._config.max_pending_bytes:
            raise DLedgerError(
                DLedgerCode.LEADER_PENDING_FULL, f"{self._store.writer.pending_bytes} bytes wait for the disk"
            )

    def check_disk(self) -> None:
        """Raises DLedgerError DISK_ERROR or DISK_FULL while the disk refuses the log."""
        code = self._store.writer.failure_code
        if code is not None:
            raise DLedgerError(code, str(self._store.writer.failure))

    def handle_push(self, request: PushEntryRequest, on_done: Callable[[PushEntryResponse], object]) -> None:
        """Handle a push of the leader that this member follows; `on_done` gets the answer."""
        self.handler.handle_push(request, on_done)

    def _appended(self, entry: Entry) -> Entry:
        self._has_appended()
        return entry

    def _has_appended(self) -> None:
        self._wake_dispatchers()
        if not self.dispatchers:
            self.checker.wakeup()

    def _role_changed(self, term: int, role: Role) -> None:
        self.transferee = None
        if role is not Role.LEADER:
            self._lead_term = -1
            self.checker.end_term()
        self.handler.clear(DLedgerCode.NOT_FOLLOWER if role is Role.LEADER else DLedgerCode.EXPIRED_TERM)
        self._wake_dispatchers()

    def _progressed(self) -> None:
        if self._state.is_leader:
            self.checker.count()
        self.handler.progressed()

    def _committed(self) -> None:
        if not self._state.is_leader:
            return
        for dispatcher in self.dispatchers.values():
            dispatcher.committed()

    def _wake_dispatchers(self) -> None:
        """Wake them soon, once for all appends of this turn of the event loop, which then go out together."""
        if not self._wakes:
            self._wakes = True
            asyncio.get_running_loop().call_soon(self._wake_them)

    def _wake_them(self) -> None:
        self._wakes = False
        for dispatcher in self.dispatchers.values():
            dispatcher.wake()
