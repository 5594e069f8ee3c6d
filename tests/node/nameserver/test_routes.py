"""The route table: role switches, expiry, closed connections, and a model that must agree throughout."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.nameserver import routes
from node.nameserver.registration import QueueData, Registration
from node.nameserver.routes import RouteTable, TableFull

N1, N2, N3 = "10.0.0.1:10911", "10.0.0.2:10911", "10.0.0.3:10911"
FOUR = QueueData(4, 4, 6)


def table() -> RouteTable:
    return RouteTable(lambda: 0, expiry_s=120)


def registration(broker_id: int, address: str, term: int | None = None, **more: Any) -> Registration:
    values: dict[str, Any] = {
        "cluster": "c", "broker_name": "b", "broker_id": broker_id, "address": address, "dledger_term": term,
        "topics": {"T": FOUR}, "data_version": "v1", "ha_address": f"ha-{address}",
    }  # fmt: skip
    return Registration(**(values | more))


def addresses(routes_: RouteTable, topic: str = "T") -> list[dict[str, str]]:
    route = routes_.route(topic)
    return [] if route is None else [data["brokerAddrs"] for data in route["brokerDatas"]]


def test_a_route_lists_a_master_and_its_slave() -> None:
    t = table()
    assert t.register(registration(0, N1), "c1") == routes.RegisterResult("", "", True)
    assert t.register(registration(1, N2), "c2") == routes.RegisterResult(f"ha-{N1}", N1, True)
    assert t.route("T") == {
        "queueDatas": [
            {"brokerName": "b", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6,
             "topicSysFlag": 0, "topicSynFlag": 0}
        ],
        "brokerDatas": [{"cluster": "c", "brokerName": "b", "brokerAddrs": {"0": N1, "1": N2}}],
        "filterServerTable": {},
    }  # fmt: skip
    assert t.route("U") is None


def test_a_slave_without_a_master_registers_no_topics_and_gets_no_master_address() -> None:
    t = table()
    assert t.register(registration(2, N2), "c2").master_address == ""
    assert t.route("T") is None
    assert t.cluster_info()["brokerAddrTable"]["b"]["brokerAddrs"] == {"2": N2}


def test_each_address_is_listed_once_at_every_step_of_a_role_switch() -> None:
    t = table()
    t.register(registration(0, N1, 1), "c1")
    t.register(registration(2, N2, 1), "c2")
    t.register(registration(3, N3, 1), "c3")
    t.register(registration(0, N2, 2), "c2")  # n2 takes over while n1 still believes that it leads
    assert addresses(t) == [{"0": N2, "3": N3}]
    assert t.register(registration(0, N1, 1), "c1") == routes.RegisterResult(f"ha-{N2}", N2, False)
    assert addresses(t) == [{"0": N2, "3": N3}]
    assert t.register(registration(1, N1, 2), "c1").master_address == N2
    assert addresses(t) == [{"0": N2, "1": N1, "3": N3}]
    t.register(registration(0, N1, 3), "c1")  # n1 takes over again
    assert addresses(t) == [{"0": N1, "3": N3}]


@pytest.mark.parametrize(
    ("known", "newcomer", "replaces"), [(3, 4, True), (3, 3, True), (3, 2, False), (3, None, True), (None, 1, True)]
)
def test_a_master_of_a_lower_term_does_not_replace_the_known_one(
    known: int | None, newcomer: int | None, replaces: bool
) -> None:
    t = table()
    t.register(registration(0, N1, known), "c1")
    assert t.register(registration(0, N2, newcomer), "c2").accepted is replaces
    assert addresses(t) == [{"0": N2 if replaces else N1}]


def test_a_lower_term_is_accepted_when_no_master_is_known() -> None:
    t = table()
    t.register(registration(0, N1, 9), "c1")
    t.register(registration(2, N2, 9), "c2")
    t.owner_gone("c1")
    assert t.register(registration(0, N3, 1), "c3").accepted
    assert addresses(t) == [{"0": N3, "2": N2}]


def test_a_new_masters_topics_replace_the_old_ones_even_with_the_same_data_version() -> None:
    t = table()
    t.register(registration(0, N1), "c1")
    t.register(registration(0, N2, topics={"T": QueueData(8, 8, 6)}), "c2")
    route = t.route("T")
    assert route is not None and route["queueDatas"][0]["readQueueNums"] == 8


@pytest.mark.parametrize("end", ["orderly", "killed"])
def test_a_returning_masters_topics_are_taken_over_even_with_the_same_data_version(end: str) -> None:
    """Configured topics have no version of their own. A slave keeps the broker name listed meanwhile."""
    t = table()
    t.register(registration(0, N1), "c1")
    t.register(registration(1, N2), "c2")
    assert t.unregister("b", 0, N1) if end == "orderly" else t.owner_gone("c1")
    assert addresses(t) == [{"1": N2}]
    t.register(registration(0, N1, topics={"T": QueueData(8, 8, 6), "U": FOUR}), "c3")
    route = t.route("T")
    assert route is not None and route["queueDatas"][0]["readQueueNums"] == 8
    assert addresses(t, "U") == [{"0": N1, "1": N2}]


def test_wiped_permissions_and_deleted_topics_last_until_the_brokers_topics_change() -> None:
    t = table()
    t.register(registration(0, N1), "c1")
    assert t.set_write_permission("b", allowed=False) == 1
    t.register(registration(0, N1), "c1")
    route = t.route("T")
    assert route is not None and route["queueDatas"][0]["perm"] == 4
    assert t.set_write_permission("b", allowed=True) == 1
    assert t.set_write_permission("other", allowed=True) == 0
    t.delete_topic("T", "another cluster")
    assert t.route("T") is not None
    t.delete_topic("T", "c")
    t.register(registration(0, N1), "c1")
    assert t.route("T") is None
    t.register(registration(0, N1, data_version="v2"), "c1")
    assert t.route("T") is not None
    t.delete_topic("T")
    assert t.topics() == []


def test_a_closed_connection_removes_only_brokers_that_registered_over_it_last() -> None:
    t = table()
    t.register(registration(0, N1), "old")
    t.register(registration(0, N1), "new")  # reconnected before the loss of the old connection was noticed
    assert t.owner_gone("old") == []
    assert addresses(t) == [{"0": N1}]
    assert t.owner_gone("new") == [N1]
    assert t.route("T") is None and t.topics() == [] and t.cluster_info()["clusterAddrTable"] == {}
    assert t.owner_gone("new") == []


def test_each_address_expires_separately_and_touch_renews_it() -> None:
    now = [0]
    t = RouteTable(lambda: now[0], expiry_s=120)
    t.register(registration(0, N1), "c1")
    t.register(registration(2, N2), "c2")
    now[0] = int(100e9)
    t.touch(N1)
    now[0] = int(120e9)
    assert t.expire() == []
    now[0] = int(121e9)
    assert t.expire() == [(N2, "c2")]
    assert addresses(t) == [{"0": N1}]
    now[0] = int(221e9)
    assert t.expire() == [(N1, "c1")]
    assert t.route("T") is None


def test_unregister_removes_only_an_exactly_matching_entry() -> None:
    t = table()
    t.register(registration(0, N1), "c1")
    t.register(registration(0, N2), "c2")
    assert not t.unregister("b", 0, N1)  # the old master unregisters late
    assert addresses(t) == [{"0": N2}]
    assert not t.unregister("b", 1, N2)
    assert t.unregister("b", 0, N2)
    assert t.route("T") is None


def test_an_address_registered_under_a_new_broker_name_leaves_the_old_one() -> None:
    t = table()
    t.register(registration(0, N1), "c1")
    t.register(registration(0, N1, broker_name="renamed"), "c1")
    assert list(t.cluster_info()["brokerAddrTable"]) == ["renamed"]
    route = t.route("T")
    assert route is not None and [data["brokerName"] for data in route["queueDatas"]] == ["renamed"]


def test_topics_are_listed_by_cluster_and_routed_over_several_brokers() -> None:
    t = table()
    t.register(registration(0, N1), "c1")
    t.register(registration(0, N2, broker_name="b2", cluster="d", topics={"T": FOUR, "U": FOUR}), "c2")
    assert t.topics() == ["T", "U"] and t.topics("c") == ["T"] and t.topics("d") == ["T", "U"]
    assert addresses(t) == [{"0": N1}, {"0": N2}]
    assert t.cluster_info()["clusterAddrTable"] == {"c": ["b"], "d": ["b2"]}


def test_filter_servers_and_data_version_are_kept_by_address() -> None:
    t = table()
    t.register(registration(0, N1, filter_servers=("f:1",)), "c1")
    route = t.route("T")
    assert route is not None and route["filterServerTable"] == {N1: ["f:1"]}
    assert t.data_version(N1) == "v1" and t.data_version(N2) is None


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_BROKERS", 2)
    monkeypatch.setattr(routes, "MAX_TOPICS", 3)
    t = table()
    t.register(registration(0, N1), "c1")
    with pytest.raises(TableFull, match="1 topics are known, 3 more"):
        t.register(registration(0, N2, topics={"A": FOUR, "B": FOUR, "C": FOUR}), "c2")
    assert addresses(t) == [{"0": N1}]
    t.register(registration(2, N2), "c2")
    with pytest.raises(TableFull, match="2 brokers"):
        t.register(registration(3, N3), "c3")
    t.register(registration(0, N1), "c1")  # listed brokers may register again


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("register"), st.integers(0, 3), st.sampled_from([N1, N2, N3]), st.integers(0, 4),
                  st.sampled_from(["b", "b2"])),
        st.tuples(st.just("gone"), st.sampled_from([N1, N2, N3])),
        st.tuples(st.just("unregister"), st.integers(0, 3), st.sampled_from([N1, N2, N3]),
                  st.sampled_from(["b", "b2"])),
        st.tuples(st.just("wait"), st.integers(1, 150)),
    ),
    max_size=30,
)  # fmt: skip


@given(STEPS)
def test_the_table_agrees_with_a_flat_list_of_registrations(steps: list[tuple[Any, ...]]) -> None:
    """Oracle: a flat list of (name, id, address, term, heard at), rebuilt from scratch at every step."""
    now = [0]
    t = RouteTable(lambda: now[0], expiry_s=120)
    registered: list[tuple[str, int, str, int, int]] = []
    for step in steps:
        if step[0] == "register":
            _, broker_id, address, term, name = step
            masters = [entry for entry in registered if entry[:2] == (name, 0) and entry[2] != address]
            accepted = not (broker_id == 0 and any(entry[3] > term for entry in masters))
            if accepted:
                registered = [entry for entry in registered if entry[2] != address and entry[:2] != (name, broker_id)]
                registered.append((name, broker_id, address, term, now[0]))
            assert t.register(registration(broker_id, address, term, broker_name=name), address).accepted is accepted
        elif step[0] == "gone":
            registered = [entry for entry in registered if entry[2] != step[1]]
            t.owner_gone(step[1])
        elif step[0] == "unregister":
            registered = [entry for entry in registered if entry[:3] != (step[3], step[1], step[2])]
            t.unregister(step[3], step[1], step[2])
        else:
            now[0] += step[1] * 10**9
            registered = [entry for entry in registered if entry[4] + 120 * 10**9 >= now[0]]
            t.expire()
        listed = {
            (name, int(broker_id), address)
            for name, data in t.cluster_info()["brokerAddrTable"].items()
            for broker_id, address in data["brokerAddrs"].items()
        }
        assert listed == {entry[:3] for entry in registered}
        assert len({address for _, _, address in listed}) == len(listed)
        route = t.route("T")
        names = set() if route is None else {data["brokerName"] for data in route["brokerDatas"]}
        assert {name for name, broker_id, _ in listed if broker_id == 0} <= names <= {entry[0] for entry in registered}
