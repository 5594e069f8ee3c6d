"""Every mutant applies: what it replaces exists, in one node only, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.exploration.mutants import SCENARIOS
from node.broker.controller import BrokerController
from node.client import BrokerClient
from node.config import ConfigError, parse_broker_config
from node.mutants.catalogue import CLIENT_MUTANTS, MUTANTS, NO_MUTANT
from node.mutants.parts import MissingPart, replace
from node.mutants.switch import mutate_broker, mutate_client
from node.real_runtime import real_runtime


def config_text(data_dir: Path, extra: str = "") -> str:
    return f"""
self_id = "n1"
listen = "127.0.0.1:0"
advertise = "127.0.0.1:1"
data_dir = "{data_dir}"
{extra}
[dledger]
listen = "127.0.0.1:2"
[dledger.peers]
n1 = "127.0.0.1:2"
n2 = "127.0.0.2:2"
n3 = "127.0.0.3:2"
"""


def parts_of(broker: BrokerController) -> Iterator[Any]:
    """Everything of a broker that mutants change."""
    ledger: Any = broker.ledger
    yield from (ledger.member_state, ledger.store, ledger.store._files, ledger.elector, ledger.elector._store)
    yield from (ledger.pusher.checker, ledger.pusher.handler, ledger.reads, *ledger.pusher.dispatchers.values())
    yield from (broker._roles, broker.store, broker.queues, broker.dispatcher)


def make_broker(directory: Path) -> BrokerController:
    return BrokerController(parse_broker_config(config_text(directory)), real_runtime(1))


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - CLIENT_MUTANTS))
def test_a_mutant_changes_the_one_node_that_it_is_put_into(name: str, tmp_path: Path) -> None:
    async def changed() -> tuple[list[str], list[str]]:
        before = [type(part) for part in parts_of(make_broker(tmp_path / "a"))]
        mutated, other = make_broker(tmp_path / "b"), make_broker(tmp_path / "c")
        mutate_broker(name, mutated)

        def differing(broker: BrokerController) -> list[str]:
            return [
                kind.__name__
                for kind, part in zip(before, parts_of(broker), strict=True)
                if type(part) is not kind
            ]

        return differing(mutated), differing(other)

    mutated, other = asyncio.run(changed())
    assert mutated and not other


def test_without_a_mutant_nothing_changes(tmp_path: Path) -> None:
    async def kinds() -> tuple[list[type], list[type]]:
        plain, none = make_broker(tmp_path / "a"), make_broker(tmp_path / "b")
        for name in (NO_MUTANT, *CLIENT_MUTANTS):
            mutate_broker(name, none)
        return [type(part) for part in parts_of(plain)], [type(part) for part in parts_of(none)]

    plain, none = asyncio.run(kinds())
    assert plain == none


def test_the_client_mutant_is_in_clients_only() -> None:
    async def kinds() -> list[type]:
        found = []
        for name in (NO_MUTANT, "ack-before-quorum", *CLIENT_MUTANTS):
            client = BrokerClient(name_servers=["127.0.0.1:1"], runtime=real_runtime(1))
            mutate_client(name, client)
            found.append(type(client))
            await client.close()
        return found

    plain, of_node, of_client = asyncio.run(kinds())
    assert plain is of_node is BrokerClient
    assert of_client is not BrokerClient and issubclass(of_client, BrokerClient)


def test_an_unknown_name_is_told_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_broker_config(config_text(tmp_path, 'mutant = "ack-before-lunch"'))
    text = str(caught.value)
    assert "ack-before-lunch" in text and all(name in text for name in MUTANTS)


def test_what_is_not_there_cannot_be_replaced() -> None:
    class Part:
        def decide(self) -> bool:
            return True

    part = Part()
    with pytest.raises(MissingPart, match="Part has no judge"):
        replace(part, judge=lambda self: False)
    replace(part, decide=lambda self: False)
    assert part.decide() is False and Part().decide() is True


def test_every_mutant_has_a_scenario() -> None:
    assert list(SCENARIOS) == list(MUTANTS)
