"""The nemesis `slow-client`: clients that send requests and do not read the responses.

Each connection to a replica has a small receive buffer and sends one request after the other, whose responses are long.
The client reads nothing, or a few bytes per second. Its receive window closes, and the replica's responses stay in the
send queues of the replica's own sockets, as its host's kernel shows them. That proves the fault, and also that the
replica has met it. How the replica reacts is its own affair: it may wait, close such a connection, or accept no more
requests on it. Other clients should not notice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemesis.forms import Form, FormNemesis
from nemesis.impairments import Activity, hosts_kept_from
from nemesis.protocol import Injection, Proof
from nemesis.target import Clients, SlowClient, Target, UnreadAnswers
from nemesis.words import plural

__all__ = ["SLOW_CLIENT", "SlowClientNemesis"]

MIN_CONNECTIONS, MAX_CONNECTIONS = 2, 8
SLOW_BYTES_PER_S = 200
"""Far too slow for any response: a kilobyte takes five seconds."""

FILL_TIMEOUT_S = 10.0
"""Until responses have filled both kernels' buffers and some stay in the replica's queues, on a busy machine."""
CLOSE_TIMEOUT_S = 6.0
"""Until a replica has noticed that such a client is gone."""
POLL_S = 0.1
STUCK_LOOKS = 5
"""Consecutive checks that must find the responses stuck: any response is in a send queue for a moment."""


class SlowClientNemesis(FormNemesis):
    """Connects clients that do not read. See the module's docstring."""

    name = "slow-client"
    description = "clients that send requests but do not read the responses, which pile up in the replica"
    forms: Mapping[str, Form] = {
        form.name: form
        for form in (
            Form(
                name="stuck",
                description="2 to 8 connections to each victim read nothing",
                needs=(("clients", "stuck"),),
                targets=("leader", "all"),
            ),
            Form(
                name="slow",
                description="2 to 8 connections to each victim read 200 bytes a second",
                needs=(("clients", "slow"),),
                targets=("leader", "one"),
            ),
        )
    }

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        rate = SLOW_BYTES_PER_S if form.name == "slow" else 0
        return {"connections": rng.randint(MIN_CONNECTIONS, MAX_CONNECTIONS), "bytes_per_s": rate}

    async def inject(self, target: Target, injection: Injection) -> None:
        """Connect the clients, which start sending requests at once."""
        if injection.problem is None:
            value = injection.value
            client = SlowClient(connections=value["connections"], bytes_per_s=value["bytes_per_s"])
            await _clients(target).connect(injection.fault_id, dict.fromkeys(value["hosts"], client))

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Responses stay in the send queues of every victim, on each of these connections; the clients have read no
        more than allowed."""
        if injection.problem is not None:
            return Proof(proven=False, detail=injection.problem)
        kept = hosts_kept_from(Activity.ANSWER, in_force)
        victims = [host for host in injection.value["hosts"] if host not in kept]
        if not victims:
            return Proof(proven=False, detail="another fault keeps every victim from answering")
        wanted, looks = int(injection.value["connections"]), 0
        deadline_s = asyncio.get_running_loop().time() + FILL_TIMEOUT_S
        while True:
            unread = await _clients(target).unread(injection.fault_id)
            failed = [problem for host in victims if (problem := _not_stuck(host, unread.get(host), wanted))]
            looks = looks + 1 if not failed else 0
            if looks == STUCK_LOOKS or asyncio.get_running_loop().time() > deadline_s:
                break
            await asyncio.sleep(POLL_S)
        if not failed and looks < STUCK_LOOKS:
            failed = [f"{host}: responses were stuck only for a moment" for host in victims]
        words = "; ".join(f"{host}: {unread[host]}" for host in victims[:4] if host in unread)
        return Proof(
            proven=not failed,
            exercised=True if not failed else None,
            detail="; ".join(failed[:3]) if failed else words,
            checked=len(victims),
            failed=failed,
        )

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """The clients still read nothing, or little. A connection that the replica closed counts as exercised, too."""
        unread = await _clients(target).unread(injection.fault_id)
        failed = [
            f"clients of {host} have read {each.read_bytes} bytes, more than the {each.may_read_bytes} allowed"
            for host, each in unread.items()
            if each.read_bytes > each.may_read_bytes
        ]
        met = [host for host, each in unread.items() if each.stuck or each.closed]
        words = "; ".join(f"{host}: {each}" for host, each in list(unread.items())[:4])
        detail = "; ".join(failed[:3]) if failed else words
        return Proof(proven=not failed, exercised=bool(met), detail=detail, checked=len(unread), failed=failed)

    async def heal(self, target: Target, injection: Injection) -> None:
        """Close the connections. Idempotent."""
        await _clients(target).release(injection.fault_id)

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """No connection of these clients is left at any victim."""
        kept = hosts_kept_from(Activity.ANSWER, in_force)
        deadline_s = asyncio.get_running_loop().time() + CLOSE_TIMEOUT_S
        while True:
            unread = await _clients(target).unread(injection.fault_id)
            left = {host: each.connections for host, each in unread.items() if each.connections}
            failed = [f"{host} still has {count} of these connections" for host, count in left.items()]
            if not failed or asyncio.get_running_loop().time() > deadline_s:
                break
            await asyncio.sleep(POLL_S)
        asked = [host for host in injection.value.get("hosts", ()) if host not in kept]
        return Proof(
            proven=not failed,
            detail="; ".join(failed[:3]) if failed else f"no slow client is left on {plural(len(asked), 'replica')}",
            checked=len(asked),
            failed=failed,
        )


def _not_stuck(host: str, unread: UnreadAnswers | None, wanted: int) -> str | None:
    if unread is None or unread.stuck < wanted:
        return f"{host}: {unread or 'no such client is connected'}; expected {wanted} connections with unread responses"
    if unread.read_bytes > unread.may_read_bytes:
        return f"clients of {host} have read {unread.read_bytes} bytes, more than the {unread.may_read_bytes} allowed"
    return None


def _clients(target: Target) -> Clients:
    if target.clients is None:
        raise ValueError("this cluster and this system have no slow clients")
    return target.clients


SLOW_CLIENT = SlowClientNemesis()
"""The instance that the registry returns; it is stateless."""
