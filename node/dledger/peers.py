"""Asking other members: one method for each request, over the remoting client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from node.dledger.config import DLedgerConfig
from node.dledger.messages import (
    HeartBeatRequest,
    HeartBeatResponse,
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

__all__ = ["PeerClient", "PeerError", "RemotingPeerClient"]

ResponseT = TypeVar("ResponseT", bound=Response)

IDLE_TIMEOUT_S = 3600.0
"""Members talk all the time; one that is silent for an hour is not worth a connection."""


class PeerError(Exception):
    """A peer did not give a usable answer: not reached, not in time, or not understood."""


class PeerClient(Protocol):
    """How a member reaches its peers. Each method raises PeerError, and nothing else."""

    async def vote(self, peer: str, request: VoteRequest) -> VoteResponse: ...
    async def heartbeat(self, peer: str, request: HeartBeatRequest) -> HeartBeatResponse: ...
    async def push(self, peer: str, request: PushEntryRequest) -> PushEntryResponse: ...
    async def close(self) -> None: ...


class RemotingPeerClient:
    """Reaches peers at the addresses of the configuration."""

    def __init__(self, config: DLedgerConfig) -> None:
        self._peers: Mapping[str, str] = config.peers
        self._timing = config.timing
        limits = ClientLimits(
            connect_timeout_ms=min(1000, config.timing.rpc_timeout_ms), idle_timeout_s=IDLE_TIMEOUT_S
        )
        self._client = RemotingClient(limits, name="dledger")

    async def vote(self, peer: str, request: VoteRequest) -> VoteResponse:
        """Ask for a vote."""
        timeout_ms = self._timing.rpc_timeout_ms
        return await self._ask(peer, DLedgerRequestCode.VOTE, request, VoteResponse, timeout_ms)

    async def heartbeat(self, peer: str, request: HeartBeatRequest) -> HeartBeatResponse:
        """Tell a peer who leads."""
        timeout_ms = self._timing.rpc_timeout_ms
        return await self._ask(peer, DLedgerRequestCode.HEART_BEAT, request, HeartBeatResponse, timeout_ms)

    async def push(self, peer: str, request: PushEntryRequest) -> PushEntryResponse:
        """Push entries, or compare, truncate, commit."""
        slow = request.type in (PushType.APPEND, PushType.COMMIT)
        timeout_ms = self._timing.push_rpc_timeout_ms if slow else self._timing.rpc_timeout_ms
        return await self._ask(peer, DLedgerRequestCode.PUSH, request, PushEntryResponse, timeout_ms)

    async def close(self) -> None:
        """Close the connections; requests under way end in PeerError."""
        await self._client.close()

    async def _ask(
        self, peer: str, code: DLedgerRequestCode, request: Request, response: type[ResponseT], timeout_ms: int
    ) -> ResponseT:
        try:
            command = Command.request(code, body=request.to_body())
            reply = await self._client.invoke(self._peers[peer], command, timeout_ms=timeout_ms)
        except RemotingError as error:
            raise PeerError(f"{peer}: {error}") from error
        if reply.code != ResponseCode.SUCCESS:
            raise PeerError(f"{peer} answered {reply.code}: {reply.remark}")
        try:
            answer = response.from_body(reply.body)
        except MalformedMessage as error:
            raise PeerError(f"{peer} answered with garbage: {error}") from error
        if answer.group != request.group:
            raise PeerError(f"{peer} belongs to group {answer.group!r}, not {request.group!r}")
        if answer.local_id != peer:
            raise PeerError(f"{self._peers[peer]} is {answer.local_id!r}, not {peer!r}")
        return answer
