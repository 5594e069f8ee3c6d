"""The plug-in of Consul: its configuration, and its client against a fake server with keys in memory."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from harness.sdk import Host, HttpError, Refused
from harness.systems import consul
from harness.systems.consul import Consul, ConsulClient
from harness.systems.planned_hosts import PlannedHosts

SETTINGS = {name: values[0] for name, values in Consul.settings.items()}


class Server:
    """The key-value part of Consul's HTTP API, as far as the client needs it. `between` is called once, before the
    first write: what another client does after this one has read."""

    def __init__(self, between: Callable[[Server], None] = lambda server: None) -> None:
        self.kept: dict[str, tuple[int, Any]] = {}
        self.index = 0
        self.between = between
        self.asked: list[str] = []
        self.problem: HttpError | None = None

    def set(self, key: str, value: Any) -> None:
        self.index += 1
        self.kept[key] = self.index, value

    def entry(self, key: str) -> dict[str, Any]:
        if key not in self.kept:
            return {"Key": key, "Value": None, "ModifyIndex": 0}
        index, value = self.kept[key]
        return {"Key": key, "Value": base64.b64encode(json.dumps(value).encode()).decode(), "ModifyIndex": index}

    async def get(self, path: str) -> Any:
        self.asked.append(path)
        key, _, options = path.removeprefix("/v1/kv/").partition("?")
        found = [name for name in sorted(self.kept) if name == key or ("keys" in options and name.startswith(key))]
        if not found:
            raise HttpError(404, "")
        return found if "keys" in options else [self.entry(key)]

    async def put(self, path: str, body: Any) -> Any:
        self.asked.append(path)
        if self.problem is not None:
            raise self.problem
        if path.startswith("/v1/txn"):
            return self.transact([each["KV"] for each in body])
        between, self.between = self.between, lambda server: None
        between(self)
        key, _, options = path.removeprefix("/v1/kv/").partition("?")
        wanted = int(options.removeprefix("cas=")) if options else None
        if wanted is not None and wanted != self.kept.get(key, (0,))[0]:
            return False
        self.set(key, body)
        return True

    def transact(self, steps: list[dict[str, Any]]) -> Any:
        if any(step["Verb"] == "set" for step in steps):
            between, self.between = self.between, lambda server: None
            between(self)
        before, found = dict(self.kept), []
        for step in steps:
            key, now = step["Key"], self.kept[step["Key"]][0] if step["Key"] in self.kept else None
            if step["Verb"] == "get-or-empty":
                found.append({"KV": self.entry(key)})
            elif step["Verb"] == "set":
                self.set(key, json.loads(base64.b64decode(step["Value"])))
            elif now is not None if step["Verb"] == "check-not-exists" else now != step["Index"]:
                self.kept = before
                raise HttpError(409, {"Errors": [{"What": f"key {key!r} has changed"}]})
        return {"Results": found}


def with_server(
    server: Server, scenario: Callable[[ConsulClient], Coroutine[Any, Any, Any]], read: str = "consistent"
) -> Any:
    client: Any = ConsulClient()
    client.http, client.settings, client.mode = server, {"read": read}, consul.READS[read]
    return asyncio.run(scenario(client))


def test_a_register_is_changed_only_from_the_value_that_was_expected() -> None:
    async def scenario(client: ConsulClient) -> Any:
        done = [await client.read(1), await client.cas(1, 0, 5)]
        await client.write(1, 0)
        return [*done, await client.cas(1, 0, 5), await client.cas(1, 0, 6), await client.read(1)]

    assert with_server(Server(), scenario) == [None, False, True, False, 5]


def test_a_change_between_the_read_and_the_write_of_a_cas_is_seen() -> None:
    """The value is as expected again, or it is not: the client reads once more."""
    for value, is_changed in ((0, True), (7, False)):
        server = Server(lambda it, value=value: it.set("registers/1", value))  # type: ignore[misc]
        server.set("registers/1", 0)
        assert with_server(server, lambda client: client.cas(1, 0, 5)) is is_changed
        assert server.kept["registers/1"][1] == (5 if is_changed else value)


def test_concurrent_increments_of_the_counter_are_both_kept() -> None:
    server = Server(lambda it: it.set("counter", 10))
    with_server(server, lambda client: client.increment(3))
    assert with_server(server, lambda client: client.value()) == 13


def test_a_key_that_others_always_change_is_given_up_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Server):
        async def put(self, path: str, body: Any) -> Any:
            return False

    monkeypatch.setattr(consul, "PAUSE_S", 0)
    with pytest.raises(Refused, match="in each attempt"):
        with_server(Busy(), lambda client: client.increment(1))


def test_the_members_of_the_set_are_numbers_of_the_keys_below_it() -> None:
    async def scenario(client: ConsulClient) -> Any:
        empty = await client.members()
        for value in (7, 11):
            await client.add(value)
        return empty, await client.members()

    empty, members = with_server(Server(), scenario)
    assert (empty, sorted(members)) == ([], [7, 11])


def test_a_transaction_sees_its_own_writes_and_returns_what_it_read() -> None:
    async def scenario(client: ConsulClient) -> Any:
        await client.transact([["append", 7, 1]])
        lists = await client.transact([["r", 7, None], ["append", 7, 2], ["r", 7, None], ["r", 8, None]])
        moved = [await client.transact([["add", 1, -by], ["add", 2, by]]) for by in (5, 3)][-1]
        return lists, moved, await client.transact([["r", 1, None], ["w", 1, 9], ["r", 1, None]])

    lists, moved, written = with_server(Server(), scenario)
    assert lists == [["r", 7, [1]], ["append", 7, 2], ["r", 7, [1, 2]], ["r", 8, None]]
    assert moved == [["add", 1, -3], ["add", 2, 3]]
    assert written == [["r", 1, -8], ["w", 1, 9], ["r", 1, 9]]


@pytest.mark.parametrize("changed", [7, 8])
def test_a_transaction_is_refused_if_anything_that_it_read_has_changed(changed: int) -> None:
    """Also a key that it only read, and one that did not exist when it was read."""
    server = Server(lambda it: it.set(f"transactions/{changed}", [99]))
    server.set("transactions/7", [1])
    with pytest.raises(Refused):
        with_server(server, lambda client: client.transact([["append", 7, 2], ["r", 8, None]]))
    assert server.kept["transactions/7"][1] == ([99] if changed == 7 else [1])


def test_only_a_request_that_no_server_began_is_refused() -> None:
    server = Server()
    for body in ("No cluster leader", "rpc error making call: No cluster leader", "leadership lost"):
        server.problem = HttpError(500, body)
        for write in (lambda client: client.write(1, 2), lambda client: client.transact([["w", 1, 2]])):
            expected = Refused if body == "No cluster leader" else HttpError
            with pytest.raises(expected) as caught:
                with_server(server, write)
            assert type(caught.value) is expected, body


@pytest.mark.parametrize("read", Consul.settings["read"])
def test_every_read_has_the_chosen_consistency_mode(read: str) -> None:
    server = Server()
    server.set("registers/1", 5)

    async def scenario(client: ConsulClient) -> None:
        await client.read(1)
        await client.members()
        await client.transact([["r", 1, None]])

    with_server(server, scenario, read)
    mode = "" if read == "default" else read
    assert [path.partition("?")[2].removeprefix("keys&") for path in server.asked] == [mode] * 3


@pytest.mark.parametrize("node_id", Consul.settings["node_id"])
def test_a_server_joins_the_others_at_the_addresses_at_which_it_reaches_them(node_id: str) -> None:
    system = Consul()
    hosts: Any = PlannedHosts(())
    system.hosts = [Host(f"n{n}", n, hosts, Consul.ports, lambda host, name: f"/opt/{name}") for n in (1, 2, 3)]
    system.settings = {**SETTINGS, "node_id": node_id}
    said = [json.loads(system.files(host)["consul.json"]) for host in system.hosts]
    assert said[1]["retry_join"] == ["127.0.0.1:8301", "127.0.0.3:8301"] and said[1]["bootstrap_expect"] == 3
    assert said[1]["bind_addr"] == said[1]["client_addr"] == "127.0.0.2"
    assert {port for port in said[1]["ports"].values() if port != -1} == {8500, 8300, 8301}
    identities = {each.get("node_id") for each in said}
    assert len(identities - {None}) == (3 if node_id == "configured" else 0)
    assert said == [json.loads(system.files(host)["consul.json"]) for host in system.hosts], "a restart keeps them"
