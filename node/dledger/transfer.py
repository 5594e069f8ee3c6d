"""Transfers leadership on request, and on its own to preferred members (R: LeadershipTransfer, preferredLeaderIds).

    leader      takes no more appends; waits until all its entries are committed and the successor has them too; steps
                down; notifies the successor
    successor   waits until its log reaches that far; stands for election at once, in the next term
    others      vote for it although they have heard their leader just now: a leader that has given up binds nobody

The leader has stopped leading, and thus serving lease reads, before anybody may vote for another, so the promise of the
lease is kept. If a message is lost on the way, the members elect a leader after a lease, as usual.
DLedger's leader keeps its role until the successor asks for votes, and its followers may turn that candidate down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from node.dledger.config import DLedgerConfig
from node.dledger.elector import LeaderElector
from node.dledger.leadership import Leadership
from node.dledger.member_state import MemberState
from node.dledger.messages import LeadershipTransferRequest
from node.dledger.peers import PeerClient, PeerError
from node.dledger.pusher import DLedgerEntryPusher
from node.dledger.rpc import DLedgerCode, DLedgerError
from node.dledger.store import DLedgerStore
from node.runtime import Runtime

__all__ = ["LeadershipTransfer"]

logger = logging.getLogger("node.dledger.elector")

POLL_S = 0.002
"""Interval of polling for what a transfer waits for. Transfers are rare and short."""

MAX_PREFERRED_PAUSE_S = 60.0
"""The longest pause between attempts to transfer leadership to a preferred member that fails to take it; the first one
is the configured interval, each further one twice as long."""


class LeadershipTransfer:
    """Both sides of a transfer, for one member."""

    def __init__(
        self,
        config: DLedgerConfig,
        runtime: Runtime,
        state: MemberState,
        store: DLedgerStore,
        peers: PeerClient,
        pusher: DLedgerEntryPusher,
        elector: LeaderElector,
    ) -> None:
        self._config = config
        self._timeout_s = config.timing.transfer_timeout_ms / 1000
        self._state = state
        self._store = store
        self._peers = peers
        self._pusher = pusher
        self._elector = elector
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to transfer leadership to preferred members, if any are configured."""
        if self._config.preferred_leaders:
            self._task = asyncio.get_running_loop().create_task(self._prefer(), name="dledger-preferred")

    async def stop(self) -> None:
        """Stop doing so."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def handle(self, request: LeadershipTransferRequest) -> None:
        """Handle a request to give up leadership (the leader) or to take it (the successor). Raises DLedgerError."""
        if request.transfer_id == self._state.self_id:
            if request.term not in (-1, self._state.term):
                raise DLedgerError(DLedgerCode.EXPIRED_TERM, f"this is term {self._state.term}")
            await self.give(request.transferee_id)
        elif request.transferee_id == self._state.self_id:
            await self._take(request)
        else:
            raise DLedgerError(
                DLedgerCode.UNEXPECTED_ARGUMENT,
                f"{self._state.self_id} is neither {request.transfer_id} nor {request.transferee_id}",
            )

    # The leader's side

    async def give(self, member: str) -> None:
        """Transfer this member's leadership to `member`; returns once `member` leads.

        Raises DLedgerError NOT_LEADER, UNKNOWN_MEMBER, UNEXPECTED_ARGUMENT (this member itself), LEADER_TRANSFERRING
        (a transfer is under way), NETWORK_ERROR (`member` not heard within a lease), FALL_BEHIND_TOO_MUCH, TIMEOUT
        (`member` has not caught up in time): this member has not stepped down then. TAKE_LEADERSHIP_FAILED: it has, and
        nobody leads for the moment.
        """
        leadership = self._check(member)
        term, pusher = leadership.term, self._pusher
        pusher.transferee = member
        try:
            index = self._store.ledger_end_index
            is_ready = await self._until(
                lambda: (
                    not self._leads(term)
                    or (self._store.committed_index >= index and pusher.checker.watermark(term, member) >= index)
                )
            )
            if not self._leads(term):
                raise DLedgerError(DLedgerCode.NOT_LEADER, f"{self._state.self_id} leads no more")
            if not is_ready:
                raise DLedgerError(DLedgerCode.TIMEOUT, f"{member} has not caught up in time")
        finally:
            pusher.transferee = None
        logger.info("%s gives the lead of term %d to %s", self._state.self_id, term, member)
        self._elector.give_up(term, member)
        request = LeadershipTransferRequest(
            group=self._config.group,
            remote_id=member,
            local_id=self._config.self_id,
            term=term,
            leader_id=self._config.self_id,
            transfer_id=self._config.self_id,
            transferee_id=member,
            take_index=index,
        )
        try:
            answer = await self._peers.transfer(member, request)
        except PeerError as error:
            raise DLedgerError(DLedgerCode.TAKE_LEADERSHIP_FAILED, str(error)) from error
        if answer.code is not DLedgerCode.SUCCESS:
            raise DLedgerError(DLedgerCode.TAKE_LEADERSHIP_FAILED, f"{member} answered {answer.code.name}")

    def _check(self, member: str) -> Leadership:
        leadership, self_id = self._elector.leadership, self._state.self_id
        if leadership is None or not self._state.is_leader:
            raise DLedgerError(DLedgerCode.NOT_LEADER, f"{self_id} does not lead", leader_id=self._state.leader_id)
        if not self._state.is_member(member):
            raise DLedgerError(DLedgerCode.UNKNOWN_MEMBER, f"{member} is no member of {self._config.group}")
        if member == self_id:
            raise DLedgerError(DLedgerCode.UNEXPECTED_ARGUMENT, f"{member} leads already")
        if self._pusher.transferee is not None:
            raise DLedgerError(DLedgerCode.LEADER_TRANSFERRING, f"{self._pusher.transferee} takes over")
        if not leadership.hears(member):
            raise DLedgerError(DLedgerCode.NETWORK_ERROR, f"{member} has not been heard of for a lease")
        mark = self._pusher.checker.watermark(leadership.term, member)
        lag = self._store.ledger_end_index - mark
        if mark < 0 or lag > self._config.max_transfer_lag:
            raise DLedgerError(DLedgerCode.FALL_BEHIND_TOO_MUCH, f"{member} lacks {lag} entries")
        return leadership

    def _leads(self, term: int) -> bool:
        return self._state.is_leader and self._state.term == term

    # The successor's side

    async def _take(self, request: LeadershipTransferRequest) -> None:
        """Raises DLedgerError NOT_FOLLOWER or TAKE_LEADERSHIP_FAILED."""
        state, term = self._state, request.term

        def follows() -> bool:
            return state.is_follower and (state.term, state.leader_id) == (term, request.transfer_id)

        if not follows():
            raise DLedgerError(DLedgerCode.NOT_FOLLOWER, f"{state.self_id} does not follow {request.transfer_id}")
        await self._until(lambda: not follows() or self._store.acked_index >= request.take_index)
        if not follows() or self._store.acked_index < request.take_index:
            raise DLedgerError(DLedgerCode.TAKE_LEADERSHIP_FAILED, f"the log ends at {self._store.acked_index}")
        self._elector.take_over(term)
        await self._until(lambda: state.term > term and not state.is_candidate)
        if not (state.is_leader and state.term > term):
            raise DLedgerError(DLedgerCode.TAKE_LEADERSHIP_FAILED, "the others have elected nobody in time")

    # Preferred leaders

    async def _prefer(self) -> None:
        interval_s = self._config.timing.preferred_check_interval_ms / 1000
        pause_s = interval_s
        while True:
            await asyncio.sleep(pause_s)
            member = self._better_leader()
            if member is None:
                pause_s = interval_s
                continue
            try:
                await self.give(member)
            except DLedgerError as error:
                logger.info("the lead was not given to %s, which is preferred: %s", member, error)
                if error.code is not DLedgerCode.FALL_BEHIND_TOO_MUCH:
                    pause_s = min(2 * pause_s, MAX_PREFERRED_PAUSE_S)
            except Exception:  # if this task ended, no preferred member would be given leadership any more
                logger.exception("giving the lead to %s met an error of its own", member)
                pause_s = min(2 * pause_s, MAX_PREFERRED_PAUSE_S)

    def _better_leader(self) -> str | None:
        """The first preferred member that answers, if this member leads and is not preferred to that one."""
        leadership, self_id = self._elector.leadership, self._state.self_id
        if leadership is None:
            return None
        for member in self._config.preferred_leaders:
            if member == self_id:
                return None
            if leadership.hears(member):
                return member
        return None

    async def _until(self, is_so: Callable[[], bool]) -> bool:
        """Wait until a condition holds, for at most the timeout of a transfer; returns whether it holds."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        while not is_so() and loop.time() < deadline_s:  # noqa: ASYNC110  # three kinds of events, and it is rare
            await asyncio.sleep(POLL_S)
        return is_so()
