"""What an operator asks a DLedger group from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from node.dledger.messages import (
    ChangeMembersRequest,
    ChangeMembersResponse,
    LeadershipTransferRequest,
    LeadershipTransferResponse,
    MalformedMessage,
    MetadataRequest,
    MetadataResponse,
    Request,
    Response,
)
from node.dledger.rpc import DLedgerCode, DLedgerRequestCode, Role
from node.remoting import ClientLimits, Command, RemotingClient, RemotingError

__all__ = ["GroupRefuses", "change_members", "give_lead"]

AnswerT = TypeVar("AnswerT", bound=Response)

TIMEOUT_MS = 5000
"""For an answer; a transfer takes at most two or three seconds."""


class GroupRefuses(Exception):
    """The group did not do it; the text says why, in one line. `is_mistake`: it never will, as it was asked."""

    def __init__(self, text: str, *, is_mistake: bool = False) -> None:
        super().__init__(text)
        self.is_mistake = is_mistake


async def give_lead(group: str, peers: Mapping[str, str], member: str) -> int:
    """Have whoever leads `group` give its lead to `member`; returns the term that it leads.

    `peers` maps the members to their addresses, as in a member's configuration. Raises GroupRefuses.
    """
    client = RemotingClient(ClientLimits(connect_timeout_ms=1000), name="operator")
    try:
        leader, term = await _leader(client, group, peers)
        if leader == member:
            return term
        request = LeadershipTransferRequest(
            group=group, remote_id=leader, local_id="operator", term=term, transfer_id=leader, transferee_id=member
        )
        answer, remark = await _ask(client, peers[leader], DLedgerRequestCode.LEADERSHIP_TRANSFER, request,
                                    LeadershipTransferResponse)  # fmt: skip
        if answer.code is not DLedgerCode.SUCCESS:
            raise GroupRefuses(f"{leader}, which leads, does not give its lead to {member}: {remark}")
        return (await _leader(client, group, peers))[1]
    except RemotingError as error:
        raise GroupRefuses(f"no answer from the leader: {error}") from error
    finally:
        await client.close()


async def change_members(group: str, peers: Mapping[str, str], member: str, address: str | None) -> int:
    """Have `member` belong to `group` at `address`, or no longer (None); returns the entry that says so.

    `peers` as for `give_lead`. Raises GroupRefuses.
    """
    client = RemotingClient(ClientLimits(connect_timeout_ms=1000), name="operator")
    try:
        leader, _ = await _leader(client, group, peers)
        request = ChangeMembersRequest(
            group=group, remote_id=leader, local_id="operator", member=member, address=address or ""
        )
        code = DLedgerRequestCode.CHANGE_MEMBERS
        answer, remark = await _ask(client, peers[leader], code, request, ChangeMembersResponse)
        if answer.code is not DLedgerCode.SUCCESS:
            is_mistake = answer.code is DLedgerCode.UNEXPECTED_ARGUMENT
            raise GroupRefuses(f"{leader}, which leads, does not do it: {remark}", is_mistake=is_mistake)
        return answer.index
    except RemotingError as error:
        raise GroupRefuses(f"no answer from the leader, it may be done or not: {error}") from error
    finally:
        await client.close()


async def _leader(client: RemotingClient, group: str, peers: Mapping[str, str]) -> tuple[str, int]:
    """Who leads, of those that answer, by the greatest term; and that term."""
    leaders: list[tuple[int, str]] = []
    for member, address in peers.items():
        request = MetadataRequest(group=group, remote_id=member, local_id="operator")
        try:
            answer, remark = await _ask(client, address, DLedgerRequestCode.METADATA, request, MetadataResponse)
        except RemotingError:
            continue
        if answer.code is not DLedgerCode.SUCCESS:
            raise GroupRefuses(f"{address} is not member {member} of group {group}: {remark}")
        if answer.role == Role.LEADER.name:
            leaders.append((answer.term, member))
    if not leaders:
        raise GroupRefuses(f"nobody leads group {group} at present, of those that answer")
    term, member = max(leaders)
    return member, term


async def _ask(
    client: RemotingClient, address: str, code: DLedgerRequestCode, request: Request, kind: type[AnswerT]
) -> tuple[AnswerT, str]:
    reply = await client.invoke(address, Command.request(code, body=request.to_body()), timeout_ms=TIMEOUT_MS)
    try:
        return kind.from_body(reply.body), reply.remark or ""
    except MalformedMessage as error:
        raise GroupRefuses(f"{address} answers with no message of DLedger's: {error}") from error
