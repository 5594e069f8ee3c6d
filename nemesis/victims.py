"""Targets of faults: words that name hosts by role or by number.

    one            a random host                   leader       the leader of the highest term
    minority       the largest minority, random    follower     a random host but the leader
    majority       the smallest majority, random   followers    everybody but the leader
    n1, n1+n3      these hosts                     all          everybody

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
"""How long a plan waits for a leader: many elections of the fast profile, one of the default profile."""

LEADER_INTERVAL_S = 0.2
"""Pause between two attempts to find the leader."""

TARGETS: Mapping[str, str] = {
    "one": "one random host",
    "minority": "the largest possible minority, of random hosts",
    "majority": "the smallest possible majority, of random hosts",
    "leader": "the leader",
    "follower": "one random host but the leader",
    "followers": "every host but the leader",
    "all": "every host",
}
"""Word -> what it means; hosts' own names are left out."""

_MINIMUM_HOSTS = {"minority": 3, "follower": 2, "followers": 2}
NEEDS_LEADER = frozenset({"leader", "follower", "followers"})
"""Words that can be resolved only if the leader is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """The hosts that a word resolves to, in the cluster's order. `problem` is set when it resolves to none."""

    hosts: tuple[str, ...]
    leader: str | None = None
    problem: str | None = None


def target_problem(word: str, hosts: Sequence[str] | None = None) -> str | None:
    """Why `word` names no hosts, as one line; None when it does. Without `hosts`, any name such as n7 is accepted."""
    if word in TARGETS:
        if hosts is not None and len(hosts) < _MINIMUM_HOSTS.get(word, 1):
            return f"target {word} needs at least {_MINIMUM_HOSTS[word]} hosts, not {len(hosts)}"
        return None
    names = word.split("+")
    if not all(names) or len(set(names)) != len(names):
        return f"target {word!r} is not a list of hosts such as n1+n3"
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

    Raises ValueError for a word that names no hosts of this target.
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
    elif word == "follower":
        chosen = {rng.choice([host for host in hosts if host != leader])}
    elif word == "followers":
        chosen = set(hosts) - {str(leader)}
    elif word == "all":
        chosen = set(hosts)
    else:
        chosen = set(word.split("+"))
    return Victims(hosts=tuple(host for host in hosts if host in chosen), leader=leader)


async def find_leader(target: Target) -> str | None:
    """The leader of the highest term, as the system reports it; None if there is none within LEADER_TIMEOUT_S."""
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
