"""Probes of links by nonces: which arrivals count, and when silence proves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.clusters.agent_network import AgentNetwork
from nemesis.mechanisms.shell import ShellError
from nemesis.target import Link

ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
Arrives = Callable[[AgentNetwork, str, str], None]


class Agent:
    """The agent of a host: for each nonce that it sends, the test decides what arrives where."""

    def __init__(self, arrives: Arrives) -> None:
        self.network: AgentNetwork | None = None
        self.connection_count = 1
        self.loses_connection = False
        self.error = ""
        self._arrives = arrives

    async def request(self, name: str, message: Any = None, **_: Any) -> dict[str, Any]:
        if name == "udp_open":
            return {"port": 9}
        if name == "hello":
            self.connection_count += self.loses_connection
            return {}
        assert name == "udp_send" and self.network is not None
        for nonce, address, _port in message["datagrams"]:
            if not self.error:
                self._arrives(self.network, nonce, address)
        return {"errors": {nonce: self.error for nonce, *_ in message["datagrams"] if self.error}}


class Nothing:
    """Cuts and counters that do nothing."""

    async def install(self) -> None:
        pass

    async def leave_out(self, ports: Any) -> None:
        pass

    async def bypasses(self, hosts: Any) -> list[str]:
        return []


def probed(arrives: Arrives, change: Callable[[dict[str, Agent]], None] = lambda agents: None) -> Any:
    """The result of a probe of n1->n2."""

    async def main() -> Any:
        agents = {host: Agent(arrives) for host in ADDRESSES}
        change(agents)
        links: Any = agents
        parts: Any = (Nothing(), Nothing())
        network = AgentNetwork(*parts, links, ADDRESSES, gained)
        for agent in agents.values():
            agent.network = network
        await network.open()
        [result] = await network.probe([Link("n1", "n2")], timeout_s=0.2)
        return result

    return asyncio.run(main())


async def gained() -> dict[str, list[str]]:
    return {"n1": ["10.0.9.9"], "n2": []}


def event(nonce: str, source: str) -> dict[str, str]:
    return {"nonce": nonce, "from": ADDRESSES[source]}


@pytest.mark.parametrize(
    ("arrives", "passed"),
    [
        (lambda network, nonce, _: network.take_event("n2", event(nonce, "n1")), True),
        (lambda network, nonce, _: network.take_event("n3", event(nonce, "n1")), False),
        (lambda network, nonce, _: network.take_event("n2", event(nonce, "n3")), False),
        (lambda network, nonce, _: network.take_event("n2", event("0" * len(nonce), "n1")), False),
        (lambda network, nonce, _: None, False),
    ],
    ids=["as sent", "at another host", "from another host", "another nonce", "nothing"],
)
def test_a_link_passes_if_its_own_nonce_arrives_at_its_end_from_its_beginning(arrives: Arrives, passed: bool) -> None:
    result = probed(arrives)
    assert result.passed is passed
    assert passed or result.detail == "nothing arrived within 200 ms"


def test_silence_of_an_agent_whose_connection_was_lost_proves_nothing() -> None:
    with pytest.raises(ShellError, match="the connection to its agent was lost during the probe"):
        probed(lambda *_: None, lambda agents: setattr(agents["n2"], "loses_connection", True))


def test_a_source_that_cannot_send_is_told_from_a_link_that_does_not_pass() -> None:
    result = probed(lambda *_: None, lambda agents: setattr(agents["n1"], "error", "Network is unreachable"))
    assert not result.passed and not result.was_sent
    assert result.detail == "the source could not send: Network is unreachable"


def test_a_source_that_could_send_at_one_of_several_attempts_has_sent() -> None:
    def change(agents: dict[str, Agent]) -> None:
        source, send = agents["n1"], agents["n1"].request

        async def request(name: str, message: Any = None, **given: Any) -> dict[str, Any]:
            answer = await send(name, message, **given)
            source.error = "No buffer space available" if name == "udp_send" else ""
            return answer

        source.request = request  # type: ignore[method-assign]

    result = probed(lambda *_: None, change)
    assert not result.passed and result.was_sent and result.detail == "nothing arrived within 200 ms"


def test_an_address_that_a_source_has_gained_bypasses_its_cuts() -> None:
    parts: Any = (Nothing(), Nothing(), {})
    network = AgentNetwork(*parts, ADDRESSES, gained)
    found = asyncio.run(network.bypasses([Link("n1", "n2")]))
    assert len(found) == 1 and found[0].startswith(
        "n1 has gained addresses since the run began (10.0.9.9), which no cut covers"
    )
    assert asyncio.run(network.bypasses([Link("n2", "n1")])) == []
