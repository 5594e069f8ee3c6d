"""A member's state in its group: role, term, vote, leader. Term and vote outlive the process.

`term` and the vote change in memory only once they are durable, so no message can reveal them earlier.
While they are being written the member is *settling*: code that judges a request by the term waits for
`settled` first, so that a follower does not take entries of a term that it is about to leave.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from node.dledger.config import DLedgerConfig
from node.dledger.document import DamagedDocument, decode_document, encode_document
from node.dledger.files import LedgerCorrupt
from node.dledger.membership import Membership
from node.dledger.rpc import Role
from node.runtime import Runtime

__all__ = ["FIRST_TERM", "MemberState", "RoleListener"]

role_logger = logging.getLogger("node.dledger.role")

FIRST_TERM = 0
"""The term of a member that has never taken part in an election; leaders have greater ones."""

RoleListener = Callable[[int, Role], None]


class MemberState:
    """One member's state. Role changes are synchronous, term and vote are awaited."""

    def __init__(self, config: DLedgerConfig, runtime: Runtime) -> None:
        self._config = config
        self._disk = runtime.disk
        self.members = Membership(config.self_id, config.peers, joins=config.joins)
        """The members of the group according to the log."""
        self._path = f"{config.ledger_dir}/member_state"
        self._lock = asyncio.Lock()
        self._role = Role.CANDIDATE
        # Plain attributes, as they are read many times for each entry; only this class changes them.
        self.self_id = config.self_id
        self.term = FIRST_TERM
        """The current term; durable."""
        self.leader_id: str | None = None
        """The leader of the current term, as far as known."""
        self.is_leader = False
        self.is_follower = False
        self._voted_for: str | None = None
        self._listeners: list[RoleListener] = []
        self.known_max_term = FIRST_TERM
        """The greatest term heard of. Need not be durable: it only saves elections that could not be won."""
        self.is_new = True
        """Whether there was no state on the disk when this member started."""

    @property
    def group(self) -> str:
        return self._config.group

    @property
    def member_ids(self) -> tuple[str, ...]:
        return self.members.ids

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """All members but this one."""
        return self.members.others

    @property
    def role(self) -> Role:
        return self._role

    @property
    def voted_for(self) -> str | None:
        """Who got this member's vote in the current term; durable."""
        return self._voted_for

    @property
    def is_candidate(self) -> bool:
        return self._role is Role.CANDIDATE

    def follows(self, term: int, leader_id: str) -> bool:
        """Whether this member follows that leader of that term, and no term or vote is being written."""
        return self.leader_id == leader_id and self.term == term and self.is_follower and not self._lock.locked()

    def is_member(self, member_id: str) -> bool:
        """Whether messages of `member_id` count. If members may change, even an unknown one's do: it may have joined
        while this member was down."""
        return self._config.members_may_change or self.members.knows(member_id)

    # Term and vote

    def load(self) -> None:
        """Read term and vote. Raises LedgerCorrupt when they cannot be trusted: a vote given twice elects two
        leaders. Raises OSError."""
        self._disk.make_dirs(self._config.ledger_dir)
        if not self._disk.exists(self._path):
            directory = self._config.ledger_dir
            if self._disk.exists(f"{directory}/checkpoint") or self._disk.list(f"{directory}/data"):
                raise LedgerCorrupt(self._path, 0, "it is missing, although this member has a log: its vote is lost")
            return
        try:
            content = decode_document(self._disk.read_file(self._path))
            term, voted_for = content.get("term"), content.get("voted_for")
            if term.__class__ is not int or not (voted_for is None or isinstance(voted_for, str)):
                raise DamagedDocument("term or vote is missing")
        except DamagedDocument as error:
            raise LedgerCorrupt(self._path, 0, str(error)) from error
        self.term = self.known_max_term = term
        self._voted_for = voted_for
        self.is_new = False

    async def confirm(self) -> None:
        """Make durable what `load` has found. The previous process may have replaced the file and been killed before
        the directory was synced, and a repeated vote is not written again. Raises OSError."""
        if not self.is_new:
            await self._disk.sync_dir(self._config.ledger_dir)

    def check_against_log(self, ledger_end_term: int) -> None:
        """Raises LedgerCorrupt when the log has entries of a term that this member has never heard of: then its
        term and vote were lost."""
        if ledger_end_term > self.term:
            raise LedgerCorrupt(
                self._path, 0, f"it says term {self.term}, but the log has entries of term {ledger_end_term}"
            )

    @property
    def is_settling(self) -> bool:
        """Whether a term or vote is being written."""
        return self._lock.locked()

    async def settled(self) -> None:
        """Wait until no term or vote is being written."""
        async with self._lock:
            pass

    @property
    def lock(self) -> asyncio.Lock:
        """Held while the term or vote is judged and changed."""
        return self._lock

    async def persist(self, term: int, voted_for: str | None) -> None:
        """Write term and vote durably; memory is not changed. Raises OSError."""
        await self._disk.write_file_atomic(self._path, encode_document({"term": term, "voted_for": voted_for}))

    async def change_term(self, term: int, *, voted_for: str | None = None) -> None:
        """Enter a newer term, forgetting the leader, and give this member's vote in it to `voted_for`, unless None.

        A leader must step down first. The caller holds `lock`. Raises OSError; nothing has changed then.
        """
        if term <= self.term:
            return
        if self._role is Role.LEADER:
            raise RuntimeError(f"the leader of term {self.term} must step down before it enters term {term}")
        await self.persist(term, voted_for)
        self.term, self._voted_for = term, voted_for
        self._log_vote()
        self.leader_id = None
        self.is_new = False
        self.known_max_term = max(self.known_max_term, term)

    async def record_vote(self, candidate_id: str) -> None:
        """Give this member's vote of the current term to `candidate_id`. The caller holds `lock` and has made
        sure that no other candidate has it. Raises OSError; nothing has changed then.
        """
        if self._voted_for == candidate_id:
            return
        await self.persist(self.term, candidate_id)
        self._voted_for = candidate_id
        self._log_vote()
        self.is_new = False

    def _log_vote(self) -> None:
        if self._voted_for is not None:
            role_logger.info("vote self=%s term=%d for=%s", self.self_id, self.term, self._voted_for)

    # Role

    def become_leader(self, term: int) -> None:
        """Lead the current term, `term`."""
        self._expect(term)
        self._change(Role.LEADER, self._config.self_id)

    def become_follower(self, term: int, leader_id: str) -> None:
        """Follow the leader of the current term, `term`."""
        self._expect(term)
        self._change(Role.FOLLOWER, leader_id)

    def become_candidate(self) -> None:
        """Become a candidate, who has no leader."""
        self._change(Role.CANDIDATE, None)

    def add_role_listener(self, listener: RoleListener) -> None:
        """Call `listener(term, role)` synchronously after each change of role, or of the term in a role."""
        self._listeners.append(listener)

    def announce(self) -> None:
        """Log the role and call the listeners. To be called once for each change, after it is complete."""
        role_logger.info("role_change self=%s role=%s term=%d", self.self_id, self._role.name, self.term)
        for listener in self._listeners:
            try:
                listener(self.term, self._role)
            except Exception:
                role_logger.exception("a role listener failed")

    def _expect(self, term: int) -> None:
        if term != self.term:
            raise RuntimeError(f"the current term is {self.term}, not {term}")

    def _change(self, role: Role, leader_id: str | None) -> None:
        self._role = role
        self.is_leader = role is Role.LEADER
        self.is_follower = role is Role.FOLLOWER
        self.leader_id = leader_id
