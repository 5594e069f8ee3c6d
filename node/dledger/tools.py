"""An operator's requests to a DLedger group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

from node.config_reader import check_dialled_address
from node.dledger.membership import MAX_MEMBERS, peers_in
from node.dledger.messages import (
    ChangeMembersRequest,
    ChangeMembersResponse,
    LeadershipTransferRequest,
    LeadershipTransferResponse,
    MalformedMessage,
    MembersRequest,
    MembersResponse,
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
"""Timeout of a request; a transfer takes at most two or three seconds."""


MAX_ASKED: Final = 4 * MAX_MEMBERS
"""The most members that are asked in search of the leader: those that answer may name others."""


class GroupRefuses(Exception):
    """The group did not do it; the text says why, in one line. `is_mistake`: the request itself is wrong."""

    def __init__(self, text: str, *, is_mistake: bool = False) -> None:
        super().__init__(text)
        self.is_mistake = is_mistake


async def give_lead(group: str, peers: Mapping[str, str], member: str) -> int:
    """Have the leader of `group` transfer its leadership to `member`; returns the new leader's term.

    `peers` maps members to their addresses, as in a member's configuration, which may be older than the group's last
    change. Raises GroupRefuses.
    """
    client = RemotingClient(ClientLimits(connect_timeout_ms=1000), name="operator")
    try:
        leader, term, address = await _leader(client, group, peers)
        if leader == member:
            return term
        members = await _members(client, group, leader, address)
        if members and member not in members:
            known = ", ".join(sorted(members))
            raise GroupRefuses(f"{member} is no member of group {group}: {known}", is_mistake=True)
        request = LeadershipTransferRequest(
            group=group, remote_id=leader, local_id="operator", term=term, transfer_id=leader, transferee_id=member
        )
        answer, remark = await _ask(client, address, DLedgerRequestCode.LEADERSHIP_TRANSFER, request,
                                    LeadershipTransferResponse)  # fmt: skip
        if answer.code is not DLedgerCode.SUCCESS:
            raise GroupRefuses(f"{leader}, which leads, does not give its lead to {member}: {remark}")
        return (await _leader(client, group, peers))[1]
    except RemotingError as error:
        raise GroupRefuses(f"no answer from the leader: {error}") from error
    finally:
        await client.close()


async def change_members(group: str, peers: Mapping[str, str], member: str, address: str | None) -> int:
    """Add `member` to `group` at `address`, or remove it (None); returns the index of the entry that does so.

    `peers` as for `give_lead`. Raises GroupRefuses.
    """
    client = RemotingClient(ClientLimits(connect_timeout_ms=1000), name="operator")
    try:
        leader, _, place = await _leader(client, group, peers)
        request = ChangeMembersRequest(
            group=group, remote_id=leader, local_id="operator", member=member, address=address or ""
        )
        code = DLedgerRequestCode.CHANGE_MEMBERS
        answer, remark = await _ask(client, place, code, request, ChangeMembersResponse)
        if answer.code is not DLedgerCode.SUCCESS:
            is_mistake = answer.code is DLedgerCode.UNEXPECTED_ARGUMENT
            raise GroupRefuses(f"{leader}, which leads, does not do it: {remark}", is_mistake=is_mistake)
        return answer.index
    except RemotingError as error:
        raise GroupRefuses(f"no answer from the leader, it may be done or not: {error}") from error
    finally:
        await client.close()


async def _leader(client: RemotingClient, group: str, peers: Mapping[str, str]) -> tuple[str, int, str]:
    """The leader, its term and its address; if several members say that they lead, the one with the greatest term.

    If none of `peers` leads, the members that they name are asked as well, and so on: the configuration that `peers`
    come from may be older than the last changes of the group.
    """
    asked: set[tuple[str, str]] = set()
    refusals: list[str] = []
    left = set(peers.items())
    while left and len(asked) < MAX_ASKED:
        asked |= left
        views = await asyncio.gather(*(_view(client, group, *each) for each in sorted(left)))
        leaders = [(view.term, view.member, view.address) for view in views if view.leads]
        if leaders:
            term, member, address = max(leaders)
            return member, term, address
        refusals += [view.refusal for view in views if view.refusal]
        told = await asyncio.gather(
            *(_members(client, group, view.member, view.address) for view in views if view.answers)
        )
        left = {each for members in told for each in members.items()} - asked
    if refusals:
        raise GroupRefuses(refusals[0])
    raise GroupRefuses(f"nobody leads group {group} at present, of those that answer")


class _View(NamedTuple):
    """A member's answer about its role; `refusal` is the reason if that member is not at this address."""

    member: str
    address: str
    term: int = -1
    leads: bool = False
    answers: bool = False
    refusal: str = ""


async def _view(client: RemotingClient, group: str, member: str, address: str) -> _View:
    request = MetadataRequest(group=group, remote_id=member, local_id="operator")
    try:
        answer, remark = await _ask(client, address, DLedgerRequestCode.METADATA, request, MetadataResponse)
    except RemotingError:
        return _View(member, address)
    except GroupRefuses as error:
        return _View(member, address, refusal=str(error))
    if answer.code is not DLedgerCode.SUCCESS:
        return _View(member, address, refusal=f"{address} is not member {member} of group {group}: {remark}")
    return _View(member, address, answer.term, answer.role == Role.LEADER.name, answers=True)


async def _members(client: RemotingClient, group: str, member: str, address: str) -> dict[str, str]:
    """The group's members, as `member` knows them, whose addresses can be dialled; none if it does not tell: earlier
    releases do not know the request."""
    request = MembersRequest(group=group, remote_id=member, local_id="operator")
    try:
        answer, _ = await _ask(client, address, DLedgerRequestCode.MEMBERS, request, MembersResponse)
    except (RemotingError, GroupRefuses):
        return {}
    members = {}
    for name, place in (peers_in(answer.peers) or {}).items():
        with contextlib.suppress(ValueError):
            members[name] = check_dialled_address(place)
    return members


async def _ask(
    client: RemotingClient, address: str, code: DLedgerRequestCode, request: Request, kind: type[AnswerT]
) -> tuple[AnswerT, str]:
    reply = await client.invoke(address, Command.request(code, body=request.to_body()), timeout_ms=TIMEOUT_MS)
    try:
        return kind.from_body(reply.body), reply.remark or ""
    except MalformedMessage as error:
        raise GroupRefuses(f"{address} answers with no message of DLedger's: {error}") from error
