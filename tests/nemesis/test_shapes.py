"""Each partition shape cuts what it promises, for every number of hosts it accepts."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemesis.shapes import (
    SHAPES,
    ShapeError,
    majority_of,
    named_grudge,
    named_problem,
    split_grudge,
    visible_from,
)
from nemesis.target import Grudge, links_of

SEEDS = st.integers(min_value=0, max_value=2**32)


def hosts_of(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


@st.composite
def clusters(draw: st.DrawFn, shape: str, most: int = 9) -> tuple[list[str], str, Grudge]:
    hosts = hosts_of(draw(st.integers(SHAPES[shape].minimum_hosts, most)))
    leader = draw(st.sampled_from(hosts))
    return hosts, leader, SHAPES[shape].grudge(hosts, random.Random(draw(SEEDS)), leader)


def components(hosts: list[str], grudge: Grudge) -> list[set[str]]:
    """Groups of hosts joined by links that work both ways."""
    cut = links_of(grudge)
    groups: list[set[str]] = []
    for host in hosts:
        near = [g for g in groups if any((host, o) not in cut and (o, host) not in cut for o in g)]
        groups = [g for g in groups if g not in near] + [{host}.union(*near)]
    return sorted(groups, key=len)


def is_symmetric(grudge: Grudge) -> bool:
    links = links_of(grudge)
    return all((b, a) in links for a, b in links)


def is_clean_split(hosts: list[str], grudge: Grudge) -> bool:
    """Two groups, each fully connected, with every link between them cut."""
    small, large = components(hosts, grudge)
    return links_of(grudge) == links_of(split_grudge([small, large]))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_shape_is_determined_by_its_seed_and_cuts_only_links_between_its_hosts(name: str) -> None:
    @given(st.integers(SHAPES[name].minimum_hosts, 9), SEEDS)
    def check(count: int, seed: int) -> None:
        hosts = hosts_of(count)
        first = SHAPES[name].grudge(hosts, random.Random(seed), hosts[-1])
        assert first == SHAPES[name].grudge(hosts, random.Random(seed), hosts[-1])
        links = links_of(first)
        assert links
        assert all(a in hosts and b in hosts and a != b for a, b in links)

    check()


@given(clusters("halves"))
def test_halves_separate_the_first_half_of_the_hosts_from_the_second(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, _, grudge = cluster
    middle = len(hosts) // 2
    assert links_of(grudge) == links_of(split_grudge([hosts[:middle], hosts[middle:]]))


@given(clusters("random-halves"))
def test_random_halves_differ_by_one_host_at_most(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, _, grudge = cluster
    small, large = components(hosts, grudge)
    assert len(large) - len(small) in (0, 1)
    assert is_clean_split(hosts, grudge)


def test_random_halves_can_choose_every_half() -> None:
    hosts = hosts_of(4)
    rng = random.Random(1)
    seen = {frozenset(components(hosts, SHAPES["random-halves"].grudge(hosts, rng))[0]) for _ in range(300)}
    assert len(seen | {frozenset(hosts) - half for half in seen}) == len(list(combinations(hosts, 2)))


@given(clusters("one"))
def test_one_isolates_exactly_one_host(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, _, grudge = cluster
    alone, others = components(hosts, grudge)
    assert (len(alone), len(others)) == (1, len(hosts) - 1)
    assert is_clean_split(hosts, grudge)


@given(clusters("majority-minority"))
def test_majority_minority_leaves_a_connected_majority(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, _, grudge = cluster
    minority, majority = components(hosts, grudge)
    assert len(majority) >= majority_of(len(hosts)) > len(minority) >= 1
    assert is_clean_split(hosts, grudge)


def test_majority_minority_chooses_every_size_of_minority() -> None:
    rng = random.Random(2)
    hosts = hosts_of(7)
    shape = SHAPES["majority-minority"]
    assert {len(components(hosts, shape.grudge(hosts, rng))[0]) for _ in range(100)} == {1, 2, 3}


@given(clusters("majorities-ring", most=15))
def test_in_a_majorities_ring_every_host_sees_a_different_majority(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, _, grudge = cluster
    views = visible_from(grudge, hosts)
    assert all(host in view and len(view) >= majority_of(len(hosts)) for host, view in views.items())
    assert len(set(views.values())) == len(hosts)
    assert is_symmetric(grudge)


@given(SEEDS)
def test_in_a_majorities_ring_of_five_every_host_sees_three(seed: int) -> None:
    hosts = hosts_of(5)
    views = visible_from(SHAPES["majorities-ring"].grudge(hosts, random.Random(seed)), hosts)
    assert {len(view) for view in views.values()} == {3}


@given(clusters("bridge"))
def test_a_bridge_is_the_only_connection_between_two_groups(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, _, grudge = cluster
    bridges = [host for host in hosts if all(host not in link for link in links_of(grudge))]
    assert len(bridges) == 1
    others = [host for host in hosts if host not in bridges]
    small, large = components(others, grudge)
    assert len(large) - len(small) in (0, 1)
    assert is_clean_split(others, grudge)


@given(clusters("one-way"))
def test_one_way_cuts_one_direction_between_two_groups(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, _, grudge = cluster
    links = links_of(grudge)
    silenced = {a for a, _ in links}
    deaf = {b for _, b in links}
    assert silenced and deaf and not silenced & deaf and silenced | deaf == set(hosts)
    assert links == {(a, b) for a, b in permutations(hosts, 2) if a in silenced and b in deaf}


def test_one_way_can_cut_either_direction() -> None:
    rng = random.Random(3)
    hosts = hosts_of(2)
    seen = {link for _ in range(50) for link in links_of(SHAPES["one-way"].grudge(hosts, rng))}
    assert seen == {("n1", "n2"), ("n2", "n1")}


@given(clusters("leader"))
def test_the_leader_shape_isolates_the_leader(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, leader, grudge = cluster
    assert visible_from(grudge, hosts)[leader] == {leader}
    assert links_of(grudge) == links_of(split_grudge([[leader], [h for h in hosts if h != leader]]))


@given(clusters("leader-minority"))
def test_leader_minority_puts_the_leader_in_the_largest_minority(cluster: tuple[list[str], str, Grudge]) -> None:
    hosts, leader, grudge = cluster
    minority, majority = components(hosts, grudge)
    assert leader in minority and 2 <= len(minority) == (len(hosts) - 1) // 2
    assert len(majority) >= majority_of(len(hosts))
    assert is_clean_split(hosts, grudge)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_shape_refuses_too_few_hosts(name: str) -> None:
    shape = SHAPES[name]
    hosts = hosts_of(shape.minimum_hosts - 1)
    with pytest.raises(ShapeError, match=f"{name} needs at least {shape.minimum_hosts} hosts"):
        shape.grudge(hosts, random.Random(0), hosts[0])
    assert shape.problem(shape.minimum_hosts) is None


@pytest.mark.parametrize(("leader", "reason"), [(None, "needs to know the leader"), ("n9", "is not one of")])
@pytest.mark.parametrize("name", ["leader", "leader-minority"])
def test_leader_shapes_refuse_a_missing_or_unknown_leader(name: str, leader: str | None, reason: str) -> None:
    with pytest.raises(ShapeError, match=reason):
        SHAPES[name].grudge(hosts_of(5), random.Random(0), leader)


def test_a_host_given_twice_is_refused() -> None:
    with pytest.raises(ShapeError, match="twice"):
        SHAPES["one"].grudge(["n1", "n1", "n2"], random.Random(0))


def test_a_cut_can_be_named_by_its_hosts() -> None:
    hosts = ["n1", "n2", "n3", "n4", "n5"]
    seen = visible_from(named_grudge("n1+n2|n3+n4"), hosts)
    assert seen == {
        "n1": {"n1", "n2", "n5"}, "n2": {"n1", "n2", "n5"}, "n3": {"n3", "n4", "n5"}, "n4": {"n3", "n4", "n5"},
        "n5": set(hosts),
    }  # fmt: skip
    assert named_grudge("n1>n2+n3") == {"n2": {"n1"}, "n3": {"n1"}}
    star = visible_from(named_grudge("n2|n3|n4|n5"), hosts)
    assert star["n1"] == set(hosts) and all(star[host] == {"n1", host} for host in hosts[1:])


@pytest.mark.parametrize("text", ["n1", "n1|", "n1|n1", "n1>n2>n3", "n1>n2|n3", "leader|n1", ""])
def test_an_invalid_cut_is_refused(text: str) -> None:
    assert named_problem(text) is not None
    with pytest.raises(ShapeError):
        named_grudge(text)
    assert named_problem("n1|n9", ["n1", "n2"]) == "the cut n1|n9 names 'n9', which is not a host"
