"""Who is hit: the words that name hosts by their role or number.

    one            a random host                   leader       the leader of the highest term
    minority       the largest minority, random    followers    everybody but the leader
    majority       the smallest majority, random   all          everybody
    n1, n1+n3      these hosts

A word is part of a fault's variant (`kill@leader`, see nemesis.forms) and is resolved when the fault is planned.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemesis.shapes import majority_of
from nemesis.target import Target

__all__ = ["LEADER_TIMEOUT_S", "NEEDS_LEADER", "TARGETS", "Victims", "choose_victims", "find_leader", "target_problem"]

LEADER_TIMEOUT_S = 5.0
"""How long a plan waits for somebody to lead: many elections of the fast profile, one of the default one."""

LEADER_INTERVAL_S = 0.2
"""Pause between two questions for the leader, while nobody leads."""

TARGETS: Mapping[str, str] = {
    "one": "one random host",
    "minority": "as many random hosts as still make a minority",
    "majority": "as few random hosts as already make a majority",
    "leader": "the leader",
    "followers": "every host but the leader",
    "all": "every host",
}
"""Every word but the hosts' own names, with what it means."""

_MINIMUM_HOSTS = {"minority": 3, "followers": 2}
NEEDS_LEADER = frozenset({"leader", "followers"})
"""Words that mean nobody unless somebody can say who leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """The hosts that a word came to, in the cluster's order. `problem` is set when it came to none."""

    hosts: tuple[str, ...]
    leader: str | None = None
    problem: str | None = None


def target_problem(word: str, hosts: Sequence[str] | None = None) -> str | None:
    """Why `word` names nobody, as one line; None when it does. Without `hosts` names are taken on trust."""
    if word in TARGETS:
        if hosts is not None and len(hosts) < _MINIMUM_HOSTS.get(word, 1):
            return f"target {word} needs at least {_MINIMUM_HOSTS[word]} hosts, not {len(hosts)}"
        return None
    names = word.split("+")
    if not all(names) or len(set(names)) != len(names):
        return f"target {word!r} is no list of hosts such as n1+n3"
    if hosts is None:
        if all(name[:1] == "n" and name[1:].isdigit() for name in names):
            return None
        return f"unknown target {word!r}; targets are {', '.join(TARGETS)}, or hosts such as n1+n3"
    unknown = [name for name in names if name not in hosts]
    if unknown:
        return f"unknown target {unknown[0]!r}; targets are {', '.join(TARGETS)}, or hosts: {', '.join(hosts)}"
    return None


async def choose_victims(target: Target, word: str, rng: random.Random) -> Victims:
    """The hosts that `word` means now, every choice from `rng`; waits up to LEADER_TIMEOUT_S for a leader.

    Raises ValueError for a word that this target cannot have.
    """
    hosts = list(target.hosts)
    problem = target_problem(word, hosts)
    if problem is not None:
        raise ValueError(problem)
    leader = None
    if word in NEEDS_LEADER:
        leader = await find_leader(target)
        if leader is None:
            return Victims(hosts=(), problem="no leader found")
    if word == "one":
        chosen = {rng.choice(hosts)}
    elif word == "minority":
        chosen = set(rng.sample(hosts, (len(hosts) - 1) // 2))
    elif word == "majority":
        chosen = set(rng.sample(hosts, majority_of(len(hosts))))
    elif word == "leader":
        chosen = {str(leader)}
    elif word == "followers":
        chosen = set(hosts) - {str(leader)}
    elif word == "all":
        chosen = set(hosts)
    else:
        chosen = set(word.split("+"))
    return Victims(hosts=tuple(host for host in hosts if host in chosen), leader=leader)


async def find_leader(target: Target) -> str | None:
    """The leader of the highest term, by the system's own word; None when nobody leads for too long."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + LEADER_TIMEOUT_S
    while (left_s := deadline_s - loop.time()) > 0:
        try:
            leaders = await asyncio.wait_for(target.leaders(), left_s)
        except TimeoutError:
            return None
        for leader in leaders:
            if leader in target.hosts:
                return leader
        await asyncio.sleep(min(LEADER_INTERVAL_S, left_s))
    return None
