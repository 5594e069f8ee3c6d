"""Every mutant applies: the parts that it replaces exist, and only the chosen node changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._blind import GROUNDS, MATTERS
from harness.exploration.mutants import SCENARIOS
from node.broker.controller import BrokerController
from node.client import BrokerClient
from node.config import ConfigError, parse_broker_config
from node.ha.ledger import HaLedger
from node.mutants.catalogue import CLIENT_MUTANTS, MUTANTS, NO_MUTANT, SCRIPTED_MUTANTS
from node.mutants.client import mutate_client
from node.mutants.parts import MissingPart, replace
from node.mutants.switch import mutate_broker, part_of
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
    """The parts of a broker that mutants change."""
    ledger: Any = broker.ledger
    if isinstance(ledger, HaLedger):
        yield from (ledger.log, ledger.service, ledger.client, ledger.service and ledger.service.log)
        yield ledger.client and ledger.client._log
        return
    yield from (ledger.member_state.members, ledger.members)
    yield from (ledger.member_state, ledger.store, ledger.store._files, ledger.elector, ledger.elector._store)
    yield ledger.store.writer
    yield from (ledger.pusher.checker, ledger.pusher.handler, ledger.reads, *ledger.pusher.dispatchers.values())
    yield from (broker._roles, broker.store, broker.queues, broker.dispatcher)
    yield from (broker._pops, broker.checkpoints, broker.open_timers)


def make_broker(directory: Path, role: str | None = None) -> BrokerController:
    text = config_text(directory)
    if role is not None:
        of_slave = 'broker_id = 1\nha_master_address = "127.0.0.1:3"\n' if role == "SLAVE" else ""
        text = text.partition("[dledger]")[0] + f'[classic]\nbroker_role = "{role}"\n{of_slave}'
    return BrokerController(parse_broker_config(text), real_runtime(1))


def role_for(name: str) -> str | None:
    """The role in classic HA that a mutant is for; None for a member of a DLedger group."""
    if not name.startswith("ha-"):
        return None
    return "SYNC_MASTER" if name in ("ha-ack-when-sent", "ha-send-before-sync") else "SLAVE"


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - CLIENT_MUTANTS))
def test_a_mutant_changes_only_the_broker_that_it_is_applied_to(name: str, tmp_path: Path) -> None:
    role = role_for(name)

    async def changed() -> tuple[list[str], list[str]]:
        before = [type(part) for part in parts_of(make_broker(tmp_path / "a", role))]
        mutated, other = make_broker(tmp_path / "b", role), make_broker(tmp_path / "c", role)
        mutate_broker(name, mutated)

        def differing(broker: BrokerController) -> list[str]:
            return [
                kind.__name__ for kind, part in zip(before, parts_of(broker), strict=True) if type(part) is not kind
            ]

        return differing(mutated), differing(other)

    mutated, other = asyncio.run(changed())
    assert mutated and not other


def test_a_mutant_is_refused_by_a_broker_with_the_other_kind_of_log(tmp_path: Path) -> None:
    async def refused() -> None:
        with pytest.raises(ValueError, match="ha-ack-when-sent needs classic HA"):
            mutate_broker("ha-ack-when-sent", make_broker(tmp_path / "a"))
        with pytest.raises(ValueError, match="no-step-down needs DLedger's log"):
            mutate_broker("no-step-down", make_broker(tmp_path / "b", "SLAVE"))

    asyncio.run(refused())


def test_no_mutant_and_client_mutants_leave_a_broker_unchanged(tmp_path: Path) -> None:
    async def kinds() -> tuple[list[type], list[type]]:
        plain, none = make_broker(tmp_path / "a"), make_broker(tmp_path / "b")
        for name in (NO_MUTANT, *CLIENT_MUTANTS):
            mutate_broker(name, none)
        return [type(part) for part in parts_of(plain)], [type(part) for part in parts_of(none)]

    plain, none = asyncio.run(kinds())
    assert plain == none


def test_only_client_mutants_change_a_client() -> None:
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


def test_an_unknown_mutant_is_refused_with_a_list_of_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_broker_config(config_text(tmp_path, 'mutant = "ack-before-lunch"'))
    text = str(caught.value)
    assert "ack-before-lunch" in text and all(name in text for name in MUTANTS)


def test_replace_needs_an_existing_attribute_and_changes_one_object_only() -> None:
    class Part:
        def decide(self) -> bool:
            return True

    part = Part()
    with pytest.raises(MissingPart, match="Part has no judge"):
        replace(part, judge=lambda self: False)
    replace(part, decide=lambda self: False)
    assert part.decide() is False and Part().decide() is True


def test_replace_needs_the_parameters_and_the_result_of_what_it_replaces() -> None:
    class Part:
        def write(self, key: str, value: bytes, *, is_synced: bool = True) -> tuple[int, int]:
            return len(key), len(value)

    def equal(self: Part, key: str, value: bytes, *, is_synced: bool = True) -> tuple[int, int]:
        return 1, 1

    def with_rest(self: Part, key: str, *rest: Any, **options: Any) -> tuple[int, int]:
        return 2, 2

    def without_value(self: Part, key: str, *, is_synced: bool = True) -> tuple[int, int]:
        return 3, 3

    def without_option(self: Part, key: str, value: bytes) -> tuple[int, int]:
        return 4, 4

    def with_more(self: Part, key: str, value: bytes, more: int, *, is_synced: bool = True) -> tuple[int, int]:
        return 5, 5

    def with_another_result(self: Part, key: str, value: bytes, *, is_synced: bool = True) -> int:
        return 6

    for stale in (without_value, without_option, with_more, with_another_result):
        part = Part()
        with pytest.raises(MissingPart, match=r"Part\.write is .* not .*: the mutant must be brought up to date"):
            replace(part, write=stale)
        assert part.write("key", b"", is_synced=False) == (3, 0), "what was refused has changed nothing"
    for number, fitting in enumerate((equal, with_rest), start=1):
        part = Part()
        replace(part, write=fitting)
        assert part.write("key", b"", is_synced=False) == (number, number)


def test_every_mutated_part_has_search_grounds_and_every_ground_is_used() -> None:
    assert {part_of(name) for name in MUTANTS} == MATTERS.keys()
    assert {ground for grounds in MATTERS.values() for ground in grounds} == GROUNDS.keys()


def test_every_scripted_mutant_has_a_scenario() -> None:
    assert tuple(SCENARIOS) == SCRIPTED_MUTANTS
