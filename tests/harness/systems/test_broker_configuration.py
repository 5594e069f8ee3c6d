"""The configuration of brokers, and the settings that are allowed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import OperatorError
from harness.systems.broker_configuration import MAX_MEMBERS, METRICS_PORT, broker_configuration, resolve_settings
from node import config_reader
from node.config import parse_broker_config


def cluster(*, proxies: bool) -> Any:
    """Three hosts; with `proxies` no host is reached where it listens."""

    def address_from(source: str, destination: str, port: int) -> str:
        number = {"n1": 1, "n2": 2, "n3": 3, "ns1": 4}[destination]
        return f"127.0.1.{source[1:]}:{number * 1000 + port % 1000}" if proxies else f"10.0.0.{number}:{port}"

    return SimpleNamespace(
        hosts=("n1", "n2", "n3"),
        bind_address=lambda host: f"10.0.0.{host[1:]}",
        address_from=address_from,
        data_dir=lambda host: f"/{host}",
    )


@pytest.mark.parametrize("proxies", [False, True])
@pytest.mark.parametrize("replication", ["dledger", "sync", "async"])
def test_brokers_can_parse_every_configuration_written_for_them(replication: str, proxies: bool) -> None:
    settings = resolve_settings({"replication": replication})
    hosts = cluster(proxies=proxies)
    configs = [
        parse_broker_config(broker_configuration(hosts, host, settings, keys=4, master="n2")) for host in hosts.hosts
    ]
    assert [config.ha.role if config.ha else None for config in configs] == {
        "dledger": [None] * 3, "sync": ["SLAVE", "SYNC_MASTER", "SLAVE"], "async": ["SLAVE", "ASYNC_MASTER", "SLAVE"],
    }[replication]  # fmt: skip
    assert [config.ha.broker_id if config.ha else None for config in configs] == (
        [None] * 3 if replication == "dledger" else [1, 0, 2]
    )
    assert len(configs[0].dial) == (4 if proxies else 0)


def test_real_brokers_serve_the_metrics_that_are_drawn_and_simulated_ones_none() -> None:
    hosts = cluster(proxies=False)
    text = broker_configuration(hosts, "n1", resolve_settings({}), keys=4, master="n1")
    assert parse_broker_config(text).metrics_listen == f"10.0.0.1:{METRICS_PORT}"
    hosts.checks = hosts.leading = list  # the members of a cluster that sees its replicas
    text = broker_configuration(hosts, "n1", resolve_settings({}), keys=4, master="n1")
    assert parse_broker_config(text).metrics_listen == ""


def test_classic_ha_has_the_default_flush_interval_of_rocketmq() -> None:
    assert resolve_settings({"replication": "sync"})["flush_interval_ms"] == "500"
    assert resolve_settings({"replication": "sync", "flush_interval_ms": "7"})["flush_interval_ms"] == "7"
    assert resolve_settings({})["flush_interval_ms"] == "10"


def test_options_of_classic_ha_are_refused_without_it() -> None:
    with pytest.raises(OperatorError, match="give replication=sync or async"):
        resolve_settings({"slave_reads": "on"})
    with pytest.raises(OperatorError, match="replication must be one of dledger, sync, async"):
        resolve_settings({"replication": "none"})


def test_a_dledger_group_that_is_too_large_is_refused_before_the_start() -> None:
    assert MAX_MEMBERS == config_reader.MAX_CONFIGURED_MEMBERS
    with pytest.raises(OperatorError, match="--nodes must be 1 to 7 for brokers in a DLedger group, not 8"):
        resolve_settings({}, brokers=8)
    resolve_settings({}, brokers=7)
    resolve_settings({"replication": "sync"}, brokers=15)


def test_a_trace_is_written_beside_the_log_of_the_host_if_it_is_asked_for() -> None:
    hosts = cluster(proxies=False)
    hosts.log_path = lambda host, name: f"/logs/{host}/{name}"
    for setting, path in (("off", ""), ("on", "/logs/n2/protocol.jsonl")):
        text = broker_configuration(hosts, "n2", resolve_settings({"trace": setting}), keys=4, master="n1")
        assert parse_broker_config(text).trace_file == path
    with pytest.raises(OperatorError, match="trace is of DLedger: leave it out, or replication"):
        resolve_settings({"trace": "on", "replication": "sync"})
    assert resolve_settings({"replication": "sync"})["trace"] == "off"
