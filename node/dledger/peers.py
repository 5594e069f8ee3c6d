"""Requests to other members, over the remoting client: one method for each kind.

Votes are awaited. Heartbeats and pushes, several of which each operation costs, take a callback instead, which is
called in the turn of the event loop in which the answer arrives: no task, no future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from node.dledger.config import DLedgerConfig
from node.dledger.membership import Membership
from node.dledger.messages import (
    HeartBeatRequest,
    HeartBeatResponse,
    InstallSnapshotRequest,
    InstallSnapshotResponse,
    LeadershipTransferRequest,
    LeadershipTransferResponse,
    MalformedMessage,
    PushEntryRequest,
    PushEntryResponse,
    Request,
    Response,
    VoteRequest,
    VoteResponse,
)
from node.dledger.rpc import DLedgerRequestCode, PushType
from node.remoting import ClientLimits, Command, RemotingClient, RemotingError, ResponseCode
from node.remoting.outstanding import Outcome

__all__ = ["LEASE_FIELD", "AnswerCallback", "PeerClient", "PeerError", "RemotingPeerClient", "settle"]

ResponseT = TypeVar("ResponseT", bound=Response)

LEASE_FIELD = "leaseMs"
"""Header field of COMPARE, which each follower gets in each term: the lease for which the leader expects its followers
to stay with it. Members of earlier versions neither send nor read it."""

IDLE_TIMEOUT_S = 3600.0
"""Members talk all the time; one that is silent for an hour is not worth a connection."""


class PeerError(Exception):
    """A peer did not give a usable answer: not reached, not in time, or not understood."""


AnswerCallback = Callable[[ResponseT | PeerError], object]
"""Called once, with the answer or the reason why there is none. Must not raise."""


class PeerClient(Protocol):
    """How a member reaches its peers. `vote`, `transfer` and `install` raise PeerError, and nothing else."""

    async def vote(self, peer: str, request: VoteRequest) -> VoteResponse: ...
    async def transfer(self, peer: str, request: LeadershipTransferRequest) -> LeadershipTransferResponse: ...
    async def install(self, peer: str, request: InstallSnapshotRequest) -> InstallSnapshotResponse: ...
    def heartbeat(self, peer: str, request: HeartBeatRequest, on_done: AnswerCallback[HeartBeatResponse]) -> None: ...
    def push(self, peer: str, request: PushEntryRequest, on_done: AnswerCallback[PushEntryResponse]) -> None: ...
    async def close(self) -> None: ...


class RemotingPeerClient:
    """Reaches peers at their addresses in the configuration, or in the log if the configuration has none."""

    def __init__(self, config: DLedgerConfig, members: Membership) -> None:
        self._members = members
        self._timing = config.timing
        limits = ClientLimits(connect_timeout_ms=min(1000, config.timing.rpc_timeout_ms), idle_timeout_s=IDLE_TIMEOUT_S)
        self._client = RemotingClient(limits, name="dledger")

    async def vote(self, peer: str, request: VoteRequest) -> VoteResponse:
        """Ask for a vote."""
        answer: asyncio.Future[VoteResponse] = asyncio.get_running_loop().create_future()
        timeout_ms = self._timing.rpc_timeout_ms
        self._ask(peer, DLedgerRequestCode.VOTE, request, VoteResponse, timeout_ms, partial(settle, answer))
        return await answer

    async def transfer(self, peer: str, request: LeadershipTransferRequest) -> LeadershipTransferResponse:
        """Tell a peer to take over."""
        answer: asyncio.Future[LeadershipTransferResponse] = asyncio.get_running_loop().create_future()
        code, timeout_ms = DLedgerRequestCode.LEADERSHIP_TRANSFER, self._timing.rpc_timeout_ms
        self._ask(peer, code, request, LeadershipTransferResponse, timeout_ms, partial(settle, answer))
        return await answer

    async def install(self, peer: str, request: InstallSnapshotRequest) -> InstallSnapshotResponse:
        """Send a piece of a snapshot."""
        answer: asyncio.Future[InstallSnapshotResponse] = asyncio.get_running_loop().create_future()
        code, timeout_ms = DLedgerRequestCode.INSTALL_SNAPSHOT, self._timing.push_rpc_timeout_ms
        self._ask(peer, code, request, InstallSnapshotResponse, timeout_ms, partial(settle, answer))
        return await answer

    def heartbeat(self, peer: str, request: HeartBeatRequest, on_done: AnswerCallback[HeartBeatResponse]) -> None:
        """Tell a peer who leads."""
        timeout_ms = self._timing.rpc_timeout_ms
        self._ask(peer, DLedgerRequestCode.HEART_BEAT, request, HeartBeatResponse, timeout_ms, on_done)

    def push(self, peer: str, request: PushEntryRequest, on_done: AnswerCallback[PushEntryResponse]) -> None:
        """Push entries, or compare, truncate, commit."""
        slow = request.type in (PushType.APPEND, PushType.COMMIT)
        timeout_ms = self._timing.push_rpc_timeout_ms if slow else self._timing.rpc_timeout_ms
        fields = {LEASE_FIELD: str(self._timing.lease_ms)} if request.type is PushType.COMPARE else None
        self._ask(peer, DLedgerRequestCode.PUSH, request, PushEntryResponse, timeout_ms, on_done, fields)

    async def close(self) -> None:
        """Close the connections; requests in flight end in PeerError."""
        await self._client.close()

    def _ask(
        self,
        peer: str,
        code: DLedgerRequestCode,
        request: Request,
        response: type[ResponseT],
        timeout_ms: int,
        on_done: AnswerCallback[ResponseT],
        fields: dict[str, str] | None = None,
    ) -> None:
        # With the binary header, which is packed and unpacked in one step; only members read these frames.
        command = Command(code, fields or {}, request.to_body(), serializer="binary")
        address = self._members.address(peer)
        if address is None:
            on_done(PeerError(f"nobody says where {peer} is"))
            return
        self._client.ask(
            address, command, partial(self._judge, peer, request.group, response, on_done), timeout_ms=timeout_ms
        )

    def _judge(
        self, peer: str, group: str, response: type[ResponseT], on_done: AnswerCallback[ResponseT], outcome: Outcome
    ) -> None:
        """Pass on an answer, or a PeerError that says what is wrong with it."""
        if isinstance(outcome, RemotingError):
            on_done(PeerError(f"{peer}: {outcome}"))
            return
        if outcome.code != ResponseCode.SUCCESS:
            on_done(PeerError(f"{peer} answered {outcome.code}: {outcome.remark}"))
            return
        try:
            answer = response.from_body(outcome.body)
        except MalformedMessage as error:
            on_done(PeerError(f"{peer} answered with garbage: {error}"))
            return
        if answer.group != group:
            on_done(PeerError(f"{peer} belongs to group {answer.group!r}, not {group!r}"))
        elif answer.local_id != peer:
            on_done(PeerError(f"{self._members.address(peer)} is {answer.local_id!r}, not {peer!r}"))
        else:
            on_done(answer)


def settle(future: asyncio.Future[Any], answer: Response | PeerError) -> None:
    """Settle a future with an answer or an error. Its owner may have given up."""
    if future.done():
        return
    if isinstance(answer, PeerError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
