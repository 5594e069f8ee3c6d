"""The shapes of a partition: which hosts are cut from which.

A shape turns the hosts of a cluster, a source of randomness and, for some, the current leader into a grudge.
Shapes are pure: the same arguments give the same grudge, so a seed decides a run. Names and guarantees are
those of Jepsen's nemesis partitioners; what Jepsen guarantees for five nodes only, the shapes here guarantee
for every number of hosts they accept.

A host *sees* itself and every host whose packets reach it. A *majority* of n hosts is n // 2 + 1 of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nemesis.target import Grudge

__all__ = [
    "SHAPES",
    "Shape",
    "ShapeError",
    "majority_of",
    "named_grudge",
    "named_problem",
    "split_grudge",
    "visible_from",
]


class ShapeError(ValueError):
    """A shape cannot be made of these hosts. The message is one line that names shape and reason."""


def majority_of(host_count: int) -> int:
    """The smallest number of hosts that is more than half of `host_count`."""
    return host_count // 2 + 1


def visible_from(grudge: Grudge, hosts: Sequence[str]) -> dict[str, frozenset[str]]:
    """Which hosts each host sees under a grudge, itself included."""
    return {host: frozenset(hosts) - grudge.get(host, frozenset()) for host in hosts}


def split_grudge(groups: Iterable[Iterable[str]]) -> dict[str, frozenset[str]]:
    """The grudge that separates groups from each other in both directions and leaves each group whole."""
    members = [frozenset(group) for group in groups]
    everyone = frozenset[str]().union(*members)
    return {host: everyone - group for group in members for host in sorted(group) if everyone != group}


def named_problem(text: str, hosts: Sequence[str] | None = None) -> str | None:
    """Why `text` names no cut, as one line; None when it does. Without `hosts`, any name such as n7 is accepted.

    A cut is named by the hosts themselves: `n1+n2|n3+n4` separates two groups (or more) in both directions, and
    `n1>n2+n3` drops what n1 sends to n2 and n3. Hosts that are not named are not cut off.
    """
    groups = _named_groups(text)
    names = [name for group in groups for name in group]
    if len(groups) < 2 or (">" in text and ("|" in text or len(groups) != 2)):
        return f"{text!r} is not a cut such as n1+n2|n3 or n1>n2"
    if len(set(names)) != len(names):
        return f"the cut {text} names a host twice"
    if hosts is None:
        odd = [name for name in names if not (name[:1] == "n" and name[1:].isdigit())]
    else:
        odd = [name for name in names if name not in hosts]
    return f"the cut {text} names {odd[0]!r}, which is not a host" if odd else None


def named_grudge(text: str) -> Grudge:
    """The grudge of a cut named by its hosts. Raises ShapeError; see `named_problem`."""
    problem = named_problem(text)
    if problem is not None:
        raise ShapeError(problem)
    groups = _named_groups(text)
    if ">" in text:
        return {destination: frozenset(groups[0]) for destination in groups[1]}
    return split_grudge(groups)


def _named_groups(text: str) -> list[list[str]]:
    return [group.split("+") for group in text.replace(">", "|").split("|")]


def _halves(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    middle = len(hosts) // 2
    return split_grudge([hosts[:middle], hosts[middle:]])


def _random_halves(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    return _halves(rng.sample(hosts, len(hosts)), rng, leader)


def _isolate(hosts: Sequence[str], alone: Sequence[str]) -> Grudge:
    return split_grudge([alone, [host for host in hosts if host not in alone]])


def _one(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    return _isolate(hosts, [rng.choice(hosts)])


def _majority_minority(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    size = rng.randint(1, (len(hosts) - 1) // 2)
    return _isolate(hosts, rng.sample(hosts, size))


def _majorities_ring(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    """Hosts are arranged in a circle, in random order, and each sees its nearest neighbours on both sides.

    With `reach` neighbours on each side a host sees 2 * reach + 1 hosts. The smallest reach that gives a
    majority is used; for n >= 4 that is less than the whole circle, so all views differ. Three hosts would
    see each other, so they form a line instead: the ends see two hosts each, the middle all three.
    """
    circle = rng.sample(hosts, len(hosts))
    count = len(circle)
    if count == 3:
        first, _, last = circle
        return {first: frozenset({last}), last: frozenset({first})}
    reach = majority_of(count) // 2
    grudge = {}
    for place, host in enumerate(circle):
        seen = {circle[(place + step) % count] for step in range(-reach, reach + 1)}
        grudge[host] = frozenset(circle) - seen
    return grudge


def _bridge(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    _, *others = rng.sample(hosts, len(hosts))  # the first is the bridge: in neither half, so cut from nobody
    middle = len(others) // 2
    return split_grudge([others[:middle], others[middle:]])


def _one_way(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    mixed = rng.sample(hosts, len(hosts))
    size = rng.randint(1, len(mixed) - 1)
    silenced = frozenset(mixed[:size])
    return {host: silenced for host in mixed[size:]}


def _leader(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    assert leader is not None
    return _isolate(hosts, [leader])


def _leader_minority(hosts: Sequence[str], rng: random.Random, leader: str | None) -> Grudge:
    assert leader is not None
    followers = [host for host in hosts if host != leader]
    return _isolate(hosts, [leader, *rng.sample(followers, (len(hosts) - 1) // 2 - 1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to partition a cluster of at least `minimum_hosts` hosts."""

    name: str
    description: str
    minimum_hosts: int
    needs_leader: bool = False
    make: Callable[[Sequence[str], random.Random, str | None], Grudge]

    def problem(self, host_count: int) -> str | None:
        """Why this shape does not exist for `host_count` hosts, as one line; None when it does."""
        if host_count >= self.minimum_hosts:
            return None
        return f"partition shape {self.name} needs at least {self.minimum_hosts} hosts, not {host_count}"

    def grudge(self, hosts: Sequence[str], rng: random.Random, leader: str | None = None) -> Grudge:
        """The grudge of this shape over `hosts`; every random choice is taken from `rng`.

        Raises ShapeError for too few hosts, for a host named twice, and for a leader that is missing or not
        among the hosts.
        """
        problem = self.problem(len(hosts))
        if problem is not None:
            raise ShapeError(problem)
        if len(set(hosts)) != len(hosts):
            raise ShapeError(f"partition shape {self.name} was given a host twice: {', '.join(hosts)}")
        if self.needs_leader and leader is None:
            raise ShapeError(f"partition shape {self.name} needs to know the leader")
        if self.needs_leader and leader not in hosts:
            raise ShapeError(f"partition shape {self.name}: leader {leader} is not one of {', '.join(hosts)}")
        return self.make(hosts, rng, leader)


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            name="halves",
            description="the first half of the hosts against the rest",
            minimum_hosts=2,
            make=_halves,
        ),
        Shape(
            name="random-halves",
            description="a random half of the hosts against the rest",
            minimum_hosts=2,
            make=_random_halves,
        ),
        Shape(name="one", description="one random host against the rest", minimum_hosts=2, make=_one),
        Shape(
            name="majority-minority",
            description="a random minority, of random size, against the majority",
            minimum_hosts=3,
            make=_majority_minority,
        ),
        Shape(
            name="majorities-ring",
            description="every host sees a majority, and no two hosts see the same one",
            minimum_hosts=3,
            make=_majorities_ring,
        ),
        Shape(
            name="bridge",
            description="two halves that see each other only through one random host",
            minimum_hosts=3,
            make=_bridge,
        ),
        Shape(
            name="one-way",
            description="a random group still hears the others, who no longer hear it",
            minimum_hosts=2,
            make=_one_way,
        ),
        Shape(
            name="leader",
            description="the leader against the rest",
            minimum_hosts=2,
            needs_leader=True,
            make=_leader,
        ),
        Shape(
            name="leader-minority",
            description="the leader with as many followers as still form a minority",
            # With three or four hosts the largest minority is the leader alone, which is another shape.
            minimum_hosts=5,
            needs_leader=True,
            make=_leader_minority,
        ),
    )
}
"""Every shape by name, in the order in which documentation lists them."""
