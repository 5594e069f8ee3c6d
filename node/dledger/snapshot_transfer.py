"""Sends a snapshot to a follower whose log ends before the leader's begins (INSTALL_SNAPSHOT, R).

The leader sends it in pieces, each one after the previous one is answered. A request names the snapshot (last entry,
size, SHA-256) and the offset of its piece; an answer names the byte from which the follower wants more. So a repeated
piece does no harm, and an interrupted transfer continues where it stopped, even after a restart of either side. Every
piece has a CRC, the whole a SHA-256, and each file in it another CRC; what does not match is discarded.

The follower accepts pieces only from the leader that it follows. It keeps one unfinished snapshot, from the last leader
that sent one, beside the others:

    <data_dir>/dledger/snapshot/incoming-<index>-<term>-<size>-<SHA-256>

This does not change its state. The state follows only when the leader makes the follower's log begin where its own
does, for which the follower must have a snapshot that covers what came before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import zlib
from collections.abc import Callable

from node.dledger.config import DLedgerConfig
from node.dledger.member_state import MemberState
from node.dledger.messages import InstallSnapshotRequest
from node.dledger.peers import PeerClient, PeerError
from node.dledger.quota import Quota
from node.dledger.rpc import DLedgerCode
from node.dledger.snapshot import MAX_SNAPSHOT_BYTES, DamagedSnapshot
from node.dledger.snapshot_manager import SnapshotManager
from node.remoting.complaints import Complaints
from node.runtime import Disk

__all__ = ["MAX_PIECE_BYTES", "SnapshotReceiver", "SnapshotSender"]

logger = logging.getLogger("node.dledger.snapshot")

MAX_PIECE_BYTES = 256 * 1024
"""Data in one request: as much as a push carries."""

MAX_WAITING = 4
"""Requests that may wait for the previous one: the leader sends one at a time, and again after a timeout."""

MAX_STEPS_BACK = 3
"""How often a follower may ask for earlier bytes again before the leader pauses: something damages what arrives."""

_PREFIX = "incoming-"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class SnapshotSender:
    """The leader's side. `on_higher_term(term)` is called if the follower is in a later term."""

    def __init__(
        self,
        config: DLedgerConfig,
        state: MemberState,
        peers: PeerClient,
        snapshots: SnapshotManager,
        *,
        on_higher_term: Callable[[int], None],
    ) -> None:
        self._config = config
        self._state = state
        self._peers = peers
        self._snapshots = snapshots
        self._on_higher_term = on_higher_term

    async def send(self, peer_id: str, term: int, index: int, quota: Quota) -> bool:
        """Make sure that a follower has a snapshot that reaches at least `index`. Returns False if this member no
        longer leads `term`. Raises PeerError, OSError."""
        if not self._snapshots.is_used or index < 0:
            return True
        snapshot, data = await self._snapshots.for_install(index)
        digest = hashlib.sha256(data).hexdigest()
        offset, steps_back = 0, 0
        piece = b""  # the first request only asks how much the follower has
        while self._leads(term):
            answer = await self._peers.install(
                peer_id,
                InstallSnapshotRequest(
                    group=self._config.group,
                    remote_id=peer_id,
                    local_id=self._config.self_id,
                    term=term,
                    leader_id=self._config.self_id,
                    last_included_index=snapshot.index,
                    last_included_term=snapshot.term,
                    size_bytes=len(data),
                    digest=digest,
                    offset=offset,
                    data_crc=zlib.crc32(piece),
                    data=piece,
                ),
            )
            if answer.term > term:
                self._on_higher_term(answer.term)
                return False
            if answer.code is not DLedgerCode.SUCCESS:
                raise PeerError(f"INSTALL_SNAPSHOT at byte {offset} was answered with {answer.code.name}")
            if answer.offset >= len(data):
                logger.info("%s has the snapshot of entry %d", peer_id, snapshot.index)
                return self._leads(term)
            steps_back += answer.offset < offset
            if steps_back > MAX_STEPS_BACK:
                raise PeerError("the snapshot does not arrive as it was sent")
            offset = max(answer.offset, 0)
            piece = data[offset : offset + MAX_PIECE_BYTES]
            quota.use(len(piece))
            wait_ns = quota.wait_ns()
            if wait_ns:
                await asyncio.sleep(wait_ns / 1e9)
        return False

    def _leads(self, term: int) -> bool:
        return self._state.is_leader and self._state.term == term


class SnapshotReceiver:
    """The follower's side."""

    def __init__(self, config: DLedgerConfig, disk: Disk, state: MemberState, snapshots: SnapshotManager) -> None:
        self._config = config
        self._disk = disk
        self._state = state
        self._snapshots = snapshots
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._complaints = Complaints(logger, lambda: asyncio.get_running_loop().time())

    async def handle(self, request: InstallSnapshotRequest) -> tuple[DLedgerCode, int]:
        """Handle a request of the leader that this member follows: returns the answer's code, and the byte from which
        more is wanted. Raises OSError."""
        problem = self._problem(request)
        if problem:
            self._complaints.warn("request", f"a snapshot of {request.leader_id}: {problem}")
            return DLedgerCode.UNEXPECTED_ARGUMENT, -1
        if self._waiting >= MAX_WAITING:
            return DLedgerCode.FALL_BEHIND_TOO_MUCH, -1
        self._waiting += 1
        try:
            async with self._lock:
                return await self._take(request)
        finally:
            self._waiting -= 1

    def _problem(self, request: InstallSnapshotRequest) -> str:
        """What is wrong with a request; "" if nothing is."""
        if not self._snapshots.is_used:
            return "nothing is made of this log"
        if request.last_included_index < 0 or not 0 <= request.last_included_term <= request.term:
            return "it ends with no entry"
        if not 0 < request.size_bytes <= MAX_SNAPSHOT_BYTES or not _DIGEST.fullmatch(request.digest):
            return f"one of {request.size_bytes} bytes"
        if not 0 <= request.offset <= request.size_bytes - len(request.data) or len(request.data) > MAX_PIECE_BYTES:
            return f"{len(request.data)} bytes at {request.offset} of {request.size_bytes}"
        if zlib.crc32(request.data) != request.data_crc:
            return f"the piece at {request.offset} is damaged"
        return ""

    async def _take(self, request: InstallSnapshotRequest) -> tuple[DLedgerCode, int]:
        if not self.is_current(request):
            return DLedgerCode.EXPIRED_TERM, -1
        if not self._snapshots.is_needed(request.last_included_index):
            await self._remove_incoming("")
            return DLedgerCode.SUCCESS, request.size_bytes  # a snapshot here reaches as far already
        name = (
            f"{_PREFIX}{request.last_included_index}-{request.last_included_term}-{request.size_bytes}-{request.digest}"
        )
        await self._remove_incoming(name)
        path = f"{self._snapshots.files.directory}/{name}"
        file = await self._disk.create(path)
        try:
            have = file.size_bytes()
            if have > request.size_bytes:
                await file.truncate(0)
                have = 0
            if request.data and request.offset == have:
                await file.write(have, request.data)
                have += len(request.data)
            if have < request.size_bytes:
                return DLedgerCode.SUCCESS, have
        finally:
            file.close()
        return await self._finish(request, path)

    async def _finish(self, request: InstallSnapshotRequest, path: str) -> tuple[DLedgerCode, int]:
        """All bytes have arrived: keep the snapshot if it is intact, else discard them."""
        data = self._disk.read_file(path)
        try:
            if not self.is_whole(request, data):
                raise DamagedSnapshot("it is not what the leader has")
            if not self.is_current(request):
                return DLedgerCode.EXPIRED_TERM, -1
            await self._snapshots.install(data, request.last_included_index, request.last_included_term)
        except DamagedSnapshot as error:
            logger.error("a snapshot of %s cannot be used: %s", request.leader_id, error)
            await self._disk.remove(path)
            return DLedgerCode.SUCCESS, 0
        await self._disk.remove(path)
        return DLedgerCode.SUCCESS, request.size_bytes

    def is_whole(self, request: InstallSnapshotRequest, data: bytes) -> bool:
        """Whether these are the bytes that the leader has."""
        return hashlib.sha256(data).hexdigest() == request.digest

    def is_current(self, request: InstallSnapshotRequest) -> bool:
        """Whether the sender is the leader that this member follows."""
        state = self._state
        return state.is_follower and state.term == request.term and state.leader_id == request.leader_id

    async def _remove_incoming(self, name: str) -> None:
        """Remove unfinished snapshots other than `name`: they will not be finished any more."""
        directory = self._snapshots.files.directory
        for other in self._disk.list(directory):
            if other.startswith(_PREFIX) and other != name:
                await self._disk.remove(f"{directory}/{other}")
